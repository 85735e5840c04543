package tokenizer

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strconv"
	"unicode/utf8"
)

// A tiktoken.model lists tokens only: their bytes in base64, and a rank, which
// is the id too. How a text is cut, and what the tokens after the last rank are,
// is said by a Python module of the model. One is known here, Kimi's
// (tokenization_kimi.py, the same for K2 and what follows it): its expression is
// the rule kimi-k2, its special tokens are reservedTokens in number.
const (
	kimiModule     = "tokenization_kimi."
	kimiClass      = "TikTokenTokenizer"
	kimiRule       = "kimi-k2"
	reservedTokens = 256
)

// initTiktoken makes everything but what tokenizer_config.json decides.
func (t *Tokenizer) initTiktoken(p *pipeline, text []byte, conf hfConfig) error {
	if !conf.kimi() {
		return fmt.Errorf("how a text is cut is not said in it, but in the Python module of the model, and tokenizer_config.json does not name the only one that is known here, tokenization_kimi: convert it to a tokenizer.json")
	}
	m, err := readRanks(text)
	if err != nil {
		return err
	}
	vocab := make(map[string]int32, len(m.ids))
	for s, id := range m.ids {
		vocab[string(escapeBytes(s))] = id
	}
	special := make([]hfAdded, reservedTokens)
	for i := range special {
		id := int64(len(m.ids) + i)
		special[i] = hfAdded{ID: id, Content: fmt.Sprintf("<|reserved_token_%d|>", id), Special: true, Normalized: new(bool)}
		if a, ok := conf.AddedByID[strconv.FormatInt(id, 10)]; ok { // those with other ids are not looked at
			special[i].Content, special[i].Special = a.Content, a.Special
		}
	}
	if err := t.number(vocab, special); err != nil {
		return err
	}
	if err := p.initAdded(special); err != nil {
		return err
	}
	rules, err := rulesOf(kimiRule)
	if err != nil {
		return err
	}
	cut, err := newSplitter(rules.stages)
	if err != nil {
		return err
	}
	p.pre = func(part []rune, start bool, yield func([]rune, bool) error) (err error) {
		cut.each(part, func(part []rune) {
			if err == nil {
				err = yield(part, start)
				start = false
			}
		})
		return err
	}
	p.model = m
	return t.initDecoder(p, json.RawMessage(`{"type":"ByteLevel"}`))
}

// kimi says whether the tokenizer is that of tokenization_kimi.py.
func (c hfConfig) kimi() bool {
	if len(c.AutoMap) > 0 && !bytes.Equal(c.AutoMap, []byte("null")) {
		return bytes.Contains(c.AutoMap, []byte(`"`+kimiModule+kimiClass+`"`)) || bytes.Contains(c.AutoMap, []byte(`--`+kimiModule+kimiClass+`"`)) // owner/name--module.class
	}
	return bytes.Equal(c.Class, []byte(`"`+kimiClass+`"`))
}

// rankBPE merges the bytes of a part: of all pairs of neighbours whose bytes
// together are a token the one of the lowest rank, the left one of equals.
type rankBPE struct {
	ids   map[string]int32 // by the bytes of a token: its rank
	bytes [256]int32
	most  int // bytes of the longest token
}

// readRanks reads the lines of a tiktoken.model. Ranks may be in any order.
func readRanks(text []byte) (*rankBPE, error) {
	if len(text) > maxHFBytes {
		return nil, fmt.Errorf("it has %d bytes, at most %d are read", len(text), maxHFBytes)
	}
	m := &rankBPE{ids: make(map[string]int32, bytes.Count(text, []byte("\n"))+1)}
	for no := 1; len(text) > 0; no++ {
		var line []byte
		line, text, _ = bytes.Cut(text, []byte("\n"))
		if line = bytes.TrimRight(line, "\r"); len(line) == 0 {
			continue
		}
		code, number, _ := bytes.Cut(line, []byte(" "))
		token, err := base64.StdEncoding.Strict().DecodeString(string(code))
		rank, err2 := strconv.ParseUint(string(number), 10, 64)
		switch {
		case err != nil || err2 != nil || len(token) == 0:
			return nil, fmt.Errorf("line %d is %q: want a token in base64, a space and its rank", no, line[:min(len(line), 60)])
		case rank >= maxHFTokens:
			return nil, fmt.Errorf("line %d has the rank %d, which must be from 0 to %d", no, rank, maxHFTokens-1)
		case len(token) > maxHFToken:
			return nil, fmt.Errorf("line %d has a token of %d bytes, at most %d are read", no, len(token), maxHFToken)
		}
		if first, twice := m.ids[string(token)]; twice {
			return nil, fmt.Errorf("line %d has the token %q, which has the rank %d already", no, token[:min(len(token), 60)], first)
		}
		m.ids[string(token)] = int32(rank)
		m.most = max(m.most, len(token))
	}
	if len(m.ids) == 0 {
		return nil, fmt.Errorf("it lists no tokens")
	}
	for b := range m.bytes {
		id, ok := m.ids[string([]byte{byte(b)})]
		if !ok {
			return nil, fmt.Errorf("it has no token for the byte 0x%02X: some text could not be written", b)
		}
		m.bytes[b] = id
	}
	return m, nil
}

func (m *rankBPE) encode(ids []int32, part []rune, e *encoder) []int32 {
	e.piece = e.piece[:0]
	for _, r := range part {
		e.piece = utf8.AppendRune(e.piece, r)
	}
	piece := e.piece
	if id, ok := m.ids[string(piece)]; ok {
		return append(ids, id)
	}
	if known, ok := e.seen[string(piece)]; ok {
		return append(ids, known...)
	}
	e.syms = e.syms[:0]
	for i, b := range piece {
		e.syms = append(e.syms, symbol{start: i, end: i + 1, id: m.bytes[b]})
	}
	e.merge(func(a, b *symbol) (float64, int32, bool) {
		if b.end-a.start > m.most {
			return 0, 0, false
		}
		id, ok := m.ids[string(piece[a.start:b.end])]
		return float64(id), id, ok
	})
	from := len(ids)
	for i := 0; i >= 0; i = e.syms[i].next {
		ids = append(ids, e.syms[i].id)
	}
	e.remember(ids[from:])
	return ids
}
