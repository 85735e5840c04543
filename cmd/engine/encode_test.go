package engine

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"testing"

	"sluice/backends"
	"sluice/internal/quant"
	"sluice/internal/safetensors"
	"sluice/moe"
	"sluice/storage"
)

// Formats of which no model small enough is published are tested here by
// encoding the oracles' weights anew, twice: as the format has them, and as a type
// of GGML with the same numbers. Both must give the same bits.

// A recoded tensor is its type and bytes in a GGUF file.
type recoded struct {
	typ  quant.Type
	data []byte
}

// recode copies a GGUF file with some tensors of other types.
func recode(t *testing.T, from string, as map[string]recoded) string {
	t.Helper()
	m, err := storage.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	var meta []storage.KV
	for _, k := range m.Meta.Keys() {
		meta = append(meta, storage.KV{Key: k, Value: m.Meta.Value(k)})
	}
	var specs []storage.TensorSpec
	for _, x := range m.Tensors {
		spec := storage.TensorSpec{Name: x.Name, Type: x.Type, Dims: x.Dims}
		if r, ok := as[x.Name]; ok {
			spec.Type = r.typ
		}
		specs = append(specs, spec)
	}
	to := filepath.Join(t.TempDir(), "m.gguf")
	w, err := storage.CreateGGUF(to, meta, specs)
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range m.Tensors {
		b := as[x.Name].data
		if b == nil {
			b = make([]byte, x.Bytes)
			if err := m.ReadTensor(b, x); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := w.Write(b); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Finish(); err != nil {
		t.Fatal(err)
	}
	return to
}

// weightsOf reads a tensor of a GGUF file as floats, with its dims.
func weightsOf(t *testing.T, m *storage.Model, name string) ([]float32, []int64) {
	t.Helper()
	x, ok := m.Tensor(name)
	if !ok {
		t.Fatalf("no tensor %s", name)
	}
	b := make([]byte, x.Bytes)
	if err := m.ReadTensor(b, x); err != nil {
		t.Fatal(err)
	}
	n := int64(1)
	for _, d := range x.Dims {
		n *= d
	}
	w := make([]float32, n)
	quant.Dequantize(x.Type, w, b)
	return w, x.Dims
}

// A blob is a tensor in a file of safetensors.
type blob struct {
	dtype safetensors.DType
	shape []int64
	data  []byte
}

// blobsOf reads the file of a Hugging Face directory.
func blobsOf(t *testing.T, dir string) map[string]blob {
	t.Helper()
	path := filepath.Join(dir, "model.safetensors")
	f, err := safetensors.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]blob{}
	for _, x := range f.Tensors() {
		all[x.Name] = blob{x.DType, x.Shape, whole[x.Off : x.Off+x.Bytes]}
	}
	return all
}

// writeBlobs writes a directory with the config.json of another, the tensors
// dealt to files of these names in turn.
func writeBlobs(t *testing.T, config string, all map[string]blob, files ...string) string {
	t.Helper()
	dir := t.TempDir()
	b, err := os.ReadFile(filepath.Join(config, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), b, 0o666); err != nil {
		t.Fatal(err)
	}
	for i, file := range files {
		var specs []safetensors.Spec
		var data [][]byte
		for at, name := range slices.Sorted(maps.Keys(all)) {
			if x := all[name]; at%len(files) == i {
				specs, data = append(specs, safetensors.Spec{Name: name, DType: x.dtype, Shape: x.shape}), append(data, x.data)
			}
		}
		w, err := safetensors.Create(filepath.Join(dir, file), specs)
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range data {
			if _, err := w.Write(b); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Finish(); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// sameModels wants the same bits of the logits of the model in dir and of the one
// in a GGUF file, and logits that are at least like those of the oracle.
func sameModels(t *testing.T, o oracle, dir, gguf string, like float64) {
	t.Helper()
	ids := o.ints("input_ids")
	e := open(t, Options{Path: dir, KV: backends.KVF32, NoText: true, Cap: 3, Chunk: 16})
	g := open(t, Options{Path: gguf, KV: backends.KVF32, NoText: true})
	got, _ := allLogits(t, e, ids)
	want, _ := allLogits(t, g, ids)
	same(t, dir, got, want)
	if c := cosine(got, o.floats("logits")); c < like {
		t.Errorf("the cosine with the logits before is %.4f, want %v", c, like)
	} else {
		t.Logf("the cosine with the logits before is %.4f", c)
	}
}

// The published gpt-oss has experts of MXFP4, gate and up in turns.
func TestMXFP4Blocks(t *testing.T) {
	dir := shared(t, "oracles/hf/gpt_oss")
	m, err := storage.Open(gptOSS)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	all, as := blobsOf(t, dir), map[string]recoded{}
	for l := range 4 {
		type matrix struct {
			codes []byte // one each
			exps  []byte
		}
		encode := func(part string) matrix {
			name := fmt.Sprintf("blk.%d.ffn_%s_exps.weight", l, part)
			w, dims := weightsOf(t, m, name)
			data := make([]byte, quant.MXFP4.RowBytes(len(w)))
			if err := quant.Encode(quant.MXFP4, data, w); err != nil {
				t.Fatal(err)
			}
			as[name] = recoded{quant.MXFP4, data}
			x := matrix{make([]byte, len(w)), nil}
			for b := 0; b*17 < len(data); b++ {
				x.exps = append(x.exps, data[17*b])
				for j := range 16 {
					x.codes[32*b+j], x.codes[32*b+j+16] = data[17*b+1+j]&15, data[17*b+1+j]>>4
				}
			}
			if dims[0]%32 != 0 {
				t.Fatal("rows of no whole blocks")
			}
			return x
		}
		put := func(name string, codes, exps []byte) {
			const experts, groups = 8, 2 // 64 columns
			rows := int64(len(exps) / experts / groups)
			blocks := make([]byte, len(codes)/2)
			for i := range blocks {
				blocks[i] = codes[2*i] | codes[2*i+1]<<4
			}
			p := fmt.Sprintf("model.layers.%d.mlp.experts.%s", l, name)
			delete(all, p)
			all[p+"_blocks"] = blob{"U8", []int64{experts, rows, groups, 16}, blocks}
			all[p+"_scales"] = blob{"U8", []int64{experts, rows, groups}, exps}
		}
		gate, up, down := encode("gate"), encode("up"), encode("down")
		var codes, exps []byte
		for r := range len(gate.codes) / 64 {
			codes = append(append(codes, gate.codes[64*r:64*r+64]...), up.codes[64*r:64*r+64]...)
			exps = append(append(exps, gate.exps[2*r:2*r+2]...), up.exps[2*r:2*r+2]...)
		}
		put("gate_up_proj", codes, exps)
		put("down_proj", down.codes, down.exps)
	}
	sameModels(t, openOracle(t, "testdata/gpt_oss.oracle.safetensors"), writeBlobs(t, dir, all, "model.safetensors"), recode(t, gptOSS, as), 0.97)
}

// coliNames are the matrices of GLM-4.5 in GGUF and in a colibri container, N
// being the layer.
var coliNames = map[string]string{
	"token_embd.weight":           "model.embed_tokens.weight",
	"output.weight":               "lm_head.weight",
	"blk.N.attn_q.weight":         "model.layers.N.self_attn.q_proj.weight",
	"blk.N.attn_k.weight":         "model.layers.N.self_attn.k_proj.weight",
	"blk.N.attn_v.weight":         "model.layers.N.self_attn.v_proj.weight",
	"blk.N.attn_output.weight":    "model.layers.N.self_attn.o_proj.weight",
	"blk.N.ffn_gate.weight":       "model.layers.N.mlp.gate_proj.weight",
	"blk.N.ffn_up.weight":         "model.layers.N.mlp.up_proj.weight",
	"blk.N.ffn_down.weight":       "model.layers.N.mlp.down_proj.weight",
	"blk.N.ffn_gate_exps.weight":  "model.layers.N.mlp.experts.*.gate_proj.weight",
	"blk.N.ffn_up_exps.weight":    "model.layers.N.mlp.experts.*.up_proj.weight",
	"blk.N.ffn_gate_shexp.weight": "model.layers.N.mlp.shared_experts.gate_proj.weight",
	"blk.N.ffn_up_shexp.weight":   "model.layers.N.mlp.shared_experts.up_proj.weight",
	"blk.N.nextn.eh_proj.weight":  "model.layers.N.eh_proj.weight",
	"blk.N.ffn_down_exps.weight":  "", // of 48 columns: they stay as they are
	"blk.N.ffn_down_shexp.weight": "",
	"blk.N.ffn_gate_inp.weight":   "",
}

// A coliCoder encodes rows as a container has them; its scales are numbers of f16,
// so that a type of GGML has the same.
type coliCoder struct {
	name   string
	group  int // columns with a scale in common; 0: a row
	lo, hi int // codes
	typ    quant.Type
	pack   func(code []int) []byte // of a row
	like   float64
}

var coliCoders = []coliCoder{
	{"int8", 0, -127, 127, quant.Q8_0, func(code []int) (b []byte) {
		for _, c := range code {
			b = append(b, byte(c))
		}
		return b
	}, 0.99},
	{"int4", 0, -8, 7, quant.Q4_0, packNibbles, 0.85},
	{"int4 in groups of 32", 32, -8, 7, quant.Q4_0, packNibbles, 0.85},
	{"int4 in groups of 64", 64, -8, 7, quant.Q4_0, packNibbles, 0.85},
	{"int3", 64, -4, 3, quant.Q4_0, func(code []int) (b []byte) {
		for ; len(code) > 0; code = code[min(64, len(code)):] {
			var group [24]byte
			for k, c := range code[:min(64, len(code))] {
				group[k/4] |= byte(c+4) & 3 << (k % 4 * 2)
				group[16+k/8] |= byte(c+4) >> 2 << (k % 8)
			}
			b = append(b, group[:]...)
		}
		return b
	}, 0.4},
	{"fp8", 0, 0, 0, quant.F32, nil, 0.98},
	{"int2", 0, -2, 1, quant.Q4_0, func(code []int) []byte {
		b := make([]byte, len(code)/4)
		for k, c := range code {
			b[k/4] |= byte(c+2) << (k % 4 * 2)
		}
		return b
	}, -1},
}

func packNibbles(code []int) []byte {
	b := make([]byte, len(code)/2)
	for k, c := range code {
		b[k/2] |= byte(c+8) << (k % 2 * 4)
	}
	return b
}

// encode gives the bytes and scales of row r in a container, and in a type of GGML.
func (c coliCoder) encode(w []float32, r int) (codes, scales, ggml []byte) {
	if c.typ == quant.F32 { // FP8, a scale for each 128 rows of at most 128 columns
		s := float32(math.Ldexp(1, -7-r/128%2))
		if r%128 == 0 {
			scales = binary.LittleEndian.AppendUint32(nil, math.Float32bits(s))
		}
		for _, x := range w {
			code, value := nearestE4M3(x / s)
			codes = append(codes, code)
			ggml = binary.LittleEndian.AppendUint32(ggml, math.Float32bits(value*s))
		}
		return codes, scales, ggml
	}
	group := c.group
	if group == 0 {
		group = len(w)
	}
	code, scale := make([]int, len(w)), make([]uint16, len(w)/32)
	for at := 0; at < len(w); at += group {
		end := min(at+group, len(w))
		h := quant.ToF16(float32(largest(w[at:end]) / float64(c.hi)))
		s := quant.FromF16(h)
		scales = binary.LittleEndian.AppendUint32(scales, math.Float32bits(s))
		for i := at; i < end; i++ {
			code[i] = int(min(max(math.RoundToEven(float64(w[i])/max(float64(s), 1e-8)), float64(c.lo)), float64(c.hi)))
			scale[i/32] = h
		}
	}
	for b, h := range scale {
		ggml = binary.LittleEndian.AppendUint16(ggml, h)
		x := code[32*b : 32*b+32]
		for j := range 32 {
			switch {
			case c.typ == quant.Q8_0:
				ggml = append(ggml, byte(x[j]))
			case j < 16:
				ggml = append(ggml, byte(x[j]+8)|byte(x[j+16]+8)<<4)
			}
		}
	}
	return c.pack(code), scales, ggml
}

// nearestE4M3 is the code whose value is nearest, and the value.
func nearestE4M3(x float32) (byte, float32) {
	value := func(c int) float64 {
		if e, m := c>>3, float64(c&7)/8; e > 0 {
			return math.Ldexp(1+m, e-7)
		} else {
			return math.Ldexp(m, -6)
		}
	}
	size := math.Abs(float64(x))
	c := sort.Search(126, func(c int) bool { return value(c) >= size })
	if c > 0 && size-value(c-1) < value(c)-size {
		c--
	}
	if v := float32(value(c)); x >= 0 {
		return byte(c), v
	} else {
		return byte(c | 128), -v
	}
}

// A colibri container in each of its formats computes what a GGUF file with the
// same codes and scales does; its files have any names.
func TestColibri(t *testing.T) {
	config := shared(t, "oracles/hf/glm4_moe")
	o := openOracle(t, "testdata/glm4_moe.oracle.safetensors")
	for _, c := range coliCoders {
		t.Run(c.name, func(t *testing.T) {
			all, as := coliContainer(t, config, glm, c)
			dir := writeBlobs(t, config, all, "out-00000.safetensors", "out-00001.safetensors", "out-idx-00000.safetensors")
			sameModels(t, o, dir, recode(t, glm, as), c.like)
			m, err := storage.Open(filepath.Join(dir, "out-00001.safetensors"))
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			if m.Format != "colibri" || len(m.Files) != 3 {
				t.Errorf("one of its files is opened as %s of %d files", m.Format, len(m.Files))
			}
			spec, err := moe.Describe(m)
			if err != nil {
				t.Fatal(err)
			}
			slab := filepath.Join(t.TempDir(), "m.slab")
			if _, err := storage.Pack(context.Background(), m, spec.Roles, slab, storage.PackOptions{}); err != nil {
				t.Fatal(err)
			}
			sameModels(t, o, slab, recode(t, glm, as), c.like)
		})
	}
}

// A drafting (nextn) layer of int8, as containers have it, drafts what the same
// layer in a GGUF file does.
func TestColibriDrafts(t *testing.T) {
	config := shared(t, "oracles/hf/glm4_moe_mtp")
	all, as := coliContainer(t, config, mtp(t), coliCoders[0])
	if all["model.layers.3.eh_proj.weight.qs"].dtype == "" {
		t.Fatal("the layer is not encoded")
	}
	var got [2][]float32
	for i, path := range []string{writeBlobs(t, config, all, "out-00000.safetensors", "out-mtp-00000.safetensors"), recode(t, mtp(t), as)} {
		e := open(t, Options{Path: path, KV: backends.KVF32, NoText: true, Drafts: 1})
		ids := []int32{5, 80, 211, 7}
		if err := e.Model.Forward(context.Background(), ids); err != nil {
			t.Fatal(err)
		}
		if err := e.Model.Draft(context.Background(), moe.DraftStep{Rows: []int32{0, 1, 2}, IDs: ids[1:]}); err != nil {
			t.Fatal(err)
		}
		got[i] = make([]float32, 3*e.Spec.Vocab)
		if err := e.Model.DraftLogits(got[i], []int32{0, 1, 2}); err != nil {
			t.Fatal(err)
		}
	}
	same(t, "drafts", got[0], got[1])
}

// coliContainer encodes the matrices of a model: the tensors of a container, and
// those of a GGUF file that are the same.
func coliContainer(t *testing.T, config, gguf string, c coliCoder) (map[string]blob, map[string]recoded) {
	t.Helper()
	m, err := storage.Open(gguf)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	all, as := blobsOf(t, config), map[string]recoded{}
	for _, x := range m.Tensors {
		key, layer := x.Name, ""
		if rest, ok := strings.CutPrefix(x.Name, "blk."); ok {
			layer, rest, _ = strings.Cut(rest, ".")
			key = "blk.N." + rest
		}
		to := strings.Replace(coliNames[key], ".N.", "."+layer+".", 1)
		if to == "" {
			continue
		}
		w, dims := weightsOf(t, m, x.Name)
		cols, rows := int(dims[0]), int(dims[1])
		if c.group > 0 && cols%c.group != 0 {
			continue // the sizes of so short a row fit other groups, too
		}
		var whole []byte
		for e := 0; e*rows*cols < len(w); e++ {
			var codes, scales []byte
			for r := range rows {
				a, b, g := c.encode(w[(e*rows+r)*cols:][:cols], r)
				codes, scales, whole = append(codes, a...), append(scales, b...), append(whole, g...)
			}
			name := strings.Replace(to, "*", fmt.Sprint(e), 1)
			if strings.Contains(to, "*") {
				delete(all, fmt.Sprintf("model.layers.%s.mlp.experts.gate_up_proj", layer))
			}
			all[name] = blob{"U8", []int64{int64(len(codes))}, codes}
			all[name+".qs"] = blob{"F32", []int64{int64(len(scales) / 4)}, scales}
		}
		as[x.Name] = recoded{c.typ, whole}
	}
	return all, as
}

// What does not add up is refused with the name and both sizes.
func TestColibriRefused(t *testing.T) {
	config := shared(t, "oracles/hf/glm4_moe")
	const name = "model.layers.1.self_attn.o_proj.weight" // [64, 128]
	for _, tt := range []struct {
		name string
		edit func(all map[string]blob)
		want []string
	}{
		{"codes cut short", func(all map[string]blob) {
			all[name] = blob{"U8", []int64{8000}, all[name].data[:8000]}
		}, []string{name, "8000 bytes of codes", "256 bytes of scales", "[64, 128]"}},
		{"a scale too few", func(all map[string]blob) {
			all[name+".qs"] = blob{"F32", []int64{63}, all[name+".qs"].data[:252]}
		}, []string{name, "8192 bytes of codes", "252 bytes of scales"}},
		{"the lattice", func(all map[string]blob) {
			all[name] = blob{"U8", []int64{64 * 98}, bytes.Repeat([]byte{1}, 64*98)}
			all[name+".qs"] = blob{"F32", []int64{1}, make([]byte, 4)}
		}, []string{name, "E8 lattice", "format 6"}},
		{"short groups", func(all map[string]blob) {
			all[name] = blob{"U8", []int64{64 * 64}, make([]byte, 64*64)}
			all[name+".qs"] = blob{"F32", []int64{64 * 8}, make([]byte, 4*64*8)}
		}, []string{name, "each 16 columns", "multiples of 32"}},
		{"scales of another type", func(all map[string]blob) {
			all[name+".qs"] = blob{"BF16", []int64{64}, make([]byte, 128)}
		}, []string{name + ".qs", "BF16", "F32"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			all, _ := coliContainer(t, config, glm, coliCoders[0])
			tt.edit(all)
			m, err := storage.Open(writeBlobs(t, config, all, "out-00000.safetensors"))
			if err == nil {
				m.Close()
				t.Fatal("it is opened")
			}
			for _, w := range tt.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%v: lacks %q", err, w)
				}
			}
		})
	}
}
