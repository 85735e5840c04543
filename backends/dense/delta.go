package dense

import (
	"fmt"
	"math"

	"sluice/backends"
)

// A delta keeps states as that of backends/cpu does: for each layer two, before and
// after its last step, and that step's inputs.
type delta struct {
	shape  backends.DeltaShape
	layers []deltaLayer
}

type deltaLayer struct {
	heads, past [2]uint64 // [value heads, valueDim, keyDim], [taps-1, channels]
	log         [3]uint64 // [DeltaReach, ...] qkv, a and b of the last step, if it had at most as many positions
	after       int       // which state is the one after the last step
	start, end  int       // positions of the last step
}

// NewDelta makes a state of zeros, freed by Close.
func (b *Backend) NewDelta(s backends.DeltaShape) (backends.Delta, error) {
	if s.Layers < 1 || s.KeyHeads < 1 || s.ValueHeads < 1 || s.ValueHeads%s.KeyHeads != 0 || s.Taps < 2 ||
		s.KeyDim < 16 || s.KeyDim%16 != 0 || s.ValueDim < 16 || s.ValueDim%16 != 0 {
		return nil, fmt.Errorf("backends/dense: a gated delta net of shape %+v: heads must divide and dims be multiples of 16", s)
	}
	if s.KeyDim > widestKey || s.ValueDim > widestHead {
		return nil, fmt.Errorf("backends/dense: a gated delta net of shape %+v: the kernels have room for keys of %d and values of %d; leave --gpu-dense out", s, widestKey, widestHead)
	}
	d := &delta{shape: s, layers: make([]deltaLayer, s.Layers)}
	var err error
	zeros := func(floats int) (at uint64) {
		if err == nil {
			at, err = b.zeros(4 * int64(floats))
		}
		return at
	}
	for i := range d.layers {
		l := &d.layers[i]
		for j := range l.heads {
			l.heads[j], l.past[j] = zeros(s.ValueHeads*s.ValueDim*s.KeyDim), zeros((s.Taps-1)*s.Channels())
		}
		for j, n := range []int{s.Channels(), s.ValueHeads, s.ValueHeads} {
			l.log[j] = zeros(backends.DeltaReach * n)
		}
	}
	return d, err
}

// Shape is what the state was made for.
func (d *delta) Shape() backends.DeltaShape { return d.shape }

// DeltaNet is backends.Backend's.
func (b *Backend) DeltaNet(y, qkv, z, a, strength backends.Vec, state backends.Delta, layer, pos int, w *backends.DeltaNet) {
	d, to, in, gates, steps, writes := state.(*delta), y.(*vec), qkv.(*vec), z.(*vec), a.(*vec), strength.(*vec)
	s := &d.shape
	n, channels, heads, out := in.n, s.Channels(), s.ValueHeads, s.ValueHeads*s.ValueDim
	if in.dim != channels || to.dim != out || gates.dim != out || gates.n != n || steps.dim != heads || steps.n != n || writes.dim != heads || writes.n != n || to == gates {
		misuse("DeltaNet", "qkv [%d, %d], z [%d, %d], a [%d, %d], b [%d, %d], y of %d with shape %+v",
			n, in.dim, gates.n, gates.dim, steps.n, steps.dim, writes.n, writes.dim, to.dim, *s)
	}
	if len(w.Conv) != s.Taps*channels || len(w.A) != heads || len(w.Bias) != heads || len(w.Norm) != s.ValueDim {
		misuse("DeltaNet", "weights of %d, %d, %d, %d floats with shape %+v", len(w.Conv), len(w.A), len(w.Bias), len(w.Norm), *s)
	}
	if layer < 0 || layer >= s.Layers {
		misuse("DeltaNet", "layer %d of %d", layer, s.Layers)
	}
	to.SetLen(n)
	if n == 0 {
		return
	}
	l := &d.layers[layer]
	switch {
	case pos == l.end:
	case pos == l.start:
		l.after ^= 1
	case pos == 0:
		b.zero(l.heads[l.after], out*s.KeyDim)
		b.zero(l.past[l.after], (s.Taps-1)*channels)
	case pos > l.start && pos < l.end && l.end-l.start <= backends.DeltaReach:
		b.deltaRun(s, w, l, l.after^1, pos-l.start, l.log, 0)
	default:
		misuse("DeltaNet", "layer %d at position %d after a step from %d to %d", layer, pos, l.start, l.end)
	}
	if n <= backends.DeltaReach {
		for i, v := range []*vec{in, steps, writes} {
			b.copy(l.log[i], v.at, n*v.dim)
		}
	}
	b.deltaRun(s, w, l, l.after, n, [3]uint64{in.at, steps.at, writes.at}, to.at)
	b.normRuns(stepDeltaNet, to.at, to.at, n*heads, w.Norm, nil, w.Eps)
	b.each(to, eachParams{x: gates.at, fail: b.failure(stepDeltaNet), how: eachSiLU})
	l.after ^= 1
	l.start, l.end = pos, pos+n
}

// deltaRun takes a layer from a state to the other, by n positions of inputs. Without
// a y no outputs are wanted.
func (b *Backend) deltaRun(s *backends.DeltaShape, w *backends.DeltaNet, l *deltaLayer, from, n int, in [3]uint64, y uint64) {
	channels, heads := s.Channels(), s.ValueHeads
	at := b.need(&b.delta, 4*int64(n)*int64(channels+2*heads))
	p := deltaParams{qkv: in[0], a: in[1], b: in[2], past: l.past[from], conv: b.constant(w.Conv), rate: b.constant(w.A), bias: b.constant(w.Bias),
		out: at, decay: at + 4*uint64(n*channels), beta: at + 4*uint64(n*(channels+heads)), next: l.past[from^1], from: l.heads[from], to: l.heads[from^1], y: y,
		fail: b.failure(stepDeltaNet), n: uint32(n), keyHeads: uint32(s.KeyHeads), valueHeads: uint32(heads), keyDim: uint32(s.KeyDim), valueDim: uint32(s.ValueDim), taps: uint32(s.Taps),
		unit: float32(1 / math.Sqrt(float64(s.KeyDim)))}
	if w.Tiled {
		p.tiled = 1
	}
	launch(b, "deltaInputs", 2*s.KeyHeads+heads, n, 1, p)
	launch(b, "deltaSteps", heads*s.ValueDim/deltaRows, 1, 1, p)
}
