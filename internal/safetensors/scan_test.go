package safetensors

import (
	"encoding/json"
	"maps"
	"reflect"
	"testing"
)

// headers are such as the scanner reads, and such as it leaves to encoding/json.
var headers = []struct {
	text  string
	plain bool
}{
	{`{}`, true},
	{"{\"__metadata__\":{\"format\":\"pt\"},\n \"a.b\" : {\"dtype\":\"BF16\",\"shape\":[2, 3],\"data_offsets\":[0,12]}}  \x00", true},
	{`{"x":{"shape":[],"data_offsets":[0,4],"dtype":"F32"},"y":{"dtype":"I64","shape":[0],"data_offsets":[4,4]}}`, true},
	{`{"x":{"dtype":"F32","shape":[999999999999999999],"data_offsets":[0,4]}}`, true},
	{`{"x":{"dtype":"F32","shape":[1000000000000000000],"data_offsets":[0,4]}}`, false},
	{`{"x":{"dtype":"F7","shape":[1],"data_offsets":[0,4]}}`, false},
	{`{"x\u0031":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}`, false},
	{`{"ä":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}`, false},
	{`{"x":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}`, false},
	{`{"x":{"dtype":"F32","shape":[01],"data_offsets":[0,4]}}`, false},
	{`{"x":{"dtype":"F32","shape":[1e0],"data_offsets":[0,4]}}`, false},
	{`{"x":{"dtype":"F32","shape":[1,],"data_offsets":[0,4]}}`, false},
	{`{"x":{"dtype":"F32","shape":null,"data_offsets":[0,4]}}`, false},
	{`{"x":{"dtype":"F32","dtype":"F16","shape":[1],"data_offsets":[0,4]}}`, false},
	{`{"x":{"dtype":"F32","shape":[1],"data_offsets":[0]}}`, false},
	{`{"x":{"dtype":"F32","shape":[1]}}`, false},
	{`{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"more":1}}`, false},
	{`{"x":{"DType":"F32","shape":[1],"data_offsets":[0,4]}}`, false},
	{`{"__metadata__":{"a":1}}`, false},
	{`{"__metadata__":{},"__metadata__":{}}`, false},
	{`{"x":1}`, false}, {`{} x`, false}, {`{,}`, false}, {`{"x"}`, false}, {`{`, false}, {``, false}, {`[]`, false}, {`{"x`, false},
}

// What the scanner reads is what encoding/json reads.
func TestScanHeader(t *testing.T) {
	for _, h := range headers {
		if ok := sameHeader(t, []byte(h.text)); ok != h.plain {
			t.Errorf("%q: scanned: %v", h.text, ok)
		}
	}
}

func sameHeader(t *testing.T, b []byte) bool {
	t.Helper()
	got, ok := scanHeader(b)
	if !ok {
		return false
	}
	want, err := decodeHeader(b)
	if err != nil || len(got) != len(want) {
		t.Fatalf("%q: %d entries; encoding/json has %d: %v", b, len(got), len(want), err)
	}
	for i, w := range want {
		g := got[i]
		if g.name != w.name || g.dtype != w.dtype || g.offsets != w.offsets || len(g.shape) != len(w.shape) || len(g.shape) > 0 && !reflect.DeepEqual(g.shape, w.shape) {
			t.Fatalf("%q: %+v, by encoding/json %+v", b, g, w)
		}
	}
	return true
}

func sameIndex(t *testing.T, b []byte) bool {
	t.Helper()
	got, ok := scanIndex(b)
	if !ok {
		return false
	}
	var want struct {
		Map map[string]string `json:"weight_map"`
	}
	if err := json.Unmarshal(b, &want); err != nil || !maps.Equal(got, want.Map) {
		t.Fatalf("%q: %v; by encoding/json %v, %v", b, got, want.Map, err)
	}
	return true
}

func TestScanIndex(t *testing.T) {
	for text, plain := range map[string]bool{
		`{"metadata":{"total_size":123,"x":"y"},"weight_map":{"a":"m.safetensors", "b":"m.safetensors"}}` + "\n": true,
		`{"weight_map":{}}`: true, `{}`: true,
		`{"metadata":{"total_size":1.5},"weight_map":{}}`:        false,
		`{"weight_map":{"a":"b"},"weight_map":{"c":"d"}}`:        false,
		`{"weight_map":{"a":1}}`:                                 false,
		`{"Weight_Map":{"a":"b"}}`:                               false,
		`{"weight_map":{"a":"b"}}x`:                              false,
		"{\"weight_map\":{\"a\":\"b\"}}\x00":                     false,
		`{"weight_map":{"a\n":"b"}}`:                             false,
		`{"metadata":{},"metadata":{},"weight_map":{"a\n":"b"}}`: false,
	} {
		if ok := sameIndex(t, []byte(text)); ok != plain {
			t.Errorf("%q: scanned: %v", text, ok)
		}
	}
	if m, err := ParseIndex([]byte(`{"weight_map":{"\u0061":"b"}}`)); err != nil || m["a"] != "b" {
		t.Errorf("%v: %v", m, err)
	}
	if _, err := ParseIndex([]byte(`{"weight_map":7}`)); err == nil {
		t.Error("a number is an index")
	}
}

func FuzzScan(f *testing.F) {
	for _, h := range headers {
		f.Add([]byte(h.text))
	}
	f.Add([]byte(`{"metadata":{"total_size":123},"weight_map":{"a":"m.safetensors"}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		sameHeader(t, b)
		sameIndex(t, b)
	})
}
