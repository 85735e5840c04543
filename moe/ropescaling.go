package moe

import "math"

// frequencies are the angles by which the pairs of dims elements of a head turn
// from one position to the next, with the scaling that the file asks for, and
// what cosines and sines are multiplied by.
//
// Scalings that a model was trained with are part of its meaning, so one that is
// not known is refused.
func (l *loader) frequencies(dims int) (freq []float64, magnitude float64) {
	freq, magnitude = ropeFrequencies(dims, l.ropeBase()), 1
	switch kind, _ := l.text("rope.scaling.type"); kind {
	case "", "none":
	case "linear":
		factor := l.positive("rope.scaling.factor", 1, 1e6)
		for i := range freq {
			freq[i] /= factor
		}
	case "llama3":
		l.llama3().stretch(freq)
	case "yarn":
		if y := l.yarn(); l.err == nil {
			freq = y.frequencies(dims, l.ropeBase())
			magnitude = y.magnitude(1) * l.positive("rope.scaling.attn_factor", 1, 1e6)
		}
	default:
		l.fail("RoPE scaling %q is not supported: none, linear, llama3 and yarn are", kind)
	}
	l.divide(freq)
	return freq, magnitude
}

// divide divides each frequency by its own number, where the file has them in a
// tensor: how GGUF files write the scaling of Llama 3.
func (l *loader) divide(freq []float64) bool {
	const name = "rope_freqs.weight"
	if !l.has(name) {
		return false
	}
	for i, f := range l.vector(name, len(freq)) {
		if !(f > 0x1p-20 && f < 0x1p20) {
			l.fail("%s divides the frequency of pair %d by %v", name, i, f)
		}
		freq[i] /= float64(f)
	}
	return true
}

// A llama3 stretches rotations to a longer context as Llama 3.1 does
// (arXiv:2407.21783): pairs that turn at least high times within the original
// context keep their frequency, those that turn less than low times are divided
// by the factor, those between get a share of both, linear in the turns.
type llama3 struct {
	factor    float64 // at least 1
	original  float64 // positions of the original context
	low, high float64 // turns within it
}

func (l *loader) llama3() llama3 {
	s := llama3{
		factor:   l.positive("rope.scaling.factor", 1, 1e6),
		low:      l.positive("rope.scaling.low_freq_factor", 1, 1e6),
		high:     l.positive("rope.scaling.high_freq_factor", 4, 1e6),
		original: float64(l.need("rope.scaling.original_context_length", maxCtx)),
	}
	if s.factor < 1 || s.high <= s.low {
		l.fail("RoPE scaling by %v with turns from %v to %v: the factor must be at least 1, the second number of turns above the first", s.factor, s.low, s.high)
	}
	return s
}

func (s llama3) stretch(freq []float64) {
	for i, f := range freq {
		turns := f * s.original / (2 * math.Pi)
		kept := min(max((turns-s.low)/(s.high-s.low), 0), 1) // share of the frequency as it was
		freq[i] = kept*f + (1-kept)*f/s.factor
	}
}
