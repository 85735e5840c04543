package cpu

import (
	"math"
	"math/rand/v2"
	"testing"

	"sluice/internal/arith"
	"sluice/internal/quant"
)

// TestQuantizeStaysInRange: every largest value becomes +-127, no code exceeds
// it, and code*d is within half a step of x.
func TestQuantizeStaysInRange(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	for _, n := range []int{32, 256} {
		x, code, sum := make([]float32, n), make([]int8, n), make([]int32, n/16)
		for b := uint32(arith.TinyBits); b <= arith.LargestBits; b += 80021 {
			a := math.Float32frombits(b)
			for i := range x {
				x[i] = float32(float64(a) * (2*rng.Float64() - 1))
			}
			at := rng.IntN(n)
			x[at] = -a
			d, top := quantize(code, sum, x)
			if top != b || code[at] != -127 {
				t.Fatalf("largest %x has code %d, top %x", -a, code[at], math.Float32frombits(top))
			}
			var total int32
			for i, c := range code {
				total += int32(c)
				if c == -128 || math.Abs(float64(c)*float64(d)-float64(x[i])) > 0.5001*float64(d) {
					t.Fatalf("%x with largest %x has code %d, scale %x", x[i], a, c, d)
				}
				if i%16 == 15 {
					if sum[i/16] != total {
						t.Fatalf("sum of group %d is %d, want %d", i/16, sum[i/16], total)
					}
					total = 0
				}
			}
		}
		x[3] = float32(math.NaN())
		if d, top := quantize(code, sum, x); top <= arith.LargestBits || d != 0 || code[3] != 0 {
			t.Error("a block with NaN is taken")
		}
		clear(x)
		x[0] = math.Nextafter32(0x1p-50, 0)
		code[0], sum[0] = 1, 1
		if d, top := quantize(code, sum, x); top >= arith.TinyBits || d != 0 || code[0] != 0 || sum[0] != 0 {
			t.Error("a block below 2^-50 is not zeros")
		}
	}
}

// TestPackedDots drives the packed dots to the ends of their fields.
func TestPackedDots(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 10))
	ends := []int8{-127, 127, 0}
	for round := range 2000 {
		var b quant.Block
		var x [3][32]int8
		var want, sum [3]int32
		for i := range 32 {
			b.Code[i] = int8(rng.IntN(256) - 128)
			if round < 54 { // both ends of w with all ends of all fields
				b.Code[i] = int8(-128 + round/27*255)
			}
			for j := range x {
				x[j][i] = int8(rng.IntN(255) - 127)
				if round < 54 {
					x[j][i] = ends[[]int{round, round / 3, round / 9}[j]%3]
				}
				want[j] += int32(b.Code[i]) * int32(x[j][i])
				sum[j] += int32(x[j][i])
			}
		}
		var packed [32]int64
		pack3(packed[:], x[0][:], x[1][:], x[2][:])
		d0, d1, d2 := dot32x3((*[32]int8)(b.Code[:]), &packed)
		if got := [3]int32{d0, d1, d2}; got != want {
			t.Fatalf("three positions at once give %d, want %d", got, want)
		}
		for j := range x {
			var pairs [16]uint64
			packPairs(pairs[:], x[j][:])
			if got := dot32((*[32]byte)(codes(&b)[:]), &pairs, sum[j]); got != want[j] {
				t.Fatalf("pairs of codes give %d, want %d", got, want[j])
			}
		}
	}
}
