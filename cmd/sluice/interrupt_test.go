package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// interrupted is a process that got a signal when it had written the first bytes
// to the stream that was waited for. It would run for minutes.
func interrupted(t *testing.T, sig syscall.Signal, onError bool, args ...string) result {
	t.Helper()
	cmd := child(t, nil, args...)
	var rest bytes.Buffer
	var watched io.Reader
	var err error
	if onError {
		cmd.Stdout = &rest
		watched, err = cmd.StderrPipe()
	} else {
		cmd.Stderr = &rest
		watched, err = cmd.StdoutPipe()
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	watchdog := time.AfterFunc(2*time.Minute, func() { cmd.Process.Kill() })
	defer watchdog.Stop()
	r := bufio.NewReader(watched)
	if _, err := r.Peek(1); err != nil {
		t.Errorf("it wrote nothing: %v", err)
	}
	if err := cmd.Process.Signal(sig); err != nil {
		t.Error(err)
	}
	text, err := io.ReadAll(r)
	if err != nil {
		t.Error(err)
	}
	cmd.Wait()
	res := result{cmd.ProcessState.ExitCode(), string(text), rest.String()}
	if onError {
		res.out, res.err = res.err, res.out
	}
	if strings.Contains(res.err, "goroutine ") || strings.Contains(res.err, "panic") {
		t.Errorf("a dump:\n%s", res.err)
	}
	return res
}

// TestInterruptToken: Ctrl-C amid the text ends it with its summary, and so does
// SIGTERM.
func TestInterruptToken(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		r := interrupted(t, sig, false, "run", demo, "4", "-p", verse, "-n", "-1", "--temp", "0")
		if r.code != exitInterrupted {
			t.Fatalf("%v: exit %d\n%s", sig, r.code, r.err)
		}
		if !strings.HasSuffix(r.out, "\n") || len(r.out) < 2 {
			t.Errorf("%v: the text is %q", sig, r.out)
		}
		for _, s := range []string{"ended by interrupted", "prompt experts: ", "memory: ", "sluice run: interrupted"} {
			if !strings.Contains(r.err, s) {
				t.Errorf("%v: standard error lacks %q:\n%s", sig, s, r.err)
			}
		}
	}
}

// TestInterruptEarly: Ctrl-C in the prompt, or just before it while the model
// is loaded. Standard error says that the cap was lowered, then loading begins.
func TestInterruptEarly(t *testing.T) {
	prompt := file(t, "prompt", strings.Repeat(verse+" ", 300)) // 3000 tokens, one by one
	for _, json := range []bool{false, true} {
		args := []string{"run", demo, "300", "-f", prompt, "--ctx", "4096", "--chunk", "1"}
		if json {
			args = append(args, "--json")
		}
		r := interrupted(t, syscall.SIGINT, true, args...)
		if r.code != exitInterrupted || !strings.Contains(r.err, "sluice run: interrupted") {
			t.Errorf("exit %d\n%s", r.code, r.err)
		}
		switch {
		case strings.TrimSpace(r.out) == "":
		case !json:
			t.Errorf("it wrote %q", r.out)
		default:
			if o := r.object(t); o["why"] != "interrupted" || o["text"] != "" || len(texts(t, o, "token_ids")) != 0 {
				t.Errorf("ended by %v with %q", o["why"], o["text"])
			}
		}
	}
}

// countdown is a context that is cancelled when it has been asked so often
// whether it is. So a test can end a command at every place where it asks.
type countdown struct {
	context.Context
	left   atomic.Int64
	done   chan struct{}
	cancel func()
}

func newCountdown(n int64) *countdown {
	c := &countdown{Context: context.Background(), done: make(chan struct{})}
	c.left.Store(n)
	c.cancel = sync.OnceFunc(func() { close(c.done) })
	return c
}

func (c *countdown) Done() <-chan struct{} { return c.done }

func (c *countdown) Err() error {
	if c.left.Add(-1) < 0 {
		c.cancel()
		return context.Canceled
	}
	return nil
}

// TestInterruptAnywhere: wherever it is interrupted, a command exits with 130,
// run prints what it had, and logits and synth leave nothing behind.
func TestInterruptAnywhere(t *testing.T) {
	find := func(name string) command {
		i := slices.IndexFunc(commands(), func(c command) bool { return c.name == name })
		return commands()[i]
	}
	at := func(n int64, name string, args ...string) (result, bool) {
		ctx := newCountdown(n)
		var out, errw bytes.Buffer
		s := streams{strings.NewReader(""), &out, &errw}
		c := find(name)
		r := result{code(s, c, c.run(ctx, s, args)), out.String(), tidy(errw.String())}
		return r, ctx.left.Load() >= 0
	}
	text := strings.Repeat("some text of a few words ", 3)
	runArgs := []string{tinyGLM4, "2", "-p", text, "-n", "4", "--temp", "0", "--chunk", "16", "--json"}
	var all struct {
		IDs []int32 `json:"token_ids"`
	}
	if err := json.Unmarshal([]byte(mustRun(t, append([]string{"run"}, runArgs...)...).out), &all); err != nil {
		t.Fatal(err)
	}
	phases := map[string]int{}
	n := int64(0)
	for ; ; n++ {
		r, whole := at(n, "run", runArgs...)
		if whole {
			r.wants(t, exitDone)
			break
		}
		if r.code != exitInterrupted || r.err != "sluice run: interrupted\n" {
			t.Fatalf("at %d: exit %d: %s", n, r.code, r.err)
		}
		if r.out == "" {
			phases["load"]++
			continue
		}
		var got struct {
			IDs           []int32 `json:"token_ids"`
			PrefillTokens int     `json:"prefill_tokens"`
			Why           string
			Counters      struct {
				Routed  int            `json:"routed_experts_total"`
				Misses  int            `json:"tier_misses"`
				Dropped int            `json:"host_loads_dropped"`
				Issued  int            `json:"prefetch_issued"`
				Used    int            `json:"prefetch_used"`
				Hits    map[string]int `json:"tier_hits"`
				Loads   map[string]int `json:"host_loads_total"`
			}
		}
		r.object(t) // one object
		if err := json.Unmarshal([]byte(r.out), &got); err != nil {
			t.Fatal(err)
		}
		c := got.Counters
		if got.Why != "interrupted" || len(got.IDs) > len(all.IDs) || !slices.Equal(got.IDs, all.IDs[:len(got.IDs)]) {
			t.Errorf("at %d: %v, ended by %s; want the beginning of %v", n, got.IDs, got.Why, all.IDs)
		}
		if c.Hits["lru"]+c.Misses != c.Routed || c.Loads["slab"]+c.Loads["pread"]+c.Dropped != c.Misses+c.Issued-c.Used {
			t.Errorf("at %d: the counters do not sum: %+v", n, c)
		}
		if got.PrefillTokens == 0 {
			if phases["prompt"] == 0 && c.Misses != 0 { // at its first step
				t.Errorf("%d experts were read before the first token of the prompt", c.Misses)
			}
			phases["prompt"]++
		} else {
			phases["text"]++
		}
	}
	for _, p := range []string{"load", "prompt", "text"} {
		if phases[p] == 0 {
			t.Errorf("of %d interruptions none fell into the %s: %v", n, p, phases)
		}
	}

	dir := t.TempDir()
	ids := file(t, "ids", "[1,2,3,4,5,6]")
	for n = 0; ; n++ {
		r, whole := at(n, "logits", tinyGLM4, "--ids", ids, "-o", filepath.Join(dir, "out"), "--chunk", "4")
		if whole {
			r.wants(t, exitDone)
			os.Remove(filepath.Join(dir, "out"))
			break
		}
		r.wants(t, exitInterrupted, "sluice logits: interrupted")
		none(t, dir)
	}

	for n = 0; ; n++ {
		r, whole := at(n, "synth", "-o", filepath.Join(dir, "out"), "--layers", "3", "--hidden", "64", "--experts", "4", "--ff", "32", "--vocab", tinyGLM4)
		if whole {
			r.wants(t, exitDone)
			break
		}
		r.wants(t, exitInterrupted, "sluice synth: interrupted")
		none(t, dir)
	}

	measured := false
	words := file(t, "text", text[:30])
	for n = 0; ; n++ {
		r, whole := at(n, "perplexity", tinyGLM4, words, "--ctx", "8")
		if whole {
			r.wants(t, exitDone)
			break
		}
		r.wants(t, exitInterrupted, "sluice perplexity: interrupted")
		measured = measured || strings.Contains(r.err, "perplexity so far: ")
	}
	if !measured {
		t.Error("no interruption told the perplexity so far")
	}
}
