package engine

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"sluice/backends"
	"sluice/moe"
	"sluice/storage"
)

const (
	next35   = "testdata/qwen3_5_moe.gguf"
	nextText = "testdata/qwen3_5_moe.oracle.safetensors"
)

// A model with states goes back where it says it can, and nowhere else; what runs
// then has the bits of a fresh run.
func TestRewindStates(t *testing.T) {
	o := openOracle(t, nextText)
	ids := slices.Concat(o.ints("input_ids"), o.ints("input_ids"))
	for _, threads := range []int{1, 2} {
		e := open(t, Options{Path: next35, Ctx: len(ids), Threads: threads, Chunk: 40})
		want, _ := allLogits(t, e, ids)
		m := e.Model
		rng := rand.New(rand.NewPCG(7, uint64(threads)))
		start, end := m.Pos()-len(ids)%40, m.Pos()
		refused, inside := 0, 0
		for range 300 {
			// Back to any position: allowed where the contract says so.
			at := m.Pos()
			pos := rng.IntN(at + 1)
			if rng.IntN(2) == 0 {
				pos = max(0, at-rng.IntN(20))
			}
			ok := pos == 0 || pos == start || pos == end || pos > start && pos < end && end-start <= backends.DeltaReach
			err := m.Rewind(pos)
			var no *moe.RewindError
			if ok != (err == nil) || !ok && (!errors.As(err, &no) || no.Pos != pos || no.Start != start || m.Pos() != at) {
				t.Fatalf("rewind from %d to %d after a forward from %d to %d: %v", at, pos, start, end, err)
			}
			if !ok {
				refused++
			} else if pos > start && pos < end {
				inside++
			}
			if m.Pos() == len(ids) || rng.IntN(4) == 0 {
				continue // back once more
			}
			n := 1 + rng.IntN([]int{2, 9, 40}[rng.IntN(3)])
			start = m.Pos()
			end = min(start+n, len(ids))
			if err := m.Forward(context.Background(), ids[start:end]); err != nil {
				t.Fatal(err)
			}
			got := make([]float32, m.Vocab)
			if err := m.Logits(got, []int32{int32(end - start - 1)}); err != nil {
				t.Fatal(err)
			}
			same(t, "after going back", got, row(want, end-1, m.Vocab))
		}
		if refused == 0 || inside == 0 {
			t.Errorf("%d refused, %d inside a forward: this tests nothing", refused, inside)
		}
	}
}

// A forward that fails in the middle of the layers leaves states that the next
// one goes on from as if it had not been.
func TestStatesAfterFailure(t *testing.T) {
	ids := openOracle(t, nextText).ints("input_ids")
	for _, n := range []int{1, 5, 30} {
		e, s := openTapped(t, Options{Path: next35, Cap: 1, Policy: "lru"})
		want, _ := allLogits(t, e, ids)
		m := e.Model
		for layer := range m.Layers {
			m.Rewind(0)
			ctx := context.Background()
			if err := m.Forward(ctx, ids[:10]); err != nil {
				t.Fatal(err)
			}
			s.broken = func(k storage.Key) error {
				if int(k.Layer) == layer {
					return errors.New("broken")
				}
				return nil
			}
			if err := m.Forward(ctx, ids[10:10+n]); err == nil {
				t.Fatalf("layer %d: no error", layer)
			}
			s.broken = nil
			var no *moe.RewindError
			if err := m.Rewind(5); !errors.As(err, &no) || no.Start != 10 {
				t.Errorf("layer %d: into the forward before the one that failed: %v", layer, err)
			}
			if err := m.Forward(ctx, ids[10:]); err != nil {
				t.Fatal(err)
			}
			got := make([]float32, m.Vocab)
			if err := m.Logits(got, []int32{int32(len(ids) - 11)}); err != nil {
				t.Fatal(err)
			}
			same(t, "after a failure", got, row(want, len(ids)-1, m.Vocab))
		}
	}
}

// Headers that a page does not implement are refused in words.
func TestDeltaRefusals(t *testing.T) {
	for _, c := range []struct {
		name  string
		meta  map[string]any
		words string
	}{
		{"no layers of one kind", map[string]any{"qwen35moe.full_attention_interval": uint32(1)}, "full attention every 1 of 4 layers"},
		{"heads that do not divide", map[string]any{"qwen35moe.ssm.time_step_rank": uint32(3)}, "3 value heads"},
		{"no whole heads", map[string]any{"qwen35moe.ssm.inner_size": uint32(66)}, "of 66 in all"},
		{"short heads", map[string]any{"qwen35moe.ssm.state_size": uint32(8)}, "multiples of 16"},
		{"one tap", map[string]any{"qwen35moe.ssm.conv_kernel": uint32(1)}, "taps at least 2"},
		{"other taps", map[string]any{"qwen35moe.ssm.conv_kernel": uint32(3)}, "blk.0.ssm_conv1d.weight has dims [4 128], want [3 128]"},
		{"no width of the shared expert", map[string]any{"qwen35moe.expert_shared_feed_forward_length": uint32(0)}, "expert_shared_feed_forward_length"},
		{"scaled experts", map[string]any{"qwen35moe.expert_weights_scale": float32(2.5)}, "scaled by 2.5"},
		{"too many heads", map[string]any{"qwen35moe.ssm.group_count": uint32(1 << 30)}, "ssm.group_count is 1073741824"},
	} {
		_, err := Prepare(Options{Path: rewrite(t, next35, change{meta: c.meta})})
		if err == nil || !strings.Contains(err.Error(), c.words) {
			t.Errorf("%s: %v, want %q", c.name, err, c.words)
		}
	}
	path := rewrite(t, next35, change{tensor: "blk.1.ssm_a", data: func(b []byte, _ storage.Tensor) { b[3] &= 0x7f }}) // a positive rate
	p := prepare(t, Options{Path: path})
	if e, err := p.Load(context.Background()); err == nil || !strings.Contains(err.Error(), "blk.1.ssm_a: the decay rate of head 0") {
		if err == nil {
			e.Close()
		}
		t.Errorf("a positive decay rate: %v", err)
	}
}
