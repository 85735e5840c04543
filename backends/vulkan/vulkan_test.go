package vulkan

import (
	"errors"
	"fmt"
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
				if opt.Staging {
					d.patience = patience // of software devices too
				}
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
			for _, c := range []struct{ dim, ff, n, k, jobs int }{{256, 512, 1, 4, 4}, {256, 256, 1, 3, 2}, {512, 256, 3, 2, 5}, {2304, 512, 1, 8, 8}, {256, 256, 20, 3, 6}} {
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
				g.Run(t, ref, e, name)
				if c.n == 20 { // every count of positions that one kernel takes, and one more
					for n := range 9 {
						g.N, g.K = n+1, 1
						g.Refill(rng)
						g.Run(t, ref, e, fmt.Sprintf("%s, %d positions", name, n+1))
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
