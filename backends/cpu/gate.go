package cpu

import (
	"fmt"

	"sluice/backends"
	"sluice/internal/arith"
)

// scaleStep is x = x*f; an item is combineRun floats.
type scaleStep struct {
	x []float32
	f float32
}

// Scale is x = x*f.
func (b *Backend) Scale(x backends.Vec, f float32) {
	s := &b.scale
	*s = scaleStep{x.(*vec).rows(), f}
	b.do("Scale", s, (len(s.x)+combineRun-1)/combineRun, 16)
	*s = scaleStep{}
}

func (s *scaleStep) run(w *worker, lo, hi int) {
	w.k.scaleBy(s.x[lo*combineRun:min(hi*combineRun, len(s.x))], s.f)
}

// gateStep is x = x*sigmoid(g), each g for a run of x; an item is run floats.
type gateStep struct {
	x, g []float32
	each int
}

// SigmoidGate multiplies x [n, dim] by the sigmoids of g [n, m], where m divides
// dim: with run = dim/m, of each row
//
//	x[i] = x[i] * sigmoid(g[i/run])
func (b *Backend) SigmoidGate(x, g backends.Vec) {
	to, from := x.(*vec), g.(*vec)
	if to.n != from.n || to.dim%from.dim != 0 {
		panic(fmt.Sprintf("backends/cpu: SigmoidGate: x [%d, %d], g [%d, %d]", to.n, to.dim, from.n, from.dim))
	}
	s := &b.gate
	*s = gateStep{to.rows(), from.rows(), to.dim / from.dim}
	if s.each == 1 {
		b.do("SigmoidGate", s, (len(s.x)+combineRun-1)/combineRun, 4)
	} else {
		b.do("SigmoidGate", s, len(s.g), prepareGrain/s.each)
	}
	*s = gateStep{}
}

func (s *gateStep) run(w *worker, lo, hi int) {
	if s.each == 1 {
		lo, hi = lo*combineRun, min(hi*combineRun, len(s.x))
		w.k.sigmoidGate(s.x[lo:hi], s.g[lo:hi])
		return
	}
	for ; lo < hi; lo++ {
		w.k.scaleBy(s.x[lo*s.each:(lo+1)*s.each], arith.Sigmoid(s.g[lo]))
	}
}
