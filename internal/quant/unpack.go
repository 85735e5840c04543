package quant

import (
	"encoding/binary"
	"unsafe"
)

// An Unpacker fills b with activation block i of a weight row.
//
//	row  whole blocks of the type
//	i    0 <= i < len(row)'s elements / t.ActBlock()
//
// Types whose activation block has 32 elements fill Code[:32] and leave Scale
// and Min alone: they count as 1, so that S is one dot product over 32 codes
// and M the sum of 32 activation codes. Types of 256 fill all of Code and
// Scale, and Min where the Kind is Minus. What the Kind does not use (MinW, W2)
// is left alone. Any bytes are taken; Check refuses those that are no numbers.
type Unpacker func(b *Block, row []byte, i int)

// UnpackerFor gives the Unpacker of t; nil for float rows and data.
func UnpackerFor(t Type) Unpacker {
	switch t {
	case Q4_0:
		return unpackQ4_0
	case Q4_1:
		return unpackQ4_1
	case Q5_0:
		return unpackQ5_0
	case Q5_1:
		return unpackQ5_1
	case Q8_0:
		return unpackQ8_0
	}
	return nil
}

// unpack is UnpackerFor(t)(b, row, i) by direct calls, so that b can live on
// the caller's stack.
func unpack(t Type, b *Block, row []byte, i int) {
	switch t {
	case Q4_0:
		unpackQ4_0(b, row, i)
	case Q4_1:
		unpackQ4_1(b, row, i)
	case Q5_0:
		unpackQ5_0(b, row, i)
	case Q5_1:
		unpackQ5_1(b, row, i)
	case Q8_0:
		unpackQ8_0(b, row, i)
	default:
		panic("quant: " + t.String() + " has no blocks to unpack")
	}
}

// Eight codes at a time: a uint64 holds eight bytes in memory order, whatever
// the machine's own order is.
const (
	ones = 0x0101010101010101 // times n: n in each byte
	tops = 0x80 * ones
)

func load8(p []byte) uint64     { return binary.LittleEndian.Uint64(p) }
func store8(p []byte, x uint64) { binary.LittleEndian.PutUint64(p, x) }

// minus subtracts n from each byte of x; bytes of x are 0..127, n is 1..128.
// The borrowed top bit of each byte keeps it from its neighbour.
func minus(x uint64, n uint64) uint64 { return (x | tops) - n*ones ^ tops }

// codes is b.Code as bytes, the same memory.
func (b *Block) codes() *[256]byte { return (*[256]byte)(unsafe.Pointer(&b.Code)) }

// f16At decodes the binary16 at p[0:2].
func f16At(p []byte) float32 { return FromF16(binary.LittleEndian.Uint16(p)) }
