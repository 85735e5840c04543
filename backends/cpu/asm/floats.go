package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// floats are the kernels of float rows: sixteen lanes, a multiply and an add
// each, rounded apart.
func floats() {
	dotLanes("dotLanesAVX2", false)
	dotLanes("dotLanesAVX512", true)
	scan("scanAVX2", false)
	scan("scanAVX512", true)
	for _, wide := range []bool{false, true} {
		for _, typ := range []string{"F32", "F16", "BF16"} {
			rows := 2 // of eight lanes a register: the sums of more would not fit
			if wide {
				rows = 4
			}
			for _, f := range []floatTile{{rows: 1, n: 1}, {rows: 1, n: rows}, {rows: rows, n: 1}, {rows: rows, n: rows}} {
				f.typ, f.wide = typ, wide
				f.emit()
			}
		}
		floats8(wide)
	}
}

// scan adds up the 64-bit words of p, in runs of 256 bytes.
func scan(name string, wide bool) {
	TEXT(name, NOSPLIT, "func(p []byte) uint64")
	Doc(name + " is scan; len(p) is a multiple of 256.")
	p, n := Load(Param("p").Base(), GP64()), Load(Param("p").Len(), GP64())
	size, acc := 32, make([]vec, 4)
	for i := range acc {
		if wide {
			size, acc[i] = 64, zero()
		} else {
			acc[i] = YMM()
			VPXOR(acc[i], acc[i], acc[i])
		}
	}
	Label("run")
	CMPQ(n, I32(256))
	JLT(LabelRef("run_end"))
	for i := 0; i < 256; i += size {
		if i%64 == 0 {
			PREFETCHT0(Mem{Base: p, Disp: 4096 + i})
		}
		a := acc[i/size%4]
		VPADDQ(Mem{Base: p, Disp: i}, a, a)
	}
	ADDQ(I32(256), p)
	SUBQ(I32(256), n)
	JMP(LabelRef("run"))
	Label("run_end")
	VPADDQ(acc[1], acc[0], acc[0])
	VPADDQ(acc[3], acc[2], acc[2])
	VPADDQ(acc[2], acc[0], acc[0])
	sum, t := acc[0], YMM()
	if wide {
		VEXTRACTI64X4(Imm(1), sum, t)
		VPADDQ(t, sum.AsY(), sum.AsY())
	}
	VEXTRACTI128(Imm(1), sum.AsY(), t.AsX())
	VPADDQ(t.AsX(), sum.AsX(), sum.AsX())
	VPSHUFD(Imm(0x4e), sum.AsX(), t.AsX())
	VPADDQ(t.AsX(), sum.AsX(), sum.AsX())
	g := GP64()
	VMOVQ(sum.AsX(), g) // from a vector register, not to one
	VZEROUPPER()
	Store(g, ReturnIndex(0))
	RET()
}

// The fields of floatArgs in backends/cpu/floats.go, eight bytes each.
const (
	floatW = 8 * iota
	floatRowBytes
	floatX
	floatStride
	floatRuns
	floatY
)

// A floatTile multiplies some float rows by some positions: sixteen lanes for
// each pair, in one register or two, each weight decoded and cleaned once.
type floatTile struct {
	typ     string
	wide    bool
	rows, n int

	args reg.GPVirtual
	w, x []reg.GPVirtual // of each row and of each position
	acc  []vec           // [rows, n, regs]
}

// regs is the registers of sixteen lanes.
func (f *floatTile) regs() int {
	if f.wide {
		return 1
	}
	return 2
}

func (f *floatTile) field(at int) reg.GPVirtual {
	g := GP64()
	MOVQ(Mem{Base: f.args, Disp: at}, g)
	return g
}

// begin starts the function.
func (f *floatTile) begin() {
	level := "AVX2"
	if f.wide {
		level = "AVX512"
	}
	TEXT(fmt.Sprintf("floats%s_%dx%d%s", f.typ, f.rows, f.n, level), NOSPLIT, "func(a *floatArgs)")
	f.args = Load(Param("a"), GP64()).(reg.GPVirtual)
	next := func(p reg.GPVirtual, stride reg.GPVirtual) reg.GPVirtual {
		g := GP64()
		LEAQ(Mem{Base: p, Index: stride, Scale: 1}, g)
		return g
	}
	f.w, f.x = []reg.GPVirtual{f.field(floatW)}, []reg.GPVirtual{f.field(floatX)}
	if f.rows > 1 {
		s := f.field(floatRowBytes)
		for len(f.w) < f.rows {
			f.w = append(f.w, next(f.w[len(f.w)-1], s))
		}
	}
	if f.n > 1 {
		s := f.field(floatStride)
		for len(f.x) < f.n {
			f.x = append(f.x, next(f.x[len(f.x)-1], s))
		}
	}
	f.acc = make([]vec, f.rows*f.n*f.regs())
	for i := range f.acc {
		if f.wide {
			f.acc[i] = zero()
		} else {
			f.acc[i] = YMM()
			VXORPS(f.acc[i], f.acc[i], f.acc[i])
		}
	}
}

func (f *floatTile) emit() {
	f.begin()
	size := map[string]int{"F32": 4, "F16": 2, "BF16": 2}[f.typ]
	loop("run", f.field(floatRuns), 1, func() {
		for r, w := range f.w {
			if f.rows == 1 || f.n == 1 {
				PREFETCHT0(Mem{Base: w, Disp: 4096})
			}
			for h := range f.regs() {
				v, keep := f.decode(Mem{Base: w, Disp: h * size * 8})
				for j, x := range f.x {
					f.multiply(v, keep, Mem{Base: x, Disp: 32 * h}, f.acc[(r*f.n+j)*f.regs()+h])
				}
			}
			ADDQ(Imm(uint64(16*size)), w)
		}
		for _, x := range f.x {
			ADDQ(Imm(64), x)
		}
	})
	f.sums()
	VZEROUPPER()
	RET()
}

// sums adds the lanes up and writes them, and returns where they are.
func (f *floatTile) sums() reg.GPVirtual {
	y := f.field(floatY)
	for i := range f.rows * f.n {
		l, t := f.acc[i*f.regs()], YMM()
		if f.wide {
			VEXTRACTF32X8(Imm(1), l, t)
			VADDPS(t, l.AsY(), l.AsY())
			VEXTRACTF32X4(Imm(1), l.AsY(), t.AsX())
		} else {
			VADDPS(f.acc[i*f.regs()+1], l, l)
			VEXTRACTF128(Imm(1), l.AsY(), t.AsX())
		}
		VADDPS(t.AsX(), l.AsX(), l.AsX())
		VMOVHLPS(l.AsX(), l.AsX(), t.AsX())
		VADDPS(t.AsX(), l.AsX(), l.AsX())
		VMOVSHDUP(l.AsX(), t.AsX())
		VADDSS(t.AsX(), l.AsX(), l.AsX())
		VMOVSS(l.AsX(), Mem{Base: y, Disp: 4 * i})
	}
	return y
}

// tiny is the bits of 2^-50.
const tiny = (127 - 50) << 23

// decode gives 16 or 8 weights as floats, and which of them count: those that
// are not below 2^-50, as a mask, or, without masks, the others made 0.
func (f *floatTile) decode(m Mem) (v, keep reg.Register) {
	v = YMM()
	if f.wide {
		v = ZMM()
	}
	switch f.typ {
	case "F16": // nothing but 0 is below 2^-24
		VCVTPH2PS(m, v)
		return v, nil
	case "BF16":
		VPMOVZXWD(m, v)
		VPSLLD(Imm(16), v, v)
	default:
		if f.wide {
			VMOVDQU32(m, v)
		} else {
			VMOVDQU(m, v)
		}
	}
	return v, f.clean(v)
}

// clean says, as decode does, which weights count.
func (f *floatTile) clean(v reg.Register) (keep reg.Register) {
	if f.wide {
		t, k := ZMM(), K()
		VPSLLD(Imm(1), v, t)
		VPCMPUD(Imm(5), dwords(tiny<<1), t, k) // not less
		return k
	}
	t := YMM()
	VPAND(dwords(0x7fffffff), v, t)
	VCMPPS(Imm(5), dwords(tiny), t, t) // not less, or unordered
	VANDPS(t, v, v.(vec))
	return nil
}

func (f *floatTile) multiply(v, keep reg.Register, x Mem, acc vec) {
	p := YMM()
	if f.wide {
		p = ZMM()
	}
	if keep != nil {
		VMULPS_Z(x, v, keep, p)
	} else {
		VMULPS(x, v, p)
	}
	VADDPS(p, acc, acc)
}

// dotLanes: l[i%16] += w[i]*x[i]. The last len(w)%16 elements are left to a
// second loop, of one lane at a time.
func dotLanes(name string, wide bool) {
	TEXT(name, NOSPLIT, "func(l *[16]float32, w, x []float32)")
	Doc(name + " is dotLanes; len(w) <= len(x).")
	l := Load(Param("l"), GP64())
	w := Load(Param("w").Base(), GP64())
	n := Load(Param("w").Len(), GP64())
	x := Load(Param("x").Base(), GP64())
	at := Mem{Base: l}
	if wide {
		acc, p := ZMM(), ZMM()
		VMOVUPS(at, acc)
		loop("wide", n, 16, func() {
			VMOVUPS(Mem{Base: w}, p)
			VMULPS(Mem{Base: x}, p, p)
			VADDPS(p, acc, acc)
			ADDQ(Imm(64), w)
			ADDQ(Imm(64), x)
		})
		VMOVUPS(acc, at)
	} else {
		a0, a1, p0, p1 := YMM(), YMM(), YMM(), YMM()
		VMOVUPS(at, a0)
		VMOVUPS(at.Offset(32), a1)
		loop("wide", n, 16, func() {
			VMOVUPS(Mem{Base: w}, p0)
			VMOVUPS(Mem{Base: w, Disp: 32}, p1)
			VMULPS(Mem{Base: x}, p0, p0)
			VMULPS(Mem{Base: x, Disp: 32}, p1, p1)
			VADDPS(p0, a0, a0)
			VADDPS(p1, a1, a1)
			ADDQ(Imm(64), w)
			ADDQ(Imm(64), x)
		})
		VMOVUPS(a0, at)
		VMOVUPS(a1, at.Offset(32))
	}
	f := XMM()
	loop("tail", n, 1, func() {
		VMOVSS(Mem{Base: w}, f)
		VMULSS(Mem{Base: x}, f, f)
		VADDSS(at, f, f)
		VMOVSS(f, at)
		ADDQ(Imm(4), w)
		ADDQ(Imm(4), x)
		ADDQ(Imm(4), l)
	})
	VZEROUPPER()
	RET()
}
