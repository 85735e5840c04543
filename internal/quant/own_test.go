package quant

import (
	"encoding/binary"
	"errors"
	"math"
	"testing"
)

// F8_128 is code times scale, by the definition of E4M3: sign, exponent of bias 7,
// three bits of fraction, subnormals; a short last block is as good as a whole one.
func TestF8Weights(t *testing.T) {
	value := func(c int) float64 {
		sign := 1 - 2*float64(c>>7)
		e, m := c>>3&15, float64(c&7)
		if e == 0 {
			return sign * m / 8 * math.Ldexp(1, -6)
		}
		return sign * (1 + m/8) * math.Ldexp(1, e-7)
	}
	row := make([]byte, 2*132)
	for i := range 256 {
		row[4+i/128*132+i%128] = byte(i)
	}
	for b, scale := range []float32{0.0371, 0x1p-46} {
		binary.LittleEndian.PutUint32(row[132*b:], math.Float32bits(scale))
	}
	for _, n := range []int{1, 127, 128, 129, 200, 256} {
		got := make([]float32, n)
		Dequantize(F8_128, got, row[:F8_128.RowBytes(n)])
		for i, g := range got {
			want := float32(value(i)) * 0.0371
			switch {
			case i&0x7f == 0x7f:
				if g == g {
					t.Errorf("code %#x is %v, want NaN", i, g)
				}
				continue
			case i >= 128: // its scale counts as zero
				want = 0
			}
			if g != want {
				t.Errorf("code %#x of %d is %v, want %v", i, n, g, want)
			}
		}
	}
	if F8_128.RowBytes(129) != 264 || !F8_128.Fits(129) || INT4_128.Fits(129) || Q4_0.Fits(33) || Type(999).Fits(0) {
		t.Error("wrong sizes of rows")
	}
}

// Grouped int4 is nibble less 8 times scale, in the order of Q4_0 in each run of 32.
func TestINT4(t *testing.T) {
	for _, typ := range []Type{INT4_32, INT4_128} {
		group, size := typ.Block()
		row := make([]byte, 3*size)
		fill(row, uint64(typ))
		scales := []float32{0.75, -3.0 / 128, 0x1p-46}
		for b, s := range scales {
			binary.LittleEndian.PutUint16(row[size*b:], ToBF16(s))
		}
		scales[2] = 0 // below what counts
		got := make([]float32, 3*group)
		Dequantize(typ, got, row)
		for i, g := range got {
			b, in := i/group, i%group
			q := row[size*b+2+in/32*16+in%16]
			if in%32 >= 16 {
				q >>= 4
			}
			if want := float32(int(q&15)-8) * scales[b]; g != want {
				t.Fatalf("%v: element %d is %v, want %v", typ, i, g, want)
			}
		}
	}
}

// Integers with scales of f32 are code times scale: of int4 nibbles less 8 in the
// order of Q4_0 in each run of 32.
func TestScaledIntegers(t *testing.T) {
	for _, typ := range []Type{INT4F_32, INT4F_64, INT4F_128, INT8F_32, INT8F_128} {
		group, size := typ.Block()
		row := make([]byte, 3*size)
		fill(row, uint64(typ))
		scales := []float32{0.75, -3.0e-3, 0x1p-46}
		for b, s := range scales {
			binary.LittleEndian.PutUint32(row[size*b:], math.Float32bits(s))
		}
		scales[2] = 0 // below what counts
		got := make([]float32, 3*group)
		Dequantize(typ, got, row)
		for i, g := range got {
			b, in := i/group, i%group
			var code int
			if typ >= INT8F_32 {
				code = int(int8(row[size*b+4+in]))
			} else {
				code = int(row[size*b+4+in/32*16+in%16]>>(in%32/16*4)&15) - 8
			}
			if want := float32(code) * scales[b]; g != want {
				t.Fatalf("%v: element %d is %v, want %v", typ, i, g, want)
			}
		}
	}
}

// What is no number is found, in the last block too.
func TestCheckOwn(t *testing.T) {
	for _, typ := range []Type{F8_128, INT4_32, INT4_128, INT4F_32, INT4F_64, INT4F_128, INT8F_32, INT8F_128} {
		elems, size := typ.Block()
		data := make([]byte, 5*size)
		if err := Check(typ, data); err != nil {
			t.Error(err)
		}
		for _, s := range []float32{float32(math.NaN()), float32(math.Inf(-1)), 0x1p41, -0x1p41} {
			bad := append([]byte(nil), data...)
			if typ == F8_128 || typ > INT4_128 {
				binary.LittleEndian.PutUint32(bad[4*size:], math.Float32bits(s))
			} else {
				binary.LittleEndian.PutUint16(bad[4*size:], ToBF16(s))
			}
			var e *RangeError
			if err := Check(typ, bad); !errors.As(err, &e) || e.Index != 4 && e.Index != 4*elems {
				t.Errorf("%v, scale %v: %v", typ, s, err)
			}
		}
		if Check(typ, data[1:]) == nil {
			t.Errorf("%v: no whole blocks, and no error", typ)
		}
	}
	for at := range 128 {
		for _, nan := range []byte{0x7f, 0xff} {
			data := make([]byte, 2*132)
			for i := range data {
				data[i] = 0x7e
			}
			clear(data[:4])
			clear(data[132:136])
			data[136+at] = nan
			var e *RangeError
			if err := Check(F8_128, data); !errors.As(err, &e) || e.Index != 128+at {
				t.Fatalf("NaN as element %d of block 1: %v", at, err)
			}
		}
	}
}
