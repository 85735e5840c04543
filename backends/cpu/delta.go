package cpu

import (
	"fmt"
	"math"

	"sluice/backends"
	"sluice/internal/arith"
	"sluice/internal/offheap"
)

// A delta keeps the states of gated delta net layers: for each layer two, before
// and after its last step, and that step's inputs. A step reads one and writes
// the other, so going back costs no copy, and going back into a step computes
// its positions again.
type delta struct {
	shape  backends.DeltaShape
	layers []deltaLayer
	again  deltaRows // the inputs of positions that are computed again
}

type deltaLayer struct {
	state      [2]deltaState
	last       deltaRows // inputs of the last step, if it had at most DeltaReach positions
	after      int       // which state is the one after the last step
	start, end int       // positions of the last step
}

// A deltaState is [value heads, valueDim, keyDim] floats, and the inputs of the
// convolution before it, [taps-1, channels], oldest first.
type deltaState struct{ heads, past []float32 }

// deltaRows are inputs of positions: [n, channels], [n, value heads] each.
type deltaRows struct{ qkv, a, b []float32 }

// deltaBlock is the rows of a head's matrix that an item of the recurrence
// takes: with keys of 128 they are 8 KiB and stay in the first cache for all
// positions of a step.
const deltaBlock = 16

// l2Eps is added to the sum of squares that normalises a query or key.
const l2Eps = 1e-6

// deltaScratch is a worker's memory.
type deltaScratch struct {
	ring   []float32 // [taps, widest head] inputs of the convolution, position t in row t mod taps
	ones   []float32 // [widest head]
	scales []float32 // [keyDim] 1/sqrt(keyDim)
	head   []float32 // [valueDim] a normalised output
	kept   [deltaBlock]float32
	change [deltaBlock]float32
}

// NewDelta makes a state of zeros, its memory resident, freed by Close.
func (b *Backend) NewDelta(s backends.DeltaShape) (backends.Delta, error) {
	if s.Layers < 1 || s.KeyHeads < 1 || s.ValueHeads < 1 || s.ValueHeads%s.KeyHeads != 0 || s.Taps < 2 ||
		s.KeyDim < 16 || s.KeyDim%16 != 0 || s.ValueDim < 16 || s.ValueDim%16 != 0 {
		return nil, fmt.Errorf("backends/cpu: a gated delta net of shape %+v: heads must divide and dims be multiples of 16", s)
	}
	all, mem, err := offheap.Of[float32](int(s.Bytes() / 4))
	if err != nil {
		return nil, fmt.Errorf("backends/cpu: no memory for the states of %d gated delta net layers, %d bytes: %w", s.Layers, s.Bytes(), err)
	}
	offheap.Populate(mem)
	b.owned = append(b.owned, mem)
	cut := func(n int) (part []float32) {
		part, all = all[:n:n], all[n:]
		return part
	}
	rows := func() deltaRows {
		return deltaRows{cut(backends.DeltaReach * s.Channels()), cut(backends.DeltaReach * s.ValueHeads), cut(backends.DeltaReach * s.ValueHeads)}
	}
	d := &delta{shape: s, layers: make([]deltaLayer, s.Layers)}
	for i := range d.layers {
		l := &d.layers[i]
		for j := range l.state {
			l.state[j] = deltaState{cut(s.ValueHeads * s.ValueDim * s.KeyDim), cut((s.Taps - 1) * s.Channels())}
		}
		l.last = rows()
	}
	d.again = rows()
	return d, nil
}

// Shape is what the state was made for.
func (d *delta) Shape() backends.DeltaShape { return d.shape }

// deltaStep is n positions of a layer. Its parts run one after the other:
// inputs by head, the recurrence by head and block of rows, outputs by position
// and head.
type deltaStep struct {
	s        *backends.DeltaShape
	w        *backends.DeltaNet
	n        int
	in       deltaRows
	log      deltaRows  // gets the inputs; nil slices: nobody wants them
	from, to deltaState // to is written whole
	y, z     []float32  // nil: no outputs are wanted
}

type (
	deltaInputs     struct{ deltaStep }
	deltaRecurrence struct{ deltaStep }
	deltaOutputs    struct{ deltaStep }
)

// DeltaNet computes y [n, value heads * valueDim], as docs/arithmetic.md says.
func (b *Backend) DeltaNet(y, qkv, z, a, strength backends.Vec, state backends.Delta, layer, pos int, w *backends.DeltaNet) {
	d, to, in, gates, steps, writes := state.(*delta), y.(*vec), qkv.(*vec), z.(*vec), a.(*vec), strength.(*vec)
	s := &d.shape
	n, channels, heads, out := in.n, s.Channels(), s.ValueHeads, s.ValueHeads*s.ValueDim
	if in.dim != channels || to.dim != out || gates.dim != out || gates.n != n || steps.dim != heads || steps.n != n || writes.dim != heads || writes.n != n || to == gates {
		panic(fmt.Sprintf("backends/cpu: DeltaNet: qkv [%d, %d], z [%d, %d], a [%d, %d], b [%d, %d], y of %d with shape %+v",
			n, in.dim, gates.n, gates.dim, steps.n, steps.dim, writes.n, writes.dim, to.dim, *s))
	}
	if len(w.Conv) != s.Taps*channels || len(w.A) != heads || len(w.Bias) != heads || len(w.Norm) != s.ValueDim {
		panic(fmt.Sprintf("backends/cpu: DeltaNet: weights of %d, %d, %d, %d floats with shape %+v", len(w.Conv), len(w.A), len(w.Bias), len(w.Norm), *s))
	}
	if layer < 0 || layer >= s.Layers {
		panic(fmt.Sprintf("backends/cpu: DeltaNet: layer %d of %d", layer, s.Layers))
	}
	to.SetLen(n)
	if n == 0 {
		return
	}
	for _, w := range b.pool.workers {
		w.delta.grow(s)
	}
	l := &d.layers[layer]
	step := deltaStep{s: s, w: w}
	switch {
	case pos == l.end:
	case pos == l.start:
		l.after ^= 1
	case pos == 0:
		clear(l.state[l.after].heads)
		clear(l.state[l.after].past)
	case pos > l.start && pos < l.end && l.end-l.start <= backends.DeltaReach:
		m := pos - l.start
		copy(d.again.qkv, l.last.qkv[:m*channels])
		copy(d.again.a, l.last.a[:m*heads])
		copy(d.again.b, l.last.b[:m*heads])
		step.n, step.in, step.from, step.to = m, d.again, l.state[l.after^1], l.state[l.after]
		b.deltaParts(&step)
	default:
		panic(fmt.Sprintf("backends/cpu: DeltaNet: layer %d at position %d after a step from %d to %d", layer, pos, l.start, l.end))
	}
	step.n, step.in, step.from, step.to = n, deltaRows{in.rows(), steps.rows(), writes.rows()}, l.state[l.after], l.state[l.after^1]
	step.y, step.z = to.rows(), gates.rows()
	if n <= backends.DeltaReach {
		step.log = l.last
	}
	b.deltaParts(&step)
	l.after ^= 1
	l.start, l.end = pos, pos+n
}

func (b *Backend) deltaParts(step *deltaStep) {
	s := step.s
	b.deltaIn.deltaStep = *step
	b.do("DeltaNet", &b.deltaIn, 2*s.KeyHeads+s.ValueHeads, prepareGrain/(4*step.n*s.KeyDim))
	b.deltaRun.deltaStep = *step
	b.do("DeltaNet", &b.deltaRun, s.ValueHeads*s.ValueDim/deltaBlock, prepareGrain/(step.n*deltaBlock*s.KeyDim))
	if step.y != nil {
		b.deltaOut.deltaStep = *step
		b.do("DeltaNet", &b.deltaOut, step.n*s.ValueHeads, prepareGrain/(2*s.ValueDim))
	}
	b.deltaIn, b.deltaRun, b.deltaOut = deltaInputs{}, deltaRecurrence{}, deltaOutputs{}
}

func (t *deltaScratch) grow(s *backends.DeltaShape) {
	widest := max(s.KeyDim, s.ValueDim)
	t.ring = grown(t.ring, s.Taps*widest)
	t.head = grown(t.head, s.ValueDim)
	t.ones = filled(t.ones, widest, 1)
	t.scales = filled(t.scales, s.KeyDim, float32(1/math.Sqrt(float64(s.KeyDim))))
}

// filled is n times v, in x if that is what it has.
func filled(x []float32, n int, v float32) []float32 {
	if len(x) == n && x[0] == v {
		return x
	}
	x = grown(x, n)
	for i := range x {
		x[i] = v
	}
	return x
}

// run makes of an item's inputs, in place, the queries, keys or values of one
// head, and of a value head its decays and write strengths.
func (s *deltaInputs) run(w *worker, lo, hi int) {
	for ; lo < hi; lo++ {
		keyHeads, kd := s.s.KeyHeads, s.s.KeyDim
		switch h := lo - 2*keyHeads; {
		case h >= 0:
			s.head(w, 2*keyHeads*kd+h*s.s.ValueDim, s.s.ValueDim, nil)
			s.rates(w, h)
		case lo < keyHeads:
			s.head(w, lo*kd, kd, w.delta.scales)
		default:
			s.head(w, lo*kd, kd, w.delta.ones[:kd])
		}
	}
}

// head does the channels from, from+1, ... of one head for all positions:
// convolution and SiLU, then, with unit, to length 1 times unit.
func (s *deltaInputs) head(w *worker, from, width int, unit []float32) {
	t, channels, taps := &w.delta, s.s.Channels(), s.s.Taps
	row := func(pos int) []float32 { return t.ring[(pos+taps)%taps*width:][:width] }
	for p := 1 - taps; p < 0; p++ {
		copy(row(p), s.from.past[(p+taps-1)*channels+from:])
	}
	for p := range s.n {
		x := s.in.qkv[p*channels+from:][:width]
		if s.log.qkv != nil {
			copy(s.log.qkv[p*channels+from:], x)
		}
		w.saw(w.k.cleanTo(row(p), x, arith.TinyBits))
		clear(x)
		for tap := range taps {
			w.k.addProducts(x, s.w.Conv[tap*channels+from:][:width], row(p+1-taps+tap))
		}
		w.k.gate(x, t.ones[:width])
		tiny := uint32(arith.TinyBits)
		if unit != nil {
			w.saw(w.k.rmsNorm(x, x, unit, 1, l2Eps))
			tiny = kvTinyBits
		}
		w.saw(w.k.cleanTo(x, x, tiny))
	}
	for p := 1 - taps; p < 0; p++ {
		copy(s.to.past[(p+taps-1)*channels+from:][:width], row(s.n+p))
	}
}

// rates makes decays of the time steps of value head h, and of its write
// strengths their sigmoids.
func (s *deltaInputs) rates(w *worker, h int) {
	var top uint32
	for i := h; i < s.n*s.s.ValueHeads; i += s.s.ValueHeads {
		a, b := s.in.a[i], s.in.b[i]
		if s.log.a != nil {
			s.log.a[i], s.log.b[i] = a, b
		}
		top = max(top, math.Float32bits(a)&^arith.SignMask, math.Float32bits(b)&^arith.SignMask)
		s.in.a[i] = decay(a+s.w.Bias[h], s.w.A[h])
		s.in.b[i] = arith.Sigmoid(b)
	}
	w.saw(top)
}

// decay is exp(rate*softplus(x)), and +0 below 2^-24.
func decay(x, rate float32) float32 {
	d := arith.Exp(float32(rate * arith.Softplus(x)))
	if d < arith.KVTiny {
		return 0
	}
	return d
}

// run takes an item's rows of one head's matrix through all positions.
func (s *deltaRecurrence) run(w *worker, lo, hi int) {
	t, heads, kd, vd, channels := &w.delta, s.s.ValueHeads, s.s.KeyDim, s.s.ValueDim, s.s.Channels()
	for ; lo < hi; lo++ {
		h, from := lo*deltaBlock/vd, lo*deltaBlock%vd
		key := h / (heads / s.s.KeyHeads)
		if s.w.Tiled {
			key = h % s.s.KeyHeads
		}
		m := s.to.heads[lo*deltaBlock*kd:][:deltaBlock*kd]
		copy(m, s.from.heads[lo*deltaBlock*kd:])
		for p := range s.n {
			x := s.in.qkv[p*channels:][:channels]
			q, k, v := x[key*kd:][:kd], x[(s.s.KeyHeads+key)*kd:][:kd], x[2*s.s.KeyHeads*kd+h*vd+from:][:deltaBlock]
			w.k.scaleBy(m, s.in.a[p*heads+h])
			w.k.cache.scores(t.kept[:], k, m, 1)
			for i, v := range v {
				t.change[i] = arith.Clean(float32((v - t.kept[i]) * s.in.b[p*heads+h]))
			}
			for i := range v {
				w.k.cache.weigh(m[i*kd:(i+1)*kd], t.change[i:i+1], k)
			}
			w.k.cleanTo(m, m, arith.TinyBits)
			if s.y != nil {
				w.k.cache.scores(s.y[(p*heads+h)*vd+from:][:deltaBlock], q, m, 1)
			}
		}
	}
}

// run normalises an item's output of one head and gates it.
func (s *deltaOutputs) run(w *worker, lo, hi int) {
	vd := s.s.ValueDim
	for ; lo < hi; lo++ {
		y := s.y[lo*vd:][:vd]
		w.saw(w.k.rmsNorm(w.delta.head, y, s.w.Norm, 1/float32(vd), s.w.Eps))
		w.saw(w.k.cleanTo(y, s.z[lo*vd:][:vd], arith.TinyBits))
		w.k.gate(y, w.delta.head)
	}
}
