package backendtest

import (
	"math"
	"math/rand/v2"
	"testing"

	"sluice/backends"
	"sluice/internal/quant"
)

// A Dense is a device on which a backend's vectors and dense weights are.
type Dense struct {
	// Host opens a backend of the host.
	Host func() backends.Backend
	// Open opens one of the device beside it, with room for so many bytes of matrices;
	// experts stay where they are.
	Open  func(host backends.Backend, room int64) (backends.Backend, error)
	Types []quant.Type // of its experts
}

func (d *Dense) open(t *testing.T, room int64) backends.Backend {
	t.Helper()
	b, err := d.Open(d.Host(), room)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Run is the suite, with so much room for matrices.
func (d *Dense) Run(t *testing.T, room int64) {
	Run(t, func() backends.Backend { return d.open(t, room) })
}

// Experts that stay where they are are computed on the device, with the bits of the
// host, whatever their types, biases and activation.
func (d *Dense) Experts(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 1))
	for i, typ := range d.Types {
		l := backends.HeldLayer{Types: [3]quant.Type{typ, d.Types[rng.IntN(len(d.Types))], d.Types[rng.IntN(len(d.Types))]}, Dim: 512, FF: 256}
		g := NewHeldGroup(rng, l, []int{1, 3, 9}[i%3], 1, 1)
		rows := make([]int32, g.N)
		for j := range rows {
			rows[j] = int32(j)
		}
		var out [2][]float32
		for j, be := range []backends.Backend{d.Host(), d.open(t, 1<<30)} {
			x, err := be.NewVec(g.N, l.Dim)
			if err != nil {
				t.Fatal(err)
			}
			y, err := be.NewVec(g.N, l.Dim)
			if err != nil {
				t.Fatal(err)
			}
			x.SetLen(g.N)
			y.SetLen(g.N)
			be.Put(x, rows, g.X)
			be.ExpertGroup(y, 1, []backends.Job{{Expert: g.All[0], Rows: rows}}, x)
			out[j] = make([]float32, g.N*l.Dim)
			if err := be.Read(out[j], y); err != nil {
				t.Fatal(err)
			}
			if err := be.Close(); err != nil {
				t.Fatal(err)
			}
		}
		for j, want := range out[0] {
			if math.Float32bits(out[1][j]) != math.Float32bits(want) {
				t.Fatalf("%v, %d positions: float %d is %x, want %x", l.Types, g.N, j, out[1][j], want)
			}
		}
	}
}

// Allocates counts what a round of steps takes of the Go heap, once each kind has run.
func (d *Dense) Allocates(t *testing.T) float64 {
	b := d.open(t, 1<<30)
	defer b.Close()
	rng := rand.New(rand.NewPCG(3, 2))
	g := NewHeldGroup(rng, backends.HeldLayer{Types: [3]quant.Type{quant.Q8_0, quant.Q8_0, quant.Q8_0}, Dim: 64, FF: 64}, 1, 1, 1)
	vec := func(dim int) backends.Vec {
		v, err := b.NewVec(2, dim)
		if err != nil {
			t.Fatal(err)
		}
		v.SetLen(1)
		return v
	}
	x, y, wide, out := vec(64), vec(64), vec(128), make([]float32, 64)
	kv, err := b.NewKV(backends.KVShape{Layers: 1, Positions: 300, Heads: 1, KeyDim: 32, ValueDim: 32})
	if err != nil {
		t.Fatal(err)
	}
	one := vec(32)
	weight, ids, rows := Vectors(rng, 1, 64, 0), []int32{1}, []int32{0}
	table := backends.Matrix{Type: quant.F32, Rows: 2, Cols: 64, Data: Bytes(Vectors(rng, 2, 64, 0))}
	w, ys := []backends.Linear{{Matrix: g.All[0].Gate}}, []backends.Vec{y}
	heads := []backends.Matrix{{Type: quant.F32, Rows: 32, Cols: 32, Data: Bytes(Vectors(rng, 32, 32, 0))}}
	heads = append(heads, heads[0])
	resident, foreign := []backends.Job{{Expert: g.All[0], Rows: rows}}, []backends.Job{{Expert: g.All[0], Rows: rows}, {Expert: g.All[0]}}
	rope := &backends.Rope{Half: 16, Cos: make([]float32, 16*300), Sin: make([]float32, 16*300)}
	how := &backends.Attention{Scale: 1}
	all := func() {
		b.Embed(x, table, ids)
		b.RMSNorm(y, x, weight, 1e-6)
		b.LayerNorm(y, y, weight, weight, 1e-6)
		b.MatMul(ys, w, x)
		b.MatMulHeads(y, heads, x)
		b.RoPE(y, 32, rope, 7)
		b.Store(kv, 0, 280, one, one)
		b.Attend(y, x, kv, 0, 280, how)
		b.ExpertGroup(y, 1, resident, x)
		b.ExpertGroup(y, 1, foreign, x)
		b.Combine(x, y, 1, weight[:1], y)
		b.Add(x, y)
		b.ScaleRows(x, y, weight[:1])
		b.Scale(x, 0x1p-20)
		b.SigmoidGate(x, y)
		b.Gather(y, x, rows)
		b.Put(y, rows, weight)
		b.Concat(wide, x, y)
		if err := b.Read(out, x); err != nil {
			t.Fatal(err)
		}
	}
	all()
	return testing.AllocsPerRun(5, all)
}
