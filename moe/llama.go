package moe

import "fmt"

// Llama 2 and 3 (arXiv:2307.09288, arXiv:2407.21783) and Mistral 7B
// (arXiv:2310.06825), architecture llama in GGUF, where it is that of Mixtral too.
//
//	x = embed(id)                                             [dim]
//	each layer:
//	  x = x + attention(RMSNorm(x))                           grouped-query, whole heads rotated; a window of keys in the first Mistral 7B
//	  x = x + ffn(RMSNorm(x))
//	logits = head(RMSNorm(x))
//
// Heads turn neighbours in GGUF files, where the rows of q and k are reordered to
// suit; elsewhere they turn halves.
func openLlama(l *loader, spec *Spec, positions int) layers {
	if n, _ := l.uint("expert_count", maxExperts); n > 0 && !l.hf {
		return openMixtral(l, spec, positions)
	}
	spec.denseSizes(l)
	m := &plain{eps: l.epsilon()}
	rope := spec.rope(l, positions)
	rope.Interleaved = !l.hf
	window := l.or("attention.sliding_window", 0, maxCtx)
	if window == 0 {
		l.fullAttention()
	}
	for i := 0; i < spec.Layers && l.err == nil; i++ {
		w := plainLayer{
			attn: spec.attention(l, i, m.eps, rope, false),
			norm: l.vector(fmt.Sprintf("blk.%d.ffn_norm.weight", i), spec.Hidden),
			ffn:  spec.plainFeedForward(l, i),
		}
		w.attn.how.Window = window
		m.layer = append(m.layer, w)
	}
	return m
}
