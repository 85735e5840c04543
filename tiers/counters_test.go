package tiers

import (
	"strings"
	"testing"
)

func TestCountersAreDefined(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range Counters() {
		if c.Name == "" || seen[c.Name] {
			t.Errorf("%q is named twice or not at all", c.Name)
		}
		seen[c.Name] = true
		if len(c.Definition) < 20 || strings.ContainsAny(c.Definition, "\n\t") {
			t.Errorf("%s: %q is not a definition in one line", c.Name, c.Definition)
		}
	}
}

// An expert is counted in exactly one bucket, that of the first tier that has
// it, whatever the others say.
func TestCountTruthTable(t *testing.T) {
	const uses = 5
	for n := range 16 {
		vram, pinned, lru, ahead := n&8 != 0, n&4 != 0, n&2 != 0, n&1 != 0
		want := Stats{RoutedExperts: uses, DistinctExperts: 1}
		var where bucket
		switch { // a tier comes before all that are right of it
		case n >= 8:
			where, want.Hits.VRAM, want.Avoided.VRAM = inVRAM, uses, 1
		case n >= 4:
			where, want.Hits.Pinned, want.Avoided.Pinned = inPinned, uses, 1
		case n >= 2:
			where, want.Hits.LRU, want.Avoided.LRU = inLRU, uses, 1
		case n == 1:
			where, want.Hits.LRU, want.Misses, want.Prefetch.Used = inAhead, uses-1, 1, 1
		default:
			where, want.Hits.LRU, want.Misses = missed, uses-1, 1
		}
		var st Stats
		if got := st.count(vram, pinned, lru, ahead, uses); got != where || st != want {
			t.Errorf("vram %v pinned %v lru %v ahead %v: bucket %d, %+v; want %d, %+v", vram, pinned, lru, ahead, got, st, where, want)
		}
		if st.Hits.VRAM+st.Hits.Pinned+st.Hits.LRU+st.Misses != st.RoutedExperts {
			t.Errorf("%+v does not sum", st)
		}
	}
}
