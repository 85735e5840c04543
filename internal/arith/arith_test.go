package arith

import (
	"encoding/binary"
	"hash/fnv"
	"math"
	"testing"
)

// ulps is the error of got in units of the last place of the exact value.
func ulps(got float32, want float64) float64 {
	_, e := math.Frexp(want)
	return math.Abs(float64(got)-want) / math.Ldexp(1, e-24)
}

func TestFunctionsAreWithinTheirErrors(t *testing.T) {
	worst := func(name string, lo, hi float32, stride uint32, limit float64, f func(float32) float32, exact func(float64) float64) {
		t.Helper()
		max, at := 0.0, float32(0)
		for b := math.Float32bits(lo); b <= math.Float32bits(hi); b += stride {
			for _, x := range [2]float32{math.Float32frombits(b), math.Float32frombits(b | SignMask)} {
				if x < 0 && (name == "rcp" || name == "rsqrt") {
					continue
				}
				if e := ulps(f(x), exact(float64(x))); !(e <= max) {
					max, at = e, x
				}
			}
		}
		if !(max <= limit) {
			t.Errorf("%s over [%g, %g]: %.3f ulp at %x, at most %.3f allowed", name, lo, hi, max, at, limit)
		}
	}
	rcp := func(x float64) float64 { return 1 / x }
	rsqrt := func(x float64) float64 { return 1 / math.Sqrt(x) }
	worst("rcp", 1, 2, 11, 1.156, Rcp, rcp)
	worst("rcp", 0x1p-100, 0x1p100, 2003, 1.156, Rcp, rcp)
	worst("rsqrt", 1, 4, 23, 1.218, Rsqrt, rsqrt)
	worst("rsqrt", 0x1p-100, 0x1p100, 2003, 1.218, Rsqrt, rsqrt)
	worst("exp", 0x1p-31, 40, 307, 0.977, Exp, math.Exp)
	silu := func(x float64) float64 { return x / (1 + math.Exp(-x)) }
	worst("silu", 0x1p-50, 40, 631, 3.18, SiLU, silu)
	softplus := func(x float64) float64 { return max(x, 0) + math.Log1p(math.Exp(-math.Abs(x))) }
	worst("softplus", 0x1p-50, 40, 631, 3.12, Softplus, softplus)
}

func TestFunctionsAreExactWhereTheyMustBe(t *testing.T) {
	for k := -100; k <= 100; k++ {
		p := float32(math.Ldexp(1, k))
		if got := Rcp(p); got != float32(math.Ldexp(1, -k)) {
			t.Errorf("rcp(2^%d) = %x", k, got)
		}
	}
	inf := float32(math.Inf(1))
	for _, c := range []struct {
		name      string
		got, want float32
	}{
		{"rsqrt(1)", Rsqrt(1), 1}, {"rsqrt(4)", Rsqrt(4), 0.5},
		{"exp(0)", Exp(0), 1}, {"exp(-40.00001)", Exp(math.Nextafter32(-40, -41)), 0}, {"exp(-inf)", Exp(-inf), 0},
		{"exp(41)", Exp(41), Exp(40)}, {"exp(inf)", Exp(inf), Exp(40)},
		{"SiLU(0)", SiLU(0), 0}, {"SiLU(50)", SiLU(50), 50}, {"SiLU(-41)", SiLU(-41), 0}, {"SiLU(-inf)", SiLU(-inf), 0},
		{"sigmoid(0)", Sigmoid(0), 0.5},
		{"softplus(50)", Softplus(50), 50}, {"softplus(-41)", Softplus(-41), 0}, {"softplus(-inf)", Softplus(-inf), 0},
		{"clean(2^-50)", Clean(0x1p-50), 0x1p-50}, {"clean(-2^-50)", Clean(-0x1p-50), -0x1p-50},
		{"clean(below)", Clean(math.Nextafter32(0x1p-50, 0)), 0}, {"clean(-below)", Clean(-0x1p-51), 0},
		{"clean(-0)", Clean(float32(math.Copysign(0, -1))), 0},
	} {
		if math.Float32bits(c.got) != math.Float32bits(c.want) {
			t.Errorf("%s = %x, want %x", c.name, c.got, c.want)
		}
	}
	if r := Rsqrt(0); math.IsInf(float64(r), 0) || r != r {
		t.Errorf("rsqrt(0) = %g, want a finite number", r)
	}
	if Outside(0x1p50) || !Outside(math.Nextafter32(-0x1p50, -inf)) || !Outside(inf) || !Outside(float32(math.NaN())) {
		t.Error("outside: the bound is not 2^50")
	}
}

func TestExpIsMonotone(t *testing.T) {
	last := float32(1)
	for b := math.Float32bits(0x1p-31); b <= math.Float32bits(40); b += 97 {
		e := Exp(-math.Float32frombits(b))
		if e > last {
			t.Fatalf("exp rises at %x", -math.Float32frombits(b))
		}
		last = e
	}
}

// TestFunctionBits holds one hash for every build: GOAMD64 v1 and v3, arm64.
func TestFunctionBits(t *testing.T) {
	h := fnv.New64a()
	var buf [16]byte
	for b := math.Float32bits(0x1p-60); b <= math.Float32bits(0x1p60); b += 1009 {
		x := math.Float32frombits(b)
		binary.LittleEndian.PutUint32(buf[0:], math.Float32bits(Rcp(x)))
		binary.LittleEndian.PutUint32(buf[4:], math.Float32bits(Rsqrt(x)))
		binary.LittleEndian.PutUint32(buf[8:], math.Float32bits(Exp(x))+3*math.Float32bits(Exp(-x)))
		binary.LittleEndian.PutUint32(buf[12:], math.Float32bits(SiLU(x))+3*math.Float32bits(SiLU(-x))+5*math.Float32bits(Softplus(x))+7*math.Float32bits(Softplus(-x)))
		h.Write(buf[:])
	}
	if got := h.Sum64(); got != functionBits {
		t.Errorf("hash of the functions' bits is %#x, want %#x: this build rounds differently", got, uint64(functionBits))
	}
}

const functionBits = 0xb546f3630fe2a656

func TestSoftmax(t *testing.T) {
	for _, n := range []int{1, 2, 15, 16, 17, 255, 256, 257, 600} {
		x := make([]float32, n)
		want := make([]float64, n)
		var sum float64
		for i := range x {
			x[i] = float32(math.Sin(float64(i)*1.7)) * 9
			want[i] = math.Exp(float64(x[i]))
			sum += want[i]
		}
		Softmax(x)
		for i := range x {
			if math.Abs(float64(x[i])-want[i]/sum) > 2e-6 {
				t.Fatalf("n=%d: x[%d] = %g, want %g", n, i, x[i], want[i]/sum)
			}
		}
	}
	Softmax(nil)
}
