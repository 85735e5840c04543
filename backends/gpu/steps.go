package gpu

import (
	"fmt"
	"slices"
	"unsafe"

	"sluice/backends"
	"sluice/backends/held"
	"sluice/internal/quant"
)

// This file is how the host speaks to the kernels of shaders/gpu.cu: parameters as
// its structs lay them out, and what each type needs.

type quantizeParams struct {
	x, u, code, scale, sum, top uint64
	n, block, gate, pair        uint32
	step, _                     uint32
}

type planesParams struct {
	from, to, bytes     uint64
	block, offset, size uint32
	_                   uint32
}

type fetchParams struct {
	from, to [2]uint64
	words    [2]uint32
}

type rowsParams struct {
	jobs, index, code, scale, sum uint64
	rows, cols                    uint32
	one                           rowsJob // where there are no jobs
}

// A rowsJob is one matrix times some vectors.
type rowsJob = held.Job

const (
	threads      = 128 // of a block of rows kernels
	positions    = 8   // of a block of them
	quantizeSize = 256 // floats of a block of quantize, of 64 threads
)

// types are the formats whose rows the kernels multiply.
var types = []quant.Type{
	quant.F32, quant.F16, quant.BF16, quant.F8_128,
	quant.Q4_0, quant.Q4_1, quant.Q5_0, quant.Q5_1, quant.Q8_0, quant.Q4_K, quant.Q5_K, quant.Q6_K, quant.IQ4_NL, quant.MXFP4,
	quant.INT4_32, quant.INT4_128, quant.INT4F_32, quant.INT4F_64, quant.INT4F_128, quant.INT8F_32, quant.INT8F_128,
}

// Types are those formats.
func Types() []quant.Type { return slices.Clone(types) }

// Supports says whether the kernels multiply rows of a type.
func Supports(t quant.Type) bool { return slices.Contains(types, t) }

// A field is a part of a block that has a plane of its own.
type field struct{ offset, size int }

// planesOf are the planes of a matrix of type t in device memory, each 16-aligned:
// nil if its blocks are aligned as they are.
func planesOf(t quant.Type) []field {
	switch t {
	case quant.Q4_0, quant.IQ4_NL, quant.INT4_32:
		return []field{{2, 16}, {0, 2}}
	case quant.Q4_1, quant.INT4F_32:
		return []field{{4, 16}, {0, 4}}
	case quant.Q5_0:
		return []field{{6, 16}, {2, 4}, {0, 2}}
	case quant.Q5_1:
		return []field{{8, 16}, {4, 4}, {0, 4}}
	case quant.Q8_0:
		return []field{{2, 32}, {0, 2}}
	case quant.MXFP4:
		return []field{{1, 16}, {0, 1}}
	case quant.Q6_K:
		return []field{{0, 128}, {128, 64}, {192, 16}, {208, 2}}
	case quant.INT4_128:
		return []field{{2, 64}, {0, 2}}
	case quant.INT4F_64, quant.INT8F_32:
		return []field{{4, 32}, {0, 4}}
	case quant.INT4F_128:
		return []field{{4, 64}, {0, 4}}
	case quant.INT8F_128, quant.F8_128:
		return []field{{4, 128}, {0, 4}}
	}
	return nil
}

func even(n int64) int64 { return (n + 15) &^ 15 }

// matrixBytes is what rows x cols take on the device, a multiple of held.Align.
func matrixBytes(t quant.Type, rows, cols int) int64 {
	n := int64(rows) * int64(t.RowBytes(cols))
	if planes := planesOf(t); planes != nil {
		_, block := t.Block()
		blocks := n / int64(block)
		n = 0
		for _, f := range planes {
			n = even(n) + blocks*int64(f.size)
		}
	}
	return (n + held.Align - 1) &^ (held.Align - 1)
}

// A product is a kernel of rows: of a type, with so many vectors of a job.
type product struct {
	t       quant.Type
	vectors int
}

// rows is the kernel for rows of a type with that many vectors of a job at most,
// the rows of a block of threads, and the vectors.
func (d *Device) rows(t quant.Type, longest int) (f function, perBlock, vectors int, err error) {
	switch {
	case !Supports(t):
		panic(fmt.Sprintf("gpu: no kernel for %v", t))
	case t.Kind() == quant.Float:
		perBlock = threads / 16
	case t.ActBlock() == 256:
		perBlock = threads / 32 * 2
	default:
		perBlock = threads / 8 * 2
	}
	vectors = positions
	if longest == 1 {
		vectors = 1
	}
	f, ok := d.products[product{t, vectors}]
	if !ok {
		module, name := fmt.Sprint(uint32(t)), "rows_"
		if vectors == 1 {
			name = "rows1_"
		}
		if f, err = d.kernel(module, name+module); err == nil {
			d.products[product{t, vectors}] = f
		}
	}
	return f, perBlock, vectors, err
}

// multiply starts the rows of a matrix of so many jobs, the longest of which has
// that many vectors. With what the device runs at once it is one wave of blocks that
// walk on through the rows.
func (d *Device) multiply(t quant.Type, p rowsParams, jobs, longest int) error {
	f, perBlock, vectors, err := d.rows(t, longest)
	if err != nil {
		return err
	}
	runs := (longest + vectors - 1) / vectors
	x := (int(p.rows) + perBlock - 1) / perBlock
	if wave := d.units * f.resident / (jobs * runs); wave > 0 && wave < x {
		x = wave
	}
	return launch(d, d.kernels, f, [3]int{x, jobs, runs}, threads, p)
}

// quantize starts the kernel that makes what rows of a type multiply: of n floats
// of x, or with a gate of what the activation makes of x and u. top becomes step, if it
// is 0, when an activation is out of range.
func (d *Device) quantize(t quant.Type, f form, x, u, top uint64, n int, gate, step uint32) error {
	k, err := d.kernel("", "quantize")
	if err != nil {
		return err
	}
	p := quantizeParams{x: x, u: u, code: f.Code, scale: f.Scale, sum: f.Sum, top: top, n: uint32(n), block: uint32(t.ActBlock()), gate: gate, step: step}
	if pairs(t) {
		p.pair = 1
	}
	return launch(d, d.kernels, k, [3]int{(n + quantizeSize - 1) / quantizeSize, 1, 1}, 64, p)
}

// alike says that rows of two types multiply the same form of a vector.
func alike(a, b quant.Type) bool {
	return a.ActBlock() == b.ActBlock() && pairs(a) == pairs(b)
}

// pairs says that rows of a type want codes of activations as its nibbles lie.
func pairs(t quant.Type) bool { return t == quant.MXFP4 || t == quant.IQ4_NL }

// A form is a batch of vectors as rows meet them, in device memory.
type form = held.Form

func formAt(at uint64, floats int) form { return held.FormAt(at, floats) }

// gateOf is the number of an activation in the kernel.
func gateOf(a backends.Activation) uint32 { return 1 + uint32(a) }

// put starts a copy of n bytes of the host's memory outside the Go heap, by a stream.
func (d *Device) put(to uint64, source *byte, n int64, stream uintptr) error {
	return d.check("copy to the device", d.dr.f.copyIn.call(uintptr(to), uintptr(unsafe.Pointer(source)), uintptr(n), stream))
}

// A span is blocks first, first+1, ... of a matrix that has of them in all.
type span struct{ first, n, of int64 }

// bring copies a span of a matrix of type t, which begins at `to`, by a stream. Where
// the type lies in planes the blocks come to the device's memory at `by` first, and
// are gathered from there.
func (d *Device) bring(stream uintptr, to uint64, t quant.Type, s span, source *byte, by uint64) error {
	_, block := t.Block()
	planes := planesOf(t)
	target := to + uint64(s.first*int64(block))
	if planes != nil {
		target = by
	}
	if err := d.put(target, source, s.n*int64(block), stream); err != nil {
		return err
	}
	var at int64
	for _, f := range planes {
		at = even(at)
		k, err := d.kernel("", "planes")
		if err != nil {
			return err
		}
		p := planesParams{from: target, to: to + uint64(at+s.first*int64(f.size)), bytes: uint64(s.n) * uint64(f.size), block: uint32(block), offset: uint32(f.offset), size: uint32(f.size)}
		if err := launch(d, stream, k, [3]int{int(min(1024, (p.bytes+255)/256)), 1, 1}, 256, p); err != nil {
			return err
		}
		at += s.of * int64(f.size)
	}
	return nil
}
