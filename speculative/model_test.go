package speculative

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"sluice/moe"
)

// echo is a small model: what it says is a function of all that it has run.
type echo struct {
	vocab  int
	text   []int32
	calls  []int // ids of each Extend
	fail   int   // the Extend, from 1, that fails half-way; 0: none
	states bool  // it goes back to the start alone
	now    *time.Time
	times  moe.Times
}

func (e *echo) Extend(_ context.Context, ids []int32) ([]float32, error) {
	e.calls = append(e.calls, len(ids))
	if e.now != nil {
		*e.now = e.now.Add(time.Duration(len(ids)) * time.Millisecond)
		e.times[moe.StageDense] += int64(len(ids)) * 1e6
	}
	if len(e.calls) == e.fail {
		e.text = append(e.text, ids[:len(ids)/2]...)
		return nil, errors.New("the drive is gone")
	}
	e.text = append(e.text, ids...)
	logits := make([]float32, e.vocab)
	logits[e.next(e.text)] = 1
	return logits, nil
}

func (e *echo) next(text []int32) int32 {
	h := int32(7)
	for _, id := range text {
		h = (h*31 + id) % 10007
	}
	return h % int32(e.vocab)
}

func (e *echo) Pos() int { return len(e.text) }

func (e *echo) Rewind(pos int) error {
	if e.states && pos > 0 && pos < len(e.text) {
		return errors.New("it keeps states")
	}
	e.text = e.text[:pos]
	return nil
}

func (e *echo) Stats() moe.Stats { return moe.Stats{Times: e.times} }

// greedy is what the model says behind a text.
func (e *echo) greedy(text []int32, n int) (ids []int32) {
	text = slices.Clone(text)
	for range n {
		ids = append(ids, e.next(text))
		text = append(text, ids[len(ids)-1])
	}
	return ids
}

// The proposals are the small model's greedy text, whatever was run before; and no
// token is run twice but the last, and what was proposed and is another now.
func TestModelProposes(t *testing.T) {
	ctx := context.Background()
	for _, states := range []bool{false, true} {
		e := &echo{vocab: 50, states: states}
		d := NewModel(e, 64)
		step := func(what string, text []int32, n int, calls ...int) {
			t.Helper()
			e.calls = nil
			got, err := d.Propose(ctx, Text{IDs: text}, n, nil)
			if err != nil {
				t.Fatal(err)
			}
			if want := e.greedy(text, n); !slices.Equal(got, want) {
				t.Errorf("%s: %v, want %v", what, got, want)
			}
			if !states && !slices.Equal(e.calls, calls) {
				t.Errorf("%s: ran %v ids, want %v", what, e.calls, calls)
			}
		}
		prompt := make([]int32, 20)
		for i := range prompt {
			prompt[i] = int32(i)
		}
		if err := d.Follow(ctx, Text{IDs: prompt}); err != nil || !slices.Equal(e.calls, []int{20}) {
			t.Errorf("a prompt of 20: ran %v, %v", e.calls, err)
		}
		if err := d.Follow(ctx, Text{IDs: prompt, To: 10}); err != nil || len(e.calls) != 1 {
			t.Errorf("its second chunk: ran %v, %v", e.calls, err)
		}
		text := append(slices.Clone(prompt), 7)
		step("behind the prompt", text, 3, 1, 1, 1)
		step("again", text, 2, 1, 1)
		text = append(text, e.greedy(text, 2)...)
		step("both were right", text, 2, 1, 1) // the second of them was not run
		text = append(text, 1, 2, 3)
		step("none was right", text, 1, 3)
		text = append(text[:21], 9)
		step("another text", text, 1, 1)

		// Where drafting paused it catches up before the proposal, if that is much.
		text = append(text, make([]int32, 15)...)
		e.calls = nil
		if err := d.Catch(ctx, Text{IDs: text}); err != nil || !states && !slices.Equal(e.calls, []int{14}) {
			t.Errorf("15 behind: ran %v, %v", e.calls, err)
		}
		step("caught up", text, 2, 1, 1)
		e.calls = nil
		text = append(text, make([]int32, 5)...)
		if err := d.Catch(ctx, Text{IDs: text}); err != nil || len(e.calls) != 0 {
			t.Errorf("5 behind: ran %v, %v", e.calls, err)
		}
		step("5 behind", text, 1, 5)

		// A text with room for no proposal, or for fewer.
		long := append(slices.Clone(text), make([]int32, 63-len(text))...)
		if got, err := d.Propose(ctx, Text{IDs: long}, 8, nil); err != nil || !slices.Equal(got, e.greedy(long, 2)) { // the last need not be run
			t.Errorf("room for two: %v, %v", got, err)
		}
		e.calls = nil
		for _, do := range []func(context.Context, Text) error{d.Follow, d.Catch} {
			if err := do(ctx, Text{IDs: make([]int32, 65)}); err != nil {
				t.Error(err)
			}
		}
		if got, err := d.Propose(ctx, Text{IDs: make([]int32, 65)}, 8, nil); err != nil || len(got) != 0 || len(e.calls) != 0 {
			t.Errorf("a longer text: %v, %v, ran %v", got, err, e.calls)
		}
	}
}

// After a pass that failed the next proposal is right again.
func TestModelFails(t *testing.T) {
	text := []int32{1, 2, 3, 4, 5, 6}
	for fail := 1; fail <= 3; fail++ {
		e := &echo{vocab: 50, fail: fail}
		d := NewModel(e, 64)
		if _, err := d.Propose(context.Background(), Text{IDs: text}, 4, nil); err == nil {
			t.Errorf("the failure of pass %d is not told", fail)
		}
		got, err := d.Propose(context.Background(), Text{IDs: text}, 4, nil)
		if err != nil || !slices.Equal(got, e.greedy(text, 4)) {
			t.Errorf("after a failure of pass %d: %v, %v, want %v", fail, got, err, e.greedy(text, 4))
		}
	}
}

// What a drafter's own model takes for a long prompt, and to catch up, is not the
// price of a proposal: a good draft model is found out behind 4000 tokens as behind
// 32. Its stages are in the times.
func TestModelCatchesUp(t *testing.T) {
	for _, prompt := range []int{32, 4000} {
		w := newWorld(5, 5000)
		w.now = time.Unix(0, 0)
		w.pass, w.cap = 100*time.Millisecond, w.experts // all resident: the batch costs no more
		// The small model says what the text is, at nine of ten places.
		small := &oracle{echo: echo{vocab: w.vocab, now: &w.now}, w: w}
		d, err := New(w, Options{Drafter: NewModel(small, w.ctx), Vocab: w.vocab, Ctx: w.ctx, Now: func() time.Time { return w.now }})
		if err != nil {
			t.Fatal(err)
		}
		ctx := context.Background()
		if _, err := d.Extend(ctx, w.truth[:prompt]); err != nil {
			t.Fatal(err)
		}
		const tokens = 400
		for i := range tokens {
			if _, err := d.Extend(ctx, w.truth[prompt+i:prompt+i+1]); err != nil {
				t.Fatal(err)
			}
		}
		if price := time.Duration(d.gate.draft.v); price > 3*time.Millisecond || price < time.Millisecond {
			t.Errorf("prompt of %d: a proposal costs %v, want 1 to 3 ms", prompt, price)
		}
		if r := d.Report(); r.Accepted < tokens/3 {
			t.Errorf("prompt of %d: %d of %d drafts accepted in %d tokens: %s", prompt, r.Accepted, r.Proposed, tokens, r.Reason)
		}
		if got := d.Stats().Times[moe.StageDense] - w.times[moe.StageDense]; got != small.times[moe.StageDense] || got == 0 {
			t.Errorf("%d ns of the draft model in the times, want %d", got, small.times[moe.StageDense])
		}
	}
}

// oracle is a small model that knows the text, but for a tenth of its places.
type oracle struct {
	echo
	w *world
}

func (o *oracle) Extend(ctx context.Context, ids []int32) ([]float32, error) {
	logits, err := o.echo.Extend(ctx, ids)
	clear(logits)
	id := o.w.truth[len(o.text)]
	if len(o.text)%10 == 0 {
		id = (id + 1) % int32(o.vocab)
	}
	logits[id] = 1
	return logits, err
}
