package gpu

import (
	"errors"
	"fmt"
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
				g := backendtest.NewHeldGroup(rng, l, c.n, c.k, c.jobs)
				g.Upload(t, e)
				for range 2 { // recorded, and replayed
					g.Refill(rng)
					g.Run(t, ref, e, name)
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
