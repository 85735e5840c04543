package tokenizer

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// hfPart is one step of tokenizer.json: a normalizer, pre-tokenizer,
// post-processor or decoder, with the fields of all of them.
type hfPart struct {
	Type string `json:"type"`

	Normalizers   []json.RawMessage `json:"normalizers"`
	PreTokenizers []json.RawMessage `json:"pretokenizers"`
	Processors    []json.RawMessage `json:"processors"`
	Decoders      []json.RawMessage `json:"decoders"`

	Pattern          *hfPattern `json:"pattern"`
	Content          string     `json:"content"`
	Prepend          string     `json:"prepend"`
	StripLeft        bool       `json:"strip_left"`
	StripRight       bool       `json:"strip_right"`
	Behavior         string     `json:"behavior"`
	Invert           bool       `json:"invert"`
	IndividualDigits bool       `json:"individual_digits"`
	AddPrefixSpace   *bool      `json:"add_prefix_space"`
	UseRegex         *bool      `json:"use_regex"`
	Replacement      string     `json:"replacement"`
	PrependScheme    string     `json:"prepend_scheme"`
	Split            *bool      `json:"split"`
	Delimiter        string     `json:"delimiter"`
	Start            int        `json:"start"`
	Stop             int        `json:"stop"`

	Single        []hfTemplate         `json:"single"`
	SpecialTokens map[string]hfSpecial `json:"special_tokens"`
	Cls           []json.RawMessage    `json:"cls"`
	Sep           []json.RawMessage    `json:"sep"`
}

type hfPattern struct {
	Regex  *string `json:"Regex"`
	String *string `json:"String"`
}

// hfTemplate is a token, or the place of the text.
type hfTemplate struct {
	SpecialToken *struct {
		ID string `json:"id"`
	} `json:"SpecialToken"`
	Sequence *struct {
		ID string `json:"id"`
	} `json:"Sequence"`
}

type hfSpecial struct {
	IDs []int64 `json:"ids"`
}

// readPart reads a step; nil if there is none. depth counts sequences around it.
func readPart(raw json.RawMessage, depth int) (*hfPart, error) {
	if len(raw) == 0 || bytes.Equal(raw, []byte("null")) {
		return nil, nil
	}
	if depth > maxHFNest {
		return nil, fmt.Errorf("sequences nested deeper than %d", maxHFNest)
	}
	p := new(hfPart)
	if err := json.Unmarshal(raw, p); err != nil {
		return nil, err
	}
	return p, nil
}

func yes(b *bool) bool { return b == nil || *b }

// A normalizer rewrites text. An error means that an expression takes too long
// or that the text grows beyond all measure.
type normalizer func(string) (string, error)

// maxGrown bounds the text that a normalizer makes out of n bytes. The longest
// that Unicode has is 11 times as long.
func maxGrown(n int) int { return 64*n + 1<<16 }

func grown(from, to int) error {
	if to > maxGrown(from) {
		return fmt.Errorf("the normalizer makes more than %d bytes out of %d", maxGrown(from), from)
	}
	return nil
}

// newNormalizer reads a normalizer; nil if there is none.
func newNormalizer(raw json.RawMessage, depth int) (normalizer, error) {
	p, err := readPart(raw, depth)
	if p == nil || err != nil {
		return nil, err
	}
	plain := func(f func(string) string) (normalizer, error) {
		return func(s string) (string, error) { return f(s), nil }, nil
	}
	switch p.Type {
	case "Sequence":
		var steps []normalizer
		for i, raw := range p.Normalizers {
			step, err := newNormalizer(raw, depth+1)
			if err != nil {
				return nil, fmt.Errorf("normalizers[%d]: %w", i, err)
			}
			if step != nil {
				steps = append(steps, step)
			}
		}
		return func(s string) (string, error) {
			before := len(s)
			for _, step := range steps {
				var err error
				if s, err = step(s); err != nil {
					return "", err
				}
				if err := grown(before, len(s)); err != nil {
					return "", err
				}
			}
			return s, nil
		}, nil
	case "NFC":
		return plain(norm.NFC.String)
	case "NFD":
		return plain(norm.NFD.String)
	case "NFKC":
		return plain(norm.NFKC.String)
	case "NFKD":
		return plain(norm.NFKD.String)
	case "Lowercase":
		return plain(lowerCase)
	case "StripAccents":
		return plain(func(s string) string {
			return strings.Map(func(r rune) rune {
				if unicode.Is(unicode.Mn, r) {
					return -1
				}
				return r
			}, s)
		})
	case "Strip":
		return plain(func(s string) string {
			if p.StripLeft {
				s = strings.TrimLeftFunc(s, unicode.IsSpace)
			}
			if p.StripRight {
				s = strings.TrimRightFunc(s, unicode.IsSpace)
			}
			return s
		})
	case "Prepend":
		return plain(func(s string) string {
			if s == "" {
				return s
			}
			return p.Prepend + s
		})
	case "ByteLevel":
		return plain(func(s string) string { return string(escapeBytes(s)) })
	case "Replace":
		find, err := newFinder(p.Pattern)
		if err != nil {
			return nil, err
		}
		return func(s string) (string, error) {
			text, last := []rune(s), 0
			var out strings.Builder
			err := find(text, func(from, to int) error {
				out.WriteString(string(text[last:from]))
				out.WriteString(p.Content)
				last = to
				return grown(len(s), out.Len())
			})
			if err != nil || last == 0 && out.Len() == 0 {
				return s, err
			}
			out.WriteString(string(text[last:]))
			return out.String(), nil
		}, nil
	}
	return nil, unsupported(p.Type, "NFC, NFD, NFKC, NFKD, Lowercase, StripAccents, Strip, Prepend, Replace, ByteLevel, Sequence")
}

func unsupported(kind, known string) error {
	return fmt.Errorf("%q is not supported: supported are %s", kind, known)
}

// mapsBytes says whether a normalizer ends by writing each byte as a character.
func mapsBytes(raw json.RawMessage) bool {
	p, err := readPart(raw, 0)
	return err == nil && p != nil && (p.Type == "ByteLevel" || p.Type == "Sequence" &&
		slices.ContainsFunc(p.Normalizers, func(raw json.RawMessage) bool {
			step, err := readPart(raw, 1)
			return err == nil && step != nil && step.Type == "ByteLevel"
		}))
}

// lowerCase is each character in lower case, as Rust has it: İ becomes two.
func lowerCase(s string) string {
	return strings.ReplaceAll(strings.Map(func(r rune) rune {
		if r == 'İ' {
			return r
		}
		return unicode.ToLower(r)
	}, s), "İ", "i\u0307")
}

// escapeBytes writes each byte of s as a character of a byte-level vocabulary.
func escapeBytes(s string) []rune {
	out := make([]rune, len(s))
	for i := range len(s) {
		out[i] = byteRunes[s[i]]
	}
	return out
}

// A preTokenizer cuts a part of a text and calls yield for the new parts in
// order; start says that the part begins the text. It passes on yield's error.
type preTokenizer func(part []rune, start bool, yield func(part []rune, start bool) error) error

// newPreTokenizer reads a pre-tokenizer; nil if there is none. bytesAsText says
// that it writes each byte as a character.
func newPreTokenizer(raw json.RawMessage, depth int) (cut preTokenizer, bytesAsText bool, err error) {
	p, err := readPart(raw, depth)
	if p == nil || err != nil {
		return nil, false, err
	}
	switch p.Type {
	case "Sequence":
		return newPreSequence(p, depth)
	case "ByteLevel":
		var gpt splitter
		if yes(p.UseRegex) {
			if gpt, err = newSplitter([]string{gpt2}); err != nil {
				return nil, false, err
			}
		}
		prefix := yes(p.AddPrefixSpace)
		return func(part []rune, start bool, yield func([]rune, bool) error) (err error) {
			if prefix && len(part) > 0 && part[0] != ' ' {
				part = slices.Insert(slices.Clone(part), 0, ' ')
			}
			gpt.each(part, func(part []rune) {
				if err == nil {
					err = yield(escapeBytes(string(part)), start)
					start = false
				}
			})
			return err
		}, true, nil
	case "Split":
		find, err := newFinder(p.Pattern)
		if err != nil {
			return nil, false, err
		}
		cut, err = cutAt(find, p.Behavior, p.Invert)
		return cut, false, err
	case "Digits":
		behavior := "Contiguous"
		if p.IndividualDigits {
			behavior = "Isolated"
		}
		cut, err = cutAt(runesThat(unicode.IsNumber), behavior, false)
		return cut, false, err
	case "Punctuation":
		behavior := p.Behavior
		if behavior == "" {
			behavior = "Isolated"
		}
		cut, err = cutAt(runesThat(isPunctuation), behavior, false)
		return cut, false, err
	case "WhitespaceSplit":
		cut, err = cutAt(runesThat(unicode.IsSpace), "Removed", false)
		return cut, false, err
	case "Whitespace":
		words := `\w+|[^\w\s]+`
		find, err := newFinder(&hfPattern{Regex: &words})
		if err != nil {
			return nil, false, err
		}
		cut, err = cutAt(find, "Removed", true)
		return cut, false, err
	case "CharDelimiterSplit":
		r, n := utf8.DecodeRuneInString(p.Delimiter)
		if n == 0 || n != len(p.Delimiter) {
			return nil, false, fmt.Errorf("step CharDelimiterSplit: delimiter %q is not one character", p.Delimiter)
		}
		cut, err = cutAt(runesThat(func(c rune) bool { return c == r }), "Removed", false)
		return cut, false, err
	case "Metaspace":
		cut, err = newMetaspace(p)
		return cut, false, err
	}
	return nil, false, unsupported(p.Type, "ByteLevel, Split, Digits, Punctuation, Whitespace, WhitespaceSplit, CharDelimiterSplit, Metaspace, Sequence")
}

func newPreSequence(p *hfPart, depth int) (cut preTokenizer, bytesAsText bool, err error) {
	var steps []preTokenizer
	for i, raw := range p.PreTokenizers {
		step, bytes, err := newPreTokenizer(raw, depth+1)
		if err != nil {
			return nil, false, fmt.Errorf("pretokenizers[%d]: %w", i, err)
		}
		if step != nil {
			steps = append(steps, step)
		}
		bytesAsText = bytesAsText || bytes
	}
	if len(steps) == 0 {
		return nil, false, nil
	}
	cut = steps[len(steps)-1]
	for _, first := range slices.Backward(steps[:len(steps)-1]) {
		then := cut
		cut = func(part []rune, start bool, yield func([]rune, bool) error) error {
			return first(part, start, func(part []rune, start bool) error { return then(part, start, yield) })
		}
	}
	return cut, bytesAsText, nil
}

// replacement is the character that stands for a space, and whether one is put
// before a text, and before every part.
func (p *hfPart) metaspace() (r rune, first, always bool, err error) {
	r, n := utf8.DecodeRuneInString(p.Replacement)
	if n == 0 || n != len(p.Replacement) {
		return 0, false, false, fmt.Errorf("step Metaspace: replacement %q is not one character", p.Replacement)
	}
	switch p.PrependScheme {
	case "always":
		return r, false, true, nil
	case "first":
		return r, true, false, nil
	case "never":
		return r, false, false, nil
	case "": // as old files have it
		return r, false, yes(p.AddPrefixSpace), nil
	}
	return 0, false, false, fmt.Errorf("step Metaspace: prepend_scheme %q is not supported: supported are always, first and never", p.PrependScheme)
}

func newMetaspace(p *hfPart) (preTokenizer, error) {
	space, first, always, err := p.metaspace()
	if err != nil {
		return nil, err
	}
	split, err := cutAt(runesThat(func(r rune) bool { return r == space }), "MergedWithNext", false)
	if err != nil {
		return nil, err
	}
	whole := !yes(p.Split)
	return func(part []rune, start bool, yield func([]rune, bool) error) error {
		out := make([]rune, 0, len(part)+1)
		if len(part) > 0 && part[0] != ' ' && part[0] != space && (always || first && start) {
			out = append(out, space)
		}
		for _, r := range part {
			if r == ' ' {
				r = space
			}
			out = append(out, r)
		}
		if whole {
			return yield(out, start)
		}
		return split(out, start, yield)
	}, nil
}

// isPunctuation is ASCII's idea of punctuation and Unicode's.
func isPunctuation(r rune) bool {
	return unicode.IsPunct(r) || r < 0x80 && unicode.IsSymbol(r)
}

// A finder calls found for the places of a pattern in text, in order. It passes
// on found's error.
type finder func(text []rune, found func(from, to int) error) error

// newFinder reads a pattern: an expression or a text.
func newFinder(p *hfPattern) (finder, error) {
	switch {
	case p == nil || (p.Regex == nil) == (p.String == nil):
		return nil, fmt.Errorf("pattern must be either a Regex or a String")
	case p.Regex != nil:
		return newRegexFinder(*p.Regex)
	}
	want := []rune(*p.String)
	return func(text []rune, found func(from, to int) error) error {
		for i := 0; len(want) > 0 && i+len(want) <= len(text); {
			if text[i] != want[0] || !slices.Equal(text[i:i+len(want)], want) {
				i++
				continue
			}
			if err := found(i, i+len(want)); err != nil {
				return err
			}
			i += len(want)
		}
		return nil
	}, nil
}

// runesThat finds each character of a kind.
func runesThat(is func(rune) bool) finder {
	return func(text []rune, found func(from, to int) error) error {
		for i, r := range text {
			if is(r) {
				if err := found(i, i+1); err != nil {
					return err
				}
			}
		}
		return nil
	}
}

// A span is a stretch of a text that a pattern matches, or one between two.
type span struct {
	from, to int
	match    bool
}

// cutAt cuts at what find finds. behavior says what becomes of a match: Removed,
// Isolated, Contiguous (neighbouring matches are one part), MergedWithPrevious or
// MergedWithNext (part). With invert the matches are what is not found.
func cutAt(find finder, behavior string, invert bool) (preTokenizer, error) {
	var join func([]span) []span
	switch behavior {
	case "Removed":
		join = func(s []span) []span { return slices.DeleteFunc(s, func(s span) bool { return s.match }) }
	case "Isolated":
		join = func(s []span) []span { return s }
	case "Contiguous":
		join = func(s []span) []span {
			out := s[:0]
			for _, s := range s {
				if n := len(out); n > 0 && out[n-1].match == s.match {
					out[n-1].to = s.to
				} else {
					out = append(out, s)
				}
			}
			return out
		}
	case "MergedWithPrevious":
		join = func(s []span) []span {
			out, before := s[:0], false
			for _, s := range s {
				if n := len(out); n > 0 && s.match && !before {
					out[n-1].to = s.to
				} else {
					out = append(out, s)
				}
				before = s.match
			}
			return out
		}
	case "MergedWithNext":
		join = func(s []span) []span {
			var out []span
			after := false
			for _, s := range slices.Backward(s) {
				if n := len(out); n > 0 && s.match && !after {
					out[n-1].from = s.from
				} else {
					out = append(out, s)
				}
				after = s.match
			}
			slices.Reverse(out)
			return out
		}
	default:
		return nil, fmt.Errorf("behavior %q is not supported: supported are Removed, Isolated, Contiguous, MergedWithPrevious and MergedWithNext", behavior)
	}
	return func(part []rune, start bool, yield func([]rune, bool) error) error {
		var spans []span
		last := 0
		err := find(part, func(from, to int) error {
			if last < from {
				spans = append(spans, span{last, from, invert})
			}
			spans = append(spans, span{from, to, !invert})
			last = to
			return nil
		})
		if err != nil {
			return err
		}
		if last < len(part) {
			spans = append(spans, span{last, len(part), invert})
		}
		for _, s := range join(spans) {
			if s.from == s.to {
				continue
			}
			if err := yield(part[s.from:s.to], start && s.from == 0); err != nil {
				return err
			}
		}
		return nil
	}, nil
}

// newPostProcessor is the ids that the file puts before and after a text.
func newPostProcessor(raw json.RawMessage, t *Tokenizer, depth int) (before, after []int32, err error) {
	p, err := readPart(raw, depth)
	if p == nil || err != nil {
		return nil, nil, err
	}
	switch p.Type {
	case "ByteLevel": // changes offsets only
		return nil, nil, nil
	case "Sequence":
		for i, raw := range p.Processors {
			b, a, err := newPostProcessor(raw, t, depth+1)
			if err != nil {
				return nil, nil, fmt.Errorf("processors[%d]: %w", i, err)
			}
			before, after = append(b, before...), append(after, a...)
		}
		return before, after, nil
	case "TemplateProcessing":
		places := 0
		for i, piece := range p.Single {
			switch {
			case piece.Sequence != nil && piece.Sequence.ID == "A":
				places++
			case piece.SpecialToken != nil:
				special, ok := p.SpecialTokens[piece.SpecialToken.ID]
				if !ok {
					return nil, nil, fmt.Errorf("single[%d]: %q is not among special_tokens", i, piece.SpecialToken.ID)
				}
				for _, id := range special.IDs {
					if id < 0 || id >= int64(len(t.tokens)) {
						return nil, nil, fmt.Errorf("special_tokens: %q has the id %d, but the vocabulary has ids 0 to %d", piece.SpecialToken.ID, id, len(t.tokens)-1)
					}
					if places == 0 {
						before = append(before, int32(id))
					} else {
						after = append(after, int32(id))
					}
				}
			default:
				return nil, nil, fmt.Errorf("single[%d] is neither a SpecialToken nor the Sequence A", i)
			}
		}
		if places != 1 {
			return nil, nil, fmt.Errorf("single has the text %d times, not once", places)
		}
		return before, after, nil
	case "BertProcessing", "RobertaProcessing":
		for _, end := range []struct {
			name string
			pair []json.RawMessage
			ids  *[]int32
		}{{"cls", p.Cls, &before}, {"sep", p.Sep, &after}} {
			var id int64
			if len(end.pair) != 2 || json.Unmarshal(end.pair[1], &id) != nil || id < 0 || id >= int64(len(t.tokens)) {
				return nil, nil, fmt.Errorf("%s: %s is no token and its id", p.Type, end.name)
			}
			*end.ids = []int32{int32(id)}
		}
		return before, after, nil
	}
	return nil, nil, unsupported(p.Type, "TemplateProcessing, ByteLevel, BertProcessing, RobertaProcessing, Sequence")
}
