package moe

import (
	"context"
	"fmt"
)

// MiniMax-M2 (MiniMax, 2025), architecture minimax-m2 in GGUF.
//
//	x = embed(id)                                             [dim]
//	each layer:
//	  x = x + attention(RMSNorm(x))                           grouped-query; the queries of all heads are normalised together, and
//	                                                          the keys; the first part of each head rotated (NeoX halves)
//	  x = x + sum over k routed experts w_i*expert_i(RMSNorm(x))
//	logits = head(RMSNorm(x))
//
// The router is DeepSeek-V3's with one group: sigmoid scores, a correction bias
// that only chooses, weights normalised.
type minimax struct {
	layer []minimaxLayer
}

type minimaxLayer struct {
	attn gqa
	moe  experts
}

func openMinimax(l *loader, spec *Spec, positions int) layers {
	spec.headSizes(l)
	spec.routed(l)
	if f := l.or("expert_gating_func", 2, 16); f != 2 {
		l.fail("expert gating function %d, want 2 (sigmoid)", f)
	}
	m := &minimax{}
	eps, rope := l.epsilon(), spec.rope(l, positions)
	scale := float32(l.positive("expert_weights_scale", 1, 0x1p40))
	for i := 0; i < spec.Layers && l.err == nil; i++ {
		bias := l.vector(fmt.Sprintf("blk.%d.exp_probs_b.bias", i), spec.Experts)
		m.layer = append(m.layer, minimaxLayer{
			attn: spec.attentionNormedWhole(l, i, eps, rope),
			moe: spec.expertLayer(l, i, fmt.Sprintf("blk.%d.ffn_norm.weight", i), eps, func(ids []int32, weights, scores []float32) {
				RouteSigmoid(ids, weights, scores, bias, true, scale)
			}),
		})
	}
	for i := 1; i < len(m.layer); i++ {
		m.layer[i-1].moe.next = &m.layer[i].moe
	}
	return m
}

func (m *minimax) run(ctx context.Context, l int, s *state) error {
	w := &m.layer[l]
	if err := w.attn.attend(ctx, l, s); err != nil {
		return err
	}
	return w.moe.compute(ctx, s)
}

func (m *minimax) warm(s *state, last int) { m.layer[0].attn.warm(s, last) }

// minimaxNaming is Hugging Face's.
func minimaxNaming() naming {
	const layer = "model.layers.N.block_sparse_moe."
	return naming{
		tensors: map[string][]string{
			"blk.N.ffn_gate_inp":         {layer + "gate"},
			"blk.N.exp_probs_b.bias":     {layer + "e_score_correction_bias"},
			"blk.N.ffn_gate_exps.weight": {layer + "experts.*.w1.weight"},
			"blk.N.ffn_up_exps.weight":   {layer + "experts.*.w3.weight"},
			"blk.N.ffn_down_exps.weight": {layer + "experts.*.w2.weight"},
		},
		keys: map[string][]string{
			"expert_feed_forward_length": {"intermediate_size"},
			"rope.dimension_count":       {"rotary_dim"},
		},
	}
}
