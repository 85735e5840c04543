package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// An order is how the codes of 256 elements, eight blocks of 32 or one of 256,
// lie in four registers.
type order int

const (
	natural order = iota
	split32       // first and second halves of 32: 4 first, 4 second, 4 first, 4 second
	pairs32       // groups of 32: 0 2, 1 3, 4 6, 5 7
)

// A format512 is a weight format, as the kernels of AVX-512 read it. Codes are
// unsigned: the bias is what must be taken off them.
type format512 struct {
	name     string
	bytes    int
	act      int
	runs     int // of 32 codes in a block of several, and their bytes
	runBytes int
	order    order
	bias     int
	kind     byte
	sums32   bool // sub-mins are for groups of 32, not 16
	wide     bool // sums of four products may exceed int16

	setup  func()
	codes  func(r *rowKernel, k int) [4]vec // of block k; for blocks of 32: of all eight
	floats func(r *rowKernel) (w, m vec)    // of eight blocks

	// Blocks of 256: the registers that multiply the sums of four products of
	// block k, and what starts its total, from the sums of a position's codes.
	scales func(r *rowKernel, k int) (s [4]vec, start func(sum reg.GPVirtual, total vec))
	// header, if there is one, comes before the blocks, and gives their mins.
	header func(r *rowKernel) (w, m vec, mins []vec)
	// unpack stores the scales and mins of block 0.
	unpack func(r *rowKernel, u *unpacker)
}

// lanes16 is 16 bytes, from byte b of blocks k..k+3, in each 128 bits.
func lanes16(r *rowKernel, k, b int) vec {
	z := ZMM()
	switch r.runs {
	case 4: // they are neighbours
		VMOVDQU32(r.at(k, b), z)
	case 2:
		VBROADCASTI64X4(r.at(k, b), z)
		VINSERTI64X4(Imm(1), r.at(k+2, b), z, z)
	default:
		VBROADCASTI32X4(r.at(k, b), z)
		for i := 1; i < 4; i++ {
			VINSERTI32X4(Imm(uint64(i)), r.at(k+i, b), z, z)
		}
	}
	return z
}

// nibbles gives the low and the high nibbles of z, which is used up.
func nibbles(z, mask vec) (lo, hi vec) {
	hi = ZMM()
	VPSRLW(Imm(4), z, hi)
	VPANDD(mask, z, z)
	VPANDD(mask, hi, hi)
	return z, hi
}

// formats512 are the formats that have kernels of their own.
func formats512() []*format512 {
	return append([]*format512{
		q8_0(),
		halves18(nibbles32("Q4_0", 18, 2, 8, ' ', nil)),
		nibbles32("Q4_1", 20, 4, 0, '+', nil),
		halves18(nibbles32("IQ4_NL", 18, 2, 128, ' ', iq4Codes)),
		mxfp4(),
		fives32("Q5_0", 22, 2, 16, ' '),
		fives32("Q5_1", 24, 4, 0, '+'),
		q4_K(false),
		q4_K(true),
		q6_K(),
		q3_K(),
		q2_K(),
		iq4_XS(),
		unpacked(),
	}, own512()...)
}

// halfFloats reads f16 scales, and mins if there are, at these bytes.
func halfFloats(d, m int) func(r *rowKernel) (vec, vec) {
	return func(r *rowKernel) (vec, vec) {
		if m < 0 {
			return r.halves512(d), nil
		}
		return r.halves512(d), r.halves512(m)
	}
}

// wordsAt are the numbers of the words where n blocks of this size begin.
func wordsAt(size, n int) Mem {
	var w []int
	for k := range 32 {
		w = append(w, k%n*size/2)
	}
	return words(w...)
}

// wordsOf8 gathers words of the 128 bytes from block k on.
func wordsOf8(r *rowKernel, k int, at vec) vec {
	z, next := ZMM(), r.at(k, 64)
	VMOVDQU32(r.at(k, 0), z)
	VPERMT2W(next, at, z)
	return z
}

// halves18 decodes the f16 that blocks of 18 bytes begin with.
func halves18(f *format512) *format512 {
	var at vec
	setup := f.setup
	f.setup = func() {
		setup()
		at = zmm(wordsAt(18, 8))
	}
	f.floats = func(r *rowKernel) (vec, vec) {
		h, y := wordsOf8(r, 0, at), YMM()
		VCVTPH2PS(h.AsX(), y)
		return y, nil
	}
	return f
}

func q8_0() *format512 {
	var flip, at vec
	return &format512{
		name: "Q8_0", bytes: 34, act: 32, order: natural, bias: 128, kind: ' ',
		setup: func() {
			flip = zmm(bytes(0x80))
			at = zmm(wordsAt(34, 4))
		},
		floats: func(r *rowKernel) (vec, vec) {
			lo, hi, f := wordsOf8(r, 0, at), wordsOf8(r, 4, at), YMM()
			VPUNPCKLQDQ(hi.AsX(), lo.AsX(), lo.AsX())
			VCVTPH2PS(lo.AsX(), f)
			return f, nil
		},
		codes: func(r *rowKernel, _ int) (c [4]vec) {
			for k := range c {
				c[k] = ZMM()
				VBROADCASTI64X4(r.at(2*k, 2), c[k])
				VINSERTI64X4(Imm(1), r.at(2*k+1, 2), c[k], c[k])
				VPXORD(flip, c[k], c[k])
			}
			return c
		},
	}
}

// table spreads 16 codes, plus the bias, to each 128 bits.
func table(bias int, codes ...int) Mem {
	return constant(64, func(i int) byte { return byte(codes[i%16] + bias) })
}

var (
	iq4Codes = []int{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}
	fp4Codes = []int{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}
)

// nibbles32 is a format whose 16 bytes at q hold 32 nibbles: codes, or indices
// of a table.
func nibbles32(name string, size, q, bias int, kind byte, values []int) *format512 {
	var mask, look vec
	m := -1
	if kind == '+' {
		m = 2
	}
	return &format512{
		name: name, bytes: size, act: 32, order: split32, bias: bias, kind: kind, floats: halfFloats(0, m),
		setup: func() {
			mask = zmm(bytes(15))
			if values != nil {
				look = zmm(table(bias, values...))
			}
		},
		codes: func(r *rowKernel, _ int) (c [4]vec) {
			for i := range 2 {
				c[2*i], c[2*i+1] = nibbles(lanes16(r, 4*i, q), mask)
			}
			if values != nil {
				for _, z := range c {
					VPSHUFB(z, look, z)
				}
			}
			return c
		},
	}
}

func mxfp4() *format512 {
	f := nibbles32("MXFP4", 17, 1, 16, ' ', fp4Codes)
	// A block begins with its exponent: the low byte of a word, or the high one.
	var at, odd, low vec
	setup := f.setup
	f.setup = func() {
		setup()
		at, odd, low = zmm(wordsAt(17, 8)), zmm(words(0, 8)), zmm(words(0xff))
	}
	f.floats = func(r *rowKernel) (vec, vec) {
		e, y, k := wordsOf8(r, 0, at), YMM(), K()
		VPSRLVW(odd.AsX(), e.AsX(), e.AsX())
		VPANDD(low.AsX(), e.AsX(), e.AsX())
		VPMOVZXWD(e.AsX(), y)
		VPCMPUD(Imm(5), dwords(83), y, k) // e >= 83
		VPSUBD(dwords(1), y, y)
		VPSLLD_Z(Imm(23), y, k, y)
		return y, nil
	}
	return f
}

// fives32 has the fifth bits of its nibbles in four bytes before them.
func fives32(name string, size, high, bias int, kind byte) *format512 {
	f := nibbles32(name, size, high+4, bias, kind, nil)
	var first, second, bit, sixteen vec
	setup, codes := f.setup, f.codes
	f.setup = func() {
		setup()
		first, second = zmm(bytes(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1)), zmm(bytes(2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3))
		bit, sixteen = zmm(bytes(1, 2, 4, 8, 16, 32, 64, 128)), zmm(bytes(16))
	}
	f.codes = func(r *rowKernel, _ int) [4]vec {
		c := codes(r, 0)
		for i := range 2 {
			h, t, k := lanes16(r, 4*i, high), ZMM(), K()
			for j, spread := range []vec{first, second} {
				VPSHUFB(spread, h, t)
				VPTESTMB(bit, t, k)
				VPADDB(sixteen, c[2*i+j], k, c[2*i+j])
			}
		}
		return c
	}
	return f
}

// q4_K is Q4_K, or Q5_K, whose fifth bits are 32 bytes more: bit k of byte l
// belongs to element 32*k+l.
func q4_K(five bool) *format512 {
	var mask, sixteen vec
	var spread, turn [4]vec
	h := &headers{}
	f := &format512{name: "Q4_K", bytes: 144, act: 256, order: pairs32, kind: '-', sums32: true}
	q := 16
	if five {
		f.name, f.bytes, q = "Q5_K", 176, 48
	}
	groups := [4][2]byte{{0, 2}, {1, 3}, {4, 6}, {5, 7}}
	f.setup = func() {
		mask = zmm(bytes(15))
		for i, g := range groups {
			spread[i] = zmm(constant(64, func(i int) byte {
				if i%4 == 0 {
					return g[i/32]
				}
				return 0x80
			}))
			if five { // bit g comes to bit 4
				turn[i] = zmm(constant(64, func(i int) byte {
					if i%8 == 0 {
						return byte(4-int(g[i/32])) & 63
					}
					return 0
				}))
			}
		}
		if five {
			sixteen = zmm(bytes(16))
		}
		h.setup()
	}
	f.codes = func(r *rowKernel, k int) (c [4]vec) {
		for i := range 2 {
			z := ZMM()
			VMOVDQU32(r.at(k, q+64*i), z)
			c[2*i], c[2*i+1] = nibbles(z, mask)
		}
		if five {
			high := ZMM()
			VBROADCASTI64X4(r.at(k, 16), high)
			for i := range c {
				t := ZMM()
				VPROLVQ(turn[i], high, t)
				VPTERNLOGD(Imm(0xf8), t, sixteen, c[i])
			}
		}
		return c
	}
	f.header = h.read
	f.scales = func(r *rowKernel, k int) (s [4]vec, _ func(reg.GPVirtual, vec)) {
		all := ZMM()
		VBROADCASTI32X4(Mem{Base: r.part(), Disp: partBytes + 16*k}, all)
		for i := range s {
			s[i] = ZMM()
			VPSHUFB(spread[i], all, s[i])
		}
		return s, nil
	}
	f.unpack = func(r *rowKernel, u *unpacker) {
		z, f, sub, min := ZMM(), XMM(), YMM(), XMM()
		VMOVDQU32(r.at(0, 0), z.AsX())
		VCVTPH2PS(z.AsX(), f)
		VMOVSS(f, Mem{Base: u.scale})
		VEXTRACTPS(Imm(1), f, Mem{Base: u.min})
		b := h.decode(z)
		VPMOVZXBD(b.AsX(), sub)
		VMOVDQU32(sub, Mem{Base: u.sub})
		VPSRLDQ(Imm(8), b.AsX(), b.AsX())
		VPMOVZXBW(b.AsX(), min)
		VMOVDQU32(min, Mem{Base: u.pair})
	}
	return f
}

// scaled16 spreads sixteen sub-scales, as words, to four registers in natural
// order.
type scaled16 struct{ even, odd vec }

func (s *scaled16) setup() {
	spread := func(first int) vec {
		return zmm(constant(64, func(i int) byte {
			if i%4 < 2 {
				return byte(first + i/16*2 + i%4)
			}
			return 0x80
		}))
	}
	s.even, s.odd = spread(0), spread(8)
}

func (s *scaled16) spread(words vec) (r [4]vec) {
	for half := range 2 {
		t := ZMM()
		VSHUFI32X4(Imm(uint64(half*0x55)), words, words, t)
		r[2*half], r[2*half+1] = ZMM(), ZMM()
		VPSHUFB(s.even, t, r[2*half])
		VPSHUFB(s.odd, t, r[2*half+1])
	}
	return r
}

// taken starts a total at -bias times the sub-scales times the sums of codes.
func taken(k int, words, minusBias vec) func(sum reg.GPVirtual, total vec) {
	w := YMM()
	VPMULLW(minusBias.AsY(), words.AsY(), w)
	return func(sum reg.GPVirtual, total vec) {
		VPDPWSSD(Mem{Base: sum, Disp: 32 * k}, w, total.AsY())
	}
}

// storeWords stores sixteen sub-scales, that are words, as int32.
func storeWords(words vec, u *unpacker) {
	z := ZMM()
	VPMOVSXWD(words.AsY(), z)
	VMOVDQU32(z, Mem{Base: u.sub})
}

// storeHalf decodes the f16 at byte b.
func storeHalf(r *rowKernel, b int, to reg.GPVirtual) {
	x := zero().AsX()
	VPINSRW(Imm(0), r.at(0, b), x, x)
	VCVTPH2PS(x, x)
	VMOVSS(x, Mem{Base: to})
}

// by16 is a format of 16 groups under signed sub-scales, whose words gives.
func by16(f *format512, d int, setup func(), words func(r *rowKernel, k int) vec) *format512 {
	var spread scaled16
	var minusBias vec
	f.act, f.kind = 256, ' '
	f.floats = halfFloats(d, -1)
	f.setup = func() {
		setup()
		spread.setup()
		minusBias = zmm(wordsOf(-f.bias))
	}
	f.scales = func(r *rowKernel, k int) ([4]vec, func(reg.GPVirtual, vec)) {
		w := words(r, k)
		return spread.spread(w), taken(k, w, minusBias)
	}
	f.unpack = func(r *rowKernel, u *unpacker) {
		storeHalf(r, d, u.scale)
		storeWords(words(r, 0), u)
	}
	return f
}

func wordsOf(w int) Mem { return words(w) }

// turned is, in each half of the register, h rotated so that bits lo and hi of
// each byte, for the two halves, come to bit to.
func turned(h vec, by vec) vec {
	t := ZMM()
	VPROLVQ(by, h, t)
	return t
}

// rotation moves bit lo to bit to in the lower half, bit hi to bit to in the upper.
func rotation(lo, hi, to int) vec {
	return zmm(constant(64, func(i int) byte {
		if i%8 != 0 {
			return 0
		}
		if i < 32 {
			return byte(to-lo) & 63
		}
		return byte(to-hi) & 63
	}))
}

func q6_K() *format512 {
	f := &format512{name: "Q6_K", bytes: 210, order: natural, bias: 32}
	var mask, pair, first, second vec
	f.codes = func(r *rowKernel, k int) (c [4]vec) {
		for half := range 2 {
			z, high := ZMM(), ZMM()
			VMOVDQU32(r.at(k, 64*half), z)
			VBROADCASTI64X4(r.at(k, 128+32*half), high)
			lo, hi := nibbles(z, mask)
			VPTERNLOGD(Imm(0xf8), turned(high, first), pair, lo)
			VPTERNLOGD(Imm(0xf8), turned(high, second), pair, hi)
			c[2*half], c[2*half+1] = lo, hi
		}
		return c
	}
	return by16(f, 208, func() {
		mask, pair = zmm(bytes(15)), zmm(bytes(0x30))
		first, second = rotation(0, 2, 4), rotation(4, 6, 4)
	}, func(r *rowKernel, k int) vec {
		w := ZMM()
		VPMOVSXBW(r.at(k, 192), w.AsY())
		return w
	})
}

// pairs2 gives the four registers of 2-bit codes: byte l of each 32 from byte q on
// holds those of elements l, l+32, l+64 and l+96.
func pairs2(r *rowKernel, k, q int, mask vec, turn [2]vec) (c [4]vec) {
	for half := range 2 {
		z := ZMM()
		VBROADCASTI64X4(r.at(k, q+32*half), z)
		for i := range 2 {
			t := turned(z, turn[i])
			VPANDD(mask, t, t)
			c[2*half+i] = t
		}
	}
	return c
}

func q3_K() *format512 {
	f := &format512{name: "Q3_K", bytes: 110, order: natural, bias: 4}
	var mask, bit, low, high, shift, shift2, nibble, pair, offset vec
	var turn [2]vec
	var turnHigh [4]vec
	f.codes = func(r *rowKernel, k int) [4]vec {
		c := pairs2(r, k, 32, mask, turn)
		h := ZMM()
		VBROADCASTI64X4(r.at(k, 0), h)
		for i := range c {
			VPTERNLOGD(Imm(0xf8), turned(h, turnHigh[i]), bit, c[i])
		}
		return c
	}
	return by16(f, 108, func() {
		mask, bit = zmm(bytes(3)), zmm(bytes(4))
		turn = [2]vec{rotation(0, 2, 0), rotation(4, 6, 0)}
		for i := range turnHigh {
			turnHigh[i] = rotation(2*i, 2*i+1, 2)
		}
		// of the 16 bytes from 94 on, the twelve of the scales are the third to the 14th
		low = zmm(bytes(2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5, 6, 7, 8, 9))
		high = zmm(bytes(10, 11, 12, 13, 10, 11, 12, 13, 10, 11, 12, 13, 10, 11, 12, 13))
		shift, shift2 = zmm(qwords(0, 4)), zmm(dwords(0, 2, 4, 6))
		nibble, pair, offset = zmm(bytes(15)), zmm(bytes(3)), zmm(bytes(32))
	}, func(r *rowKernel, k int) vec {
		w, x, h := ZMM(), XMM(), XMM()
		VMOVDQU32(r.at(k, 94), x)
		VPSHUFB(high.AsX(), x, h)
		VPSHUFB(low.AsX(), x, x)
		VPSRLVQ(shift.AsX(), x, x)
		VPSRLVD(shift2.AsX(), h, h)
		VPANDD(nibble.AsX(), x, x)
		VPANDD(pair.AsX(), h, h)
		VPSLLW(Imm(4), h, h)
		VPORD(h, x, x)
		VPSUBB(offset.AsX(), x, x)
		VPMOVSXBW(x, w.AsY())
		return w
	})
}

func q2_K() *format512 {
	f := &format512{name: "Q2_K", bytes: 84, act: 256, order: natural, kind: '-', floats: halfFloats(80, 82)}
	var spread scaled16
	var mask, nibble vec
	var turn [2]vec
	f.setup = func() {
		spread.setup()
		mask, nibble = zmm(bytes(3)), zmm(bytes(15))
		turn = [2]vec{rotation(0, 2, 0), rotation(4, 6, 0)}
	}
	f.codes = func(r *rowKernel, k int) [4]vec { return pairs2(r, k, 16, mask, turn) }
	// both gives the scales and the mins as words.
	both := func(r *rowKernel, k int) (s, m vec) {
		s, m = ZMM(), ZMM()
		VPMOVZXBW(r.at(k, 0), s.AsY())
		VPSRLW(Imm(4), s.AsY(), m.AsY())
		VPANDD(nibble.AsY(), s.AsY(), s.AsY())
		return s, m
	}
	f.scales = func(r *rowKernel, k int) ([4]vec, func(reg.GPVirtual, vec)) {
		s, m := both(r, k)
		VMOVDQU32(m.AsY(), Mem{Base: r.part(), Disp: partBytes + 32*k})
		return spread.spread(s), nil
	}
	f.unpack = func(r *rowKernel, u *unpacker) {
		storeHalf(r, 80, u.scale)
		storeHalf(r, 82, u.min)
		s, m := both(r, 0)
		storeWords(s, u)
		VMOVDQU32(m.AsY(), Mem{Base: u.pair})
	}
	return f
}

func iq4_XS() *format512 {
	f := &format512{name: "IQ4_XS", bytes: 136, act: 256, order: split32, bias: 128, kind: ' ', wide: true, floats: halfFloats(0, -1)}
	var mask, look, shift, shift2, nibble, pair, offset, twice, minusBias vec
	var groups [2]vec
	f.setup = func() {
		mask, look = zmm(bytes(15)), zmm(table(128, iq4Codes...))
		shift, shift2 = zmm(dwords(0, 4, 8, 12, 16, 20, 24, 28)), zmm(dwords(0, 2, 4, 6, 8, 10, 12, 14))
		nibble, pair, offset = zmm(dwords(15)), zmm(dwords(3)), zmm(dwords(32))
		twice = zmm(bytes(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13))
		minusBias = zmm(wordsOf(-128))
		for i := range groups {
			groups[i] = zmm(constant(64, func(b int) byte {
				if b%4 != 0 {
					return 0
				}
				return byte(4*i + b/16)
			}))
		}
	}
	f.codes = func(r *rowKernel, k int) (c [4]vec) {
		for i := range 2 {
			z := ZMM()
			VMOVDQU32(r.at(k, 8+64*i), z)
			c[2*i], c[2*i+1] = nibbles(z, mask)
		}
		for _, z := range c {
			VPSHUFB(z, look, z)
		}
		return c
	}
	// scales gives those of eight groups of 32, as int32.
	scales := func(r *rowKernel, k int) vec {
		s, h := ZMM(), ZMM()
		VPBROADCASTD(r.at(k, 4), s.AsY())
		VPBROADCASTW(r.at(k, 2), h.AsY())
		VPSRLVD(shift.AsY(), s.AsY(), s.AsY())
		VPSRLVD(shift2.AsY(), h.AsY(), h.AsY())
		VPANDD(nibble.AsY(), s.AsY(), s.AsY())
		VPANDD(pair.AsY(), h.AsY(), h.AsY())
		VPSLLD(Imm(4), h.AsY(), h.AsY())
		VPORD(h.AsY(), s.AsY(), s.AsY())
		VPSUBD(offset.AsY(), s.AsY(), s.AsY())
		return s
	}
	doubled := func(s vec) vec {
		w := ZMM()
		VPSHUFB(twice.AsY(), s.AsY(), w.AsY())
		return w
	}
	f.scales = func(r *rowKernel, k int) (m [4]vec, _ func(reg.GPVirtual, vec)) {
		s := scales(r, k)
		for i := range groups {
			z := ZMM()
			VPERMD(s, groups[i], z)
			m[2*i], m[2*i+1] = z, z
		}
		return m, taken(k, doubled(s), minusBias)
	}
	f.unpack = func(r *rowKernel, u *unpacker) {
		storeHalf(r, 0, u.scale)
		storeWords(doubled(scales(r, 0)), u)
	}
	return f
}

// unpacked is a quant.Block of 256 codes, made in Go: for the formats without a
// kernel of their own.
func unpacked() *format512 {
	f := &format512{name: "Block", bytes: 396, act: 256, order: natural, bias: 128, kind: ' ', wide: true}
	var flip vec
	var groups [4]vec
	f.setup = func() {
		flip = zmm(bytes(0x80))
		for i := range groups {
			groups[i] = zmm(constant(64, func(b int) byte {
				if b%4 != 0 {
					return 0
				}
				return byte(4*i + b/16)
			}))
		}
	}
	f.codes = func(r *rowKernel, k int) (c [4]vec) {
		for i := range c {
			c[i] = ZMM()
			VPXORD(r.at(k, 64*i), flip, c[i])
		}
		return c
	}
	f.floats = func(r *rowKernel) (vec, vec) {
		var half [2]vec
		for h := range half {
			half[h] = XMM()
			VMOVSS(r.at(4*h, 384), half[h])
			for i := 1; i < 4; i++ {
				VINSERTPS(Imm(uint64(i<<4)), r.at(4*h+i, 384), half[h], half[h])
			}
		}
		y := YMM()
		VINSERTF32X4(Imm(1), half[1], half[0].AsY(), y)
		return y, nil
	}
	f.scales = func(r *rowKernel, k int) (s [4]vec, _ func(reg.GPVirtual, vec)) {
		all, off := ZMM(), ZMM()
		VMOVDQU32(r.at(k, 256), all)
		for i := range s {
			s[i] = ZMM()
			VPERMD(all, groups[i], s[i])
		}
		VPSLLD(Imm(7), all, off)
		return s, func(sum reg.GPVirtual, total vec) {
			t := ZMM()
			VPMOVSXWD(Mem{Base: sum, Disp: 32 * k}, t)
			VPMULLD(off, t, t)
			VPSUBD(t, total, total)
		}
	}
	return f
}

// The fields of unpackArgs in backends/cpu/tiles.go, eight bytes each.
const (
	unpackW = 8 * iota
	unpackGroups
	unpackCodes
	unpackScale
	unpackMin
	unpackSub
	unpackPair
)

// An unpacker spreads a row's blocks for the tile kernels.
type unpacker struct{ codes, scale, min, sub, pair reg.GPVirtual }

// unpackRow writes the kernel that unpacks eight blocks of 32, or one of 256, at
// a time.
func (f *format512) unpackRow() {
	TEXT("unpack"+f.name+"AVX512", NOSPLIT, "func(a *unpackArgs)")
	args := Load(Param("a"), GP64()).(reg.GPVirtual)
	field := func(at int) reg.GPVirtual {
		g := GP64()
		MOVQ(Mem{Base: args, Disp: at}, g)
		return g
	}
	f.setup()
	r := &rowKernel{blockBytes: f.bytes, runs: f.runs, runBytes: f.runBytes, w: field(unpackW)}
	n := field(unpackGroups)
	u := &unpacker{field(unpackCodes), field(unpackScale), field(unpackMin), field(unpackSub), field(unpackPair)}
	Label("group")
	r.prefetch(0, r.groupBytes()*32/f.act)
	c := f.codes(r, 0)
	run := func(i, b int) Mem { return Mem{Base: u.codes, Disp: i*tileRows*32 + b} }
	for i, z := range c {
		switch f.order {
		case natural:
			VMOVDQU32(z.AsY(), run(2*i, 0))
			VEXTRACTI64X4(Imm(1), z, run(2*i+1, 0))
		case pairs32:
			VMOVDQU32(z.AsY(), run(i/2*4+i%2, 0))
			VEXTRACTI64X4(Imm(1), z, run(i/2*4+i%2+2, 0))
		case split32:
			VMOVDQU32(z.AsX(), run(i/2*4, i%2*16))
			for lane := 1; lane < 4; lane++ {
				VEXTRACTI32X4(Imm(uint64(lane)), z, run(i/2*4+lane, i%2*16))
			}
		}
	}
	ADDQ(I32(8*tileRows*32), u.codes)
	if f.act == 32 {
		w, m := f.floats(r)
		VMOVUPS(w, Mem{Base: u.scale})
		ADDQ(Imm(32), u.scale)
		if m != nil {
			VMOVUPS(m, Mem{Base: u.min})
			ADDQ(Imm(32), u.min)
		}
		ADDQ(I32(int32(r.groupBytes())), r.w)
	} else {
		f.unpack(r, u)
		ADDQ(Imm(4), u.scale)
		ADDQ(Imm(4), u.min)
		groups := 16
		if f.sums32 {
			groups = 8
		}
		ADDQ(I32(int32(groups*4*tileRows)), u.sub)
		ADDQ(I32(int32(groups*2*tileRows)), u.pair)
		ADDQ(I32(int32(f.bytes)), r.w)
	}
	DECQ(n)
	JNZ(LabelRef("group"))
	VZEROUPPER()
	RET()
}

// headers decodes the first 16 bytes of Q4_K and Q5_K blocks: d, dmin, and
// 6-bit scales and mins of eight groups.
type headers struct{ shift, low, high, halves vec }

func (h *headers) setup() {
	h.shift = zmm(dwords(0, 0, 0, 4))
	h.low = zmm(dwords(0x3f3f3f3f, 0x0f0f0f0f))
	h.high = zmm(dwords(0, 0x30303030))
	h.halves = zmm(dwords(0, 4, 8, 12, 16, 20, 24, 28, 0, 0, 0, 0, 0, 0, 0, 0))
}

// decode gives, for the block in each 128 bits of z, the scales of its eight
// groups as bytes, then its mins.
func (h *headers) decode(z vec) vec {
	// dwords of z: d and dmin; low scales; low mins; the nibbles of both
	low, high := ZMM(), ZMM()
	VPSHUFD(Imm(1|3<<2|2<<4|3<<6), z, low)
	VPSHUFD(Imm(1|1<<2|2<<4|2<<6), z, high)
	VPSRLVD(h.shift, low, low)
	VPSRLD(Imm(2), high, high)
	VPANDD(h.low, low, low)
	VPTERNLOGD(Imm(0xf8), high, h.high, low) // low | high & h.high
	return low
}

// read stores, behind the partial sums, 16 bytes for each block: the scales of
// its eight groups, then its mins. It returns d and dmin of the eight blocks, and
// their mins as words, those of four blocks in each register.
func (h *headers) read(r *rowKernel) (d, dmin vec, mins []vec) {
	part := r.part()
	var head [2]vec
	none := zero()
	for i := range head {
		z := ZMM()
		head[i] = z
		VBROADCASTI32X4(r.at(4*i, 0), z)
		for k := 1; k < 4; k++ {
			VINSERTI32X4(Imm(uint64(k)), r.at(4*i+k, 0), z, z)
		}
		low := h.decode(z)
		VMOVDQU32(low, Mem{Base: part, Disp: partBytes + 64*i})
		m := ZMM()
		VPUNPCKHBW(none, low, m)
		mins = append(mins, m)
	}
	VPERMT2D(head[1], h.halves, head[0])
	d, dmin = YMM(), YMM()
	x := XMM()
	VPMOVDW(head[0].AsY(), x)
	VCVTPH2PS(x, d)
	VPSRLD(Imm(16), head[0].AsY(), head[0].AsY())
	VPMOVDW(head[0].AsY(), x)
	VCVTPH2PS(x, dmin)
	return d, dmin, mins
}
