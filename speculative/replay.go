package speculative

import (
	"context"
	"math/rand/v2"
	"slices"
)

// Replay proposes what a recorded run of the same prompt said next, and is wrong
// on purpose: an experimenter's drafter of a known acceptance that costs nothing.
type Replay struct {
	ids   []int32 // prompt and text
	vocab int32
	wrong func(pos int) bool
}

// replaySeed makes the same places wrong in every run.
const replaySeed = 0x5351

// NewReplay proposes ids, a prompt and the text after it. Each proposal is right
// with a probability of acceptance, 0 to 1, which is drawn once for each place, so
// that runs of any depth are wrong at the same places.
func NewReplay(ids []int32, vocab int, acceptance float64) *Replay {
	return &Replay{ids: ids, vocab: int32(vocab), wrong: func(pos int) bool {
		var r rand.PCG
		r.Seed(replaySeed, uint64(pos))
		return float64(r.Uint64()>>11)/(1<<53) >= acceptance
	}}
}

// Name is "replay".
func (d *Replay) Name() string { return "replay" }

// Follow does nothing: the recording is all there is.
func (d *Replay) Follow(context.Context, Text) error { return nil }

// Propose goes on where the text ends, as long as it is that of the recording. In
// place of a right token stands another of the vocabulary.
func (d *Replay) Propose(_ context.Context, t Text, n int, dst []int32) ([]int32, error) {
	at := len(t.IDs)
	if at > len(d.ids) || !slices.Equal(t.IDs, d.ids[:at]) {
		return dst, nil
	}
	for pos := at; pos < min(at+n, len(d.ids)); pos++ {
		id := d.ids[pos]
		if d.vocab > 1 && d.wrong(pos) {
			id = (id + 1 + int32(uint32(pos)*2654435761>>8)%(d.vocab-1)) % d.vocab
		}
		dst = append(dst, id)
	}
	return dst, nil
}
