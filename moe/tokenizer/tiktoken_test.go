package tokenizer

import (
	"encoding/base64"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const kimiConfig = `{"tokenizer_class": "TikTokenTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", null]}}`

// rankFile writes tokens as a tiktoken.model: the first has rank 0.
func rankFile(tokens []string) []byte {
	var out strings.Builder
	for i, s := range tokens {
		fmt.Fprintf(&out, "%s %d\n", base64.StdEncoding.EncodeToString([]byte(s)), i)
	}
	return []byte(out.String())
}

// allBytes are the 256 tokens that each such file has, and more.
func allBytes(more ...string) []string {
	var tokens []string
	for b := range 256 {
		tokens = append(tokens, string([]byte{byte(b)}))
	}
	return append(tokens, more...)
}

// TestTiktoken: a vocabulary gives the same ids as a GGUF file with merges and as a
// list of ranks. That of GPT-2 can be written both ways, since its tokens are
// numbered in the order of its merges.
func TestTiktoken(t *testing.T) {
	v := packed["gpt-2"](t)
	v.Pre = "kimi-k2"
	want := mustNew(t, v)
	end := len(v.Tokens) - 1
	if v.Tokens[end] != "<|endoftext|>" {
		t.Fatalf("the last token is %q", v.Tokens[end])
	}
	tokens := make([]string, end)
	for i := range tokens {
		tokens[i] = unescapeBytes(v.Tokens[i])
	}
	config := strings.TrimSuffix(kimiConfig, "}") + fmt.Sprintf(`, "added_tokens_decoder": {"%d": {"content": "<|endoftext|>", "special": true}, "%d": {"content": "<call>", "special": false}, "%d": {"content": "outside"}}, "bos_token": "<|endoftext|>"}`, end, end+2, end+400)
	got, err := NewHF(HF{Tiktoken: rankFile(tokens), TokenizerConfig: []byte(config), GenerationConfig: fmt.Appendf(nil, `{"eos_token_id": %d}`, end)})
	if err != nil {
		t.Fatal(err)
	}
	if got.Size() != end+256 || got.EOS() != int32(end) || !slices.Equal(got.Stops(), []int32{int32(end)}) {
		t.Errorf("size %d, end %d, stops %v", got.Size(), got.EOS(), got.Stops())
	}
	if bos, add := got.BOS(); bos != int32(end) || add {
		t.Errorf("BOS is %d, before each text: %v", bos, add)
	}
	b, err := os.ReadFile(filepath.Join("testdata", "cases.inp"))
	if err != nil {
		t.Fatal(err)
	}
	texts := strings.Split(string(b), "\n__ggml_vocab_test__\n")
	texts = append(texts, "", "<|endoftext|>a<|endoftext|>", "中文English混合 HTTPServer helloWorld's", "\xff\xfe x", strings.Repeat("ab", 5000), strings.Repeat(" ", 3000)+"x")
	r := rand.New(rand.NewPCG(3, 4))
	for range 300 {
		texts = append(texts, randomText(r, 1+r.IntN(60)))
	}
	for _, text := range texts {
		for _, special := range []bool{false, true} {
			a, b := must(want.Encode(text, special)), must(got.Encode(text, special))
			if !slices.Equal(a, b) {
				t.Fatalf("%.200q becomes %v by merges and %v by ranks", text, a, b)
			}
			if x, y := want.Decode(a, special), got.Decode(b, special); x != y {
				t.Fatalf("%.200q comes back as %q and %q", text, x, y)
			}
		}
	}
	reserved := fmt.Sprintf("<|reserved_token_%d|>", end+1)
	if ids := must(got.Encode(reserved+"<call>", true)); !slices.Equal(ids, []int32{int32(end + 1), int32(end + 2)}) {
		t.Errorf("special tokens are %v", ids)
	}
	if s := got.Decode([]int32{int32(end), int32(end + 1), int32(end + 2)}, false); s != "<call>" {
		t.Errorf("special tokens print as %q", s)
	}
}

// TestRankOrder: the lowest rank of all is merged first, the left of equals, and a
// part that is a token is that token.
func TestRankOrder(t *testing.T) {
	tok := must(NewHF(HF{Tiktoken: rankFile(allBytes("bc", "ab", "cd", "aa", "whole")), TokenizerConfig: []byte(`{"tokenizer_class": "TikTokenTokenizer"}`)}))
	for text, want := range map[string]string{"abcd": "a bc d", "abd": "ab d", "aaa": "aa a", "whole": "whole"} {
		if got := strings.Join(texts(tok, must(tok.Encode(text, true))), " "); got != want {
			t.Errorf("%q becomes %q, want %q", text, got, want)
		}
	}
}

// TestTiktokenRefuses: what is no list of ranks, or cannot write every text, is an
// error that says where.
func TestTiktokenRefuses(t *testing.T) {
	good := string(rankFile(allBytes("ab")))
	for _, c := range []struct{ file, config, want string }{
		{"", kimiConfig, "it lists no tokens"},
		{"\n\r\n", kimiConfig, "it lists no tokens"},
		{"x", kimiConfig, "line 1 is"},
		{"YQ== 0\nYQ==\n", kimiConfig, "line 2 is"},
		{"YQ== -1\n", kimiConfig, "line 1 is"},
		{"YQ== 0 1\n", kimiConfig, "line 1 is"},
		{" 0\n", kimiConfig, "line 1 is"},
		{"YQ 0\n", kimiConfig, "line 1 is"},
		{"YQ== 99999999999999999999\n", kimiConfig, "line 1 is"},
		{"YQ== 16777216\n", kimiConfig, "rank 16777216"},
		{"YQ== 0\nYQ== 1\n", kimiConfig, `"a", which has the rank 0 already`},
		{"YQ== 0\n", kimiConfig, "no token for the byte 0x00"},
		{good + "YWE= 3\n", kimiConfig, "id 3 is both"},
		{good + "YWE= 300000\n", kimiConfig, "ids go up to 300000"},
		{good + "YWE= 300\n", kimiConfig, "id 300 is both"}, // where a reserved token is
		{base64.StdEncoding.EncodeToString(make([]byte, maxHFToken+1)) + " 0\n", kimiConfig, "a token of 65537 bytes"},
		{good, `{}`, "tokenization_kimi"},
		{good, `{"tokenizer_class": "TikTokenTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_other.TikTokenTokenizer", null]}}`, "tokenization_kimi"},
		{good, `{"tokenizer_class": 3, "auto_map": null}`, "tokenization_kimi"},
		{good, `{"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": {"257": {"content": "ab"}}}`, `"ab" has the ids 256 and 257`},
		{good, `{"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": {"257": {"content": ""}}}`, "no text"},
	} {
		_, err := NewHF(HF{Tiktoken: []byte(c.file), TokenizerConfig: []byte(c.config)})
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.HasPrefix(err.Error(), "tokenizer: tiktoken.model: ") || len(err.Error()) > 400 {
			t.Errorf("%.60q: error %v, want one with %q", c.file, err, c.want)
		}
	}
}

// FuzzTiktoken: any file is read or refused, and then gives texts back, without a
// panic.
func FuzzTiktoken(f *testing.F) {
	f.Add([]byte("YWI= 256\n"), `{"257": {"content": "<x>", "special": true}}`, "ab<x>\xff 中")
	f.Add([]byte("YWI= 256\r\nYWJj 257\n"), `{}`, "abc")
	bytes := rankFile(allBytes())
	f.Fuzz(func(t *testing.T, file []byte, added, text string) {
		config := `{"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": ` + added + `}`
		for _, all := range [][]byte{file, append(slices.Clone(bytes), file...)} {
			tok, err := NewHF(HF{Tiktoken: all, TokenizerConfig: []byte(config)})
			if err != nil {
				if !strings.HasPrefix(err.Error(), "tokenizer: ") {
					t.Errorf("error %q does not say where it comes from", err)
				}
				continue
			}
			for _, special := range []bool{false, true} {
				ids, err := tok.Encode(text, special)
				if err != nil {
					t.Fatal(err)
				}
				if back, want := tok.Decode(ids, true), string([]rune(text)); back != want {
					t.Errorf("%q comes back as %q", text, back)
				}
			}
		}
	})
}
