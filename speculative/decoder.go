package speculative

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"sluice/moe"
)

// A Target is the model that drafts are for: a *moe.Model.
type Target interface {
	Forward(ctx context.Context, ids []int32) error
	Logits(dst []float32, rows []int32) error
	Keep(n int) error
	Rewind(pos int) error
	Pos() int
	Chunk() int
	Unions(n int) (experts, missed float64, ok bool)
	Stats() moe.Stats
}

// Options of a Decoder.
type Options struct {
	Drafter Drafter
	Vocab   int
	Ctx     int              // positions of the target's context
	Depth   int              // tokens that are drafted at once, 1 to moe.MostDrafts; 0: as the gate expects the most of
	Force   bool             // always draft
	Now     func() time.Time // nil: time.Now
}

// A Decoder extends a sequence like its target, and drafts where that pays. One
// goroutine uses it, and nobody else its target.
//
// A batch is the token that is certain and the drafts behind it. Its logits are
// kept; as long as the tokens that come in are the drafts, they are answered from
// there. The first that is not ends the batch, whose rest is rolled back.
type Decoder struct {
	t    Target
	o    Options
	gate gate

	text   []int32 // what is certain
	from   int     // position of the last Forward's first row; that of the next, if it failed
	batch  []int32 // drafts of the last Forward
	at     int     // of them, those that came true so far
	rows   []int32 // 0, 1, ...
	logits []float32
	alone  []float32 // of the first row, run alone: the numerical guard

	shadow   []int32 // proposed and not run
	shadowAt int     // of them, those that came true so far

	checked bool
	count   counts
}

// counts are of what was decoded: prompts are apart.
type counts struct {
	proposed, accepted int64 // of batches that ended
	forwards           int64 // of decoding, but for the guard's
	tokens             int64 // that came in one by one
	positions          int64 // run by those forwards
	shadows            int64 // drafts that were not verified
	empty              int64 // times that the drafter had no idea
}

// New makes a decoder over a target whose context is empty.
func New(t Target, o Options) (*Decoder, error) {
	if o.Drafter == nil || o.Vocab < 1 || o.Ctx < 1 || o.Depth < 0 || o.Depth > moe.MostDrafts {
		return nil, fmt.Errorf("speculative: a drafter, a vocabulary, a context and a depth of 0 to %d are needed, got %v, %d, %d, %d", moe.MostDrafts, o.Drafter, o.Vocab, o.Ctx, o.Depth)
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	deepest := moe.MostDrafts
	if o.Depth > 0 {
		deepest = o.Depth
	}
	d := &Decoder{
		t: t, o: o,
		gate:   newGate(o.Depth, o.Force),
		text:   make([]int32, 0, o.Ctx+1),
		batch:  make([]int32, 0, 1+deepest),
		shadow: make([]int32, 0, deepest),
		logits: make([]float32, (1+deepest)*o.Vocab),
		alone:  make([]float32, o.Vocab),
	}
	for i := range 1 + deepest {
		d.rows = append(d.rows, int32(i))
	}
	return d, nil
}

// Stats are the target's; its times and those of the drafter's model, if it has one of
// its own.
func (d *Decoder) Stats() moe.Stats {
	s := d.t.Stats()
	if by, ok := d.o.Drafter.(own); ok {
		for i, t := range by.Times() {
			s.Times[i] += t
		}
	}
	return s
}

// Extend is moe.Decoder's. Several ids are a prompt.
func (d *Decoder) Extend(ctx context.Context, ids []int32) ([]float32, error) {
	if len(ids) != 1 || len(d.text) == 0 {
		return d.prompt(ctx, ids)
	}
	id := ids[0]
	d.see(id)
	if d.at < len(d.batch) && d.batch[d.at] == id {
		d.gate.outcome(d.at, true)
		d.at++
		d.count.tokens++
		d.text = append(d.text, id)
		return d.row(d.at), nil
	}
	if d.at < len(d.batch) {
		d.gate.outcome(d.at, false)
	}
	if err := d.settle(); err != nil {
		return nil, err
	}
	d.text = append(d.text, id)
	logits, err := d.round(ctx)
	if err != nil {
		d.text = d.text[:d.t.Pos()]
		return nil, err
	}
	d.count.tokens++
	return logits, nil
}

func (d *Decoder) row(i int) []float32 { return d.logits[i*d.o.Vocab : (i+1)*d.o.Vocab] }

// see compares a token with the shadow drafts.
func (d *Decoder) see(id int32) {
	if d.shadowAt == len(d.shadow) {
		return
	}
	right := d.shadow[d.shadowAt] == id
	d.gate.outcome(d.shadowAt, right)
	d.shadowAt++
	if !right {
		d.shadow, d.shadowAt = d.shadow[:0], 0
	}
}

// settle ends a batch: what did not come true is rolled back.
func (d *Decoder) settle() error {
	if len(d.batch) == 0 {
		return nil
	}
	d.count.proposed += int64(len(d.batch))
	d.count.accepted += int64(d.at)
	n := 1 + d.at
	d.batch, d.at = d.batch[:0], 0
	return d.t.Keep(n)
}

// prompt runs ids in chunks. The drafter follows.
func (d *Decoder) prompt(ctx context.Context, ids []int32) ([]float32, error) {
	if err := d.settle(); err != nil {
		return nil, err
	}
	d.shadow, d.shadowAt = d.shadow[:0], 0
	if d.t.Pos()+len(ids) > d.o.Ctx {
		return nil, &moe.ContextError{Tokens: d.t.Pos() + len(ids), Ctx: d.o.Ctx}
	}
	d.text = append(d.text, ids...)
	for len(ids) > 0 {
		n := min(len(ids), d.t.Chunk())
		start := d.o.Now()
		err := d.o.Drafter.Follow(ctx, d.tail())
		from := d.t.Pos()
		if err == nil {
			if err = d.t.Forward(ctx, ids[:n]); err != nil {
				d.from = d.t.Pos() // what stood of the last Forward, this one overwrote
			}
		}
		if err != nil {
			d.text = d.text[:d.t.Pos()]
			return nil, err
		}
		d.from = from
		d.gate.passed(d.o.Now().Sub(start))
		ids = ids[n:]
	}
	d.rows[0] = int32(d.t.Pos() - d.from - 1)
	err := d.t.Logits(d.row(0), d.rows[:1])
	d.rows[0] = 0
	return d.row(0), err
}

// tail is the text with what stands of the last Forward.
func (d *Decoder) tail() Text {
	return Text{IDs: d.text, From: d.from, To: d.t.Pos()}
}

// round runs the last token of the text, with drafts behind it if the gate is open.
func (d *Decoder) round(ctx context.Context) ([]float32, error) {
	pos := d.t.Pos()
	if pos >= d.o.Ctx {
		return nil, &moe.ContextError{Tokens: pos + 1, Ctx: d.o.Ctx}
	}
	room := min(d.o.Ctx-pos-1, d.t.Chunk()-1, len(d.rows)-1)
	depth := d.gate.choose(room)
	if depth > 0 {
		if err := d.propose(ctx, depth); err != nil {
			return nil, err
		}
	} else if n := d.gate.shadow(room); n > 0 && len(d.shadow) == d.shadowAt {
		if err := d.castShadow(ctx, n); err != nil {
			return nil, err
		}
	}
	check := len(d.batch) > 0 && !d.checked
	if check {
		if err := d.runAlone(ctx, pos); err != nil {
			d.batch = d.batch[:0]
			return nil, err
		}
	}
	logits, err := d.run(ctx, pos)
	if err != nil || !check || d.same(logits) {
		return logits, err
	}
	d.gate.refuse()
	d.batch = d.batch[:0]
	if err := d.t.Rewind(pos); err != nil {
		return nil, err
	}
	return d.run(ctx, pos)
}

// propose asks the drafter for a batch.
func (d *Decoder) propose(ctx context.Context, depth int) (err error) {
	d.shadow, d.shadowAt = d.shadow[:0], 0
	start := d.o.Now()
	d.batch, err = d.o.Drafter.Propose(ctx, d.tail(), depth, d.batch[:0])
	if err != nil {
		d.batch = d.batch[:0]
		return err
	}
	if len(d.batch) == 0 {
		d.count.empty++
	}
	d.gate.proposed(len(d.batch), d.o.Now().Sub(start))
	return nil
}

// castShadow asks the drafter for tokens that will only be compared.
func (d *Decoder) castShadow(ctx context.Context, n int) (err error) {
	start := d.o.Now()
	if by, ok := d.o.Drafter.(own); ok {
		if err := by.Catch(ctx, d.tail()); err != nil {
			return err
		}
		now := d.o.Now()
		d.gate.caught(now.Sub(start))
		start = now
	}
	d.shadow, err = d.o.Drafter.Propose(ctx, d.tail(), n, d.shadow[:0])
	d.shadowAt = 0
	if err != nil {
		d.shadow = d.shadow[:0]
		return err
	}
	if len(d.shadow) == 0 {
		d.count.empty++
	}
	d.count.shadows += int64(len(d.shadow))
	d.gate.shadowed(len(d.shadow), d.o.Now().Sub(start))
	return nil
}

// run runs the last token and the batch behind it.
func (d *Decoder) run(ctx context.Context, pos int) ([]float32, error) {
	start, before := d.o.Now(), d.t.Stats().Times
	k := len(d.batch)
	d.batch = append(d.batch, 0)
	copy(d.batch[1:], d.batch)
	d.batch[0] = d.text[pos]
	err := d.t.Forward(ctx, d.batch)
	copy(d.batch, d.batch[1:])
	d.batch = d.batch[:k]
	if err == nil {
		d.from, d.at = pos, 0
		err = d.t.Logits(d.logits[:(1+k)*d.o.Vocab], d.rows[:1+k])
	}
	if err != nil {
		d.batch = d.batch[:0]
		err = errors.Join(err, d.t.Rewind(pos))
		d.from = d.t.Pos()
		return nil, err
	}
	d.count.forwards++
	d.count.positions += int64(1 + k)
	times := d.t.Stats().Times.Sub(before)
	d.gate.ran(k, d.o.Now().Sub(start), times, d.t)
	return d.row(0), nil
}

// runAlone is half of the numerical guard: before the first batch the certain
// token is run by itself, and its logits must be those that it gets in the batch,
// to the bit.
func (d *Decoder) runAlone(ctx context.Context, pos int) error {
	d.checked = true
	err := d.t.Forward(ctx, d.text[pos:pos+1])
	if err == nil {
		err = d.t.Logits(d.alone, d.rows[:1])
	}
	err = errors.Join(err, d.t.Rewind(pos))
	d.from = d.t.Pos()
	return err
}

// same is the other half.
func (d *Decoder) same(logits []float32) bool {
	for i, v := range d.alone {
		if math.Float32bits(v) != math.Float32bits(logits[i]) {
			return false
		}
	}
	return true
}
