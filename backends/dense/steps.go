package dense

import (
	"fmt"
	"slices"

	"sluice/backends"
	"sluice/backends/held"
	"sluice/internal/quant"
)

// misuse is a panic with what a step was given.
func misuse(step, format string, args ...any) {
	panic(fmt.Sprintf("backends/dense: "+step+": "+format, args...))
}

// Embed is backends.Backend's. The table is the host's: a token needs one row of it.
func (b *Backend) Embed(x backends.Vec, table backends.Matrix, ids []int32) {
	v := x.(*vec)
	v.SetLen(len(ids))
	if t := b.onHost(v); t != nil {
		b.host.Embed(t, table, ids)
		b.fromHost(v)
	}
}

// RMSNorm is backends.Backend's.
func (b *Backend) RMSNorm(y, x backends.Vec, weight []float32, eps float32) {
	b.norm("RMSNorm", stepRMSNorm, y, x, weight, nil, eps)
}

// LayerNorm is backends.Backend's.
func (b *Backend) LayerNorm(y, x backends.Vec, weight, bias []float32, eps float32) {
	if len(bias) != len(weight) {
		misuse("LayerNorm", "weight of %d, bias of %d", len(weight), len(bias))
	}
	b.norm("LayerNorm", stepLayerNorm, y, x, weight, bias, eps)
}

func (b *Backend) norm(name string, step uint32, y, x backends.Vec, weight, bias []float32, eps float32) {
	to, from, n := y.(*vec), x.(*vec), len(weight)
	if n == 0 || from.dim%n != 0 || to.dim != from.dim {
		misuse(name, "x of %d, weight of %d, y of %d", from.dim, n, to.dim)
	}
	to.SetLen(from.n)
	b.normRuns(step, to.at, from.at, from.n*from.dim/n, weight, bias, eps)
}

func (b *Backend) normRuns(step uint32, y, x uint64, runs int, weight, bias []float32, eps float32) {
	n := len(weight)
	groups := runs
	if n <= shortNorm {
		groups = per(runs, 16)
	}
	launch(b, "normalize", groups, 1, 1, normParams{y: y, x: x, weight: b.constant(weight), bias: b.constant(bias), fail: b.failure(step), n: uint32(n), runs: uint32(runs), inv: 1 / float32(n), eps: eps})
}

// MatMul is backends.Backend's.
func (b *Backend) MatMul(y []backends.Vec, w []backends.Linear, x backends.Vec) {
	from := x.(*vec)
	if len(y) != len(w) {
		misuse("MatMul", "%d results of %d matrices", len(y), len(w))
	}
	for i := range w {
		to := y[i].(*vec)
		if w[i].Cols != from.dim || w[i].Rows != to.dim || to == from {
			misuse("MatMul", "x of %d, a matrix of %d x %d, y of %d, which must be two vectors", from.dim, w[i].Rows, w[i].Cols, to.dim)
		}
		to.SetLen(from.n)
	}
	if from.n == 0 {
		return
	}
	given := false // to the host
	var have formOf
	for i := range w {
		to, at := y[i].(*vec), b.matrix(&w[i].Matrix)
		if at == 0 && w[i].Rows > 0 {
			if b.failed != nil {
				return
			}
			if !given {
				given = true
				b.toHost(from)
			}
			if t := b.onHost(to); t != nil && from.twin != nil {
				b.host.MatMul([]backends.Vec{t}, w[i:i+1], from.twin)
				b.fromHost(to)
			}
			continue
		}
		b.quantize(&have, w[i].Type, from.at, from.n*from.dim, stepMatMul)
		b.multiply(Product{Type: w[i].Type, Rows: w[i].Rows, Cols: w[i].Cols, W: at, Bias: b.constant(w[i].Bias), In: have.form, Step: 1, N: from.n, Y: to.at, Stride: to.dim})
	}
}

// formOf is which form of a step's input has been made.
type formOf struct {
	made  bool
	block int
	mixed bool
	form  held.Form
}

// quantize makes the form that a type's rows multiply, unless it is the one there is.
func (b *Backend) quantize(have *formOf, t quant.Type, x uint64, floats int, step uint32) {
	mixed := t == quant.MXFP4 || t == quant.IQ4_NL // whose codes a driver may lay otherwise
	if b.failed != nil || have.made && have.block == t.ActBlock() && have.mixed == mixed {
		return
	}
	*have = formOf{true, t.ActBlock(), mixed, held.FormAt(b.need(&b.form, held.FormBytes(floats)), floats)}
	if b.failed == nil {
		b.note(b.d.Quantize(t, have.form, x, 0, 0, floats, b.failure(step)))
	}
}

func (b *Backend) multiply(p Product) {
	if b.failed == nil && p.N > 0 && p.Rows > 0 {
		b.product = p
		b.note(b.d.Multiply(&b.product))
	}
}

// MatMulHeads is backends.Backend's.
func (b *Backend) MatMulHeads(y backends.Vec, w []backends.Matrix, x backends.Vec) {
	to, from, heads := y.(*vec), x.(*vec), len(w)
	if heads == 0 || from.dim%heads != 0 || to.dim%heads != 0 || to == from {
		misuse("MatMulHeads", "%d heads, x of %d, y of %d, which must be two vectors", heads, from.dim, to.dim)
	}
	to.SetLen(from.n)
	n, cols, rows, xd, yd := from.n, w[0].Cols, w[0].Rows, from.dim/heads, to.dim/heads
	onHost := false
	for h := range w {
		if m := &w[h]; m.Cols != cols || m.Rows != rows || cols > xd || xd-cols != yd-rows {
			misuse("MatMulHeads", "heads of %d to heads of %d by a matrix of %d x %d, the first %d x %d", xd, yd, m.Rows, m.Cols, rows, cols)
		}
		onHost = b.matrix(&w[h]) == 0 && rows > 0 || onHost
	}
	switch {
	case n == 0 || b.failed != nil:
		return
	case onHost:
		b.toHost(from)
		if t := b.onHost(to); t != nil && from.twin != nil {
			b.host.MatMulHeads(t, w, from.twin)
			b.fromHost(to)
		}
		return
	}
	in := b.need(&b.heads, 4*int64(n)*int64(heads)*int64(cols))
	every := runsParams{n: uint32(n), groups: uint32(heads), fromRow: uint32(from.dim), fromGroup: uint32(xd)}
	p := every
	p.to, p.from, p.run, p.toRow, p.toGroup = in, from.at, uint32(cols), uint32(heads*cols), uint32(cols)
	b.runs(p)
	p = every
	p.to, p.from, p.run, p.toRow, p.toGroup = to.at+4*uint64(rows), from.at+4*uint64(cols), uint32(xd-cols), uint32(to.dim), uint32(yd)
	b.runs(p)
	var have formOf
	for h := range w {
		m := &w[h]
		b.quantize(&have, m.Type, in, n*heads*cols, stepMatMulHeads)
		b.multiply(Product{Type: m.Type, Rows: rows, Cols: cols, W: b.matrix(m), In: have.form, First: h, Step: heads, N: n, Y: to.at + 4*uint64(h*yd), Stride: to.dim})
	}
}

// RoPE is backends.Backend's.
func (b *Backend) RoPE(x backends.Vec, headDim int, r *backends.Rope, pos int) {
	v := x.(*vec)
	if headDim < 1 || v.dim%headDim != 0 || r.Half < 0 || r.Skip < 0 || r.Skip+2*r.Half > headDim {
		misuse("RoPE", "x of %d, heads of %d, %d pairs behind %d floats", v.dim, headDim, r.Half, r.Skip)
	}
	if end := (pos + v.n) * r.Half; pos < 0 || end > len(r.Cos) || end > len(r.Sin) {
		misuse("RoPE", "positions %d to %d of a table of %d cosines", pos, pos+v.n, len(r.Cos))
	}
	p := ropeParams{x: v.at, cos: b.constant(r.Cos), sin: b.constant(r.Sin), rows: uint32(v.n), dim: uint32(v.dim), headDim: uint32(headDim), half: uint32(r.Half), skip: uint32(r.Skip), pos: uint32(pos)}
	if r.Interleaved {
		p.pairs = 1
	}
	launch(b, "rope", per(v.n*v.dim/headDim*r.Half, groupFloats), 1, 1, p)
}

// ExpertGroup is backends.Backend's. Experts that stay where they are are the
// device's, if it has room for them; of the others x goes to the host, whose memory has
// them, and the outputs of their rows come back.
func (b *Backend) ExpertGroup(out backends.Vec, k int, jobs []backends.Job, x backends.Vec) (bad int) {
	to, from := out.(*vec), x.(*vec)
	rows := 0
	for i := range jobs {
		rows += len(jobs[i].Rows)
	}
	if rows == 0 || b.failed != nil {
		return -1
	}
	if k == 1 && len(jobs) == 1 && b.resident(&jobs[0].Expert) && inOrder(jobs[0].Rows) {
		b.expert(to, &jobs[0], from)
		return -1
	}
	b.toHost(from)
	t := b.onHost(to)
	if t == nil || from.twin == nil {
		return -1
	}
	bad = b.host.ExpertGroup(t, k, jobs, from.twin)
	b.temp = grow(b.temp, to.n*to.dim)
	err := b.host.Read(b.temp, t)
	if bad >= 0 {
		return bad // and the host has told what came of such weights
	}
	if err != nil {
		b.note(err)
		return -1
	}
	// Rows that come back lie one behind the other, in the place of those that do not.
	b.rows = b.rows[:0]
	for i := range jobs {
		b.rows = append(b.rows, jobs[i].Rows...)
	}
	slices.Sort(b.rows)
	for i, r := range b.rows {
		copy(b.temp[i*to.dim:(i+1)*to.dim], b.temp[int(r)*to.dim:])
	}
	b.putRows(to, b.rows, b.temp[:len(b.rows)*to.dim])
	return -1
}

// inOrder says that rows follow each other.
func inOrder(rows []int32) bool {
	for i, r := range rows {
		if r != rows[0]+int32(i) {
			return false
		}
	}
	return true
}

// resident says whether the device has an expert, bringing it there if it may.
func (b *Backend) resident(e *backends.Expert) bool {
	all := [...]*backends.Matrix{&e.Gate, &e.Up, &e.Down}
	for _, m := range all {
		if b.stays == nil || !b.stays(m) {
			return false
		}
	}
	for _, m := range all {
		if b.matrix(m) == 0 {
			return false
		}
	}
	return true
}

// expert computes an expert that the device has, for rows that follow each other.
func (b *Backend) expert(to *vec, j *backends.Job, from *vec) {
	e, n, first := &j.Expert, len(j.Rows), int(j.Rows[0])
	gate, up := b.need(&b.gate, 4*int64(n)*int64(e.Gate.Rows)), b.need(&b.up, 4*int64(n)*int64(e.Up.Rows))
	var have formOf
	for _, p := range []struct {
		m    *backends.Matrix
		bias []float32
		y    uint64
	}{{&e.Gate, e.GateBias, gate}, {&e.Up, e.UpBias, up}} {
		b.quantize(&have, p.m.Type, from.row(first), n*from.dim, stepExpertGroup)
		b.multiply(Product{Type: p.m.Type, Rows: p.m.Rows, Cols: p.m.Cols, W: b.matrix(p.m), Bias: b.constant(p.bias), In: have.form, Step: 1, N: n, Y: p.y, Stride: p.m.Rows})
	}
	m, floats := &e.Down, n*e.Down.Cols
	form := held.FormAt(b.need(&b.hidden, held.FormBytes(floats)), floats)
	if b.failed == nil {
		b.note(b.d.Quantize(m.Type, form, gate, up, e.Act, floats, b.failure(stepExpertGroup)))
	}
	b.multiply(Product{Type: m.Type, Rows: m.Rows, Cols: m.Cols, W: b.matrix(m), Bias: b.constant(e.DownBias), In: form, Step: 1, N: n, Y: to.row(first), Stride: to.dim})
}

// Combine is backends.Backend's.
func (b *Backend) Combine(x, out backends.Vec, k int, weights []float32, shared backends.Vec) {
	to, from := x.(*vec), out.(*vec)
	if k < 1 || from.dim != to.dim || from.n != to.n*k || len(weights) != to.n*k {
		misuse("Combine", "x [%d, %d], out [%d, %d], k %d, %d weights", to.n, to.dim, from.n, from.dim, k, len(weights))
	}
	p := combineParams{x: to.at, out: from.at, weights: put(b, weights), n: uint32(to.n), k: uint32(k), dim: uint32(to.dim)}
	if shared != nil {
		v := shared.(*vec)
		if v.dim != to.dim || v.n != to.n {
			misuse("Combine", "x [%d, %d], shared [%d, %d]", to.n, to.dim, v.n, v.dim)
		}
		p.shared = v.at
	}
	launch(b, "combine", per(to.n*to.dim, groupFloats), 1, 1, p)
}

func (b *Backend) each(v *vec, p eachParams) {
	p.y, p.n = v.at, uint32(v.n*v.dim)
	launch(b, "each", per(v.n*v.dim, groupFloats), 1, 1, p)
}

// Add is backends.Backend's.
func (b *Backend) Add(x, y backends.Vec) {
	to, from := x.(*vec), y.(*vec)
	if to.dim != from.dim || to.n != from.n {
		misuse("Add", "x [%d, %d], y [%d, %d]", to.n, to.dim, from.n, from.dim)
	}
	b.each(to, eachParams{x: from.at, how: eachAdd})
}

// ScaleRows is backends.Backend's.
func (b *Backend) ScaleRows(y, x backends.Vec, f []float32) {
	to, from := y.(*vec), x.(*vec)
	if to.dim != from.dim || len(f) != from.n {
		misuse("ScaleRows", "x [%d, %d], y of %d, %d factors", from.n, from.dim, to.dim, len(f))
	}
	to.SetLen(from.n)
	b.each(to, eachParams{x: from.at, f: put(b, f), dim: uint32(to.dim), how: eachScale})
}

// Scale is backends.Backend's.
func (b *Backend) Scale(x backends.Vec, f float32) {
	v := x.(*vec)
	b.each(v, eachParams{x: v.at, by: f, how: eachScale})
}

// SigmoidGate is backends.Backend's.
func (b *Backend) SigmoidGate(x, g backends.Vec) {
	to, from := x.(*vec), g.(*vec)
	if to.n != from.n || to.dim%from.dim != 0 {
		misuse("SigmoidGate", "x [%d, %d], g [%d, %d]", to.n, to.dim, from.n, from.dim)
	}
	b.each(to, eachParams{x: from.at, dim: uint32(to.dim / from.dim), how: eachSigmoid})
}

// Gather is backends.Backend's.
func (b *Backend) Gather(y, x backends.Vec, rows []int32) {
	to, from := y.(*vec), x.(*vec)
	if to.dim != from.dim || to == from {
		misuse("Gather", "rows of %d into a vector of %d", from.dim, to.dim)
	}
	for _, r := range rows {
		if r < 0 || int(r) >= from.n {
			misuse("Gather", "row %d of %d", r, from.n)
		}
	}
	to.SetLen(len(rows))
	b.runs(runsParams{to: to.at, from: from.at, fromRows: put(b, rows), n: uint32(len(rows)), groups: 1, run: uint32(to.dim), toRow: uint32(to.dim), fromRow: uint32(to.dim)})
}

// Put is backends.Backend's.
func (b *Backend) Put(y backends.Vec, rows []int32, data []float32) {
	to := y.(*vec)
	if len(data) != len(rows)*to.dim {
		misuse("Put", "%d floats for %d rows of %d", len(data), len(rows), to.dim)
	}
	for _, r := range rows {
		if r < 0 || int(r) >= to.n {
			misuse("Put", "row %d of %d", r, to.n)
		}
	}
	b.putRows(to, rows, data)
}

// putRows is Put, in pieces that the ring has room for: of rows, or of a long row.
func (b *Backend) putRows(to *vec, rows []int32, data []float32) {
	most := len(b.ring) / 8 // of its floats a half
	if to.dim > most {
		for i, r := range rows {
			for at := 0; at < to.dim; at += most {
				n := min(to.dim-at, most)
				b.copy(to.row(int(r))+4*uint64(at), put(b, data[i*to.dim+at:][:n]), n)
			}
		}
		return
	}
	for len(rows) > 0 {
		n := min(len(rows), most/to.dim)
		p := runsParams{to: to.at, n: uint32(n), groups: 1, run: uint32(to.dim), toRow: uint32(to.dim), fromRow: uint32(to.dim)}
		b.reserve(4*n*(to.dim+1) + 32)
		p.from, p.toRows = put(b, data[:n*to.dim]), put(b, rows[:n])
		b.runs(p)
		rows, data = rows[n:], data[n*to.dim:]
	}
}

// Concat is backends.Backend's.
func (b *Backend) Concat(y, left, right backends.Vec) {
	to, l, r := y.(*vec), left.(*vec), right.(*vec)
	if to.dim != l.dim+r.dim || l.n != r.n || to == l || to == r {
		misuse("Concat", "[%d, %d] and [%d, %d] into a vector of %d", l.n, l.dim, r.n, r.dim, to.dim)
	}
	to.SetLen(l.n)
	at := to.at
	for _, v := range []*vec{l, r} {
		b.runs(runsParams{to: at, from: v.at, n: uint32(v.n), groups: 1, run: uint32(v.dim), toRow: uint32(to.dim), fromRow: uint32(v.dim)})
		at += 4 * uint64(v.dim)
	}
}

// Split is backends.Backend's.
func (b *Backend) Split(y []backends.Vec, runs []int, x backends.Vec) {
	from, sum := x.(*vec), 0
	for _, r := range runs {
		sum += r
	}
	if len(y) != len(runs) || sum < 1 || from.dim%sum != 0 {
		misuse("Split", "runs %v of x of %d for %d vectors", runs, from.dim, len(y))
	}
	groups := from.dim / sum
	// before is the floats of a group in the vector of y[i] that come from the first runs.
	before := func(i, end int) (n int) {
		for j, r := range runs[:end] {
			if y[j] == y[i] {
				n += r
			}
		}
		return n
	}
	behind := 0
	for i, r := range runs {
		to := y[i].(*vec)
		if before(i, len(y))*groups != to.dim || to == from {
			misuse("Split", "runs %v of x of %d do not fill y[%d] of %d", runs, from.dim, i, to.dim)
		}
		to.SetLen(from.n)
		b.runs(runsParams{to: to.at + 4*uint64(groups*before(i, i)), from: from.at + 4*uint64(behind), n: uint32(from.n), groups: uint32(groups), run: uint32(r),
			toRow: uint32(to.dim), toGroup: uint32(r), fromRow: uint32(from.dim), fromGroup: uint32(sum)})
		behind += r
	}
}

// grow is x with room for n floats, of which nothing is kept.
func grow(x []float32, n int) []float32 {
	if cap(x) < n {
		return make([]float32, n)
	}
	return x[:n]
}
