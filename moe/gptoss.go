package moe

import (
	"context"
	"fmt"

	"sluice/backends"
)

// gpt-oss (arXiv:2508.10925), architecture gpt-oss in GGUF.
//
//	x = embed(id)                                             [dim]
//	each layer:
//	  x = x + attention(RMSNorm(x))                           grouped-query, biased q k v o, whole heads rotated (NeoX halves, YaRN),
//	                                                          a sink in each head's softmax; even layers see a window of keys alone
//	  x = x + sum over k routed experts w_i*expert_i(RMSNorm(x))
//	logits = head(RMSNorm(x))
//
// The router has a bias and takes the best k, softmax over their scores alone.
// Experts have biases and a clamped SwiGLU (backends.ClampedSwiGLU). YaRN's
// borders are not rounded to whole pairs, and its magnitude multiplies queries
// and keys.
type gptOSS struct {
	layer []gptOSSLayer
}

type gptOSSLayer struct {
	attn gqa
	moe  experts
}

func openGPTOSS(l *loader, spec *Spec, positions int) layers {
	spec.headSizes(l)
	spec.routed(l)
	m := &gptOSS{}
	eps, base := l.epsilon(), l.ropeBase()
	freq, magnitude := ropeFrequencies(spec.RopeDims, base), 1.0
	if y := l.yarn(); y != nil {
		y.exact = true
		freq, magnitude = y.frequencies(spec.RopeDims, base), y.magnitude(1)
	}
	rope := ropeTable(positions, freq, magnitude)
	window := l.need("attention.sliding_window", maxCtx)
	for i := 0; i < spec.Layers && l.err == nil; i++ {
		p := fmt.Sprintf("blk.%d.", i)
		w := gptOSSLayer{
			attn: spec.attention(l, i, eps, rope, false),
			moe:  spec.expertLayer(l, i, p+"post_attention_norm.weight", eps, RouteChosenSoftmax),
		}
		for _, bias := range [...]struct {
			name string
			n    int
		}{{"attn_q", spec.Heads * spec.HeadDim}, {"attn_k", spec.KVHeads * spec.HeadDim}, {"attn_v", spec.KVHeads * spec.HeadDim}, {"attn_output", spec.Hidden}} {
			l.shaped(p+bias.name+".bias", bias.n) // attention takes them where they are; here they always are
		}
		w.attn.how.Sinks = l.vector(p+"attn_sinks.weight", spec.Heads)
		if i%2 == 0 {
			w.attn.how.Window = window
		}
		w.moe.router.Bias = l.vector(p+"ffn_gate_inp.bias", spec.Experts)
		w.moe.act = backends.ClampedSwiGLU
		w.moe.bias = [3][]float32{
			l.floats(p+"ffn_gate_exps.bias", spec.ExpertFF, spec.Experts),
			l.floats(p+"ffn_up_exps.bias", spec.ExpertFF, spec.Experts),
			l.floats(p+"ffn_down_exps.bias", spec.Hidden, spec.Experts),
		}
		m.layer = append(m.layer, w)
	}
	for i := 1; i < len(m.layer); i++ {
		m.layer[i-1].moe.next = &m.layer[i].moe
	}
	return m
}

func (m *gptOSS) run(ctx context.Context, l int, s *state) error {
	w := &m.layer[l]
	if err := w.attn.attend(ctx, l, s); err != nil {
		return err
	}
	return w.moe.compute(ctx, s)
}

func (m *gptOSS) warm(s *state, last int) {
	for i := range min(2, len(m.layer)) {
		m.layer[i].attn.warm(s, last)
	}
}
