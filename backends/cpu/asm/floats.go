package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
)

// floats are the kernels of float rows: sixteen lanes, a multiply and an add
// each, rounded apart.
func floats() {
	dotLanes("dotLanesAVX2", false)
	dotLanes("dotLanesAVX512", true)
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
