// Package dense is a backend whose vectors, caches and dense weights lie in the
// memory of a device: it cuts the steps of a model into launches of a few kernels,
// whoever's driver starts them (Driver). What a device has no kernel or no room for,
// and experts that come from the host's memory, a backend of the host computes.
package dense

import (
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"sluice/backends"
	"sluice/internal/offheap"
)

// A Backend implements backends.Backend. One goroutine uses it.
type Backend struct {
	d      Driver
	host   backends.Backend // computes what the device does not
	room   int64            // bytes of matrices that there is room for yet
	stays  func(m *backends.Matrix) bool
	failed error // of the driver or the host; what the next Read returns

	args     *[256]byte // parameters of a launch, outside the Go heap
	fail     uint64     // where steps leave their number
	failWord *uint32
	weights  map[part[byte]]uint64    // matrices on the device, by where the host has them; 0: the host multiplies
	floats   map[part[float32]]uint64 // the same of norms, biases, tables
	product  Product                  // of the launch under way
	form     scratch
	score    scratch
	part     scratch
	heads    scratch
	delta    scratch
	gate, up scratch
	hidden   scratch

	// Ring is what launches read that changes from step to step. It is used again
	// when all of them are done.
	ring   []byte
	ringAt uint64
	used   int
	// Out is what comes back from the device, a piece at a time.
	out   []byte
	outAt uint64

	mem  [][]byte
	rows []int32
	temp []float32
}

var _ backends.Backend = (*Backend)(nil)

// A part of the host's memory is known by where it begins and how long it is.
type part[T any] struct {
	at *T
	n  int
}

// A scratch is device memory that grows. What it was stays until Close: a launch may
// be under way there.
type scratch struct {
	at   uint64
	size int64
}

// Options are how much of the device a backend takes.
type Options struct {
	// Room is the device's memory for matrices, in bytes; those for which there is
	// none left when they are first multiplied are the host's.
	Room int64
	// Resident says whether a matrix of an expert stays where it is as long as the
	// backend lives, as those of dense layers and shared experts do: then it may be
	// the device's. nil: none does. All other matrices and all weights must.
	Resident func(m *backends.Matrix) bool
}

const (
	ringBytes = 8 << 20
	outBytes  = 4 << 20
	// attendFloats bounds the scores of one launch.
	attendFloats = 16 << 20
)

// Steps that may fail, by their numbers.
const (
	stepMatMul = 1 + iota
	stepMatMulHeads
	stepRMSNorm
	stepLayerNorm
	stepStore
	stepChooseKeys
	stepAttend
	stepDeltaNet
	stepExpertGroup
)

var stepNames = [...]string{"", "MatMul", "MatMulHeads", "RMSNorm", "LayerNorm", "Store", "ChooseKeys", "Attend", "DeltaNet", "ExpertGroup"}

// New starts a backend on a device, beside one of the host. It closes both, also if
// it fails.
func New(d Driver, host backends.Backend, o Options) (*Backend, error) {
	b := &Backend{d: d, host: host, room: o.Room, stays: o.Resident, weights: map[part[byte]]uint64{}, floats: map[part[float32]]uint64{}}
	if err := b.open(); err != nil {
		b.Close()
		return nil, err
	}
	return b, nil
}

func (b *Backend) open() (err error) {
	mem, err := offheap.Alloc(256)
	if err != nil {
		return fmt.Errorf("%s: no memory for calls: %w", b.d.Name(), err)
	}
	b.mem = append(b.mem, mem)
	b.args = (*[256]byte)(mem)
	if b.ringAt, b.ring, err = b.d.Share(ringBytes); err != nil {
		return err
	}
	if b.outAt, b.out, err = b.d.Share(outBytes + 256); err != nil {
		return err
	}
	b.fail = b.outAt + outBytes
	b.failWord = (*uint32)(unsafe.Pointer(&b.out[outBytes]))
	b.out = b.out[:outBytes]
	*b.failWord = 0
	return nil
}

// Name is the device's.
func (b *Backend) Name() string { return b.d.Name() }

// Close frees the device's memory, and closes the host's backend.
func (b *Backend) Close() error {
	if b.d == nil {
		return nil
	}
	err := errors.Join(b.d.Close(), b.host.Close())
	for _, m := range b.mem {
		err = errors.Join(err, offheap.Free(m))
	}
	b.d, b.mem = nil, nil
	return err
}

// note keeps the first failure.
func (b *Backend) note(err error) {
	if err != nil && b.failed == nil {
		b.failed = err
	}
}

// launch starts a kernel; without groups there is nothing to do.
func launch[T any](b *Backend, kernel string, x, y, z int, params T) {
	if x == 0 || y == 0 || z == 0 || b.failed != nil {
		return
	}
	*(*T)(unsafe.Pointer(b.args)) = params
	b.note(b.d.Launch(kernel, [3]int{x, y, z}, b.args[:unsafe.Sizeof(params)]))
}

func per(n, each int) int { return (n + each - 1) / each }

// failure is where a step leaves its number.
func (b *Backend) failure(step uint32) Failure { return Failure{At: b.fail, Step: step} }

// wait waits for the device, and takes what its steps have left.
func (b *Backend) wait() {
	if err := b.d.Wait(); err != nil {
		b.note(err)
		return
	}
	b.used = 0
	if n := *b.failWord; n != 0 {
		*b.failWord = 0
		b.note(&backends.ActivationError{Step: stepNames[n]})
	}
}

// alloc is memory of the device that nobody counts as weights.
func (b *Backend) alloc(bytes int64) (uint64, error) {
	at, err := b.d.Alloc((bytes + 255) &^ 255)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", b.d.Name(), err)
	}
	return at, nil
}

// zeros is memory of the device that holds +0.
func (b *Backend) zeros(bytes int64) (uint64, error) {
	at, err := b.alloc(bytes)
	if err != nil {
		return 0, err
	}
	const most = 65535 * groupFloats                                   // groups that every device takes
	for done, all := int64(0), (bytes+3)/4; done < all; done += most { // memory comes in whole 256 bytes
		b.zero(at+4*uint64(done), int(min(all-done, most)))
	}
	return at, nil
}

// zero starts to make floats +0.
func (b *Backend) zero(at uint64, floats int) {
	launch(b, "each", per(floats, groupFloats), 1, 1, eachParams{y: at, n: uint32(floats), how: eachZero})
}

// need is at least so much memory of a scratch.
func (b *Backend) need(s *scratch, bytes int64) uint64 {
	if bytes > s.size {
		at, err := b.alloc(bytes)
		if err != nil {
			b.note(err)
			return 0
		}
		s.at, s.size = at, bytes
	}
	return s.at
}

// put is a copy of data that the launches of a step read.
func put[T float32 | int32](b *Backend, data []T) uint64 {
	if len(data) == 0 {
		return b.ringAt
	}
	n := (4*len(data) + 15) &^ 15
	if n > len(b.ring) {
		panic(fmt.Sprintf("backends/dense: a step with %d bytes of its own: at most %d", n, len(b.ring)))
	}
	b.reserve(n)
	at := b.used
	copy(unsafe.Slice((*T)(unsafe.Pointer(&b.ring[at])), len(data)), data)
	b.used += n
	return b.ringAt + uint64(at)
}

// reserve has room in the ring for what a launch reads.
func (b *Backend) reserve(bytes int) {
	if b.used+bytes > len(b.ring) {
		b.wait()
		b.used = 0
	}
}

// constant is where floats lie on the device that never change, copied there when
// they are first seen; 0 for none.
func (b *Backend) constant(x []float32) uint64 {
	if len(x) == 0 || b.failed != nil {
		return 0
	}
	key := part[float32]{&x[0], len(x)}
	at, ok := b.floats[key]
	if !ok {
		var err error
		if at, err = b.alloc(4 * int64(len(x))); err == nil {
			err = b.d.Upload(at, 0, bytesOf(x)) // F32
		}
		if err != nil {
			b.note(err)
			return 0
		}
		b.floats[key] = at
	}
	return at
}

func bytesOf(x []float32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), 4*len(x))
}

// matrix is where a matrix lies on the device, copied there when it is first seen; 0
// if it is the host's to multiply.
func (b *Backend) matrix(m *backends.Matrix) uint64 {
	if len(m.Data) == 0 || b.failed != nil {
		return 0
	}
	key := part[byte]{&m.Data[0], len(m.Data)}
	at, ok := b.weights[key]
	if ok {
		return at
	}
	if size := b.d.MatrixBytes(m.Type, m.Rows, m.Cols); b.d.Knows(m.Type) && size <= b.room {
		b.room -= size
		var err error
		if at, err = b.alloc(size); err == nil {
			err = b.d.Upload(at, m.Type, m.Data)
		}
		if err != nil {
			b.note(err)
			return 0
		}
	}
	b.weights[key] = at
	return at
}

// A Vec of a Backend may be met by others on its device, in the order of its steps.
type Vec interface {
	backends.Vec
	// Lies says where it lies: on the device of which driver, and its first position.
	Lies() (on Driver, at uint64)
	// Failure is what kernels of others leave that compute a group of experts of it.
	Failure() Failure
	// Place starts a copy of floats of the device, to rows of the vector.
	Place(rows []int32, from uint64)
}

// A vec is [capacity, dim] floats of the device.
type vec struct {
	b                *Backend
	at               uint64
	n, dim, capacity int
	twin             backends.Vec // of the host, where a step of its is asked for
}

// NewVec makes a vector of length 0, all +0, freed by Close.
func (b *Backend) NewVec(capacity, dim int) (backends.Vec, error) {
	if capacity < 1 || dim < 1 {
		return nil, fmt.Errorf("backends/dense: a vector of %d positions of %d floats: both must be at least 1", capacity, dim)
	}
	at, err := b.zeros(4 * int64(capacity) * int64(dim))
	if err != nil {
		return nil, err
	}
	return &vec{b: b, at: at, dim: dim, capacity: capacity}, nil
}

func (v *vec) Len() int               { return v.n }
func (v *vec) Dim() int               { return v.dim }
func (v *vec) Lies() (Driver, uint64) { return v.b.d, v.at }
func (v *vec) Failure() Failure       { return v.b.failure(stepExpertGroup) }

func (v *vec) Place(rows []int32, from uint64) {
	v.b.runs(runsParams{to: v.at, from: from, toRows: put(v.b, rows), n: uint32(len(rows)), groups: 1, run: uint32(v.dim), toRow: uint32(v.dim), fromRow: uint32(v.dim)})
}

func (v *vec) SetLen(n int) {
	if n < 0 || n > v.capacity {
		panic(fmt.Sprintf("backends/dense: length %d of a vector made for %d positions", n, v.capacity))
	}
	v.n = n
}

// row is where a position lies.
func (v *vec) row(i int) uint64 { return v.at + 4*uint64(i)*uint64(v.dim) }

// onHost is the vector's twin in the host's backend, as long as it is.
func (b *Backend) onHost(v *vec) backends.Vec {
	if v.twin == nil {
		t, err := b.host.NewVec(v.capacity, v.dim)
		if err != nil {
			b.note(err)
			return nil
		}
		v.twin = t
	}
	v.twin.SetLen(v.n)
	return v.twin
}

// toHost copies a vector to its twin.
func (b *Backend) toHost(v *vec) backends.Vec {
	t := b.onHost(v)
	if t == nil {
		return nil
	}
	b.read(v, func(first int, rows []float32) {
		b.host.Put(t, b.numbers(first, len(rows)/v.dim), rows)
	})
	return t
}

// fromHost copies the twin to a vector.
func (b *Backend) fromHost(v *vec) {
	b.temp = grow(b.temp, v.n*v.dim)
	if err := b.host.Read(b.temp, v.twin); err != nil {
		b.note(err)
		return
	}
	b.putRows(v, b.numbers(0, v.n), b.temp)
}

// numbers are first, first+1, ..., until the next call.
func (b *Backend) numbers(first, n int) []int32 {
	b.rows = slices.Grow(b.rows[:0], n)[:n]
	for i := range b.rows {
		b.rows[i] = int32(first + i)
	}
	return b.rows
}

// read gives the rows of a vector, some at a time, when they are computed.
func (b *Backend) read(v *vec, take func(first int, rows []float32)) {
	each := len(b.out) / 4 / v.dim
	if each == 0 {
		b.readLong(v, take)
		return
	}
	for i := 0; i < v.n && b.failed == nil; i += each {
		n := min(each, v.n-i)
		b.copy(b.outAt, v.row(i), n*v.dim)
		b.wait()
		if b.failed == nil {
			take(i, unsafe.Slice((*float32)(unsafe.Pointer(&b.out[0])), n*v.dim))
		}
	}
}

// readLong is read where a row is longer than what comes back at a time.
func (b *Backend) readLong(v *vec, take func(first int, rows []float32)) {
	row := make([]float32, v.dim)
	for i := 0; i < v.n && b.failed == nil; i++ {
		for at := 0; at < v.dim; at += len(b.out) / 4 {
			n := min(len(b.out)/4, v.dim-at)
			b.copy(b.outAt, v.row(i)+4*uint64(at), n)
			b.wait()
			copy(row[at:], unsafe.Slice((*float32)(unsafe.Pointer(&b.out[0])), n))
		}
		if b.failed == nil {
			take(i, row)
		}
	}
}

// copy starts a copy of floats.
func (b *Backend) copy(to, from uint64, floats int) {
	b.runs(runsParams{to: to, from: from, n: 1, groups: 1, run: uint32(floats)})
}

func (b *Backend) runs(p runsParams) {
	launch(b, "runs", per(int(p.n*p.groups*p.run), groupFloats), 1, 1, p)
}

// Read copies v to dst, which is exactly as long as its positions, when all steps
// before are done. It returns the first failure since the last Read: of the driver,
// of the host's backend, or an *backends.ActivationError; then dst means nothing.
// The driver's loss of the device stays.
func (b *Backend) Read(dst []float32, v backends.Vec) error {
	x := v.(*vec)
	if len(dst) != x.n*x.dim {
		panic(fmt.Sprintf("backends/dense: Read of %d positions of %d floats into %d floats", x.n, x.dim, len(dst)))
	}
	if b.failed == nil && x.n > 0 {
		b.read(x, func(first int, rows []float32) { copy(dst[first*x.dim:], rows) })
	} else {
		b.wait()
	}
	err := b.failed
	b.failed = nil
	return err
}
