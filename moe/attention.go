package moe

import (
	"context"
	"math"

	"sluice/backends"
)

// gqa is grouped-query attention with an optional norm of each query and key
// head and rotation of the first half-pairs of a head (NeoX halves).
type gqa struct {
	norm       []float32 // [dim], before the projections
	q, k, v, o backends.Linear
	qNorm      []float32 // [headDim], nil: none
	kNorm      []float32
	headDim    int
	eps        float32
	scale      float32 // of q.k
	rope       *backends.Rope
}

// attend adds the attention of layer l to the residual stream s.x.
func (a *gqa) attend(ctx context.Context, l int, s *state) error {
	be := s.be
	be.RMSNorm(s.h, s.x, a.norm, a.eps)
	s.y3 = [3]backends.Vec{s.q, s.k, s.v}
	s.w3 = [3]backends.Linear{a.q, a.k, a.v}
	be.MatMul(s.y3[:], s.w3[:], s.h)
	if a.qNorm != nil {
		be.RMSNorm(s.q, s.q, a.qNorm, a.eps)
		be.RMSNorm(s.k, s.k, a.kNorm, a.eps)
	}
	be.RoPE(s.q, a.headDim, a.rope, s.pos)
	be.RoPE(s.k, a.headDim, a.rope, s.pos)
	be.Store(s.kv, l, s.pos, s.k, s.v)
	be.Attend(s.a, s.q, s.kv, l, s.pos, a.scale)
	s.matMul(s.h, a.o, s.a)
	be.Add(s.x, s.h)
	s.clock.lap(StageAttention)
	return ctx.Err()
}

// newRope makes the host's table of rotations: pair i of position p turns by
// p * base^(-2i/dims). The angles are float64, rounded once at the end.
func newRope(positions, dims int, base float64) *backends.Rope {
	half := dims / 2
	r := &backends.Rope{Half: half, Cos: make([]float32, positions*half), Sin: make([]float32, positions*half)}
	for i := range half {
		freq := math.Pow(base, -2*float64(i)/float64(dims))
		for p := range positions {
			sin, cos := math.Sincos(float64(p) * freq)
			r.Cos[p*half+i], r.Sin[p*half+i] = float32(cos), float32(sin)
		}
	}
	return r
}

// dense is a feed-forward that every token passes.
type dense struct {
	ffn backends.Expert
}

// compute leaves the feed-forward of s.h in y.
func (d *dense) compute(y backends.Vec, s *state) {
	y.SetLen(s.h.Len())
	s.job[0] = backends.Job{Expert: d.ffn, Rows: s.everyRow[:s.h.Len()]}
	s.be.ExpertGroup(y, 1, s.job[:1], s.h)
	s.clock.lap(StageDense)
}
