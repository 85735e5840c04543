package moe

import (
	"slices"
	"strconv"
	"strings"

	"sluice/tiers"
)

// Pages ask for tensors and numbers by the names that GGUF has for them. In a
// model of Hugging Face's layout the loader finds them by the tables below; what
// a family calls otherwise stands beside its row of families, and is looked at
// first. Where not only names differ but values (a converter adds 1 to norms,
// permutes rows, splits matrices), a page asks l.hf.

// A naming is what Hugging Face calls things.
type naming struct {
	// tensors, by GGUF's name with N for the number of the layer, with ".weight" or
	// ".bias" or without: then it stands for both, which are appended here too. The
	// first that the model has is taken. What begins with "model." may have another
	// prefix in a model that is part of a larger one. See storage.Model.View for
	// names of what is made of several tensors, or of a part of one.
	tensors map[string][]string
	// keys, by GGUF's key without the architecture, to paths in config.json.
	keys map[string][]string
	// fromOne are the vectors, by GGUF's name with N, to which 1 is added.
	fromOne []string
}

// hfNaming is what most families share.
func hfNaming() naming {
	const layer = "model.layers.N."
	return naming{
		tensors: map[string][]string{
			"token_embd":  {"model.embed_tokens"},
			"output_norm": {"model.norm"},
			"output":      {"lm_head"},

			"blk.N.attn_norm":   {layer + "input_layernorm"},
			"blk.N.attn_q":      {layer + "self_attn.q_proj"},
			"blk.N.attn_k":      {layer + "self_attn.k_proj"},
			"blk.N.attn_v":      {layer + "self_attn.v_proj"},
			"blk.N.attn_output": {layer + "self_attn.o_proj"},
			"blk.N.attn_q_norm": {layer + "self_attn.q_norm"},
			"blk.N.attn_k_norm": {layer + "self_attn.k_norm"},

			"blk.N.attn_q_a":       {layer + "self_attn.q_a_proj"},
			"blk.N.attn_q_a_norm":  {layer + "self_attn.q_a_layernorm"},
			"blk.N.attn_q_b":       {layer + "self_attn.q_b_proj"},
			"blk.N.attn_kv_a_mqa":  {layer + "self_attn.kv_a_proj_with_mqa"},
			"blk.N.attn_kv_a_norm": {layer + "self_attn.kv_a_layernorm"},
			"blk.N.attn_kv_b":      {layer + "self_attn.kv_b_proj"},

			"blk.N.ffn_norm":            {layer + "post_attention_layernorm"},
			"blk.N.post_attention_norm": {layer + "post_attention_layernorm"},

			"blk.N.ffn_gate": {layer + "mlp.gate_proj"},
			"blk.N.ffn_up":   {layer + "mlp.up_proj"},
			"blk.N.ffn_down": {layer + "mlp.down_proj"},

			"blk.N.ffn_gate_inp":     {layer + "mlp.gate"},
			"blk.N.exp_probs_b.bias": {layer + "mlp.gate.e_score_correction_bias"},

			"blk.N.ffn_gate_exps.weight": {layer + "mlp.experts.*.gate_proj.weight", layer + "mlp.experts.gate_up_proj[0/2]"},
			"blk.N.ffn_up_exps.weight":   {layer + "mlp.experts.*.up_proj.weight", layer + "mlp.experts.gate_up_proj[1/2]"},
			"blk.N.ffn_down_exps.weight": {layer + "mlp.experts.*.down_proj.weight", layer + "mlp.experts.down_proj"},

			"blk.N.ffn_gate_shexp":     {layer + "mlp.shared_experts.gate_proj", layer + "mlp.shared_expert.gate_proj"},
			"blk.N.ffn_up_shexp":       {layer + "mlp.shared_experts.up_proj", layer + "mlp.shared_expert.up_proj"},
			"blk.N.ffn_down_shexp":     {layer + "mlp.shared_experts.down_proj", layer + "mlp.shared_expert.down_proj"},
			"blk.N.ffn_gate_inp_shexp": {layer + "mlp.shared_expert_gate"},

			"blk.N.nextn.eh_proj":          {layer + "eh_proj"},
			"blk.N.nextn.enorm":            {layer + "enorm"},
			"blk.N.nextn.hnorm":            {layer + "hnorm"},
			"blk.N.nextn.embed_tokens":     {layer + "embed_tokens"},
			"blk.N.nextn.shared_head_norm": {layer + "shared_head.norm"},
			"blk.N.nextn.shared_head_head": {layer + "shared_head.head"},
		},
		keys: map[string][]string{
			"block_count":          {"num_hidden_layers"},
			"nextn_predict_layers": {"num_nextn_predict_layers"},
			"embedding_length":     {"hidden_size"},
			"context_length":       {"max_position_embeddings"},
			"feed_forward_length":  {"intermediate_size"},

			"attention.head_count":             {"num_attention_heads"},
			"attention.head_count_kv":          {"num_key_value_heads"},
			"attention.key_length":             {"head_dim"},
			"attention.value_length":           {"head_dim"},
			"attention.layer_norm_rms_epsilon": {"rms_norm_eps"},
			"attention.q_lora_rank":            {"q_lora_rank"},
			"attention.kv_lora_rank":           {"kv_lora_rank"},
			"attention.sliding_window":         {"sliding_window"},

			"rope.freq_base":      {"rope_parameters.rope_theta", "rope_theta"},
			"rope.scaling.type":   {"rope_parameters.rope_type", "rope_scaling.rope_type", "rope_scaling.type"},
			"rope.scaling.factor": {"rope_parameters.factor", "rope_scaling.factor"},
			"rope.scaling.original_context_length": {"rope_parameters.original_max_position_embeddings",
				"rope_scaling.original_max_position_embeddings"},
			"rope.scaling.low_freq_factor":  {"rope_parameters.low_freq_factor", "rope_scaling.low_freq_factor"},
			"rope.scaling.high_freq_factor": {"rope_parameters.high_freq_factor", "rope_scaling.high_freq_factor"},
			"rope.scaling.yarn_beta_fast":   {"rope_parameters.beta_fast", "rope_scaling.beta_fast"},
			"rope.scaling.yarn_beta_slow":   {"rope_parameters.beta_slow", "rope_scaling.beta_slow"},

			"expert_count":               {"n_routed_experts", "num_experts", "num_local_experts"},
			"expert_used_count":          {"num_experts_per_tok"},
			"expert_feed_forward_length": {"moe_intermediate_size"},
			"expert_shared_count":        {"n_shared_experts"},
			"expert_weights_norm":        {"norm_topk_prob"},
			"expert_weights_scale":       {"routed_scaling_factor"},
			"expert_group_count":         {"n_group"},
			"expert_group_used_count":    {"topk_group"},
			"leading_dense_block_count":  {"first_k_dense_replace"},
		},
	}
}

// modelType is the family that a model of Hugging Face's layout names, without
// the "_text" of those that are part of a larger one.
func modelType(m tiers.Meta) (string, bool) {
	t, ok := m.String(hfPrefix + "model_type")
	return strings.TrimSuffix(t, "_text"), ok
}

// hfPrefix goes before the paths in config.json.
const hfPrefix = "config."

// candidates are the names that a tensor may have in the file.
func (l *loader) candidates(name string) []string {
	if !l.hf {
		return []string{name}
	}
	key, layer := numbered(name)
	var found []string
	for _, table := range [...]map[string][]string{l.fam.hfNames.tensors, l.shared.tensors} {
		for _, suffix := range [...]string{"", ".weight", ".bias"} {
			stem, ok := strings.CutSuffix(key, suffix)
			if !ok {
				continue
			}
			for _, c := range table[stem] {
				found = append(found, l.prefixed(strings.Replace(c, ".N.", "."+layer+".", 1)+suffix))
			}
		}
	}
	if found == nil {
		return []string{name} // which it does not have
	}
	return found
}

// numbered is a name with N for the number of the layer, and that number.
func numbered(name string) (key, layer string) {
	if rest, ok := strings.CutPrefix(name, "blk."); ok {
		if no, rest, ok := strings.Cut(rest, "."); ok {
			return "blk.N." + rest, no
		}
	}
	return name, ""
}

// lacksOne says that the file has a vector of this name as what is added to 1.
func (l *loader) lacksOne(name string) bool {
	key, _ := numbered(name)
	return l.hf && slices.Contains(l.fam.hfNames.fromOne, key)
}

// prefixed is a name as it is in this file, which may be of a model that is a
// part of a larger one.
func (l *loader) prefixed(name string) string {
	if rest, ok := strings.CutPrefix(name, "model."); ok {
		return l.prefix + rest
	}
	if strings.HasPrefix(l.prefix, "language_model.") {
		return "language_model." + name
	}
	return name
}

// findPrefix looks what the names of the model's tensors begin with.
func (l *loader) findPrefix() {
	for _, p := range [...]string{"model.", "model.language_model.", "language_model.model."} {
		if _, ok := l.file.Tensor(p + "embed_tokens.weight"); ok {
			l.prefix = p
			return
		}
	}
	l.prefix = "model."
}

// key is where a number of the model stands in the metadata: the first there is
// of the keys that it may have.
func (l *loader) key(key string) string {
	if !l.hf {
		return l.arch + "." + key
	}
	first := ""
	for _, table := range [...]map[string][]string{l.fam.hfNames.keys, l.shared.keys} {
		for _, c := range table[key] {
			if l.file.Meta.Has(hfPrefix + c) {
				return hfPrefix + c
			}
			if first == "" {
				first = hfPrefix + c
			}
		}
	}
	if first == "" {
		return hfPrefix + key
	}
	return first
}

// derived is a count that follows from others in a config.json.
func (l *loader) derived(key string) (uint64, bool) {
	meta := l.file.Meta
	switch key {
	case "rope.dimension_count":
		if n, ok := meta.Uint(hfPrefix + "qk_rope_head_dim"); ok {
			return n, true
		}
		dim, ok := meta.Uint(l.key("attention.key_length"))
		if !ok {
			hidden, _ := meta.Uint(l.key("embedding_length"))
			heads, _ := meta.Uint(l.key("attention.head_count"))
			dim = hidden / max(1, heads)
		}
		share, ok := meta.Float(hfPrefix + "rope_parameters.partial_rotary_factor")
		if !ok {
			share, ok = meta.Float(hfPrefix + "partial_rotary_factor")
		}
		if !ok || !(share > 0 && share <= 1) || dim > maxDim {
			return dim, dim > 0
		}
		return uint64(float64(dim) * share), true
	case "ssm.inner_size":
		heads, _ := meta.Uint(hfPrefix + "linear_num_value_heads")
		dim, ok := meta.Uint(hfPrefix + "linear_value_head_dim")
		if !ok || heads > maxDim || dim > maxDim {
			return 0, false
		}
		return heads * dim, true
	case "expert_gating_func":
		switch kind, _ := meta.String(hfPrefix + "scoring_func"); kind {
		case "softmax":
			return 1, true
		case "sigmoid":
			return 2, true
		}
	}
	return 0, false
}

// fullAttention refuses a model some of whose layers see a window of keys alone,
// for a page that does not.
func (l *loader) fullAttention() {
	if windows, _ := l.file.Meta.Bool(hfPrefix + "use_sliding_window"); windows {
		l.fail("some layers see a window of keys (use_sliding_window), only full attention is supported for this family")
		return
	}
	kinds, _ := l.file.Meta.Strings(hfPrefix + "layer_types")
	for i, kind := range kinds {
		if kind != "full_attention" {
			l.fail("layer %d is of the kind %q (layer_types), only full_attention is supported for this family", i, kind)
			return
		}
	}
}

// missingExpert says of a stack that is made of one tensor for each expert which
// of n experts is missing; "" if none is.
func missingExpert(t tiers.Tensor, n int) string {
	if have := t.Dims[len(t.Dims)-1]; strings.Contains(t.Name, "*") && have < int64(n) {
		return strings.Replace(t.Name, "*", strconv.FormatInt(have, 10), 1)
	}
	return ""
}
