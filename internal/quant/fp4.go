package quant

import "math"

// Formats whose nibbles are numbers of a table. In each, byte j of 16 (NVFP4:
// of 8) holds element j low and the element half a block on high.

// fp4Values are the doubled values of E2M1 (OCP Microscaling 1.0, table 5).
var fp4Values = [16]int8{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}

// iq4Values is the table of IQ4_NL and IQ4_XS, of the GGML ecosystem.
var iq4Values = [16]int8{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}

// IQ4_NL: d f16, 16 bytes of nibbles. Value d*table[q].
func unpackIQ4_NL(b *Block, row []byte, i int) {
	p := (*[18]byte)(row[18*i:])
	b.W = f16At(p[:])
	lookup32((*[32]int8)(b.Code[:]), (*[16]byte)(p[2:]), &iq4Values)
}

// MXFP4: an E8M0 exponent e, 16 bytes of nibbles. Value 2^(e-128)*table[q], and
// +0 for e < 83, whose scale is below what the arithmetic knows.
func unpackMXFP4(b *Block, row []byte, i int) {
	p := (*[17]byte)(row[17*i:])
	b.W = 0
	if p[0] >= 83 {
		b.W = mxfp4Scale(p[0])
	}
	lookup32((*[32]int8)(b.Code[:]), (*[16]byte)(p[1:]), &fp4Values)
}

// mxfp4Scale is 2^(e-128), the scale of the doubled values; subnormal for e < 2.
func mxfp4Scale(e uint8) float32 {
	if e < 2 {
		return math.Float32frombits(0x00200000 << e)
	}
	return math.Float32frombits(uint32(e-1) << 23)
}

// NVFP4: 64 elements: four UE4M3 scales, one for each 16, and four times 8
// bytes of nibbles. Value scale/2*table[q]. Activation block i is half i%2.
func unpackNVFP4(b *Block, row []byte, i int) {
	p, half := (*[36]byte)(row[36*(i/2):]), i%2
	b.W, b.W2 = FromUE4M3(p[2*half])*0.5, FromUE4M3(p[2*half+1])*0.5
	q, c := p[4+16*half:][:16], &b.Code
	for j, x := range q[:8] {
		c[j], c[j+8] = fp4Values[x&15], fp4Values[x>>4]
	}
	for j, x := range q[8:] {
		c[j+16], c[j+24] = fp4Values[x&15], fp4Values[x>>4]
	}
}

// lookup32 spreads 16 bytes into 32 codes of a table.
func lookup32(c *[32]int8, q *[16]byte, table *[16]int8) {
	for j, x := range q {
		c[j], c[j+16] = table[x&15], table[x>>4]
	}
}
