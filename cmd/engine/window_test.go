package engine

import (
	"fmt"
	"slices"
	"testing"

	"sluice/backends"
)

const (
	gptOSS = "testdata/gpt_oss.gguf"
	llama4 = "testdata/llama4.gguf"
)

// A window, a chunk and a temperature show where they must and nowhere before,
// and the bits are those of every batch width, thread count and cap.
func TestWindows(t *testing.T) {
	for _, tt := range []struct {
		name, path string
		meta       map[string]any
		same       int // positions at the start that the change does not touch
	}{
		{"gpt-oss with a wide window", gptOSS, map[string]any{"gpt-oss.attention.sliding_window": uint32(64)}, 8},
		{"gpt-oss with a narrow window", gptOSS, map[string]any{"gpt-oss.attention.sliding_window": uint32(3)}, 3},
		{"Llama 4 in chunks", llama4, map[string]any{"llama4.attention.sliding_window": uint32(20)}, 20},
		{"Llama 4 with a temperature", llama4, map[string]any{"llama4.attention.temperature_length": uint32(17)}, 16},
		{"Llama 4 with a scaled rotation", llama4, map[string]any{
			"llama4.rope.scaling.type": "llama3", "llama4.rope.scaling.factor": float32(8), "llama4.rope.scaling.original_context_length": uint32(64),
		}, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			o := Options{Path: tt.path, Ctx: 128, KV: backends.KVF32, Threads: 1}
			e := open(t, o)
			ids := heldout(t, e, 70)
			plain, _ := allLogits(t, e, ids)
			o.Path = rewrite(t, tt.path, change{meta: tt.meta})
			e = open(t, o)
			want, _ := allLogits(t, e, ids)
			for p := range ids {
				a, b := row(plain, p, e.Spec.Vocab), row(want, p, e.Spec.Vocab)
				if same := slices.Equal(a, b); same != (p < tt.same) {
					t.Errorf("position %d: the logits are those of the model without the change: %v", p, same)
				}
			}
			for _, other := range []Options{{Chunk: 1}, {Chunk: 7, Threads: 3}, {Chunk: 64, Cap: 1, Threads: 2}} {
				o.Chunk, o.Threads, o.Cap = other.Chunk, max(other.Threads, 1), other.Cap
				if got, _ := allLogits(t, open(t, o), ids); !slices.Equal(got, want) {
					t.Errorf("%s: other bits", fmt.Sprintf("%+v", other))
				}
			}
		})
	}
}
