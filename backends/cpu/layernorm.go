package cpu

import (
	"fmt"
	"math"

	"sluice/backends"
	"sluice/internal/arith"
)

// layerNormStep normalises runs of len(weight) floats; an item is one run.
type layerNormStep struct {
	y, x, weight, bias []float32
	inv, eps           float32 // inv is 1/len(weight)
}

// LayerNorm normalises runs of n = len(weight) floats, which divides the dim:
//
//	m = (sum of clean(x) in 16 lanes)*(1/n); d = clean(clean(x) - m)
//	q = sum of d^2 in 16 lanes; r = rsqrt(q*(1/n) + eps); y = ((d*r)*weight) + bias
//
// y may be x, else its length is set.
func (b *Backend) LayerNorm(y, x backends.Vec, weight, bias []float32, eps float32) {
	to, from := y.(*vec), x.(*vec)
	n := len(weight)
	if n == 0 || len(bias) != n || from.dim%n != 0 || to.dim != from.dim {
		panic(fmt.Sprintf("backends/cpu: LayerNorm: x of %d, weight of %d, bias of %d, y of %d", from.dim, n, len(bias), to.dim))
	}
	to.SetLen(from.n)
	b.layerNorm = layerNormStep{to.rows(), from.rows(), weight, bias, 1 / float32(n), eps}
	b.do("LayerNorm", &b.layerNorm, len(from.rows())/n, prepareGrain/n)
	b.layerNorm = layerNormStep{}
}

func (s *layerNormStep) run(w *worker, lo, hi int) {
	n := len(s.weight)
	for ; lo < hi; lo++ {
		y := s.y[lo*n : (lo+1)*n]
		w.saw(w.k.cleanTo(y, s.x[lo*n:(lo+1)*n], arith.TinyBits))
		var l [16]float32
		for i, v := range y {
			l[i&15] += v
		}
		mean := float32(arith.Tree16(&l) * s.inv)
		for i, v := range y {
			d := v - mean
			if math.Float32bits(d)&^arith.SignMask < arith.TinyBits {
				d = 0
			}
			y[i] = d
		}
		clear(l[:])
		dotLanes(&l, y, y)
		r := arith.Rsqrt(float32(arith.Tree16(&l)*s.inv) + s.eps)
		for i, d := range y {
			y[i] = float32(float32(d*r)*s.weight[i]) + s.bias[i]
		}
	}
}
