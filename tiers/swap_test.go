package tiers

import (
	"context"
	"errors"
	"slices"
	"testing"

	"sluice/storage"
)

// pass runs one position through both layers, each with the given expert.
func pass(t *testing.T, c *Cache, experts ...int32) {
	t.Helper()
	for l, e := range experts {
		s, err := c.Begin(context.Background(), l, []int32{e}, []int32{1})
		if err != nil {
			t.Fatal(err)
		}
		i, parts, ok, err := s.Next(context.Background())
		if err != nil || !ok {
			t.Fatalf("layer %d expert %d: %v", l, e, err)
		}
		if !s.InVRAM(i) {
			if err := c.src.(*fake).verify(Key{Layer: int32(l), Expert: e}, parts); err != nil {
				t.Fatal(err)
			}
		}
		s.Done(i)
		s.End()
	}
}

// What is used more than an expert of VRAM takes its place, after some passes
// and not before, for one upload and no read; what is used as much does not.
func TestSwap(t *testing.T) {
	open1 := func(t *testing.T, fix bool) (*Cache, *fakeDevice) {
		el, fl := small(2, 8)
		f := newFake(t, storage.Slab, fl)
		f.pick = func(int) int { return 0 }
		d := &fakeDevice{f: f}
		c := open(t, f, Options{Cap: 4, TopK: 1, Layers: el, Device: d, VRAM: []Key{{Layer: 0, Expert: 0}, {Layer: 1, Expert: 0}}, FixVRAM: fix})
		if err := c.Preload(context.Background()); err != nil {
			t.Fatal(err)
		}
		if d.from != 2 || d.lent != nil {
			t.Errorf("%d uploads from lent memory, want 2; %d lent at the end", d.from, len(d.lent))
		}
		return c, d
	}
	c, d := open1(t, false)
	for range swapEvery - 1 {
		pass(t, c, 3, 0)
	}
	if n := c.Stats().VRAMSwaps; n != 0 {
		t.Fatalf("%d swaps before the time", n)
	}
	pass(t, c, 3, 0)
	if st := c.Stats(); st.VRAMSwaps != 1 || st.VRAMEvictions != 1 || !slices.Equal(d.keys, []Key{{Layer: 1, Expert: 0}, {Layer: 0, Expert: 3}}) || st.Source.Loads != 3 {
		t.Fatalf("%d swaps, %v, %+v", st.VRAMSwaps, d.keys, st)
	}
	// It is served from VRAM now, and what left is read when it is wanted.
	before := c.Stats()
	pass(t, c, 3, 0)
	pass(t, c, 0, 0)
	if st := c.Stats(); st.Hits.VRAM != before.Hits.VRAM+3 || st.Misses != before.Misses+1 {
		t.Errorf("%+v, before %+v", st, before)
	}
	// Two that are used alike: the one in VRAM stays.
	for i := range 4 * swapEvery {
		pass(t, c, []int32{3, 5}[i%2], 0)
	}
	if n := c.Stats().VRAMSwaps; n != 1 {
		t.Errorf("%d swaps of equals", n-1)
	}

	c, d = open1(t, true)
	for range 3 * swapEvery {
		pass(t, c, 3, 1)
	}
	if n := c.Stats().VRAMSwaps; n != 0 || len(d.keys) != 2 {
		t.Errorf("%d swaps of a set that is to stay", n)
	}

	// A device that fails: both are out of it, and the run goes on.
	c, d = open1(t, false)
	d.err = errors.New("lost")
	for range 2 * swapEvery {
		pass(t, c, 3, 0)
	}
	pass(t, c, 0, 0)
	if st := c.Stats(); st.VRAMSwaps != 0 || st.VRAMEvictions != 1 || len(c.Notices()) != 1 || st.Misses != 2 {
		t.Errorf("%+v, %q", st, c.notices)
	}
}
