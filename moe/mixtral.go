package moe

import (
	"context"
	"fmt"
)

// Mixtral (arXiv:2401.04088), architecture llama in GGUF.
//
//	x = embed(id)                                             [dim]
//	each layer:
//	  x = x + attention(RMSNorm(x))                           grouped-query, whole heads rotated; a window of keys in some early files
//	  x = x + sum over k routed experts w_i*expert_i(RMSNorm(x))
//	logits = head(RMSNorm(x))
//
// The weights are a softmax over the chosen scores alone, which is a softmax over
// all with the chosen weights normalised.
//
// Heads turn neighbours in GGUF files, where the rows of q and k are reordered to
// suit; elsewhere they turn halves.
type mixtral struct {
	layer []mixtralLayer
}

type mixtralLayer struct {
	attn gqa
	moe  experts
}

func openMixtral(l *loader, spec *Spec, positions int) layers {
	if n, _ := l.uint("expert_count", maxExperts); n == 0 {
		l.fail("the model has no experts: only the llama models with experts (Mixtral) are supported")
	}
	spec.headSizes(l)
	spec.routedOf(l, "feed_forward_length")
	m := &mixtral{}
	eps, rope := l.epsilon(), spec.rope(l, positions)
	rope.Interleaved = !l.hf
	window := l.or("attention.sliding_window", 0, maxCtx)
	for i := 0; i < spec.Layers && l.err == nil; i++ {
		w := mixtralLayer{
			attn: spec.attention(l, i, eps, rope, false),
			moe: spec.expertLayer(l, i, fmt.Sprintf("blk.%d.ffn_norm.weight", i), eps, func(ids []int32, weights, scores []float32) {
				RouteSoftmax(ids, weights, scores, true)
			}),
		}
		w.attn.how.Window = window
		m.layer = append(m.layer, w)
	}
	for i := 1; i < len(m.layer); i++ {
		m.layer[i-1].moe.next = &m.layer[i].moe
	}
	return m
}

func (m *mixtral) run(ctx context.Context, l int, s *state) error {
	w := &m.layer[l]
	if err := w.attn.attend(ctx, l, s); err != nil {
		return err
	}
	return w.moe.compute(ctx, s)
}

func (m *mixtral) warm(s *state, last int) { m.layer[0].attn.warm(s, last) }

// mixtralNaming is Hugging Face's.
func mixtralNaming() naming {
	const layer = "model.layers.N.block_sparse_moe."
	return naming{tensors: map[string][]string{
		"blk.N.ffn_gate_inp":         {layer + "gate"},
		"blk.N.ffn_gate_exps.weight": {layer + "experts.*.w1.weight"},
		"blk.N.ffn_up_exps.weight":   {layer + "experts.*.w3.weight"},
		"blk.N.ffn_down_exps.weight": {layer + "experts.*.w2.weight"},
	}}
}
