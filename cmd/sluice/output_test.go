package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestReplaces: a command replaces what it has written itself, and an empty file, but no
// file of somebody else, unless told to.
func TestReplaces(t *testing.T) {
	dir := t.TempDir()
	ids := filepath.Join(dir, "ids")
	if err := os.WriteFile(ids, []byte("[1, 2]"), 0o666); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(dir, "out")
	for _, c := range []struct {
		name, what string
		args       []string
	}{
		{"synth", "-o " + out + " is there already and is not a model of synth", []string{"synth", "-o", out, "--layers", "2", "--hidden", "64", "--experts", "2", "--ff", "32", "--top-k", "1"}},
		{"logits", "-o " + out + " is there already and is not the output of logits", []string{"logits", tinyGLM4, "--ids", ids, "-o", out}},
		{"pack", "-o " + out + " is there already and is not a slab", []string{"pack", tinyGLM4, "-o", out}},
		{"trace", "--trace " + out + " is there already and is not a trace", []string{"run", tinyGLM4, "-p", "a", "-n", "2", "--trace", out}},
	} {
		t.Run(c.name, func(t *testing.T) {
			os.Remove(out)
			mustRun(t, c.args...)
			first := read(t, out)
			mustRun(t, c.args...) // its own
			if c.name != "trace" && read(t, out) != first {
				t.Error("the second is another file")
			}
			foreign := []string{"a letter of somebody's", read(t, tinyGLM4)}
			for _, text := range foreign {
				if err := os.WriteFile(out, []byte(text), 0o666); err != nil {
					t.Fatal(err)
				}
				r := sluice("", c.args...)
				r.wants(t, exitUsage, c.what)
				if read(t, out) != text {
					t.Fatal("it was changed")
				}
				if c.name == "trace" {
					continue
				}
				if !strings.Contains(r.err, "--force") {
					t.Errorf("the words do not say how: %s", r.err)
				}
				mustRun(t, append(c.args, "--force")...)
			}
			if err := os.WriteFile(out, nil, 0o666); err != nil {
				t.Fatal(err)
			}
			mustRun(t, c.args...)
		})
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
