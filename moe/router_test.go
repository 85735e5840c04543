package moe

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// reference is a router in float64: softmax, or sigmoid with a bias that only
// chooses, in the words of the papers.
type reference struct {
	sigmoid bool
	bias    []float64
	norm    bool
	scale   float64
}

func (r reference) route(logits []float32, k int) (ids []int32, weights []float64) {
	score := make([]float64, len(logits))
	sum := 0.0
	for i, x := range logits {
		if r.sigmoid {
			score[i] = 1 / (1 + math.Exp(-float64(x)))
		} else {
			score[i] = math.Exp(float64(x))
		}
		sum += score[i]
	}
	if !r.sigmoid {
		for i := range score {
			score[i] /= sum
		}
	}
	by := slices.Clone(score)
	for i, b := range r.bias {
		by[i] += b
	}
	for i := range score {
		ids = append(ids, int32(i))
	}
	slices.SortStableFunc(ids, func(a, b int32) int { return cmp.Compare(by[b], by[a]) }) // stable: ties to the lower id
	ids = ids[:k]
	sum = 0
	for _, id := range ids {
		weights = append(weights, score[id])
		sum += score[id]
	}
	for i := range weights {
		if r.norm {
			weights[i] /= sum
		}
		weights[i] *= r.scale
	}
	return ids, weights
}

func TestRouters(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, shape := range []struct{ experts, k int }{{1, 1}, {2, 1}, {4, 4}, {16, 4}, {32, 4}, {128, 8}, {300, 12}} {
		for _, kind := range []string{"softmax", "sigmoid", "sigmoid with bias"} {
			for _, norm := range []bool{false, true} {
				for _, spread := range []string{"normal", "wide", "few values"} { // few values: many ties
					for range 20 {
						logits := make([]float32, shape.experts)
						bias := make([]float32, shape.experts)
						ref := reference{sigmoid: kind != "softmax", norm: norm, scale: 1}
						for i := range logits {
							switch spread {
							case "normal":
								logits[i] = float32(rng.NormFloat64())
							case "wide": // a sigmoid is flat above 8 or so, and orders less finely in float32
								wide := 5.0
								if ref.sigmoid {
									wide = 2
								}
								logits[i] = float32(wide * rng.NormFloat64())
							case "few values":
								logits[i] = float32(rng.IntN(5)-2) / 2
							}
							if bias[i] = float32(rng.IntN(3)-1) / 8; kind == "sigmoid with bias" {
								ref.bias = append(ref.bias, float64(bias[i]))
							}
						}
						ids, weights := make([]int32, shape.k), make([]float32, shape.k)
						scores := slices.Clone(logits)
						switch kind {
						case "softmax":
							RouteSoftmax(ids, weights, scores, norm)
						case "sigmoid":
							ref.scale = 2.5
							RouteSigmoid(ids, weights, scores, nil, norm, 2.5)
						default:
							ref.scale = 0.5
							RouteSigmoid(ids, weights, scores, bias, norm, 0.5)
						}
						wantIDs, want := ref.route(logits, shape.k)
						if !slices.Equal(ids, wantIDs) {
							t.Fatalf("%v %s norm=%v %s: chose %v, want %v", shape, kind, norm, spread, ids, wantIDs)
						}
						for i, w := range weights {
							if math.Abs(float64(w)-want[i]) > 3e-6*want[i] {
								t.Fatalf("%v %s norm=%v %s: weights %v, want %v", shape, kind, norm, spread, weights, want)
							}
						}
					}
				}
			}
		}
	}
}

// What a router leaves behind and how it decides at the edges.
func TestRouterEdges(t *testing.T) {
	ids, weights := make([]int32, 3), make([]float32, 3)

	// Far above 0 every sigmoid is 1 in float32: ties, so the lower ids.
	RouteSigmoid(ids, weights, []float32{20, 30, 25, 40, 100}, nil, true, 1)
	if !slices.Equal(ids, []int32{0, 1, 2}) {
		t.Errorf("saturated: chose %v", ids)
	}
	// The bias chooses and does not weigh: expert 0 has the largest sigmoid.
	RouteSigmoid(ids, weights, []float32{3, 0, 0, 0}, []float32{-1, 0, 0.25, 0.25}, false, 1)
	if !slices.Equal(ids, []int32{2, 3, 1}) || weights[0] != 0.5 || weights[2] != 0.5 {
		t.Errorf("bias: chose %v with %v", ids, weights)
	}
	// A bias of zeros changes no bit.
	a, b := []float32{0.3, -1, 2, 0.7}, []float32{0.3, -1, 2, 0.7}
	other, otherWeights := make([]int32, 3), make([]float32, 3)
	RouteSigmoid(ids, weights, a, nil, true, 1.5)
	RouteSigmoid(other, otherWeights, b, make([]float32, 4), true, 1.5)
	if !slices.Equal(ids, other) || !slices.Equal(weights, otherWeights) {
		t.Errorf("a bias of zeros: %v %v, none: %v %v", other, otherWeights, ids, weights)
	}
	// Scores far below all others: nothing to normalise by is still no NaN.
	RouteSigmoid(ids, weights, []float32{-90, -90, -90, -90}, nil, true, 1)
	for _, w := range weights {
		if !(w >= 0 && w <= 1) {
			t.Errorf("all scores 0: weights %v", weights)
		}
	}

	scores := []float32{1, 2, 3, 4, 5}
	RouteSoftmax(ids, weights, scores, false)
	sum := float32(0)
	for _, p := range scores {
		sum += p
	}
	if math.Abs(float64(sum-1)) > 1e-6 || weights[0] != scores[4] {
		t.Errorf("softmax leaves %v, which sum to %v; first weight %v", scores, sum, weights[0])
	}
	// Softmax sees differences alone, whatever the level.
	RouteSoftmax(ids, weights, []float32{1000, 1001, 999, 1001}, true)
	if !slices.Equal(ids, []int32{1, 3, 0}) || weights[0] != weights[1] {
		t.Errorf("at 1000: chose %v with %v", ids, weights)
	}

	if n := testing.AllocsPerRun(100, func() {
		RouteSigmoid(ids, weights, a, b, true, 1)
		RouteSoftmax(ids, weights, a, true)
	}); n != 0 {
		t.Errorf("routing allocates %v times", n)
	}
}
