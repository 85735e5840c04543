package moe

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// off are settings that keep every token as it is.
var off = Sampling{Temp: 1, TopP: 1, RepeatPenalty: 1}

// logitsOf are logits whose softmax has these probabilities.
func logitsOf(p ...float64) []float32 {
	l := make([]float32, len(p))
	for i := range p {
		l[i] = float32(math.Log(p[i]))
	}
	return l
}

func TestGreedy(t *testing.T) {
	inf := float32(math.Inf(-1))
	for _, tt := range []struct {
		logits []float32
		want   int32
	}{
		{[]float32{0}, 0},
		{[]float32{1, 3, 2}, 1},
		{[]float32{1, 3, 2, 3}, 1}, // a tie goes to the lower id
		{[]float32{-3, -1, -1}, 1},
		{[]float32{float32(math.Copysign(0, -1)), 0}, 0}, // the zeros are equal
		{[]float32{inf, -5}, 1},
	} {
		s := NewSampler(Sampling{TopP: 1, RepeatPenalty: 1, TopK: 1}, len(tt.logits))
		if got := s.Sample(tt.logits); got != tt.want {
			t.Errorf("%v: chose %d, want %d", tt.logits, got, tt.want)
		}
	}
}

// What top-k, top-p and min-p keep, likeliest first, computed by hand.
func TestKept(t *testing.T) {
	five := logitsOf(0.0625, 0.5, 0.125, 0.25, 0.0625)
	even := []float32{2, 2, 2, 2}
	for _, tt := range []struct {
		name   string
		logits []float32
		s      Sampling
		want   []int32
	}{
		{"all off", five, Sampling{TopP: 1}, []int32{1, 3, 2, 0, 4}},
		{"top-k", five, Sampling{TopK: 2, TopP: 1}, []int32{1, 3}},
		{"top-k, a tie at the cut", five, Sampling{TopK: 4, TopP: 1}, []int32{1, 3, 2, 0}},
		{"top-k of one", five, Sampling{TopK: 1, TopP: 1}, []int32{1}},
		{"top-k above all", five, Sampling{TopK: 9, TopP: 1}, []int32{1, 3, 2, 0, 4}},
		{"top-p inside the first", five, Sampling{TopP: 0.4}, []int32{1}},
		{"top-p: 0.5 + 0.25 reach 0.7", five, Sampling{TopP: 0.7}, []int32{1, 3}},
		{"top-p: 0.875 do not reach 0.9", five, Sampling{TopP: 0.9}, []int32{1, 3, 2, 0}},
		{"top-p, to the bit: two quarters reach a half", even, Sampling{TopP: 0.5}, []int32{0, 1}},
		{"top-p, tiny: one stays", even, Sampling{TopP: 1e-9}, []int32{0}},
		{"min-p: a fifth of 0.5 is 0.1", five, Sampling{TopP: 1, MinP: 0.2}, []int32{1, 3, 2}},
		{"min-p: above 0.0625", five, Sampling{TopP: 1, MinP: 0.12}, []int32{1, 3, 2, 0, 4}},
		{"min-p 1: those equal to the first", []float32{1, 2, 2, 1.999}, Sampling{TopP: 1, MinP: 1}, []int32{1, 2}},
		// Each step sees what the step before it left: of 2/3 and 1/3, the first reaches 0.6.
		{"top-k, then top-p", five, Sampling{TopK: 2, TopP: 0.6}, []int32{1}},
		{"top-p, then min-p", five, Sampling{TopP: 0.9, MinP: 0.3}, []int32{1, 3}},
		// The temperature comes last, so it does not change who is kept.
		{"hot", five, Sampling{Temp: 100, TopP: 0.7}, []int32{1, 3}},
		{"cold", five, Sampling{Temp: 0.01, TopP: 0.7}, []int32{1, 3}},
	} {
		s := NewSampler(tt.s, len(tt.logits))
		for i, l := range tt.logits {
			s.cand[i] = candidate{id: int32(i), logit: l}
		}
		var got []int32
		for _, c := range s.keep(s.cand) {
			got = append(got, c.id)
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s: kept %v, want %v", tt.name, got, tt.want)
		}
	}
}

// The heap of top-k keeps what a sort keeps, ties included.
func TestLargest(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 500 {
		cand := make([]candidate, 1+rng.IntN(60))
		for i := range cand {
			cand[i] = candidate{id: int32(i), logit: float32(rng.IntN(12))}
		}
		sorted := slices.Clone(cand)
		slices.SortFunc(sorted, likelier)
		k := 1 + rng.IntN(len(cand))
		got := largest(cand, k)
		slices.SortFunc(got, likelier)
		if !slices.Equal(got, sorted[:k]) {
			t.Fatalf("%d of %d: %v, want %v", k, len(cand), got, sorted[:k])
		}
	}
}

// Draws follow softmax(logits / temperature) over what is kept: Pearson's
// chi-square stays below its 99.9 % point. The seeds are fixed.
func TestDistribution(t *testing.T) {
	logits := []float32{1, 0.5, -1, 2, 0, 1.5}
	for i, tt := range []struct {
		s     Sampling
		kept  []int32
		bound float64 // 99.9 % point for len(kept)-1 degrees of freedom
	}{
		{Sampling{Temp: 1, TopP: 1}, []int32{0, 1, 2, 3, 4, 5}, 20.52},
		{Sampling{Temp: 0.5, TopP: 1}, []int32{0, 1, 2, 3, 4, 5}, 20.52},
		{Sampling{Temp: 3, TopP: 1}, []int32{0, 1, 2, 3, 4, 5}, 20.52},
		{Sampling{Temp: 0.8, TopK: 3, TopP: 1}, []int32{0, 3, 5}, 13.82},
		{Sampling{Temp: 2, TopP: 0.6}, []int32{3, 5}, 10.83},
	} {
		tt.s.Seed, tt.s.RepeatPenalty = uint64(i), 1
		s := NewSampler(tt.s, len(logits))
		const draws = 20000
		seen := make([]float64, len(logits))
		for range draws {
			seen[s.Sample(logits)]++
		}
		sum := 0.0
		for _, id := range tt.kept {
			sum += math.Exp(float64(logits[id]) / tt.s.Temp)
		}
		chi, drawn := 0.0, 0.0
		for _, id := range tt.kept {
			want := draws * math.Exp(float64(logits[id])/tt.s.Temp) / sum
			chi += (seen[id] - want) * (seen[id] - want) / want
			drawn += seen[id]
		}
		if drawn != draws {
			t.Errorf("%+v: %v of %d draws among %v: %v", tt.s, drawn, draws, tt.kept, seen)
		}
		if chi > tt.bound {
			t.Errorf("%+v: chi-square %.1f, above %.1f; counts %v", tt.s, chi, tt.bound, seen)
		}
	}
}

// The limits of the temperature: towards 0 it is greedy, and large logits do
// not overflow.
func TestTemperatureLimits(t *testing.T) {
	for _, logits := range [][]float32{{1, 1.5, 0}, {1e30, 2e30, -1e30}, {-1e30, -1e29, -2e30}} {
		s := NewSampler(Sampling{Temp: 1e-3, TopP: 1, RepeatPenalty: 1}, 3)
		for range 100 {
			if got := s.Sample(logits); got != 1 {
				t.Fatalf("%v at temperature 0.001: drew %d", logits, got)
			}
		}
	}
}

func TestSeed(t *testing.T) {
	draw := func(seed uint64) (ids []int32) {
		set := off
		set.Seed, set.TopK = seed, 40
		s := NewSampler(set, 100)
		rng := rand.New(rand.NewPCG(9, 9))
		logits := make([]float32, 100)
		for range 200 {
			for i := range logits {
				logits[i] = float32(rng.NormFloat64())
			}
			ids = append(ids, s.Sample(logits))
		}
		return ids
	}
	if !slices.Equal(draw(7), draw(7)) {
		t.Error("the same seed drew other tokens")
	}
	if slices.Equal(draw(7), draw(8)) {
		t.Error("another seed drew the same tokens")
	}
}

func TestRepeatPenalty(t *testing.T) {
	for _, tt := range []struct {
		name string
		last int
		said []int32
		want []float32
	}{
		{"nothing said", 4, nil, []float32{2, -2, 0, 1, 4}},
		{"positive is divided, negative multiplied, 0 stays", 4, []int32{0, 1, 2}, []float32{1, -4, 0, 1, 4}},
		{"once, however often said", 4, []int32{4, 4, 4, 4}, []float32{2, -2, 0, 1, 2}},
		{"the window forgets", 2, []int32{4, 0, 3}, []float32{1, -2, 0, 0.5, 4}},
		{"the window forgets, round and round", 2, []int32{0, 1, 2, 3, 4, 0, 1}, []float32{1, -4, 0, 1, 4}},
		{"no window", 0, []int32{0, 1, 2}, []float32{2, -2, 0, 1, 4}},
	} {
		s := NewSampler(Sampling{TopP: 1, RepeatPenalty: 2, RepeatLast: tt.last}, 5)
		for _, id := range tt.said {
			s.Accept(id)
		}
		logits := []float32{2, -2, 0, 1, 4}
		got := s.Sample(logits)
		if !slices.Equal(logits, tt.want) {
			t.Errorf("%s: logits %v, want %v", tt.name, logits, tt.want)
		}
		if want := argmax(tt.want); got != want {
			t.Errorf("%s: chose %d, want %d", tt.name, got, want)
		}
	}
}

func TestSamplerAllocates(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	logits, fresh := make([]float32, 5000), make([]float32, 5000)
	for i := range fresh {
		fresh[i] = float32(rng.NormFloat64())
	}
	for _, set := range []Sampling{
		{TopP: 1, RepeatPenalty: 1},
		{Temp: 0.8, TopK: 40, TopP: 0.95, MinP: 0.05, RepeatPenalty: 1.1, RepeatLast: 64},
		{Temp: 1, TopP: 0.9, RepeatPenalty: 1},
	} {
		s := NewSampler(set, len(logits))
		if n := testing.AllocsPerRun(50, func() {
			copy(logits, fresh)
			s.Accept(s.Sample(logits))
		}); n != 0 {
			t.Errorf("%+v: %v allocations a token", set, n)
		}
	}
}

func TestSamplingCheck(t *testing.T) {
	nan := math.NaN()
	for _, tt := range []struct {
		edit func(*Sampling)
		want string // in the error; "" for none
	}{
		{func(*Sampling) {}, ""},
		{func(s *Sampling) { s.Temp = 0 }, ""},
		{func(s *Sampling) { s.TopK, s.MinP, s.RepeatLast = 1<<30, 1, 1<<20 }, ""},
		{func(s *Sampling) { s.Temp = -0.1 }, "temperature -0.1"},
		{func(s *Sampling) { s.Temp = nan }, "temperature NaN"},
		{func(s *Sampling) { s.Temp = math.Inf(1) }, "temperature +Inf"},
		{func(s *Sampling) { s.TopK = -1 }, "top-k -1"},
		{func(s *Sampling) { s.TopP = 0 }, "top-p 0"},
		{func(s *Sampling) { s.TopP = 1.01 }, "top-p 1.01"},
		{func(s *Sampling) { s.TopP = nan }, "top-p NaN"},
		{func(s *Sampling) { s.MinP = -0.5 }, "min-p -0.5"},
		{func(s *Sampling) { s.MinP = nan }, "min-p NaN"},
		{func(s *Sampling) { s.RepeatPenalty = 0 }, "repeat penalty 0"},
		{func(s *Sampling) { s.RepeatPenalty = nan }, "repeat penalty NaN"},
		{func(s *Sampling) { s.RepeatLast = -1 }, "repeat window -1"},
	} {
		s := off
		tt.edit(&s)
		err := s.Check()
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%+v: %v, want %q", s, err, tt.want)
		}
	}
}
