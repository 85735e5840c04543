package tiers

// lfu lets the expert with the fewest batches that used it go first, since the
// start and not since it became resident; among equals the oldest use.
type lfu struct {
	b     *books
	n     uint64   // uses so far
	count []uint32 // by expert: batches that used it
	last  []uint64 // by expert: n of its last use
	rank  *ranking // resident experts that the batch does not use
	batch []int32  // what the batch uses, as it came; may have left since
}

func newLFU(b *books) *lfu {
	n := len(b.keys)
	return &lfu{b: b, count: make([]uint32, n), last: make([]uint64, n), rank: newRanking(n)}
}

// sibling is an order of other experts: they share what is by expert.
func (o *lfu) sibling() *lfu {
	return &lfu{b: o.b, count: o.count, last: o.last, rank: &ranking{at: o.rank.at}}
}

func (o *lfu) end() {
	for _, i := range o.batch {
		if o.b.resident[i] {
			o.enter(i)
		}
	}
	o.batch = o.batch[:0]
}

func (o *lfu) use(i int32, first bool) {
	o.n++
	o.last[i] = o.n
	if !first {
		return
	}
	o.count[i]++
	o.rank.remove(i)
	o.batch = append(o.batch, i)
}

func (o *lfu) enter(i int32)  { o.rank.set(i, rank{float64(o.count[i]), o.last[i]}) }
func (o *lfu) remove(i int32) { o.rank.remove(i) }

func (o *lfu) victim() (int32, bool) {
	x, ok := o.rank.first()
	return x.i, ok
}
