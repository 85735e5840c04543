package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// vectors are the kernels of activations: cleaning, norms, activation
// functions, rotations, sums and the quantizer.
func vectors() {
	for _, l := range levels {
		cleanTo(l)
		rmsNorm(l)
		gate(l)
		sigmoidGate(l)
		expSum(l)
		largest(l)
		scaleBy(l)
		add(l)
		addProducts(l)
		combine(l)
		rotate(l)
		quantize(l, 32)
		quantize(l, 256)
	}
	rotatePairs()
}

func cleanTo(l level) {
	TEXT("cleanTo"+l.name, NOSPLIT, "func(dst, x []float32, tiny uint32) (top uint32)")
	Doc("cleanTo" + l.name + " is cleanTo.")
	dst, x := Load(Param("dst").Base(), GP64()), Load(Param("x").Base(), GP64())
	n := Load(Param("x").Len(), GP64())
	c := l.cleaner(Load(Param("tiny"), GP32()))
	v := l.reg()
	l.each("each", n, []reg.Register{dst, x}, func(k mask) {
		l.load(Mem{Base: x}, k, v)
		c.clean(v)
		l.store(v, k, Mem{Base: dst})
	})
	Store(l.largest(c.top), ReturnIndex(0))
	VZEROUPPER()
	RET()
}

func rmsNorm(l level) {
	TEXT("rmsNorm"+l.name, NOSPLIT, "func(y, x, weight []float32, inv, eps float32) (top uint32)")
	Doc("rmsNorm" + l.name + " is rmsNorm.")
	x, n := Load(Param("x").Base(), GP64()), Load(Param("weight").Len(), GP64())
	tiny := GP32()
	MOVL(U32(77<<23), tiny)
	c := l.cleaner(tiny)
	sum, v := l.lanes(), l.reg()
	for _, s := range sum {
		l.zero(s)
	}
	l.each16("squares", n, []reg.Register{x}, func(half, at int, k mask) {
		l.load(Mem{Base: x, Disp: at}, k, v)
		c.clean(v)
		VMULPS(v, v, v)
		VADDPS(v, sum[half], sum[half])
	})
	Comment("r = rsqrt(sum*inv + eps) in all lanes")
	q := l.tree(sum)
	inv, _ := Param("inv").Resolve()
	eps, _ := Param("eps").Resolve()
	VMULSS(inv.Addr, q, q)
	VADDSS(eps.Addr, q, q)
	a := l.reg()
	VBROADCASTSS(q, a)
	r := l.rsqrt(a)

	y, w := Load(Param("y").Base(), GP64()), Load(Param("weight").Base(), GP64())
	x, n = Load(Param("x").Base(), GP64()), Load(Param("weight").Len(), GP64())
	u := l.reg()
	l.each("scale", n, []reg.Register{y, x, w}, func(k mask) {
		l.load(Mem{Base: x}, k, v)
		l.load(Mem{Base: w}, k, u)
		c.clean(v)
		VMULPS(r, v, v)
		VMULPS(u, v, v)
		l.store(v, k, Mem{Base: y})
	})
	Store(l.largest(c.top), ReturnIndex(0))
	VZEROUPPER()
	RET()
}

func gate(l level) {
	TEXT("gate"+l.name, NOSPLIT, "func(g, u []float32)")
	Doc("gate" + l.name + " is gate.")
	g, u := Load(Param("g").Base(), GP64()), Load(Param("u").Base(), GP64())
	n := Load(Param("g").Len(), GP64())
	exp, rcp := l.exponential(), l.rcp()
	zero := l.reg()
	l.zero(zero)
	l.each("each", n, []reg.Register{g, u}, func(k mask) {
		v, e, w := l.reg(), l.reg(), l.reg()
		l.load(Mem{Base: g}, k, v)
		VSUBPS(v, zero, e)
		exp.of(e)
		VADDPS(rcp.one, e, e)
		VMULPS(rcp.of(e), v, e)
		l.notBelow(exp.low, v)(e)
		l.load(Mem{Base: u}, k, w)
		VMULPS(w, e, e)
		l.store(e, k, Mem{Base: g})
	})
	VZEROUPPER()
	RET()
}

func sigmoidGate(l level) {
	TEXT("sigmoidGate"+l.name, NOSPLIT, "func(x, g []float32)")
	Doc("sigmoidGate" + l.name + " is sigmoidGate.")
	x, g := Load(Param("x").Base(), GP64()), Load(Param("g").Base(), GP64())
	n := Load(Param("g").Len(), GP64())
	exp, rcp := l.exponential(), l.rcp()
	zero := l.reg()
	l.zero(zero)
	l.each("each", n, []reg.Register{x, g}, func(k mask) {
		v, e := l.reg(), l.reg()
		l.load(Mem{Base: g}, k, e)
		VSUBPS(e, zero, e)
		exp.of(e)
		VADDPS(rcp.one, e, e)
		l.load(Mem{Base: x}, k, v)
		VMULPS(rcp.of(e), v, v)
		l.store(v, k, Mem{Base: x})
	})
	VZEROUPPER()
	RET()
}

func expSum(l level) {
	TEXT("expSum"+l.name, NOSPLIT, "func(x []float32, top float32) float32")
	Doc("expSum" + l.name + " is expSum.")
	x, n := Load(Param("x").Base(), GP64()), Load(Param("x").Len(), GP64())
	exp := l.exponential()
	top, sum := l.reg(), l.lanes()
	at, _ := Param("top").Resolve()
	VBROADCASTSS(at.Addr, top)
	for _, s := range sum {
		l.zero(s)
	}
	l.each16("each", n, []reg.Register{x}, func(half, at int, k mask) {
		v := l.reg()
		l.load(Mem{Base: x, Disp: at}, k, v)
		VSUBPS(top, v, v)
		exp.of(v)
		l.store(v, k, Mem{Base: x, Disp: at})
		l.only(k, v)
		VADDPS(v, sum[half], sum[half])
	})
	Store(l.tree(sum), ReturnIndex(0))
	VZEROUPPER()
	RET()
}

func largest(l level) {
	TEXT("largest"+l.name, NOSPLIT, "func(x []float32) float32")
	Doc("largest" + l.name + " is largest.")
	x, n := Load(Param("x").Base(), GP64()), Load(Param("x").Len(), GP64())
	top, v := l.reg(), l.reg()
	VBROADCASTSS(Mem{Base: x}, top)
	l.each("each", n, []reg.Register{x}, func(k mask) {
		l.load(Mem{Base: x}, k, v)
		switch {
		case k == nil:
			VMAXPS(top, v, top) // v > top ? v : top
		case l.wide:
			VMAXPS(top, v, k, top)
		default:
			VBLENDVPS(k, v, top, v)
			VMAXPS(top, v, top)
		}
	})
	y := YMM()
	if l.wide {
		VEXTRACTF64X4(Imm(1), top, y)
		VMAXPS(top.AsY(), y, top.AsY())
	}
	t, m := XMM(), top.AsX()
	VEXTRACTF128(Imm(1), top.AsY(), t)
	VMAXPS(m, t, m)
	VPSHUFD(Imm(0x0e), m, t)
	VMAXPS(m, t, m)
	VPSHUFD(Imm(0x01), m, t)
	VMAXSS(m, t, m)
	Store(m, ReturnIndex(0))
	VZEROUPPER()
	RET()
}

func scaleBy(l level) {
	TEXT("scaleBy"+l.name, NOSPLIT, "func(x []float32, r float32)")
	Doc("scaleBy" + l.name + " is scaleBy.")
	x, n := Load(Param("x").Base(), GP64()), Load(Param("x").Len(), GP64())
	r, v := l.reg(), l.reg()
	at, _ := Param("r").Resolve()
	VBROADCASTSS(at.Addr, r)
	l.each("each", n, []reg.Register{x}, func(k mask) {
		l.load(Mem{Base: x}, k, v)
		VMULPS(r, v, v)
		l.store(v, k, Mem{Base: x})
	})
	VZEROUPPER()
	RET()
}

func add(l level) {
	TEXT("add"+l.name, NOSPLIT, "func(x, y []float32)")
	Doc("add" + l.name + " is add.")
	x, y := Load(Param("x").Base(), GP64()), Load(Param("y").Base(), GP64())
	n := Load(Param("x").Len(), GP64())
	v, u := l.reg(), l.reg()
	l.each("each", n, []reg.Register{x, y}, func(k mask) {
		l.load(Mem{Base: x}, k, v)
		l.load(Mem{Base: y}, k, u)
		VADDPS(u, v, v)
		l.store(v, k, Mem{Base: x})
	})
	VZEROUPPER()
	RET()
}

func addProducts(l level) {
	TEXT("addProducts"+l.name, NOSPLIT, "func(y, w, x []float32)")
	Doc("addProducts" + l.name + " is addProducts.")
	y, w, x := Load(Param("y").Base(), GP64()), Load(Param("w").Base(), GP64()), Load(Param("x").Base(), GP64())
	n := Load(Param("y").Len(), GP64())
	v, u, t := l.reg(), l.reg(), l.reg()
	l.each("each", n, []reg.Register{y, w, x}, func(k mask) {
		l.load(Mem{Base: y}, k, v)
		l.load(Mem{Base: w}, k, u)
		l.load(Mem{Base: x}, k, t)
		VMULPS(t, u, u)
		VADDPS(u, v, v)
		l.store(v, k, Mem{Base: y})
	})
	VZEROUPPER()
	RET()
}

func combine(l level) {
	TEXT("combine"+l.name, NOSPLIT, "func(x, out []float32, stride int, weights, shared []float32)")
	Doc("combine" + l.name + " is combine.")
	x, out := Load(Param("x").Base(), GP64()), Load(Param("out").Base(), GP64())
	n := Load(Param("x").Len(), GP64())
	stride := Load(Param("stride"), GP64())
	SHLQ(Imm(2), stride)
	weights, end := Load(Param("weights").Base(), GP64()), Load(Param("weights").Len(), GP64())
	LEAQ(Mem{Base: weights, Index: end, Scale: 4}, end)
	shared := Load(Param("shared").Base(), GP64())
	with := Load(Param("shared").Len(), GP64())
	v, y, w := l.reg(), l.reg(), l.reg()
	at, f := GP64(), GP64()
	label := "whole"
	l.each("each", n, []reg.Register{x, out, shared}, func(k mask) {
		l.zero(y)
		MOVQ(out, at)
		MOVQ(weights, f)
		Label(label + "_expert")
		VBROADCASTSS(Mem{Base: f}, w)
		l.load(Mem{Base: at}, k, v)
		VMULPS(w, v, v)
		VADDPS(v, y, y)
		ADDQ(stride, at)
		ADDQ(Imm(4), f)
		CMPQ(f, end)
		JNE(LabelRef(label + "_expert"))
		TESTQ(with, with)
		JZ(LabelRef(label + "_alone"))
		l.load(Mem{Base: shared}, k, v)
		VADDPS(v, y, y)
		Label(label + "_alone")
		l.load(Mem{Base: x}, k, v)
		VADDPS(y, v, v)
		l.store(v, k, Mem{Base: x})
		label = "tail"
	})
	VZEROUPPER()
	RET()
}

func rotate(l level) {
	TEXT("rotate"+l.name, NOSPLIT, "func(x, cos, sin []float32, headDim int)")
	Doc("rotate" + l.name + " is rotate.")
	head, rest := Load(Param("x").Base(), GP64()), Load(Param("x").Len(), GP64())
	headDim := Load(Param("headDim"), GP64())
	half := Load(Param("cos").Len(), GP64())
	x, y, cos, sin, n := GP64(), GP64(), GP64(), GP64(), GP64()
	a, b, c, s, t, u := l.reg(), l.reg(), l.reg(), l.reg(), l.reg(), l.reg()
	Label("head")
	CMPQ(rest, headDim)
	JLT(LabelRef("end"))
	MOVQ(head, x)
	LEAQ(Mem{Base: head, Index: half, Scale: 4}, y)
	Load(Param("cos").Base(), cos)
	Load(Param("sin").Base(), sin)
	MOVQ(half, n)
	l.each("each", n, []reg.Register{x, y, cos, sin}, func(k mask) {
		l.load(Mem{Base: x}, k, a)
		l.load(Mem{Base: y}, k, b)
		l.load(Mem{Base: cos}, k, c)
		l.load(Mem{Base: sin}, k, s)
		VMULPS(c, a, t)
		VMULPS(s, b, u)
		VSUBPS(u, t, t)
		VMULPS(c, b, b)
		VMULPS(s, a, a)
		VADDPS(a, b, b)
		l.store(t, k, Mem{Base: x})
		l.store(b, k, Mem{Base: y})
	})
	LEAQ(Mem{Base: head, Index: headDim, Scale: 4}, head)
	SUBQ(headDim, rest)
	JMP(LabelRef("head"))
	Label("end")
	VZEROUPPER()
	RET()
}

// rotatePairs is for AVX2 alone: VADDSUBPS, which is both halves of a rotation
// at once, has no form for ZMM.
func rotatePairs() {
	TEXT("rotatePairsAVX2", NOSPLIT, "func(x, cos, sin []float32, headDim int)")
	Doc("rotatePairsAVX2 is rotatePairs.")
	head, rest := Load(Param("x").Base(), GP64()), Load(Param("x").Len(), GP64())
	headDim := Load(Param("headDim"), GP64())
	half := Load(Param("cos").Len(), GP64())
	x, cos, sin, n := GP64(), GP64(), GP64(), GP64()
	a, b, c, s, twice := YMM(), YMM(), YMM(), YMM(), YMM()
	VMOVDQU(dwords(0, 0, 1, 1, 2, 2, 3, 3), twice)
	turn := func(a, b, c, s reg.VecVirtual) { // a is x, c and s stand twice
		VMULPS(c, a, c)
		VPERMILPS(Imm(0b10110001), a, b) // neighbours change places
		VMULPS(s, b, b)
		VADDSUBPS(b, c, a) // even: c-b, odd: c+b
	}
	Label("head")
	CMPQ(rest, headDim)
	JLT(LabelRef("end"))
	MOVQ(head, x)
	Load(Param("cos").Base(), cos)
	Load(Param("sin").Base(), sin)
	MOVQ(half, n)
	loop("four", n, 4, func() {
		VMOVUPS(Mem{Base: x}, a)
		VMOVUPS(Mem{Base: cos}, c.AsX())
		VMOVUPS(Mem{Base: sin}, s.AsX())
		VPERMPS(c, twice, c)
		VPERMPS(s, twice, s)
		turn(a, b, c, s)
		VMOVUPS(a, Mem{Base: x})
		ADDQ(Imm(32), x)
		ADDQ(Imm(16), cos)
		ADDQ(Imm(16), sin)
	})
	one, other, d, t := XMM(), XMM(), XMM(), XMM()
	loop("one", n, 1, func() {
		VMOVSD(Mem{Base: x}, one)
		VBROADCASTSS(Mem{Base: cos}, d)
		VBROADCASTSS(Mem{Base: sin}, t)
		turn(one, other, d, t)
		VMOVSD(one, Mem{Base: x})
		ADDQ(Imm(8), x)
		ADDQ(Imm(4), cos)
		ADDQ(Imm(4), sin)
	})
	LEAQ(Mem{Base: head, Index: headDim, Scale: 4}, head)
	SUBQ(headDim, rest)
	JMP(LabelRef("head"))
	Label("end")
	VZEROUPPER()
	RET()
}

// quantize makes blocks of n codes.
func quantize(l level, n int) {
	name := map[int]string{32: "quantize32", 256: "quantize256"}[n]
	TEXT(name+l.name, NOSPLIT, "func(code []int8, sum []int32, scale, x []float32) (top uint32)")
	Doc(name + l.name + " is " + name + ".")
	code, sum := Load(Param("code").Base(), GP64()), Load(Param("sum").Base(), GP64())
	scale, x := Load(Param("scale").Base(), GP64()), Load(Param("x").Base(), GP64())
	blocks := Load(Param("scale").Len(), GP64())
	top := GP32()
	XORL(top, top)
	magnitude := l.constant(0x7fffffff)
	rcp := l.rcp()
	perStep, steps := l.float(0x1.020408p-7), l.float(127)
	one8, one16 := YMM(), YMM()
	VPBROADCASTD(bytes(1), one8)
	VPBROADCASTD(words(1), one16)
	var order reg.VecVirtual
	if !l.wide {
		order = YMM()
		VMOVDQU(dwords(0, 4, 1, 5, 2, 6, 3, 7), order)
	}
	loop("block", blocks, 1, func() {
		a, v := l.reg(), l.reg()
		step := 4 * l.floats()
		VMOVUPS(Mem{Base: x}, a)
		VANDPS(magnitude, a, a)
		for at := step; at < 4*n; at += step {
			VMOVUPS(Mem{Base: x, Disp: at}, v)
			VANDPS(magnitude, v, v)
			VPMAXUD(v, a, a)
		}
		bits := l.largest(a)
		CMPL(bits, top)
		CMOVLHI(bits, top)
		CMPL(bits, U32(77<<23))
		JCS(LabelRef("zeros"))
		CMPL(bits, U32(177<<23))
		JHI(LabelRef("zeros"))

		f := XMM()
		VMOVD(bits, f)
		VBROADCASTSS(f, a)
		s := rcp.of(a)
		VMULPS(steps, s, s)
		VMULPS(perStep, a, a)
		VMOVSS(a.AsX(), Mem{Base: scale})
		i := GP64()
		XORQ(i, i)
		Label("codes")
		src := Mem{Base: x, Index: i, Scale: 4}
		c := YMM()
		if l.wide {
			w := ZMM()
			VMULPS(src, s, w)
			VCVTPS2DQ(w, w)
			VPMOVDB(w, c.AsX())
			h := ZMM()
			VMULPS(src.Offset(64), s, h)
			VCVTPS2DQ(h, h)
			hi := XMM()
			VPMOVDB(h, hi)
			VINSERTI128(Imm(1), hi, c, c)
		} else {
			w := [4]reg.VecVirtual{YMM(), YMM(), YMM(), YMM()}
			for j, r := range w {
				VMULPS(src.Offset(32*j), s, r)
				VCVTPS2DQ(r, r)
			}
			VPACKSSDW(w[1], w[0], w[0])
			VPACKSSDW(w[3], w[2], w[2])
			VPACKSSWB(w[2], w[0], w[0])
			VPERMD(w[0], order, c)
		}
		VMOVDQU(c, Mem{Base: code, Index: i, Scale: 1})
		p := YMM()
		VPMADDUBSW(c, one8, p) // at most 254
		VPMADDWD(one16, p, p)
		VPHADDD(p, p, p)
		VPHADDD(p, p, p)
		VMOVD(p.AsX(), Mem{Base: sum})
		hi := XMM()
		VEXTRACTI128(Imm(1), p, hi)
		VMOVD(hi, Mem{Base: sum, Disp: 4})
		ADDQ(Imm(8), sum)
		ADDQ(Imm(32), i)
		CMPQ(i, U32(uint32(n)))
		JNE(LabelRef("codes"))
		JMP(LabelRef("next"))

		Label("zeros")
		z := YMM()
		VPXOR(z, z, z)
		VMOVD(z.AsX(), Mem{Base: scale})
		for at := 0; at < n; at += 32 {
			VMOVDQU(z, Mem{Base: code, Disp: at})
		}
		for at := 0; at < n/4; at += 8 {
			VMOVQ(z.AsX(), Mem{Base: sum, Disp: at})
		}
		ADDQ(Imm(uint64(n/4)), sum)
		Label("next")
		ADDQ(Imm(4), scale)
		ADDQ(U32(uint32(n)), code)
		ADDQ(U32(uint32(4*n)), x)
	})
	Store(top, ReturnIndex(0))
	VZEROUPPER()
	RET()
}
