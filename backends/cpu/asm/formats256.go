package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
)

// A format256 is a weight format, as the kernels of AVX2 read it: 32 codes in a
// register, in natural order. VPMADDUBSW multiplies unsigned codes, at most 63,
// by signed ones; codes of either sign give it their magnitude, and their sign to
// the other factor, so that its 16-bit sums of two products are at most 2*128*127.
type format256 struct {
	name     string
	bytes    int
	act      int
	runs     int // of 32 codes in a block of several, and their bytes
	runBytes int
	d        int // byte of the f16 scale of a block of 256; a min follows it
	bias     int // of unsigned codes
	signed   bool
	kind     byte
	sums32   bool // sub-scales and sub-mins are for groups of 32, not 16

	setup  func()
	code   func(r *rowKernel, k, i int) vec // codes 32*i.. of block k; for blocks of 32, i is 0
	floats func(r *rowKernel) (w, m vec)    // of eight blocks
	// words gives the sub-scales of block k: sixteen, or eight and then as many mins.
	words func(r *rowKernel, k int) vec
	// mins, if not nil, gives sixteen mins after words.
	mins func(r *rowKernel, k int) vec
}

// formats256 are the formats that have kernels of their own.
func formats256() []*format256 {
	return append([]*format256{
		{
			name: "Q8_0", bytes: 34, act: 32, signed: true, kind: ' ', floats: halves256s(0, -1), setup: func() {},
			code: func(r *rowKernel, k, _ int) vec { return load256(r.at(k, 2)) },
		},
		nibbles256("Q4_0", 18, 2, 8, ' ', nil),
		nibbles256("Q4_1", 20, 4, 0, '+', nil),
		nibbles256("IQ4_NL", 18, 2, 0, ' ', iq4Codes),
		mxfp4By256(),
		fives256("Q5_0", 22, 2, 16, ' '),
		fives256("Q5_1", 24, 4, 0, '+'),
		q4_KBy256(false),
		q4_KBy256(true),
		q6_KBy256(),
		q3_KBy256(),
		q2_KBy256(),
		iq4_XSBy256(),
		unpackedBy256(),
	}, own256()...)
}

func load256(m Mem) vec {
	y := YMM()
	VMOVDQU(m, y)
	return y
}

// halves256 decodes the f16 at byte b of each of the eight blocks.
func (r *rowKernel) halves256(b int) vec {
	lo, hi, f := XMM(), XMM(), YMM()
	VPXOR(lo, lo, lo)
	VPXOR(hi, hi, hi)
	for k := range 4 {
		VPINSRW(Imm(uint64(k)), r.at(k, b), lo, lo)
		VPINSRW(Imm(uint64(k)), r.at(k+4, b), hi, hi)
	}
	VPUNPCKLQDQ(hi, lo, lo)
	VCVTPH2PS(lo, f)
	return f
}

func halves256s(d, m int) func(r *rowKernel) (vec, vec) {
	return func(r *rowKernel) (vec, vec) {
		if m < 0 {
			return r.halves256(d), nil
		}
		return r.halves256(d), r.halves256(m)
	}
}

// spreadNibbles gives the low nibbles of 16 bytes, then the high ones.
func spreadNibbles(m Mem) vec {
	y := YMM()
	VBROADCASTI128(m, y)
	VPSRLVQ(qwords(0, 0, 4, 4), y, y)
	VPAND(bytes(15), y, y)
	return y
}

func nibbles256(name string, size, q, bias int, kind byte, values []int) *format256 {
	m := -1
	if kind == '+' {
		m = 2
	}
	var look vec
	return &format256{
		name: name, bytes: size, act: 32, bias: bias, signed: values != nil && bias == 0, kind: kind, floats: halves256s(0, m),
		setup: func() {
			if values != nil {
				look = ymm(table(bias, values...))
			}
		},
		code: func(r *rowKernel, k, _ int) vec {
			y := spreadNibbles(r.at(k, q))
			if values != nil {
				VPSHUFB(y, look, y)
			}
			return y
		},
	}
}

func mxfp4By256() *format256 {
	f := nibbles256("MXFP4", 17, 1, 16, ' ', fp4Codes)
	f.floats = func(r *rowKernel) (vec, vec) {
		x, e, keep := XMM(), YMM(), YMM()
		VPXOR(x, x, x)
		for k := range 8 {
			VPINSRB(Imm(uint64(k)), r.at(k, 0), x, x)
		}
		VPMOVZXBD(x, e)
		VPCMPGTD(dwords(82), e, keep) // e >= 83
		VPSUBD(dwords(1), e, e)
		VPSLLD(Imm(23), e, e)
		VPAND(keep, e, e)
		return e, nil
	}
	return f
}

func fives256(name string, size, high, bias int, kind byte) *format256 {
	f := nibbles256(name, size, high+4, bias, kind, nil)
	code := f.code
	f.code = func(r *rowKernel, k, _ int) vec {
		y, h := code(r, k, 0), YMM()
		VPBROADCASTD(r.at(k, high), h)
		VPSHUFB(constant(64, func(i int) byte { return byte(i % 32 / 8) }), h, h)
		VPAND(bytes(1, 2, 4, 8, 16, 32, 64, 128), h, h)
		VPCMPEQB(bytes(1, 2, 4, 8, 16, 32, 64, 128), h, h)
		VPAND(bytes(16), h, h)
		VPOR(h, y, y)
		return y
	}
	return f
}

// shifted moves bit from of each byte to bit to, among others of no interest.
func shifted(y vec, from, to int) {
	if from < to {
		VPSLLW(Imm(uint64(to-from)), y, y)
	} else if from > to {
		VPSRLW(Imm(uint64(from-to)), y, y)
	}
}

func q4_KBy256(five bool) *format256 {
	f := &format256{name: "Q4_K", bytes: 144, act: 256, kind: '-', sums32: true, d: 0, floats: halves256s(0, 2), setup: func() {}}
	q := 16
	if five {
		f.name, f.bytes, q = "Q5_K", 176, 48
	}
	f.code = func(r *rowKernel, k, i int) vec {
		y := load256(r.at(k, q+i/2*32))
		shifted(y, i%2*4, 0)
		VPAND(bytes(15), y, y)
		if five {
			h := load256(r.at(k, 16))
			shifted(h, i, 4)
			VPAND(bytes(16), h, h)
			VPOR(h, y, y)
		}
		return y
	}
	f.words = func(r *rowKernel, k int) vec {
		x, low, high, w := XMM(), XMM(), XMM(), YMM()
		VMOVDQU(r.at(k, 0), x)
		// dwords of x: d and dmin; low scales; low mins; the nibbles of both
		VPSHUFD(Imm(1|3<<2|2<<4|3<<6), x, low)
		VPSHUFD(Imm(1|1<<2|2<<4|2<<6), x, high)
		VPSRLVD(dwords(0, 0, 0, 4), low, low)
		VPSRLD(Imm(2), high, high)
		VPAND(dwords(0x3f3f3f3f, 0x0f0f0f0f), low, low)
		VPAND(dwords(0, 0x30303030), high, high)
		VPOR(high, low, low)
		VPMOVZXBW(low, w)
		return w
	}
	return f
}

func q6_KBy256() *format256 {
	return &format256{
		name: "Q6_K", bytes: 210, d: 208, act: 256, bias: 32, kind: ' ', floats: halves256s(208, -1), setup: func() {},
		code: func(r *rowKernel, k, i int) vec {
			y, h := load256(r.at(k, i/4*64+i%2*32)), load256(r.at(k, 128+i/4*32))
			shifted(y, i%4/2*4, 0)
			VPAND(bytes(15), y, y)
			shifted(h, i%4*2, 4)
			VPAND(bytes(0x30), h, h)
			VPOR(h, y, y)
			return y
		},
		words: func(r *rowKernel, k int) vec {
			w := YMM()
			VPMOVSXBW(r.at(k, 192), w)
			return w
		},
	}
}

func q3_KBy256() *format256 {
	return &format256{
		name: "Q3_K", bytes: 110, d: 108, act: 256, bias: 4, kind: ' ', floats: halves256s(108, -1), setup: func() {},
		code: func(r *rowKernel, k, i int) vec {
			y, h := load256(r.at(k, 32+i/4*32)), load256(r.at(k, 0))
			shifted(y, i%4*2, 0)
			VPAND(bytes(3), y, y)
			shifted(h, i, 2)
			VPAND(bytes(4), h, h)
			VPOR(h, y, y)
			return y
		},
		words: func(r *rowKernel, k int) vec {
			w, x, h := YMM(), XMM(), XMM()
			VMOVDQU(r.at(k, 94), x) // the twelve bytes of the scales are its third to 14th
			VPSHUFB(bytes(10, 11, 12, 13), x, h)
			VPSHUFB(bytes(2, 3, 4, 5, 6, 7, 8, 9), x, x)
			VPSRLVQ(qwords(0, 4), x, x)
			VPSRLVD(dwords(0, 2, 4, 6), h, h)
			VPAND(bytes(15), x, x)
			VPAND(bytes(3), h, h)
			VPSLLW(Imm(4), h, h)
			VPOR(h, x, x)
			VPSUBB(bytes(32), x, x)
			VPMOVSXBW(x, w)
			return w
		},
	}
}

func q2_KBy256() *format256 {
	return &format256{
		name: "Q2_K", bytes: 84, d: 80, act: 256, kind: '-', floats: halves256s(80, 82), setup: func() {},
		code: func(r *rowKernel, k, i int) vec {
			y := load256(r.at(k, 16+i/4*32))
			shifted(y, i%4*2, 0)
			VPAND(bytes(3), y, y)
			return y
		},
		words: func(r *rowKernel, k int) vec {
			w := YMM()
			VPMOVZXBW(r.at(k, 0), w)
			VPAND(bytes(15), w, w)
			return w
		},
		mins: func(r *rowKernel, k int) vec {
			w := YMM()
			VPMOVZXBW(r.at(k, 0), w)
			VPSRLW(Imm(4), w, w)
			return w
		},
	}
}

func iq4_XSBy256() *format256 {
	var look vec
	return &format256{
		name: "IQ4_XS", bytes: 136, act: 256, signed: true, kind: ' ', floats: halves256s(0, -1),
		setup: func() { look = ymm(table(0, iq4Codes...)) },
		code: func(r *rowKernel, k, i int) vec {
			y := spreadNibbles(r.at(k, 8+16*i))
			VPSHUFB(y, look, y)
			return y
		},
		words: func(r *rowKernel, k int) vec {
			s, h := YMM(), YMM()
			VPBROADCASTD(r.at(k, 4), s)
			VPBROADCASTW(r.at(k, 2), h)
			VPSRLVD(dwords(0, 4, 8, 12, 16, 20, 24, 28), s, s)
			VPSRLVD(dwords(0, 2, 4, 6, 8, 10, 12, 14), h, h)
			VPAND(dwords(15), s, s)
			VPAND(dwords(3), h, h)
			VPSLLD(Imm(4), h, h)
			VPOR(h, s, s)
			VPSUBD(dwords(32), s, s)
			VPSHUFB(bytes(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13), s, s)
			return s
		},
	}
}

func unpackedBy256() *format256 {
	return &format256{
		name: "Block", bytes: 396, act: 256, signed: true, kind: ' ', setup: func() {},
		code: func(r *rowKernel, k, i int) vec { return load256(r.at(k, 32*i)) },
		words: func(r *rowKernel, k int) vec {
			w := load256(r.at(k, 256))
			VPACKSSDW(r.at(k, 256+32), w, w) // sub-scales are far below 2^15
			VPERMQ(Imm(0|2<<2|1<<4|3<<6), w, w)
			return w
		},
		floats: func(r *rowKernel) (vec, vec) {
			y := YMM()
			var half [2]vec
			for h := range half {
				half[h] = XMM()
				VMOVSS(r.at(4*h, 384), half[h])
				for i := 1; i < 4; i++ {
					VINSERTPS(Imm(uint64(i<<4)), r.at(4*h+i, 384), half[h], half[h])
				}
			}
			VINSERTF128(Imm(1), half[1], half[0].AsY(), y)
			return y, nil
		},
	}
}
