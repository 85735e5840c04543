package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"sluice/cmd/engine"
	"sluice/storage"
)

// A pipe that nobody writes to does not hold up Ctrl-C.
func TestBlockedInput(t *testing.T) {
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Skipf("needs named pipes: %v", err)
	}
	r, w := io.Pipe()
	defer w.Close()
	for _, path := range []string{"-", fifo} {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := readFile(ctx, streams{in: r}, path); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// A text without an end is refused before it fills the memory.
func TestEndlessInput(t *testing.T) {
	_, err := readFile(t.Context(), streams{in: io.LimitReader(zeros{}, mostText+1)}, "-")
	if err == nil || !strings.Contains(err.Error(), "cut it into pieces") {
		t.Errorf("got %v", err)
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

// What is read is never written over.
func TestOutputIsNoInput(t *testing.T) {
	dir := t.TempDir()
	model, ids := filepath.Join(dir, "m.gguf"), filepath.Join(dir, "ids.json")
	before, err := os.ReadFile(tinyGLM4)
	if err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, "link")
	for _, err := range []error{os.WriteFile(model, before, 0o666), os.WriteFile(ids, []byte("[1,2]"), 0o666), os.Symlink(model, link)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, out := range []string{model, ids, link} {
		r := sluice("", "logits", model, "--ids", ids, "-o", out)
		if r.code != exitUsage || !strings.Contains(r.err, "which is read: name another file") {
			t.Errorf("-o %s: exit %d\n%s", out, r.code, r.err)
		}
	}
	if r := sluice("", "synth", "-o", model, "--layers", "2", "--vocab", model); r.code != exitUsage {
		t.Errorf("synth over its vocabulary: exit %d\n%s", r.code, r.err)
	}
	if after, err := os.ReadFile(model); err != nil || !bytes.Equal(after, before) {
		t.Errorf("the model has changed: %v", err)
	}
}

// A null among the ids is no token 0, an empty MODEL not the demo, and a pipe
// beside the model no slab.
func TestSilentDefaults(t *testing.T) {
	dir := t.TempDir()
	ids := filepath.Join(dir, "ids.json")
	if err := os.WriteFile(ids, []byte("[5,null,7]"), 0o666); err != nil {
		t.Fatal(err)
	}
	if r := sluice("", "logits", tinyGLM4, "--ids", ids, "-o", filepath.Join(dir, "o")); r.code != exitError || !strings.Contains(r.err, "id 1 of the array is null") {
		t.Errorf("null: exit %d\n%s", r.code, r.err)
	}
	for _, args := range [][]string{{"run", "", "-p", "hi"}, {"run", "--model", "", "-p", "hi"}, {"inspect", ""}} {
		if r := sluice("", args...); r.code != exitUsage || !strings.Contains(r.err, "MODEL is empty") {
			t.Errorf("%q: exit %d\n%s", args, r.code, r.err)
		}
	}
	model := filepath.Join(dir, "q.gguf")
	b, err := os.ReadFile(tinyGLM4)
	if err == nil {
		err = os.WriteFile(model, b, 0o666)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(filepath.Join(dir, "q.slab"), 0o600); err != nil {
		t.Skipf("needs named pipes: %v", err)
	}
	if r := sluice("", "run", model, "-p", "hi", "-n", "1"); r.code != exitDone || !strings.Contains(r.err, "q.slab is not used: it is no regular file") {
		t.Errorf("pipe beside the model: exit %d\n%s", r.code, r.err)
	}
}

// A chat template that does not end does not hold up Ctrl-C.
func TestEndlessTemplate(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	p := &engine.Plan{File: &storage.Model{}}
	meta, err := storage.NewMeta("test", []storage.KV{{Key: "tokenizer.chat_template",
		Value: "{% for a in range(1000) %}{% for b in range(1000) %}{% endfor %}{% endfor %}"}})
	if err != nil {
		t.Fatal(err)
	}
	p.File.Meta = meta
	file, err := storage.Open(demo)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if p.Tokens, err = engine.Tokenizer(file); err != nil {
		t.Fatal(err)
	}
	if _, err := chatText(ctx, p, "hi", &conversation{}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}
