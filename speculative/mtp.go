package speculative

import (
	"context"
	"fmt"

	"sluice/moe"
)

// A Nextn is a model with a drafting layer: a *moe.Model opened with one drafting cache.
type Nextn interface {
	Draft(ctx context.Context, step moe.DraftStep) error
	DraftLogits(dst []float32, rows []int32) error
}

// MTP drafts by the model's first drafting (nextn) layer: from the hidden state
// behind the last token that was run and the token after it, then from its own
// output and its own proposal.
//
// The layer's keys and values are kept for true tokens; rows for proposals are
// written behind them and overwritten. Where drafting paused, rows are missing:
// the cache is dense and its positions are its own, so the layer sees less text,
// which costs acceptance and nothing else.
type MTP struct {
	m      Nextn
	rows   []int32 // the text's position of each row that is kept, ascending
	logits []float32
	step   []int32 // scratch: rows of a step
	ids    [1]int32
	one    [1]int32
}

// NewMTP drafts for a model of so large a vocabulary and a context of ctx.
func NewMTP(m Nextn, vocab, ctx int) *MTP {
	return &MTP{m: m, rows: make([]int32, 0, ctx), step: make([]int32, 0, ctx), logits: make([]float32, vocab)}
}

// Name is "mtp".
func (d *MTP) Name() string { return "mtp" }

// Follow runs the layer over what stands of the last Forward.
func (d *MTP) Follow(ctx context.Context, t Text) error {
	d.rewind(t.From)
	_, err := d.follow(ctx, t)
	return err
}

// rewind forgets rows of positions from pos on.
func (d *MTP) rewind(pos int) {
	for len(d.rows) > 0 && int(d.rows[len(d.rows)-1]) >= pos {
		d.rows = d.rows[:len(d.rows)-1]
	}
}

// follow writes rows for the positions of the last Forward and says how many.
func (d *MTP) follow(ctx context.Context, t Text) (n int, err error) {
	if n = t.To - t.From; n == 0 {
		return 0, nil
	}
	d.step = d.step[:0]
	for i := range n {
		d.step = append(d.step, int32(i))
	}
	err = d.m.Draft(ctx, moe.DraftStep{Pos: len(d.rows), Rows: d.step, IDs: t.IDs[t.From+1 : t.To+1]})
	if err != nil {
		return 0, fmt.Errorf("speculative: mtp: %w", err)
	}
	for i := range n {
		d.rows = append(d.rows, int32(t.From+i))
	}
	return n, nil
}

// Propose catches up with the last Forward, and goes on by itself.
func (d *MTP) Propose(ctx context.Context, t Text, n int, dst []int32) ([]int32, error) {
	d.rewind(t.From)
	rows, err := d.follow(ctx, t)
	if err != nil || rows == 0 {
		return dst, err
	}
	last := int32(rows - 1)
	for i := range n {
		d.one[0] = last
		if err := d.m.DraftLogits(d.logits, d.one[:]); err != nil {
			return dst, fmt.Errorf("speculative: mtp: %w", err)
		}
		id := likeliest(d.logits)
		dst = append(dst, id)
		if i == n-1 {
			break
		}
		d.ids[0] = id
		err := d.m.Draft(ctx, moe.DraftStep{Pos: len(d.rows) + i, Recycle: true, Rows: d.one[:], IDs: d.ids[:]})
		if err != nil {
			return dst, fmt.Errorf("speculative: mtp: %w", err)
		}
		last = 0
	}
	return dst, nil
}

// likeliest is the largest logit, the lower id among equals.
func likeliest(logits []float32) int32 {
	best := 0
	for i, l := range logits {
		if l > logits[best] {
			best = i
		}
	}
	return int32(best)
}
