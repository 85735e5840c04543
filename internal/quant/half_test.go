package quant

import (
	"math"
	"testing"
)

// f16 is the definition: 1-5-10 bits, bias 15.
func f16(h uint16) float64 {
	sign, exp, man := 1.0, int(h>>10&31), float64(h&0x3ff)
	if h>>15 != 0 {
		sign = -1
	}
	switch exp {
	case 0:
		return sign * math.Ldexp(man, -24)
	case 31:
		if man != 0 {
			return math.NaN()
		}
		return sign * math.Inf(1)
	}
	return sign * math.Ldexp(1024+man, exp-25)
}

func TestF16AllCodes(t *testing.T) {
	for i := 0; i <= 0xffff; i++ {
		h := uint16(i)
		x, want := FromF16(h), f16(h)
		if math.IsNaN(want) {
			if x == x || math.Float32bits(x)>>13&0x3ff != uint32(h&0x3ff) || ToF16(x) != h|0x200 {
				t.Fatalf("%#04x, a NaN, becomes %#08x and %#04x", h, math.Float32bits(x), ToF16(x))
			}
			continue
		}
		if float64(x) != want || math.Signbit(float64(x)) != math.Signbit(want) {
			t.Fatalf("%#04x is %v, want %v", h, x, want)
		}
		if ToF16(x) != h || ToF16Saturate(x) != h {
			t.Fatalf("%#04x comes back as %#04x and %#04x", h, ToF16(x), ToF16Saturate(x))
		}
	}
}

// Between each two neighbours: just below the middle goes down, the middle to
// the even one, just above goes up; beyond the last is an infinity.
func TestF16RoundsToNearestEven(t *testing.T) {
	for h := uint16(0); h < 0x7c00; h++ {
		lo, hi := FromF16(h), FromF16(h+1)
		if h == 0x7bff {
			hi = 65536
		}
		mid := float32((float64(lo) + float64(hi)) / 2)
		for _, c := range []struct {
			x    float32
			want uint16
		}{
			{math.Nextafter32(mid, 0), h}, {mid, h + h&1}, {math.Nextafter32(mid, hi), h + 1},
		} {
			if got := ToF16(c.x); got != c.want {
				t.Fatalf("%g becomes %#04x, want %#04x", c.x, got, c.want)
			}
			if got := ToF16(-c.x); got != c.want|0x8000 {
				t.Fatalf("%g becomes %#04x, want %#04x", -c.x, got, c.want|0x8000)
			}
			if got := ToF16Saturate(c.x); got != min(c.want, 0x7bff) {
				t.Fatalf("%g saturates to %#04x, want %#04x", c.x, got, min(c.want, 0x7bff))
			}
		}
	}
	inf := float32(math.Inf(1))
	for _, c := range []struct {
		x              float32
		want, saturate uint16
	}{
		{math.MaxFloat32, 0x7c00, 0x7bff}, {-1e9, 0xfc00, 0xfbff}, {inf, 0x7c00, 0x7c00}, {-inf, 0xfc00, 0xfc00},
		{math.SmallestNonzeroFloat32, 0, 0}, {0x1p-25, 0, 0}, {0x1.8p-25, 1, 1},
	} {
		if ToF16(c.x) != c.want || ToF16Saturate(c.x) != c.saturate {
			t.Errorf("%g becomes %#04x and %#04x, want %#04x and %#04x", c.x, ToF16(c.x), ToF16Saturate(c.x), c.want, c.saturate)
		}
	}
	nan := math.Float32frombits(0x7f800001)
	if h := ToF16Saturate(nan); h&0x7c00 != 0x7c00 || h&0x3ff == 0 {
		t.Errorf("a NaN becomes %#04x", h)
	}
}

func TestBF16(t *testing.T) {
	for i := 0; i <= 0xffff; i++ {
		h := uint16(i)
		x := FromBF16(h)
		if math.Float32bits(x) != uint32(h)<<16 {
			t.Fatalf("%#04x becomes %#08x", h, math.Float32bits(x))
		}
		if x != x {
			if ToBF16(x) != h|0x40 {
				t.Fatalf("the NaN %#04x comes back as %#04x", h, ToBF16(x))
			}
			continue
		}
		if ToBF16(x) != h {
			t.Fatalf("%#04x comes back as %#04x", h, ToBF16(x))
		}
		if h&0x7fff == 0x7f80 {
			continue // infinity has no neighbour above
		}
		b := uint32(h) << 16
		for low, want := range map[uint32]uint16{0x7fff: h, 0x8000: h + h&1, 0x8001: h + 1} {
			if got := ToBF16(math.Float32frombits(b | low)); got != want {
				t.Fatalf("%#08x becomes %#04x, want %#04x", b|low, got, want)
			}
		}
	}
}

func TestEightBitScales(t *testing.T) {
	for e := 0; e < 255; e++ {
		if got, want := float64(FromE8M0(uint8(e))), math.Ldexp(1, e-127); got != want {
			t.Errorf("E8M0 %d is %g, want %g", e, got, want)
		}
		if got, want := float64(mxfp4Scale(uint8(e))), math.Ldexp(1, e-128); got != want {
			t.Errorf("MXFP4 scale %d is %g, want %g", e, got, want)
		}
	}
	if x := FromE8M0(255); x == x {
		t.Errorf("E8M0 255 is %g, want NaN", x)
	}
	for c := 0; c < 0x7f; c++ {
		want := math.Ldexp(float64(c&7), -9)
		if c >= 8 {
			want = math.Ldexp(float64(8+c&7), c>>3-10)
		}
		if got := float64(FromUE4M3(uint8(c))); got != want {
			t.Errorf("UE4M3 %#02x is %g, want %g", c, got, want)
		}
	}
	if x := FromUE4M3(0x7f); x == x {
		t.Errorf("UE4M3 0x7f is %g, want NaN", x)
	}
}
