package main

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"sluice/storage"
)

// TestMain lets the test binary be sluice itself, for tests that need a process
// of their own: see child.
func TestMain(m *testing.M) {
	if os.Getenv("SLUICE_TEST_MAIN") == "" && !(len(os.Args) == 2 && os.Args[1] == renderName) {
		os.Exit(m.Run())
	}
	if procs := os.Getenv("SLUICE_TEST_CGROUP"); procs != "" { // join, then start afresh so that all memory is counted there
		if err := os.WriteFile(procs, []byte("0"), 0); err != nil {
			io.WriteString(os.Stderr, err.Error()+"\n")
			os.Exit(125)
		}
		os.Unsetenv("SLUICE_TEST_CGROUP")
		exe, err := os.Executable()
		if err == nil {
			err = syscall.Exec(exe, os.Args, os.Environ())
		}
		io.WriteString(os.Stderr, err.Error()+"\n")
		os.Exit(125)
	}
	os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

const (
	tinyGLM4  = "../engine/testdata/glm4_moe.gguf"
	tinyQwen3 = "../engine/testdata/qwen3_moe.gguf"
	demo      = "../../" + demoModel
)

// result is what a run of sluice left behind.
type result struct {
	code     int
	out, err string
}

// sluice runs the program in this process, with in as its standard input.
func sluice(in string, args ...string) result {
	var out, errw bytes.Buffer
	code := run(args, strings.NewReader(in), &out, &errw)
	return result{code, out.String(), tidy(errw.String())}
}

// fallback is what a run says, rightly, on a system or in a build without
// direct reads by io_uring, where all else must hold too.
var fallback = regexp.MustCompile(`(?m)^storage: (io_uring|O_DIRECT) .*; using (buffered )?pread\n`)

func tidy(errText string) string { return fallback.ReplaceAllString(errText, "") }

// mustRun is sluice for what has to work.
func mustRun(t *testing.T, args ...string) result {
	t.Helper()
	r := sluice("", args...)
	if r.code != exitDone {
		t.Fatalf("sluice %q: exit %d: %s", args, r.code, r.err)
	}
	return r
}

// child is a process of sluice, not yet started.
func child(t *testing.T, env []string, args ...string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(exe, args...)
	c.Env = append(append(os.Environ(), "SLUICE_TEST_MAIN=1"), env...)
	return c
}

// wants checks the exit code and that standard error holds each text.
func (r result) wants(t *testing.T, code int, texts ...string) {
	t.Helper()
	if r.code != code {
		t.Errorf("exit %d, want %d\n%s", r.code, code, r.err)
	}
	for _, text := range texts {
		if !strings.Contains(r.err, text) {
			t.Errorf("standard error lacks %q:\n%s", text, r.err)
		}
	}
	if code != exitDone && r.out != "" {
		t.Errorf("a failure wrote %q to standard output", r.out)
	}
}

// object is the one JSON object that standard output holds.
func (r result) object(t *testing.T) map[string]any {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(r.out))
	d.UseNumber()
	var v map[string]any
	if err := d.Decode(&v); err != nil {
		t.Fatalf("no JSON object: %v\n%s", err, r.out)
	}
	if rest, _ := io.ReadAll(d.Buffered()); strings.TrimSpace(string(rest)) != "" {
		t.Fatalf("more than one JSON object: %s", rest)
	}
	return v
}

// at is the value under a path of keys.
func at(t *testing.T, v any, keys ...string) any {
	t.Helper()
	for _, k := range keys {
		m, ok := v.(map[string]any)
		if !ok || m[k] == nil {
			t.Fatalf("the object has no %q of %q", k, keys)
		}
		v = m[k]
	}
	return v
}

// number is the integer under a path of keys.
func number(t *testing.T, v any, keys ...string) int64 {
	t.Helper()
	n, ok := at(t, v, keys...).(json.Number)
	if !ok {
		t.Fatalf("%q is %v, not a number", keys, at(t, v, keys...))
	}
	i, err := n.Int64()
	if err != nil {
		t.Fatalf("%q is %v, not an integer", keys, n)
	}
	return i
}

// texts is an array as its elements' texts.
func texts(t *testing.T, v any, keys ...string) []string {
	t.Helper()
	list, ok := at(t, v, keys...).([]any)
	if !ok {
		t.Fatalf("%q is no array", keys)
	}
	out := make([]string, len(list))
	for i, e := range list {
		b, err := json.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		out[i] = string(b)
	}
	return out
}

// copyModel writes a model like another, its metadata changed by edit, and
// returns its path.
func copyModel(t *testing.T, from string, edit func([]storage.KV) []storage.KV) string {
	t.Helper()
	m, err := storage.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	var kvs []storage.KV
	for _, key := range m.Meta.Keys() {
		kvs = append(kvs, storage.KV{Key: key, Value: m.Meta.Value(key)})
	}
	var specs []storage.TensorSpec
	for _, ts := range m.Tensors {
		specs = append(specs, storage.TensorSpec{Name: ts.Name, Type: ts.Type, Dims: ts.Dims})
	}
	path := filepath.Join(t.TempDir(), "copy.gguf")
	w, err := storage.CreateGGUF(path, edit(kvs), specs)
	if err != nil {
		t.Fatal(err)
	}
	for _, ts := range m.Tensors {
		b := make([]byte, ts.Bytes)
		if err := m.ReadTensor(b, ts); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(b); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Finish(); err != nil {
		t.Fatal(err)
	}
	return path
}

// with is an edit that sets keys.
func with(set ...storage.KV) func([]storage.KV) []storage.KV {
	return func(kvs []storage.KV) []storage.KV {
	next:
		for _, s := range set {
			for i := range kvs {
				if kvs[i].Key == s.Key {
					kvs[i].Value = s.Value
					continue next
				}
			}
			kvs = append(kvs, s)
		}
		return kvs
	}
}

// file writes a file into a folder of the test and returns its path.
func file(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
		t.Fatal(err)
	}
	return path
}

// shared is a file of the shared oracles.
func shared(t *testing.T, name string) string {
	t.Helper()
	dir := os.Getenv("SLUICE_SHARED")
	if dir == "" {
		dir = "../../../shared"
	}
	path := filepath.Join(dir, name)
	if _, err := os.Stat(path); err != nil {
		t.Skip("needs the shared oracles: set SLUICE_SHARED")
	}
	return path
}

func TestHelp(t *testing.T) {
	for _, args := range [][]string{{"help"}, {"-h"}, {"--help"}} {
		r := mustRun(t, args...)
		for _, c := range commands() {
			if !strings.Contains(r.out, "sluice "+c.name) {
				t.Errorf("%q does not name the command %s", args, c.name)
			}
		}
		if r.err != "" {
			t.Errorf("%q wrote to standard error: %s", args, r.err)
		}
	}
	for _, c := range commands() {
		for _, flag := range []string{"--help", "-h"} {
			r := mustRun(t, c.name, flag)
			if !strings.HasPrefix(r.out, "sluice "+c.name+": ") || !strings.Contains(r.out, "--json") || r.err != "" {
				t.Errorf("%s %s: got %q and on standard error %q", c.name, flag, r.out, r.err)
			}
		}
	}
}

func TestCommands(t *testing.T) {
	sluice("").wants(t, exitUsage, "sluice run ", "sluice COMMAND --help")
	sluice("", "rum").wants(t, exitUsage, `unknown command "rum"`, "sluice help lists the commands")
	sluice("", "").wants(t, exitUsage, `unknown command ""`)
	for _, c := range commands() {
		sluice("", c.name, "--no-such-flag").wants(t, exitUsage, "unknown flag: --no-such-flag", "usage: sluice "+c.name)
		sluice("", c.name, "-y").wants(t, exitUsage, "unknown shorthand flag: 'y'")
		sluice("", c.name, "--json=perhaps").wants(t, exitUsage, "--json")
	}
}

// TestDemo: no MODEL is the demo, beside the executable or else in the working
// folder or one above it.
func TestDemo(t *testing.T) {
	whole, err := filepath.Abs(demo)
	if err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// place makes a folder with bin/sluice and, if asked, models/demo.
	place := func(model bool) string {
		dir, err := filepath.EvalSymlinks(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		for _, sub := range []string{"bin", "models", "a/b"} {
			if err := os.MkdirAll(filepath.Join(dir, sub), 0o777); err != nil {
				t.Fatal(err)
			}
		}
		if os.Link(exe, filepath.Join(dir, "bin/sluice")) != nil { // another file system
			program, err := os.ReadFile(exe)
			if err == nil {
				err = os.WriteFile(filepath.Join(dir, "bin/sluice"), program, 0o777)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if model {
			if err := os.Symlink(whole, filepath.Join(dir, demoModel)); err != nil {
				t.Fatal(err)
			}
		}
		return dir
	}
	full, empty := place(true), place(false)
	for _, c := range []struct {
		name, exe, dir, want string
	}{
		{"beside the executable", full, empty, full},
		{"in the working folder", empty, full, full},
		{"above the working folder", empty, filepath.Join(full, "a/b"), full},
		{"beside the executable first", full, filepath.Dir(filepath.Dir(whole)), full},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out, errw bytes.Buffer
			cmd := child(t, nil, "run", "--print-config", "--json")
			cmd.Path, cmd.Dir, cmd.Stdout, cmd.Stderr = filepath.Join(c.exe, "bin/sluice"), c.dir, &out, &errw
			if err := cmd.Run(); err != nil {
				t.Fatal(err, errw.String())
			}
			model := at(t, result{out: out.String()}.object(t), "settings", "model")
			if got := at(t, model, "value"); got != filepath.Join(c.want, demoModel) || at(t, model, "origin") != "default" {
				t.Errorf("the model is %v, want %s by default", model, filepath.Join(c.want, demoModel))
			}
		})
	}
	t.Run("nowhere", func(t *testing.T) {
		for _, args := range [][]string{{"run", "-p", "a"}, {"inspect"}, {"tokenize"}, {"synth", "-o", "x", "--layers", "2"}} {
			var out, errw bytes.Buffer
			cmd := child(t, nil, args...)
			cmd.Path, cmd.Dir, cmd.Stdout, cmd.Stderr = filepath.Join(empty, "bin/sluice"), filepath.Join(empty, "a"), &out, &errw
			cmd.Run()
			result{cmd.ProcessState.ExitCode(), out.String(), errw.String()}.wants(t, exitUsage, "no model named",
				filepath.Join(empty, demoModel), filepath.Join(empty, "a", demoModel))
			if n := strings.Count(errw.String(), filepath.Join(empty, demoModel)); n != 1 {
				t.Errorf("a place is named %d times: %s", n, errw.String())
			}
		}
	})
}
