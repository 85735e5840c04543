package chat

import (
	"strings"
	"testing"
)

// TestFind: which template counts where several are given.
func TestFind(t *testing.T) {
	const (
		jinja  = "hf.chat_template.jinja"
		inJSON = "hf.chat_template.json"
		config = "hf.tokenizer_config.json"
		gguf   = "tokenizer.chat_template"
		named  = `{"chat_template": [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]}`
	)
	for _, c := range []struct {
		meta  map[string]string
		tools bool
		want  string
	}{
		{nil, false, ""},
		{map[string]string{gguf: "G"}, false, "G"},
		{map[string]string{gguf: "G", gguf + ".tool_use": "GT"}, false, "G"},
		{map[string]string{gguf: "G", gguf + ".tool_use": "GT"}, true, "GT"},
		{map[string]string{config: `{"chat_template": "C"}`}, true, "C"},
		{map[string]string{config: `{"chat_template": null}`}, false, ""},
		{map[string]string{config: `{}`, inJSON: `{"chat_template": "J"}`}, false, "J"},
		{map[string]string{config: `{"chat_template": "C"}`, inJSON: `{"chat_template": "J"}`}, false, "J"},
		{map[string]string{config: `{"chat_template": "C"}`, inJSON: `{"chat_template": "J"}`, jinja: "F"}, false, "F"},
		{map[string]string{config: named}, false, "D"},
		{map[string]string{config: named}, true, "T"},
		{map[string]string{config: `{"chat_template": {"default": "D"}}`}, true, "D"},
	} {
		got, err := Find(func(key string) (string, bool) { s, ok := c.meta[key]; return s, ok }, c.tools)
		if err != nil || got != c.want {
			t.Errorf("%v, tools %v: %q, %v; want %q", c.meta, c.tools, got, err, c.want)
		}
	}
	for text, want := range map[string]string{
		`{`:                    "chat: tokenizer_config.json: ",
		`{"chat_template": 1}`: "chat: tokenizer_config.json: chat_template: is neither",
		`{"chat_template": [{"name": "rag", "template": "R"}]}`: `has the templates "rag" and none of them is called default`,
	} {
		if _, err := Find(func(key string) (string, bool) { return text, key == config }, false); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want one with %q", text, err, want)
		}
	}
}

// TestReadMessages: what is no list of messages, or no list of tools, is refused.
func TestReadMessages(t *testing.T) {
	m, err := ReadMessages([]byte(`[{"content": null, "role": "assistant", "tool_calls": []}]`))
	if err != nil || len(m) != 1 || m[0].Role != "assistant" {
		t.Fatalf("%v, %v", m, err)
	}
	tmpl, err := Parse("{{ messages | tojson }}")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := tmpl.Render(m, Options{}); err != nil || got != `[{"content": null, "role": "assistant", "tool_calls": []}]` {
		t.Errorf("%q, %v: the keys must keep their order", got, err)
	}
	for _, bad := range []string{``, `{}`, `[1]`, `[{"content": "x"}]`, `[{"role": 1}]`, `[null]`} {
		if _, err := ReadMessages([]byte(bad)); err == nil || !strings.HasPrefix(err.Error(), "chat: ") {
			t.Errorf("messages %s: error %v", bad, err)
		}
	}
	for _, bad := range []string{``, `{}`, `["x"]`, `[null]`} {
		if _, err := ReadTools([]byte(bad)); err == nil || !strings.HasPrefix(err.Error(), "chat: ") {
			t.Errorf("tools %s: error %v", bad, err)
		}
	}
}
