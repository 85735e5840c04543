package speculative

import (
	"context"
	"fmt"

	"sluice/moe"
)

// A Small is a model that drafts for another of the same vocabulary: a
// *moe.Model of its own.
type Small interface {
	Extend(ctx context.Context, ids []int32) ([]float32, error)
	Pos() int
	Rewind(pos int) error
	Stats() moe.Stats
}

// Model drafts by a smaller model's greedy text.
type Model struct {
	m    Small
	ids  []int32 // what it has run
	room int     // positions of its context
	one  [1]int32
}

// NewModel drafts by m, whose context has room for so many positions.
func NewModel(m Small, room int) *Model { return &Model{m: m, ids: make([]int32, 0, room), room: room} }

// Name is "model".
func (d *Model) Name() string { return "model" }

// Times are those of the small model.
func (d *Model) Times() moe.Times { return d.m.Stats().Times }

// Follow runs the small model over a prompt, so that the time that takes is the
// prompt's and not the first proposal's.
func (d *Model) Follow(ctx context.Context, t Text) error {
	if len(t.IDs) > d.room || d.same(t.IDs) == len(t.IDs) {
		return nil
	}
	_, err := d.run(ctx, t.IDs)
	return err
}

// Catch runs the text but for its last token if more of it is missing than a batch
// of drafts leaves behind.
func (d *Model) Catch(ctx context.Context, t Text) error {
	if len(t.IDs) > d.room || len(t.IDs)-d.same(t.IDs) <= 1+moe.MostDrafts {
		return nil
	}
	_, err := d.run(ctx, t.IDs[:len(t.IDs)-1])
	return err
}

// Propose rolls the small model back to what its text has in common with this
// one, and lets it go on from the end. A text that is longer than its context
// gets no proposal.
func (d *Model) Propose(ctx context.Context, t Text, n int, dst []int32) ([]int32, error) {
	if n = min(n, d.room-len(t.IDs)+1); n < 1 {
		return dst, nil
	}
	logits, err := d.run(ctx, t.IDs)
	for err == nil {
		d.one[0] = likeliest(logits)
		dst = append(dst, d.one[0])
		if n--; n == 0 {
			return dst, nil
		}
		d.ids = append(d.ids, d.one[0])
		if logits, err = d.m.Extend(ctx, d.one[:]); err != nil {
			err = d.failed(err)
		}
	}
	return dst, err
}

// same is how many of ids, from the first, the small model has run.
func (d *Model) same(ids []int32) (n int) {
	for n < min(len(d.ids), len(ids)) && d.ids[n] == ids[n] {
		n++
	}
	return n
}

// run runs what of ids the small model has not run, the last of them in any
// case, and gives the logits behind it.
func (d *Model) run(ctx context.Context, ids []int32) ([]float32, error) {
	same := min(d.same(ids), len(ids)-1)
	if d.m.Rewind(same) != nil { // it keeps states that go back to the start alone
		if err := d.m.Rewind(0); err != nil {
			return nil, fmt.Errorf("speculative: draft model: %w", err)
		}
		same = 0
	}
	d.ids = append(d.ids[:same], ids[same:]...)
	logits, err := d.m.Extend(ctx, ids[same:])
	if err != nil {
		return nil, d.failed(err)
	}
	return logits, nil
}

// failed forgets what an Extend that failed did not run.
func (d *Model) failed(err error) error {
	d.ids = d.ids[:min(len(d.ids), d.m.Pos())]
	return fmt.Errorf("speculative: draft model: %w", err)
}
