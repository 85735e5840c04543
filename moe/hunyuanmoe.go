package moe

import (
	"context"
	"fmt"
)

// Hunyuan-A13B (Tencent, 2025), architecture hunyuan-moe in GGUF.
//
//	x = embed(id)                                             [dim]
//	each layer:
//	  x = x + attention(RMSNorm(x))                           grouped-query, whole heads rotated (NeoX halves), norms of q and k behind that
//	  h = RMSNorm(x)
//	  x = x + sum over k routed experts w_i*expert_i(h) + shared(h)
//	logits = head(RMSNorm(x))
//
// The router is a softmax over all experts, the chosen weights normalised.
type hunyuan struct {
	layer []hunyuanLayer
}

type hunyuanLayer struct {
	attn gqa
	moe  experts
}

func openHunyuan(l *loader, spec *Spec, positions int) layers {
	spec.headSizes(l)
	spec.routed(l)
	spec.SharedExperts = l.or("expert_shared_count", 1, maxExperts)
	spec.SharedFF = l.or("expert_shared_feed_forward_length", 0, maxDim)
	if spec.SharedFF == 0 {
		spec.SharedFF = l.need("feed_forward_length", maxDim)
	}
	m := &hunyuan{}
	eps, rope := l.epsilon(), spec.rope(l, positions)
	for i := 0; i < spec.Layers && l.err == nil; i++ {
		w := hunyuanLayer{
			attn: spec.attention(l, i, eps, rope, true),
			moe: spec.expertLayer(l, i, fmt.Sprintf("blk.%d.ffn_norm.weight", i), eps, func(ids []int32, weights, scores []float32) {
				RouteSoftmax(ids, weights, scores, true)
			}),
		}
		shared := spec.feedForward(l, i, spec.SharedFF, "_shexp")
		w.moe.shared = &shared
		m.layer = append(m.layer, w)
	}
	for i := 1; i < len(m.layer); i++ {
		m.layer[i-1].moe.next = &m.layer[i].moe
	}
	return m
}

func (m *hunyuan) run(ctx context.Context, l int, s *state) error {
	w := &m.layer[l]
	w.attn.project(s)
	w.attn.rotate(s)
	w.attn.normalize(s)
	w.attn.look(l, s)
	s.be.Add(s.x, s.h)
	s.clock.lap(StageAttention)
	if err := ctx.Err(); err != nil {
		return err
	}
	return w.moe.compute(ctx, s)
}

func (m *hunyuan) warm(s *state, last int) { m.layer[0].attn.warm(s, last) }
