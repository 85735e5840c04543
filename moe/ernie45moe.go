package moe

import (
	"context"
	"fmt"
)

// ERNIE 4.5 (Baidu, technical report of 2025), architecture ernie4_5-moe in GGUF.
//
//	x = embed(id)                                             [dim]
//	each layer:
//	  x = x + attention(RMSNorm(x))                           grouped-query, whole heads rotated, neighbours together
//	  h = RMSNorm(x)
//	  x = x + ffn(h)                                          the leading layers, and between those with experts all but each step-th
//	  x = x + sum over k routed experts w_i*expert_i(h) + shared(h)
//	logits = head(RMSNorm(x))
//
// The router is a softmax over all experts with a correction bias that only
// chooses; the chosen weights are normalised.
type ernie struct {
	layer []ernieLayer
	eps   float32
}

type ernieLayer struct {
	attn    gqa
	ffnNorm []float32 // [dim], as ffn
	ffn     *dense    // nil: the layer has experts
	moe     experts
}

func openErnie(l *loader, spec *Spec, positions int) layers {
	spec.heads(l)
	spec.routed(l)
	spec.sharedExperts(l, 0)
	spec.LeadingDense = l.or("leading_dense_block_count", 0, spec.Layers)
	step := l.need("interleave_moe_layer_step", maxLayers)
	if f := l.or("expert_gating_func", 1, 16); f != 1 {
		l.fail("expert gating function %d, want 1 (softmax)", f)
	}
	if l.bool("use_bias", false) {
		l.fail("the linear layers have biases (use_bias), which is not supported")
	}
	floor := float32(l.positive("expert_weights_norm_min", 1e-12, 1)) // moe_norm_min; GGUF files do not have it
	m := &ernie{eps: l.epsilon()}
	rope := newRope(positions, spec.RopeDims, l.ropeBase())
	rope.Interleaved = true
	for i := 0; i < spec.Layers && l.err == nil; i++ {
		w := ernieLayer{attn: spec.attention(l, i, m.eps, rope, false)}
		name := fmt.Sprintf("blk.%d.ffn_norm.weight", i)
		if i < spec.LeadingDense || (i+1)%step != 0 {
			if spec.FF == 0 {
				spec.FF = l.need("feed_forward_length", maxDim)
			}
			ffn := spec.feedForward(l, i, spec.FF, "")
			w.ffnNorm, w.ffn = l.vector(name, spec.Hidden), &ffn
		} else {
			bias := spec.correctionBias(l, i)
			w.moe = spec.expertLayer(l, i, name, m.eps, func(ids []int32, weights, scores []float32) {
				RouteSoftmaxBiased(ids, weights, scores, bias, floor)
			})
			if spec.SharedFF > 0 {
				shared := spec.feedForward(l, i, spec.SharedFF, "_shexp")
				w.moe.shared = &shared
			}
		}
		m.layer = append(m.layer, w)
	}
	var last *experts
	for i := range m.layer {
		if w := &m.layer[i]; w.ffn == nil {
			if last != nil {
				last.next = &w.moe
			}
			last = &w.moe
		}
	}
	return m
}

func (m *ernie) run(ctx context.Context, l int, s *state) error {
	w := &m.layer[l]
	if err := w.attn.attend(ctx, l, s); err != nil {
		return err
	}
	if w.ffn != nil {
		w.ffn.add(s, w.ffnNorm, m.eps)
		return nil
	}
	return w.moe.compute(ctx, s)
}

func (m *ernie) warm(s *state, last int) { m.layer[0].attn.warm(s, last) }

// ernieNaming is Hugging Face's.
func ernieNaming() naming {
	return naming{
		tensors: map[string][]string{"blk.N.exp_probs_b.bias": {"model.layers.N.mlp.moe_statics.e_score_correction_bias"}},
		keys: map[string][]string{
			"expert_count":              {"moe_num_experts"},
			"expert_used_count":         {"moe_k"},
			"expert_shared_count":       {"moe_num_shared_experts"},
			"expert_weights_norm_min":   {"moe_norm_min"},
			"leading_dense_block_count": {"moe_layer_start_index"},
			"interleave_moe_layer_step": {"moe_layer_interval"},
		},
	}
}
