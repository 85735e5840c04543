package sim

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"strings"
	"testing"

	"sluice/tiers"
)

// Nobody can do better than belady: on tiny traces of equal experts, whose
// batches fit into the budget, it misses as often as the best of all ways to
// evict, which are tried one and all.
func TestBeladyIsOptimal(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 1))
		layers, experts := 1+rng.IntN(3), 2+rng.IntN(3)
		topK := 1 + rng.IntN(min(2, experts))
		budget := topK + rng.IntN(layers*experts-topK+1)
		var b strings.Builder
		header(&b, layers, experts, topK, 1)
		var batches []uint32 // sets of layer*experts + expert
		for step := range 4 + rng.IntN(6) {
			for l := range layers {
				chosen := rng.Perm(experts)[:topK]
				writeRows(&b, 0, 1, step, l, chosen)
				set := uint32(0)
				for _, e := range chosen {
					set |= 1 << (l*experts + e)
				}
				batches = append(batches, set)
			}
		}
		tr, err := tiers.ReadTrace(strings.NewReader(b.String()))
		if err != nil {
			t.Fatal(err)
		}
		best := fewestMisses(batches, budget)
		for _, name := range Policies() {
			r := Replay(tr, mustPolicy(t, name, tr, int64(budget)))
			misses := int(r.Lookups - r.Hits)
			if name == "belady" && misses != best {
				t.Errorf("seed %d: belady misses %d times, the best is %d", seed, misses, best)
			}
			// layer and layerlfu may exceed a budget below their slices' batches.
			if strings.HasPrefix(name, "layer") && name != "layer-aware" && budget/layers < topK {
				continue
			}
			if misses < best {
				t.Errorf("seed %d: %s misses %d times, the best is %d: it breaks a rule", seed, name, misses, best)
			}
		}
	}
}

// fewestMisses tries every way to evict after each batch.
func fewestMisses(batches []uint32, budget int) int {
	states := map[uint32]int{0: 0} // what is resident: the fewest misses to get there
	for _, b := range batches {
		next := map[uint32]int{}
		put := func(s uint32, misses int) {
			if old, ok := next[s]; !ok || misses < old {
				next[s] = misses
			}
		}
		for s, misses := range states {
			misses += bits.OnesCount32(b &^ s)
			idle := s &^ b
			for keep := idle; ; keep = (keep - 1) & idle { // every subset
				if bits.OnesCount32(keep|b) <= budget {
					put(keep|b, misses)
				}
				if keep == 0 {
					break
				}
			}
		}
		states = next
	}
	best := 1 << 30
	for _, misses := range states {
		best = min(best, misses)
	}
	return best
}

// The rules of a replay, one by one, on a trace small enough to follow.
func TestRules(t *testing.T) {
	trace := func(rows string) *tiers.Trace {
		var b strings.Builder
		header(&b, 2, 8, 2, 1<<20)
		b.WriteString(rows)
		tr, err := tiers.ReadTrace(strings.NewReader(b.String()))
		if err != nil {
			t.Fatal(err)
		}
		return tr
	}
	for _, tt := range []struct {
		what, policy string
		mib          int64
		rows         string
		want         Result
	}{
		{"a batch is looked up once for each expert, and stays whole above the budget", "lru", 1, `0,0,0,0,0,1,1,0,0
0,0,0,0,1,2,1,0,0
0,0,1,0,0,1,1,0,0
0,0,1,0,1,3,1,0,0
0,1,2,0,0,1,1,0,0
0,1,2,0,1,2,1,0,0
`, Result{5, 2, 2, 2, 3 << 20}},
		{"a repeat refreshes recency: 2 is the oldest", "lru", 2, `0,0,0,0,0,1,1,0,0
0,0,0,0,1,2,1,0,0
0,0,1,0,0,1,1,0,0
0,1,2,1,0,5,1,0,0
0,1,3,0,0,1,1,0,0
`, Result{4, 1, 2, 1, 3 << 20}},
		{"lfu counts what has left: 1 was used twice, 2 once", "lfu", 1, `0,1,0,0,0,1,1,0,0
0,1,1,0,0,2,1,0,0
0,1,2,0,0,1,1,0,0
0,1,2,1,0,5,1,0,0
0,1,3,0,0,1,1,0,0
`, Result{5, 0, 5, 0, 5 << 20}},
		{"each layer has half of the budget", "layer", 4, `0,1,0,0,0,1,1,0,0
0,1,1,0,0,2,1,0,0
0,1,2,0,0,3,1,0,0
0,1,3,0,0,2,1,0,0
0,1,4,0,0,3,1,0,0
0,1,5,0,0,1,1,0,0
`, Result{6, 2, 6, 2, 4 << 20}},
	} {
		tr := trace(tt.rows)
		if got := Replay(tr, mustPolicy(t, tt.policy, tr, tt.mib<<20)); got != tt.want {
			t.Errorf("%s: %+v, want %+v", tt.what, got, tt.want)
		}
	}
	if r := (Result{}); r.HitPercent() != 0 || r.DecodeHitPercent() != 0 {
		t.Error("nothing looked up is not 0 %")
	}
	if _, err := NewPolicy("mru", trace(""), 1); err == nil || !strings.Contains(fmt.Sprint(err), "no policy") {
		t.Errorf("an unknown policy: %v", err)
	}
}
