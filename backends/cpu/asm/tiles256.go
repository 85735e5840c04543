package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// A tile256 is a kernel for many positions of AVX2: eight rows by 16 positions,
// in two registers of eight lanes. Memory is laid out as for tileKernel with one
// register of positions, but for two things: a sub-scale is a pair of equal int16,
// and codes of signed formats are plain int8.
//
// VPMADDUBSW leaves sums of two products in int16. As many dwords of codes as
// depth says are added up there: the largest code times 127 times 2*depth stays
// below 2^15.
type tile256 struct {
	name   string
	kind   byte
	group  int // codes under one sub-scale; 0: blocks of 32 without
	depth  int // 1: signed codes
	biased bool

	args  reg.GPVirtual
	w, x  reg.GPVirtual
	lanes reg.GPVirtual
	scale rowsOf
	min   rowsOf
}

func (t *tile256) field(at int) reg.GPVirtual {
	g := GP64()
	MOVQ(Mem{Base: t.args, Disp: at}, g)
	return g
}

func (t *tile256) begin() {
	TEXT(t.name, NOSPLIT, "func(a *tileArgs)")
	t.args = Load(Param("a"), GP64()).(reg.GPVirtual)
	t.lanes = t.field(tileLanes)
	none, n, p := YMM(), GP64(), GP64()
	VPXOR(none, none, none)
	MOVQ(t.lanes, p)
	MOVQ(I32(8), n)
	Label("zero")
	for i := range 2 * tileRows {
		VMOVDQU(none, Mem{Base: p, Disp: 32 * i})
	}
	ADDQ(I32(tileRows*64), p)
	DECQ(n)
	JNZ(LabelRef("zero"))

	t.w, t.x = t.field(tileW), t.field(tileX0)
	s, s3 := t.field(tileScaleStride), GP64()
	LEAQ(Mem{Base: s, Index: s, Scale: 2}, s3)
	t.scale = rowsOf{t.field(tileScale), GP64(), s, s3}
	LEAQ(Mem{Base: t.scale.p, Index: s, Scale: 4}, t.scale.p4)
	if t.kind != ' ' {
		t.min = rowsOf{t.field(tileMin), GP64(), s, s3}
		LEAQ(Mem{Base: t.min.p, Index: s, Scale: 4}, t.min.p4)
	}
}

// next ends a block.
func (t *tile256) next() {
	for _, a := range []rowsOf{t.scale, t.min} {
		if a.p != nil {
			ADDQ(Imm(4), a.p)
			ADDQ(Imm(4), a.p4)
		}
	}
	const size = 8 * tileRows * 64
	o := GP64()
	ADDQ(I32(size/8), t.lanes)
	MOVQ(t.lanes, o)
	ANDQ(I32(size-1), o)
	JNZ(LabelRef("same"))
	SUBQ(I32(size), t.lanes)
	Label("same")
	DECQ(Mem{Base: t.args, Disp: tileBlocks})
	JNZ(LabelRef("block"))
}

type pairOf [2]vec // eight positions each

// sums is the sum of products of n dwords of codes, n <= depth, as int16, or as
// int32 where codes are signed.
func (t *tile256) sums(rows, lo, first, n int) []pairOf {
	s := make([]pairOf, rows)
	for k := first; k < first+n; k++ {
		var x pairOf
		for h := range x {
			x[h] = load256(Mem{Base: t.x, Disp: 64*k + 32*h})
		}
		for r := range rows {
			w := YMM()
			VPBROADCASTD(Mem{Base: t.w, Disp: 32*(lo+r) + 4*k}, w)
			size := w
			if t.depth == 1 {
				size = YMM()
				VPABSB(w, size)
			}
			for h := range x {
				p := YMM()
				if t.depth == 1 {
					VPSIGNB(w, x[h], p)
					VPMADDUBSW(p, size, p)
				} else {
					VPMADDUBSW(x[h], size, p)
				}
				if k == first {
					s[r][h] = p
				} else {
					VPADDW(p, s[r][h], s[r][h])
				}
			}
		}
	}
	return s
}

// add turns exact sums of row r into terms and adds them to the block's lane.
func (t *tile256) add(r int, s, m pairOf, d [2]Mem) {
	w := YMM()
	VBROADCASTSS(t.scale.row(r), w)
	for h := range s {
		VCVTDQ2PS(s[h], s[h])
		VMULPS(w, s[h], s[h])
	}
	if t.kind != ' ' {
		VBROADCASTSS(t.min.row(r), w)
		for h := range s {
			VCVTDQ2PS(m[h], m[h])
			VMULPS(w, m[h], m[h])
			if t.kind == '+' {
				VADDPS(m[h], s[h], s[h])
			} else {
				VSUBPS(m[h], s[h], s[h])
			}
		}
	}
	for h := range s {
		lane := Mem{Base: t.lanes, Disp: r*64 + 32*h}
		VMULPS(d[h], s[h], s[h])
		VADDPS(lane, s[h], s[h])
		VMOVUPS(s[h], lane)
	}
}

func (t *tile256) blocks32() {
	t.begin()
	rows := 2
	if t.depth == 8 {
		rows = 4 // no int32 sums beside the int16
	}
	Label("block")
	d := [2]Mem{{Base: t.x, Disp: record32Scale}, {Base: t.x, Disp: record32Scale + 32}}
	for lo := 0; lo < tileRows; lo += rows {
		var total []pairOf
		for first := 0; first < 8; first += t.depth {
			for r, s := range t.sums(rows, lo, first, t.depth) {
				for h := range s {
					VPMADDWD(words(1), s[h], s[h])
				}
				if first == 0 {
					total = append(total, s)
					continue
				}
				for h := range s {
					VPADDD(s[h], total[r][h], total[r][h])
				}
			}
		}
		for r, s := range total {
			var m pairOf
			for h := range s {
				x := Mem{Base: t.x, Disp: runSum + 32*h}
				if t.biased {
					off := YMM()
					VPBROADCASTD(Mem{Base: t.args, Disp: tileBias}, off)
					VPMULLD(x, off, off)
					VPADDD(off, s[h], s[h])
				}
				if t.kind == '+' {
					m[h] = load256(x)
				}
			}
			t.add(lo+r, s, m, d)
		}
	}
	ADDQ(I32(tileRows*32), t.w)
	ADDQ(I32(record32), t.x)
	t.next()
	t.end()
}

func (t *tile256) blocks256() {
	t.begin()
	const rows = 2
	groups := 256 / t.group
	sub, runs := t.field(tileSub), GP64()
	pair := t.field(tilePair)
	Label("block")
	for lo := 0; lo < tileRows; lo += rows {
		total := make([]pairOf, rows)
		for r := range total {
			for h := range total[r] {
				total[r][h] = YMM()
				VPXOR(total[r][h], total[r][h], total[r][h])
			}
		}
		MOVQ(I32(8), runs)
		label := fmt.Sprintf("run%d", lo/rows)
		Label(label)
		for first := 0; first < 8; first += t.depth {
			for r, s := range t.sums(rows, lo, first, t.depth) {
				scale := YMM()
				VPBROADCASTD(Mem{Base: sub, Disp: 4 * (groups*(lo+r) + first*4/t.group)}, scale)
				for h := range s {
					VPMADDWD(scale, s[h], s[h])
					VPADDD(s[h], total[r][h], total[r][h])
				}
			}
		}
		ADDQ(I32(tileRows*32), t.w)
		ADDQ(I32(int32(4*32/t.group)), sub)
		ADDQ(I32(runBytes), t.x)
		DECQ(runs)
		JNZ(LabelRef(label))

		// Mins, or what the bias added: pairs of them times pairs of sums of codes.
		m := make([]pairOf, rows)
		if t.kind == '-' || t.biased {
			for r := range m {
				for h := range m[r] {
					m[r][h] = total[r][h]
					if t.kind == '-' {
						m[r][h] = YMM()
						VPXOR(m[r][h], m[r][h], m[r][h])
					}
				}
			}
			for i := range groups / 2 {
				for r := range m {
					p, q := YMM(), YMM()
					VPBROADCASTD(Mem{Base: pair, Disp: 4 * (groups/2*(lo+r) + i)}, p)
					for h := range m[r] {
						VPMADDWD(Mem{Base: t.x, Disp: record256Pair - record256Scale + 64*i + 32*h}, p, q)
						VPADDD(q, m[r][h], m[r][h])
					}
				}
			}
		}
		for r, s := range total {
			t.add(lo+r, s, m[r], [2]Mem{{Base: t.x}, {Base: t.x, Disp: 32}})
		}
		if lo+rows < tileRows {
			SUBQ(I32(8*tileRows*32), t.w)
			SUBQ(I32(int32(4*groups)), sub)
			SUBQ(I32(8*runBytes), t.x)
		}
	}
	ADDQ(I32(int32(4*groups*(tileRows-1))), sub)
	ADDQ(I32(int32(4*groups/2*tileRows)), pair)
	ADDQ(I32(int32(record256Pair-record256Scale+groups/2*64)), t.x)
	t.next()
	t.end()
}

// end adds the lanes up and writes the rows of each position.
func (t *tile256) end() {
	lanes, out, to := t.field(tileLanes), t.field(tileOut), GP64()
	at := func(l, r, h int) Mem { return Mem{Base: lanes, Disp: (l*tileRows+r)*64 + 32*h} }
	for h := range 2 {
		var row [8]vec
		for r := range row {
			var l [4]vec
			for i := range l {
				l[i] = YMM()
				VMOVUPS(at(i, r, h), l[i])
				VADDPS(at(i+4, r, h), l[i], l[i])
			}
			VADDPS(l[2], l[0], l[0])
			VADDPS(l[3], l[1], l[1])
			VADDPS(l[1], l[0], l[0])
			row[r] = l[0]
		}
		// Four rows at a time: in each 128 bits, those of one position.
		for q := range 2 {
			var pair [2][2]vec
			for i := range pair {
				a, b := row[4*q+2*i], row[4*q+2*i+1]
				pair[i] = [2]vec{YMM(), YMM()}
				VUNPCKLPS(b, a, pair[i][0])
				VUNPCKHPS(b, a, pair[i][1])
			}
			for i := range 4 {
				y := YMM()
				if i%2 == 0 {
					VUNPCKLPD(pair[1][i/2], pair[0][i/2], y)
				} else {
					VUNPCKHPD(pair[1][i/2], pair[0][i/2], y)
				}
				for half := range 2 { // positions i and i+4
					MOVQ(Mem{Base: out, Disp: 8 * (8*h + 4*half + i)}, to)
					if half == 0 {
						VMOVUPS(y.AsX(), Mem{Base: to, Disp: 16 * q})
					} else {
						VEXTRACTF128(Imm(1), y, Mem{Base: to, Disp: 16 * q})
					}
				}
			}
		}
	}
	VZEROUPPER()
	RET()
}

// unpackRow writes the kernel that unpacks eight blocks of 32, or one of 256, at
// a time.
func (f *format256) unpackRow() {
	TEXT("unpack"+f.name+"AVX2", NOSPLIT, "func(a *unpackArgs)")
	args := Load(Param("a"), GP64()).(reg.GPVirtual)
	field := func(at int) reg.GPVirtual {
		g := GP64()
		MOVQ(Mem{Base: args, Disp: at}, g)
		return g
	}
	f.setup()
	r := &rowKernel{blockBytes: f.bytes, runs: f.runs, runBytes: f.runBytes, w: field(unpackW)}
	n := field(unpackGroups)
	u := &unpacker{field(unpackCodes), field(unpackScale), field(unpackMin), field(unpackSub), field(unpackPair)}
	Label("group")
	r.prefetch(0, r.groupBytes()*32/f.act)
	for i := range 8 {
		c := vec(nil)
		if f.act == 32 {
			c = f.code(r, i, 0)
		} else {
			c = f.code(r, 0, i)
		}
		VMOVDQU(c, Mem{Base: u.codes, Disp: i * tileRows * 32})
	}
	ADDQ(I32(8*tileRows*32), u.codes)
	if f.act == 32 {
		w, m := f.floats(r)
		VMOVUPS(w, Mem{Base: u.scale})
		ADDQ(Imm(32), u.scale)
		if m != nil {
			VMOVUPS(m, Mem{Base: u.min})
			ADDQ(Imm(32), u.min)
		}
		ADDQ(I32(int32(r.groupBytes())), r.w)
	} else {
		f.storeScales(r, u)
		ADDQ(Imm(4), u.scale)
		ADDQ(Imm(4), u.min)
		groups := 16
		if f.sums32 {
			groups = 8
		}
		ADDQ(I32(int32(groups*4*tileRows)), u.sub)
		ADDQ(I32(int32(groups*2*tileRows)), u.pair)
		ADDQ(I32(int32(f.bytes)), r.w)
	}
	DECQ(n)
	JNZ(LabelRef("group"))
	VZEROUPPER()
	RET()
}

// storeScales stores what block 0 of 256 codes is scaled by.
func (f *format256) storeScales(r *rowKernel, u *unpacker) {
	half := func(b int, to reg.GPVirtual) {
		x := XMM()
		VPXOR(x, x, x)
		VPINSRW(Imm(0), r.at(0, b), x, x)
		VCVTPH2PS(x, x)
		VMOVSS(x, Mem{Base: to})
	}
	half(f.d, u.scale)
	if f.kind == '-' {
		half(f.d+2, u.min)
	}
	w, lo, hi := f.words(r, 0), YMM(), YMM()
	VPUNPCKLWD(w, w, lo)
	VPUNPCKHWD(w, w, hi)
	VMOVDQU(lo.AsX(), Mem{Base: u.sub})
	VMOVDQU(hi.AsX(), Mem{Base: u.sub, Disp: 16})
	switch {
	case f.sums32:
		VEXTRACTI128(Imm(1), w, Mem{Base: u.pair})
		return
	case f.mins != nil:
		VMOVDQU(f.mins(r, 0), Mem{Base: u.pair})
	case f.bias > 0:
		p := YMM()
		VPMULLW(words(-f.bias), w, p)
		VMOVDQU(p, Mem{Base: u.pair})
	}
	VEXTRACTI128(Imm(1), lo, Mem{Base: u.sub, Disp: 32})
	VEXTRACTI128(Imm(1), hi, Mem{Base: u.sub, Disp: 48})
}

// tiles256 are the kernels for many positions of AVX2.
func tiles256() {
	packs()
	for _, f := range formats256() {
		if f.name != "Block" {
			f.unpackRow()
		}
	}
	for _, t := range []*tile256{
		{name: "Depth8", kind: ' ', depth: 8, biased: true},
		{name: "Depth8Plus", kind: '+', depth: 8},
		{name: "Depth4", kind: ' ', depth: 4, biased: true},
		{name: "Depth4Plus", kind: '+', depth: 4},
		{name: "Signed", kind: ' ', depth: 1},
		{name: "By32MinusDepth8", kind: '-', group: 32, depth: 8},
		{name: "By32MinusDepth4", kind: '-', group: 32, depth: 4},
		{name: "By16MinusDepth4", kind: '-', group: 16, depth: 4},
		{name: "By16Depth2", kind: ' ', group: 16, depth: 2, biased: true},
		{name: "By16Depth4", kind: ' ', group: 16, depth: 4, biased: true},
		{name: "By16Signed", kind: ' ', group: 16, depth: 1},
	} {
		if t.group == 0 {
			t.name = "tile32" + t.name + "AVX2"
			t.blocks32()
		} else {
			t.name = "tile256" + t.name + "AVX2"
			t.blocks256()
		}
	}
}
