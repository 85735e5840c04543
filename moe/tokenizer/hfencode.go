package tokenizer

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// A pipeline is a tokenizer.json at work: added tokens are cut out of the text,
// what lies between them is normalized and cut into parts, and the model makes
// tokens of each part.
type pipeline struct {
	raw, normal *prefixes       // added tokens found before normalization, and after; nil: none
	added       map[int32]added // by id
	normalize   normalizer      // nil: as it is
	pre         preTokenizer    // nil: one part
	model       interface {
		encode(ids []int32, part []rune, e *encoder) []int32
	}
	before, after []int32 // ids around a text

	strip     string // decoding: leaves this out at the start of a text,
	stripMost int    // so many times at most
}

// added is how an added token is found.
type added struct{ special, single, left, right bool }

// initAdded sorts the added tokens by when they are looked for.
func (p *pipeline) initAdded(list []hfAdded) error {
	raw, normal := map[string]int32{}, map[string]int32{}
	p.added = make(map[int32]added, len(list))
	for _, a := range list {
		id := int32(a.ID)
		p.added[id] = added{a.Special, a.SingleWord, a.LStrip, a.RStrip}
		if !a.normalized() {
			raw[a.Content] = id
			continue
		}
		s := a.Content
		if p.normalize != nil {
			var err error
			if s, err = p.normalize(s); err != nil {
				return fmt.Errorf("added_tokens: %q: %w", a.Content, err)
			}
		}
		if s != "" {
			normal[s] = id
		}
	}
	if len(raw) > 0 {
		p.raw = newPrefixes(raw)
	}
	if len(normal) > 0 {
		p.normal = newPrefixes(normal)
	}
	return nil
}

// encode appends the ids of text. An error means that an expression of the file
// takes too long on it.
func (p *pipeline) encode(e *encoder, text string, special bool) (ids []int32, err error) {
	ids = make([]int32, 0, len(text)/3+1)
	if !utf8.ValidString(text) {
		text = string([]rune(text)) // each bad byte becomes U+FFFD
	}
	p.cut(p.raw, text, special, func(part string, start bool, id int32) {
		switch {
		case err != nil:
		case id >= 0:
			ids = append(ids, id)
		default:
			if p.normalize != nil {
				if part, err = p.normalize(part); err != nil {
					return
				}
			}
			p.cut(p.normal, part, special, func(part string, first bool, id int32) {
				switch {
				case err != nil:
				case id >= 0:
					ids = append(ids, id)
				default:
					ids, err = p.plain(e, ids, part, start && first)
				}
			})
		}
	})
	return ids, err
}

// plain appends the ids of normalized text without added tokens.
func (p *pipeline) plain(e *encoder, ids []int32, text string, start bool) ([]int32, error) {
	part := []rune(text)
	if len(part) == 0 {
		return ids, nil
	}
	if p.pre == nil {
		return p.model.encode(ids, part, e), nil
	}
	err := p.pre(part, start, func(part []rune, _ bool) error {
		if len(part) > 0 {
			ids = p.model.encode(ids, part, e)
		}
		return nil
	})
	return ids, err
}

// cut calls yield for the added tokens of list in text and for what lies between
// them, which has no id; start says that nothing is before it. At each place the
// longest token counts. Without special, marks of the format are plain text.
func (p *pipeline) cut(list *prefixes, text string, special bool, yield func(part string, start bool, id int32)) {
	from := 0 // text[:from] is done
	if list != nil {
		for i := 0; i < len(text); {
			id, end := int32(-1), 0
			list.each(text[i:], func(found int32, n int) {
				if special || !p.added[found].special {
					id, end = found, i+n
				}
			})
			if id < 0 {
				i++
				continue
			}
			a, begin := p.added[id], i
			i = end
			if a.single && (endsWord(text[:begin]) || beginsWord(text[end:])) {
				continue
			}
			if a.left {
				begin = max(from, len(strings.TrimRightFunc(text[:begin], unicode.IsSpace)))
			}
			if a.right {
				end = len(text) - len(strings.TrimLeftFunc(text[end:], unicode.IsSpace))
				i = end
			}
			if from < begin {
				yield(text[from:begin], from == 0, -1)
			}
			yield("", false, id)
			from = end
		}
	}
	if from < len(text) {
		yield(text[from:], from == 0, -1)
	}
}

func endsWord(s string) bool {
	r, n := utf8.DecodeLastRuneInString(s)
	return n > 0 && isWordRune(r)
}

func beginsWord(s string) bool {
	r, n := utf8.DecodeRuneInString(s)
	return n > 0 && isWordRune(r)
}

// isWordRune says whether \w of Rust's regular expressions has the character.
func isWordRune(r rune) bool {
	return unicode.IsLetter(r) || unicode.In(r, unicode.M, unicode.Nd, unicode.Nl, unicode.Pc, unicode.Other_Alphabetic, unicode.Join_Control)
}

// initModel makes the model of the file's vocabulary.
func (t *Tokenizer) initModel(p *pipeline, f *hfFile, vocab map[string]int32, scores []float64, bytesAsText bool) error {
	m := &f.Model
	fallback, complete := [256]int32{}, true
	for b := range fallback {
		id, ok := vocab[fmt.Sprintf("<0x%02X>", b)]
		if !ok || !m.ByteFallback {
			id, complete = -1, false
		}
		fallback[b] = id
	}
	// Control tokens are never made of text, even if the text spells them.
	text := make(map[string]int32, len(vocab))
	for s, id := range vocab {
		if t.types[id] != Control && s != "" {
			text[s] = id
		}
	}
	if m.Type == "Unigram" {
		if m.UnkID != nil {
			if *m.UnkID < 0 || *m.UnkID >= int64(len(scores)) {
				return fmt.Errorf("unk_id is %d, but the vocabulary has ids 0 to %d", *m.UnkID, len(scores)-1)
			}
			t.unk = int32(*m.UnkID)
		}
		if t.unk < 0 && !complete {
			return fmt.Errorf("neither unk_id nor all 256 byte tokens: some text could not be written")
		}
		u := &unigram{texts: text, prefixes: newPrefixes(text), scores: scores, bytes: fallback, fallback: complete, unk: t.unk, unkScore: scores[0]}
		for id, s := range scores {
			if s != s || s > 1e9 || s < -1e9 {
				return fmt.Errorf("vocab: the score of token %d is %v, which is no logarithm", id, s)
			}
			u.unkScore = min(u.unkScore, s)
		}
		u.unkScore -= unknownPenalty
		p.model = u
		return nil
	}

	switch {
	case m.Prefix != nil && *m.Prefix != "":
		return fmt.Errorf("continuing_subword_prefix %q is not supported", *m.Prefix)
	case m.Suffix != nil && *m.Suffix != "":
		return fmt.Errorf("end_of_word_suffix %q is not supported", *m.Suffix)
	case m.Dropout != nil && *m.Dropout != 0:
		return fmt.Errorf("dropout %v is not supported: the ids of a text would be random", *m.Dropout)
	}
	b := &charBPE{chars: make(map[rune]int32), merges: make(map[uint64]merge, len(m.Merges)), bytes: fallback, fallback: complete, unk: -1, fuse: m.FuseUnk}
	if m.UnkToken != nil && *m.UnkToken != "" {
		id, ok := vocab[*m.UnkToken]
		if !ok {
			return fmt.Errorf("unk_token %q is not in vocab", *m.UnkToken)
		}
		b.unk, t.unk = id, id
	}
	for s, id := range text {
		if r, n := utf8.DecodeRuneInString(s); n == len(s) {
			b.chars[r] = id
		}
	}
	for i := range b.low {
		b.low[i] = -1
		if id, ok := b.chars[rune(i)]; ok {
			b.low[i] = id
		}
	}
	if b.unk < 0 && !complete {
		if !bytesAsText {
			return fmt.Errorf("neither unk_token nor byte_fallback with all 256 byte tokens: some text could not be written")
		}
		for c, r := range byteRunes {
			neverInUTF8 := c == 0xC0 || c == 0xC1 || c >= 0xF5
			if _, ok := b.chars[r]; !ok && !neverInUTF8 {
				return fmt.Errorf("vocab has no token %q for byte 0x%02X: some text could not be written", string(r), c)
			}
		}
	}
	for rank, pair := range m.Merges {
		var part [3]int32
		for i, s := range [3]string{pair[0], pair[1], pair[0] + pair[1]} {
			var ok bool
			if part[i], ok = vocab[s]; !ok {
				return fmt.Errorf("merges[%d] is %q and %q, but %q is not in vocab", rank, pair[0], pair[1], s)
			}
		}
		key := pairKey(part[0], part[1])
		if _, twice := b.merges[key]; !twice && t.types[part[2]] != Control {
			b.merges[key] = merge{int32(rank), part[2]}
		}
	}
	if m.IgnoreMerges {
		b.whole = text
	}
	p.model = b
	return nil
}

// charBPE merges the characters of a part by rank.
type charBPE struct {
	low      [0x180]int32     // ids of characters, -1 if none: those that bytes are written as
	chars    map[rune]int32   // and of all
	merges   map[uint64]merge // by left<<32 | right
	whole    map[string]int32 // parts that are taken whole; nil: none
	bytes    [256]int32
	fallback bool // characters without a token become bytes
	unk      int32
	fuse     bool // neighbours without a token become one unknown token
}

func (b *charBPE) encode(ids []int32, part []rune, e *encoder) []int32 {
	e.piece = e.piece[:0]
	for _, r := range part {
		e.piece = utf8.AppendRune(e.piece, r)
	}
	if id, ok := b.whole[string(e.piece)]; ok {
		return append(ids, id)
	}
	if known, ok := e.seen[string(e.piece)]; ok {
		return append(ids, known...)
	}
	e.syms = e.syms[:0]
	add := func(id int32) {
		n := len(e.syms)
		e.syms = append(e.syms, symbol{start: n, end: n + 1, id: id})
	}
	unknown := false // the last symbol is
	for _, r := range part {
		id := int32(-1)
		if int(r) < len(b.low) {
			id = b.low[r]
		} else if known, ok := b.chars[r]; ok {
			id = known
		}
		if id < 0 && b.fallback {
			for _, c := range utf8.AppendRune(nil, r) {
				add(b.bytes[c])
			}
		} else if id >= 0 {
			add(id)
		} else if b.unk >= 0 && !(unknown && b.fuse) {
			add(b.unk)
		}
		unknown = id < 0 && !b.fallback
	}
	from := len(ids)
	if len(e.syms) > 0 {
		e.merge(func(left, right *symbol) (float64, int32, bool) {
			m, ok := b.merges[pairKey(left.id, right.id)]
			return float64(m.rank), m.id, ok
		})
		for i := 0; i >= 0; i = e.syms[i].next {
			ids = append(ids, e.syms[i].id)
		}
	}
	e.remember(ids[from:])
	return ids
}

// unknownPenalty is how much less likely than the least likely token an unknown
// character is, in SentencePiece.
const unknownPenalty = 10

// unigram cuts a part into the tokens whose scores have the highest sum.
type unigram struct {
	texts    map[string]int32
	prefixes *prefixes
	scores   []float64
	bytes    [256]int32
	fallback bool
	unk      int32
	unkScore float64
}

// A step is the best way to cut a part up to some byte.
type step struct {
	score float64
	from  int // where its last token begins; -1: no way found yet
	id    int32
}

func (u *unigram) encode(ids []int32, part []rune, e *encoder) []int32 {
	text := string(part)
	e.piece = append(e.piece[:0], text...)
	if known, ok := e.seen[text]; ok {
		return append(ids, known...)
	}
	best := make([]step, len(text)+1)
	for i := range best {
		best[i].from = -1
	}
	best[0].from = 0
	try := func(from, to int, score float64, id int32) {
		if s := score + best[from].score; best[to].from < 0 || s > best[to].score {
			best[to] = step{s, from, id}
		}
	}
	for i, r := range text {
		size, single := utf8.RuneLen(r), false
		u.prefixes.each(text[i:], func(id int32, n int) {
			single = single || n == size
			if i+n == len(text) || utf8.RuneStart(text[i+n]) {
				try(i, i+n, u.scores[id], id)
			}
		})
		if !single {
			try(i, i+size, u.unkScore, -1)
		}
	}
	var cuts []int // backwards: where tokens begin
	for to := len(text); to > 0; to = best[to].from {
		cuts = append(cuts, to)
	}
	from := len(ids)
	start := 0
	for n := len(cuts) - 1; n >= 0; n-- {
		to := cuts[n]
		if id := best[to].id; id >= 0 && id != u.unk {
			ids = append(ids, id)
			start = to
			continue
		}
		for n > 0 && (best[cuts[n-1]].id < 0 || best[cuts[n-1]].id == u.unk) { // unknown neighbours are one
			n--
			to = cuts[n]
		}
		ids = u.unknown(ids, text[start:to])
		start = to
	}
	e.remember(ids[from:])
	return ids
}

// unknown appends what stands for text that no token makes.
func (u *unigram) unknown(ids []int32, text string) []int32 {
	if id, ok := u.texts[text]; ok {
		return append(ids, id)
	}
	if !u.fallback {
		return append(ids, u.unk)
	}
	for i := range len(text) {
		ids = append(ids, u.bytes[text[i]])
	}
	return ids
}
