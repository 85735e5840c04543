package tokenizer

import (
	"strings"
	"unicode/utf8"
)

// An encoder is the memory of one call of Encode.
type encoder struct {
	t     *Tokenizer
	syms  []symbol
	queue []bigram
	runes []rune
	piece []byte
	seen  map[string][]int32 // pieces met before: most of a text repeats
}

// Pieces are remembered within one call, within these bounds: words repeat,
// long pieces do not.
const (
	maxSeen    = 1 << 15
	maxSeenLen = 48
)

// A symbol is a stretch of the text that merges have made so far. Symbols form
// a list; a symbol that was merged into its left neighbour is no longer in it.
type symbol struct {
	prev, next int // -1 at the ends; next is gone if the symbol is
	start, end int // text[start:end]
	id         int32
}

const gone = -2

// A bigram is a possible merge of two neighbours. It is stale, and skipped, if
// one of them has changed since: left.next or right.end tells.
type bigram struct {
	cost        float64 // lower is earlier; a tie goes to the left
	left, right int
	end         int
	id          int32 // of the merged symbol
}

func (a *bigram) before(b *bigram) bool {
	return a.cost < b.cost || a.cost == b.cost && a.left < b.left
}

// plain appends the ids of text without special tokens. fresh: a special
// token or nothing is before it.
func (e *encoder) plain(ids []int32, text string, fresh bool) []int32 {
	if e.t.spm {
		return e.spm(ids, text, fresh)
	}
	e.runes = e.runes[:0]
	for _, r := range text { // a byte that is not UTF-8 gives U+FFFD
		e.runes = append(e.runes, r)
	}
	e.t.split.each(e.runes, func(piece []rune) {
		e.piece = e.piece[:0]
		for _, r := range piece {
			e.piece = utf8.AppendRune(e.piece, r)
		}
		ids = e.bpe(ids, e.piece)
	})
	return ids
}

// bpe appends the ids of one piece of a gpt2 vocabulary: bytes, merged by rank.
func (e *encoder) bpe(ids []int32, piece []byte) []int32 {
	t := e.t
	if len(piece) == 1 {
		return append(ids, t.bytes[piece[0]])
	}
	if id, ok := t.whole[string(piece)]; ok {
		return append(ids, id)
	}
	if known, ok := e.seen[string(piece)]; ok {
		return append(ids, known...)
	}
	e.syms = e.syms[:0]
	for i, b := range piece {
		e.syms = append(e.syms, symbol{start: i, end: i + 1, id: t.bytes[b]})
	}
	e.merge(func(a, b *symbol) (float64, int32, bool) {
		m, ok := t.merges[pairKey(a.id, b.id)]
		return float64(m.rank), m.id, ok
	})
	from := len(ids)
	for i := 0; i >= 0; i = e.syms[i].next {
		ids = append(ids, e.syms[i].id)
	}
	e.remember(ids[from:])
	return ids
}

// remember keeps the ids of e.piece for the next time that it comes.
func (e *encoder) remember(ids []int32) {
	if len(e.piece) <= maxSeenLen && len(e.seen) < maxSeen {
		if e.seen == nil {
			e.seen = make(map[string][]int32)
		}
		e.seen[string(e.piece)] = append([]int32(nil), ids...)
	}
}

// spm appends the ids of text in a llama vocabulary: characters, merged into
// whatever token scores best, and bytes for characters that are no token.
func (e *encoder) spm(ids []int32, text string, fresh bool) []int32 {
	t := e.t
	if fresh && t.prefix {
		text = " " + text
	}
	text = strings.ReplaceAll(text, " ", space)
	e.syms = e.syms[:0]
	for i := 0; i < len(text); {
		_, size := utf8.DecodeRuneInString(text[i:])
		e.syms = append(e.syms, symbol{start: i, end: i + size, id: t.textToken(text[i : i+size])})
		i += size
	}
	e.merge(func(a, b *symbol) (float64, int32, bool) {
		if b.end-a.start > t.maxLen {
			return 0, 0, false
		}
		id := t.textToken(text[a.start:b.end])
		if id < 0 {
			return 0, 0, false
		}
		return -float64(t.scores[id]), id, true
	})
	for i := 0; i >= 0; i = e.syms[i].next {
		s := &e.syms[i]
		if s.id >= 0 {
			ids = append(ids, s.id)
			continue
		}
		for _, b := range []byte(text[s.start:s.end]) {
			if t.bytes[b] < 0 {
				ids = append(ids, t.unk)
				break
			}
			ids = append(ids, t.bytes[b])
		}
	}
	return ids
}

// textToken is the token that plain text may become, or -1. Control, unknown
// and byte tokens are not text, though their names could be spelled.
func (t *Tokenizer) textToken(s string) int32 {
	id, ok := t.ids[s]
	if !ok || t.types[id] == Control || t.types[id] == Unknown || t.types[id] == Byte {
		return -1
	}
	return id
}

// merge links e.syms and merges neighbours, the cheapest pair of all first,
// until no pair has a merge. find gives the cost of a pair and what it becomes.
// Time is n log n in the number of symbols, however they repeat.
func (e *encoder) merge(find func(a, b *symbol) (cost float64, id int32, ok bool)) {
	e.queue = e.queue[:0]
	try := func(left, right int) {
		if left < 0 || right < 0 {
			return
		}
		if cost, id, ok := find(&e.syms[left], &e.syms[right]); ok {
			e.push(bigram{cost, left, right, e.syms[right].end, id})
		}
	}
	for i := range e.syms {
		e.syms[i].prev, e.syms[i].next = i-1, i+1
	}
	e.syms[len(e.syms)-1].next = -1
	for i := 1; i < len(e.syms); i++ {
		try(i-1, i)
	}
	for len(e.queue) > 0 {
		b := e.pop()
		left, right := &e.syms[b.left], &e.syms[b.right]
		if left.next != b.right || right.end != b.end {
			continue // stale
		}
		left.end, left.id, left.next = right.end, b.id, right.next
		right.next = gone
		if left.next >= 0 {
			e.syms[left.next].prev = b.left
		}
		try(left.prev, b.left)
		try(b.left, left.next)
	}
}

// push and pop keep e.queue a binary heap, the earliest bigram first.
func (e *encoder) push(b bigram) {
	q := append(e.queue, b)
	i := len(q) - 1
	for i > 0 {
		up := (i - 1) / 2
		if !q[i].before(&q[up]) {
			break
		}
		q[i], q[up] = q[up], q[i]
		i = up
	}
	e.queue = q
}

func (e *encoder) pop() bigram {
	q := e.queue
	first, n := q[0], len(q)-1
	q[0] = q[n]
	q = q[:n]
	for i := 0; ; {
		least := i
		for _, c := range [2]int{2*i + 1, 2*i + 2} {
			if c < n && q[c].before(&q[least]) {
				least = c
			}
		}
		if least == i {
			break
		}
		q[i], q[least] = q[least], q[i]
		i = least
	}
	e.queue = q
	return first
}
