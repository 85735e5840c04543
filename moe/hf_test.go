package moe

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sluice/internal/safetensors"
	"sluice/storage"
)

// hfHeaders opens a Qwen3-MoE of Hugging Face's layout of nothing but headers: 2
// layers of 4 experts. prefix is what names begin with; edit may change the config
// and the shapes of the tensors.
func hfHeaders(t *testing.T, prefix string, edit func(config map[string]any, shapes map[string][]int64)) *storage.Model {
	t.Helper()
	config := map[string]any{
		"model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 32, "max_position_embeddings": 64, "num_attention_heads": 2,
		"num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "num_experts": 4, "num_experts_per_tok": 2,
		"moe_intermediate_size": 64, "norm_topk_prob": true, "partial_rotary_factor": 0.5,
	}
	shapes := map[string][]int64{prefix + "embed_tokens.weight": {3, 32}, prefix + "norm.weight": {32}}
	for l := range 2 {
		p := fmt.Sprintf("%slayers.%d.", prefix, l)
		for name, shape := range map[string][]int64{
			"input_layernorm": {32}, "post_attention_layernorm": {32}, "self_attn.q_norm": {16}, "self_attn.k_norm": {16},
			"self_attn.q_proj": {32, 32}, "self_attn.k_proj": {16, 32}, "self_attn.v_proj": {16, 32}, "self_attn.o_proj": {32, 32}, "mlp.gate": {4, 32},
		} {
			shapes[p+name+".weight"] = shape
		}
		for e := range 4 {
			x := fmt.Sprintf("%smlp.experts.%d.", p, e)
			shapes[x+"gate_proj.weight"], shapes[x+"up_proj.weight"], shapes[x+"down_proj.weight"] = []int64{64, 32}, []int64{64, 32}, []int64{32, 64}
		}
	}
	edit(config, shapes)
	dir := t.TempDir()
	text, _ := json.Marshal(config)
	if err := os.WriteFile(filepath.Join(dir, "config.json"), text, 0o666); err != nil {
		t.Fatal(err)
	}
	var specs []safetensors.Spec
	for name, shape := range shapes {
		specs = append(specs, safetensors.Spec{Name: name, DType: safetensors.BF16, Shape: shape})
	}
	w, err := safetensors.Create(filepath.Join(dir, "model.safetensors"), specs)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Abort()
	for _, s := range specs {
		n, _ := s.Bytes()
		if _, err := w.Write(make([]byte, n)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Finish(); err != nil {
		t.Fatal(err)
	}
	m, err := storage.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

// Names and numbers of Hugging Face's layout are found by GGUF's, in a model by
// itself and in one that is the text of a larger one.
func TestHFDescribe(t *testing.T) {
	for _, prefix := range []string{"model.", "model.language_model.", "language_model.model."} {
		m := hfHeaders(t, prefix, func(config map[string]any, _ map[string][]int64) {
			if prefix != "model." {
				text := map[string]any{}
				for k, v := range config {
					text[k] = v
					delete(config, k)
				}
				text["model_type"] = "qwen3_moe_text"
				config["model_type"], config["text_config"], config["hidden_size"] = "larger", text, 7
			}
		})
		s, err := Describe(m)
		if err != nil {
			t.Fatal(err)
		}
		if s.Arch != "qwen3moe" || s.Layers != 2 || s.Hidden != 32 || s.Vocab != 3 || s.HeadDim != 16 || s.RopeDims != 8 || s.Experts != 4 || s.TopK != 2 || s.ExpertFF != 64 {
			t.Errorf("%s: %+v", prefix, *s)
		}
		if len(s.Roles) != 2 || s.Roles[1].Parts[2] != prefix+"layers.1.mlp.experts.*.down_proj.weight" || len(s.Dense) != 2+2*9 {
			t.Errorf("%s: roles %v, %d resident tensors", prefix, s.Roles, len(s.Dense))
		}
	}
}

func TestHFDescribeRefuses(t *testing.T) {
	for _, tt := range []struct {
		name string
		edit func(config map[string]any, shapes map[string][]int64)
		want string
	}{
		{"an expert in the middle", func(_ map[string]any, s map[string][]int64) { delete(s, "model.layers.1.mlp.experts.2.up_proj.weight") },
			"expert 2 of 4 is missing: the file has no tensor model.layers.1.mlp.experts.2.up_proj.weight"},
		{"the last expert", func(_ map[string]any, s map[string][]int64) {
			delete(s, "model.layers.0.mlp.experts.3.gate_proj.weight")
		},
			"no tensor model.layers.0.mlp.experts.3.gate_proj.weight"},
		{"the first expert", func(_ map[string]any, s map[string][]int64) {
			delete(s, "model.layers.0.mlp.experts.0.gate_proj.weight")
		},
			"expert 0 of 4 is missing: the file has no tensor model.layers.0.mlp.experts.0.gate_proj.weight"},
		{"a short expert", func(_ map[string]any, s map[string][]int64) {
			s["model.layers.1.mlp.experts.3.up_proj.weight"] = []int64{32, 32}
		}, "model.layers.1.mlp.experts.3.up_proj.weight of BF16 has dims [32 32]"},
		{"a shape", func(_ map[string]any, s map[string][]int64) {
			s["model.layers.0.self_attn.q_proj.weight"] = []int64{31, 32}
		},
			"tensor model.layers.0.self_attn.q_proj.weight has dims [32 31], want [32 32]"},
		{"a number", func(c map[string]any, _ map[string][]int64) { delete(c, "num_hidden_layers") }, "lacks config.num_hidden_layers"},
		{"a word for a number", func(c map[string]any, _ map[string][]int64) { c["num_experts"] = "four" }, `"config.num_experts" is the string "four"`},
		{"another activation", func(c map[string]any, _ map[string][]int64) { c["hidden_act"] = "gelu" }, `config.hidden_act is "gelu"`},
		{"no family", func(c map[string]any, _ map[string][]int64) { delete(c, "model_type") }, "lacks model_type"},
		{"another family", func(c map[string]any, _ map[string][]int64) { c["model_type"] = "bert" }, `architecture "bert" is not supported; supported are`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Describe(hfHeaders(t, "model.", tt.edit))
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %q", err, tt.want)
			}
			var unsupported *UnsupportedError
			if tt.name == "another family" && (!errors.As(err, &unsupported) || !strings.Contains(err.Error(), "qwen3_moe")) {
				t.Errorf("%v does not name what config.json may say", err)
			}
		})
	}
}
