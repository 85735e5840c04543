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
	case IQ4_NL:
		return unpackIQ4_NL
	case MXFP4:
		return unpackMXFP4
	case NVFP4:
		return unpackNVFP4
	case Q2_K:
		return unpackQ2_K
	case Q3_K:
		return unpackQ3_K
	case Q4_K:
		return unpackQ4_K
	case Q5_K:
		return unpackQ5_K
	case Q6_K:
		return unpackQ6_K
	case IQ4_XS:
		return unpackIQ4_XS
	case IQ2_XXS:
		return unpackIQ2_XXS
	case IQ2_XS:
		return unpackIQ2_XS
	case IQ2_S:
		return unpackIQ2_S
	case IQ3_XXS:
		return unpackIQ3_XXS
	case IQ3_S:
		return unpackIQ3_S
	case IQ1_S:
		return unpackIQ1_S
	case IQ1_M:
		return unpackIQ1_M
	case TQ1_0:
		return unpackTQ1_0
	case TQ2_0:
		return unpackTQ2_0
	case INT4_32:
		return unpackINT4_32
	case INT4_128:
		return unpackINT4_128
	case INT4F_32:
		return unpackINT4F_32
	case INT4F_64:
		return unpackINT4F_64
	case INT4F_128:
		return unpackINT4F_128
	case INT8F_32:
		return unpackINT8F_32
	case INT8F_128:
		return unpackINT8F_128
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
	case IQ4_NL:
		unpackIQ4_NL(b, row, i)
	case MXFP4:
		unpackMXFP4(b, row, i)
	case NVFP4:
		unpackNVFP4(b, row, i)
	case Q2_K:
		unpackQ2_K(b, row, i)
	case Q3_K:
		unpackQ3_K(b, row, i)
	case Q4_K:
		unpackQ4_K(b, row, i)
	case Q5_K:
		unpackQ5_K(b, row, i)
	case Q6_K:
		unpackQ6_K(b, row, i)
	case IQ4_XS:
		unpackIQ4_XS(b, row, i)
	case IQ2_XXS:
		unpackIQ2_XXS(b, row, i)
	case IQ2_XS:
		unpackIQ2_XS(b, row, i)
	case IQ2_S:
		unpackIQ2_S(b, row, i)
	case IQ3_XXS:
		unpackIQ3_XXS(b, row, i)
	case IQ3_S:
		unpackIQ3_S(b, row, i)
	case IQ1_S:
		unpackIQ1_S(b, row, i)
	case IQ1_M:
		unpackIQ1_M(b, row, i)
	case TQ1_0:
		unpackTQ1_0(b, row, i)
	case TQ2_0:
		unpackTQ2_0(b, row, i)
	case INT4_32:
		unpackINT4_32(b, row, i)
	case INT4_128:
		unpackINT4_128(b, row, i)
	case INT4F_32:
		unpackINT4F_32(b, row, i)
	case INT4F_64:
		unpackINT4F_64(b, row, i)
	case INT4F_128:
		unpackINT4F_128(b, row, i)
	case INT8F_32:
		unpackINT8F_32(b, row, i)
	case INT8F_128:
		unpackINT8F_128(b, row, i)
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
