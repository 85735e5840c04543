package vulkan

import (
	"strings"
	"testing"
)

// Machines that are not here: which memory is chosen, whether uploads are
// staged, and the words about Resizable BAR.
func TestPlace(t *testing.T) {
	const mib, gib = 1 << 20, 1 << 30
	local, visible, coherent, cached := Type{Local: true}, Type{Visible: true}, Type{Coherent: true}, Type{Cached: true}
	kind := func(heap int, of ...Type) (k Type) {
		k.Heap = heap
		for _, o := range of {
			k.Local, k.Visible, k.Coherent, k.Cached = k.Local || o.Local, k.Visible || o.Visible, k.Coherent || o.Coherent, k.Cached || o.Cached
		}
		return k
	}
	for _, c := range []struct {
		name   string
		memory Memory
		want   placement
		vram   uint64
	}{
		{"discrete, ReBAR off: a window of 256 MiB", Memory{
			[]Heap{{Size: 16304 * mib, Local: true}, {Size: 32 * gib}, {Size: 256 * mib, Local: true}},
			[]Type{kind(0, local), kind(1, visible, coherent), kind(2, local, visible, coherent), kind(1, visible, coherent, cached)},
		}, placement{near: 2, weights: 0, up: 1, down: 3,
			warning: "warning: only 256 MiB of 16304 MiB VRAM is host-visible: Resizable BAR appears disabled. Enable Resizable BAR in firmware (BIOS/UEFI); the expert tier would land in system RAM and be slow."}, 16304 * mib},
		{"the same, with the window named first", Memory{
			[]Heap{{Size: 256 * mib, Local: true}, {Size: 16304 * mib, Local: true}, {Size: 32 * gib}},
			[]Type{kind(0, local, visible, coherent), kind(2, visible, coherent, cached), kind(1, local)},
		}, placement{near: 0, weights: 2, up: 1, down: 1,
			warning: "warning: only 256 MiB of 16304 MiB VRAM is host-visible: Resizable BAR appears disabled. Enable Resizable BAR in firmware (BIOS/UEFI); the expert tier would land in system RAM and be slow."}, 16304 * mib},
		{"discrete, full BAR", Memory{
			[]Heap{{Size: 24 * gib, Local: true}, {Size: 64 * gib}},
			[]Type{kind(0, local), kind(1, visible, coherent), kind(1, visible, coherent, cached), kind(0, local, visible, coherent)},
		}, placement{near: 3, weights: 0, up: 1, down: 2, rebar: true}, 24 * gib},
		{"discrete whose own memory is all visible", Memory{
			[]Heap{{Size: 24 * gib, Local: true}, {Size: 64 * gib}},
			[]Type{kind(0, local, visible, coherent), kind(1, visible, coherent, cached)},
		}, placement{near: 0, weights: 0, direct: true, up: 1, down: 1, rebar: true}, 24 * gib},
		{"unified: one heap, all of it everything", Memory{
			[]Heap{{Size: 2 * gib, Local: true}}, []Type{kind(0, local, visible, coherent, cached)},
		}, placement{near: 0, weights: 0, direct: true, up: 0, down: 0, rebar: true}, 2 * gib},
		{"integrated, two heaps, the larger one local", Memory{
			[]Heap{{Size: 10 * gib}, {Size: 20 * gib, Local: true}},
			[]Type{kind(1, local), kind(0, visible, coherent), kind(1, local, visible, coherent, cached)},
		}, placement{near: 2, weights: 0, up: 1, down: 2, rebar: true}, 20 * gib},
		{"a window of 4 GiB, as some firmware's BAR ends at 32 bits", Memory{
			[]Heap{{Size: 16304 * mib, Local: true}, {Size: 32 * gib}, {Size: 4 * gib, Local: true}},
			[]Type{kind(0, local), kind(1, visible, coherent), kind(2, local, visible, coherent), kind(1, visible, coherent, cached)},
		}, placement{near: 2, weights: 0, up: 1, down: 3,
			warning: "warning: only 4096 MiB of 16304 MiB VRAM is host-visible: Resizable BAR appears disabled. Enable Resizable BAR in firmware (BIOS/UEFI); the expert tier would land in system RAM and be slow."}, 16304 * mib},
		{"a pool of exactly 4 GiB, all of it seen", Memory{
			[]Heap{{Size: 4 * gib, Local: true}, {Size: 8 * gib}},
			[]Type{kind(0, local), kind(1, visible, coherent, cached), kind(0, local, visible, coherent)},
		}, placement{near: 2, weights: 0, up: 1, down: 1, rebar: true}, 4 * gib},
		{"a pool of 4 GiB and a little, whose low 32 bits are small", Memory{
			[]Heap{{Size: 300 * mib, Local: true}, {Size: 4*gib + mib, Local: true}, {Size: 8 * gib}},
			[]Type{kind(0, local, visible, coherent), kind(1, local), kind(2, visible, coherent, cached)},
		}, placement{near: 0, weights: 1, up: 2, down: 2,
			warning: "warning: only 300 MiB of 4097 MiB VRAM is host-visible: Resizable BAR appears disabled. Enable Resizable BAR in firmware (BIOS/UEFI); the expert tier would land in system RAM and be slow."}, 4*gib + mib},
		{"no type is visible but in the window", Memory{
			[]Heap{{Size: 8 * gib, Local: true}, {Size: 256 * mib, Local: true}},
			[]Type{kind(0, local), kind(1, local, visible, coherent)},
		}, placement{near: 1, weights: 0, up: 1, down: 1,
			warning: "warning: only 256 MiB of 8192 MiB VRAM is host-visible: Resizable BAR appears disabled. Enable Resizable BAR in firmware (BIOS/UEFI); the expert tier would land in system RAM and be slow."}, 8 * gib},
	} {
		got, err := c.memory.place()
		if err != nil || got != c.want {
			t.Errorf("%s:\n got %+v, %v\nwant %+v", c.name, got, err, c.want)
		}
		if v := c.memory.VRAM(); v != c.vram {
			t.Errorf("%s: %d bytes of VRAM, want %d", c.name, v, c.vram)
		}
	}
	for name, m := range map[string]Memory{
		"no heap of its own": {[]Heap{{Size: gib}}, []Type{kind(0, visible, coherent)}},
		"no type for it":     {[]Heap{{Size: gib, Local: true}, {Size: gib}}, []Type{kind(1, visible, coherent)}},
		"nothing visible":    {[]Heap{{Size: gib, Local: true}}, []Type{kind(0, local)}},
		"not coherent":       {[]Heap{{Size: gib, Local: true}}, []Type{kind(0, local, visible)}},
		"no memory":          {},
	} {
		if _, err := m.place(); err == nil || !strings.Contains(err.Error(), "driver is broken") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
