package quant

import (
	"encoding/binary"
	"math"
)

// Types of other ecosystems than GGML's, whose codes and scales stand in tensors
// apart; blocks of our own keep them together, so that a row is one run of bytes.
// Their numbers are private.
const (
	// F8_128: rows of FP8-E4M3. A block is a scale f32 and 128 codes; the last of a
	// row may be short, then zeros are behind it.
	F8_128 Type = firstOwn + iota
	// INT4_32: grouped int4. A block is a scale bf16 and 16 bytes of nibbles, of
	// offset 8, in the order of Q4_0: byte j has element j low and j+16 high.
	INT4_32
	// INT4_128: the same with one scale for four runs of 32.
	INT4_128
	// INT4F_32, _64 and _128: the same with a scale f32.
	INT4F_32
	INT4F_64
	INT4F_128
	// INT8F_32 and _128: int8. A block is a scale f32 and the codes.
	INT8F_32
	INT8F_128
)

const firstOwn Type = 1000

// ownLayouts by number from firstOwn on.
var ownLayouts = [...]layout{
	F8_128 - firstOwn:   {"F8_128", 128, 132, 0, Float},
	INT4_32 - firstOwn:  {"INT4_32", 32, 18, 32, Plain},
	INT4_128 - firstOwn: {"INT4_128", 128, 66, 32, Plain},
	INT4F_32 - firstOwn: {"INT4F_32", 32, 20, 32, Plain}, INT4F_64 - firstOwn: {"INT4F_64", 64, 36, 32, Plain},
	INT4F_128 - firstOwn: {"INT4F_128", 128, 68, 32, Plain},
	INT8F_32 - firstOwn:  {"INT8F_32", 32, 36, 32, Plain}, INT8F_128 - firstOwn: {"INT8F_128", 128, 132, 32, Plain},
}

// e4m3 are the values of the codes of FP8-E4M3 (OCP 8-bit floating point 1.0, "FN":
// no infinity, NaN for 0x7f and 0xff).
var e4m3 = func() (v [256]float32) {
	for c := range v {
		if v[c] = FromUE4M3(uint8(c)); c >= 0x80 {
			v[c] = -v[c]
		}
	}
	return v
}()

// F8Weights decodes the first len(dst) elements of a row of F8_128, from a whole
// block on: code times scale, a scale below 2^-45 in size counting as +0.
func F8Weights(dst []float32, row []byte) {
	for ; len(dst) > 0; row = row[132:] {
		scale := tinyScale(math.Float32frombits(binary.LittleEndian.Uint32(row)))
		n := min(len(dst), 128)
		for i, c := range row[4 : 4+n] {
			dst[i] = e4m3[c] * scale
		}
		dst = dst[n:]
	}
}

// tinyScale is +0 for a scale that is below what the arithmetic knows.
func tinyScale(s float32) float32 {
	if math.Float32bits(s)&0x7fffffff < 0x29000000 { // 2^-45
		return 0
	}
	return s
}

func bf16Scale(p []byte) float32 {
	return tinyScale(FromBF16(binary.LittleEndian.Uint16(p)))
}

func unpackINT4_32(b *Block, row []byte, i int) {
	p := (*[18]byte)(row[18*i:])
	b.W = bf16Scale(p[:])
	nibbles8((*[32]byte)(b.codes()[:]), (*[16]byte)(p[2:]))
}

func unpackINT4_128(b *Block, row []byte, i int) {
	p := (*[66]byte)(row[66*(i/4):])
	b.W = bf16Scale(p[:])
	nibbles8((*[32]byte)(b.codes()[:]), (*[16]byte)(p[2+16*(i%4):]))
}

func unpackINT4F_32(b *Block, row []byte, i int)  { unpackINT4F(b, row[20*i:], 0) }
func unpackINT4F_64(b *Block, row []byte, i int)  { unpackINT4F(b, row[36*(i/2):], i%2) }
func unpackINT4F_128(b *Block, row []byte, i int) { unpackINT4F(b, row[68*(i/4):], i%4) }
func unpackINT8F_32(b *Block, row []byte, i int)  { unpackINT8F(b, row[36*i:], 0) }
func unpackINT8F_128(b *Block, row []byte, i int) { unpackINT8F(b, row[132*(i/4):], i%4) }

// unpackINT4F unpacks run i of 32 codes of the block p.
func unpackINT4F(b *Block, p []byte, i int) {
	b.W = tinyScale(math.Float32frombits(binary.LittleEndian.Uint32(p)))
	nibbles8((*[32]byte)(b.codes()[:]), (*[16]byte)(p[4+16*i:]))
}

// unpackINT8F unpacks run i of 32 codes of the block p.
func unpackINT8F(b *Block, p []byte, i int) {
	b.W = tinyScale(math.Float32frombits(binary.LittleEndian.Uint32(p)))
	copy(b.codes()[:32], p[4+32*i:])
}

// nibbles8 spreads 16 bytes into 32 codes, less 8.
func nibbles8(c *[32]byte, q *[16]byte) {
	for k := 0; k < 16; k += 8 {
		x := load8(q[k:])
		store8(c[k:], minus(x&(15*ones), 8))
		store8(c[k+16:], minus(x>>4&(15*ones), 8))
	}
}

// checkF8 finds a scale or a code that is no number.
func checkF8(data []byte) error {
	for i := 0; i*132 < len(data); i++ {
		b := data[132*i : 132*i+132]
		s := math.Float32frombits(binary.LittleEndian.Uint32(b))
		if what := badScale(s); what != "" {
			return &RangeError{F8_128, 128 * i, what}
		}
		for k := 4; k < 132; k += 8 {
			if (load8(b[k:])&(0x7f*ones)+ones)&tops != 0 {
				for b[k]&0x7f != 0x7f {
					k++
				}
				return &RangeError{F8_128, 128*i + k - 4, "weight is NaN"}
			}
		}
	}
	return nil
}

// checkBF16Scales finds a scale that is no number at the head of a block.
func checkBF16Scales(t Type, data []byte) error {
	_, size := t.Block()
	for i := 0; i*size < len(data); i++ {
		if what := badScale(FromBF16(binary.LittleEndian.Uint16(data[i*size:]))); what != "" {
			return &RangeError{t, i, what}
		}
	}
	return nil
}

// checkF32Scales finds a scale that is no number at the head of a block.
func checkF32Scales(t Type, data []byte) error {
	_, size := t.Block()
	for i := 0; i*size < len(data); i++ {
		if what := badScale(math.Float32frombits(binary.LittleEndian.Uint32(data[i*size:]))); what != "" {
			return &RangeError{t, i, what}
		}
	}
	return nil
}

// badScale is what is wrong with a scale; "" if nothing is.
func badScale(s float32) string {
	switch v := math.Abs(float64(s)); {
	case v != v:
		return "scale is NaN"
	case math.IsInf(v, 0):
		return "scale is infinite"
	case v > 0x1p40:
		return "scale is above 2^40"
	}
	return ""
}
