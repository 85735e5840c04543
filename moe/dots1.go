package moe

import (
	"context"
	"fmt"
)

// dots.llm1 (arXiv:2506.05767), architecture dots1 in GGUF.
//
//	x = embed(id)                                             [dim]
//	each layer:
//	  x = x + attention(RMSNorm(x))                           multi-head, norms of q and k, whole heads rotated (NeoX halves)
//	  h = RMSNorm(x)
//	  x = x + ffn(h)                                          the leading dense layers
//	  x = x + sum over k routed experts w_i*expert_i(h) + shared(h)
//	logits = head(RMSNorm(x))
//
// The router is DeepSeek-V3's: sigmoid scores, a correction bias that only
// chooses, first among groups of experts, weights normalised and scaled.
type dots1 struct {
	layer []dots1Layer
	eps   float32
}

type dots1Layer struct {
	attn    gqa
	ffnNorm []float32 // [dim], of the leading layers, as ffn
	ffn     *dense    // nil: the layer has experts
	moe     experts
}

func openDots1(l *loader, spec *Spec, positions int) layers {
	spec.heads(l)
	l.fullAttention()
	groups := spec.routedInGroups(l)
	spec.sharedExperts(l, 0)
	spec.LeadingDense = l.or("leading_dense_block_count", 0, spec.Layers)
	if f := l.or("expert_gating_func", 2, 16); f != 2 {
		l.fail("expert gating function %d, want 2 (sigmoid)", f)
	}
	if spec.LeadingDense > 0 {
		spec.FF = l.need("feed_forward_length", maxDim)
	}
	norm, scale := l.bool("expert_weights_norm", true), float32(l.positive("expert_weights_scale", 1, 0x1p40))
	m := &dots1{eps: l.epsilon()}
	rope := newRope(positions, spec.RopeDims, l.ropeBase())
	for i := 0; i < spec.Layers && l.err == nil; i++ {
		w := dots1Layer{attn: spec.attention(l, i, m.eps, rope, true)}
		name := fmt.Sprintf("blk.%d.ffn_norm.weight", i)
		if i < spec.LeadingDense {
			ffn := spec.feedForward(l, i, spec.FF, "")
			w.ffnNorm, w.ffn = l.vector(name, spec.Hidden), &ffn
		} else {
			bias := spec.correctionBias(l, i)
			w.moe = spec.expertLayer(l, i, name, m.eps, func(ids []int32, weights, scores []float32) {
				RouteSigmoidGrouped(ids, weights, scores, bias, groups, norm, scale)
			})
			if spec.SharedFF > 0 {
				shared := spec.feedForward(l, i, spec.SharedFF, "_shexp")
				w.moe.shared = &shared
			}
		}
		m.layer = append(m.layer, w)
	}
	for i := spec.LeadingDense + 1; i < len(m.layer); i++ {
		m.layer[i-1].moe.next = &m.layer[i].moe
	}
	return m
}

func (m *dots1) run(ctx context.Context, l int, s *state) error {
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

func (m *dots1) warm(s *state, last int) { m.layer[0].attn.warm(s, last) }
