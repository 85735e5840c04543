package moe

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// grouped is the scores and biases with -Inf for the experts of groups that are
// not chosen from, sorted out in float64.
func grouped(score, bias []float64, n, keep int, two bool) []float64 {
	size := len(score) / n
	worth, order := make([]float64, n), make([]int, n)
	for g := range n {
		by := []float64{}
		for i := g * size; i < (g+1)*size; i++ {
			by = append(by, score[i]+bias[i])
		}
		slices.SortFunc(by, func(a, b float64) int { return cmp.Compare(b, a) })
		if worth[g], order[g] = by[0], g; two && size > 1 {
			worth[g] += by[1]
		}
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(worth[b], worth[a]) })
	out := slices.Clone(score)
	for i := range out {
		if !slices.Contains(order[:keep], i/size) {
			out[i] = math.Inf(-1)
		}
	}
	return out
}

func TestGroupedRouters(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for _, c := range []struct{ experts, k, n, keep int }{{8, 2, 4, 2}, {16, 4, 4, 1}, {256, 8, 8, 4}, {160, 6, 8, 3}, {6, 3, 6, 3}, {32, 4, 1, 1}, {12, 2, 3, 3}} {
		for range 50 {
			for _, soft := range []bool{false, true} {
				logits, bias := make([]float32, c.experts), make([]float32, c.experts)
				score, bias64 := make([]float64, c.experts), make([]float64, c.experts)
				sum := 0.0
				for i := range logits {
					logits[i] = float32(rng.NormFloat64())
					score[i] = math.Exp(float64(logits[i]))
					sum += score[i]
					if !soft {
						score[i] = 1 / (1 + 1/score[i])
						bias[i] = float32(rng.NormFloat64()) // some sums below 0: they too come before another group's
						bias64[i] = float64(bias[i])
					}
				}
				if soft {
					for i := range score {
						score[i] /= sum
					}
				}
				by := grouped(score, bias64, c.n, c.keep, !soft)
				want := make([]int32, c.experts)
				for i := range want {
					want[i] = int32(i)
					by[i] += bias64[i]
				}
				slices.SortStableFunc(want, func(a, b int32) int { return cmp.Compare(by[b], by[a]) })
				want = want[:c.k]

				ids, weights := make([]int32, c.k), make([]float32, c.k)
				if soft {
					RouteSoftmaxGrouped(ids, weights, logits, Groups{c.n, c.keep}, false, 16)
				} else {
					RouteSigmoidGrouped(ids, weights, logits, bias, Groups{c.n, c.keep}, true, 2.5)
				}
				if !slices.Equal(ids, want) {
					t.Fatalf("%+v softmax=%v: chose %v, want %v", c, soft, ids, want)
				}
				sum = 0
				for _, id := range ids {
					sum += score[id]
				}
				for i, id := range ids {
					w := score[id] / sum * 2.5
					if soft {
						w = score[id] * 16
					}
					if math.Abs(float64(weights[i])-w) > 3e-6*w {
						t.Fatalf("%+v softmax=%v: weight %d is %v, want %v", c, soft, i, weights[i], w)
					}
				}
			}
		}
	}
}

// One group, or all groups, is no restriction: the same bits.
func TestAllGroups(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for range 50 {
		logits, bias := make([]float32, 24), make([]float32, 24)
		for i := range logits {
			logits[i], bias[i] = float32(rng.NormFloat64()), float32(rng.NormFloat64())/8
		}
		ids, weights, other, otherWeights := make([]int32, 5), make([]float32, 5), make([]int32, 5), make([]float32, 5)
		for _, g := range []Groups{{}, {1, 1}, {4, 4}} {
			RouteSigmoid(ids, weights, slices.Clone(logits), bias, true, 2)
			RouteSigmoidGrouped(other, otherWeights, slices.Clone(logits), bias, g, true, 2)
			if !slices.Equal(ids, other) || !slices.Equal(weights, otherWeights) {
				t.Fatalf("%+v: %v %v, without groups %v %v", g, other, otherWeights, ids, weights)
			}
			RouteSoftmax(ids, weights, slices.Clone(logits), true)
			RouteSoftmaxGrouped(other, otherWeights, slices.Clone(logits), g, true, 1)
			if !slices.Equal(ids, other) || !slices.Equal(weights, otherWeights) {
				t.Fatalf("%+v: %v %v, without groups %v %v", g, other, otherWeights, ids, weights)
			}
		}
	}
}

func TestRouteSoftmaxBiased(t *testing.T) {
	ids, weights := make([]int32, 2), make([]float32, 2)
	// Probabilities 1/10 .. 4/10; the bias brings expert 0 to the top, and does not weigh.
	logits := func() []float32 {
		return []float32{0, float32(math.Log(2)), float32(math.Log(3)), float32(math.Log(4))}
	}
	RouteSoftmaxBiased(ids, weights, logits(), []float32{0.5, 0, 0, 0}, 1e-12)
	if !slices.Equal(ids, []int32{0, 3}) || math.Abs(float64(weights[0])-0.2) > 1e-6 || math.Abs(float64(weights[1])-0.8) > 1e-6 {
		t.Errorf("chose %v with %v", ids, weights)
	}
	// A sum below the floor is not blown up to 1.
	RouteSoftmaxBiased(ids, weights, logits(), []float32{0.5, 0.5, 0, 0}, 0.6)
	if !slices.Equal(ids, []int32{1, 0}) || math.Abs(float64(weights[0])-0.2/0.6) > 1e-6 || math.Abs(float64(weights[1])-0.1/0.6) > 1e-6 {
		t.Errorf("with a floor: chose %v with %v", ids, weights)
	}
	a, b := logits(), []float32{0, 0, 0, 0}
	if n := testing.AllocsPerRun(100, func() {
		RouteSoftmaxBiased(ids, weights, a, b, 1e-12)
		RouteSigmoidGrouped(ids, weights, a, b, Groups{2, 1}, true, 1)
		clear(a)
		RouteSoftmaxGrouped(ids, weights, a, Groups{2, 1}, true, 1)
		clear(a)
	}); n != 0 {
		t.Errorf("routing allocates %v times", n)
	}
}
