// Package mxcsr sets the processor's treatment of subnormal floats, for tests
// which show that it does not matter.
package mxcsr

// The bits that make subnormal results, and subnormal operands, count as zeros.
const (
	FlushToZero      = 1 << 15
	DenormalsAreZero = 1 << 6
)

// Get is the control register of this thread, Set changes it. The caller has
// locked its goroutine to the thread, and puts back what it found or lets the
// thread end.
func Get() uint32
func Set(v uint32)
