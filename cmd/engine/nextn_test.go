package engine

import (
	"context"
	"slices"
	"testing"

	"sluice/moe"
	"sluice/tiers"
)

// mtp is the tiny GLM-4.5 with a drafting layer. It is not in the repository,
// which has another of its family.
func mtp(t testing.TB) string { t.Helper(); return shared(t, "oracles/gguf/glm4_moe_mtp.gguf") }

// A drafting layer takes memory only when it is used, and then the ledger counts
// it: its weights, its keys and values, its experts' slots.
func TestNextnMemory(t *testing.T) {
	without, with := open(t, Options{Path: mtp(t), Cap: 3}), open(t, Options{Path: mtp(t), Cap: 3, Drafts: 2})
	for _, p := range []tiers.Purpose{tiers.Dense, tiers.KV, tiers.LRU, tiers.Scratch} {
		if a, b := without.Ledger.Of(p), with.Ledger.Of(p); a >= b {
			t.Errorf("purpose %v: %d bytes without drafts, %d with", p, a, b)
		}
	}
	kv := func(e *Engine) int64 { return e.Ledger.Of(tiers.KV) }
	if a, b := kv(without), kv(with); a*5 != b*3 { // 3 layers, and 2 caches
		t.Errorf("keys and values of %d bytes without drafts, %d with", a, b)
	}
	var nextn int64
	for _, x := range with.Spec.NextnDense {
		nextn += x.Bytes
	}
	if got := with.Ledger.Of(tiers.Dense) - without.Ledger.Of(tiers.Dense); got < nextn-8192 || got > nextn+8192+64*int64(len(with.Spec.NextnDense)) { // pages
		t.Errorf("the drafting layer's %d bytes are counted as %d", nextn, got)
	}
}

// Drafts change nothing of the sequence, wherever they come between.
func TestDraftsChangeNothing(t *testing.T) {
	ctx := context.Background()
	plain := open(t, Options{Path: mtp(t), Cap: 16})
	prompt := heldout(t, plain, 40)
	want := generate(t, plain, prompt, 20)
	logits, _ := allLogits(t, plain, prompt)

	e := open(t, Options{Path: mtp(t), Cap: 1, Drafts: 1})
	draft := func(at int, recycle bool, row, id int32) {
		t.Helper()
		if err := e.Model.Draft(ctx, moe.DraftStep{Pos: at, Recycle: recycle, Rows: []int32{row}, IDs: []int32{id}}); err != nil {
			t.Fatal(err)
		}
	}
	vocab := e.Spec.Vocab
	got, foretold := make([]float32, vocab), make([]float32, vocab)
	for at := 0; at < len(prompt); at += 8 {
		if err := e.Model.Forward(ctx, prompt[at:at+8]); err != nil {
			t.Fatal(err)
		}
		draft(at, false, 3, 7)
		draft(at+1, true, 0, 9)
		if err := e.Model.DraftLogits(foretold, []int32{0}); err != nil {
			t.Fatal(err)
		}
		for i := range int32(8) {
			if err := e.Model.Logits(got, []int32{i}); err != nil {
				t.Fatal(err)
			}
			same(t, "logits after a draft", got, row(logits, at+int(i), vocab))
		}
	}
	if r := generate(t, e, prompt, 20); r.Witness != want.Witness || !slices.Equal(r.IDs, want.IDs) {
		t.Errorf("text %v (%08x), want %v (%08x)", r.IDs, r.Witness, want.IDs, want.Witness)
	}
}
