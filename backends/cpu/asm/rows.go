package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// The fields of rowArgs in backends/cpu/rows.go, eight bytes each.
const (
	rowW = 8 * iota
	rowGroups
	rowCodes
	rowScale
	rowSum
	rowCodeStride
	rowScaleStride
	rowSumStride
	rowBlocks
	rowStart
	rowStep
	rowN
	rowTerms
	rowTermStride
	rowPart
	rowHalf
)

// partBytes is the first part of rowArgs.part: sums of eight blocks and eight
// positions. What follows is for one group of blocks.
const partBytes = 8 * 8 * 64

// A rowKernel multiplies a run of weight blocks, eight at a time, by the codes
// of one to eight positions; terms of the blocks come out, in their order.
type rowKernel struct {
	name       string
	blockBytes int // of weights
	runs       int // of 32 codes under one scale in a block; 0: one block, one scale
	runBytes   int // of codes from one of several runs to the next
	codeBytes  int // of a block's codes, for one position; half of them where they are split
	sumBytes   int // of the sums of a block's codes, for one position

	args  reg.GPVirtual
	w     reg.GPVirtual // first block of the group
	x     reg.GPVirtual // codes of the first position at the group
	d     reg.GPVirtual // its scales
	sum   reg.GPVirtual // its sums
	terms reg.GPVirtual
	alone bool // there is one position
	loops int
}

// emit writes the kernel: setup once, then body for each group of eight blocks,
// in two versions: for several positions, and for one alone.
func (r *rowKernel) emit(setup, body func()) {
	TEXT(r.name, NOSPLIT, "func(a *rowArgs)")
	r.args = Load(Param("a"), GP64()).(reg.GPVirtual)
	field := func(at int) reg.GPVirtual {
		g := GP64()
		MOVQ(Mem{Base: r.args, Disp: at}, g)
		return g
	}
	setup()
	r.w, r.terms = field(rowW), field(rowTerms)
	start := field(rowStart)
	CMPQ(Mem{Base: r.args, Disp: rowN}, Imm(1))
	JEQ(LabelRef("alone"))
	for _, r.alone = range []bool{false, true} {
		group := "group"
		if r.alone {
			group = "alone"
		}
		Label(group)
		r.x, r.d, r.sum = field(rowCodes), field(rowScale), field(rowSum)
		t := GP64()
		offset := func(bytes int, to reg.Register) {
			if bytes == 4 {
				LEAQ(Mem{Base: to, Index: start, Scale: 4}, to)
				return
			}
			IMUL3Q(I32(int32(bytes)), start, t)
			ADDQ(t, to)
		}
		offset(r.codeBytes, r.x)
		offset(4, r.d)
		offset(r.sumBytes, r.sum)
		body()
		ADDQ(I32(int32(r.groupBytes())), r.w)
		ADDQ(Imm(32), r.terms)
		ADDQ(Mem{Base: r.args, Disp: rowStep}, start)
		MOVQ(start, t)
		SUBQ(Mem{Base: r.args, Disp: rowBlocks}, t)
		CMOVQGE(t, start)
		DECQ(Mem{Base: r.args, Disp: rowGroups})
		JNZ(LabelRef(group))
		VZEROUPPER()
		RET()
	}
}

// at is a place in the weights: byte b of block k of the group. Where blocks have
// several runs of 32 codes, k counts these, and b is where codes begin in a block.
func (r *rowKernel) at(k, b int) Mem {
	runs := max(r.runs, 1)
	return Mem{Base: r.w, Disp: k/runs*r.blockBytes + k%runs*r.runBytes + b}
}

// groupBytes is the size of a group.
func (r *rowKernel) groupBytes() int { return 8 * r.blockBytes / max(r.runs, 1) }

// part is a place in the scratch memory behind the partial sums.
func (r *rowKernel) part() reg.GPVirtual {
	p := GP64()
	MOVQ(Mem{Base: r.args, Disp: rowPart}, p)
	return p
}

// prefetch asks for the lines 4 KiB ahead of bytes lo..hi of the group.
func (r *rowKernel) prefetch(lo, hi int) {
	for b := (lo + 63) &^ 63; b < hi; b += 64 {
		PREFETCHT0(Mem{Base: r.w, Disp: 4096 + b})
	}
}

// positions runs body for each position, with its terms; r.x, r.d and r.sum are
// its codes, scales and sums. It comes last in a group.
func (r *rowKernel) positions(body func(terms reg.GPVirtual)) {
	if r.alone {
		body(r.terms)
		return
	}
	n, terms := GP64(), GP64()
	MOVQ(Mem{Base: r.args, Disp: rowN}, n)
	MOVQ(r.terms, terms)
	label := r.label("position")
	Label(label)
	body(terms)
	for _, s := range []struct {
		g  reg.GPVirtual
		at int
	}{{r.x, rowCodeStride}, {r.d, rowScaleStride}, {r.sum, rowSumStride}, {terms, rowTermStride}} {
		ADDQ(Mem{Base: r.args, Disp: s.at}, s.g)
	}
	DECQ(n)
	JNZ(LabelRef(label))
}

// eachPosition runs body for each position, with its codes and sums, and its place
// in the partial sums, which lie so many bytes apart.
func (r *rowKernel) eachPosition(stride int, body func(x, sum, to reg.GPVirtual)) {
	if r.alone {
		body(r.x, r.sum, r.part())
		return
	}
	x, sum, n, to := GP64(), GP64(), GP64(), r.part()
	MOVQ(r.x, x)
	MOVQ(r.sum, sum)
	MOVQ(Mem{Base: r.args, Disp: rowN}, n)
	label := r.label("part")
	Label(label)
	body(x, sum, to)
	ADDQ(I32(int32(stride)), to)
	ADDQ(Mem{Base: r.args, Disp: rowCodeStride}, x)
	ADDQ(Mem{Base: r.args, Disp: rowSumStride}, sum)
	DECQ(n)
	JNZ(LabelRef(label))
}

// label makes a label of its own for this kernel.
func (r *rowKernel) label(s string) string {
	r.loops++
	return fmt.Sprintf("%s%d", s, r.loops)
}
