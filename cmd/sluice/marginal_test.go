package main

import (
	"path/filepath"
	"strings"
	"testing"
)

// The marginal hits of a pinned set are the misses that the same run has more
// without it; a tier that is not there has none.
func TestMarginalHits(t *testing.T) {
	usage := filepath.Join(t.TempDir(), "usage.txt")
	args := []string{"run", tinyQwen3, "--cap", "2", "-p", verse, "-n", "24", "--temp", "0", "--draft", "off", "--backend", "cpu", "--chunk", "5"}
	mustRun(t, append(args, "--usage", usage)...)
	for _, policy := range []string{"layer-aware", "lru"} {
		args := append(args, "--usage-freeze", usage, "--policy", policy)
		without := mustRun(t, append(args, "--json")...).object(t)
		with := mustRun(t, append(args, "--pin", "8", "--json")...).object(t)
		more := number(t, without, "counters", "tier_misses") - number(t, with, "counters", "tier_misses")
		if got := number(t, with, "counters", "marginal_hits", "pinned"); got != more || more <= 0 {
			t.Errorf("%s: %d marginal hits, %d misses more without the pinned set", policy, got, more)
		}
		for _, o := range []map[string]any{with, without} {
			for _, phase := range []string{"counters", "decode_counters"} {
				if got, want := number(t, o, phase, "marginal_hits", "lru"), number(t, o, phase, "loads_avoided", "lru"); got != want {
					t.Errorf("%s: %s: %d marginal hits of the pool, it avoided %d loads", policy, phase, got, want)
				}
			}
		}
		if n := number(t, without, "counters", "marginal_hits", "pinned"); n != 0 {
			t.Errorf("%s: %d marginal hits of no pinned set", policy, n)
		}
	}
	r := mustRun(t, append(args, "--usage-freeze", usage, "--pin", "8")...)
	if want := " without the pinned set, which served "; !strings.Contains(r.err, want) {
		t.Errorf("the summary lacks %q:\n%s", want, r.err)
	}
}
