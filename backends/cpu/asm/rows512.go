package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
	"github.com/mmcloughlin/avo/x86"
)

type vec = reg.VecVirtual

// reducer adds up the int32 lanes of eight blocks' sums together.
type reducer struct{ lanes, pairs vec }

func newReducer() *reducer { return &reducer{} }

// unpackAdd is, in each 128 bits, [a0+a2, b0+b2, a1+a3, b1+b3].
func unpackAdd(a, b vec) vec {
	lo, hi := ZMM(), ZMM()
	VPUNPCKLDQ(b, a, lo)
	VPUNPCKHDQ(b, a, hi)
	VPADDD(hi, lo, lo)
	return lo
}

// unpackAdd2 is, in each 128 bits, [a0+a2, a1+a3, b0+b2, b1+b3].
func unpackAdd2(a, b vec) vec {
	lo, hi := ZMM(), ZMM()
	VPUNPCKLQDQ(b, a, lo)
	VPUNPCKHQDQ(b, a, hi)
	VPADDD(hi, lo, lo)
	return lo
}

// eight reduces eight registers, one a block.
func (r *reducer) eight(a [8]vec) vec {
	p := unpackAdd2(unpackAdd(a[0], a[1]), unpackAdd(a[2], a[3])) // in each 128 bits: a part of blocks 0, 1, 2, 3
	q := unpackAdd2(unpackAdd(a[4], a[5]), unpackAdd(a[6], a[7]))
	lo, hi := ZMM(), ZMM()
	VSHUFI32X4(Imm(0x44), q, p, lo)
	VSHUFI32X4(Imm(0xee), q, p, hi)
	VPADDD(hi, lo, lo) // p p q q
	even, odd := ZMM(), ZMM()
	VSHUFI32X4(Imm(0x08), lo, lo, even)
	VSHUFI32X4(Imm(0x0d), lo, lo, odd)
	VPADDD(odd.AsY(), even.AsY(), even.AsY())
	return even
}

// four reduces four registers of two blocks each, 0 and 1 in the first.
func (r *reducer) four(a [4]vec) vec {
	p := unpackAdd2(unpackAdd(a[0], a[1]), unpackAdd(a[2], a[3])) // 128 bits: even, even, odd, odd blocks
	s := ZMM()
	VSHUFI32X4(Imm(0xb1), p, p, s)
	VPADDD(s, p, p)
	VPERMD(p, r.pairs, p)
	return p
}

// two reduces two registers of four blocks each, one in each 128 bits.
func (r *reducer) two(a, b vec) vec {
	p, s := unpackAdd(a, b), ZMM()
	VPSHUFD(Imm(0x4e), p, s)
	VPADDD(s, p, p)
	VPERMD(p, r.lanes, p)
	return p
}

func (r *reducer) setup(two, four bool) {
	if two {
		r.lanes = zmm(dwords(0, 4, 8, 12, 1, 5, 9, 13, 0, 0, 0, 0, 0, 0, 0, 0))
	}
	if four {
		r.pairs = zmm(dwords(0, 8, 1, 9, 2, 10, 3, 11, 0, 0, 0, 0, 0, 0, 0, 0))
	}
}

// zero is a register of zeros.
func zero() vec {
	z := ZMM()
	i, err := x86.VPXORD(z, z, z)
	if err != nil {
		panic(err)
	}
	i.CancellingInputs = true // which avo does not know of VPXORD: the old value is not read
	Instruction(i)
	return z
}

// halves512 decodes the f16 at byte b of each of the eight blocks.
func (r *rowKernel) halves512(b int) vec {
	lo, hi, f := zero().AsX(), zero().AsX(), YMM()
	for k := range 4 {
		VPINSRW(Imm(uint64(k)), r.at(k, b), lo, lo)
		VPINSRW(Imm(uint64(k)), r.at(k+4, b), hi, hi)
	}
	VPUNPCKLQDQ(hi, lo, lo)
	VCVTPH2PS(lo, f)
	return f
}

// finish turns exact sums into terms: (S*w)*d, (S*w + M*m)*d, (S*w - M*m)*d.
func finish(kind byte, s, m, w, mw reg.Register, d, terms reg.GPVirtual) {
	VCVTDQ2PS(s, s)
	VMULPS(w, s, s)
	if kind != ' ' {
		VCVTDQ2PS(m, m)
		VMULPS(mw, m, m)
		if kind == '+' {
			VADDPS(m, s, s)
		} else {
			VSUBPS(m, s, s)
		}
	}
	VMULPS(Mem{Base: d}, s, s)
	VMOVUPS(s, Mem{Base: terms})
}

// rows512 are the row kernels of AVX-512 with VNNI.
func rows512() {
	rowsQ8_0()
	rowsQ4_K()
	sumRows512()
}

func rowsQ8_0() {
	r := rowKernel{name: "rowsQ8_0AVX512", blockBytes: 34, act: 32, sumBytes: 4}
	var flip vec
	red := newReducer()
	r.emit(func() {
		flip = zmm(bytes(0x80))
		red.setup(false, true)
	}, func() {
		r.prefetch(0, 8*34)
		var c [4]vec
		for k := range c {
			c[k] = ZMM()
			VMOVDQU32(r.at(2*k, 2), c[k].AsY())
			VINSERTI64X4(Imm(1), r.at(2*k+1, 2), c[k], c[k])
			VPXORD(flip, c[k], c[k])
		}
		w := r.halves512(0)
		r.positions(func(terms reg.GPVirtual) {
			var s [4]vec
			for k := range s {
				s[k] = zero()
				VPDPBUSD(Mem{Base: r.x, Disp: 64 * k}, c[k], s[k])
			}
			t, off := red.four(s).AsY(), YMM()
			VPSLLD(Imm(7), Mem{Base: r.sum}, off)
			VPSUBD(off, t, t)
			finish(' ', t, nil, w, nil, r.d, terms)
		})
	})
}

func rowsQ4_K() {
	r := rowKernel{name: "rowsQ4_KAVX512", blockBytes: 144, act: 256, sumBytes: 16}
	var nibble vec
	var spread [4]vec
	red := newReducer()
	var heads headers
	r.emit(func() {
		nibble = zmm(bytes(15))
		for i, g := range [4][2]byte{{0, 2}, {1, 3}, {4, 6}, {5, 7}} {
			spread[i] = zmm(constant(64, func(i int) byte {
				if i%4 == 0 {
					return g[i/32]
				}
				return 0x80
			}))
		}
		red.setup(true, false)
		heads.setup()
	}, func() {
		w, mw, mins := heads.read(&r)
		part := r.part()
		for k := range 8 {
			r.prefetch(144*k, 144*(k+1))
			var c, s [4]vec
			scales := ZMM()
			VBROADCASTI32X4(Mem{Base: part, Disp: partBytes + 16*k}, scales)
			for i := range 2 {
				c[2*i], c[2*i+1] = ZMM(), ZMM()
				VMOVDQU32(r.at(k, 16+64*i), c[2*i])
				VPSRLW(Imm(4), c[2*i], c[2*i+1])
				VPANDD(nibble, c[2*i], c[2*i])
				VPANDD(nibble, c[2*i+1], c[2*i+1])
			}
			for i := range s {
				s[i] = ZMM()
				VPSHUFB(spread[i], scales, s[i])
			}
			r.partials(k, func(x reg.GPVirtual) vec {
				sum := zero()
				for i := range c {
					t := zero()
					VPDPBUSD(Mem{Base: x, Disp: 256*k + 64*i}, c[i], t)
					VPDPWSSD(t, s[i], sum)
				}
				return sum
			})
		}
		r.positionsOf256(red, func(s vec, terms reg.GPVirtual) {
			m0, m1 := ZMM(), ZMM()
			VPMADDWD(Mem{Base: r.sum}, mins[0], m0)
			VPMADDWD(Mem{Base: r.sum, Disp: 64}, mins[1], m1)
			finish('-', s.AsY(), red.two(m0, m1).AsY(), w, mw, r.d, terms)
		})
	})
}

// partials runs body for each position, and keeps what it returns as the sums
// of block k.
func (r *rowKernel) partials(k int, body func(x reg.GPVirtual) vec) {
	x, n, to := GP64(), GP64(), r.part()
	MOVQ(r.x, x)
	MOVQ(Mem{Base: r.args, Disp: rowN}, n)
	label := r.label("part")
	Label(label)
	VMOVDQU32(body(x), Mem{Base: to, Disp: 64 * k})
	ADDQ(I32(8*64), to)
	ADDQ(Mem{Base: r.args, Disp: rowCodeStride}, x)
	DECQ(n)
	JNZ(LabelRef(label))
}

// positionsOf256 runs body for each position, with the reduced sums that
// partials kept.
func (r *rowKernel) positionsOf256(red *reducer, body func(s vec, terms reg.GPVirtual)) {
	from := r.part()
	r.positions(func(terms reg.GPVirtual) {
		var a [8]vec
		for k := range a {
			a[k] = ZMM()
			VMOVDQU32(Mem{Base: from, Disp: 64 * k}, a[k])
		}
		ADDQ(I32(8*64), from)
		body(red.eight(a), terms)
	})
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

// read stores, behind the partial sums, 16 bytes for each block: the scales of
// its eight groups, then its mins. It returns d and dmin of the eight blocks, and
// their mins as words, those of four blocks in each register.
func (h *headers) read(r *rowKernel) (d, dmin vec, mins [2]vec) {
	part := r.part()
	var head [2]vec
	none := zero()
	for i := range head {
		z := ZMM()
		head[i] = z
		VMOVDQU32(r.at(4*i, 0), z.AsX())
		for k := 1; k < 4; k++ {
			VINSERTI32X4(Imm(uint64(k)), r.at(4*i+k, 0), z, z)
		}
		// dwords of z: d and dmin; low scales; low mins; the four nibbles of both
		low, high := ZMM(), ZMM()
		VPSHUFD(Imm(1|3<<2|2<<4|3<<6), z, low)
		VPSHUFD(Imm(1|1<<2|2<<4|2<<6), z, high)
		VPSRLVD(h.shift, low, low)
		VPSRLD(Imm(2), high, high)
		VPANDD(h.low, low, low)
		VPTERNLOGD(Imm(0xf8), high, h.high, low) // low | high & h.high
		VMOVDQU32(low, Mem{Base: part, Disp: partBytes + 64*i})
		mins[i] = ZMM()
		VPUNPCKHBW(none, low, mins[i])
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

// sumRows512: y[r] is the eight lanes and the tree over row r's terms.
func sumRows512() {
	TEXT("sumRowsAVX512", NOSPLIT, "func(y *float32, terms *float32, rows, blocks int)")
	Doc("sumRowsAVX512 is sumRows.")
	y, terms := Load(Param("y"), GP64()), Load(Param("terms"), GP64())
	rows, blocks := Load(Param("rows"), GP64()), Load(Param("blocks"), GP64())
	// mask has a bit for each block of the last, incomplete eight.
	mask, rest, n := K(), GP64(), GP64()
	bits := GP32()
	MOVQ(blocks, reg.RCX)
	ANDQ(Imm(7), reg.RCX)
	MOVL(U32(1), bits)
	SHLL(reg.CL, bits)
	DECL(bits)
	KMOVW(bits, mask)
	MOVQ(blocks, rest)
	ANDQ(Imm(7), rest)
	Label("row")
	l, t := zero().AsY().(vec), YMM()
	MOVQ(blocks, n)
	loop("eight", n, 8, func() {
		VADDPS(Mem{Base: terms}, l, l)
		ADDQ(Imm(32), terms)
	})
	VMOVUPS_Z(Mem{Base: terms}, mask, t)
	LEAQ(Mem{Base: terms, Index: rest, Scale: 4}, terms)
	VADDPS(t, l, l)
	treeOf8(l, t)
	VMOVSS(l.AsX(), Mem{Base: y.(reg.GPVirtual)})
	ADDQ(Imm(4), y)
	DECQ(rows)
	JNZ(LabelRef("row"))
	VZEROUPPER()
	RET()
}

// treeOf8 leaves ((l0+l4)+(l2+l6)) + ((l1+l5)+(l3+l7)) in the lowest lane.
func treeOf8(l, t vec) {
	VEXTRACTF128(Imm(1), l, t.AsX())
	VADDPS(t.AsX(), l.AsX(), l.AsX())
	VMOVHLPS(l.AsX(), l.AsX(), t.AsX())
	VADDPS(t.AsX(), l.AsX(), l.AsX())
	VMOVSHDUP(l.AsX(), t.AsX())
	VADDSS(t.AsX(), l.AsX(), l.AsX())
}
