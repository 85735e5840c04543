package moe

import (
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"math"
	"slices"
	"testing"
)

// counting is a decoder whose next token is the last one plus 1, and whose
// logits tell how many tokens it has run.
type counting struct {
	runs  [][]int32
	pos   int
	limit int // positions; 0: none
	stats Stats
	fail  func(call int) error // nil: never
}

const countingVocab = 100

func (d *counting) Extend(ctx context.Context, ids []int32) ([]float32, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	d.runs = append(d.runs, slices.Clone(ids))
	if d.fail != nil {
		if err := d.fail(len(d.runs)); err != nil {
			return nil, err
		}
	}
	if d.pos += len(ids); d.limit > 0 && d.pos > d.limit {
		return nil, &ContextError{d.pos, d.limit}
	}
	d.stats.Times[StageExperts] += 1000
	logits := make([]float32, countingVocab)
	logits[ids[len(ids)-1]+1] = float32(d.pos)
	return logits, nil
}

func (d *counting) Stats() Stats { return d.stats }

func greedy() *Sampler { return NewSampler(Sampling{TopP: 1, RepeatPenalty: 1}, countingVocab) }

func TestGenerate(t *testing.T) {
	broken, full := errors.New("a broken drive"), errors.New("a full pipe")
	for _, tt := range []struct {
		name   string
		prompt []int32
		tokens int
		ctx    int
		stop   int32 // the token that stops; -1: none
		cancel int   // after so many emitted tokens; 0: before the prompt, -1: never
		emit   int   // the token whose Emit fails; 0: none
		fail   int   // the call of Extend that fails; 0: none
		ids    []int32
		why    Why
		stopID int32
		err    error
		decode int // tokens of the decode phase
	}{
		{name: "length", prompt: []int32{5, 6}, tokens: 3, ctx: 50, stop: -1, cancel: -1, ids: []int32{7, 8, 9}, why: WhyLength, stopID: -1, decode: 2},
		{name: "one", prompt: []int32{5}, tokens: 1, ctx: 50, stop: -1, cancel: -1, ids: []int32{6}, why: WhyLength, stopID: -1},
		{name: "none", prompt: []int32{5}, tokens: 0, ctx: 50, stop: -1, cancel: -1, why: WhyLength, stopID: -1},
		{name: "stop", prompt: []int32{5}, tokens: 10, ctx: 50, stop: 9, cancel: -1, ids: []int32{6, 7, 8}, why: WhyStop, stopID: 9, decode: 3},
		{name: "stop at once", prompt: []int32{5}, tokens: 10, ctx: 50, stop: 6, cancel: -1, why: WhyStop, stopID: 6},
		{name: "stop before the length", prompt: []int32{5}, tokens: 4, ctx: 50, stop: 9, cancel: -1, ids: []int32{6, 7, 8}, why: WhyStop, stopID: 9, decode: 3},
		{name: "context", prompt: []int32{1, 2, 3}, tokens: 10, ctx: 5, stop: -1, cancel: -1, ids: []int32{4, 5, 6}, why: WhyContext, stopID: -1, decode: 2},
		{name: "until the context is full", prompt: []int32{1, 2, 3}, tokens: -1, ctx: 5, stop: -1, cancel: -1, ids: []int32{4, 5, 6}, why: WhyContext, stopID: -1, decode: 2},
		{name: "a prompt of the whole context", prompt: []int32{1, 2, 3}, tokens: -1, ctx: 3, stop: -1, cancel: -1, ids: []int32{4}, why: WhyContext, stopID: -1},
		{name: "as many as there is room for", prompt: []int32{1, 2, 3}, tokens: 3, ctx: 5, stop: -1, cancel: -1, ids: []int32{4, 5, 6}, why: WhyLength, stopID: -1, decode: 2},
		{name: "far more than there is room for", prompt: []int32{1}, tokens: math.MaxInt, ctx: 3, stop: -1, cancel: -1, ids: []int32{2, 3, 4}, why: WhyContext, stopID: -1, decode: 2},
		{name: "a prompt over the context", prompt: []int32{1, 2, 3}, tokens: 4, ctx: 2, stop: -1, cancel: -1, stopID: -1, err: &ContextError{3, 2}},
		{name: "interrupted before", prompt: []int32{5}, tokens: 3, ctx: 50, stop: -1, cancel: 0, why: WhyInterrupted, stopID: -1},
		{name: "interrupted", prompt: []int32{5}, tokens: 9, ctx: 50, stop: -1, cancel: 2, ids: []int32{6, 7}, why: WhyInterrupted, stopID: -1, decode: 1},
		{name: "interrupted at the last", prompt: []int32{5}, tokens: 2, ctx: 50, stop: -1, cancel: 2, ids: []int32{6, 7}, why: WhyLength, stopID: -1, decode: 1},
		{name: "nobody listens", prompt: []int32{5}, tokens: 9, ctx: 50, stop: -1, cancel: -1, emit: 7, ids: []int32{6, 7}, stopID: -1, err: full, decode: 1},
		{name: "fails at the prompt", prompt: []int32{5}, tokens: 9, ctx: 50, stop: -1, cancel: -1, fail: 1, stopID: -1, err: broken},
		{name: "fails later", prompt: []int32{5}, tokens: 9, ctx: 50, stop: -1, cancel: -1, fail: 3, ids: []int32{6, 7}, stopID: -1, err: broken, decode: 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			if tt.cancel == 0 {
				cancel()
			}
			d := &counting{limit: tt.ctx}
			d.fail = func(call int) error {
				if call == tt.fail {
					return broken
				}
				return nil
			}
			var emitted []int32
			decodes := 0
			r, err := Generate(ctx, d, greedy(), Generation{
				Prompt: tt.prompt,
				Tokens: tt.tokens,
				Ctx:    tt.ctx,
				Stop:   func(id int32) bool { return id == tt.stop },
				Emit: func(id int32) error {
					emitted = append(emitted, id)
					if len(emitted) == tt.cancel {
						cancel()
					}
					if id == int32(tt.emit) {
						return full
					}
					return nil
				},
				Decodes: func() {
					if decodes++; len(emitted) > 0 {
						t.Error("Decodes is called after a token")
					}
				},
			})
			var over, want *ContextError
			if errors.As(tt.err, &want) {
				if !errors.As(err, &over) || *over != *want {
					t.Fatalf("error %v, want %v", err, want)
				}
			} else if !errors.Is(err, tt.err) {
				t.Fatalf("error %v, want %v", err, tt.err)
			}
			if !slices.Equal(r.IDs, tt.ids) || !slices.Equal(emitted, tt.ids) {
				t.Errorf("generated %v, emitted %v, want %v", r.IDs, emitted, tt.ids)
			}
			if err == nil && r.Why != tt.why || r.StopID != tt.stopID {
				t.Errorf("ended by %q and token %d, want %q and %d", r.Why, r.StopID, tt.why, tt.stopID)
			}
			if r.Decode.Tokens != tt.decode {
				t.Errorf("%d tokens of decoding, want %d", r.Decode.Tokens, tt.decode)
			}
			if prompted := r.Prefill.Tokens > 0; (decodes == 1) != prompted || decodes > 1 { // a prompt alone is no decoding, and its experts are the prompt's
				t.Errorf("Decodes is called %d times", decodes)
			}
			if len(d.runs) > 0 && !slices.Equal(d.runs[0], tt.prompt) {
				t.Errorf("the prompt ran as %v", d.runs[0])
			}
			for i, ids := range d.runs[min(1, len(d.runs)):] {
				if len(ids) != 1 || ids[0] != emitted[i] {
					t.Errorf("run %d is of %v, want the token that was emitted before", i+1, ids)
				}
			}
			// The times are those of the decoder, by phase; each call took 1000 ns of experts.
			if got, want := r.Decode.Times[StageExperts], int64(1000*tt.decode); got != want {
				t.Errorf("decoding took %d ns of experts, want %d", got, want)
			}
			if r.Prefill.Tokens > 0 && r.Prefill.Times != (Times{StageExperts: 1000}) {
				t.Errorf("prefill took %v", r.Prefill.Times)
			}
		})
	}
}

// The witness is the CRC-32C of the bits of all logits that a token was chosen
// by, as a little-endian machine holds them.
func TestWitness(t *testing.T) {
	var want []byte
	for _, pos := range []int{2, 3, 4} {
		logits := make([]float32, countingVocab)
		logits[7+pos-2] = float32(pos)
		for _, l := range logits {
			want = binary.LittleEndian.AppendUint32(want, math.Float32bits(l))
		}
	}
	r, err := Generate(context.Background(), &counting{}, greedy(), Generation{
		Prompt: []int32{5, 6}, Tokens: 3, Ctx: 50,
		Stop: func(int32) bool { return false },
		Emit: func(int32) error { return nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	if sum := crc32.Checksum(want, crc32.MakeTable(crc32.Castagnoli)); r.Witness != sum {
		t.Errorf("witness %08x, want %08x", r.Witness, sum)
	}
}

// fixed is a decoder of always the same logits.
type fixed []float32

func (d fixed) Extend(context.Context, []int32) ([]float32, error) { return slices.Clone(d), nil }
func (d fixed) Stats() Stats                                       { return Stats{} }

// The penalty looks back over the prompt and over what was generated.
func TestGenerationIsPenalized(t *testing.T) {
	s := NewSampler(Sampling{TopP: 1, RepeatPenalty: 2, RepeatLast: 8}, 4)
	r, err := Generate(context.Background(), fixed{1, 6, 5, 4}, s, Generation{
		Prompt: []int32{1}, Tokens: 3, Ctx: 50,
		Stop: func(int32) bool { return false },
		Emit: func(int32) error { return nil },
	})
	if want := []int32{2, 3, 1}; err != nil || !slices.Equal(r.IDs, want) {
		t.Errorf("chose %v, %v, want %v", r.IDs, err, want)
	}
}

func TestRate(t *testing.T) {
	if got := (Phase{Nanos: 5e8, Tokens: 10}).Rate(); got != 20 {
		t.Errorf("10 tokens in half a second are %v a second", got)
	}
	if got := (Phase{Tokens: 10}).Rate(); got != 0 {
		t.Errorf("the rate of no time is %v", got)
	}
}

func TestSurprise(t *testing.T) {
	logits := logitsOf(0.5, 0.25, 0.25)
	for id, p := range []float64{0.5, 0.25, 0.25} {
		if got, want := surprise(logits, int32(id)), -math.Log(p); math.Abs(got-want) > 1e-7 {
			t.Errorf("token %d: %v, want %v", id, got, want)
		}
	}
	if got := surprise([]float32{1e30, 0}, 1); math.Abs(got/1e30-1) > 1e-7 {
		t.Errorf("far off: %v", got)
	}
}
