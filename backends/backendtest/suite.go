// Package backendtest is the suite that every backend passes: each step, on
// random and on extreme input, must return the bits of plain loops.
package backendtest

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"sluice/backends"
	"sluice/internal/quant"
)

// Run tests the backend that open gives. Each subtest opens and closes its own.
func Run(t *testing.T, open func() backends.Backend) {
	for _, c := range []struct {
		name string
		test func(*bench)
	}{
		{"MatMul", testMatMul}, {"MatMulSeveral", testMatMulSeveral}, {"Embed", testEmbed}, {"Gather", testGather}, {"Concat", testConcat},
		{"RMSNorm", testRMSNorm}, {"RoPE", testRoPE}, {"Attend", testAttend}, {"ExpertGroup", testExpertGroup},
		{"Combine", testCombine}, {"Add", testAdd}, {"ScaleRows", testScaleRows}, {"Scale", testScale}, {"SigmoidGate", testSigmoidGate},
		{"DeltaNet", testDeltaNet}, {"Split", testSplit}, {"ActivationError", testActivationError},
		{"Latent", testLatent}, {"LayerNorm", testLayerNorm}, {"MatMulHeads", testMatMulHeads},
	} {
		t.Run(c.name, func(t *testing.T) {
			be := open()
			defer func() {
				if err := be.Close(); err != nil {
					t.Error(err)
				}
			}()
			const seed = 0x51ce
			c.test(&bench{t, be, rand.New(rand.NewPCG(seed, 1))})
		})
	}
}

// A bench is a test, its backend and its source of numbers.
type bench struct {
	*testing.T
	be  backends.Backend
	rng *rand.Rand
}

func (b *bench) vec(capacity, dim int) backends.Vec {
	b.Helper()
	v, err := b.be.NewVec(capacity, dim)
	if err != nil {
		b.Fatal(err)
	}
	return v
}

// upload makes a vector of x [n, dim]; Embed is the way in.
func (b *bench) upload(x []float32, dim int) backends.Vec {
	b.Helper()
	n := len(x) / dim
	v := b.vec(n, dim)
	ids := make([]int32, n)
	for i := range ids {
		ids[i] = int32(i)
	}
	b.be.Embed(v, backends.Matrix{Type: quant.F32, Rows: n, Cols: dim, Data: Bytes(x)}, ids)
	return v
}

// wants compares v with the reference, bit by bit (a zero's sign too).
func (b *bench) wants(what string, v backends.Vec, want []float32) {
	b.Helper()
	if v.Len()*v.Dim() != len(want) {
		b.Fatalf("%s: %d positions of %d, want %d floats", what, v.Len(), v.Dim(), len(want))
	}
	got := make([]float32, len(want))
	if err := b.be.Read(got, v); err != nil {
		b.Fatalf("%s: %v", what, err)
	}
	for i := range want {
		if math.Float32bits(got[i]) != math.Float32bits(want[i]) {
			b.Fatalf("%s: float %d of position %d is %x, want %x", what, i%v.Dim(), i/v.Dim(), got[i], want[i])
		}
	}
}

func (b *bench) matrix(t quant.Type, rows, cols int) backends.Matrix {
	elems, bytes := t.Block()
	n := rows * t.RowBytes(cols) / bytes * elems // more than there are, where rows end in a short block
	return backends.Matrix{Type: t, Rows: rows, Cols: cols, Data: Weights(b.rng, t, n)}
}

// cleaned is x as Embed gives it.
func cleaned(x []float32) []float32 {
	y := make([]float32, len(x))
	for i, v := range x {
		y[i] = clean(v)
	}
	return y
}

// rowLengths gives row lengths for a type: some blocks, some lanes of 8, a tail.
func rowLengths(t quant.Type) []int {
	switch elems, _ := t.Block(); elems {
	case 1:
		return []int{1, 15, 16, 17, 100, 256, 257, 600}
	case 128: // F8_128 alone may end in a short block
		if t == quant.F8_128 {
			return []int{128, 640, 1, 100, 257, 600}
		}
		return []int{128, 256, 384, 128 * 9}
	case 256:
		return []int{256, 512, 768, 256 * 9}
	default:
		return []int{elems, 2 * elems, 3 * elems, 7 * elems, 8 * elems, 9 * elems, 17 * elems}
	}
}

func testMatMul(b *bench) {
	batches := []int{1, 2, 3, 8, 33, 50}
	for _, typ := range Types {
		for i, cols := range rowLengths(typ) {
			rows, n := 1+b.rng.IntN(9), batches[(i+int(typ))%len(batches)]
			w := backends.Linear{Matrix: b.matrix(typ, rows, cols)}
			if i%2 == 1 {
				w.Bias = Vectors(b.rng, 1, rows, 0)
			}
			x := Vectors(b.rng, n, cols, i)
			y := b.vec(n, rows)
			b.be.MatMul([]backends.Vec{y}, []backends.Linear{w}, b.upload(x, cols))
			want := matMul(w, cleaned(x))
			b.wants(fmt.Sprintf("%v, %d rows of %d, %d positions", typ, rows, cols, n), y, want)
			near(b, w, cleaned(x), want)
		}
	}
}

// near holds the result against float64 sums over decoded weights: the error is
// at most what rounding the activations to int8 explains.
func near(b *bench, w backends.Linear, x, y []float32) {
	b.Helper()
	decoded := make([]float32, w.Rows*w.Cols)
	for r, bytes := 0, w.Type.RowBytes(w.Cols); r < w.Rows; r++ {
		quant.Dequantize(w.Type, decoded[r*w.Cols:(r+1)*w.Cols], w.Data[r*bytes:(r+1)*bytes])
	}
	// The error of an activation: half a step of its block's 127, or what clean drops.
	off := make([]float64, len(x))
	block := w.Type.ActBlock()
	for i := range x {
		off[i] = math.Abs(float64(x[i])) * 0x1p-39 // times 1e-3 below
	}
	for i := 0; block > 0 && i < len(x); i += block {
		var top float64
		for _, v := range x[i : i+block] {
			top = max(top, math.Abs(float64(v)))
		}
		for j := range block {
			off[i+j] = top / 127 * 0.51
		}
	}
	for i, got := range y {
		at := i / w.Rows * w.Cols
		var want, allowed float64
		for j, f := range decoded[i%w.Rows*w.Cols:][:w.Cols] {
			p := float64(f) * float64(x[at+j])
			want += p
			// A min and its code may cancel in f; their rounding does not: 1e-3.
			allowed += math.Abs(p)*1e-5 + (math.Abs(float64(f))+1e-3)*off[at+j]
		}
		if w.Bias != nil {
			want += float64(w.Bias[i%w.Rows])
			allowed += math.Abs(want) * 1e-6
		}
		if !(math.Abs(float64(got)-want) <= allowed+1e-12) {
			b.Fatalf("%v, row %d of %d: %g, but the decoded weights give %g, at most %g off", w.Type, i%w.Rows, w.Cols, got, want, allowed)
		}
	}
}

// testMatMulSeveral multiplies one x by matrices of all forms in one call, many
// enough rows to be shared among threads.
func testMatMulSeveral(b *bench) {
	for _, n := range []int{0, 1, 5, 100} {
		x := Vectors(b.rng, n, 512, 2)
		var w []backends.Linear
		var y []backends.Vec
		for i, t := range []quant.Type{quant.Q4_K, quant.Q8_0, quant.F32, quant.Q6_K, quant.Q4_1, quant.F16} {
			rows := 10 + 30*i
			w = append(w, backends.Linear{Matrix: b.matrix(t, rows, 512)})
			y = append(y, b.vec(max(n, 1), rows))
		}
		in := b.vec(1, 512)
		if n > 0 {
			in = b.upload(x, 512)
		}
		b.be.MatMul(y, w, in)
		for i := range w {
			b.wants(fmt.Sprintf("matrix %d, %d positions", i, n), y[i], matMul(w[i], cleaned(x)))
		}
	}
}

func testEmbed(b *bench) {
	for _, t := range Types {
		elems, _ := t.Block()
		cols := elems * 3
		m := b.matrix(t, 5, cols)
		table := make([]float32, 5*cols)
		quant.Dequantize(t, table, m.Data)
		x := b.vec(4, cols)
		var want []float32
		ids := []int32{4, 0, 4, 2}
		for _, id := range ids {
			want = append(want, cleaned(table[int(id)*cols:][:cols])...)
		}
		b.be.Embed(x, m, ids)
		b.wants(t.String(), x, want)
	}
}

func testGather(b *bench) {
	x := Vectors(b.rng, 6, 33, 0)
	y := b.vec(3, 33)
	b.be.Gather(y, b.upload(x, 33), []int32{5, 1})
	b.wants("rows 5, 1", y, append(append([]float32{}, x[5*33:]...), x[33:2*33]...))
}

func testConcat(b *bench) {
	left, right := Vectors(b.rng, 3, 33, 0), Vectors(b.rng, 3, 5, 2)
	y := b.vec(4, 38)
	b.be.Concat(y, b.upload(left, 33), b.upload(right, 5))
	var want []float32
	for i := range 3 {
		want = append(append(want, left[i*33:(i+1)*33]...), right[i*5:(i+1)*5]...)
	}
	b.wants("[3, 33] and [3, 5]", y, cleaned(want))
}

func testRMSNorm(b *bench) {
	for i, c := range []struct{ n, dim, run int }{{1, 64, 64}, {3, 100, 100}, {2, 96, 16}, {70, 128, 32}, {1, 2048, 2048}, {5, 7, 7}} {
		x, weight := Vectors(b.rng, c.n, c.dim, i), Vectors(b.rng, 1, c.run, 0)
		for _, eps := range []float32{1e-6, 0} {
			want := rmsNorm(cleaned(x), weight, eps)
			in, y := b.upload(x, c.dim), b.vec(c.n, c.dim)
			b.be.RMSNorm(y, in, weight, eps)
			b.wants(fmt.Sprintf("%+v into another", c), y, want)
			b.be.RMSNorm(in, in, weight, eps)
			b.wants(fmt.Sprintf("%+v in place", c), in, want)
		}
	}
	zero := b.upload(make([]float32, 32), 32)
	b.be.RMSNorm(zero, zero, Vectors(b.rng, 1, 32, 3), 0)
	got := make([]float32, 32)
	if err := b.be.Read(got, zero); err != nil {
		b.Fatal(err)
	}
	for _, v := range got {
		if v != 0 {
			b.Fatalf("zeros are normalised to %g", v)
		}
	}
}

func testRoPE(b *bench) {
	for _, c := range []struct {
		n, heads, headDim, half, skip, pos int
		interleaved                        bool
	}{
		{n: 1, heads: 1, headDim: 8, half: 4},
		{n: 3, heads: 4, headDim: 16, half: 8, pos: 5},
		{n: 2, heads: 3, headDim: 20, half: 6, pos: 1},
		{n: 2, heads: 3, headDim: 20, half: 6, skip: 8, pos: 1},
		{n: 40, heads: 8, headDim: 32, half: 16, pos: 2},
		{n: 1, heads: 1, headDim: 8, half: 4, interleaved: true},
		{n: 2, heads: 3, headDim: 20, half: 7, pos: 3, interleaved: true},
		{n: 3, heads: 5, headDim: 96, half: 16, skip: 64, pos: 3, interleaved: true},
		{n: 40, heads: 8, headDim: 32, half: 16, pos: 2, interleaved: true},
	} {
		r := &backends.Rope{Half: c.half, Skip: c.skip, Interleaved: c.interleaved}
		for i := range (c.pos + c.n) * c.half {
			sin, cos := math.Sincos(float64(i) * 0.37)
			r.Sin, r.Cos = append(r.Sin, float32(sin)), append(r.Cos, float32(cos))
		}
		dim := c.heads * c.headDim
		x := Vectors(b.rng, c.n, dim, 0)
		v := b.upload(x, dim)
		b.be.RoPE(v, c.headDim, r, c.pos)
		b.wants(fmt.Sprintf("%+v", c), v, rope(x, dim, c.headDim, r, c.pos))
	}
}

func testAttend(b *bench) {
	for i, c := range []struct {
		heads, kvHeads, keyDim, valueDim int
		batches                          []int // positions stored and attended together
	}{
		{1, 1, 32, 32, []int{1, 1, 2}},
		{4, 2, 64, 32, []int{3, 1, 20}},
		{6, 1, 32, 64, []int{1, 9}},
		{2, 2, 32, 32, []int{254, 1, 1, 1, 40, 1}},
		{8, 4, 96, 96, []int{17}},
	} {
		for _, typ := range []backends.KVType{backends.KVF16, backends.KVF32, backends.KVQ8} {
			total := 0
			for _, n := range c.batches {
				total += n
			}
			shape := backends.KVShape{Layers: 2, Positions: total, Heads: c.kvHeads, KeyDim: c.keyDim, ValueDim: c.valueDim, Type: typ}
			kv, err := b.be.NewKV(shape)
			if err != nil {
				b.Fatal(err)
			}
			if kv.Shape() != shape {
				b.Fatalf("a cache of shape %+v says %+v", shape, kv.Shape())
			}
			sinks := Vectors(b.rng, 1, c.heads, 0)
			sinks[0] = 30 // above all scores of some queries
			hows := []backends.Attention{{Scale: 0.125}, {Scale: 0.125, Sinks: sinks},
				{Scale: 0.125, Window: 5}, {Scale: 0.125, Window: 1, Sinks: sinks}, {Scale: 0.125, Window: 40, Sinks: sinks}, {Scale: 0.125, Window: 270},
				{Scale: 0.125, Chunk: 6}, {Scale: 0.125, Chunk: 256}, {Scale: 0.125, Chunk: 280, Sinks: sinks}, {Scale: 0.125, Chunk: 20, Window: 9}}
			var keys, values []float32
			pos := 0
			for _, n := range c.batches {
				layer := 1
				k, v := Vectors(b.rng, n, c.kvHeads*c.keyDim, i), Vectors(b.rng, n, c.kvHeads*c.valueDim, i%2)
				q := Vectors(b.rng, n, c.heads*c.keyDim, i%3)
				if i == 0 {
					k[0], v[1], v[2] = 1e6, -7e4, 0x1p-25 // beyond f16, and below what is kept
				}
				kx, vx := b.upload(k, c.kvHeads*c.keyDim), b.upload(v, c.kvHeads*c.valueDim)
				b.be.Store(kv, 0, pos, b.upload(make([]float32, len(k)), c.kvHeads*c.keyDim), vx) // another layer, not to be seen
				b.be.Store(kv, layer, pos, kx, vx)
				y := b.vec(n, c.heads*c.valueDim)
				keys, values = append(keys, cached(typ, cleaned(k))...), append(values, cached(typ, cleaned(v))...)
				up := b.upload(q, c.heads*c.keyDim)
				for _, how := range hows {
					b.be.Attend(y, up, kv, layer, pos, &how)
					var want []float32
					for p := range n {
						for h := range c.heads {
							g := h / (c.heads / c.kvHeads)
							var hk, hv [][]float32
							for j := range pos + p + 1 {
								hk = append(hk, keys[(j*c.kvHeads+g)*c.keyDim:][:c.keyDim])
								hv = append(hv, values[(j*c.kvHeads+g)*c.valueDim:][:c.valueDim])
							}
							want = append(want, attend(q[(p*c.heads+h)*c.keyDim:][:c.keyDim], hk, hv, h, &how, nil)...)
						}
					}
					b.wants(fmt.Sprintf("%+v %v at %d, %+v", c, typ, pos, how), y, want)
				}
				pos += n
			}
		}
	}
}

func testExpertGroup(b *bench) {
	types := [][3]quant.Type{
		{quant.Q4_K, quant.Q4_K, quant.Q6_K}, {quant.Q8_0, quant.Q4_0, quant.Q8_0},
		{quant.F32, quant.BF16, quant.F16}, {quant.MXFP4, quant.MXFP4, quant.MXFP4}, {quant.NVFP4, quant.IQ4_XS, quant.Q5_1},
	}
	const dim, ff = 256, 512
	for _, c := range []struct{ n, k int }{{1, 1}, {1, 4}, {3, 2}, {60, 2}} {
		x := Vectors(b.rng, c.n, dim, 0)
		out := b.vec(c.n*c.k, dim)
		out.SetLen(c.n * c.k)
		before := Vectors(b.rng, c.n*c.k, dim, 0)
		src := b.upload(before, dim)
		all := make([]int32, c.n*c.k)
		for i := range all {
			all[i] = int32(i)
		}
		b.be.Gather(out, src, all)
		want := append([]float32(nil), cleaned(before)...)

		jobs := make([]backends.Job, len(types)+1) // the last without rows
		for i := range jobs {
			t := types[i%len(types)]
			e := &jobs[i].Expert
			*e = backends.Expert{Gate: b.matrix(t[0], ff, dim), Up: b.matrix(t[1], ff, dim), Down: b.matrix(t[2], dim, ff)}
			if i%2 == 1 { // gates about the limit, too
				e.Act, e.GateBias, e.UpBias = backends.ClampedSwiGLU, Vectors(b.rng, 1, ff, 0), Vectors(b.rng, 1, ff, 0)
				e.GateBias[0], e.UpBias[1], e.UpBias[2], e.GateBias[3] = 100, 100, -100, -100
			}
			if i > 2 {
				e.DownBias = Vectors(b.rng, 1, dim, 0)
			}
		}
		for r := range c.n * c.k {
			if r%7 == 3 {
				continue // nobody's: it stays
			}
			j := &jobs[b.rng.IntN(len(types))]
			if c.n == 60 {
				j = &jobs[r%2*3] // two large batches
			}
			j.Rows = append(j.Rows, int32(r))
			copy(want[r*dim:], expert(j.Expert, x[r/c.k*dim:][:dim]))
		}
		for i := range jobs {
			jobs[i].Fresh = b.rng.IntN(2) == 0
		}
		if bad := b.be.ExpertGroup(out, c.k, jobs, b.upload(x, dim)); bad != -1 {
			b.Errorf("%+v: job %d is refused, whose weights are in range", c, bad)
		}
		b.wants(fmt.Sprintf("%+v", c), out, want)
		b.refused(fmt.Sprintf("%+v", c), out, c.k, jobs, b.upload(x, dim))
	}
}

// refused damages rows of fresh experts: the first of them is refused, if it has work.
func (b *bench) refused(name string, out backends.Vec, k int, jobs []backends.Job, x backends.Vec) {
	damaged := slices.Clone(jobs)
	want := -1
	for i := len(jobs) - 1; i >= 0; i-- {
		j := &damaged[i]
		if j.Fresh = i < 4; !j.Fresh || b.rng.IntN(2) == 0 {
			continue
		}
		m := []*backends.Matrix{&j.Expert.Gate, &j.Expert.Up, &j.Expert.Down}[b.rng.IntN(3)]
		m.Data = bytes.Clone(m.Data)
		row, n := b.rng.IntN(m.Rows), m.Type.RowBytes(m.Cols)
		for p := range n { // a NaN, or a scale that is too large, in every type
			m.Data[row*n+p] = 0xff
		}
		if len(j.Rows) > 0 {
			want = i
		}
	}
	if bad := b.be.ExpertGroup(out, k, damaged, x); bad != want {
		b.Errorf("%s: job %d is refused, want %d", name, bad, want)
	}
	b.be.Read(make([]float32, out.Len()*out.Dim()), out) // to forget what came of it
}

func testCombine(b *bench) {
	for _, c := range []struct {
		n, k, dim int
		shared    bool
	}{{1, 1, 5, false}, {1, 8, 2048, true}, {7, 3, 100, true}, {9, 2, 1500, false}} {
		x, out := Vectors(b.rng, c.n, c.dim, 0), Vectors(b.rng, c.n*c.k, c.dim, 0)
		w, shared := Vectors(b.rng, c.n, c.k, 0), Vectors(b.rng, c.n, c.dim, 0)
		v := b.upload(x, c.dim)
		var s backends.Vec
		if c.shared {
			s = b.upload(shared, c.dim)
		}
		b.be.Combine(v, b.upload(out, c.dim), c.k, w, s)
		want := make([]float32, len(x))
		for i := range want {
			var y float32
			for j := range c.k {
				row := i/c.dim*c.k + j
				y = add(y, mul(w[row], out[row*c.dim+i%c.dim]))
			}
			if c.shared {
				y = add(y, shared[i])
			}
			want[i] = add(x[i], y)
		}
		b.wants(fmt.Sprintf("%+v", c), v, want)
	}
}

func testAdd(b *bench) {
	x, y := Vectors(b.rng, 3, 50, 0), Vectors(b.rng, 3, 50, 2)
	v := b.upload(x, 50)
	b.be.Add(v, b.upload(y, 50))
	want := make([]float32, len(x))
	for i := range want {
		want[i] = add(x[i], y[i])
	}
	b.wants("x + y", v, want)
}

func testScale(b *bench) {
	for i, n := range []int{1, 2, 45} {
		x := Vectors(b.rng, n, 700, i)
		v := b.upload(x, 700)
		b.be.Scale(v, 0.22)
		want := cleaned(x)
		for i := range want {
			want[i] = mul(want[i], 0.22)
		}
		b.wants(fmt.Sprintf("%d positions", n), v, want)
	}
}

func testSigmoidGate(b *bench) {
	for _, c := range []struct{ n, dim, gates int }{{1, 2048, 1}, {3, 100, 1}, {1, 96, 96}, {7, 1500, 1500}, {5, 96, 3}, {50, 64, 1}} {
		x, g := Vectors(b.rng, c.n, c.dim, 0), Vectors(b.rng, c.n, c.gates, 0)
		for i := range g {
			g[i] = mul(g[i], []float32{1, 8, 60}[i%3]) // to both ends of exp
		}
		v := b.upload(x, c.dim)
		b.be.SigmoidGate(v, b.upload(g, c.gates))
		want := make([]float32, len(x))
		for i := range want {
			want[i] = mul(x[i], sigmoid(g[i/(c.dim/c.gates)]))
		}
		b.wants(fmt.Sprintf("%+v", c), v, want)
	}
}

func testScaleRows(b *bench) {
	for _, c := range []struct{ n, dim int }{{1, 5}, {3, 2048}, {70, 100}} {
		x, f := Vectors(b.rng, c.n, c.dim, 2), Vectors(b.rng, 1, c.n, 0)
		f[0] = 1
		want := cleaned(x)
		for i := range want {
			want[i] = mul(want[i], f[i/c.dim])
		}
		v, y := b.upload(x, c.dim), b.vec(c.n, c.dim)
		b.be.ScaleRows(y, v, f)
		b.wants(fmt.Sprintf("%+v into another", c), y, want)
		b.be.ScaleRows(v, v, f)
		b.wants(fmt.Sprintf("%+v in place", c), v, want)
	}
}

// testActivationError drives each step that reads activations out of range. The
// error comes once, the backend works on.
func testActivationError(b *bench) {
	const dim = 256
	weight := Vectors(b.rng, 1, dim, 3)
	kv, err := b.be.NewKV(backends.KVShape{Layers: 1, Positions: 4, Heads: 1, KeyDim: dim, ValueDim: dim, Type: backends.KVF16})
	if err != nil {
		b.Fatal(err)
	}
	good := b.upload(Vectors(b.rng, 1, dim, 0), dim)
	b.be.Store(kv, 0, 0, good, good)
	b.be.Store(kv, 0, 1, good, good)
	set, err := b.be.NewKeys(1, 1)
	if err != nil {
		b.Fatal(err)
	}
	half, one := b.matrix(quant.Q5_0, dim/2, dim/2), b.upload([]float32{1e-10}, 1)
	y := b.vec(1, dim)
	matMul := func(t quant.Type) func(backends.Vec) {
		w := []backends.Linear{{Matrix: b.matrix(t, dim, dim)}}
		return func(x backends.Vec) { b.be.MatMul([]backends.Vec{y}, w, x) }
	}
	e := backends.Expert{Gate: b.matrix(quant.Q8_0, dim, dim), Up: b.matrix(quant.Q8_0, dim, dim), Down: b.matrix(quant.Q8_0, dim, dim)}
	for _, c := range []struct {
		step string
		do   func(x backends.Vec)
	}{
		{"MatMul", matMul(quant.Q8_0)}, {"MatMul", matMul(quant.Q4_K)}, {"MatMul", matMul(quant.F32)},
		{"RMSNorm", func(x backends.Vec) { b.be.RMSNorm(y, x, weight, 1e-6) }},
		{"Store", func(x backends.Vec) { b.be.Store(kv, 0, 1, x, good) }},
		{"Store", func(x backends.Vec) { b.be.Store(kv, 0, 1, good, x) }},
		{"LayerNorm", func(x backends.Vec) { b.be.LayerNorm(y, x, weight, weight, 1e-6) }},
		{"MatMulHeads", func(x backends.Vec) { b.be.MatMulHeads(y, []backends.Matrix{half, half}, x) }},
		{"ChooseKeys", func(x backends.Vec) { b.be.ChooseKeys(set, x, one, kv, 0, 1) }},
		{"Attend", func(x backends.Vec) { b.be.Attend(y, x, kv, 0, 0, &backends.Attention{Scale: 1}) }},
		{"DeltaNet", func(x backends.Vec) { b.deltaOf(x, nil) }},
		{"DeltaNet", func(x backends.Vec) { b.deltaOf(nil, x) }},
		{"ExpertGroup", func(x backends.Vec) {
			y.SetLen(1)
			b.be.ExpertGroup(y, 1, []backends.Job{{Expert: e, Rows: []int32{0}}}, x)
		}},
	} {
		for _, bad := range []float32{float32(math.NaN()), float32(math.Inf(-1)), -0x1.000002p50} {
			x := Vectors(b.rng, 1, dim, 0)
			x[b.rng.IntN(dim)] = bad
			c.do(b.upload(x, dim))
			got := make([]float32, dim)
			var want *backends.ActivationError
			if err := b.be.Read(got, good); !errors.As(err, &want) || want.Step != c.step {
				b.Errorf("%s of %g: Read says %v", c.step, bad, err)
			}
			if err := b.be.Read(got, good); err != nil {
				b.Errorf("%s of %g: the error came twice: %v", c.step, bad, err)
			}
		}
		if c.step == "ExpertGroup" {
			continue // whose hidden vector would be out of range, and rightly refused
		}
		x := Vectors(b.rng, 1, dim, 0)
		x[7] = 0x1p50
		c.do(b.upload(x, dim))
		if err := b.be.Read(make([]float32, dim), good); err != nil {
			b.Errorf("%s of 2^50: %v", c.step, err)
		}
	}
}
