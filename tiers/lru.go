package tiers

import "github.com/hashicorp/golang-lru/v2/simplelru"

// lru lets the oldest use go first. A repeat within a batch is a use. What the
// batch uses is newer than all else, so the oldest is a victim or there is none.
type lru struct {
	b    *books
	list *simplelru.LRU[int32, struct{}] // with room for all, so that it never evicts by itself
}

func newLRU(b *books) *lru {
	list, err := simplelru.NewLRU[int32, struct{}](len(b.keys), nil)
	if err != nil {
		panic(err) // only a size below 1 is an error
	}
	return &lru{b, list}
}

func (o *lru) end() {}

func (o *lru) use(i int32, _ bool) {
	if _, ok := o.list.Get(i); !ok {
		o.list.Add(i, struct{}{})
	}
}

func (o *lru) remove(i int32) { o.list.Remove(i) }

func (o *lru) victim() (int32, bool) {
	i, _, ok := o.list.GetOldest()
	return i, ok && !o.b.inBatch(i)
}
