package synth

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sluice/internal/quant"
	"sluice/moe"
	"sluice/storage"
)

// vocabulary is a model of nothing but n tokens.
func vocabulary(t *testing.T, n int) *storage.Model {
	t.Helper()
	words := make([]string, n)
	for i := range words {
		words[i] = fmt.Sprint("w", i)
	}
	path := filepath.Join(t.TempDir(), "vocab.gguf")
	w, err := storage.CreateGGUF(path, []storage.KV{
		{Key: "general.architecture", Value: "other"},
		{Key: "general.sampling.temp", Value: float32(0.6)},
		{Key: "tokenizer.ggml.model", Value: "gpt2"},
		{Key: "tokenizer.ggml.tokens", Value: words},
		{Key: "tokenizer.ggml.token_type", Value: make([]int32, n)},
		{Key: "tokenizer.ggml.eos_token_id", Value: uint32(0)},
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Finish(); err != nil {
		t.Fatal(err)
	}
	return open(t, path)
}

func open(t *testing.T, path string) *storage.Model {
	t.Helper()
	m, err := storage.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

// write writes a model and gives its path.
func write(t *testing.T, opt Options, vocab *storage.Model) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "m.gguf")
	if err := Write(context.Background(), path, opt, vocab); err != nil {
		t.Fatal(err)
	}
	return path
}

// values reads a tensor as numbers.
func values(t *testing.T, m *storage.Model, name string) (storage.Tensor, []float32) {
	t.Helper()
	x, ok := m.Tensor(name)
	if !ok {
		t.Fatalf("no tensor %s", name)
	}
	b := make([]byte, x.Bytes)
	if err := m.ReadTensor(b, x); err != nil {
		t.Fatal(err)
	}
	if err := quant.Check(x.Type, b); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	n := int64(1)
	for _, d := range x.Dims {
		n *= d
	}
	v := make([]float32, n)
	quant.Dequantize(x.Type, v, b)
	return x, v
}

// The family pages find every tensor in the shape that they want, and the
// numbers are the ones asked for.
func TestOpens(t *testing.T) {
	vocab := vocabulary(t, 300)
	for _, c := range []struct {
		opt  Options
		want moe.Spec
	}{
		{Options{Layers: 3, Hidden: 256, Experts: 16, FF: 256, Nextn: 1}, moe.Spec{Arch: "glm4moe", Layers: 3, LeadingDense: 1, Nextn: 1, Hidden: 256,
			Heads: 4, KVHeads: 1, HeadDim: 128, RopeDims: 64, FF: 512, ExpertFF: 256, Experts: 16, TopK: 6, SharedExperts: 1}},
		{Options{Arch: "qwen3moe", Layers: 2, Hidden: 64, Experts: 4, FF: 96}, moe.Spec{Arch: "qwen3moe", Layers: 2, Hidden: 64,
			Heads: 1, KVHeads: 1, HeadDim: 64, RopeDims: 64, ExpertFF: 96, Experts: 4, TopK: 4}},
		{Options{Arch: "qwen3moe", Layers: 1, Hidden: 1792, Experts: 2, FF: 32, TopK: 1, Seed: 9}, moe.Spec{Arch: "qwen3moe", Layers: 1, Hidden: 1792,
			Heads: 28, KVHeads: 2, HeadDim: 128, RopeDims: 128, ExpertFF: 32, Experts: 2, TopK: 1}},
		{Options{Arch: "qwen3", Layers: 2, Hidden: 128, FF: 96}, moe.Spec{Arch: "qwen3", Layers: 2, LeadingDense: 2, Hidden: 128,
			Heads: 2, KVHeads: 1, HeadDim: 128, RopeDims: 128, FF: 96}},
	} {
		m := open(t, write(t, c.opt, vocab))
		s, err := moe.Describe(m)
		if err != nil {
			t.Errorf("%+v: %v", c.opt, err)
			continue
		}
		got := moe.Spec{Arch: s.Arch, Layers: s.Layers, LeadingDense: s.LeadingDense, Nextn: s.Nextn, Hidden: s.Hidden, Heads: s.Heads,
			KVHeads: s.KVHeads, HeadDim: s.HeadDim, RopeDims: s.RopeDims, FF: s.FF, ExpertFF: s.ExpertFF, Experts: s.Experts, TopK: s.TopK, SharedExperts: s.SharedExperts}
		if a, b := fmt.Sprintf("%+v", got), fmt.Sprintf("%+v", c.want); a != b || s.Vocab != 300 {
			t.Errorf("%+v gives\n%s, want\n%s", c.opt, a, b)
		}
		if !strings.Contains(s.Name, "Synthetic") || !strings.Contains(s.Name, fmt.Sprintf("seed %d", c.opt.Seed)) {
			t.Errorf("named %q", s.Name)
		}
		if words, _ := m.Meta.Strings("tokenizer.ggml.tokens"); len(words) != 300 || m.Meta.Has("general.sampling.temp") {
			t.Errorf("%d tokens; a sampling temperature: %v", len(words), m.Meta.Has("general.sampling.temp"))
		}
		for _, x := range m.Tensors {
			if strings.Contains(x.Name, "_exps.") {
				if want := map[bool]quant.Type{true: quant.Q4_K, false: quant.Q8_0}[x.Dims[0]%256 == 0]; x.Type != want {
					t.Errorf("%s with rows of %d is %v", x.Name, x.Dims[0], x.Type)
				}
			}
		}
	}
}

// The file is within a layer of the size asked for.
func TestSize(t *testing.T) {
	vocab := vocabulary(t, 300)
	for _, arch := range []string{"glm4moe", "qwen3moe", "qwen3"} {
		opt := Options{Arch: arch, Hidden: 64, Experts: 16, FF: 64}
		if arch == "qwen3" {
			opt.Experts, opt.FF = 0, 4096
		}
		size := func(o Options) int64 {
			fi, err := os.Stat(write(t, o, vocab))
			if err != nil {
				t.Fatal(err)
			}
			return fi.Size()
		}
		two, three := opt, opt
		two.Layers, three.Layers = 2, 3
		layer := size(three) - size(two)
		for _, want := range []int64{1_500_000, 2_000_000, 3_000_001} {
			opt.Size = want
			if got := size(opt); got < want-layer || got > want+layer {
				t.Errorf("%s of %d bytes has %d; a layer has %d", arch, want, got, layer)
			}
		}
	}
	// The default shapes, without writing them.
	for _, c := range []struct {
		arch   string
		size   int64
		layers int
	}{{"glm4moe", 8 << 30, 45}, {"qwen3moe", 8 << 30, 24}, {"qwen3", 600 << 20, 54}} {
		s, err := newShape(Options{Arch: c.arch, Size: c.size}, vocab)
		if err != nil {
			t.Fatal(err)
		}
		if n, err := s.layersFor(c.size, vocab); err != nil || n != c.layers {
			t.Errorf("%s of %d bytes has %d layers (%v), want %d", c.arch, c.size, n, err, c.layers)
		}
	}
}

func TestSameSeedSameBytes(t *testing.T) {
	vocab := vocabulary(t, 300)
	opt := Options{Size: 2_000_000, Hidden: 256, Experts: 4, FF: 256, Seed: 5}
	read := func(o Options) []byte {
		b, err := os.ReadFile(write(t, o, vocab))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	a, b := read(opt), read(opt)
	opt.Seed = 6
	if c := read(opt); !bytes.Equal(a, b) || bytes.Equal(a, c) {
		t.Errorf("same seed the same: %v, another seed the same: %v", bytes.Equal(a, b), bytes.Equal(a, c))
	}
}

// Every weight is in range, and matrices keep the size of what they multiply:
// mean about 0, deviation about 1/sqrt(cols), in any part of a tensor.
func TestValues(t *testing.T) {
	m := open(t, write(t, Options{Layers: 2, Hidden: 256, Experts: 8, FF: 256, Nextn: 1}, vocabulary(t, 300)))
	for _, x := range m.Tensors {
		values(t, m, x.Name) // checks them
	}
	for _, name := range []string{"blk.0.attn_q.weight", "blk.0.ffn_up.weight", "blk.1.ffn_gate_exps.weight", "blk.1.ffn_up_exps.weight", "blk.1.ffn_down_exps.weight", "blk.2.nextn.eh_proj.weight"} {
		x, v := values(t, m, name)
		cols, rows := int(x.Dims[0]), int(x.Dims[1])
		part := v[len(v)-(rows-anchorDims)*cols:] // of the last expert, without rows for the anchor
		var sum, square float64
		for _, f := range part {
			sum += float64(f)
			square += float64(f) * float64(f)
		}
		n := float64(len(part))
		want := 1 / math.Sqrt(float64(cols))
		if mean, dev := sum/n, math.Sqrt(square/n); math.Abs(mean) > 0.02*want || math.Abs(dev/want-1) > 0.02 {
			t.Errorf("%s (%v): mean %g, deviation %g, want 0 and %g", name, x.Type, mean, dev, want)
		}
	}
	// The anchor: held by the embedding, written by nothing, seen by no head.
	_, embed := values(t, m, "token_embd.weight")
	_, head := values(t, m, "output.weight")
	_, out := values(t, m, "blk.0.attn_output.weight") // cols 512
	x, down := values(t, m, "blk.1.ffn_down_exps.weight")
	for row := range 300 {
		for col := range anchorDims {
			if got := embed[row*256+col]; got != embed[0] || math.Abs(float64(got)/math.Sqrt(256.0/16/anchorDims)-1) > 1e-3 {
				t.Fatalf("embedding of token %d, element %d: %g", row, col, got)
			}
			if head[row*256+col] != 0 {
				t.Fatalf("head row %d sees element %d", row, col)
			}
		}
	}
	for i := range anchorDims * 512 {
		if out[i] != 0 {
			t.Fatalf("attention writes to element %d", i/512)
		}
	}
	for e := range 8 {
		for i := range anchorDims * int(x.Dims[0]) {
			if down[e*256*256+i] != 0 {
				t.Fatalf("expert %d writes to element %d", e, i/256)
			}
		}
	}
}

// An LRU cache of half of a layer's experts hits far more than half of the
// time, and each layer has other favourites.
func TestPopularity(t *testing.T) {
	const hidden, experts, tokens = 256, 64, 600
	for _, arch := range []string{"glm4moe", "qwen3moe"} {
		opt := Options{Arch: arch, Layers: 4, Hidden: hidden, Experts: experts, FF: 32}
		vocab := vocabulary(t, 64)
		m := open(t, write(t, opt, vocab))
		s, err := newShape(opt, vocab)
		if err != nil {
			t.Fatal(err)
		}
		rng := rand.New(rand.NewPCG(1, 2))
		var favourites []int32
		for l := 2; l < 4; l++ {
			_, router := values(t, m, fmt.Sprintf("blk.%d.ffn_gate_inp.weight", l))
			var bias []float32
			if arch == "glm4moe" {
				_, bias = values(t, m, fmt.Sprintf("blk.%d.exp_probs_b.bias", l))
			}
			var recent []int32 // the least recent first
			hits, uses := 0, make([]int, experts)
			ids, weights, scores := make([]int32, s.k), make([]float32, s.k), make([]float32, experts)
			for range tokens {
				for e := range scores {
					scores[e] = 0
				}
				for i := range hidden { // what a norm would give: the anchor, and noise of deviation 1
					h := float32(rng.NormFloat64())
					if i < anchorDims {
						h = float32(s.anchorValue() / s.streamRMS(l))
					}
					for e := range scores {
						scores[e] += h * router[e*hidden+i]
					}
				}
				if arch == "glm4moe" {
					moe.RouteSigmoid(ids, weights, scores, bias, true, 1)
				} else {
					moe.RouteSoftmax(ids, weights, scores, true)
				}
				for _, id := range ids {
					uses[id]++
					if i := slices.Index(recent, id); i >= 0 {
						hits++
						recent = slices.Delete(recent, i, i+1)
					} else if len(recent) == experts/2 {
						recent = slices.Delete(recent, 0, 1)
					}
					recent = append(recent, id)
				}
			}
			rate := float64(hits) / float64(tokens*s.k)
			t.Logf("%s layer %d: half of the experts hit %.2f; most used %d, least %d of %d tokens", arch, l, rate, slices.Max(uses), slices.Min(uses), tokens)
			if rate < 0.58 || rate > 0.85 {
				t.Errorf("%s layer %d: half of the experts hit %.2f", arch, l, rate)
			}
			favourites = append(favourites, int32(slices.Index(uses, slices.Max(uses))))
		}
		if favourites[0] == favourites[1] {
			t.Errorf("%s: both layers like expert %d best", arch, favourites[0])
		}
	}
}

func TestRefuses(t *testing.T) {
	vocab := vocabulary(t, 8)
	dir := t.TempDir()
	path := filepath.Join(dir, "m.gguf")
	for want, opt := range map[string]Options{
		"use glm4moe, qwen3moe or qwen3": {Arch: "llama", Layers: 2},
		"qwen3 is dense: leave out":      {Arch: "qwen3", Layers: 2, Experts: 4},
		"the number of experts and the":  {Arch: "qwen3", Layers: 2, TopK: 1},
		"give a size":                    {},
		"give one of them":               {Size: 1 << 30, Layers: 2},
		"hidden is 100":                  {Layers: 2, Hidden: 100},
		"ff is -32":                      {Layers: 2, FF: -32},
		"experts is 5000":                {Layers: 2, Experts: 5000},
		"layers is 1:":                   {Layers: 1},
		"nextn is 2":                     {Layers: 2, Nextn: 2},
		"leave nextn at 0":               {Layers: 2, Nextn: 1, Arch: "qwen3moe"},
		"top-k is 9: use 1 to 8":         {Layers: 2, Experts: 8, TopK: 9},
		"bytes are too few":              {Size: 1000},
		"bytes are too many: a lay":      {Size: 1 << 50},
	} {
		if err := Write(context.Background(), path, opt, vocab); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: got %v, want %q", opt, err, want)
		}
	}
	none := open(t, write(t, Options{Layers: 2, Hidden: 64, Experts: 2, FF: 32}, vocab))
	none.Meta, _ = storage.NewMeta("none", nil)
	if err := Write(context.Background(), path, Options{Layers: 2}, none); err == nil || !strings.Contains(err.Error(), "no vocabulary") {
		t.Errorf("without a vocabulary: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := Write(ctx, path, Options{Layers: 2, Hidden: 64, Experts: 2, FF: 32}, vocab); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if es, _ := os.ReadDir(dir); len(es) != 0 {
		t.Errorf("left behind: %v", es)
	}
}
