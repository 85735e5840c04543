package quant

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"math"
	"strings"
	"testing"
)

var encodable = []Type{F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q6_K, MXFP4}

func rmse(a, b []float32) float64 {
	var sum float64
	for i := range a {
		d := float64(a[i]) - float64(b[i])
		sum += d * d
	}
	return math.Sqrt(sum / float64(len(a)))
}

// The oracles of all types encode the same values; F16's are nearest to them.
// Our quantizers are at most 15 percent worse there than ggml's.
func TestEncodeIsAsCloseAsGGML(t *testing.T) {
	all := map[Type]oracle{}
	for _, o := range oracles(t) {
		all[o.Number] = o
	}
	src := all[F16].dec
	for _, typ := range encodable {
		enc := make([]byte, typ.RowBytes(len(src)))
		if err := Encode(typ, enc, src); err != nil {
			t.Fatal(err)
		}
		if err := Check(typ, enc); err != nil {
			t.Fatal(err)
		}
		dec := make([]float32, len(src))
		Dequantize(typ, dec, enc)
		got, ggml := rmse(dec, src), rmse(all[typ].dec, src)
		switch typ {
		case F32, F16:
			ggml = 0
		}
		t.Logf("%v: rmse %.5f, ggml's %.5f (of the values unrounded %.5f)", typ, got, ggml, all[typ].RMSE)
		if got > 1.15*ggml {
			t.Errorf("%v: rmse %g, ggml's %g", typ, got, ggml)
		}
	}
}

// What a format can hold exactly comes back exactly.
func TestEncodeKeepsItsOwnValues(t *testing.T) {
	for _, typ := range []Type{F32, F16, BF16, Q8_0, MXFP4} {
		elems, _ := typ.Block()
		src := make([]float32, max(elems, 64))
		for i := range src {
			src[i] = []float32{-6, 4, 3, -2, 1.5, 1, -0.5, 0}[i%8]
			if typ == Q8_0 {
				src[i] = float32(127-3*(i%32)) / 8
			}
		}
		enc, dec := make([]byte, typ.RowBytes(len(src))), make([]float32, len(src))
		if err := Encode(typ, enc, src); err != nil {
			t.Fatal(err)
		}
		Dequantize(typ, dec, enc)
		if rmse(dec, src) != 0 {
			t.Errorf("%v: %v becomes %v", typ, src, dec)
		}
	}
}

// Zeros, constants, tiny, huge and lopsided blocks: finite, and no further off
// than the step of the format.
func TestEncodeEdges(t *testing.T) {
	for _, typ := range encodable {
		for name, at := range map[string]func(i int) float32{
			"zero":     func(int) float32 { return 0 },
			"one":      func(int) float32 { return 1 },
			"minus":    func(int) float32 { return -3 },
			"tiny":     func(i int) float32 { return float32(i) * 0x1p-100 },
			"smallest": func(i int) float32 { return math.SmallestNonzeroFloat32 },
			"small":    func(i int) float32 { return float32(i) * 0x1p-28 },
			"large":    func(i int) float32 { return float32(i%37-18) * 1000 },
			"spike":    func(i int) float32 { return []float32{0.01, -50}[i%101/100] },
		} {
			src, dec := make([]float32, 256), make([]float32, 256)
			var top float32
			for i := range src {
				src[i] = at(i)
				top = max(top, abs(src[i]))
			}
			enc := make([]byte, typ.RowBytes(256))
			if err := Encode(typ, enc, src); err != nil {
				t.Errorf("%v, %s: %v", typ, name, err)
				continue
			}
			if err := Check(typ, enc); err != nil {
				t.Errorf("%v, %s: %v", typ, name, err)
			}
			Dequantize(typ, dec, enc)
			for i := range src {
				if off := abs(dec[i] - src[i]); !(off <= top/5+0x1p-20) {
					t.Errorf("%v, %s: element %d is %g, of %g", typ, name, i, dec[i], src[i])
					break
				}
			}
		}
	}
}

func TestEncodeRefuses(t *testing.T) {
	src := make([]float32, 512)
	for _, typ := range []Type{Q5_0, IQ2_XS, I8, 99} {
		if err := Encode(typ, nil, nil); err == nil || !strings.Contains(err.Error(), typ.String()) {
			t.Errorf("%v: %v", typ, err)
		}
	}
	for _, typ := range encodable {
		enc := make([]byte, typ.RowBytes(len(src)))
		for _, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1), 0x1.000002p50} {
			src[300] = float32(bad)
			var off *RangeError
			if err := Encode(typ, enc, src); !errors.As(err, &off) || off.Index != 300 {
				t.Errorf("%v of %v: %v", typ, bad, err)
			}
		}
		src[300] = -0x1p49
		err := Encode(typ, enc, src)
		if held := typ == F32 || typ == BF16; held != (err == nil) {
			t.Errorf("%v of -2^49: %v", typ, err)
		}
		src[300] = 0
	}
}

// The bytes are the same whatever the compiler makes of the arithmetic
// (GOAMD64=v3 and arm64 have fused operations): a hash of them all.
func TestEncodeIsTheSameEverywhere(t *testing.T) {
	var src []float32
	for _, o := range oracles(t) {
		if o.Number == F16 {
			src = o.dec
		}
	}
	sum := sha256.New()
	for _, typ := range encodable {
		enc := make([]byte, typ.RowBytes(len(src)))
		if err := Encode(typ, enc, src); err != nil {
			t.Fatal(err)
		}
		sum.Write(enc)
	}
	if got, want := hex.EncodeToString(sum.Sum(nil)[:8]), "5f3bd0ade4c5fc01"; got != want {
		t.Errorf("hash %s, want %s", got, want)
	}
}

func BenchmarkEncode(b *testing.B) {
	src := make([]float32, 4096)
	Dequantize(Q8_0, src, randomBlocks(Q8_0, len(src), 1))
	for _, typ := range encodable {
		b.Run("type="+typ.String(), func(b *testing.B) {
			enc := make([]byte, typ.RowBytes(len(src)))
			b.SetBytes(int64(4 * len(src)))
			for b.Loop() {
				if err := Encode(typ, enc, src); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkCheck(b *testing.B) {
	for _, typ := range []Type{F32, BF16, Q8_0, Q4_K, MXFP4, NVFP4} {
		b.Run("type="+typ.String(), func(b *testing.B) {
			n := 1 << 20
			data := randomBlocks(typ, n, 1)
			if typ.Kind() == Float || typ == MXFP4 {
				clear(data)
			}
			b.SetBytes(int64(len(data)))
			for b.Loop() {
				if err := Check(typ, data); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
