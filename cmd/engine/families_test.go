package engine

import (
	"encoding/binary"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sluice/backends"
	"sluice/internal/quant"
	"sluice/storage"
)

// A part is a tensor of a model that a test writes: read from another under a
// name, or made.
type part struct {
	storage.TensorSpec
	data []byte
}

// parts reads all tensors of a model.
func parts(t *testing.T, m *storage.Model) []part {
	t.Helper()
	var all []part
	for _, x := range m.Tensors {
		all = append(all, partOf(t, m, x.Name, x.Name))
	}
	return all
}

// partOf reads one tensor, or what is made of several (storage.Model.View).
func partOf(t *testing.T, m *storage.Model, from, name string) part {
	t.Helper()
	x, err := m.View(from)
	if err != nil {
		t.Fatal(err)
	}
	p := part{storage.TensorSpec{Name: name, Type: x.Type, Dims: x.Dims}, make([]byte, x.Bytes)}
	if err := m.ReadTensor(p.data, x); err != nil {
		t.Fatal(err)
	}
	return p
}

// scale multiplies the tensor's BF16 weights by a power of two, which is exact.
func (p *part) scale(t *testing.T, power int) {
	t.Helper()
	if p.Type != quant.BF16 {
		t.Fatalf("%s is of %v", p.Name, p.Type)
	}
	for i := 0; i < len(p.data); i += 2 {
		v := math.Float32frombits(uint32(binary.LittleEndian.Uint16(p.data[i:])) << 16)
		binary.LittleEndian.PutUint16(p.data[i:], uint16(math.Float32bits(float32(math.Ldexp(float64(v), power)))>>16))
	}
}

func writeParts(t *testing.T, meta []storage.KV, all []part) string {
	t.Helper()
	var specs []storage.TensorSpec
	for _, p := range all {
		specs = append(specs, p.TensorSpec)
	}
	path := filepath.Join(t.TempDir(), "m.gguf")
	w, err := storage.CreateGGUF(path, meta, specs)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range all {
		if _, err := w.Write(p.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Finish(); err != nil {
		t.Fatal(err)
	}
	return path
}

// metaOf is the entries of a model with changes; a nil takes one away.
func metaOf(m *storage.Model, changes map[string]any) []storage.KV {
	var kvs []storage.KV
	for _, k := range m.Meta.Keys() {
		if _, changed := changes[k]; !changed {
			kvs = append(kvs, storage.KV{Key: k, Value: m.Meta.Value(k)})
		}
	}
	for k, v := range changes {
		if v != nil {
			kvs = append(kvs, storage.KV{Key: k, Value: v})
		}
	}
	return kvs
}

func openModel(t *testing.T, path string) *storage.Model {
	t.Helper()
	m, err := storage.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

// logitsOf runs some tokens.
func logitsOf(t *testing.T, path string) []float32 {
	t.Helper()
	ids := make([]int32, 40)
	for i := range ids {
		ids[i] = int32(i * 37 % 512)
	}
	logits, _ := allLogits(t, open(t, Options{Path: path, KV: backends.KVF32, NoText: true}), ids)
	return logits
}

// Granite's multipliers, all 1 in the oracle, are those of weights scaled by
// powers of two: to the bit.
func TestGraniteMultipliers(t *testing.T) {
	path, _ := checkpoint(t, "granitemoe")
	m := openModel(t, path)
	all := parts(t, m)
	for i := range all {
		switch p := &all[i]; {
		case p.Name == "token_embd.weight":
			p.scale(t, 2)
		case p.Name == "output.weight":
			p.scale(t, -3)
		case strings.HasSuffix(p.Name, "attn_output.weight"), strings.HasSuffix(p.Name, "ffn_down_exps.weight"):
			p.scale(t, -1)
		case strings.HasSuffix(p.Name, "attn_q.weight"):
			p.scale(t, -2)
		}
	}
	scaled := logitsOf(t, writeParts(t, metaOf(m, nil), all))
	told := logitsOf(t, writeParts(t, metaOf(m, map[string]any{
		"granitemoe.embedding_scale": float32(4), "granitemoe.logit_scale": float32(8),
		"granitemoe.residual_scale": float32(0.5), "granitemoe.attention.scale": float32(0.25),
	}), parts(t, m)))
	same(t, "multipliers", told, scaled)
	if slices.Equal(told, logitsOf(t, path)) {
		t.Error("the multipliers change nothing")
	}
}

// Granite's shared expert, of which there is no oracle: one whose down is all
// zeros adds nothing; one like all the routed ones counts as much as they do.
func TestGraniteShared(t *testing.T) {
	path, _ := checkpoint(t, "granitemoe")
	m := openModel(t, path)
	const ff, dim = 48, 64
	with := func(shared bool, edit func(p *part)) []float32 {
		all := parts(t, m)
		changes := map[string]any{"granitemoe.residual_scale": float32(0.5)}
		if shared {
			changes["granitemoe.expert_shared_feed_forward_length"] = uint32(ff)
			for i := range 3 {
				for _, name := range []string{"gate", "up", "down"} {
					p := partOf(t, m, fmt.Sprintf("blk.%d.ffn_%s_exps.weight", i, name), fmt.Sprintf("blk.%d.ffn_%s_shexp.weight", i, name))
					p.Dims, p.data = p.Dims[:2:2], p.data[:2*ff*dim] // expert 0
					all = append(all, p)
				}
			}
		}
		for i := range all {
			edit(&all[i])
		}
		return logitsOf(t, writeParts(t, metaOf(m, changes), all))
	}
	none := with(false, func(*part) {})
	same(t, "a shared expert of zeros", with(true, func(p *part) {
		if strings.HasSuffix(p.Name, "down_shexp.weight") {
			clear(p.data)
		}
	}), none)
	// All experts of a layer as the first: their weights add up to 1, so they and
	// the shared one are twice the first.
	alike := func(power int) func(p *part) {
		return func(p *part) {
			if strings.Contains(p.Name, "_exps.") {
				one := p.data[:2*ff*dim]
				for e := range 8 {
					copy(p.data[e*len(one):], one)
				}
				if strings.Contains(p.Name, "down") {
					p.scale(t, power)
				}
			}
		}
	}
	got, want := with(true, alike(0)), with(false, alike(1))
	if d := distance(got, want); d > tolerance*largest(want) || slices.Equal(got, with(false, alike(0))) {
		t.Errorf("a shared expert beside its like differs from twice the expert by %.3g", d)
	}
}

// Hunyuan from GGUF, of which there is no oracle: the tensors of the Hugging Face
// checkpoint under the names that a converter gives them, the same bits.
func TestHunyuanGGUF(t *testing.T) {
	dir := shared(t, "oracles/hf/hunyuan_v1_moe")
	m := openModel(t, dir)
	names := map[string]string{"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
	for i := range 3 {
		from, to := fmt.Sprintf("model.layers.%d.", i), fmt.Sprintf("blk.%d.", i)
		for hf, gguf := range map[string]string{
			"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
			"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
			"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm", "mlp.gate.wg": "ffn_gate_inp",
			"mlp.experts.*.gate_proj": "ffn_gate_exps", "mlp.experts.*.up_proj": "ffn_up_exps", "mlp.experts.*.down_proj": "ffn_down_exps",
			"mlp.shared_mlp.gate_proj": "ffn_gate_shexp", "mlp.shared_mlp.up_proj": "ffn_up_shexp", "mlp.shared_mlp.down_proj": "ffn_down_shexp",
		} {
			names[from+hf] = to + gguf
		}
	}
	var all []part
	for hf, gguf := range names {
		all = append(all, partOf(t, m, hf+".weight", gguf+".weight"))
	}
	meta := []storage.KV{{Key: "general.architecture", Value: "hunyuan-moe"}}
	for k, v := range map[string]any{
		"block_count": uint32(3), "context_length": uint32(128), "embedding_length": uint32(64), "feed_forward_length": uint32(48),
		"attention.head_count": uint32(4), "attention.head_count_kv": uint32(2), "attention.key_length": uint32(32), "attention.value_length": uint32(32),
		"attention.layer_norm_rms_epsilon": float32(1e-5), "rope.freq_base": float32(10000),
		"expert_count": uint32(8), "expert_used_count": uint32(2), "expert_feed_forward_length": uint32(48), "expert_shared_feed_forward_length": uint32(48),
	} {
		meta = append(meta, storage.KV{Key: "hunyuan-moe." + k, Value: v})
	}
	path := writeParts(t, meta, all)
	checkOracle(t, openOracle(t, dir+"/oracle.safetensors"), open(t, Options{Path: path, KV: backends.KVF32, NoText: true}))
	same(t, "hunyuan-moe", logitsOf(t, path), logitsOf(t, dir))
}

// Mixtral's window: with one that is as long as the text nothing changes, and a
// shorter one leaves alone the positions that it covers.
func TestMixtralWindow(t *testing.T) {
	path, _ := checkpoint(t, "mixtral")
	m := openModel(t, path)
	with := func(window uint32) []float32 {
		return logitsOf(t, writeParts(t, metaOf(m, map[string]any{"llama.attention.sliding_window": window}), parts(t, m)))
	}
	all := logitsOf(t, path)
	same(t, "a window of 40", with(40), all)
	short := with(8)
	same(t, "the first positions with a window of 8", short[:8*512], all[:8*512])
	if slices.Equal(short[8*512:9*512], all[8*512:9*512]) {
		t.Error("position 8 sees the first key through a window of 8")
	}
}

// Rotations stretched by 2 in a model are those of positions half as far apart,
// whichever way the file says it.
func TestStretchedRotations(t *testing.T) {
	path, _ := checkpoint(t, "qwen2_moe")
	m := openModel(t, path)
	linear := logitsOf(t, writeParts(t, metaOf(m, map[string]any{"qwen2moe.rope.scaling.type": "linear", "qwen2moe.rope.scaling.factor": float32(2)}), parts(t, m)))
	divisors := part{storage.TensorSpec{Name: "rope_freqs.weight", Type: quant.F32, Dims: []int64{8}}, nil}
	for range 8 {
		divisors.data = binary.LittleEndian.AppendUint32(divisors.data, math.Float32bits(2))
	}
	same(t, "divisors of 2", logitsOf(t, writeParts(t, metaOf(m, nil), append(parts(t, m), divisors))), linear)
	// Every pair turns less than once in so short a context: all are stretched.
	same(t, "llama3, all pairs slow", logitsOf(t, writeParts(t, metaOf(m, map[string]any{
		"qwen2moe.rope.scaling.type": "llama3", "qwen2moe.rope.scaling.factor": float32(2), "qwen2moe.rope.scaling.original_context_length": uint32(6),
	}), parts(t, m))), linear)
	if slices.Equal(linear, logitsOf(t, path)) {
		t.Error("the scaling changes nothing")
	}
}
