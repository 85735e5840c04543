package moe

import (
	"context"
	"fmt"
	"math"

	"sluice/backends"
)

// Hunyuan-A13B (Tencent, 2025), architecture hunyuan-moe in GGUF.
//
//	x = embed(id)                                             [dim]
//	each layer:
//	  x = x + attention(RMSNorm(x))                           grouped-query, whole heads rotated (NeoX halves), norms of q and k behind that
//	  h = RMSNorm(x)
//	  x = x + sum over k routed experts w_i*expert_i(h) + shared(h)
//	logits = head(RMSNorm(x))
//
// The router is a softmax over all experts, the chosen weights normalised.
type hunyuan struct {
	layer []hunyuanLayer
}

type hunyuanLayer struct {
	attn gqa
	moe  experts
}

func openHunyuan(l *loader, spec *Spec, positions int) layers {
	spec.headSizes(l)
	spec.routed(l)
	spec.SharedExperts = l.or("expert_shared_count", 1, maxExperts)
	spec.SharedFF = l.or("expert_shared_feed_forward_length", 0, maxDim)
	if spec.SharedFF == 0 {
		spec.SharedFF = spec.SharedExperts * l.need("feed_forward_length", maxDim)
	}
	if l.bool("use_cla", false) {
		l.fail("layers share keys and values (use_cla), which is not supported")
	}
	m := &hunyuan{}
	eps, rope := l.epsilon(), l.hunyuanRope(spec, positions)
	for i := 0; i < spec.Layers && l.err == nil; i++ {
		w := hunyuanLayer{
			attn: spec.attention(l, i, eps, rope, true),
			moe: spec.expertLayer(l, i, fmt.Sprintf("blk.%d.ffn_norm.weight", i), eps, func(ids []int32, weights, scores []float32) {
				RouteSoftmax(ids, weights, scores, true)
			}),
		}
		shared := spec.feedForward(l, i, spec.SharedFF, "_shexp")
		w.moe.shared = &shared
		m.layer = append(m.layer, w)
	}
	for i := 1; i < len(m.layer); i++ {
		m.layer[i-1].moe.next = &m.layer[i].moe
	}
	return m
}

func (m *hunyuan) run(ctx context.Context, l int, s *state) error {
	w := &m.layer[l]
	w.attn.project(s)
	w.attn.rotate(s)
	w.attn.normalize(s)
	w.attn.look(l, s)
	s.be.Add(s.x, s.h)
	s.clock.lap(StageAttention)
	if err := ctx.Err(); err != nil {
		return err
	}
	return w.moe.compute(ctx, s)
}

func (m *hunyuan) warm(s *state, last int) { m.layer[0].attn.warm(s, last) }

// hunyuanRope is the rotations. A Hugging Face model has alpha, by which the
// base is raised for long contexts: base * alpha^(dims/(dims-2)); a converter to
// GGUF writes the base that comes of it.
func (l *loader) hunyuanRope(spec *Spec, positions int) *backends.Rope {
	if kind, _ := l.text("rope.scaling.type"); kind != "dynamic" {
		return spec.rope(l, positions)
	}
	alpha, dims := l.positive("rope.scaling.alpha", 0, 1e9), float64(spec.RopeDims)
	return newRope(positions, spec.RopeDims, l.ropeBase()*math.Pow(alpha, dims/max(dims-2, 1)))
}

// hunyuanNaming is Hugging Face's.
func hunyuanNaming() naming {
	const layer = "model.layers.N."
	return naming{
		tensors: map[string][]string{
			"blk.N.attn_q_norm":    {layer + "self_attn.query_layernorm"},
			"blk.N.attn_k_norm":    {layer + "self_attn.key_layernorm"},
			"blk.N.ffn_gate_inp":   {layer + "mlp.gate.wg"},
			"blk.N.ffn_gate_shexp": {layer + "mlp.shared_mlp.gate_proj"},
			"blk.N.ffn_up_shexp":   {layer + "mlp.shared_mlp.up_proj"},
			"blk.N.ffn_down_shexp": {layer + "mlp.shared_mlp.down_proj"},
		},
		keys: map[string][]string{
			"attention.key_length":       {"head_dim", "attention_head_dim"},
			"attention.value_length":     {"head_dim", "attention_head_dim"},
			"expert_used_count":          {"moe_topk"},
			"expert_feed_forward_length": {"moe_intermediate_size", "intermediate_size"},
			"expert_shared_count":        {"num_shared_expert"},
			"rope.scaling.alpha":         {"rope_parameters.alpha", "rope_scaling.alpha"},
		},
	}
}
