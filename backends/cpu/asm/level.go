package main

import (
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// A level is the registers of one set of kernels: ZMM of 16 floats with mask
// registers, or YMM of 8 with masks in vectors.
type level struct {
	name string
	wide bool
}

var levels = []level{{"AVX2", false}, {"AVX512", true}}

// floats is how many fit a register.
func (l level) floats() int {
	if l.wide {
		return 16
	}
	return 8
}

// reg is a new vector register.
func (l level) reg() reg.VecVirtual {
	if l.wide {
		return ZMM()
	}
	return YMM()
}

// lanes is new registers for 16 floats: one or two.
func (l level) lanes() []reg.VecVirtual {
	if l.wide {
		return []reg.VecVirtual{ZMM()}
	}
	return []reg.VecVirtual{YMM(), YMM()}
}

func (l level) zero(r reg.VecVirtual) {
	if l.wide {
		VPXORD(r, r, r)
	} else {
		VPXOR(r, r, r)
	}
}

// constant is an operand that may stand first in an instruction: a register,
// where there are 32 of them, or memory. Make it before a loop.
func (l level) constant(bits uint32) Op {
	if l.wide {
		return l.register(bits)
	}
	return dwords(int(bits))
}

func (l level) float(f float32) Op { return l.constant(math.Float32bits(f)) }

// register is a constant in a register.
func (l level) register(bits uint32) reg.VecVirtual {
	r := l.reg()
	VBROADCASTSS(dwords(int(bits)), r)
	return r
}

// A mask is the floats of a register that a tail takes; nil is all of them.
type mask Op

// load reads the floats of the mask, the others become 0.
func (l level) load(m Mem, k mask, r reg.VecVirtual) {
	switch {
	case k == nil:
		VMOVUPS(m, r)
	case l.wide:
		VMOVUPS_Z(m, k, r)
	default:
		VMASKMOVPS(m, k, r)
	}
}

// store writes the floats of the mask.
func (l level) store(r reg.VecVirtual, k mask, m Mem) {
	switch {
	case k == nil:
		VMOVUPS(r, m)
	case l.wide:
		VMOVUPS(r, k, m)
	default:
		VMASKMOVPS(r, k, m)
	}
}

// only zeroes the floats outside the mask.
func (l level) only(k mask, r reg.VecVirtual) {
	switch {
	case k == nil:
	case l.wide:
		VMOVAPS_Z(r, k, r)
	default:
		VANDPS(k, r, r)
	}
}

// masks gives one mask for each register of lanes(): the first n of 16 floats.
func (l level) masks(n reg.Register) []mask {
	if l.wide {
		bits, k := GP32(), K()
		MOVQ(n, reg.RCX)
		MOVL(U32(1), bits)
		SHLL(reg.CL, bits)
		DECL(bits)
		KMOVW(bits, k)
		return []mask{k}
	}
	ones := constant(128, func(i int) byte { return byte(i/64) - 1 }) // 16 words of ones, then 16 of zeros
	at, off := GP64(), GP64()
	LEAQ(ones, at)
	MOVQ(U32(16), off)
	SUBQ(n, off)
	k := []mask{YMM(), YMM()}
	VMOVUPS(Mem{Base: at, Index: off, Scale: 4}, k[0])
	VMOVUPS(Mem{Base: at, Index: off, Scale: 4, Disp: 32}, k[1])
	return k
}

// each runs body for a register of floats at a time, then for what is left
// under a mask. The pointers, and n, move along.
func (l level) each(label string, n reg.Register, pointers []reg.Register, body func(k mask)) {
	step := l.floats()
	loop(label, n, step, func() {
		body(nil)
		for _, p := range pointers {
			ADDQ(Imm(uint64(4*step)), p)
		}
	})
	TESTQ(n, n)
	JZ(LabelRef(label + "_done"))
	body(l.masks(n)[0])
	Label(label + "_done")
}

// each16 runs body for 16 floats at a time, register by register, then for
// what is left under masks.
func (l level) each16(label string, n reg.Register, pointers []reg.Register, body func(half, at int, k mask)) {
	half := func(k []mask) {
		for h := range 16 / l.floats() {
			if k == nil {
				body(h, 32*h, nil)
			} else {
				body(h, 32*h, k[h])
			}
		}
	}
	loop(label, n, 16, func() {
		half(nil)
		for _, p := range pointers {
			ADDQ(Imm(64), p)
		}
	})
	TESTQ(n, n)
	JZ(LabelRef(label + "_done"))
	half(l.masks(n))
	Label(label + "_done")
}

// A cleaner zeroes what is small.
type cleaner struct {
	l            level
	magnitude    Op
	tiny         reg.VecVirtual // the least bits that stay; AVX2: less 1
	abs, keep    reg.VecVirtual
	top          reg.VecVirtual // the largest bits so far
	small, large Op
}

// cleaner makes one for a bound in a register of 32 bits.
func (l level) cleaner(tiny reg.Register) *cleaner {
	c := &cleaner{l: l, magnitude: l.constant(0x7fffffff), tiny: l.reg(), abs: l.reg(), top: l.reg()}
	if l.wide {
		VPBROADCASTD(tiny, c.tiny)
	} else {
		c.keep = l.reg()
		less := GP32()
		MOVL(tiny, less)
		DECL(less)
		x := XMM()
		VMOVD(less, x)
		VPBROADCASTD(x, c.tiny)
	}
	l.zero(c.top)
	return c
}

// clean makes x +0 where it is below the bound, and notes its size.
func (c *cleaner) clean(x reg.VecVirtual) {
	VANDPS(c.magnitude, x, c.abs)
	VPMAXUD(c.abs, c.top, c.top)
	if c.l.wide {
		k := K()
		VPCMPUD(Imm(5), c.tiny, c.abs, k) // not below
		VMOVAPS_Z(x, k, x)
	} else {
		VPCMPGTD(c.tiny, c.abs, c.keep)
		VANDPS(c.keep, x, x)
	}
}

// largest gives the largest of the unsigned words of r, and spoils r.
func (l level) largest(r reg.VecVirtual) reg.Register {
	t, x := YMM(), r.AsY()
	if l.wide {
		VEXTRACTI64X4(Imm(1), r, t)
		VPMAXUD(t, x, x)
	}
	u, y := XMM(), r.AsX()
	VEXTRACTI128(Imm(1), x, u)
	VPMAXUD(u, y, y)
	VPSHUFD(Imm(0x0e), y, u)
	VPMAXUD(u, y, y)
	VPSHUFD(Imm(0x01), y, u)
	VPMAXUD(u, y, y)
	g := GP32()
	VMOVD(y, g)
	return g
}

// tree adds the 16 floats of lanes, j with j+8, then j+4, j+2, j+1, into every
// float of the lowest four of the register that it gives.
func (l level) tree(a []reg.VecVirtual) reg.VecVirtual {
	y := YMM()
	if l.wide {
		VEXTRACTF64X4(Imm(1), a[0], y)
		VADDPS(y, a[0].AsY(), y)
	} else {
		VADDPS(a[1], a[0], y)
	}
	x, t := XMM(), XMM()
	VEXTRACTF128(Imm(1), y, x)
	VADDPS(x, y.AsX(), x)
	VPSHUFD(Imm(0x0e), x, t)
	VADDPS(t, x, x)
	VPSHUFD(Imm(0x01), x, t)
	VADDSS(t, x, x)
	return x
}
