package main

import (
	"math/bits"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// Where the row kernels of AVX2 keep, in rowArgs.part, what is not sums: the
// mins of eight blocks, and the codes and sub-scales of one block.
const (
	part256Mins   = 8 * 8 * 32
	part256Codes  = part256Mins + 8*32
	part256Scales = part256Codes + 8*32
)

// rows256 are the row kernels of AVX2.
func rows256() {
	for _, f := range formats256() {
		f.rows()
	}
	sumRows256()
}

// rows is the row kernel of a format. The sums of each block and position, eight
// int32, wait in memory until there are those of eight blocks.
func (f *format256) rows() {
	r := &rowKernel{name: "rows" + f.name + "AVX2", blockBytes: f.bytes, runs: f.runs, runBytes: f.runBytes, codeBytes: f.act, sumBytes: f.act / 8}
	if f.sums32 {
		r.sumBytes = 16
	}
	r.emit(f.setup, func() {
		var sums [8]vec
		for k := range sums {
			r.prefetch(r.groupBytes()*k/8, r.groupBytes()*(k+1)/8)
			if f.act == 32 {
				c := f.code(r, k, 0)
				sums[k] = r.partials256(k, func(x, _ reg.GPVirtual) vec {
					s := f.dot(c, Mem{Base: x, Disp: 32 * k})
					VPMADDWD(words(1), s, s)
					return s
				})
			} else {
				f.block(r, k)
			}
		}
		w, mw := f.floats(r)
		from := r.part()
		r.positions(func(terms reg.GPVirtual) {
			s, x := vec(nil), YMM()
			if r.alone && f.act == 32 {
				s = reduceRegs256(func(k int) vec { return sums[k] })
			} else {
				s = reduce256(func(k int) Mem { return Mem{Base: from, Disp: 32 * k} })
				ADDQ(I32(8*32), from)
			}
			if f.act == 32 && (f.bias > 0 || f.kind == '+') {
				VMOVDQU(Mem{Base: r.sum}, x)
				if f.bias > 0 {
					VPSLLD(Imm(uint64(bits.Len(uint(f.bias))-1)), x, x)
					VPSUBD(x, s, s)
				}
			}
			if f.kind == '-' {
				x = f.minSums(r)
			}
			finish(f.kind, s, x, w, mw, r.d, terms)
		})
	})
}

// dot is sixteen int16, each a sum of two products of codes.
func (f *format256) dot(c vec, x Mem) vec {
	s := YMM()
	if !f.signed {
		VPMADDUBSW(x, c, s)
		return s
	}
	a, signed := YMM(), YMM()
	VMOVDQU(x, s)
	VPSIGNB(c, s, signed)
	VPABSB(c, a)
	VPMADDUBSW(signed, a, s)
	return s
}

// block is block k of 256 codes: its codes and sub-scales go to memory, where
// each position meets them; one alone meets them at once.
func (f *format256) block(r *rowKernel, k int) {
	p := r.part()
	w := f.words(r, k)
	switch {
	case f.sums32:
		VEXTRACTI128(Imm(1), w, Mem{Base: p, Disp: part256Mins + 16*k})
	case f.mins != nil:
		VMOVDQU(f.mins(r, k), Mem{Base: p, Disp: part256Mins + 32*k})
	}
	var off, total, half vec
	if f.bias > 0 {
		off = YMM()
		VPMULLW(words(-f.bias), w, off)
		if r.alone {
			total = YMM()
			VPMADDWD(Mem{Base: r.sum, Disp: 32 * k}, off, total)
		}
	}
	for i := range 8 {
		c, s := f.code(r, k, i), YMM()
		switch {
		case f.sums32:
			if i == 0 {
				half = YMM()
				VPERM2I128(Imm(0x00), w, w, half)
			}
			VPSHUFB(words((2*i+1)<<8|2*i), half, s)
		default:
			if i%4 == 0 {
				half = YMM()
				VPERM2I128(Imm(uint64(i/4*0x11)), w, w, half)
			}
			VPSHUFB(constant(64, func(b int) byte { return byte(i%4*4 + b%32/16*2 + b%2) }), half, s)
		}
		if r.alone {
			t := f.dot(c, Mem{Base: r.x, Disp: 256*k + 32*i})
			VPMADDWD(s, t, t)
			if total == nil {
				total = t
			} else {
				VPADDD(t, total, total)
			}
			continue
		}
		VMOVDQU(c, Mem{Base: p, Disp: part256Codes + 32*i})
		VMOVDQU(s, Mem{Base: p, Disp: part256Scales + 32*i})
	}
	if r.alone {
		VMOVDQU(total, Mem{Base: p, Disp: 32 * k})
		return
	}
	r.partials256(k, func(x, sum reg.GPVirtual) vec {
		total := YMM()
		if off != nil {
			VPMADDWD(Mem{Base: sum, Disp: 32 * k}, off, total)
		}
		for i := range 8 {
			s := f.dot(load256(Mem{Base: p, Disp: part256Codes + 32*i}), Mem{Base: x, Disp: 256*k + 32*i})
			if i == 0 && off == nil {
				VPMADDWD(Mem{Base: p, Disp: part256Scales + 32*i}, s, total)
				continue
			}
			VPMADDWD(Mem{Base: p, Disp: part256Scales + 32*i}, s, s)
			VPADDD(s, total, total)
		}
		return total
	})
}

// minSums is the sum of mins times sums of codes, for each of eight blocks.
func (f *format256) minSums(r *rowKernel) vec {
	p := r.part()
	product := func(i int) vec {
		m := load256(Mem{Base: p, Disp: part256Mins + 32*i})
		VPMADDWD(Mem{Base: r.sum, Disp: 32 * i}, m, m)
		return m
	}
	if !f.sums32 {
		return reduceRegs256(product)
	}
	// Each product is of two blocks.
	a, b := product(0), product(2)
	VPHADDD(product(1), a, a)
	VPHADDD(product(3), b, b)
	VPHADDD(b, a, a) // blocks 0 2 4 6, 1 3 5 7
	order := ymm(dwords(0, 4, 1, 5, 2, 6, 3, 7))
	VPERMD(a, order, a)
	return a
}

// reduce256 adds up the eight int32 of each of eight blocks.
func reduce256(at func(k int) Mem) vec {
	return reduceRegs256(func(k int) vec { return load256(at(k)) })
}

func reduceRegs256(at func(k int) vec) vec {
	var quad [2]vec
	for h := range quad {
		a := at(4 * h)
		VPHADDD(at(4*h+1), a, a)
		b := at(4*h + 2)
		VPHADDD(at(4*h+3), b, b)
		VPHADDD(b, a, a) // in each half: a part of each of four blocks
		quad[h] = a
	}
	lo, hi := YMM(), YMM()
	VPERM2I128(Imm(0x20), quad[1], quad[0], lo)
	VPERM2I128(Imm(0x31), quad[1], quad[0], hi)
	VPADDD(hi, lo, lo)
	return lo
}

// partials256 is partials of eight int32.
func (r *rowKernel) partials256(k int, body func(x, sum reg.GPVirtual) vec) vec {
	if r.alone {
		return body(r.x, r.sum)
	}
	r.eachPosition(8*32, func(x, sum, to reg.GPVirtual) {
		VMOVDQU(body(x, sum), Mem{Base: to, Disp: 32 * k})
	})
	return nil
}

// sumRows256: y[r] is the eight lanes and the tree over row r's terms.
func sumRows256() {
	TEXT("sumRowsAVX2", NOSPLIT, "func(y *float32, terms *float32, rows, blocks int)")
	Doc("sumRowsAVX2 is sumRows.")
	y, terms := Load(Param("y"), GP64()), Load(Param("terms"), GP64())
	rows, blocks := Load(Param("rows"), GP64()), Load(Param("blocks"), GP64())
	rest, n, at := GP64(), GP64(), GP64()
	MOVQ(blocks, rest)
	ANDQ(Imm(7), rest)
	// mask is eight int32, the first rest of them -1
	mask := YMM()
	m := constant(64, func(i int) byte {
		if i < 32 {
			return 0xff
		}
		return 0
	})
	LEAQ(m.Offset(32), at)
	MOVQ(rest, n)
	SHLQ(Imm(2), n)
	SUBQ(n, at)
	VMOVDQU(Mem{Base: at}, mask)
	Label("row")
	l, t := YMM(), YMM()
	VXORPS(l, l, l)
	MOVQ(blocks, n)
	loop("eight", n, 8, func() {
		VADDPS(Mem{Base: terms}, l, l)
		ADDQ(Imm(32), terms)
	})
	VMASKMOVPS(Mem{Base: terms}, mask, t)
	LEAQ(Mem{Base: terms, Index: rest, Scale: 4}, terms)
	VADDPS(t, l, l)
	treeOf8(l, t)
	VMOVSS(l.AsX(), Mem{Base: y.(reg.GPVirtual)})
	ADDQ(Imm(4), y)
	DECQ(rows)
	JNZ(LabelRef("row"))
	VZEROUPPER()
	RET()
}
