package tokenizer

import (
	"fmt"
	"sort"
	"strings"

	"github.com/dlclark/regexp2/v2"
)

// Parts of the expressions below. White space and categories are Unicode's.
const (
	contraction = `'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]`
	punctuation = ` ?[^\s\p{L}\p{N}]+[\r\n]*`
	spaces      = `\s*[\r\n]+|\s+(?!\S)|\s+`

	// Words of mixed case: HTTPServer is HTTPServer, helloWorld is hello World.
	upper = `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]`
	lower = `[\p{Ll}\p{Lm}\p{Lo}\p{M}]`

	upperNotHan = `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}-[\p{Han}]]`
	lowerNotHan = `[\p{Ll}\p{Lm}\p{Lo}\p{M}-[\p{Han}]]`

	hanOrHangul = `\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF` // with all between the two, as deepseek-llm has it
	hanOrKana   = `\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF`

	ascii = "!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~"
	gpt2  = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
)

// casedLetters are the letters of deepseek-llm's own class, alphabets with case.
const casedLetters = "A-Za-z\u00B5\u00C0-\u00D6\u00D8-\u00F6\u00F8-\u01BA\u01BC-\u01BF\u01C4-\u0293\u0295-\u02AF\u0370-\u0373\u0376" +
	"\u0377\u037B-\u037D\u037F\u0386\u0388-\u038A\u038C\u038E-\u03A1\u03A3-\u03F5\u03F7-\u0481\u048A-\u052F" +
	"\u0531-\u0556\u10A0-\u10C5\u13A0-\u13F5\u13F8-\u13FD\u1C90-\u1CBA\u1CBD-\u1CBF\u1D00-\u1D2B\u1D6B-\u1D77" +
	"\u1D79-\u1D9A\u1E00-\u1F15\u1F18-\u1F1D\u1F20-\u1F45\u1F48-\u1F4D\u1F50-\u1F57\u1F59\u1F5B\u1F5D\u1F5F-\u1F7D" +
	"\u1F80-\u1FB4\u1FB6-\u1FBC\u1FBE\u1FC2-\u1FC4\u1FC6-\u1FCC\u1FD0-\u1FD3\u1FD6-\u1FDB\u1FE0-\u1FEC\u1FF2-\u1FF4" +
	"\u1FF6-\u1FFC\u2102\u2107\u210A-\u2113\u2115\u2119-\u211D\u2124\u2126\u2128\u212A-\u212D\u212F-\u2134\u2139" +
	"\u213C-\u213F\u2145-\u2149\u214E\u2183\u2184\u2C00-\u2C7B\u2C7E-\u2CE4\u2CEB-\u2CEE\u2CF2\u2CF3\uA640-\uA66D" +
	"\uA680-\uA69B\uA722-\uA76F\uA771-\uA787\uA78B-\uA78E\uAB70-\uABBF\uFB00-\uFB06\uFB13-\uFB17\uFF21-\uFF3A" +
	"\uFF41-\uFF5A\U00010400-\U0001044F\U000104B0-\U000104D3\U000104D8-\U000104FB\U00010C80-\U00010CB2" +
	"\U00010CC0-\U00010CF2\U000118A0-\U000118DF\U0001E900-\U0001E943"

// cl100k cuts words in the way of that vocabulary, with the given digits at a time.
func cl100k(digits string) string {
	return `(?:` + contraction + `)|[^\r\n\p{L}\p{N}]?\p{L}+|` + digits + `|` + punctuation + `|` + spaces
}

// A rule says how a text is cut before merging. Each stage cuts every part that
// the stage before left, at the matches of its expression; what lies between
// two matches is a part as well.
type rule struct {
	names  []string // values of tokenizer.ggml.pre
	whole  bool     // a part that is a token is taken whole, without merges
	stages []string
}

// rules are the known pre-tokenizers. The expressions are those of the models'
// own tokenizer files; the names are llama.cpp's.
var rules = []rule{
	{names: []string{"gpt-2", "phi-2", "mpt", "olmo"}, stages: []string{gpt2}},
	{names: []string{"llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2"}, whole: true, stages: []string{cl100k(`\p{N}{1,3}`)}},
	{names: []string{"glm4", "chatglm-bpe", "dbrx", "smaug-bpe"}, stages: []string{cl100k(`\p{N}{1,3}`)}},
	{names: []string{"qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "solar-open", "grok-2"}, stages: []string{cl100k(`\p{N}`)}},
	{names: []string{"qwen35"}, stages: []string{
		`(?:` + contraction + `)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|` + spaces,
	}},
	{names: []string{"bailingmoe", "bailingmoe2", "llada-moe"}, stages: []string{
		`'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|` + punctuation + `|\s*[\r\n]|\s+(?!\S)|\s+`,
	}},
	{names: []string{"gpt-4o", "llama4", "minimax-m2", "kanana2"}, stages: []string{
		`[^\r\n\p{L}\p{N}]?` + upper + `*` + lower + `+(?:` + contraction + `)?|` +
			`[^\r\n\p{L}\p{N}]?` + upper + `+` + lower + `*(?:` + contraction + `)?|` +
			`\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|` + spaces,
	}},
	{names: []string{"kimi-k2"}, stages: []string{ // as gpt-4o, but Chinese characters are words of their own
		`\p{Han}+|` +
			`[^\r\n\p{L}\p{N}]?` + upperNotHan + `*` + lowerNotHan + `+(?:` + contraction + `)?|` +
			`[^\r\n\p{L}\p{N}]?` + upperNotHan + `+` + lowerNotHan + `*(?:` + contraction + `)?|` +
			`\p{N}{1,3}|` + punctuation + `|` + spaces,
	}},
	{names: []string{"tekken"}, whole: true, stages: []string{
		`[^\r\n\p{L}\p{N}]?` + upper + `*` + lower + `+|[^\r\n\p{L}\p{N}]?` + upper + `+` + lower + `*|` +
			`\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|` + spaces,
	}},
	{names: []string{"deepseek-llm"}, stages: []string{
		`[\r\n]`,
		`\s?[` + casedLetters + `]+`,
		`\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3000-\u3002]+`,
		`(?<!\s)\s+\z`, // \s+$, begun at the first space only: the same match, in linear time
		`[` + hanOrHangul + `]+`,
		`\p{N}+`,
	}},
	{names: []string{"deepseek-coder"}, stages: []string{`[\r\n]`, `\s?\p{L}+`, `\s?\p{P}+`, `[` + hanOrHangul + `]+`, `\p{N}`}},
	{names: []string{"deepseek-v3", "hunyuan-dense", "joyai-llm"}, stages: []string{
		`\p{N}{1,3}`,
		`[` + hanOrKana + `]+`,
		`[` + ascii + `][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|` + spaces,
	}},
	{names: []string{"starcoder", "refact", "command-r", "smollm", "codeshell", "mellum2"}, stages: []string{`\p{N}`, gpt2}},
	{names: []string{"default"}, stages: []string{`[\p{P}\$\+<=>\^~\|]+`, gpt2, `\p{N}+`, `[0-9][0-9][0-9]`}},
}

// rulesOf finds a pre-tokenizer by its name. There is no default: a wrong one
// gives ids that look right and are not.
func rulesOf(pre string) (rule, error) {
	var known []string
	for _, r := range rules {
		for _, name := range r.names {
			if name == pre {
				return r, nil
			}
			known = append(known, name)
		}
	}
	sort.Strings(known)
	list := strings.Join(known, ", ")
	if pre == "" {
		return rule{}, fmt.Errorf("tokenizer: tokenizer.ggml.pre is absent, so the file does not say how to cut text: convert the model again, or set the key to one of %s", list)
	}
	return rule{}, fmt.Errorf("tokenizer: tokenizer.ggml.pre %q is not supported: supported are %s", pre, list)
}

// A splitter cuts text by the stages of a rule.
type splitter []*regexp2.Regexp

func newSplitter(stages []string) (splitter, error) {
	s := make(splitter, len(stages))
	for i, expr := range stages {
		re, err := regexp2.Compile(expr)
		if err != nil {
			return nil, fmt.Errorf("tokenizer: stage %d of the pre-tokenizer: %w", i, err)
		}
		s[i] = re
	}
	return s, nil
}

// each calls yield for the parts of text in order; together they are text.
func (s splitter) each(text []rune, yield func(part []rune)) {
	if len(text) == 0 {
		return
	}
	if len(s) == 0 {
		yield(text)
		return
	}
	last := 0
	err := s[0].FindRunesMatches(text, 0, func(m regexp2.MatchView) bool {
		i, n, _ := m.GroupRange(0)
		s[1:].each(text[last:i], yield)
		s[1:].each(text[i:i+n], yield)
		last = i + n
		return true
	})
	if err != nil { // only a time limit gives one, and none is set
		panic(fmt.Sprintf("tokenizer: %v in %v", err, s[0]))
	}
	s[1:].each(text[last:], yield)
}
