package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// The fields of tileArgs in backends/cpu/tiles.go, eight bytes each.
const (
	tileW = 8 * iota
	tileScale
	tileMin
	tileScaleStride
	tileSub
	tilePair
	tileX0
	tileX1
	tileBlocks
	tileBias
	tileLanes
	tileOut
)

// A tileKernel multiplies eight rows of unpacked weights by 16 or 32 positions,
// which lie in the int32 lanes of one or two registers: a dword of four codes of
// a row is broadcast and meets four codes of each position. So nothing is ever
// added across lanes.
//
// The eight float lanes of the row order stay in memory: [8 lanes][8 rows][z][16].
type tileKernel struct {
	name  string
	z     int // registers of positions: 1 or 2
	kind  byte
	group int // codes under one sub-scale: 16 or 32; 0: blocks of 32 without
	bias  bool

	args  reg.GPVirtual
	w     reg.GPVirtual
	x     [2]reg.GPVirtual
	lanes reg.GPVirtual // of the block
	scale rowsOf
	min   rowsOf
}

// rowsOf addresses eight rows that lie a stride apart.
type rowsOf struct{ p, p4, s, s3 reg.GPVirtual }

func (a rowsOf) row(r int) Mem {
	base := a.p
	if r >= 4 {
		base = a.p4
	}
	switch r % 4 {
	case 0:
		return Mem{Base: base}
	case 3:
		return Mem{Base: base, Index: a.s3, Scale: 1}
	default:
		return Mem{Base: base, Index: a.s, Scale: uint8(r % 4)}
	}
}

const tileRows = 8

func (t *tileKernel) field(at int) reg.GPVirtual {
	g := GP64()
	MOVQ(Mem{Base: t.args, Disp: at}, g)
	return g
}

func (t *tileKernel) begin() {
	TEXT(t.name, NOSPLIT, "func(a *tileArgs)")
	t.args = Load(Param("a"), GP64()).(reg.GPVirtual)
	t.lanes = t.field(tileLanes)
	// zero the lanes
	none, n, p := zero(), GP64(), GP64()
	MOVQ(t.lanes, p)
	MOVQ(I32(8), n)
	Label("zero")
	for i := range tileRows * t.z {
		VMOVDQU32(none, Mem{Base: p, Disp: 64 * i})
	}
	ADDQ(I32(int32(tileRows*t.z*64)), p)
	DECQ(n)
	JNZ(LabelRef("zero"))

	t.w = t.field(tileW)
	for z := range t.z {
		t.x[z] = t.field(tileX0 + 8*z)
	}
	s, s3 := t.field(tileScaleStride), GP64()
	LEAQ(Mem{Base: s, Index: s, Scale: 2}, s3)
	t.scale = rowsOf{t.field(tileScale), GP64(), s, s3}
	LEAQ(Mem{Base: t.scale.p, Index: s, Scale: 4}, t.scale.p4)
	if t.kind != ' ' {
		t.min = rowsOf{t.field(tileMin), GP64(), s, s3}
		LEAQ(Mem{Base: t.min.p, Index: s, Scale: 4}, t.min.p4)
	}
}

// next goes to the next block's scales and lanes; the lanes' memory begins at a
// multiple of its size.
func (t *tileKernel) next() {
	for _, a := range []rowsOf{t.scale, t.min} {
		if a.p != nil {
			ADDQ(Imm(4), a.p)
			ADDQ(Imm(4), a.p4)
		}
	}
	size := int32(8 * tileRows * t.z * 64)
	o := GP64()
	ADDQ(I32(size/8), t.lanes)
	MOVQ(t.lanes, o)
	ANDQ(I32(size-1), o)
	JNZ(LabelRef("same"))
	SUBQ(I32(size), t.lanes)
	Label("same")
}

// dots adds the products of n dwords of codes, from the first of the run on, to
// acc[row][z], for rows lo <= r < lo+len(acc).
func (t *tileKernel) dots(acc [][]vec, lo, first, n int) {
	for k := first; k < first+n; k++ {
		var x [2]vec
		for z := range t.z {
			x[z] = ZMM()
			VMOVDQU32(Mem{Base: t.x[z], Disp: 64 * k}, x[z])
		}
		for r := range acc {
			w := ZMM()
			VPBROADCASTD(Mem{Base: t.w, Disp: 32*(lo+r) + 4*k}, w)
			for z := range t.z {
				VPDPBUSD(x[z], w, acc[r][z])
			}
		}
	}
}

// add turns exact sums of row r into terms and adds them to the block's lane.
func (t *tileKernel) add(r int, s, m []vec, d []vec) {
	w, mw := ZMM(), ZMM()
	VBROADCASTSS(t.scale.row(r), w)
	if t.kind != ' ' {
		VBROADCASTSS(t.min.row(r), mw)
	}
	for z := range t.z {
		lane := Mem{Base: t.lanes, Disp: (r*t.z + z) * 64}
		VCVTDQ2PS(s[z], s[z])
		VMULPS(w, s[z], s[z])
		switch t.kind {
		case '+':
			p := ZMM()
			VMULPS(mw, m[z], p)
			VADDPS(p, s[z], s[z])
		case '-':
			VCVTDQ2PS(m[z], m[z])
			VMULPS(mw, m[z], m[z])
			VSUBPS(m[z], s[z], s[z])
		}
		VMULPS(d[z], s[z], s[z])
		VADDPS(lane, s[z], s[z])
		VMOVUPS(s[z], lane)
	}
}

// end adds the lanes up and writes the rows of each position.
func (t *tileKernel) end() {
	lanes, out, to := t.field(tileLanes), t.field(tileOut), GP64()
	at := func(l, r, z int) Mem { return Mem{Base: lanes, Disp: ((l*tileRows+r)*t.z + z) * 64} }
	for z := range t.z {
		var row [8]vec
		for r := range row {
			var l [4]vec
			for i := range l {
				l[i] = ZMM()
				VMOVUPS(at(i, r, z), l[i])
				VADDPS(at(i+4, r, z), l[i], l[i])
			}
			VADDPS(l[2], l[0], l[0])
			VADDPS(l[3], l[1], l[1])
			VADDPS(l[1], l[0], l[0])
			row[r] = l[0]
		}
		// In each 128 bits: four rows of one position.
		var quad [2][4]vec
		for h := range quad {
			a, b := interleave(row[4*h], row[4*h+1]), interleave(row[4*h+2], row[4*h+3])
			for i := range 2 {
				quad[h][2*i], quad[h][2*i+1] = ZMM(), ZMM()
				VUNPCKLPD(b[i], a[i], quad[h][2*i])
				VUNPCKHPD(b[i], a[i], quad[h][2*i+1])
			}
		}
		for p := range 16 {
			MOVQ(Mem{Base: out, Disp: 8 * (16*z + p)}, to)
			for h := range quad {
				VEXTRACTF32X4(Imm(uint64(p/4)), quad[h][p%4], Mem{Base: to, Disp: 16 * h})
			}
		}
	}
	VZEROUPPER()
	RET()
}

func interleave(a, b vec) [2]vec {
	lo, hi := ZMM(), ZMM()
	VUNPCKLPS(b, a, lo)
	VUNPCKHPS(b, a, hi)
	return [2]vec{lo, hi}
}

func (t *tileKernel) fresh(rows int) [][]vec {
	acc := make([][]vec, rows)
	for r := range acc {
		for range t.z {
			acc[r] = append(acc[r], zero())
		}
	}
	return acc
}

// started is accumulators that begin at bias*sum of the codes, whose sums lie at
// byte b of the record; zero without a bias.
func (t *tileKernel) started(rows, b int, bias vec) [][]vec {
	if !t.bias {
		return t.fresh(rows)
	}
	var first []vec
	for z := range t.z {
		first = append(first, ZMM())
		VPMULLD(Mem{Base: t.x[z], Disp: b}, bias, first[z])
	}
	acc := [][]vec{first}
	for range rows - 1 {
		var a []vec
		for z := range t.z {
			a = append(a, ZMM())
			VMOVDQA32(first[z], a[z])
		}
		acc = append(acc, a)
	}
	return acc
}

// What 16 positions hold for 32 codes: eight times a dword of codes, then the
// sums of codes 0..15, of 16..31 and of all, as int32.
const (
	runHalf  = 512
	runSum   = 512 + 2*64
	runBytes = 512 + 3*64
)

// A block of 32 is a run and its scales. A block of 256 is eight runs, their
// scales, and the sums of its groups as pairs of int16.
const (
	record32Scale  = runBytes
	record32       = runBytes + 64
	record256Scale = 8 * runBytes
	record256Pair  = record256Scale + 64
)

// blocks32 is the kernel of blocks of 32 codes under one scale.
func (t *tileKernel) blocks32() {
	t.begin()
	n := t.field(tileBlocks)
	bias := ZMM()
	VPBROADCASTD(Mem{Base: t.args, Disp: tileBias}, bias)
	Label("block")
	acc := t.started(tileRows, runSum, bias)
	t.dots(acc, 0, 0, 8)
	var d, m []vec
	for z := range t.z {
		d = append(d, ZMM())
		VMOVUPS(Mem{Base: t.x[z], Disp: record32Scale}, d[z])
		if t.kind == '+' {
			m = append(m, ZMM())
			VCVTDQ2PS(Mem{Base: t.x[z], Disp: runSum}, m[z])
		}
	}
	for r := range acc {
		t.add(r, acc[r], m, d)
	}
	ADDQ(I32(tileRows*32), t.w)
	t.move(record32)
	t.next()
	DECQ(n)
	JNZ(LabelRef("block"))
	t.end()
}

// move goes on in the positions' records.
func (t *tileKernel) move(bytes int) {
	for z := range t.z {
		ADDQ(I32(int32(bytes)), t.x[z])
	}
}

// blocks256 is the kernel of blocks of 256 codes in groups under integer
// sub-scales. With two registers of positions, four rows at a time: their sums
// and those of a group take 16 registers.
func (t *tileKernel) blocks256() {
	t.begin()
	rows, groups := tileRows/t.z, 256/t.group
	n, sub, runs := t.field(tileBlocks), t.field(tileSub), GP64()
	var pair reg.GPVirtual
	if t.kind == '-' {
		pair = t.field(tilePair)
	}
	bias := ZMM()
	VPBROADCASTD(Mem{Base: t.args, Disp: tileBias}, bias)
	Label("block")
	for pass := range t.z {
		lo := pass * rows
		sum := t.fresh(rows)
		MOVQ(I32(8), runs)
		label := fmt.Sprintf("run%d", pass)
		Label(label)
		for h := range 32 / t.group {
			first := runSum
			if t.group == 16 {
				first = runHalf + 64*h
			}
			acc := t.started(rows, first, bias)
			t.dots(acc, lo, h*t.group/4, t.group/4)
			for r := range acc {
				for z := range t.z {
					VPMULLD_BCST(Mem{Base: sub, Disp: 4 * (groups*(lo+r) + h)}, acc[r][z], acc[r][z])
					VPADDD(acc[r][z], sum[r][z], sum[r][z])
				}
			}
		}
		ADDQ(I32(tileRows*32), t.w)
		ADDQ(I32(int32(4*32/t.group)), sub)
		t.move(runBytes)
		DECQ(runs)
		JNZ(LabelRef(label))

		min := make([][]vec, rows)
		if t.kind == '-' {
			min = t.fresh(rows)
			for i := range groups / 2 {
				var x [2]vec
				for z := range t.z {
					x[z] = ZMM()
					VMOVDQU32(Mem{Base: t.x[z], Disp: record256Pair - record256Scale + 64*i}, x[z])
				}
				for r := range min {
					for z := range t.z {
						VPDPWSSD_BCST(Mem{Base: pair, Disp: 4 * (groups/2*(lo+r) + i)}, x[z], min[r][z])
					}
				}
			}
		}
		var d []vec
		for z := range t.z {
			d = append(d, ZMM())
			VMOVUPS(Mem{Base: t.x[z]}, d[z])
		}
		for r := range sum {
			t.add(lo+r, sum[r], min[r], d)
		}
		if pass < t.z-1 {
			SUBQ(I32(8*tileRows*32), t.w)
			SUBQ(I32(int32(4*groups)), sub)
			t.move(-8 * runBytes)
		}
	}
	ADDQ(I32(int32(4*groups*(tileRows-1))), sub)
	record := record256Pair - record256Scale
	if t.kind == '-' {
		ADDQ(I32(int32(4*groups/2*tileRows)), pair)
	}
	t.move(record + groups/2*64)
	t.next()
	DECQ(n)
	JNZ(LabelRef("block"))
	t.end()
}

// tiles512 are the kernels for many positions of AVX-512 with VNNI.
func tiles512() {
	for _, f := range formats512() {
		if f.name != "Block" {
			f.unpackRow()
		}
	}
	for _, t := range []tileKernel{
		{name: "tile32", kind: ' ', bias: true},
		{name: "tile32Plus", kind: '+'},
		{name: "tile256By16", kind: ' ', group: 16, bias: true},
		{name: "tile256By16Minus", kind: '-', group: 16},
		{name: "tile256By32Minus", kind: '-', group: 32},
	} {
		for z := 1; z <= 2; z++ {
			t := t
			t.name, t.z = fmt.Sprintf("%sx%dAVX512", t.name, 16*z), z
			if t.group == 0 {
				t.blocks32()
			} else {
				t.blocks256()
			}
		}
	}
}
