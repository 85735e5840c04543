package main

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sluice/internal/quant"
	"sluice/storage"
)

// TestUsage: each mistake in the arguments exits with 2 and says what to do.
func TestUsage(t *testing.T) {
	text := file(t, "text", "some text")
	long := strings.Repeat("word ", 200)
	ids := file(t, "ids", "[1, 2]")
	many := file(t, "ids", "[1"+strings.Repeat(",1", 128)+"]") // of 128 positions
	for _, c := range []struct {
		args, want string // _ stands for the model; spaces part the arguments
	}{
		{"run _ 0 -p a", "cap 0: it is the number of experts per layer that stay in RAM, at least 1"},
		{"run _ -1 -p a", "cap -1: it is the number of experts per layer"},
		{"run _ -p a -17", "cap -17: it is the number of experts per layer"},
		{"run -1 -p a", "cap -1: it is the number of experts per layer"},
		{"run 0 -p a", "cap 0: it is the number of experts per layer"},
		{"run _ --cap 0 -p a", "cap 0: it is"},
		{"run _ --cap -1 -p a", "cap -1: it is"},
		{"run _ --cap=-1 -p a", "cap -1: it is"},
		{"perplexity _ TEXT 0", "cap 0: it is"},
		{"perplexity _ TEXT -1", "cap -1: it is"},
		{"logits _ 0 --ids IDS -o x", "cap 0: it is"},
		{"run _ --cap many -p a", `invalid argument "many" for "--cap"`},
		{"run _ --cap 1.5 -p a", `invalid argument "1.5" for "--cap"`},
		{"run _ --cap 99999999999999999999 -p a", `invalid argument "99999999999999999999" for "--cap"`},
		{"run _ 8 --cap 4 -p a", "--cap 4 and the argument 8 both give the cap: use one"},
		{"run _ 8 9 -p a", `unexpected argument "9"`},
		{"run _ eight -p a", `unexpected argument "eight"`},
		{"run --model _ _ -p a", "both give the model: name each copy by --model, or none"},
		{"perplexity _ TEXT 8 9", `unexpected argument "9"`},
		{"tokenize _ 8", `unexpected argument "8"`},
		{"inspect _ 8", `unexpected argument "8"`},
		{"run _ -p", "flag needs an argument"},
		{"run _", "no text to continue: give one with -p TEXT or -f FILE"},
		{"run _ -p a -f TEXT", "-p and -f both give the text: use one"},
		{"run _ -p EMPTY", "the text is empty: there is nothing to continue"},
		{"run _ -p LONG", "601 tokens do not fit into a context of 128: shorten the text or raise --ctx"},
		{"run _ -p LONG -n 0 --ctx 64", "601 tokens do not fit into a context of 64"},
		{"run _ -n -2 -p a", "-n -2: use 0 or more tokens, or -1 until the context is full"},
		{"run _ -n few -p a", `invalid argument "few"`},
		{"run _ -n -1 --bogus -p a", "unknown flag: --bogus"}, // not the cap
		{"run _ --threads 0 -p a", "--threads 0: use 1 to 1024"},
		{"run _ --threads -3 -p a", "--threads -3: use 1 to 1024"},
		{"run _ --threads 2000 -p a", "--threads 2000: use 1 to 1024"},
		{"run _ --chunk 0 -p a", "--chunk 0: use 1 to 1048576"},
		{"run _ --chunk 2000000 -p a", "--chunk 2000000: use 1 to 1048576"},
		{"run _ --ctx 0 -p a", "--ctx 0: use 1 to 134217728"},
		{"run _ --ctx -1 -p a", "--ctx -1: use 1 to 134217728"},
		{"run _ --ctx 999999999 -p a", "--ctx 999999999: use 1 to 134217728"},
		{"run _ --kv f8 -p a", `--kv: unknown KV cache type "f8": use f16, f32 or q8`},
		{"run _ --storage ram -p a", `--storage: unknown storage mode "ram": use slab, pread or mmap`},
		{"run _ --io-depth 0 -p a", "--io-depth 0: use 1 to 4096"},
		{"run _ --io-depth 5000 -p a", "--io-depth 5000: use 1 to 4096"},
		{"bench", "name what to measure: storage"},
		{"bench ram", `unknown measurement "ram": use one of storage, cap, draft, experts, limit`},
		{"bench storage _ 8", `unexpected argument "8"`},
		{"bench storage _ --seconds 0", "--seconds is above 0"},
		{"bench storage _ --samples 0", "--samples and --pairs are at least 1"},
		{"bench storage _ --depths 0", "--depths 0: use 1 to 1024"},
		{"bench storage _ --modes ram", `--modes "ram": use io_uring, pread or mmap`},
		{"bench storage _ --size big", `--size "big": use a number of bytes`},
		{"run _ -p a --draft-depth 0", `--draft-depth "0": use 1 to 8, or auto`},
		{"run _ -p a --draft-depth 9", `--draft-depth "9": use 1 to 8, or auto`},
		{"run _ -p a --draft-depth -1", `--draft-depth "-1": use 1 to 8, or auto`},
		{"run _ -p a --draft off --draft-depth 2", "--draft-depth 2 is for a drafter, and --draft is off"},
		{"run _ -p a --draft off --draft-force", "use it with --draft mtp, lookup, model or replay, not off"},
		{"run _ -p a --draft MTP", `there is no drafter "MTP": use one of off, auto, mtp, lookup, model, replay`},
		{"run _ -p a --draft=", "--draft is empty"},
		{"run _ -p a --draft-model=", "--draft-model is empty"},
		{"run _ -p a --draft-replay=", "--draft-replay is empty"},
		{"run _ -p a --draft replay", "--draft replay needs --draft-replay FILE@ACCEPTANCE"},
		{"run _ --temp -1 -p a", "temperature -1: use 0 (greedy) to 100"},
		{"run _ --temp NaN -p a", "temperature NaN: use 0 (greedy) to 100"},
		{"run _ --temp Inf -p a", "temperature +Inf: use 0 (greedy) to 100"},
		{"run _ --temp hot -p a", `invalid argument "hot" for "--temp"`},
		{"run _ --top-k -1 -p a", "top-k -1: use 0 (all) or more"},
		{"run _ --top-p 0 -p a", "top-p 0: use above 0, up to 1 (all)"},
		{"run _ --top-p 1.5 -p a", "top-p 1.5: use above 0"},
		{"run _ --min-p -0.1 -p a", "min-p -0.1: use 0 (none) to 1"},
		{"run _ --repeat-penalty 0 -p a", "repeat penalty 0: use above 0"},
		{"run _ --seed -1 -p a", `invalid argument "-1" for "--seed"`},
		{"run nosuchmodel --temp -1 -p a", "temperature -1"}, // flags are looked at first
		{"perplexity", "no text to measure: give FILE"},
		{"perplexity _ TEXT --ctx 3", "--ctx 3: chunks have at least 4 tokens"},
		{"logits _ --ids IDS", "logits needs --ids FILE and -o OUT.safetensors"},
		{"logits _ -o x", "logits needs --ids FILE and -o OUT.safetensors"},
		{"logits _ --ids MANY -o OUT", "129 tokens do not fit into a context of 128"},
		{"logits _ --ids IDS -o OUT --ctx 1", "2 tokens do not fit into a context of 1"},
		{"synth --size 1MB", "synth needs -o FILE, and --size or --layers"},
		{"synth -o OUT", "synth needs -o FILE, and --size or --layers"},
		{"synth -o OUT --size big", `--size: "big" is no size: use a number of bytes, or one like 8GiB or 500MB`},
		{"synth -o OUT --size -5", `--size: "-5" is no size`},
		{"synth -o OUT --size 0", `--size: "0" is no size`},
		{"synth -o OUT --size 8XiB", `--size: "8XiB" is no size`},
		{"synth -o OUT --size NaN", `--size: "NaN" is no size`},
		{"synth -o OUT --size 9e99GiB", `--size: "9e99GiB" is no size`},
		{"synth -o OUT --size 100 --vocab _", "100 bytes are too few"},
		{"synth -o OUT --size 900TiB --vocab _", "bytes are too many"},
		{"synth -o OUT --size 1GiB --arch llama --vocab _", `architecture "llama": use glm4moe, qwen3moe or qwen3`},
		{"synth -o OUT --layers -1 --vocab _", "--layers -1: it must be at least 1"},
		{"synth -o OUT --layers 3 --hidden 0 --vocab _", "--hidden 0: it must be at least 1"},
		{"synth -o OUT --layers 3 --hidden 100 --vocab _", "hidden is 100: use a multiple of 64"},
		{"synth -o OUT --layers 3 --experts 5000 --vocab _", "experts is 5000"},
		{"synth -o OUT --layers 3 --ff 33 --vocab _", "ff is 33"},
		{"synth -o OUT --layers 3 --experts 4 --top-k 5 --vocab _", "top-k is 5: use 1 to 4, the number of experts"},
		{"synth -o OUT --layers 3 --nextn 2 --vocab _", "nextn is 2"},
		{"synth -o OUT --layers 3 --seed x --vocab _", `invalid argument "x" for "--seed"`},
		{"synth _ -o OUT --layers 3", "unexpected argument"},
	} {
		t.Run(c.args, func(t *testing.T) {
			out := filepath.Join(t.TempDir(), "out")
			args := strings.Fields(c.args)
			words := map[string]string{"_": tinyGLM4, "TEXT": text, "IDS": ids, "MANY": many, "OUT": out, "LONG": long, "EMPTY": ""}
			for i, a := range args {
				if w, ok := words[a]; ok {
					args[i] = w
				}
			}
			sluice("", args...).wants(t, exitUsage, "sluice "+args[0]+": ", c.want)
			none(t, filepath.Dir(out))
		})
	}
}

// none checks that a folder is empty.
func none(t *testing.T, dir string) {
	t.Helper()
	left, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range left {
		t.Errorf("%s was left behind", f.Name())
	}
}

// TestCapLowered: a cap above the experts is lowered in these words, and works.
func TestCapLowered(t *testing.T) {
	for _, args := range [][]string{{"320"}, {"--cap", "320"}} {
		r := mustRun(t, append([]string{"run", demo, "-p", "a", "-n", "1"}, args...)...)
		line, _, _ := strings.Cut(r.err, "\n")
		if line != "cap lowered 320 -> 32 (the model has 32 experts per layer)" {
			t.Errorf("%q: the first line is %q", args, line)
		}
	}
	r := mustRun(t, "run", demo, "32", "-p", "a", "-n", "1")
	if strings.Contains(r.err, "lowered") {
		t.Errorf("a cap of all experts was lowered: %s", r.err)
	}
}

// TestNoRoom: what does not fit even with cap 1 is refused, before it is loaded.
func TestNoRoom(t *testing.T) {
	const positions = 1 << 27
	m := copyModel(t, tinyGLM4, with(storage.KV{Key: "glm4moe.context_length", Value: uint32(positions)}))
	sluice("", "run", m, "1", "-p", "a", "--ctx", fmt.Sprint(positions), "--kv", "f32").wants(t, exitRefused,
		"not enough memory for one expert per layer (cap 1)", "needed in all", "available", "shorten --ctx")
}

// settings are the values and origins that --print-config gives.
func settings(t *testing.T, args ...string) map[string]string {
	t.Helper()
	got := map[string]string{}
	list, ok := at(t, mustRun(t, append(args, "--print-config", "--json")...).object(t), "settings").(map[string]any)
	if !ok {
		t.Fatal("settings is no object")
	}
	for name, s := range list {
		got[name] = fmt.Sprint(at(t, s, "value"), " ", at(t, s, "origin"))
	}
	return got
}

// TestPositional: which argument is what.
func TestPositional(t *testing.T) {
	abs := func(p string) string {
		p, err := filepath.Abs(p)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	tiny, whole := abs(tinyGLM4), abs(demo)
	t.Chdir(filepath.Dir(whole)) // the demo is found from here
	byDemo := whole + " default"
	dir := t.TempDir()
	numbered := filepath.Join(dir, "8")
	data, err := os.ReadFile(tiny)
	if err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string][]byte{"8": data, "text": []byte("text"), "9": []byte("text")} {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	text := filepath.Join(dir, "text")
	for _, c := range []struct {
		args       []string
		model, cap string
	}{
		{[]string{"run"}, byDemo, "32 auto"},
		{[]string{"run", "8"}, byDemo, "8 argument"},
		{[]string{"run", "--cap", "8"}, byDemo, "8 flag"},
		{[]string{"run", tiny}, tiny + " argument", "16 auto"},
		{[]string{"run", tiny, "8"}, tiny + " argument", "8 argument"},
		{[]string{"run", "--cap", "8", tiny}, tiny + " argument", "8 flag"},
		{[]string{"run", tiny, "8", "--model", tiny}, "", ""},
		{[]string{"run", "--model", tiny}, tiny + " flag", "16 auto"},
		{[]string{"run", "--model", tiny, "8"}, tiny + " flag", "8 argument"},
		{[]string{"run", "8", "--model", tiny}, tiny + " flag", "8 argument"},
		{[]string{"logits", "8"}, byDemo, "8 argument"},
		{[]string{"logits", tiny, "8"}, tiny + " argument", "8 argument"},
		{[]string{"perplexity"}, byDemo, "32 auto"},
		{[]string{"perplexity", text}, byDemo, "32 auto"},
		{[]string{"perplexity", text, "8"}, byDemo, "8 argument"},
		{[]string{"perplexity", tiny, text}, tiny + " argument", "16 auto"},
		{[]string{"perplexity", tiny, text, "8"}, tiny + " argument", "8 argument"},
		{[]string{"perplexity", "--model", tiny, text}, tiny + " flag", "16 auto"},
		{[]string{"perplexity", "--model", tiny, text, "8"}, tiny + " flag", "8 argument"},
	} {
		t.Run(strings.Join(c.args, " "), func(t *testing.T) {
			if c.model == "" {
				sluice("", append(c.args, "--print-config")...).wants(t, exitUsage, "both give the model")
				return
			}
			got := settings(t, c.args...)
			if got["model"] != c.model || got["cap"] != c.cap {
				t.Errorf("model %s, cap %s; want %s, %s", got["model"], got["cap"], c.model, c.cap)
			}
		})
	}
	t.Run("a file named like a number", func(t *testing.T) {
		t.Chdir(dir)
		for _, c := range []struct {
			args       []string
			model, cap string
		}{
			{[]string{"run", "8"}, "8 argument", "16 auto"},
			{[]string{"run", "8", "8"}, "8 argument", "8 argument"},
			{[]string{"run", "8", "4"}, "8 argument", "4 argument"},
			{[]string{"run", tiny, "8"}, tiny + " argument", "8 argument"}, // not alone
			{[]string{"run", "--model", numbered, "8"}, numbered + " flag", "8 argument"},
			{[]string{"perplexity", "8", "9"}, "8 argument", "16 auto"},
			{[]string{"perplexity", "8", "text", "9"}, "8 argument", "9 argument"},
		} {
			got := settings(t, c.args...)
			if got["model"] != c.model || got["cap"] != c.cap {
				t.Errorf("%q: model %s, cap %s; want %s, %s", c.args, got["model"], got["cap"], c.model, c.cap)
			}
		}
	})
}

// TestPrintConfig: every setting, in its order, with what it is and whence.
func TestPrintConfig(t *testing.T) {
	sampled := copyModel(t, tinyGLM4, with(
		storage.KV{Key: "general.sampling.temp", Value: float32(0.3)},
		storage.KV{Key: "general.sampling.top_k", Value: int32(7)},
	))
	model := []string{"model", "slab", "ctx", "kv", "chunk", "threads", "cpu-kernels", "storage", "io-depth", "backend", "ram", "gpu-dense", "vram", "pin", "release-host", "cap",
		"policy", "prefetch"}
	for _, c := range []struct {
		args  []string
		names []string
	}{
		{[]string{"run", tinyGLM4}, append(slices.Clone(model), "draft", "drafter", "draft-depth", "draft-force", "temp", "top-p", "min-p", "repeat-penalty", "top-k", "seed", "tokens", "chat")},
		{[]string{"logits", tinyGLM4}, model},
		{[]string{"perplexity", tinyGLM4, "text"}, model}, // which is not there, and not read
	} {
		r := mustRun(t, append(c.args, "--print-config")...)
		var names []string
		for line := range strings.Lines(r.out) {
			names = append(names, strings.Fields(line)[0])
		}
		if !slices.Equal(names, c.names) {
			t.Errorf("%s prints %q, want %q", c.args[0], names, c.names)
		}
		got := slices.Sorted(maps.Keys(settings(t, c.args...)))
		slices.Sort(names)
		if !slices.Equal(got, names) {
			t.Errorf("%s --json has %q, the lines have %q", c.args[0], got, names)
		}
		if r.err != "" {
			t.Errorf("%s wrote to standard error: %s", c.args[0], r.err)
		}
	}

	for _, c := range []struct {
		args []string
		name string
		want string
	}{
		{[]string{"run", tinyGLM4}, "cap", "16 auto"},
		{[]string{"run", tinyGLM4, "3"}, "cap", "3 argument"},
		{[]string{"run", tinyGLM4, "--cap", "3"}, "cap", "3 flag"},
		{[]string{"run", tinyGLM4, "--cap", "300"}, "cap", "16 flag"},
		{[]string{"run", tinyGLM4}, "ctx", "128 default"},
		{[]string{"run", tinyGLM4, "--ctx", "100"}, "ctx", "100 flag"},
		{[]string{"run", demo}, "ctx", "4096 default"},
		{[]string{"perplexity", demo, "text"}, "ctx", "512 default"},
		{[]string{"perplexity", demo, "text", "--ctx", "512"}, "ctx", "512 flag"},
		{[]string{"perplexity", tinyGLM4, "text"}, "ctx", "128 default"},
		{[]string{"run", tinyGLM4}, "kv", "f16 default"},
		{[]string{"run", tinyGLM4, "--kv", "f16"}, "kv", "f16 flag"},
		{[]string{"run", tinyGLM4, "--kv", "q8"}, "kv", "q8 flag"},
		{[]string{"run", tinyGLM4}, "chunk", "128 default"},
		{[]string{"run", tinyGLM4, "--chunk", "512"}, "chunk", "128 flag"}, // the context has no more
		{[]string{"run", tinyGLM4, "--threads", "3"}, "threads", "3 flag"},
		{[]string{"run", tinyGLM4, "--storage", "mmap"}, "storage", "mmap flag"},
		{[]string{"run", tinyGLM4, "--io-depth", "7"}, "io-depth", "7 flag"},
		{[]string{"run", tinyGLM4}, "temp", "0.8 default"},
		{[]string{"run", sampled}, "temp", "0.3 file"},
		{[]string{"run", sampled, "--temp", "0.8"}, "temp", "0.8 flag"},
		{[]string{"run", sampled}, "top-k", "7 file"},
		{[]string{"run", sampled, "--top-k", "0"}, "top-k", "0 flag"},
		{[]string{"run", sampled}, "top-p", "0.95 default"},
		{[]string{"run", sampled}, "min-p", "0.05 default"},
		{[]string{"run", sampled}, "repeat-penalty", "1 default"},
		{[]string{"run", tinyGLM4, "--seed", "18446744073709551615"}, "seed", "18446744073709551615 flag"},
		{[]string{"run", tinyGLM4}, "tokens", "128 default"},
		{[]string{"run", tinyGLM4, "-n", "-1"}, "tokens", "-1 flag"},
		{[]string{"run", tinyGLM4, "--tokens=5"}, "tokens", "5 flag"},
		{[]string{"run", tinyGLM4, "--chat"}, "chat", "true flag"},
	} {
		if got := settings(t, c.args...)[c.name]; got != c.want {
			t.Errorf("%q: %s is %s, want %s", c.args, c.name, got, c.want)
		}
	}

	// What could not be honoured stands beside what took effect.
	r := mustRun(t, "run", tinyGLM4, "300", "--ctx", "4000", "--print-config", "--json").object(t)
	if got := number(t, r, "settings", "cap", "requested"); got != 300 {
		t.Errorf("a cap of %d was requested, want 300", got)
	}
	if got := number(t, r, "settings", "ctx", "requested"); got != 4000 {
		t.Errorf("a context of %d was requested, want 4000", got)
	}
	if r := mustRun(t, "run", tinyGLM4, "300", "--print-config"); !strings.Contains(r.out, "(requested 300)") {
		t.Errorf("the requested cap is not printed:\n%s", r.out)
	}
}

// TestPrintConfigLoadsNothing: a tensor that no load would accept goes unseen.
func TestPrintConfigLoadsNothing(t *testing.T) {
	data, err := os.ReadFile(tinyGLM4)
	if err != nil {
		t.Fatal(err)
	}
	m, err := storage.Open(tinyGLM4)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	const name = "output_norm.weight"
	norm, ok := m.Tensor(name)
	if !ok || norm.Type != quant.F32 {
		t.Fatalf("%s is of %v", name, norm.Type)
	}
	copy(data[norm.Off:], []byte{0, 0, 0xc0, 0x7f}) // not a number
	bad := file(t, "bad.gguf", string(data))
	sluice("", "run", bad, "-p", "a").wants(t, exitError, name)
	mustRun(t, "run", bad, "-p", "a", "--print-config")
}
