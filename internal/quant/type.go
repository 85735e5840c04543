// Package quant knows the block formats of weights: their numbers and sizes,
// their values as ggml's C library decodes them, and their integers as the one
// arithmetic of Sluice multiplies them.
package quant

import "fmt"

// A Type is a tensor type: one of GGML, by the number that a GGUF file carries, or
// one of our own, see own.go.
type Type uint32

// The types that Sluice reads as weights, and the plain integer types that a
// file may hold beside them (data only; no row of them is ever multiplied).
const (
	F32     Type = 0
	F16     Type = 1
	Q4_0    Type = 2
	Q4_1    Type = 3
	Q5_0    Type = 6
	Q5_1    Type = 7
	Q8_0    Type = 8
	Q2_K    Type = 10
	Q3_K    Type = 11
	Q4_K    Type = 12
	Q5_K    Type = 13
	Q6_K    Type = 14
	IQ2_XXS Type = 16
	IQ2_XS  Type = 17
	IQ3_XXS Type = 18
	IQ1_S   Type = 19
	IQ4_NL  Type = 20
	IQ3_S   Type = 21
	IQ2_S   Type = 22
	IQ4_XS  Type = 23
	I8      Type = 24
	I16     Type = 25
	I32     Type = 26
	I64     Type = 27
	F64     Type = 28
	IQ1_M   Type = 29
	BF16    Type = 30
	TQ1_0   Type = 34
	TQ2_0   Type = 35
	MXFP4   Type = 39
	NVFP4   Type = 40
)

// layout is what a type's rows are made of.
type layout struct {
	name  string
	elems int // elements in a block
	bytes int // bytes in a block
	act   int // elements in the activation block that meets it; 0: float rows or data
	kind  Kind
}

// A Kind says how a row of a type is multiplied.
type Kind uint8

const (
	Data  Kind = iota // not a weight
	Float             // float rows: 16 lanes, no integers
	Plain             // term (float(S)*w)*d
	Plus              // term ((float(S)*w) + (float(M)*m))*d
	Minus             // term ((float(S)*w) - (float(M)*m))*d
)

// layouts by type; what is no type has no elements.
var layouts = [...]layout{
	F32: {"F32", 1, 4, 0, Float}, F16: {"F16", 1, 2, 0, Float}, BF16: {"BF16", 1, 2, 0, Float},
	Q4_0: {"Q4_0", 32, 18, 32, Plain}, Q4_1: {"Q4_1", 32, 20, 32, Plus},
	Q5_0: {"Q5_0", 32, 22, 32, Plain}, Q5_1: {"Q5_1", 32, 24, 32, Plus},
	Q8_0: {"Q8_0", 32, 34, 32, Plain}, IQ4_NL: {"IQ4_NL", 32, 18, 32, Plain},
	MXFP4: {"MXFP4", 32, 17, 32, Plain}, NVFP4: {"NVFP4", 64, 36, 32, Plain},
	Q2_K: {"Q2_K", 256, 84, 256, Minus}, Q3_K: {"Q3_K", 256, 110, 256, Plain},
	Q4_K: {"Q4_K", 256, 144, 256, Minus}, Q5_K: {"Q5_K", 256, 176, 256, Minus},
	Q6_K: {"Q6_K", 256, 210, 256, Plain}, IQ4_XS: {"IQ4_XS", 256, 136, 256, Plain},
	IQ2_XXS: {"IQ2_XXS", 256, 66, 256, Plain}, IQ2_XS: {"IQ2_XS", 256, 74, 256, Plain},
	IQ2_S: {"IQ2_S", 256, 82, 256, Plain}, IQ3_XXS: {"IQ3_XXS", 256, 98, 256, Plain},
	IQ3_S: {"IQ3_S", 256, 110, 256, Plain}, IQ1_S: {"IQ1_S", 256, 50, 256, Plain},
	IQ1_M: {"IQ1_M", 256, 56, 256, Plain},
	TQ1_0: {"TQ1_0", 256, 54, 256, Plain}, TQ2_0: {"TQ2_0", 256, 66, 256, Plain},
	I8: {"I8", 1, 1, 0, Data}, I16: {"I16", 1, 2, 0, Data}, I32: {"I32", 1, 4, 0, Data},
	I64: {"I64", 1, 8, 0, Data}, F64: {"F64", 1, 8, 0, Data},
}

// Known says whether the type is one of the above.
func (t Type) Known() bool { return t.layout().elems > 0 }

func (t Type) layout() (l layout) {
	switch {
	case int(t) < len(layouts):
		l = layouts[t]
	case t >= firstOwn && t-firstOwn < Type(len(ownLayouts)):
		l = ownLayouts[t-firstOwn]
	}
	return l
}

// String is the type's name in the GGML ecosystem, such as Q4_K.
func (t Type) String() string {
	if t.Known() {
		return t.layout().name
	}
	return fmt.Sprintf("type %d", uint32(t))
}

// Block gives the elements and the bytes of one block; 0, 0 if unknown.
func (t Type) Block() (elems, bytes int) { l := t.layout(); return l.elems, l.bytes }

// RowBytes gives the size of a row of n elements, which Fits, in bytes.
func (t Type) RowBytes(n int) int {
	l := t.layout()
	return (n + l.elems - 1) / l.elems * l.bytes
}

// Fits says whether a row may have n elements: a whole number of blocks, or any
// number where the last block may be short.
func (t Type) Fits(n int) bool {
	l := t.layout()
	return l.elems > 0 && (n%l.elems == 0 || t == F8_128)
}

// ActBlock gives the elements of the activation block that a row of this type
// is multiplied with: 32 or 256; 0 for float rows and data.
func (t Type) ActBlock() int { return t.layout().act }

// Kind says how a row of this type is multiplied.
func (t Type) Kind() Kind { return t.layout().kind }
