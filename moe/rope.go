package moe

import (
	"math"

	"sluice/backends"
)

// newRope makes the host's table of rotations of the first dims elements of a
// head: pair i of position p turns by p * base^(-2i/dims).
func newRope(positions, dims int, base float64) *backends.Rope {
	return ropeTable(positions, ropeFrequencies(dims, base), 1)
}

// ropeFrequencies are the angles by which the pairs of dims elements turn from
// one position to the next.
func ropeFrequencies(dims int, base float64) []float64 {
	freq := make([]float64, dims/2)
	for i := range freq {
		freq[i] = math.Pow(base, -2*float64(i)/float64(dims))
	}
	return freq
}

// ropeTable is the cosines and sines of so many positions, times magnitude. The
// angles are float64, rounded once at the end.
func ropeTable(positions int, freq []float64, magnitude float64) *backends.Rope {
	half := len(freq)
	r := &backends.Rope{Half: half, Cos: make([]float32, positions*half), Sin: make([]float32, positions*half)}
	for i, f := range freq {
		for p := range positions {
			sin, cos := math.Sincos(float64(p) * f)
			r.Cos[p*half+i], r.Sin[p*half+i] = float32(cos*magnitude), float32(sin*magnitude)
		}
	}
	return r
}

// A yarn stretches rotations to a longer context (YaRN, arXiv:2309.00071): pairs
// that turn often within the original context keep their frequency, those that
// turn less than once are slowed by the factor, those between by a share.
type yarn struct {
	factor             float64 // at least 1
	original           float64 // positions of the original context
	betaFast, betaSlow float64 // turns within it, from which, and below which
	exact              bool    // the bounds are not rounded outward to whole pairs
}

// yarn reads the scaling of rotations, nil if there is none. A family that has
// only plain rotations refuses it by itself.
func (l *loader) yarn() *yarn {
	kind, ok := l.text("rope.scaling.type")
	switch {
	case !ok || kind == "none":
		return nil
	case kind != "yarn":
		l.fail("RoPE scaling %q is not supported: only yarn is", kind)
		return nil
	}
	y := &yarn{
		factor:   l.positive("rope.scaling.factor", 1, 1e6),
		original: float64(l.need("rope.scaling.original_context_length", maxCtx)),
		betaFast: l.positive("rope.scaling.yarn_beta_fast", 32, 1e6),
		betaSlow: l.positive("rope.scaling.yarn_beta_slow", 1, 1e6),
	}
	if y.factor < 1 || y.betaFast <= y.betaSlow {
		l.fail("RoPE scaling by %v with betas %v and %v: the factor must be at least 1, the first beta above the second", y.factor, y.betaFast, y.betaSlow)
	}
	return y
}

// frequencies are those of ropeFrequencies, stretched.
func (y *yarn) frequencies(dims int, base float64) []float64 {
	freq := ropeFrequencies(dims, base)
	// pair is the (fractional) pair that makes so many turns in the original context.
	pair := func(turns float64) float64 {
		return float64(dims) * math.Log(y.original/(turns*2*math.Pi)) / (2 * math.Log(base))
	}
	low, high := pair(y.betaFast), pair(y.betaSlow)
	if !y.exact {
		low, high = math.Floor(low), math.Ceil(high)
	}
	low, high = max(low, 0), min(high, float64(dims-1))
	for i, f := range freq {
		slowed := min(max((float64(i)-low)/max(high-low, 0.001), 0), 1) // share of the stretched frequency
		freq[i] = f/y.factor*slowed + f*(1-slowed)
	}
	return freq
}

// magnitude is the paper's 1 + 0.1*ln(factor), its logarithm weighted (mscale):
// what makes up in the scores for the flatter softmax of a longer context.
func (y *yarn) magnitude(weight float64) float64 {
	return 1 + 0.1*weight*math.Log(y.factor)
}
