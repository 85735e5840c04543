package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// denseModel is a dense model with the demo's tokens.
func denseModel(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "dense.gguf")
	mustRun(t, "synth", "--arch", "qwen3", "--layers", "2", "--hidden", "128", "-o", path, "--vocab", demo)
	return path
}

// Each command takes a dense model, and says in words what has no meaning for it.
func TestDense(t *testing.T) {
	path := denseModel(t)
	dir := filepath.Dir(path)
	holds := func(r result, texts ...string) {
		t.Helper()
		r.wants(t, exitDone)
		for _, text := range texts {
			if !strings.Contains(r.out+r.err, text) {
				t.Errorf("no %q in\n%s%s", text, r.out, r.err)
			}
		}
	}
	holds(sluice("", "inspect", path), "architecture   qwen3 (", "2, 0 of them with experts", "none: the model is dense, its feed-forwards are 256 wide", "a token reads nothing from the drive", "dense FF ")
	o := mustRun(t, "inspect", path, "--json").object(t)
	if number(t, o, "experts") != 0 || number(t, o, "bytes_per_token") != 0 || number(t, o, "leading_dense_layers") != 2 {
		t.Errorf("%v", o)
	}
	holds(sluice("", "plan", path, "8"), "--cap: without effect, since the model is dense", "experts  none: the model is dense, all of it stays in memory", "lru      0 B")
	o = mustRun(t, "plan", path, "--json").object(t)
	if number(t, o, "cap") != 0 || number(t, o, "held_pct") != 100 || number(t, o, "ram_bytes", "lru") != 0 || number(t, o, "ram_bytes", "dense") < 1_000_000 {
		t.Errorf("%v", o)
	}
	text := []string{"-p", "The old", "-n", "12", "--temp", "0"}
	with := func(args ...string) result { return sluice("", append(args, text...)...) }
	holds(with("run", path), "experts: none, the model is dense")
	holds(with("run", path, "4", "--pin", "3"), "--cap, --pin: without effect")
	want := at(t, with("run", path, "--json").object(t), "logits_crc32c")
	for _, args := range [][]string{{"--draft-model", path, "--draft-force"}, {"--storage", "mmap"}, {"--storage", "pread", "--threads", "1", "--chunk", "3"}, {"--draft", "lookup", "--draft-force"}} {
		if got := at(t, with(append([]string{"run", path, "--json"}, args...)...).object(t), "logits_crc32c"); got != want {
			t.Errorf("%q: logits %v, want %v", args, got, want)
		}
	}
	with("run", path, "--trace", filepath.Join(dir, "t.csv")).wants(t, exitUsage, "the model is dense: it has no routers")
	holds(sluice("", "doctor", path, "--seconds", "0"), "dense: all of it stays in memory")
	long := filepath.Join(dir, "text")
	if err := os.WriteFile(long, []byte(strings.Repeat("In the beginning was the word. ", 20)), 0o666); err != nil {
		t.Fatal(err)
	}
	holds(sluice("", "perplexity", path, long, "--ctx", "32"), "perplexity")
	for _, args := range [][]string{{"cap", "--caps", "2,4"}, {"limit"}} {
		sluice("", append([]string{"bench", args[0], path}, args[1:]...)...).wants(t, exitError, "the model is dense: all of it stays in memory and no token reads from the drive")
	}
	sluice("", "pack", path, "--quant", "q4_0").wants(t, exitError, "nothing to requantize: the model has no such weights")
	holds(sluice("", "pack", path), "0 experts, 25 other tensors, read back and verified")
	holds(sluice("", "verify", path), "0 packed experts, compared with the model that was packed: 0 bad")
	if got := at(t, with("run", path, "--json").object(t), "logits_crc32c"); got != want { // from the slab
		t.Errorf("packed: logits %v, want %v", got, want)
	}
	sluice("", "synth", "--arch", "qwen3", "--layers", "2", "--experts", "4", "-o", path, "--vocab", demo).wants(t, exitUsage, "qwen3 is dense")
}

// A dense model of the same tokens drafts for the demo, by each flag that asks for it,
// and changes no bit; what it takes is told, and planned.
func TestDraftModel(t *testing.T) {
	path := denseModel(t)
	run := func(args ...string) map[string]any {
		return mustRun(t, append([]string{"run", demo, "8", "-p", verse, "-n", "24", "--temp", "0", "--json"}, args...)...).object(t)
	}
	want := at(t, run("--draft", "off"), "logits_crc32c")
	for _, c := range []struct {
		args   []string
		forced bool
	}{
		{[]string{"--draft-model", path}, false},
		{[]string{"--draft-model", path, "--draft", "auto"}, false},
		{[]string{"--draft-model", path, "--draft", "model", "--draft-depth", "3"}, false},
		{[]string{"--draft-model", path, "--draft", "model", "--draft-force"}, true},
		{[]string{"--draft-model", path, "--draft-depth", "8", "--draft-force"}, true},
	} {
		o := run(c.args...)
		if at(t, o, "logits_crc32c") != want || at(t, o, "draft", "drafter") != "model" || at(t, o, "settings", "draft-model", "value") != path {
			t.Errorf("%q: %v, settings %v", c.args, o["draft"], o["settings"])
		}
		if n := number(t, o, "counters", "draft_proposed"); c.forced != (n > 0) {
			t.Errorf("%q: %d proposed", c.args, n)
		}
	}
	alone := mustRun(t, "plan", demo, "8", "--json", "--drive-rate", "1", "--draft", "off").object(t)
	beside := mustRun(t, "plan", demo, "8", "--json", "--drive-rate", "1", "--draft-model", path)
	beside.wants(t, exitDone, "draft model "+path+": ", "weights 0.00154 GB")
	small := mustRun(t, "plan", path, "--json", "--ctx", "4096").object(t)
	for _, purpose := range []string{"dense", "kv", "scratch"} {
		if got, want := number(t, beside.object(t), "ram_bytes", purpose)-number(t, alone, "ram_bytes", purpose), number(t, small, "ram_bytes", purpose); got != want {
			t.Errorf("%s: %d bytes for the draft model, want %d", purpose, got, want)
		}
	}

	t.Setenv("SLUICE_TEST_MAIN", "1") // the processes are this binary again
	r := mustRun(t, "bench", "draft", demo, "--caps", "8", "--depths", "2", "--drafters", "model", "--draft-model", path, "--gated", "--runs", "1", "-n", "8", "--temp", "0")
	for _, want := range []string{"cap 8 model 2 against cap 8 off", "cap 8 model auto against cap 8 off"} {
		if !strings.Contains(r.out, want) {
			t.Errorf("no %q in\n%s", want, r.out)
		}
	}
	t.Setenv("SLUICE_TEST_MAIN", "")

	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"--draft-model", tinyGLM4}, exitError, "its tokens are not those of " + demo},
		{[]string{"--draft-model", path, "--draft", "lookup"}, exitUsage, "is for --draft model, not for --draft lookup"},
		{[]string{"--draft-model", path, "--draft", "auto", "--draft-force"}, exitUsage, "--draft-force makes a named drafter draft always"},
		{[]string{"--draft-model", broken(t, path)}, exitError, "draft model: storage: "},
	} {
		sluice("", append([]string{"run", demo, "8", "-p", verse, "-n", "2"}, c.args...)...).wants(t, c.code, c.want)
	}
}

// broken is a copy of a model whose end is missing.
func broken(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(t.TempDir(), "broken.gguf")
	if err := os.WriteFile(path, b[:len(b)-1000], 0o666); err != nil {
		t.Fatal(err)
	}
	return path
}
