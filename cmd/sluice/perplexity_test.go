package main

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
)

// TestPerplexity: the line, the object, and the same value however it is run.
func TestPerplexity(t *testing.T) {
	text := file(t, "text", strings.Repeat(verse+". ", 12))
	args := []string{"perplexity", tinyGLM4, text, "--ctx", "32"}
	o := mustRun(t, append(args, "--json")...).object(t)
	value, err := at(t, o, "perplexity").(json.Number).Float64()
	if err != nil || !(value > 1) || math.IsInf(value, 0) {
		t.Fatalf("perplexity %v, %v", o["perplexity"], err)
	}
	spread, err := at(t, o, "perplexity_error").(json.Number).Float64()
	if err != nil {
		t.Fatal(err)
	}
	chunks := number(t, o, "chunks")
	if scored := number(t, o, "scored_tokens"); chunks < 4 || scored != chunks*15 { // of 32, tokens 17 to 31
		t.Errorf("%d tokens of %d chunks were scored", scored, chunks)
	}
	if got := number(t, o, "counters", "positions_total"); got != chunks*32 {
		t.Errorf("%d positions of %d chunks", got, chunks)
	}
	if got := number(t, o, "counters", "emitted_tokens_total"); got != 0 {
		t.Errorf("%d tokens emitted", got)
	}
	plain := mustRun(t, args...)
	if want := fmt.Sprintf("perplexity %.4f +/- %.4f (%d chunks of 32 tokens, %d scored)\n", value, spread, chunks, chunks*15); plain.out != want || plain.err != "" {
		t.Errorf("%q and %q, want %q", plain.out, plain.err, want)
	}
	for _, other := range []string{"1", "--storage mmap", "--storage pread 2", "--threads 1", "--threads 5", "--chunk 1", "--chunk 7"} {
		if got := mustRun(t, slices.Concat(args, strings.Fields(other))...).out; got != plain.out {
			t.Errorf("with %s: %q, want %q", other, got, plain.out)
		}
	}
}

// TestPerplexityFails: texts that cannot be measured.
func TestPerplexityFails(t *testing.T) {
	sluice("", "perplexity", tinyGLM4, "no-such-text").wants(t, exitError, "read the text: open no-such-text: no such file or directory")
	sluice("", "perplexity", tinyGLM4, t.TempDir()).wants(t, exitError, "read the text: ", "is a directory")
	sluice("", "perplexity", tinyGLM4, file(t, "text", "")).wants(t, exitError, "the text has 0 tokens, fewer than one chunk of 128: use a longer text or a smaller --ctx")
	sluice("", "perplexity", tinyGLM4, file(t, "text", "short")).wants(t, exitError, "fewer than one chunk of 128")
	sluice("", "perplexity", "no-such-model", file(t, "text", "short")).wants(t, exitError, "no-such-model: no such file or directory")
}
