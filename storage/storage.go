// Package storage opens model files and reads from them: metadata and tensors
// by name, dense tensors whole, experts in bulk straight from the drive. It
// knows bytes and types, not families, not caches.
//
// Files are untrusted: every size, offset, type, name and count is checked
// before it is used, and errors name the file, the tensor or the byte.
package storage

import (
	"fmt"

	"sluice/internal/quant"
)

// A Key names one routed expert of a model.
type Key struct{ Layer, Expert int32 }

func (k Key) String() string { return fmt.Sprintf("layer %d expert %d", k.Layer, k.Expert) }

// A Tensor is a weight of the model. Its bytes are those in a file, or made of
// some of the files as they are read; File and Off are where the first of them
// lie then. Dims are innermost first (as
// GGUF writes them): a matrix of rows x cols has Dims [cols, rows], a stack of
// experts [cols, rows, experts].
type Tensor struct {
	Name  string
	Type  quant.Type
	Dims  []int64
	File  int   // index into Model.Files
	Off   int64 // absolute, in that file
	Bytes int64 // in memory
	// Stride is 0 where the bytes lie together. In a slab, a stack of experts lies
	// among the layer's others: expert e has an equal share of the bytes, which
	// begins at Off + e*Stride.
	Stride int64

	form  *form   // how the bytes are made of others; nil: they lie in the file
	stack *stack  // of a slab: the experts that it has its share of
	sum   *uint32 // of a slab: the CRC-32C of bytes that lie together
}

// at is where the share of expert e of n begins, and how long it is. A tensor
// that is no stack is the share of expert 0 of 1.
func (t Tensor) at(e, n int64) (off, share int64) {
	share = t.Bytes / n
	if t.Stride != 0 {
		return t.Off + e*t.Stride, share
	}
	return t.Off + e*share, share
}

// A FormatError is bad data in a model file: what, where, what to do.
type FormatError struct {
	File string
	Off  int64 // byte position, -1 if none applies
	Msg  string
}

func (e *FormatError) Error() string {
	if e.Off < 0 {
		return fmt.Sprintf("storage: %s: %s", e.File, e.Msg)
	}
	return fmt.Sprintf("storage: %s: byte %d: %s", e.File, e.Off, e.Msg)
}

// An ExpertLayer is the role table of one MoE layer: Parts name the tensors
// that hold the experts' matrices, such as gate, up, down. The last dim of each
// is the expert, so expert e of a part is its e-th equal share of bytes. Where a
// model has no such stack, a part is a view that makes one, see Model.View.
type ExpertLayer struct {
	Layer   int
	Experts int
	Parts   []string
}

// MaxParts bounds the parts of an expert.
const MaxParts = 4

// A Fetch is one expert on its way from a drive into a slot.
type Fetch struct {
	Key  Key
	Slot []byte // memory to read into, of SlotBytes(layer); nil in mmap mode
	// Background reads wait for all others, have a queue of their own and the lowest
	// I/O priority: for what may never be asked for.
	Background bool
	Parts      [MaxParts][]byte // out: the matrices in the order of the roles, views into Slot or the map
	Err        error            // out: why the bytes mean nothing
	src        fetchState       // the source's own
}

// A Source reads experts. One goroutine calls it, and one may be in Reap
// meanwhile, so that who submits need not wait for a read. Whatever the mode, the
// bytes are the same.
type Source interface {
	Mode() Mode
	// SlotBytes is the memory that an expert of this layer takes in a slot: its
	// parts, each rounded out to the alignment of direct reads. 0 in mmap mode.
	SlotBytes(layer int) int64
	// ExpertBytes is the payload of an expert of this layer: the sum of its parts.
	ExpertBytes(layer int) int64
	// Submit starts all reads of the fetches in one submission and returns.
	// The fetches belong to the source until Reap gives them back, the slice is
	// the caller's again.
	Submit(fetches []*Fetch)
	// Register names the memory that slots lie in, so that it is prepared for
	// reads once instead of at each; it takes the place of what was registered
	// before, and nil lets go. It is an optimization: where it fails, reads go on
	// without. While memory is registered its pages stay, whatever madvise says:
	// register what is to stay before the rest is given back. Nothing may be in flight.
	Register(arenas [][]byte)
	// Hurry says that a background fetch is wanted now. One that is no longer in
	// flight is left alone.
	Hurry(f *Fetch)
	// Reap waits for the next finished fetch, in any order, and returns it, its
	// Err set if it failed (after one retry). It panics if nothing is in flight.
	Reap() *Fetch
	// Poll is Reap for a caller that has a processor to itself: it returns at once,
	// with nil if no fetch is finished. beside says that Reap is to be called
	// instead, in a goroutine of its own: nobody can look at these reads without
	// waiting, or one that is over needs work, such as a checksum, that others
	// need not wait for. Nobody may be in Reap meanwhile.
	Poll() (f *Fetch, beside bool)
	// Evict says that the fetch's parts are no longer wanted (mmap: drop the pages).
	Evict(f *Fetch)
	Stats() SourceStats
	Close() error // waits for what is in flight
}

// SourceStats counts what a source did.
type SourceStats struct {
	Loads     int64 // experts delivered without error
	LoadBytes int64 // their payload
	ReadBytes int64 // bytes asked of the device, rounding and retries included
	Retries   int64 // reads done again after an error, an unexpected end or a bad checksum
	Checksums int64 // of them, those after a bad checksum
}

// Mode is a way to read experts.
type Mode uint8

const (
	Slab  Mode = iota // O_DIRECT by io_uring into memory of ours
	Pread             // the same by a pool of readers, the fallback
	MMap              // views of the page cache
)

func (m Mode) String() string { return [...]string{"slab", "pread", "mmap"}[m] }

// ParseMode reads the value of --storage.
func ParseMode(s string) (Mode, error) {
	for m := Slab; m <= MMap; m++ {
		if m.String() == s {
			return m, nil
		}
	}
	return 0, fmt.Errorf("unknown storage mode %q: use slab, pread or mmap", s)
}
