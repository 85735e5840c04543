package quant

import (
	"encoding/binary"
	"errors"
	"math"
	"strings"
	"testing"
)

func TestCheckAcceptsGoodData(t *testing.T) {
	for _, o := range oracles(t) {
		if err := Check(o.Number, o.enc); err != nil {
			t.Error(err)
		}
	}
	for _, typ := range []Type{I8, I16, I32, I64, F64} {
		if err := Check(typ, []byte{255, 255, 255, 255, 255, 255, 255, 255}); err != nil {
			t.Error(err)
		}
	}
}

// put writes bytes at an offset of block (or element) 5 of 9 good ones, so that the
// last is no multiple of eight bytes for the small types.
func TestCheckRefuses(t *testing.T) {
	f32 := func(x float64) string {
		return string(binary.LittleEndian.AppendUint32(nil, math.Float32bits(float32(x))))
	}
	const inf, ninf, nan, nan2 = "\x00\x7c", "\x00\xfc", "\x01\x7c", "\xff\xff"
	for _, c := range []struct {
		typ  Type
		at   int
		put  string
		want string // part of the message; empty: accepted
	}{
		{Q4_0, 0, inf, "scale is infinite"}, {Q4_0, 0, nan, "scale is NaN"}, {Q4_0, 0, "\xff\x7b", ""}, {Q4_0, 2, nan2, ""},
		{Q4_1, 0, ninf, "scale is infinite"}, {Q4_1, 2, nan2, "min is NaN"}, {Q5_0, 0, nan, "scale is NaN"},
		{Q5_1, 2, inf, "min is infinite"}, {Q8_0, 0, nan, "scale"}, {IQ4_NL, 0, inf, "scale"},
		{MXFP4, 0, "\xa8", ""}, {MXFP4, 0, "\xa9", "169 is above 168"}, {MXFP4, 0, "\x00", ""},
		{NVFP4, 0, "\x7e", ""}, {NVFP4, 2, "\x7f", "7f"}, {NVFP4, 3, "\x80", "sign"}, {NVFP4, 1, "\xff", "ff"}, {NVFP4, 4, "\xff", ""},
		{Q2_K, 80, nan, "scale"}, {Q2_K, 82, nan, "min"}, {Q3_K, 108, inf, "scale"}, {Q4_K, 0, inf, "scale"}, {Q4_K, 2, inf, "min"},
		{Q5_K, 0, nan, "scale"}, {Q5_K, 2, nan, "min"}, {Q6_K, 208, nan, "scale"}, {IQ4_XS, 0, nan, "scale"},
		{IQ2_XXS, 0, nan, "scale"}, {IQ2_XS, 0, nan, "scale"}, {IQ2_S, 0, nan, "scale"}, {IQ3_XXS, 0, nan, "scale"},
		{IQ3_S, 0, nan, "scale"}, {IQ1_S, 0, nan, "scale"}, {IQ1_M, 48, "\x00\x00\x00\x00\x00\xc0\x00\x70", "scale is infinite"},
		{IQ1_M, 48, "\x00\x10\x00\x00\x00\xc0\x00\xf0", "scale is NaN"}, {TQ1_0, 52, nan, "scale"}, {TQ2_0, 64, nan, "scale"},
		{F16, 0, inf, "weight is infinite"}, {F16, 0, nan, "weight is NaN"}, {F16, 0, "\xff\xfb", ""},
		{BF16, 0, "\x80\x58", ""}, {BF16, 0, "\x81\x58", "above 2^50"}, {BF16, 0, "\x80\xff", "infinite"}, {BF16, 0, "\xc0\x7f", "NaN"},
		{F32, 0, f32(0x1p50), ""}, {F32, 0, f32(-0x1.000002p50), "above 2^50"}, {F32, 0, f32(math.NaN()), "NaN"}, {F32, 0, f32(math.Inf(-1)), "infinite"},
	} {
		_, size := c.typ.Block()
		for _, block := range []int{0, 5, 8} {
			data := make([]byte, 9*size)
			copy(data[block*size+c.at:], c.put)
			err := Check(c.typ, data)
			var bad *RangeError
			switch {
			case c.want == "":
				if err != nil {
					t.Errorf("%v with % x: %v", c.typ, c.put, err)
				}
			case !errors.As(err, &bad) || bad.Index != block || bad.Type != c.typ || !strings.Contains(bad.What, c.want):
				t.Errorf("%v with % x in block %d: got %v, want %q", c.typ, c.put, block, err, c.want)
			}
		}
	}
}
