package storage

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"sluice/internal/quant"
)

// Case 1 of issue 5's parsers: to open a pipe waits for its other end, for ever and
// deaf to Ctrl-C. One in the place of any file of a model is refused at once.
func TestPipesAreRefused(t *testing.T) {
	pipe := func(path string) {
		os.Remove(path)
		if err := unix.Mkfifo(path, 0o600); err != nil {
			t.Skip("needs a file system with pipes: ", err)
		}
	}
	for _, name := range []string{hfConfig, hfIndex, "tokenizer.json", "chat_template.jinja", "model-00002-of-00003.safetensors"} {
		dir, _ := threeShards(t, true)
		pipe(filepath.Join(dir, name))
		m, err := Open(dir)
		if err == nil {
			m.Close()
		}
		if err == nil || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "regular file") {
			t.Errorf("%s is a pipe: %v", name, err)
		}
	}
	paths := split(t, t.TempDir(), asIs)
	pipe(paths[1])
	if _, err := Open(paths[0]); err == nil || !strings.Contains(err.Error(), paths[1]+": it is no regular file") {
		t.Errorf("a shard is a pipe: %v", err)
	}
	dir := t.TempDir() // what may be a colibri container
	write(t, filepath.Join(dir, hfConfig), []byte(`{}`))
	pipe(filepath.Join(dir, "out-00000.safetensors"))
	if m, err := Open(dir); err == nil {
		m.Close()
		t.Error("a container's file is a pipe, and it is opened")
	}
}

// Case 2: a file that is cut while its weights are requantized is told, with what to
// do; no slab appears, and made whole again it is gone on with.
func TestRequantizeCut(t *testing.T) {
	m, layers, parts := requantizable(t)
	path := m.Files[0].Path
	whole, stamp := readFile(t, path), must(os.Stat(path)).ModTime()
	types := map[string]quant.Type{}
	for _, p := range parts {
		types[p] = quant.Q8_0
	}
	out := filepath.Join(t.TempDir(), "s.slab")
	cut := false
	opt := PackOptions{Requantize: types, chunk: 4096, journal: 4096, Progress: func(what string, done, total int64) {
		if !cut && what == "packing" {
			cut = true
			if err := os.Truncate(path, m.Files[0].head+1000); err != nil {
				t.Fatal(err)
			}
		}
	}}
	_, err := Pack(context.Background(), m, layers, out, opt)
	var bad *FormatError
	if !errors.As(err, &bad) || bad.File != path || !strings.Contains(err.Error(), "cut short after it was opened") || !strings.Contains(err.Error(), ".part stays") {
		t.Errorf("cut: %v", err)
	}
	if _, err := os.Stat(out); err == nil {
		t.Error("a slab of a model that was cut")
	}
	f := must(os.OpenFile(path, os.O_WRONLY, 0)) // the very file, which is open
	if _, err := f.WriteAt(whole, 0); err != nil {
		t.Fatal(err)
	}
	f.Close()
	if err := os.Chtimes(path, stamp, stamp); err != nil {
		t.Fatal(err)
	}
	r, err := Pack(context.Background(), m, layers, out, opt)
	if err != nil || r.Resumed == 0 {
		t.Errorf("whole again: resumed from %d bytes: %v", r.Resumed, err)
	}
}
