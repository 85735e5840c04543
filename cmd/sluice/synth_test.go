package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestSynth: what it writes is a model, of the numbers asked for, the same for
// a seed and another for another.
func TestSynth(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, args ...string) []byte {
		t.Helper()
		path := filepath.Join(dir, name)
		o := mustRun(t, append([]string{"synth", "-o", path, "--vocab", tinyGLM4, "--hidden", "64", "--experts", "8", "--ff", "32", "--top-k", "3", "--json"}, args...)...).object(t)
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if o["output"] != path || number(t, o, "file_bytes") != int64(len(b)) {
			t.Errorf("%v, but the file has %d bytes", o, len(b))
		}
		return b
	}
	for _, arch := range []string{"glm4moe", "qwen3moe"} {
		first := write(arch, "--arch", arch, "--layers", "3")
		if !bytes.Equal(first, write("again", "--arch", arch, "--layers", "3", "--seed", "0")) {
			t.Errorf("%s: the same seed gave other bytes", arch)
		}
		if bytes.Equal(first, write("other", "--arch", arch, "--layers", "3", "--seed", "1")) {
			t.Errorf("%s: another seed gave the same bytes", arch)
		}
		path := filepath.Join(dir, arch)
		o := mustRun(t, "inspect", path, "--json").object(t)
		for key, want := range map[string]any{"architecture": arch, "layers": 3, "experts": 8, "expert_ff": 32, "top_k": 3, "hidden": 64, "vocab": 512} {
			if fmt.Sprint(o[key]) != fmt.Sprint(want) {
				t.Errorf("%s: %s is %v, want %v", arch, key, o[key], want)
			}
		}
		text := mustRun(t, "run", path, "2", "-p", verse, "-n", "5").out
		if text != mustRun(t, "run", path, "-p", verse, "-n", "5", "--storage", "mmap").out {
			t.Errorf("%s: two texts", arch)
		}
	}
	if r := mustRun(t, "synth", "-o", filepath.Join(dir, "both"), "--vocab", tinyGLM4, "--size", "1GiB", "--layers", "2", "--hidden", "64", "--experts", "2", "--ff", "32"); !strings.Contains(r.err, "--layers 2 sets the number of layers: --size 1GiB is not used") {
		t.Errorf("size and layers: %s", r.err)
	}
	write("nextn", "--layers", "3", "--nextn", "1")
	if n := number(t, mustRun(t, "inspect", filepath.Join(dir, "nextn"), "--json").object(t), "nextn_layers"); n != 1 {
		t.Errorf("%d drafting layers, want 1", n)
	}
	const size = 1 << 20
	if got := len(write("sized", "--size", "1MiB")); got < size*9/10 || got > size*11/10 {
		t.Errorf("--size 1MiB gave %d bytes", got)
	}
	r := mustRun(t, "synth", "-o", filepath.Join(dir, "told"), "--vocab", tinyGLM4, "--layers", "2", "--hidden", "64", "--experts", "2", "--ff", "32")
	if r.out != "" || r.err == "" {
		t.Errorf("it wrote %q and told %q", r.out, r.err)
	}
}

func TestParseSize(t *testing.T) {
	for text, want := range map[string]int64{
		"123": 123, "123B": 123, "8GiB": 8 << 30, "8GB": 8e9, "8G": 8e9, "500MB": 500e6, "1.5TiB": 3 << 39, "1k": 1000, "1 KiB": 1024, "0.5KiB": 512, "1e6": 1e6,
	} {
		if got, err := parseSize(text); err != nil || got != want {
			t.Errorf("%q is %d, want %d (%v)", text, got, want, err)
		}
	}
	for _, text := range []string{"", "B", "GiB", "iB", "1iB", "1XB", "1GGB", "1GiBB", "-1", "0", "0.1", "NaN", "Inf", "1e30", "0x10", "1 2", "8g", "8gib"} {
		if got, err := parseSize(text); err == nil {
			t.Errorf("%q is %d, want an error", text, got)
		}
	}
}
