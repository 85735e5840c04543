package sim

import (
	"testing"

	"sluice/tiers"
)

// Drafts that are all right read about what the tokens would have read; wrong
// ones read more; the more is right, the more I/O may take.
func TestReplayDrafts(t *testing.T) {
	for _, x := range texts[:3] {
		tr := x.trace(t, 5)
		policy := func() (tiers.Policy, error) { return NewPolicy("lru", tr, tr.ModelBytes()/8) }
		p, err := policy()
		if err != nil {
			t.Fatal(err)
		}
		plain := Replay(tr, p)
		one, err := ReplayDrafts(tr, policy, 0, 0, 1)
		if err != nil || one.Loads != plain.DecodeLookups-plain.DecodeHits || one.Passes != one.Tokens || one.Yield() != 1 {
			t.Errorf("%s: %+v, %v; replayed without drafts %+v", x.name, one, err, plain)
		}
		for _, k := range []int{1, 4} {
			before := -1.0
			for _, a := range []float64{0, 0.5, 0.9, 1} {
				r, err := ReplayDrafts(tr, policy, k, a, 1)
				if err != nil {
					t.Fatal(err)
				}
				even := r.BreakEven(k, 0)
				if r.Tokens != one.Tokens || even < before || a == 0 && (even != 0 || r.Loads <= one.Loads) {
					t.Errorf("%s, depth %d, acceptance %v: %+v, break-even %v after %v", x.name, k, a, r, even, before)
				}
				// A batch takes its uses layer by layer, which lru likes less the more tokens it has.
				if a == 1 && k == 1 && (float64(r.Loads) > 1.05*float64(one.Loads) || even < 0.9) {
					t.Errorf("%s, depth %d, all right: %d loads, %d without drafts; break-even %v", x.name, k, r.Loads, one.Loads, even)
				}
				before = even
			}
		}
	}
}
