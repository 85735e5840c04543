package moe

import (
	"context"

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
	how        backends.Attention
	rope       *backends.Rope
	at         gqaVectors
}

// gqaVectors are where grouped-query attention works: queries and results
// [n, heads*headDim], keys and values [n, kvHeads*headDim].
type gqaVectors struct{ q, k, v, a vecID }

// attend adds the attention of layer l to the residual stream s.x.
func (a *gqa) attend(ctx context.Context, l int, s *state) error {
	q, k := a.project(s)
	if a.qNorm != nil {
		s.be.RMSNorm(q, q, a.qNorm, a.eps)
		s.be.RMSNorm(k, k, a.kNorm, a.eps)
	}
	s.be.RoPE(q, a.headDim, a.rope, s.pos)
	s.be.RoPE(k, a.headDim, a.rope, s.pos)
	return a.mix(ctx, l, s)
}

// project makes the queries, keys and values of the normalised residual stream.
func (a *gqa) project(s *state) (q, k backends.Vec) {
	q, k = s.vec[a.at.q], s.vec[a.at.k]
	s.be.RMSNorm(s.h, s.x, a.norm, a.eps)
	s.y3 = [3]backends.Vec{q, k, s.vec[a.at.v]}
	s.w3 = [3]backends.Linear{a.q, a.k, a.v}
	s.be.MatMul(s.y3[:], s.w3[:], s.h)
	return q, k
}

// mix caches the keys and values of layer l and adds what the queries see to
// the residual stream.
func (a *gqa) mix(ctx context.Context, l int, s *state) error {
	be, y := s.be, s.vec[a.at.a]
	be.Store(s.kv, l+s.cacheShift, s.pos, s.vec[a.at.k], s.vec[a.at.v])
	be.Attend(y, s.vec[a.at.q], s.kv, l+s.cacheShift, s.pos, &a.how)
	s.matMul(s.h, a.o, y)
	be.Add(s.x, s.h)
	s.clock.lap(StageAttention)
	return ctx.Err()
}

// warm is one query at the last position, over whatever is there.
func (a *gqa) warm(s *state, last int) {
	s.vec[a.at.q].SetLen(1)
	s.be.Attend(s.vec[a.at.a], s.vec[a.at.q], s.kv, 0, last, &a.how)
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
