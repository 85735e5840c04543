package gpu

import (
	"encoding/binary"
	"errors"
	"math"
	"slices"
	"testing"
	"unsafe"

	"sluice/backends"
	"sluice/backends/backendtest"
	"sluice/backends/cpu"
	"sluice/backends/held"
)

// The kernels of dense.cu pass the suite of backends.
func TestSteps(t *testing.T) {
	devices(t, func(t *testing.T, d *Device) {
		backendtest.Run(t, func() backends.Backend {
			ref, err := cpu.New(cpu.Options{Threads: 1})
			if err != nil {
				t.Fatal(err)
			}
			b := &stepper{t: t, d: d, ref: ref}
			b.top = b.alloc(4)
			b.fail.at = b.top.at
			return b
		})
	})
}

// A stepper is a backend whose steps are launches of kernels, each waited for; all
// of its memory is the host's. What there is no kernel for is the CPU's.
type stepper struct {
	t    *testing.T
	d    *Device
	ref  *cpu.Backend
	all  []*buffer
	temp []*buffer // of a step
	top  *buffer
	fail failure
	name []string // of steps, by number less one
}

type devVec struct {
	b           *buffer
	n, dim, cap int
}

func (v *devVec) Len() int { return v.n }
func (v *devVec) Dim() int { return v.dim }
func (v *devVec) SetLen(n int) {
	if n < 0 || n > v.cap {
		panic("length")
	}
	v.n = n
}
func (v *devVec) floats() []float32 { return slice[float32](v.b, 0, v.n*v.dim) }

type devKV struct {
	shape       backends.KVShape
	code, scale [2]*buffer // keys, values
}

func (c *devKV) Shape() backends.KVShape { return c.shape }

type devKeys struct {
	n, most     int
	keys, count *buffer
}

func (k *devKeys) Len() int  { return k.n }
func (k *devKeys) Most() int { return k.most }

type devDelta struct {
	shape  backends.DeltaShape
	layers []devDeltaLayer
}

type devDeltaLayer struct {
	heads, past [2]*buffer
	log         [3]*buffer
	after       int
	start, end  int
}

func (d *devDelta) Shape() backends.DeltaShape { return d.shape }

func (b *stepper) alloc(size int) *buffer {
	m, err := b.d.hostBuffer(int64(max(size, 4)))
	if err != nil {
		b.t.Fatal(err)
	}
	clear(m.host)
	b.all = append(b.all, m)
	return m
}

// put is memory with some data, for one step.
func (b *stepper) put(data []byte) uint64 {
	m, err := b.d.hostBuffer(int64(max(len(data), 4)))
	if err != nil {
		b.t.Fatal(err)
	}
	copy(m.host, data)
	b.temp = append(b.temp, m)
	return m.at
}

func (b *stepper) room(size int) uint64 { return b.put(make([]byte, size)) }

func (b *stepper) floats(x []float32) uint64 {
	if x == nil {
		return 0
	}
	return b.put(backendtest.Bytes(x))
}

func (b *stepper) ints(x []int32) uint64 {
	var out []byte
	for _, v := range x {
		out = binary.LittleEndian.AppendUint32(out, uint32(v))
	}
	return b.put(out)
}

// number is what a step leaves behind that fails.
func (b *stepper) number(name string) failure {
	i := slices.Index(b.name, name)
	if i < 0 {
		i, b.name = len(b.name), append(b.name, name)
	}
	return failure{at: b.fail.at, step: uint32(i + 1)}
}

func (b *stepper) check(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

// wait ends a step.
func (b *stepper) wait() {
	defer b.d.enter()()
	b.check(b.d.check("stream synchronize", b.d.dr.f.waitStream.call(b.d.kernels)))
	for _, m := range b.temp {
		b.d.drop(m)
	}
	b.temp = b.temp[:0]
}

func go1[T any](b *stepper, name string, x, y, z, threads int, params T) {
	b.t.Helper()
	if x == 0 || y == 0 || z == 0 {
		return
	}
	defer b.d.enter()()
	b.check(step(b.d, name, [3]int{x, y, z}, threads, params))
}

func per(n, each int) int { return (n + each - 1) / each }

func (b *stepper) Name() string { return "steps" }

func (b *stepper) NewVec(capacity, dim int) (backends.Vec, error) {
	return &devVec{b: b.alloc(4 * capacity * dim), dim: dim, cap: capacity}, nil
}

func (b *stepper) NewKV(s backends.KVShape) (backends.KV, error) {
	c := &devKV{shape: s}
	for i, dim := range []int{s.KeyDim, s.ValueDim} {
		if i == 1 && (s.Latent || dim == 0) {
			c.code[1], c.scale[1] = c.code[0], c.scale[0]
			break
		}
		n := s.Layers * s.Positions * s.Heads * dim
		c.code[i], c.scale[i] = b.alloc(n*map[backends.KVType]int{backends.KVF16: 2, backends.KVF32: 4, backends.KVQ8: 1}[s.Type]), b.alloc(n/32*4)
	}
	return c, nil
}

// plane is where the keys or values of a layer are.
func (c *devKV) plane(i, layer int) planeParams {
	dim := []int{c.shape.KeyDim, c.shape.ValueDim}[i]
	if c.shape.Latent {
		dim = c.shape.KeyDim
	}
	n := uint64(layer * c.shape.Positions * c.shape.Heads * dim)
	return planeParams{code: c.code[i].at + n*map[backends.KVType]uint64{backends.KVF16: 2, backends.KVF32: 4, backends.KVQ8: 1}[c.shape.Type], scale: c.scale[i].at + n/32*4, width: uint32(dim), kind: uint32(c.shape.Type)}
}

func (b *stepper) NewKeys(capacity, most int) (backends.Keys, error) {
	return &devKeys{most: most, keys: b.alloc(4 * capacity * most), count: b.alloc(4 * capacity)}, nil
}

func (b *stepper) NewDelta(s backends.DeltaShape) (backends.Delta, error) {
	d := &devDelta{shape: s}
	for range s.Layers {
		var l devDeltaLayer
		for i := range 2 {
			l.heads[i], l.past[i] = b.alloc(4*s.ValueHeads*s.ValueDim*s.KeyDim), b.alloc(4*(s.Taps-1)*s.Channels())
		}
		for i, n := range []int{s.Channels(), s.ValueHeads, s.ValueHeads} {
			l.log[i] = b.alloc(4 * backends.DeltaReach * n)
		}
		d.layers = append(d.layers, l)
	}
	return d, nil
}

func (b *stepper) Embed(x backends.Vec, table backends.Matrix, ids []int32) {
	v, err := b.ref.NewVec(max(1, len(ids)), table.Cols)
	b.check(err)
	b.ref.Embed(v, table, ids)
	to := x.(*devVec)
	to.SetLen(len(ids))
	b.check(b.ref.Read(to.floats(), v))
}

func (b *stepper) norm(step string, y, x backends.Vec, weight, bias []float32, eps float32) {
	to, from, n := y.(*devVec), x.(*devVec), len(weight)
	to.SetLen(from.n)
	b.rows(step, to.b.at, from.b.at, from.n*from.dim/n, weight, bias, eps)
	b.wait()
}

func (b *stepper) rows(step string, y, x uint64, runs int, weight, bias []float32, eps float32) {
	n := len(weight)
	p := normParams{y: y, x: x, weight: b.floats(weight), bias: b.floats(bias), fail: b.number(step), n: uint32(n), runs: uint32(runs), inv: 1 / float32(n), eps: eps}
	grid := runs
	if n <= shortNorm {
		grid = per(runs, 16)
	}
	go1(b, "norm", grid, 1, 1, 256, p)
}

func (b *stepper) RMSNorm(y, x backends.Vec, weight []float32, eps float32) {
	b.norm("RMSNorm", y, x, weight, nil, eps)
}

func (b *stepper) LayerNorm(y, x backends.Vec, weight, bias []float32, eps float32) {
	b.norm("LayerNorm", y, x, weight, bias, eps)
}

// product is a matrix times rows of x [count, cols], which begin at an address; row i
// becomes row i of y, stride floats apart.
func (b *stepper) product(step string, y uint64, stride int, w *backends.Linear, x uint64, count int, rowOf func(i int) int, total int) {
	if count == 0 {
		return
	}
	d := b.d
	f := formAt(b.room(int(held.FormBytes(total*w.Cols))), total*w.Cols)
	top := b.room(4)
	leave := d.enter()
	b.check(d.quantize(w.Type, f, x, 0, top, total*w.Cols, 0))
	leave()
	code := b.planes(w)
	job := rowsJob{W: code, Y: y, Bias: b.floats(w.Bias), N: uint32(count), Stride: uint32(stride)}
	var index []int32
	for i := range count {
		index = append(index, int32(rowOf(i)), int32(i))
	}
	jobs := b.put(unsafe.Slice((*byte)(unsafe.Pointer(&job)), unsafe.Sizeof(job)))
	leave = d.enter()
	defer leave()
	b.check(d.multiply(w.Type, rowsParams{jobs: jobs, index: b.ints(index), code: f.Code, scale: f.Scale, sum: f.Sum, rows: uint32(w.Rows), cols: uint32(w.Cols)}, 1, count))
	b.check(d.check("stream synchronize", d.dr.f.waitStream.call(d.kernels)))
	for _, m := range b.temp {
		if m.at == top && *at[uint32](m, 0) != 0 && *at[uint32](b.top, 0) == 0 {
			*at[uint32](b.top, 0) = b.number(step).step
		}
	}
}

// planes is a matrix as kernels read it.
func (b *stepper) planes(w *backends.Linear) uint64 {
	planes := planesOf(w.Type)
	if planes == nil {
		return b.put(w.Data)
	}
	_, block := w.Type.Block()
	out := make([]byte, matrixBytes(w.Type, w.Rows, w.Cols))
	at := 0
	for _, f := range planes {
		at = int(even(int64(at)))
		for i := 0; i < len(w.Data); i += block {
			at += copy(out[at:], w.Data[i+f.offset:][:f.size])
		}
	}
	return b.put(out)
}

func (b *stepper) MatMul(y []backends.Vec, w []backends.Linear, x backends.Vec) {
	from := x.(*devVec)
	for i := range w {
		to := y[i].(*devVec)
		to.SetLen(from.n)
		if !Supports(w[i].Type) {
			in := b.onHost(from)
			out, err := b.ref.NewVec(max(1, from.n), w[i].Rows)
			b.check(err)
			b.ref.MatMul([]backends.Vec{out}, w[i:i+1], in)
			b.check(b.ref.Read(to.floats(), out))
			continue
		}
		b.product("MatMul", to.b.at, to.dim, &w[i], from.b.at, from.n, func(i int) int { return i }, from.n)
		b.wait()
	}
}

func (b *stepper) MatMulHeads(y backends.Vec, w []backends.Matrix, x backends.Vec) {
	to, from, heads := y.(*devVec), x.(*devVec), len(w)
	to.SetLen(from.n)
	cols, rows, xd, yd := w[0].Cols, w[0].Rows, from.dim/heads, to.dim/heads
	if from.n == 0 {
		return
	}
	in := b.alloc(4 * from.n * heads * cols)
	b.copyRuns(in.at, from.b.at, runsParams{n: uint32(from.n), groups: uint32(heads), run: uint32(cols), toRow: uint32(heads * cols), toGroup: uint32(cols), fromRow: uint32(from.dim), fromGroup: uint32(xd)})
	b.copyRuns(to.b.at+uint64(4*rows), from.b.at+uint64(4*cols), runsParams{n: uint32(from.n), groups: uint32(heads), run: uint32(xd - cols), toRow: uint32(to.dim), toGroup: uint32(yd), fromRow: uint32(from.dim), fromGroup: uint32(xd)})
	b.wait()
	for h := range w {
		l := backends.Linear{Matrix: w[h]}
		if !Supports(w[h].Type) {
			a, c := &devVec{b: b.alloc(4 * from.n * cols), n: from.n, dim: cols, cap: from.n}, &devVec{b: b.alloc(4 * from.n * rows), dim: rows, cap: from.n}
			for p := range from.n {
				copy(a.floats()[p*cols:], slice[float32](in, 4*(p*heads+h)*cols, cols))
			}
			b.MatMul([]backends.Vec{c}, []backends.Linear{l}, a)
			for p := range from.n {
				copy(to.floats()[p*to.dim+h*yd:], c.floats()[p*rows:(p+1)*rows])
			}
			continue
		}
		b.product("MatMulHeads", to.b.at+uint64(4*h*yd), to.dim, &l, in.at, from.n, func(p int) int { return p*heads + h }, from.n*heads)
		b.wait()
	}
}

func (b *stepper) copyRuns(to, from uint64, p runsParams) {
	p.to, p.from = to, from
	go1(b, "runs", per(int(p.n*p.groups*p.run), 256), 1, 1, 256, p)
}

func (b *stepper) RoPE(x backends.Vec, headDim int, r *backends.Rope, pos int) {
	v := x.(*devVec)
	p := ropeParams{x: v.b.at, cos: b.floats(r.Cos), sin: b.floats(r.Sin), rows: uint32(v.n), dim: uint32(v.dim), headDim: uint32(headDim), half: uint32(r.Half), skip: uint32(r.Skip), pos: uint32(pos)}
	if r.Interleaved {
		p.pairs = 1
	}
	go1(b, "rope", per(v.n*v.dim/headDim*r.Half, 256), 1, 1, 256, p)
	b.wait()
}

func (b *stepper) Store(kv backends.KV, layer, pos int, k, v backends.Vec) {
	c, kx := kv.(*devKV), k.(*devVec)
	s := &c.shape
	store := func(x *devVec, i, from, dim int) {
		at := c.plane(i, 0)
		go1(b, "store", per(x.n*x.dim, 256), 1, 1, 256, storeParams{x: x.b.at, code: at.code, scale: at.scale, fail: b.number("Store"), row: uint64(layer*s.Heads*s.Positions + pos), n: uint32(x.n), heads: uint32(s.Heads), dim: uint32(dim),
			width: at.width, from: uint32(from), positions: uint32(s.Positions), kind: at.kind})
	}
	switch {
	case s.Latent:
		store(kx, 0, s.ValueDim, s.KeyDim-s.ValueDim)
		store(v.(*devVec), 0, 0, s.ValueDim)
	case v == nil:
		store(kx, 0, 0, s.KeyDim)
	default:
		store(kx, 0, 0, s.KeyDim)
		store(v.(*devVec), 1, 0, s.ValueDim)
	}
	b.wait()
}

func (b *stepper) ChooseKeys(keys backends.Keys, q, w backends.Vec, kv backends.KV, layer, pos int) {
	set, qx, wx, c := keys.(*devKeys), q.(*devVec), w.(*devVec), kv.(*devKV)
	set.n = qx.n
	all := pos + qx.n
	p := indexParams{q: qx.b.at, w: wx.b.at, score: b.room(4 * qx.n * all), keys: set.keys.at, count: set.count.at, k: c.plane(0, layer), fail: b.number("ChooseKeys"), n: uint32(qx.n), pos: uint32(pos), heads: uint32(wx.dim), most: uint32(set.most), stride: uint32(all)}
	if all > set.most {
		go1(b, "indexScores", per(all, scoreKeys), qx.n, 1, 256, p)
	}
	go1(b, "choose", qx.n, 1, 1, 256, p)
	b.wait()
}

func (b *stepper) Attend(y, q backends.Vec, kv backends.KV, layer, pos int, how *backends.Attention) {
	to, qx, c := y.(*devVec), q.(*devVec), kv.(*devKV)
	s := &c.shape
	to.SetLen(qx.n)
	heads, end := qx.dim/s.KeyDim, pos+qx.n
	first := how.First(pos) / 256
	p := attendParams{q: qx.b.at, y: to.b.at, k: c.plane(0, layer), v: c.plane(1, layer), sinks: b.floats(how.Sinks), fail: b.number("Attend"),
		n: uint32(qx.n), pos: uint32(pos), heads: uint32(heads), kvHeads: uint32(s.Heads), positions: uint32(s.Positions), dim: uint32(s.ValueDim),
		window: uint32(how.Window), chunk: uint32(how.Chunk), stride: uint32(end), first: uint32(first), chunks: uint32(per(end, 256) - first), factor: how.Scale}
	slots := end - 256*first
	if set, ok := how.Keys.(*devKeys); ok {
		p.keys, p.count, p.most = set.keys.at, set.count.at, uint32(set.most)
		slots = min(end, set.most)
	}
	p.score, p.part = b.room(4*qx.n*heads*end), b.room(4*qx.n*heads*int(p.chunks)*s.ValueDim)
	runs := s.Heads * per(heads/s.Heads, scoreQueries)
	go1(b, "attendScores", per(slots, scoreKeys), runs, qx.n, 256, p)
	go1(b, "attendSoftmax", heads, qx.n, 1, 256, p)
	go1(b, "attendWeigh", int(p.chunks), runs, qx.n, 128, p)
	if p.chunks > 1 {
		go1(b, "attendSum", per(qx.n*heads*s.ValueDim, 256), 1, 1, 256, p)
	}
	b.wait()
}

// ExpertGroup is the CPU's: TestExperts has the device's.
func (b *stepper) ExpertGroup(out backends.Vec, k int, jobs []backends.Job, x backends.Vec) {
	to := out.(*devVec)
	y, in := b.onHost(to), b.onHost(x.(*devVec))
	b.ref.ExpertGroup(y, k, jobs, in)
	var failed *backends.ActivationError
	if err := b.ref.Read(to.floats(), y); errors.As(err, &failed) {
		*at[uint32](b.top, 0) = b.number(failed.Step).step
	} else {
		b.check(err)
	}
}

// onHost is a copy of a vector for the CPU.
func (b *stepper) onHost(x *devVec) backends.Vec {
	v, err := b.ref.NewVec(max(1, x.n), x.dim)
	b.check(err)
	v.SetLen(x.n)
	rows := make([]int32, x.n)
	for i := range rows {
		rows[i] = int32(i)
	}
	b.ref.Put(v, rows, x.floats())
	return v
}

func (b *stepper) Combine(x, out backends.Vec, k int, weights []float32, shared backends.Vec) {
	to, from := x.(*devVec), out.(*devVec)
	p := combineParams{x: to.b.at, out: from.b.at, weights: b.floats(weights), n: uint32(to.n), k: uint32(k), dim: uint32(to.dim)}
	if shared != nil {
		p.shared = shared.(*devVec).b.at
	}
	go1(b, "combine", per(to.n*to.dim, 256), 1, 1, 256, p)
	b.wait()
}

func (b *stepper) each(n int, p eachParams) {
	p.n = uint32(n)
	go1(b, "each", per(n, 256), 1, 1, 256, p)
	b.wait()
}

func (b *stepper) Add(x, y backends.Vec) {
	to := x.(*devVec)
	b.each(to.n*to.dim, eachParams{y: to.b.at, x: y.(*devVec).b.at, how: eachAdd})
}

func (b *stepper) ScaleRows(y, x backends.Vec, f []float32) {
	to, from := y.(*devVec), x.(*devVec)
	to.SetLen(from.n)
	b.each(to.n*to.dim, eachParams{y: to.b.at, x: from.b.at, f: b.floats(f), dim: uint32(to.dim), how: eachScale})
}

func (b *stepper) Scale(x backends.Vec, f float32) {
	to := x.(*devVec)
	b.each(to.n*to.dim, eachParams{y: to.b.at, x: to.b.at, by: f, how: eachScale})
}

func (b *stepper) SigmoidGate(x, g backends.Vec) {
	to, from := x.(*devVec), g.(*devVec)
	b.each(to.n*to.dim, eachParams{y: to.b.at, x: from.b.at, dim: uint32(to.dim / from.dim), how: eachSigmoid})
}

func (b *stepper) Gather(y, x backends.Vec, rows []int32) {
	to, from := y.(*devVec), x.(*devVec)
	to.SetLen(len(rows))
	b.copyRuns(to.b.at, from.b.at, runsParams{fromRows: b.ints(rows), n: uint32(len(rows)), groups: 1, run: uint32(to.dim), toRow: uint32(to.dim), fromRow: uint32(to.dim)})
	b.wait()
}

func (b *stepper) Put(y backends.Vec, rows []int32, data []float32) {
	to := y.(*devVec)
	b.copyRuns(to.b.at, b.floats(data), runsParams{toRows: b.ints(rows), n: uint32(len(rows)), groups: 1, run: uint32(to.dim), toRow: uint32(to.dim), fromRow: uint32(to.dim)})
	b.wait()
}

func (b *stepper) Concat(y, a, c backends.Vec) {
	to, l, r := y.(*devVec), a.(*devVec), c.(*devVec)
	to.SetLen(l.n)
	b.copyRuns(to.b.at, l.b.at, runsParams{n: uint32(l.n), groups: 1, run: uint32(l.dim), toRow: uint32(to.dim), fromRow: uint32(l.dim)})
	b.copyRuns(to.b.at+uint64(4*l.dim), r.b.at, runsParams{n: uint32(l.n), groups: 1, run: uint32(r.dim), toRow: uint32(to.dim), fromRow: uint32(r.dim)})
	b.wait()
}

func (b *stepper) Split(y []backends.Vec, runs []int, x backends.Vec) {
	from, sum := x.(*devVec), 0
	for _, r := range runs {
		sum += r
	}
	groups, behind := from.dim/sum, 0
	filled := map[backends.Vec]int{}
	for i, r := range runs {
		to := y[i].(*devVec)
		to.SetLen(from.n)
		b.copyRuns(to.b.at+uint64(4*filled[to]), from.b.at+uint64(4*behind), runsParams{n: uint32(from.n), groups: uint32(groups), run: uint32(r), toRow: uint32(to.dim), toGroup: uint32(r), fromRow: uint32(from.dim), fromGroup: uint32(sum)})
		behind += r
		filled[to] += groups * r
	}
	b.wait()
}

func (b *stepper) DeltaNet(y, qkv, z, a, strength backends.Vec, state backends.Delta, layer, pos int, w *backends.DeltaNet) {
	d, to, in, gates := state.(*devDelta), y.(*devVec), qkv.(*devVec), z.(*devVec)
	s, l := &d.shape, &d.layers[layer]
	n, channels, heads := in.n, s.Channels(), s.ValueHeads
	to.SetLen(n)
	run := func(n int, qkv, a, bb uint64, from, into int, y uint64) {
		p := deltaParams{qkv: qkv, a: a, b: bb, past: l.past[from].at, conv: b.floats(w.Conv), rate: b.floats(w.A), bias: b.floats(w.Bias), out: b.room(4 * n * channels), decay: b.room(4 * n * heads), beta: b.room(4 * n * heads),
			next: l.past[into].at, from: l.heads[from].at, to: l.heads[into].at, y: y, fail: b.number("DeltaNet"), n: uint32(n), keyHeads: uint32(s.KeyHeads), valueHeads: uint32(heads), keyDim: uint32(s.KeyDim), valueDim: uint32(s.ValueDim), taps: uint32(s.Taps),
			unit: float32(1 / math.Sqrt(float64(s.KeyDim)))}
		if w.Tiled {
			p.tiled = 1
		}
		go1(b, "deltaInputs", 2*s.KeyHeads+heads, n, 1, 128, p)
		go1(b, "deltaSteps", heads*s.ValueDim/16, 1, 1, 256, p)
	}
	switch {
	case pos == l.end:
	case pos == l.start:
		l.after ^= 1
	case pos == 0:
		clear(l.heads[l.after].host)
		clear(l.past[l.after].host)
	default:
		run(pos-l.start, l.log[0].at, l.log[1].at, l.log[2].at, l.after^1, l.after, 0)
		b.wait()
	}
	rows := []*devVec{in, a.(*devVec), strength.(*devVec)}
	if n <= backends.DeltaReach {
		for i, v := range rows {
			copy(slice[float32](l.log[i], 0, n*v.dim), v.floats())
		}
	}
	run(n, rows[0].b.at, rows[1].b.at, rows[2].b.at, l.after, l.after^1, to.b.at)
	b.rows("DeltaNet", to.b.at, to.b.at, n*heads, w.Norm, nil, w.Eps)
	for _, v := range gates.floats() {
		if !(math.Abs(float64(v)) <= 0x1p50) && *at[uint32](b.top, 0) == 0 {
			*at[uint32](b.top, 0) = b.number("DeltaNet").step
		}
	}
	b.each(n*to.dim, eachParams{y: to.b.at, x: gates.b.at, how: eachSiLU})
	l.after ^= 1
	l.start, l.end = pos, pos+n
}

func (b *stepper) Read(dst []float32, v backends.Vec) error {
	copy(dst, v.(*devVec).floats())
	if n := *at[uint32](b.top, 0); n != 0 {
		*at[uint32](b.top, 0) = 0
		return &backends.ActivationError{Step: b.name[n-1]}
	}
	return nil
}

func (b *stepper) Close() error {
	for _, m := range b.all {
		b.d.drop(m)
	}
	return b.ref.Close()
}
