package engine

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"sluice/moe"
	"sluice/storage"
	"sluice/tiers"
)

// draftsOf are ways to draft for a text that is known, each forced and deep.
func draftsOf(t *testing.T, prompt []int32, want moe.Result) []Drafting {
	return []Drafting{
		{By: "mtp", Depth: 3, Force: true},
		{By: "lookup", Depth: 8, Force: true},
		{By: "model", Model: mtp(t), Depth: 4, Force: true},
		{By: "replay", Replay: Recording{"said", slices.Concat(prompt, want.IDs), 0.6}, Depth: 5, Force: true},
	}
}

// A stubborn decoder gives its inner one a context of its own for each step, and
// takes a step that fails again, with what of it does not stand yet.
type stubborn struct {
	*Engine
	next   func() context.Context
	failed func(error)
}

func (d stubborn) Stats() moe.Stats { return d.Decoder().Stats() }

func (d stubborn) Extend(_ context.Context, ids []int32) ([]float32, error) {
	before := d.Model.Pos()
	logits, err := d.Decoder().Extend(d.next(), ids)
	if err == nil {
		return logits, nil
	}
	d.failed(err)
	if len(ids) > 1 {
		ids = ids[d.Model.Pos()-before:]
	}
	return d.Decoder().Extend(context.Background(), ids)
}

// Wherever drafting is interrupted, in the prompt, a proposal, a verification or
// the roll-back after it, the sequence stands as it was, and goes on with the same bits.
func TestDraftInterrupted(t *testing.T) {
	const tokens = 14
	plain := open(t, Options{Path: mtp(t), Ctx: 64, Cap: 16})
	prompt := heldout(t, plain, 12)
	prompt = append(prompt, prompt[:8]...)
	want := generate(t, plain, prompt, tokens)
	for _, o := range draftsOf(t, prompt, want) {
		interrupted, stride := 0, 23 // looks lie closer than what they may break
		if raceEnabled {
			stride = 97
		}
		for n := 1 + rand.IntN(stride); ; n += stride {
			e := open(t, Options{Path: mtp(t), Ctx: 64, Cap: 2, Chunk: 9, Threads: 1, Draft: o})
			ctx, hit := &expiring{context.Background(), n}, false
			d := stubborn{e, func() context.Context {
				if hit {
					return context.Background()
				}
				return ctx
			}, func(err error) {
				if hit = true; !errors.Is(err, context.Canceled) {
					t.Errorf("%s, at look %d: %v", o.By, n, err)
				}
			}}
			r, err := moe.Generate(context.Background(), d, greedy(e), generation(e, prompt, tokens))
			if err != nil || r.Witness != want.Witness || !slices.Equal(r.IDs, want.IDs) {
				t.Fatalf("%s, interrupted at look %d: %v (logits %08x), %v; want %v (%08x)", o.By, n, r.IDs, r.Witness, err, want.IDs, want.Witness)
			}
			if err := e.Close(); err != nil {
				t.Fatal(err)
			}
			if !hit {
				break
			}
			interrupted++
		}
		if !raceEnabled && interrupted < 5 {
			t.Errorf("%s: only %d interruptions", o.By, interrupted)
		}
	}
}

// An expert that cannot be read, of a layer that verifies or of the one that drafts,
// fails its step by name; taken again, it gives the same bits.
func TestDraftBrokenReads(t *testing.T) {
	const tokens = 14
	plain := open(t, Options{Path: mtp(t), Ctx: 64, Cap: 16})
	prompt := heldout(t, plain, 12)
	prompt = append(prompt, prompt[:8]...)
	want := generate(t, plain, prompt, tokens)
	layers := int32(plain.Spec.Layers)
	for _, o := range draftsOf(t, prompt, want) {
		broke := map[int32]int{} // by layer
		stride := 7
		if raceEnabled {
			stride = 40
		}
		for n := 1 + rand.IntN(stride); ; n += stride {
			e, source := openTapped(t, Options{Path: mtp(t), Ctx: 64, Cap: 2, Threads: 1, Prefetch: tiers.PrefetchOff, Draft: o})
			left, broken := n, storage.Key{}
			source.broken = func(k storage.Key) error {
				if left--; left == 0 {
					broken = k
					return errors.New("a loose cable")
				}
				return nil
			}
			failures := 0
			d := stubborn{e, context.Background, func(err error) {
				if failures++; !strings.Contains(err.Error(), "a loose cable") || !strings.Contains(err.Error(), fmt.Sprintf("layer %d", broken.Layer)) || !strings.Contains(err.Error(), "expert") {
					t.Errorf("%s, load %d: %v", o.By, n, err)
				}
			}}
			r, err := moe.Generate(context.Background(), d, greedy(e), generation(e, prompt, tokens))
			if err != nil || r.Witness != want.Witness || !slices.Equal(r.IDs, want.IDs) {
				t.Fatalf("%s, load %d of layer %d failed: %v (logits %08x), %v; want %v (%08x)", o.By, n, broken.Layer, r.IDs, r.Witness, err, want.IDs, want.Witness)
			}
			if err := e.Close(); err != nil {
				t.Fatal(err)
			}
			if left > 0 {
				break
			}
			if failures == 1 {
				broke[int32(broken.Layer)]++
			}
		}
		t.Logf("%s: failures by layer %v", o.By, broke)
		if !raceEnabled && ((broke[layers] > 0) != (o.By == "mtp") || broke[layers-1] == 0) {
			t.Errorf("%s: failures by layer %v", o.By, broke)
		}
	}
}
