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

	ascii = "!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~"
	gpt2  = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
)

// words of the cl100k shape, with the given digits at a time.
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
	{names: []string{"tekken"}, whole: true, stages: []string{
		`[^\r\n\p{L}\p{N}]?` + upper + `*` + lower + `+|[^\r\n\p{L}\p{N}]?` + upper + `+` + lower + `*|` +
			`\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|` + spaces,
	}},
	{names: []string{"deepseek-llm"}, stages: []string{
		`[\r\n]`,
		`\s?[` + casedLetters + `]+`,
		`\s?[!-/:-~！-／：-～‘-‟　-。]+`,
		`(?<!\s)\s+\z`, // \s+$, begun at the first space only: the same match, in linear time
		`[一-龥ࠀ-一가-퟿]+`,
		`\p{N}+`,
	}},
	{names: []string{"deepseek-coder"}, stages: []string{`[\r\n]`, `\s?\p{L}+`, `\s?\p{P}+`, `[一-龥ࠀ-一가-퟿]+`, `\p{N}`}},
	{names: []string{"deepseek-v3", "hunyuan-dense", "joyai-llm"}, stages: []string{
		`\p{N}{1,3}`,
		`[一-龥぀-ゟ゠-ヿ]+`,
		`[` + ascii + `][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|` + spaces,
	}},
	{names: []string{"starcoder", "refact", "command-r", "smollm", "codeshell", "mellum2"}, stages: []string{`\p{N}`, gpt2}},
	{names: []string{"default"}, stages: []string{`[\p{P}\$\+<=>\^~\|]+`, gpt2, `\p{N}+`, `[0-9][0-9][0-9]`}},
}

// casedLetters are the letters of deepseek-llm's own class, alphabets with case.
const casedLetters = `A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃`

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
