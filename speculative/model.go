package speculative

import (
	"context"
	"fmt"
)

// A Small is a model that drafts for another of the same vocabulary: a
// *moe.Model of its own.
type Small interface {
	Extend(ctx context.Context, ids []int32) ([]float32, error)
	Pos() int
	Rewind(pos int) error
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

// Follow does nothing: what is missing is run when a proposal is asked for.
func (d *Model) Follow(context.Context, Text) error { return nil }

// Propose rolls the small model back to what its text has in common with this
// one, and lets it go on from the end. A text that is longer than its context
// gets no proposal.
func (d *Model) Propose(ctx context.Context, t Text, n int, dst []int32) ([]int32, error) {
	if n = min(n, d.room-len(t.IDs)+1); n < 1 {
		return dst, nil
	}
	same := 0
	for same < min(len(d.ids), len(t.IDs)-1) && d.ids[same] == t.IDs[same] { // the last is run again, for its logits
		same++
	}
	if d.m.Rewind(same) != nil { // it keeps states that go back to the start alone
		if err := d.m.Rewind(0); err != nil {
			return dst, fmt.Errorf("speculative: draft model: %w", err)
		}
		same = 0
	}
	d.ids = append(d.ids[:same], t.IDs[same:]...)
	logits, err := d.m.Extend(ctx, t.IDs[same:])
	for i := 0; err == nil; i++ {
		d.one[0] = likeliest(logits)
		dst = append(dst, d.one[0])
		if i == n-1 {
			return dst, nil
		}
		d.ids = append(d.ids, d.one[0])
		logits, err = d.m.Extend(ctx, d.one[:])
	}
	d.ids = d.ids[:min(len(d.ids), d.m.Pos())]
	return dst, fmt.Errorf("speculative: draft model: %w", err)
}
