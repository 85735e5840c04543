package vulkan

import (
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
		rooms := map[string]int64{"all": 1 << 40, "some": 64 << 10, "none": 0}
		if d.Software() { // which is slow
			name := "all"
			if d.opt.Staging {
				name = "some"
			}
			rooms = map[string]int64{name: rooms[name]}
		}
		for name, room := range rooms {
			t.Run(name, func(t *testing.T) { denseOn(t, d).Run(t, room) })
		}
	})
}

// denseOn is what the tests of a backend of dense steps want of a device, whose memory
// has poison where nothing was written.
func denseOn(t *testing.T, d *Device) *backendtest.Dense {
	return &backendtest.Dense{
		Host: func() backends.Backend { return onHost(t) },
		Open: func(host backends.Backend, room int64) (backends.Backend, error) {
			s, err := d.newDense("device")
			if err != nil {
				return nil, err
			}
			return dense.New(poisoned{s}, host, dense.Options{Room: room, Resident: func(*backends.Matrix) bool { return true }})
		},
		Types: types,
	}
}

func onHost(t *testing.T) backends.Backend {
	t.Helper()
	host, err := cpu.New(cpu.Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	return host
}

// A poisoned driver gives memory that is full of NaNs.
type poisoned struct{ *denseDriver }

func (p poisoned) Alloc(size int64) (uint64, error) {
	at, err := p.denseDriver.Alloc(size)
	if err != nil {
		return 0, err
	}
	poison := make([]byte, min(size, 1<<20))
	for i := range poison {
		poison[i] = 0xfb
	}
	for done := int64(0); done < size; done += int64(len(poison)) {
		if err := p.Upload(at+uint64(done), quant.F32, poison[:min(size-done, int64(len(poison)))]); err != nil {
			return 0, err
		}
	}
	return at, nil
}

// An expert that stays where it is is computed on the device.
func TestDenseExpert(t *testing.T) {
	devices(t, func(t *testing.T, d *Device) { denseOn(t, d).Experts(t) })
}

// Steps allocate nothing on the Go heap once each kind has run.
func TestDenseAllocates(t *testing.T) {
	devices(t, func(t *testing.T, d *Device) {
		if n := denseOn(t, d).Allocates(t); n > 0 && !raceEnabled { // whose pools forget
			t.Errorf("a round of steps allocates %v times", n)
		}
	})
}
