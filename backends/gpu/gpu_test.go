package gpu

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"testing"

	"sluice/backends"
	"sluice/backends/backendtest"
	"sluice/backends/bench"
	"sluice/backends/cpu"
	"sluice/internal/quant"
)

// devices runs a test on each device of this machine, with compiled and embedded
// kernels, and on fakes of both makers.
func devices(t *testing.T, test func(t *testing.T, d *Device)) {
	open := func(name string, dr *Driver, i int, opt Options) {
		t.Run(name, func(t *testing.T) {
			d, err := dr.Open(i, opt)
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%s, %s, kernels of %v", d.Name, d.Arch, d.Compiler)
			test(t, d)
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	for _, a := range []API{CUDA, HIP} {
		dr, err := Open(a)
		if errors.Is(err, ErrNoDriver) {
			t.Logf("no device: %v", err)
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Log(dr.Library)
		for i, info := range dr.Devices() {
			open(fmt.Sprintf("%v:%d,%s", a, i, info.Name), dr, i, Options{Cache: t.TempDir()})
			if a == CUDA {
				open(fmt.Sprintf("%v:%d,embedded", a, i), dr, i, Options{Embedded: true})
			}
		}
		dr.Close()
	}
	if os.Getenv("SLUICE_GPU_ONLY") != "" {
		return
	}
	for _, a := range []API{CUDA, HIP} {
		f := fakeDriver(t)
		f.device(map[API]int{CUDA: 13000, HIP: 60000000}[a], "gfx1030", 1)
		dr := f.open(t, a)
		open("fake "+a.String(), dr, 0, Options{Cache: t.TempDir()})
		if n := f.live(); n != 0 {
			t.Errorf("%v: %d things are left", a, n)
		}
	}
}

// Groups of experts on the device have the bits of the plain kernels, for every
// format, some shapes, and counts of positions up to a chunk.
func TestExperts(t *testing.T) {
	devices(t, func(t *testing.T, d *Device) {
		rng := rand.New(rand.NewPCG(7, 9))
		shapes := []struct{ dim, ff, n, k, jobs int }{{256, 512, 1, 4, 4}, {512, 256, 3, 2, 5}, {2304, 256, 1, 8, 8}, {256, 256, 20, 3, 6}}
		for n := range 9 {
			shapes = append(shapes, struct{ dim, ff, n, k, jobs int }{768, 512, n + 1, 1, 2})
		}
		if testing.Short() { // under a checker of memory or races
			shapes = shapes[:2]
		}
		if d.Name == "Fake 0" { // whose threads are slow
			shapes = []struct{ dim, ff, n, k, jobs int }{{256, 256, 1, 2, 2}, {512, 256, 3, 2, 3}, {2304, 256, 1, 1, 1}, {256, 256, 10, 1, 1}}
		}
		for at, typ := range types {
			other := types[rng.IntN(len(types))]
			for i, c := range shapes {
				if d.Name == "Fake 0" && i > 1 && (at+i)%4 != 0 && (i == 3 || typ.ActBlock() != 256) {
					continue
				}
				l := backends.HeldLayer{Types: [3]quant.Type{typ, typ, other}, Dim: c.dim, FF: c.ff}
				if c.n == 3 {
					l.Types[1] = other
				}
				name := fmt.Sprintf("%v, %+v", l.Types, c)
				e, err := d.newExperts(map[int]backends.HeldLayer{5: l}, c.k, c.n)
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				ref, err := cpu.New(cpu.Options{Threads: 1})
				if err != nil {
					t.Fatal(err)
				}
				g := newGroup(t, rng, l, c.n, c.k, c.jobs)
				g.upload(t, e)
				for range 2 { // recorded, and replayed
					g.refill(rng)
					g.run(t, ref, e, name)
				}
				ref.Close()
				if err := e.Close(); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}

// A measurement has all of its times.
func TestBench(t *testing.T) {
	devices(t, func(t *testing.T, d *Device) {
		s := bench.Shape{Type: quant.Q8_0, Dim: 256, FF: 256, K: 2, Sets: 2, Samples: 2, CopyBytes: 1 << 20}
		if d.Name != "Fake 0" {
			s = bench.Shape{Type: quant.Q4_K, Dim: 7168, FF: 2048, K: 8, Sets: 4, Samples: 21, CopyBytes: 1 << 30}
		}
		m, err := d.Bench(s)
		if err != nil {
			t.Fatal(err)
		}
		if len(m.Group) != s.Samples || len(m.Wall) != s.Samples || len(m.Copy) != s.Samples || m.Rate() <= 0 || m.Both <= 0 || m.GroupBytes == 0 {
			t.Errorf("%+v", m)
		}
	})
}

// A group is experts of layer 5 and the positions that they compute.
type group struct {
	l      backends.HeldLayer
	n, k   int
	all    []backends.Expert
	bias   *[3][]float32
	act    backends.Activation
	x      []float32
	choose func() int
}

func newGroup(t *testing.T, rng *rand.Rand, l backends.HeldLayer, n, k, experts int) *group {
	g := &group{l: l, n: n, k: k, all: make([]backends.Expert, experts), choose: func() int { return rng.IntN(experts) }}
	matrix := func(typ quant.Type, rows, cols int) backends.Matrix {
		return backends.Matrix{Type: typ, Rows: rows, Cols: cols, Data: backendtest.Weights(rng, typ, rows*cols)}
	}
	if rng.IntN(2) == 0 { // biases and the clamped activation in half of the cases
		g.act = backends.ClampedSwiGLU
		g.bias = &[3][]float32{backendtest.Vectors(rng, experts, l.FF, 0), backendtest.Vectors(rng, experts, l.FF, 0), backendtest.Vectors(rng, experts, l.Dim, 0)}
	}
	for i := range g.all {
		g.all[i] = backends.Expert{Gate: matrix(l.Types[0], l.FF, l.Dim), Up: matrix(l.Types[1], l.FF, l.Dim), Down: matrix(l.Types[2], l.Dim, l.FF), Act: g.act}
		if g.bias != nil {
			of := func(part, rows int) []float32 { return g.bias[part][i*rows : (i+1)*rows] }
			g.all[i].GateBias, g.all[i].UpBias, g.all[i].DownBias = of(0, l.FF), of(1, l.FF), of(2, l.Dim)
		}
	}
	g.refill(rng)
	return g
}

func (g *group) refill(rng *rand.Rand) {
	g.x = backendtest.Vectors(rng, g.n, g.l.Dim, g.n)
	for i := range g.x { // so that most of what three matrices make of it stays in range
		g.x[i] *= 0x1p-16
	}
}

func (g *group) upload(t *testing.T, e *experts) {
	for i, x := range g.all {
		if err := e.Upload(5, i, [3][]byte{x.Gate.Data, x.Up.Data, x.Down.Data}); err != nil {
			t.Fatal(err)
		}
	}
}

func (g *group) run(t *testing.T, ref *cpu.Backend, e *experts, name string) {
	t.Helper()
	l, n, k := g.l, g.n, g.k
	jobs, held := make([]backends.Job, len(g.all)), make([]backends.HeldJob, len(g.all))
	for i := range jobs {
		jobs[i].Expert, held[i].Expert = g.all[i], int32(i)
	}
	for r := range n * k {
		i := g.choose()
		if n == 1 { // each expert at most once
			i = r % len(g.all)
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
	ref.Embed(xv, backends.Matrix{Type: quant.F32, Rows: n, Cols: l.Dim, Data: backendtest.Bytes(g.x)}, ids)
	out, _ := ref.NewVec(n*k, l.Dim)
	out.SetLen(n * k)
	ref.ExpertGroup(out, k, jobs, xv)
	want := make([]float32, n*k*l.Dim)
	refused := ref.Read(want, out)
	if err := ref.Read(e.Input(n, l.Dim), xv); err != nil {
		t.Fatal(err)
	}
	if err := e.Start(5, held, k, n, g.act, g.bias); err != nil {
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
