package moe

import (
	"context"
	"fmt"
)

// Qwen3-MoE (arXiv:2505.09388), architecture qwen3moe in GGUF.
//
//	x = embed(id)                                             [dim]
//	each layer:
//	  x = x + attention(RMSNorm(x))                           grouped-query, norms of q and k, whole heads rotated (NeoX halves)
//	  x = x + sum over k routed experts w_i*expert_i(RMSNorm(x))
//	logits = head(RMSNorm(x))
//
// The router is a softmax over all experts, the chosen weights normalised;
// there is no shared expert.
type qwen3 struct {
	layer []qwen3Layer
	eps   float32
	norm  bool
}

type qwen3Layer struct {
	attn gqa
	moe  experts
}

func openQwen3(l *loader, spec *Spec, positions int) layers {
	spec.headSizes(l)
	spec.routed(l)
	m := &qwen3{
		eps:  l.epsilon(),
		norm: l.bool("expert_weights_norm", true),
	}
	rope := spec.rope(l, positions)
	for i := 0; i < spec.Layers && l.err == nil; i++ {
		m.layer = append(m.layer, qwen3Layer{
			attn: spec.attention(l, i, m.eps, rope, true),
			moe: spec.expertLayer(l, i, fmt.Sprintf("blk.%d.ffn_norm.weight", i), m.eps, func(ids []int32, weights, scores []float32) {
				RouteSoftmax(ids, weights, scores, m.norm)
			}),
		})
	}
	for i := 1; i < len(m.layer); i++ {
		m.layer[i-1].moe.next = &m.layer[i].moe
	}
	return m
}

func (m *qwen3) run(ctx context.Context, l int, s *state) error {
	w := &m.layer[l]
	if err := w.attn.attend(ctx, l, s); err != nil {
		return err
	}
	return w.moe.compute(ctx, s)
}

func (m *qwen3) warm(s *state, last int) { m.layer[0].attn.warm(s, last) }
