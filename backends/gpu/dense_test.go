package gpu

import (
	"testing"

	"sluice/backends"
	"sluice/backends/backendtest"
	"sluice/backends/cpu"
	"sluice/backends/dense"
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
		Hold: func(layers map[int]backends.HeldLayer, k, most int) (backendtest.Taker, error) {
			return d.newExperts(layers, k, most)
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

// Groups whose input and outputs stay on the device have the bits of the CPU.
func TestGive(t *testing.T) {
	devices(t, func(t *testing.T, d *Device) { denseOn(t, d).Give(t) })
}
