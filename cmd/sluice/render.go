package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"sluice/moe/chat"
)

// A chat template is a program that came with the model. Its language has no
// bounds: one operation may ask for all memory, a macro or a list in itself for all
// of the stack, and the Go runtime ends the process then. So it runs in a process
// of its own, this program once more, which may fail.
const (
	renderName   = "render-template" // the command of that process; not one for users
	renderTime   = 10 * time.Second  // a template takes microseconds
	renderMemory = 1 << 30           // bytes; a real one needs a few times the text
	renderStack  = 64 << 20          // bytes of one goroutine
	renderText   = 256 << 20         // bytes of a prompt; no context holds as many
)

// A renderJob is what the process reads, a renderResult what it writes. Texts are
// bytes, since JSON would mend what is not UTF-8.
type renderJob struct {
	Template, BOS, EOS []byte
	Messages           []renderMessage
	Tools              []json.RawMessage // nil: none
}

type renderMessage struct {
	Role, Content []byte
	More          json.RawMessage `json:",omitempty"`
}

type renderResult struct {
	Text  []byte
	Error string
}

// renderTemplate renders a conversation in a process of its own.
func renderTemplate(ctx context.Context, template string, messages []chat.Message, opt chat.Options) (string, error) {
	job := renderJob{Template: []byte(template), BOS: []byte(opt.BOS), EOS: []byte(opt.EOS), Tools: opt.Tools}
	for _, m := range messages {
		job.Messages = append(job.Messages, renderMessage{[]byte(m.Role), []byte(m.Content), m.More})
	}
	in, err := json.Marshal(job)
	if err != nil {
		return "", err
	}
	exe := "/proc/self/exe" // also when the file was replaced since
	if _, err := os.Stat(exe); err != nil {
		if exe, err = os.Executable(); err != nil {
			return "", err
		}
	}
	limited, cancel := context.WithTimeout(ctx, renderTime)
	defer cancel()
	cmd := exec.CommandContext(limited, exe, renderName)
	cmd.Env = []string{"GOTRACEBACK=none", "GOMAXPROCS=2"}
	cmd.Stdin = bytes.NewReader(in)
	var out, errw capped
	out.most, errw.most = 2*renderText, 4096 // base64 takes a third more
	cmd.Stdout, cmd.Stderr = &out, &errw
	err = cmd.Run()
	var exit *exec.ExitError
	const hint = "run without --chat, on text in the model's own format"
	switch {
	case ctx.Err() != nil:
		return "", ctx.Err()
	case limited.Err() != nil:
		return "", fmt.Errorf("--chat: the model's chat template was not done after %v: it does not end; %s", renderTime, hint)
	case out.over:
		return "", fmt.Errorf("--chat: the model's chat template makes a text of more than %s; %s", size(renderText), hint)
	case errors.As(err, &exit):
		// What is not the stack is memory, which shows in many ways: the runtime says so, no
		// thread can be made, a fault in the runtime, a signal of the kernel.
		words := fmt.Sprintf("needs more than %s of memory", size(renderMemory))
		if said := errw.String(); strings.Contains(said, "stack exceeds") {
			words = "calls itself, or nests values, without end"
		} else if line, _, _ := strings.Cut(said, "\n"); line != "" && !strings.Contains(said, "memory") {
			words += " (" + printable(line) + ")"
		}
		return "", fmt.Errorf("--chat: the model's chat template %s; %s", words, hint)
	case err != nil:
		return "", fmt.Errorf("--chat: start a process for the model's chat template: %w", err)
	}
	var r renderResult
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		return "", fmt.Errorf("--chat: the process of the model's chat template: %w", err)
	}
	if r.Error != "" {
		return "", errors.New(r.Error)
	}
	return string(r.Text), nil
}

// renderCommand is that process: a renderJob in, a renderResult out.
func renderCommand(s streams) int {
	limitProcess(renderMemory, 2*renderTime)
	debug.SetMaxStack(renderStack)
	debug.SetMemoryLimit(renderMemory / 2)
	var job renderJob
	var r renderResult
	b, err := io.ReadAll(s.in)
	if err == nil {
		err = json.Unmarshal(b, &job)
	}
	var t *chat.Template
	if err == nil {
		t, err = chat.Parse(string(job.Template))
	}
	if err == nil {
		var messages []chat.Message
		for _, m := range job.Messages {
			messages = append(messages, chat.Message{Role: string(m.Role), Content: string(m.Content), More: m.More})
		}
		var text string
		text, err = t.Render(messages, chat.Options{BOS: string(job.BOS), EOS: string(job.EOS), AddGenerationPrompt: true, Tools: job.Tools})
		r.Text = []byte(text)
	}
	switch {
	case err != nil:
		r = renderResult{Error: err.Error()[:min(len(err.Error()), 4096)]}
	case len(r.Text) > renderText:
		r = renderResult{Error: fmt.Sprintf("chat: the template makes a text of %s, more than %s", size(int64(len(r.Text))), size(renderText))}
	}
	if err := json.NewEncoder(s.out).Encode(r); err != nil {
		s.notice("%v", err)
		return exitError
	}
	return exitDone
}

// limitProcess bounds what this process may take from now on: bytes of memory that it
// may write to, and time at work. Where the system refuses, the parent's bounds are
// left.
func limitProcess(memory uint64, cpu time.Duration) {
	if b, err := os.ReadFile("/proc/self/statm"); err == nil {
		if pages := strings.Fields(string(b)); len(pages) > 5 { // what the runtime has set aside, for the race detector a lot
			n, _ := strconv.ParseUint(pages[5], 10, 50)
			memory += n * uint64(os.Getpagesize())
		}
	}
	set := func(what int, most uint64) {
		var l syscall.Rlimit
		if syscall.Getrlimit(what, &l) == nil {
			l.Max = min(most, l.Max)
			l.Cur = l.Max
			syscall.Setrlimit(what, &l)
		}
	}
	set(syscall.RLIMIT_DATA, memory)
	set(syscall.RLIMIT_CPU, uint64(cpu/time.Second))
	set(syscall.RLIMIT_CORE, 0)
}

// A capped buffer keeps so many bytes and refuses more.
type capped struct {
	bytes.Buffer
	most int
	over bool
}

func (c *capped) Write(b []byte) (int, error) {
	if c.Len()+len(b) > c.most {
		c.over = true
		c.Buffer.Write(b[:c.most-c.Len()])
		return 0, errors.New("too much")
	}
	return c.Buffer.Write(b)
}
