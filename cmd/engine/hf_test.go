package engine

import (
	"slices"
	"testing"

	"sluice/backends"
)

// The tiny models compute the same from a Hugging Face directory, and every bit
// as from the GGUF that a converter made of it, if it reordered nothing.
func TestHFOracles(t *testing.T) {
	reordered := []string{"granitemoe", "mixtral"} // the rows of q and k: sums of other orders
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
