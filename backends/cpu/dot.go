package cpu

import (
	"encoding/binary"
	"unsafe"

	"sluice/internal/quant"
)

// Sums of products of codes, exact in int32, so their order is free: several
// codes share one 64-bit multiplication, each in a field of its own.

// One position: the fields are two codes of a row.
//
// A row's codes, made unsigned by adding 128, are taken eight bytes at a time;
// bytes j and j+4 stand 32 bits apart under pairMask, w0 + w1*2^32. They meet
// x1 + x0*2^32, and the product, modulo 2^64, has w0*x0 + w1*x1 in its upper
// half. The lower halves, w0*x1, are at most 16*255*127 < 2^31 together, so upper
// takes their borrow back exactly.

const (
	pairMask = 0x000000ff000000ff
	flip     = 0x8080808080808080 // adds 128 to eight int8
)

// packPairs fills dst [len(x)/2] from the codes of one position.
func packPairs(dst []uint64, x []int8) {
	for i := 0; i < len(dst); i += 4 {
		d, x := (*[4]uint64)(dst[i:]), (*[8]int8)(x[2*i:])
		for j := range d {
			d[j] = uint64(int64(x[4+j])) + uint64(int64(x[j]))<<32
		}
	}
}

// upper gives the upper half of v, whose lower half is a signed number.
func upper(v uint64) int32 { return int32((v - uint64(int64(int32(v)))) >> 32) }

// pairs16 has in its upper half the sum of (w[i]+128)*x[i].
func pairs16(w *[16]byte, x *[8]uint64) uint64 {
	u := binary.LittleEndian.Uint64(w[:]) ^ flip
	v := binary.LittleEndian.Uint64(w[8:]) ^ flip
	return (u&pairMask)*x[0] + (u>>8&pairMask)*x[1] + ((u>>16&pairMask)*x[2] + (u>>24&pairMask)*x[3]) +
		((v&pairMask)*x[4] + (v>>8&pairMask)*x[5] + ((v>>16&pairMask)*x[6] + (v>>24&pairMask)*x[7]))
}

// codes is b.Code as bytes, the same memory.
func codes(b *quant.Block) *[256]byte { return (*[256]byte)(unsafe.Pointer(&b.Code)) }

// dot16 is the sum of codes times activation codes, whose sum is sum.
func dot16(w *[16]byte, x *[8]uint64, sum int32) int32 { return upper(pairs16(w, x)) - 128*sum }

// dot32 is dot16 of 32 codes.
func dot32(w *[32]byte, x *[16]uint64, sum int32) int32 {
	return upper(pairs16((*[16]byte)(w[:]), (*[8]uint64)(x[:]))+pairs16((*[16]byte)(w[16:]), (*[8]uint64)(x[8:]))) - 128*sum
}

// dot256 is the sum over groups g of Scale[g] * dot16 of the group.
func dot256(b *quant.Block, x *[128]uint64, sum *[16]int32) int32 {
	var s int32
	w := codes(b)
	for g, k := range b.Scale {
		s += k * dot16((*[16]byte)(w[16*g:]), (*[8]uint64)(x[8*g:]), sum[g])
	}
	return s
}

// mins256 is the sum over groups g of Min[g]*sum[g].
func mins256(m, sum *[16]int32) int32 {
	return m[0]*sum[0] + m[1]*sum[1] + m[2]*sum[2] + m[3]*sum[3] +
		(m[4]*sum[4] + m[5]*sum[5] + m[6]*sum[6] + m[7]*sum[7]) +
		(m[8]*sum[8] + m[9]*sum[9] + m[10]*sum[10] + m[11]*sum[11]) +
		(m[12]*sum[12] + m[13]*sum[13] + m[14]*sum[14] + m[15]*sum[15])
}

// Several positions: the fields are the activation codes of three,
// x0 + x1*2^21 + x2*2^42, which meet one code of the row. A sum of 32 products is at most 32*128*127 = 520192 < 2^20 in magnitude and stays in its
// field; split takes the fields apart.

const (
	field     = 21
	fieldHalf = 1 << (field - 1)
	fieldMask = 1<<field - 1
	fieldBias = fieldHalf + fieldHalf<<field + fieldHalf<<(2*field)
)

// pack3 packs three vectors of codes; absent ones are nil and count as zeros.
func pack3(dst []int64, a, b, c []int8) {
	a = a[:len(dst)]
	if b == nil {
		for i := range dst {
			dst[i] = int64(a[i])
		}
		return
	}
	b = b[:len(dst)]
	if c == nil {
		for i := range dst {
			dst[i] = int64(a[i]) + int64(b[i])<<field
		}
		return
	}
	c = c[:len(dst)]
	for i := range dst {
		dst[i] = int64(a[i]) + int64(b[i])<<field + int64(c[i])<<(2*field)
	}
}

// split gives the three signed fields of v, each within +-(2^20 - 1).
func split(v int64) (a, b, c int32) {
	u := uint64(v + fieldBias)
	return int32(u&fieldMask) - fieldHalf, int32(u>>field&fieldMask) - fieldHalf, int32(u>>(2*field)) - fieldHalf
}

func dot16x3(w *[16]int8, x *[16]int64) int64 {
	return int64(w[0])*x[0] + int64(w[1])*x[1] + int64(w[2])*x[2] + int64(w[3])*x[3] +
		(int64(w[4])*x[4] + int64(w[5])*x[5] + int64(w[6])*x[6] + int64(w[7])*x[7]) +
		(int64(w[8])*x[8] + int64(w[9])*x[9] + int64(w[10])*x[10] + int64(w[11])*x[11]) +
		(int64(w[12])*x[12] + int64(w[13])*x[13] + int64(w[14])*x[14] + int64(w[15])*x[15])
}

func dot32x3(w *[32]int8, x *[32]int64) (a, b, c int32) {
	return split(dot16x3((*[16]int8)(w[:]), (*[16]int64)(x[:])) + dot16x3((*[16]int8)(w[16:]), (*[16]int64)(x[16:])))
}

func dot256x3(b *quant.Block, x *[256]int64) (s0, s1, s2 int32) {
	for g, k := range b.Scale {
		d0, d1, d2 := split(dot16x3((*[16]int8)(b.Code[16*g:]), (*[16]int64)(x[16*g:])))
		s0 += k * d0
		s1 += k * d1
		s2 += k * d2
	}
	return s0, s1, s2
}

// dotLanes adds w[i]*x[i] to lane i mod 16, i ascending in each lane.
func dotLanes(l *[16]float32, w, x []float32) {
	n := len(w) &^ 15
	x = x[:len(w)]
	// Half of the lanes at a time: eight fit the registers.
	l0, l1, l2, l3, l4, l5, l6, l7 := l[0], l[1], l[2], l[3], l[4], l[5], l[6], l[7]
	for i := 0; i < n; i += 16 {
		w, x := (*[16]float32)(w[i:]), (*[16]float32)(x[i:])
		l0 += float32(w[0] * x[0])
		l1 += float32(w[1] * x[1])
		l2 += float32(w[2] * x[2])
		l3 += float32(w[3] * x[3])
		l4 += float32(w[4] * x[4])
		l5 += float32(w[5] * x[5])
		l6 += float32(w[6] * x[6])
		l7 += float32(w[7] * x[7])
	}
	l[0], l[1], l[2], l[3], l[4], l[5], l[6], l[7] = l0, l1, l2, l3, l4, l5, l6, l7
	l0, l1, l2, l3, l4, l5, l6, l7 = l[8], l[9], l[10], l[11], l[12], l[13], l[14], l[15]
	for i := 0; i < n; i += 16 {
		w, x := (*[16]float32)(w[i:]), (*[16]float32)(x[i:])
		l0 += float32(w[8] * x[8])
		l1 += float32(w[9] * x[9])
		l2 += float32(w[10] * x[10])
		l3 += float32(w[11] * x[11])
		l4 += float32(w[12] * x[12])
		l5 += float32(w[13] * x[13])
		l6 += float32(w[14] * x[14])
		l7 += float32(w[15] * x[15])
	}
	l[8], l[9], l[10], l[11], l[12], l[13], l[14], l[15] = l0, l1, l2, l3, l4, l5, l6, l7
	for i := n; i < len(w); i++ {
		l[i&15] += float32(w[i] * x[i])
	}
}
