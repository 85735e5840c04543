package cpu

import (
	"fmt"

	"sluice/backends"
)

// normStep normalises runs of len(weight) floats; an item is one run.
type normStep struct {
	y, x, weight []float32
	inv, eps     float32 // inv is 1/len(weight)
}

// RMSNorm normalises runs of n = len(weight) floats, which divides the dim:
//
//	q = sum of clean(x)^2 in 16 lanes; r = rsqrt(q*(1/n) + eps); y = (clean(x)*r)*weight
//
// y may be x, else its length is set.
func (b *Backend) RMSNorm(y, x backends.Vec, weight []float32, eps float32) {
	to, from := y.(*vec), x.(*vec)
	n := len(weight)
	if n == 0 || from.dim%n != 0 || to.dim != from.dim {
		panic(fmt.Sprintf("backends/cpu: RMSNorm: x of %d, weight of %d, y of %d", from.dim, n, to.dim))
	}
	to.SetLen(from.n)
	b.norm = normStep{to.rows(), from.rows(), weight, 1 / float32(n), eps}
	b.do("RMSNorm", &b.norm, len(from.rows())/n, prepareGrain/n)
	b.norm = normStep{}
}

func (s *normStep) run(w *worker, lo, hi int) {
	n := len(s.weight)
	for ; lo < hi; lo++ {
		w.saw(w.k.rmsNorm(s.y[lo*n:(lo+1)*n], s.x[lo*n:(lo+1)*n], s.weight, s.inv, s.eps))
	}
}
