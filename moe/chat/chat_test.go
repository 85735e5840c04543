package chat

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A fixture is a conversation and what Jinja2 3.1.6 makes of it with the
// template of the same name, in the environment of Hugging Face's
// apply_chat_template (sandboxed, trim_blocks, lstrip_blocks, loopcontrols).
type fixture struct {
	Messages []json.RawMessage          `json:"messages"`
	Vars     map[string]json.RawMessage `json:"vars"`
	Want     string                     `json:"want"`
	Refuses  string                     `json:"refuses"` // the words of raise_exception
}

var testTime = time.Date(2026, 3, 5, 7, 8, 9, 0, time.UTC)

func (f fixture) options() (Options, error) {
	opt := Options{Extra: map[string]any{}, Now: testTime}
	for k, raw := range f.Vars {
		var into any
		switch k {
		case "bos_token":
			into = &opt.BOS
		case "eos_token":
			into = &opt.EOS
		case "add_generation_prompt":
			into = &opt.AddGenerationPrompt
		case "tools":
			into = &opt.Tools
		default:
			opt.Extra[k] = raw
			continue
		}
		if err := json.Unmarshal(raw, into); err != nil {
			return opt, err
		}
	}
	return opt, nil
}

func (f fixture) messages() ([]Message, error) {
	list := make([]Message, len(f.Messages))
	for i, raw := range f.Messages {
		var plain struct{ Role, Content string }
		var all map[string]json.RawMessage
		if err := json.Unmarshal(raw, &all); err != nil {
			return nil, err
		}
		if json.Unmarshal(raw, &plain) != nil || len(all) > 2 {
			list[i].More = raw
		}
		list[i].Role, list[i].Content = plain.Role, plain.Content
	}
	return list, nil
}

// TestStyles: short templates in the manner of the model families, with the
// constructs that theirs use.
func TestStyles(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("testdata", "*.jinja"))
	if err != nil || len(files) == 0 {
		t.Fatal("no templates: ", err)
	}
	for _, path := range files {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".jinja"), func(t *testing.T) {
			src, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			b, err := os.ReadFile(strings.TrimSuffix(path, ".jinja") + ".json")
			if err != nil {
				t.Fatal(err)
			}
			var cases []fixture
			if err := json.Unmarshal(b, &cases); err != nil {
				t.Fatal(err)
			}
			tmpl, err := Parse(string(src))
			if err != nil {
				t.Fatal(err)
			}
			for i, c := range cases {
				messages, err := c.messages()
				if err != nil {
					t.Fatal(err)
				}
				opt, err := c.options()
				if err != nil {
					t.Fatal(err)
				}
				got, err := tmpl.Render(messages, opt)
				if c.Refuses != "" {
					refused, ok := err.(*RefusedError)
					if !ok || refused.Msg != c.Refuses {
						t.Errorf("case %d: error %v, want it to refuse: %s", i, err, c.Refuses)
					}
					continue
				}
				if err != nil || got != c.Want {
					t.Errorf("case %d: error %v\n got %q\nwant %q", i, err, got, c.Want)
				}
			}
		})
	}
}

// demoTemplate is the one in the demo model's file.
const demoTemplate = "[gMASK]<sop>{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}{% elif m.role == 'assistant' %}<|assistant|>\n<think></think>\n{{ m.content }}{% elif m.role == 'system' %}<|system|>\n{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n<think></think>\n{% endif %}"

func TestDemo(t *testing.T) {
	tmpl, err := Parse(demoTemplate)
	if err != nil {
		t.Fatal(err)
	}
	messages := []Message{{Role: "system", Content: "S"}, {Role: "user", Content: "Define {{ row }}."}, {Role: "assistant", Content: "A line."}, {Role: "user", Content: "And <|user|>?"}}
	got, err := tmpl.Render(messages, Options{AddGenerationPrompt: true})
	want := "[gMASK]<sop><|system|>\nS<|user|>\nDefine {{ row }}.<|assistant|>\n<think></think>\nA line.<|user|>\nAnd <|user|>?<|assistant|>\n<think></think>"
	if err != nil || got != want+"\n" {
		t.Errorf("error %v\n got %q\nwant %q", err, got, want)
	}
}

func render(src string, opt Options) (string, error) {
	t, err := Parse(src)
	if err != nil {
		return "", err
	}
	return t.Render([]Message{{Role: "user", Content: "hi"}}, opt)
}

func TestParseRefuses(t *testing.T) {
	for src, want := range map[string]string{
		"a\n{{ x":                                "line 2: the expression that begins here is not closed with }}",
		"a\n\n{% if x %}":                        "unclosed if",
		"{% if x %}{% endfor %}":                 "endfor",
		"{# no end":                              "line 1: the comment",
		"\n{% raw %} {{":                         "line 2: the raw block",
		"\n\n{{ 'abc }}":                         "line 3: the text \"'abc }}\" is not closed with '",
		"{{ }}":                                  "line 1: an empty tag",
		"{{ a & b }}":                            "line 1: '&' in this expression is not understood",
		"\n{{ (a] }}":                            "line 2: ']' in this expression closes nothing",
		"{{ a b }}":                              "line 1",
		"{% frobnicate %}":                       "frobnicate",
		"{% set a, b.c = 1, 2 %}":                "line 1: set here takes one name",
		"{% for (a, b) in c %}{% endfor %}":      "line 1: for here takes",
		"{% filter indent(2) %}{% endfilter %}":  "line 1: filter here takes",
		"{{ '%s' % x }}":                         "formatting with the operator %",
		"{{ '\\xq1' }}":                          "escape",
		"{{ " + strings.Repeat("(", 300) + " }}": "nested deeper than 200",
		strings.Repeat(" ", maxTemplate+1):       "at most 1048576",
	} {
		if _, err := Parse(src); err == nil || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), "chat: the template") {
			t.Errorf("%.40q: error %v, want one with %q", src, err, want)
		}
	}
}

func TestRenderFails(t *testing.T) {
	for src, want := range map[string]string{
		"{{ raise_exception('No ' + messages[0].role) }}": "chat: the template refuses these messages: No user",
		"{{ nothing() }}":   "nothing is not callable",
		"{{ 'a' | frob }}":  `unknown filter "frob"`,
		"{{ 'a' is frob }}": `unknown test "frob"`,
		"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}":                   "macros call each other deeper than 200",
		"{{ range(100000000) }}":                                            "range of more than",
		"{{ range(1, 2, 0) }}":                                              "step 0",
		"{{ strftime_now('%Q') }}":                                          "field %Q",
		"{{ '%d' | format('x') }}":                                          "does not take 'x'",
		"{{ messages.append(messages) }}{{ messages | tojson }}":            "nested deeper",
		"{{ 'a' * 9223372036854775807 }}":                                   "chat: the template failed",
		"{{ [0, 1] | select | list }}{{ [0] | select }}{{ [] | select() }}": "chat: the template failed", // the library panics here
	} {
		if got, err := render(src, Options{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %q and error %v, want one with %q", src, got, err, want)
		}
	}
	tmpl, err := Parse("{{ messages | length }}")
	if err != nil {
		t.Fatal(err)
	}
	for _, more := range []string{"", "[1]", "{", `{"a":1}x`, `{"a":` + strings.Repeat("[", 300) + strings.Repeat("]", 300) + "}"} {
		if _, err := tmpl.Render([]Message{{More: json.RawMessage(more)}}, Options{}); err == nil || !strings.Contains(err.Error(), "message 0") {
			t.Errorf("further fields %.20q: error %v", more, err)
		}
		if more == "[1]" {
			continue
		}
		if _, err := tmpl.Render(nil, Options{Tools: []json.RawMessage{json.RawMessage(more)}}); err == nil || !strings.Contains(err.Error(), "tool 0") {
			t.Errorf("tool %.20q: error %v", more, err)
		}
	}
}

// TestExpressions holds what the library alone gets wrong, or differently from
// Python.
func TestExpressions(t *testing.T) {
	opt := Options{
		Tools: []json.RawMessage{json.RawMessage(`{"z": 1, "a": [1.0, 1e20, 0.00001, 12345678901234567890, true, null, "<é\u2028\n\u0001😀>"]}`)},
		Extra: map[string]any{"p": json.RawMessage(`{"y": {"b": 1}, "x": 2}`)},
		BOS:   "<s>", Now: testTime,
	}
	for src, want := range map[string]string{
		"{{ {'a': {'b': {'c': 1}}} | tojson }}":                                                                            `{"a": {"b": {"c": 1}}}`,
		"{{ {'a':{'b':1}}['a']['b'] }}":                                                                                    "1",
		"{{ tools[0] | tojson }}":                                                                                          `{"z": 1, "a": [1.0, 1e+20, 1e-05, 1.2345678901234567e+19, true, null, "<é` + "\u2028" + `\n\u0001😀>"]}`,
		"{{ p | tojson(indent=1) }}":                                                                                       "{\n \"y\": {\n  \"b\": 1\n },\n \"x\": 2\n}",
		"{{ p | tojson(sort_keys=true, separators=(',', ':')) }}":                                                          `{"x":2,"y":{"b":1}}`,
		"{{ 'é😀' | tojson(ensure_ascii=true) }}":                                                                           `"\u00e9\ud83d\ude00"`,
		"{{ [[], {}] | tojson(indent=2) }}":                                                                                "[\n  [],\n  {}\n]",
		"{{ '%s: %03d, %.1f%%' | format('a', 7, 2.25) }}":                                                                  "a: 007, 2.2%",
		`{{ 'a\r\x41\u00e9\101\'"' + "\"" }}`:                                                                              "a\rAéA'\"\"",
		"{{ 'a-b-c'.split('-', 1) | tojson }}{{ ' a  b c '.split(none, 1)[1] }}":                                           `["a", "b-c"]b c `,
		"{{ 'a-b-c'.rsplit('-', 1)[0] }}{{ ('x ' ~ 'a/b/c').split(' ')[1].rsplit('/', maxsplit=1)[-1] }}":                  "a-bc",
		"{{ [p.x, 'a,b,c'.split(',', [1, 2][0])[1].split(',', 1)[0]] | tojson }}":                                          `[2, "b"]`,
		"{{ 1 if not ('a b c').split(' ', 1)[1] else 2 }}{{ 'x' in ('y,x').split(',', 5) }}":                               "2True",
		"{{ 'abc'.startswith(('x', 'a')) }}{{ ('a' ~ 'b').endswith(('c',)) }}{{ 'abc'.endswith('bc') }}":                   "TrueFalseTrue",
		"{% set a, b = 1, [2, 3] %}{{ a }}{{ b[1] }}{% set a, b = b %}{{ a }}{{ b }}":                                      "1323",
		"{{ 'xxaxx'.strip('x') }}{{ 'xxaxx'.lstrip('x') }} {{ none is none }}":                                             "aaxx True",
		"{{ '}}' + \"%}\" + '{{' }}":                                                                                       "}}%}{{",
		"x {{ 1 }}{%- if true %} y{% endif %}":                                                                             "x 1 y", // the - takes nothing: no text is before it
		"a\r\nb\r\n":                                                                                                       "a\nb",
		"{{ bos_token }}{{ eos_token is defined }}{{ tools is defined }}{{ documents is none }}":                           "<s>FalseTrueTrue",
		"{{ strftime_now('%d %b %Y, %-d.%-m., %H:%M:%S %p %j %A %%') }}":                                                   "05 Mar 2026, 5.3., 07:08:09 AM 064 Thursday %",
		"{% for k, v in p.items() if k == 'x' %}{{ k }}{{ v }}{{ loop.last }}{% endfor %}":                                 "x2True",
		"{% for i in range(5) %}{% set n = i %}{% if i == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}{{ n is defined }}": "01False",
	} {
		if got, err := render(src, opt); err != nil || got != want {
			t.Errorf("%s:\n got %q, %v\nwant %q", src, got, err, want)
		}
	}
	if got, err := render("{{ tools is none }}", Options{}); err != nil || got != "True" {
		t.Errorf("without tools: %q, %v", got, err)
	}
}

// FuzzParse: any template is read or refused, without a panic.
func FuzzParse(f *testing.F) {
	files, err := filepath.Glob(filepath.Join("testdata", "*.jinja"))
	if err != nil {
		f.Fatal(err)
	}
	for _, path := range files {
		b, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(b))
	}
	f.Add(demoTemplate)
	f.Add("{%- for a, b in c if 'd' %}{% set e %}{% endset %}{% break %}{% else %}{% endfor +%}\n{#- x -#}{% raw %}{{{% endraw %}")
	f.Fuzz(func(t *testing.T, src string) {
		if _, err := Parse(src); err != nil && !strings.HasPrefix(err.Error(), "chat: ") {
			t.Errorf("error %q does not say where it comes from", err)
		}
		if strings.Contains(src, "{%") || strings.Contains(src, "{{") || strings.Contains(src, "{#") || strings.Contains(src, "\r") {
			return
		}
		if got, err := render(src, Options{}); err != nil || got != strings.TrimSuffix(src, "\n") {
			t.Errorf("plain text %q becomes %q, %v", src, got, err)
		}
	})
}
