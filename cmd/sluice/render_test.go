package main

import (
	"context"
	"strings"
	"syscall"
	"testing"
	"time"

	"sluice/moe/chat"
	"sluice/storage"
)

// TestHostileTemplates: templates that ask for all memory or all of the stack give
// an error in words, and this process neither ends nor grows.
func TestHostileTemplates(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector takes more memory than a template may have")
	}
	largest := func() int64 { // resident set of a child that has ended, of whatever test
		var all syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_CHILDREN, &all); err != nil {
			t.Fatal(err)
		}
		return all.Maxrss << 10
	}
	before := largest()
	for _, c := range []struct{ name, template, want string }{
		{"a long text", `{{ "a" * 100000000000 }}`, "needs more than 1.074 GB of memory"},
		{"beyond any address", `{{ "a" * 1000000000000000000 }}`, "the template failed"},
		{"doubled", `{% set ns = namespace(x="aaaaaaaa") %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}`, "needs more than 1.074 GB of memory"},
		{"a list in itself", `{% set l = [] %}{% set _ = l.append(l) %}{{ l }}`, "--chat: the model's chat template"},
		{"compared", `{% set l = [] %}{% set _ = l.append(l) %}{% set k = [] %}{% set _ = k.append(k) %}{{ l == k }}`, "calls itself, or nests values, without end"},
		{"a namespace in itself", `{% set n = namespace(x=1) %}{% set n.x = n %}{{ n }}`, "--chat: the model's chat template"},
		{"a deep list", `{% set n = namespace(x=[]) %}{% for i in range(1000000) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x }}`, "calls itself, or nests values, without end"},
		{"a huge range", `{{ range(100000000000) | length }}`, "range of more than 1048576 numbers"},
		{"a recursive macro", `{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}`, "macros call each other deeper than 200"},
		{"wide indents", `{{ "a\nb" | indent(100000000000) }}`, "needs more than 1.074 GB of memory"},
		{"a slice", `{{ [1, 2][0:100000000000:2] }}`, "--chat: the model's chat template"},
	} {
		t.Run(c.name, func(t *testing.T) {
			text, err := renderTemplate(context.Background(), c.template, []chat.Message{{Role: "user", Content: "hi"}}, chat.Options{})
			if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "goroutine") {
				t.Errorf("%.40q, error %v, want one with %q", text, err, c.want)
			}
		})
	}
	if peak := largest(); peak > max(before, renderMemory+256<<20) {
		t.Errorf("a template took %d bytes", peak)
	}
}

// TestRenderTemplate: what goes to the other process comes back as it is, and
// Ctrl-C ends it.
func TestRenderTemplate(t *testing.T) {
	opt := chat.Options{BOS: "<s>", EOS: "</s\xff>", AddGenerationPrompt: true}
	messages := []chat.Message{{Role: "user", Content: "a\xfe<é>\x00"}, {Role: "tool", More: []byte(`{"role": "tool", "n": 1.50, "b": null, "a": "<>"}`)}}
	source := `{{ bos_token }}{{ eos_token }}{{ tools }}{% for m in messages %}{{ m.role }}{{ m.content }}{{ m | tojson }}{% endfor %}{{ add_generation_prompt }}`
	tmpl, err := chat.Parse(source)
	if err != nil {
		t.Fatal(err)
	}
	want, err := tmpl.Render(messages, opt)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := renderTemplate(t.Context(), source, messages, opt); err != nil || got != want {
		t.Errorf("error %v\n got %q\nwant %q", err, got, want)
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	if _, err := renderTemplate(ctx, `{% for i in range(1000000) %}{% for j in range(1000000) %}{% endfor %}{% endfor %}`, messages, opt); err != context.Canceled {
		t.Errorf("Ctrl-C: error %v", err)
	}
}

// TestHostileTemplateRun: a run with such a template ends with its words.
func TestHostileTemplateRun(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector takes more memory than a template may have")
	}
	m := copyModel(t, tinyGLM4, with(storage.KV{Key: "tokenizer.chat_template", Value: `{{ "a" * 100000000000 }}`}))
	sluice("", "run", m, "--chat", "-p", "a").wants(t, exitError, "sluice run: --chat: the model's chat template needs more than 1.074 GB of memory; run without --chat")
}

// TestPrintable: no byte of a name reaches the terminal as a command.
func TestPrintable(t *testing.T) {
	for text, want := range map[string]string{
		"model.gguf": "model.gguf", "größe 模型": "größe 模型", "a\x1b[2Jb": `a\x1b[2Jb`, "a\nb\r": `a\nb\r`, "x\u202efdp": `x\u202efdp`,
		"\x9b1m": `\x9b1m`, "\u009b1m": `\u009b1m`, "\xff": `\xff`, "\uFFFD": "\uFFFD", "a\\n": `a\n`, "\x00": `\x00`,
	} {
		if got := printable(text); got != want {
			t.Errorf("%q prints as %q, want %q", text, got, want)
		}
	}
	sluice("", "inspect", "no\x1b]0;x\x07where").wants(t, exitError, `no\x1b]0;x\awhere`)
}
