package tokenizer

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

func pieces(t testing.TB, pre, text string) []string {
	r, err := rulesOf(pre)
	if err != nil {
		t.Fatal(err)
	}
	s, err := newSplitter(r.stages)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	s.each([]rune(text), func(p []rune) { got = append(got, string(p)) })
	return got
}

// TestPieces holds the cuts that follow from the expressions by hand.
func TestPieces(t *testing.T) {
	for _, c := range []struct {
		pre, text string
		want      []string
	}{
		{"gpt-2", "I'm 1234, you're\n\n  x ", []string{"I", "'m", " 1234", ",", " you", "'re", "\n\n ", " x", " "}},
		{"gpt-2", "I'M", []string{"I", "'", "M"}},
		{"olmo", "a  b", []string{"a", " ", " b"}},

		{"glm4", "I'M 1234 okay?\n\n  x", []string{"I", "'M", " ", "123", "4", " okay", "?\n\n", " ", " x"}},
		{"glm4", "(foo)bar  \n \n", []string{"(foo", ")bar", "  \n \n"}},
		{"glm4", "a\u00a0b\u00a0\u00a01", []string{"a", "\u00a0b", "\u00a0", "\u00a0", "1"}},
		{"glm4", "a \u200b b", []string{"a", " \u200b", " b"}}, // U+200B is no white space
		{"glm4", "½²Ⅳ٣x", []string{"½²Ⅳ", "٣", "x"}},           // every kind of number
		{"llama-bpe", "1234567", []string{"123", "456", "7"}},
		{"llama3", "it'S\r\n", []string{"it", "'S", "\r\n"}},
		{"llama-v3", "a", []string{"a"}},
		{"chatglm-bpe", "a12345", []string{"a", "123", "45"}},

		{"qwen2", "v1234 x", []string{"v", "1", "2", "3", "4", " x"}},
		{"qwen2", "नमस्ते", []string{"नमस", "्त", "े"}}, // a mark is no letter
		{"qwen35", "नमस्ते 12!\u0301", []string{"नमस्ते", " ", "1", "2", "!\u0301"}},
		{"qwen35", "e\u0301te\u0301's", []string{"e\u0301te\u0301", "'s"}},

		{"gpt-4o", "HTTPServer helloWorld's IT'LL", []string{"HTTPServer", " hello", "World's", " IT'LL"}},
		{"gpt-4o", "नमस्ते 12345", []string{"नमस्ते", " ", "123", "45"}},
		{"gpt-4o", "foo/bar //\n/x", []string{"foo", "/bar", " //\n/", "x"}},
		{"gpt-4o", "ABC世界abc", []string{"ABC世界abc"}},
		{"llama4", "aB", []string{"a", "B"}},
		{"minimax-m2", "aB", []string{"a", "B"}},
		{"tekken", "helloWORLD's 12", []string{"hello", "WORLD", "'s", " ", "1", "2"}},

		{"kimi-k2", "汉字abc HTTPServer's 漢A 12345 かな", []string{"汉字", "abc", " HTTPServer's", " ", "漢", "A", " ", "123", "45", " かな"}},
		{"kimi-k2", "x/\n/y ...\n", []string{"x", "/\n", "/y", " ...\n"}},

		{"deepseek-llm", "Hello 世界  123\nx  ", []string{"Hello", " ", "世界", "  ", "123", "\n", "x", "  "}},
		{"deepseek-llm", "a!? b，c", []string{"a", "!?", " b", "，", "c"}},
		{"deepseek-llm", "café", []string{"caf", "é"}}, // the class :-~ has letters, and cuts again
		{"deepseek-llm", "a   \r\nb", []string{"a", "   ", "\r", "\n", "b"}},
		{"deepseek-coder", "x1 = foo_2; 世界", []string{"x", "1", " =", " foo", "_", "2", ";", " ", "世界"}},
		{"deepseek-v3", "Hello, world! 12345 你好abc\n\n", []string{"Hello", ",", " world", "!", " ", "123", "45", " ", "你好", "abc", "\n\n"}},
		{"deepseek-v3", "a.foo $x ${y}", []string{"a", ".foo", " $", "x", " ${", "y", "}"}},
		{"deepseek-v3", "ひらカタ漢字x", []string{"ひらカタ漢字", "x"}},

		{"bailingmoe", "a\n\nb'S 12", []string{"a", "\n\n", "b", "'S", " ", "1", "2"}},
		{"refact", "foo 123", []string{"foo", " ", "1", "2", "3"}},
		{"default", "a+b 1234.", []string{"a", "+", "b", " ", "123", "4", "."}},
	} {
		if got := pieces(t, c.pre, c.text); !slices.Equal(got, c.want) {
			t.Errorf("%s, %q:\n got %q\nwant %q", c.pre, c.text, got, c.want)
		}
	}
}

// snippets are characters that the expressions tell apart.
var snippets = []string{
	"a", "Z", "é", "ß", "ǅ", "世", "か", "한", "ا", "\u0301", "्", "1", "٣", "½", " ", "  ", "\t", "\n", "\r\n", "\u00a0", "\u3000", "\u0085",
	"'", "'s", "'LL", ".", "_", "$", "+", "。", "！", "😀", "👩\u200d💻", "\x00", "\x1f", "\ufeff", "<|x|>", "/", "\\", "▁", "e\u0301",
}

func randomText(r *rand.Rand, n int) string {
	var b strings.Builder
	for range r.IntN(n + 1) {
		b.WriteString(snippets[r.IntN(len(snippets))])
	}
	return b.String()
}

// TestPiecesAreTheText: no rule loses, adds or moves a character, or makes an
// empty part.
func TestPiecesAreTheText(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, rule := range rules {
		s, err := newSplitter(rule.stages)
		if err != nil {
			t.Fatal(err)
		}
		for range 200 {
			text := randomText(r, 40)
			var got strings.Builder
			s.each([]rune(text), func(p []rune) {
				if len(p) == 0 {
					t.Errorf("%s, %q: an empty part", rule.names[0], text)
				}
				got.WriteString(string(p))
			})
			if got.String() != text {
				t.Errorf("%s, %q: the parts are %q", rule.names[0], text, got.String())
			}
		}
	}
}

// TestLongRuns: whatever repeats, a long text is cut and merged in about the
// time that its length asks for. A quadratic step would not end here.
func TestLongRuns(t *testing.T) {
	v := tiny("gpt-2", []string{"a a", "aa aa", "aaaa aaaa", "Ġ Ġ", "ĠĠ ĠĠ", "1 1", "b c"})
	prose := strings.Repeat("The quick brown fox jumps over 13 lazy dogs, doesn't it?\n", 20000) // 1.1 MB
	for _, rule := range rules {
		t.Run(rule.names[0], func(t *testing.T) {
			t.Parallel()
			v := v
			v.Pre = rule.names[0]
			tok := mustNew(t, v)
			for _, unit := range []string{"a", "A", " ", "\n", " \n", "1", "世", "'", "\u0301", "aB", "' ", "\r", "."} {
				text := strings.Repeat(unit, 100000/len(unit)) + "x"
				if got := tok.Decode(must(tok.Encode(text, true)), true); got != text {
					t.Errorf("%d times %q does not come back", 100000/len(unit), unit)
				}
			}
			if len(rule.stages) > 3 || rule.names[0] == "glm4" {
				if got := tok.Decode(must(tok.Encode(prose, true)), true); got != prose {
					t.Error("a long text does not come back")
				}
			}
		})
	}
	t.Run("llama", func(t *testing.T) {
		t.Parallel()
		tok := mustNew(t, spm("aa", "aaaa", "aaaaaaaa", "▁▁", "▁▁▁▁", "a", "▁", "▁the"))
		for _, text := range []string{strings.Repeat("a", 100000), strings.Repeat(" ", 100000), strings.Repeat("世", 30000), prose} {
			if got := tok.Decode(must(tok.Encode(text, true)), true); got != text {
				t.Errorf("%.20q...: does not come back", text)
			}
		}
	})
}

func ExampleTokenizer_Encode() {
	tok, err := New(tiny("qwen2", []string{"h i", "Ġ hi"}, "<|end|>"))
	if err != nil {
		panic(err)
	}
	for _, special := range []bool{true, false} {
		fmt.Printf("%q\n", texts(tok, must(tok.Encode("hi hi<|end|>", special))))
	}
	// Output:
	// ["hi" "Ġhi" "<|end|>"]
	// ["hi" "Ġhi" "<" "|" "e" "n" "d" "|" ">"]
}
