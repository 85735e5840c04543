package quant

import (
	"encoding/binary"
	"fmt"
	"math"
)

// Encode quantizes src into blocks of t: F32, F16, BF16, Q8_0, Q4_0, Q4_K,
// Q6_K or MXFP4; other types are an error.
//
//	dst  t.RowBytes(len(src)) bytes, out
//	src  whole blocks of t
//
// Values that Check would refuse in a file, or whose scale is more than t can
// hold, are an error (the values as a *RangeError), and dst means nothing then.
// The result does not depend on the machine. Wrong lengths panic.
func Encode(t Type, dst []byte, src []float32) error {
	elems, size := t.Block()
	encode := encoderFor(t)
	if encode == nil {
		return fmt.Errorf("quant: there is no encoder for %v: use F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q6_K or MXFP4", t)
	}
	if len(src)%elems != 0 || len(dst) != len(src)/elems*size {
		panic(fmt.Sprintf("quant: Encode of %d %v elements into %d bytes", len(src), t, len(dst)))
	}
	for i, x := range src {
		if !(x >= -0x1p50 && x <= 0x1p50) {
			return &RangeError{F32, i, fmt.Sprintf("weight %g is not within 2^50", x)}
		}
	}
	for i := 0; i < len(src)/elems; i++ {
		if !encode(dst[size*i:size*(i+1)], src[elems*i:elems*(i+1)]) {
			return fmt.Errorf("quant: encode %v: the values from %d on, such as %g, need more than its scale holds: use BF16 or F32", t, elems*i, extreme(src[elems*i:elems*(i+1)]))
		}
	}
	return nil
}

// CanEncode says whether Encode has an encoder for t.
func CanEncode(t Type) bool { return encoderFor(t) != nil }

// encoderFor gives the encoder of one block, which says whether the values are
// within what the type can hold.
func encoderFor(t Type) func(dst []byte, src []float32) bool {
	switch t {
	case F32:
		return encodeF32
	case F16:
		return encodeF16
	case BF16:
		return encodeBF16
	case Q8_0:
		return encodeQ8_0
	case Q4_0:
		return encodeQ4_0
	case Q4_K:
		return encodeQ4_K
	case Q6_K:
		return encodeQ6_K
	case MXFP4:
		return encodeMXFP4
	}
	return nil
}

func encodeF32(dst []byte, src []float32) bool {
	binary.LittleEndian.PutUint32(dst, math.Float32bits(src[0]))
	return true
}

func encodeF16(dst []byte, src []float32) bool { _, ok := putF16(dst, src[0]); return ok }

func encodeBF16(dst []byte, src []float32) bool {
	binary.LittleEndian.PutUint16(dst, ToBF16(src[0]))
	return true
}

func encodeQ8_0(dst []byte, src []float32) bool {
	d, ok := putF16(dst, abs(extreme(src))/127)
	id := inverse(d)
	for j, x := range src {
		dst[2+j] = byte(round(x*id, -127, 127))
	}
	return ok
}

func encodeQ4_0(dst []byte, src []float32) bool {
	d, ok := putF16(dst, fitScale(src, 8))
	id := inverse(d)
	for j := 0; j < 16; j++ {
		lo, hi := round(src[j]*id, -8, 7)+8, round(src[j+16]*id, -8, 7)+8
		dst[2+j] = byte(lo | hi<<4)
	}
	return ok
}

// encodeQ4_K fits each group of 32 by itself, then rounds the eight scales and
// mins to 6 bits of the largest, and the codes last, to what then stands.
func encodeQ4_K(dst []byte, src []float32) bool {
	var scales, mins [8]float32
	var topScale, topMin float32
	for k := range scales {
		scales[k], mins[k] = fitAffine(src[32*k:32*(k+1)], 15)
		topScale, topMin = max(topScale, scales[k]), max(topMin, mins[k])
	}
	d, ok := putF16(dst, topScale/63)
	m, okMin := putF16(dst[2:], topMin/63)
	id, im := inverse(d), inverse(m)
	s, q := dst[4:16], dst[16:144]
	clear(dst[4:144])
	for k := range scales {
		sc, mn := round(scales[k]*id, 0, 63), round(mins[k]*im, 0, 63)
		if k < 4 {
			s[k] |= byte(sc)
			s[k+4] |= byte(mn)
		} else {
			s[k+4] = byte(sc&15 | mn&15<<4)
			s[k-4] |= byte(sc >> 4 << 6)
			s[k] |= byte(mn >> 4 << 6)
		}
		step, low := inverse(d*float32(sc)), float32(m*float32(mn))
		for l, x := range src[32*k : 32*(k+1)] {
			q[k/2*32+l] |= byte(round((x+low)*step, 0, 15) << (k % 2 * 4))
		}
	}
	return ok && okMin
}

// encodeQ6_K fits each group of 16 by itself, then rounds the scales to 8 bits
// of the largest, which becomes -128, and the codes last.
func encodeQ6_K(dst []byte, src []float32) bool {
	var scales [16]float32
	for g := range scales {
		scales[g] = fitScale(src[16*g:16*(g+1)], 32)
	}
	d, ok := putF16(dst[208:], extreme(scales[:])/-128)
	id := inverse(d)
	clear(dst[:192])
	for g := range scales {
		sc := round(scales[g]*id, -128, 127)
		dst[192+g] = byte(sc)
		step := inverse(d * float32(sc))
		for l, x := range src[16*g : 16*(g+1)] {
			c := round(x*step, -32, 31) + 32
			half, at := g/8, g%8*16+l // at: 0..127 in its half
			dst[64*half+at%64] |= byte(c & 15 << (at / 64 * 4))
			dst[128+32*half+at%32] |= byte(c >> 4 << (at / 32 * 2))
		}
	}
	return ok
}

// encodeMXFP4 takes the better of two exponents: the one that brings the
// largest value to 4..8, where above 6 it saturates, and the next.
func encodeMXFP4(dst []byte, src []float32) bool {
	_, exp := math.Frexp(float64(abs(extreme(src)))) // below 2^exp, at least 2^(exp-1)
	e := max(exp+124, 83)                            // times 2^(127-e): 4..8; 83 is the smallest scale that counts
	if e > 168 {
		return false
	}
	var codes, other [16]byte
	err := fitFP4(&codes, src, uint8(e))
	if e < 168 && fitFP4(&other, src, uint8(e+1)) < err {
		codes, e = other, e+1
	}
	dst[0] = byte(e)
	copy(dst[1:17], codes[:])
	return true
}

// fitFP4 rounds src to the scale of e and returns the squared error.
func fitFP4(dst *[16]byte, src []float32, e uint8) float64 {
	w := mxfp4Scale(e)
	iw := 1 / w
	var sum float64
	clear(dst[:])
	for j, x := range src {
		a := float32(abs(x) * iw)
		c := 0
		for c < 7 && 2*a > float32(fp4Values[c])+float32(fp4Values[c+1]) {
			c++
		}
		if x < 0 {
			c += 8
		}
		dst[j%16] |= byte(c << (j / 16 * 4))
		e := float64(x) - float64(float32(w*float32(fp4Values[c])))
		sum += float64(e * e)
	}
	return sum
}

// fitScale finds a scale d such that d times integers -n..n-1 comes close to x
// in squares. It tries several grids about the one that puts the largest value
// at -n, and gives each the d that is best for its integers.
func fitScale(x []float32, n int) float32 {
	top := extreme(x)
	if abs(top) < tiny {
		return 0
	}
	var best float32
	var gain float64 // how much of the sum of squares the fit explains
	lo, hi := float32(-n), float32(n-1)
	for k := -8; k <= 8; k++ {
		id := (lo + float32(0.1*float32(k))) / top
		var xq, qq float64
		for _, v := range x {
			q := float64(round(v*id, lo, hi))
			xq += float64(float64(v) * q)
			qq += float64(q * q)
		}
		if g := xq * xq; qq > 0 && g > float64(gain*qq) {
			gain, best = g/qq, float32(xq/qq)
		}
	}
	return best
}

// fitAffine finds d and m, neither below 0, such that d times integers 0..n,
// less m, comes close to x in squares: several grids over the range of x, and
// for each the d and m that are best for its integers.
func fitAffine(x []float32, n float32) (d, m float32) {
	lo, hi := float32(0), x[0]
	var sx float64
	for _, v := range x {
		lo, hi = min(lo, v), max(hi, v)
		sx += float64(v)
	}
	if hi-lo < tiny {
		return 0, -lo
	}
	least := math.Inf(1)
	for k := -8; k <= 12; k++ {
		id := (n + float32(0.1*float32(k))) / (hi - lo)
		var sq, qq, xq float64
		for _, v := range x {
			q := float64(round((v-lo)*id, 0, n))
			sq += q
			qq += float64(q * q)
			xq += float64(float64(v) * q)
		}
		// The line x = a*q - b through the points; where that is none, or b
		// below 0, the line through zero. Some q is n, so qq > 0.
		count := float64(len(x))
		a, b := xq/qq, 0.0
		if det := float64(count*qq) - float64(sq*sq); det > 0 {
			slope := (float64(count*xq) - float64(sq*sx)) / det
			if at0 := (float64(slope*sq) - sx) / count; at0 > 0 {
				a, b = slope, at0
			}
		}
		// The squared error, less the sum of x*x, which is the same for all k.
		err := float64(a*a*qq) - float64(2*a*b*sq) + float64(count*b*b) - float64(2*a*xq) + float64(2*b*sx)
		if a > 0 && err < least {
			least, d, m = err, float32(a), float32(b)
		}
	}
	return d, m
}

// tiny is a value far below the smallest f16 scale times any code, and far
// above what a quotient needs to stay finite.
const tiny = 0x1p-60

// putF16 stores a scale and returns what it decodes to, or false if it overflows.
func putF16(dst []byte, x float32) (float32, bool) {
	h := ToF16(x)
	binary.LittleEndian.PutUint16(dst, h)
	return FromF16(h), h&0x7c00 != 0x7c00
}

// round is the nearest integer to x, within lo..hi, ties to even; |lo|, |hi| < 2^22.
func round(x, lo, hi float32) int {
	x = min(max(x, lo), hi) + 12582912 // 1.5 * 2^23: the last bit is worth 1
	return int(int32(math.Float32bits(x)) - 0x4b400000)
}

// extreme is the value of largest size, with its sign; the first of equals.
func extreme(x []float32) float32 {
	var top float32
	for _, v := range x {
		if abs(v) > abs(top) {
			top = v
		}
	}
	return top
}

// inverse is 1/x, and 0 for 0.
func inverse(x float32) float32 {
	if x == 0 {
		return 0
	}
	return 1 / x
}

func abs(x float32) float32 { return math.Float32frombits(math.Float32bits(x) &^ (1 << 31)) }
