package tiers

import (
	"fmt"
	"slices"

	"github.com/hashicorp/golang-lru/v2/simplelru"
)

// This file is what the tiers know of drafts: tokens that were run before it was
// known whether they belong to the text.

// DraftStats count what rejected drafts cost.
type DraftStats struct {
	WastedLoads int64 // loads of experts that only rejected positions used
	WastedBytes int64 // their payload
	Evictions   int64 // experts that left the pool for them
}

// cold is the experts in memory that only rejected drafts have used, the oldest
// first to go. What some step uses again is no longer among them.
type cold struct {
	list *simplelru.LRU[Key, struct{}] // with room for all, so that it never evicts by itself
}

func newCold(experts int) cold {
	list, err := simplelru.NewLRU[Key, struct{}](max(experts, 1), nil)
	if err != nil {
		panic(err) // only a size below 1 is an error
	}
	return cold{list}
}

func (c *cold) add(k Key)    { c.list.Add(k, struct{}{}) }
func (c *cold) remove(k Key) { c.list.Remove(k) }

func (c *cold) oldest() (Key, bool) {
	k, _, ok := c.list.GetOldest()
	return k, ok
}

// Rejected tells, between two steps, that of the experts that the last step of a
// layer used these were used by positions alone that do not belong to the text.
// They are the first to leave when there is need of room.
func (c *Cache) Rejected(layer int, experts []int32) {
	if !c.step.ended {
		panic("tiers: Rejected before the End of the step")
	}
	if layer < 0 || layer >= len(c.layers) || c.layers[layer].experts == 0 {
		panic(fmt.Sprintf("tiers: layer %d has no experts", layer))
	}
	l := &c.layers[layer]
	wasted := int64(0)
	for _, e := range experts {
		k := Key{Layer: int32(layer), Expert: e}
		if slices.Contains(l.loaded, e) {
			wasted++
		}
		if _, here := l.class.kept.peek(k); here {
			l.class.kept.cold.add(k)
		}
	}
	for i := range l.class.kept.shadows {
		l.class.kept.shadows[i].rejected(int32(layer), experts)
	}
	c.mu.Lock()
	st := &c.stats.Drafts
	st.WastedLoads += wasted
	st.WastedBytes += wasted * l.class.payload
	st.Evictions += min(wasted, l.evicted)
	c.mu.Unlock()
	l.loaded, l.evicted = l.loaded[:0], 0
}

// Missed says that expert i of the step was in no tier when the step began.
func (s *Step) Missed(i int) bool { return s.items[i].from == missed || s.items[i].from == inAhead }
