package moe

import "fmt"

// Qwen2 and Qwen2.5 (arXiv:2407.10671), architecture qwen2 in GGUF.
//
//	x = embed(id)                                             [dim]
//	each layer:
//	  x = x + attention(RMSNorm(x))                           grouped-query, biased q k v, whole heads rotated (NeoX halves)
//	  x = x + ffn(RMSNorm(x))
//	logits = head(RMSNorm(x))
func openDenseQwen2(l *loader, spec *Spec, positions int) layers {
	spec.denseSizes(l)
	l.fullAttention()
	m := &plain{eps: l.epsilon()}
	rope := spec.rope(l, positions)
	for i := 0; i < spec.Layers && l.err == nil; i++ {
		for _, part := range []string{"q", "k", "v"} { // taken with their matrices, if they are there
			if name := fmt.Sprintf("blk.%d.attn_%s.bias", i, part); !l.has(name) {
				l.missing(name)
			}
		}
		m.layer = append(m.layer, plainLayer{
			attn: spec.attention(l, i, m.eps, rope, false),
			norm: l.vector(fmt.Sprintf("blk.%d.ffn_norm.weight", i), spec.Hidden),
			ffn:  spec.plainFeedForward(l, i),
		})
	}
	return m
}
