package cpu

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"sluice/backends"
	"sluice/backends/backendtest"
	"sluice/internal/arith"
	"sluice/internal/quant"
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

// atEnd is a copy of x at the end of memory: to read beyond it is a fault.
func atEnd(t testing.TB, x []byte) []byte {
	t.Helper()
	page := unix.Getpagesize()
	n := (len(x) + page - 1) &^ (page - 1)
	m, err := unix.Mmap(-1, 0, n+page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(m) })
	if err := unix.Mprotect(m[n:], unix.PROT_NONE); err != nil {
		t.Fatal(err)
	}
	y := m[n-len(x) : n : n]
	copy(y, x)
	return y
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

func TestScan(t *testing.T) {
	each(t, scanKernels, func(t *testing.T, want, run func(p []byte) uint64) {
		rng := rand.New(rand.NewPCG(1, 2))
		for n := range 9 {
			p := make([]byte, 256*n)
			for i := range p {
				p[i] = byte(rng.Uint32())
			}
			p, _ = guarded(rng, p)
			if got, want := run(p), want(p); got != want {
				t.Fatalf("%d bytes: %#x, want %#x", len(p), got, want)
			}
		}
	})
}

// TestRowKernels wants plain Go's bits from the kernels of each type: rows of
// 1 to 70 blocks, 1 to 9 rows, weights at odd places.
func TestRowKernels(t *testing.T) {
	for _, typ := range backendtest.Types {
		if len(rowKernels(typ))+len(tileKernels(typ))+len(floatKernels(typ)) == 3 {
			continue // plain Go alone
		}
		t.Run(typ.String(), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(uint64(typ), 1))
			for blocks := 1; blocks <= 70; blocks++ {
				testRows(t, rng, typ, blocks, 1+rng.IntN(9), []int{1, 2, 3, 8, 17}[rng.IntN(5)])
			}
			for _, n := range []int{1, 2, 3, 8, 33, 50} {
				for _, blocks := range []int{3, 8} {
					testRows(t, rng, typ, blocks, []int{1, 8, 9, 20}[rng.IntN(4)], n)
				}
			}
		})
	}
}

// testRows multiplies a matrix by n positions in plain Go, and at each level that
// this CPU has.
func testRows(t *testing.T, rng *rand.Rand, typ quant.Type, blocks, rows, n int) {
	t.Helper()
	elems, size := typ.Block()
	cols := blocks * elems
	act := typ.ActBlock()
	if act == 0 {
		cols = blocks * 16 // of F8_128, the last block may be short
	}
	all := rows * typ.RowBytes(cols) / size * elems
	var data []byte
	if kind := rng.IntN(3); kind == 0 {
		data = backendtest.Weights(rng, typ, all)
	} else {
		data = backendtest.Extremes(rng, typ, all, kind == 1)
	}
	w, checkW := guarded(rng, data)
	if rng.IntN(2) == 0 {
		w = atEnd(t, data)
	}
	in := someInputs(rng, n, cols, act)
	var bias []float32
	if rng.IntN(2) == 0 {
		bias = backendtest.Vectors(rng, 1, rows, 0)
	}
	stride := rows + rng.IntN(3)
	var yRow []int32
	for _, j := range rng.Perm(n) {
		yRow = append(yRow, int32(j))
	}
	first := someFloats(rng, n*stride)
	var want []float32
	for l := Go; l <= AVX512; l++ {
		if _, err := Choose(l); err != nil {
			t.Log("skipped:", err)
			continue
		}
		what := fmt.Sprintf("kernels %v, %d rows of %d blocks, %d positions", l, rows, blocks, n)
		y, check := guarded(rng, first)
		k := kernelsFor(l)
		var s products
		s.add(&k, product{
			m:  backends.Matrix{Type: typ, Rows: rows, Cols: cols, Data: w},
			in: in, n: n, bias: bias, y: y, yRow: yRow, stride: stride,
		})
		s.run(&worker{scratch: scratch{k: &k}}, 0, s.items)
		check(t, what)
		checkW(t, what)
		if l == Go {
			want = y
		} else {
			sameFloats(t, what, y, want)
		}
	}
}

// someInputs are n vectors in the quantized form that blocks of act meet: codes
// random or at their ends, scales of all sizes.
func someInputs(rng *rand.Rand, n, cols, act int) *inputs {
	in := &inputs{n: n, cols: cols, serial: rng.Uint64()}
	if act == 0 {
		in.f = backendtest.Vectors(rng, n, cols, rng.IntN(6))
		cleanTo(in.f, in.f, arith.TinyBits)
		return in
	}
	q := &in.q[formOf(act)]
	q.block = act
	q.grow(n * cols)
	for b := range q.scale {
		kind := rng.IntN(4)
		for i := range act {
			c := rng.IntN(255) - 127
			switch kind {
			case 0:
				c = 127
			case 1:
				c = -127
			case 2:
				c = 127 - 254*(i/16%2)
			}
			q.code[b*act+i] = int8(c)
		}
		q.scale[b] = float32(math.Ldexp(rng.Float64(), rng.IntN(60)-50))
		if rng.IntN(10) == 0 {
			clear(q.code[b*act : (b+1)*act])
			q.scale[b] = 0
		}
		for g := range act / 16 {
			q.sum[b*act/16+g] = 0
			for _, c := range q.code[b*act+16*g:][:16] {
				q.sum[b*act/16+g] += int32(c)
			}
		}
	}
	return in
}
