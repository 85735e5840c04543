package cpu

import (
	"math"
	"testing"

	"sluice/internal/quant"
)

func TestFromF16(t *testing.T) {
	for h := range 1 << 16 {
		if got, want := fromF16(uint16(h)), quant.FromF16(uint16(h)); math.Float32bits(got) != math.Float32bits(want) && (got == got || want == want) {
			t.Fatalf("%#04x is %x, want %x", h, got, want)
		}
	}
}
