// Package synth writes random models of any size: files that open, plan, load
// and decode like real ones, for trials of memory and drives. Their text means
// nothing.
//
// Two things in the weights are not random. The first anchorDims elements of
// the residual stream are the same for every token, since no layer writes to
// them; router rows lean on them, so that in each layer some experts are popular
// and most are not, as in trained models. And the norms of queries and keys
// are large, so that attention picks positions and text does not soon repeat.
package synth

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"

	"sluice/internal/quant"
	"sluice/storage"
)

// Options say what model to write. 0 takes the shape's own value.
type Options struct {
	Arch string // "glm4moe" (default), "qwen3moe", or "qwen3", which is dense
	Seed uint64
	Size int64 // bytes of the file, met as nearly as whole layers can; or
	// Layers counts the decoder layers, the leading dense one of glm4moe included,
	// a drafting one not.
	Layers  int
	Nextn   int // drafting (MTP) layers behind them, 0 or 1; glm4moe only
	Hidden  int // width of the residual stream, a multiple of 64
	Experts int // routed experts of a layer
	FF      int // width of a routed expert, or of the feed-forward of a dense model, a multiple of 32
	TopK    int // experts chosen for each token
}

// An OptionError says which option cannot be met, and what could be.
type OptionError struct{ msg string }

func (e *OptionError) Error() string { return e.msg }

func optionf(format string, args ...any) error { return &OptionError{fmt.Sprintf(format, args...)} }

// A shape is a model's numbers, all of them set.
type shape struct {
	arch                   string
	seed                   uint64
	layers, dense, nextn   int // all decoder layers; of them without a router; drafting ones
	hidden, heads, kvHeads int
	headDim, ff, vocab     int
	experts, expertFF, k   int
	shared                 bool // a shared expert, biases in attention, a correction bias
	routed                 bool // it has experts
	drift                  float64
}

// anchorDims is the number of leading elements of the residual stream that no
// layer changes: a block of Q8_0, whose scale can be 0.
const anchorDims = 32

// Write writes a model to path, with the vocabulary of another. The same
// options and vocabulary give the same bytes. Memory is constant; nothing is
// left behind after an error or when ctx ends. Options that no model can have
// are an *OptionError.
func Write(ctx context.Context, path string, opt Options, vocab *storage.Model) error {
	s, err := newShape(opt, vocab)
	if err != nil {
		return fmt.Errorf("synth: %w", err)
	}
	if s.layers == 0 {
		if s.layers, err = s.layersFor(opt.Size, vocab); err != nil {
			return fmt.Errorf("synth: %w", err)
		}
	}
	tensors := s.tensors()
	specs := make([]storage.TensorSpec, len(tensors))
	for i, t := range tensors {
		specs[i] = t.TensorSpec
	}
	w, err := storage.CreateGGUF(path, s.metadata(vocab), specs)
	if err != nil {
		return fmt.Errorf("synth: %w", err)
	}
	defer w.Abort()
	buf := make([]byte, chunkBytes)
	for _, t := range tensors {
		g := newGenerator(s.seed, t)
		for {
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("synth: %s: given up at tensor %s: %w", path, t.Name, err)
			}
			b := g.next(buf)
			if len(b) == 0 {
				break
			}
			if _, err := w.Write(b); err != nil {
				return fmt.Errorf("synth: %w", err)
			}
		}
	}
	if err := w.Finish(); err != nil {
		return fmt.Errorf("synth: %w", err)
	}
	return nil
}

// nameBegins is how the general.name of each such model begins.
const nameBegins = "Synthetic "

// Wrote says whether a model is one of this package.
func Wrote(m *storage.Model) bool {
	name, _ := m.Meta.String("general.name")
	return m.Format == "gguf" && strings.HasPrefix(name, nameBegins) && strings.Contains(name, ", random weights of seed ")
}

// newShape fills in what the options leave open, except for layers where a
// size is to be met.
func newShape(opt Options, vocab *storage.Model) (*shape, error) {
	words, ok := vocab.Meta.Strings("tokenizer.ggml.tokens")
	if err := vocab.Meta.Err(); err != nil {
		return nil, err
	}
	if !ok || len(words) == 0 {
		return nil, fmt.Errorf("%s has no vocabulary (tokenizer.ggml.tokens): name a model that has one", vocab.Files[0].Path)
	}
	s := &shape{arch: opt.Arch, seed: opt.Seed, nextn: opt.Nextn, layers: opt.Layers, vocab: len(words), hidden: 2048, expertFF: 768, routed: true}
	switch s.arch {
	case "glm4moe", "":
		s.arch, s.dense, s.shared, s.experts, s.k, s.drift = "glm4moe", 1, true, 64, 6, 1.3
	case "qwen3moe":
		s.experts, s.k, s.drift = 128, 8, 0.7
	case "qwen3":
		s.hidden, s.routed = 1024, false
		if opt.Experts != 0 || opt.TopK != 0 {
			return nil, optionf("%s is dense: leave out the number of experts and the top-k", s.arch)
		}
	default:
		return nil, optionf("architecture %q: use glm4moe, qwen3moe or qwen3", opt.Arch)
	}
	for _, set := range []struct {
		name            string
		value           int
		to              *int
		least, most, of int
	}{
		{"hidden", opt.Hidden, &s.hidden, 64, 1 << 16, 64},
		{"experts", opt.Experts, &s.experts, 1, 1 << 12, 1},
		{"ff", opt.FF, &s.expertFF, 32, 1 << 16, 32},
		{"layers", opt.Layers, &s.layers, s.dense + 1, 1 << 10, 1},
		{"nextn", opt.Nextn, &s.nextn, 0, 1, 1},
	} {
		if set.value == 0 {
			continue
		}
		if set.value < set.least || set.value > set.most || set.value%set.of != 0 {
			return nil, optionf("%s is %d: use a multiple of %d from %d to %d", set.name, set.value, set.of, set.least, set.most)
		}
		*set.to = set.value
	}
	s.k = min(s.k, s.experts)
	if opt.TopK != 0 && s.routed {
		if opt.TopK < 1 || opt.TopK > s.experts {
			return nil, optionf("top-k is %d: use 1 to %d, the number of experts", opt.TopK, s.experts)
		}
		s.k = opt.TopK
	}
	switch {
	case s.nextn > 0 && s.arch != "glm4moe":
		return nil, optionf("a drafting layer is glm4moe's: leave nextn at 0 for %s", s.arch)
	case opt.Layers == 0 && opt.Size <= 0:
		return nil, optionf("give a size in bytes or a number of layers")
	case opt.Layers > 0 && opt.Size != 0:
		return nil, optionf("the size sets the number of layers: give one of them")
	}
	// Attention and dense feed-forward follow the width: 32 heads and 4096 at 2048.
	s.headDim = min(128, s.hidden)
	s.heads = s.hidden / 64
	s.kvHeads = max(1, s.heads/8)
	for s.heads%s.kvHeads != 0 {
		s.kvHeads--
	}
	s.ff = 2 * s.hidden
	if !s.routed && opt.FF != 0 {
		s.ff = opt.FF
	}
	return s, nil
}

// layersFor is the number of layers that brings the file nearest to size bytes.
func (s *shape) layersFor(size int64, vocab *storage.Model) (int, error) {
	at := func(layers int) (int64, error) {
		with := *s
		with.layers = layers
		var specs []storage.TensorSpec
		for _, t := range with.tensors() {
			specs = append(specs, t.TensorSpec)
		}
		return storage.GGUFSize(with.metadata(vocab), specs)
	}
	least := s.dense + 1
	small, err := at(least)
	if err != nil {
		return 0, err
	}
	next, err := at(least + 1)
	if err != nil {
		return 0, err
	}
	layer := next - small
	if size < small-layer/2 {
		return 0, optionf("%d bytes are too few: a model of this shape has at least %d; a smaller hidden, ff or number of experts makes it smaller", size, small)
	}
	n := least + int((size-small+layer/2)/layer)
	if limit := 1 << 10; n > limit {
		return 0, optionf("%d bytes are too many: a layer of this shape has %d, and %d layers are the limit; a larger hidden, ff or number of experts makes it larger", size, layer, limit)
	}
	return n, nil
}

// metadata is the model's own and the other's vocabulary.
func (s *shape) metadata(vocab *storage.Model) []storage.KV {
	u := func(key string, v int) storage.KV { return storage.KV{Key: s.arch + "." + key, Value: uint32(v)} }
	f := func(key string, v float32) storage.KV { return storage.KV{Key: s.arch + "." + key, Value: v} }
	rope, eps := s.headDim, float32(1e-6)
	if s.arch == "glm4moe" {
		rope, eps = s.headDim/2, 1e-5
	}
	kvs := []storage.KV{
		{Key: "general.architecture", Value: s.arch},
		{Key: "general.type", Value: "model"},
		{Key: "general.name", Value: fmt.Sprintf(nameBegins+"%s, random weights of seed %d", s.arch, s.seed)},
		u("block_count", s.layers+s.nextn),
		u("context_length", 32768),
		u("embedding_length", s.hidden),
		u("feed_forward_length", s.ff),
		u("attention.head_count", s.heads),
		u("attention.head_count_kv", s.kvHeads),
		u("attention.key_length", s.headDim),
		u("attention.value_length", s.headDim),
		f("attention.layer_norm_rms_epsilon", eps),
		f("rope.freq_base", 1e6),
		u("rope.dimension_count", rope),
	}
	if s.routed {
		kvs = append(kvs, u("expert_count", s.experts), u("expert_used_count", s.k), u("expert_feed_forward_length", s.expertFF))
	}
	if s.arch == "glm4moe" {
		kvs = append(kvs,
			u("expert_group_count", 1),
			u("expert_group_used_count", 1),
			u("expert_shared_count", 1),
			u("leading_dense_block_count", s.dense),
			u("expert_gating_func", 2), // sigmoid
			f("expert_weights_scale", 2.5),
			storage.KV{Key: s.arch + ".expert_weights_norm", Value: true},
		)
		if s.nextn > 0 {
			kvs = append(kvs, u("nextn_predict_layers", s.nextn))
		}
	}
	types := uint32(15) // mostly Q4_K
	if !s.routed {
		types = 7 // Q8_0
	}
	kvs = append(kvs,
		storage.KV{Key: "general.file_type", Value: types},
		storage.KV{Key: "general.quantization_version", Value: uint32(2)},
	)
	for _, key := range vocab.Meta.Keys() {
		if strings.HasPrefix(key, "tokenizer.") {
			kvs = append(kvs, storage.KV{Key: key, Value: vocab.Meta.Value(key)})
		}
	}
	return kvs
}

// A tensor is a tensor to be written and how its values are drawn.
type tensor struct {
	storage.TensorSpec
	// mean and dev are those of its elements. Matrices have mean 0, and a dev of
	// 0 stands for 1/sqrt(cols), which keeps the size of what they multiply.
	mean, dev float64
	quiet     anchoring
	// popular is set for routers [hidden, experts] and biases [experts]: what
	// each expert gains in every token's score, in units of the scores' own
	// spread. For a router it is spread over the anchor.
	popular []float64
	anchor  float64 // router: the value of the anchor after the norm
}

// An anchoring says what a matrix does about the anchor.
type anchoring uint8

const (
	none    anchoring = iota
	holds             // the embedding: each row begins with the anchor
	skips             // rows for the anchor are 0: a layer's writing to the stream
	ignores           // columns for the anchor are 0: the head, so that no token is always the likeliest
)

// tensors lists the model's tensors in the order of the file.
func (s *shape) tensors() []tensor {
	var ts []tensor
	add := func(t tensor, name string, typ quant.Type, dims ...int) {
		t.Name, t.Type = name, typ
		for _, d := range dims {
			t.Dims = append(t.Dims, int64(d))
		}
		ts = append(ts, t)
	}
	norm := tensor{mean: 1, dev: 0.1}
	small := tensor{dev: 0.02}
	sharp := tensor{mean: 2, dev: 0.1} // q.k/sqrt(headDim) spreads by about 4
	expert := func(cols int) quant.Type {
		if cols%256 == 0 {
			return quant.Q4_K
		}
		return quant.Q8_0
	}

	add(tensor{dev: 2.5 / math.Sqrt(float64(s.hidden)), quiet: ignores}, "output.weight", quant.Q8_0, s.hidden, s.vocab)
	add(tensor{dev: 1, quiet: holds, anchor: s.anchorValue()}, "token_embd.weight", quant.Q8_0, s.hidden, s.vocab)
	q, kv := s.heads*s.headDim, s.kvHeads*s.headDim
	for l := 0; l < s.layers+s.nextn; l++ {
		p := fmt.Sprintf("blk.%d.", l)
		if l >= s.layers {
			add(tensor{}, p+"nextn.eh_proj.weight", quant.Q8_0, 2*s.hidden, s.hidden)
			add(norm, p+"nextn.enorm.weight", quant.F32, s.hidden)
			add(norm, p+"nextn.hnorm.weight", quant.F32, s.hidden)
		}
		add(norm, p+"attn_norm.weight", quant.F32, s.hidden)
		for _, m := range []struct {
			name string
			rows int
		}{{"attn_q", q}, {"attn_k", kv}, {"attn_v", kv}} {
			add(tensor{}, p+m.name+".weight", quant.Q8_0, s.hidden, m.rows)
			if s.arch == "glm4moe" {
				add(small, p+m.name+".bias", quant.F32, m.rows)
			}
		}
		add(sharp, p+"attn_q_norm.weight", quant.F32, s.headDim)
		add(sharp, p+"attn_k_norm.weight", quant.F32, s.headDim)
		add(tensor{quiet: skips}, p+"attn_output.weight", quant.Q8_0, q, s.hidden)
		if s.arch == "glm4moe" {
			add(norm, p+"post_attention_norm.weight", quant.F32, s.hidden)
		} else {
			add(norm, p+"ffn_norm.weight", quant.F32, s.hidden)
		}
		if l < s.dense || !s.routed {
			add(tensor{}, p+"ffn_gate.weight", quant.Q8_0, s.hidden, s.ff)
			add(tensor{}, p+"ffn_up.weight", quant.Q8_0, s.hidden, s.ff)
			add(tensor{quiet: skips}, p+"ffn_down.weight", quant.Q8_0, s.ff, s.hidden)
			continue
		}
		popular := s.popularity(l)
		router := tensor{popular: popular, anchor: s.anchorValue() / s.streamRMS(l)}
		if s.arch == "glm4moe" {
			// Half of it by the router and half by the bias, which is in units of
			// sigmoids, whose slope is 1/4 where most scores lie.
			half, bias := slices.Clone(popular), slices.Clone(popular)
			for e := range half {
				half[e] *= 0.5
				bias[e] *= 0.5 / 4
			}
			router.popular = half
			add(tensor{popular: bias}, p+"exp_probs_b.bias", quant.F32, s.experts)
		}
		add(router, p+"ffn_gate_inp.weight", quant.F32, s.hidden, s.experts)
		up, down := expert(s.hidden), expert(s.expertFF)
		add(tensor{}, p+"ffn_gate_exps.weight", up, s.hidden, s.expertFF, s.experts)
		add(tensor{}, p+"ffn_up_exps.weight", up, s.hidden, s.expertFF, s.experts)
		add(tensor{quiet: skips}, p+"ffn_down_exps.weight", down, s.expertFF, s.hidden, s.experts)
		if s.shared {
			add(tensor{}, p+"ffn_gate_shexp.weight", quant.Q8_0, s.hidden, s.expertFF)
			add(tensor{}, p+"ffn_up_shexp.weight", quant.Q8_0, s.hidden, s.expertFF)
			add(tensor{quiet: skips}, p+"ffn_down_shexp.weight", quant.Q8_0, s.expertFF, s.hidden)
		}
		if l >= s.layers {
			add(norm, p+"nextn.shared_head_norm.weight", quant.F32, s.hidden)
		}
	}
	add(norm, "output_norm.weight", quant.F32, s.hidden)
	return ts
}

// anchorValue is the value of the anchor's elements in the residual stream:
// together a sixteenth of the energy of an embedding, whose elements have dev 1.
func (s *shape) anchorValue() float64 { return math.Sqrt(float64(s.hidden) / 16 / anchorDims) }

// streamRMS is about how large the elements of the residual stream are at the
// router of layer l: each layer adds drift to their square, as measured.
func (s *shape) streamRMS(l int) float64 { return math.Sqrt(1 + float64(s.drift*(float64(l)+0.5))) }

// popularity is what each expert of a layer gains in every token's score: the
// logarithm of a Zipf law over ranks that differ from layer to layer.
func (s *shape) popularity(layer int) []float64 {
	const exponent = 0.4
	r := newRand(s.seed, fmt.Sprintf("popularity of layer %d", layer))
	order := r.Perm(s.experts)
	p := make([]float64, s.experts)
	sum := 0.0
	for e, rank := range order {
		p[e] = -exponent * math.Log(float64(rank+1))
		sum += p[e]
	}
	for e := range p {
		p[e] -= sum / float64(s.experts)
	}
	return p
}
