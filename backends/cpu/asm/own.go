package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// The types whose numbers begin at quant.F8_128 and that have integer codes: a
// scale, bf16 or f32, then one, two or four runs of 32 codes, nibbles in the order
// of Q4_0 or bytes. A scale below 2^-45 in size counts as +0.

// An ownType is one of them.
type ownType struct {
	name string
	head int // bytes of the scale: 2 for bf16, 4 for f32
	runs int
	wide bool // a byte a code
}

var ownTypes = []ownType{
	{"INT4_32", 2, 1, false}, {"INT4_128", 2, 4, false},
	{"INT4F_32", 4, 1, false}, {"INT4F_64", 4, 2, false}, {"INT4F_128", 4, 4, false},
	{"INT8F_32", 4, 1, true}, {"INT8F_128", 4, 4, true},
}

func (t *ownType) runBytes() int {
	if t.wide {
		return 32
	}
	return 16
}

func (t *ownType) bytes() int { return t.head + t.runs*t.runBytes() }

// leastScale is the bits of 2^-45.
const leastScale = (127 - 45) << 23

func own256() (all []*format256) {
	for _, t := range ownTypes {
		f := nibbles256(t.name, t.bytes(), t.head, 8, ' ', nil)
		if t.wide {
			f.bias, f.signed = 0, true
			f.code = func(r *rowKernel, k, _ int) vec { return load256(r.at(k, t.head)) }
		}
		f.runs, f.runBytes = t.runs, t.runBytes()
		f.floats = func(r *rowKernel) (vec, vec) {
			w, size, none := t.scales256(r), YMM(), YMM()
			VPAND(dwords(0x7fffffff), w, size)
			VPCMPGTD(dwords(leastScale-1), size, none) // not below
			VPAND(none, w, w)
			return w, nil
		}
		all = append(all, f)
	}
	return all
}

// scales256 is the scale of each of the eight runs.
func (t *ownType) scales256(r *rowKernel) vec {
	at := func(k int) Mem { return Mem{Base: r.w, Disp: k * t.bytes()} }
	y := YMM()
	switch {
	case t.head == 2 && t.runs == 1:
		lo, hi := XMM(), XMM()
		VPXOR(lo, lo, lo)
		VPXOR(hi, hi, hi)
		for k := range 4 {
			VPINSRW(Imm(uint64(k)), at(k), lo, lo)
			VPINSRW(Imm(uint64(k)), at(k+4), hi, hi)
		}
		VPUNPCKLQDQ(hi, lo, lo)
		VPMOVZXWD(lo, y)
		VPSLLD(Imm(16), y, y)
	case t.head == 2:
		lo, hi := XMM(), XMM()
		VPBROADCASTW(at(0), lo)
		VPBROADCASTW(at(1), hi)
		VPUNPCKLQDQ(hi, lo, lo)
		VPMOVZXWD(lo, y)
		VPSLLD(Imm(16), y, y)
	case t.runs == 4:
		x := XMM()
		VBROADCASTSS(at(0), y)
		VBROADCASTSS(at(1), x)
		VINSERTF128(Imm(1), x, y, y)
	case t.runs == 2:
		VPMOVZXDQ(floats4(at, 0), y)
		VMOVSLDUP(y, y)
	default:
		lo, hi := floats4(at, 0), floats4(at, 4)
		VINSERTF128(Imm(1), hi, lo.AsY(), y)
	}
	return y
}

// floats4 is four floats from memory.
func floats4(at func(k int) Mem, first int) reg.VecVirtual {
	x := XMM()
	VMOVSS(at(first), x)
	for k := 1; k < 4; k++ {
		VINSERTPS(Imm(uint64(k<<4)), at(first+k), x, x)
	}
	return x
}

func own512() (all []*format512) {
	for _, t := range ownTypes {
		f := nibbles32(t.name, t.bytes(), t.head, 8, ' ', nil)
		if t.wide {
			f = t.bytes512()
		}
		f.runs, f.runBytes = t.runs, t.runBytes()
		setup, scales := f.setup, t.scales512()
		var least vec
		f.setup = func() {
			setup()
			scales.setup()
			least = YMM()
			VMOVDQU(dwords(leastScale<<1), least)
		}
		f.floats = func(r *rowKernel) (vec, vec) {
			w, size, k := scales.read(r), YMM(), K()
			VPSLLD(Imm(1), w, size)
			VPCMPUD(Imm(5), least, size, k) // not below
			VMOVAPS_Z(w, k, w)
			return w, nil
		}
		all = append(all, f)
	}
	return all
}

// bytes512 is the codes of Q8_0 behind another head.
func (t *ownType) bytes512() *format512 {
	var flip vec
	return &format512{
		name: t.name, bytes: t.bytes(), act: 32, order: natural, bias: 128, kind: ' ',
		setup: func() { flip = zmm(bytes(0x80)) },
		codes: func(r *rowKernel, _ int) (c [4]vec) {
			for k := range c {
				c[k] = ZMM()
				if t.runs > 1 {
					VPXORD(r.at(2*k, t.head), flip, c[k])
					continue
				}
				VBROADCASTI64X4(r.at(2*k, t.head), c[k])
				VINSERTI64X4(Imm(1), r.at(2*k+1, t.head), c[k], c[k])
				VPXORD(flip, c[k], c[k])
			}
			return c
		},
	}
}

// A gathering reads the scales of the eight runs, as floats.
type gathering struct {
	setup func()
	read  func(r *rowKernel) vec
}

// scales512 gathers by one permutation of two registers where the group's scales
// lie within two.
func (t *ownType) scales512() gathering {
	at := func(r *rowKernel, k int) Mem { return Mem{Base: r.w, Disp: k * t.bytes()} }
	var order vec
	// A second register of memory ends with the last scale; order says which floats,
	// or halves of floats, are taken from both.
	unit := t.head
	second := 7/t.runs*t.bytes() + unit - 64
	number := func(k int) int {
		b := k / t.runs * t.bytes()
		if b >= 64 {
			b += 64 - second
		}
		return b / unit
	}
	switch {
	case t.wide && t.runs == 4:
		return gathering{func() {}, func(r *rowKernel) vec {
			y, x := YMM(), XMM()
			VBROADCASTSS(at(r, 0), y)
			VBROADCASTSS(at(r, 1), x)
			VINSERTF32X4(Imm(1), x, y, y)
			return y
		}}
	case t.wide:
		return gathering{func() {}, func(r *rowKernel) vec {
			each := func(k int) Mem { return at(r, k) }
			lo, hi, y := floats4(each, 0), floats4(each, 4), YMM()
			VINSERTF32X4(Imm(1), hi, lo.AsY(), y)
			return y
		}}
	}
	return gathering{
		setup: func() {
			order = zmm(constant(64, func(i int) byte { return byte(number(i/unit%8) >> (i % unit * 8)) }))
		},
		read: func(r *rowKernel) vec {
			z, next := ZMM(), Mem{Base: r.w, Disp: second}
			VMOVDQU32(Mem{Base: r.w}, z)
			if t.head == 4 {
				VPERMT2D(next, order, z)
				return z.AsY().(vec)
			}
			y := YMM()
			VPERMT2W(next, order, z)
			VPMOVZXWD(z.AsX(), y)
			VPSLLD(Imm(16), y, y)
			return y
		},
	}
}
