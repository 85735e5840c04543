package quant

import (
	"encoding/binary"
	"fmt"
	"math"
)

// A RangeError says that weights hold a number which the arithmetic does not
// take: the file is damaged, or was made from weights that are.
type RangeError struct {
	Type  Type
	Index int    // of the block; of the element in float types
	What  string // such as "scale is NaN"
}

func (e *RangeError) Error() string {
	unit := "block"
	if e.Type.Kind() == Float {
		unit = "element"
	}
	return fmt.Sprintf("quant: %v %s %d: %s: the weights are damaged or out of range; verify the file and get it again", e.Type, unit, e.Index, e.What)
}

// Check finds the first number of data that the arithmetic does not take, and
// returns it as a *RangeError: NaN or infinite scales, mins and float weights,
// scales above 2^40 (MXFP4: exponent codes above 168), float weights above
// 2^50, and NVFP4 scale codes that are NaN or have the sign bit, which is none
// of theirs; and FP8 codes that are NaN. Of block formats it reads the scales alone. Integer data has
// nothing to find. Data that is not whole blocks of a known type is an error too.
func Check(t Type, data []byte) error {
	_, size := t.Block()
	if size == 0 {
		return fmt.Errorf("quant: check of %v, which is unknown: convert the model to a type that Sluice reads", t)
	}
	if len(data)%size != 0 {
		return fmt.Errorf("quant: check of %d bytes, which are no whole number of %v blocks of %d", len(data), t, size)
	}
	switch {
	case t == F32:
		return checkFloats(t, data, 32, 0x58800000) // 2^50
	case t == BF16:
		return checkFloats(t, data, 16, 0x5880) // 2^50
	case t == F16:
		return checkFloats(t, data, 16, 0x7bff) // 65504, the largest there is
	case t == F8_128:
		return checkF8(data)
	case t == INT4_32 || t == INT4_128:
		return checkBF16Scales(t, data)
	case t >= INT4F_32 && t <= INT8F_128:
		return checkF32Scales(t, data)
	case t == MXFP4:
		for i := 0; i < len(data); i += size {
			if e := data[i]; e > 168 {
				return &RangeError{t, i / size, fmt.Sprintf("scale exponent code %d is above 168 (2^40)", e)}
			}
		}
	case t == NVFP4:
		for i := 0; i < len(data); i += size {
			if s := binary.LittleEndian.Uint32(data[i:]); (s+0x01010101|s)&0x80808080 != 0 {
				return &RangeError{t, i / size, fmt.Sprintf("scale codes % x hold a NaN (7f) or a sign", data[i:i+4])}
			}
		}
	case t == IQ1_M:
		for i := 0; i < len(data); i += size {
			if h := iq1mScale(data[i+48 : i+56]); h&0x7c00 == 0x7c00 {
				return &RangeError{t, i / size, "scale is " + notFinite(h)}
			}
		}
	case t.Kind() != Data:
		d, m := scalesAt(t)
		for i := 0; i < len(data); i += size {
			if data[i+d+1]&0x7c == 0x7c {
				return &RangeError{t, i / size, "scale is " + notFinite(binary.LittleEndian.Uint16(data[i+d:]))}
			}
			if data[i+m+1]&0x7c == 0x7c {
				return &RangeError{t, i / size, "min is " + notFinite(binary.LittleEndian.Uint16(data[i+m:]))}
			}
		}
	}
	return nil
}

// scalesAt gives the bytes of a block where its f16 scale and min begin; m is d
// where there is no min. MXFP4, NVFP4 and IQ1_M have no such scale.
func scalesAt(t Type) (d, m int) {
	switch t {
	case Q4_1, Q5_1, Q4_K, Q5_K:
		return 0, 2
	case Q2_K:
		return 80, 82
	case Q3_K:
		return 108, 108
	case Q6_K:
		return 208, 208
	case TQ1_0:
		return 52, 52
	case TQ2_0:
		return 64, 64
	default:
		return 0, 0
	}
}

// notFinite names a binary16 whose exponent is all ones.
func notFinite(h uint16) string {
	if h&0x3ff != 0 {
		return "NaN"
	}
	return "infinite"
}

// checkFloats finds elements of so many bits whose bits, but for the sign, are
// above largest: greater floats, infinities and NaNs. It looks at eight bytes at
// a time; what is added takes those elements, and only those, to their top bit.
func checkFloats(t Type, data []byte, bits int, largest uint64) error {
	top := uint64(1) << (bits - 1)
	add := top - 1 - largest
	for n := bits; n < 64; n *= 2 {
		top |= top << n
		add |= add << n
	}
	whole := len(data) / 8 * 8
	for i := 0; i < whole; i += 8 {
		if (load8(data[i:])&^top+add)&top != 0 {
			return badFloat(t, data, i)
		}
	}
	var rest [8]byte
	copy(rest[:], data[whole:])
	if (load8(rest[:])&^top+add)&top != 0 {
		return badFloat(t, data, whole)
	}
	return nil
}

// badFloat describes the first bad element from byte i on.
func badFloat(t Type, data []byte, i int) error {
	_, size := t.Block()
	for ; ; i += size {
		var x [1]float32
		Dequantize(t, x[:], data[i:i+size])
		switch v := float64(x[0]); {
		case v != v:
			return &RangeError{t, i / size, "weight is NaN"}
		case math.IsInf(v, 0):
			return &RangeError{t, i / size, "weight is infinite"}
		case math.Abs(v) > 0x1p50:
			return &RangeError{t, i / size, fmt.Sprintf("weight %g is above 2^50", v)}
		}
	}
}
