package engine

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sluice/backends"
)

// The tiny models compute the same from a Hugging Face directory, and every bit
// as from the GGUF that a converter made of it, if it reordered nothing.
func TestHFOracles(t *testing.T) {
	reordered := []string{"granitemoe", "mixtral", "qwen3_5_moe"} // the rows of q and k, columns of ssm_out: sums of other orders
	for _, name := range append([]string{"hunyuan_v1_moe"}, checkpoints...) {
		t.Run(name, func(t *testing.T) {
			dir := shared(t, "oracles/hf/"+name)
			o := openOracle(t, dir+"/oracle.safetensors")
			e := open(t, Options{Path: dir, KV: backends.KVF32, NoText: true})
			checkOracle(t, o, e)
			if name == "hunyuan_v1_moe" || slices.Contains(reordered, name) { // of the first there is no GGUF
				return
			}
			path, _ := checkpoint(t, name)
			g := open(t, Options{Path: path, KV: backends.KVF32})
			ids := o.ints("input_ids")
			got, _ := allLogits(t, e, ids)
			want, _ := allLogits(t, g, ids)
			same(t, name, got, want)
		})
	}
}

// edited is a checkpoint with other entries in its config.json, a nil as good as
// none.
func edited(t *testing.T, name string, changes map[string]any) string {
	t.Helper()
	from, to := shared(t, "oracles/hf/"+name), t.TempDir()
	var config map[string]any
	readJSON(t, from+"/config.json", &config)
	for k, v := range changes {
		config[k] = v
	}
	b, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to+"/config.json", b, 0o666); err != nil {
		t.Fatal(err)
	}
	from, err = filepath.Abs(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(from+"/model.safetensors", to+"/model.safetensors"); err != nil {
		t.Fatal(err)
	}
	return to
}

// What a config.json asks for and a page does not have is refused.
func TestHFRefuses(t *testing.T) {
	for _, tt := range []struct {
		name, key string
		value     any
		want      string
	}{
		{"qwen2_moe", "layer_types", []string{"full_attention", "sliding_attention", "full_attention"}, `layer 1 is of the kind "sliding_attention"`},
		{"dots1", "layer_types", []string{"sliding_attention"}, `layer 0 is of the kind "sliding_attention"`},
		{"dots1", "scoring_func", "softmax", "gating function 1, want 2 (sigmoid)"},
		{"ernie4_5_moe", "use_bias", true, "use_bias"},
		{"hunyuan_v1_moe", "use_cla", true, "use_cla"},
		{"hunyuan_v1_moe", "moe_topk", []int{2, 1, 2}, "config.moe_topk differs among the layers"},
		{"hunyuan_v1_moe", "rope_parameters", map[string]any{"rope_theta": 10000, "rope_type": "dynamic"}, "alpha"},
		{"olmoe", "clip_qkv", 8.0, "clamp"},
		{"mixtral", "rope_parameters", map[string]any{"rope_theta": 10000, "rope_type": "longrope"}, `"longrope"`},
		{"granitemoe", "logits_scaling", 0.0, "logits_scaling"},
	} {
		_, err := Prepare(Options{Path: edited(t, tt.name, map[string]any{tt.key: tt.value}), NoText: true})
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s with %s = %v: %v, want %q", tt.name, tt.key, tt.value, err, tt.want)
		}
	}
}

// The ways in which Hunyuan's configs say the same.
func TestHunyuanConfigs(t *testing.T) {
	of := func(changes map[string]any) []float32 { return logitsOf(t, edited(t, "hunyuan_v1_moe", changes)) }
	plain := of(nil)
	same(t, "lists by layer", of(map[string]any{"moe_topk": []int{2, 2, 2}, "num_shared_expert": []int{1, 1, 1}}), plain)
	same(t, "attention_head_dim", of(map[string]any{"head_dim": nil, "attention_head_dim": 32}), plain)
	raised := of(map[string]any{"rope_parameters": map[string]any{"rope_theta": 10000 * math.Pow(1000, 32./30)}, "rope_theta": nil})
	same(t, "alpha of 1000", of(map[string]any{"rope_parameters": nil, "rope_scaling": map[string]any{"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}}), raised)
	if slices.Equal(raised, plain) {
		t.Error("the base changes nothing")
	}
}
