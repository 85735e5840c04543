package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// The fields of packArgs in backends/cpu/tiles.go, eight bytes each.
const (
	packTo     = 8 * iota
	packBlocks // of 32 or 256 codes; of eight floats
	packStride // bytes from one float to the next
	packFrom   // eight pointers
)

// transposed turns eight registers, of eight dwords of a position each, into
// eight, of a dword of eight positions each.
func transposed(a [8]vec) (t [8]vec) {
	var b, c [8]vec
	for i := range 4 { // dwords of two positions, in each half
		b[2*i], b[2*i+1] = YMM(), YMM()
		VPUNPCKLDQ(a[2*i+1], a[2*i], b[2*i])
		VPUNPCKHDQ(a[2*i+1], a[2*i], b[2*i+1])
	}
	for i := range 2 { // of four
		for j := range 2 {
			lo, hi := b[4*i+j], b[4*i+j+2]
			c[4*i+2*j], c[4*i+2*j+1] = YMM(), YMM()
			VPUNPCKLQDQ(hi, lo, c[4*i+2*j])
			VPUNPCKHQDQ(hi, lo, c[4*i+2*j+1])
		}
	}
	for i := range 4 {
		t[i], t[i+4] = YMM(), YMM()
		VPERM2I128(Imm(0x20), c[i+4], c[i], t[i])
		VPERM2I128(Imm(0x31), c[i+4], c[i], t[i+4])
	}
	return t
}

// packer writes half of a record's positions, eight of the sixteen.
type packer struct {
	to   reg.GPVirtual
	n    reg.GPVirtual
	args reg.GPVirtual
	from [8]reg.GPVirtual
}

func newPacker(name string) *packer {
	TEXT(name, NOSPLIT, "func(a *packArgs)")
	p := &packer{args: Load(Param("a"), GP64()).(reg.GPVirtual)}
	field := func(at int) reg.GPVirtual {
		g := GP64()
		MOVQ(Mem{Base: p.args, Disp: at}, g)
		return g
	}
	p.to, p.n = field(packTo), field(packBlocks)
	for i := range p.from {
		p.from[i] = field(packFrom + 8*i)
	}
	return p
}

func (p *packer) load(b int) (a [8]vec) {
	for i := range a {
		a[i] = load256(Mem{Base: p.from[i], Disp: b})
	}
	return transposed(a)
}

func (p *packer) move(from, to int) {
	for _, f := range p.from {
		ADDQ(I32(int32(from)), f)
	}
	ADDQ(I32(int32(to)), p.to)
	DECQ(p.n)
	JNZ(LabelRef("block"))
	VZEROUPPER()
	RET()
}

// run packs 32 codes, number i of the record, with their sums, which it returns.
func (p *packer) run(i int) (lo, hi, all vec) {
	at := func(b int) Mem { return Mem{Base: p.to, Disp: i*runBytes + b} }
	x := p.load(32 * i)
	ones := ymm(bytes(1))
	var half [2]vec
	for k, v := range x {
		VMOVDQU(v, at(64*k))
		VPMADDUBSW(v, ones, v)
		if k%4 == 0 {
			half[k/4] = v
		} else {
			VPADDW(v, half[k/4], half[k/4])
		}
	}
	all = YMM()
	for h := range half {
		VPMADDWD(words(1), half[h], half[h])
		VMOVDQU(half[h], at(runHalf+64*h))
	}
	VPADDD(half[1], half[0], all)
	VMOVDQU(all, at(runSum))
	return half[0], half[1], all
}

// paired is two int32 as a pair of int16.
func paired(lo, hi vec) vec {
	VPSLLD(Imm(16), hi, hi)
	VPBLENDW(Imm(0xaa), hi, lo, lo)
	return lo
}

// packs are the kernels that lay out positions for the tile kernels.
func packs() {
	p := newPacker("pack32AVX2")
	Label("block")
	p.run(0)
	p.move(32, record32)

	for _, group := range []int{16, 32} {
		name := "pack256By16AVX2"
		if group == 32 {
			name = "pack256By32AVX2"
		}
		p := newPacker(name)
		Label("block")
		var before vec
		for i := range 8 {
			pair := func(n int) Mem { return Mem{Base: p.to, Disp: record256Pair + 64*n} }
			lo, hi, all := p.run(i)
			switch {
			case group == 16:
				VMOVDQU(paired(lo, hi), pair(i))
			case i%2 == 0:
				before = all
			default:
				VMOVDQU(paired(before, all), pair(i/2))
			}
		}
		p.move(256, record256Pair+256/group/2*64)
	}

	p = newPacker("packFloatsAVX2")
	Label("block")
	stride := GP64()
	MOVQ(Mem{Base: p.args, Disp: packStride}, stride)
	for _, v := range p.load(0) {
		VMOVDQU(v, Mem{Base: p.to})
		ADDQ(stride, p.to)
	}
	p.move(32, 0)
}
