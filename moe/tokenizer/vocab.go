package tokenizer

import (
	"fmt"
	"math"
)

// A Source gives metadata by key, as storage.Meta does: false if the key is
// absent or holds another kind of value, which Err then tells.
type Source interface {
	String(key string) (string, bool)
	Bool(key string) (bool, bool)
	Int(key string) (int64, bool)
	Strings(key string) ([]string, bool)
	Ints(key string) ([]int64, bool)
	Floats(key string) ([]float64, bool)
	Err() error
}

// ReadVocab collects what a model file says about its tokens.
func ReadVocab(s Source) (Vocab, error) {
	const prefix = "tokenizer.ggml."
	var v Vocab
	var err error
	v.Model, _ = s.String(prefix + "model")
	v.Pre, _ = s.String(prefix + "pre")
	v.Tokens, _ = s.Strings(prefix + "tokens")
	v.Merges, _ = s.Strings(prefix + "merges")
	if types, ok := s.Ints(prefix + "token_type"); ok {
		if v.Types, err = int32s(prefix+"token_type", types); err != nil {
			return Vocab{}, err
		}
	}
	if scores, ok := s.Floats(prefix + "scores"); ok {
		v.Scores = make([]float32, len(scores))
		for i, f := range scores {
			v.Scores[i] = float32(f)
		}
	}
	for _, k := range []struct {
		key string
		id  *int32
	}{
		{"bos_token_id", &v.BOS}, {"eos_token_id", &v.EOS}, {"eot_token_id", &v.EOT},
		{"eom_token_id", &v.EOM}, {"unknown_token_id", &v.UNK}, {"padding_token_id", &v.PAD},
	} {
		*k.id = -1
		if id, ok := s.Int(prefix + k.key); ok {
			ids, err := int32s(prefix+k.key, []int64{id})
			if err != nil {
				return Vocab{}, err
			}
			*k.id = ids[0]
		}
	}
	if ids, ok := s.Ints(prefix + "eos_token_ids"); ok {
		if v.EOSIDs, err = int32s(prefix+"eos_token_ids", ids); err != nil {
			return Vocab{}, err
		}
	}
	if b, ok := s.Bool(prefix + "add_bos_token"); ok {
		v.AddBOS = &b
	}
	if b, ok := s.Bool(prefix + "add_space_prefix"); ok {
		v.AddSpacePrefix = &b
	}
	if err := s.Err(); err != nil {
		return Vocab{}, fmt.Errorf("tokenizer: %w", err)
	}
	return v, nil
}

func int32s(key string, in []int64) ([]int32, error) {
	out := make([]int32, len(in))
	for i, n := range in {
		if n < math.MinInt32 || n > math.MaxInt32 {
			return nil, fmt.Errorf("tokenizer: %s has the entry %d, which is no id or type of a token", key, n)
		}
		out[i] = int32(n)
	}
	return out, nil
}
