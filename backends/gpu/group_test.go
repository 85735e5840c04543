package gpu

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"sluice/backends"
	"sluice/backends/backendtest"
	"sluice/backends/cpu"
	"sluice/internal/quant"
	"sluice/shaders"
)

// Groups of one position in one launch have the bits of the plain kernels, for every
// format that has them, with down of the same and of another, and for rows that end
// within what is read together.
func TestWhole(t *testing.T) {
	devices(t, func(t *testing.T, d *Device) {
		if d.dr.API != CUDA || d.capability < 80 || d.compiler.lib == 0 {
			return // no tensor cores for bytes, or kernels for them
		}
		rng := rand.New(rand.NewPCG(11, 12))
		ref, err := cpu.New(cpu.Options{Threads: 1})
		if err != nil {
			t.Fatal(err)
		}
		defer ref.Close()
		shapes := []struct{ dim, ff, k int }{{256, 256, 2}, {1280, 512, 1}, {320, 832, 1}}
		if d.Name != "Fake 0" && !testing.Short() {
			shapes = append(shapes, struct{ dim, ff, k int }{7168, 2048, 2}, struct{ dim, ff, k int }{2880, 2880, 4}, struct{ dim, ff, k int }{2048, 768, 16})
		}
		for _, n := range shaders.Groups {
			typ := quant.Type(n)
			for i, c := range shapes {
				l := backends.HeldLayer{Types: [3]quant.Type{typ, typ, typ}, Dim: c.dim, FF: c.ff}
				if i == 0 {
					l.Types[2] = quant.Type(shaders.Groups[rng.IntN(len(shaders.Groups))])
				}
				if !typ.Fits(c.dim) || !typ.Fits(c.ff) {
					continue
				}
				name := fmt.Sprintf("%v, %+v", l.Types, c)
				e, err := d.newExperts(map[int]backends.HeldLayer{5: l}, c.k, 1)
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				if w, err := e.whole(l); err != nil || w.kernels == nil {
					t.Fatalf("%s: %+v, %v", name, w, err)
				}
				g := backendtest.NewHeldGroup(rng, l, 1, c.k, c.k)
				g.Upload(t, e)
				g.Run(t, ref, e, name) // both ways
				if w, _ := e.whole(l); !w.proven || e.unequal != 0 {
					t.Fatalf("%s: the two ways differ", name)
				}
				launches := d.launches
				const runs = 2
				for range runs { // counts are as they were
					g.Refill(rng)
					g.Run(t, ref, e, name)
				}
				if n := d.launches - launches; n != runs && (i > 0 || n != 2*runs) {
					t.Errorf("%s: %d launches for %d groups", name, n, runs)
				}
				if err := e.Close(); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}

// A group that is started again allocates nothing.
func TestWholeAllocs(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	_, _, e, ref := onFake(t, CUDA, atOnce, 2, 1)
	g := backendtest.NewHeldGroup(rand.New(rand.NewPCG(15, 16)), atOnce, 1, 2, 2)
	g.Upload(t, e)
	g.Run(t, ref, e, "first")
	p := program{layer: atOnce, act: g.Act, jobs: 2}
	if n := testing.AllocsPerRun(5, func() {
		if err := e.single(p); err != nil {
			t.Error(err)
		}
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

// Kernels for one launch that give other bits than those for several are not used, and
// told of; no output is theirs.
func TestUnequal(t *testing.T) {
	f, _, e, ref := onFake(t, CUDA, atOnce, 2, 1)
	f.call("fakeFlawTiles", 1)
	defer f.call("fakeFlawTiles", 0)
	rng := rand.New(rand.NewPCG(17, 18))
	g := backendtest.NewHeldGroup(rng, atOnce, 1, 2, 2)
	g.Upload(t, e)
	for range 3 {
		g.Refill(rng)
		g.Run(t, ref, e, "unequal")
	}
	if n := e.Usage().Unequal; n != 1 {
		t.Errorf("%d kernels are told to be unequal, want 1", n)
	}
}

// Where the kernel for one launch cannot be compiled, several launches compute the group.
func TestApart(t *testing.T) {
	f, d, e, ref := onFake(t, CUDA, atOnce, 2, 1)
	rng := rand.New(rand.NewPCG(13, 14))
	g := backendtest.NewHeldGroup(rng, atOnce, 1, 2, 2)
	g.Upload(t, e)
	f.fail("compile", 0, 6)
	for range 2 {
		g.Refill(rng)
		g.Run(t, ref, e, "apart")
	}
	if d.recorded != 1 {
		t.Errorf("%d graphs, want 1", d.recorded)
	}
}
