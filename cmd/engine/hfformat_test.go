package engine

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"sluice/backends"
	"sluice/internal/quant"
	"sluice/internal/safetensors"
	"sluice/storage"
)

// A raw is a tensor to be written to a safetensors file.
type raw struct {
	name  string
	dtype safetensors.DType
	shape []int64
	data  []byte
}

// An encoding turns a matrix into the tensors of a format, and says what numbers
// they hold.
type encoding func(name string, rows, cols int, v []float32) ([]raw, []float32)

func asFloats(dtype safetensors.DType) encoding {
	return func(name string, rows, cols int, v []float32) ([]raw, []float32) {
		x := raw{name, dtype, []int64{int64(rows), int64(cols)}, nil}
		out := slices.Clone(v)
		for i, f := range v {
			if dtype == safetensors.BF16 {
				x.data = binary.LittleEndian.AppendUint16(x.data, quant.ToBF16(f))
				out[i] = quant.FromBF16(quant.ToBF16(f))
			} else {
				x.data = binary.LittleEndian.AppendUint32(x.data, math.Float32bits(f))
			}
		}
		return []raw{x}, out
	}
}

// nearest is the code of the table whose value is nearest.
func nearest(table []float32, v float32) (code int) {
	for c, x := range table {
		if math.Abs(float64(x-v)) < math.Abs(float64(table[code]-v)) {
			code = c
		}
	}
	return code
}

func peak(v []float32) float32 {
	return max(float32(largest(v)), 1e-9)
}

// e4m3 are the values of FP8-E4M3 but for NaN, e2m1 those of MXFP4's codes.
func e4m3() (v []float32) {
	for c := range 127 {
		m, e := float64(c&7), c>>3
		x := m / 8 * 0x1p-6
		if e > 0 {
			x = math.Ldexp(1+m/8, e-7)
		}
		v = append(v, float32(x))
	}
	return v
}

var e2m1 = []float32{0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6}

// asFP8 has a scale for each block of 128 x 128, as DeepSeek-V3 has.
func asFP8(name string, rows, cols int, v []float32) ([]raw, []float32) {
	table := e4m3()
	sr, sc := (rows+127)/128, (cols+127)/128
	codes := raw{name, "F8_E4M3", []int64{int64(rows), int64(cols)}, make([]byte, len(v))}
	scale := raw{name + "_scale_inv", "F32", []int64{int64(sr), int64(sc)}, nil}
	out := make([]float32, len(v))
	scales := make([]float32, sr*sc)
	for i, x := range v {
		s := &scales[i/cols/128*sc+i%cols/128]
		*s = max(*s, float32(math.Abs(float64(x)))/448)
	}
	for _, s := range scales {
		scale.data = binary.LittleEndian.AppendUint32(scale.data, math.Float32bits(s))
	}
	for i, x := range v {
		s := scales[i/cols/128*sc+i%cols/128]
		c := nearest(table, float32(math.Abs(float64(x)))/s)
		codes.data[i], out[i] = byte(c), table[c]*s
		if x < 0 {
			codes.data[i], out[i] = byte(c|0x80), -out[i]
		}
	}
	return []raw{codes, scale}, out
}

// asMXFP4 is compressed-tensors' packing of it, two neighbours in a byte.
func asMXFP4(name string, rows, cols int, v []float32) ([]raw, []float32) {
	codes := raw{name + "_packed", "U8", []int64{int64(rows), int64(cols / 2)}, make([]byte, len(v)/2)}
	scale := raw{name + "_scale", "U8", []int64{int64(rows), int64(cols / 32)}, nil}
	out := make([]float32, len(v))
	for b := 0; b < len(v); b += 32 {
		_, e := math.Frexp(float64(peak(v[b:b+32]) / 6)) // 6 * 2^e is not below the largest
		scale.data = append(scale.data, byte(e+127))
		for i := b; i < b+32; i++ {
			c := nearest(e2m1, v[i]/float32(math.Ldexp(1, e)))
			codes.data[i/2] |= byte(c << (i % 2 * 4))
			out[i] = e2m1[c] * float32(math.Ldexp(1, e))
		}
	}
	return []raw{codes, scale}, out
}

// asInt4 is compressed-tensors' pack-quantized, as Kimi K2 has it.
func asInt4(group int) encoding {
	return func(name string, rows, cols int, v []float32) ([]raw, []float32) {
		codes := raw{name + "_packed", "I32", []int64{int64(rows), int64(cols / 8)}, make([]byte, len(v)/2)}
		scale := raw{name + "_scale", "BF16", []int64{int64(rows), int64(cols / group)}, nil}
		shape := raw{name + "_shape", "I32", []int64{2}, binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, uint32(rows)), uint32(cols))}
		out := make([]float32, len(v))
		for b := 0; b < len(v); b += group {
			bits := quant.ToBF16(peak(v[b:b+group]) / 7)
			s := quant.FromBF16(bits)
			scale.data = binary.LittleEndian.AppendUint16(scale.data, bits)
			for i := b; i < b+group; i++ {
				q := min(max(int(math.RoundToEven(float64(v[i]/s))), -8), 7)
				codes.data[i/2] |= byte((q + 8) << (i % 2 * 4))
				out[i] = float32(q) * s
			}
		}
		return []raw{codes, scale, shape}, out
	}
}

// hfDirectory writes a Qwen3-MoE of random weights: width 128, 2 layers of 8
// experts, which are all chosen: a near tie of the router would fall the other way
// with another rounding. Its linear layers are encoded, or with plain are F32 that
// hold what the encoding makes of them. With fused, gate and up are one tensor of
// all experts.
func hfDirectory(t *testing.T, matrix encoding, plain, fused bool) string {
	t.Helper()
	const dim, ff, heads, kvHeads, headDim, experts, layers, vocab = 128, 256, 4, 2, 32, 8, 2, 96
	rng := rand.New(rand.NewPCG(11, 12))
	var all []raw
	numbers := func(n int, dev float64) (v []float32) {
		for range n {
			v = append(v, float32(rng.NormFloat64()*dev))
		}
		return v
	}
	norm := func(name string, n int) {
		v := numbers(n, 0.05)
		for i := range v {
			v[i]++
		}
		x, _ := asFloats(safetensors.F32)(name, 1, n, v)
		x[0].shape = x[0].shape[1:]
		all = append(all, x...)
	}
	floats := asFloats(safetensors.BF16)
	linear := func(name string, rows, cols int, how encoding) {
		x, values := how(name, rows, cols, numbers(rows*cols, 1.5/math.Sqrt(float64(cols))))
		if plain {
			x, _ = asFloats(safetensors.F32)(name, rows, cols, values)
		}
		all = append(all, x...)
	}
	linear("model.embed_tokens.weight", vocab, dim, floats)
	linear("lm_head.weight", vocab, dim, floats)
	norm("model.norm.weight", dim)
	for l := range layers {
		p := fmt.Sprintf("model.layers.%d.", l)
		norm(p+"input_layernorm.weight", dim)
		norm(p+"post_attention_layernorm.weight", dim)
		norm(p+"self_attn.q_norm.weight", headDim)
		norm(p+"self_attn.k_norm.weight", headDim)
		linear(p+"self_attn.q_proj.weight", heads*headDim, dim, matrix)
		linear(p+"self_attn.k_proj.weight", kvHeads*headDim, dim, matrix)
		linear(p+"self_attn.v_proj.weight", kvHeads*headDim, dim, matrix)
		linear(p+"self_attn.o_proj.weight", dim, heads*headDim, matrix)
		linear(p+"mlp.gate.weight", experts, dim, floats)
		first := len(all)
		for e := range experts {
			x := fmt.Sprintf("%smlp.experts.%d.", p, e)
			linear(x+"gate_proj.weight", ff, dim, matrix)
			linear(x+"up_proj.weight", ff, dim, matrix)
			linear(x+"down_proj.weight", dim, ff, matrix)
		}
		if fused { // of one tensor a matrix
			one := all[first:]
			gu := raw{p + "mlp.experts.gate_up_proj", one[0].dtype, []int64{experts, 2 * ff, dim}, nil}
			down := raw{p + "mlp.experts.down_proj", one[0].dtype, []int64{experts, dim, ff}, nil}
			for e := range experts {
				gu.data = append(append(gu.data, one[3*e].data...), one[3*e+1].data...)
				down.data = append(down.data, one[3*e+2].data...)
			}
			all = append(all[:first], gu, down)
		}
	}
	config, _ := json.Marshal(map[string]any{
		"model_type": "qwen3_moe", "num_hidden_layers": layers, "hidden_size": dim, "max_position_embeddings": 128, "num_attention_heads": heads,
		"num_key_value_heads": kvHeads, "head_dim": headDim, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "num_experts": experts,
		"num_experts_per_tok": experts, "moe_intermediate_size": ff, "norm_topk_prob": true, "vocab_size": vocab,
	})
	return writeHF(t, config, all)
}

// writeHF makes a directory of a config.json and one file of tensors.
func writeHF(t *testing.T, config []byte, all []raw) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "config.json"), config, 0o666); err != nil {
		t.Fatal(err)
	}
	var specs []safetensors.Spec
	for _, x := range all {
		specs = append(specs, safetensors.Spec{Name: x.name, DType: x.dtype, Shape: x.shape})
	}
	w, err := safetensors.Create(filepath.Join(dir, "model.safetensors"), specs)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Abort()
	for _, x := range all {
		if _, err := w.Write(x.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Finish(); err != nil {
		t.Fatal(err)
	}
	return dir
}

// A model in each format of safetensors computes what the numbers that it holds
// compute as F32. There is no outside oracle for these: the encoders are the test's
// own. FP8 has the arithmetic of floats, so every bit is the same; the others round
// their activations to int8, whose error these shares of the largest logit bound.
//
// And the bits do not depend on the cap, the mode, the chunk or a slab between.
func TestHFEncodings(t *testing.T) {
	ids := []int32{5, 17, 3, 90, 41, 41, 8, 66, 2, 29, 77, 13}
	for _, tt := range []struct {
		name     string
		matrix   encoding
		attn     quant.Type // of a dense matrix
		distance float64
	}{
		{"bf16", asFloats(safetensors.BF16), quant.BF16, 0},
		{"fp8", asFP8, quant.F8_128, 0},
		{"mxfp4", asMXFP4, quant.MXFP4, 0.03},
		{"int4, groups of 32", asInt4(32), quant.INT4_32, 0.03},
		{"int4, groups of 128", asInt4(128), quant.INT4_128, 0.03},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir, floats := hfDirectory(t, tt.matrix, false, false), hfDirectory(t, tt.matrix, true, false)
			o := Options{Path: floats, KV: backends.KVF32, NoText: true}
			want, _ := allLogits(t, open(t, o), ids)
			o.Path = dir
			e := open(t, o)
			got, _ := allLogits(t, e, ids)
			if x, ok := e.File.Tensor("model.layers.1.self_attn.q_proj.weight"); !ok || x.Type != tt.attn {
				t.Errorf("a dense matrix is of %v, want %v", x.Type, tt.attn)
			}
			if x, _ := e.File.Tensor(e.Spec.Roles[1].Parts[2]); x.Type != tt.attn {
				t.Errorf("an expert's matrix is of %v, want %v", x.Type, tt.attn)
			}
			apart := distance(got, want) / largest(want)
			t.Logf("%s: within %.3g of the largest logit of its numbers as F32, cosine %.6f", tt.name, apart, cosine(got, want))
			if apart > tt.distance {
				t.Errorf("logits differ by %.3g of the largest, more than %.3g", apart, tt.distance)
			}
			if _, err := storage.Pack(t.Context(), e.File, e.Spec.Roles, filepath.Join(dir, "model.slab"), storage.PackOptions{}); err != nil {
				t.Fatal(err)
			}
			for i, o := range []Options{
				{Cap: 1, Storage: storage.Pread, NoSlab: true}, {Cap: 2, Chunk: 5, NoSlab: true}, {Cap: 8, Storage: storage.MMap, Threads: 3, NoSlab: true},
				{Cap: 3}, {Cap: 1, Storage: storage.MMap}, {Cap: 4, Storage: storage.Pread, Chunk: 1},
			} {
				o.Path, o.KV, o.NoText = dir, backends.KVF32, true
				e := open(t, o)
				if slab := e.File.Format == "slab"; slab == o.NoSlab {
					t.Errorf("case %d runs from a %s", i, e.File.Format)
				}
				again, _ := allLogits(t, e, ids)
				same(t, fmt.Sprintf("%s, case %d, %s", tt.name, i, options(o)), again, got)
			}
		})
	}
}

// gpt-oss as it is published, its experts in blocks of MXFP4 with gate and up by
// turns, against the numbers of those blocks as BF16 in the transposed stacks that
// the oracle has. The blocks are the test's own: no outside oracle.
func TestGPTOSSBlocks(t *testing.T) {
	from, err := safetensors.Open(shared(t, "oracles/hf/gpt_oss/model.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	var config map[string]any
	readJSON(t, shared(t, "oracles/hf/gpt_oss/config.json"), &config)
	config["num_experts_per_tok"] = config["num_local_experts"] // no near tie of a router falls the other way
	text, _ := json.Marshal(config)
	var blocks, floats []raw
	for _, x := range from.Tensors() {
		v, err := from.Floats(x.Name)
		if err != nil {
			t.Fatal(err)
		}
		shape := []int64{1, 1, 1}
		copy(shape[3-len(x.Shape):], x.Shape)
		plain, _ := asFloats(x.DType)(x.Name, 1, len(v), v)
		plain[0].shape = x.Shape
		if n, in, out := int(shape[0]), int(shape[1]), int(shape[2]); len(x.Shape) == 3 {
			turn := func(v []float32, rows, cols int) []float32 {
				y := make([]float32, len(v))
				for i := range v {
					e, r, c := i/(rows*cols), i/cols%rows, i%cols
					y[e*rows*cols+c*rows+r] = v[i]
				}
				return y
			}
			packed, values := asMXFP4(x.Name, n*out, in, turn(v, in, out))
			packed[0].name, packed[0].shape = x.Name+"_blocks", []int64{int64(n), int64(out), int64(in / 32), 16}
			packed[1].name, packed[1].shape = x.Name+"_scales", []int64{int64(n), int64(out), int64(in / 32)}
			blocks = append(blocks, packed...)
			plain, _ = asFloats(safetensors.BF16)(x.Name, 1, len(v), turn(values, out, in)) // E2M1 times a power of two: exact
			plain[0].shape = x.Shape
			floats = append(floats, plain...)
			continue
		}
		blocks, floats = append(blocks, plain...), append(floats, plain...)
	}
	var logits [2][]float32
	for i, all := range [][]raw{floats, blocks} {
		e := open(t, Options{Path: writeHF(t, text, all), KV: backends.KVF32, NoText: true, Cap: 3})
		if x, _ := e.File.Tensor(e.Spec.Roles[0].Parts[1]); x.Type != [2]quant.Type{quant.BF16, quant.MXFP4}[i] {
			t.Errorf("experts of %v", x.Type)
		}
		logits[i], _ = allLogits(t, e, []int32{5, 17, 3, 90, 41, 41, 8, 66, 2, 29, 77, 13})
	}
	apart := distance(logits[1], logits[0]) / largest(logits[0])
	t.Logf("within %.3g of the largest logit", apart)
	if apart > 0.03 {
		t.Errorf("logits differ by %.3g of the largest", apart)
	}
}

// Experts in one tensor of gate and up give the bits of experts in tensors of their own.
func TestHFFused(t *testing.T) {
	ids := []int32{5, 17, 3, 90, 41}
	for _, plain := range []bool{false, true} {
		o := Options{Path: hfDirectory(t, asFloats(safetensors.BF16), plain, false), KV: backends.KVF32, NoText: true}
		want, _ := allLogits(t, open(t, o), ids)
		o.Path, o.Cap = hfDirectory(t, asFloats(safetensors.BF16), plain, true), 2
		for _, o.Storage = range []storage.Mode{storage.Slab, storage.MMap} {
			e := open(t, o)
			if len(e.File.Tensors) != 3+2*11 {
				t.Errorf("%d tensors", len(e.File.Tensors))
			}
			got, _ := allLogits(t, e, ids)
			same(t, o.Storage.String(), got, want)
		}
	}
}
