package quant

import "math"

// The small float formats, by integers alone: no table, no hardware
// conversion, so that a device that flushes subnormals sees the same numbers.

// FromF16 is the value of an IEEE 754 binary16, exactly; subnormals,
// infinities and the payloads of NaNs are kept.
func FromF16(h uint16) float32 {
	sign, a := uint32(h&0x8000)<<16, uint32(h&0x7fff)
	switch {
	case a < 0x0400: // zero or subnormal: a whole number of 2^-24
		return math.Float32frombits(sign | math.Float32bits(float32(a)*0x1p-24))
	case a < 0x7c00:
		return math.Float32frombits(sign | a<<13 + 112<<23)
	default:
		return math.Float32frombits(sign | a<<13 | 0x7f800000)
	}
}

// ToF16 rounds x to binary16, to nearest even. From 65520 on the result is an
// infinity; a NaN stays one.
func ToF16(x float32) uint16 {
	b := math.Float32bits(x)
	sign, a := uint16(b>>16)&0x8000, b&0x7fffffff
	switch {
	case a > 0x7f800000: // NaN, made quiet
		return sign | 0x7e00 | uint16(a>>13)&0x03ff
	case a >= 0x477ff000: // 65520: half way from 65504 to 65536
		return sign | 0x7c00
	case a >= 0x38800000: // 2^-14: normal
		a += 0x0fff + a>>13&1
		return sign | uint16((a-112<<23)>>13)
	case a > 0x33000000: // 2^-25, whose tie goes to zero: a whole number of 2^-24
		m, shift := a&0x7fffff|0x800000, 126-a>>23
		m += 1<<(shift-1) - 1 + m>>shift&1
		return sign | uint16(m>>shift)
	default:
		return sign
	}
}

// ToF16Saturate is ToF16, except that a finite x beyond the range becomes the
// largest binary16 of its sign, +-65504. The key-value cache stores so.
func ToF16Saturate(x float32) uint16 {
	h := ToF16(x)
	if h&0x7fff == 0x7c00 && math.Float32bits(x)&0x7fffffff != 0x7f800000 {
		h-- // the infinity's neighbour
	}
	return h
}

// FromBF16 is the value of a bfloat16, exactly.
func FromBF16(h uint16) float32 { return math.Float32frombits(uint32(h) << 16) }

// ToBF16 rounds x to bfloat16, to nearest even; beyond the range it gives an
// infinity, and a NaN stays one.
func ToBF16(x float32) uint16 {
	b := math.Float32bits(x)
	if b&0x7fffffff > 0x7f800000 {
		return uint16(b>>16) | 0x0040 // made quiet
	}
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}

// FromE8M0 is the value of an OCP MX scale: 2^(e-127), and NaN for 255
// (Microscaling Formats specification 1.0, section 5.4.1).
func FromE8M0(e uint8) float32 {
	switch e {
	case 0:
		return 0x1p-127
	case 255:
		return float32(math.NaN())
	default:
		return math.Float32frombits(uint32(e) << 23)
	}
}

// FromUE4M3 is the value of a scale of NVFP4, an FP8 E4M3 without its sign
// (bit 7 is not looked at): bias 7, subnormals, no infinity, NaN for 0x7f.
func FromUE4M3(c uint8) float32 {
	a := uint32(c & 0x7f)
	switch {
	case a < 8: // zero or subnormal: a whole number of 2^-9
		return float32(a) * 0x1p-9
	case a < 0x7f:
		return math.Float32frombits(a<<20 + 120<<23)
	default:
		return float32(math.NaN())
	}
}
