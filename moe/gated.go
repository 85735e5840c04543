package moe

import (
	"context"
	"fmt"

	"sluice/backends"
)

// gatedGQA is grouped-query attention whose query projection also makes a gate
// for each float of the result: of each head the query, then the gates.
type gatedGQA struct {
	gqa
	both, gate vecID // [n, heads*2*headDim], [n, heads*headDim]
	runs       [2]int
}

// attend adds the attention of layer l of the cache to the residual stream s.x.
func (a *gatedGQA) attend(ctx context.Context, l int, s *state) error {
	be := s.be
	q, k, v, y, gate := s.vec[a.at.q], s.vec[a.at.k], s.vec[a.at.v], s.vec[a.at.a], s.vec[a.gate]
	be.RMSNorm(s.h, s.x, a.norm, a.eps)
	s.y3 = [3]backends.Vec{s.vec[a.both], k, v}
	s.w3 = [3]backends.Linear{a.q, a.k, a.v}
	s.matMuls(s.y3[:], s.w3[:], s.h)
	s.y4 = [4]backends.Vec{q, gate}
	be.Split(s.y4[:2], a.runs[:], s.vec[a.both])
	be.RMSNorm(q, q, a.qNorm, a.eps)
	be.RMSNorm(k, k, a.kNorm, a.eps)
	be.RoPE(q, a.headDim, a.rope, s.pos)
	be.RoPE(k, a.headDim, a.rope, s.pos)
	be.Store(s.kv, l+s.cacheShift, s.pos, k, v)
	be.Attend(y, q, s.kv, l+s.cacheShift, s.pos, &a.how)
	be.SigmoidGate(y, gate)
	s.matMul(s.h, a.o, y)
	be.Add(s.x, s.h)
	s.clock.lap(StageAttention)
	return ctx.Err()
}

// gatedVectors asks for what gated attention needs beside Spec.gqa.
func (s *Spec) gatedVectors() (both, gate vecID) {
	q := s.Heads * s.HeadDim
	return s.vector(2 * q), s.vector(q)
}

// gatedAttention loads the projections of layer blk.l.
func (s *Spec) gatedAttention(l *loader, layer int, eps float32, rope *backends.Rope, both, gate vecID) gatedGQA {
	p := fmt.Sprintf("blk.%d.", layer)
	return gatedGQA{
		gqa: gqa{
			norm:    l.vector(p+"attn_norm.weight", s.Hidden),
			q:       l.linear(p+"attn_q", 2*s.Heads*s.HeadDim, s.Hidden),
			k:       l.linear(p+"attn_k", s.KVHeads*s.HeadDim, s.Hidden),
			v:       l.linear(p+"attn_v", s.KVHeads*s.HeadDim, s.Hidden),
			o:       l.linear(p+"attn_output", s.Hidden, s.Heads*s.HeadDim),
			qNorm:   l.vector(p+"attn_q_norm.weight", s.HeadDim),
			kNorm:   l.vector(p+"attn_k_norm.weight", s.HeadDim),
			headDim: s.HeadDim,
			eps:     eps,
			how:     backends.Attention{Scale: rsqrtOf(s.HeadDim)},
			rope:    rope,
			at:      s.gqa,
		},
		both: both,
		gate: gate,
		runs: [2]int{s.HeadDim, s.HeadDim},
	}
}
