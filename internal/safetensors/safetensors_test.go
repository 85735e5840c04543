package safetensors

import (
	"bytes"
	"encoding/binary"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func write(t testing.TB, path string) {
	t.Helper()
	w, err := Create(path, []Spec{{"odd \"name\"", I32, []int64{3}}, {"x", F32, []int64{2, 2}}, {"none", F32, []int64{0, 7}},
		{"h", F16, []int64{2}}, {"b", BF16, nil}, {"l", I64, []int64{2}}})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Abort()
	raw := func(v any) {
		if err := binary.Write(w, binary.LittleEndian, v); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Ints([]int32{1, -2, 3}); err != nil {
		t.Fatal(err)
	}
	if err := w.Floats([]float32{0.5, -1, float32(math.Inf(1))}); err != nil {
		t.Fatal(err)
	}
	raw(float32(4))
	raw([]uint16{0x3c00, 0xc000, 0x3fc0})
	raw([]int64{-7, 1 << 31})
	if _, err := w.Write([]byte{1}); err == nil {
		t.Error("took a byte too many")
	}
	if err := w.Finish(); err != nil {
		t.Fatal(err)
	}
}

func TestRoundTrip(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a")
	write(t, path)
	write(t, filepath.Join(dir, "b"))
	a, _ := os.ReadFile(path)
	if b, _ := os.ReadFile(filepath.Join(dir, "b")); !bytes.Equal(a, b) || len(a) == 0 {
		t.Error("the same values gave other bytes")
	}
	if n := binary.LittleEndian.Uint64(a); n%8 != 0 {
		t.Errorf("a header of %d bytes", n)
	}
	f, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if x, ok := f.Tensor("x"); !ok || !slices.Equal(x.Shape, []int64{2, 2}) || x.DType != F32 || len(f.Tensors()) != 6 {
		t.Errorf("x is %+v", x)
	}
	for name, want := range map[string][]float32{"x": {0.5, -1, float32(math.Inf(1)), 4}, "none": {}, "h": {1, -2}, "b": {1.5}} {
		if got, err := f.Floats(name); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s = %v, want %v (%v)", name, got, want, err)
		}
	}
	if got, err := f.Ints("odd \"name\""); err != nil || !slices.Equal(got, []int32{1, -2, 3}) {
		t.Errorf("odd name = %v (%v)", got, err)
	}
	for name, want := range map[string]string{"l": "over 32 bits", "x": "has the type F32", "y": `no tensor "y"`} {
		if _, err := f.Ints(name); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Ints(%s): %v, want %q", name, err, want)
		}
	}
	if err := os.Truncate(path, int64(len(a)-20)); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Ints("l"); err == nil || !strings.Contains(err.Error(), "cut short") {
		t.Errorf("a file cut while open: %v", err)
	}
}

func TestWriterLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a")
	w, err := Create(path, []Spec{{"x", F32, []int64{2}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Finish(); err == nil || !strings.Contains(err.Error(), "8 of 8 bytes are missing") {
		t.Errorf("Finish without data: %v", err)
	}
	for want, specs := range map[string][]Spec{
		"twice":          {{"x", F32, nil}, {"x", F32, nil}},
		"not known":      {{"x", "F7", nil}},
		"dimension of -": {{"x", F32, []int64{-1}}},
		"no size":        {{"x", F32, []int64{1 << 31, 1 << 31}}},
		"larger":         {{"x", F32, []int64{1 << 60}}, {"y", F32, []int64{1 << 60}}},
	} {
		if _, err := Create(path, specs); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: got %v, want %q", specs, err, want)
		}
	}
	if es, _ := os.ReadDir(dir); len(es) != 0 {
		t.Errorf("left behind: %v", es)
	}
}

// file is a header with its length before it and data after it.
func file(header string, data int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return append(append(b, header...), make([]byte, data)...)
}

func TestRefuses(t *testing.T) {
	cases := []struct {
		file []byte
		want string
	}{
		{nil, "cut short"},
		{[]byte("GGUF\x03\x00\x00\x00 and so on"), "no safetensors file"},
		{file("{}", 0)[:9], "cut short"},
		{file("", 0), "no JSON object"},
		{file("[]", 0), "no JSON object"},
		{file("{", 0), "EOF"},
		{file("{}x", 0), "text after"},
		{file(`{"x":1}`, 0), `"x"`},
		{file(`{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"x":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}`, 8), "twice"},
		{file(`{"x":{"dtype":"F7","shape":[1],"data_offsets":[0,4]}}`, 4), `type "F7"`},
		{file(`{"x":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}`, 4), "dimension of -1"},
		{file(`{"x":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}`, 4), "no size"},
		{file(`{"x":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}}`, 4), "1.5"},
		{file(`{"x":{"dtype":"F32","shape":[1]}}`, 4), "has bytes []"},
		{file(`{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}}`, 8), "has bytes"},
		{file(`{"x":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}`, 4), "has bytes"},
		{file(`{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}`, 4), "cut short"},
		{file(`{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}`, 4), "needs 8"},
		{file(`{"x":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}`, 8), "no gap"},
		{file(`{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"y":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}`, 4), "no gap and no overlap"},
		{file(`{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}`, 8), "its data has 8"},
		{file(`{"__metadata__":7}`, 0), "__metadata__"},
	}
	for _, c := range cases {
		path := filepath.Join(t.TempDir(), "f")
		if err := os.WriteFile(path, c.file, 0o666); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(path); err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), path) {
			t.Errorf("%q: got %v, want %q", c.file, err, c.want)
		}
	}
	if _, err := Open(t.TempDir()); err == nil {
		t.Error("opened a folder")
	}
	if got, err := parse(bytes.NewReader(file(`{"__metadata__":{"a":"b"}}   `, 0)), 8+29); err != nil || len(got) != 0 {
		t.Errorf("a file of metadata alone: %v %v", got, err)
	}
}

// The oracles were written by the format's own library.
func TestOracle(t *testing.T) {
	dir := os.Getenv("SLUICE_SHARED")
	if dir == "" {
		dir = filepath.Join("..", "..", "..", "shared")
	}
	path := filepath.Join(dir, "oracles", "hf", "qwen3_moe", "oracle.safetensors")
	if _, err := os.Stat(path); err != nil {
		t.Skip("needs the shared oracles: set SLUICE_SHARED")
	}
	f, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	logits, err := f.Floats("logits")
	if err != nil || len(logits) != 48*512 {
		t.Errorf("%d logits: %v", len(logits), err)
	}
	ids, err := f.Ints("greedy_ids")
	if err != nil || len(ids) != 60 {
		t.Errorf("%d ids: %v", len(ids), err)
	}
}

func FuzzHeader(f *testing.F) {
	path := filepath.Join(f.TempDir(), "a")
	write(f, path)
	whole, err := os.ReadFile(path)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(whole)
	f.Add(file(`{"__metadata__":{"a":"b"},"x":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}  `, 1))
	f.Add([]byte("{}"))
	f.Fuzz(func(t *testing.T, b []byte) {
		tensors, err := parse(bytes.NewReader(b), int64(len(b)))
		if err != nil {
			return
		}
		end := int64(0)
		for i, x := range tensors {
			if i == 0 {
				end = x.Off
			}
			if x.Off != end || x.Bytes < 0 || x.Off < 8 {
				t.Fatalf("%+v after byte %d", x, end)
			}
			end += x.Bytes
		}
		if len(tensors) > 0 && end != int64(len(b)) {
			t.Fatalf("tensors end at %d of %d bytes", end, len(b))
		}
	})
}
