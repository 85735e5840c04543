package tiers

import (
	"context"
	"testing"

	"sluice/storage"
)

// What only rejected drafts used leaves first, is counted once, and is like any
// other as soon as it is used again.
func TestRejected(t *testing.T) {
	src := newFake(t, storage.Slab, map[int]fakeLayer{0: {slot: 300, part: 100}})
	src.pick = func(int) int { return 0 }
	c := open(t, src, Options{Cap: 4, TopK: 4, Layers: []ExpertLayer{{Layer: 0, Experts: 8}}, Policy: "lru"})
	run := func(experts ...int32) {
		t.Helper()
		uses := make([]int32, len(experts))
		for i := range uses {
			uses[i] = 1
		}
		s, err := c.Begin(context.Background(), 0, experts, uses)
		if err != nil {
			t.Fatal(err)
		}
		compute(t, s)
	}
	here := func(e int32) bool { _, ok := c.layers[0].class.kept.peek(Key{Expert: e}); return ok }

	run(0, 1)
	run(2, 3)                 // a token 2 and a draft 3
	c.Rejected(0, []int32{3}) // newest, and the first to leave
	run(4)
	if here(3) || !here(0) || !here(1) || !here(2) || !here(4) {
		t.Errorf("expert 3 was to leave: %v %v %v %v %v", here(0), here(1), here(2), here(3), here(4))
	}
	if d := c.Stats().Drafts; d != (DraftStats{WastedLoads: 1, WastedBytes: src.ExpertBytes(0)}) {
		t.Errorf("%+v", d)
	}
	run(4, 5) // 0, the oldest, leaves for 5
	c.Rejected(0, []int32{5})
	if d := c.Stats().Drafts; d.WastedLoads != 2 || d.Evictions != 1 {
		t.Errorf("%+v, want 2 loads and 1 eviction", d)
	}
	c.Rejected(0, []int32{5}) // told twice, counted once
	run(5)                    // wanted after all
	run(6)
	if d := c.Stats().Drafts; d.WastedLoads != 2 || !here(5) || here(1) {
		t.Errorf("%+v, 5 here: %v, 1 here: %v", d, here(5), here(1))
	}
}
