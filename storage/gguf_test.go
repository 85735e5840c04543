package storage

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sluice/internal/quant"
)

// shared is the folder of oracles that is not part of the repository.
func shared(t testing.TB, path string) string {
	t.Helper()
	dir := os.Getenv("SLUICE_SHARED")
	if dir == "" {
		dir = filepath.Join("..", "..", "shared")
	}
	full := filepath.Join(dir, path)
	if _, err := os.Stat(full); err != nil {
		t.Skip("needs the shared oracles: set SLUICE_SHARED")
	}
	return full
}

// sampleMeta has an entry of every kind that GGUF has.
func sampleMeta() []KV {
	return []KV{
		{"general.architecture", "test"},
		{"u8", uint8(200)}, {"i8", int8(-3)}, {"u16", uint16(60000)}, {"i16", int16(-300)},
		{"u32", uint32(4e9)}, {"i32", int32(-70000)}, {"u64", uint64(1 << 63)}, {"i64", int64(-1 << 40)},
		{"f32", float32(0.5)}, {"f64", 1e-300}, {"yes", true}, {"no", false}, {"empty", ""},
		{"au8", []uint8{1, 2}}, {"ai8", []int8{-1}}, {"au16", []uint16{7}}, {"ai16", []int16{-7}},
		{"au32", []uint32{4e9}}, {"ai32", []int32{3, -4}}, {"au64", []uint64{9, 1 << 63}}, {"ai64", []int64{-5}},
		{"af32", []float32{1.5, -2}}, {"af64", []float64{2.5}}, {"abool", []bool{true, false}},
		{"astr", []string{"a", "", "\xffnot text", "dd"}}, {"anone", []string{}},
	}
}

var sampleTensors = []TensorSpec{
	{"a", quant.F32, []int64{3}},
	{"b", quant.Q8_0, []int64{64, 2}},
	{"c", quant.Q4_K, []int64{256, 2, 3}},
	{"d", quant.I64, []int64{1, 1, 1, 2}},
}

// bytesOf is data that differs for each tensor and position.
func bytesOf(s TensorSpec) []byte {
	b := make([]byte, s.Bytes())
	for i := range b {
		b[i] = byte(len(b) + 7*i + int(s.Name[0]))
	}
	return b
}

// writeGGUF writes a file with made-up data.
func writeGGUF(t testing.TB, path string, meta []KV, tensors []TensorSpec) {
	t.Helper()
	w, err := CreateGGUF(path, meta, tensors)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Abort()
	for _, s := range tensors {
		if _, err := w.Write(bytesOf(s)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Finish(); err != nil {
		t.Fatal(err)
	}
}

// checkTensors reads all tensors of a model and compares shapes and bytes.
func checkTensors(t *testing.T, m *Model, want []TensorSpec) {
	t.Helper()
	if len(m.Tensors) != len(want) {
		t.Fatalf("%d tensors, want %d", len(m.Tensors), len(want))
	}
	for i, s := range want {
		got, ok := m.Tensor(s.Name)
		if !ok || got.Name != m.Tensors[i].Name || got.Type != s.Type || !slices.Equal(got.Dims, s.Dims) || got.Bytes != s.Bytes() {
			t.Fatalf("tensor %d is %+v, want %+v", i, got, s)
		}
		b := make([]byte, got.Bytes)
		if err := m.ReadTensor(b, got); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(b, bytesOf(s)) {
			t.Errorf("tensor %s: other bytes", s.Name)
		}
	}
}

func TestGGUFRoundTrip(t *testing.T) {
	for _, align := range []int64{8, 32, 4096} {
		path := filepath.Join(t.TempDir(), "m.gguf")
		meta := sampleMeta()
		if align != ggufAlignment {
			meta = append(meta, KV{"general.alignment", uint32(align)})
		}
		writeGGUF(t, path, meta, sampleTensors)
		m, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		checkTensors(t, m, sampleTensors)
		for i, key := range m.Meta.Keys() {
			if got := m.Meta.Value(key); key != meta[i].Key || fmt.Sprintf("%T %v", got, got) != fmt.Sprintf("%T %v", meta[i].Value, meta[i].Value) {
				t.Errorf("entry %d: %s = %T %v, want %v", i, key, got, got, meta[i])
			}
		}
		for _, x := range m.Tensors {
			if x.Off%align != 0 {
				t.Errorf("tensor %s at byte %d, alignment %d", x.Name, x.Off, align)
			}
		}
		if m.Format != "gguf" || len(m.Files) != 1 || m.Files[0].Path != path {
			t.Errorf("format %q, files %v", m.Format, m.Files)
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
}

// Any prefix of a file is refused in words that name a byte, and so is any file
// with one byte changed, unless it is still a good one.
func TestGGUFTruncated(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m.gguf")
	writeGGUF(t, path, sampleMeta(), sampleTensors)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	last := roundUp(16, 32) - 16 // the padding after the last tensor may be missing
	for n := 0; n < len(whole)-int(last); n++ {
		_, err := parseGGUF(bytes.NewReader(whole[:n]), int64(n), "m.gguf")
		var fe *FormatError
		if !errors.As(err, &fe) {
			t.Fatalf("cut to %d of %d bytes: %v", n, len(whole), err)
		}
		if n > 4 && (!strings.Contains(err.Error(), fmt.Sprint(n)) || fe.Off < 0) {
			t.Fatalf("cut to %d bytes, which the error does not say: %v", n, err)
		}
	}
	for i := range whole[:len(whole)-1000] {
		for _, x := range []byte{0x00, 0x01, 0x7f, 0xff} {
			b := bytes.Clone(whole)
			b[i] = x
			_, err := parseGGUF(bytes.NewReader(b), int64(len(b)), "m.gguf")
			var fe *FormatError
			if err != nil && !errors.As(err, &fe) {
				t.Fatalf("byte %d set to %#x: %v", i, x, err)
			}
		}
	}
}

// hostile builds a header by hand, to say what no writer would.
type hostile struct{ bytes.Buffer }

func (h *hostile) put(vs ...any) *hostile {
	for _, v := range vs {
		if s, ok := v.(string); ok {
			binary.Write(h, binary.LittleEndian, uint64(len(s)))
			h.WriteString(s)
			continue
		}
		binary.Write(h, binary.LittleEndian, v)
	}
	return h
}

// header begins a file with counts of tensors and entries.
func header(tensors, entries uint64) *hostile {
	h := &hostile{}
	h.WriteString("GGUF")
	return h.put(uint32(3), tensors, entries)
}

// tensor is a file with one F32 tensor "x", described by vs after its name.
func oneTensor(vs ...any) []byte {
	h := header(1, 0).put("x").put(vs...)
	h.Write(make([]byte, 4096))
	return h.Bytes()
}

func TestGGUFRefuses(t *testing.T) {
	long := strings.Repeat("k", maxName+1)
	cases := []struct {
		name string
		file []byte
		want string
	}{
		{"nothing", nil, "it is empty"},
		{"two bytes", []byte("GG"), "cut short"},
		{"text", []byte("hello, world"), `begins with "hell"`},
		{"web page", []byte("<!DOCTYPE html><html>"), "web page"},
		{"zip", []byte("PK\x03\x04 and so on"), "zip archive"},
		{"old ggml", []byte("tjgg\x03\x00\x00\x00"), "older ggml"},
		{"lfs", []byte("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"},
		{"safetensors", append([]byte{2, 0, 0, 0, 0, 0, 0, 0}, "{}"...), "safetensors"},
		{"big endian", []byte("GGUF\x00\x00\x00\x03aaaaaaaa"), "big-endian"},
		{"version 1", []byte("GGUF\x01\x00\x00\x00aaaaaaaa"), "version 1"},
		{"version 9", []byte("GGUF\x09\x00\x00\x00aaaaaaaa"), "version 9"},
		{"many tensors", header(1<<60, 0).Bytes(), "announces 1152921504606846976 tensors"},
		{"many entries", header(0, 1<<63).Bytes(), "metadata entries"},
		{"long key", header(0, 1).put(uint64(1<<60), make([]byte, 64)).Bytes(), "want 1 to 65536"},
		{"long real key", header(0, 1).put(long, uint32(0), uint8(1), make([]byte, 64)).Bytes(), "want 1 to 65536"},
		{"no key", header(0, 1).put("", uint32(0), uint8(1), make([]byte, 64)).Bytes(), "length of 0"},
		{"key of bytes", header(0, 1).put("\xff", uint32(0), uint8(1), make([]byte, 64)).Bytes(), "not plain text"},
		{"key twice", header(0, 2).put("k", uint32(0), uint8(1), "k", uint32(0), uint8(1), make([]byte, 64)).Bytes(), `"k" appears twice`},
		{"value type", header(0, 1).put("k", uint32(13), make([]byte, 64)).Bytes(), "value type 13"},
		{"long string", header(0, 1).put("k", uint32(8), uint64(1<<62), make([]byte, 64)).Bytes(), "needs 4611686018427387904 bytes"},
		{"bool of 2", header(0, 1).put("k", uint32(7), uint8(2), make([]byte, 64)).Bytes(), "truth value 2"},
		{"array of arrays", header(0, 1).put("k", uint32(9), uint32(9), uint64(1), make([]byte, 64)).Bytes(), "array of arrays"},
		{"array element type", header(0, 1).put("k", uint32(9), uint32(99), uint64(1), make([]byte, 64)).Bytes(), "element type 99"},
		{"long array", header(0, 1).put("k", uint32(9), uint32(10), uint64(1<<61+1), make([]byte, 64)).Bytes(), "room for at most 8"},
		{"many strings", header(0, 1).put("k", uint32(9), uint32(8), uint64(9), make([]byte, 64)).Bytes(), "room for at most 8"},
		{"string in array", header(0, 1).put("k", uint32(9), uint32(8), uint64(1), uint64(1<<40), make([]byte, 64)).Bytes(), "needs 1099511627776 bytes"},
		{"alignment text", header(0, 1).put("general.alignment", uint32(8), "32", make([]byte, 64)).Bytes(), `the string "32"`},
		{"alignment 0", header(0, 1).put("general.alignment", uint32(4), uint32(0), make([]byte, 64)).Bytes(), "power of two"},
		{"alignment 24", header(0, 1).put("general.alignment", uint32(4), uint32(24), make([]byte, 64)).Bytes(), "power of two"},
		{"alignment huge", header(0, 1).put("general.alignment", uint32(10), uint64(1<<63), make([]byte, 64)).Bytes(), "power of two"},
		{"no dims", oneTensor(uint32(0), uint32(0), uint64(0)), "0 dimensions"},
		{"five dims", oneTensor(uint32(5)), "5 dimensions"},
		{"dim 0", oneTensor(uint32(2), uint64(4), uint64(0), uint32(0), uint64(0)), "dimension of 0"},
		{"dims overflow", oneTensor(uint32(2), uint64(1<<33), uint64(1<<33), uint32(0), uint64(0)), "no size that a file can have"},
		{"bytes overflow", oneTensor(uint32(2), uint64(1<<31), uint64(1<<31), uint32(28), uint64(0)), "more than the file"},
		{"type", oneTensor(uint32(1), uint64(4), uint32(36), uint64(0)), `"x" has the type number 36`},
		{"part of a block", oneTensor(uint32(1), uint64(33), uint32(8), uint64(0)), "Q8_0 has blocks of 32"},
		{"offset odd", oneTensor(uint32(1), uint64(4), uint32(0), uint64(4)), "multiple of the alignment"},
		{"offset far", oneTensor(uint32(1), uint64(4), uint32(0), uint64(1<<63)), "lies at byte 9223372036854775808"},
		{"offset end", oneTensor(uint32(1), uint64(4), uint32(0), uint64(4096)), "needs 4176 bytes, 23 more"},
		{"overlap", header(2, 0).put("x", uint32(1), uint64(64), uint32(0), uint64(0), "y", uint32(1), uint64(64), uint32(0), uint64(32), make([]byte, 4096)).Bytes(), "overlap"},
	}
	for _, c := range cases {
		path := filepath.Join(t.TempDir(), "m.gguf")
		if err := os.WriteFile(path, c.file, 0o666); err != nil {
			t.Fatal(err)
		}
		m, err := Open(path)
		var fe *FormatError
		if m != nil || !errors.As(err, &fe) || fe.File != path || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want a FormatError with %q", c.name, err, c.want)
		}
	}
	twice := filepath.Join(t.TempDir(), "m.gguf")
	os.WriteFile(twice, header(2, 0).put("x", uint32(1), uint64(4), uint32(0), uint64(0), "x", uint32(1), uint64(4), uint32(0), uint64(32), make([]byte, 4096)).Bytes(), 0o666)
	if _, err := Open(twice); err == nil || !strings.Contains(err.Error(), `"x" appears twice`) {
		t.Errorf("a tensor twice: %v", err)
	}
	if _, err := Open(t.TempDir()); err == nil || !strings.Contains(err.Error(), "is a directory") {
		t.Errorf("a directory: %v", err)
	}
	if _, err := Open(filepath.Join(t.TempDir(), "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
}

// split writes the sample as three shards; the first has no tensors.
func split(t testing.TB, dir string, change func(no int, meta []KV) []KV) (paths []string) {
	t.Helper()
	parts := [][]TensorSpec{nil, sampleTensors[:3], sampleTensors[3:]}
	for no, tensors := range parts {
		var meta []KV
		if no == 0 {
			meta = sampleMeta()
		}
		meta = append(meta, KV{"split.no", uint16(no)}, KV{"split.count", uint16(3)}, KV{"split.tensors.count", int32(4)})
		path := filepath.Join(dir, fmt.Sprintf("m-%05d-of-00003.gguf", no+1))
		writeGGUF(t, path, change(no, meta), tensors)
		paths = append(paths, path)
	}
	return paths
}

// replace gives an entry another value, in shard only.
func replace(shard int, key string, value any) func(int, []KV) []KV {
	return func(no int, meta []KV) []KV {
		for i := range meta {
			if no == shard && meta[i].Key == key {
				meta[i].Value = value
			}
		}
		return meta
	}
}

func asIs(_ int, meta []KV) []KV { return meta }

func TestGGUFSplit(t *testing.T) {
	paths := split(t, t.TempDir(), asIs)
	for _, named := range paths { // whichever is named
		m, err := Open(named)
		if err != nil {
			t.Fatal(err)
		}
		checkTensors(t, m, sampleTensors)
		if v, _ := m.Meta.String("general.architecture"); v != "test" {
			t.Errorf("metadata is not the first shard's: architecture %q", v)
		}
		if d, _ := m.Tensor("d"); d.File != 2 || len(m.Files) != 3 || m.Files[2].Path != paths[2] {
			t.Errorf("tensor d in file %d of %v", d.File, m.Files)
		}
		m.Close()
	}
	os.Remove(paths[1])
	if _, err := Open(paths[2]); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "shard m-00002-of-00003.gguf is missing") {
		t.Errorf("a shard missing: %v", err)
	}
	odd := filepath.Join(t.TempDir(), "odd.gguf")
	if err := os.Rename(paths[0], odd); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(odd); err == nil || !strings.Contains(err.Error(), "rename it back") {
		t.Errorf("a shard renamed: %v", err)
	}
}

func TestGGUFSplitRefuses(t *testing.T) {
	cases := []struct {
		change func(int, []KV) []KV
		want   string
	}{
		{replace(1, "split.no", uint16(2)), "it holds shard 2 of 3"},
		{replace(2, "split.count", uint16(4)), "it holds shard 2 of 4"},
		{replace(0, "split.tensors.count", int32(5)), "hold 4 tensors"},
		{replace(0, "split.tensors.count", "four"), `the string "four"`},
		{replace(1, "split.no", int16(-1)), "want an integer that is not negative"},
		{func(no int, meta []KV) []KV { return meta[:len(meta)-2*(no%2)] }, "no split.no or split.count"},
	}
	for i, c := range cases {
		paths := split(t, t.TempDir(), c.change)
		_, err := Open(paths[0])
		var fe *FormatError
		if !errors.As(err, &fe) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("case %d: got %v, want %q", i, err, c.want)
		}
	}
	// The same tensor in two shards.
	dir := t.TempDir()
	for no := range 2 {
		writeGGUF(t, filepath.Join(dir, fmt.Sprintf("m-%05d-of-00002.gguf", no+1)),
			[]KV{{"split.no", uint16(no)}, {"split.count", uint16(2)}}, sampleTensors[:1])
	}
	if _, err := Open(filepath.Join(dir, "m-00001-of-00002.gguf")); err == nil || !strings.Contains(err.Error(), `"a" appears twice (the other is in m-00001-of-00002.gguf)`) {
		t.Errorf("a tensor in two shards: %v", err)
	}
	// A file that says that it is one of four, under a name that says three.
	p := filepath.Join(dir, "n-00001-of-00003.gguf")
	writeGGUF(t, p, []KV{{"split.no", uint16(0)}, {"split.count", uint16(4)}}, nil)
	if _, err := Open(p); err == nil || !strings.Contains(err.Error(), "the name says 3") {
		t.Errorf("another count in the name: %v", err)
	}
	// Merged again: count 0, whatever the name.
	writeGGUF(t, p, []KV{{"split.count", uint16(0)}}, sampleTensors)
	m, err := Open(p)
	if err != nil {
		t.Fatal(err)
	}
	checkTensors(t, m, sampleTensors)
	m.Close()
}

// A file that is cut while it is open gives an error with its end, not zeros.
func TestReadTensorCut(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m.gguf")
	writeGGUF(t, path, nil, sampleTensors)
	m, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	c, _ := m.Tensor("c")
	if err := os.Truncate(path, c.Off+5); err != nil {
		t.Fatal(err)
	}
	err = m.ReadTensor(make([]byte, c.Bytes), c)
	var fe *FormatError
	if !errors.As(err, &fe) || fe.Off != c.Off+5 || !strings.Contains(fe.Msg, `"c"`) {
		t.Errorf("got %v", err)
	}
}

// stutter reads few bytes at a time.
type stutter struct{ b []byte }

func (s stutter) ReadAt(b []byte, off int64) (int, error) {
	return copy(b[:min(len(b), 3)], s.b[off:]), nil
}

func TestReadFullContinues(t *testing.T) {
	want := []byte("0123456789")
	got := make([]byte, 8)
	if n, err := readFull(stutter{want}, got, 2); n != 8 || err != nil || !bytes.Equal(got, want[2:]) {
		t.Errorf("%d %v %q", n, err, got)
	}
	if _, err := readFull(stutter{want}, make([]byte, 11), 0); err == nil {
		t.Error("an end without a word was taken for success")
	}
}

// All models and vocabularies of the oracles open, and their tensors lie where
// the file says: the last one ends with the file, but for padding.
func TestGGUFOracles(t *testing.T) {
	var paths []string
	for _, dir := range []string{"oracles/gguf", "models", "vocab"} {
		found, _ := filepath.Glob(filepath.Join(shared(t, dir), "*.gguf"))
		paths = append(paths, found...)
	}
	if len(paths) < 20 {
		t.Fatalf("only %d files", len(paths))
	}
	for _, path := range paths {
		m, err := Open(path)
		if err != nil {
			t.Error(err)
			continue
		}
		var end int64
		for _, x := range m.Tensors {
			end = max(end, x.Off+x.Bytes)
		}
		if len(m.Tensors) > 0 && roundUp(end, ggufAlignment) != m.Files[0].Size {
			t.Errorf("%s: tensors end at %d, the file at %d", path, end, m.Files[0].Size)
		}
		if words, ok := m.Meta.Strings("tokenizer.ggml.tokens"); !ok || len(words) < 512 {
			t.Errorf("%s: %d tokens", path, len(words))
		}
		if _, ok := m.Meta.String("general.architecture"); !ok || m.Meta.Err() != nil {
			t.Errorf("%s: no architecture, or %v", path, m.Meta.Err())
		}
		m.Close()
	}
}

// A vocabulary of any size costs a handful of allocations.
func TestGGUFVocabularyAllocations(t *testing.T) {
	words := make([]string, 20000)
	for i := range words {
		words[i] = fmt.Sprint("word ", i)
	}
	path := filepath.Join(t.TempDir(), "m.gguf")
	writeGGUF(t, path, []KV{{"tokenizer.ggml.tokens", words}, {"tokenizer.ggml.token_type", make([]int32, len(words))}}, nil)
	allocs := testing.AllocsPerRun(1, func() {
		m, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		if got, _ := m.Meta.Strings("tokenizer.ggml.tokens"); !slices.Equal(got, words) {
			t.Error("other words")
		}
		m.Close()
	})
	if allocs > 200 {
		t.Errorf("%v allocations for %d words", allocs, len(words))
	}
}

// FuzzOpenGGUF: whatever the bytes, there is a model that lies within them, or
// a FormatError.
func FuzzOpenGGUF(f *testing.F) {
	path := filepath.Join(f.TempDir(), "m.gguf")
	writeGGUF(f, path, sampleMeta(), sampleTensors)
	whole, err := os.ReadFile(path)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(whole)
	f.Add(whole[:100])
	f.Add(header(0, 1).put("general.alignment", uint32(4), uint32(64)).Bytes())
	f.Add(oneTensor(uint32(1), uint64(64), uint32(2), uint64(32)))
	f.Add(header(0, 1).put("k", uint32(9), uint32(8), uint64(2), "a", "b").Bytes())
	f.Add([]byte("GGUF\x02\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := parseGGUF(bytes.NewReader(b), int64(len(b)), "m.gguf")
		if err != nil {
			var fe *FormatError
			if !errors.As(err, &fe) {
				t.Fatalf("not a FormatError: %v", err)
			}
			return
		}
		used := make([]bool, len(b))
		for _, x := range s.tensors {
			if x.Name == "" || !x.Type.Known() || x.Bytes <= 0 || x.Off < 0 || x.Off+x.Bytes > int64(len(b)) {
				t.Fatalf("%+v in %d bytes", x, len(b))
			}
			for i := x.Off; i < x.Off+x.Bytes; i++ {
				if used[i] {
					t.Fatalf("%s: byte %d is another's", x.Name, i)
				}
				used[i] = true
			}
		}
		for _, key := range s.meta.Keys() { // no getter may panic
			m := s.meta
			m.Uint(key)
			m.Int(key)
			m.Float(key)
			m.Bool(key)
			m.String(key)
			m.Strings(key)
			m.Ints(key)
			m.Floats(key)
			m.Len(key)
		}
		if err := s.meta.Err(); len(s.meta.Keys()) > 0 && err == nil {
			t.Fatal("a key was of all kinds at once")
		}
	})
}
