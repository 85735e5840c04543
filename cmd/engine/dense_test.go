package engine

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sluice/backends"
	"sluice/internal/quant"
	"sluice/internal/safetensors"
	"sluice/moe"
	"sluice/moe/synth"
	"sluice/storage"
	"sluice/tiers"
)

// A denseModel is a small dense model of a family, written from what its paper and its
// published configuration say: weights as Hugging Face has them, and their meaning
// in float64.
type denseModel struct {
	family              string // as model_type names it
	hidden, ff, layers  int
	heads, kvHeads, dim int
	rotated             int  // elements of a head that turn
	neighbours          bool // turn together; else halves
	base                float64
	window              int // keys that a query sees; 0: all
	tied                bool
	biases              bool // of q, k and v
	normed              bool // q and k, each head by itself
	after               bool // norms of what attention and feed-forward add
	scaling             map[string]any
	divide              func(f float64) float64 // of a pair's frequency, by its own: scaling, computed here
	magnitude           float64                 // of cosines and sines
	vocab               int
	weights             map[string]blob
	v                   map[string][]float64
	arch                string         // in GGUF
	meta                map[string]any // of GGUF, beside what all have
	config              map[string]any // beside what all have
	divisors            bool           // GGUF has the scaling as a tensor
	gateUp              bool           // one matrix
	rng                 *rand.Rand
}

// denseModels are one or more of each family, with what may differ within it.
func denseModels() map[string]*denseModel {
	llama3 := map[string]any{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
	yarn := map[string]any{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
	all := map[string]*denseModel{
		"llama":       {family: "llama", arch: "llama", dim: 16, base: 10000},
		"llama, tied": {family: "llama", arch: "llama", dim: 16, base: 500000, tied: true, scaling: llama3, divisors: true, divide: llama3Divisor(8, 1, 4, 32)},
		"mistral":     {family: "mistral", arch: "llama", dim: 32, base: 10000, window: 9, config: map[string]any{"sliding_window": 9}, meta: map[string]any{"attention.sliding_window": uint32(9)}},
		"qwen2":       {family: "qwen2", arch: "qwen2", dim: 16, base: 1e6, tied: true, biases: true, config: map[string]any{"use_sliding_window": false, "sliding_window": 4, "max_window_layers": 1}},
		"qwen2, yarn": {family: "qwen2", arch: "qwen2", dim: 16, base: 10000, biases: true, scaling: yarn, magnitude: 0.1*math.Log(4) + 1},
		"qwen3":       {family: "qwen3", arch: "qwen3", dim: 32, base: 1e6, normed: true},
		"qwen3, tied": {family: "qwen3", arch: "qwen3", dim: 32, base: 1e6, normed: true, tied: true},
		"glm4":        {family: "glm4", arch: "glm4", dim: 16, base: 10000, rotated: 8, neighbours: true, biases: true, after: true, gateUp: true, config: map[string]any{"partial_rotary_factor": 0.5}},
	}
	y := all["qwen2, yarn"]
	y.divide = yarnDivisor(y.dim, y.base, 4, 32)
	for name, m := range all {
		m.hidden, m.ff, m.layers, m.heads, m.kvHeads, m.vocab = 64, 96, 3, 4, 2, 80
		if m.rotated == 0 {
			m.rotated = m.dim
		}
		if m.magnitude == 0 {
			m.magnitude = 1
		}
		m.make(name)
	}
	return all
}

// llama3Divisor is Llama 3.1's stretch: pairs whose wavelength is above
// original/low are slowed by the factor, those below original/high are not, those
// between by a share.
func llama3Divisor(factor, low, high, original float64) func(f float64) float64 {
	return func(f float64) float64 {
		wave := 2 * math.Pi / f
		switch {
		case wave < original/high:
			return 1
		case wave > original/low:
			return factor
		}
		smooth := (original/wave - low) / (high - low)
		return 1 / ((1-smooth)/factor + smooth)
	}
}

// yarnDivisor is YaRN's with the usual 32 and 1 turns, from whole pairs to whole pairs.
func yarnDivisor(dim int, base, factor, original float64) func(f float64) float64 {
	at := func(turns float64) float64 {
		return float64(dim) * math.Log(original/(turns*2*math.Pi)) / (2 * math.Log(base))
	}
	low, high := max(math.Floor(at(32)), 0), min(math.Ceil(at(1)), float64(dim-1))
	return func(f float64) float64 {
		pair := -math.Log(f) / math.Log(base) * float64(dim) / 2
		ramp := min(max((pair-low)/(high-low), 0), 1)
		return 1 / (ramp/factor + 1 - ramp)
	}
}

// make draws the weights, numbers that BF16 has.
func (m *denseModel) make(seed string) {
	h := uint64(0)
	for _, c := range []byte(seed) {
		h = h*31 + uint64(c)
	}
	m.rng, m.weights, m.v = rand.New(rand.NewPCG(h, 1)), map[string]blob{}, map[string][]float64{}
	matrix := func(name string, rows, cols int) { m.draw(name, 0, 1/math.Sqrt(float64(cols)), rows, cols) }
	vector := func(name string, mean float64, n int) { m.draw(name, mean, 0.2, n) }
	matrix("model.embed_tokens.weight", m.vocab, m.hidden)
	if !m.tied {
		matrix("lm_head.weight", m.vocab, m.hidden)
	}
	vector("model.norm.weight", 1, m.hidden)
	q, kv := m.heads*m.dim, m.kvHeads*m.dim
	for l := range m.layers {
		p := fmt.Sprintf("model.layers.%d.", l)
		vector(p+"input_layernorm.weight", 1, m.hidden)
		vector(p+"post_attention_layernorm.weight", 1, m.hidden)
		matrix(p+"self_attn.q_proj.weight", q, m.hidden)
		matrix(p+"self_attn.k_proj.weight", kv, m.hidden)
		matrix(p+"self_attn.v_proj.weight", kv, m.hidden)
		matrix(p+"self_attn.o_proj.weight", m.hidden, q)
		matrix(p+"mlp.down_proj.weight", m.hidden, m.ff)
		if m.biases {
			vector(p+"self_attn.q_proj.bias", 0, q)
			vector(p+"self_attn.k_proj.bias", 0, kv)
			vector(p+"self_attn.v_proj.bias", 0, kv)
		}
		if m.normed {
			vector(p+"self_attn.q_norm.weight", 1, m.dim)
			vector(p+"self_attn.k_norm.weight", 1, m.dim)
		}
		if m.after {
			vector(p+"post_self_attn_layernorm.weight", 1, m.hidden)
			vector(p+"post_mlp_layernorm.weight", 1, m.hidden)
		}
		if m.gateUp {
			matrix(p+"mlp.gate_up_proj.weight", 2*m.ff, m.hidden)
		} else {
			matrix(p+"mlp.gate_proj.weight", m.ff, m.hidden)
			matrix(p+"mlp.up_proj.weight", m.ff, m.hidden)
		}
	}
}

func (m *denseModel) draw(name string, mean, dev float64, dims ...int) {
	n, b := 1, blob{dtype: safetensors.BF16}
	for _, d := range dims {
		n *= d
		b.shape = append(b.shape, int64(d))
	}
	v := make([]float64, n)
	for i := range v {
		bits := quant.ToBF16(float32(mean + dev*m.rng.NormFloat64()))
		v[i] = float64(quant.FromBF16(bits))
		b.data = binary.LittleEndian.AppendUint16(b.data, bits)
	}
	m.weights[name], m.v[name] = b, v
}

// logits are those of each position, in float64.
func (m *denseModel) logits(ids []int32) []float64 {
	times := func(name string, x []float64) []float64 {
		w := m.v[name+".weight"]
		y := make([]float64, len(w)/len(x))
		for r := range y {
			for c, v := range x {
				y[r] += w[r*len(x)+c] * v
			}
		}
		for r, b := range m.v[name+".bias"] {
			y[r] += b
		}
		return y
	}
	norm := func(name string, x []float64) []float64 {
		sum := 0.0
		for _, v := range x {
			sum += v * v
		}
		y := make([]float64, len(x))
		for i, v := range x {
			y[i] = v / math.Sqrt(sum/float64(len(x))+1e-6) * m.v[name+".weight"][i]
		}
		return y
	}
	turn := func(head []float64, pos int) {
		for i := range m.rotated / 2 {
			f := math.Pow(m.base, -2*float64(i)/float64(m.rotated))
			if m.divide != nil {
				f /= m.divide(f)
			}
			a, b := i, i+m.rotated/2
			if m.neighbours {
				a, b = 2*i, 2*i+1
			}
			sin, cos := math.Sincos(float64(pos) * f)
			x, y := head[a], head[b]
			head[a], head[b] = m.magnitude*(x*cos-y*sin), m.magnitude*(y*cos+x*sin)
		}
	}
	add := func(x, y []float64) {
		for i := range x {
			x[i] += y[i]
		}
	}
	keys, values := make([][][]float64, m.layers), make([][][]float64, m.layers)
	var all []float64
	for pos, id := range ids {
		x := slices.Clone(m.v["model.embed_tokens.weight"][int(id)*m.hidden : (int(id)+1)*m.hidden])
		for l := range m.layers {
			p := fmt.Sprintf("model.layers.%d.", l)
			h := norm(p+"input_layernorm", x)
			q, k, v := times(p+"self_attn.q_proj", h), times(p+"self_attn.k_proj", h), times(p+"self_attn.v_proj", h)
			for i := range m.heads + m.kvHeads {
				name, head := "q", q
				if i >= m.heads {
					name, head = "k", k
				}
				at := i % m.heads * m.dim
				if i >= m.heads {
					at = (i - m.heads) * m.dim
				}
				head = head[at : at+m.dim]
				if m.normed {
					copy(head, norm(p+"self_attn."+name+"_norm", head))
				}
				turn(head, pos)
			}
			keys[l], values[l] = append(keys[l], k), append(values[l], v)
			mixed := make([]float64, m.heads*m.dim)
			for i := range m.heads {
				from := i / (m.heads / m.kvHeads) * m.dim
				first := 0
				if m.window > 0 {
					first = max(0, pos+1-m.window)
				}
				var share []float64
				sum := 0.0
				for t := first; t <= pos; t++ {
					dot := 0.0
					for d := range m.dim {
						dot += q[i*m.dim+d] * keys[l][t][from+d]
					}
					share = append(share, math.Exp(dot/math.Sqrt(float64(m.dim))))
					sum += share[t-first]
				}
				for t := first; t <= pos; t++ {
					for d := range m.dim {
						mixed[i*m.dim+d] += share[t-first] / sum * values[l][t][from+d]
					}
				}
			}
			y := times(p+"self_attn.o_proj", mixed)
			if m.after {
				y = norm(p+"post_self_attn_layernorm", y)
			}
			add(x, y)
			h = norm(p+"post_attention_layernorm", x)
			var gate, up []float64
			if m.gateUp {
				both := times(p+"mlp.gate_up_proj", h)
				gate, up = both[:m.ff], both[m.ff:]
			} else {
				gate, up = times(p+"mlp.gate_proj", h), times(p+"mlp.up_proj", h)
			}
			for i, g := range gate {
				up[i] *= g / (1 + math.Exp(-g))
			}
			y = times(p+"mlp.down_proj", up)
			if m.after {
				y = norm(p+"post_mlp_layernorm", y)
			}
			add(x, y)
		}
		head := "lm_head"
		if m.tied {
			head = "model.embed_tokens"
		}
		all = append(all, times(head, norm("model.norm", x))...)
	}
	return all
}

// directory writes the model as Hugging Face does, in shards.
func (m *denseModel) directory(t *testing.T) string {
	t.Helper()
	config := map[string]any{
		"model_type": m.family, "hidden_act": "silu", "hidden_size": m.hidden, "intermediate_size": m.ff, "num_hidden_layers": m.layers,
		"num_attention_heads": m.heads, "num_key_value_heads": m.kvHeads, "head_dim": m.dim, "rms_norm_eps": 1e-6, "rope_theta": m.base,
		"max_position_embeddings": 128, "tie_word_embeddings": m.tied, "vocab_size": m.vocab,
	}
	if m.scaling != nil {
		config["rope_scaling"] = m.scaling
	}
	maps.Copy(config, m.config)
	dir := t.TempDir()
	b, err := json.Marshal(config)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "config.json"), b, 0o666)
	}
	if err != nil {
		t.Fatal(err)
	}
	return writeBlobs(t, dir, m.weights, "model.safetensors")
}

// gguf writes the model as a converter does.
func (m *denseModel) gguf(t *testing.T) string {
	t.Helper()
	meta := []storage.KV{{Key: "general.architecture", Value: m.arch}}
	set := func(key string, v any) { meta = append(meta, storage.KV{Key: m.arch + "." + key, Value: v}) }
	for key, v := range map[string]int{
		"block_count": m.layers, "context_length": 128, "embedding_length": m.hidden, "feed_forward_length": m.ff, "attention.head_count": m.heads,
		"attention.head_count_kv": m.kvHeads, "attention.key_length": m.dim, "attention.value_length": m.dim, "rope.dimension_count": m.rotated, "vocab_size": m.vocab,
	} {
		set(key, uint32(v))
	}
	set("rope.freq_base", float32(m.base))
	set("attention.layer_norm_rms_epsilon", float32(1e-6))
	for key, v := range m.meta {
		set(key, v)
	}
	if m.scaling != nil && !m.divisors {
		set("rope.scaling.type", "yarn")
		set("rope.scaling.factor", float32(m.scaling["factor"].(float64)))
		set("rope.scaling.original_context_length", uint32(m.scaling["original_max_position_embeddings"].(int)))
	}
	var all []part
	if m.divisors {
		p := part{storage.TensorSpec{Name: "rope_freqs.weight", Type: quant.F32, Dims: []int64{int64(m.rotated / 2)}}, nil}
		for i := range m.rotated / 2 {
			p.data = binary.LittleEndian.AppendUint32(p.data, math.Float32bits(float32(m.divide(math.Pow(m.base, -2*float64(i)/float64(m.rotated))))))
		}
		all = append(all, p)
	}
	names := strings.NewReplacer("model.embed_tokens.", "token_embd.", "lm_head.", "output.", "model.norm.", "output_norm.", "model.layers.", "blk.",
		"input_layernorm.", "attn_norm.", "post_self_attn_layernorm.", "post_attention_norm.", "post_mlp_layernorm.", "post_ffw_norm.", "post_attention_layernorm.", "ffn_norm.",
		"self_attn.q_proj.", "attn_q.", "self_attn.k_proj.", "attn_k.", "self_attn.v_proj.", "attn_v.", "self_attn.o_proj.", "attn_output.",
		"self_attn.q_norm.", "attn_q_norm.", "self_attn.k_norm.", "attn_k_norm.", "mlp.gate_up_proj.", "ffn_up.", "mlp.gate_proj.", "ffn_gate.", "mlp.up_proj.", "ffn_up.", "mlp.down_proj.", "ffn_down.")
	for _, name := range slices.Sorted(maps.Keys(m.weights)) {
		b := m.weights[name]
		p := part{storage.TensorSpec{Name: names.Replace(name), Type: quant.F32, Dims: slices.Clone(b.shape)}, nil}
		slices.Reverse(p.Dims)
		v := m.v[name]
		if m.arch == "llama" && (strings.HasSuffix(name, "q_proj.weight") || strings.HasSuffix(name, "k_proj.weight")) {
			v = neighbours(v, m.dim, m.hidden)
		}
		for _, x := range v {
			p.data = binary.LittleEndian.AppendUint32(p.data, math.Float32bits(float32(x)))
		}
		all = append(all, p)
	}
	return writeParts(t, meta, all)
}

// neighbours moves the rows of each head so that those that turn together, half a
// head apart, are neighbours.
func neighbours(v []float64, dim, cols int) []float64 {
	out := make([]float64, 0, len(v))
	for head := 0; head < len(v); head += dim * cols {
		for i := range dim / 2 {
			for _, row := range [2]int{i, i + dim/2} {
				out = append(out, v[head+row*cols:head+(row+1)*cols]...)
			}
		}
	}
	return out
}

func denseIDs(m *denseModel) []int32 {
	ids := make([]int32, 40)
	for i := range ids {
		ids[i] = int32((i*i*7 + i*3) % m.vocab)
	}
	return ids
}

// Dense models compute what their papers say, from a Hugging Face directory and from
// GGUF, whatever the threads and the width of the batch.
func TestDenseReference(t *testing.T) {
	for name, m := range denseModels() {
		t.Run(name, func(t *testing.T) {
			ids := denseIDs(m)
			want := m.logits(ids)
			most := 0.0
			for _, v := range want {
				most = max(most, math.Abs(v))
			}
			dir, file := m.directory(t), m.gguf(t)
			var logits [2][]float32
			for i, path := range []string{dir, file} {
				e := open(t, Options{Path: path, KV: backends.KVF32, NoText: true})
				if !e.Dense() || e.Spec.Experts != 0 || e.Spec.LeadingDense != m.layers || e.Cap.Cap != 0 || e.Spec.Arch != m.arch {
					t.Errorf("%s: %+v", path, e.Spec)
				}
				logits[i], _ = allLogits(t, e, ids)
				worst := 0.0
				for j, v := range logits[i] {
					worst = max(worst, math.Abs(float64(v)-want[j]))
				}
				t.Logf("%s: %.2g of the largest logit", e.File.Format, worst/most)
				if worst > tolerance*most {
					t.Errorf("%s: logits differ by %.3g, of at most %.3g", path, worst, most)
				}
				for _, o := range []Options{{Chunk: 7, Threads: 2, Cap: 3, Storage: storage.Pread}, {Chunk: 1, Storage: storage.MMap}} {
					o.Path, o.KV, o.NoText = path, backends.KVF32, true
					again, _ := allLogits(t, open(t, o), ids)
					same(t, options(o), again, logits[i])
				}
			}
			if m.arch != "llama" && !m.gateUp { // whose rows are not reordered
				same(t, "the directory and the GGUF file", logits[0], logits[1])
			}
			slab := filepath.Join(t.TempDir(), "m.slab")
			if _, err := storage.Pack(context.Background(), openModel(t, dir), nil, slab, storage.PackOptions{}); err != nil {
				t.Fatal(err)
			}
			packed, _ := allLogits(t, open(t, Options{Path: slab, KV: backends.KVF32, NoText: true}), ids)
			same(t, "packed", packed, logits[0])
		})
	}
}

// What a dense file lacks or has wrong is told, with the tensor and the reason.
func TestDenseRefused(t *testing.T) {
	refused := func(path, want string) {
		t.Helper()
		p, err := Prepare(Options{Path: path, NoText: true, PlanOnly: true})
		if err == nil {
			p.Close()
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", path, err, want)
		}
	}
	for _, tt := range []struct {
		model string
		edit  func(m *denseModel)
		want  string // of the directory; "": it is as good as before
		gguf  string // of the file; "-": as good as before
	}{
		{"llama", func(m *denseModel) { delete(m.weights, "model.layers.1.mlp.up_proj.weight") }, "the file has no tensor model.layers.1.mlp.up_proj.weight", "the file has no tensor blk.1.ffn_up.weight"},
		{"qwen2", func(m *denseModel) { delete(m.weights, "model.layers.2.self_attn.k_proj.bias") }, "no tensor model.layers.2.self_attn.k_proj.bias", "no tensor blk.2.attn_k.bias"},
		{"qwen3", func(m *denseModel) { delete(m.weights, "model.layers.0.self_attn.q_norm.weight") }, "no tensor model.layers.0.self_attn.q_norm.weight", "no tensor blk.0.attn_q_norm.weight"},
		{"qwen3", func(m *denseModel) { delete(m.weights, "lm_head.weight") }, "no tensor lm_head.weight", "-"}, // in GGUF a head that is not there is the embedding
		{"qwen3, tied", func(m *denseModel) { m.draw("lm_head.weight", 0, 1, m.vocab, m.hidden) }, "", "-"},
		{"glm4", func(m *denseModel) { delete(m.weights, "model.layers.1.post_mlp_layernorm.weight") }, "no tensor model.layers.1.post_mlp_layernorm.weight", "no tensor blk.1.post_ffw_norm.weight"},
		{"glm4", func(m *denseModel) { delete(m.weights, "model.layers.1.mlp.gate_up_proj.weight") }, "no tensor model.layers.1.mlp.gate_up_proj.weight", "no tensor blk.1.ffn_up.weight"},
		{"glm4", func(m *denseModel) { m.draw("model.layers.0.mlp.gate_up_proj.weight", 0, 1, m.ff, m.hidden) }, "has dims [64 48], want [64 96]", "has dims [64 48], want [64 96]"},
		{"llama", func(m *denseModel) { m.draw("model.layers.0.self_attn.k_proj.weight", 0, 1, 64, m.hidden) }, "model.layers.0.self_attn.k_proj.weight has dims [64 64], want [64 32]", "blk.0.attn_k.weight has dims [64 64], want [64 32]"},
		{"llama", func(m *denseModel) { m.draw("model.layers.2.mlp.gate_proj.bias", 0, 1, m.ff) }, "feed-forwards with biases", "feed-forwards with biases"},
		{"llama", func(m *denseModel) { m.config = map[string]any{"hidden_act": "gelu"} }, `hidden_act is "gelu"`, "-"},
		{"llama", func(m *denseModel) {
			m.config = map[string]any{"rope_scaling": map[string]any{"rope_type": "dynamic", "factor": 2.0}}
		}, `RoPE scaling "dynamic"`, "-"},
		{"qwen2", func(m *denseModel) { m.config["use_sliding_window"] = true }, "use_sliding_window", "-"},
		{"qwen3", func(m *denseModel) {
			m.config = map[string]any{"layer_types": []string{"full_attention", "sliding_attention", "full_attention"}}
		}, `layer 1 is of the kind "sliding_attention"`, "-"},
		{"qwen3", func(m *denseModel) {
			m.meta, m.config = map[string]any{"expert_count": uint32(8)}, map[string]any{"num_experts": 8}
		}, "config.num_experts is 8: this family has no experts", "qwen3.expert_count is 8: this family has no experts"},
		{"llama", func(m *denseModel) { m.config = map[string]any{"num_local_experts": 8} }, "this family has no experts", "-"},
		{"llama", func(m *denseModel) { m.meta = map[string]any{"nextn_predict_layers": uint32(3)} }, "", "3 nextn layers of 3 in all"},
	} {
		m := denseModels()[tt.model]
		before := m.logits(denseIDs(m))[:m.vocab]
		tt.edit(m)
		if tt.want != "" {
			refused(m.directory(t), tt.want)
		} else if got := m.logits(denseIDs(m))[:m.vocab]; !slices.Equal(got, before) {
			t.Errorf("%s: other logits", tt.model)
		} else {
			e := open(t, Options{Path: m.directory(t), KV: backends.KVF32, NoText: true})
			logits, _ := allLogits(t, e, denseIDs(m)[:1])
			for i, v := range logits {
				if math.Abs(float64(v)-got[i]) > tolerance*10 {
					t.Fatalf("%s: logit %d is %v, want %v", tt.model, i, v, got[i])
				}
			}
		}
		if tt.gguf != "-" {
			refused(m.gguf(t), tt.gguf)
		}
	}

	// Cut short, with the end missing and in the middle of its headers.
	m := denseModels()["qwen3"]
	for _, path := range []string{m.gguf(t), filepath.Join(m.directory(t), "model.safetensors")} {
		whole, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range []int{len(whole) - 100, 200} {
			if err := os.WriteFile(path, whole[:n], 0o666); err != nil {
				t.Fatal(err)
			}
			refused(path, path)
		}
	}
}

// Options that say something of experts are told to mean nothing, and change nothing.
func TestDenseOptions(t *testing.T) {
	path := denseModels()["qwen3"].gguf(t)
	usage := filepath.Join(t.TempDir(), "usage")
	p := prepare(t, Options{Path: path, NoText: true, Cap: 8, Policy: "lru", Pin: Budget{Experts: 4}, VRAM: Budget{Experts: 3}, Usage: usage, Backend: "vulkan", KeepHost: true})
	e := load(t, p)
	words := strings.Join(p.Notices, "\n")
	if want := "--cap, --policy, --pin, --usage, --vram, --backend, --release-host: without effect, since the model is dense"; !strings.Contains(words, want) {
		t.Errorf("%q, want %q", words, want)
	}
	if e.Held() != 1 || e.BytesPerToken() != 0 || len(e.Forecast(1e9)) != 0 || e.Cap.Slots != 0 || e.Cap.LRU != 0 {
		t.Errorf("held %v, %d bytes a token, %+v, cap %+v", e.Held(), e.BytesPerToken(), e.Forecast(1e9), e.Cap)
	}
	if rate, err := e.DriveRate(); rate != 0 || err != nil {
		t.Errorf("a drive of %v, %v", rate, err)
	}
	generate(t, e, []int32{1, 2, 3}, 5)
	if _, err := e.Finish(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(usage); err == nil {
		t.Error("a usage history of no experts was written")
	}
	if st := e.Cache.Stats(); st.RoutedExperts != 0 || st.Source.Loads != 0 {
		t.Errorf("%+v", st)
	}
	if _, err := Prepare(Options{Path: path, NoText: true, Backend: "magic"}); err == nil || !strings.Contains(err.Error(), "--backend magic") {
		t.Errorf("%v", err)
	}
}

// A model that does not fit is refused, with what it would take: none of it can stay
// on the drive.
func TestDenseNoRoom(t *testing.T) {
	_, err := Prepare(Options{Path: denseModels()["qwen3"].gguf(t), NoText: true, RAM: 1 << 20})
	if err == nil || !strings.Contains(err.Error(), "not enough memory for the model, which has no experts that could stay on the drive") {
		t.Errorf("%v", err)
	}
}

// thinned is a dense model made of one with experts: of each layer there is the first
// expert alone. It has the same tokens, and drafts that are sometimes right.
func thinned(t *testing.T) string {
	t.Helper()
	m := openModel(t, qwen)
	changes := map[string]any{"general.architecture": "qwen3"}
	ff := int64(0)
	var all []part
	for _, x := range m.Tensors {
		p := partOf(t, m, x.Name, strings.Replace(x.Name, "_exps", "", 1))
		switch {
		case strings.Contains(x.Name, "ffn_gate_inp"):
			continue
		case strings.Contains(x.Name, "_exps"):
			if strings.Contains(x.Name, "gate") {
				ff = x.Dims[1]
			}
			p.data = p.data[:int64(len(p.data))/x.Dims[2]]
			p.Dims = x.Dims[:2]
		}
		all = append(all, p)
	}
	for _, k := range m.Meta.Keys() {
		if rest, ok := strings.CutPrefix(k, "qwen3moe."); ok {
			changes[k] = nil
			if !strings.HasPrefix(rest, "expert_") {
				changes["qwen3."+rest] = m.Meta.Value(k)
			}
		}
	}
	changes["qwen3.feed_forward_length"] = uint32(ff)
	return writeParts(t, metaOf(m, changes), all)
}

// synthetic is a dense model with the tokens of another.
func synthetic(t *testing.T, vocab string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "dense.gguf")
	if err := synth.Write(context.Background(), path, synth.Options{Arch: "qwen3", Layers: 2, Hidden: 64, FF: 64}, openModel(t, vocab)); err != nil {
		t.Fatal(err)
	}
	return path
}

// A dense model drafts for one with experts and for a dense one, and changes no bit:
// at each depth, under several caps, always and where the gate decides.
func TestDraftDense(t *testing.T) {
	thin := thinned(t)
	for _, tt := range []struct {
		name, path, draft string
		caps              []int
		right             bool // some drafts are
	}{
		{"experts", qwen, thin, []int{0, 1, 2, 8}, true},
		{"dense", thin, thin, []int{0}, true},
		{"strangers", mtp(t), synthetic(t, mtp(t)), []int{0, 2}, false},
	} {
		greedily := moe.Sampling{TopP: 1, RepeatPenalty: 1}
		plain := open(t, Options{Path: tt.path, Ctx: 100})
		prompt := make([]int32, 30)
		for i := range prompt {
			prompt[i] = int32(i*i*7%20) + 100
		}
		want := sampled(t, plain, greedily, prompt, 40)
		proposed, accepted := int64(0), int64(0)
		run := func(limit int, d Drafting) {
			e := open(t, Options{Path: tt.path, Ctx: 100, Cap: limit, Draft: d})
			r := sampled(t, e, greedily, prompt, 40)
			if r.Witness != want.Witness || !slices.Equal(r.IDs, want.IDs) {
				t.Errorf("%s, cap %d, %+v: %v (logits %08x), want %v (%08x)", tt.name, limit, d, r.IDs, r.Witness, want.IDs, want.Witness)
			}
			report := e.Drafts.Report()
			if d.Force && report.Proposed == 0 {
				t.Errorf("%s, cap %d, %+v: nothing was proposed", tt.name, limit, d)
			}
			proposed, accepted = proposed+report.Proposed, accepted+report.Accepted
			if err := e.Close(); err != nil {
				t.Fatal(err)
			}
		}
		for depth := 0; depth <= moe.MostDrafts; depth++ {
			if raceEnabled && depth%4 > 0 {
				continue
			}
			for i := range min(2, len(tt.caps)) {
				run(tt.caps[(depth+i)%len(tt.caps)], Drafting{By: "model", Depth: depth, Force: true, Model: tt.draft})
			}
		}
		run(tt.caps[0], Drafting{By: "auto", Model: tt.draft})
		t.Logf("%s: %d of %d drafts accepted", tt.name, accepted, proposed)
		if tt.right != (accepted > 0) || tt.name != "dense" && accepted == proposed {
			t.Errorf("%s: %d of %d drafts accepted", tt.name, accepted, proposed)
		}
	}
}

// What a draft model takes is in the ledger of the model that it drafts for, each part
// under its purpose, and is told.
func TestDraftDenseLedger(t *testing.T) {
	draft := synthetic(t, mtp(t))
	of := func(path string, d Drafting) *Plan {
		p := prepare(t, Options{Path: path, Ctx: 64, Draft: d})
		t.Cleanup(func() { p.Close() })
		return p
	}
	alone, beside, small := of(mtp(t), Drafting{}), of(mtp(t), Drafting{By: "auto", Model: draft}), of(draft, Drafting{})
	if beside.draft.By != "model" {
		t.Errorf("--draft auto with a draft model is %q", beside.draft.By)
	}
	near := func(what string, got, want int64) {
		t.Helper()
		if got != want || want == 0 {
			t.Errorf("%s: %d bytes, want %d", what, got, want)
		}
	}
	l, b, s := alone.Ledger, beside.Ledger, small.Ledger
	near("weights", b.Of(tiers.Dense)-l.Of(tiers.Dense), s.Of(tiers.Dense))
	near("KV cache", b.Of(tiers.KV)-l.Of(tiers.KV), s.Of(tiers.KV))
	near("work space", b.Of(tiers.Scratch)-l.Of(tiers.Scratch), s.Of(tiers.Scratch))
	near("resident bytes", s.Of(tiers.Dense), small.Reader.ResidentBytes(small.Spec.Dense))
	if words := strings.Join(beside.Notices, "\n"); !strings.Contains(words, "draft model "+draft+": ") || !strings.Contains(words, "KV cache") {
		t.Errorf("%q", words)
	}
}

// thinnedDirectory is thinned of the Hugging Face checkpoint of the same model, with
// its tokenizer as edit leaves it.
func thinnedDirectory(t *testing.T, edit func(vocab map[string]any)) string {
	t.Helper()
	from := shared(t, "oracles/hf/qwen3_moe")
	var config, words map[string]any
	readJSON(t, from+"/config.json", &config)
	readJSON(t, from+"/tokenizer.json", &words)
	config["model_type"], config["intermediate_size"] = "qwen3", config["moe_intermediate_size"]
	for _, key := range []string{"num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"} {
		delete(config, key)
	}
	edit(words["model"].(map[string]any)["vocab"].(map[string]any))
	all := map[string]blob{}
	for name, b := range blobsOf(t, from) {
		before, after, expert := strings.Cut(name, ".experts.0.")
		switch {
		case expert:
			all[before+"."+after] = b
		case !strings.Contains(name, ".experts.") && !strings.Contains(name, "mlp.gate."):
			all[name] = b
		}
	}
	dir := t.TempDir()
	write := func(dir, name string, v any) {
		t.Helper()
		text, err := json.Marshal(v)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), text, 0o666)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	write(dir, "config.json", config)
	dir = writeBlobs(t, dir, all, "model.safetensors")
	write(dir, "tokenizer.json", words)
	return dir
}

// A directory drafts for a GGUF file of the same tokens, a GGUF file for a
// directory, and a slab of fewer bits for both; tokens are compared by what they
// stand for, however the files write them.
func TestDraftDirectory(t *testing.T) {
	dir := thinnedDirectory(t, func(map[string]any) {})
	hf, gguf := open(t, Options{Path: dir, KV: backends.KVF32}), open(t, Options{Path: thinned(t), KV: backends.KVF32})
	ids := heldout(t, gguf, 30)
	if got := heldout(t, hf, 30); !slices.Equal(got, ids) {
		t.Fatalf("the directory reads %v, the file %v", got, ids)
	}
	a, _ := allLogits(t, hf, ids)
	b, _ := allLogits(t, gguf, ids)
	same(t, "the directory and the GGUF file", a, b)

	slab := filepath.Join(t.TempDir(), "small.slab")
	types, _, err := hf.Spec.Requantize(moe.Requantization{Dense: quant.Q8_0})
	if err == nil {
		_, err = storage.Pack(context.Background(), hf.File, nil, slab, storage.PackOptions{Requantize: types})
	}
	if err != nil {
		t.Fatal(err)
	}
	small := open(t, Options{Path: slab, KV: backends.KVF32})
	c, _ := allLogits(t, small, ids)
	if like := cosine(a, c); like < 0.999 || slices.Equal(a, c) || small.dense >= hf.dense {
		t.Errorf("of 8 bits: cosine %v, %d bytes of %d", like, small.dense, hf.dense)
	}

	greedily := moe.Sampling{TopP: 1, RepeatPenalty: 1}
	for _, tt := range [][2]string{{qwen, dir}, {shared(t, "oracles/hf/qwen3_moe"), gguf.path}, {qwen, slab}, {dir, slab}} {
		want := sampled(t, open(t, Options{Path: tt[0], Ctx: 80}), greedily, ids, 30)
		e := open(t, Options{Path: tt[0], Ctx: 80, Cap: 2, Draft: Drafting{By: "model", Force: true, Model: tt[1]}})
		r := sampled(t, e, greedily, ids, 30)
		if d := e.Drafts.Report(); r.Witness != want.Witness || d.Accepted == 0 {
			t.Errorf("%v: %d of %d accepted, logits %08x, want %08x", tt, d.Accepted, d.Proposed, r.Witness, want.Witness)
		}
	}

	other := thinnedDirectory(t, func(vocab map[string]any) {
		at := map[float64]string{}
		for word, id := range vocab {
			at[id.(float64)] = word
		}
		vocab[at[300]], vocab[at[301]] = vocab[at[301]], vocab[at[300]]
	})
	for _, path := range []string{qwen, dir} {
		if _, err := Prepare(Options{Path: path, Draft: Drafting{By: "model", Model: other}}); err == nil || !strings.Contains(err.Error(), "its tokens are not those of "+path+" (token 300 is ") {
			t.Errorf("%s: %v", path, err)
		}
	}
}
