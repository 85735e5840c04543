package moe

import (
	"context"
	"fmt"

	"sluice/backends"
)

// Granite 3 MoE (IBM, 2024), architecture granitemoe in GGUF; with a shared
// expert, as GraniteMoeShared.
//
//	x = embed(id) * embeddingScale                            [dim]
//	each layer:
//	  x = x + residualScale*attention(RMSNorm(x))             grouped-query, whole heads rotated, scores times attentionScale
//	  h = RMSNorm(x)
//	  x = x + residualScale*(sum over k routed experts w_i*expert_i(h) + shared(h))
//	logits = head(RMSNorm(x)) / logitScale
//
// The weights are a softmax over the chosen scores alone, as Mixtral's. Heads
// turn neighbours in GGUF files, as Mixtral's do.
type granite struct {
	layer    []graniteLayer
	residual float32 // residualScale
}

type graniteLayer struct {
	attn gqa
	moe  experts
}

func openGranite(l *loader, spec *Spec, positions int) layers {
	spec.headSizes(l)
	spec.routedOf(l, "feed_forward_length")
	spec.SharedFF = l.or("expert_shared_feed_forward_length", 0, maxDim)
	if spec.SharedFF > 0 {
		spec.SharedExperts = 1
	}
	if !l.bool("rope.scaling.finetuned", true) {
		l.fail("heads are not rotated (rope.scaling.finetuned is false), which is not supported for this family")
	}
	const most = 0x1p20
	m := &granite{residual: float32(l.positive("residual_scale", 1, most))}
	spec.embedScale = float32(l.positive("embedding_scale", 1, most))
	spec.logitScale = float32(1 / l.positive("logit_scale", 1, most))
	attention := rsqrtOf(spec.HeadDim)
	if v := l.float("attention.scale", 0); v != 0 {
		attention = float32(l.positive("attention.scale", 1, most))
	}
	eps, rope := l.epsilon(), spec.rope(l, positions)
	rope.Interleaved = !l.hf
	for i := 0; i < spec.Layers && l.err == nil; i++ {
		w := graniteLayer{
			attn: spec.attention(l, i, eps, rope, false),
			moe: spec.expertLayer(l, i, fmt.Sprintf("blk.%d.ffn_norm.weight", i), eps, func(ids []int32, weights, scores []float32) {
				RouteSoftmax(ids, weights, scores, true)
				for i := range weights {
					weights[i] *= m.residual
				}
			}),
		}
		w.attn.how.Scale = attention
		if spec.SharedFF > 0 {
			w.moe.shared = &scaledDense{spec.feedForward(l, i, spec.SharedFF, "_shexp"), m.residual}
		}
		m.layer = append(m.layer, w)
	}
	for i := 1; i < len(m.layer); i++ {
		m.layer[i-1].moe.next = &m.layer[i].moe
	}
	return m
}

// scaledDense is a dense feed-forward times a number.
type scaledDense struct {
	dense
	scale float32
}

func (d *scaledDense) compute(y backends.Vec, s *state) {
	d.dense.compute(y, s)
	s.be.Scale(y, d.scale)
	s.clock.lap(StageDense)
}

func (m *granite) run(ctx context.Context, l int, s *state) error {
	w := &m.layer[l]
	w.attn.project(s)
	w.attn.rotate(s)
	w.attn.look(l, s)
	s.be.Scale(s.h, m.residual)
	s.be.Add(s.x, s.h)
	s.clock.lap(StageAttention)
	if err := ctx.Err(); err != nil {
		return err
	}
	return w.moe.compute(ctx, s)
}

func (m *granite) warm(s *state, last int) { m.layer[0].attn.warm(s, last) }

// graniteNaming is Hugging Face's.
func graniteNaming() naming {
	const layer = "model.layers.N."
	const experts = layer + "block_sparse_moe."
	return naming{
		tensors: map[string][]string{
			"blk.N.ffn_gate_inp":          {experts + "router.layer"},
			"blk.N.ffn_gate_exps.weight":  {experts + "input_linear.weight[0/2]"},
			"blk.N.ffn_up_exps.weight":    {experts + "input_linear.weight[1/2]"},
			"blk.N.ffn_down_exps.weight":  {experts + "output_linear.weight"},
			"blk.N.ffn_gate_shexp.weight": {layer + "shared_mlp.input_linear.weight[0/2]"},
			"blk.N.ffn_up_shexp.weight":   {layer + "shared_mlp.input_linear.weight[1/2]"},
			"blk.N.ffn_down_shexp.weight": {layer + "shared_mlp.output_linear.weight"},
		},
		keys: map[string][]string{
			"attention.scale":                   {"attention_multiplier"},
			"embedding_scale":                   {"embedding_multiplier"},
			"residual_scale":                    {"residual_multiplier"},
			"logit_scale":                       {"logits_scaling"},
			"expert_shared_feed_forward_length": {"shared_intermediate_size"},
		},
	}
}
