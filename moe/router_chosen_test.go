package moe

import (
	"math"
	"slices"
	"testing"
)

func TestRouteChosen(t *testing.T) {
	scores := []float32{1, 3, -2, 3, 2.5}
	ids, weights := make([]int32, 3), make([]float32, 3)
	RouteChosenSoftmax(ids, weights, scores)
	if !slices.Equal(ids, []int32{1, 3, 4}) {
		t.Errorf("chose %v", ids)
	}
	sum := 2 + math.Exp(-0.5)
	for i, want := range []float64{1 / sum, 1 / sum, math.Exp(-0.5) / sum} {
		if math.Abs(float64(weights[i])-want) > 1e-6 {
			t.Errorf("weight %d is %v, want %v", i, weights[i], want)
		}
	}
	RouteChosenSigmoid(ids, weights, scores)
	for i, want := range []float64{1 / (1 + math.Exp(-3)), 1 / (1 + math.Exp(-3)), 1 / (1 + math.Exp(-2.5))} {
		if math.Abs(float64(weights[i])-want) > 1e-6 {
			t.Errorf("sigmoid %d is %v, want %v", i, weights[i], want)
		}
	}
	// Sigmoids of 90 and 80 are both 1: the scores themselves decide.
	RouteChosenSigmoid(ids[:1], weights[:1], []float32{80, 90})
	if ids[0] != 1 {
		t.Errorf("of 80 and 90 it chose number %d", ids[0])
	}
	if n := testing.AllocsPerRun(100, func() {
		RouteChosenSoftmax(ids, weights, scores)
		RouteChosenSigmoid(ids, weights, scores)
	}); n != 0 {
		t.Errorf("routing allocates %v times", n)
	}
}
