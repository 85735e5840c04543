package moe

import (
	"context"

	"sluice/backends"
)

// gqa is grouped-query attention with optional norms of queries and keys, and
// rotation of heads or of parts of them.
type gqa struct {
	norm       []float32 // [dim], before the projections
	q, k, v, o backends.Linear
	qNorm      []float32 // [headDim], of each head, or [heads*headDim], of all together; nil: none
	kNorm      []float32 // [headDim] or [kvHeads*headDim]
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
	a.project(s)
	a.normalize(s)
	a.rotate(s)
	return a.mix(ctx, l, s)
}

// mix caches the keys and values of layer l and adds what the queries see to
// the residual stream.
func (a *gqa) mix(ctx context.Context, l int, s *state) error {
	a.look(l, s)
	s.be.Add(s.x, s.h)
	s.clock.lap(StageAttention)
	return ctx.Err()
}

// project makes queries, keys and values of the residual stream.
func (a *gqa) project(s *state) (q, k backends.Vec) {
	q, k = s.vec[a.at.q], s.vec[a.at.k]
	s.be.RMSNorm(s.h, s.x, a.norm, a.eps)
	s.y3 = [3]backends.Vec{q, k, s.vec[a.at.v]}
	s.w3 = [3]backends.Linear{a.q, a.k, a.v}
	s.matMuls(s.y3[:], s.w3[:], s.h)
	return q, k
}

// normalize applies the norms of queries and keys, if there are any.
func (a *gqa) normalize(s *state) {
	if a.qNorm != nil {
		q, k := s.vec[a.at.q], s.vec[a.at.k]
		s.be.RMSNorm(q, q, a.qNorm, a.eps)
		s.be.RMSNorm(k, k, a.kNorm, a.eps)
	}
}

// rotate turns queries and keys to their positions.
func (a *gqa) rotate(s *state) {
	s.be.RoPE(s.vec[a.at.q], a.headDim, a.rope, s.pos)
	s.be.RoPE(s.vec[a.at.k], a.headDim, a.rope, s.pos)
}

// look stores keys and values as those of layer l, and leaves in s.h what the
// queries see, projected to the width of the residual stream.
func (a *gqa) look(l int, s *state) {
	y := s.vec[a.at.a]
	s.be.Store(s.kv, l+s.cacheShift, s.pos, s.vec[a.at.k], s.vec[a.at.v])
	s.be.Attend(y, s.vec[a.at.q], s.kv, l+s.cacheShift, s.pos, &a.how)
	s.matMul(s.h, a.o, y)
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

// gatedDense is a dense feed-forward whose output is scaled, position by
// position, by sigmoid(gate . s.h).
type gatedDense struct {
	dense
	gate backends.Linear // [1, dim]
	at   vecID           // [n, 1]
}

func (d *gatedDense) compute(y backends.Vec, s *state) {
	d.dense.compute(y, s)
	s.matMul(s.vec[d.at], d.gate, s.h)
	s.be.SigmoidGate(y, s.vec[d.at])
	s.clock.lap(StageDense)
}

// add adds the feed-forward of the normalised residual stream to s.x.
func (d *dense) add(s *state, norm []float32, eps float32) {
	s.be.RMSNorm(s.h, s.x, norm, eps)
	d.compute(s.shared, s)
	s.be.Add(s.x, s.shared)
}
