// Package chat turns a conversation into the text that a model was trained on,
// by the Jinja template in the model's file, as Hugging Face's
// apply_chat_template does. A template that cannot be read or that refuses its
// messages is an error; nothing stands in for it.
package chat

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/ardanlabs/jinja"
)

// A Message is one turn of a conversation.
type Message struct {
	Role    string // such as system, user, assistant, tool
	Content string
	More    json.RawMessage // an object of further fields, such as tool_calls, or of all in their order; nil if none
}

// ReadMessages reads a JSON list of messages, as chat interfaces write them: each
// an object with a role, and a content, tool_calls, tool_call_id and whatever
// else the template knows. Keys keep their order, on which the text may depend.
func ReadMessages(raw []byte) ([]Message, error) {
	var list []json.RawMessage
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, fmt.Errorf("chat: the messages are no JSON list: %w", err)
	}
	messages := make([]Message, len(list))
	for i, m := range list {
		var head struct {
			Role *string `json:"role"`
		}
		if err := json.Unmarshal(m, &head); err != nil || head.Role == nil {
			return nil, fmt.Errorf("chat: message %d is no JSON object with a role", i)
		}
		messages[i] = Message{Role: *head.Role, More: m}
	}
	return messages, nil
}

// ReadTools reads a JSON list of tools, each the schema of a function.
func ReadTools(raw []byte) ([]json.RawMessage, error) {
	var list []json.RawMessage
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, fmt.Errorf("chat: the tools are no JSON list: %w", err)
	}
	for i, t := range list {
		var object map[string]json.RawMessage
		if err := json.Unmarshal(t, &object); err != nil || object == nil {
			return nil, fmt.Errorf("chat: tool %d is no JSON object", i)
		}
	}
	return list, nil
}

// Options is what a template sees beside the messages. Empty BOS and EOS are
// not defined in it.
type Options struct {
	BOS, EOS            string            // texts of the tokens
	AddGenerationPrompt bool              // end with the beginning of an answer
	Tools               []json.RawMessage // schemas; their keys keep their order
	Extra               map[string]any    // further variables, such as enable_thinking; of JSON's types, json.RawMessage included
	Now                 time.Time         // for strftime_now; zero means the time of the call
}

// A Template makes prompts. It never changes, so any number of goroutines may
// render at once.
type Template struct{ t *jinja.Template }

// maxTemplate bounds a template's bytes: real ones have up to some 20 KB.
const maxTemplate = 1 << 20

// Parse reads a template. An error says at which line it cannot be understood.
func Parse(template string) (t *Template, err error) {
	if len(template) > maxTemplate {
		return nil, fmt.Errorf("chat: the template has %d bytes, at most %d are read", len(template), maxTemplate)
	}
	defer func() {
		if r := recover(); r != nil {
			t, err = nil, fmt.Errorf("chat: the template cannot be parsed: %v", r)
		}
	}()
	src, err := plainSource(template)
	if err != nil {
		return nil, fmt.Errorf("chat: the template cannot be parsed: %w", err)
	}
	c, err := jinja.Compile(src)
	if err != nil {
		return nil, fmt.Errorf("chat: the template cannot be parsed: %w", err)
	}
	return &Template{c}, nil
}

// A RefusedError is a template's own objection to the conversation, made with
// raise_exception.
type RefusedError struct{ Msg string }

func (e *RefusedError) Error() string { return "chat: the template refuses these messages: " + e.Msg }

// Render is the prompt for the messages. When the template objects to them the
// error is a *RefusedError. A hostile template may run without end, or take all
// memory or all of the stack, which ends the process: one that nobody vouches for is
// parsed and rendered in a process of its own.
func (t *Template) Render(messages []Message, opt Options) (text string, err error) {
	defer func() {
		if r := recover(); r != nil {
			text, err = "", fmt.Errorf("chat: the template failed: %v", r)
		}
	}()
	list := make([]jinja.Value, len(messages))
	for i, m := range messages {
		list[i] = jinja.NewDict()
		d := list[i].AsDict()
		if m.More == nil {
			d.Set("role", jinja.NewString(m.Role))
			d.Set("content", jinja.NewString(m.Content))
			continue
		}
		more, err := fromJSON(m.More)
		if err != nil {
			return "", fmt.Errorf("chat: message %d: further fields: %w", i, err)
		}
		if !more.IsDict() {
			return "", fmt.Errorf("chat: message %d: further fields are no JSON object", i)
		}
		fields := more.AsDict()
		if _, all := fields.Data["role"]; !all {
			d.Set("role", jinja.NewString(m.Role))
			d.Set("content", jinja.NewString(m.Content))
		}
		for _, k := range fields.Keys {
			d.Set(k, fields.Data[k])
		}
	}
	depth := 0 // of macros that call each other
	enter := func([]jinja.Value, map[string]jinja.Value) (jinja.Value, error) {
		if depth++; depth > maxDepth {
			return jinja.Undefined(), fmt.Errorf("macros call each other deeper than %d", maxDepth)
		}
		return jinja.NewString(""), nil
	}
	leave := func([]jinja.Value, map[string]jinja.Value) (jinja.Value, error) {
		depth--
		return jinja.NewString(""), nil
	}
	now := opt.Now
	if now.IsZero() {
		now = time.Now()
	}
	data := map[string]jinja.Value{
		"messages":              jinja.NewList(list),
		"add_generation_prompt": jinja.NewBool(opt.AddGenerationPrompt),
		"tools":                 jinja.None(), // defined, as Hugging Face has them
		"documents":             jinja.None(),
		"raise_exception":       jinja.NewCallable("raise_exception", raise),
		"strftime_now":          jinja.NewCallable("strftime_now", func(args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) { return strftimeNow(now, args) }),
		"range":                 jinja.NewCallable("range", boundedRange),
		ownJSON:                 jinja.NewCallable("tojson", toJSON),
		"format":                jinja.NewCallable("format", formatFilter),
		"_split": jinja.NewCallable("split", func(args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
			return split(args, kwargs, false)
		}),
		"_rsplit": jinja.NewCallable("rsplit", func(args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
			return split(args, kwargs, true)
		}),
		"_startswith": jinja.NewCallable("startswith", func(args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
			return anyOf(args, strings.HasPrefix)
		}),
		"_endswith": jinja.NewCallable("endswith", func(args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
			return anyOf(args, strings.HasSuffix)
		}),
		"_enter": jinja.NewCallable("_enter", enter),
		"_leave": jinja.NewCallable("_leave", leave),
	}
	if opt.BOS != "" {
		data["bos_token"] = jinja.NewString(opt.BOS)
	}
	if opt.EOS != "" {
		data["eos_token"] = jinja.NewString(opt.EOS)
	}
	if opt.Tools != nil {
		tools := make([]jinja.Value, len(opt.Tools))
		for i, raw := range opt.Tools {
			if tools[i], err = fromJSON(raw); err != nil {
				return "", fmt.Errorf("chat: tool %d: %w", i, err)
			}
		}
		data["tools"] = jinja.NewList(tools)
	}
	for k, v := range opt.Extra {
		raw, ok := v.(json.RawMessage)
		if !ok {
			data[k] = jinja.FromGoValue(v)
			continue
		}
		if data[k], err = fromJSON(raw); err != nil {
			return "", fmt.Errorf("chat: variable %q: %w", k, err)
		}
	}
	text, err = t.t.RenderValues(data)
	if err != nil {
		var refused *RefusedError
		if errors.As(err, &refused) {
			return "", refused
		}
		return "", fmt.Errorf("chat: the template failed: %w", err)
	}
	return text, nil
}

// fromJSON reads one JSON value and keeps the order of its keys, on which the
// text of tool schemas depends.
func fromJSON(raw []byte) (jinja.Value, error) {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	v, err := decodeJSON(dec, 0)
	if err != nil {
		return jinja.Undefined(), fmt.Errorf("not JSON at byte %d: %w", dec.InputOffset(), err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return jinja.Undefined(), fmt.Errorf("not JSON: more follows the value, at byte %d", dec.InputOffset())
	}
	return v, nil
}

// maxDepth bounds how deep JSON values, brackets in a template and calls of
// macros may nest.
const maxDepth = 200

func decodeJSON(dec *json.Decoder, depth int) (jinja.Value, error) {
	if depth > maxDepth {
		return jinja.Undefined(), fmt.Errorf("nested deeper than %d", maxDepth)
	}
	tok, err := dec.Token()
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return jinja.Undefined(), err
	}
	switch tok {
	case json.Delim('{'):
		v := jinja.NewDict()
		for dec.More() {
			key, err := dec.Token()
			if err != nil {
				return v, err
			}
			item, err := decodeJSON(dec, depth+1)
			if err != nil {
				return v, err
			}
			v.AsDict().Set(key.(string), item)
		}
		_, err := dec.Token()
		return v, err
	case json.Delim('['):
		v := jinja.NewList(nil)
		for dec.More() {
			item, err := decodeJSON(dec, depth+1)
			if err != nil {
				return v, err
			}
			v.AsList().Append(item)
		}
		_, err := dec.Token()
		return v, err
	}
	return jinja.FromGoValue(tok), nil // nil, bool, json.Number or string
}
