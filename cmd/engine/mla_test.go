package engine

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sluice/backends"
	"sluice/backends/cpu"
	"sluice/internal/quant"
	"sluice/moe"
	"sluice/storage"
	"sluice/tiers"
)

// The tiny models of multi-head latent attention compute what their reference
// implementation does.
func TestLatentOracles(t *testing.T) {
	for _, name := range []string{"deepseek_v3", "deepseek_v2", "deepseek_v3_yarn"} {
		t.Run(name, func(t *testing.T) {
			path, expected := latentFiles(t, name)
			checkOracle(t, openOracle(t, expected), open(t, Options{Path: path, KV: backends.KVF32}))
		})
	}
}

// latentFiles are a tiny model and its oracle; some have no place in the repository.
func latentFiles(t *testing.T, name string) (path, oracle string) {
	if name == "deepseek_v3" || name == "glm_moe_dsa" {
		return "testdata/" + name + ".gguf", "testdata/" + name + ".oracle.safetensors"
	}
	return shared(t, "oracles/gguf/"+name+".gguf"), shared(t, "oracles/hf/"+name+"/oracle.safetensors")
}

// From a Hugging Face directory, where keys and values are made by one matrix a
// layer, comes every bit that comes from a GGUF file, where a converter has split it.
func TestLatentHF(t *testing.T) {
	for _, name := range []string{"deepseek_v2", "deepseek_v3", "deepseek_v3_yarn", "deepseek_v32", "glm_moe_dsa"} {
		t.Run(name, func(t *testing.T) {
			dir := shared(t, "oracles/hf/"+name)
			path, expected := latentFiles(t, name)
			o := openOracle(t, expected)
			e := open(t, Options{Path: dir, KV: backends.KVF32, NoText: true})
			if e.Spec.MadeBytes != int64(e.Spec.Layers*e.Spec.Heads*32*16*2) {
				t.Errorf("%d bytes of transposed matrices", e.Spec.MadeBytes)
			}
			ids := o.ints("input_ids")
			got, _ := allLogits(t, e, ids)
			want, _ := allLogits(t, open(t, Options{Path: path, KV: backends.KVF32}), ids)
			same(t, name, got, want)
			if e.Spec.IndexKV(e.Config).Layers == 0 { // see TestIndexedOracles
				checkOracle(t, o, e)
			}
		})
	}
}

// The split layout in a GGUF file: of floats every bit is that of the absorbed
// one; of blocks the half that makes keys is used as F32, and a notice says so.
func TestSplitLayout(t *testing.T) {
	path, expected := latentFiles(t, "deepseek_v3")
	ids := openOracle(t, expected).ints("input_ids")
	want, _ := allLogits(t, open(t, Options{Path: path, KV: backends.KVF32}), ids)
	for _, tt := range []struct {
		typ   quant.Type
		bytes int64
	}{{quant.BF16, 3 * 4 * 32 * 16 * 2}, {quant.F32, 3 * 4 * 32 * 16 * 4}, {quant.Q8_0, 3 * 4 * 32 * 16 * 4}} {
		t.Run(tt.typ.String(), func(t *testing.T) {
			e := open(t, Options{Path: splitLayout(t, path, tt.typ), KV: backends.KVF32})
			if e.Spec.MadeBytes != tt.bytes || !slices.ContainsFunc(e.Notices, func(s string) bool { return strings.Contains(s, "attn_kv_b") }) {
				t.Errorf("%d bytes of transposed matrices, want %d; notices %q", e.Spec.MadeBytes, tt.bytes, e.Notices)
			}
			got, _ := allLogits(t, e, ids)
			if tt.typ != quant.Q8_0 {
				same(t, "logits", got, want)
			} else if c := cosine(got, want); c < 0.998 || c == 1 { // here and there another expert is chosen
				t.Errorf("the cosine of all logits is %v", c)
			}
		})
	}
}

// As DeepSeek-V3 is published: matrices of FP8 with a scale for each 128 x 128,
// the one that makes keys and values among them. Every bit is that of the same
// numbers in F32.
func TestLatentFP8(t *testing.T) {
	from := shared(t, "oracles/hf/deepseek_v32")
	as8, as32 := blobsOf(t, from), blobsOf(t, from)
	coded := 0
	for name, x := range as8 {
		stem, ok := strings.CutSuffix(name, "_proj.weight")
		for _, more := range []string{"_proj_with_mqa.weight", ".wk.weight", ".wq_b.weight"} {
			ok = ok || strings.HasSuffix(name, more)
		}
		if !ok || len(x.shape) != 2 || strings.HasSuffix(stem, ".weights") {
			continue
		}
		coded++
		const scale = 0x1p-9
		code, value := make([]byte, len(x.data)/2), make([]byte, 2*len(x.data))
		for i := range code {
			w := math.Float32frombits(uint32(x.data[2*i])<<16 | uint32(x.data[2*i+1])<<24)
			c, v := nearestE4M3(w / scale)
			code[i] = c
			binary.LittleEndian.PutUint32(value[4*i:], math.Float32bits(v*scale))
		}
		scales := make([]byte, 4*((x.shape[0]+127)/128)*((x.shape[1]+127)/128))
		for i := 0; i < len(scales); i += 4 {
			binary.LittleEndian.PutUint32(scales[i:], math.Float32bits(scale))
		}
		as8[name] = blob{"F8_E4M3", x.shape, code}
		as8[name+"_scale_inv"] = blob{"F32", []int64{(x.shape[0] + 127) / 128, (x.shape[1] + 127) / 128}, scales}
		as32[name] = blob{"F32", x.shape, value}
	}
	ids := openOracle(t, from+"/oracle.safetensors").ints("input_ids")
	run := func(all map[string]blob) ([]float32, *Engine) {
		e := open(t, Options{Path: writeBlobs(t, from, all, "model.safetensors"), KV: backends.KVF32, NoText: true})
		logits, _ := allLogits(t, e, ids)
		return logits, e
	}
	got, e := run(as8)
	want, _ := run(as32)
	same(t, "logits", got, want)
	i := slices.IndexFunc(e.Spec.Dense, func(x tiers.Tensor) bool { return strings.Contains(x.Name, "kv_b_proj") })
	if coded < 100 || i < 0 || e.Spec.Dense[i].Type != quant.F8_128 {
		t.Errorf("%d tensors are coded; %+v", coded, e.Spec.Dense)
	}
}

// splitLayout is a copy of a tiny GGUF model in which attn_kv_b stands for
// attn_k_b and attn_v_b, as the first converters wrote it, with their keys.
func splitLayout(t *testing.T, from string, typ quant.Type) string {
	t.Helper()
	m, err := storage.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	const heads, nope, value, latent = 4, 16, 16, 32
	var meta []storage.KV
	for _, k := range m.Meta.Keys() {
		switch v := m.Meta.Value(k); k {
		case "deepseek2.attention.key_length", "deepseek2.attention.value_length":
		case "deepseek2.attention.key_length_mla":
			meta = append(meta, storage.KV{Key: "deepseek2.attention.key_length", Value: v})
		case "deepseek2.attention.value_length_mla":
			meta = append(meta, storage.KV{Key: "deepseek2.attention.value_length", Value: v})
		case "deepseek2.attention.head_count_kv":
			meta = append(meta, storage.KV{Key: k, Value: uint32(heads)})
		default:
			meta = append(meta, storage.KV{Key: k, Value: v})
		}
	}
	floats := func(name string) []float32 {
		x, ok := m.Tensor(name)
		if !ok {
			t.Fatal("no tensor ", name)
		}
		b, f := make([]byte, x.Bytes), make([]float32, x.Dims[0]*x.Dims[1]*x.Dims[2])
		if err := m.ReadTensor(b, x); err != nil {
			t.Fatal(err)
		}
		quant.Dequantize(x.Type, f, b)
		return f
	}
	var specs []storage.TensorSpec
	var data [][]byte
	for _, x := range m.Tensors {
		if strings.HasSuffix(x.Name, "attn_v_b.weight") {
			continue
		}
		if layer, ok := strings.CutSuffix(x.Name, "attn_k_b.weight"); ok {
			k, v := floats(x.Name), floats(layer+"attn_v_b.weight")
			var both []float32
			for h := range heads {
				for i := range nope {
					for j := range latent {
						both = append(both, k[(h*latent+j)*nope+i])
					}
				}
				both = append(both, v[h*value*latent:(h+1)*value*latent]...)
			}
			b := make([]byte, heads*(nope+value)*typ.RowBytes(latent))
			if err := quant.Encode(typ, b, both); err != nil {
				t.Fatal(err)
			}
			specs = append(specs, storage.TensorSpec{Name: layer + "attn_kv_b.weight", Type: typ, Dims: []int64{latent, heads * (nope + value)}})
			data = append(data, b)
			continue
		}
		b := make([]byte, x.Bytes)
		if err := m.ReadTensor(b, x); err != nil {
			t.Fatal(err)
		}
		specs = append(specs, storage.TensorSpec{Name: x.Name, Type: x.Type, Dims: x.Dims})
		data = append(data, b)
	}
	to := filepath.Join(t.TempDir(), "split.gguf")
	w, err := storage.CreateGGUF(to, meta, specs)
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
	return to
}

// Batch width, threads, kernels, what was forgotten, and a context that holds no
// more keys than an indexer chooses change no bit.
func TestLatentSameBits(t *testing.T) {
	for _, name := range []string{"deepseek_v3", "glm_moe_dsa"} {
		path, expected := latentFiles(t, name)
		ids := openOracle(t, expected).ints("input_ids")
		for _, kv := range []backends.KVType{backends.KVF16, backends.KVF32} {
			var want []float32
			for i, o := range []Options{{Threads: 1, Chunk: 48}, {Threads: 1, Chunk: 1}, {Threads: 3, Chunk: 7}, {Threads: 2, Chunk: 20, Kernels: cpu.Go}} {
				o.Path, o.KV = path, kv
				e := open(t, o)
				got, _ := allLogits(t, e, ids)
				if i == 0 {
					want = got
					continue
				}
				what := fmt.Sprintf("%s with %s", name, options(o))
				same(t, what, got, want)
				// Forget from position 20 on, and run it again.
				e.Model.Rewind(20)
				last, err := e.Model.Extend(context.Background(), ids[20:])
				if err != nil {
					t.Fatal(err)
				}
				same(t, what+", again from 20", last, row(want, len(ids)-1, e.Spec.Vocab))
			}
			e := open(t, Options{Path: path, KV: kv, Ctx: 16})
			got, _ := allLogits(t, e, ids[:16])
			same(t, name+" with a short context", got, want[:len(got)])
		}
	}
}

// Layers may share what the indexer of a layer before them chose.
func TestSharedIndexer(t *testing.T) {
	path, expected := latentFiles(t, "glm_moe_dsa")
	ids := openOracle(t, expected).ints("input_ids")
	want, _ := allLogits(t, open(t, Options{Path: path, KV: backends.KVF32}), ids)
	e := open(t, Options{Path: rewrite(t, path, change{meta: map[string]any{"glm-dsa.attention.indexer.types": []bool{true, false, true}}}), KV: backends.KVF32})
	if n := e.Spec.IndexKV(e.Config).Layers; n != 2 {
		t.Errorf("%d layers of indexers, want 2", n)
	}
	for _, d := range e.Spec.Dense {
		if strings.HasPrefix(d.Name, "blk.1.indexer") {
			t.Errorf("%s is resident, and nobody asks it", d.Name)
		}
	}
	got, _ := allLogits(t, e, ids)
	same(t, "positions that see all keys", got[:16*e.Spec.Vocab], want[:16*e.Spec.Vocab])
	if distance(got, want) == 0 {
		t.Error("a layer that shares its keys computes what one with its own does")
	}
	one := open(t, Options{Path: e.File.Files[0].Path, KV: backends.KVF32, Chunk: 1})
	by1, _ := allLogits(t, one, ids)
	same(t, "position by position", by1, got)
}

// Headers that do not add up are refused in words.
func TestLatentRefusals(t *testing.T) {
	for _, tt := range []struct {
		name, file, key string
		value           any
		want            string
	}{
		{"no latent", "deepseek_v3", "deepseek2.attention.kv_lora_rank", uint32(0), "kv_lora_rank"},
		{"heads of the rotation alone", "deepseek_v3", "deepseek2.attention.key_length_mla", uint32(8), "heads of 8 elements, 8 of them rotated"},
		{"an odd rotation", "deepseek_v3", "deepseek2.rope.dimension_count", uint32(7), "pairs to rotate"},
		{"another scaling", "deepseek_v3", "deepseek2.rope.scaling.type", "linear", "only yarn"},
		{"groups that do not divide", "deepseek_v3", "deepseek2.expert_group_count", uint32(3), "groups"},
		{"another router", "deepseek_v3", "deepseek2.expert_gating_func", uint32(3), "gating function 3"},
		{"a rank of nothing", "glm_moe_dsa", "glm-dsa.attention.q_lora_rank", uint32(0), "the rank be given"},
		{"an index of no keys", "glm_moe_dsa", "glm-dsa.attention.indexer.top_k", uint32(0), "top_k"},
		{"a first layer that shares", "glm_moe_dsa", "glm-dsa.attention.indexer.types", []bool{false, true, true}, "layer 0 shares"},
		{"a short list of layers", "glm_moe_dsa", "glm-dsa.attention.indexer.types", []bool{true}, "of 1 layers of 3"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			path, _ := latentFiles(t, tt.file)
			p, err := Prepare(Options{Path: rewrite(t, path, change{meta: map[string]any{tt.key: tt.value}}), PlanOnly: true})
			if err == nil {
				p.Close()
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want words of %q", err, tt.want)
			}
		})
	}
	path, _ := latentFiles(t, "deepseek_v3")
	if _, err := Prepare(Options{Path: path, KV: backends.KVQ8}); err == nil || !strings.Contains(err.Error(), "multiple of 32") {
		t.Errorf("keys of 40 elements with q8: %v", err)
	}
}

// The tiny models with indexers do so too, but for one thing. Their indexers have
// two heads, both of which often have no positive score: then keys tie at 0, more
// of them than there is room for. We take the lower ones, and say so; the
// reference takes what torch.topk leaves in front, which is nobody's meaning and
// depends on how many keys there are behind the query. With its choice in place of
// ours every number is the reference's, so the models, their files and all else here agree.
func TestIndexedOracles(t *testing.T) {
	for _, name := range []string{"glm_moe_dsa", "deepseek_v32"} {
		t.Run(name, func(t *testing.T) {
			path, expected := latentFiles(t, name)
			o := openOracle(t, expected)
			e := open(t, Options{Path: path, KV: backends.KVF32})
			ids, want, greedyIDs := o.ints("input_ids"), o.floats("logits"), o.ints("greedy_ids")
			plain, _ := allLogits(t, e, ids)
			m, like := withTorchTies(t, e)
			logits, _ := allLogits(t, &Engine{Plan: e.Plan, Model: m}, ids)
			close := tolerance * largest(want)
			if worst := distance(logits, want); worst > close {
				t.Errorf("logits differ by up to %.3g, more than %.3g", worst, close)
			} else {
				t.Logf("logits within %.2g of the largest, %.4g", worst/largest(want), largest(want))
			}
			states, hidden := o.floats("hidden"), make([]float32, (e.Spec.Layers+1)*len(ids)*e.Spec.Hidden)
			m.Rewind(0)
			if err := m.ForwardStates(context.Background(), ids, hidden); err != nil {
				t.Fatal(err)
			}
			for l := range e.Spec.Layers + 1 {
				n := len(ids) * e.Spec.Hidden
				got, want := row(hidden, l, n), row(states, l, n)
				if worst, close := distance(got, want), tolerance*largest(want); worst > close {
					t.Errorf("hidden states %d differ by up to %.3g, more than %.3g", l, worst, close)
				}
			}
			// Up to the first tie ours is the reference's.
			if like.first < 16 || like.first >= len(ids) || like.ties == 0 {
				t.Errorf("the first of %d ties is at position %d, want one behind the 16 keys that all see", like.ties, like.first)
			}
			if n := like.first * e.Spec.Vocab; distance(plain[:n], want[:n]) > close {
				t.Errorf("before the first tie, at position %d, logits differ by up to %.3g", like.first, distance(plain[:n], want[:n]))
			}
			// The reference runs the whole text again for each token.
			text := ids
			for i, want := range greedyIDs[len(ids):] {
				all, _ := allLogits(t, &Engine{Plan: e.Plan, Model: m}, text)
				got, margin := topOf(row(all, len(text)-1, e.Spec.Vocab))
				if margin <= 2*close {
					t.Logf("token %d is a near tie (%.3g)", i, margin)
					break
				}
				if got != want {
					t.Fatalf("token %d of the greedy text is %d, want %d", i, got, want)
				}
				text = append(text[:len(text):len(text)], got)
			}
		})
	}
}

// withTorchTies opens e's model again on a backend that chooses keys as torch.topk does.
func withTorchTies(t *testing.T, e *Engine) (*moe.Model, *torchTies) {
	t.Helper()
	be, err := cpu.New(cpu.Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { be.Close() })
	like := &torchTies{Backend: be, t: t, first: 1 << 30}
	bytes := map[string][]byte{}
	for _, x := range e.Spec.Dense {
		b := make([]byte, x.Bytes)
		if err := e.File.ReadTensor(b, x); err != nil {
			t.Fatal(err)
		}
		bytes[x.Name] = b
	}
	m, err := moe.New(e.Spec, func(x tiers.Tensor) []byte { return bytes[x.Name] }, like, e.Cache, e.Config)
	if err != nil {
		t.Fatal(err)
	}
	like.on = true
	return m, like
}

// torchTies chooses keys as the reference does, for a text that is run in one
// batch from position 0, and has the backend choose the very same.
type torchTies struct {
	backends.Backend
	t           *testing.T
	on          bool
	keys        []float32 // of the layer that was stored last
	first, ties int       // position of the first tie, and how many there were
}

func (b *torchTies) Store(kv backends.KV, layer, pos int, k, v backends.Vec) {
	b.Backend.Store(kv, layer, pos, k, v)
	if v == nil && b.on {
		b.keys = b.read(k)
	}
}

func (b *torchTies) read(v backends.Vec) []float32 {
	x := make([]float32, v.Len()*v.Dim())
	if err := b.Read(x, v); err != nil {
		b.t.Fatal(err)
	}
	return x
}

func (b *torchTies) ChooseKeys(keys backends.Keys, q, w backends.Vec, kv backends.KV, layer, pos int) {
	if !b.on {
		b.Backend.ChooseKeys(keys, q, w, kv, layer, pos)
		return
	}
	n, heads, dim := q.Len(), w.Dim(), kv.Shape().KeyDim
	if pos != 0 || len(b.keys) != n*dim {
		b.t.Fatalf("a batch at position %d", pos)
	}
	qs, ws := b.read(q), b.read(w)
	// The backend's own choice is of scores 1 and 0, as they are made here from
	// keys of one 1 each.
	wide := (n + 31) &^ 31
	vec := func(n, dim int, x []float32) backends.Vec {
		v, err := b.NewVec(n, dim)
		if err != nil {
			b.t.Fatal(err)
		}
		table := make([]byte, 4*len(x))
		rows := make([]int32, n)
		for i, f := range x {
			u := math.Float32bits(f)
			table[4*i], table[4*i+1], table[4*i+2], table[4*i+3] = byte(u), byte(u>>8), byte(u>>16), byte(u>>24)
		}
		for i := range rows {
			rows[i] = int32(i)
		}
		b.Embed(v, backends.Matrix{Type: quant.F32, Rows: n, Cols: dim, Data: table}, rows)
		return v
	}
	units, wanted, ones := make([]float32, n*wide), make([]float32, n*wide), make([]float32, n)
	for p := range n {
		units[p*wide+p], ones[p] = 1, 1
		score := make([]float64, n)
		for k := range score {
			score[k] = math.Inf(-1)
			if k > p {
				continue
			}
			score[k] = 0
			for h := range heads {
				dot := 0.0
				for i := range dim {
					dot += float64(qs[(p*heads+h)*dim+i]) * float64(b.keys[k*dim+i])
				}
				score[k] += float64(ws[p*heads+h]) * max(dot, 0)
			}
		}
		chosen := torchTopK(b.t, score, min(keys.Most(), n))
		least, in := math.Inf(1), map[int]bool{}
		for _, k := range chosen {
			least, in[k] = min(least, score[k]), true
			if k <= p {
				wanted[p*wide+k] = 1
			}
		}
		for k, s := range score[:p+1] {
			if s == least && !in[k] {
				b.ties++
				b.first = min(b.first, p)
				break
			}
		}
	}
	index, err := b.NewKV(backends.KVShape{Layers: 1, Positions: n, Heads: 1, KeyDim: wide, Type: backends.KVF32})
	if err != nil {
		b.t.Fatal(err)
	}
	b.Backend.Store(index, 0, 0, vec(n, wide, units), nil)
	b.Backend.ChooseKeys(keys, vec(n, wide, wanted), vec(n, 1, ones), index, 0, 0)
}

// torchTopK is the places of the k largest of x as torch.topk of a CPU finds
// them: the first k after std::nth_element of GNU's library, which partitions
// about the median of three until three are left.
func torchTopK(t *testing.T, x []float64, k int) []int {
	at := make([]int, len(x))
	for i := range at {
		at[i] = i
	}
	before := func(i, j int) bool { return x[at[i]] > x[at[j]] }
	swap := func(i, j int) { at[i], at[j] = at[j], at[i] }
	lo, hi, nth := 0, len(at), k-1
	for steps := 0; hi-lo > 3; steps++ {
		if steps > 2*int(math.Log2(float64(len(x)))) {
			t.Fatal("nth_element would go on by a heap, which is not written here")
		}
		a, b, c := lo+1, lo+(hi-lo)/2, hi-1
		median := b
		switch {
		case before(a, b) && !before(b, c) && before(a, c), !before(a, b) && !before(a, c) && before(b, c):
			median = c
		case before(a, b) && !before(b, c), !before(a, b) && before(a, c):
			median = a
		}
		swap(lo, median)
		i, j := lo+1, hi
		for {
			for before(i, lo) {
				i++
			}
			j--
			for before(lo, j) {
				j--
			}
			if i >= j {
				break
			}
			swap(i, j)
			i++
		}
		if i <= nth {
			lo = i
		} else {
			hi = i
		}
	}
	for i := lo + 1; i < hi; i++ {
		for j := i; j > lo && before(j, j-1); j-- {
			swap(j, j-1)
		}
	}
	return at[:k]
}
