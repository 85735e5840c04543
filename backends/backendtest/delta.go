package backendtest

import (
	"fmt"
	"math"

	"sluice/backends"
)

func softplus(x float32) float32 {
	e := exp(sub(0, float32(math.Abs(float64(x)))))
	s := mul(e, rcp(add(2, e)))
	q := mul(s, s)
	p := float32(1.0 / 13)
	for _, c := range []float32{1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3} {
		p = add(mul(p, q), c)
	}
	t := add(s, s)
	return add(max(x, 0), add(t, mul(t, mul(q, p))))
}

// dotLanes is w times x in 16 lanes.
func dotLanes(w, x []float32) float32 {
	var l [16]float32
	for i := range w {
		l[i%16] = add(l[i%16], mul(w[i], x[i]))
	}
	return tree16(l)
}

// deltaNet is a gated delta net layer over a whole sequence, from position 0:
// y [n, heads*valueDim] of qkv [n, channels], z [n, heads*valueDim], a and b [n, heads].
func deltaNet(s backends.DeltaShape, w *backends.DeltaNet, qkv, z, a, b []float32) []float32 {
	channels, kd, vd := s.Channels(), s.KeyDim, s.ValueDim
	n := len(qkv) / channels
	var y []float32
	state := make([][][]float32, s.ValueHeads)
	for h := range state {
		for range vd {
			state[h] = append(state[h], make([]float32, kd))
		}
	}
	for p := range n {
		x := make([]float32, channels)
		for c := range x {
			for tap := range s.Taps {
				if at := p + 1 - s.Taps + tap; at >= 0 {
					x[c] = add(x[c], mul(w.Conv[tap*channels+c], clean(qkv[at*channels+c])))
				}
			}
			x[c] = clean(silu(x[c]))
		}
		unit := func(x []float32, scale float32) []float32 {
			r := rsqrt(add(dotFloats(x, x), 1e-6))
			y := make([]float32, len(x))
			for i, v := range x {
				if y[i] = mul(mul(v, r), scale); math.Abs(float64(y[i])) < 0x1p-24 {
					y[i] = 0
				}
			}
			return y
		}
		for h := range s.ValueHeads {
			key := h / (s.ValueHeads / s.KeyHeads)
			if w.Tiled {
				key = h % s.KeyHeads
			}
			q := unit(x[key*kd:][:kd], float32(1/math.Sqrt(float64(kd))))
			k := unit(x[(s.KeyHeads+key)*kd:][:kd], 1)
			decay := exp(mul(w.A[h], softplus(add(a[p*s.ValueHeads+h], w.Bias[h]))))
			if decay < 0x1p-24 {
				decay = 0
			}
			beta := sigmoid(b[p*s.ValueHeads+h])
			out := make([]float32, vd)
			for j, row := range state[h] {
				for i := range row {
					row[i] = mul(row[i], decay)
				}
				v := x[2*s.KeyHeads*kd+h*vd+j]
				d := clean(mul(sub(v, dotLanes(row, k)), beta))
				for i := range row {
					row[i] = clean(add(row[i], mul(d, k[i])))
				}
				out[j] = dotLanes(row, q)
			}
			for j, v := range rmsNorm(out, w.Norm, w.Eps) {
				y = append(y, mul(silu(clean(z[(p*s.ValueHeads+h)*vd+j])), v))
			}
		}
	}
	return y
}

// deltaWeights are random weights of a layer.
func (b *bench) deltaWeights(s backends.DeltaShape) *backends.DeltaNet {
	w := &backends.DeltaNet{
		Conv: Vectors(b.rng, s.Taps, s.Channels(), 0), A: Vectors(b.rng, 1, s.ValueHeads, 0), Bias: Vectors(b.rng, 1, s.ValueHeads, 0),
		Norm: Vectors(b.rng, 1, s.ValueDim, 0), Eps: 1e-6,
	}
	for i, a := range w.A {
		w.A[i] = -float32(math.Abs(float64(a))) * []float32{0.01, 1, 15}[i%3]
	}
	return w
}

// testDeltaNet runs layers in steps of some positions, and goes back: each
// position has the bits of a run of the whole sequence, however it was cut.
func testDeltaNet(b *bench) {
	type step struct{ pos, n int }
	for i, s := range []backends.DeltaShape{
		{Layers: 1, KeyHeads: 2, ValueHeads: 4, KeyDim: 16, ValueDim: 16, Taps: 4},
		{Layers: 3, KeyHeads: 3, ValueHeads: 6, KeyDim: 32, ValueDim: 48, Taps: 2},
		{Layers: 2, KeyHeads: 2, ValueHeads: 2, KeyDim: 48, ValueDim: 32, Taps: 6},
		{Layers: 1, KeyHeads: 1, ValueHeads: 3, KeyDim: 128, ValueDim: 128, Taps: 4},
	} {
		d, err := b.be.NewDelta(s)
		if err != nil {
			b.Fatal(err)
		}
		if d.Shape() != s {
			b.Fatalf("a state of shape %+v says %+v", s, d.Shape())
		}
		const n = 60
		channels, out, heads := s.Channels(), s.ValueHeads*s.ValueDim, s.ValueHeads
		for _, tiled := range []bool{false, true} {
			w := b.deltaWeights(s)
			w.Tiled = tiled
			qkv, z := Vectors(b.rng, n, channels, []int{0, 1, 2, 4}[i]), Vectors(b.rng, n, out, i%2)
			steps, writes := Vectors(b.rng, n, heads, 0), Vectors(b.rng, n, heads, 0)
			for j := range steps {
				f := []float32{1, 1, 8, 60}[j%4] // to both ends of exp
				steps[j], writes[j] = cleaned([]float32{steps[j]})[0]*f, cleaned([]float32{writes[j]})[0]*f
			}
			want := deltaNet(s, w, cleaned(qkv), cleaned(z), cleaned(steps), cleaned(writes))
			for _, script := range [][]step{
				{{0, 1}, {1, 1}, {2, 1}, {3, 3}, {6, 1}, {7, 30}, {37, 16}, {53, 1}},
				{{0, n}},
				{{0, 5}, {5, 4}, {7, 9}, {7, 2}, {8, 1}, {9, 16}, {9, 1}, {10, 16}, {25, 2}, {26, 20}, {26, 5}}, // back into a step, to its begin, before it grew
				{{0, 7}, {0, 3}, {2, 40}, {42, 2}, {0, 1}, {1, 5}},                                              // back to the start
			} {
				for _, c := range script {
					layer := s.Layers - 1
					part := func(x []float32, dim int) backends.Vec { return b.upload(x[c.pos*dim:(c.pos+c.n)*dim], dim) }
					y := b.vec(c.n, out)
					b.be.DeltaNet(y, part(qkv, channels), part(z, out), part(steps, heads), part(writes, heads), d, layer, c.pos, w)
					b.wants(fmt.Sprintf("%+v, tiled %v, script %v, step %v", s, tiled, script, c), y, want[c.pos*out:(c.pos+c.n)*out])
					if layer > 0 { // another layer, not to be seen
						b.be.DeltaNet(y, part(qkv, channels), part(z, out), part(writes, heads), part(steps, heads), d, 0, c.pos, w)
					}
				}
			}
		}
	}
}

func testSplit(b *bench) {
	for _, n := range []int{1, 3, 40} {
		const groups = 5
		x := Vectors(b.rng, n, groups*(4+4+7+1), 0)
		first, second := b.vec(n, groups*15), b.vec(n, groups)
		b.be.Split([]backends.Vec{first, first, first, second}, []int{4, 4, 7, 1}, b.upload(x, groups*16))
		var a, c []float32
		x = cleaned(x)
		for p := range n {
			row := x[p*groups*16:]
			for _, run := range [][2]int{{0, 4}, {4, 4}, {8, 7}} {
				for g := range groups {
					a = append(a, row[g*16+run[0]:][:run[1]]...)
				}
			}
			for g := range groups {
				c = append(c, row[g*16+15])
			}
		}
		b.wants(fmt.Sprintf("%d positions, runs 4, 4, 7", n), first, a)
		b.wants(fmt.Sprintf("%d positions, run 1", n), second, c)
	}
	y := b.vec(1, 8)
	b.be.Split([]backends.Vec{y}, []int{8}, b.upload(make([]float32, 8), 8))
	b.wants("one run", y, make([]float32, 8))
}

// deltaOf runs one position of a gated delta net layer whose convolution's
// inputs, or gates, are x [1, 256]; nil for the other.
func (b *bench) deltaOf(qkv, z backends.Vec) {
	b.Helper()
	s := backends.DeltaShape{Layers: 1, KeyHeads: 2, ValueHeads: 2, KeyDim: 32, ValueDim: 64, Taps: 2}
	if qkv == nil {
		s.ValueDim = 128
		qkv = b.upload(Vectors(b.rng, 1, s.Channels(), 0), s.Channels())
	} else {
		z = b.upload(Vectors(b.rng, 1, 128, 0), 128)
	}
	d, err := b.be.NewDelta(s)
	if err != nil {
		b.Fatal(err)
	}
	w := b.deltaWeights(s)
	for i := range w.Conv {
		w.Conv[i] = 0.5
	}
	rate := func() backends.Vec { return b.upload(Vectors(b.rng, 1, 2, 0), 2) }
	b.be.DeltaNet(b.vec(1, 2*s.ValueDim), qkv, z, rate(), rate(), d, 0, 0, w)
}
