package moe

import (
	"context"
	"fmt"
)

// Qwen3-Next and Qwen3.5-MoE, architectures qwen3next and qwen35moe in GGUF.
//
//	x = embed(id)                                             [dim]
//	each layer:
//	  x = x + attention(RMSNorm(x))                           every fourth layer: grouped-query, norms of q and k, the first part of each
//	                                                          head rotated (NeoX halves), times sigmoid(a gate for each float)
//	  x = x + deltaNet(RMSNorm(x))                            the others: a gated delta net, which keeps a matrix for each head
//	  h = RMSNorm(x)
//	  x = x + sum over k routed experts w_i*expert_i(h) + sigmoid(gate . h)*shared(h)
//	logits = head(RMSNorm(x))
//
// The router is a softmax over all experts, the chosen weights normalised. Drafting
// layers have full attention.
//
// Files of Qwen3-Next have value heads in the order of their key heads (head h
// reads key head h / (value heads / key heads)); GGUF files of Qwen3.5 have them
// dealt out (head h reads key head h mod key heads), which converters made by
// moving rows and columns. Sections of the rotation (rope.dimension_sections) are
// for positions of images: in a text all sections have the same position.
type qwen3Next struct {
	layer []qwen3NextLayer
}

type qwen3NextLayer struct {
	full  *gatedGQA // nil: delta
	delta *deltaNet
	state int // number of the layer among those of its kind
	moe   experts
}

func openQwen3Next(l *loader, spec *Spec, positions int) layers {
	return openDelta(l, spec, positions, false)
}

func openQwen35(l *loader, spec *Spec, positions int) layers {
	return openDelta(l, spec, positions, !l.hf)
}

func openDelta(l *loader, spec *Spec, positions int, tiled bool) layers {
	spec.heads(l)
	spec.routed(l)
	every := l.or("full_attention_interval", 4, maxLayers)
	if every < 2 || every > spec.Layers {
		l.fail("full attention every %d of %d layers: the family has layers of both kinds", every, spec.Layers)
		return nil
	}
	spec.cache.Layers = spec.Layers / every
	spec.deltaSizes(l, spec.Layers-spec.cache.Layers)
	spec.SharedExperts = 1
	spec.SharedFF = l.need("expert_shared_feed_forward_length", maxDim)
	eps, norm, rope := l.epsilon(), l.bool("expert_weights_norm", true), spec.rope(l, positions)
	if f := l.positive("expert_weights_scale", 1, 0x1p40); f != 1 {
		l.fail("weights of experts are scaled by %v: this family takes them as they are", f)
	}
	both, gate := spec.gatedVectors()
	shared := spec.vector(1)
	m := &qwen3Next{}
	for i := 0; i < spec.opened() && l.err == nil; i++ {
		w := qwen3NextLayer{
			moe: spec.expertLayer(l, i, fmt.Sprintf("blk.%d.post_attention_norm.weight", i), eps, func(ids []int32, weights, scores []float32) {
				RouteSoftmax(ids, weights, scores, norm)
			}),
		}
		w.moe.shared = spec.gatedFeedForward(l, i, spec.SharedFF, "_shexp", shared)
		switch {
		case i >= spec.Layers: // the caches of drafts are behind those of decoding
			w.state = spec.cache.Layers + i - spec.Layers
		case (i+1)%every == 0:
			w.state = i / every
		default:
			w.state = i - i/every
		}
		if i >= spec.Layers || (i+1)%every == 0 {
			a := spec.gatedAttention(l, i, eps, rope, both, gate)
			w.full = &a
		} else {
			d := spec.deltaNet(l, i, eps, tiled)
			w.delta = &d
		}
		m.layer = append(m.layer, w)
	}
	for i := 1; i < min(spec.Layers, len(m.layer)); i++ {
		m.layer[i-1].moe.next = &m.layer[i].moe
	}
	return m
}

func (m *qwen3Next) run(ctx context.Context, l int, s *state) error {
	w := &m.layer[l]
	var err error
	if w.full != nil {
		err = w.full.attend(ctx, w.state, s)
	} else {
		err = w.delta.attend(ctx, w.state, s)
	}
	if err != nil {
		return err
	}
	return w.moe.compute(ctx, s)
}

func (m *qwen3Next) warm(s *state, last int) {
	for i := range m.layer {
		if a := m.layer[i].full; a != nil {
			a.warm(s, last)
			break
		}
	}
	m.layer[0].delta.warm(s)
}

// qwen3NextNaming is what Hugging Face calls the tensors and numbers. Of the norms
// only those of the gated delta nets are stored whole.
func qwen3NextNaming() naming {
	const layer = "model.layers.N.linear_attn."
	return naming{
		tensors: map[string][]string{
			"blk.N.ssm_in":      {layer + "in_proj_qkvz"},
			"blk.N.ssm_ba":      {layer + "in_proj_ba"},
			"blk.N.attn_qkv":    {layer + "in_proj_qkv"},
			"blk.N.attn_gate":   {layer + "in_proj_z"},
			"blk.N.ssm_beta":    {layer + "in_proj_b"},
			"blk.N.ssm_alpha":   {layer + "in_proj_a"},
			"blk.N.ssm_conv1d":  {layer + "conv1d"},
			"blk.N.ssm_a":       {layer + "A_log"},
			"blk.N.ssm_dt.bias": {layer + "dt_bias"},
			"blk.N.ssm_norm":    {layer + "norm"},
			"blk.N.ssm_out":     {layer + "out_proj"},
		},
		keys: map[string][]string{
			"ssm.group_count":                   {"linear_num_key_heads"},
			"ssm.time_step_rank":                {"linear_num_value_heads"},
			"ssm.state_size":                    {"linear_key_head_dim"},
			"ssm.conv_kernel":                   {"linear_conv_kernel_dim"},
			"expert_shared_feed_forward_length": {"shared_expert_intermediate_size"},
		},
		fromOne: []string{"output_norm.weight", "blk.N.attn_norm.weight", "blk.N.post_attention_norm.weight", "blk.N.attn_q_norm.weight", "blk.N.attn_k_norm.weight"},
	}
}
