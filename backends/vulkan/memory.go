package vulkan

import "fmt"

// Memory is how a device describes its memory: heaps, and types that lie in them.
type Memory struct {
	Heaps []Heap
	Types []Type
}

// A Heap is memory of one kind. Budget and Used are the driver's own figures for
// this process, where it tells them.
type Heap struct {
	Size         uint64
	Local        bool // the device's own
	Budget, Used uint64
}

// A Type is a way to allocate from a heap.
type Type struct {
	Heap                             int
	Local, Visible, Coherent, Cached bool
}

// A placement says where things go: indices of types.
type placement struct {
	weights int  // the device's own memory
	direct  bool // the host can write it: no staging
	up      int  // written by the host, read by the device
	down    int  // written by the device, read by the host
	near    int  // the device's own, of any heap, written by the host; -1: there is none
	warning string
	rebar   bool // all of the device's memory is visible to the host
}

// of gives the type for a use.
func (p *placement) of(w where) int {
	if w == near && p.near < 0 {
		w = up
	}
	return [...]int{p.weights, p.up, p.down, p.near}[w]
}

// ReBAR says whether the host sees all of the device's memory, and what is to be
// said if it sees a part.
func (m *Memory) ReBAR() (all bool, warning string) {
	p, err := m.place()
	return err == nil && p.rebar, p.warning
}

// VRAM is the size of the device's own memory: its largest local heap.
func (m *Memory) VRAM() uint64 {
	if h := m.vramHeap(); h >= 0 {
		return m.Heaps[h].Size
	}
	return 0
}

func (m *Memory) vramHeap() int {
	best := -1
	for i, h := range m.Heaps {
		if h.Local && (best < 0 || h.Size > m.Heaps[best].Size) {
			best = i
		}
	}
	return best
}

// place chooses memory for weights and for what passes between host and device.
//
// Weights go to the largest local heap, whatever else calls itself local: with
// Resizable BAR switched off, a type that is local and visible lies in a window
// of 256 MiB, and what does not fit there ends in system memory without a word.
// A type of that heap which the host cannot see is preferred, with staging; where
// there is none (unified memory, software), the host writes directly.
func (m *Memory) place() (placement, error) {
	vram := m.vramHeap()
	if vram < 0 {
		return placement{}, fmt.Errorf("vulkan: the device has no memory of its own: its driver is broken; update it")
	}
	p := placement{weights: -1, up: -1, down: -1, near: -1}
	visible := uint64(0) // most of the device's memory that the host can see
	for i, t := range m.Types {
		if t.Local && t.Heap == vram && (p.weights < 0 || m.Types[p.weights].Visible && !t.Visible) {
			p.weights = i
		}
		if t.Local && t.Visible {
			visible = max(visible, m.Heaps[t.Heap].Size)
		}
		if !t.Visible || !t.Coherent {
			continue
		}
		if p.near < 0 && t.Local {
			p.near = i
		}
		// Up: not the device's own if there is a choice, as that is scarce. Down: cached, or each read is a trip over the bus.
		if p.up < 0 || m.Types[p.up].Local && !t.Local {
			p.up = i
		}
		if p.down < 0 || !m.Types[p.down].Cached && t.Cached {
			p.down = i
		}
	}
	if p.weights < 0 || p.up < 0 {
		return placement{}, fmt.Errorf("vulkan: the device has no type for its own memory, or none that the host can write: its driver is broken; update it")
	}
	p.direct = m.Types[p.weights].Visible && m.Types[p.weights].Coherent
	size := m.Heaps[vram].Size
	p.rebar = visible >= size
	if visible > 0 && visible < size {
		p.warning = fmt.Sprintf("warning: only %d MiB of %d MiB VRAM is host-visible: Resizable BAR appears disabled. Enable Resizable BAR in firmware (BIOS/UEFI); the expert tier would land in system RAM and be slow.", visible>>20, size>>20)
	}
	return p, nil
}
