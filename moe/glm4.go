package moe

import (
	"context"
	"fmt"

	"sluice/backends"
)

// GLM-4-0414, architecture glm4 in GGUF.
//
//	x = embed(id)                                             [dim]
//	each layer:
//	  x = x + RMSNorm(attention(RMSNorm(x)))                  grouped-query, biased q k v, the first half of each head rotated, by neighbours
//	  x = x + RMSNorm(ffn(RMSNorm(x)))
//	logits = head(RMSNorm(x))
//
// The gate and the up of the feed-forward are one matrix, the gate first. GGUF
// names it ffn_up.
type denseGLM4 struct {
	layer []denseGLM4Layer
	eps   float32
}

type denseGLM4Layer struct {
	plainLayer
	attnAfter, ffnAfter []float32 // [dim], norms of what is added
}

func openDenseGLM4(l *loader, spec *Spec, positions int) layers {
	spec.denseSizes(l)
	m := &denseGLM4{eps: l.epsilon()}
	rope := spec.rope(l, positions)
	rope.Interleaved = true
	for i := 0; i < spec.Layers && l.err == nil; i++ {
		p := fmt.Sprintf("blk.%d.", i)
		var w denseGLM4Layer
		w.attn = spec.projections(l, p, m.eps, rope)
		w.attnAfter = l.vector(p+"post_attention_norm.weight", spec.Hidden)
		w.norm = l.vector(p+"ffn_norm.weight", spec.Hidden)
		w.ffn = dense{backends.Expert{
			Gate: l.matrix(p+"ffn_up.weight[0/2]", spec.FF, spec.Hidden),
			Up:   l.matrix(p+"ffn_up.weight[1/2]", spec.FF, spec.Hidden),
			Down: l.matrix(p+"ffn_down.weight", spec.Hidden, spec.FF),
		}}
		w.ffnAfter = l.vector(p+"post_ffw_norm.weight", spec.Hidden)
		m.layer = append(m.layer, w)
	}
	return m
}

func (m *denseGLM4) run(ctx context.Context, l int, s *state) error {
	w := &m.layer[l]
	w.attn.project(s)
	w.attn.rotate(s)
	w.attn.look(l, s)
	s.be.RMSNorm(s.h, s.h, w.attnAfter, m.eps)
	s.be.Add(s.x, s.h)
	s.clock.lap(StageAttention)
	s.be.RMSNorm(s.h, s.x, w.norm, m.eps)
	w.ffn.compute(s.shared, s)
	s.be.RMSNorm(s.shared, s.shared, w.ffnAfter, m.eps)
	s.be.Add(s.x, s.shared)
	s.clock.lap(StageDense)
	return ctx.Err()
}

func (m *denseGLM4) warm(s *state, last int) { m.layer[0].attn.warm(s, last) }

// glm4Naming is Hugging Face's.
func glm4Naming() naming {
	const layer = "model.layers.N."
	return naming{tensors: map[string][]string{
		"blk.N.post_attention_norm": {layer + "post_self_attn_layernorm"},
		"blk.N.post_ffw_norm":       {layer + "post_mlp_layernorm"},
		"blk.N.ffn_up.weight[0/2]":  {layer + "mlp.gate_up_proj.weight[0/2]"},
		"blk.N.ffn_up.weight[1/2]":  {layer + "mlp.gate_up_proj.weight[1/2]"},
	}}
}
