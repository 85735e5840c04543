package sim

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"sluice/tiers"
)

// A text is a synthetic source of routing: each layer ranks its experts, a
// position draws from that ranking by Zipf's law, and what is left of the last
// position's choices may stay.
type text struct {
	name    string
	zipf    float64 // exponent; 0 is uniform
	stay    float64 // probability that a choice is one of the position before
	drift   int     // pairs of ranks swapped at each decoded token
	phase   int     // tokens until all ranks are drawn anew, 0: never
	prompts int     // tokens until a prompt of another ranking comes between, 0: never
}

var texts = []text{
	{name: "zipf", zipf: 1},
	{name: "steep zipf", zipf: 1.5},
	{name: "uniform"},
	{name: "drift", zipf: 1, drift: 1},
	{name: "phases", zipf: 1, phase: 100},
	{name: "short phases", zipf: 1, phase: 25},
	{name: "prompts", zipf: 1, prompts: 60},
	{name: "runs", zipf: 1, stay: .6},
	{name: "long runs", zipf: 1, stay: .9},
}

const synthLayers, synthExperts, synthTopK, synthTokens = 12, 64, 4, 300

// trace writes a text in the format of traces and reads it back.
func (x text) trace(t *testing.T, seed uint64) *tiers.Trace {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 1))
	var b strings.Builder
	header(&b, synthLayers, synthExperts, synthTopK, 1<<20)
	cumulated := make([]float64, synthExperts)
	sum := 0.0
	for i := range cumulated {
		sum += math.Pow(float64(i+1), -x.zipf)
		cumulated[i] = sum
	}
	ranks := func() (r [][]int) {
		for range synthLayers {
			r = append(r, rng.Perm(synthExperts))
		}
		return r
	}
	rank := ranks()
	before := make([][]int, synthLayers)
	choose := func(l int) []int {
		var out []int
		has := func(e int) bool {
			for _, o := range out {
				if o == e {
					return true
				}
			}
			return false
		}
		for _, e := range before[l] {
			if rng.Float64() < x.stay {
				out = append(out, e)
			}
		}
		for len(out) < synthTopK {
			at, i := rng.Float64()*sum, 0
			for cumulated[i] < at {
				i++
			}
			if e := rank[l][i]; !has(e) {
				out = append(out, e)
			}
		}
		before[l] = out
		return out
	}
	turn, step := -1, 0
	prompt := func(n int) {
		turn++
		for l := range synthLayers {
			for p := range n {
				writeRows(&b, turn, 0, step+p, l, choose(l))
			}
		}
		step += n
	}
	prompt(40)
	for token := range synthTokens {
		if x.phase > 0 && token%x.phase == x.phase-1 {
			rank = ranks()
		}
		if x.prompts > 0 && token%x.prompts == x.prompts-1 {
			mine := rank
			rank = ranks()
			prompt(100)
			rank = mine
		}
		for l := range synthLayers {
			for range x.drift {
				i, j := rng.IntN(synthExperts), rng.IntN(synthExperts)
				rank[l][i], rank[l][j] = rank[l][j], rank[l][i]
			}
			writeRows(&b, turn, 1, step, l, choose(l))
		}
		step++
	}
	tr, err := tiers.ReadTrace(strings.NewReader(b.String()))
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

func header(b *strings.Builder, layers, experts, topK int, size int64) {
	fmt.Fprintf(b, "# route_trace v1\n# model=synthetic arch=none n_layer=%d n_expert=%d n_expert_used=%d\n", layers, experts, topK)
	for l := range layers {
		fmt.Fprintf(b, "# layer=%d expert_bytes=%d dense_bytes=0\n", l, size)
	}
	b.WriteString("turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n")
}

func writeRows(b *strings.Builder, turn, phase, step, layer int, experts []int) {
	for slot, e := range experts {
		fmt.Fprintf(b, "%d,%d,%d,%d,%d,%d,0.25,0,0\n", turn, phase, step, layer, slot, e)
	}
}

// synthBudgets is in experts: from above one batch to most of the model, one
// token cycle being 48.
var synthBudgets = []int64{38, 77, 154, 307, 538}

// On no text does layer-aware lose badly to the better of lru and lfu, at any
// budget.
func TestLayerAwareOnSyntheticTexts(t *testing.T) {
	const most = 2.0 // points
	for _, x := range texts {
		t.Run(x.name, func(t *testing.T) {
			t.Parallel()
			tr := x.trace(t, 1)
			for _, experts := range synthBudgets {
				hits := map[string]float64{}
				for _, p := range []string{"lru", "lfu", "layer-aware", "belady"} {
					hits[p] = Replay(tr, mustPolicy(t, p, tr, experts<<20)).DecodeHitPercent()
				}
				if got, best := hits["layer-aware"], max(hits["lru"], hits["lfu"]); got < best-most {
					t.Errorf("%d experts: layer-aware %.2f, lru %.2f, lfu %.2f", experts, got, hits["lru"], hits["lfu"])
				}
				t.Logf("%4d experts: layer-aware %.2f, lru %.2f, lfu %.2f, belady %.2f", experts, hits["layer-aware"], hits["lru"], hits["lfu"], hits["belady"])
			}
		})
	}
}
