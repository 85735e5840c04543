package cpu

import (
	"strings"
	"testing"

	"sluice/backends"
)

// A deltaBench is a layer and vectors for n positions of it.
type deltaBench struct {
	state                 backends.Delta
	net                   *backends.DeltaNet
	y, qkv, z, a, b, q, v backends.Vec
}

func newDeltaBench(t testing.TB, b *Backend, n int, s backends.DeltaShape) (d deltaBench) {
	state, err := b.NewDelta(s)
	if err != nil {
		t.Fatal(err)
	}
	vec := func(dim int) backends.Vec {
		v, err := b.NewVec(n, dim)
		if err != nil {
			t.Fatal(err)
		}
		v.SetLen(n)
		return v
	}
	out, keys := s.ValueHeads*s.ValueDim, 2*s.KeyHeads*s.KeyDim
	return deltaBench{
		state, &backends.DeltaNet{Conv: make([]float32, s.Taps*s.Channels()), A: make([]float32, s.ValueHeads), Bias: make([]float32, s.ValueHeads), Norm: make([]float32, s.ValueDim), Eps: 1e-6},
		vec(out), vec(s.Channels()), vec(out), vec(s.ValueHeads), vec(s.ValueHeads), vec(keys), vec(out),
	}
}

func (d *deltaBench) step(b *Backend, layer, pos int) {
	b.DeltaNet(d.y, d.qkv, d.z, d.a, d.b, d.state, layer, pos, d.net)
}

var smallDelta = backends.DeltaShape{Layers: 1, KeyHeads: 2, ValueHeads: 4, KeyDim: 32, ValueDim: 48, Taps: 4}

func TestDeltaDoesNotAllocate(t *testing.T) {
	for _, threads := range []int{1, 3} {
		for _, n := range []int{1, 7} {
			b := open(t, threads)
			d := newDeltaBench(t, b, n, smallDelta)
			d.step(b, 0, 0)
			to, runs := []backends.Vec{d.v, d.q, d.q}, []int{48 * 4, 64, 64}
			if a := testing.AllocsPerRun(5, func() {
				d.step(b, 0, n)
				d.step(b, 0, 2*n-1) // which computes n-1 positions again
				d.step(b, 0, 0)
				b.Split(to, runs, d.qkv)
			}); a != 0 {
				t.Errorf("%d positions by %d threads: %g allocations", n, threads, a)
			}
		}
	}
}

func TestDeltaMisusePanics(t *testing.T) {
	b := open(t, 3)
	d := newDeltaBench(t, b, 20, smallDelta)
	d.step(b, 0, 0)
	d.step(b, 0, 20)
	for name, c := range map[string]struct {
		misuse func()
		words  string
	}{
		"inside a long step":   {func() { d.step(b, 0, 25) }, "at position 25 after a step from 20 to 40"},
		"before the last step": {func() { d.step(b, 0, 5) }, "at position 5"},
		"beyond":               {func() { d.step(b, 0, 41) }, "at position 41"},
		"layer":                {func() { d.step(b, 1, 40) }, "layer 1 of 1"},
		"vectors":              {func() { b.DeltaNet(d.y, d.q, d.z, d.a, d.b, d.state, 0, 40, d.net) }, "qkv [20, 128]"},
		"weights":              {func() { b.DeltaNet(d.y, d.qkv, d.z, d.a, d.b, d.state, 0, 40, &backends.DeltaNet{}) }, "weights of 0"},
		"runs of no group":     {func() { b.Split([]backends.Vec{d.y}, []int{24}, d.q) }, "runs [24] of x of 128"},
		"runs that do not fit": {func() { b.Split([]backends.Vec{d.y}, []int{32}, d.q) }, "do not fill y[0]"},
		"split in place":       {func() { b.Split([]backends.Vec{d.q}, []int{32}, d.q) }, "do not fill y[0]"},
	} {
		func() {
			defer func() {
				if words, _ := recover().(string); !strings.Contains(words, c.words) {
					t.Errorf("%s: %q, want %q", name, words, c.words)
				}
			}()
			c.misuse()
		}()
	}
	d.step(b, 0, 40)
	if err := b.Read(make([]float32, 20*192), d.y); err != nil {
		t.Errorf("after misuse: %v", err)
	}
}

func TestDeltaRefusals(t *testing.T) {
	b := open(t, 1)
	for _, s := range []backends.DeltaShape{
		{Layers: 1, KeyHeads: 2, ValueHeads: 3, KeyDim: 16, ValueDim: 16, Taps: 4},
		{Layers: 1, KeyHeads: 1, ValueHeads: 1, KeyDim: 24, ValueDim: 16, Taps: 4},
		{Layers: 1, KeyHeads: 1, ValueHeads: 1, KeyDim: 16, ValueDim: 0, Taps: 4},
		{Layers: 1, KeyHeads: 1, ValueHeads: 1, KeyDim: 16, ValueDim: 16, Taps: 1},
		{Layers: 1 << 12, KeyHeads: 1, ValueHeads: 1 << 14, KeyDim: 1 << 12, ValueDim: 1 << 12, Taps: 4},
	} {
		if _, err := b.NewDelta(s); err == nil {
			t.Errorf("a state of shape %+v gives no error", s)
		}
	}
}
