package sim

import (
	"math/rand/v2"

	"sluice/tiers"
)

// A DraftResult is what decoding would read with drafts, against without.
type DraftResult struct {
	Passes int
	Tokens int     // that they give
	Loads  int64   // of all passes
	Union  float64 // u: loads of a pass by loads of a pass of one token, 0 where that loads nothing
}

// Yield is the tokens that a pass gives.
func (r DraftResult) Yield() float64 { return float64(r.Tokens) / float64(max(r.Passes, 1)) }

// BreakEven is the share of I/O in the time of decoding without drafts up to which
// drafts of depth k pay, if a proposal costs price of a pass: where
//
//	yield = u*f + (1-f) + k*price
//
// 0: nowhere; 1: everywhere.
func (r DraftResult) BreakEven(k int, price float64) float64 {
	gain := r.Yield() - 1 - float64(k)*price
	switch {
	case gain <= 0:
		return 0
	case r.Union-1 <= gain:
		return 1
	}
	return gain / (r.Union - 1)
}

// ReplayDrafts decodes a trace's tokens as passes of one token and k drafts, each of
// which is right with probability accept where those before it were; seed draws.
// A wrong draft and what follows it route like tokens from elsewhere in the
// trace, since nobody has recorded how they would; prompts are run as they were.
func ReplayDrafts(t *tiers.Trace, newPolicy func() (tiers.Policy, error), k int, accept float64, seed uint64) (DraftResult, error) {
	one, err := replayDrafts(t, newPolicy, 0, 0, seed)
	if err != nil || k == 0 {
		return one, err
	}
	r, err := replayDrafts(t, newPolicy, k, accept, seed)
	if one.Loads > 0 {
		r.Union = float64(r.Loads) / float64(max(r.Passes, 1)) / (float64(one.Loads) / float64(one.Passes))
	}
	return r, err
}

// A token is its batch in each layer, in the order of the layers.
type token []tiers.TraceBatch

func replayDrafts(t *tiers.Trace, newPolicy func() (tiers.Policy, error), k int, accept float64, seed uint64) (d DraftResult, err error) {
	p, err := newPolicy()
	if err != nil {
		return d, err
	}
	r, rng := newReplay(t, p), rand.New(rand.NewPCG(seed, 0))
	var all []token // that are decoded
	for _, b := range t.Batches() {
		if !b.Decode {
			continue
		}
		if n := len(all); n == 0 || b.Layer <= all[n-1][len(all[n-1])-1].Layer {
			all = append(all, nil)
		}
		all[len(all)-1] = append(all[len(all)-1], b)
	}
	pass := make([]token, 0, 1+k)
	decode := func(run []token) { // consecutive tokens
		for len(run) > 0 {
			right := 0
			for right < min(k, len(run)-1) && rng.Float64() < accept {
				right++
			}
			pass = append(pass[:0], run[:1+right]...)
			for len(pass) < min(1+k, len(run)) {
				pass = append(pass, all[rng.IntN(len(all))])
			}
			before := r.DecodeLookups - r.DecodeHits
			for l := range pass[0] {
				r.together(pass, l)
			}
			d.Loads += r.DecodeLookups - r.DecodeHits - before
			d.Passes++
			d.Tokens += 1 + right
			run = run[1+right:]
		}
	}
	from, at, last := 0, 0, -1 // tokens from..at-1 wait to be decoded
	for _, b := range t.Batches() {
		if !b.Decode {
			decode(all[from:at])
			from, last = at, -1
			r.run(b)
			continue
		}
		if last < 0 || b.Layer <= last {
			at++
		}
		last = b.Layer
	}
	decode(all[from:at])
	return d, nil
}

// together runs the batches of several tokens as one of the first one's layer;
// a token that has none there adds nothing.
func (r *replay) together(pass []token, l int) {
	b := pass[0][l]
	r.begin(b.Layer, len(pass))
	for pos, x := range pass {
		if l < len(x) && x[l].Layer == b.Layer {
			for _, k := range x[l].Choices() {
				r.use(k, pos, true)
			}
		}
	}
	r.end()
}
