package main

import (
	"fmt"
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// Rows of F8_128: blocks of a scale f32 and 128 codes of FP8-E4M3, of which the
// last may be short.
//
// A code, its sign moved to the top of 16 bits and the rest below a bit that is 0,
// is a binary16 of 2^-8 times its value, exactly, which 256 times the scale makes
// good; that product is rounded once, as the code's value times the scale is. Not
// so for the scales whose products may be below 2^-50 and count as 0, or that 256
// times would be too large: their blocks take a slower way. The codes 0x7f
// and 0xff are NaN, and so is the sum of a row with one.

const (
	// Below 2^-41 a product may be below 2^-50: the smallest code is 2^-9.
	float8Least = (127 - 41) << 23
	float8Most  = (127 + 100) << 23
)

// A float8Tile multiplies some rows by some positions, as floatTile does.
type float8Tile struct {
	floatTile
	top   []vec // of each row, the largest of its codes without their signs
	scale []vec
	next  reg.GPVirtual // bytes to the next rows; nil: they come next, or there are other positions
}

// floats8 are the kernels of F8_128. One position takes several rows too: the
// lanes of one alone would wait for each other.
func floats8(wide bool) {
	rows := 2
	if wide {
		rows = 4
	}
	for _, t := range []floatTile{{rows: 1, n: 1}, {rows: 1, n: rows}, {rows: rows, n: 1}, {rows: rows, n: rows}} {
		t.typ, t.wide = "F8_128", wide
		f := &float8Tile{floatTile: t}
		f.emit()
	}
}

func (f *float8Tile) emit() {
	f.begin()
	if f.rows > 1 && f.n == 1 {
		f.next = f.field(floatRowBytes)
		IMUL3Q(Imm(uint64(f.rows)), f.next, f.next)
	}
	for range f.rows {
		top, scale := YMM(), YMM()
		if f.wide {
			scale = ZMM()
		}
		if f.wide {
			top = zero().AsY().(vec)
		} else {
			VPXOR(top, top, top)
		}
		f.top, f.scale = append(f.top, top), append(f.scale, scale)
	}
	float256 := dwords(int(math.Float32bits(256)))
	left, runs := f.field(floatRuns), GP64()
	Label("block")
	MOVQ(I32(8), runs)
	CMPQ(left, runs)
	CMOVQLT(left, runs)
	SUBQ(runs, left)
	size := GP32()
	for _, w := range f.w {
		MOVL(Mem{Base: w}, size)
		ANDL(U32(0x7fffffff), size)
		SUBL(U32(float8Least), size)
		CMPL(size, U32(float8Most-float8Least))
		JAE(LabelRef("any"))
	}
	for r, w := range f.w {
		VBROADCASTSS(Mem{Base: w}, f.scale[r])
		VMULPS(float256, f.scale[r], f.scale[r])
		ADDQ(Imm(4), w)
	}
	CMPQ(runs, Imm(8))
	JNE(LabelRef("one"))
	step := 16
	if f.wide {
		step = 32
	}
	for at := 0; at < 128; at += step {
		f.run(at, step, false)
	}
	f.move(128)
	JMP(LabelRef("next"))
	loop("one", runs, 1, func() {
		f.run(0, 16, false)
		f.move(16)
	})
	Label("next")
	TESTQ(left, left)
	JNZ(LabelRef("block"))
	y := f.sums()
	for r, top := range f.top {
		if f.wide {
			k := K()
			VPCMPEQB(bytes(0x7f), top, k)
			KMOVD(k, size)
		} else {
			VPCMPEQB(bytes(0x7f), top, top)
			VPMOVMSKB(top, size)
		}
		TESTL(size, size)
		label := fmt.Sprintf("number%d", r)
		JZ(LabelRef(label))
		for j := range f.n {
			MOVL(U32(0x7fc00000), Mem{Base: y, Disp: 4 * (r*f.n + j)})
		}
		Label(label)
	}
	VZEROUPPER()
	RET()

	Label("any")
	for r, w := range f.w {
		s := f.scale[r]
		VBROADCASTSS(Mem{Base: w}, s)
		if f.wide {
			t, k := ZMM(), K()
			VPSLLD(Imm(1), s, t)
			VPCMPUD(Imm(5), dwords(leastScale<<1), t, k) // not below
			VMOVAPS_Z(s, k, s)
		} else {
			t := YMM()
			VPAND(dwords(0x7fffffff), s, t)
			VPCMPGTD(dwords(leastScale-1), t, t)
			VPAND(t, s, s)
		}
		ADDQ(Imm(4), w)
	}
	loop("slow", runs, 1, func() {
		f.run(0, 16, true)
		f.move(16)
	})
	JMP(LabelRef("next"))
}

// move goes on by n codes.
func (f *float8Tile) move(n int) {
	for _, w := range f.w {
		ADDQ(I32(int32(n)), w)
	}
	for _, x := range f.x {
		ADDQ(I32(int32(4*n)), x)
	}
}

// run takes n codes of each row, from code at on.
func (f *float8Tile) run(at, n int, slow bool) {
	for r, w := range f.w {
		switch {
		case at%64 != 0:
		case f.next != nil:
			PREFETCHT0(Mem{Base: w, Index: f.next, Scale: 1, Disp: at})
		case f.rows == 1:
			PREFETCHT0(Mem{Base: w, Disp: 4096 + at})
		}
		// The codes without their signs, whose largest is kept.
		c := YMM()
		switch {
		case n == 32:
			VMOVDQU32(Mem{Base: w, Disp: at}, c)
		case f.wide:
			VBROADCASTI32X4(Mem{Base: w, Disp: at}, c)
		default:
			VBROADCASTI128(Mem{Base: w, Disp: at}, c)
		}
		if f.wide {
			VPANDD(bytes(0x7f), c, c)
		} else {
			VPAND(bytes(0x7f), c, c)
		}
		VPMAXUB(c, f.top[r], f.top[r])
		words := YMM()
		if n == 32 {
			words = ZMM()
		}
		VPMOVSXBW(Mem{Base: w, Disp: at}, words)
		VPSLLW(Imm(7), words, words)
		if f.wide {
			VPANDD(wordsOf(0xbf80), words, words)
		} else {
			VPAND(wordsOf(0xbf80), words, words)
		}
		floats := 8
		if f.wide {
			floats = 16
		}
		for i := 0; i < n; i += floats {
			half, v := reg.Register(words), YMM()
			if f.wide {
				v = ZMM()
			}
			switch {
			case i == 0 && f.wide:
				half = words.AsY()
			case i == 0:
				half = words.AsX()
			case f.wide:
				half = YMM()
				VEXTRACTI64X4(Imm(1), words, half)
			default:
				half = XMM()
				VEXTRACTI128(Imm(1), words, half)
			}
			VCVTPH2PS(half, v)
			var keep reg.Register
			if slow {
				VMULPS(dwords(int(math.Float32bits(256))), v, v)
			}
			VMULPS(f.scale[r], v, v)
			if slow {
				keep = f.clean(v)
			}
			for j, x := range f.x {
				f.multiply(v, keep, Mem{Base: x, Disp: 4 * (at + i)}, f.acc[(r*f.n+j)*f.regs()+i%16/floats])
			}
		}
	}
}
