package cpu

import (
	"fmt"

	"sluice/backends"
)

// MatMul computes y[i] [n, rows] = x [n, cols] times w[i] [rows, cols]
// transposed, plus the bias of w[i] if it has one, and sets the lengths of y.
// No y is x. The n positions get the bits that each would get alone.
func (b *Backend) MatMul(y []backends.Vec, w []backends.Linear, x backends.Vec) {
	v := x.(*vec)
	if len(y) != len(w) {
		panic(fmt.Sprintf("backends/cpu: MatMul: %d results for %d matrices", len(y), len(w)))
	}
	b.in.reset(v.n, v.dim)
	b.products.reset()
	for i := range w {
		l, out := &w[i], y[i].(*vec)
		checkMatrix("MatMul", &l.Matrix)
		if l.Cols != v.dim || l.Rows != out.dim || l.Bias != nil && len(l.Bias) != l.Rows || out == v {
			panic(fmt.Sprintf("backends/cpu: MatMul: x of %d, matrix %d x %d, bias of %d, y of %d", v.dim, l.Rows, l.Cols, len(l.Bias), out.dim))
		}
		out.SetLen(v.n)
		if v.n == 0 {
			continue
		}
		b.prepare(&b.in, formOf(l.Type.ActBlock()), v.rows())
		b.products.add(&b.pool.kernels, product{m: l.Matrix, bias: l.Bias, in: &b.in, n: v.n, y: out.data, stride: out.dim})
	}
	b.do("MatMul", &b.products, b.products.items, 1)
	b.products.drop()
}
