package cpu

import (
	"fmt"

	"sluice/backends"
)

// combineStep adds experts' outputs to x; an item is combineRun floats of all
// rows laid end to end.
type combineStep struct {
	x, out, weights, shared []float32
	k, dim                  int
}

const combineRun = 1024

// Combine adds to row i of x its k experts' outputs, rows k*i .. of out, in the
// router's order, and the shared expert's if there is one:
//
//	y = +0; y = y + w[j]*out[j] for j ascending; y = y + shared; x = x + y
//
// weights is [n, k].
func (b *Backend) Combine(x, out backends.Vec, k int, weights []float32, shared backends.Vec) {
	to, from := x.(*vec), out.(*vec)
	if k < 1 || from.dim != to.dim || from.n != to.n*k || len(weights) != to.n*k {
		panic(fmt.Sprintf("backends/cpu: Combine: x [%d, %d], out [%d, %d], k %d, %d weights", to.n, to.dim, from.n, from.dim, k, len(weights)))
	}
	s := &b.sum
	*s = combineStep{x: to.rows(), out: from.rows(), weights: weights, k: k, dim: to.dim}
	if shared != nil {
		v := shared.(*vec)
		if v.dim != to.dim || v.n != to.n {
			panic(fmt.Sprintf("backends/cpu: Combine: x [%d, %d], shared [%d, %d]", to.n, to.dim, v.n, v.dim))
		}
		s.shared = v.rows()
	}
	b.do("Combine", s, (len(s.x)+combineRun-1)/combineRun, 4)
	*s = combineStep{}
}

func (s *combineStep) run(w *worker, lo, hi int) {
	lo, hi = lo*combineRun, min(hi*combineRun, len(s.x))
	for lo < hi {
		row, col := lo/s.dim, lo%s.dim
		n := min(hi-lo, s.dim-col) // the part of one row
		shared := s.shared
		if shared != nil {
			shared = shared[lo : lo+n]
		}
		w.k.combine(s.x[lo:lo+n], s.out[row*s.k*s.dim+col:], s.dim, s.weights[row*s.k:(row+1)*s.k], shared)
		lo += n
	}
}

// Add is x = x + y.
func (b *Backend) Add(x, y backends.Vec) {
	to, from := x.(*vec), y.(*vec)
	if to.dim != from.dim || to.n != from.n {
		panic(fmt.Sprintf("backends/cpu: Add: x [%d, %d], y [%d, %d]", to.n, to.dim, from.n, from.dim))
	}
	s := &b.add
	*s = addStep{to.rows(), from.rows()}
	b.do("Add", s, (len(s.x)+combineRun-1)/combineRun, 16)
	*s = addStep{}
}

// addStep is x = x + y; an item is combineRun floats.
type addStep struct{ x, y []float32 }

func (s *addStep) run(w *worker, lo, hi int) {
	lo, hi = lo*combineRun, min(hi*combineRun, len(s.x))
	w.k.add(s.x[lo:hi], s.y[lo:hi])
}
