package chat

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// Find takes the template of a model out of its metadata: text gives a string by
// key, false if there is none. Beside a Hugging Face model the file
// chat_template.jinja counts first, then chat_template.json, then the
// chat_template of tokenizer_config.json; in a GGUF file it is
// tokenizer.chat_template. Of several with names the one called tool_use counts
// where tools are given, else the one called default, as in transformers. "" if
// the model has none.
func Find(text func(key string) (string, bool), tools bool) (string, error) {
	if s, ok := text("hf.chat_template.jinja"); ok {
		return s, nil
	}
	for _, name := range [...]string{"chat_template.json", "tokenizer_config.json"} {
		s, ok := text("hf." + name)
		if !ok {
			continue
		}
		var file struct {
			Template json.RawMessage `json:"chat_template"`
		}
		if err := json.Unmarshal([]byte(s), &file); err != nil {
			return "", fmt.Errorf("chat: %s: %w", name, err)
		}
		if file.Template == nil || string(file.Template) == "null" {
			continue
		}
		template, err := choose(file.Template, tools)
		if err != nil {
			return "", fmt.Errorf("chat: %s: chat_template: %w", name, err)
		}
		return template, nil
	}
	if tools {
		if s, ok := text("tokenizer.chat_template.tool_use"); ok {
			return s, nil
		}
	}
	s, _ := text("tokenizer.chat_template")
	return s, nil
}

// choose reads a template, a list of {"name", "template"}, or an object of
// templates by name.
func choose(raw json.RawMessage, tools bool) (string, error) {
	var one string
	if json.Unmarshal(raw, &one) == nil {
		return one, nil
	}
	named := map[string]string{}
	var list []struct {
		Name     string `json:"name"`
		Template string `json:"template"`
	}
	if json.Unmarshal(raw, &list) == nil {
		for _, t := range list {
			named[t.Name] = t.Template
		}
	} else if err := json.Unmarshal(raw, &named); err != nil {
		return "", fmt.Errorf("is neither a text nor a list of templates with names: %w", err)
	}
	if t, ok := named["tool_use"]; ok && tools {
		return t, nil
	}
	if t, ok := named["default"]; ok {
		return t, nil
	}
	var names []string
	for name := range named {
		names = append(names, name)
	}
	slices.Sort(names)
	return "", fmt.Errorf("has the templates %q and none of them is called default", strings.Join(names, ", "))
}
