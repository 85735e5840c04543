package tokenizer

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// HF is what a Hugging Face model directory says about its tokens, each the
// bytes of the file of that name. Tokenizer is needed, or Tiktoken in its stead;
// the others may be nil.
type HF struct {
	Tokenizer        []byte // tokenizer.json: the tokens and how text becomes them
	Tiktoken         []byte // tiktoken.model: tokens and their ranks; not looked at beside a tokenizer.json
	TokenizerConfig  []byte // tokenizer_config.json: which tokens begin and end a text, further added tokens
	GenerationConfig []byte // generation_config.json: eos_token_id
	Config           []byte // config.json: eos_token_id
}

// Keys of the metadata of a Hugging Face model under which its files are found.
const (
	keyHFTokenizer        = "hf.tokenizer.json"
	keyHFTiktoken         = "hf.tiktoken.model"
	keyHFTokenizerConfig  = "hf.tokenizer_config.json"
	keyHFGenerationConfig = "hf.generation_config.json"
	keyHFConfig           = "hf.config.json"
)

// ReadHF collects the files of a Hugging Face model that speak of tokens; false
// if the metadata has neither tokenizer.json nor tiktoken.model.
func ReadHF(s Source) (HF, bool, error) {
	var h HF
	for _, f := range []struct {
		key  string
		text *[]byte
	}{
		{keyHFTokenizer, &h.Tokenizer}, {keyHFTiktoken, &h.Tiktoken}, {keyHFTokenizerConfig, &h.TokenizerConfig},
		{keyHFGenerationConfig, &h.GenerationConfig}, {keyHFConfig, &h.Config},
	} {
		if text, ok := s.String(f.key); ok {
			*f.text = []byte(text)
		}
	}
	if err := s.Err(); err != nil {
		return HF{}, false, fmt.Errorf("tokenizer: %w", err)
	}
	return h, h.Tokenizer != nil || h.Tiktoken != nil, nil
}

// Bounds of a tokenizer.json. Real files have up to 35 MB and 262,144 tokens.
const (
	maxHFBytes  = 512 << 20
	maxHFTokens = 1 << 24
	maxHFToken  = 1 << 16 // bytes of one token
	maxHFNest   = 16      // sequences in sequences
	maxHFIDs    = 1 << 16 // ids more than there are tokens: gaps in the numbering
)

// hfFile is tokenizer.json, or what is read of it. Truncation and padding are
// for batches and not read.
type hfFile struct {
	AddedTokens   []hfAdded       `json:"added_tokens"`
	Normalizer    json.RawMessage `json:"normalizer"`
	PreTokenizer  json.RawMessage `json:"pre_tokenizer"`
	PostProcessor json.RawMessage `json:"post_processor"`
	Decoder       json.RawMessage `json:"decoder"`
	Model         struct {
		Type          string          `json:"type"`
		Vocab         json.RawMessage `json:"vocab"`
		Merges        hfMerges        `json:"merges"`
		UnkToken      *string         `json:"unk_token"`
		UnkID         *int64          `json:"unk_id"`
		Dropout       *float64        `json:"dropout"`
		Prefix        *string         `json:"continuing_subword_prefix"`
		Suffix        *string         `json:"end_of_word_suffix"`
		FuseUnk       bool            `json:"fuse_unk"`
		ByteFallback  bool            `json:"byte_fallback"`
		IgnoreMerges  bool            `json:"ignore_merges"`
		CharsPerWord  *int64          `json:"max_input_chars_per_word"` // WordPiece has it, and old files no type
		LegacyUnigram json.RawMessage `json:"precompiled_charsmap"`
	} `json:"model"`
}

// hfAdded is a token that is found in the text before the model sees it.
type hfAdded struct {
	ID         int64  `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"` // not inside a word
	LStrip     bool   `json:"lstrip"`      // takes the white space before it along
	RStrip     bool   `json:"rstrip"`      // and after it
	Normalized *bool  `json:"normalized"`  // found in normalized text; absent: yes, unless special
	Special    bool   `json:"special"`     // a mark of the format
}

func (a *hfAdded) normalized() bool {
	if a.Normalized != nil {
		return *a.Normalized
	}
	return !a.Special
}

// hfMerges are pairs, which newer files write as two texts and older ones as
// one text with a space in it.
type hfMerges [][2]string

// UnmarshalJSON reads either way of writing.
func (m *hfMerges) UnmarshalJSON(b []byte) error {
	inside, isList := bytes.CutPrefix(b, []byte("["))
	if inside = bytes.TrimLeft(inside, " \t\r\n"); !isList || inside[0] != '[' {
		var lines []string
		if err := json.Unmarshal(b, &lines); err != nil {
			return fmt.Errorf("model.merges: want texts or pairs of texts: %w", err)
		}
		*m = make(hfMerges, len(lines))
		for i, s := range lines {
			left, right, ok := strings.Cut(s, " ")
			if !ok || strings.Contains(right, " ") {
				return fmt.Errorf("model.merges[%d] is %q: want two texts and one space between them", i, s)
			}
			(*m)[i] = [2]string{left, right}
		}
		return nil
	}
	var pairs [][]string
	if err := json.Unmarshal(b, &pairs); err != nil {
		return fmt.Errorf("model.merges: want texts or pairs of texts: %w", err)
	}
	*m = make(hfMerges, len(pairs))
	for i, p := range pairs {
		if len(p) != 2 {
			return fmt.Errorf("model.merges[%d] has %d texts, not two", i, len(p))
		}
		(*m)[i] = [2]string{p[0], p[1]}
	}
	return nil
}

// NewHF makes the tokenizer of a Hugging Face model. Its ids are those of the
// library that the file was written by; a part that is not known here is an
// error that names it.
func NewHF(h HF) (*Tokenizer, error) {
	t, err := newHF(h)
	if err != nil {
		return nil, fmt.Errorf("tokenizer: %w", err)
	}
	return t, nil
}

func newHF(h HF) (*Tokenizer, error) {
	if len(h.Tokenizer) > maxHFBytes {
		return nil, fmt.Errorf("tokenizer.json has %d bytes, at most %d are read", len(h.Tokenizer), maxHFBytes)
	}
	conf, err := readHFConfig(h)
	if err != nil {
		return nil, err
	}
	p := new(pipeline)
	t := &Tokenizer{hf: p, bos: -1, eos: -1, unk: -1}
	if h.Tokenizer == nil && h.Tiktoken != nil {
		if err := t.initTiktoken(p, h.Tiktoken, conf); err != nil {
			return nil, fmt.Errorf("tiktoken.model: %w", err)
		}
	} else {
		var f hfFile
		if err := json.Unmarshal(h.Tokenizer, &f); err != nil {
			return nil, fmt.Errorf("tokenizer.json: %w", err)
		}
		if err := t.initHF(p, &f, conf); err != nil {
			return nil, fmt.Errorf("tokenizer.json: %w", err)
		}
	}
	if t.bos, err = t.named(conf.BOS, "bos_token"); err != nil {
		return nil, err
	}
	if t.eos, err = t.named(conf.EOS, "eos_token"); err != nil {
		return nil, err
	}
	if err := t.initEnds(p, conf); err != nil {
		return nil, err
	}
	return t, nil
}

// initHF makes everything but what tokenizer_config.json decides.
func (t *Tokenizer) initHF(p *pipeline, f *hfFile, conf hfConfig) error {
	var err error
	if p.normalize, err = newNormalizer(f.Normalizer, 0); err != nil {
		return fmt.Errorf("normalizer: %w", err)
	}
	var bytesAsText bool
	if p.pre, bytesAsText, err = newPreTokenizer(f.PreTokenizer, 0); err != nil {
		return fmt.Errorf("pre_tokenizer: %w", err)
	}
	vocab, scores, err := readHFVocab(f)
	if err != nil {
		return fmt.Errorf("model: %w", err)
	}
	added := append(slices.Clone(f.AddedTokens), conf.added(f.AddedTokens)...)
	if err := t.number(vocab, added); err != nil {
		return err
	}
	bytesAsText = bytesAsText || p.normalize != nil && mapsBytes(f.Normalizer)
	if err := t.initModel(p, f, vocab, scores, bytesAsText); err != nil {
		return fmt.Errorf("model: %w", err)
	}
	if err := p.initAdded(added); err != nil {
		return err
	}
	if err := t.initDecoder(p, f.Decoder); err != nil {
		return fmt.Errorf("decoder: %w", err)
	}
	if p.before, p.after, err = newPostProcessor(f.PostProcessor, t, 0); err != nil {
		return fmt.Errorf("post_processor: %w", err)
	}
	return nil
}

// readHFVocab reads the model's own tokens; scores by id for Unigram.
func readHFVocab(f *hfFile) (vocab map[string]int32, scores []float64, err error) {
	kind := f.Model.Type
	switch {
	case kind == "" && f.Model.Merges != nil:
		kind = "BPE" // as old files leave it out
	case kind == "" && f.Model.UnkID != nil:
		kind = "Unigram"
	case kind == "" && f.Model.CharsPerWord != nil:
		kind = "WordPiece"
	}
	f.Model.Type = kind
	switch kind {
	case "BPE":
		var all map[string]int64
		if err := json.Unmarshal(f.Model.Vocab, &all); err != nil {
			return nil, nil, fmt.Errorf("vocab: want an object of texts and ids: %w", err)
		}
		vocab = make(map[string]int32, len(all))
		for s, id := range all {
			if id < 0 || id >= maxHFTokens {
				return nil, nil, fmt.Errorf("vocab: %q has the id %d, which must be from 0 to %d", s, id, maxHFTokens-1)
			}
			vocab[s] = int32(id)
		}
	case "Unigram":
		var all []hfPiece
		if err := json.Unmarshal(f.Model.Vocab, &all); err != nil {
			return nil, nil, fmt.Errorf("vocab: want pairs of a text and its score: %w", err)
		}
		if len(all) > maxHFTokens {
			return nil, nil, fmt.Errorf("vocab has %d tokens, at most %d are read", len(all), maxHFTokens)
		}
		vocab, scores = make(map[string]int32, len(all)), make([]float64, len(all))
		for id, piece := range all {
			if first, ok := vocab[piece.text]; ok {
				return nil, nil, fmt.Errorf("vocab: ids %d and %d are both %q", first, id, piece.text)
			}
			vocab[piece.text], scores[id] = int32(id), piece.score
		}
	case "":
		return nil, nil, fmt.Errorf("type is absent: supported are BPE and Unigram")
	default:
		return nil, nil, fmt.Errorf("type %q is not supported: supported are BPE and Unigram", kind)
	}
	if len(vocab) == 0 {
		return nil, nil, fmt.Errorf("vocab is empty or absent")
	}
	return vocab, scores, nil
}

// hfPiece is one token of a Unigram vocabulary: [text, score].
type hfPiece struct {
	text  string
	score float64
}

// UnmarshalJSON reads the pair.
func (p *hfPiece) UnmarshalJSON(b []byte) error {
	var pair []json.RawMessage
	if err := json.Unmarshal(b, &pair); err != nil {
		return err
	}
	if len(pair) != 2 {
		return fmt.Errorf("an entry of %d values, not a text and a score", len(pair))
	}
	if err := json.Unmarshal(pair[0], &p.text); err != nil {
		return err
	}
	return json.Unmarshal(pair[1], &p.score)
}

// number lays out the tokens by id: the model's and those added.
func (t *Tokenizer) number(vocab map[string]int32, added []hfAdded) error {
	size, count := 0, len(vocab)+len(added)
	for _, id := range vocab {
		size = max(size, int(id)+1)
	}
	for _, a := range added {
		if a.ID < 0 || a.ID >= maxHFTokens {
			return fmt.Errorf("added_tokens: %q has the id %d, which must be from 0 to %d", a.Content, a.ID, maxHFTokens-1)
		}
		size = max(size, int(a.ID)+1)
	}
	if size > 2*count+maxHFIDs {
		return fmt.Errorf("ids go up to %d, but there are only %d tokens", size-1, count)
	}
	t.tokens, t.types, t.ids = make([]string, size), make([]int32, size), make(map[string]int32, count)
	for id := range t.types {
		t.types[id] = Unused // a gap in the numbering, until a token is there
	}
	put := func(where, s string, id, kind int32) error {
		if len(s) > maxHFToken {
			return fmt.Errorf("%s: token %d has a text of %d bytes, at most %d are read", where, id, len(s), maxHFToken)
		}
		if t.types[id] != Unused && t.tokens[id] != s {
			return fmt.Errorf("%s: id %d is both %q and %q", where, id, t.tokens[id], s)
		}
		if first, ok := t.ids[s]; ok && first != id {
			return fmt.Errorf("%s: %q has the ids %d and %d", where, s, first, id)
		}
		t.tokens[id], t.types[id], t.ids[s] = s, kind, id
		return nil
	}
	for s, id := range vocab {
		if err := put("model.vocab", s, id, Normal); err != nil {
			return err
		}
	}
	for _, a := range added {
		if a.Content == "" {
			return fmt.Errorf("added_tokens: the token with id %d has no text", a.ID)
		}
		kind := int32(UserDefined)
		if a.Special {
			kind = Control
		}
		if err := put("added_tokens", a.Content, int32(a.ID), kind); err != nil {
			return err
		}
	}
	return nil
}

// hfConfig is what tokenizer_config.json, config.json and generation_config.json
// say of tokens.
type hfConfig struct {
	BOS        hfText             `json:"bos_token"`
	EOS        hfText             `json:"eos_token"`
	AddBOS     *bool              `json:"add_bos_token"`
	AddEOS     *bool              `json:"add_eos_token"`
	AddedByID  map[string]hfAdded `json:"added_tokens_decoder"`
	AutoMap    json.RawMessage    `json:"auto_map"`        // modules that make the tokenizer,
	Class      json.RawMessage    `json:"tokenizer_class"` // and the class; both for tiktoken.model only
	eosIDs     []int64            // of config.json and generation_config.json
	eosSources []string           // the file of each
}

// added lists the tokens of tokenizer_config.json that tokenizer.json lacks, by
// id, as the library adds them.
func (c hfConfig) added(known []hfAdded) []hfAdded {
	have := make(map[string]bool, len(known))
	for _, a := range known {
		have[a.Content] = true
	}
	var list []hfAdded
	for _, a := range c.AddedByID {
		if !have[a.Content] {
			list = append(list, a)
		}
	}
	slices.SortFunc(list, func(a, b hfAdded) int { return int(a.ID - b.ID) })
	return list
}

// hfText is a token's text, written as it is or as an object with content.
type hfText string

// UnmarshalJSON reads either, and null as none.
func (s *hfText) UnmarshalJSON(b []byte) error {
	var text *string
	if json.Unmarshal(b, &text) == nil {
		if text != nil {
			*s = hfText(*text)
		}
		return nil
	}
	var object struct {
		Content string `json:"content"`
	}
	if err := json.Unmarshal(b, &object); err != nil {
		return err
	}
	*s = hfText(object.Content)
	return nil
}

// hfIDs is an id, a list of them, or null.
type hfIDs []int64

// UnmarshalJSON reads each.
func (ids *hfIDs) UnmarshalJSON(b []byte) error {
	if bytes.Equal(b, []byte("null")) {
		return nil
	}
	var one int64
	if json.Unmarshal(b, &one) == nil {
		*ids = hfIDs{one}
		return nil
	}
	return json.Unmarshal(b, (*[]int64)(ids))
}

func readHFConfig(h HF) (hfConfig, error) {
	var c hfConfig
	if h.TokenizerConfig != nil {
		if err := json.Unmarshal(h.TokenizerConfig, &c); err != nil {
			return c, fmt.Errorf("tokenizer_config.json: %w", err)
		}
	}
	for key, a := range c.AddedByID {
		id, err := strconv.ParseInt(key, 10, 64)
		if err != nil {
			return c, fmt.Errorf("tokenizer_config.json: added_tokens_decoder has the key %q, which is no id", key)
		}
		a.ID = id
		c.AddedByID[key] = a
	}
	for _, f := range []struct {
		name string
		text []byte
	}{{"config.json", h.Config}, {"generation_config.json", h.GenerationConfig}} {
		if f.text == nil {
			continue
		}
		var ends struct {
			EOS  hfIDs `json:"eos_token_id"`
			Text struct {
				EOS hfIDs `json:"eos_token_id"`
			} `json:"text_config"` // of models that also see
		}
		if err := json.Unmarshal(f.text, &ends); err != nil {
			return c, fmt.Errorf("%s: %w", f.name, err)
		}
		for _, id := range append(ends.EOS, ends.Text.EOS...) {
			c.eosIDs = append(c.eosIDs, id)
			c.eosSources = append(c.eosSources, f.name)
		}
	}
	return c, nil
}

// named finds a token that tokenizer_config.json names, -1 if it names none.
func (t *Tokenizer) named(s hfText, key string) (int32, error) {
	if s == "" {
		return -1, nil
	}
	id, ok := t.ids[string(s)]
	if !ok {
		return -1, fmt.Errorf("tokenizer_config.json: %s is %q, which is no token of the vocabulary", key, string(s))
	}
	return id, nil
}

// initEnds decides what goes before and after a text, and what ends one.
func (t *Tokenizer) initEnds(p *pipeline, c hfConfig) error {
	for _, end := range []struct {
		key, token string
		add        *bool
		id         int32
		ids        *[]int32
	}{{"add_bos_token", "bos_token", c.AddBOS, t.bos, &p.before}, {"add_eos_token", "eos_token", c.AddEOS, t.eos, &p.after}} {
		switch {
		case end.add == nil:
		case !*end.add:
			*end.ids = slices.DeleteFunc(*end.ids, func(id int32) bool { return id == end.id })
		case end.id < 0:
			return fmt.Errorf("tokenizer_config.json: %s is true, but %s is absent", end.key, end.token)
		case !slices.Contains(*end.ids, end.id):
			*end.ids = append(*end.ids, end.id)
		}
	}
	if len(p.before) > 0 {
		t.addBOS = true
		if t.bos < 0 {
			t.bos = p.before[0]
		}
	}

	v := Vocab{EOS: -1, EOT: -1, EOM: -1}
	for i, id := range c.eosIDs {
		if id < 0 || id >= int64(len(t.tokens)) {
			return fmt.Errorf("%s: eos_token_id has the id %d, but the vocabulary has ids 0 to %d", c.eosSources[i], id, len(t.tokens)-1)
		}
		v.EOSIDs = append(v.EOSIDs, int32(id))
	}
	if len(v.EOSIDs) == 0 {
		v.EOS = t.eos
	}
	t.initStops(v)
	if len(v.EOSIDs) > 0 { // what the files name, and no habits of families
		slices.Sort(v.EOSIDs)
		t.stops = slices.Compact(v.EOSIDs)
		if t.eos < 0 {
			t.eos = t.stops[0]
		}
	}
	return nil
}
