package moe

import "fmt"

// Qwen3 (arXiv:2505.09388), architecture qwen3 in GGUF.
//
//	x = embed(id)                                             [dim]
//	each layer:
//	  x = x + attention(RMSNorm(x))                           grouped-query, norms of q and k, whole heads rotated (NeoX halves)
//	  x = x + ffn(RMSNorm(x))
//	logits = head(RMSNorm(x))
func openDenseQwen3(l *loader, spec *Spec, positions int) layers {
	spec.denseSizes(l)
	l.fullAttention()
	m := &plain{eps: l.epsilon()}
	rope := spec.rope(l, positions)
	for i := 0; i < spec.Layers && l.err == nil; i++ {
		m.layer = append(m.layer, plainLayer{
			attn: spec.attention(l, i, m.eps, rope, true),
			norm: l.vector(fmt.Sprintf("blk.%d.ffn_norm.weight", i), spec.Hidden),
			ffn:  spec.plainFeedForward(l, i),
		})
	}
	return m
}
