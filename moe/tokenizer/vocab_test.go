package tokenizer

import (
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"sluice/storage"
)

// shared is a file of the reference outputs, which are not part of the repository.
func shared(t testing.TB, elem ...string) string {
	dir := os.Getenv("SLUICE_SHARED")
	if dir == "" {
		dir = filepath.Join("..", "..", "..", "shared")
	}
	if _, err := os.Stat(filepath.Join(dir, "vocab")); err != nil {
		t.Skip("needs the shared oracles: set SLUICE_SHARED")
	}
	return filepath.Join(append([]string{dir}, elem...)...)
}

// readVocab reads the vocabulary of a GGUF file.
func readVocab(t testing.TB, path string) Vocab {
	m, err := storage.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	v, err := ReadVocab(m.Meta)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func mustNew(t testing.TB, v Vocab) *Tokenizer {
	tok, err := New(v)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// packed unpacks a vocabulary of testdata and reads it, once.
var packed = map[string]func(t testing.TB) Vocab{
	"gpt-2":     once("gpt-2"),
	"llama-spm": once("llama-spm"),
}

func once(name string) func(t testing.TB) Vocab {
	var do sync.Once
	var v Vocab
	return func(t testing.TB) Vocab {
		do.Do(func() {
			f, err := os.Open(filepath.Join("testdata", name+".gguf.gz"))
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			z, err := gzip.NewReader(f)
			if err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(t.TempDir(), name+".gguf")
			out, err := os.Create(path)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(out, z); err != nil {
				t.Fatal(err)
			}
			if err := out.Close(); err != nil {
				t.Fatal(err)
			}
			v = readVocab(t, path)
		})
		return v
	}
}

// TestReferenceCases wants the ids of llama.cpp for its own test cases.
func TestReferenceCases(t *testing.T) {
	for _, name := range []string{"gpt-2", "llama-spm", "llama-bpe", "qwen2"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var tok *Tokenizer
			inp, out := filepath.Join("testdata", "cases.inp"), filepath.Join("testdata", name+".out")
			if get, ok := packed[name]; ok {
				tok = mustNew(t, get(t))
			} else {
				path := shared(t, "vocab", "ggml-vocab-"+name+".gguf")
				tok = mustNew(t, readVocab(t, path))
				inp, out = path+".inp", path+".out"
			}
			f, err := os.Open(inp)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			cases, err := ReadCases(f)
			if err != nil {
				t.Fatal(err)
			}
			b, err := os.ReadFile(out)
			if err != nil {
				t.Fatal(err)
			}
			lines := strings.Split(strings.TrimSuffix(string(b), "\n"), "\n")
			if len(cases) != 46 || len(lines) != len(cases) {
				t.Fatalf("%d cases and %d lines of ids, want 46 of each", len(cases), len(lines))
			}
			for i, text := range cases {
				var want []int32
				for _, s := range strings.Fields(lines[i]) {
					id, err := strconv.ParseInt(s, 10, 32)
					if err != nil {
						t.Fatal(err)
					}
					want = append(want, int32(id))
				}
				if got := must(tok.Encode(text, false)); !slices.Equal(got, want) {
					t.Errorf("case %d, %q:\n got %v\nwant %v", i, text, got, want)
				}
				if got := tok.Decode(must(tok.Encode(text, false)), true); got != text {
					t.Errorf("case %d, %q: decodes to %q", i, text, got)
				}
			}
		})
	}
}

// TestModelOracles wants the ids that Hugging Face's tokenizers gave to the
// texts of the model oracles.
func TestModelOracles(t *testing.T) {
	type oracle struct {
		Text     string  `json:"text"`
		InputIDs []int32 `json:"input_ids"`
	}
	read := func(t *testing.T, path string, into any) {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(b, into); err != nil {
			t.Fatal(err)
		}
	}
	check := func(t *testing.T, tok *Tokenizer, o oracle, whole bool) {
		got := must(tok.EncodePrompt(o.Text))
		if !whole && len(got) > len(o.InputIDs) {
			got = got[:len(o.InputIDs)] // the oracle took the first ids only
		}
		if !slices.Equal(got, o.InputIDs) {
			t.Errorf("%q:\n got %v\nwant %v", o.Text, got, o.InputIDs)
		}
	}
	t.Run("demo", func(t *testing.T) {
		tok := mustNew(t, readVocab(t, shared(t, "models", "demo-q4_k_m.gguf")))
		var all map[string]oracle
		read(t, shared(t, "oracles", "demo", "demo-oracle.json"), &all)
		if len(all) == 0 {
			t.Fatal("no prompts")
		}
		for name, o := range all {
			t.Run(name, func(t *testing.T) { check(t, tok, o, true) })
		}
	})
	files, err := filepath.Glob(shared(t, "oracles", "hf", "*", "oracle.json"))
	if err != nil || len(files) == 0 {
		t.Fatal("no oracles: ", err)
	}
	for _, path := range files {
		dir := filepath.Dir(path)
		name := filepath.Base(dir)
		t.Run(name+" tokenizer.json", func(t *testing.T) {
			var h HF
			for file, to := range map[string]*[]byte{"tokenizer.json": &h.Tokenizer, "tokenizer_config.json": &h.TokenizerConfig,
				"config.json": &h.Config, "generation_config.json": &h.GenerationConfig} {
				*to = must(os.ReadFile(filepath.Join(dir, file)))
			}
			var o oracle
			read(t, path, &o)
			check(t, must(NewHF(h)), o, false)
		})
		gguf := shared(t, "oracles", "gguf", name+".gguf")
		if _, err := os.Stat(gguf); err != nil {
			continue // a family without a GGUF
		}
		t.Run(name, func(t *testing.T) {
			var o oracle
			read(t, path, &o)
			check(t, mustNew(t, readVocab(t, gguf)), o, false)
		})
	}
}

// tiny is a gpt2 vocabulary of the 256 bytes, some merges and the tokens given.
func tiny(pre string, merges []string, more ...string) Vocab {
	v := Vocab{Model: "gpt2", Pre: pre, BOS: -1, EOS: -1, EOT: -1, EOM: -1, UNK: -1, PAD: -1}
	for _, r := range byteRunes {
		v.Tokens = append(v.Tokens, string(r))
	}
	for _, m := range merges {
		v.Tokens = append(v.Tokens, strings.Replace(m, " ", "", 1))
	}
	v.Merges = merges
	for range v.Tokens {
		v.Types = append(v.Types, Normal)
	}
	for _, s := range more {
		v.Tokens = append(v.Tokens, s)
		v.Types = append(v.Types, Control)
	}
	return v
}

// spm is a llama vocabulary: <unk>, <s>, </s>, the 256 bytes, and the pieces
// given, the first with the best score.
func spm(pieces ...string) Vocab {
	v := Vocab{Model: "llama", BOS: 1, EOS: 2, EOT: -1, EOM: -1, UNK: 0, PAD: -1}
	v.Tokens = []string{"<unk>", "<s>", "</s>"}
	v.Types = []int32{Unknown, Control, Control}
	v.Scores = make([]float32, 3)
	for b := range 256 {
		v.Tokens = append(v.Tokens, fmt.Sprintf("<0x%02X>", b))
		v.Types = append(v.Types, Byte)
		v.Scores = append(v.Scores, 0)
	}
	for i, p := range pieces {
		v.Tokens = append(v.Tokens, p)
		v.Types = append(v.Types, Normal)
		v.Scores = append(v.Scores, -float32(i))
	}
	return v
}

func TestNewRefuses(t *testing.T) {
	base := func() Vocab { return tiny("gpt-2", []string{"a b", "ab c"}, "<x>") }
	for _, c := range []struct {
		want string // in the error
		edit func(v *Vocab)
	}{
		{"tokens is empty", func(v *Vocab) { v.Tokens = nil }},
		{"model is absent", func(v *Vocab) { v.Model = "" }},
		{`model "bert" is not supported: supported are gpt2 and llama`, func(v *Vocab) { v.Model = "bert" }},
		{"pre is absent", func(v *Vocab) { v.Pre = "" }},
		{`pre "gpt-5" is not supported: supported are bailingmoe,`, func(v *Vocab) { v.Pre = "gpt-5" }},
		{"token_type has 1 entries for 259 tokens", func(v *Vocab) { v.Types = v.Types[:1] }},
		{"token_type[3] is 7", func(v *Vocab) { v.Types[3] = 7 }},
		{"scores has 2 entries", func(v *Vocab) { v.Scores = make([]float32, 2) }},
		{"merges is empty", func(v *Vocab) { v.Merges = nil }},
		{`merges[1] is "abc"`, func(v *Vocab) { v.Merges[1] = "abc" }},
		{`merges[1] is "a b c"`, func(v *Vocab) { v.Merges[1] = "a b c" }},
		{`merges[0] is "a q", but "aq" is not a token`, func(v *Vocab) { v.Merges[0] = "a q" }},
		{`no token "A" for byte 0x41`, func(v *Vocab) { v.Tokens['A'] = "AA" }},
		{`ids 65 and 66 are both "A"`, func(v *Vocab) { v.Tokens['B'] = "A" }},
		{"bos_token_id is 259", func(v *Vocab) { v.BOS = 259 }},
		{"eos_token_id is -2", func(v *Vocab) { v.EOS = -2 }},
		{"eos_token_ids[1] is 999", func(v *Vocab) { v.EOSIDs = []int32{1, 999} }},
		{"add_bos_token is true", func(v *Vocab) { yes := true; v.AddBOS = &yes }},
		{"scores is absent", func(v *Vocab) { *v = spm("a"); v.Scores = nil }},
		{"token_type is absent", func(v *Vocab) { *v = spm("a"); v.Types = nil }},
		{"scores[4] is not a number", func(v *Vocab) { *v = spm("a"); v.Scores[4] = float32(nan()) }},
		{"no <0x07>", func(v *Vocab) { *v = spm("a"); v.UNK = -1; v.Tokens[10] = "seven"; v.Types[10] = Normal }},
		{"its type says byte", func(v *Vocab) { *v = spm("a"); v.Tokens[10] = "<0xQQ>" }},
	} {
		v := base()
		c.edit(&v)
		if _, err := New(v); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("error %v, want one with %q", err, c.want)
		}
	}
	mustNew(t, base())
}

func nan() float64 { z := 0.0; return z / z }

func TestReadCases(t *testing.T) {
	got, err := ReadCases(strings.NewReader("one\ntwo\n" + caseEnd + caseEnd + " " + caseEnd))
	if want := []string{"one\ntwo\n", "", " "}; err != nil || !slices.Equal(got, want) {
		t.Errorf("got %q, %v; want %q", got, err, want)
	}
	if got, err := ReadCases(strings.NewReader("")); err != nil || len(got) != 0 {
		t.Errorf("an empty file: got %q, %v", got, err)
	}
	if _, err := ReadCases(strings.NewReader("one" + caseEnd + "two")); err == nil || !strings.Contains(err.Error(), "at byte 24") {
		t.Errorf("a case without an end: error %v, want its byte", err)
	}
}

// must is a result that cannot fail here.
func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
