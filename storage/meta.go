package storage

import (
	"fmt"
	"math"
	"sync/atomic"
)

// A KV is one entry of a model's metadata. Value is one of uint8, int8, uint16,
// int16, uint32, int32, uint64, int64, float32, float64, bool, string, or a
// slice of one of these, as the file has it.
type KV struct {
	Key   string
	Value any
}

// Meta is a model's metadata, read by typed getters. Each returns false if the
// key is absent. A key that is there but holds another kind of value, or one
// out of range, also returns false and is remembered: Err returns the first of
// them. So a loader reads all that it wants, with its defaults, and asks once:
//
//	n, ok := meta.Uint("llama.block_count")
//	...
//	if err := meta.Err(); err != nil { return err }
//
// Several goroutines may read at once. Slices belong to Meta: do not change them.
type Meta struct {
	file  string
	kvs   []KV
	offs  []int64 // where each entry begins in the file; -1 if nowhere
	index map[string]int
	bad   *atomic.Pointer[FormatError]
}

// NewMeta makes metadata of entries that come from file, a name for errors.
// It refuses a key given twice and a value of a kind that KV does not name.
func NewMeta(file string, kvs []KV) (Meta, error) {
	m := newMeta(file)
	for _, kv := range kvs {
		if _, ok := kindOf(kv.Value); !ok {
			return Meta{}, fmt.Errorf("storage: metadata %q: a %T cannot be stored", kv.Key, kv.Value)
		}
		if !m.add(kv, -1) {
			return Meta{}, &FormatError{File: file, Off: -1, Msg: fmt.Sprintf("metadata key %q appears twice", kv.Key)}
		}
	}
	return m, nil
}

func newMeta(file string) Meta {
	return Meta{file: file, index: map[string]int{}, bad: new(atomic.Pointer[FormatError])}
}

// add appends an entry that begins at byte off (-1: none); false if the key is
// there already.
func (m *Meta) add(kv KV, off int64) bool {
	if _, dup := m.index[kv.Key]; dup {
		return false
	}
	m.index[kv.Key] = len(m.kvs)
	m.kvs = append(m.kvs, kv)
	m.offs = append(m.offs, off)
	return true
}

// off is where the entry of a key begins, -1 if there is no such byte.
func (m Meta) off(key string) int64 {
	if i, ok := m.index[key]; ok {
		return m.offs[i]
	}
	return -1
}

// Err is the first entry that a getter found to be of another kind than asked
// for, or out of range: a *FormatError, or nil.
func (m Meta) Err() error {
	if m.bad == nil {
		return nil
	}
	if e := m.bad.Load(); e != nil {
		return e
	}
	return nil
}

// Keys lists the keys in the file's order.
func (m Meta) Keys() []string {
	keys := make([]string, len(m.kvs))
	for i, kv := range m.kvs {
		keys[i] = kv.Key
	}
	return keys
}

// Has says whether the key is there, whatever its kind.
func (m Meta) Has(key string) bool { _, ok := m.index[key]; return ok }

// Value is the entry as the file has it, of a type that KV names; nil if absent.
func (m Meta) Value(key string) any {
	if i, ok := m.index[key]; ok {
		return m.kvs[i].Value
	}
	return nil
}

// Len is the number of elements of an array; false if the key is absent or no
// array, which is no error: for keys that may be one value or one for each layer.
func (m Meta) Len(key string) (int, bool) { return lenOf(m.Value(key)) }

func lenOf(v any) (int, bool) {
	switch v := v.(type) {
	case []uint8:
		return len(v), true
	case []int8:
		return len(v), true
	case []uint16:
		return len(v), true
	case []int16:
		return len(v), true
	case []uint32:
		return len(v), true
	case []int32:
		return len(v), true
	case []uint64:
		return len(v), true
	case []int64:
		return len(v), true
	case []float32:
		return len(v), true
	case []float64:
		return len(v), true
	case []bool:
		return len(v), true
	case []string:
		return len(v), true
	}
	return 0, false
}

// Uint reads an integer of any width that is not negative.
func (m Meta) Uint(key string) (uint64, bool) {
	v := m.Value(key)
	if v == nil {
		return 0, false
	}
	if u, ok := v.(uint64); ok {
		return u, true
	}
	i, ok := toInt(v)
	if !ok || i < 0 {
		m.mismatch(key, "an integer that is not negative")
		return 0, false
	}
	return uint64(i), true
}

// Int reads an integer of any width, within int64.
func (m Meta) Int(key string) (int64, bool) {
	v := m.Value(key)
	if v == nil {
		return 0, false
	}
	i, ok := toInt(v)
	if !ok {
		m.mismatch(key, "an integer")
		return 0, false
	}
	return i, true
}

// Float reads a finite number; integers count.
func (m Meta) Float(key string) (float64, bool) {
	v := m.Value(key)
	if v == nil {
		return 0, false
	}
	f, ok := toFloat(v)
	if !ok {
		m.mismatch(key, "a finite number")
		return 0, false
	}
	return f, true
}

// Bool reads a truth value.
func (m Meta) Bool(key string) (bool, bool) { return exact[bool](m, key, "true or false") }

// String reads a string. Its bytes are the file's; they need not be UTF-8.
func (m Meta) String(key string) (string, bool) { return exact[string](m, key, "a string") }

// Strings reads an array of strings. Their bytes are the file's.
func (m Meta) Strings(key string) ([]string, bool) {
	return exact[[]string](m, key, "an array of strings")
}

// Ints reads an array of integers of any width, each within int64.
func (m Meta) Ints(key string) ([]int64, bool) {
	v := m.Value(key)
	if v == nil {
		return nil, false
	}
	out, ok := intsOf(v)
	if !ok {
		m.mismatch(key, "an array of integers")
	}
	return out, ok
}

// Floats reads an array of finite numbers; integers count.
func (m Meta) Floats(key string) ([]float64, bool) {
	var out []float64
	var ok bool
	switch v := m.Value(key).(type) {
	case nil:
		return nil, false
	case []float32:
		out, ok = toFloats(v)
	case []float64:
		out, ok = toFloats(v)
	default:
		var ints []int64
		if ints, ok = intsOf(v); ok {
			out, ok = toFloats(ints)
		}
	}
	if !ok {
		m.mismatch(key, "an array of finite numbers")
	}
	return out, ok
}

// intsOf is an array of integers of any width as int64s; false for anything else.
func intsOf(v any) ([]int64, bool) {
	switch v := v.(type) {
	case []uint8:
		return toInts(v)
	case []int8:
		return toInts(v)
	case []uint16:
		return toInts(v)
	case []int16:
		return toInts(v)
	case []uint32:
		return toInts(v)
	case []int32:
		return toInts(v)
	case []uint64:
		return toInts(v)
	case []int64:
		return v, true
	}
	return nil, false
}

// exact reads a value that is stored as a T.
func exact[T any](m Meta, key, want string) (T, bool) {
	v := m.Value(key)
	t, ok := v.(T)
	if v != nil && !ok {
		m.mismatch(key, want)
	}
	return t, ok
}

type integer interface {
	uint8 | int8 | uint16 | int16 | uint32 | int32 | uint64 | int64
}

func toInts[E integer](v []E) ([]int64, bool) {
	out := make([]int64, len(v))
	for i, x := range v {
		out[i] = int64(x)
		if x > 0 && out[i] < 0 {
			return nil, false
		}
	}
	return out, true
}

func toFloats[E float32 | float64 | int64](v []E) ([]float64, bool) {
	out := make([]float64, len(v))
	for i, x := range v {
		out[i] = float64(x)
		if math.IsNaN(out[i]) || math.IsInf(out[i], 0) {
			return nil, false
		}
	}
	return out, true
}

// toInt is an integer of any width as an int64; false for anything else.
func toInt(v any) (int64, bool) {
	switch v := v.(type) {
	case uint8:
		return int64(v), true
	case int8:
		return int64(v), true
	case uint16:
		return int64(v), true
	case int16:
		return int64(v), true
	case uint32:
		return int64(v), true
	case int32:
		return int64(v), true
	case int64:
		return v, true
	case uint64:
		return int64(v), v <= math.MaxInt64
	}
	return 0, false
}

// toFloat is a number as a float64; false for what is none, or not finite.
func toFloat(v any) (float64, bool) {
	var f float64
	switch v := v.(type) {
	case float32:
		f = float64(v)
	case float64:
		f = v
	case uint64:
		f = float64(v)
	default:
		i, ok := toInt(v)
		return float64(i), ok
	}
	return f, !math.IsNaN(f) && !math.IsInf(f, 0)
}

// mismatch remembers that key does not hold what was wanted, if it is the first.
func (m Meta) mismatch(key, want string) {
	m.bad.CompareAndSwap(nil, &FormatError{File: m.file, Off: m.off(key), Msg: fmt.Sprintf(
		"metadata %q is %s, want %s: convert the model again with a current converter", key, describe(m.Value(key)), want)})
}

// describe is a value in words, short whatever it holds.
func describe(v any) string {
	switch v := v.(type) {
	case string:
		if len(v) > 40 {
			return fmt.Sprintf("a string of %d bytes", len(v))
		}
		return fmt.Sprintf("the string %q", v)
	case bool, uint8, int8, uint16, int16, uint32, int32, uint64, int64, float32, float64:
		return fmt.Sprintf("the %T %v", v, v)
	}
	k, _ := kindOf(v)
	return "an array of " + kinds[k.elem].name
}
