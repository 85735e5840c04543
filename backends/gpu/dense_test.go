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
		rooms := map[string]int64{"all": 1 << 40, "some": 64 << 10, "none": 0}
		switch {
		case d.Name == "Fake 0" && d.dr.API == HIP: // whose threads are slow
			rooms = map[string]int64{"some": rooms["some"]}
		case d.Name == "Fake 0" || testing.Short():
			rooms = map[string]int64{"all": rooms["all"]}
		}
		for name, room := range rooms {
			t.Run(name, func(t *testing.T) {
				backendtest.Run(t, func() backends.Backend {
					host, err := cpu.New(cpu.Options{Threads: 1})
					if err != nil {
						t.Fatal(err)
					}
					b, err := d.NewDense("device", host, dense.Options{Room: room})
					if err != nil {
						t.Fatal(err)
					}
					return b
				})
			})
		}
	})
}
