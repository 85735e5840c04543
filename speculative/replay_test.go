package speculative

import (
	"context"
	"math"
	"slices"
	"testing"
)

// A replay is right at its share of the places, at the same ones whatever the depth,
// and never where it means to be wrong; on another text it has no idea.
func TestReplay(t *testing.T) {
	const n, vocab = 20000, 7
	ids := make([]int32, n)
	for i := range ids {
		ids[i] = int32(i*i) % vocab
	}
	ctx := context.Background()
	propose := func(d *Replay, at, depth int) []int32 {
		t.Helper()
		got, err := d.Propose(ctx, Text{IDs: ids[:at]}, depth, nil)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	for _, a := range []float64{0, 0.3, 0.8, 1} {
		d := NewReplay(ids, vocab, a)
		right := make([]bool, n)
		sum := 0.0
		for at := 1; at < n; at += 8 {
			got := propose(d, at, 8)
			if want := min(8, n-at); len(got) != want {
				t.Fatalf("%d proposals at %d, want %d", len(got), at, want)
			}
			for i, id := range got {
				if id < 0 || id >= vocab {
					t.Fatalf("a proposal of %d", id)
				}
				if right[at+i] = id == ids[at+i]; right[at+i] {
					sum++
				}
			}
		}
		if sum /= n - 1; math.Abs(sum-a) > 0.015 {
			t.Errorf("%v of the proposals are right, want %v", sum, a)
		}
		for at := 1; at < 400; at++ {
			if got := propose(d, at, 1); (got[0] == ids[at]) != right[at] {
				t.Fatalf("acceptance %v: place %d depends on the depth", a, at)
			}
		}
	}
	d := NewReplay(ids, vocab, 1)
	other := slices.Clone(ids[:50])
	other[3] = (other[3] + 1) % vocab
	if got, err := d.Propose(ctx, Text{IDs: other}, 4, nil); len(got) > 0 || err != nil {
		t.Errorf("%v, %v of another text", got, err)
	}
	if got := propose(d, n, 4); len(got) > 0 {
		t.Errorf("%v behind the end", got)
	}
	if got := propose(NewReplay([]int32{0, 0}, 1, 0), 0, 2); !slices.Equal(got, []int32{0, 0}) { // nothing else to say
		t.Errorf("%v of a vocabulary of one", got)
	}
}
