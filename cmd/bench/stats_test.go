package bench

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"
)

func near(a, b, by float64) bool { return math.Abs(a-b) <= by }

func TestQuantile(t *testing.T) {
	for _, c := range []struct {
		x    []float64
		p    float64
		want float64
	}{
		{[]float64{3}, 0.25, 3},
		{[]float64{4, 1, 3, 2}, 0.5, 2.5},
		{[]float64{4, 1, 3, 2}, 0.25, 1.75}, // R: quantile(1:4, .25, type = 7)
		{[]float64{4, 1, 3, 2}, 0.75, 3.25},
		{[]float64{1, 2, 3, 4, 10}, 0.75, 4},
		{[]float64{1, 2}, 1, 2},
		{[]float64{1, 2}, 0, 1},
	} {
		if got := Quantile(c.x, c.p); !near(got, c.want, 1e-12) {
			t.Errorf("quantile %v of %v is %v, want %v", c.p, c.x, got, c.want)
		}
	}
	if got := Summarize([]float64{5, 1, 3}); got != (Summary{3, 3, 1, 5, 2, 4}) {
		t.Errorf("%+v", got)
	}
	if got := Summarize(nil); got != (Summary{}) {
		t.Errorf("of nothing: %+v", got)
	}
}

// The values that are in every table of the sign test.
func TestSignTest(t *testing.T) {
	for _, c := range []struct {
		wins, losses int
		want         float64
	}{
		{0, 0, 1}, {1, 0, 1}, {3, 3, 1}, {5, 0, 0.0625}, {6, 0, 0.03125}, {8, 0, 0.0078125}, {7, 1, 0.0703125}, {1, 7, 0.0703125},
		{10, 0, 0.001953125}, {9, 1, 0.021484375}, {8, 2, 0.109375}, {10, 2, 0.03857421875}, {13, 3, 0.0213}, {15, 5, 0.0414},
	} {
		if got := SignTest(c.wins, c.losses); !near(got, c.want, 5e-5) {
			t.Errorf("%d to %d: p = %v, want %v", c.wins, c.losses, got, c.want)
		}
	}
}

func TestInterval(t *testing.T) {
	for _, c := range []struct {
		n, low   int // from the low-th value
		coverage float64
	}{{8, 1, 99.2}, {10, 2, 97.9}, {12, 3, 96.1}, {16, 4, 97.9}, {20, 6, 95.9}} {
		x := make([]float64, c.n)
		for i, v := range rand.New(rand.NewPCG(1, 2)).Perm(c.n) {
			x[i] = float64(v + 1)
		}
		low, high, coverage, ok := Interval(x)
		if !ok || low != float64(c.low) || high != float64(c.n+1-c.low) || !near(100*coverage, c.coverage, 0.06) {
			t.Errorf("n = %d: %v..%v with %.1f %%, want from %d with %.1f %%", c.n, low, high, 100*coverage, c.low, c.coverage)
		}
	}
	for n := range 6 {
		if _, _, _, ok := Interval(make([]float64, n)); ok {
			t.Errorf("n = %d gives an interval", n)
		}
	}
}

func TestHolm(t *testing.T) {
	got := Holm([]float64{0.04, 0.01, 0.03, 0.9})
	for i, want := range []float64{0.09, 0.04, 0.09, 0.9} {
		if !near(got[i], want, 1e-12) {
			t.Errorf("adjusted %v, want %v at %d", got, want, i)
		}
	}
	if len(Holm(nil)) != 0 {
		t.Error("of nothing")
	}
}

func TestOverlap(t *testing.T) {
	for _, c := range []struct {
		t, c []float64
		want string
	}{
		{[]float64{3, 4}, []float64{1, 2}, "no overlap: every a run is above every b run (lowest 3, highest 2); by chance alone p = 0.33"},
		{[]float64{1, 2, 3}, []float64{5, 6, 7}, "no overlap: every a run is below every b run (highest 3, lowest 5); by chance alone p = 0.1"},
		{[]float64{6, 7, 8, 9, 10}, []float64{1, 2, 3, 4, 5}, "no overlap: every a run is above every b run (lowest 6, highest 5); by chance alone p = 0.0079"},
		{[]float64{1, 3}, []float64{2, 4}, "ranges overlap: a 1..3, b 2..4; the claim rests on pairing"},
		{[]float64{1, 2}, []float64{2, 3}, "ranges overlap: a 1..2, b 2..3; the claim rests on pairing"},
		{nil, []float64{2}, ""},
	} {
		if got := Overlap("a", "b", c.t, c.c); got != c.want {
			t.Errorf("got %q, want %q", got, c.want)
		}
	}
}

// A verdict needs enough blocks, one direction, and an effect that matters.
func TestCompare(t *testing.T) {
	steady := func(n int, v float64) []float64 {
		x := make([]float64, n)
		for i := range x {
			x[i] = v * (1 + 1e-4*float64(i%3))
		}
		return x
	}
	mixed := steady(10, 100)
	for i := range mixed {
		mixed[i] *= 1 + 0.3*float64(i%2) - 0.15
	}
	for _, c := range []struct {
		name    string
		control []float64
		t       []float64
		verdict string
		words   []string
	}{
		{"faster", steady(10, 100), steady(10, 150), "faster", []string{"1.5 times as fast", "ahead in 10 of 10 blocks", "p = 0.002, adjusted 0.002", "(97.9 %)"}},
		{"slower", steady(10, 100), steady(10, 90), "slower", []string{"ahead in 0 of 10"}},
		{"a little faster", steady(10, 100), steady(10, 101), "no practical difference", nil},
		{"either way", steady(10, 100), mixed, "inconclusive", []string{"ahead in 5 of 10"}},
		{"few blocks", steady(5, 100), steady(5, 150), "inconclusive", []string{"(n = 5: no result reaches 0.05)"}},
		{"no p-value", steady(2, 100), steady(2, 150), "inconclusive", []string{"n = 2 per side gives no p-value"}},
		{"ties", steady(8, 100), steady(8, 100), "no practical difference", []string{"with 8 ties"}},
	} {
		got := compare([]string{"cap 4", "cap 8"}, [][]float64{c.control, c.t})
		if len(got) != 1 || got[0].Verdict != c.verdict {
			t.Errorf("%s: %+v", c.name, got)
			continue
		}
		for _, w := range append(c.words, "cap 8 against cap 4: "+c.verdict) {
			if s := got[0].String(); !strings.Contains(s, w) {
				t.Errorf("%s: %q lacks %q", c.name, s, w)
			}
		}
	}
	// Several comparisons pay for each other.
	got := compare([]string{"a", "b", "c"}, [][]float64{steady(6, 1), steady(6, 2), steady(6, 3)})
	if len(got) != 2 || !near(got[0].P, 0.03125, 1e-9) || !near(got[0].Adjusted, 0.0625, 1e-9) || got[0].Verdict != "inconclusive" {
		t.Errorf("%+v", got)
	}
}
