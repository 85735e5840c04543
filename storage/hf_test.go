package storage

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sluice/internal/offheap"
	"sluice/internal/quant"
	"sluice/internal/safetensors"
)

// An st is a tensor of a safetensors file to be made.
type st struct {
	name  string
	dtype string
	shape []int64
	data  []byte // nil: zeros that are not written
}

func (x st) bytes() int64 {
	n, err := safetensors.Spec{Name: x.name, DType: safetensors.DType(x.dtype), Shape: x.shape}.Bytes()
	if err != nil {
		panic(err)
	}
	return n
}

// stHeader is the header of a file of the tensors, with its length before it.
func stHeader(ts []st) []byte {
	var b bytes.Buffer
	b.WriteString("{")
	off := int64(0)
	for i, x := range ts {
		if i > 0 {
			b.WriteString(",")
		}
		shape, _ := json.Marshal(x.shape)
		fmt.Fprintf(&b, `%q:{"dtype":%q,"shape":%s,"data_offsets":[%d,%d]}`, x.name, x.dtype, shape, off, off+x.bytes())
		off += x.bytes()
	}
	b.WriteString("}")
	return append(binary.LittleEndian.AppendUint64(nil, uint64(b.Len())), b.Bytes()...)
}

// writeST writes a file of the tensors.
func writeST(t testing.TB, path string, ts ...st) {
	t.Helper()
	b := stHeader(ts)
	size := int64(len(b))
	for _, x := range ts {
		b = append(b, x.data...)
		size += x.bytes()
	}
	write(t, path, b)
	if err := os.Truncate(path, size); err != nil {
		t.Fatal(err)
	}
}

func write(t testing.TB, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path, b, 0o666); err != nil {
		t.Fatal(err)
	}
}

func writeIndex(t testing.TB, dir string, files map[string][]st) {
	t.Helper()
	weights := map[string]string{}
	for f, ts := range files {
		for _, x := range ts {
			weights[x.name] = f
		}
	}
	b, _ := json.Marshal(map[string]any{"metadata": map[string]any{"total_size": 1}, "weight_map": weights})
	write(t, filepath.Join(dir, hfIndex), b)
}

func randomBytes(rng *rand.Rand, n int64) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	return b
}

// bf16s makes a tensor of that shape, of small numbers.
func bf16s(rng *rand.Rand, name string, shape ...int64) st {
	x := st{name, "BF16", shape, nil}
	x.data = make([]byte, x.bytes())
	for i := 0; i < len(x.data); i += 2 {
		binary.LittleEndian.PutUint16(x.data[i:], quant.ToBF16(float32(rng.NormFloat64())))
	}
	return x
}

func formatError(t *testing.T, err error, wants ...string) {
	t.Helper()
	var e *FormatError
	if !errors.As(err, &e) {
		t.Errorf("%v, want a *FormatError", err)
		return
	}
	for _, w := range wants {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%q lacks %q", err, w)
		}
	}
}

// threeShards is a directory of shards with or without an index.
func threeShards(t testing.TB, index bool) (dir string, names []string) {
	dir = t.TempDir()
	rng := rand.New(rand.NewPCG(1, 1))
	write(t, filepath.Join(dir, hfConfig), []byte(`{"model_type":"x"}`))
	files := map[string][]st{}
	for i := range 3 {
		name := fmt.Sprintf("model-%05d-of-00003.safetensors", i+1)
		names = append(names, name)
		files[name] = []st{bf16s(rng, fmt.Sprintf("t%d.a", i), 3, 5), bf16s(rng, fmt.Sprintf("t%d.b", i), 7)}
		writeST(t, filepath.Join(dir, name), files[name]...)
	}
	if index {
		writeIndex(t, dir, files)
	}
	return dir, names
}

// A set of shards opens from its directory and from each of its files; what lies
// beside it does not matter.
func TestHFShards(t *testing.T) {
	for _, index := range []bool{true, false} {
		dir, names := threeShards(t, index)
		if index {
			writeST(t, filepath.Join(dir, "adapter.safetensors"), st{"other", "U8", []int64{1}, []byte{1}})
		}
		paths := append([]string{"", hfConfig}, names...)
		if index {
			paths = append(paths, hfIndex)
		}
		for _, p := range paths {
			m, err := Open(filepath.Join(dir, p))
			if err != nil {
				t.Fatal(err)
			}
			if len(m.Files) != 3 || len(m.Tensors) != 6 || m.Format != "safetensors" || m.Files[1].Path != filepath.Join(dir, names[1]) {
				t.Errorf("%s: %d files, %d tensors, %s", p, len(m.Files), len(m.Tensors), m.Format)
			}
			if x, ok := m.Tensor("t1.a"); !ok || x.File != 1 || !slices.Equal(x.Dims, []int64{5, 3}) || x.Type != quant.BF16 {
				t.Errorf("t1.a is %+v", x)
			}
			m.Close()
		}
		if index {
			if m := open(t, filepath.Join(dir, "adapter.safetensors")); len(m.Tensors) != 1 {
				t.Error("a file beside the set is not itself")
			}
		}
	}
}

func TestHFSetErrors(t *testing.T) {
	for _, tt := range []struct {
		name  string
		index bool
		spoil func(dir string, names []string)
		path  string
		wants []string
	}{
		{"missing shard", true, func(dir string, n []string) { os.Remove(filepath.Join(dir, n[1])) }, "", []string{"00002-of-00003", "missing"}},
		{"missing shard, no index", false, func(dir string, n []string) { os.Remove(filepath.Join(dir, n[2])) }, "model-00001-of-00003.safetensors", []string{"00003-of-00003", "missing"}},
		{"another model's shard", true, func(dir string, n []string) {
			writeST(t, filepath.Join(dir, n[1]), st{"strange", "U8", []int64{2}, []byte{1, 2}})
		}, "", []string{n2, "strange", "the index does not have it"}},
		{"a shard in another's place", true, func(dir string, n []string) {
			b, _ := os.ReadFile(filepath.Join(dir, n[0]))
			write(t, filepath.Join(dir, n[1]), b)
		}, "", []string{n2, "t0.a", "the index puts it into model-00001"}},
		{"a tensor fewer", true, func(dir string, n []string) {
			writeST(t, filepath.Join(dir, n[1]), st{"t1.a", "U8", []int64{2}, []byte{1, 2}})
		}, "", []string{n2, "t1.b", "does not have it"}},
		{"twice", false, func(dir string, n []string) {
			writeST(t, filepath.Join(dir, n[2]), st{"t0.b", "U8", []int64{2}, []byte{1, 2}})
		}, "", []string{"00003-of-00003", "t0.b", "appears twice", "00001-of-00003"}},
		{"a file that the index does not know", true, func(dir string, n []string) {
			writeST(t, filepath.Join(dir, "model-00004-of-00004.safetensors"))
		}, "model-00004-of-00004.safetensors", []string{"the index does not know"}},
		{"two sets", false, func(dir string, n []string) { writeST(t, filepath.Join(dir, "other.safetensors")) }, "", []string{"2 models"}},
		{"no weights", false, func(dir string, n []string) {
			for _, x := range n {
				os.Remove(filepath.Join(dir, x))
			}
		}, "", []string{"no .safetensors file"}},
		{"no config", true, func(dir string, n []string) { os.Remove(filepath.Join(dir, hfConfig)) }, "model-00001-of-00003.safetensors", []string{"config.json", "missing"}},
		{"bad config", true, func(dir string, n []string) { write(t, filepath.Join(dir, hfConfig), []byte("[]")) }, "", []string{"config.json", "no JSON object"}},
		{"bad index", true, func(dir string, n []string) { write(t, filepath.Join(dir, hfIndex), []byte("{}")) }, "", []string{"weight_map"}},
		{"index of elsewhere", true, func(dir string, n []string) {
			write(t, filepath.Join(dir, hfIndex), []byte(`{"weight_map":{"a":"../x.safetensors"}}`))
		}, "", []string{"../x.safetensors", "beside"}},
		{"cut", true, func(dir string, n []string) { os.Truncate(filepath.Join(dir, n[0]), 20) }, "", []string{"00001", "cut short"}},
		{"cut data", true, func(dir string, n []string) {
			fi, _ := os.Stat(filepath.Join(dir, n[0]))
			os.Truncate(filepath.Join(dir, n[0]), fi.Size()-1)
		}, "", []string{"00001", "t0.b"}},
		{"overlap", false, func(dir string, n []string) {
			h := `{"t0.a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"t0.b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}}`
			write(t, filepath.Join(dir, n[0]), append(binary.LittleEndian.AppendUint64(nil, uint64(len(h))), h+"1234567"...))
		}, "", []string{"overlap"}},
		{"wrong bytes", false, func(dir string, n []string) {
			h := `{"t0.a":{"dtype":"F32","shape":[4],"data_offsets":[0,4]}}`
			write(t, filepath.Join(dir, n[0]), append(binary.LittleEndian.AppendUint64(nil, uint64(len(h))), h+"1234"...))
		}, "", []string{"4 bytes", "needs 16"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir, names := threeShards(t, tt.index)
			tt.spoil(dir, names)
			m, err := Open(filepath.Join(dir, tt.path))
			if err == nil {
				m.Close()
			}
			formatError(t, err, tt.wants...)
		})
	}
	if _, err := Open(t.TempDir()); err == nil || !strings.Contains(err.Error(), "directory") {
		t.Errorf("an empty directory: %v", err)
	}
}

const n2 = "model-00002-of-00003.safetensors"

// A config.json is flat in the metadata, that of the text on top.
func TestHFConfig(t *testing.T) {
	dir, _ := threeShards(t, true)
	write(t, filepath.Join(dir, hfConfig), []byte(`{"model_type":"both","hidden_size":1,"vision_config":{"depth":2},"only_top":true,
		"text_config":{"model_type":"both_text","hidden_size":64,"nothing":null,"rope":{"theta":1e4,"kinds":["a","b"],"factors":[1,2.5]},
		"layers":[0,3,7],"mixed":[1,"a"],"objects":[{"x":-1}],"empty":[],"big":18446744073709551615}}`))
	write(t, filepath.Join(dir, "tokenizer.json"), []byte("{tokens"))
	m := open(t, dir)
	got := map[string]any{}
	for _, k := range m.Meta.Keys() {
		if strings.HasPrefix(k, configPrefix) {
			got[k] = m.Meta.Value(k)
		}
	}
	want := map[string]any{
		"config.model_type": "both_text", "config.hidden_size": int64(64), "config.vision_config.depth": int64(2), "config.only_top": true,
		"config.rope.theta": 1e4, "config.rope.kinds": []string{"a", "b"}, "config.rope.factors": []float64{1, 2.5},
		"config.layers": []int64{0, 3, 7}, "config.mixed.0": int64(1), "config.mixed.1": "a", "config.objects.0.x": int64(-1), "config.big": 18446744073709551615.0,
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
	if text, ok := m.Meta.String("hf.tokenizer.json"); !ok || text != "{tokens" {
		t.Errorf("tokenizer.json is %q", text)
	}
	if name, _ := m.Meta.String("general.name"); name != filepath.Base(dir) {
		t.Errorf("name %q", name)
	}
}

// A woven is a tensor that a file has in pieces, with the numbers that it means.
type woven struct {
	name   string // that the model has for it, or its view
	typ    quant.Type
	cols   int64
	values []float32 // of all rows
	files  []st
}

// e4m3Value and e2m1Value are what codes mean, by the definitions of the formats.
func e4m3Value(c byte) float32 {
	m, e := float64(c&7), int(c>>3&15)
	v := m / 8 * 0x1p-6
	if e > 0 {
		v = math.Ldexp(1+m/8, e-7)
	}
	return float32(math.Copysign(v, float64(int8(c))))
}

func e2m1Value(c byte) float32 {
	v := [...]float64{0, 0.5, 1, 1.5, 2, 3, 4, 6}[c&7]
	if c&8 != 0 {
		v = -v
	}
	return float32(v)
}

// wovens makes one of each kind: dense ones and stacks of n experts.
func wovens(rng *rand.Rand, n int64, prefix string) (all []woven) {
	f8 := func(name string, rows, cols int64, scale string, scaleShape []int64, high, wide int64) woven {
		codes := st{name, "F8_E4M3", []int64{rows, cols}, randomBytes(rng, rows*cols)}
		for i := range codes.data {
			if codes.data[i]&0x7f == 0x7f {
				codes.data[i] = 0
			}
		}
		w := woven{name: name, typ: quant.F8_128, cols: cols, files: []st{codes}}
		s := st{name + scale, "F32", scaleShape, nil}
		scales := make([]float32, s.bytes()/4)
		for i := range scales {
			scales[i] = float32(rng.Float64() + 0.1)
			s.data = binary.LittleEndian.AppendUint32(s.data, math.Float32bits(scales[i]))
		}
		if scale != "" {
			w.files = append(w.files, s)
		}
		perRow := (cols + wide - 1) / wide
		for i, c := range codes.data {
			v := e4m3Value(c)
			if scale != "" {
				v *= scales[int64(i)/cols/high*perRow+int64(i)%cols/wide]
			}
			w.values = append(w.values, v)
		}
		return w
	}
	all = append(all,
		f8(prefix+"f8.a", 300, 256, "_scale_inv", []int64{3, 2}, 128, 128),
		f8(prefix+"f8.short", 129, 200, "_scale_inv", []int64{2, 2}, 128, 128),
		f8(prefix+"f8.rows", 5, 136, "_scale", []int64{5, 1}, 1, 136),
		f8(prefix+"f8.row", 5, 136, "_scale", []int64{5}, 1, 136),
		f8(prefix+"f8.whole", 5, 136, "_scale", nil, 5, 136),
		f8(prefix+"f8.bare", 5, 136, "", nil, 5, 136))

	mx := func(codes, scales, name string, shape []int64, codeShape, scaleShape []int64) woven {
		c, s := st{codes, "U8", codeShape, nil}, st{scales, "U8", scaleShape, nil}
		c.data = randomBytes(rng, c.bytes())
		for range s.bytes() {
			s.data = append(s.data, byte(120+rng.IntN(10)))
		}
		w := woven{name: name, typ: quant.MXFP4, cols: shape[len(shape)-1], files: []st{c, s}}
		for i := range 2 * len(c.data) {
			code := c.data[i/2] >> (i % 2 * 4) & 15
			w.values = append(w.values, e2m1Value(code)*float32(math.Ldexp(1, int(s.data[i/32])-127)))
		}
		return w
	}
	all = append(all,
		mx(prefix+"mx.gu_blocks", prefix+"mx.gu_scales", prefix+"mx.gu", []int64{n, 6, 64}, []int64{n, 6, 2, 16}, []int64{n, 6, 2}),
		mx(prefix+"mx.w.weight_packed", prefix+"mx.w.weight_scale", prefix+"mx.w.weight", []int64{6, 96}, []int64{6, 48}, []int64{6, 3}))

	i4 := func(name string, rows, cols, group int64, dtype string, typ quant.Type) woven {
		c, s := st{name + "_packed", "I32", []int64{rows, cols / 8}, nil}, st{name + "_scale", dtype, []int64{rows, cols / group}, nil}
		c.data = randomBytes(rng, c.bytes())
		var scales []float32
		for range s.bytes() / 2 {
			v := float32(rng.NormFloat64())
			bits := quant.ToBF16(v)
			if dtype == "F16" {
				bits = quant.ToF16(v)
				scales = append(scales, quant.FromF16(bits))
			} else {
				scales = append(scales, quant.FromBF16(bits))
			}
			s.data = binary.LittleEndian.AppendUint16(s.data, bits)
		}
		shape := st{name + "_shape", "I64", []int64{2}, nil}
		shape.data = binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, uint64(rows)), uint64(cols))
		w := woven{name: name, typ: typ, cols: cols, files: []st{c, s, shape}}
		for i := range rows * cols {
			word := binary.LittleEndian.Uint32(c.data[i/8*4:])
			w.values = append(w.values, float32(int(word>>(i%8*4)&15)-8)*scales[i/group])
		}
		return w
	}
	return append(all,
		i4(prefix+"i4.a.weight", 5, 96, 32, "BF16", quant.INT4_32),
		i4(prefix+"i4.b.weight", 5, 384, 128, "BF16", quant.INT4_128),
		i4(prefix+"i4.c.weight", 5, 512, 256, "BF16", quant.INT4_128),
		i4(prefix+"i4.d.weight", 5, 128, 64, "BF16", quant.INT4_32),
		i4(prefix+"i4.e.weight", 5, 64, 32, "F16", quant.Q4_0))
}

// directory is an opened model of these tensors in two files.
func directory(t testing.TB, config string, ts ...st) *Model {
	t.Helper()
	dir := t.TempDir()
	write(t, filepath.Join(dir, hfConfig), []byte(config))
	half := len(ts) / 2
	files := map[string][]st{"model-00001-of-00002.safetensors": ts[:half], "model-00002-of-00002.safetensors": ts[half:]}
	for name, ts := range files {
		writeST(t, filepath.Join(dir, name), ts...)
	}
	writeIndex(t, dir, files)
	return open(t, dir)
}

// decode is the numbers of all rows of a tensor.
func decode(typ quant.Type, cols int64, b []byte) (v []float32) {
	for size := typ.RowBytes(int(cols)); len(b) > 0; b = b[size:] {
		row := make([]float32, cols)
		quant.Dequantize(typ, row, b[:size])
		v = append(v, row...)
	}
	return v
}

// What stands in several tensors is one, with the numbers that the formats define,
// read alone or loaded with others. No outside oracle: the codes are the test's own.
func TestHFWovenTensors(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 7))
	all := wovens(rng, 3, "")
	var ts []st
	for _, w := range all {
		ts = append(ts, w.files...)
	}
	ts = append(ts, bf16s(rng, "plain", 9, 33))
	rng.Shuffle(len(ts), func(i, j int) { ts[i], ts[j] = ts[j], ts[i] })
	m := directory(t, `{}`, ts...)
	if len(m.Tensors) != len(all)+1 {
		t.Errorf("%d tensors, want %d", len(m.Tensors), len(all)+1)
	}
	if err := verified(m, nil); err != nil {
		t.Error(err)
	}
	wide := []ExpertLayer{{Layer: 0, Experts: 9, Parts: []string{"plain"}}}
	for _, mode := range []Mode{Slab, Pread, MMap} {
		r, err := m.Source(wide, SourceOptions{Mode: mode})
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		arena, err := offheap.Alloc(r.ResidentBytes(m.Tensors))
		if err != nil {
			t.Fatal(err)
		}
		defer offheap.Free(arena)
		data, _, err := r.Load(context.Background(), arena, m.Tensors)
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range all {
			x, ok := m.Tensor(w.name)
			if !ok || x.Type != w.typ || x.Dims[0] != w.cols {
				t.Errorf("%s is %+v", w.name, x)
				continue
			}
			b := tensorBytes(t, m, w.name)
			if !slices.Equal(decode(w.typ, w.cols, b), w.values) {
				t.Errorf("%s: other numbers", w.name)
			}
			if !bytes.Equal(data[m.byName[w.name]], b) {
				t.Errorf("%v: %s is loaded as other bytes than it is read", mode, w.name)
			}
		}
	}
}

// verified is what Verify finds.
func verified(m, packed *Model) error {
	v, err := Verify(context.Background(), m, packed, nil)
	for _, x := range v.Bad {
		err = errors.Join(err, x.Err)
	}
	return err
}

// A layout is a way in which files hold the experts of a layer.
type hfLayout struct {
	name  string
	parts []string
	files func(v [3][]float32) []st // of gate, up [experts, ff, dim] and down [experts, dim, ff]
	woven bool
}

const (
	hfExperts, hfFF, hfDim = 5, 48, 40
)

// stacked is a BF16 tensor of numbers.
func stacked(name string, v []float32, shape ...int64) st {
	x := st{name, "BF16", shape, nil}
	for _, f := range v {
		x.data = binary.LittleEndian.AppendUint16(x.data, quant.ToBF16(f))
	}
	return x
}

// turned is v [n, rows, cols] as [n, cols, rows].
func turned(v []float32, rows, cols int) []float32 {
	out := make([]float32, len(v))
	for i := range v {
		e, r, c := i/(rows*cols), i/cols%rows, i%cols
		out[e*rows*cols+c*rows+r] = v[i]
	}
	return out
}

// together puts gate and up, [n, ff, dim], into one [n, 2*ff, dim]: halves, or rows by turns.
func together(gate, up []float32, byTurns bool) (out []float32) {
	for e := range hfExperts {
		g, u := gate[e*hfFF*hfDim:][:hfFF*hfDim], up[e*hfFF*hfDim:][:hfFF*hfDim]
		if !byTurns {
			out = append(append(out, g...), u...)
			continue
		}
		for r := range hfFF {
			out = append(append(out, g[r*hfDim:][:hfDim]...), u[r*hfDim:][:hfDim]...)
		}
	}
	return out
}

func hfLayouts() []hfLayout {
	each := func(v [3][]float32) (ts []st) {
		for e := range hfExperts {
			for i, name := range []string{"gate", "up", "down"} {
				shape := []int64{hfFF, hfDim}
				if i == 2 {
					shape = []int64{hfDim, hfFF}
				}
				ts = append(ts, stacked(fmt.Sprintf("e.%d.%s", e, name), v[i][e*hfFF*hfDim:][:hfFF*hfDim], shape...))
			}
		}
		return ts
	}
	down := func(v [3][]float32) st { return stacked("down", v[2], hfExperts, hfDim, hfFF) }
	return []hfLayout{
		{"stacks", []string{"gate", "up", "down"}, func(v [3][]float32) []st {
			return []st{stacked("gate", v[0], hfExperts, hfFF, hfDim), stacked("up", v[1], hfExperts, hfFF, hfDim), down(v)}
		}, false},
		{"each", []string{"e.*.gate", "e.*.up", "e.*.down"}, each, false},
		{"each, in another order", []string{"e.*.gate", "e.*.up", "e.*.down"}, func(v [3][]float32) []st {
			ts := each(v)
			rand.New(rand.NewPCG(3, 4)).Shuffle(len(ts), func(i, j int) { ts[i], ts[j] = ts[j], ts[i] })
			return ts
		}, false},
		{"halves", []string{"gu[0/2]", "gu[1/2]", "down"}, func(v [3][]float32) []st {
			return []st{stacked("gu", together(v[0], v[1], false), hfExperts, 2*hfFF, hfDim), down(v)}
		}, false},
		{"by turns", []string{"gu[0%2]", "gu[1%2]", "down"}, func(v [3][]float32) []st {
			return []st{stacked("gu", together(v[0], v[1], true), hfExperts, 2*hfFF, hfDim), down(v)}
		}, true},
		{"transposed halves", []string{"gu[T0/2]", "gu[T1/2]", "down[T]"}, func(v [3][]float32) []st {
			return []st{stacked("gu", turned(together(v[0], v[1], false), 2*hfFF, hfDim), hfExperts, hfDim, 2*hfFF), stacked("down", turned(v[2], hfDim, hfFF), hfExperts, hfFF, hfDim)}
		}, true},
		{"transposed, by turns", []string{"gu[T0%2]", "gu[T1%2]", "down[T]"}, func(v [3][]float32) []st {
			return []st{stacked("gu", turned(together(v[0], v[1], true), 2*hfFF, hfDim), hfExperts, hfDim, 2*hfFF), stacked("down", turned(v[2], hfDim, hfFF), hfExperts, hfFF, hfDim)}
		}, true},
		{"each, fused", []string{"e.*.gu[0/2]", "e.*.gu[1/2]", "down"}, func(v [3][]float32) (ts []st) {
			all := together(v[0], v[1], false)
			for e := range hfExperts {
				ts = append(ts, stacked(fmt.Sprintf("e.%d.gu", e), all[e*2*hfFF*hfDim:][:2*hfFF*hfDim], 2*hfFF, hfDim))
			}
			return append(ts, down(v))
		}, false},
	}
}

// However the files hold the experts, the same bytes arrive as from three stacks,
// in every mode, and in a slab that is packed of them.
func TestHFLayouts(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 9))
	var v [3][]float32
	for i := range v {
		for range hfExperts * hfFF * hfDim {
			v[i] = append(v[i], quant.FromBF16(quant.ToBF16(float32(rng.NormFloat64()))))
		}
	}
	want := [3][]byte{}
	for i := range v {
		want[i] = stacked("", v[i], int64(len(v[i]))).data
	}
	const share = hfFF * hfDim * 2
	for _, l := range hfLayouts() {
		t.Run(l.name, func(t *testing.T) {
			m := directory(t, `{"model_type":"x"}`, append(l.files(v), bf16s(rng, "norm", 7))...)
			layers := []ExpertLayer{{Layer: 3, Experts: hfExperts, Parts: l.parts}}
			check := func(m *Model, mode Mode) {
				r, err := m.Source(layers, SourceOptions{Mode: mode})
				if err != nil {
					t.Fatal(err)
				}
				defer r.Close()
				if mapped := mode == MMap && (!l.woven || m.Format == "slab"); mapped != (r.Mode() == MMap) {
					t.Errorf("%v runs as %v: %v", mode, r.Mode(), r.Notices())
				}
				if r.ExpertBytes(3) != 3*share {
					t.Errorf("an expert has %d bytes, want %d", r.ExpertBytes(3), 3*share)
				}
				for _, f := range expertFetches(t, r, layers, hfExperts) {
					for e := range int32(hfExperts) {
						if err := load(r, f, Key{3, e}); err != nil {
							t.Fatal(err)
						}
						for p := range want {
							if !bytes.Equal(f.Parts[p], want[p][int(e)*share:][:share]) {
								t.Fatalf("%v: expert %d, part %d: other bytes", mode, e, p)
							}
						}
					}
				}
			}
			for p, name := range l.parts {
				x, err := m.View(name)
				if err != nil || x.Type != quant.BF16 || x.Bytes != int64(len(want[p])) || !bytes.Equal(tensorBytes(t, m, name), want[p]) {
					t.Errorf("%s is %+v: %v", name, x, err)
				}
			}
			for _, mode := range []Mode{Slab, Pread, MMap} {
				check(m, mode)
			}
			s := pack(t, m, layers)
			if len(s.Tensors) != 4 || s.Format != "slab" {
				t.Errorf("the slab has %d tensors, want 4", len(s.Tensors))
			}
			if kind, _ := s.Meta.String("config.model_type"); kind != "x" {
				t.Errorf("the slab's model_type is %q", kind)
			}
			for _, mode := range []Mode{Slab, Pread, MMap} {
				check(s, mode)
			}
			side, words := m.Sidecar()
			if side == nil {
				t.Fatal("the slab is not used: ", words)
			}
			side.Close()
			beside, err := s.Unpacked()
			if err != nil || beside == nil {
				t.Fatal("the model beside the slab is not found: ", err)
			}
			defer beside.Close()
			if err := verified(s, beside); err != nil {
				t.Error(err)
			}
			if err := verified(m, nil); err != nil {
				t.Error(err)
			}
			// A changed weight is found.
			f, err := os.OpenFile(m.Files[0].Path, os.O_WRONLY, 0)
			if err == nil {
				_, err = f.WriteAt([]byte{0x5a}, m.Files[0].head+100)
				f.Close()
			}
			if err != nil {
				t.Fatal(err)
			}
			if err := verified(s, beside); err == nil {
				t.Error("a changed weight is not found")
			}
		})
	}
}

// The codes and scales of an expert's matrices, from files in which they stand
// apart, arrive as blocks, and survive a fault of one read in either.
func TestHFWovenExperts(t *testing.T) {
	const n = 4
	rng := rand.New(rand.NewPCG(5, 5))
	var ts []st
	want := map[string][]float32{}
	for e := range n {
		one := fmt.Sprintf("e.%d.", e)
		for _, w := range wovens(rng, n, one) {
			name := strings.Replace(w.name, one, "e.*.", 1)
			if strings.HasSuffix(w.name, "mx.gu") { // a stack by itself
				if name = w.name; e > 0 {
					continue
				}
			}
			ts = append(ts, w.files...)
			want[name] = append(want[name], w.values...)
		}
	}
	m := directory(t, `{}`, ts...)
	roles := [][]string{
		{"e.*.f8.a", "e.*.f8.short", "e.*.f8.rows"}, {"e.0.mx.gu[0%2]", "e.0.mx.gu[1%2]", "e.*.mx.w.weight"}, {"e.0.mx.gu[0/2]", "e.0.mx.gu[1/2]", "e.*.i4.e.weight"},
		{"e.*.i4.a.weight", "e.*.i4.b.weight", "e.*.i4.c.weight", "e.*.i4.d.weight"}, {"e.*.f8.bare", "e.*.f8.whole", "e.*.f8.row"},
	}
	var layers []ExpertLayer
	for i, parts := range roles {
		layers = append(layers, ExpertLayer{Layer: i, Experts: n, Parts: parts})
	}
	values := func(name string, e int) []float32 {
		base, sel, _ := strings.Cut(name, "[")
		all := want[base]
		one := all[e*len(all)/n:][:len(all)/n]
		x, _ := m.Tensor(base)
		cols := int(x.Dims[0])
		rows := len(one) / cols
		switch sel {
		case "0/2]":
			return one[:len(one)/2]
		case "1/2]":
			return one[len(one)/2:]
		case "0%2]", "1%2]":
			var out []float32
			for r := int(sel[0] - '0'); r < rows; r += 2 {
				out = append(out, one[r*cols:][:cols]...)
			}
			return out
		}
		return one
	}
	for _, mode := range []Mode{Slab, Pread, MMap} {
		for at := range 3 {
			x := &faults{}
			r, err := m.Source(layers, SourceOptions{Mode: mode, dev: device{result: x.spoil}})
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			f := expertFetches(t, r, layers, 1)[0]
			for _, l := range layers {
				for e := range n {
					*x = faults{file: m.Files[(e+at)%2].Path, to: 1 << 40}
					if at < 2 {
						x.script = []fault{{err: unix.EIO}}
					}
					if err := load(r, f, Key{int32(l.Layer), int32(e)}); err != nil {
						t.Fatal(err)
					}
					for p, name := range l.Parts {
						y, _ := m.Tensor(name)
						if !slices.Equal(decode(y.Type, y.Dims[0], f.Parts[p]), values(name, e)) {
							t.Fatalf("%v: layer %d expert %d: %s has other numbers", mode, l.Layer, e, name)
						}
					}
				}
			}
			// What fails twice fails the fetch, and the next is as good as ever.
			*x = faults{file: m.Files[0].Path, to: 1 << 40, script: []fault{{err: unix.EIO}, {err: unix.EIO}, {err: unix.EIO}, {err: unix.EIO}, {err: unix.EIO}, {err: unix.EIO}, {err: unix.EIO}, {err: unix.EIO}}}
			var bad *ReadError
			err = load(r, f, Key{0, 0})
			if touched := len(x.script) < 8; touched && (!errors.As(err, &bad) || f.Parts[0] != nil) {
				t.Errorf("%v: two faults of one read: %v", mode, err)
			}
			x.script = nil
			if err := load(r, f, Key{0, 1}); err != nil {
				t.Error(err)
			}
		}
	}
	s := pack(t, m, layers)
	r := slabSource(t, s, layers, SourceOptions{Mode: MMap})
	f := expertFetches(t, r, layers, 1)[0]
	for _, l := range layers {
		if err := load(r, f, Key{int32(l.Layer), 2}); err != nil {
			t.Fatal(err)
		}
		for p, name := range l.Parts {
			y, _ := s.Tensor(name)
			if !slices.Equal(decode(y.Type, y.Dims[0], f.Parts[p]), values(name, 2)) {
				t.Errorf("slab: layer %d: %s has other numbers", l.Layer, name)
			}
		}
	}
	if err := verified(s, m); err != nil {
		t.Error(err)
	}
}

// What is wrong with the tensors of a layer is told by name.
func TestHFBadTensors(t *testing.T) {
	rng := rand.New(rand.NewPCG(2, 2))
	m := directory(t, `{}`, bf16s(rng, "e.0.g", 8, 4), bf16s(rng, "e.1.g", 8, 4), bf16s(rng, "e.3.g", 8, 4),
		bf16s(rng, "u.0.g", 8, 4), bf16s(rng, "u.1.g", 4, 8), bf16s(rng, "odd", 2, 7, 4), bf16s(rng, "vector", 7))
	for name, want := range map[string]string{
		"e.*.g": "expert 2 is missing, of 4: the model has no e.2.g", "u.*.g": "must be alike", "none.*.g": "no none.0.g", "odd[0/2]": "7 rows",
		"odd[2/2]": "no such selection", "odd[1%0]": "no such selection", "odd[": "no such selection", "odd[]": "last must be the number", "odd[x/2]": "no such selection",
		"odd[0/2": "no such selection", "vector[0/7]": "only of a matrix", "nothing[T]": "has none of that name", "*": "has no 0",
	} {
		_, err := m.Source([]ExpertLayer{{Layer: 6, Experts: 4, Parts: []string{name}}}, SourceOptions{})
		formatError(t, err, "layer 6", want)
	}
	for _, tt := range []struct {
		name string
		ts   []st
	}{
		{"want a scale for each block", []st{{"a", "F8_E4M3", []int64{300, 4}, nil}, {"a_scale_inv", "F32", []int64{2, 1}, nil}}},
		{"want a scale for each block", []st{{"a", "F8_E4M3", []int64{4, 300}, nil}, {"a_scale_inv", "F32", []int64{1, 2}, nil}}},
		{"none of a scale", []st{{"a", "F8_E4M3", []int64{4, 4}, nil}, {"a_scale_inv", "I32", []int64{1, 1}, nil}}},
		{"want that of a matrix", []st{{"a", "F8_E4M3", []int64{4, 4, 2, 2}, nil}}},
		{"want one for each 32", []st{{"a_blocks", "U8", []int64{2, 4, 2, 16}, nil}, {"a_scales", "U8", []int64{2, 4, 1}, nil}}},
		{"want one for each 32", []st{{"a_packed", "U8", []int64{2, 8}, nil}, {"a_scale", "U8", []int64{2, 1}, nil}}},
		{"does not fit codes", []st{{"a_packed", "I32", []int64{2, 8}, nil}, {"a_scale", "BF16", []int64{3, 2}, nil}}},
		{"multiple of 32", []st{{"a_packed", "I32", []int64{2, 8}, nil}, {"a_scale", "BF16", []int64{2, 4}, nil}}},
		{"supported are BF16 and F16", []st{{"a_packed", "I32", []int64{2, 8}, nil}, {"a_scale", "F32", []int64{2, 2}, nil}}},
		{"only symmetric", []st{{"a_packed", "I32", []int64{2, 8}, nil}, {"a_scale", "BF16", []int64{2, 2}, nil}, {"a_zero_point", "I32", []int64{1, 2}, nil}}},
	} {
		dir := t.TempDir()
		write(t, filepath.Join(dir, hfConfig), []byte(`{}`))
		writeST(t, filepath.Join(dir, hfWhole), tt.ts...)
		m, err := Open(dir)
		if err == nil {
			m.Close()
		}
		formatError(t, err, tt.name)
	}
}

// A model of the size of the largest is opened from its headers: 160 sparse files
// of 4.4 GB, 140,000 tensors.
func TestHFHuge(t *testing.T) {
	if testing.Short() {
		t.Skip("writes 20 MB of headers")
	}
	dir := t.TempDir()
	write(t, filepath.Join(dir, hfConfig), []byte(`{"model_type":"x"}`))
	const shards, layers, experts = 160, 61, 384
	files := make(map[string][]st, shards)
	n := 0
	add := func(x st) {
		name := fmt.Sprintf("model-%05d-of-%05d.safetensors", 1+n*shards/(layers*experts*6), shards)
		files[name] = append(files[name], x)
		n++
	}
	for l := range layers {
		for e := range experts {
			for _, k := range []string{"gate", "up", "down"} {
				name := fmt.Sprintf("model.layers.%d.mlp.experts.%d.%s_proj.weight", l, e, k)
				add(st{name + "_packed", "I32", []int64{2048, 896}, nil})
				add(st{name + "_scale", "BF16", []int64{2048, 224}, nil})
			}
		}
	}
	total := int64(0)
	for name, ts := range files {
		writeST(t, filepath.Join(dir, name), ts...)
		for _, x := range ts {
			total += x.bytes()
		}
	}
	writeIndex(t, dir, files)
	start := time.Now()
	m := open(t, dir)
	var roles []ExpertLayer
	for l := range layers {
		p := fmt.Sprintf("model.layers.%d.mlp.experts.*.", l)
		roles = append(roles, ExpertLayer{Layer: l, Experts: experts, Parts: []string{p + "gate_proj.weight", p + "up_proj.weight", p + "down_proj.weight"}})
	}
	t.Logf("%.4g GB, %d tensors, opened in %v", float64(total)/1e9, len(m.Tensors), time.Since(start))
	r, err := m.Source(roles, SourceOptions{Mode: Pread})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	t.Logf("planned after %v", time.Since(start))
	f := expertFetches(t, r, roles, 1)[0]
	if err := load(r, f, Key{60, 383}); err != nil { // over the borders of shards, or not
		t.Error(err)
	}
	if len(m.Tensors) != layers*experts*3 || len(f.Parts[2]) != 2048*7168/32*18 {
		t.Errorf("%d tensors, parts of %d bytes", len(m.Tensors), len(f.Parts[2]))
	}
}

// Whatever a header says, a model is refused in words, or every tensor of it and
// every view lies in the data.
func FuzzHFTensors(f *testing.F) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, ts := range [][]st{{bf16s(rng, "e.0.g", 8, 4), bf16s(rng, "e.1.g", 8, 4)}, {bf16s(rng, "x", 3, 4, 6)}} {
		f.Add(stHeader(ts)[8:])
	}
	for _, w := range wovens(rng, 3, "e.0.") {
		f.Add(stHeader(w.files)[8:])
	}
	f.Fuzz(func(t *testing.T, header []byte) {
		var size int64
		for _, n := range []int64{0, 1 << 10, 1 << 20} { // what the data has
			size += n
			ts, err := safetensors.ParseHeader(header, size)
			if err != nil {
				// The data must be covered: ask for as much as the header does.
				var want struct{ End int64 }
				if _, e := fmt.Sscanf(err.Error(), "its tensors have %d bytes", &want.End); e != nil || want.End < 0 || want.End > 1<<50 {
					continue
				}
				if ts, err = safetensors.ParseHeader(header, want.End); err != nil {
					continue
				}
				size = want.End
			}
			m := &Model{Format: "safetensors", Files: []File{{Path: "x", Size: size}}, byName: map[string]int{}}
			all, err := m.compose([][]safetensors.Tensor{ts})
			if err != nil {
				continue
			}
			if err := m.addTensors(all); err != nil {
				continue
			}
			for _, x := range all {
				names := []string{x.Name, x.Name + "[T]", x.Name + "[0/2]", x.Name + "[1%3]", x.Name + "[T1%2]", strings.Replace(x.Name, "0", "*", 1), strings.Replace(x.Name, "0", "*", 1) + "[1/2]"}
				for _, name := range names {
					y, err := m.View(name)
					if err != nil {
						continue
					}
					n := y.shares()
					for e := range n {
						for _, s := range y.sources(n) {
							if at := s.of(e); s.n > 0 && (at.off < 0 || at.off+s.n > size) {
								t.Fatalf("%s: expert %d has bytes %d to %d of %d", name, e, at.off, at.off+s.n, size)
							}
						}
						if e > 1000 {
							break
						}
					}
					if y.form == nil || y.Bytes > 1<<20 {
						continue
					}
					var raw [2][]byte
					for i, s := range y.form.from {
						raw[i] = make([]byte, s.n)
					}
					dst := make([]byte, y.Bytes/n)
					y.form.share(dst, raw[0], raw[1]) // within its slices
				}
			}
			return
		}
	})
}

func FuzzHFConfig(f *testing.F) {
	f.Add([]byte(`{"a":{"b":[1,2.5,"x",{"c":null}]},"text_config":{"d":true}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		kvs, err := flattenConfig("x", b)
		if err != nil {
			formatError(t, err)
			return
		}
		for _, kv := range kvs {
			if _, ok := kindOf(kv.Value); !ok || !strings.HasPrefix(kv.Key, configPrefix) {
				t.Fatalf("%q is %T", kv.Key, kv.Value)
			}
		}
	})
}

func FuzzHFIndex(f *testing.F) {
	f.Add([]byte(`{"weight_map":{"a":"x.safetensors"}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		x, err := parseIndex("x", b)
		if err != nil {
			formatError(t, err)
			return
		}
		for _, name := range x.files() {
			if strings.ContainsRune(name, '/') || name == ".." {
				t.Fatal(name)
			}
		}
	})
}
