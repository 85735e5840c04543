package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// loop runs body while n >= step, taking step from n each time. The label is
// one of its function.
func loop(label string, n reg.Register, step int, body func()) {
	Label(label)
	CMPQ(n, Imm(uint64(step)))
	JLT(LabelRef(label + "_end"))
	body()
	SUBQ(Imm(uint64(step)), n)
	JMP(LabelRef(label))
	Label(label + "_end")
}
