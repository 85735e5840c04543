package backendtest

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"

	"sluice/internal/quant"
)

// Types are all types of weights.
var Types = []quant.Type{
	quant.F32, quant.F16, quant.BF16,
	quant.Q4_0, quant.Q4_1, quant.Q5_0, quant.Q5_1, quant.Q8_0, quant.IQ4_NL, quant.MXFP4, quant.NVFP4,
	quant.Q2_K, quant.Q3_K, quant.Q4_K, quant.Q5_K, quant.Q6_K, quant.IQ4_XS,
	quant.IQ2_XXS, quant.IQ2_XS, quant.IQ2_S, quant.IQ3_XXS, quant.IQ3_S, quant.IQ1_S, quant.IQ1_M,
	quant.TQ1_0, quant.TQ2_0,
	quant.F8_128, quant.INT4_32, quant.INT4_128,
	quant.INT4F_32, quant.INT4F_64, quant.INT4F_128, quant.INT8F_32, quant.INT8F_128,
}

// halves are the places of the f16 scales in a block.
var halves = map[quant.Type][]int{
	quant.Q4_0: {0}, quant.Q4_1: {0, 2}, quant.Q5_0: {0}, quant.Q5_1: {0, 2}, quant.Q8_0: {0}, quant.IQ4_NL: {0},
	quant.Q2_K: {80, 82}, quant.Q3_K: {108}, quant.Q4_K: {0, 2}, quant.Q5_K: {0, 2}, quant.Q6_K: {208}, quant.IQ4_XS: {0},
	quant.IQ2_XXS: {0}, quant.IQ2_XS: {0}, quant.IQ2_S: {0}, quant.IQ3_XXS: {0}, quant.IQ3_S: {0}, quant.IQ1_S: {0},
	quant.TQ1_0: {52}, quant.TQ2_0: {64},
}

// Weights makes n elements, whole blocks of t, whose codes are random and whose
// scales are of either sign, mostly about 2^-7, some of them zero or f16
// subnormals. Float weights are Gaussian, with zeros and tiny values.
func Weights(rng *rand.Rand, t quant.Type, n int) []byte {
	b := make([]byte, t.RowBytes(n))
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	_, bytes := t.Block()
	for at := 0; at < len(b); at += bytes {
		setScales(rng, t, b[at:at+bytes], func() uint16 {
			switch rng.IntN(12) {
			case 0:
				return uint16(rng.IntN(2)) << 15 // +-0
			case 1:
				return uint16(rng.IntN(0x400)) // subnormal
			default:
				return uint16(rng.IntN(2))<<15 | uint16(0x2000+rng.IntN(0x800)) // 2^-7 .. 2^-5
			}
		})
	}
	return b
}

// Extremes makes n elements at the ends of what it can hold: all
// codes and sub-scales at one end, or at both by turns, or random; scales zero,
// subnormal, the largest, and, if wild, any bits at all, infinities and NaN among them.
func Extremes(rng *rand.Rand, t quant.Type, n int, wild bool) []byte {
	b := make([]byte, t.RowBytes(n))
	_, bytes := t.Block()
	fills := []byte{0x00, 0x7f, 0x80, 0xff, 0x0f, 0xf0, 0x88, 0x77}
	for at := 0; at < len(b); at += bytes {
		p := b[at : at+bytes]
		one, other := fills[rng.IntN(len(fills))], fills[rng.IntN(len(fills))]
		kind := rng.IntN(3)
		for i := range p {
			switch {
			case kind == 0:
				p[i] = byte(rng.Uint32())
			case kind == 1 || i%2 == 0:
				p[i] = one
			default:
				p[i] = other
			}
		}
		if wild && rng.IntN(8) == 0 {
			continue // the scales too are what the codes are
		}
		setScales(rng, t, p, func() uint16 {
			sign := uint16(rng.IntN(2)) << 15
			switch {
			case wild && rng.IntN(6) == 0:
				return uint16(rng.Uint32()) | 0x7c00 // not finite
			case rng.IntN(3) == 0:
				return sign | [...]uint16{0, 1, 0x3ff, 0x400, 0x7bff}[rng.IntN(5)]
			default:
				return sign | uint16(rng.IntN(0x7c00))
			}
		})
	}
	return b
}

// setScales gives the block p of type t scales, from half where they are f16.
func setScales(rng *rand.Rand, t quant.Type, p []byte, half func() uint16) {
	switch t {
	case quant.F32:
		binary.LittleEndian.PutUint32(p, math.Float32bits(floatWeight(rng)))
	case quant.F16:
		binary.LittleEndian.PutUint16(p, quant.ToF16(floatWeight(rng)))
	case quant.BF16:
		binary.LittleEndian.PutUint16(p, quant.ToBF16(floatWeight(rng)))
	case quant.F8_128:
		s := floatWeight(rng)
		if rng.IntN(12) == 0 {
			s = float32(math.Ldexp(float64(s), -40)) // about the cut at 2^-45
		}
		binary.LittleEndian.PutUint32(p, math.Float32bits(s))
		for i := range p[4:] {
			if p[4+i]&0x7f == 0x7f {
				p[4+i] ^= 1 // no NaN
			}
		}
	case quant.INT4_32, quant.INT4_128:
		s := floatWeight(rng)
		if rng.IntN(12) == 0 {
			s = float32(math.Ldexp(float64(s), -40))
		}
		binary.LittleEndian.PutUint16(p, quant.ToBF16(s))
	case quant.INT4F_32, quant.INT4F_64, quant.INT4F_128, quant.INT8F_32, quant.INT8F_128:
		s := floatWeight(rng)
		if rng.IntN(12) == 0 {
			s = float32(math.Ldexp(float64(s), -40))
		}
		binary.LittleEndian.PutUint32(p, math.Float32bits(s))
	case quant.MXFP4:
		p[0] = byte(115 + rng.IntN(10))
		if rng.IntN(12) == 0 {
			p[0] = byte(rng.IntN(90)) // about the cut at 83
		}
	case quant.NVFP4:
		for i := range 4 {
			p[i] = byte(rng.IntN(0x50))
		}
	case quant.IQ1_M: // the scale's nibbles lie in the tops of four words
		s := half()
		for i := range 4 {
			w := binary.LittleEndian.Uint16(p[48+2*i:])
			binary.LittleEndian.PutUint16(p[48+2*i:], w&0x0fff|s>>(4*i)<<12)
		}
	default:
		if halves[t] == nil {
			panic(fmt.Sprintf("backendtest: no places of scales for %v", t))
		}
		for _, o := range halves[t] {
			binary.LittleEndian.PutUint16(p[o:], half())
		}
	}
}

func floatWeight(rng *rand.Rand) float32 {
	switch rng.IntN(20) {
	case 0:
		return float32(math.Copysign(0, rng.Float64()-0.5))
	case 1:
		return float32(rng.NormFloat64() * 0x1p-49) // about the cut at 2^-50
	default:
		return float32(rng.NormFloat64() * 0.05)
	}
}

// Vectors makes n vectors of dim floats, of a kind that i chooses: Gaussian,
// scales mixed over blocks, with outliers, all +-1, tiny, huge.
func Vectors(rng *rand.Rand, n, dim, i int) []float32 {
	x := make([]float32, n*dim)
	for j := range x {
		v := rng.NormFloat64()
		switch i % 6 {
		case 1:
			v *= math.Ldexp(1, rng.IntN(60)-40)
		case 2:
			if rng.IntN(100) == 0 {
				v *= 1000
			}
		case 3:
			v = math.Copysign(1, v)
		case 4:
			v *= 0x1p-49
		case 5:
			v = math.Copysign(min(math.Abs(v)*0x1p47, 0x1p50), v)
		}
		x[j] = float32(v)
	}
	for j := 0; j+32 <= len(x); j += 32 {
		if rng.IntN(16) == 0 {
			clear(x[j : j+32])
		}
	}
	return x
}
