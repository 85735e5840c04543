package vulkan

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"sluice/backends"
	"sluice/backends/backendtest"
	"sluice/backends/cpu"
	"sluice/internal/quant"
)

// devices runs a test on each device of the machine, software ones too.
func devices(t *testing.T, test func(t *testing.T, d *Device)) {
	in, err := Open(true)
	var missing *Error
	if errors.As(err, &missing) && missing.Result == errLayerMissing {
		t.Log("without the validation layers (package vulkan-validationlayers)")
		in, err = Open(false)
	}
	if errors.Is(err, ErrNoDriver) {
		t.Skipf("needs a Vulkan driver: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	for i, info := range in.Devices() {
		for _, opt := range []Options{{}, {Emulate: true, Staging: true}} {
			t.Run(fmt.Sprintf("%s,emulate=%v", info.Name, opt.Emulate), func(t *testing.T) {
				d, err := in.Open(i, opt)
				if errors.Is(err, ErrUnfit) {
					t.Skip(err)
				}
				if err != nil {
					t.Fatal(err)
				}
				defer func() {
					if err := d.Close(); err != nil {
						t.Error(err)
					}
				}()
				test(t, d)
			})
		}
	}
	for _, m := range in.Validation() {
		t.Errorf("validation: %s", m)
	}
}

// Groups of experts on the device have the bits of the plain kernels, for every
// format, some shapes, and counts of positions up to a chunk.
func TestExperts(t *testing.T) {
	devices(t, func(t *testing.T, d *Device) {
		rng := rand.New(rand.NewPCG(7, 9))
		for _, typ := range types {
			if raceEnabled && typ != quant.Q4_K && typ != quant.BF16 { // minutes otherwise, for the same calls
				continue
			}
			other := types[rng.IntN(len(types))]
			for _, c := range []struct{ dim, ff, n, k, jobs int }{{256, 512, 1, 4, 4}, {512, 256, 3, 2, 5}, {2304, 512, 1, 8, 8}, {256, 256, 20, 3, 6}} {
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
				x := backendtest.Vectors(rng, c.n, c.dim, c.n)
				for i := range x { // so that most of what three matrices make of it stays in range
					x[i] *= 0x1p-16
				}
				run(t, ref, e, rng, l, c.n, c.k, c.jobs, x, name)
				if c.n == 20 { // every count of positions that one kernel takes, and one more
					for n := range 9 {
						run(t, ref, e, rng, l, n+1, 1, c.jobs, x[:(n+1)*c.dim], fmt.Sprintf("%s, %d positions", name, n+1))
					}
				}
				ref.Close()
				if err := e.Close(); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}

func run(t *testing.T, ref *cpu.Backend, e *experts, rng *rand.Rand, l backends.HeldLayer, n, k, experts int, x []float32, name string) {
	t.Helper()
	runFrom(t, ref, e, rng, l, n, k, experts, x, name, func(parts [3][]byte) [3][]byte { return parts })
}

// runFrom uploads what from makes of the parts.
func runFrom(t *testing.T, ref *cpu.Backend, e *experts, rng *rand.Rand, l backends.HeldLayer, n, k, experts int, x []float32, name string, from func(parts [3][]byte) [3][]byte) {
	t.Helper()
	matrix := func(typ quant.Type, rows, cols int) backends.Matrix {
		return backends.Matrix{Type: typ, Rows: rows, Cols: cols, Data: backendtest.Weights(rng, typ, rows*cols)}
	}
	// Biases, of a layer always the same, and the clamped activation in half of the cases.
	var act backends.Activation
	var bias *[3][]float32
	if rng.IntN(2) == 0 {
		act = backends.ClampedSwiGLU
		same := rand.New(rand.NewPCG(uint64(l.Dim), uint64(l.FF)))
		bias = &[3][]float32{backendtest.Vectors(same, experts, l.FF, 0), backendtest.Vectors(same, experts, l.FF, 0), backendtest.Vectors(same, experts, l.Dim, 0)}
	}
	all := make([]backends.Expert, experts)
	for i := range all {
		all[i] = backends.Expert{Gate: matrix(l.Types[0], l.FF, l.Dim), Up: matrix(l.Types[1], l.FF, l.Dim), Down: matrix(l.Types[2], l.Dim, l.FF)}
		if err := e.Upload(5, i, from([3][]byte{all[i].Gate.Data, all[i].Up.Data, all[i].Down.Data})); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	jobs, held := make([]backends.Job, experts), make([]backends.HeldJob, experts)
	for i := range jobs {
		if bias != nil {
			of := func(i, e, rows int) []float32 { return bias[i][e*rows : (e+1)*rows] }
			all[i].GateBias, all[i].UpBias, all[i].DownBias = of(0, i, l.FF), of(1, i, l.FF), of(2, i, l.Dim)
		}
		all[i].Act = act
		jobs[i].Expert, held[i].Expert = all[i], int32(i)
	}
	for r := range n * k {
		i := rng.IntN(experts)
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
	ref.Embed(xv, backends.Matrix{Type: quant.F32, Rows: n, Cols: l.Dim, Data: backendtest.Bytes(x)}, ids)
	out, _ := ref.NewVec(n*k, l.Dim)
	out.SetLen(n * k)
	ref.ExpertGroup(out, k, jobs, xv)
	want := make([]float32, n*k*l.Dim)
	refused := ref.Read(want, out)
	if err := ref.Read(e.Input(n, l.Dim), xv); err != nil {
		t.Fatal(err)
	}
	if err := e.Start(5, held, k, n, act, bias); err != nil {
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
