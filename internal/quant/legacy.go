package quant

import "encoding/binary"

// The first formats of ggml: 32 elements under one scale. Where codes are
// nibbles, byte j holds element j low and element j+16 high.

// Q4_0: d f16, 16 bytes of nibbles. Value (q-8)*d.
func unpackQ4_0(b *Block, row []byte, i int) {
	p := (*[18]byte)(row[18*i:])
	b.W = f16At(p[:])
	nibbles32(b.codes(), p[2:], 8)
}

// Q4_1: d and m f16, 16 bytes of nibbles. Value q*d + m.
func unpackQ4_1(b *Block, row []byte, i int) {
	p := (*[20]byte)(row[20*i:])
	b.W, b.MinW = f16At(p[:]), f16At(p[2:])
	nibbles32(b.codes(), p[4:], 0)
}

// Q5_0: d f16, 4 bytes with the fifth bits, 16 bytes of nibbles. Value (q-16)*d.
func unpackQ5_0(b *Block, row []byte, i int) {
	p := (*[22]byte)(row[22*i:])
	b.W = f16At(p[:])
	fives32(b.codes(), p[2:], 16)
}

// Q5_1: d and m f16, 4 bytes with the fifth bits, 16 bytes of nibbles. Value q*d + m.
func unpackQ5_1(b *Block, row []byte, i int) {
	p := (*[24]byte)(row[24*i:])
	b.W, b.MinW = f16At(p[:]), f16At(p[2:])
	fives32(b.codes(), p[4:], 0)
}

// Q8_0: d f16, 32 int8. Value q*d.
func unpackQ8_0(b *Block, row []byte, i int) {
	p := (*[34]byte)(row[34*i:])
	b.W = f16At(p[:])
	copy(b.codes()[:32], p[2:])
}

// nibbles32 spreads 16 bytes into 32 codes, less n each.
func nibbles32(c *[256]byte, q []byte, n uint64) {
	_ = q[15]
	for j := 0; j < 16; j += 8 {
		x := load8(q[j:])
		store8(c[j:], minus(x&(0x0f*ones), n))
		store8(c[j+16:], minus(x>>4&(0x0f*ones), n))
	}
}

// fives32 is nibbles32 with bit k of q's first four bytes as the fifth bit of code k.
func fives32(c *[256]byte, q []byte, n uint64) {
	_ = q[19]
	h := binary.LittleEndian.Uint32(q)
	for j := 0; j < 16; j += 8 {
		x := load8(q[4+j:])
		store8(c[j:], minus(x&(0x0f*ones)|bits8(uint8(h>>j))<<4, n))
		store8(c[j+16:], minus(x>>4&(0x0f*ones)|bits8(uint8(h>>(j+16)))<<4, n))
	}
}

// bits8 spreads the bits of x: byte k of the result is bit k.
func bits8(x uint8) uint64 {
	y := uint64(x) * ones & 0x8040201008040201 // byte k keeps bit k alone
	return (y + 0x7f*ones) >> 7 & ones         // whose presence sets the byte's top bit
}
