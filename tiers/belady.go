package tiers

import "iter"

// NewBelady makes the policy that is given the future, for replays: the expert
// whose next use is the farthest batch away goes first, one that is never used
// again before all. With experts of equal size, and batches that fit into the
// budget, no policy misses less.
//
//	future   what each batch will use, in order: the number of the batch, from
//	         0, and an expert; repeats do no harm
func NewBelady(c PolicyConfig, future iter.Seq2[int, Key]) (Policy, error) {
	b, err := newBooks(c)
	if err != nil {
		return nil, err
	}
	n := len(b.keys)
	o := &belady{b: b, from: make([]int, n+1), at: make([]int, n), rank: newRanking(n)}
	for _, k := range future {
		o.from[b.number(k)+1]++
	}
	for i := range n {
		o.from[i+1] += o.from[i]
		o.at[i] = o.from[i]
	}
	o.uses = make([]int, o.from[n])
	for at, k := range future {
		i := b.number(k)
		o.uses[o.at[i]] = at
		o.at[i]++
	}
	copy(o.at, o.from[:n])
	return &shared{books: b, order: o}, nil
}

type belady struct {
	b     *books
	from  []int    // by expert: where its uses begin in uses; one more at the end
	uses  []int    // numbers of the batches, ascending for each expert
	at    []int    // by expert: where in uses it is now
	rank  *ranking // resident experts that the batch does not use, the farthest next use first
	batch []int32
}

func (o *belady) end() {
	for _, i := range o.batch {
		if o.b.resident[i] {
			o.enter(i)
		}
	}
	o.batch = o.batch[:0]
}

func (o *belady) use(i int32, first bool) {
	if first {
		o.rank.remove(i)
		o.batch = append(o.batch, i)
	}
}

func (o *belady) enter(i int32) {
	now := int(o.b.batch) - 1
	for o.at[i] < o.from[i+1] && o.uses[o.at[i]] <= now {
		o.at[i]++
	}
	next := rank{a: -1e300}
	if o.at[i] < o.from[i+1] {
		next.a = -float64(o.uses[o.at[i]])
	}
	o.rank.set(i, next)
}

func (o *belady) remove(i int32) { o.rank.remove(i) }

func (o *belady) victim() (int32, bool) {
	x, ok := o.rank.first()
	return x.i, ok
}
