package moe

import (
	"context"
	"fmt"
)

// DeepSeek-V2 (arXiv:2405.04434), V3 (arXiv:2412.19437) and Kimi K2
// (arXiv:2507.20534), architecture deepseek2 in GGUF; DeepSeek-V3.2
// (arXiv:2512.02556), deepseek32; GLM-5 (arXiv:2602.15763), glm-dsa.
//
//	x = embed(id)                                             [dim]
//	each layer:
//	  x = x + attention(RMSNorm(x))                           multi-head latent attention (mla.go), of the last two with an
//	                                                          indexer (indexer.go), which GLM-5 may share among layers
//	  h = RMSNorm(x)
//	  x = x + ffn(h)                                          the leading dense layers
//	  x = x + sum over k routed experts w_i*expert_i(h) + shared(h)
//	logits = head(RMSNorm(x))
//
// The router of V2 is a softmax over all experts, of V3 and later sigmoids with a
// correction bias that only chooses; either may choose among the experts of some
// groups alone. A nextn layer is a decoder layer with experts inside what
// nextn.go tells.
type deepseek struct {
	layer []deepseekLayer
	eps   float32
}

type deepseekLayer struct {
	attn    mla
	ffnNorm []float32 // [dim], of the leading layers, as ffn
	ffn     *dense    // nil: the layer has experts
	moe     experts
}

func openDeepSeek2(l *loader, spec *Spec, positions int) layers {
	return openDeepSeek(l, spec, positions, spec.latentHeads(l, positions, false, false))
}

func openDeepSeek32(l *loader, spec *Spec, positions int) layers {
	return openDeepSeek(l, spec, positions, spec.latentHeads(l, positions, true, false))
}

func openGLMDSA(l *loader, spec *Spec, positions int) layers {
	return openDeepSeek(l, spec, positions, spec.latentHeads(l, positions, true, true))
}

func openDeepSeek(l *loader, spec *Spec, positions int, heads mlaSpec) layers {
	groups := spec.routedInGroups(l)
	spec.LeadingDense = l.or("leading_dense_block_count", 0, spec.Layers)
	spec.sharedExperts(l, 0)
	if spec.LeadingDense > 0 {
		spec.FF = l.need("feed_forward_length", maxDim)
	}
	if n := l.or("moe_layer_freq", 1, maxLayers); n != 1 {
		l.fail("experts in one of %d layers: this version knows them in every layer behind the dense ones", n)
	}
	route := deepseekRouter(l, &groups)
	m := &deepseek{eps: l.epsilon()}
	indexed := l.indexed(spec, heads)
	rows := 0 // of the indexers' cache
	for i := 0; i < spec.opened() && l.err == nil; i++ {
		full := heads.most > 0 && (i >= spec.Layers || indexed[i])
		w := deepseekLayer{attn: spec.latentAttention(l, i, m.eps, heads, full, rows)}
		if full {
			rows++
		}
		norm := fmt.Sprintf("blk.%d.ffn_norm.weight", i)
		if i < spec.LeadingDense {
			w.ffnNorm = l.vector(norm, spec.Hidden)
			ffn := spec.feedForward(l, i, spec.FF, "")
			w.ffn = &ffn
		} else {
			bias := spec.correctionBias(l, i)
			w.moe = spec.expertLayer(l, i, norm, m.eps, func(ids []int32, weights, scores []float32) { route(ids, weights, scores, bias) })
			if spec.SharedFF > 0 {
				shared := spec.feedForward(l, i, spec.SharedFF, "_shexp")
				w.moe.shared = &shared
			}
		}
		m.layer = append(m.layer, w)
		if i < spec.Layers {
			spec.index.Layers = rows
		}
	}
	for i := spec.LeadingDense + 1; i < min(spec.Layers, len(m.layer)); i++ {
		m.layer[i-1].moe.next = &m.layer[i].moe
	}
	return m
}

// deepseekRouter is how a model of the family routes one position.
func deepseekRouter(l *loader, groups *Groups) func(ids []int32, weights, scores, bias []float32) {
	norm := l.bool("expert_weights_norm", false)
	scale := float32(l.positive("expert_weights_scale", 1, 0x1p40))
	kind := 2
	if l.arch == "deepseek2" && (!l.hf || l.file.Meta.Value(hfPrefix+"model_type") == "deepseek_v2") {
		kind = 1 // the first files of V2 do not say it
	}
	if method, ok := l.file.Meta.String(hfPrefix + "topk_method"); ok && method == "greedy" {
		*groups = Groups{}
	}
	switch kind = l.or("expert_gating_func", kind, 16); kind {
	case 1:
		return func(ids []int32, weights, scores, _ []float32) {
			RouteSoftmaxGrouped(ids, weights, scores, *groups, norm, scale)
		}
	case 2:
		return func(ids []int32, weights, scores, bias []float32) {
			RouteSigmoidGrouped(ids, weights, scores, bias, *groups, norm, scale)
		}
	}
	l.fail("expert gating function %d, want 1 (softmax) or 2 (sigmoid)", kind)
	return nil
}

// indexed says which layers have an indexer of their own: all, unless the file
// names those that share the keys of the layer before.
func (l *loader) indexed(spec *Spec, m mlaSpec) []bool {
	all := make([]bool, spec.Layers)
	for i := range all {
		all[i] = m.most > 0
	}
	key := l.key("attention.indexer.types")
	if m.most == 0 || !l.file.Meta.Has(key) {
		return all
	}
	switch v := l.file.Meta.Value(key).(type) {
	case []bool:
		if len(v) >= spec.Layers {
			copy(all, v)
		} else {
			l.fail("%s is of %d layers of %d", key, len(v), spec.Layers)
		}
	case []string:
		if len(v) < spec.Layers {
			l.fail("%s is of %d layers of %d", key, len(v), spec.Layers)
			break
		}
		for i := range all {
			if all[i] = v[i] == "full"; !all[i] && v[i] != "shared" {
				l.fail("%s has %q for layer %d, want full or shared", key, v[i], i)
			}
		}
	default:
		l.fail("%s is no list of layers", key)
	}
	if len(all) > 0 && !all[0] {
		l.fail("%s: layer 0 shares the keys of a layer before it", key)
	}
	return all
}

// deepseekNaming is what these families alone have in Hugging Face's layout.
func deepseekNaming() naming {
	const layer = "model.layers.N.self_attn.indexer."
	return naming{
		tensors: map[string][]string{
			"blk.N.indexer.attn_q_b": {layer + "wq_b"},
			"blk.N.indexer.attn_k":   {layer + "wk"},
			"blk.N.indexer.k_norm":   {layer + "k_norm"},
			"blk.N.indexer.proj":     {layer + "weights_proj"},
		},
		keys: map[string][]string{
			"attention.indexer.head_count": {"index_n_heads"},
			"attention.indexer.key_length": {"index_head_dim"},
			"attention.indexer.top_k":      {"index_topk"},
			"attention.indexer.types":      {"indexer_types"},
			"rope.scaling.mscale":          {"rope_parameters.mscale", "rope_scaling.mscale"},
			"rope.scaling.mscale_all_dim":  {"rope_parameters.mscale_all_dim", "rope_scaling.mscale_all_dim"},
		},
	}
}

func (m *deepseek) run(ctx context.Context, l int, s *state) error {
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

func (m *deepseek) warm(s *state, last int) { m.layer[0].attn.warm(s, last) }
