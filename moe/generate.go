package moe

import (
	"context"
	"errors"
	"hash/crc32"
	"time"
	"unsafe"
)

// A Decoder extends a sequence. Extend runs ids as the next positions, however
// many, and returns the logits [vocab] after the last of them, which stay valid
// until the next call. After an error the sequence ends where it was, or at a
// chunk's end behind it.
type Decoder interface {
	Extend(ctx context.Context, ids []int32) ([]float32, error)
	Stats() Stats
}

// Extend runs ids in chunks. It is the whole of prefill, and of decoding.
func (m *Model) Extend(ctx context.Context, ids []int32) ([]float32, error) {
	if m.s.pos+len(ids) > m.cfg.Ctx {
		return nil, &ContextError{m.s.pos + len(ids), m.cfg.Ctx}
	}
	n := 0
	for len(ids) > 0 {
		n = min(len(ids), m.Chunk())
		if err := m.Forward(ctx, ids[:n]); err != nil {
			return nil, err
		}
		ids = ids[n:]
	}
	m.lastRow[0] = int32(n - 1)
	return m.next, m.Logits(m.next, m.lastRow[:])
}

// Why a generation ended.
type Why string

const (
	WhyStop        Why = "stop"        // the model gave a token that ends the text
	WhyLength      Why = "length"      // as many tokens as asked for
	WhyContext     Why = "context"     // the context is full
	WhyInterrupted Why = "interrupted" // the context was cancelled
)

// Generation is what to generate.
type Generation struct {
	Prompt  []int32 // at least one
	Tokens  int     // at most so many new ones; below 0: until the context is full
	Ctx     int     // positions of the context, prompt included
	Stop    func(id int32) bool
	Emit    func(id int32) error // gets each token as it is chosen, the stopping one not; its error ends all
	Decodes func()               // called once, when the prompt has been run and decoding begins; nil: nothing is
}

// A Result is what was generated, with the counts and times of its two phases.
// Decode is the time from the first new token to the last: its rate is the
// tokens after the first by that time.
type Result struct {
	IDs     []int32
	Why     Why
	StopID  int32  // the token that ended it, -1: none
	Witness uint32 // CRC-32C of the bits of all logits that tokens were chosen by
	Prefill Phase
	Decode  Phase
}

// A Phase is a share of a generation.
type Phase struct {
	Nanos  int64
	Tokens int   // prompt tokens run, or tokens chosen after the first, the stopping one included
	Times  Times // by stage; they sum to Nanos but for what lies between the steps
}

// Rate is tokens by second; 0 if there was no time.
func (p Phase) Rate() float64 {
	if p.Nanos == 0 {
		return 0
	}
	return float64(p.Tokens) * 1e9 / float64(p.Nanos)
}

// Generate extends a prompt token by token. An interruption is no error: the
// result says so and holds what came before.
func Generate(ctx context.Context, d Decoder, s *Sampler, g Generation) (r Result, err error) {
	r = Result{StopID: -1, Why: WhyLength}
	room := g.Ctx - len(g.Prompt) + 1 // the last token need not be run
	if g.Tokens < 0 || g.Tokens > room {
		g.Tokens = room
		r.Why = WhyContext
	}
	r.IDs = make([]int32, 0, max(g.Tokens, 0))
	for _, id := range g.Prompt {
		s.Accept(id)
	}
	start, before := time.Now(), d.Stats().Times
	logits, err := d.Extend(ctx, g.Prompt)
	r.Prefill.Nanos = int64(time.Since(start))
	r.Prefill.Times = d.Stats().Times.Sub(before)
	if err != nil {
		return r.interrupted(ctx, err)
	}
	r.Prefill.Tokens = len(g.Prompt)
	if g.Tokens == 0 {
		if g.Decodes != nil {
			g.Decodes()
		}
		return r, nil
	}

	var sampling int64
	r.Witness = witness(r.Witness, logits)
	step := [1]int32{s.Sample(logits)}
	if g.Decodes != nil {
		g.Decodes()
	}
	start, before = time.Now(), d.Stats().Times
	defer func() {
		r.Decode.Nanos = int64(time.Since(start))
		r.Decode.Times = d.Stats().Times.Sub(before)
		r.Decode.Times[StageSampling] += sampling
	}()
	for {
		if g.Stop(step[0]) {
			r.Why, r.StopID = WhyStop, step[0]
			return r, nil
		}
		at := time.Now()
		r.IDs = append(r.IDs, step[0])
		s.Accept(step[0])
		err := g.Emit(step[0])
		sampling += int64(time.Since(at))
		if err != nil {
			return r, err
		}
		if len(r.IDs) == g.Tokens {
			return r, nil
		}
		if logits, err = d.Extend(ctx, step[:]); err != nil {
			return r.interrupted(ctx, err)
		}
		at = time.Now()
		r.Witness = witness(r.Witness, logits)
		step[0] = s.Sample(logits)
		r.Decode.Tokens++
		sampling += int64(time.Since(at))
	}
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// witness goes on with a checksum over the bits of logits, so that two runs can
// be shown to have computed the same ones.
func witness(sum uint32, logits []float32) uint32 {
	return crc32.Update(sum, castagnoli, unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(logits))), 4*len(logits)))
}

// interrupted turns the error of a cancelled context into a reason.
func (r Result) interrupted(ctx context.Context, err error) (Result, error) {
	if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		r.Why = WhyInterrupted
		return r, nil
	}
	return r, err
}
