package tokenizer

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// texts writes ids as their tokens' texts.
func texts(tok *Tokenizer, ids []int32) []string {
	out := make([]string, len(ids))
	for i, id := range ids {
		out[i] = tok.Text(id)
	}
	return out
}

// TestMergeOrder compares with the plain meaning: merge the best pair of all,
// the leftmost of equals, until none is left.
func TestMergeOrder(t *testing.T) {
	merges := []string{"a b", "b c", "ab c", "a a", "aa a", "c a", "abc abc", "b b", "c ab", "aa bb"}
	v := tiny("gpt-2", merges)
	tok := mustNew(t, v)
	r := rand.New(rand.NewPCG(3, 4))
	for range 2000 {
		var b strings.Builder
		for range 1 + r.IntN(30) {
			b.WriteByte("abc"[r.IntN(3)])
		}
		want := strings.Split(b.String(), "")
		for {
			best, at := len(merges), -1
			for i := range len(want) - 1 {
				if rank := slices.Index(merges, want[i]+" "+want[i+1]); rank >= 0 && rank < best {
					best, at = rank, i
				}
			}
			if at < 0 {
				break
			}
			want = slices.Replace(want, at, at+2, want[at]+want[at+1])
		}
		if got := texts(tok, must(tok.Encode(b.String(), true))); !slices.Equal(got, want) {
			t.Fatalf("%s: got %q, want %q", b.String(), got, want)
		}
	}
}

// TestScoreOrder is the same for a llama vocabulary, where any two neighbours
// that make a token may merge, the best score first.
func TestScoreOrder(t *testing.T) {
	tokens := []string{"ab", "bc", "abc", "aa", "▁a", "aaa", "ca", "abcabc", "bb", "cab", "▁▁", "a", "b", "▁"} // c is no token
	tok := mustNew(t, spm(tokens...))
	r := rand.New(rand.NewPCG(5, 6))
	for range 2000 {
		var b strings.Builder
		for range 1 + r.IntN(30) {
			b.WriteByte("abc "[r.IntN(4)])
		}
		want := strings.Split(strings.ReplaceAll(" "+b.String(), " ", "▁"), "")
		for {
			best, at := len(tokens), -1
			for i := range len(want) - 1 {
				if score := slices.Index(tokens, want[i]+want[i+1]); score >= 0 && score < best {
					best, at = score, i
				}
			}
			if at < 0 {
				break
			}
			want = slices.Replace(want, at, at+2, want[at]+want[at+1])
		}
		for i, s := range want {
			if s == "c" {
				want[i] = "<0x63>"
			}
		}
		if got := texts(tok, must(tok.Encode(b.String(), true))); !slices.Equal(got, want) {
			t.Fatalf("%q: got %q, want %q", b.String(), got, want)
		}
	}
}

func TestSpecialTokens(t *testing.T) {
	v := tiny("gpt-2", []string{"a b"}, "<a>", "<a><b>", "<b>", "<u>", "<unk>")
	n := int32(len(v.Tokens))
	v.Types[n-2] = UserDefined
	v.Types[n-1] = Unknown
	tok := mustNew(t, v)
	for _, c := range []struct {
		text    string
		special bool
		want    string
	}{
		{"ab<a>ab", true, "ab <a> ab"},
		{"<a><b><b>", true, "<a><b> <b>"}, // the longest first
		{"<a", true, "< a"},
		{"<unk><u>", true, "<unk> <u>"},
		{"<b><u>ab", false, "< b > <u> ab"}, // user-defined always
		{"<unk>", false, "< u n k >"},
		{"", true, ""},
	} {
		if got := strings.Join(texts(tok, must(tok.Encode(c.text, c.special))), " "); got != c.want {
			t.Errorf("%q, special %v: got %s, want %s", c.text, c.special, got, c.want)
		}
	}

	// In a llama vocabulary text cannot spell a control token by merges either,
	// and a space goes before text at the start and after each special token.
	s := spm("▁a", "a", "▁", "<", "/", "s", ">", "</", "</s", "s>")
	tok = mustNew(t, s)
	for _, c := range []struct {
		text    string
		special bool
		want    string
	}{
		{"a a", true, "▁a ▁a"},
		{"a</s>a", true, "▁a </s> ▁a"},
		{"</s>", false, "▁ </s >"},
		{"<s>", true, "<s>"},
		{"", true, ""},
	} {
		if got := strings.Join(texts(tok, must(tok.Encode(c.text, c.special))), " "); got != c.want {
			t.Errorf("llama: %q, special %v: got %s, want %s", c.text, c.special, got, c.want)
		}
	}
	no := false
	s.AddSpacePrefix = &no
	if got := texts(mustNew(t, s), must(mustNew(t, s).Encode("a", true))); !slices.Equal(got, []string{"a"}) {
		t.Errorf("llama without a space before text: got %q", got)
	}
}

func TestIgnoredMerges(t *testing.T) {
	// "xyz" cannot be made by the merges, but llama3 takes whole parts first.
	v := tiny("llama-bpe", []string{"x y"})
	v.Tokens = append(v.Tokens, "xyz")
	v.Types = append(v.Types, Normal)
	for pre, want := range map[string]string{"llama-bpe": "xyz", "glm4": "xy z"} {
		v.Pre = pre
		tok := mustNew(t, v)
		if got := strings.Join(texts(tok, must(tok.Encode("xyz", true))), " "); got != want {
			t.Errorf("%s: got %s, want %s", pre, got, want)
		}
	}
}

func TestMissingBytes(t *testing.T) {
	v := spm("a")
	v.Tokens[3+0xE4], v.Types[3+0xE4] = "gap", Normal
	tok := mustNew(t, v)
	got := strings.Join(texts(tok, must(tok.Encode("aä世", true))), " ") // 世 is E4 B8 96
	if want := "<0xE2> <0x96> <0x81> a <0xC3> <0xA4> <unk>"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestBOS(t *testing.T) {
	yes, no := true, false
	for _, c := range []struct {
		name string
		v    Vocab
		bos  int32
		flag *bool
		add  bool
	}{
		{"gpt2, absent", tiny("gpt-2", []string{"a b"}, "<s>"), 257, nil, false},
		{"gpt2, true", tiny("gpt-2", []string{"a b"}, "<s>"), 257, &yes, true},
		{"llama, absent", spm("a"), 1, nil, true},
		{"llama, no id", spm("a"), -1, nil, true}, // <s> is found by its text
		{"llama, false", spm("a"), 1, &no, false},
	} {
		c.v.BOS, c.v.AddBOS = c.bos, c.flag
		tok := mustNew(t, c.v)
		id, add := tok.BOS()
		if tok.Text(id) != "<s>" || add != c.add {
			t.Errorf("%s: BOS %q, add %v", c.name, tok.Text(id), add)
		}
		for _, text := range []string{"a", "<s>a", ""} {
			got := must(tok.EncodePrompt(text))
			want := must(tok.Encode(text, true))
			if c.add && text != "<s>a" {
				want = slices.Insert(want, 0, id)
			}
			if !slices.Equal(got, want) {
				t.Errorf("%s: %q gives %v, want %v", c.name, text, got, want)
			}
		}
	}
}

func TestStops(t *testing.T) {
	for _, c := range []struct {
		name string
		more []string // control tokens
		edit func(v *Vocab, id func(string) int32)
		want string
	}{
		{"named in the file", []string{"<1>", "<2>", "<3>", "<4>", "<5>"}, func(v *Vocab, id func(string) int32) {
			v.EOS, v.EOT, v.EOM, v.EOSIDs = id("<1>"), id("<3>"), id("<4>"), []int32{id("<5>"), id("<1>")}
		}, "<1> <3> <4> <5>"},
		{"by their text", []string{"<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>"}, nil, "<|im_end|> <|endoftext|> <|eot_id|>"},
		{"plain text is no end", []string{"</s>", "<|end|>"}, func(v *Vocab, id func(string) int32) { v.Types[id("</s>")] = Normal }, "<|end|>"},
		{"user-defined is", []string{"<|im_end|>"}, func(v *Vocab, id func(string) int32) { v.Types[id("<|im_end|>")] = UserDefined }, "<|im_end|>"},
		{"without types", []string{"<|endoftext|>", "<x>"}, func(v *Vocab, _ func(string) int32) { v.Types = nil }, "<|endoftext|>"},
		{"harmony", []string{"<|start|>", "<|end|>", "<|return|>", "<|call|>"}, nil, "<|return|> <|call|>"},
		{"harmony that ends with end", []string{"<|end|>", "<|return|>", "<|call|>"}, func(v *Vocab, id func(string) int32) { v.EOS = id("<|end|>") }, "<|end|> <|return|> <|call|>"},
		{"none", []string{"<x>"}, nil, ""},
	} {
		v := tiny("gpt-2", []string{"a b"}, c.more...)
		if c.edit != nil {
			c.edit(&v, func(s string) int32 { return int32(slices.Index(v.Tokens, s)) })
		}
		tok := mustNew(t, v)
		if got := strings.Join(texts(tok, tok.Stops()), " "); got != c.want {
			t.Errorf("%s: got %s, want %s", c.name, got, c.want)
		}
		for id := int32(-1); int(id) <= tok.Size(); id++ {
			if tok.IsStop(id) != slices.Contains(tok.Stops(), id) {
				t.Errorf("%s: IsStop(%d) is %v", c.name, id, tok.IsStop(id))
			}
		}
	}
}

func TestPiece(t *testing.T) {
	v := tiny("gpt-2", []string{"Ġ a", "Ċ Ċ"}, "<c>", "<u> v", "[PAD]", "naïve ▁")
	n := int32(len(v.Tokens))
	v.Types[n-3], v.Types[n-2], v.Types[n-1] = UserDefined, Unused, Normal
	v.Tokens = append(v.Tokens, "", "")
	v.Types = append(v.Types, Normal, Unused)
	tok := mustNew(t, v)
	for _, c := range []struct {
		id      int32
		special bool
		want    string
	}{
		{256, false, " a"}, {257, false, "\n\n"}, {0xFF, false, "\xff"},
		{n - 4, false, ""}, {n - 4, true, "<c>"}, {n - 3, false, "<u> v"}, {n - 2, true, ""},
		{n - 1, false, "naïve ▁"}, // not written in byte characters: itself
		{n, true, ""}, {n + 1, true, ""}, {-1, true, ""}, {n + 2, true, ""},
	} {
		if got := string(tok.Piece(c.id, c.special)); got != c.want {
			t.Errorf("piece %d (%q), special %v: got %q, want %q", c.id, tok.Text(c.id), c.special, got, c.want)
		}
	}

	// Harmony's marks print, or its channels would run together.
	tok = mustNew(t, tiny("gpt-2", []string{"a b"}, "<|channel|>", "<|message|>", "<|return|>", "<|call|>"))
	if got := tok.Decode(must(tok.Encode("<|channel|>a<|message|>b<|return|>", true)), false); got != "<|channel|>a<|message|>b" {
		t.Errorf("harmony: got %q", got)
	}

	tok = mustNew(t, spm("▁a", "▁"))
	for text, want := range map[string]string{"▁a": " a", "▁": " ", "<0x0A>": "\n", "<unk>": "", "</s>": ""} {
		id, ok := tok.ID(text)
		if got := string(tok.Piece(id, false)); !ok || got != want {
			t.Errorf("llama: %q is %q, want %q", text, got, want)
		}
	}
}

// TestDecoder: however a text is cut into tokens, each part that comes out is
// whole UTF-8, and together they are the text.
func TestDecoder(t *testing.T) {
	tok := mustNew(t, tiny("gpt-2", []string{"a b", "ð Ł", "ðŁ ĺ", "â ľ", "Ń ĩ"}, "<c>"))
	bytesOf := func(s string) (ids []int32) {
		for _, b := range []byte(s) {
			ids = append(ids, tok.bytes[b])
		}
		return ids
	}
	check := func(ids []int32, want string) {
		t.Helper()
		d := tok.NewDecoder(false)
		for range 2 { // a decoder may be used again after Flush
			var got strings.Builder
			for _, id := range ids {
				s := d.Add(id)
				if !utf8.ValidString(s) {
					t.Fatalf("%q: a part is %q", want, s)
				}
				got.WriteString(s)
			}
			got.WriteString(d.Flush())
			if got.String() != want {
				t.Fatalf("%v: got %q, want %q", texts(tok, ids), got.String(), want)
			}
		}
	}
	r := rand.New(rand.NewPCG(7, 8))
	for range 500 {
		text := randomText(r, 20)
		check(bytesOf(text), text)
		check(must(tok.Encode(text, false)), text)
	}
	const bad = "\uFFFD"
	for in, want := range map[string]string{
		"\xff":                      bad,
		"a\x80b":                    "a" + bad + "b",
		"\xe2\x82A":                 bad + "A", // one for the begun sequence
		"\xf0\x9f\x98":              bad,
		"\xf0\x9f\x98\xf0\x9f":      bad + bad,
		"\xc0\xaf":                  bad + bad, // too long a form of a slash
		"\xed\xa0\x80":              bad + bad + bad,
		"é\xe4\xb8\xe4\xb8\x96\xe4": "é" + bad + "世" + bad,
		"\uFFFD":                    bad,
	} {
		check(bytesOf(in), want)
	}

	// What is certain comes at once, the rest is held.
	d := tok.NewDecoder(true)
	for _, step := range []struct{ in, want string }{{"a", "a"}, {"\xf0", ""}, {"\x9f\x98", ""}, {"\x80", "😀"}, {"\xe4", ""}, {"\xb8", ""}, {"x", bad + "x"}} {
		var got string
		for _, id := range bytesOf(step.in) {
			got += d.Add(id)
		}
		if got != step.want {
			t.Errorf("after %q: got %q, want %q", step.in, got, step.want)
		}
	}
	if id, _ := tok.ID("<c>"); d.Add(id) != "<c>" || tok.NewDecoder(false).Add(id) != "" {
		t.Error("control tokens print on request only")
	}
}

func TestDecoderAllocates(t *testing.T) {
	tok := mustNew(t, tiny("gpt-2", []string{"a b"}))
	d := tok.NewDecoder(false)
	id, _ := tok.ID("ab")
	if n := testing.AllocsPerRun(100, func() { d.Add(id) }); n != 0 {
		t.Errorf("a token of whole characters allocates %v times", n)
	}
}

// TestRoundTrip: with real vocabularies, any text comes back.
func TestRoundTrip(t *testing.T) {
	for name, get := range packed {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tok := mustNew(t, get(t))
			r := rand.New(rand.NewPCG(9, 10))
			for range 500 {
				text := randomText(r, 60)
				for _, special := range []bool{false, true} {
					want := text
					if tok.spm {
						want = strings.ReplaceAll(text, space, " ") // it writes both the same
					}
					if got := tok.Decode(must(tok.Encode(text, special)), true); got != want {
						t.Fatalf("%q: comes back as %q", text, got)
					}
				}
			}
		})
	}
}

// FuzzEncode: no text panics, every id is of the vocabulary, and the bytes of
// the ids are the text.
func FuzzEncode(f *testing.F) {
	f.Add("Hello, <s>world</s>!", true)
	f.Add("a\xff\xe4\xb8 ▁ 😀", false)
	for _, s := range snippets {
		f.Add(s+s, true)
	}
	gpt2 := mustNew(f, tiny("deepseek-v3", []string{"a b", "Ġ a", "ab ab", "1 2"}, "<s>", "</s>"))
	llama := mustNew(f, spm("▁a", "a", "b", "ab", "▁▁", "<", "<s", "世", "▁"))
	f.Fuzz(func(t *testing.T, text string, special bool) {
		for _, tok := range []*Tokenizer{gpt2, llama} {
			ids := must(tok.Encode(text, special))
			var got []byte
			for _, id := range ids {
				if id < 0 || int(id) >= tok.Size() {
					t.Fatalf("%q: id %d", text, id)
				}
				got = append(got, tok.Piece(id, true)...)
			}
			if !tok.spm {
				if want := string([]rune(text)); string(got) != want {
					t.Fatalf("%q: the ids are %q", text, got)
				}
				continue
			}
			if !special || !strings.Contains(text, "<") {
				want := strings.ReplaceAll(text, space, " ")
				if text != "" {
					want = " " + want
				}
				if string(got) != want {
					t.Fatalf("%q: the ids are %q", text, got)
				}
			}
		}
	})
}

func BenchmarkEncode(b *testing.B) {
	text := strings.Repeat("The quick brown fox jumps over 13 lazy dogs, doesn't it? 世界 naïve\n", 2000)
	for name, get := range packed {
		tok := mustNew(b, get(b))
		b.Run("vocab="+name, func(b *testing.B) {
			b.SetBytes(int64(len(text)))
			for b.Loop() {
				must(tok.Encode(text, true))
			}
		})
	}
}
