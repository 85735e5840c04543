package storage

import "errors"

func openGGUF(path string) (*Model, error) { return nil, errors.New("not yet") }

type kind struct{ typ, elem uint32 }

// kinds are the value types of GGUF metadata by number; size 0 means that it varies.
var kinds = [13]struct {
	name string
	size int64
}{
	0: {"uint8", 1}, 1: {"int8", 1}, 2: {"uint16", 2}, 3: {"int16", 2}, 4: {"uint32", 4}, 5: {"int32", 4},
	6: {"float32", 4}, 7: {"bool", 1}, 8: {"string", 0}, 9: {"array", 0}, 10: {"uint64", 8}, 11: {"int64", 8}, 12: {"float64", 8},
}

func kindOf(v any) (kind, bool) {
	switch v.(type) {
	case uint8:
		return kind{0, 0}, true
	}
	return kind{}, false
}
