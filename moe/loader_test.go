package moe

import (
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"sluice/backends"
	"sluice/internal/quant"
	"sluice/storage"
)

// A header is a model file without its weights, which Describe does not read.
type header struct {
	meta    []storage.KV
	tensors []storage.TensorSpec
}

func (h *header) set(key string, v any) {
	if i := slices.IndexFunc(h.meta, func(kv storage.KV) bool { return kv.Key == key }); i >= 0 {
		h.meta[i].Value = v
		return
	}
	h.meta = append(h.meta, storage.KV{Key: key, Value: v})
}

func (h *header) unset(key string) {
	h.meta = slices.DeleteFunc(h.meta, func(kv storage.KV) bool { return kv.Key == key })
}

func (h *header) add(name string, dims ...int64) {
	h.tensors = append(h.tensors, storage.TensorSpec{Name: name, Type: quant.F32, Dims: dims})
}

func (h *header) drop(name string) {
	h.tensors = slices.DeleteFunc(h.tensors, func(t storage.TensorSpec) bool { return t.Name == name })
}

func (h *header) tensor(name string) *storage.TensorSpec {
	return &h.tensors[slices.IndexFunc(h.tensors, func(t storage.TensorSpec) bool { return t.Name == name })]
}

// headers of small models, by architecture: width 32, 2 heads and 1 key-value
// head of 16, 4 experts of width 64, top-2.
func headers() map[string]header {
	layer := func(h *header, i int, ffnNorm string) {
		p := fmt.Sprintf("blk.%d.", i)
		h.add(p+"attn_norm.weight", 32)
		h.add(p+"attn_q.weight", 32, 32)
		h.add(p+"attn_k.weight", 32, 16)
		h.add(p+"attn_v.weight", 32, 16)
		h.add(p+"attn_output.weight", 32, 32)
		h.add(p+"attn_q_norm.weight", 16)
		h.add(p+"attn_k_norm.weight", 16)
		h.add(p+ffnNorm, 32)
	}
	routed := func(h *header, i int) {
		p := fmt.Sprintf("blk.%d.", i)
		h.add(p+"ffn_gate_inp.weight", 32, 4)
		h.add(p+"ffn_gate_exps.weight", 32, 64, 4)
		h.add(p+"ffn_up_exps.weight", 32, 64, 4)
		h.add(p+"ffn_down_exps.weight", 64, 32, 4)
	}
	model := func(arch string, layers uint32) (h header) {
		h.set("general.architecture", arch)
		h.set("general.name", "Small")
		for _, kv := range []storage.KV{
			{Key: "block_count", Value: layers}, {Key: "embedding_length", Value: uint32(32)}, {Key: "context_length", Value: uint32(64)},
			{Key: "attention.head_count", Value: uint32(2)}, {Key: "attention.head_count_kv", Value: uint32(1)},
			{Key: "attention.key_length", Value: uint32(16)}, {Key: "attention.value_length", Value: uint32(16)},
			{Key: "attention.layer_norm_rms_epsilon", Value: float32(1e-5)},
			{Key: "rope.freq_base", Value: float32(10000)}, {Key: "rope.dimension_count", Value: uint32(8)},
			{Key: "expert_count", Value: uint32(4)}, {Key: "expert_used_count", Value: uint32(2)}, {Key: "expert_feed_forward_length", Value: uint32(64)},
			{Key: "expert_weights_norm", Value: true},
		} {
			h.set(arch+"."+kv.Key, kv.Value)
		}
		h.set("tokenizer.ggml.tokens", []string{"a", "b", "c"})
		h.add("token_embd.weight", 32, 3)
		h.add("output_norm.weight", 32)
		h.add("output.weight", 32, 3)
		return h
	}

	glm := model("glm4moe", 3)
	for key, v := range map[string]any{
		"feed_forward_length": uint32(96), "leading_dense_block_count": uint32(1), "expert_shared_count": uint32(1), "expert_gating_func": uint32(2),
		"expert_weights_scale": float32(2.5), "nextn_predict_layers": uint32(0), "expert_group_count": uint32(1), "rope.scaling.type": "none",
	} {
		glm.set("glm4moe."+key, v)
	}
	for i := range 3 {
		p := fmt.Sprintf("blk.%d.", i)
		layer(&glm, i, "post_attention_norm.weight")
		glm.add(p+"attn_q.bias", 32)
		if i == 0 {
			glm.add(p+"ffn_gate.weight", 32, 96)
			glm.add(p+"ffn_up.weight", 32, 96)
			glm.add(p+"ffn_down.weight", 96, 32)
			continue
		}
		routed(&glm, i)
		glm.add(p+"exp_probs_b.bias", 4)
		glm.add(p+"ffn_gate_shexp.weight", 32, 64)
		glm.add(p+"ffn_up_shexp.weight", 32, 64)
		glm.add(p+"ffn_down_shexp.weight", 64, 32)
	}
	qwen := model("qwen3moe", 2)
	for i := range 2 {
		layer(&qwen, i, "ffn_norm.weight")
		routed(&qwen, i)
	}
	all := map[string]header{"glm4moe": glm, "qwen3moe": qwen}

	oss := model("gpt-oss", 2)
	for key, v := range map[string]any{
		"attention.sliding_window": uint32(8), "rope.scaling.type": "yarn", "rope.scaling.factor": float32(32),
		"rope.scaling.original_context_length": uint32(16), "rope.scaling.yarn_beta_fast": float32(32), "rope.scaling.yarn_beta_slow": float32(1),
	} {
		oss.set("gpt-oss."+key, v)
	}
	oss.unset("gpt-oss.expert_weights_norm")
	for i := range 2 {
		p := fmt.Sprintf("blk.%d.", i)
		layer(&oss, i, "post_attention_norm.weight")
		routed(&oss, i)
		oss.drop(p + "attn_q_norm.weight")
		oss.drop(p + "attn_k_norm.weight")
		oss.add(p+"attn_q.bias", 32)
		oss.add(p+"attn_k.bias", 16)
		oss.add(p+"attn_v.bias", 16)
		oss.add(p+"attn_output.bias", 32)
		oss.add(p+"attn_sinks.weight", 2)
		oss.add(p+"ffn_gate_inp.bias", 4)
		oss.add(p+"ffn_gate_exps.bias", 64, 4)
		oss.add(p+"ffn_up_exps.bias", 64, 4)
		oss.add(p+"ffn_down_exps.bias", 32, 4)
	}
	all["gpt-oss"] = oss

	llama := model("llama4", 5)
	for key, v := range map[string]any{
		"expert_used_count": uint32(1), "feed_forward_length": uint32(96), "interleave_moe_layer_step": uint32(2),
		"attention.sliding_window": uint32(8), "attention.temperature_length": uint32(8), "attention.temperature_scale": float32(0.1), "attention.qk_norm": true,
		"rope.scaling.type": "llama3", "rope.scaling.factor": float32(8), "rope.scaling.original_context_length": uint32(16),
		"rope.scaling.low_freq_factor": float32(1), "rope.scaling.high_freq_factor": float32(4), "expert_shared_count": uint32(1),
	} {
		llama.set("llama4."+key, v)
	}
	llama.unset("llama4.expert_weights_norm")
	for i := range 5 {
		p := fmt.Sprintf("blk.%d.", i)
		layer(&llama, i, "ffn_norm.weight")
		llama.drop(p + "attn_q_norm.weight")
		llama.drop(p + "attn_k_norm.weight")
		if i%2 == 0 {
			llama.add(p+"ffn_gate.weight", 32, 96)
			llama.add(p+"ffn_up.weight", 32, 96)
			llama.add(p+"ffn_down.weight", 96, 32)
			continue
		}
		routed(&llama, i)
		llama.add(p+"ffn_gate_shexp.weight", 32, 64)
		llama.add(p+"ffn_up_shexp.weight", 32, 64)
		llama.add(p+"ffn_down_shexp.weight", 64, 32)
	}
	all["llama4"] = llama
	return all
}

// describe writes the file, opens it and describes it.
func (h header) describe(t *testing.T) (*Spec, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "m.gguf")
	w, err := storage.CreateGGUF(path, h.meta, h.tensors)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range h.tensors {
		if _, err := w.Write(make([]byte, s.Bytes())); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Finish(); err != nil {
		t.Fatal(err)
	}
	m, err := storage.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	return Describe(m)
}

func TestDescribe(t *testing.T) {
	common := Spec{Name: "Small", Hidden: 32, Vocab: 3, Heads: 2, KVHeads: 1, HeadDim: 16, RopeDims: 8, ExpertFF: 64, Experts: 4, TopK: 2, Ctx: 64}
	glm, qwen := common, common
	glm.Arch, glm.Layers, glm.LeadingDense, glm.FF, glm.SharedExperts, glm.SharedFF = "glm4moe", 3, 1, 96, 1, 64
	qwen.Arch, qwen.Layers = "qwen3moe", 2
	nextn, noDense, plain, bare, oss, llama, rotated := glm, glm, qwen, qwen, common, common, common
	oss.Arch, oss.Layers = "gpt-oss", 2
	llama.Arch, llama.Layers, llama.LeadingDense, llama.FF, llama.SharedExperts, llama.SharedFF, llama.TopK = "llama4", 5, 1, 96, 1, 64, 1
	rotated = llama
	nextn.Layers, nextn.Nextn = 2, 1
	noDense.SharedExperts, noDense.SharedFF = 0, 0
	plain.Name, plain.RopeDims, plain.KVHeads = "", 16, 2
	bare.Vocab = 3
	for _, tt := range []struct {
		name, arch string
		edit       func(h *header)
		want       Spec
		layers     []int // with experts
	}{
		{"all", "glm4moe", func(*header) {}, glm, []int{1, 2}},
		{"a nextn layer is not run", "glm4moe", func(h *header) { h.set("glm4moe.nextn_predict_layers", uint32(1)) }, nextn, []int{1}},
		{"no shared expert", "glm4moe", func(h *header) {
			h.set("glm4moe.expert_shared_count", uint32(0))
			for _, i := range []int{1, 2} { // weights that nothing reads are refused
				for _, part := range []string{"gate", "up", "down"} {
					h.drop(fmt.Sprintf("blk.%d.ffn_%s_shexp.weight", i, part))
				}
			}
		}, noDense, []int{1, 2}},
		{"defaults", "glm4moe", func(h *header) {
			for _, key := range []string{"nextn_predict_layers", "expert_shared_count", "expert_gating_func", "expert_weights_norm", "expert_group_count", "attention.key_length", "attention.value_length"} {
				h.unset("glm4moe." + key)
			}
			for i := range 3 { // larger models have these norms, the biases may lack too
				h.drop(fmt.Sprintf("blk.%d.attn_q_norm.weight", i))
				h.drop(fmt.Sprintf("blk.%d.attn_k_norm.weight", i))
				h.drop(fmt.Sprintf("blk.%d.attn_q.bias", i))
				h.drop(fmt.Sprintf("blk.%d.exp_probs_b.bias", i))
			}
			h.drop("output.weight") // tied to the embedding
		}, glm, []int{1, 2}},
		{"all", "qwen3moe", func(*header) {}, qwen, []int{0, 1}},
		{"defaults", "qwen3moe", func(h *header) {
			for _, key := range []string{"rope.dimension_count", "attention.head_count_kv"} {
				h.unset("qwen3moe." + key)
			}
			h.unset("general.name")
			for i := range 2 {
				h.tensor(fmt.Sprintf("blk.%d.attn_k.weight", i)).Dims[1] = 32
				h.tensor(fmt.Sprintf("blk.%d.attn_v.weight", i)).Dims[1] = 32
			}
		}, plain, []int{0, 1}},
		{"integers of any width", "qwen3moe", func(h *header) {
			h.set("qwen3moe.block_count", int64(2))
			h.set("qwen3moe.expert_count", uint8(4))
			h.set("qwen3moe.context_length", uint64(64))
			h.set("qwen3moe.rope.freq_base", uint32(10000))
		}, qwen, []int{0, 1}},
		{"counts for each layer", "qwen3moe", func(h *header) { h.set("qwen3moe.expert_feed_forward_length", []uint32{64, 64}) }, qwen, []int{0, 1}},
		{"stretched rotations", "qwen3moe", func(h *header) {
			h.set("qwen3moe.rope.scaling.type", "linear")
			h.set("qwen3moe.rope.scaling.factor", float32(4))
			h.add("rope_freqs.weight", 4)
		}, qwen, []int{0, 1}},
		{"no list of tokens", "qwen3moe", func(h *header) { h.unset("tokenizer.ggml.tokens") }, bare, []int{0, 1}},
		{"dims of 1 behind a vector", "qwen3moe", func(h *header) { h.tensor("output_norm.weight").Dims = []int64{32, 1, 1} }, qwen, []int{0, 1}},
		{"all", "gpt-oss", func(*header) {}, oss, []int{0, 1}},
		{"plain rotations", "gpt-oss", func(h *header) {
			h.unset("gpt-oss.rope.scaling.type")
			h.unset("gpt-oss.rope.scaling.factor") // without its kind it is refused
		}, oss, []int{0, 1}},
		{"all", "llama4", func(*header) {}, llama, []int{1, 3}},
		{"defaults, frequencies divided by a tensor", "llama4", func(h *header) {
			for _, key := range []string{"attention.sliding_window", "attention.temperature_length", "attention.temperature_scale", "attention.qk_norm", "rope.scaling.type", "rope.scaling.factor", "expert_shared_count"} {
				h.unset("llama4." + key)
			}
			h.add("rope_freqs.weight", 4)
		}, rotated, []int{1, 3}},
	} {
		t.Run(tt.arch+"/"+tt.name, func(t *testing.T) {
			h := headers()[tt.arch]
			tt.edit(&h)
			s, err := h.describe(t)
			if err != nil {
				t.Fatal(err)
			}
			var layers []int
			experts := map[string]bool{}
			for _, r := range s.Roles {
				layers = append(layers, r.Layer)
				if r.Experts != 4 || len(r.Parts) != 3 {
					t.Errorf("layer %d: %+v", r.Layer, r)
				}
				for _, p := range r.Parts {
					experts[p] = true
				}
			}
			if !slices.Equal(layers, tt.layers) {
				t.Errorf("layers with experts %v, want %v", layers, tt.layers)
			}
			// Every tensor of the layers that run is resident, once, or an expert's.
			resident := map[string]int{}
			for _, d := range s.Dense {
				resident[d.Name]++
			}
			for _, x := range h.tensors {
				want := 1
				if experts[x.Name] || s.Nextn > 0 && strings.HasPrefix(x.Name, fmt.Sprintf("blk.%d.", s.Layers)) || s.SharedExperts == 0 && strings.Contains(x.Name, "_shexp") {
					want = 0
				}
				if resident[x.Name] != want {
					t.Errorf("%s is resident %d times, want %d", x.Name, resident[x.Name], want)
				}
			}
			got := *s
			got.Dense, got.Roles, got.Kinds, got.NextnDense, got.NextnRoles, got.NextnKinds, got.NextnErr, got.file, got.fam, got.asked = nil, nil, nil, nil, nil, nil, nil, nil, family{}, nil
			got.cache, got.vectors, got.gqa = backends.KVShape{}, nil, gqaVectors{} // follow from the rest
			got.embedScale, got.logitScale = 0, 0                                   // no page of these sets them
			if !reflect.DeepEqual(got, tt.want) {
				t.Errorf("got  %+v\nwant %+v", got, tt.want)
			}
		})
	}
}

// What is wrong in a header is told in words that name it.
func TestDescribeRefuses(t *testing.T) {
	set := func(key string, v any) func(*header) {
		return func(h *header) { h.set(key, v) }
	}
	dims := func(name string, d ...int64) func(*header) {
		return func(h *header) { h.tensor(name).Dims = d }
	}
	for _, tt := range []struct {
		name, arch string
		edit       func(h *header)
		want       []string // words in the error
	}{
		{"no architecture", "glm4moe", func(h *header) { h.unset("general.architecture") }, []string{"lacks general.architecture"}},
		{"architecture of another kind", "glm4moe", set("general.architecture", uint32(4)), []string{`"general.architecture" is the uint32 4, want a string`}},
		{"architecture without a page", "glm4moe", set("general.architecture", "mamba9"), []string{`"mamba9" is not supported`, "glm4moe", "qwen3moe"}},
		{"nextn of all", "glm4moe", set("glm4moe.nextn_predict_layers", uint32(3)), []string{"3 nextn layers of 3"}},
		{"nextn above all", "glm4moe", set("glm4moe.nextn_predict_layers", uint32(900)), []string{"900 nextn layers of 3"}},
		{"more dense layers than layers", "glm4moe", set("glm4moe.leading_dense_block_count", uint32(4)), []string{"glm4moe.leading_dense_block_count is 4", "3"}},
		{"softmax router", "glm4moe", set("glm4moe.expert_gating_func", uint32(1)), []string{"gating function 1", "sigmoid"}},
		{"groups", "glm4moe", set("glm4moe.expert_group_count", uint32(8)), []string{"group-limited routing", "8 groups"}},
		{"scaled rope", "qwen3moe", set("qwen3moe.rope.scaling.type", "longrope"), []string{`RoPE scaling "longrope"`}},
		{"rope stretched from nowhere", "qwen3moe", set("qwen3moe.rope.scaling.type", "yarn"), []string{"qwen3moe.rope.scaling.original_context_length"}},
		{"rope squeezed", "qwen3moe", func(h *header) {
			h.set("qwen3moe.rope.scaling.type", "llama3")
			h.set("qwen3moe.rope.scaling.factor", float32(0.5))
			h.set("qwen3moe.rope.scaling.original_context_length", uint32(32))
		}, []string{"RoPE scaling by 0.5"}},
		{"rope factors of another number", "qwen3moe", func(h *header) { h.add("rope_freqs.weight", 5) }, []string{"rope_freqs.weight has dims [5], want [4]"}},
		{"another scaling", "gpt-oss", set("gpt-oss.rope.scaling.type", "llama3"), []string{`RoPE scaling "llama3"`}},
		{"window of 0", "gpt-oss", set("gpt-oss.attention.sliding_window", uint32(0)), []string{"gpt-oss.attention.sliding_window", "0"}},
		{"sinks of another number", "gpt-oss", dims("blk.1.attn_sinks.weight", 3), []string{"blk.1.attn_sinks.weight has dims [3], want [2]"}},
		{"biases turned round", "gpt-oss", dims("blk.1.ffn_up_exps.bias", 4, 64), []string{"blk.1.ffn_up_exps.bias has dims [4 64], want [64 4]"}},
		{"two experts for a token", "llama4", set("llama4.expert_used_count", uint32(2)), []string{"2 experts used", "only 1"}},
		{"another scaling", "llama4", set("llama4.rope.scaling.type", "yarn"), []string{`RoPE scaling "yarn"`, "llama3"}},
		{"scaling backwards", "llama4", set("llama4.rope.scaling.factor", float32(0.5)), []string{"RoPE scaling by 0.5"}},
		{"no order of turns", "llama4", set("llama4.rope.scaling.high_freq_factor", float32(1)), []string{"turns from 1 to 1"}},
		{"a temperature below 0", "llama4", set("llama4.attention.temperature_scale", float32(-1)), []string{"temperature scale -1"}},
		{"a temperature for no positions", "llama4", set("llama4.attention.temperature_length", uint32(0)), []string{"each 0 positions"}},
		{"norms with weights", "llama4", func(h *header) {
			h.add("blk.0.attn_q_norm.weight", 16)
			h.add("blk.0.attn_k_norm.weight", 16)
		}, []string{"blk.0 has weights for the norms of q and k"}},
		{"two shared experts", "llama4", set("llama4.expert_shared_count", uint32(2)), []string{"llama4.expert_shared_count is 2"}},
		{"count of 0", "qwen3moe", set("qwen3moe.block_count", uint32(0)), []string{"qwen3moe.block_count", "0"}},
		{"count too large", "qwen3moe", set("qwen3moe.embedding_length", uint32(1<<31)), []string{"qwen3moe.embedding_length is 2147483648"}},
		{"negative count", "qwen3moe", set("qwen3moe.expert_count", int32(-4)), []string{"qwen3moe.expert_count", "-4"}},
		{"count by layer", "qwen3moe", set("qwen3moe.attention.head_count", []uint32{2, 4}), []string{"qwen3moe.attention.head_count", "array of 2 and 4"}},
		{"negative count by layer", "qwen3moe", set("qwen3moe.attention.head_count", []int32{-2, -2}), []string{"qwen3moe.attention.head_count", "array of -2"}},
		{"more used than there are", "qwen3moe", set("qwen3moe.expert_used_count", uint32(5)), []string{"5 experts used of 4"}},
		{"heads that do not divide", "qwen3moe", set("qwen3moe.attention.head_count_kv", uint32(3)), []string{"2 heads, 3 key-value heads"}},
		{"no key-value heads", "qwen3moe", set("qwen3moe.attention.head_count_kv", uint32(0)), []string{"0 key-value heads"}},
		{"keys unlike values", "qwen3moe", set("qwen3moe.attention.value_length", uint32(8)), []string{"keys of 16", "values of 8"}},
		{"odd rotation", "qwen3moe", set("qwen3moe.rope.dimension_count", uint32(7)), []string{"7 of them rotated"}},
		{"rotation wider than the head", "qwen3moe", set("qwen3moe.rope.dimension_count", uint32(18)), []string{"18 of them rotated"}},
		{"rotation of nothing", "qwen3moe", set("qwen3moe.rope.freq_base", float32(0)), []string{"qwen3moe.rope.freq_base"}},
		{"rotation backwards", "glm4moe", set("glm4moe.rope.freq_base", float32(-10000)), []string{"glm4moe.rope.freq_base"}},
		{"epsilon of 0", "qwen3moe", set("qwen3moe.attention.layer_norm_rms_epsilon", float32(0)), []string{"layer_norm_rms_epsilon is 0"}},
		{"epsilon that is no number", "qwen3moe", set("qwen3moe.attention.layer_norm_rms_epsilon", float32(math.NaN())), []string{"layer_norm_rms_epsilon", "finite"}},
		{"scale out of range", "glm4moe", set("glm4moe.expert_weights_scale", float32(1e30)), []string{"glm4moe.expert_weights_scale"}},
		{"switch of another kind", "qwen3moe", set("qwen3moe.expert_weights_norm", "yes"), []string{"qwen3moe.expert_weights_norm", `"yes"`}},
		{"another vocabulary", "qwen3moe", set("tokenizer.ggml.tokens", []string{"a", "b"}), []string{"2 tokens", "3 rows"}},
		{"embedding of one dim", "qwen3moe", dims("token_embd.weight", 96), []string{"token_embd.weight"}},
		{"norm of another width", "qwen3moe", dims("output_norm.weight", 31), []string{"output_norm.weight has dims [31], want [32]"}},
		{"norm of two dims", "qwen3moe", dims("blk.1.ffn_norm.weight", 32, 2), []string{"blk.1.ffn_norm.weight has dims [32 2], want [32]"}},
		{"matrix turned round", "qwen3moe", dims("blk.0.attn_k.weight", 16, 32), []string{"blk.0.attn_k.weight has dims [16 32], want [32 16]"}},
		{"bias of another width", "glm4moe", dims("blk.2.attn_q.bias", 16), []string{"blk.2.attn_q.bias has dims [16], want [32]"}},
		{"fewer experts than said", "qwen3moe", dims("blk.1.ffn_up_exps.weight", 32, 64, 3), []string{"blk.1.ffn_up_exps.weight has dims [32 64 3], want [32 64 4]", "experts 3 to 3 are missing; download"}},
		{"router of another number", "qwen3moe", dims("blk.1.ffn_gate_inp.weight", 32, 5), []string{"blk.1.ffn_gate_inp.weight has dims [32 5], want [32 4]", "download the model again"}},
		{"integers for weights", "qwen3moe", func(h *header) { h.tensor("blk.0.attn_v.weight").Type = quant.I32 }, []string{"blk.0.attn_v.weight is of I32"}},
		{"integers for experts", "qwen3moe", func(h *header) { h.tensor("blk.0.ffn_down_exps.weight").Type = quant.I32 }, []string{"blk.0.ffn_down_exps.weight is of I32"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := headers()[tt.arch]
			tt.edit(&h)
			_, err := h.describe(t)
			if err == nil {
				t.Fatal("it is accepted")
			}
			for _, w := range tt.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%v: lacks %q", err, w)
				}
			}
		})
	}
	var unsupported *UnsupportedError
	h := headers()["qwen3moe"]
	h.set("general.architecture", "gpt2")
	if _, err := h.describe(t); !errors.As(err, &unsupported) || unsupported.Arch != "gpt2" {
		t.Errorf("got %v, want an UnsupportedError", err)
	}
}

// No tensor of a header can go without its name being told, but those that a
// family may lack; nor one of them alone where they belong together.
func TestEveryTensorIsNeeded(t *testing.T) {
	optional := []string{"output.weight", ".attn_q.bias", ".exp_probs_b.bias"}
	for arch, h := range headers() {
		for _, x := range h.tensors {
			without := header{h.meta, slices.Clone(h.tensors)}
			without.drop(x.Name)
			_, err := without.describe(t)
			if arch != "gpt-oss" && strings.HasSuffix(x.Name, optional[1]) || x.Name == optional[0] || strings.HasSuffix(x.Name, optional[2]) {
				if err != nil {
					t.Errorf("%s without %s: %v", arch, x.Name, err)
				}
				continue
			}
			if err == nil || !strings.Contains(err.Error(), x.Name) {
				t.Errorf("%s without %s: %v", arch, x.Name, err)
			}
		}
	}
}

// No entry of the metadata may be of another kind without its key being told.
func TestEveryKeyIsChecked(t *testing.T) {
	for arch, h := range headers() {
		for i, kv := range h.meta {
			if kv.Key == "general.name" || kv.Key == "tokenizer.ggml.tokens" {
				continue // a name is nothing to fail by; the tokenizer checks its own
			}
			wrong := header{slices.Clone(h.meta), h.tensors}
			wrong.meta[i].Value = []bool{true}
			if _, err := wrong.describe(t); err == nil || !strings.Contains(err.Error(), kv.Key) {
				t.Errorf("%s with an array as %s: %v", arch, kv.Key, err)
			}
		}
		for _, key := range []string{"block_count", "embedding_length", "context_length", "attention.head_count", "attention.layer_norm_rms_epsilon", "expert_count", "expert_used_count", "expert_feed_forward_length"} {
			without := header{slices.Clone(h.meta), h.tensors}
			without.unset(arch + "." + key)
			if _, err := without.describe(t); err == nil || !strings.Contains(err.Error(), arch+"."+key) {
				t.Errorf("%s without %s: %v", arch, key, err)
			}
		}
	}
}
