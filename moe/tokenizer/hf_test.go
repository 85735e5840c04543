package tokenizer

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/internal/npmtest"
)

var update = flag.Bool("update", false, "rewrite testdata/hf/*.ids with the ids of @huggingface/tokenizers")

// TestTinyHF: tokenizer.json files of our own, one for each way that a text becomes
// ids, give what @huggingface/tokenizers gave. TestPublished has the real ones.
func TestTinyHF(t *testing.T) {
	texts := mixedLines(200)
	files, err := filepath.Glob(filepath.Join("testdata", "hf", "*.json"))
	if err != nil || len(files) == 0 {
		t.Fatal("no files: ", err)
	}
	for _, file := range files {
		golden := strings.TrimSuffix(file, ".json") + ".ids"
		t.Run(filepath.Base(file), func(t *testing.T) {
			if *update {
				library := filepath.Join(npmtest.Fetch(t, reference, "dist/tokenizers.mjs", "package.json"), "dist", "tokenizers.mjs")
				dir := t.TempDir()
				config, input := filepath.Join(dir, "config.json"), filepath.Join(dir, "texts.json")
				for path, b := range map[string][]byte{config: []byte("{}"), input: must(json.Marshal(texts))} {
					if err := os.WriteFile(path, b, 0o666); err != nil {
						t.Fatal(err)
					}
				}
				if err := os.WriteFile(golden, npmtest.Node(t, filepath.Join("testdata", "encode.mjs"), library, file, config, input), 0o666); err != nil {
					t.Fatal(err)
				}
			}
			tok := must(NewHF(HF{Tokenizer: must(os.ReadFile(file))}))
			lines := strings.Split(string(must(os.ReadFile(golden))), "\n")
			if len(lines) != 2*len(texts)+1 {
				t.Fatalf("%d lines of ids for %d texts", len(lines), len(texts))
			}
			for i, text := range texts {
				if got := spell(must(tok.Encode(text, true))); got != lines[2*i] {
					t.Errorf("%q:\n got %s\nwant %s", text, got, lines[2*i])
				}
				if got := spell(must(tok.EncodePrompt(text))); got != lines[2*i+1] && !strings.HasPrefix(text, "<s>") {
					t.Errorf("%q as a prompt:\n got %s\nwant %s", text, got, lines[2*i+1])
				}
				ids := must(tok.Encode(text, false))
				for _, id := range ids {
					if tok.types[id] == Control && id != tok.unk {
						t.Errorf("%q without special tokens has the token %q", text, tok.Text(id))
					}
				}
				var streamed strings.Builder
				d := tok.NewDecoder(true)
				for _, id := range ids {
					streamed.WriteString(d.Add(id))
				}
				streamed.WriteString(d.Flush())
				if got := tok.Decode(ids, true); got != streamed.String() && " "+got != streamed.String() {
					t.Errorf("%q: decoded %q, token by token %q", text, got, streamed.String())
				}
			}
		})
	}
}

// tinyHF is a tokenizer.json with the given parts in place of the plain ones:
// letters, a space, and a few merges.
func tinyHF(parts map[string]string) []byte {
	all := map[string]string{
		"added_tokens": `[]`, "normalizer": "null", "pre_tokenizer": "null", "post_processor": "null", "decoder": `{"type": "Fuse"}`,
		"model": `{"type": "BPE", "unk_token": "?", "vocab": {"?": 0, "a": 1, "b": 2, "c": 3, " ": 4, "ab": 5, "abc": 6, "X": 7, "1": 8, ".": 9, "é": 10, "e": 11, "▁": 12, "A": 13}, "merges": ["a b", "ab c"]}`,
	}
	for k, v := range parts {
		all[k] = v
	}
	var b strings.Builder
	for _, k := range []string{"added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model"} {
		b.WriteString(map[bool]string{true: "{", false: ", "}[b.Len() == 0] + `"` + k + `": ` + all[k])
	}
	return []byte(b.String() + "}")
}

// TestHFSteps: each step of a tokenizer.json by itself; expectations are the
// definitions of Hugging Face's tokenizers.
func TestHFSteps(t *testing.T) {
	added := func(fields string) string { return `[{"id": 20, "content": "XX", ` + fields + `}]` }
	for _, c := range []struct{ key, value, text, want string }{
		{"", "", "abcab", "abc ab"},
		{"", "", "abzzc", "ab ? ? c"},
		{"normalizer", `{"type": "Lowercase"}`, "ABC", "abc"},
		{"normalizer", `{"type": "NFC"}`, "e\u0301", "é"},
		{"normalizer", `{"type": "NFKC"}`, "ａｂ", "ab"},
		{"normalizer", `{"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}]}`, "é", "e"},
		{"normalizer", `{"type": "Strip", "strip_left": true, "strip_right": false}`, " a ", "a  "},
		{"normalizer", `{"type": "Prepend", "prepend": "▁"}`, "a", "▁ a"},
		{"normalizer", `{"type": "Replace", "pattern": {"Regex": "b+"}, "content": "X"}`, "abbab", "a X a X"},
		{"pre_tokenizer", `{"type": "Split", "pattern": {"String": "b"}, "behavior": "Removed", "invert": false}`, "abcb", "a c"},
		{"pre_tokenizer", `{"type": "Split", "pattern": {"String": "b"}, "behavior": "Removed", "invert": true}`, "abcb", "b b"},
		{"pre_tokenizer", `{"type": "Split", "pattern": {"String": "c"}, "behavior": "Isolated"}`, "abc", "ab c"},
		{"pre_tokenizer", `{"type": "Split", "pattern": {"String": "b"}, "behavior": "MergedWithPrevious"}`, "abbc", "ab b c"},
		{"pre_tokenizer", `{"type": "Split", "pattern": {"String": "a"}, "behavior": "MergedWithNext"}`, "aab", "a ab"},
		{"pre_tokenizer", `{"type": "Split", "pattern": {"Regex": "a|b"}, "behavior": "Contiguous"}`, "abc", "ab c"},
		{"pre_tokenizer", `{"type": "Digits", "individual_digits": false}`, "a11ab", "a 1 1 ab"},
		{"pre_tokenizer", `{"type": "Punctuation"}`, "a.ab", "a . ab"},
		{"pre_tokenizer", `{"type": "WhitespaceSplit"}`, " a  bab ", "a b ab"},
		{"pre_tokenizer", `{"type": "Whitespace"}`, "ab. a", "ab . a"},
		{"pre_tokenizer", `{"type": "CharDelimiterSplit", "delimiter": "."}`, "ab.a", "ab a"},
		{"pre_tokenizer", `{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"}`, "a b", "▁ a ▁ b"},
		{"pre_tokenizer", `{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"}`, "a b", "a ▁ b"},
		{"pre_tokenizer", `{"type": "Metaspace", "replacement": "▁", "add_prefix_space": false}`, "a", "a"},
		{"added_tokens", added(`"normalized": false`), "abXXXX", "ab XX XX"},
		{"added_tokens", added(`"lstrip": true`), "ab  XX a", "ab XX   a"},
		{"added_tokens", added(`"rstrip": true, "normalized": false`), "ab XX  a", "ab   XX a"},
		{"added_tokens", added(`"single_word": true`), "aXX XX", "a X X   XX"},
	} {
		parts := map[string]string{}
		if c.key != "" {
			parts[c.key] = c.value
		}
		tok, err := NewHF(HF{Tokenizer: tinyHF(parts)})
		if err != nil {
			t.Errorf("%s: %v", c.value, err)
			continue
		}
		if got := strings.Join(texts(tok, must(tok.Encode(c.text, true))), " "); got != c.want {
			t.Errorf("%s: %q becomes %q, want %q", c.value, c.text, got, c.want)
		}
	}
}

// TestHFRefuses: what is not known is an error that names it, and so is what
// does not fit together.
func TestHFRefuses(t *testing.T) {
	model := func(fields string) string { return `{"type": "BPE", "vocab": {"a": 0, "b": 1}, ` + fields + `}` }
	for _, c := range []struct{ key, value, want string }{
		{"model", `{"type": "WordPiece", "vocab": {"a": 0}}`, `type "WordPiece" is not supported: supported are BPE and Unigram`},
		{"model", `{"vocab": {"a": 0}, "max_input_chars_per_word": 100}`, `"WordPiece"`},
		{"model", `{}`, "type is absent"},
		{"model", `{"type": "BPE", "vocab": {}}`, "vocab is empty"},
		{"model", `{"type": "BPE", "vocab": {"a": -1}}`, `"a" has the id -1`},
		{"model", `{"type": "BPE", "vocab": {"a": 9999999}}`, "ids go up to 9999999"},
		{"model", `{"type": "BPE", "vocab": {"a": 1, "b": 1}}`, "id 1 is both"},
		{"model", model(`"merges": ["a b"], "unk_token": "a"`), `"ab" is not in vocab`},
		{"model", model(`"merges": ["ab"]`), "merges[0]"},
		{"model", model(`"merges": [["a"]]`), "merges[0] has 1 texts"},
		{"model", model(`"merges": 3`), "merges"},
		{"model", model(`"unk_token": "zz"`), `unk_token "zz"`},
		{"model", model(`"unk_token": null`), "some text could not be written"},
		{"model", model(`"dropout": 0.1`), "dropout 0.1"},
		{"model", model(`"continuing_subword_prefix": "##"`), `continuing_subword_prefix "##"`},
		{"model", model(`"end_of_word_suffix": "</w>"`), `end_of_word_suffix "</w>"`},
		{"model", `{"type": "Unigram", "vocab": [["a", -1]], "unk_id": 3}`, "unk_id is 3"},
		{"model", `{"type": "Unigram", "vocab": [["a", -1]]}`, "some text could not be written"},
		{"model", `{"type": "Unigram", "vocab": [["a", -1], ["a", -2]], "unk_id": 0}`, "both"},
		{"model", `{"type": "Unigram", "vocab": [["a"]], "unk_id": 0}`, "an entry of 1 values"},
		{"normalizer", `{"type": "Precompiled", "precompiled_charsmap": "AA=="}`, `normalizer: "Precompiled" is not supported`},
		{"normalizer", `{"type": "Replace", "content": "x"}`, "pattern must be"},
		{"pre_tokenizer", `{"type": "BertPreTokenizer"}`, `"BertPreTokenizer" is not supported`},
		{"pre_tokenizer", `{"type": "Split", "pattern": {"Regex": "["}, "behavior": "Isolated"}`, "not closed"},
		{"pre_tokenizer", `{"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Odd"}`, `behavior "Odd"`},
		{"pre_tokenizer", `{"type": "Sequence", "pretokenizers": [{"type": "Nope"}]}`, `pretokenizers[0]: "Nope"`},
		{"pre_tokenizer", strings.Repeat(`{"type": "Sequence", "pretokenizers": [`, 40) + "null" + strings.Repeat("]}", 40), "nested deeper than 16"},
		{"post_processor", `{"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}], "special_tokens": {}}`, `"<s>" is not among special_tokens`},
		{"post_processor", `{"type": "TemplateProcessing", "single": []}`, "the text 0 times"},
		{"post_processor", `{"type": "Nope"}`, `"Nope" is not supported`},
		{"decoder", `null`, "decoder: is absent"},
		{"decoder", `{"type": "WordPiece"}`, `"WordPiece" is not supported`},
		{"decoder", `{"type": "CTC"}`, `"CTC" is not supported`},
		{"added_tokens", `[{"id": 0, "content": "zz"}]`, "id 0 is both"},
		{"added_tokens", `[{"id": 30, "content": "a"}]`, `"a" has the ids 1 and 30`},
		{"added_tokens", `[{"id": -2, "content": "zz"}]`, "id -2"},
		{"added_tokens", `[{"id": 30, "content": ""}]`, "no text"},
	} {
		_, err := NewHF(HF{Tokenizer: tinyHF(map[string]string{c.key: c.value})})
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.HasPrefix(err.Error(), "tokenizer: tokenizer.json: ") {
			t.Errorf("%s %.80s: error %v, want one with %q", c.key, c.value, err, c.want)
		}
	}
	for _, h := range []HF{
		{}, {Tokenizer: []byte("{")}, {Tokenizer: []byte("[]")},
		{Tokenizer: tinyHF(nil), TokenizerConfig: []byte("[")},
		{Tokenizer: tinyHF(nil), TokenizerConfig: []byte(`{"bos_token": "<none>"}`)},
		{Tokenizer: tinyHF(nil), TokenizerConfig: []byte(`{"add_bos_token": true}`)},
		{Tokenizer: tinyHF(nil), TokenizerConfig: []byte(`{"added_tokens_decoder": {"x": {"content": "y"}}}`)},
		{Tokenizer: tinyHF(nil), Config: []byte(`{"eos_token_id": 99}`)},
		{Tokenizer: tinyHF(nil), GenerationConfig: []byte(`{"eos_token_id": "x"}`)},
	} {
		if _, err := NewHF(h); err == nil || !strings.HasPrefix(err.Error(), "tokenizer: ") {
			t.Errorf("%.40q %.40q %.40q %.40q: error %v", h.Tokenizer, h.TokenizerConfig, h.Config, h.GenerationConfig, err)
		}
	}
}

// TestHFEnds: what begins and ends a text, by the files that may say so.
func TestHFEnds(t *testing.T) {
	file := tinyHF(map[string]string{"added_tokens": `[{"id": 20, "content": "<s>", "special": true}, {"id": 21, "content": "</s>", "special": true}, {"id": 22, "content": "<|im_end|>", "special": true}]`,
		"post_processor": `{"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}], "special_tokens": {"<s>": {"ids": [20]}}}`})
	for _, c := range []struct {
		name                       string
		tokenizer, config, general string
		prompt                     []int32
		stops                      []int32
	}{
		{"nothing but tokenizer.json", "", "", "", []int32{20, 1}, []int32{21, 22}},
		{"union", `{"eos_token": "</s>"}`, `{"eos_token_id": 22}`, `{"eos_token_id": [21, 22]}`, []int32{20, 1}, []int32{21, 22}},
		{"one of a model that sees", `{"eos_token": {"content": "</s>"}}`, `{"text_config": {"eos_token_id": 22}}`, `{"eos_token_id": null}`, []int32{20, 1}, []int32{22}},
		{"both ends", `{"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": true, "add_eos_token": true}`, "", "", []int32{20, 1, 21}, []int32{21, 22}},
		{"no BOS", `{"bos_token": "<s>", "add_bos_token": false}`, "", "", []int32{1}, []int32{21, 22}},
		{"a further token", `{"added_tokens_decoder": {"20": {"content": "<s>"}, "25": {"content": "a", "special": true}}}`, "", "", nil, nil},
		{"a token of its own", `{"added_tokens_decoder": {"25": {"content": "<call>", "special": true}}, "eos_token": "<call>"}`, `{"eos_token_id": 25}`, "", []int32{20, 1}, []int32{25}},
	} {
		h := HF{Tokenizer: file}
		for text, to := range map[*string]*[]byte{&c.tokenizer: &h.TokenizerConfig, &c.config: &h.Config, &c.general: &h.GenerationConfig} {
			if *text != "" {
				*to = []byte(*text)
			}
		}
		tok, err := NewHF(h)
		if c.prompt == nil {
			if err == nil || !strings.Contains(err.Error(), `"a" has the ids 1 and 25`) {
				t.Errorf("%s: error %v", c.name, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if got := must(tok.EncodePrompt("a")); !slices.Equal(got, c.prompt) {
			t.Errorf("%s: a prompt is %v, want %v", c.name, got, c.prompt)
		}
		if got := must(tok.EncodePrompt("<s>a")); got[0] == 20 && got[1] == 20 {
			t.Errorf("%s: BOS twice: %v", c.name, got)
		}
		if got := must(tok.EncodeChat("a")); !slices.Equal(got, []int32{1}) {
			t.Errorf("%s: what a template made is %v", c.name, got)
		}
		if !slices.Equal(tok.Stops(), c.stops) {
			t.Errorf("%s: stops %v, want %v", c.name, tok.Stops(), c.stops)
		}
	}
}

// TestOniguruma: expressions of the two syntaxes that mean the same.
func TestOniguruma(t *testing.T) {
	for _, c := range []struct{ expr, want string }{
		{`a?+b++c*+`, `(?>a?)(?>b+)(?>c*)`},
		{`[a-z]++(?:x|y)?+`, `(?>[a-z]+)(?>(?:x|y)?)`},
		{`\p{^L}\P{^N}+`, `\P{L}\p{N}+`},
		{`[\p{Lu}\p{Lo}&&[^\p{Han}]]+`, `[\p{Lu}\p{Lo}-[\p{Han}]]+`},
		{`a{,3}b{2}c{1,}d{x`, `a{0,3}b{2}c{1,}d\{x`},
		{`a{2}+`, `(?:a{2})+`},
		{`(?i:'s|'t)|(?<=a)b(?!c)(?<n>d)`, `(?i:'s|'t)|(?<=a)b(?!c)(?<n>d)`},
		{`é+?\d`, `é+?\d`},
	} {
		if got, err := fromOniguruma(c.expr); err != nil || got != c.want {
			t.Errorf("%s becomes %s, %v; want %s", c.expr, got, err, c.want)
		}
		if _, err := newRegexFinder(c.expr); err != nil {
			t.Errorf("%s: %v", c.expr, err)
		}
	}
	for _, expr := range []string{`[[:alpha:]]`, `[a[bc]]`, `[a&&b]`, `[^a&&[^b]]`, `[a&&[^b]c]`, `(?m:a)`, `(?#x)`, `(?(1)a)`, `\h`, `\p{`, `a)`, `(a`, `*a`, `\`, `[]`, `\p{Nonsense}`, strings.Repeat("a", maxExpr+1)} {
		if _, err := newRegexFinder(expr); err == nil {
			t.Errorf("%.30s is taken", expr)
		}
	}
}

// TestEndless: a file whose expressions or normalizers would never be done gives
// an error.
func TestEndless(t *testing.T) {
	grow := `{"type": "Sequence", "normalizers": [` + strings.Repeat(`{"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaa"}, `, 20) + `{"type": "NFC"}]}`
	tok := must(NewHF(HF{Tokenizer: tinyHF(map[string]string{"normalizer": grow})}))
	if _, err := tok.Encode("aaaa", true); err == nil || !strings.Contains(err.Error(), "the normalizer makes more than") {
		t.Errorf("a normalizer that multiplies: error %v", err)
	}
	find := must(newRegexFinderWithin(`(a+)+x`, 50*time.Millisecond))
	if err := find([]rune(strings.Repeat("a", 40)), func(int, int) error { return nil }); err == nil || !strings.Contains(err.Error(), "takes too long") {
		t.Errorf("an expression that backtracks: error %v", err)
	}
}

// FuzzHF: a tokenizer.json of any parts is read or refused, and then encodes and
// decodes, without a panic.
func FuzzHF(f *testing.F) {
	const (
		bpe  = `{"type": "BPE", "unk_token": "?", "byte_fallback": true, "ignore_merges": true, "vocab": {"?": 0, "a": 1, "b": 2, "ab": 3, "<0x41>": 4}, "merges": [["a", "b"]]}`
		uni  = `{"type": "Unigram", "unk_id": 0, "vocab": [["?", 0], ["a", -1], ["ab", -1.5], ["▁", -2]]}`
		plus = `[{"id": 20, "content": "b", "lstrip": true, "rstrip": true, "single_word": true}, {"id": 21, "content": "XX", "normalized": false, "special": true}]`
	)
	f.Add(bpe, `{"type": "Replace", "pattern": {"Regex": "a|b++"}, "content": "ab"}`, `{"type": "Split", "pattern": {"Regex": "[a-z&&[^c]]"}, "behavior": "MergedWithNext", "invert": true}`,
		`{"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "s"}}, {"Sequence": {"id": "A"}}], "special_tokens": {"s": {"ids": [1]}}}`,
		`{"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}`, plus, `{"bos_token": "?", "eos_token_id": [1, 2]}`, "abA\xffXX b")
	f.Add(uni, `{"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Strip", "strip_left": true}]}`, `{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true}`,
		`{"type": "BertProcessing", "cls": ["a", 1], "sep": ["?", 0]}`, `{"type": "Metaspace", "replacement": "▁"}`, `[]`, `{"add_bos_token": true, "added_tokens_decoder": {"9": {"content": "z"}}}`, " ab zab ")
	f.Add(bpe, `{"type": "ByteLevel"}`, `{"type": "Sequence", "pretokenizers": [{"type": "Digits"}, {"type": "Punctuation"}, {"type": "ByteLevel"}]}`,
		`null`, `{"type": "ByteLevel"}`, plus, `{"eos_token": {"content": "a"}}`, "ab 12.b")
	f.Fuzz(func(t *testing.T, model, normalizer, pre, post, decoder, added, config, text string) {
		file := tinyHF(map[string]string{"model": model, "normalizer": normalizer, "pre_tokenizer": pre, "post_processor": post, "decoder": decoder, "added_tokens": added})
		tok, err := NewHF(HF{Tokenizer: file, TokenizerConfig: []byte(config), Config: []byte(config)})
		if err != nil {
			if !strings.HasPrefix(err.Error(), "tokenizer: ") {
				t.Errorf("error %q does not say where it comes from", err)
			}
			return
		}
		ids, err := tok.EncodePrompt(text)
		if err != nil {
			return
		}
		for _, id := range ids {
			if id < 0 || int(id) >= tok.Size() {
				t.Fatalf("id %d of a vocabulary of %d", id, tok.Size())
			}
		}
		tok.Decode(ids, true)
	})
}
