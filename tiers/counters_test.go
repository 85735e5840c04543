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
	for _, tt := range []struct {
		vram, pinned, lru bool
		want              bucket
		stats             Stats
	}{
		{false, false, false, missed, Stats{Hits: Hits{LRU: uses - 1}, Misses: 1}},
		{false, false, true, inLRU, Stats{Hits: Hits{LRU: uses}}},
		{false, true, false, inPinned, Stats{Hits: Hits{Pinned: uses}}},
		{false, true, true, inPinned, Stats{Hits: Hits{Pinned: uses}}},
		{true, false, false, inVRAM, Stats{Hits: Hits{VRAM: uses}}},
		{true, false, true, inVRAM, Stats{Hits: Hits{VRAM: uses}}},
		{true, true, false, inVRAM, Stats{Hits: Hits{VRAM: uses}}},
		{true, true, true, inVRAM, Stats{Hits: Hits{VRAM: uses}}},
	} {
		var st Stats
		got := st.count(tt.vram, tt.pinned, tt.lru, uses)
		tt.stats.RoutedExperts, tt.stats.DistinctExperts = uses, 1
		if got != tt.want || st != tt.stats {
			t.Errorf("vram %v pinned %v lru %v: bucket %d, %+v; want %d, %+v", tt.vram, tt.pinned, tt.lru, got, st, tt.want, tt.stats)
		}
		if st.Hits.VRAM+st.Hits.Pinned+st.Hits.LRU+st.Misses != st.RoutedExperts {
			t.Errorf("%+v does not sum", st)
		}
	}
}
