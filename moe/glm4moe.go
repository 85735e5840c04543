package moe

import (
	"context"
	"fmt"
)

// GLM-4.5 (arXiv:2508.06471), architecture glm4moe in GGUF.
//
//	x = embed(id)                                             [dim]
//	each layer:
//	  x = x + attention(RMSNorm(x))                           grouped-query, biased q k v, norms of q and k (larger models),
//	                                                          the first half of each head rotated (NeoX halves)
//	  h = RMSNorm(x)
//	  x = x + ffn(h)                                          the leading dense layers
//	  x = x + sum over k routed experts w_i*expert_i(h) + shared(h)
//	logits = head(RMSNorm(x))
//
// A nextn layer is a decoder layer with experts inside what nextn.go tells.
//
// The router is DeepSeek-V3's with one group: sigmoid scores, a correction bias
// that only chooses, weights normalised and scaled.
type glm4 struct {
	layer []glm4Layer
	eps   float32
	norm  bool    // expert_weights_norm
	scale float32 // expert_weights_scale
}

type glm4Layer struct {
	attn    gqa
	ffnNorm []float32 // [dim], of the leading layers, as ffn
	ffn     *dense    // nil: the layer has experts
	moe     experts
}

func openGLM4(l *loader, spec *Spec, positions int) layers {
	spec.headSizes(l)
	spec.routed(l)
	spec.LeadingDense = l.or("leading_dense_block_count", 0, spec.Layers)
	spec.sharedExperts(l, 1)
	if f := l.or("expert_gating_func", 2, 16); f != 2 {
		l.fail("expert gating function %d, want 2 (sigmoid)", f)
	}
	m := &glm4{
		eps:   l.epsilon(),
		norm:  l.bool("expert_weights_norm", true),
		scale: float32(l.positive("expert_weights_scale", 1, 0x1p40)),
	}
	if spec.LeadingDense > 0 {
		spec.FF = l.need("feed_forward_length", maxDim)
	}
	rope := spec.rope(l, positions)
	for i := 0; i < spec.opened() && l.err == nil; i++ {
		w := glm4Layer{
			attn: spec.attention(l, i, m.eps, rope, false),
		}
		norm := fmt.Sprintf("blk.%d.post_attention_norm.weight", i)
		if i < spec.LeadingDense {
			w.ffnNorm = l.vector(norm, spec.Hidden)
			ffn := spec.feedForward(l, i, spec.FF, "")
			w.ffn = &ffn
		} else {
			var bias []float32 // [experts], of the router's choice
			w.moe = spec.expertLayer(l, i, norm, m.eps, func(ids []int32, weights, scores []float32) {
				RouteSigmoid(ids, weights, scores, bias, m.norm, m.scale)
			})
			if name := fmt.Sprintf("blk.%d.exp_probs_b.bias", i); l.has(name) {
				bias = l.vector(name, spec.Experts)
			}
			if spec.SharedFF > 0 {
				shared := spec.feedForward(l, i, spec.SharedFF, "_shexp")
				w.moe.shared = &shared
			}
		}
		m.layer = append(m.layer, w)
	}
	for i := spec.LeadingDense + 1; i < min(spec.Layers, len(m.layer)); i++ {
		m.layer[i-1].moe.next = &m.layer[i].moe
	}
	return m
}

func (m *glm4) run(ctx context.Context, l int, s *state) error {
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

func (m *glm4) warm(s *state, last int) { m.layer[0].attn.warm(s, last) }
