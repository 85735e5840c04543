package backendtest

import (
	"errors"
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
	Open func(host backends.Backend, room int64) (backends.Backend, error)
	// Hold makes room on the device for experts.
	Hold  func(layers map[int]backends.HeldLayer, k, most int) (Taker, error)
	Types []quant.Type // of experts
}

// A Taker is a device of experts that may take what a Dense computes.
type Taker interface {
	Held
	backends.Taker
	Replace(oldLayer, old, layer, expert int, parts [3][]byte) error
	Close() error
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

// Give wants groups whose input and outputs stay on the device to have the bits of the
// host, though nobody waits between one and the next, or before another expert takes the
// place of one that is under way.
func (d *Dense) Give(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 3))
	l := backends.HeldLayer{Types: [3]quant.Type{quant.Q8_0, quant.Q8_0, quant.Q4_K}, Dim: 256, FF: 256}
	for _, n := range []int{1, 5} {
		ref := d.Host()
		var g, other *HeldGroup
		for inRange := false; !inRange; { // of random weights not all keep in range
			g, other = NewHeldGroup(rng, l, n, 2, 4), NewHeldGroup(rng, l, n, 2, 1)
			other.All[0].Act, other.All[0].GateBias, other.All[0].UpBias, other.All[0].DownBias = g.Act, g.All[0].GateBias, g.All[0].UpBias, g.All[0].DownBias
			x, rows := onHost(t, ref, g.X, l.Dim)
			y, _ := onHost(t, ref, make([]float32, n*l.Dim), l.Dim)
			for _, e := range append([]backends.Expert{other.All[0]}, g.All...) {
				ref.ExpertGroup(y, 1, []backends.Job{{Expert: e, Rows: rows}}, x)
			}
			inRange = ref.Read(make([]float32, n*l.Dim), y) == nil
		}
		b := d.open(t, 0)
		e, err := d.Hold(map[int]backends.HeldLayer{HeldLayer: l}, 2, n)
		if err != nil {
			t.Fatal(err)
		}
		g.Upload(t, e)
		vecs := func(be backends.Backend) (x, y backends.Vec) {
			x, err := be.NewVec(n, l.Dim)
			if err != nil {
				t.Fatal(err)
			}
			if y, err = be.NewVec(2*n, l.Dim); err != nil {
				t.Fatal(err)
			}
			x.SetLen(n)
			y.SetLen(2 * n)
			rows := make([]int32, n)
			for i := range rows {
				rows[i] = int32(i)
			}
			be.Put(x, rows, g.X)
			return x, y
		}
		rx, ry := vecs(ref)
		x, y := vecs(b)
		read := func(be backends.Backend, v backends.Vec) []float32 {
			out := make([]float32, 2*n*l.Dim)
			if err := be.Read(out, v); err != nil {
				t.Fatal(err)
			}
			return out
		}
		for round := range 3 {
			// Experts 0 and 1 have the even rows and the odd ones, then 2 and 3.
			for pair := range 2 {
				jobs, held := make([]backends.Job, 2), make([]backends.HeldJob, 2)
				var rows []int32
				for i := range jobs {
					jobs[i].Expert, held[i].Expert = g.All[2*pair+i], int32(2*pair+i)
					if round == 2 && pair == 0 && i == 0 {
						jobs[i].Expert = other.All[0]
					}
					for r := i; r < 2*n; r += 2 {
						if r/2%2 == pair || n == 1 {
							jobs[i].Rows = append(jobs[i].Rows, int32(r))
						}
					}
					held[i].Rows = jobs[i].Rows
					rows = append(rows, jobs[i].Rows...)
				}
				ref.ExpertGroup(ry, 2, jobs, rx)
				if pair == 0 {
					if ok, err := e.Take(x); !ok || err != nil {
						t.Fatalf("taken: %v, %v", ok, err)
					}
				}
				if err := e.Start(HeldLayer, held, 2, n, g.Act, g.Bias); err != nil {
					t.Fatal(err)
				}
				if ok, err := e.Give(y, rows); !ok || err != nil {
					t.Fatalf("given: %v, %v", ok, err)
				}
			}
			if round == 1 { // while that is under way
				p := &other.All[0]
				if err := e.Replace(HeldLayer, 0, HeldLayer, 0, [3][]byte{p.Gate.Data, p.Up.Data, p.Down.Data}); err != nil {
					t.Fatal(err)
				}
			}
			want, got := read(ref, ry), read(b, y)
			for i := range want {
				if math.Float32bits(got[i]) != math.Float32bits(want[i]) {
					t.Fatalf("%d positions, round %d: float %d of row %d is %x, want %x", n, round, i%l.Dim, i/l.Dim, got[i], want[i])
				}
			}
		}
		// What was taken need not be given.
		if ok, err := e.Take(x); !ok || err != nil {
			t.Fatalf("taken: %v, %v", ok, err)
		}
		jobs, held := make([]backends.Job, 2), make([]backends.HeldJob, 2)
		for i := range jobs {
			held[i] = backends.HeldJob{Expert: int32(1 + i), Rows: []int32{int32(i)}}
			jobs[i] = backends.Job{Expert: g.All[1+i], Rows: held[i].Rows}
		}
		ref.ExpertGroup(ry, 2, jobs, rx)
		if err := e.Start(HeldLayer, held, 2, n, g.Act, g.Bias); err != nil {
			t.Fatal(err)
		}
		finished, err := e.Finish()
		if err != nil {
			t.Fatal(err)
		}
		for i, want := range read(ref, ry)[:2*l.Dim] {
			if math.Float32bits(finished[i]) != math.Float32bits(want) {
				t.Fatalf("%d positions, finished: float %d of row %d is %x, want %x", n, i%l.Dim, i/l.Dim, finished[i], want)
			}
		}
		// Out of range, told by the next Read.
		b.Put(x, []int32{0}, append([]float32{float32(math.Inf(1))}, make([]float32, l.Dim-1)...))
		if ok, err := e.Take(x); !ok || err != nil {
			t.Fatalf("taken: %v, %v", ok, err)
		}
		if err := e.Start(HeldLayer, []backends.HeldJob{{Expert: 1, Rows: []int32{0}}}, 2, n, g.Act, g.Bias); err != nil {
			t.Fatal(err)
		}
		if ok, err := e.Give(y, []int32{0}); !ok || err != nil {
			t.Fatalf("given: %v, %v", ok, err)
		}
		var bad *backends.ActivationError
		if err := b.Read(make([]float32, 2*n*l.Dim), y); !errors.As(err, &bad) || bad.Step != "ExpertGroup" {
			t.Errorf("an infinite activation: %v", err)
		}
		for _, c := range []interface{ Close() error }{e, b, ref} {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// onHost makes a vector of x, and the numbers of its rows.
func onHost(t *testing.T, be backends.Backend, x []float32, dim int) (backends.Vec, []int32) {
	t.Helper()
	n := len(x) / dim
	v, err := be.NewVec(n, dim)
	if err != nil {
		t.Fatal(err)
	}
	v.SetLen(n)
	rows := make([]int32, n)
	for i := range rows {
		rows[i] = int32(i)
	}
	be.Put(v, rows, x)
	return v, rows
}
