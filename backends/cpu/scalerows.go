package cpu

import (
	"fmt"

	"sluice/backends"
)

// scaleRowsStep multiplies each row by a factor of its own; an item is one row.
type scaleRowsStep struct {
	y, x, f []float32
	dim     int
}

// ScaleRows makes row i of y the row i of x times f[i], and sets the length of
// y, which may be x.
func (b *Backend) ScaleRows(y, x backends.Vec, f []float32) {
	to, from := y.(*vec), x.(*vec)
	if to.dim != from.dim || len(f) != from.n {
		panic(fmt.Sprintf("backends/cpu: ScaleRows: x [%d, %d], y of %d, %d factors", from.n, from.dim, to.dim, len(f)))
	}
	to.SetLen(from.n)
	s := &b.scaleRows
	*s = scaleRowsStep{to.rows(), from.rows(), f, to.dim}
	b.do("ScaleRows", s, from.n, prepareGrain/to.dim)
	*s = scaleRowsStep{}
}

func (s *scaleRowsStep) run(w *worker, lo, hi int) {
	for ; lo < hi; lo++ {
		y := s.y[lo*s.dim : (lo+1)*s.dim]
		copy(y, s.x[lo*s.dim:])
		w.k.scaleBy(y, s.f[lo])
	}
}
