package moe

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sluice/storage"
)

// tinyModels are the models of cmd/engine/testdata, without their weights and
// their words, by name.
func tinyModels(t *testing.T) map[string]header {
	t.Helper()
	paths, err := filepath.Glob("../cmd/engine/testdata/*.gguf")
	if err != nil || len(paths) == 0 {
		t.Fatalf("tiny models %v, %v", paths, err)
	}
	return headersOf(t, paths)
}

// headersOf reads the headers of models, by their names.
func headersOf(t *testing.T, paths []string) map[string]header {
	t.Helper()
	all := map[string]header{}
	for _, path := range paths {
		m, err := storage.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		var h header
		for _, key := range m.Meta.Keys() {
			if !strings.HasPrefix(key, "tokenizer.") {
				h.set(key, m.Meta.Value(key))
			}
		}
		for _, x := range m.Tensors {
			h.tensors = append(h.tensors, storage.TensorSpec{Name: x.Name, Type: x.Type, Dims: x.Dims})
		}
		m.Close()
		all[strings.TrimSuffix(filepath.Base(path), ".gguf")] = h
	}
	return all
}

// A tiny model's page uses each of its tensors, once; without one of them its
// name is told, but for those that other models of the family may lack.
func TestTinyModelsTensors(t *testing.T) {
	optional := []string{"output.weight", ".attn_q.bias", ".attn_k.bias", ".attn_v.bias", ".attn_output.bias", ".exp_probs_b.bias"}
	for name, h := range tinyModels(t) {
		s, err := h.describe(t)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		used := map[string]int{}
		for _, x := range s.Dense {
			used[x.Name]++
		}
		for _, r := range s.Roles {
			for _, p := range r.Parts {
				used[p]++
			}
		}
		for i, x := range h.tensors {
			if s.Nextn > 0 && strings.HasPrefix(x.Name, fmt.Sprintf("blk.%d.", s.Layers)) {
				continue // of the drafting layer
			}
			if used[x.Name] != 1 {
				t.Errorf("%s: %s is used %d times", name, x.Name, used[x.Name])
			}
			if i%3 != 0 && !strings.HasPrefix(x.Name, "blk.1.") {
				continue // the layers are alike
			}
			without := header{h.meta, slices.Clone(h.tensors)}
			without.drop(x.Name)
			_, err := without.describe(t)
			if slices.ContainsFunc(optional, func(o string) bool { return strings.HasSuffix(x.Name, o) }) {
				continue
			}
			if err == nil || !strings.Contains(err.Error(), x.Name) {
				t.Errorf("%s without %s: %v", name, x.Name, err)
			}
		}
	}
}

// What a page does not implement it refuses, in words.
func TestFamiliesRefuse(t *testing.T) {
	models := tinyModels(t)
	shared := os.Getenv("SLUICE_SHARED")
	if shared == "" {
		shared = "../../shared"
	}
	if dots := filepath.Join(shared, "oracles/gguf/dots1.gguf"); models["dots1"].meta == nil {
		if _, err := os.Stat(dots); err == nil {
			models["dots1"] = headersOf(t, []string{dots})["dots1"]
		}
	}
	for _, tt := range []struct {
		name, key string
		value     any // nil: without the key
		want      string
	}{
		{"mixtral", "llama.expert_count", nil, "the file has experts (blk.0.ffn_gate_exps.weight), but by its metadata (llama.expert_count) there are none"},
		{"mixtral", "llama.feed_forward_length", nil, "llama.feed_forward_length"},
		{"olmoe", "olmoe.attention.clamp_kqv", float32(8), "clamp_kqv"},
		{"olmoe", "olmoe.expert_group_count", uint32(2), "group-limited routing"},
		{"qwen2_moe", "qwen2moe.expert_shared_feed_forward_length", nil, "qwen2moe.expert_shared_feed_forward_length"},
		{"granitemoe", "granitemoe.rope.scaling.finetuned", false, "not rotated"},
		{"granitemoe", "granitemoe.logit_scale", float32(0), "granitemoe.logit_scale is 0"},
		{"granitemoe", "granitemoe.residual_scale", float32(-1), "granitemoe.residual_scale is -1"},
		{"granitemoe", "granitemoe.attention.scale", float32(-1), "granitemoe.attention.scale is -1"},
		{"dots1", "dots1.expert_gating_func", uint32(1), "gating function 1, want 2 (sigmoid)"},
		{"dots1", "dots1.expert_group_count", uint32(3), "4 experts used of 16, in 1 of 3 groups"},
		{"dots1", "dots1.expert_group_count", uint32(8), "4 experts used of 16, in 1 of 8 groups"}, // of 2 experts each
		{"ernie4_5_moe", "ernie4_5-moe.interleave_moe_layer_step", nil, "ernie4_5-moe.interleave_moe_layer_step"},
		{"ernie4_5_moe", "ernie4_5-moe.expert_gating_func", uint32(2), "gating function 2, want 1 (softmax)"},
		{"ernie4_5_moe", "ernie4_5-moe.leading_dense_block_count", uint32(9), "ernie4_5-moe.leading_dense_block_count is 9"},
		{"ernie4_5_moe", "ernie4_5-moe.rope.scaling.type", "dynamic", `RoPE scaling "dynamic"`},
	} {
		h, ok := models[tt.name]
		if !ok {
			t.Logf("SKIPPED: %s needs the shared oracles: set SLUICE_SHARED", tt.name)
			continue
		}
		h.meta, h.tensors = slices.Clone(h.meta), slices.Clone(h.tensors)
		if tt.value == nil {
			h.unset(tt.key)
		} else {
			h.set(tt.key, tt.value)
		}
		if _, err := h.describe(t); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s with %s = %v: %v, want %q", tt.name, tt.key, tt.value, err, tt.want)
		}
	}
}

// Layers with experts may take turns with dense ones.
func TestInterleavedLayers(t *testing.T) {
	tiny := tinyModels(t)["ernie4_5_moe"] // layer 0 is dense, 1 and 2 have experts
	h := header{meta: slices.Clone(tiny.meta)}
	h.set("ernie4_5-moe.leading_dense_block_count", uint32(0))
	h.set("ernie4_5-moe.interleave_moe_layer_step", uint32(2))
	h.set("ernie4_5-moe.block_count", uint32(4))
	for _, x := range tiny.tensors {
		switch {
		case strings.HasPrefix(x.Name, "blk.0."), strings.HasPrefix(x.Name, "blk.1."):
			h.tensors = append(h.tensors, x)
			x.Name = strings.NewReplacer("blk.0.", "blk.2.", "blk.1.", "blk.3.").Replace(x.Name)
			h.tensors = append(h.tensors, x)
		case !strings.HasPrefix(x.Name, "blk."):
			h.tensors = append(h.tensors, x)
		}
	}
	s, err := h.describe(t)
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Roles) != 2 || s.Roles[0].Layer != 1 || s.Roles[1].Layer != 3 || s.FF != 96 {
		t.Errorf("layers with experts %+v, feed-forward of %d", s.Roles, s.FF)
	}
}
