package main

import (
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// The own functions (internal/arith, docs/arithmetic.md section 3), each
// operation rounded by itself.

// rcp are the constants of 1/a.
type rcp struct {
	l        level
	seed     reg.VecVirtual
	two, one reg.VecVirtual
}

func (l level) rcp() *rcp {
	return &rcp{l, l.register(0x7ef311c0), l.register(math.Float32bits(2)), l.register(math.Float32bits(1))}
}

// of gives 1/a in a new register.
func (c *rcp) of(a reg.VecVirtual) reg.VecVirtual {
	y, t := c.l.reg(), c.l.reg()
	VPSUBD(a, c.seed, y)
	for _, k := range []reg.VecVirtual{c.two, c.two} {
		VMULPS(y, a, t)
		VSUBPS(t, k, t)
		VMULPS(t, y, y)
	}
	VMULPS(y, a, t)
	VSUBPS(t, c.one, t)
	VMULPS(t, y, t)
	VADDPS(t, y, y)
	return y
}

// rsqrt gives 1/sqrt(a) in a new register; its constants are made here.
func (l level) rsqrt(a reg.VecVirtual) reg.VecVirtual {
	h, y, t := l.reg(), l.reg(), l.reg()
	threeHalves, half := l.register(math.Float32bits(1.5)), l.register(math.Float32bits(0.5))
	VMULPS(half, a, h)
	VPSRLD(Imm(1), a, t)
	seed := l.register(0x5f376380)
	VPSUBD(t, seed, y)
	for range 2 {
		VMULPS(y, h, t)
		VMULPS(y, t, t)
		VSUBPS(t, threeHalves, t)
		VMULPS(t, y, y)
	}
	VMULPS(y, h, t)
	VMULPS(y, t, t)
	VSUBPS(t, half, t)
	VMULPS(t, y, t)
	VADDPS(t, y, y)
	return y
}

// exponential are the constants of e^x.
type exponential struct {
	l                 level
	low, high         Op
	perLn2, rounder   Op
	ln2High, ln2Lower Op
	p                 [5]Op
	one               Op
}

func (l level) exponential() *exponential {
	return &exponential{l: l, low: l.float(-40), high: l.float(40), perLn2: l.float(0x1.715476p+0), rounder: l.float(12582912),
		ln2High: l.float(0.693359375), ln2Lower: l.float(-0x1.bd0106p-13),
		p:   [5]Op{l.float(0x1.6a241ap-10), l.float(0x1.1239f2p-7), l.float(0x1.5558f2p-5), l.float(0x1.555492p-3), l.float(0x1.fffffcp-2)},
		one: l.float(1)}
}

// of replaces x by e^x.
func (c *exponential) of(x reg.VecVirtual) {
	l := c.l
	keep := l.notBelow(c.low, x)
	VMINPS(x, l.held(c.high), x) // 40 < x ? 40 : x
	t, f, r := l.reg(), l.reg(), l.reg()
	VMULPS(c.perLn2, x, t)
	VADDPS(c.rounder, t, t)
	VSUBPS(c.rounder, t, f)
	VMULPS(c.ln2High, f, r)
	VSUBPS(r, x, r)
	VMULPS(c.ln2Lower, f, f)
	VSUBPS(f, r, r)
	p := f
	VMULPS(c.p[0], r, p)
	for _, k := range c.p[1:4] {
		VADDPS(k, p, p)
		VMULPS(r, p, p)
	}
	VADDPS(c.p[4], p, p)
	VMULPS(r, r, x)
	VMULPS(p, x, p)
	VADDPS(r, p, p)
	VADDPS(c.one, p, p)
	VPSLLD(Imm(23), t, t) // the bits of the rounder fall off: 0x4b400000 << 23 is 0
	VPADDD(t, p, x)
	keep(x)
}

// held is a constant in a register.
func (l level) held(c Op) reg.VecVirtual {
	if r, ok := c.(reg.VecVirtual); ok {
		return r
	}
	r := l.reg()
	VMOVUPS(c, r)
	return r
}

// notBelow compares x with a bound now, and zeroes later where x was below it.
func (l level) notBelow(bound Op, x reg.VecVirtual) func(r reg.VecVirtual) {
	if l.wide {
		k := K()
		VCMPPS(Imm(5), bound, x, k) // not less than, or unordered
		return func(r reg.VecVirtual) { VMOVAPS_Z(r, k, r) }
	}
	m := l.reg()
	VCMPPS(Imm(5), bound, x, m)
	return func(r reg.VecVirtual) { VANDPS(m, r, r) }
}
