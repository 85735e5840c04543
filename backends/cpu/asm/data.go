package main

import (
	"encoding/binary"
	"fmt"

	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// constants names the read-only data that has been written, by its content.
var constants = map[string]Mem{}

// constant is read-only data: the bytes that f gives for 0 <= i < n.
func constant(n int, f func(i int) byte) Mem {
	b := make([]byte, n)
	for i := range b {
		b[i] = f(i)
	}
	if m, ok := constants[string(b)]; ok {
		return m
	}
	m := GLOBL(fmt.Sprintf("constant%d", len(constants)), attr.RODATA|attr.NOPTR)
	for i := 0; i < n; i += 8 {
		DATA(i, U64(binary.LittleEndian.Uint64(b[i:])))
	}
	constants[string(b)] = m
	return m
}

// bytes repeats b up to 64 bytes.
func bytes(b ...byte) Mem { return constant(64, func(i int) byte { return b[i%len(b)] }) }

// words repeats w up to 64 bytes.
func words(w ...int) Mem {
	return constant(64, func(i int) byte { return byte(w[i/2%len(w)] >> (i % 2 * 8)) })
}

// dwords repeats d up to 64 bytes.
func dwords(d ...int) Mem {
	return constant(64, func(i int) byte { return byte(d[i/4%len(d)] >> (i % 4 * 8)) })
}

// qwords repeats q up to 64 bytes.
func qwords(q ...int) Mem {
	return constant(64, func(i int) byte { return byte(q[i/8%len(q)] >> (i % 8 * 8)) })
}

// zmm is a register that holds 64 bytes of data.
func zmm(m Mem) reg.VecVirtual {
	z := ZMM()
	VMOVDQU32(m, z)
	return z
}

// ymm is a register that holds the first 32 bytes of data.
func ymm(m Mem) reg.VecVirtual {
	y := YMM()
	VMOVDQU(m, y)
	return y
}
