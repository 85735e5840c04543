package backendtest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"sluice/backends"
	"sluice/internal/quant"
)

// HeldLayer is the number of the layer that a HeldGroup is of.
const HeldLayer = 5

// A HeldGroup is experts of a layer and the positions that they compute on a device
// that holds them.
type HeldGroup struct {
	Layer backends.HeldLayer
	N, K  int // positions, choices of each
	All   []backends.Expert
	Bias  *[3][]float32
	Act   backends.Activation
	X     []float32

	choose func() int
}

// A Held is a device to test.
type Held interface {
	backends.Holder
	Upload(layer, expert int, parts [3][]byte) error
}

// NewHeldGroup makes up experts, half of the time with biases and the clamped
// activation, and inputs.
func NewHeldGroup(rng *rand.Rand, l backends.HeldLayer, n, k, experts int) *HeldGroup {
	g := &HeldGroup{Layer: l, N: n, K: k, All: make([]backends.Expert, experts), choose: func() int { return rng.IntN(experts) }}
	if rng.IntN(2) == 0 {
		g.Act = backends.ClampedSwiGLU
		g.Bias = &[3][]float32{Vectors(rng, experts, l.FF, 0), Vectors(rng, experts, l.FF, 0), Vectors(rng, experts, l.Dim, 0)}
	}
	g.Reweigh(rng)
	g.Refill(rng)
	return g
}

// Reweigh makes up other experts, with the biases as they are.
func (g *HeldGroup) Reweigh(rng *rand.Rand) {
	l := g.Layer
	matrix := func(typ quant.Type, rows, cols int) backends.Matrix {
		return backends.Matrix{Type: typ, Rows: rows, Cols: cols, Data: Weights(rng, typ, rows*cols)}
	}
	for i := range g.All {
		g.All[i] = backends.Expert{Gate: matrix(l.Types[0], l.FF, l.Dim), Up: matrix(l.Types[1], l.FF, l.Dim), Down: matrix(l.Types[2], l.Dim, l.FF), Act: g.Act}
		if g.Bias != nil {
			of := func(part, rows int) []float32 { return g.Bias[part][i*rows : (i+1)*rows] }
			g.All[i].GateBias, g.All[i].UpBias, g.All[i].DownBias = of(0, l.FF), of(1, l.FF), of(2, l.Dim)
		}
	}
}

// Refill makes up other inputs.
func (g *HeldGroup) Refill(rng *rand.Rand) {
	g.X = Vectors(rng, g.N, g.Layer.Dim, g.N)
	for i := range g.X { // so that most of what three matrices make of it stays in range
		g.X[i] *= 0x1p-16
	}
}

// Upload brings the experts to the device.
func (g *HeldGroup) Upload(t *testing.T, e Held) {
	t.Helper()
	g.UploadThrough(t, e, nil)
}

// UploadThrough brings them there by memory that is used again for each, as a slot
// is; without memory from where they lie.
func (g *HeldGroup) UploadThrough(t *testing.T, e Held, slot []byte) {
	t.Helper()
	for i, x := range g.All {
		parts, at := [3][]byte{x.Gate.Data, x.Up.Data, x.Down.Data}, 0
		for j, p := range parts {
			if slot != nil {
				parts[j] = slot[at : at+len(p)]
				at += copy(parts[j], p)
			}
		}
		if err := e.Upload(HeldLayer, i, parts); err != nil {
			t.Fatal(err)
		}
		clear(slot)
	}
}

// Run lets the device and the reference compute the group, each position by experts
// drawn anew, and compares every bit.
func (g *HeldGroup) Run(t *testing.T, ref backends.Backend, e Held, name string) {
	t.Helper()
	l, n, k := g.Layer, g.N, g.K
	jobs, held := make([]backends.Job, len(g.All)), make([]backends.HeldJob, len(g.All))
	for i := range jobs {
		jobs[i].Expert, held[i].Expert = g.All[i], int32(i)
	}
	for r := range n * k {
		i := g.choose()
		if n == 1 { // each expert at most once
			i = r % len(g.All)
		}
		jobs[i].Rows = append(jobs[i].Rows, int32(r))
		held[i].Rows = append(held[i].Rows, int32(r))
	}
	xv, err := ref.NewVec(n, l.Dim)
	if err != nil {
		t.Fatal(err)
	}
	ids := make([]int32, n)
	for i := range ids {
		ids[i] = int32(i)
	}
	ref.Embed(xv, backends.Matrix{Type: quant.F32, Rows: n, Cols: l.Dim, Data: Bytes(g.X)}, ids)
	out, err := ref.NewVec(n*k, l.Dim)
	if err != nil {
		t.Fatal(err)
	}
	out.SetLen(n * k)
	ref.ExpertGroup(out, k, jobs, xv)
	want := make([]float32, n*k*l.Dim)
	refused := ref.Read(want, out)
	if err := ref.Read(e.Input(n, l.Dim), xv); err != nil {
		t.Fatal(err)
	}
	if err := e.Start(HeldLayer, held, k, n, g.Act, g.Bias); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	got, err := e.Finish()
	if fmt.Sprint(err) != fmt.Sprint(refused) {
		t.Fatalf("%s: %v, want %v", name, err, refused)
	}
	if err != nil {
		return
	}
	at := 0
	for i, j := range held {
		for _, r := range j.Rows {
			for c := range l.Dim {
				if g, w := got[at*l.Dim+c], want[int(r)*l.Dim+c]; math.Float32bits(g) != math.Float32bits(w) {
					t.Fatalf("%s: expert %d, row %d, float %d is %x, want %x", name, i, r, c, g, w)
				}
			}
			at++
		}
	}
}
