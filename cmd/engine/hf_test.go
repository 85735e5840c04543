package engine

import (
	"testing"

	"sluice/backends"
)

// The tiny models compute the same from a Hugging Face directory, and every bit
// as from the GGUF that a converter made of it.
func TestHFOracles(t *testing.T) {
	for _, name := range []string{"glm4_moe", "gpt_oss", "llama4", "qwen3_moe"} {
		t.Run(name, func(t *testing.T) {
			dir := shared(t, "oracles/hf/"+name)
			o := openOracle(t, dir+"/oracle.safetensors")
			e := open(t, Options{Path: dir, KV: backends.KVF32, NoText: true})
			checkOracle(t, o, e)
			g := open(t, Options{Path: "testdata/" + name + ".gguf", KV: backends.KVF32})
			ids := o.ints("input_ids")
			got, _ := allLogits(t, e, ids)
			want, _ := allLogits(t, g, ids)
			same(t, name, got, want)
		})
	}
}
