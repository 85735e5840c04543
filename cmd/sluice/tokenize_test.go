package main

import (
	"os"
	"slices"
	"strings"
	"testing"

	"sluice/storage"
)

// TestTokenizeCases: the ids of the reference, for each vocabulary.
func TestTokenizeCases(t *testing.T) {
	for _, name := range []string{"gpt-2", "llama-bpe", "llama-spm", "qwen2"} {
		t.Run(name, func(t *testing.T) {
			model := shared(t, "vocab/ggml-vocab-"+name+".gguf")
			in, err := os.ReadFile(model + ".inp")
			if err != nil {
				t.Fatal(err)
			}
			out, err := os.ReadFile(model + ".out")
			if err != nil {
				t.Fatal(err)
			}
			r := sluice(string(in), "tokenize", model, "--cases")
			r.wants(t, exitDone)
			got, want := lines(r.out), lines(string(out))
			if len(got) != 46 || !slices.Equal(got, want) {
				t.Errorf("%d lines\n%q\nwant %d\n%q", len(got), got, len(want), want)
			}
			asJSON := texts(t, sluice(string(in), "tokenize", model, "--cases", "--json").object(t), "cases")
			for i, ids := range asJSON {
				if ids = strings.ReplaceAll(strings.Trim(ids, "[]"), ",", " "); ids != want[i] {
					t.Errorf("case %d is %s in JSON, want %s", i, ids, want[i])
				}
			}
		})
	}
}

// lines are the lines of a text without the spaces around them.
func lines(text string) (list []string) {
	for line := range strings.Lines(text) {
		list = append(list, strings.TrimSpace(line))
	}
	return list
}

// TestTokenize: one id a line, the same in JSON, as run sees the text.
func TestTokenize(t *testing.T) {
	for _, text := range []string{"", "hello", verse, "two\nlines\n", "\xff\x00", "<|endoftext|> ünïcödé 漢字 \t "} {
		plain := sluice(text, "tokenize", tinyGLM4)
		plain.wants(t, exitDone)
		ids := texts(t, sluice(text, "tokenize", "--model", tinyGLM4, "--json").object(t), "token_ids")
		if got := lines(plain.out); !slices.Equal(got, ids) {
			t.Errorf("%q: %q, in JSON %q", text, got, ids)
		}
		if text == "" {
			if len(ids) != 0 {
				t.Errorf("nothing is %q", ids)
			}
			continue
		}
		run := mustRun(t, "run", tinyGLM4, "-f", file(t, "text", text), "-n", "0", "--json").object(t)
		if got := texts(t, run, "prompt_ids"); !slices.Equal(got, ids) {
			t.Errorf("%q: %q, run has %q", text, ids, got)
		}
	}
}

// TestTokenizeBOS: the token that begins a text is the file's to ask for, and
// cases never have it.
func TestTokenizeBOS(t *testing.T) {
	m := copyModel(t, tinyGLM4, with(
		storage.KV{Key: "tokenizer.ggml.bos_token_id", Value: uint32(9)},
		storage.KV{Key: "tokenizer.ggml.add_bos_token", Value: true},
	))
	without := lines(sluice("hello", "tokenize", tinyGLM4).out)
	if got, want := lines(sluice("hello", "tokenize", m).out), append([]string{"9"}, without...); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if got := sluice("hello\n__ggml_vocab_test__\n", "tokenize", m, "--cases").out; got != strings.Join(without, " ")+"\n" {
		t.Errorf("a case is %q, want %q", got, without)
	}
}

func TestTokenizeCasesUnended(t *testing.T) {
	sluice("hello\n", "tokenize", tinyGLM4, "--cases").wants(t, exitError, "the last one, at byte 0, is not ended")
	r := sluice("\n__ggml_vocab_test__\nhello\n__ggml_vocab_test__\n", "tokenize", tinyGLM4, "--cases")
	r.wants(t, exitDone)
	if got := strings.Count(r.out, "\n"); got != 2 || !strings.HasPrefix(r.out, "\n") {
		t.Errorf("an empty case and another are %q", r.out)
	}
}
