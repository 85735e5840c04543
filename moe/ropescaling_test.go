package moe

import (
	"math"
	"testing"
)

// Frequencies of Llama 3.1: above 4 turns in 8192 positions as they were, below
// 1 an eighth, in between falling.
func TestLlama3Frequencies(t *testing.T) {
	const dims, base = 128, 500000.0
	plain := ropeFrequencies(dims, base)
	got := ropeFrequencies(dims, base)
	llama3{factor: 8, low: 1, high: 4, original: 8192}.stretch(got)
	share := 1.0
	between := 0
	for i, f := range got {
		turns, r := plain[i]*8192/(2*math.Pi), f/plain[i]
		switch {
		case turns >= 4 && r != 1, turns <= 1 && math.Abs(r-0.125) > 1e-15, r > share:
			t.Errorf("pair %d, which turns %.3g times, is scaled by %v, the one before by %v", i, turns, r, share)
		case turns > 1 && turns < 4:
			between++
			if want := (turns-1)/3 + (4-turns)/3/8; math.Abs(r-want) > 1e-12 {
				t.Errorf("pair %d, which turns %.3g times, is scaled by %v, want %v", i, turns, r, want)
			}
		}
		share = r
	}
	if between != 6 { // 4 = 500000^(2*6.8/128)
		t.Errorf("%d pairs between 1 and 4 turns", between)
	}
}
