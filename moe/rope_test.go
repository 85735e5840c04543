package moe

import (
	"math"
	"testing"
)

// Stretched frequencies follow the paper: fast pairs as they were, slow pairs
// divided by the factor, monotone in between.
func TestYarnFrequencies(t *testing.T) {
	const dims, base = 64, 10000.0
	plain := ropeFrequencies(dims, base)
	y := &yarn{factor: 40, original: 4096, betaFast: 32, betaSlow: 1} // DeepSeek-V3
	got := y.frequencies(dims, base)
	turns := func(i int) float64 { return y.original * plain[i] / (2 * math.Pi) }
	share := 1.0
	for i, f := range got {
		r := f / plain[i] // 1 down to 1/factor
		if turns(i) > y.betaFast && r != 1 || turns(i) < y.betaSlow/1.4 && math.Abs(r*y.factor-1) > 1e-12 {
			t.Errorf("pair %d, which turns %.3g times, is scaled by %v", i, turns(i), r)
		}
		if r > share+1e-12 || r < 1/y.factor-1e-12 {
			t.Errorf("pair %d is scaled by %v, the one before by %v", i, r, share)
		}
		share = r
	}
	// Whole pairs bound the ramp at 10 and 23 here; in between it is linear in
	// the pair: see the paper's own configuration of this model.
	if got[10] != plain[10] || got[11] == plain[11] || math.Abs(got[23]*40/plain[23]-1) > 1e-12 || got[22]*40 <= plain[22] {
		t.Errorf("the ramp is not from pair 10 to pair 23: %v", got)
	}
	exact := *y
	exact.exact = true
	if e := exact.frequencies(dims, base); e[11] <= got[11]*0.99 || e[11] == got[11] {
		t.Errorf("bounds that are not rounded give pair 11 %v, rounded ones %v", e[11], got[11])
	}
	if one := (&yarn{factor: 1, original: 32, betaFast: 32, betaSlow: 1}).frequencies(8, base); one[3] != ropeFrequencies(8, base)[3] {
		t.Errorf("a factor of 1 changes frequencies: %v", one)
	}
	if m := y.magnitude(1); math.Abs(m-1.3688879) > 1e-6 || y.magnitude(0) != 1 {
		t.Errorf("magnitude %v", m)
	}
}

// A table holds the rotations of every position, times its magnitude.
func TestRopeTable(t *testing.T) {
	r := ropeTable(3, []float64{1, 0.25}, 2)
	if r.Half != 2 || len(r.Cos) != 6 || len(r.Sin) != 6 {
		t.Fatalf("%+v", r)
	}
	for p := range 3 {
		for i, f := range []float64{1, 0.25} {
			if c, s := float32(2*math.Cos(float64(p)*f)), float32(2*math.Sin(float64(p)*f)); r.Cos[2*p+i] != c || r.Sin[2*p+i] != s {
				t.Errorf("position %d, pair %d: %v %v, want %v %v", p, i, r.Cos[2*p+i], r.Sin[2*p+i], c, s)
			}
		}
	}
	if plain := newRope(3, 4, 16); plain.Cos[3] != r.Cos[3]/2 {
		t.Errorf("base 16 over 4 elements: %v, want pairs of 1 and 1/4", plain)
	}
}
