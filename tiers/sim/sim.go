// Package sim replays traces: what a policy would have kept in memory, without
// a model, its weights or a drive.
package sim

import (
	"fmt"

	"sluice/tiers"
)

// A Result counts what a replay saw.
type Result struct {
	Lookups, Hits             int64 // distinct experts, once a batch
	DecodeLookups, DecodeHits int64 // the same, of batches that decode
	ReadBytes                 int64 // of the misses
}

// HitPercent is the hits of all lookups, 0 to 100; 0 without lookups.
func (r Result) HitPercent() float64 { return percent(r.Hits, r.Lookups) }

// DecodeHitPercent is the hits of the lookups of decoding.
func (r Result) DecodeHitPercent() float64 { return percent(r.DecodeHits, r.DecodeLookups) }

// ReadMiB is the bytes of the misses in units of 2^20.
func (r Result) ReadMiB() float64 { return float64(r.ReadBytes) / (1 << 20) }

func percent(n, of int64) float64 {
	if of == 0 {
		return 0
	}
	return 100 * float64(n) / float64(of)
}

// Policies are the names that NewPolicy knows: those of the engine, and belady.
func Policies() []string { return append(tiers.Policies(), "belady") }

// NewPolicy makes a policy for a replay of t with a budget in bytes.
func NewPolicy(name string, t *tiers.Trace, budget int64) (tiers.Policy, error) {
	if name == "belady" {
		return tiers.NewBelady(t.Policy(budget), t.Future())
	}
	return tiers.NewPolicy(name, t.Policy(budget))
}

// Replay runs a trace through a policy that has seen nothing yet:
//
//	for each batch:
//	  each distinct expert is looked up once; a miss makes it resident at once
//	  a repeat is told to the policy, which may refresh it
//	  while the policy is over its budget: its victim leaves, none that the batch used
func Replay(t *tiers.Trace, p tiers.Policy) Result {
	r := newReplay(t, p)
	for _, b := range t.Batches() {
		r.run(b)
	}
	return r.Result
}

type replay struct {
	Result
	t        *tiers.Trace
	p        tiers.Policy
	resident []bool // by layer and expert
	seen     []int  // the last batch that looked an expert up
	batch    int
	bytes    int64 // resident
}

func newReplay(t *tiers.Trace, p tiers.Policy) *replay {
	n := len(t.Layers) * t.Experts
	return &replay{t: t, p: p, resident: make([]bool, n), seen: make([]int, n)}
}

func (r *replay) at(k tiers.Key) int { return int(k.Layer)*r.t.Experts + int(k.Expert) }

func (r *replay) run(b tiers.TraceBatch) {
	r.begin(b.Layer, b.Positions)
	for pos, k := range b.Choices() {
		r.use(k, pos, b.Decode)
	}
	r.end()
}

func (r *replay) begin(layer, positions int) {
	r.batch++
	r.p.Begin(layer, positions)
}

func (r *replay) use(k tiers.Key, pos int, decode bool) {
	if i := r.at(k); r.seen[i] != r.batch {
		r.seen[i] = r.batch
		r.lookup(i, decode, r.t.Layers[k.Layer].ExpertBytes)
	}
	r.p.Use(k, pos)
}

func (r *replay) end() {
	for r.p.Over() {
		k, ok := r.p.Victim()
		if !ok {
			break
		}
		if i := r.at(k); !r.resident[i] || r.seen[i] == r.batch {
			panic(fmt.Sprintf("sim: the policy gives up %v, which is not resident or in use", k))
		}
		r.p.Remove(k)
		r.resident[r.at(k)] = false
		r.bytes -= r.t.Layers[k.Layer].ExpertBytes
	}
}

func (r *replay) lookup(i int, decode bool, size int64) {
	r.Lookups++
	if decode {
		r.DecodeLookups++
	}
	if r.resident[i] {
		r.Hits++
		if decode {
			r.DecodeHits++
		}
		return
	}
	r.resident[i] = true
	r.bytes += size
	r.ReadBytes += size
}
