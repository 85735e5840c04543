package backends

import (
	"fmt"

	"sluice/internal/quant"
)

// A HeldLayer says what the experts of a layer that a device holds are made of:
// gate and up [FF, Dim], down [Dim, FF].
type HeldLayer struct {
	Types   [3]quant.Type // gate, up, down
	Dim, FF int
}

// Parts are the bytes of gate, up and down.
func (l HeldLayer) Parts() [3]int64 {
	return [3]int64{int64(l.FF) * int64(l.Types[0].RowBytes(l.Dim)), int64(l.FF) * int64(l.Types[1].RowBytes(l.Dim)), int64(l.Dim) * int64(l.Types[2].RowBytes(l.FF))}
}

// Check looks for numbers in an expert's gate, up and down that the arithmetic does
// not take. It panics if a part has not the layer's size.
func (l HeldLayer) Check(expert int, parts [3][]byte) error {
	for i, want := range l.Parts() {
		if int64(len(parts[i])) != want {
			panic(fmt.Sprintf("backends: part %d of an expert holds %d bytes, want %d", i, len(parts[i]), want))
		}
		if err := quant.Check(l.Types[i], parts[i]); err != nil {
			return fmt.Errorf("expert %d, %s: %w", expert, [...]string{"gate", "up", "down"}[i], err)
		}
	}
	return nil
}

// A HeldUsage is what experts take of a device's memory, and what it took to bring
// them there.
type HeldUsage struct {
	Experts     int64
	Payload     int64 // bytes of the experts' matrices
	Allocated   int64 // bytes of its own memory asked of the driver: experts with their alignment, biases, scratch, staging, and what is no expert
	Driver      int64 // bytes in use by the driver's own count, less what was before; -1: it does not tell
	UploadBytes int64
	UploadNanos int64
	Recorded    int64 // command buffers, graphs
	Launches    int64 // kernels and graphs started, command buffers submitted
	DirectBytes int64 // of uploads, those that came from lent memory without a copy through staging
	Pinned      int64 // bytes of host memory that are pinned for copies
	PinAsked    int64 // bytes of host memory that should be
	Unpinned    int64 // times that it could not be had
	Unequal     int64 // kernels that gave other bits than those that they stand for, and are not used
}

// tolerance is how much of what was allocated the driver's own count may differ.
const tolerance = 0.10

// Doubt says in words that the driver counts other bytes in use on a device than
// were allocated there: that a tier is not where it seems to be; "" if it does
// not, or does not tell.
func (u *HeldUsage) Doubt(device int) string {
	off := u.Driver - u.Allocated
	if u.Driver < 0 || u.Experts == 0 || float64(max(off, -off)) <= tolerance*float64(u.Allocated) {
		return ""
	}
	claim := fmt.Sprintf("warning: VRAM tier claims %s but the driver reports %s in use on device %d", bytesText(u.Allocated), bytesText(u.Driver), device)
	if off < 0 {
		return claim + ": experts are not in VRAM."
	}
	return claim + ": something else of this process takes the rest; lower --vram if the device runs out of memory."
}

func bytesText(n int64) string {
	if n >= 1e9 {
		return fmt.Sprintf("%.2f GB", float64(n)/1e9)
	}
	return fmt.Sprintf("%.0f MB", float64(n)/1e6)
}
