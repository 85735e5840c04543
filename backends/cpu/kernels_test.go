package cpu

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"
)

// each runs test with every kernel of a table but the first, whose results it
// wants; kernels that this CPU lacks are skipped in words.
func each[F any](t *testing.T, table []kernel[F], test func(t *testing.T, want, run F)) {
	for _, k := range table[1:] {
		t.Run(fmt.Sprintf("kernels=%v", k.level), func(t *testing.T) {
			if _, err := Choose(k.level); err != nil {
				t.Skip(err)
			}
			test(t, table[0].run, k.run)
		})
	}
}

// guarded is a copy of x at an odd place (for its size) of a larger piece of
// memory, and a check that what lies around it was not written.
func guarded[T any](rng *rand.Rand, x []T) (y []T, check func(t testing.TB, what string)) {
	const guard = 64
	var zero T
	size := int(unsafe.Sizeof(zero))
	mem := make([]T, len(x)+2*(guard+16))
	bytes := unsafe.Slice((*byte)(unsafe.Pointer(&mem[0])), len(mem)*size)
	for i := range bytes {
		bytes[i] = byte(rng.Uint32())
	}
	at := guard + rng.IntN(16)
	y = mem[at : at+len(x) : at+len(x)]
	copy(y, x)
	before := append([]byte(nil), bytes...)
	return y, func(t testing.TB, what string) {
		t.Helper()
		for i := range bytes {
			if (i < at*size || i >= (at+len(x))*size) && bytes[i] != before[i] {
				t.Fatalf("%s: byte %d around %d elements was written", what, i-at*size, len(x))
			}
		}
	}
}

// sameFloats wants equal bits, or both NaN.
func sameFloats(t testing.TB, what string, got, want []float32) {
	t.Helper()
	for i := range want {
		if math.Float32bits(got[i]) != math.Float32bits(want[i]) && (got[i] == got[i] || want[i] == want[i]) {
			t.Fatalf("%s: float %d is %x, want %x", what, i, got[i], want[i])
		}
	}
}

// someFloats are numbers of all sizes, some of them 0 or not finite.
func someFloats(rng *rand.Rand, n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		switch rng.IntN(12) {
		case 0:
			x[i] = 0
		case 1:
			x[i] = float32(math.Copysign(0, -1))
		case 2:
			x[i] = math.Float32frombits(rng.Uint32())
		default:
			x[i] = float32(rng.NormFloat64() * math.Ldexp(1, rng.IntN(40)-20))
		}
	}
	return x
}

func TestDotLanes(t *testing.T) {
	each(t, dotLanesKernels, func(t *testing.T, want, run func(l *[16]float32, w, x []float32)) {
		rng := rand.New(rand.NewPCG(1, 2))
		for n := range 70 {
			w, _ := guarded(rng, someFloats(rng, n))
			x, _ := guarded(rng, someFloats(rng, n+rng.IntN(3)))
			l, check := guarded(rng, someFloats(rng, 16))
			wants := *(*[16]float32)(l)
			want(&wants, w, x)
			run((*[16]float32)(l), w, x)
			sameFloats(t, fmt.Sprintf("%d elements", n), l, wants[:])
			check(t, fmt.Sprintf("%d elements", n))
		}
	})
}
