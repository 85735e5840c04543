package moe

import (
	"strings"
	"testing"
)

// TestContradictions: what the metadata say and the tensors deny is refused, in words.
func TestContradictions(t *testing.T) {
	for _, c := range []struct {
		name, arch string
		change     func(h *header)
		want       string // "": taken
	}{
		{"a factor without its kind", "qwen3moe", func(h *header) { h.set("qwen3moe.rope.scaling.factor", float32(4)) }, "qwen3moe.rope.scaling.factor is 4, but qwen3moe.rope.scaling.type is absent"},
		{"as old files have it", "qwen3moe", func(h *header) { h.set("qwen3moe.rope.scale_linear", float32(2)) }, "qwen3moe.rope.scale_linear is 2, but qwen3moe.rope.scaling.type is absent"},
		{"of a family with no scaling", "glm4moe", func(h *header) {
			h.unset("glm4moe.rope.scaling.type")
			h.set("glm4moe.rope.scaling.factor", float32(4))
		}, "glm4moe.rope.scaling.factor is 4"},
		{"not a number", "qwen3moe", func(h *header) { h.set("qwen3moe.rope.scaling.factor", "x") }, `"qwen3moe.rope.scaling.factor" is the string "x"`},
		{"a factor of 1", "qwen3moe", func(h *header) { h.set("qwen3moe.rope.scaling.factor", float32(1)) }, ""},
		{"the kind none", "glm4moe", func(h *header) { h.set("glm4moe.rope.scaling.factor", float32(4)) }, ""},
		{"no shared experts by the count", "glm4moe", func(h *header) { h.set("glm4moe.expert_shared_count", uint32(0)) }, "the file has blk.1.ffn_gate_shexp.weight, of a shared expert"},
		{"none known to the family", "qwen3moe", func(h *header) { h.add("blk.0.ffn_up_shexp.weight", 32, 64) }, "the file has blk.0.ffn_up_shexp.weight, of a shared expert"},
		{"in a dense layer", "glm4moe", func(h *header) { h.add("blk.0.ffn_up_shexp.weight", 32, 64) }, "the file has blk.0.ffn_up_shexp.weight, of a shared expert"},
	} {
		h := headers()[c.arch]
		c.change(&h)
		_, err := h.describe(t)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: error %v, want one with %q", c.name, err, c.want)
		}
	}
}
