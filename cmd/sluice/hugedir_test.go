package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// A hugeTensor is a tensor of zeros in a file of safetensors.
type hugeTensor struct {
	name, dtype string
	shape       []int64
}

func (x hugeTensor) bytes() int64 {
	n := map[string]int64{"BF16": 2, "F32": 4, "I32": 4}[x.dtype]
	for _, d := range x.shape {
		n *= d
	}
	return n
}

// hugeDirectory writes a directory of the shape of Kimi K2 with all its layers,
// experts and shards, of int4 with scales apart, all of it holes: 560 GB.
func hugeDirectory(t *testing.T) (dir string, total int64) {
	t.Helper()
	const layers, experts, shards, vocab, hidden, ff, wide, heads = 61, 384, 160, 163840, 7168, 2048, 18432, 64
	const qRank, latent, nope, rope, value = 1536, 512, 128, 64, 128
	dir = t.TempDir()
	config := fmt.Sprintf(`{"model_type":"kimi_k2","num_hidden_layers":%d,"hidden_size":%d,"vocab_size":%d,"intermediate_size":%d,"moe_intermediate_size":%d,
"n_routed_experts":%d,"num_experts_per_tok":8,"n_shared_experts":1,"first_k_dense_replace":1,"num_attention_heads":%d,"num_key_value_heads":%d,"q_lora_rank":%d,
"kv_lora_rank":%d,"qk_nope_head_dim":%d,"qk_rope_head_dim":%d,"v_head_dim":%d,"max_position_embeddings":131072,"rms_norm_eps":1e-6,"rope_theta":50000,
"routed_scaling_factor":2.827,"norm_topk_prob":true,"scoring_func":"sigmoid","topk_method":"noaux_tc","n_group":1,"topk_group":1,"moe_layer_freq":1,"num_nextn_predict_layers":0}`,
		layers, hidden, vocab, wide, ff, experts, heads, heads, qRank, latent, nope, rope, value)
	var all []hugeTensor
	bf16 := func(name string, shape ...int64) { all = append(all, hugeTensor{name + ".weight", "BF16", shape}) }
	int4 := func(name string, rows, cols int64) {
		all = append(all, hugeTensor{name + ".weight_packed", "I32", []int64{rows, cols / 8}}, hugeTensor{name + ".weight_scale", "BF16", []int64{rows, cols / 32}})
	}
	bf16("model.embed_tokens", vocab, hidden)
	for l := range layers {
		p := fmt.Sprintf("model.layers.%d.", l)
		bf16(p+"input_layernorm", hidden)
		bf16(p+"post_attention_layernorm", hidden)
		bf16(p+"self_attn.q_a_proj", qRank, hidden)
		bf16(p+"self_attn.q_a_layernorm", qRank)
		bf16(p+"self_attn.q_b_proj", heads*(nope+rope), qRank)
		bf16(p+"self_attn.kv_a_proj_with_mqa", latent+rope, hidden)
		bf16(p+"self_attn.kv_a_layernorm", latent)
		bf16(p+"self_attn.kv_b_proj", heads*(nope+value), latent)
		bf16(p+"self_attn.o_proj", hidden, heads*value)
		if l == 0 {
			bf16(p+"mlp.gate_proj", wide, hidden)
			bf16(p+"mlp.up_proj", wide, hidden)
			bf16(p+"mlp.down_proj", hidden, wide)
			continue
		}
		bf16(p+"mlp.gate", experts, hidden)
		all = append(all, hugeTensor{p + "mlp.gate.e_score_correction_bias", "F32", []int64{experts}})
		for e := -1; e < experts; e++ {
			q := fmt.Sprintf("%smlp.experts.%d.", p, e)
			if e < 0 {
				bf16(p+"mlp.shared_experts.gate_proj", ff, hidden)
				bf16(p+"mlp.shared_experts.up_proj", ff, hidden)
				bf16(p+"mlp.shared_experts.down_proj", hidden, ff)
				continue
			}
			int4(q+"gate_proj", ff, hidden)
			int4(q+"up_proj", ff, hidden)
			int4(q+"down_proj", hidden, ff)
		}
	}
	bf16("model.norm", hidden)
	bf16("lm_head", vocab, hidden)

	write := func(name string, b []byte, size int64) {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, b, 0o666); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(path, max(size, int64(len(b)))); err != nil {
			t.Skipf("needs a file system with sparse files of %d bytes (set TMPDIR): %v", size, err)
		}
	}
	write("config.json", []byte(config), 0)
	index := map[string]string{}
	for i := range shards {
		name := fmt.Sprintf("model-%05d-of-%05d.safetensors", i+1, shards)
		mine := all[i*len(all)/shards : (i+1)*len(all)/shards]
		slices.SortFunc(mine, func(a, b hugeTensor) int { return strings.Compare(a.name, b.name) })
		var h bytes.Buffer
		off := int64(0)
		h.WriteString(`{"__metadata__":{"format":"pt"}`)
		for _, x := range mine {
			index[x.name] = name
			shape, _ := json.Marshal(x.shape)
			fmt.Fprintf(&h, `,%q:{"dtype":%q,"shape":%s,"data_offsets":[%d,%d]}`, x.name, x.dtype, shape, off, off+x.bytes())
			off += x.bytes()
		}
		h.WriteString("}")
		b := append(binary.LittleEndian.AppendUint64(nil, uint64(h.Len())), h.Bytes()...)
		write(name, b, int64(len(b))+off)
		total += int64(len(b)) + off
	}
	b, err := json.MarshalIndent(map[string]any{"metadata": map[string]any{"total_size": total}, "weight_map": index}, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	write("model.safetensors.index.json", b, 0)
	return dir, total
}

// TestHugeDirectory: a directory of the shape of the largest open model, with
// 140,000 tensors in 160 shards, is described in under a second of CPU time.
func TestHugeDirectory(t *testing.T) {
	if testing.Short() {
		t.Skip("writes 30 MB of headers")
	}
	dir, total := hugeDirectory(t)
	start, cpu := time.Now(), cpuNanos(t)
	o := mustRun(t, "inspect", dir, "--json").object(t)
	spent := cpuNanos(t) - cpu
	t.Logf("inspect of %.4g GB: %v, CPU %v", float64(total)/1e9, time.Since(start), time.Duration(spent))
	if spent > 1e9 && !raceEnabled { // the detector takes several times that
		t.Errorf("it takes %v of CPU time", time.Duration(spent))
	}
	const expert = 3 * 7168 * 2048 / 32 * 18
	for key, want := range map[string]int64{"file_bytes": total, "files": 160, "layers": 61, "experts": 384, "bytes_per_expert": expert,
		"expert_bytes": expert * 60 * 384, "bytes_per_token": expert * 60 * 8} {
		if got := number(t, o, key); got != want {
			t.Errorf("%s is %d, want %d", key, got, want)
		}
	}
}
