package storage

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sluice/internal/quant"
)

// left lists what lies in a folder.
func left(t *testing.T, dir string) int {
	t.Helper()
	es, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	return len(es)
}

// However the bytes come in pieces, the file is the same.
func TestGGUFWriterPieces(t *testing.T) {
	var all []byte
	for _, s := range sampleTensors {
		all = append(all, bytesOf(s)...)
	}
	var first []byte
	for _, piece := range []int{len(all), 1, 7, 100} {
		path := filepath.Join(t.TempDir(), "m.gguf")
		w, err := CreateGGUF(path, sampleMeta(), sampleTensors)
		if err != nil {
			t.Fatal(err)
		}
		for b := all; len(b) > 0; {
			n, err := w.Write(b[:min(piece, len(b))])
			if err != nil {
				t.Fatal(err)
			}
			b = b[n:]
		}
		if _, err := os.Stat(path); err == nil {
			t.Error("the file is there before Finish")
		}
		if n, err := w.Write([]byte{1}); n != 0 || err == nil {
			t.Error("took a byte too many")
		}
		if err := w.Finish(); err != nil {
			t.Fatal(err)
		}
		w.Abort()
		got, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if first == nil {
			first = got
		}
		if size, err := GGUFSize(sampleMeta(), sampleTensors); err != nil || size != int64(len(got)) {
			t.Errorf("GGUFSize %d (%v), the file has %d bytes", size, err, len(got))
		}
		if string(got) != string(first) {
			t.Errorf("in pieces of %d: another file", piece)
		}
	}
}

func TestGGUFWriterLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "m.gguf")
	w, err := CreateGGUF(path, nil, sampleTensors)
	if err != nil {
		t.Fatal(err)
	}
	w.Write(make([]byte, 50))
	if err := w.Finish(); err == nil || !strings.Contains(err.Error(), `"b" lacks 98 of its 136 bytes`) {
		t.Errorf("Finish without all bytes: %v", err)
	}
	if n := left(t, dir); n != 0 {
		t.Errorf("%d files left", n)
	}
	if w, err = CreateGGUF(path, nil, sampleTensors); err != nil {
		t.Fatal(err)
	}
	w.Abort()
	if n := left(t, dir); n != 0 {
		t.Errorf("%d files left", n)
	}
	if _, err := CreateGGUF(filepath.Join(dir, "no", "m.gguf"), nil, nil); err == nil {
		t.Error("wrote into a folder that is not there")
	}
}

// What Open refuses is not begun.
func TestGGUFWriterRefuses(t *testing.T) {
	f32 := func(name string, dims ...int64) []TensorSpec {
		return []TensorSpec{{name, quant.F32, dims}}
	}
	cases := []struct {
		name    string
		meta    []KV
		tensors []TensorSpec
		want    string
	}{
		{"kind", []KV{{"k", 3}}, nil, "cannot be stored"},
		{"key twice", []KV{{"k", true}, {"k", true}}, nil, "twice"},
		{"key of bytes", []KV{{"\xff", true}}, nil, "plain text"},
		{"alignment", []KV{{"general.alignment", uint32(24)}}, f32("a", 1), "power of two"},
		{"tensor twice", nil, append(f32("a", 1), f32("a", 1)...), "twice"},
		{"no name", nil, f32("", 1), "length of 0"},
		{"no shape", nil, f32("a"), "0 dimensions"},
		{"dim 0", nil, f32("a", 0), "dimension of 0"},
		{"dim -1", nil, f32("a", -1), "no size"},
		{"overflow", nil, f32("a", 1<<40, 1<<40), "no size"},
		{"type", nil, []TensorSpec{{"a", 36, []int64{32}}}, "type number 36"},
		{"block", nil, []TensorSpec{{"a", quant.Q4_K, []int64{32}}}, "blocks of 256"},
	}
	for _, c := range cases {
		dir := t.TempDir()
		_, err := CreateGGUF(filepath.Join(dir, "m.gguf"), c.meta, c.tensors)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q", c.name, err, c.want)
		}
		if left(t, dir) != 0 {
			t.Errorf("%s: a file was begun", c.name)
		}
	}
}
