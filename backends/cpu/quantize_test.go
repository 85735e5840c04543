package cpu

import (
	"math"
	"math/rand/v2"
	"testing"
)

// TestQuantizeStaysInRange: every largest value becomes +-127, no code exceeds
// it, and code*d is within half a step of x.
func TestQuantizeStaysInRange(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	for _, n := range []int{32, 256} {
		x, code, sum := make([]float32, n), make([]int8, n), make([]int32, n/16)
		for b := uint32(tinyBits); b <= largestBits; b += 80021 {
			a := math.Float32frombits(b)
			for i := range x {
				x[i] = float32(float64(a) * (2*rng.Float64() - 1))
			}
			at := rng.IntN(n)
			x[at] = -a
			d, ok := quantize(code, sum, x)
			if !ok || code[at] != -127 {
				t.Fatalf("largest %x has code %d, ok %v", -a, code[at], ok)
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
		if d, ok := quantize(code, sum, x); ok || d != 0 || code[3] != 0 {
			t.Error("a block with NaN is taken")
		}
		clear(x)
		x[0] = math.Nextafter32(0x1p-50, 0)
		code[0], sum[0] = 1, 1
		if d, ok := quantize(code, sum, x); !ok || d != 0 || code[0] != 0 || sum[0] != 0 {
			t.Error("a block below 2^-50 is not zeros")
		}
	}
}

// TestThreeAtOnce drives the packed dots to the ends of their fields.
func TestThreeAtOnce(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 10))
	ends := []int8{-127, 127, 0}
	for round := range 2000 {
		var w [32]int8
		var x [3][32]int8
		for i := range w {
			w[i] = int8(rng.IntN(256) - 128)
			for j := range x {
				x[j][i] = int8(rng.IntN(255) - 127)
				if round < 27 { // all ends of all fields
					w[i] = -128
					x[j][i] = ends[[]int{round, round / 3, round / 9}[j]%3]
				}
			}
		}
		var packed [32]int64
		pack3(packed[:], x[0][:], x[1][:], x[2][:])
		a, b, c := dot32x3(&w, &packed)
		if a != dot32(&w, &x[0]) || b != dot32(&w, &x[1]) || c != dot32(&w, &x[2]) {
			t.Fatalf("three at once give %d %d %d, one by one %d %d %d", a, b, c, dot32(&w, &x[0]), dot32(&w, &x[1]), dot32(&w, &x[2]))
		}
	}
}
