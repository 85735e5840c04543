package storage

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
)

func meta(t *testing.T, kvs ...KV) Meta {
	t.Helper()
	m, err := NewMeta("m.gguf", kvs)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// Integers come in any width; the getters see one kind.
func TestMetaGetters(t *testing.T) {
	m := meta(t, sampleMeta()...)
	for key, want := range map[string]uint64{"u8": 200, "u16": 60000, "u32": 4e9, "u64": 1 << 63} {
		if got, ok := m.Uint(key); got != want || !ok {
			t.Errorf("Uint(%s) = %d %v, want %d", key, got, ok, want)
		}
	}
	for key, want := range map[string]int64{"u8": 200, "i8": -3, "u16": 60000, "i16": -300, "u32": 4e9, "i32": -70000, "i64": -1 << 40} {
		if got, ok := m.Int(key); got != want || !ok {
			t.Errorf("Int(%s) = %d %v, want %d", key, got, ok, want)
		}
	}
	for key, want := range map[string]float64{"f32": 0.5, "f64": 1e-300, "i8": -3, "u64": 1 << 63} {
		if got, ok := m.Float(key); got != want || !ok {
			t.Errorf("Float(%s) = %g %v, want %g", key, got, ok, want)
		}
	}
	for key, want := range map[string][]int64{"au8": {1, 2}, "ai8": {-1}, "au16": {7}, "ai16": {-7}, "au32": {4e9}, "ai32": {3, -4}, "ai64": {-5}} {
		if got, ok := m.Ints(key); !slices.Equal(got, want) || !ok {
			t.Errorf("Ints(%s) = %d %v, want %d", key, got, ok, want)
		}
	}
	for key, want := range map[string][]float64{"af32": {1.5, -2}, "af64": {2.5}, "ai32": {3, -4}} {
		if got, ok := m.Floats(key); !slices.Equal(got, want) || !ok {
			t.Errorf("Floats(%s) = %g %v, want %g", key, got, ok, want)
		}
	}
	if yes, ok := m.Bool("yes"); !yes || !ok {
		t.Error("Bool(yes)")
	}
	if no, ok := m.Bool("no"); no || !ok {
		t.Error("Bool(no)")
	}
	if s, ok := m.String("empty"); s != "" || !ok {
		t.Error("String(empty)")
	}
	if s, ok := m.Strings("astr"); len(s) != 4 || s[2] != "\xffnot text" || !ok {
		t.Errorf("Strings(astr) = %q", s)
	}
	if n, ok := m.Len("astr"); n != 4 || !ok {
		t.Error("Len(astr)")
	}
	if _, ok := m.Len("u8"); ok {
		t.Error("Len of one value")
	}
	if !m.Has("anone") || m.Has("nothing") {
		t.Error("Has")
	}
	if err := m.Err(); err != nil {
		t.Errorf("an error where all was well: %v", err)
	}
}

// An absent key is no error; one of another kind is, and the first is kept.
func TestMetaMismatch(t *testing.T) {
	get := map[string]func(Meta, string) bool{
		"Uint":    func(m Meta, k string) bool { _, ok := m.Uint(k); return ok },
		"Int":     func(m Meta, k string) bool { _, ok := m.Int(k); return ok },
		"Float":   func(m Meta, k string) bool { _, ok := m.Float(k); return ok },
		"Bool":    func(m Meta, k string) bool { _, ok := m.Bool(k); return ok },
		"String":  func(m Meta, k string) bool { _, ok := m.String(k); return ok },
		"Strings": func(m Meta, k string) bool { _, ok := m.Strings(k); return ok },
		"Ints":    func(m Meta, k string) bool { _, ok := m.Ints(k); return ok },
		"Floats":  func(m Meta, k string) bool { _, ok := m.Floats(k); return ok },
	}
	bad := map[string][]any{
		"Uint":    {"4096", int32(-1), float32(1), true, []uint32{1}},
		"Int":     {"4096", uint64(1 << 63), 1.0, []int32{1}},
		"Float":   {"1", math.NaN(), float32(math.Inf(1)), []float32{1}},
		"Bool":    {uint8(1), "true"},
		"String":  {uint8(1), []string{"a"}, true},
		"Strings": {"a", []int32{1}},
		"Ints":    {int32(1), []float32{1}, []string{"1"}, []bool{true}, []uint64{1, 1 << 63}},
		"Floats":  {1.0, []float64{1, math.NaN()}, []float32{float32(math.Inf(-1))}, []string{"1"}},
	}
	for name, values := range bad {
		for _, v := range values {
			m := meta(t, KV{"x.context_length", v})
			if get[name](m, "absent") || m.Err() != nil {
				t.Errorf("%s of an absent key: %v", name, m.Err())
			}
			if get[name](m, "x.context_length") {
				t.Errorf("%s took %T %v", name, v, v)
			}
			var fe *FormatError
			if err := m.Err(); !errors.As(err, &fe) || !strings.Contains(err.Error(), "x.context_length") {
				t.Errorf("%s of %T %v: error %v", name, v, v, err)
			}
		}
	}
	m := meta(t, KV{"a", "text"}, KV{"b", strings.Repeat("long", 100)})
	m.Uint("a")
	m.Uint("b")
	if err := fmt.Sprint(m.Err()); !strings.Contains(err, `"a"`) || !strings.Contains(err, `the string "text", want an integer`) {
		t.Errorf("not the first: %s", err)
	}
}

func TestNewMetaRefuses(t *testing.T) {
	if _, err := NewMeta("f", []KV{{"a", 1}}); err == nil {
		t.Error("took an int, which has no width")
	}
	if _, err := NewMeta("f", []KV{{"a", true}, {"a", true}}); err == nil {
		t.Error("took a key twice")
	}
	var zero Meta
	if zero.Has("a") || zero.Err() != nil || len(zero.Keys()) != 0 {
		t.Error("the zero Meta is not empty")
	}
}
