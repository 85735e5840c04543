// Package tokenizer turns text into token ids and back, with the vocabulary of
// a model file: byte-level BPE ("gpt2" in GGUF), the score-driven BPE of
// SentencePiece ("llama"), and what a tokenizer.json of Hugging Face describes
// (NewHF). The ids are those of the reference implementations;
// RATIONALE.md says which of them decides where they differ.
package tokenizer

import (
	"fmt"
	"slices"
	"sort"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Token types of GGUF's tokenizer.ggml.token_type.
const (
	Normal      = 1 // text, made by merges
	Unknown     = 2 // stands for what cannot be written
	Control     = 3 // a mark of the model's format, not text
	UserDefined = 4 // text that is one token wherever it stands
	Unused      = 5 // padding of the vocabulary
	Byte        = 6 // one byte, written <0xXX>
)

// A Vocab is what a model file says about its tokens. The comments name the
// GGUF keys, without their prefix "tokenizer.ggml.".
type Vocab struct {
	Model  string    // model: "gpt2" or "llama"
	Pre    string    // pre: how gpt2 splits text before it merges; not used by llama
	Tokens []string  // tokens: the text of each id, all different unless empty
	Types  []int32   // token_type: as many as tokens; may be absent with gpt2
	Scores []float32 // scores: as many as tokens; llama only
	Merges []string  // merges: "left right", best first; gpt2 only

	// bos_token_id, eos_token_id, eot_token_id, eom_token_id,
	// unknown_token_id, padding_token_id: -1 if absent, not 0.
	BOS, EOS, EOT, EOM, UNK, PAD int32
	EOSIDs                       []int32 // eos_token_ids: further ends, where a file lists them

	AddBOS         *bool // add_bos_token; absent: gpt2 no, llama yes
	AddSpacePrefix *bool // add_space_prefix; absent: gpt2 no, llama yes
}

// A Tokenizer encodes and decodes with one vocabulary. It never changes, so
// any number of goroutines may use it.
type Tokenizer struct {
	tokens []string // text of each id, as the file writes it
	types  []int32
	pieces []string // bytes that each id stands for, control tokens as their text
	ids    map[string]int32
	bytes  [256]int32 // the token of a byte, -1 if none

	spm    bool
	prefix bool // llama: a space goes before text
	scores []float32
	maxLen int // llama: bytes of the longest token

	merges map[uint64]merge // gpt2: by left<<32 | right
	whole  map[string]int32 // gpt2: pieces that are taken whole, merges or not; nil if the family has no such rule
	split  splitter

	hf *pipeline // tokenizer.json; nil: GGUF

	marks  [256][]int32 // special tokens by their first byte, longest first
	hidden []bool       // ids that print only on request
	stops  []int32      // ascending

	bos, eos, unk int32
	addBOS        bool
}

type merge struct{ rank, id int32 }

// New checks a vocabulary and makes its tokenizer. An error names the key and
// the entry that is wrong.
func New(v Vocab) (*Tokenizer, error) {
	n := len(v.Tokens)
	if n == 0 {
		return nil, fmt.Errorf("tokenizer: tokenizer.ggml.tokens is empty or absent: the file has no vocabulary")
	}
	if v.Types != nil && len(v.Types) != n {
		return nil, fmt.Errorf("tokenizer: tokenizer.ggml.token_type has %d entries for %d tokens", len(v.Types), n)
	}
	if v.Scores != nil && len(v.Scores) != n {
		return nil, fmt.Errorf("tokenizer: tokenizer.ggml.scores has %d entries for %d tokens", len(v.Scores), n)
	}
	for _, s := range []struct {
		key string
		id  int32
	}{
		{"bos_token_id", v.BOS}, {"eos_token_id", v.EOS}, {"eot_token_id", v.EOT},
		{"eom_token_id", v.EOM}, {"unknown_token_id", v.UNK}, {"padding_token_id", v.PAD},
	} {
		if s.id < -1 || int(s.id) >= n {
			return nil, fmt.Errorf("tokenizer: tokenizer.ggml.%s is %d, but the vocabulary has ids 0 to %d", s.key, s.id, n-1)
		}
	}
	for i, id := range v.EOSIDs {
		if id < 0 || int(id) >= n {
			return nil, fmt.Errorf("tokenizer: tokenizer.ggml.eos_token_ids[%d] is %d, but the vocabulary has ids 0 to %d", i, id, n-1)
		}
	}

	t := &Tokenizer{
		tokens: v.Tokens,
		types:  slices.Clone(v.Types),
		ids:    make(map[string]int32, n),
		bos:    v.BOS, eos: v.EOS, unk: v.UNK,
	}
	for i, s := range v.Tokens {
		if s == "" {
			continue // a gap in the numbering: no text makes it
		}
		if first, ok := t.ids[s]; ok {
			return nil, fmt.Errorf("tokenizer: tokenizer.ggml.tokens: ids %d and %d are both %q", first, i, s)
		}
		t.ids[s] = int32(i)
	}
	if t.types == nil {
		t.types = make([]int32, n)
		for i, s := range v.Tokens {
			t.types[i] = Normal
			if endTexts[s] {
				t.types[i] = Control
			}
		}
	}
	for i, k := range t.types {
		if k < Normal || k > Byte {
			return nil, fmt.Errorf("tokenizer: tokenizer.ggml.token_type[%d] is %d: known are 1 (normal) to 6 (byte)", i, k)
		}
	}

	var err error
	switch v.Model {
	case "gpt2":
		err = t.initBPE(v)
	case "llama":
		err = t.initSPM(v)
	case "":
		err = fmt.Errorf("tokenizer: tokenizer.ggml.model is absent: supported are gpt2 and llama")
	default:
		err = fmt.Errorf("tokenizer: tokenizer.ggml.model %q is not supported: supported are gpt2 and llama", v.Model)
	}
	if err != nil {
		return nil, err
	}

	if v.AddBOS != nil {
		t.addBOS = *v.AddBOS
	} else {
		t.addBOS = t.spm && t.bos >= 0
	}
	if t.addBOS && t.bos < 0 {
		return nil, fmt.Errorf("tokenizer: tokenizer.ggml.add_bos_token is true, but tokenizer.ggml.bos_token_id is absent")
	}
	t.initMarks()
	t.initStops(v)
	return t, nil
}

// initBPE reads merges and bytes of a byte-level vocabulary.
func (t *Tokenizer) initBPE(v Vocab) error {
	rules, err := rulesOf(v.Pre)
	if err != nil {
		return err
	}
	if t.split, err = newSplitter(rules.stages); err != nil {
		return err
	}
	if len(v.Merges) == 0 {
		return fmt.Errorf("tokenizer: tokenizer.ggml.merges is empty or absent: a gpt2 vocabulary needs them")
	}
	for b := range 256 {
		id, ok := t.ids[string(byteRunes[b])]
		if !ok {
			return fmt.Errorf("tokenizer: tokenizer.ggml.tokens has no token %q for byte 0x%02X: a gpt2 vocabulary needs all 256", string(byteRunes[b]), b)
		}
		t.bytes[b] = id
	}
	t.merges = make(map[uint64]merge, len(v.Merges))
	for rank, m := range v.Merges {
		left, right, ok := strings.Cut(m, " ")
		if !ok || left == "" || right == "" || strings.Contains(right, " ") {
			return fmt.Errorf("tokenizer: tokenizer.ggml.merges[%d] is %q: want two texts and one space between them", rank, m)
		}
		var part [3]int32
		for i, s := range [3]string{left, right, left + right} {
			if part[i], ok = t.ids[s]; !ok {
				return fmt.Errorf("tokenizer: tokenizer.ggml.merges[%d] is %q, but %q is not a token", rank, m, s)
			}
		}
		key := pairKey(part[0], part[1])
		if _, twice := t.merges[key]; !twice {
			t.merges[key] = merge{int32(rank), part[2]}
		}
	}
	t.pieces = make([]string, len(t.tokens))
	for i, s := range t.tokens {
		switch t.types[i] {
		case Unused:
		case Normal, Byte:
			t.pieces[i] = unescapeBytes(s)
		default:
			t.pieces[i] = s
		}
	}
	if rules.whole {
		t.whole = make(map[string]int32, len(t.tokens))
		for i, p := range t.pieces {
			if t.types[i] == Normal && p != "" {
				t.whole[p] = int32(i)
			}
		}
	}
	return nil
}

// space is how a SentencePiece vocabulary writes U+0020.
const space = "\u2581"

// initSPM reads scores and bytes of a SentencePiece vocabulary.
func (t *Tokenizer) initSPM(v Vocab) error {
	t.spm = true
	if v.Scores == nil {
		return fmt.Errorf("tokenizer: tokenizer.ggml.scores is absent: a llama vocabulary needs them")
	}
	if v.Types == nil {
		return fmt.Errorf("tokenizer: tokenizer.ggml.token_type is absent: a llama vocabulary needs it")
	}
	for i, s := range v.Scores {
		if s != s {
			return fmt.Errorf("tokenizer: tokenizer.ggml.scores[%d] is not a number", i)
		}
	}
	t.scores = v.Scores
	t.prefix = v.AddSpacePrefix == nil || *v.AddSpacePrefix
	if id, ok := t.ids["<s>"]; ok && t.bos < 0 && t.types[id] == Control {
		t.bos = id
	}
	for b := range 256 {
		t.bytes[b] = -1
		if id, ok := t.ids[fmt.Sprintf("<0x%02X>", b)]; ok {
			t.bytes[b] = id
		} else if t.unk < 0 {
			return fmt.Errorf("tokenizer: tokenizer.ggml.tokens has no <0x%02X> and the file no unknown_token_id: some text could not be written", b)
		}
	}
	t.pieces = make([]string, len(t.tokens))
	for i, s := range t.tokens {
		switch t.types[i] {
		case Unused:
		case Normal:
			t.pieces[i] = strings.ReplaceAll(s, space, " ")
		case Byte:
			b, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimPrefix(s, "<0x"), ">"), 16, 8)
			if err != nil || len(s) != len("<0x00>") {
				return fmt.Errorf("tokenizer: tokenizer.ggml.tokens[%d] is %q: its type says byte, which is written <0xXX>", i, s)
			}
			t.pieces[i] = string([]byte{byte(b)})
		default:
			t.pieces[i] = s
		}
		t.maxLen = max(t.maxLen, len(s))
	}
	return nil
}

// Size is the number of tokens; ids are 0 to Size()-1.
func (t *Tokenizer) Size() int { return len(t.tokens) }

// Text is a token as the file writes it; "" if there is no such id.
func (t *Tokenizer) Text(id int32) string {
	if id < 0 || int(id) >= len(t.tokens) {
		return ""
	}
	return t.tokens[id]
}

// ID finds a token by its text as the file writes it.
func (t *Tokenizer) ID(text string) (id int32, ok bool) {
	id, ok = t.ids[text]
	return id, ok
}

// Piece is the bytes that a token stands for, often not whole UTF-8. Control
// and unknown tokens stand for nothing, or with special for their text. An
// unused token or an id outside the vocabulary gives nothing.
func (t *Tokenizer) Piece(id int32, special bool) []byte { return []byte(t.piece(id, special)) }

func (t *Tokenizer) piece(id int32, special bool) string {
	if id < 0 || int(id) >= len(t.pieces) || t.hidden[id] && !special {
		return ""
	}
	return t.pieces[id]
}

// BOS is the token that begins a text, -1 if the file names none, and whether
// the file wants it before every prompt.
func (t *Tokenizer) BOS() (id int32, add bool) { return t.bos, t.addBOS }

// EOS is the token that ends a text, -1 if the file names none. IsStop knows
// the others that end generation.
func (t *Tokenizer) EOS() int32 { return t.eos }

// EncodePrompt encodes a prompt with its special tokens, after BOS if the file
// wants it and the text does not begin with it. A tokenizer.json may want other
// tokens before and after a text.
func (t *Tokenizer) EncodePrompt(text string) ([]int32, error) {
	ids, err := t.Encode(text, true)
	switch {
	case err != nil:
		return nil, err
	case t.hf != nil:
		if n := len(t.hf.before); len(ids) < n || !slices.Equal(ids[:n], t.hf.before) {
			ids = slices.Concat(t.hf.before, ids)
		}
		ids = append(ids, t.hf.after...)
	case t.addBOS && (len(ids) == 0 || ids[0] != t.bos):
		ids = slices.Insert(ids, 0, t.bos)
	}
	return ids, nil
}

// EncodeChat encodes what a chat template made. As EncodePrompt for a GGUF file;
// beside a tokenizer.json a template writes BOS itself if it wants it.
func (t *Tokenizer) EncodeChat(text string) ([]int32, error) {
	if t.hf != nil {
		return t.Encode(text, true)
	}
	return t.EncodePrompt(text)
}

// Encode turns text into ids, without BOS. With special, the texts of control
// and unknown tokens become those tokens; without, they are plain text, so
// that a user's words cannot pose as the format. Texts of user-defined tokens
// are those tokens always. Where several could begin, the longest does.
//
// Bytes that are not UTF-8 count as U+FFFD, but are kept in a llama vocabulary.
// Only a tokenizer.json can give an error: its expressions may take too long.
func (t *Tokenizer) Encode(text string, special bool) ([]int32, error) {
	if t.hf != nil {
		ids, err := t.hf.encode(&encoder{t: t}, text, special)
		if err != nil {
			return nil, fmt.Errorf("tokenizer: tokenizer.json: %w", err)
		}
		return ids, nil
	}
	ids := make([]int32, 0, len(text)/3+1)
	e := encoder{t: t}
	start, fresh := 0, true // text[start:i] is plain; fresh: nothing or a special token is before it
	flush := func(end int) {
		if start < end {
			ids = e.plain(ids, text[start:end], fresh)
		}
	}
	for i := 0; i < len(text); {
		id := t.markAt(text[i:], special)
		if id < 0 {
			i++
			continue
		}
		flush(i)
		ids = append(ids, id)
		i += len(t.tokens[id])
		start, fresh = i, true
	}
	flush(len(text))
	return ids, nil
}

// initMarks sorts the special tokens for markAt.
func (t *Tokenizer) initMarks() {
	for id, s := range t.tokens {
		if k := t.types[id]; s != "" && (k == Control || k == UserDefined || k == Unknown) {
			t.marks[s[0]] = append(t.marks[s[0]], int32(id))
		}
	}
	for b := range t.marks {
		sort.SliceStable(t.marks[b], func(i, j int) bool {
			return len(t.tokens[t.marks[b][i]]) > len(t.tokens[t.marks[b][j]])
		})
	}
}

// markAt is the longest special token that text begins with, or -1.
func (t *Tokenizer) markAt(text string, special bool) int32 {
	for _, id := range t.marks[text[0]] {
		if (special || t.types[id] == UserDefined) && strings.HasPrefix(text, t.tokens[id]) {
			return id
		}
	}
	return -1
}

// byteRunes is how a gpt2 vocabulary writes each byte as a printable
// character: itself if it prints in Latin-1, else the next of U+0100 and up.
var byteRunes = func() (r [256]rune) {
	next := rune(256)
	for b := range r {
		if b > ' ' && b < 0x7F || b > 0xA0 && b != 0xAD {
			r[b] = rune(b)
		} else {
			r[b] = next
			next++
		}
	}
	return r
}()

var runeBytes = func() map[rune]byte {
	m := make(map[rune]byte, 256)
	for b, r := range byteRunes {
		m[r] = byte(b)
	}
	return m
}()

// unescapeBytes is the bytes of a token of a gpt2 vocabulary. A text that is
// not written in byteRunes stands for itself.
func unescapeBytes(s string) string {
	out := make([]byte, 0, len(s))
	for _, r := range s {
		b, ok := runeBytes[r]
		if !ok {
			return s
		}
		out = append(out, b)
	}
	return string(out)
}

func pairKey(left, right int32) uint64 { return uint64(uint32(left))<<32 | uint64(uint32(right)) }

// Decode is the text of ids: what Encode made them from, if they came from
// there. Bytes that are not UTF-8 become U+FFFD.
func (t *Tokenizer) Decode(ids []int32, special bool) string {
	var out strings.Builder
	d := t.NewDecoder(special)
	for _, id := range ids {
		out.WriteString(d.Add(id))
	}
	out.WriteString(d.Flush())
	s := out.String()
	if t.prefix && len(ids) > 0 && t.piece(ids[0], false) != "" {
		s = strings.TrimPrefix(s, " ")
	}
	if t.hf != nil {
		for i := 0; i < t.hf.stripMost && strings.HasPrefix(s, t.hf.strip); i++ {
			s = s[len(t.hf.strip):]
		}
	}
	return s
}

// A Decoder makes text of tokens that come one by one. It never gives out part
// of a UTF-8 sequence.
type Decoder struct {
	t       *Tokenizer
	special bool
	held    []byte // the beginning of a sequence
}

// NewDecoder starts a text; with special, control tokens are written too.
func (t *Tokenizer) NewDecoder(special bool) *Decoder {
	return &Decoder{t: t, special: special, held: make([]byte, 0, 64)}
}

// Add takes the next token and gives the text that is now certain, "" if none
// is. What can no longer become UTF-8 is given as U+FFFD.
func (d *Decoder) Add(id int32) string {
	p := d.t.piece(id, d.special)
	if len(d.held) == 0 && utf8.ValidString(p) {
		return p // no copy: the usual case
	}
	d.held = append(d.held, p...)
	text, n := validText(d.held, false)
	d.held = append(d.held[:0], d.held[n:]...)
	return text
}

// Flush ends the text: an unfinished sequence becomes one U+FFFD. The decoder
// is then ready for another text.
func (d *Decoder) Flush() string {
	text, _ := validText(d.held, true)
	d.held = d.held[:0]
	return text
}

// validText is b as UTF-8, and how many bytes of b it stands for. Each longest
// beginning of a sequence that cannot be finished becomes one U+FFFD (Unicode
// chapter 3, substitution of maximal subparts). An unfinished sequence at the
// end is left over, or with all counts as one that cannot be finished.
func validText(b []byte, all bool) (text string, n int) {
	out := make([]byte, 0, len(b)+utf8.UTFMax)
	for n < len(b) {
		r, size := utf8.DecodeRune(b[n:])
		if r == utf8.RuneError && size == 1 {
			if !all && !utf8.FullRune(b[n:]) {
				break
			}
			for n+size < len(b) && !utf8.FullRune(b[n:n+size+1]) {
				size++
			}
		}
		out = utf8.AppendRune(out, r)
		n += size
	}
	return string(out), n
}
