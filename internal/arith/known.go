package arith

import (
	"fmt"
	"math"
)

// A Known is a vector of which every bit is known, SiLU(G)*U cleaned: it goes
// through exp and rcp, and through products that an FMA would round otherwise. A
// device computes it, and its quantized form in blocks of 256, when it is opened.
type Known struct{ G, U, Want []float32 }

// KnownLen is the floats of a Known.
const KnownLen = 1024

// NewKnown makes the vector.
func NewKnown() Known {
	k := Known{make([]float32, KnownLen), make([]float32, KnownLen), make([]float32, KnownLen)}
	for i := range k.G {
		k.G[i] = float32(float32(i-KnownLen/2)*0.0803) + 0.3*float32(i%7)
		k.U[i] = float32(1.7*float32(i%31)) - 25.3
		k.Want[i] = Clean(float32(SiLU(k.G[i]) * k.U[i]))
	}
	return k
}

// Differs says what a device got wrong, "" if nothing:
//
//	values [KnownLen]      SiLU(G)*U, cleaned
//	scales [KnownLen/256]  of its blocks, quantized
//	codes  [KnownLen]
func (k Known) Differs(values, scales []float32, codes []int8) string {
	for i, want := range k.Want {
		if math.Float32bits(values[i]) != math.Float32bits(want) {
			return Wrong("value", i, math.Float32bits(values[i]), math.Float32bits(want))
		}
	}
	for b, scale := range scales {
		block := k.Want[256*b : 256*(b+1)]
		var top uint32
		for _, v := range block {
			top = max(top, math.Float32bits(v)&^SignMask)
		}
		a := math.Float32frombits(top)
		if want := float32(a * 0x1.020408p-7); scale != want {
			return Wrong("scale", b, math.Float32bits(scale), math.Float32bits(want))
		}
		s := float32(127 * Rcp(a))
		for i, v := range block {
			want := int8(int32(math.Float32bits(float32(v*s)+Rounder) - RounderBits))
			if got := codes[256*b+i]; got != want {
				return Wrong("code", 256*b+i, uint32(got), uint32(want))
			}
		}
	}
	return ""
}

// Wrong is the words for number i of a known vector that has other bits.
func Wrong(what string, i int, got, want uint32) string {
	return fmt.Sprintf("%s %d of a known vector as %08x, not %08x", what, i, got, want)
}
