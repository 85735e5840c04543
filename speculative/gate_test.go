package speculative

import (
	"math"
	"testing"
	"time"
)

// A drive that serves at a set rate, shares of I/O from 0.05 to 0.95, acceptance from
// 0.1 to 1: the gate is never below 0.98 of the better of drafting always and
// never, and where drafting is on the closed form is what is counted.
func TestGateSweep(t *testing.T) {
	const tokens = 4096
	for _, depth := range []int{1, 3, 0} {
		worst, worstForm, worstDepth, cell := 1.0, 0.0, 1.0, 0
		for share := 0.05; share < 0.96; share += 0.1 {
			for accept := 0.1; accept < 1.01; accept += 0.1 {
				make := func() *world {
					w := newWorld(uint64(1000*share+10*accept), tokens)
					w.accept = func(int) float64 { return accept }
					w.perDraft = w.pass / 50
					return w
				}
				w := make()
				_, _ = w.generate(t, off{w}, tokens) // how much it reads
				perToken := float64(w.loads) / float64(w.passes)
				perLoad := time.Duration(share / (1 - share) * float64(w.pass) / perToken)

				w = make()
				w.perLoad = perLoad
				text, never := w.generate(t, off{w}, tokens)
				loadsNever := float64(w.loads)
				passesNever := float64(w.passes)

				w = make()
				w.perLoad = perLoad
				d := w.decoder(t, depth, true)
				got, always := w.generate(t, d, tokens)
				if !equal(got, text) {
					t.Fatalf("share %.2f, acceptance %.1f: another text", share, accept)
				}
				r := d.Report()
				// The closed form, with u and a as they were counted.
				k, a := float64(depth), float64(r.Accepted)/float64(r.Proposed)
				wait := float64(perLoad) * loadsNever / passesNever
				f := wait / (wait + float64(w.pass))
				u := float64(w.loads) / float64(w.passes) / (loadsNever / passesNever)
				dr := float64(w.perDraft) / (wait + float64(w.pass))
				form := (u*f + 1 - f + k*dr) / (1 + k*a)
				counted := float64(always) / float64(never)
				if depth > 0 {
					worstForm = max(worstForm, math.Abs(form/counted-1))
				}
				if depth > 0 && math.Abs(form/counted-1) > 0.02 {
					t.Errorf("share %.2f, acceptance %.1f, depth %d: the closed form says %.4f, counted is %.4f", share, accept, depth, form, counted)
				}

				w = make()
				w.perLoad = perLoad
				d = w.decoder(t, depth, false)
				got, auto := w.generate(t, d, tokens)
				if !equal(got, text) {
					t.Fatalf("share %.2f, acceptance %.1f: another text under the gate", share, accept)
				}
				if cell++; depth == 0 && cell%7 == 0 { // and not far from the best depth, which nobody knows beforehand
					hindsight := min(always, never)
					for _, k := range []int{1, 2, 4, 8} {
						w = make()
						w.perLoad = perLoad
						_, fixed := w.generate(t, w.decoder(t, k, true), tokens)
						hindsight = min(hindsight, fixed)
					}
					v := float64(hindsight) / float64(auto)
					worstDepth = min(worstDepth, v)
					if v < 0.9 {
						t.Errorf("share %.2f, acceptance %.1f: depth by expected gain is %.4f of the best depth", share, accept, v)
					}
				}
				best := min(always, never)
				if v := float64(best) / float64(auto); v < 0.98 {
					t.Errorf("share %.2f, acceptance %.1f, depth %d: auto is %.4f of the better of always (gain %.3f) and never; %d changes, %v",
						share, accept, depth, v, float64(never)/float64(always), d.Report().Changes, d.Report().Lines())
				} else {
					worst = min(worst, v)
				}
				if g := d.gate.cast / d.gate.elapsed; g > 0.011 {
					t.Errorf("share %.2f, acceptance %.1f: shadows took %.3f of the time", share, accept, g)
				}
			}
		}
		t.Logf("depth %d: auto is at worst %.4f of the better; the closed form is off by at most %.4f; depth 0 is at worst %.4f of the best depth", depth, worst, worstForm, worstDepth)
	}
}

func equal(a, b []int32) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}
