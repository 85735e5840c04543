package dense

import (
	"sluice/backends"
	"sluice/backends/held"
	"sluice/internal/quant"
)

// A Driver is what a maker's driver does for a Backend. Addresses are the device's.
// What it is asked for is done in the order in which it was asked for; it may be
// done later, but Wait waits for it. After an error that tells of the device's loss
// every call gives that error.
type Driver interface {
	// Name is the device's in words for errors: cuda:0.
	Name() string
	// Knows says whether the device multiplies rows of a type; a matrix of it takes
	// MatrixBytes of the device's memory.
	Knows(t quant.Type) bool
	MatrixBytes(t quant.Type, rows, cols int) int64
	// Alloc takes memory of the device, aligned to 256 bytes, until Close.
	Alloc(size int64) (at uint64, err error)
	// Share takes memory of the host that the device addresses too, until Close.
	Share(size int64) (at uint64, mem []byte, err error)
	// Upload copies a matrix to where there is room for it. The data are the
	// caller's again when it returns.
	Upload(at uint64, t quant.Type, data []byte) error
	// Launch starts so many groups of threads of a kernel. The parameters are its
	// struct, the caller's again when it returns.
	Launch(kernel string, groups [3]int, params []byte) error
	// Quantize makes of so many floats of x what rows of a type multiply; with a u, of
	// what an expert's activation makes of x and u.
	Quantize(t quant.Type, to held.Form, x, u uint64, act backends.Activation, floats int, fail Failure) error
	// Multiply starts a matrix times vectors.
	Multiply(p *Product) error
	// Wait waits for all that was asked for.
	Wait() error
	// Close waits, and frees all.
	Close() error
}

// A Product is a matrix times some of the vectors that lie in a form.
type Product struct {
	Type       quant.Type
	Rows, Cols int
	W, Bias    uint64 // Bias [rows] may be 0: none
	In         held.Form
	First      int // number of the first vector
	Step       int // from one to the next
	N          int
	Y          uint64 // out: row i of N, Stride floats from one to the next
	Stride     int
}

// A Failure is where a kernel leaves the number of its step when it meets an
// activation that is out of range, unless one before it has left its own.
type Failure struct {
	At   uint64
	Step uint32
	_    uint32
}
