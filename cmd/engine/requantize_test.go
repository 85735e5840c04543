package engine

import (
	"context"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sluice/internal/quant"
	"sluice/moe"
	"sluice/storage"
)

// requantized packs a model so beside nothing, and says what was said of it.
func requantized(t *testing.T, path string, q moe.Requantization) (slab string, notes []string) {
	t.Helper()
	file, err := storage.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	spec := must(moe.Describe(file))
	types, notes, err := spec.Requantize(q)
	if err != nil {
		t.Fatal(err)
	}
	slab = filepath.Join(t.TempDir(), "r.slab")
	if _, err := storage.Pack(context.Background(), file, slices.Concat(spec.Roles, spec.NextnRoles), slab, storage.PackOptions{Requantize: types}); err != nil {
		t.Fatal(err)
	}
	return slab, notes
}

// encoded is the tensor of a GGUF file as that type, or as Q8_0 if that does not fit;
// nil if neither does.
func encoded(t *testing.T, m *storage.Model, name string, typ quant.Type) (r recoded) {
	t.Helper()
	w, dims := weightsOf(t, m, name)
	if !typ.Fits(int(dims[0])) {
		typ = quant.Q8_0
	}
	if !typ.Fits(int(dims[0])) {
		return r
	}
	r = recoded{typ, make([]byte, typ.RowBytes(len(w)))}
	if err := quant.Encode(typ, r.data, w); err != nil {
		t.Fatal(err)
	}
	return r
}

// ends says whether a name ends in one of these, and ".weight".
func ends(name string, in ...string) bool {
	return slices.ContainsFunc(in, func(s string) bool { return strings.HasSuffix(name, s+".weight") })
}

var (
	expertNames = []string{"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"}
	denseNames  = []string{"token_embd", "output", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"}
)

// A requantized slab of a Hugging Face directory gives the bits of the same model in
// GGUF whose weights the test has encoded.
func TestRequantizedLogits(t *testing.T) {
	for _, name := range []string{"qwen3_moe", "glm4_moe"} {
		dir := shared(t, filepath.Join("oracles/hf", name))
		gguf := filepath.Join("testdata", name+".gguf")
		plain := logitsOf(t, dir)
		for _, typ := range []quant.Type{quant.Q8_0, quant.Q4_0, quant.MXFP4} {
			for _, dense := range []quant.Type{quant.F32, quant.Q8_0} {
				slab, notes := requantized(t, dir, moe.Requantization{Experts: typ, Dense: dense})
				if words := strings.Join(notes, "; "); !strings.Contains(words, "48 columns") || !strings.Contains(words, "stay as they are") {
					t.Errorf("%s: what cannot be requantized is not told: %q", name, words)
				}
				m, err := storage.Open(gguf)
				if err != nil {
					t.Fatal(err)
				}
				as := map[string]recoded{}
				for _, x := range m.Tensors {
					var r recoded
					if ends(x.Name, expertNames...) {
						r = encoded(t, m, x.Name, typ)
					} else if dense != quant.F32 && ends(x.Name, denseNames...) {
						r = encoded(t, m, x.Name, dense)
					}
					if r.data != nil {
						as[x.Name] = r
					}
				}
				m.Close()
				got := logitsOf(t, slab)
				same(t, slab, got, logitsOf(t, recode(t, gguf, as)))
				if c := cosine(got, plain); c < 0.9 || slices.Equal(got, plain) {
					t.Errorf("%s with experts of %v: the cosine with the logits before is %.4f", name, typ, c)
				} else {
					t.Logf("%s with experts of %v, dense %v: the cosine with the logits before is %.4f", name, typ, dense, c)
				}
			}
		}
	}
}

// The demo, whose Q8_0 weights are taken for floats, loses little by 4 bits: as much
// as with the weights that the test has encoded, to the bit. Drafting layers and dense
// weights stay as they are unless that is asked for.
func TestRequantizedPerplexity(t *testing.T) {
	path := shared(t, "models/demo-q8_0.gguf")
	m, err := storage.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	spec := must(moe.Describe(m))
	floats, quants := map[string]recoded{}, map[string]recoded{}
	for _, x := range m.Tensors {
		if x.Type != quant.Q8_0 {
			continue
		}
		w, _ := weightsOf(t, m, x.Name)
		b := make([]byte, 2*len(w))
		if err := quant.Encode(quant.BF16, b, w); err != nil {
			t.Fatal(err)
		}
		floats[x.Name] = recoded{quant.BF16, b}
	}
	bf16 := recode(t, path, floats)
	f, err := storage.Open(bf16)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for name := range floats {
		quants[name] = floats[name]
		if draft := strings.HasPrefix(name, "blk.7."); ends(name, expertNames...) && !draft {
			quants[name] = encoded(t, f, name, quant.Q4_K)
		}
	}
	slab, notes := requantized(t, bf16, moe.Requantization{Experts: quant.Q4_K})
	if words := strings.Join(notes, "; "); !strings.Contains(words, "128 columns") || !strings.Contains(words, "Q8_0 instead") {
		t.Errorf("%q", words)
	}
	s, err := storage.Open(slab)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for _, x := range s.Tensors {
		if want, ok := quants[x.Name]; ok && x.Type != want.typ {
			t.Errorf("%s is of %v, want %v", x.Name, x.Type, want.typ)
		}
	}
	measure := func(path string) float64 {
		e := open(t, Options{Path: path, Ctx: 64})
		p, err := moe.MeasurePerplexity(context.Background(), e.Model, heldout(t, e, 640), 64, -1, nil)
		if err != nil {
			t.Fatal(err)
		}
		return p.Value
	}
	before, after, want := measure(bf16), measure(slab), measure(recode(t, path, quants))
	t.Logf("perplexity %.3f, of 4 bits %.3f", before, after)
	if after != want {
		t.Errorf("perplexity %v, of the weights encoded by the test %v", after, want)
	}
	if math.Abs(after/before-1) > 0.05 {
		t.Errorf("perplexity %.3f before, %.3f after", before, after)
	}

	if _, _, err := spec.Requantize(moe.Requantization{Experts: quant.Q4_K, Draft: quant.Q4_K}); err == nil || !strings.Contains(err.Error(), "nothing to requantize") || !strings.Contains(err.Error(), "quantized already") {
		t.Errorf("what is quantized already: %v", err)
	}
	_, notes = requantized(t, bf16, moe.Requantization{Draft: quant.Q4_K})
	if words := strings.Join(notes, "; "); !strings.Contains(words, "warning: the drafting (MTP) layers become Q4_K") {
		t.Errorf("4 bits for drafting: %q", words)
	}
	if _, notes = requantized(t, bf16, moe.Requantization{Experts: quant.Q4_0, Draft: quant.Q8_0}); len(notes) > 0 {
		t.Errorf("8 bits for drafting: %q", notes)
	}
}
