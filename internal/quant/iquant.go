package quant

import (
	"encoding/binary"
	"math/bits"
)

// The grid formats: 256 elements, eight (IQ2, IQ1) or four (IQ3) at a time an
// index into a table of magnitudes, with signs beside it. A sub-scale s counts
// as s+1/2 times a power of two in ggml; here 2s+1, the rest being in W.

// IQ2_XXS: d f16; for each 32 elements four index bytes and a word of four
// 7-bit signs and a 4-bit scale. Value d/8*(2s+1)*grid*sign.
func unpackIQ2_XXS(b *Block, row []byte, i int) {
	p := (*[66]byte)(row[66*i:])
	b.W = f16At(p[:]) * 0.125
	c := b.codes()
	for k := 0; k < 8; k++ {
		q, word := p[2+8*k:][:4], binary.LittleEndian.Uint32(p[6+8*k:])
		b.scale32(k, 2*int32(word>>28)+1)
		for l, index := range q {
			store8(c[32*k+8*l:], signed(iq2xxsGrid[index], even(word>>(7*l))))
		}
	}
}

// IQ2_XS: d f16; 32 words of a 9-bit index and 7-bit signs; 8 bytes of scales,
// a nibble for each 16 elements. Value d/8*(2s+1)*grid*sign.
func unpackIQ2_XS(b *Block, row []byte, i int) {
	p := (*[74]byte)(row[74*i:])
	b.W = f16At(p[:]) * 0.125
	b.scaleNibbles(p[66:])
	c := b.codes()
	for l := 0; l < 32; l++ {
		q := binary.LittleEndian.Uint16(p[2+2*l:])
		store8(c[8*l:], signed(iq2xsGrid[q&511], even(uint32(q>>9))))
	}
}

// IQ2_S: d f16; 32 low index bytes, 32 bytes of signs, 8 bytes of high index
// pairs, 8 bytes of scales as in IQ2_XS. Value d/8*(2s+1)*grid*sign.
func unpackIQ2_S(b *Block, row []byte, i int) {
	p := (*[82]byte)(row[82*i:])
	b.W = f16At(p[:]) * 0.125
	b.scaleNibbles(p[74:])
	c := b.codes()
	for l := 0; l < 32; l++ {
		index := uint(p[2+l]) | uint(p[66+l/4])>>(l%4*2)&3<<8
		store8(c[8*l:], signed(iq2sGrid[index], p[34+l]))
	}
}

// IQ3_XXS: d f16; 64 index bytes; for each 32 elements a word of four 7-bit
// signs and a 4-bit scale. Value d/4*(2s+1)*grid*sign.
func unpackIQ3_XXS(b *Block, row []byte, i int) {
	p := (*[98]byte)(row[98*i:])
	b.W = f16At(p[:]) * 0.25
	c := b.codes()
	for k := 0; k < 8; k++ {
		q, word := p[2+8*k:][:8], binary.LittleEndian.Uint32(p[66+4*k:])
		b.scale32(k, 2*int32(word>>28)+1)
		for l := 0; l < 4; l++ {
			grid := uint64(iq3xxsGrid[q[2*l]]) | uint64(iq3xxsGrid[q[2*l+1]])<<32
			store8(c[32*k+8*l:], signed(grid, even(word>>(7*l))))
		}
	}
}

// IQ3_S: d f16; 64 low index bytes, 8 bytes of high index bits, 32 bytes of
// signs, 4 bytes of scales, a nibble for each 32 elements. Value d*(2s+1)*grid*sign.
func unpackIQ3_S(b *Block, row []byte, i int) {
	p := (*[110]byte)(row[110*i:])
	b.W = f16At(p[:])
	c := b.codes()
	for k := 0; k < 8; k++ {
		q, high, signs := p[2+8*k:][:8], uint(p[66+k]), p[74+4*k:][:4]
		b.scale32(k, 2*int32(p[106+k/2]>>(k%2*4)&15)+1)
		for l, sign := range signs {
			first := uint(q[2*l]) | high>>(2*l)&1<<8
			second := uint(q[2*l+1]) | high>>(2*l+1)&1<<8
			grid := uint64(iq3sGrid[first]) | uint64(iq3sGrid[second])<<32
			store8(c[32*k+8*l:], signed(grid, sign))
		}
	}
}

// IQ1_S: d f16; 32 low index bytes; for each 32 elements a word of four 3-bit
// high indices, a 3-bit scale, and the sign of the delta of 1/8.
// Value d*(2s+1)*(grid + delta), here d/8*(2s+1)*(8*grid +- 1).
func unpackIQ1_S(b *Block, row []byte, i int) {
	p := (*[50]byte)(row[50*i:])
	b.W = f16At(p[:]) * 0.125
	c := b.codes()
	for k := 0; k < 8; k++ {
		q, word := p[2+4*k:][:4], uint(binary.LittleEndian.Uint16(p[34+2*k:]))
		b.scale32(k, 2*int32(word>>12&7)+1)
		n := 8 + word>>15<<1 // the table holds 8*grid + 9
		for l, low := range q {
			index := uint(low) | word>>(3*l)&7<<8
			store8(c[32*k+8*l:], minus(iq1Grid[index], uint64(n)))
		}
	}
}

// IQ1_M: 32 low index bytes; 16 bytes, a nibble for each 8 elements, of a 3-bit
// high index and the sign of the delta; four words, each of four 3-bit scales
// and, on top, a quarter of the f16 d. Value as IQ1_S.
func unpackIQ1_M(b *Block, row []byte, i int) {
	p := (*[56]byte)(row[56*i:])
	b.W = FromF16(iq1mScale(p[48:])) * 0.125
	for g := range b.Scale {
		word := binary.LittleEndian.Uint16(p[48+g/4*2:])
		b.Scale[g] = 2*int32(word>>(g%4*3)&7) + 1
	}
	c := b.codes()
	for l := 0; l < 32; l++ {
		nibble := uint(p[32+l/2]) >> (l % 2 * 4) & 15
		n := 8 + nibble>>3<<1 // the table holds 8*grid + 9
		store8(c[8*l:], minus(iq1Grid[uint(p[l])|nibble&7<<8], uint64(n)))
	}
}

// iq1mScale gathers the f16 from the top nibbles of four words, lowest first.
func iq1mScale(s []byte) uint16 {
	_ = s[7]
	return uint16(s[1]>>4) | uint16(s[3]>>4)<<4 | uint16(s[5]>>4)<<8 | uint16(s[7]>>4)<<12
}

// scale32 gives scale s to the k-th 32 elements.
func (b *Block) scale32(k int, s int32) { b.Scale[2*k&15], b.Scale[2*k&15+1] = s, s }

// scaleNibbles gives 2s+1 to each 16 elements, for the nibbles s of 8 bytes, low first.
func (b *Block) scaleNibbles(s []byte) {
	for k, x := range s[:8] {
		b.Scale[2*k], b.Scale[2*k+1] = 2*int32(x&15)+1, 2*int32(x>>4)+1
	}
}

// signed negates byte k of a grid, each 1..127, where bit k of signs is set.
func signed(grid uint64, signs uint8) uint64 {
	s := bits8(signs)
	return (grid ^ s*255) + s
}

// even completes seven signs by the eighth that makes their number even.
func even(s uint32) uint8 {
	s &= 127
	return uint8(s) | uint8(bits.OnesCount8(uint8(s)))<<7
}
