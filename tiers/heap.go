package tiers

// A ranking orders experts by rank, the lowest first. It is a binary heap that
// knows where each expert stands, so that any can be taken out.
type ranking struct {
	at   []int32 // by expert: its place in heap + 1; 0: not in it
	heap []ranked
}

type ranked struct {
	rank rank
	i    int32
}

// A rank compares by its numbers in turn; experts of equal rank compare by
// their number, which is the order of their keys.
type rank struct {
	a float64
	b uint64
}

func (x ranked) less(y ranked) bool {
	switch {
	case x.rank.a != y.rank.a:
		return x.rank.a < y.rank.a
	case x.rank.b != y.rank.b:
		return x.rank.b < y.rank.b
	}
	return x.i < y.i
}

func newRanking(n int) *ranking { return &ranking{at: make([]int32, n)} }

func (r *ranking) has(i int32) bool { return r.at[i] != 0 }

// first is the lowest.
func (r *ranking) first() (ranked, bool) {
	if len(r.heap) == 0 {
		return ranked{}, false
	}
	return r.heap[0], true
}

// set enters i, or moves it to another rank.
func (r *ranking) set(i int32, to rank) {
	if !r.has(i) {
		r.heap = append(r.heap, ranked{})
		r.at[i] = int32(len(r.heap))
	}
	r.place(int(r.at[i])-1, ranked{to, i})
}

// remove takes i out if it is in.
func (r *ranking) remove(i int32) {
	if !r.has(i) {
		return
	}
	hole := int(r.at[i]) - 1
	r.at[i] = 0
	last := r.heap[len(r.heap)-1]
	r.heap = r.heap[:len(r.heap)-1]
	if hole < len(r.heap) {
		r.place(hole, last)
	}
}

// place puts x into the hole at p, or where the order wants it from there.
func (r *ranking) place(p int, x ranked) {
	for p > 0 {
		up := (p - 1) / 2
		if !x.less(r.heap[up]) {
			break
		}
		r.put(p, r.heap[up])
		p = up
	}
	r.sink(p, x)
}

// sink puts x into the hole at p, or below it.
func (r *ranking) sink(p int, x ranked) {
	for {
		down := 2*p + 1
		if down >= len(r.heap) {
			break
		}
		if down+1 < len(r.heap) && r.heap[down+1].less(r.heap[down]) {
			down++
		}
		if !r.heap[down].less(x) {
			break
		}
		r.put(p, r.heap[down])
		p = down
	}
	r.put(p, x)
}

func (r *ranking) put(p int, x ranked) {
	r.heap[p] = x
	r.at[x.i] = int32(p) + 1
}

// sort restores the order after ranks were changed in place.
func (r *ranking) sort() {
	for p := len(r.heap)/2 - 1; p >= 0; p-- {
		r.sink(p, r.heap[p])
	}
}
