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
		y.exact = !l.bool("rope.scaling.truncate", false)
		freq, magnitude = y.frequencies(spec.RopeDims, base), y.magnitude(1)
	}
	rope := ropeTable(positions, freq, magnitude)
	window := l.need("attention.sliding_window", maxCtx)
	if v := l.float("expert_clamp", 7); v != 7 {
		l.fail("experts are clamped at %v, only 7 is supported", v)
	}
	local := l.localLayers(spec.Layers)
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
		if local[i] {
			w.attn.how.Window = window
		}
		w.moe.router.Bias = l.vector(p+"ffn_gate_inp.bias", spec.Experts)
		w.moe.act = backends.ClampedSwiGLU
		w.moe.bias[2] = l.floats(p+"ffn_down_exps.bias", spec.Hidden, spec.Experts)
		if l.hf {
			both := l.floats(p+"ffn_gate_up_exps.bias", 2*spec.ExpertFF, spec.Experts) // in turns
			w.moe.bias[0], w.moe.bias[1] = inTurns(both)
		} else {
			w.moe.bias[0] = l.floats(p+"ffn_gate_exps.bias", spec.ExpertFF, spec.Experts)
			w.moe.bias[1] = l.floats(p+"ffn_up_exps.bias", spec.ExpertFF, spec.Experts)
		}
		m.layer = append(m.layer, w)
	}
	for i := 1; i < len(m.layer); i++ {
		m.layer[i-1].moe.next = &m.layer[i].moe
	}
	return m
}

// gptOSSNaming is Hugging Face's. The published files have experts of MXFP4, whose
// rows are those of gate and up in turns; files of floats have them transposed.
func gptOSSNaming() naming {
	const layer = "model.layers.N."
	const experts = layer + "mlp.experts."
	return naming{
		tensors: map[string][]string{
			"blk.N.attn_sinks.weight":     {layer + "self_attn.sinks"},
			"blk.N.ffn_gate_inp":          {layer + "mlp.router"},
			"blk.N.ffn_gate_exps.weight":  {experts + "gate_up_proj[T0%2]", experts + "gate_up_proj[0%2]"},
			"blk.N.ffn_up_exps.weight":    {experts + "gate_up_proj[T1%2]", experts + "gate_up_proj[1%2]"},
			"blk.N.ffn_down_exps.weight":  {experts + "down_proj[T]", experts + "down_proj"},
			"blk.N.ffn_gate_up_exps.bias": {experts + "gate_up_proj_bias"},
			"blk.N.ffn_down_exps.bias":    {experts + "down_proj_bias"},
		},
		keys: map[string][]string{
			"expert_feed_forward_length": {"intermediate_size"},
			"expert_clamp":               {"swiglu_limit"},
			"rope.scaling.truncate":      {"rope_parameters.truncate", "rope_scaling.truncate"},
		},
	}
}

// localLayers says which layers see a window alone: the even ones, if the model
// does not say.
func (l *loader) localLayers(n int) []bool {
	local := make([]bool, n)
	kinds, told := l.file.Meta.Strings(hfPrefix + "layer_types")
	if told && len(kinds) != n {
		l.fail("layer_types has %d entries for %d layers", len(kinds), n)
		return local
	}
	for i := range local {
		switch {
		case !told:
			local[i] = i%2 == 0
		case kinds[i] == "sliding_attention":
			local[i] = true
		case kinds[i] != "full_attention":
			l.fail("layer %d is of the type %q: sliding_attention and full_attention are supported", i, kinds[i])
		}
	}
	return local
}

// inTurns takes apart what stands in turns: even and odd elements, which it puts
// into the first and second half of x; empty ones of an empty x.
func inTurns(x []float32) (even, odd []float32) {
	second := make([]float32, len(x)/2)
	for i := range second {
		second[i], x[i] = x[2*i+1], x[2*i]
	}
	copy(x[len(second):], second)
	return x[:len(second)], x[len(second):]
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
