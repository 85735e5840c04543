package sim

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"sluice/tiers"
)

// shared finds a file of the shared oracles, or skips.
func shared(t *testing.T, name string) string {
	t.Helper()
	root := os.Getenv("SLUICE_SHARED")
	if root == "" {
		root = filepath.Join("..", "..", "..", "shared")
	}
	name = filepath.Join(root, name)
	if _, err := os.Stat(name); err != nil {
		t.Skip("needs the shared oracles: set SLUICE_SHARED")
	}
	return name
}

var models = []string{"gpt-oss-120b", "gemma-4-26b"}

func readTrace(t *testing.T, model string) *tiers.Trace {
	t.Helper()
	f, err := os.Open(shared(t, "traces/"+model+".route.csv"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	tr, err := tiers.ReadTrace(f)
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

// point is a line of a published curve.
type point struct {
	mib       int64
	policy    string
	cum, dec  float64
	read      float64
	published string
}

func readCurve(t *testing.T, model string) (points []point) {
	t.Helper()
	b, err := os.ReadFile(shared(t, "traces/"+model+".curve.csv"))
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range strings.Split(strings.TrimSpace(string(b)), "\n")[1:] {
		f := strings.Split(l, ",")
		var p point
		var errs [4]error
		p.mib, errs[0] = strconv.ParseInt(f[0], 10, 64)
		p.policy, p.published = f[1], l
		p.cum, errs[1] = strconv.ParseFloat(f[2], 64)
		p.dec, errs[2] = strconv.ParseFloat(f[3], 64)
		p.read, errs[3] = strconv.ParseFloat(f[4], 64)
		for _, err := range errs {
			if err != nil {
				t.Fatal(err)
			}
		}
		points = append(points, p)
	}
	return points
}

func mustPolicy(t testing.TB, name string, tr *tiers.Trace, budget int64) tiers.Policy {
	t.Helper()
	p, err := NewPolicy(name, tr, budget)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// Every published point is reproduced as it is printed. (Those of "random" are
// not to be had without its generator.)
func TestPublishedCurves(t *testing.T) {
	for _, model := range models {
		t.Run(model, func(t *testing.T) {
			tr := readTrace(t, model)
			points := 0
			for _, p := range readCurve(t, model) {
				if p.policy == "random" {
					continue
				}
				points++
				r := Replay(tr, mustPolicy(t, p.policy, tr, p.mib<<20))
				got := fmt.Sprintf("%d,%s,%.3f,%.3f,%.1f", p.mib, p.policy, r.HitPercent(), r.DecodeHitPercent(), r.ReadMiB())
				if got != p.published {
					t.Errorf("replay gives %s, published is %s", got, p.published)
				}
			}
			if points != 55 {
				t.Errorf("%d points, want 11 budgets of 5 policies", points)
			}
		})
	}
}

// What the default policy has to be, on both traces (decode hits): at or above
// lru and lfu everywhere, and layer wherever the budget holds one token cycle;
// never 0 where belady is not; and within its budget.
func TestLayerAwareOnTraces(t *testing.T) {
	cycle := map[string]int64{"gpt-oss-120b": 1000, "gemma-4-26b": 750} // MiB
	for _, model := range models {
		t.Run(model, func(t *testing.T) {
			tr := readTrace(t, model)
			published := map[int64]map[string]float64{}
			for _, p := range readCurve(t, model) {
				if published[p.mib] == nil {
					published[p.mib] = map[string]float64{}
				}
				published[p.mib][p.policy] = p.dec
			}
			for mib, at := range published {
				p := mustPolicy(t, "layer-aware", tr, mib<<20)
				r := newReplay(tr, p)
				for _, b := range tr.Batches() {
					r.run(b)
					if r.bytes > mib<<20 && r.idle() {
						t.Fatalf("%d MiB, batch %d: %d bytes are resident, and not all in use", mib, r.batch, r.bytes)
					}
				}
				got := r.DecodeHitPercent()
				for _, other := range []string{"lru", "lfu", "layer"} {
					if other == "layer" && mib < cycle[model] {
						continue
					}
					if got < at[other] {
						t.Errorf("%d MiB: layer-aware %.3f, %s %.3f", mib, got, other, at[other])
					}
				}
				if got == 0 && at["belady"] > 0 {
					t.Errorf("%d MiB: nothing hits, belady %.3f", mib, at["belady"])
				}
				t.Logf("%5d MiB: layer-aware %.2f, lru %.2f, lfu %.2f, layer %.2f, layerlfu %.2f, belady %.2f: %.0f %% of the gap from lru to belady", mib,
					got, at["lru"], at["lfu"], at["layer"], at["layerlfu"], at["belady"], 100*(got-at["lru"])/(at["belady"]-at["lru"]))
			}
		})
	}
}

// idle says whether a resident expert is not one of the batch.
func (r *replay) idle() bool {
	for i, here := range r.resident {
		if here && r.seen[i] != r.batch {
			return true
		}
	}
	return false
}
