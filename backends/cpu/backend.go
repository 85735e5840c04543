// Package cpu is the backend of the host's cores. Its plain Go kernels are
// complete, run everywhere, and their bits are the meaning of every other kernel
// and device; kernels.go has the tables of the faster ones.
//
// The arithmetic, told in docs/arithmetic.md, is written out in internal/arith (own
// functions), quantize.go (activations), row.go (matrix rows) and attend.go.
// Every product stands inside float32(...), so that no compiler fuses it with
// an addition.
package cpu

import (
	"fmt"

	"sluice/backends"
	"sluice/internal/offheap"
	"sluice/internal/quant"
)

// A Backend computes each step before the call returns, shared among its
// threads. The thread count never changes a bit. One goroutine uses it.
type Backend struct {
	pool   *pool
	level  Level
	owned  [][]byte // vectors and caches, freed by Close
	failed error    // what the next Read returns: the first failure since the last

	// Scratch of the steps, grown when a larger batch comes, else reused.
	in          inputs // of MatMul, and of an expert's gate and up
	products    products
	preparation preparation
	norm        normStep
	rope        ropeStep
	store       storeStep
	attend      attendStep
	layerNorm   layerNormStep
	heads       headStep
	index       indexStep
	experts     expertStep
	sum         combineStep
	add         addStep
	scaleRows   scaleRowsStep
	scale       scaleStep
	gate        gateStep
	embed       embedStep
	scan        scanStep
	split       splitStep
	deltaIn     deltaInputs
	deltaRun    deltaRecurrence
	deltaOut    deltaOutputs
	crc         checksumStep
	pieceShift  uint32 // of a whole piece of crc
}

var _ backends.Backend = (*Backend)(nil)

// Options choose how a backend computes; none of them changes a bit.
type Options struct {
	Threads int   // 1 to 1024, the caller among them
	Level   Level // the kernels; zero is Auto
}

// New starts a backend. The caller owes a Close.
func New(o Options) (*Backend, error) {
	if o.Threads < 1 || o.Threads > 1024 {
		return nil, fmt.Errorf("backends/cpu: %d threads: give 1 to 1024, best the number of physical cores", o.Threads)
	}
	level, err := Choose(o.Level)
	if err != nil {
		return nil, err
	}
	return &Backend{pool: newPool(o.Threads, kernelsFor(level)), level: level, pieceShift: shiftOf(checksumPiece)}, nil
}

// Name is "cpu".
func (b *Backend) Name() string { return "cpu" }

// Level is the level of the kernels that run.
func (b *Backend) Level() Level { return b.level }

// do runs one step to its end and remembers the first failure since the last Read.
func (b *Backend) do(name string, s step, items, grain int) {
	b.pool.do(s, items, grain)
	b.note(name)
}

// note keeps the first failure that the pool met, under the name of the step.
func (b *Backend) note(name string) {
	if err := b.pool.take(name); err != nil && b.failed == nil {
		b.failed = err
	}
}

// Read copies v to dst, which is exactly as long as its positions. It returns
// the first failure since the last Read, a memory fault on mapped weights or an
// *backends.ActivationError; then dst means nothing.
func (b *Backend) Read(dst []float32, v backends.Vec) error {
	x := v.(*vec)
	if len(dst) != x.n*x.dim {
		panic(fmt.Sprintf("backends/cpu: Read of %d positions of %d floats into %d floats", x.n, x.dim, len(dst)))
	}
	copy(dst, x.data)
	err := b.failed
	b.failed = nil
	return err
}

// Close ends the threads and frees all vectors and caches, whose use after it
// is a memory fault. A second Close does nothing.
func (b *Backend) Close() error {
	if b.pool == nil {
		return nil
	}
	b.pool.close()
	b.pool = nil
	var first error
	for _, m := range b.owned {
		if err := offheap.Free(m); err != nil && first == nil {
			first = err
		}
	}
	b.owned = nil
	return first
}

// A vec is [capacity, dim] floats outside the Go heap.
type vec struct {
	data   []float32
	n, dim int
}

// NewVec makes a vector of length 0, its memory resident, freed by Close.
func (b *Backend) NewVec(capacity, dim int) (backends.Vec, error) {
	if capacity < 1 || dim < 1 {
		return nil, fmt.Errorf("backends/cpu: a vector of %d positions of %d floats: both must be at least 1", capacity, dim)
	}
	data, mem, err := offheap.Of[float32](capacity * dim)
	if err != nil {
		return nil, fmt.Errorf("backends/cpu: no memory for %d positions of %d floats: %w", capacity, dim, err)
	}
	offheap.Populate(mem)
	b.owned = append(b.owned, mem)
	return &vec{data: data, dim: dim}, nil
}

func (v *vec) Len() int { return v.n }
func (v *vec) Dim() int { return v.dim }

func (v *vec) SetLen(n int) {
	if n < 0 || n > len(v.data)/v.dim {
		panic(fmt.Sprintf("backends/cpu: length %d of a vector made for %d positions", n, len(v.data)/v.dim))
	}
	v.n = n
}

// rows is the floats of the positions now in the batch.
func (v *vec) rows() []float32 { return v.data[:v.n*v.dim] }

// checkMatrix panics unless m is whole rows of a weight type.
func checkMatrix(name string, m *backends.Matrix) {
	if !m.Type.Known() || m.Type.Kind() == quant.Data {
		panic(fmt.Sprintf("backends/cpu: %s: a matrix of %v, which is not a weight type", name, m.Type))
	}
	if m.Rows < 0 || m.Cols < 1 || !m.Type.Fits(m.Cols) || len(m.Data) != m.Rows*m.Type.RowBytes(m.Cols) {
		panic(fmt.Sprintf("backends/cpu: %s: a matrix of %d x %d %v in %d bytes", name, m.Rows, m.Cols, m.Type, len(m.Data)))
	}
}
