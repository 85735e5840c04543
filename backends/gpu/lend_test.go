package gpu

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"sluice/backends"
	"sluice/backends/backendtest"
	"sluice/backends/cpu"
	"sluice/internal/offheap"
	"sluice/internal/quant"
)

// From memory that was lent experts come without staging, and may be written over
// when Upload has returned; what cannot be pinned says so and is counted, and staging
// gives the same bits.
func TestLend(t *testing.T) {
	devices(t, func(t *testing.T, d *Device) {
		l := backends.HeldLayer{Types: [3]quant.Type{quant.Q4_K, quant.Q8_0, quant.BF16}, Dim: 256, FF: 256}
		size := int64(0)
		for _, n := range l.Parts() {
			size += n
		}
		mem, err := offheap.Alloc((size + 4095) &^ 4095)
		if err != nil {
			t.Fatal(err)
		}
		defer offheap.Free(mem)
		ref, err := cpu.New(cpu.Options{Threads: 1})
		if err != nil {
			t.Fatal(err)
		}
		defer ref.Close()
		var all []*experts
		for range 2 {
			e, err := d.newExperts(map[int]backends.HeldLayer{5: l}, 2, 4)
			if err != nil {
				t.Fatal(err)
			}
			defer e.Close()
			all = append(all, e)
		}
		e := all[0]
		g := backendtest.NewHeldGroup(rand.New(rand.NewPCG(3, 4)), l, 3, 2, 2)
		upload := func(e *experts, want int64) {
			t.Helper()
			before := e.Usage().DirectBytes
			g.UploadThrough(t, e, mem)
			if got := e.Usage().DirectBytes - before; got != want {
				t.Errorf("%d bytes without staging, want %d", got, want)
			}
			g.Run(t, ref, e, fmt.Sprint(want, " bytes"))
		}
		upload(e, 0)
		plain := e.Usage()
		if err := e.Experts.Lend([][]byte{mem}); err != nil {
			t.Fatal(err)
		}
		u := e.Usage()
		if got, asked := u.Pinned-plain.Pinned, u.PinAsked-plain.PinAsked; asked != int64(len(mem)) || float64(got) > 1.02*float64(asked) || got < asked {
			t.Errorf("%d bytes are pinned of %d", got, asked)
		}
		upload(e, 2*size)
		// Another device that is lent the same memory finds it pinned.
		if err := all[1].Experts.Lend([][]byte{mem}); err != nil {
			t.Fatal(err)
		}
		upload(all[1], 2*size)
		if err := all[1].Experts.Lend(nil); err != nil {
			t.Fatal(err)
		}
		upload(e, 2*size)
		if err := e.Experts.Lend(nil); err != nil {
			t.Fatal(err)
		}
		upload(e, 0)
		if u := e.Usage(); u.Pinned != plain.Pinned || u.PinAsked != plain.PinAsked || u.Unpinned != plain.Unpinned {
			t.Errorf("%+v, before %+v", u, plain)
		}
		// A refusal.
		if d.Name == "Fake 0" {
			f := fakeDriver(t)
			f.fail("register", 0, 2)
			if err := e.Experts.Lend([][]byte{mem}); err == nil || !strings.Contains(err.Error(), "pin found no memory") || !strings.Contains(err.Error(), "bytes of the host's memory") {
				t.Errorf("%v", err)
			}
			upload(e, 0)
			if u := e.Usage(); u.Unpinned != plain.Unpinned+1 || u.Pinned != plain.Pinned {
				t.Errorf("%+v", u)
			}
		}
		// Lent to the end: Close lets it go.
		if err := e.Experts.Lend([][]byte{mem}); err != nil {
			t.Fatal(err)
		}
	})
}
