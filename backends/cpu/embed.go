package cpu

import (
	"fmt"

	"sluice/backends"
	"sluice/internal/arith"
	"sluice/internal/quant"
)

// embedStep copies rows of a table; an item is one row.
type embedStep struct {
	x     []float32
	dim   int
	table backends.Matrix
	ids   []int32
}

// Embed makes x [len(ids), dim] of the table's rows: the values that ggml's C
// library decodes, cleaned. It sets the length of x.
func (b *Backend) Embed(x backends.Vec, table backends.Matrix, ids []int32) {
	v := x.(*vec)
	checkMatrix("Embed", &table)
	if table.Cols != v.dim {
		panic(fmt.Sprintf("backends/cpu: Embed: rows of %d into a vector of %d", table.Cols, v.dim))
	}
	for _, id := range ids {
		if id < 0 || int(id) >= table.Rows {
			panic(fmt.Sprintf("backends/cpu: Embed: token %d of a table of %d rows", id, table.Rows))
		}
	}
	v.SetLen(len(ids))
	b.embed = embedStep{v.data, v.dim, table, ids}
	b.do("Embed", &b.embed, len(ids), prepareGrain/v.dim)
	b.embed = embedStep{}
}

func (s *embedStep) run(w *worker, lo, hi int) {
	bytes := s.table.Type.RowBytes(s.dim)
	for i := lo; i < hi; i++ {
		x, at := s.x[i*s.dim:(i+1)*s.dim], int(s.ids[i])*bytes
		quant.Dequantize(s.table.Type, x, s.table.Data[at:at+bytes])
		w.k.cleanTo(x, x, arith.TinyBits)
	}
}

// Gather makes y [len(rows), dim] of rows of x, which is not y, and sets the
// length of y.
func (b *Backend) Gather(y, x backends.Vec, rows []int32) {
	to, from := y.(*vec), x.(*vec)
	if to.dim != from.dim || to == from {
		panic(fmt.Sprintf("backends/cpu: Gather: rows of %d into a vector of %d", from.dim, to.dim))
	}
	for _, r := range rows {
		if r < 0 || int(r) >= from.n {
			panic(fmt.Sprintf("backends/cpu: Gather: row %d of %d", r, from.n))
		}
	}
	to.SetLen(len(rows))
	d := to.dim
	for i, r := range rows {
		copy(to.data[i*d:(i+1)*d], from.data[int(r)*d:])
	}
}

// Concat makes y [n, a's dim + b's dim] of rows of a and b side by side, and
// sets the length of y, which is neither.
func (b *Backend) Concat(y, left, right backends.Vec) {
	to, l, r := y.(*vec), left.(*vec), right.(*vec)
	if to.dim != l.dim+r.dim || l.n != r.n || to == l || to == r {
		panic(fmt.Sprintf("backends/cpu: Concat: [%d, %d] and [%d, %d] into a vector of %d", l.n, l.dim, r.n, r.dim, to.dim))
	}
	to.SetLen(l.n)
	for i := range l.n {
		row := to.data[i*to.dim : (i+1)*to.dim]
		copy(row, l.data[i*l.dim:(i+1)*l.dim])
		copy(row[l.dim:], r.data[i*r.dim:(i+1)*r.dim])
	}
}

// Put copies the rows of data [len(rows), dim] to rows of y, which has its length
// already.
func (b *Backend) Put(y backends.Vec, rows []int32, data []float32) {
	to := y.(*vec)
	if len(data) != len(rows)*to.dim {
		panic(fmt.Sprintf("backends/cpu: Put: %d floats for %d rows of %d", len(data), len(rows), to.dim))
	}
	for i, r := range rows {
		if r < 0 || int(r) >= to.n {
			panic(fmt.Sprintf("backends/cpu: Put: row %d of %d", r, to.n))
		}
		copy(to.data[int(r)*to.dim:(int(r)+1)*to.dim], data[i*to.dim:])
	}
}
