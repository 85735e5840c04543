package cpu

import (
	"runtime"
	"testing"

	"sluice/backends"
	"sluice/backends/backendtest"
	"sluice/internal/mxcsr"
)

// flushing is a backend whose one thread makes subnormal floats zeros.
type flushing struct {
	*Backend
	before uint32
}

func (f *flushing) Close() error {
	mxcsr.Set(f.before)
	runtime.UnlockOSThread()
	return f.Backend.Close()
}

// TestStepsWithFlushToZero wants the same bits: no subnormal may matter.
func TestStepsWithFlushToZero(t *testing.T) {
	levels(t, func(t *testing.T, l Level) {
		backendtest.Run(t, func() backends.Backend {
			f := &flushing{Backend: openLevel(t, 1, l)}
			runtime.LockOSThread()
			f.before = mxcsr.Get()
			mxcsr.Set(f.before | mxcsr.FlushToZero | mxcsr.DenormalsAreZero)
			tiny := float32(0x1p-140)
			if tiny*float32(f.before) != 0 {
				panic("subnormal floats are not zeros")
			}
			return f
		})
	})
}
