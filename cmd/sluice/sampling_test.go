package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// hfModel copies a small Hugging Face model, with a generation_config.json of the test.
func hfModel(t *testing.T, generation string) string {
	t.Helper()
	root := os.Getenv("SLUICE_SHARED")
	if root == "" {
		root = filepath.Join("..", "..", "..", "shared")
	}
	from := filepath.Join(root, "oracles", "hf", "qwen3_moe")
	if _, err := os.Stat(from); err != nil {
		t.Skip("needs the shared oracles: set SLUICE_SHARED")
	}
	dir := t.TempDir()
	for _, name := range []string{"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} {
		b, err := os.ReadFile(filepath.Join(from, name))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), b, 0o666)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "generation_config.json"), []byte(generation), 0o666); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestGenerationConfig: generation_config.json sets the defaults, as general.sampling.*
// of a GGUF file do, and flags win.
func TestGenerationConfig(t *testing.T) {
	dir := hfModel(t, "{}")
	put := func(text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, "generation_config.json"), []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	all := []string{"temp", "top-k", "top-p", "min-p", "repeat-penalty"}
	const plain = "0.8 default, 40 default, 0.95 default, 0.05 default, 1 default"
	for _, c := range []struct{ text, flags, want string }{
		{`{}`, "", plain},
		{`{"temperature": null, "top_k": null, "do_sample": null}`, "", plain},
		{`{"do_sample": true}`, "", plain},
		{`{"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0, "repetition_penalty": 1.05, "do_sample": true}`, "", "0.6 file, 20 file, 0.9 file, 0 file, 1.05 file"},
		{`{"temperature": 0.6, "top_k": 20}`, "--temp=0.7 --top-k=5", "0.7 flag, 5 flag, 0.95 default, 0.05 default, 1 default"},
		{`{"temperature": 0.6, "do_sample": false}`, "", "0 file, 40 default, 0.95 default, 0.05 default, 1 default"},
		{`{"do_sample": false}`, "--temp=1", "1 flag, 40 default, 0.95 default, 0.05 default, 1 default"},
		{`{"top_k": -1}`, "", "0.8 default, 0 file, 0.95 default, 0.05 default, 1 default"},
	} {
		put(c.text)
		set := settings(t, append([]string{"run", dir}, strings.Fields(c.flags)...)...)
		var got []string
		for _, name := range all {
			got = append(got, set[name])
		}
		if s := strings.Join(got, ", "); s != c.want {
			t.Errorf("%s %s: %s, want %s", c.text, c.flags, s, c.want)
		}
	}
	for _, c := range []struct{ text, want string }{
		{`{"temperature": -1}`, "generation_config.json has values that are out of range: temperature -1"},
		{`{"top_p": 0}`, "generation_config.json has values that are out of range: top-p 0"},
		{`{"temperature": "hot"}`, "generation_config.json: json: "},
		{`{"top_k": 2.5}`, "generation_config.json: top_k is 2.5, want a whole number"},
		{`{"temperature": 1e999}`, "generation_config.json: "},
		{`[`, "generation_config.json: "},
	} {
		put(c.text)
		sluice("", "run", dir, "-p", "a").wants(t, exitError, c.want)
	}
	put(`{"temperature": -1}`)
	mustRun(t, "run", dir, "-p", "a", "-n", "1", "--temp", "1")
	put(`{"do_sample": false}`)
	greedy := mustRun(t, "run", dir, "-p", "a", "-n", "8").out
	if want := mustRun(t, "run", dir, "-p", "a", "-n", "8", "--temp", "0").out; greedy != want {
		t.Errorf("do_sample false: %q, greedy %q", greedy, want)
	}
}

// TestFileBeside: who names a file beside the weights is told what to name.
func TestFileBeside(t *testing.T) {
	dir := hfModel(t, "{}")
	sluice("", "inspect", filepath.Join(dir, "tokenizer.json")).wants(t, exitError, "it is a file beside a Hugging Face model: name the directory")
	mustRun(t, "inspect", filepath.Join(dir, "config.json"))
}
