package vulkan

import (
	"fmt"
	"unsafe"

	"sluice/backends"
	"sluice/backends/dense"
	"sluice/backends/held"
	"sluice/internal/quant"
)

// This file is how the host speaks to the kernels: parameter blocks as their
// Params structs lay them out, and which kernel a type has.

const slotBytes = 128 // of a parameter block, at most

type quantizeParams struct {
	groups                      [4]uint32
	x, u, code, scale, sum, top uint64
	n, step                     uint32
	from, to                    uint64
	words                       uint32
	_                           uint32
}

type rowsParams struct {
	groups                        [4]uint32
	jobs, index, code, scale, sum uint64
	rows, cols, rowBytes          uint32
	_                             uint32
}

// behind are the bytes of parameters behind the group counts.
func behind[T quantizeParams | rowsParams](p *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(p)), unsafe.Sizeof(*p))[16:]
}

// A rowsJob is one matrix times some positions.
type rowsJob = held.Job

const jobBytes = int(unsafe.Sizeof(rowsJob{}))

// Types are the formats whose rows the kernels multiply.
var types = []quant.Type{quant.F32, quant.F16, quant.BF16, quant.Q4_0, quant.Q4_1, quant.Q5_0, quant.Q5_1, quant.Q8_0, quant.Q4_K, quant.Q5_K, quant.Q6_K, quant.IQ4_NL, quant.MXFP4,
	quant.INT4_32, quant.INT4_128, quant.INT4F_32, quant.INT4F_64, quant.INT4F_128, quant.INT8F_32, quant.INT8F_128}

// Types are those formats.
func Types() []quant.Type { return append([]quant.Type(nil), types...) }

// Supports says whether the kernels multiply rows of a type.
func Supports(t quant.Type) bool {
	for _, have := range types {
		if have == t {
			return true
		}
	}
	return false
}

// A product is a kernel of rows: of a type, the rows that one group makes, and of how
// many positions of a job at most.
type product struct {
	kernel
	rows, positions int
}

// rows is the kernel for rows of a type, with so many positions of a job at most.
func (d *Device) rows(t quant.Type, longest int) product {
	// Threads: enough to read at full rate, few enough that what they read stays in the cache.
	p := product{kernel{"rows", uint32(t), 8, 32}, 8, 8}
	if t.ActBlock() == 256 {
		p.c2, p.rows = 64, 16
	}
	switch {
	case !Supports(t):
		panic(fmt.Sprintf("vulkan: no kernel for %v", t))
	case t.Kind() == quant.Float:
		return product{kernel{shader: "floats", c0: uint32(t)}, 16, 8}
	case d.dot:
		p.shader = "rows_dot"
	}
	if longest == 1 {
		p.c1, p.positions = 1, 1
	}
	return p
}

// quantizer is the kernel that makes what rows of a type multiply: of a vector,
// or of what an activation makes of two.
func quantizer(t quant.Type) kernel { return kernel{shader: "quantize", c0: uint32(t.ActBlock())} }

func gatedQuantizer(t quant.Type, act backends.Activation) kernel {
	return kernel{shader: "quantize", c0: uint32(t.ActBlock()), c1: 1 + uint32(act)}
}

// A form is a batch of vectors as rows meet them, in device memory.
type form held.Form

func formAt(at uint64, floats int) form { return form(held.FormAt(at, floats)) }

func (f form) quantize(x, u uint64, fail dense.Failure, n int) quantizeParams {
	return quantizeParams{groups: [4]uint32{uint32((n + 255) / 256), 1, 1, 0}, x: x, u: u, code: f.Code, scale: f.Scale, sum: f.Sum, top: fail.At, n: uint32(n), step: fail.Step}
}

func (f form) rows(k product, jobs, index uint64, count, most, rows, cols int, t quant.Type) rowsParams {
	return rowsParams{groups: [4]uint32{k.groups(rows), uint32(count), uint32((most + k.positions - 1) / k.positions), 0},
		jobs: jobs, index: index, code: f.Code, scale: f.Scale, sum: f.Sum, rows: uint32(rows), cols: uint32(cols), rowBytes: uint32(t.RowBytes(cols))}
}

// groups is how many groups make so many rows.
func (p product) groups(rows int) uint32 { return uint32((rows + p.rows - 1) / p.rows) }
