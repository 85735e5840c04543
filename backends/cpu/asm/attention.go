package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// attention are the kernels of the key-value cache. Rows are multiples of 16
// elements.
func attention() {
	for _, l := range levels {
		decodeF16(l)
		decodeQ8(l)
		encodeF16(l)
		scores(l)
		weigh(l)
	}
}

func decodeF16(l level) {
	TEXT("decodeF16"+l.name, NOSPLIT, "func(dst []float32, src []uint16)")
	Doc("decodeF16" + l.name + " is decodeF16; len(src) is a multiple of 16.")
	dst, src := Load(Param("dst").Base(), GP64()), Load(Param("src").Base(), GP64())
	n := Load(Param("src").Len(), GP64())
	loop("each", n, 16, func() {
		for h, r := range l.lanes() {
			VCVTPH2PS(Mem{Base: src, Disp: 16 * h}, r)
			VMOVUPS(r, Mem{Base: dst, Disp: 32 * h})
		}
		ADDQ(Imm(32), src)
		ADDQ(Imm(64), dst)
	})
	VZEROUPPER()
	RET()
}

func decodeQ8(l level) {
	TEXT("decodeQ8"+l.name, NOSPLIT, "func(dst []float32, code []int8, scale []float32)")
	Doc("decodeQ8" + l.name + " is decodeQ8.")
	dst, code := Load(Param("dst").Base(), GP64()), Load(Param("code").Base(), GP64())
	scale, n := Load(Param("scale").Base(), GP64()), Load(Param("scale").Len(), GP64())
	d := l.reg()
	loop("each", n, 1, func() {
		VBROADCASTSS(Mem{Base: scale}, d)
		for at := 0; at < 32; at += l.floats() {
			r := l.reg()
			VPMOVSXBD(Mem{Base: code, Disp: at}, r)
			VCVTDQ2PS(r, r)
			VMULPS(d, r, r)
			VMOVUPS(r, Mem{Base: dst, Disp: 4 * at})
		}
		ADDQ(Imm(4), scale)
		ADDQ(Imm(32), code)
		ADDQ(U32(128), dst)
	})
	VZEROUPPER()
	RET()
}

func encodeF16(l level) {
	TEXT("encodeF16"+l.name, NOSPLIT, "func(dst []uint16, x []float32) (top uint32)")
	Doc("encodeF16" + l.name + " is encodeF16; len(x) is a multiple of 16.")
	dst, x := Load(Param("dst").Base(), GP64()), Load(Param("x").Base(), GP64())
	n := Load(Param("x").Len(), GP64())
	magnitude, high, low, top := l.constant(0x7fffffff), l.float(65504), l.register(0xc77fe000), l.reg()
	l.zero(top)
	loop("each", n, 16, func() {
		for h, r := range l.lanes() {
			a := l.reg()
			VMOVUPS(Mem{Base: x, Disp: 32 * h}, r)
			VANDPS(magnitude, r, a)
			VPMAXUD(a, top, top)
			VMINPS(high, r, r)
			VMAXPS(low, r, r)
			VCVTPS2PH(Imm(0), r, Mem{Base: dst, Disp: 16 * h}) // to nearest even
		}
		ADDQ(Imm(64), x)
		ADDQ(Imm(32), dst)
	})
	Store(l.largest(top), ReturnIndex(0))
	VZEROUPPER()
	RET()
}

// scores forms sixteen sums at once, or four: one key's sixteen lanes in a
// register or two, then a tree for all keys together.
func scores(l level) {
	TEXT("scores"+l.name, NOSPLIT, "func(dst, q, keys []float32, scale float32)")
	Doc("scores" + l.name + " is scores; len(dst) and len(q) are multiples of 16.")
	dst, left := Load(Param("dst").Base(), GP64()), Load(Param("dst").Len(), GP64())
	key, size := Load(Param("keys").Base(), GP64()), Load(Param("q").Len(), GP64())
	SHLQ(Imm(2), size) // bytes of a key
	scale, zero := l.reg(), l.reg()
	at, _ := Param("scale").Resolve()
	VBROADCASTSS(at.Addr, scale)
	l.zero(zero)
	s3 := GP64()
	LEAQ(Mem{Base: size, Index: size, Scale: 2}, s3)
	q, n, k := GP64(), GP64(), GP64()

	if l.wide {
		s5, s7, k8 := GP64(), GP64(), GP64()
		LEAQ(Mem{Base: size, Index: size, Scale: 4}, s5)
		LEAQ(Mem{Base: s3, Index: size, Scale: 4}, s7)
		loop("keys", left, 16, func() {
			Load(Param("q").Base(), q)
			Load(Param("q").Len(), n)
			MOVQ(key, k)
			LEAQ(Mem{Base: key, Index: size, Scale: 8}, k8)
			acc := make([]reg.VecVirtual, 16)
			for i := range acc {
				acc[i] = ZMM()
				l.zero(acc[i])
			}
			loop("lanes", n, 16, func() {
				v := ZMM()
				VMOVUPS(Mem{Base: q}, v)
				for i := range acc {
					b := k
					if i >= 8 {
						b = k8
					}
					m := []Mem{{Base: b}, {Base: b, Index: size, Scale: 1}, {Base: b, Index: size, Scale: 2}, {Base: b, Index: s3, Scale: 1},
						{Base: b, Index: size, Scale: 4}, {Base: b, Index: s5, Scale: 1}, {Base: b, Index: s3, Scale: 2}, {Base: b, Index: s7, Scale: 1}}[i%8]
					p := ZMM()
					VMULPS(m, v, p)
					VADDPS(p, acc[i], acc[i])
				}
				ADDQ(Imm(64), q)
				ADDQ(Imm(64), k)
				ADDQ(Imm(64), k8)
			})
			// Each step halves the lanes of a key: two registers become one.
			a := acc
			pairs := func(apart int, even, odd func(x, y, to reg.VecVirtual)) {
				var to []reg.VecVirtual
				for i := range a {
					if i/apart%2 == 0 {
						e, o := ZMM(), ZMM()
						even(a[i], a[i+apart], e)
						odd(a[i], a[i+apart], o)
						VADDPS(o, e, e)
						to = append(to, e)
					}
				}
				a = to
			}
			shuffle := func(sel uint64) func(x, y, to reg.VecVirtual) {
				return func(x, y, to reg.VecVirtual) { VSHUFF32X4(Imm(sel), y, x, to) }
			}
			// Keys i and i+8 into halves, then i and i+4 into quarters: a quarter's
			// key is its first plus 0, 4, 8, 12 in some order; then i and i+2, i and i+1
			// within quarters.
			pairs(8, shuffle(0x44), shuffle(0xee))
			pairs(4, shuffle(0x88), shuffle(0xdd))
			pairs(2, func(x, y, to reg.VecVirtual) { VUNPCKLPD(y, x, to) }, func(x, y, to reg.VecVirtual) { VUNPCKHPD(y, x, to) })
			pairs(1, func(x, y, to reg.VecVirtual) { VSHUFPS(Imm(0x88), y, x, to) }, func(x, y, to reg.VecVirtual) { VSHUFPS(Imm(0xdd), y, x, to) })
			r := a[0]
			order, places := ZMM(), make([]int, 16)
			for i := range places {
				places[i] = scoreOrder(i)
			}
			VMOVDQU32(dwords(places...), order)
			VPERMPS(r, order, r)
			VADDPS(zero, r, r) // a sum from +0 on is never -0
			VMULPS(scale, r, r)
			VMOVUPS(r, Mem{Base: dst})
			ADDQ(Imm(64), dst)
			SHLQ(Imm(4), size)
			ADDQ(size, key)
			SHRQ(Imm(4), size)
		})
	} else {
		loop("keys", left, 4, func() {
			Load(Param("q").Base(), q)
			Load(Param("q").Len(), n)
			MOVQ(key, k)
			acc := make([]reg.VecVirtual, 8)
			for i := range acc {
				acc[i] = YMM()
				l.zero(acc[i])
			}
			loop("lanes", n, 16, func() {
				v := []reg.VecVirtual{YMM(), YMM()}
				VMOVUPS(Mem{Base: q}, v[0])
				VMOVUPS(Mem{Base: q, Disp: 32}, v[1])
				for i := range acc {
					m := []Mem{{Base: k}, {Base: k, Index: size, Scale: 1}, {Base: k, Index: size, Scale: 2}, {Base: k, Index: s3, Scale: 1}}[i/2]
					p := YMM()
					VMULPS(m.Offset(32*(i%2)), v[i%2], p)
					VADDPS(p, acc[i], acc[i])
				}
				ADDQ(Imm(64), q)
				ADDQ(Imm(64), k)
			})
			for i := 0; i < 8; i += 2 {
				VADDPS(acc[i+1], acc[i], acc[i])
			}
			half := func(x, y reg.VecVirtual) reg.VecVirtual {
				e, o := YMM(), YMM()
				VPERM2F128(Imm(0x20), y, x, e)
				VPERM2F128(Imm(0x31), y, x, o)
				VADDPS(o, e, e)
				return e
			}
			x, y := half(acc[0], acc[4]), half(acc[2], acc[6]) // keys 0 and 2, 1 and 3
			e, o := YMM(), YMM()
			VUNPCKLPD(y, x, e)
			VUNPCKHPD(y, x, o)
			VADDPS(o, e, e) // 0 0 1 1 | 2 2 3 3
			VSHUFPS(Imm(0xdd), e, e, o)
			VSHUFPS(Imm(0x88), e, e, e)
			VADDPS(o, e, e) // 0 1 0 1 | 2 3 2 3
			hi := XMM()
			VEXTRACTF128(Imm(1), e, hi)
			VUNPCKLPD(hi, e.AsX(), hi)
			VADDPS(zero.AsX(), hi, hi) // a sum from +0 on is never -0
			VMULPS(scale.AsX(), hi, hi)
			VMOVUPS(hi, Mem{Base: dst})
			ADDQ(Imm(16), dst)
			LEAQ(Mem{Base: key, Index: size, Scale: 4}, key)
		})
	}
	VZEROUPPER()
	RET()
}

// scoreOrder gives the place of key i after the four steps of scores.
func scoreOrder(i int) int {
	// The register holds quarters; follow each key's lanes through the same steps.
	type lane struct{ key, n int }
	regs := make([][16]lane, 16)
	for k := range regs {
		for j := range 16 {
			regs[k][j] = lane{k, j}
		}
	}
	step := func(apart int, pick func(x, y [16]lane) [16]lane) {
		var to [][16]lane
		for r := range regs {
			if r/apart%2 == 0 {
				to = append(to, pick(regs[r], regs[r+apart]))
			}
		}
		regs = to
	}
	quarters := func(sel int) func(x, y [16]lane) [16]lane {
		return func(x, y [16]lane) (to [16]lane) {
			for q := range 4 {
				src := x
				if q >= 2 {
					src = y
				}
				copy(to[4*q:], src[4*(sel>>(2*q)&3):][:4])
			}
			return to
		}
	}
	within := func(at [4]int) func(x, y [16]lane) [16]lane { // 0..3 of x, 4..7 of y
		return func(x, y [16]lane) (to [16]lane) {
			for j := range to {
				s := at[j%4]
				src := x
				if s >= 4 {
					src = y
				}
				to[j] = src[j&^3+s%4]
			}
			return to
		}
	}
	step(8, quarters(0x44))
	step(4, quarters(0x88))
	step(2, within([4]int{0, 1, 4, 5}))
	step(1, within([4]int{0, 2, 4, 6}))
	for j, l := range regs[0] {
		if l.key == i {
			return j
		}
	}
	panic("a key is lost")
}

// weigh keeps a run of columns in registers over all keys.
func weigh(l level) {
	TEXT("weigh"+l.name, NOSPLIT, "func(y, p, values []float32)")
	Doc("weigh" + l.name + " is weigh; len(y) is a multiple of 16.")
	y, cols := Load(Param("y").Base(), GP64()), Load(Param("y").Len(), GP64())
	size, values := GP64(), Load(Param("values").Base(), GP64())
	MOVQ(cols, size)
	SHLQ(Imm(2), size)
	p, n, v := GP64(), GP64(), GP64()
	columns := func(label string, regs int) {
		bytes := 4 * l.floats()
		loop(label, cols, regs*l.floats(), func() {
			acc := make([]reg.VecVirtual, regs)
			for i := range acc {
				acc[i] = l.reg()
				VMOVUPS(Mem{Base: y, Disp: bytes * i}, acc[i])
			}
			Load(Param("p").Base(), p)
			Load(Param("p").Len(), n)
			MOVQ(values, v)
			w := l.reg()
			loop(label+"_key", n, 1, func() {
				VBROADCASTSS(Mem{Base: p}, w)
				for i := range acc {
					t := l.reg()
					VMULPS(Mem{Base: v, Disp: bytes * i}, w, t)
					VADDPS(t, acc[i], acc[i])
				}
				ADDQ(Imm(4), p)
				ADDQ(size, v)
			})
			for i := range acc {
				VMOVUPS(acc[i], Mem{Base: y, Disp: bytes * i})
			}
			ADDQ(U32(uint32(bytes*regs)), y)
			ADDQ(U32(uint32(bytes*regs)), values)
		})
	}
	columns("many", 8)
	columns("few", 16/l.floats())
	VZEROUPPER()
	RET()
}
