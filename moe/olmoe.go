package moe

import (
	"context"
	"fmt"
)

// OLMoE (arXiv:2409.02060), architecture olmoe in GGUF.
//
//	x = embed(id)                                             [dim]
//	each layer:
//	  x = x + attention(RMSNorm(x))                           grouped-query; the queries of all heads are normalised together, and
//	                                                          the keys; whole heads rotated (NeoX halves)
//	  x = x + sum over k routed experts w_i*expert_i(RMSNorm(x))
//	logits = head(RMSNorm(x))
//
// The router is a softmax over all experts; the chosen weights stay as they are.
type olmoe struct {
	layer []olmoeLayer
}

type olmoeLayer struct {
	attn gqa
	moe  experts
}

func openOlmoe(l *loader, spec *Spec, positions int) layers {
	spec.headSizes(l)
	spec.routedOf(l, "feed_forward_length")
	if l.float("attention.clamp_kqv", 0) != 0 {
		l.fail("queries, keys and values are clamped (attention.clamp_kqv), which is not supported")
	}
	m := &olmoe{}
	eps, norm, rope := l.epsilon(), l.bool("expert_weights_norm", false), spec.rope(l, positions)
	for i := 0; i < spec.Layers && l.err == nil; i++ {
		m.layer = append(m.layer, olmoeLayer{
			attn: spec.attentionNormedWhole(l, i, eps, rope),
			moe: spec.expertLayer(l, i, fmt.Sprintf("blk.%d.ffn_norm.weight", i), eps, func(ids []int32, weights, scores []float32) {
				RouteSoftmax(ids, weights, scores, norm)
			}),
		})
	}
	for i := 1; i < len(m.layer); i++ {
		m.layer[i-1].moe.next = &m.layer[i].moe
	}
	return m
}

func (m *olmoe) run(ctx context.Context, l int, s *state) error {
	w := &m.layer[l]
	if err := w.attn.attend(ctx, l, s); err != nil {
		return err
	}
	return w.moe.compute(ctx, s)
}

func (m *olmoe) warm(s *state, last int) { m.layer[0].attn.warm(s, last) }

// olmoeNaming is Hugging Face's.
func olmoeNaming() naming {
	return naming{keys: map[string][]string{"attention.clamp_kqv": {"clip_qkv"}}}
}
