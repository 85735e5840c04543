package moe

import (
	"context"
	"fmt"
)

// Qwen1.5-MoE and Qwen2-MoE (arXiv:2407.10671), architecture qwen2moe in GGUF.
//
//	x = embed(id)                                             [dim]
//	each layer:
//	  x = x + attention(RMSNorm(x))                           grouped-query, biased q k v, whole heads rotated (NeoX halves)
//	  h = RMSNorm(x)
//	  x = x + sum over k routed experts w_i*expert_i(h) + sigmoid(gate . h)*shared(h)
//	logits = head(RMSNorm(x))
//
// The router is a softmax over all experts; the chosen weights stay as they are.
type qwen2 struct {
	layer []qwen2Layer
}

type qwen2Layer struct {
	attn gqa
	moe  experts
}

func openQwen2(l *loader, spec *Spec, positions int) layers {
	spec.headSizes(l)
	spec.routed(l)
	l.fullAttention()
	spec.SharedExperts = 1
	spec.SharedFF = l.need("expert_shared_feed_forward_length", maxDim)
	m := &qwen2{}
	eps, norm, rope := l.epsilon(), l.bool("expert_weights_norm", false), spec.rope(l, positions)
	gate := spec.vector(1)
	for i := 0; i < spec.Layers && l.err == nil; i++ {
		w := qwen2Layer{
			attn: spec.attention(l, i, eps, rope, false),
			moe: spec.expertLayer(l, i, fmt.Sprintf("blk.%d.ffn_norm.weight", i), eps, func(ids []int32, weights, scores []float32) {
				RouteSoftmax(ids, weights, scores, norm)
			}),
		}
		w.moe.shared = spec.gatedFeedForward(l, i, spec.SharedFF, "_shexp", gate)
		m.layer = append(m.layer, w)
	}
	for i := 1; i < len(m.layer); i++ {
		m.layer[i-1].moe.next = &m.layer[i].moe
	}
	return m
}

func (m *qwen2) run(ctx context.Context, l int, s *state) error {
	w := &m.layer[l]
	if err := w.attn.attend(ctx, l, s); err != nil {
		return err
	}
	return w.moe.compute(ctx, s)
}

func (m *qwen2) warm(s *state, last int) { m.layer[0].attn.warm(s, last) }

// qwen2Naming is Hugging Face's.
func qwen2Naming() naming {
	return naming{keys: map[string][]string{"expert_shared_feed_forward_length": {"shared_expert_intermediate_size"}}}
}
