package gpu

import (
	"errors"
	"math"
	"math/rand/v2"
	"testing"

	"sluice/backends"
	"sluice/backends/backendtest"
	"sluice/backends/cpu"
	"sluice/backends/dense"
	"sluice/internal/quant"
)

// The backend of dense steps passes the suite: with all matrices on the device, with
// those for which there is room, and with none.
func TestDense(t *testing.T) {
	devices(t, func(t *testing.T, d *Device) {
		if d.compiler.lib != 0 { // or those of the binary would take the place of what does not compile
			if _, err := d.compiler.code("dense"); err != nil {
				t.Errorf("the kernels do not compile: %v", err)
			}
		}
		rooms := map[string]int64{"all": 1 << 40, "some": 64 << 10, "none": 0}
		switch {
		case d.Name == "Fake 0" && d.dr.API == HIP: // whose threads are slow
			if raceEnabled {
				return
			}
			rooms = map[string]int64{"some": rooms["some"]}
		case d.Name == "Fake 0" || testing.Short():
			rooms = map[string]int64{"all": rooms["all"]}
		}
		for name, room := range rooms {
			t.Run(name, func(t *testing.T) { denseOn(t, d).Run(t, room) })
		}
	})
}

// denseOn is what the tests of a backend of dense steps want of a device.
func denseOn(t *testing.T, d *Device) *backendtest.Dense {
	return &backendtest.Dense{
		Host: func() backends.Backend {
			host, err := cpu.New(cpu.Options{Threads: 1})
			if err != nil {
				t.Fatal(err)
			}
			return host
		},
		Open: func(host backends.Backend, room int64) (backends.Backend, error) {
			return d.NewDense("device", host, dense.Options{Room: room, Resident: func(*backends.Matrix) bool { return true }})
		},
		Types: types,
	}
}

// An expert that stays where it is is computed on the device.
func TestDenseExpert(t *testing.T) {
	devices(t, func(t *testing.T, d *Device) { denseOn(t, d).Experts(t) })
}

// Steps allocate nothing on the Go heap once each kind has run.
func TestDenseAllocates(t *testing.T) {
	f := fakeDriver(t)
	d, err := f.open(t, CUDA).Open(0, Options{Cache: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if n := denseOn(t, d).Allocates(t); n > 0 && !raceEnabled { // whose pools forget
		t.Errorf("a round of steps allocates %v times", n)
	}
}

// Groups whose input and outputs stay on the device have the bits of the CPU, though
// nobody waits between one and the next, or before another expert takes the place of
// one that is under way.
func TestGive(t *testing.T) {
	devices(t, func(t *testing.T, d *Device) {
		rng := rand.New(rand.NewPCG(3, 3))
		l := backends.HeldLayer{Types: [3]quant.Type{quant.Q8_0, quant.Q8_0, quant.Q4_K}, Dim: 256, FF: 256}
		for _, n := range []int{1, 5} {
			ref, err := cpu.New(cpu.Options{Threads: 1})
			if err != nil {
				t.Fatal(err)
			}
			var g, other *backendtest.HeldGroup
			for inRange := false; !inRange; { // of random weights not all keep in range
				g, other = backendtest.NewHeldGroup(rng, l, n, 2, 4), backendtest.NewHeldGroup(rng, l, n, 2, 1)
				other.All[0].Act, other.All[0].GateBias, other.All[0].UpBias, other.All[0].DownBias = g.Act, g.All[0].GateBias, g.All[0].UpBias, g.All[0].DownBias
				x, rows := onCPU(t, ref, g.X, l.Dim)
				y, _ := onCPU(t, ref, make([]float32, n*l.Dim), l.Dim)
				for _, e := range append([]backends.Expert{other.All[0]}, g.All...) {
					ref.ExpertGroup(y, 1, []backends.Job{{Expert: e, Rows: rows}}, x)
				}
				inRange = ref.Read(make([]float32, n*l.Dim), y) == nil
			}
			host, err := cpu.New(cpu.Options{Threads: 1})
			if err != nil {
				t.Fatal(err)
			}
			b, err := d.NewDense("device", host, dense.Options{})
			if err != nil {
				t.Fatal(err)
			}
			e, err := d.newExperts(map[int]backends.HeldLayer{5: l}, 2, n)
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
					if err := e.Start(5, held, 2, n, g.Act, g.Bias); err != nil {
						t.Fatal(err)
					}
					if ok, err := e.Give(y, rows); !ok || err != nil {
						t.Fatalf("given: %v, %v", ok, err)
					}
				}
				if round == 1 { // while that is under way
					p := &other.All[0]
					if err := e.Replace(5, 0, 5, 0, [3][]byte{p.Gate.Data, p.Up.Data, p.Down.Data}); err != nil {
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
			// Out of range, told by the next Read.
			b.Put(x, []int32{0}, append([]float32{float32(math.Inf(1))}, make([]float32, l.Dim-1)...))
			if ok, err := e.Take(x); !ok || err != nil {
				t.Fatalf("taken: %v, %v", ok, err)
			}
			if err := e.Start(5, []backends.HeldJob{{Expert: 1, Rows: []int32{0}}}, 2, n, g.Act, g.Bias); err != nil {
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
	})
}

// onCPU makes a vector of x, and the numbers of its rows.
func onCPU(t *testing.T, be *cpu.Backend, x []float32, dim int) (backends.Vec, []int32) {
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
