package cpu

import (
	"fmt"

	"sluice/backends"
)

// ropeStep turns the heads of rows; an item is one row.
type ropeStep struct {
	x            []float32
	dim, headDim int
	rope         *backends.Rope
	pos          int
}

// RoPE turns row i of x, in place, to position pos+i. In each head of headDim
// floats, without its first Skip, with c and s of the position and j < Half:
//
//	x[j], x[j+Half] = (x[j]*c) - (x[j+Half]*s), (x[j+Half]*c) + (x[j]*s)
//
// and if Interleaved the same of x[2*j] and x[2*j+1].
func (b *Backend) RoPE(x backends.Vec, headDim int, rope *backends.Rope, pos int) {
	v := x.(*vec)
	if headDim < 1 || v.dim%headDim != 0 || rope.Half < 0 || rope.Skip < 0 || rope.Skip+2*rope.Half > headDim {
		panic(fmt.Sprintf("backends/cpu: RoPE: x of %d, heads of %d, %d pairs behind %d floats", v.dim, headDim, rope.Half, rope.Skip))
	}
	if end := (pos + v.n) * rope.Half; pos < 0 || end > len(rope.Cos) || end > len(rope.Sin) {
		panic(fmt.Sprintf("backends/cpu: RoPE: positions %d to %d of a table of %d cosines", pos, pos+v.n, len(rope.Cos)))
	}
	b.rope = ropeStep{v.data, v.dim, headDim, rope, pos}
	b.do("RoPE", &b.rope, v.n, prepareGrain/v.dim)
	b.rope = ropeStep{}
}

func (s *ropeStep) run(w *worker, lo, hi int) {
	half, skip := s.rope.Half, s.rope.Skip
	rotate := w.k.rotate
	if s.rope.Interleaved {
		rotate = w.k.rotatePairs
	}
	for ; lo < hi; lo++ {
		at := (s.pos + lo) * half
		cos, sin := s.rope.Cos[at:at+half], s.rope.Sin[at:at+half]
		x := s.x[lo*s.dim : (lo+1)*s.dim]
		if skip == 0 {
			rotate(x, cos, sin, s.headDim)
			continue
		}
		for ; len(x) > 0; x = x[s.headDim:] {
			rotate(x[skip:s.headDim], cos, sin, s.headDim-skip)
		}
	}
}
