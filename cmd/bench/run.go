// Package bench asks questions of Sluice by running it: each run a fresh process
// of the program itself, whose JSON is read; and it says what the answers are
// worth. Speed is tokens after the first over the nanoseconds of decoding.
package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"
)

// A Sluice runs the program with arguments in a process of its own, and gives
// what it wrote to standard output.
type Sluice func(ctx context.Context, args ...string) ([]byte, error)

// Program is the program at a path. Words before its arguments, if there are
// any, start it: a shell that enters a cgroup.
func Program(path string, before ...string) Sluice {
	return func(ctx context.Context, args ...string) ([]byte, error) {
		line := append(append(before[:len(before):len(before)], path), args...)
		c := exec.CommandContext(ctx, line[0], line[1:]...)
		c.Cancel = func() error { return c.Process.Signal(os.Interrupt) }
		c.WaitDelay = 10 * time.Second // after that it is killed
		var out, errw bytes.Buffer
		c.Stdout, c.Stderr = &out, &errw
		if err := c.Run(); err != nil {
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			text := strings.TrimSpace(errw.String())
			return nil, fmt.Errorf("%w: %s", err, text[max(0, len(text)-2000):])
		}
		return out.Bytes(), nil
	}
}

// A RefusedError says why arms cannot be compared.
type RefusedError struct{ msg string }

func (e *RefusedError) Error() string { return e.msg }

func refusef(format string, args ...any) error {
	return &RefusedError{"bench: " + fmt.Sprintf(format, args...)}
}

// Counts are what run --json counts while it decodes.
type Counts struct {
	Routed      int64            `json:"routed_experts_total"`
	Hits        map[string]int64 `json:"tier_hits"`
	Misses      int64            `json:"tier_misses"`
	Loads       int64            `json:"host_loads"` // in whatever mode
	LoadBytes   int64            `json:"host_load_bytes"`
	WaitNanos   int64            `json:"host_load_wait_ns"`
	MajorFaults int64            `json:"major_faults"`
	DeviceReads int64            `json:"device_read_bytes"`
}

// A Run is what is read of the JSON of one run.
type Run struct {
	Settings      map[string]Setting `json:"settings"`
	Decode        Counts             `json:"decode_counters"`
	LoadNanos     int64              `json:"load_ns"`
	PrefillNanos  int64              `json:"prefill_ns"`
	PrefillTokens int64              `json:"prefill_tokens"`
	DecodeNanos   int64              `json:"decode_ns"`
	DecodeTokens  int64              `json:"decode_tokens"`
	WaitNanos     int64              `json:"expert_wait_ns"` // the stage
	Witness       string             `json:"logits_crc32c"`
	Drive         float64            `json:"drive_bytes_per_s"`
	Counters      struct {
		Peak   int64 `json:"rss_peak_bytes"`
		Faults int64 `json:"major_faults"`

		Proposed    int64 `json:"draft_proposed"`
		Accepted    int64 `json:"draft_accepted"`
		WastedLoads int64 `json:"draft_wasted_loads"`
	} `json:"counters"`
	Draft *Drafted `json:"draft,omitempty"` // nil: nobody drafts
}

// Drafted is what run --json tells of its drafts.
type Drafted struct {
	Forwards  int64   `json:"forwards"`
	Predicted float64 `json:"positions_per_token_predicted"`
	Counted   float64 `json:"positions_per_token_counted"`
}

// A Setting is one of run's, as JSON.
type Setting struct {
	Value     json.RawMessage `json:"value"`
	Origin    string          `json:"origin"`
	Requested json.RawMessage `json:"requested,omitempty"`
}

// Number is the value as an integer, 0 if it is none.
func (s Setting) Number() (n int) {
	json.Unmarshal(s.Value, &n)
	return n
}

// Text is the value as JSON writes it, without the quotes of a string.
func (s Setting) Text() string {
	var text string
	if json.Unmarshal(s.Value, &text) == nil {
		return text
	}
	return string(s.Value)
}

// run runs the program and reads its object.
func (s Sluice) run(ctx context.Context, args ...string) (r Run, err error) {
	out, err := s(ctx, args...)
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal(out, &r); err != nil {
		return r, fmt.Errorf("what run printed: %w", err)
	}
	return r, nil
}

// speed is tokens by second.
func (r Run) speed() (float64, error) {
	if r.DecodeTokens < 1 || r.DecodeNanos < 1 {
		return 0, errors.New("the run decoded no token after its first: another prompt or seed may go on longer, -n must be at least 2")
	}
	return float64(r.DecodeTokens) / float64(r.DecodeNanos) * 1e9, nil
}
