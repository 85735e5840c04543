package cpu

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"sluice/internal/arith"
)

// lengths are what every kernel of vectors is tried with: all short ones, and
// some about the whole registers, blocks and chunks.
var lengths = func() (n []int) {
	for i := range 71 {
		n = append(n, i)
	}
	return append(n, 127, 128, 129, 255, 256, 257, 1000, 2048)
}()

// extremes are floats about the borders of the ranges, of either sign, among
// others; finite leaves NaN and infinities out.
func extremes(rng *rand.Rand, n int, finite bool) []float32 {
	bits := []uint32{0, 1, 0x7fffff, 0x800000, arith.TinyBits - 1, arith.TinyBits, arith.TinyBits + 1, kvTinyBits - 1, kvTinyBits,
		arith.LargestBits - 1, arith.LargestBits, arith.LargestBits + 1, math.Float32bits(40), math.Float32bits(40) + 1,
		math.Float32bits(65504), math.Float32bits(65519.996), math.Float32bits(65520), 0x33000000, 0x33000001, 0x387fffff, 0x7f7fffff,
		0x7f800000, 0x7fc00000, 0x7f800001}
	if finite {
		bits = bits[:len(bits)-3]
	}
	x := make([]float32, n)
	for i := range x {
		if rng.IntN(3) == 0 {
			x[i] = math.Float32frombits(bits[rng.IntN(len(bits))] | rng.Uint32()&arith.SignMask)
		} else {
			x[i] = float32(rng.NormFloat64() * math.Ldexp(1, rng.IntN(24)-16))
		}
	}
	return x
}

// kinds of vectors: of one size, of many, and with extreme numbers.
func kinds(rng *rand.Rand, n, kind int) []float32 {
	if kind > 0 {
		return extremes(rng, n, kind == 1)
	}
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(rng.NormFloat64() * 3)
	}
	return x
}

// compare runs a kernel and plain Go on copies of the same slices of floats at
// odd places, wants equal bits in all of them, and nothing written around them.
func compare(t *testing.T, rng *rand.Rand, what string, want, run func(f [][]float32) any, in ...[]float32) {
	t.Helper()
	expect := make([][]float32, len(in))
	got := make([][]float32, len(in))
	checks := make([]func(testing.TB, string), len(in))
	for i, x := range in {
		expect[i] = slices.Clone(x)
		got[i], checks[i] = guarded(rng, x)
	}
	a, b := want(expect), run(got)
	if a != b && !(a != a && b != b) {
		t.Fatalf("%s: gives %v, want %v", what, b, a)
	}
	for i := range in {
		sameFloats(t, fmt.Sprintf("%s, slice %d", what, i), got[i], expect[i])
		checks[i](t, what)
	}
}

// tried runs a test of vectors over the lengths and kinds.
func tried(test func(rng *rand.Rand, what string, n, kind int)) {
	rng := rand.New(rand.NewPCG(11, 12))
	for _, n := range lengths {
		for kind := range 3 {
			test(rng, fmt.Sprintf("%d floats, kind %d", n, kind), n, kind)
		}
	}
}

func TestCleanTo(t *testing.T) {
	each(t, cleanToKernels, func(t *testing.T, want, run func(dst, x []float32, tiny uint32) uint32) {
		tried(func(rng *rand.Rand, what string, n, kind int) {
			tiny := []uint32{arith.TinyBits, kvTinyBits}[rng.IntN(2)]
			x := kinds(rng, n, kind)
			apart := func(f func(dst, x []float32, tiny uint32) uint32) func([][]float32) any {
				return func(v [][]float32) any { return f(v[0], v[1], tiny) }
			}
			compare(t, rng, what, apart(want), apart(run), make([]float32, n), x)
			inPlace := func(f func(dst, x []float32, tiny uint32) uint32) func([][]float32) any {
				return func(v [][]float32) any { return f(v[0], v[0], tiny) }
			}
			compare(t, rng, what+" in place", inPlace(want), inPlace(run), x)
		})
	})
}

func TestRMSNormKernels(t *testing.T) {
	type norm = func(y, x, weight []float32, inv, eps float32) uint32
	each(t, rmsNormKernels, func(t *testing.T, want, run func(y, x, weight []float32, inv, eps float32) (top uint32)) {
		tried(func(rng *rand.Rand, what string, n, kind int) {
			inv, eps := 1/float32(n), []float32{1e-6, 0}[rng.IntN(2)]
			x, w := kinds(rng, n, kind), kinds(rng, n, 0)
			of := func(f norm, y int) func([][]float32) any {
				return func(v [][]float32) any { return f(v[y], v[0], v[1], inv, eps) }
			}
			compare(t, rng, what, of(want, 2), of(run, 2), x, w, make([]float32, n))
			compare(t, rng, what+" in place", of(want, 0), of(run, 0), x, w)
		})
	})
}

func TestGate(t *testing.T) {
	each(t, gateKernels, func(t *testing.T, want, run func(g, u []float32)) {
		of := func(f func(g, u []float32)) func([][]float32) any {
			return func(v [][]float32) any { f(v[0], v[1]); return nil }
		}
		tried(func(rng *rand.Rand, what string, n, kind int) {
			compare(t, rng, what, of(want), of(run), kinds(rng, n, kind), kinds(rng, n, kind))
		})
		// SiLU over its range.
		rng := rand.New(rand.NewPCG(13, 14))
		g, u := make([]float32, 4096), make([]float32, 4096)
		for i := range u {
			u[i] = 1
		}
		b := math.Float32bits(0x1p-60)
		for b < math.Float32bits(0x1p20) {
			for i := range g {
				g[i] = math.Float32frombits(b | uint32(i&1)<<31)
				b += 5003
			}
			compare(t, rng, fmt.Sprintf("SiLU about %g", g[0]), of(want), of(run), g, u)
		}
	})
}

func TestSigmoidGate(t *testing.T) {
	type gating = func(x, g []float32)
	each(t, sigmoidGateKernels, func(t *testing.T, want, run func(x, g []float32)) {
		of := func(f gating) func([][]float32) any {
			return func(v [][]float32) any { f(v[0], v[1]); return nil }
		}
		tried(func(rng *rand.Rand, what string, n, kind int) {
			compare(t, rng, what, of(want), of(run), kinds(rng, n, kind), kinds(rng, n, kind))
		})
		rng := rand.New(rand.NewPCG(11, 12))
		g, x := make([]float32, 4096), make([]float32, 4096)
		for i := range x {
			x[i] = 1
		}
		for b := math.Float32bits(0x1p-60); b < math.Float32bits(0x1p20); {
			for i := range g {
				g[i] = math.Float32frombits(b | uint32(i&1)<<31)
				b += 5003
			}
			compare(t, rng, fmt.Sprintf("sigmoid about %g", g[0]), of(want), of(run), x, g)
		}
	})
}

func TestExpSum(t *testing.T) {
	each(t, expSumKernels, func(t *testing.T, want, run func(x []float32, top float32) float32) {
		tried(func(rng *rand.Rand, what string, n, kind int) {
			x := kinds(rng, n, min(kind, 1))
			top := float32(rng.NormFloat64())
			if n > 0 {
				top = largest(x)
			}
			of := func(f func(x []float32, top float32) float32) func([][]float32) any {
				return func(v [][]float32) any { return f(v[0], top) }
			}
			compare(t, rng, what, of(want), of(run), x)
		})
	})
}

func TestLargest(t *testing.T) {
	each(t, largestKernels, func(t *testing.T, want, run func(x []float32) float32) {
		tried(func(rng *rand.Rand, what string, n, kind int) {
			if n == 0 {
				return
			}
			x := kinds(rng, n, min(kind, 1))
			if rng.IntN(2) == 0 {
				for i := range x { // below what lies around them, and below 0
					x[i] = -float32(math.Abs(float64(x[i])))
				}
			}
			of := func(f func(x []float32) float32) func([][]float32) any {
				return func(v [][]float32) any { return f(v[0]) }
			}
			compare(t, rng, what, of(want), of(run), x)
		})
	})
}

func TestSums(t *testing.T) {
	each(t, scaleByKernels, func(t *testing.T, want, run func(x []float32, r float32)) {
		tried(func(rng *rand.Rand, what string, n, kind int) {
			r := float32(rng.NormFloat64())
			of := func(f func(x []float32, r float32)) func([][]float32) any {
				return func(v [][]float32) any { f(v[0], r); return nil }
			}
			compare(t, rng, what, of(want), of(run), kinds(rng, n, kind))
		})
	})
	each(t, addKernels, func(t *testing.T, want, run func(x, y []float32)) {
		tried(func(rng *rand.Rand, what string, n, kind int) {
			of := func(f func(x, y []float32)) func([][]float32) any {
				return func(v [][]float32) any { f(v[0], v[1]); return nil }
			}
			compare(t, rng, what, of(want), of(run), kinds(rng, n, kind), kinds(rng, n, kind))
		})
	})
	each(t, addProductsKernels, func(t *testing.T, want, run func(y, w, x []float32)) {
		tried(func(rng *rand.Rand, what string, n, kind int) {
			of := func(f func(y, w, x []float32)) func([][]float32) any {
				return func(v [][]float32) any { f(v[0], v[1], v[2]); return nil }
			}
			compare(t, rng, what, of(want), of(run), kinds(rng, n, kind), kinds(rng, n, kind), kinds(rng, n, kind))
		})
	})
}

func TestCombineKernels(t *testing.T) {
	type combining = func(x, out []float32, stride int, weights, shared []float32)
	each(t, combineKernels, func(t *testing.T, want, run func(x, out []float32, stride int, weights, shared []float32)) {
		tried(func(rng *rand.Rand, what string, n, kind int) {
			k, stride := 1+rng.IntN(9), n+rng.IntN(20)
			var shared []float32
			if rng.IntN(2) == 0 {
				shared = kinds(rng, n, kind)
			}
			of := func(f combining) func([][]float32) any {
				return func(v [][]float32) any { f(v[0], v[1], stride, v[2], v[3]); return nil }
			}
			compare(t, rng, what, of(want), of(run), kinds(rng, n, kind), kinds(rng, k*stride, kind), kinds(rng, k, 0), shared)
		})
	})
}

func TestRotate(t *testing.T)      { testRotate(t, rotateKernels) }
func TestRotatePairs(t *testing.T) { testRotate(t, rotatePairsKernels) }

func testRotate(t *testing.T, table []kernel[func(x, cos, sin []float32, headDim int)]) {
	type rotation = func(x, cos, sin []float32, headDim int)
	each(t, table, func(t *testing.T, want, run func(x, cos, sin []float32, headDim int)) {
		tried(func(rng *rand.Rand, what string, half, kind int) {
			headDim, heads := 2*half+rng.IntN(3)+1, 1+rng.IntN(4)
			of := func(f rotation) func([][]float32) any {
				return func(v [][]float32) any { f(v[0], v[1], v[2], headDim); return nil }
			}
			compare(t, rng, what, of(want), of(run), kinds(rng, heads*headDim, kind), kinds(rng, half, 0), kinds(rng, half, 0))
		})
	})
}

func TestQuantizeKernels(t *testing.T) {
	type quantizer = func(code []int8, sum []int32, scale, x []float32) (top uint32)
	for _, c := range []struct {
		block int
		table []kernel[func(code []int8, sum []int32, scale, x []float32) (top uint32)]
	}{{32, quantize32Kernels}, {256, quantize256Kernels}} {
		each(t, c.table, func(t *testing.T, want, run func(code []int8, sum []int32, scale, x []float32) (top uint32)) {
			rng := rand.New(rand.NewPCG(15, 16))
			try := func(blocks int, x []float32) {
				t.Helper()
				n := len(x)
				code, sum, scale := make([]int8, n), make([]int32, n/16), make([]float32, blocks)
				gotCode, code1 := guarded(rng, code)
				gotSum, sum1 := guarded(rng, sum)
				gotScale, scale1 := guarded(rng, scale)
				gotX, _ := guarded(rng, x)
				what := fmt.Sprintf("%d blocks of %d", blocks, c.block)
				if a, b := quantizer(want)(code, sum, scale, x), run(gotCode, gotSum, gotScale, gotX); a != b {
					t.Fatalf("%s: largest %x, want %x", what, b, a)
				}
				if !slices.Equal(code, gotCode) || !slices.Equal(sum, gotSum) {
					t.Fatalf("%s: codes or sums differ", what)
				}
				sameFloats(t, what, gotScale, scale)
				code1(t, what)
				sum1(t, what)
				scale1(t, what)
			}
			for blocks := range 71 {
				for kind := range 3 {
					x := kinds(rng, blocks*c.block, kind)
					for i := range blocks { // most of a whole range, so that not all have an extreme
						if rng.IntN(2) == 0 {
							for j := range c.block {
								x[i*c.block+j] = float32(rng.NormFloat64())
							}
						}
					}
					try(blocks, x)
				}
			}
			x := make([]float32, c.block)
			for b := uint32(arith.TinyBits); b <= arith.LargestBits; b += 80021 {
				a := math.Float32frombits(b)
				for i := range x { // halves of a step too
					x[i] = a * float32(rng.IntN(509)-254) / 254
				}
				x[rng.IntN(len(x))] = -a
				try(1, x)
			}
		})
	}
}

// rowsOf16 are the sizes of keys and values that the cache's kernels know.
var rowsOf16 = []int{16, 32, 48, 64, 80, 96, 112, 128, 144, 192, 256, 272}

func TestDecodeF16(t *testing.T) {
	each(t, decodeF16Kernels, func(t *testing.T, _, run func(dst []float32, src []uint16)) {
		rng := rand.New(rand.NewPCG(17, 18))
		var all []uint16
		for h := range 1 << 16 {
			if h&0x7c00 != 0x7c00 {
				all = append(all, uint16(h))
			}
		}
		for len(all) > 0 {
			n := min(16*(1+rng.IntN(300)), len(all))
			src, _ := guarded(rng, all[:n])
			dst, check := guarded(rng, make([]float32, n))
			run(dst, src)
			want := make([]float32, n)
			decodeF16(want, all[:n])
			sameFloats(t, "all finite numbers", dst, want)
			check(t, "all finite numbers")
			all = all[n:]
		}
		run(nil, nil)
	})
}

func TestDecodeQ8(t *testing.T) {
	each(t, decodeQ8Kernels, func(t *testing.T, want, run func(dst []float32, code []int8, scale []float32)) {
		rng := rand.New(rand.NewPCG(19, 20))
		for blocks := range 71 {
			code := make([]int8, 32*blocks)
			for i := range code {
				code[i] = int8(rng.Uint32())
			}
			scale := kinds(rng, blocks, 0)
			a := make([]float32, 32*blocks)
			want(a, code, scale)
			b, check := guarded(rng, make([]float32, 32*blocks))
			code, _ = guarded(rng, code)
			scale, _ = guarded(rng, scale)
			run(b, code, scale)
			what := fmt.Sprintf("%d blocks", blocks)
			sameFloats(t, what, b, a)
			check(t, what)
		}
	})
}

func TestEncodeF16(t *testing.T) {
	each(t, encodeF16Kernels, func(t *testing.T, want, run func(dst []uint16, x []float32) (top uint32)) {
		rng := rand.New(rand.NewPCG(21, 22))
		try := func(x []float32) {
			t.Helper()
			a := make([]uint16, len(x))
			b, check := guarded(rng, a)
			y, _ := guarded(rng, x)
			topA, topB := want(a, x), run(b, y)
			if topA != topB {
				t.Fatalf("%d floats: largest %x, want %x", len(x), topB, topA)
			}
			for i := range a {
				if a[i] != b[i] {
					t.Fatalf("%x is stored as %#04x, want %#04x", x[i], b[i], a[i])
				}
			}
			check(t, "stored")
		}
		for _, n := range append([]int{0}, rowsOf16...) {
			for range 20 {
				try(extremes(rng, n, true))
			}
			x := extremes(rng, n, true)
			if n > 0 { // the bits then mean nothing, but it must be told
				x[rng.IntN(n)] = float32(math.NaN())
				if top := run(make([]uint16, n), x); top <= arith.LargestBits {
					t.Fatal("a NaN is not told")
				}
			}
		}
		x := make([]float32, 4096)
		for b := uint32(0x32000000); b < 0x48000000; { // from below the smallest to above the largest
			for i := range x {
				x[i] = math.Float32frombits(b | uint32(i&1)<<31)
				b += 1009
				if i%7 == 3 {
					b = b&^0x1fff | 0x1000 // a tie, among normal numbers
				}
			}
			try(x)
		}
	})
}

func TestScores(t *testing.T) {
	type scoring = func(dst, q, keys []float32, scale float32)
	each(t, scoresKernels, func(t *testing.T, want, run func(dst, q, keys []float32, scale float32)) {
		rng := rand.New(rand.NewPCG(23, 24))
		for _, dim := range rowsOf16 {
			for _, n := range []int{0, 16, 32, 48} {
				for kind := range 3 {
					of := func(f scoring) func([][]float32) any {
						return func(v [][]float32) any { f(v[0], v[1], v[2], -0.125); return nil }
					}
					q, keys := kinds(rng, dim, kind), kinds(rng, n*dim, kind)
					if kind == 0 && n > 0 {
						for i := range dim { // products of -0 alone
							keys[i] = float32(math.Copysign(0, -float64(q[i])))
						}
					}
					compare(t, rng, fmt.Sprintf("%d keys of %d, kind %d", n, dim, kind), of(want), of(run), make([]float32, n), q, keys)
				}
			}
		}
	})
}

func TestWeigh(t *testing.T) {
	type weighing = func(y, p, values []float32)
	each(t, weighKernels, func(t *testing.T, want, run func(y, p, values []float32)) {
		rng := rand.New(rand.NewPCG(25, 26))
		for _, dim := range rowsOf16 {
			for n := range 36 {
				for kind := range 3 {
					of := func(f weighing) func([][]float32) any {
						return func(v [][]float32) any { f(v[0], v[1], v[2]); return nil }
					}
					compare(t, rng, fmt.Sprintf("%d values of %d, kind %d", n, dim, kind), of(want), of(run), kinds(rng, dim, 0), kinds(rng, n, 0), kinds(rng, n*dim, kind))
				}
			}
		}
	})
}

// TestSoftmax of kernels is that of arith.
func TestSoftmax(t *testing.T) {
	levels(t, func(t *testing.T, l Level) {
		k := kernelsFor(l)
		tried(func(rng *rand.Rand, what string, n, _ int) {
			if n == 0 {
				return
			}
			x := kinds(rng, n, 0)
			y := slices.Clone(x)
			arith.Softmax(x)
			k.softmax(y, 0, nil)
			sameFloats(t, what, y, x)
		})
	})
}
