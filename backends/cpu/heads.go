package cpu

import (
	"fmt"

	"sluice/backends"
)

// headStep prepares the heads of x as inputs of MatMulHeads, head by head, and
// copies what follows their columns; an item is one head of one position.
type headStep struct {
	in                 *inputs
	form               form
	y, x               []float32
	n, heads           int
	xd, yd, cols, rows int
	copied             bool // the rests
}

// MatMulHeads multiplies each head of x by a matrix of its own. With len(w)
// heads, head h of a row of x is cols floats and a rest; head h of that row of y
// is w[h] [rows, cols] times the cols floats, as MatMul gives it, and the rest as
// it is. All matrices have one shape; y is not x, and its length is set.
func (b *Backend) MatMulHeads(y backends.Vec, w []backends.Matrix, x backends.Vec) {
	to, from := y.(*vec), x.(*vec)
	heads := len(w)
	if heads == 0 || from.dim%heads != 0 || to.dim%heads != 0 || to == from {
		panic(fmt.Sprintf("backends/cpu: MatMulHeads: %d heads, x of %d, y of %d, which must be two vectors", heads, from.dim, to.dim))
	}
	s := &b.heads
	*s = headStep{in: &b.in, x: from.rows(), n: from.n, heads: heads, xd: from.dim / heads, yd: to.dim / heads, cols: w[0].Cols, rows: w[0].Rows}
	to.SetLen(from.n)
	s.y = to.rows()
	b.in.reset(heads*from.n, s.cols)
	b.products.reset()
	for h := range w {
		m := &w[h]
		checkMatrix("MatMulHeads", m)
		if m.Cols != s.cols || m.Rows != s.rows || m.Cols > s.xd || s.xd-m.Cols != s.yd-m.Rows {
			panic(fmt.Sprintf("backends/cpu: MatMulHeads: heads of %d to heads of %d by a matrix of %d x %d, the first %d x %d", s.xd, s.yd, m.Rows, m.Cols, s.rows, s.cols))
		}
		if from.n == 0 {
			continue
		}
		if f := formOf(m.Type.ActBlock()); !b.in.have[f] {
			b.in.have[f] = true
			b.in.make(f, heads*from.n*s.cols)
			s.form = f
			b.pool.do(s, heads*from.n, prepareGrain/s.cols)
			s.copied = true
		}
		b.products.add(&b.pool.kernels, product{m: *m, in: &b.in, inBase: h * from.n, n: from.n, y: to.data[h*s.yd:], stride: to.dim})
	}
	b.do("MatMulHeads", &b.products, b.products.items, 1)
	b.products.drop()
	*s = headStep{}
}

func (s *headStep) run(w *worker, lo, hi int) {
	for ; lo < hi; lo++ {
		h, p := lo/s.n, lo%s.n // the inputs are [heads, n, cols]
		x := s.x[(p*s.heads+h)*s.xd:][:s.xd]
		w.saw(s.in.fill(w.k, s.form, x[:s.cols], lo*s.cols, (lo+1)*s.cols))
		if !s.copied && s.cols < s.xd {
			copy(s.y[(p*s.heads+h)*s.yd+s.rows:][:s.xd-s.cols], x[s.cols:])
		}
	}
}
