package quant

import "encoding/binary"

// The K formats: 256 elements, their sub-scales being integers under one or
// two f16 scales.

// Q2_K: 16 bytes of scale (low) and min (high), 64 bytes of 2-bit codes, d and
// dmin f16. Byte l of a half's 32 holds elements l, l+32, l+64, l+96 from its
// low bits up. Value d*sc*q - dmin*min.
func unpackQ2_K(b *Block, row []byte, i int) {
	p := (*[84]byte)(row[84*i:])
	b.W, b.MinW = f16At(p[80:]), f16At(p[82:])
	for g, s := range p[:16] {
		b.Scale[g], b.Min[g] = int32(s&15), int32(s>>4)
	}
	c, q := b.codes(), p[16:80]
	for l := 0; l < 32; l += 8 {
		for half := 0; half < 2; half++ {
			x := load8(q[32*half+l:])
			for k := 0; k < 4; k++ {
				store8(c[128*half+32*k+l:], x>>(2*k)&(3*ones))
			}
		}
	}
}

// Q3_K: 32 bytes of high bits, 64 bytes of 2-bit codes as in Q2_K, 12 bytes of
// 6-bit scales, d f16. Bit k of high byte l belongs to element 32*k+l.
// Value d*(sc-32)*(q-4).
func unpackQ3_K(b *Block, row []byte, i int) {
	p := (*[110]byte)(row[110*i:])
	b.W = f16At(p[108:])
	s := p[96:108]
	for g := 0; g < 16; g++ { // low four bits: a nibble of bytes 0..7; high two: of bytes 8..11
		lo := s[g&7] >> (g / 8 * 4) & 15
		hi := s[8+g&3] >> (g / 4 * 2) & 3
		b.Scale[g] = int32(lo|hi<<4) - 32
	}
	c, high, q := b.codes(), p[:32], p[32:96]
	for l := 0; l < 32; l += 8 {
		h := load8(high[l:])
		for half := 0; half < 2; half++ {
			x := load8(q[32*half+l:])
			for k := 0; k < 4; k++ {
				bit := h >> (4*half + k) & ones
				store8(c[128*half+32*k+l:], minus(x>>(2*k)&(3*ones)|bit<<2, 4))
			}
		}
	}
}

// Q4_K: d and dmin f16, 12 bytes of 6-bit scales and mins of 8 groups of 32,
// 128 bytes of nibbles: byte l of each 32 holds elements l (low) and l+32
// (high) of its 64. Value d*sc*q - dmin*min.
func unpackQ4_K(b *Block, row []byte, i int) {
	p := (*[144]byte)(row[144*i:])
	b.W, b.MinW = f16At(p[:]), f16At(p[2:])
	sixes(b, p[4:16])
	c, q := b.codes(), p[16:]
	for l := 0; l < 128; l += 8 {
		x, at := load8(q[l:]), l/32*64+l%32
		store8(c[at:], x&(15*ones))
		store8(c[at+32:], x>>4&(15*ones))
	}
}

// Q5_K: as Q4_K, with 32 bytes of fifth bits before the nibbles: bit k of
// byte l belongs to element 32*k+l. Value d*sc*q - dmin*min.
func unpackQ5_K(b *Block, row []byte, i int) {
	p := (*[176]byte)(row[176*i:])
	b.W, b.MinW = f16At(p[:]), f16At(p[2:])
	sixes(b, p[4:16])
	c, high, q := b.codes(), p[16:48], p[48:]
	for l := 0; l < 32; l += 8 {
		h := load8(high[l:])
		for k := 0; k < 4; k++ {
			x := load8(q[32*k+l:])
			store8(c[64*k+l:], x&(15*ones)|h>>(2*k)&ones<<4)
			store8(c[64*k+32+l:], x>>4&(15*ones)|h>>(2*k+1)&ones<<4)
		}
	}
}

// Q6_K: 128 bytes of low nibbles, 64 bytes of high pairs, 16 int8 scales, d
// f16. In each half of 128, nibble byte l holds element l low and l+64 high (l
// < 64), pair byte l those of l, l+32, l+64, l+96. Value d*sc*(q-32).
func unpackQ6_K(b *Block, row []byte, i int) {
	p := (*[210]byte)(row[210*i:])
	b.W = f16At(p[208:])
	for g, s := range p[192:208] {
		b.Scale[g] = int32(int8(s))
	}
	c := b.codes()
	for half := 0; half < 2; half++ {
		c, low, high := c[128*half:], p[64*half:], p[128+32*half:]
		for l := 0; l < 32; l += 8 {
			x, y, h := load8(low[l:]), load8(low[32+l:]), load8(high[l:])
			store8(c[l:], minus(x&(15*ones)|h&(3*ones)<<4, 32))
			store8(c[32+l:], minus(y&(15*ones)|h>>2&(3*ones)<<4, 32))
			store8(c[64+l:], minus(x>>4&(15*ones)|h>>4&(3*ones)<<4, 32))
			store8(c[96+l:], minus(y>>4&(15*ones)|h>>6&(3*ones)<<4, 32))
		}
	}
}

// IQ4_XS: d f16, the high pairs of 8 scales, 4 bytes of their low nibbles, 128
// bytes of nibbles, 16 for each 32 elements as in IQ4_NL. Value d*(ls-32)*table[q].
func unpackIQ4_XS(b *Block, row []byte, i int) {
	p := (*[136]byte)(row[136*i:])
	b.W = f16At(p[:])
	high := binary.LittleEndian.Uint16(p[2:])
	for k := 0; k < 8; k++ {
		lo, hi := p[4+k/2]>>(k%2*4)&15, high>>(2*k)&3
		s := int32(lo) | int32(hi)<<4
		b.Scale[2*k], b.Scale[2*k+1] = s-32, s-32
	}
	for k := 0; k < 8; k++ {
		lookup32((*[32]int8)(b.Code[32*k:]), (*[16]byte)(p[8+16*k:]), &iq4Values)
	}
}

// sixes spreads 12 bytes into the 6-bit scales and mins of 8 groups of 32.
// Groups 0..3 lie in the low six bits of bytes 0..3 (scales) and 4..7 (mins);
// groups 4..7 in the nibbles of bytes 8..11, their high pairs on top of the first eight.
func sixes(b *Block, s []byte) {
	_ = s[11]
	for k := 0; k < 4; k++ {
		sc, mn, both := int32(s[k]), int32(s[k+4]), int32(s[k+8])
		lo, hi := sc&63, both&15|sc>>6<<4
		b.Scale[2*k], b.Scale[2*k+1], b.Scale[2*k+8], b.Scale[2*k+9] = lo, lo, hi, hi
		lo, hi = mn&63, both>>4|mn>>6<<4
		b.Min[2*k], b.Min[2*k+1], b.Min[2*k+8], b.Min[2*k+9] = lo, lo, hi, hi
	}
}
