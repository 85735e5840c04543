package main

import (
	"math/bits"

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
	for _, f := range formats512() {
		if f.act == 32 {
			f.rows32()
		} else {
			f.rows256()
		}
	}
	sumRows512()
}

// rows32 is the row kernel of blocks of 32: the codes of eight blocks are four
// registers, and each position meets them there.
func (f *format512) rows32() {
	r := &rowKernel{name: "rows" + f.name + "AVX512", blockBytes: f.bytes, runs: f.runs, runBytes: f.runBytes, codeBytes: 32, sumBytes: 4}
	if f.order == split32 {
		r.codeBytes = 16
	}
	red := newReducer()
	r.emit(func() {
		f.setup()
		red.setup(f.order == split32, f.order == natural)
	}, func() {
		r.prefetch(0, r.groupBytes())
		c := f.codes(r, 0)
		w, mw := f.floats(r)
		r.positions(func(terms reg.GPVirtual) {
			var s vec
			if f.order == natural {
				var a [4]vec
				for k := range a {
					a[k] = zero()
					VPDPBUSD(Mem{Base: r.x, Disp: 64 * k}, c[k], a[k])
				}
				s = red.four(a)
			} else {
				var a [2]vec
				high := GP64() // the second halves follow all of the first
				MOVQ(Mem{Base: r.args, Disp: rowHalf}, high)
				for k := range a {
					a[k] = zero()
					VPDPBUSD(Mem{Base: r.x, Disp: 64 * k}, c[2*k], a[k])
					VPDPBUSD(Mem{Base: r.x, Index: high, Scale: 1, Disp: 64 * k}, c[2*k+1], a[k])
				}
				s = red.two(a[0], a[1])
			}
			t, x := s.AsY().(vec), YMM()
			if f.bias > 0 {
				VPSLLD(Imm(uint64(bits.Len(uint(f.bias))-1)), Mem{Base: r.sum}, x)
				VPSUBD(x, t, t)
			}
			if f.kind == '+' {
				VMOVDQU32(Mem{Base: r.sum}, x)
			}
			finish(f.kind, t, x, w, mw, r.d, terms)
		})
	})
}

// rows256 is the row kernel of blocks of 256 in groups under sub-scales. The
// sums of each block and position wait in memory until there are eight.
func (f *format512) rows256() {
	r := &rowKernel{name: "rows" + f.name + "AVX512", blockBytes: f.bytes, codeBytes: 256, sumBytes: 32}
	if f.sums32 {
		r.sumBytes = 16
	}
	red := newReducer()
	r.emit(func() {
		f.setup()
		red.setup(f.sums32, f.kind == '-' && !f.sums32)
	}, func() {
		var w, mw vec
		var mins []vec
		if f.header != nil {
			w, mw, mins = f.header(r)
		}
		for k := range 8 {
			r.prefetch(f.bytes*k, f.bytes*(k+1))
			c := f.codes(r, k)
			s, start := f.scales(r, k)
			r.partials(k, func(x, sum reg.GPVirtual) vec {
				total := zero()
				if start != nil {
					start(sum, total)
				}
				for i := range c {
					t := zero()
					VPDPBUSD(Mem{Base: x, Disp: 256*k + 64*i}, c[i], t)
					if f.wide {
						VPMULLD(s[i], t, t)
						VPADDD(t, total, total)
					} else {
						VPDPWSSD(t, s[i], total)
					}
				}
				return total
			})
		}
		if f.header == nil {
			w, mw = f.floats(r)
		}
		r.positionsOf256(red, func(s vec, terms reg.GPVirtual) {
			var m reg.Register
			if f.kind == '-' {
				p := make([]vec, 8*r.sumBytes/64)
				for i := range p {
					p[i] = ZMM()
					if mins != nil {
						VPMADDWD(Mem{Base: r.sum, Disp: 64 * i}, mins[i], p[i])
					} else {
						VMOVDQU32(Mem{Base: r.sum, Disp: 64 * i}, p[i])
						VPMADDWD(Mem{Base: r.part(), Disp: partBytes + 64*i}, p[i], p[i])
					}
				}
				if len(p) == 2 {
					m = red.two(p[0], p[1]).AsY()
				} else {
					m = red.four([4]vec(p)).AsY()
				}
			}
			finish(f.kind, s.AsY(), m, w, mw, r.d, terms)
		})
	})
}

// partials runs body for each position, and keeps what it returns as the sums
// of block k.
func (r *rowKernel) partials(k int, body func(x, sum reg.GPVirtual) vec) {
	r.eachPosition(8*64, func(x, sum, to reg.GPVirtual) {
		VMOVDQU32(body(x, sum), Mem{Base: to, Disp: 64 * k})
	})
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
