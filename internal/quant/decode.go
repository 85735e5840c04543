package quant

import (
	"encoding/binary"
	"fmt"
	"math"
)

// Dequantize decodes len(dst) elements of a weight row from src.
//
//	dst  whole blocks of t, or a row of F8_128
//	src  t.RowBytes(len(dst)) bytes
//
// The bits are those of ggml's C library: each value is the code times
// (W*Scale), plus or minus a min, every step rounded to float32. Only scales
// that Check refuses may give other bits. Misuse panics.
func Dequantize(t Type, dst []float32, src []byte) {
	if !t.Known() || t.Kind() == Data {
		panic(fmt.Sprintf("quant: Dequantize of %v, which is not a weight", t))
	}
	if !t.Fits(len(dst)) || len(src) != t.RowBytes(len(dst)) {
		panic(fmt.Sprintf("quant: Dequantize of %d %v elements from %d bytes", len(dst), t, len(src)))
	}
	switch t {
	case F32:
		for i := range dst {
			dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(src[4*i:]))
		}
	case F16:
		for i := range dst {
			dst[i] = f16At(src[2*i:])
		}
	case BF16:
		for i := range dst {
			dst[i] = FromBF16(binary.LittleEndian.Uint16(src[2*i:]))
		}
	case F8_128:
		F8Weights(dst, src)
	default:
		dequantizeBlocks(t, dst, src)
	}
}

func dequantizeBlocks(t Type, dst []float32, src []byte) {
	var b Block
	act, kind := t.ActBlock(), t.Kind()
	for g := range b.Scale {
		b.Scale[g], b.Min[g] = 1, 1 // what 32-blocks leave alone
	}
	for i := 0; len(dst) > 0; i++ {
		unpack(t, &b, src, i)
		if t == MXFP4 { // the small scales that the arithmetic counts as zero
			b.W = mxfp4Scale(src[17*i])
		}
		for g := 0; g < act/16; g++ {
			w := b.W
			if t == NVFP4 && g == 1 {
				w = b.W2
			}
			d, m := float32(w*float32(b.Scale[g])), float32(0)
			code, out := b.Code[16*g:16*g+16], dst[16*g:16*g+16]
			switch kind {
			case Plain:
				for j := range out {
					out[j] = d * float32(code[j])
				}
			case Plus:
				m = b.MinW
				for j := range out {
					out[j] = float32(d*float32(code[j])) + m
				}
			case Minus:
				m = float32(b.MinW * float32(b.Min[g]))
				for j := range out {
					out[j] = float32(d*float32(code[j])) - m
				}
			}
		}
		dst = dst[act:]
	}
}
