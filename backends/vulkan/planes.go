package vulkan

import (
	"sluice/backends/held"
	"sluice/internal/quant"
)

// This file is how matrices of blocks lie in the device's memory, as
// shaders/planes.glsl says: as planes of aligned words, since blocks of 17, 18, 22,
// 34 or 210 bytes would be read byte by byte.

// A layout says of a type how many elements a unit has, the quads of 16 bytes of its
// codes, whether it has a word of fifth bits, and the bytes of a scale, of which there
// is one for so many units.
type layout struct {
	unit, quads  int
	fifths       bool
	scale, units int
}

func layoutOf(t quant.Type) layout {
	switch t {
	case quant.Q4_K:
		return layout{unit: 256, quads: 9}
	case quant.Q5_K:
		return layout{unit: 256, quads: 11}
	case quant.Q6_K:
		return layout{unit: 256, quads: 13, scale: 2, units: 1}
	case quant.MXFP4:
		return layout{unit: 32, quads: 1, scale: 1, units: 1}
	case quant.Q5_0:
		return layout{unit: 32, quads: 1, fifths: true, scale: 2, units: 1}
	case quant.Q5_1:
		return layout{unit: 32, quads: 1, fifths: true, scale: 4, units: 1}
	}
	// What is left is a scale and then codes, of 4 bits or of 8.
	elems, bytes := t.Block()
	l := layout{unit: 32, quads: 1, units: elems / 32}
	if bytes > elems {
		l.quads = 2
	}
	l.scale = bytes - l.units*l.quads*16
	return l
}

// matrixBytes is what a matrix takes on the device, a multiple of held.Align.
func matrixBytes(t quant.Type, rows, cols int) int64 {
	size := int64(rows) * int64(t.RowBytes(cols))
	if t.Kind() != quant.Float {
		l := layoutOf(t)
		room := (int64(rows)*int64(cols/l.unit) + 15) &^ 7
		size = room * 16 * int64(l.quads)
		if l.fifths {
			size += (4*room + 15) &^ 15
		}
		if l.scale > 0 {
			size += (room/int64(l.units)*int64(l.scale) + 15) &^ 15
		}
	}
	return (size + held.Align - 1) &^ (held.Align - 1)
}

type planesParams struct {
	groups          [4]uint32
	from, to        uint64
	first, n, units uint32
	_               uint32
}

// planesBlocks: runs of blocks that become planes one by one begin at multiples of it.
const planesBlocks = 64

// planes is the kernel that makes planes of blocks, and its parameters: of n bytes at
// `from`, which lie at an offset of a matrix of `size` bytes, of which each run but the
// last ends at a multiple of planesBlocks.
func planes(t quant.Type, from, to uint64, offset, n, size int) (kernel, planesParams) {
	l := layoutOf(t)
	elems, bytes := t.Block()
	per := elems / l.unit
	p := planesParams{from: from, to: to, first: uint32(offset / bytes * per), n: uint32(n / bytes * per), units: uint32(size / bytes * per)}
	quads := (int(p.n) + 7) &^ 7 * l.quads
	if l.fifths {
		quads += (int(p.n) + 3) / 4
	}
	quads += (n/bytes*l.scale + 15) / 16
	p.groups = [4]uint32{uint32(quads+63) / 64, 1, 1, 0}
	return kernel{shader: "planes", c0: uint32(t)}, p
}
