// Package arith has the functions of the one arithmetic (docs/arithmetic.md): the
// same bits on every processor, in place of division, square root and exp.
package arith

import "math"

// The constants of the ranges in which the arithmetic is exact.
const (
	Tiny    = 0x1p-50 // below it, a value counts as +0
	KVTiny  = 0x1p-24 // the same for what a KV cache keeps
	Largest = 0x1p50  // above it, an activation fails the request

	SignMask    = 1 << 31
	TinyBits    = (127 - 50) << 23
	LargestBits = (127 + 50) << 23

	// Rounder is 1.5 * 2^23: adding it to |v| < 2^22 leaves v, rounded half to
	// even, in the low bits of the sum.
	Rounder     = 12582912
	RounderBits = 0x4b400000
)

// Clean gives +0 for |x| < 2^-50 (so for -0 too), else x.
func Clean(x float32) float32 {
	b := math.Float32bits(x)
	if b&^SignMask < TinyBits {
		b = 0
	}
	return math.Float32frombits(b)
}

// Outside says whether x is NaN or above 2^50 in magnitude.
func Outside(x float32) bool { return math.Float32bits(x)&^SignMask > LargestBits }

// Rcp is 1/a for 2^-100 <= a <= 2^100, within 1.16 ulp; exact for powers of two.
func Rcp(a float32) float32 {
	y := math.Float32frombits(0x7ef311c0 - math.Float32bits(a))
	y = float32(y * (2 - float32(a*y)))
	y = float32(y * (2 - float32(a*y)))
	return y + float32(y*(1-float32(a*y)))
}

// Rsqrt is 1/sqrt(a) for 2^-100 <= a <= 2^100, within 1.22 ulp. Rsqrt(0) is
// finite, so that a vector of zeros is normalised to zeros.
func Rsqrt(a float32) float32 {
	h := float32(0.5 * a)
	y := math.Float32frombits(0x5f376380 - math.Float32bits(a)>>1)
	y = float32(y * (1.5 - float32(float32(h*y)*y)))
	y = float32(y * (1.5 - float32(float32(h*y)*y)))
	return y + float32(y*(0.5-float32(float32(h*y)*y)))
}

// Exp is e^x within 0.98 ulp for x in -40..40; +0 below, e^40 above.
func Exp(x float32) float32 {
	if x < -40 {
		return 0
	}
	if x > 40 {
		x = 40
	}
	t := float32(x*0x1.715476p+0) + Rounder // x / ln 2, rounded to a whole number n in the low bits
	n := math.Float32bits(t) - RounderBits
	f := t - Rounder
	r := (x - float32(f*0.693359375)) - float32(f*-0x1.bd0106p-13) // x - n*ln 2, |r| <= ln 2 / 2
	p := float32(0x1.6a241ap-10)
	p = float32(p*r) + 0x1.1239f2p-7
	p = float32(p*r) + 0x1.5558f2p-5
	p = float32(p*r) + 0x1.555492p-3
	p = float32(p*r) + 0x1.fffffcp-2
	p = (float32(float32(r*r)*p) + r) + 1
	return math.Float32frombits(math.Float32bits(p) + n<<23)
}

// Sigmoid is 1/(1+e^-x); at least 2^-57.7 (its value at -40).
func Sigmoid(x float32) float32 { return Rcp(1 + Exp(0-x)) }

// SiLU is x*Sigmoid(x) within 3.2 ulp, and +0 for x < -40.
func SiLU(x float32) float32 {
	if x < -40 {
		return 0
	}
	return float32(x * Sigmoid(x))
}

// Softplus is ln(1+e^x) within 3.12 ulp; +0 for x < -40. With e = e^-|x|, which is
// at most 1, ln(1+e) = 2*atanh(e/(2+e)), whose series ends after six terms: the
// argument is at most 1/3.
func Softplus(x float32) float32 {
	e := Exp(-max(x, -x))
	s := float32(e * Rcp(2+e))
	q := float32(s * s)
	p := float32(0x1.3b13b2p-4) // 1/13
	p = float32(p*q) + 0x1.745d18p-4
	p = float32(p*q) + 0x1.c71c72p-4
	p = float32(p*q) + 0x1.24924ap-3
	p = float32(p*q) + 0x1.99999ap-3
	p = float32(p*q) + 0x1.555556p-2 // 1/3
	t := s + s
	return max(x, 0) + (t + float32(t*float32(q*p)))
}

// Softmax turns finite x, in place, into e^(x-max) over their sum. The sum is
// that of attention: 16 lanes in each chunk of 256, the chunks' sums added in
// ascending order. Empty x is left alone.
func Softmax(x []float32) {
	r := ExpSum(x)
	for i, e := range x {
		x[i] = float32(e * r)
	}
}

// Chunk is the number of keys whose sums are formed apart from the others'.
const Chunk = 256

// ExpSum replaces x by e = exp(x - max) and returns rcp of the sum of e.
func ExpSum(x []float32) float32 {
	if len(x) == 0 {
		return 0
	}
	m := x[0]
	for _, v := range x {
		if v > m {
			m = v
		}
	}
	var sum float32
	for c := 0; c < len(x); c += Chunk {
		var l [16]float32
		for i, v := range x[c:min(c+Chunk, len(x))] {
			e := Exp(v - m)
			x[c+i] = e
			l[i&15] += e
		}
		sum += Tree16(&l)
	}
	return Rcp(sum)
}

// Tree16 adds sixteen lanes: j with j+8, then j+4, j+2, j+1.
func Tree16(l *[16]float32) float32 {
	a0, a1, a2, a3 := l[0]+l[8], l[1]+l[9], l[2]+l[10], l[3]+l[11]
	a4, a5, a6, a7 := l[4]+l[12], l[5]+l[13], l[6]+l[14], l[7]+l[15]
	return ((a0 + a4) + (a2 + a6)) + ((a1 + a5) + (a3 + a7))
}
