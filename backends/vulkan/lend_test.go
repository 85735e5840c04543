package vulkan

import (
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	"sluice/backends"
	"sluice/backends/backendtest"
	"sluice/backends/cpu"
	"sluice/internal/offheap"
	"sluice/internal/quant"
)

// From memory that was lent experts come without staging, from other memory through
// it, and the bits are the same; what cannot be lent says so, and staging does.
func TestLend(t *testing.T) {
	devices(t, func(t *testing.T, d *Device) {
		if d.place.direct {
			t.Skip("the host writes this device's memory itself")
		}
		if d.f.hostPointer == 0 {
			t.Skip("needs VK_EXT_external_memory_host")
		}
		l := backends.HeldLayer{Types: [3]quant.Type{quant.Q8_0, quant.Q4_K, quant.BF16}, Dim: 512, FF: 256}
		e, err := d.newExperts(map[int]backends.HeldLayer{5: l}, 2, 3)
		if err != nil {
			t.Fatal(err)
		}
		ref, err := cpu.New(cpu.Options{Threads: 1})
		if err != nil {
			t.Fatal(err)
		}
		defer ref.Close()
		size := int64(0)
		for _, n := range l.Parts() {
			size += n
		}
		mem, err := offheap.Alloc((size + 8191) &^ 4095)
		if err != nil {
			t.Fatal(err)
		}
		defer offheap.Free(mem)
		g := backendtest.NewHeldGroup(rand.New(rand.NewPCG(8, 9)), l, 3, 2, 4)
		upload := func(want int64) {
			t.Helper()
			before := e.Usage().DirectBytes
			g.UploadThrough(t, e, mem)
			g.Run(t, ref, e, "lent")
			if got := e.Usage().DirectBytes - before; got != want {
				t.Errorf("%d bytes without staging, want %d", got, want)
			}
		}
		upload(0)
		if err := e.Experts.Lend([][]byte{mem}); err != nil {
			t.Fatal(err)
		}
		u := e.Usage()
		if u.Pinned != int64(len(mem)) || float64(u.Pinned) > 1.02*float64(u.PinAsked) {
			t.Errorf("%+v", u)
		}
		allocated := u.Allocated
		upload(4 * size)
		if err := e.Experts.Lend(nil); err != nil {
			t.Fatal(err)
		}
		if u := e.Usage(); u.Pinned != 0 || u.Unpinned != 0 || u.DirectBytes != 4*size || u.Allocated < allocated {
			t.Errorf("%+v", u)
		}
		upload(0)
		// What does not begin on a page, and what the driver refuses.
		if err := e.Experts.Lend([][]byte{mem[:4096], mem[16:4096]}); err == nil || !strings.Contains(err.Error(), "multiples of") {
			t.Errorf("%v", err)
		}
		real := d.f.allocate
		d.f.allocate = fails(errOutOfHost)
		err = e.Experts.Lend([][]byte{mem})
		d.f.allocate = real
		wants(t, err, "vkAllocateMemory found no host memory", "bytes of the host's memory")
		upload(0)
		if u := e.Usage(); u.Unpinned != 2 || u.Pinned != 0 {
			t.Errorf("%+v", u)
		}
		pointer := d.f.hostPointer
		d.f.hostPointer = 0
		if err := e.Experts.Lend([][]byte{mem}); !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), "VK_EXT_external_memory_host") || e.Usage().Unpinned != 2 {
			t.Errorf("%v", err)
		}
		d.f.hostPointer = pointer
		// Lent to the end.
		if err := e.Experts.Lend([][]byte{mem}); err != nil {
			t.Fatal(err)
		}
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
		for b := range d.buffers {
			t.Errorf("a buffer of %d bytes is left", b.size)
		}
	})
}
