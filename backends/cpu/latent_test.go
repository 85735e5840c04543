package cpu

import (
	"math/rand/v2"
	"testing"

	"sluice/backends"
	"sluice/backends/backendtest"
	"sluice/internal/quant"
)

// latentSteps is one of each step of multi-head latent attention, on n positions.
func latentSteps(t testing.TB, b *Backend, n int) map[string]func() {
	const heads, latent, rest, value, index = 8, 64, 32, 32, 64
	rng := rand.New(rand.NewPCG(7, 8))
	vec := func(dim int) backends.Vec {
		v, err := b.NewVec(n, dim)
		if err != nil {
			t.Fatal(err)
		}
		v.SetLen(n)
		return v
	}
	cache := func(s backends.KVShape) backends.KV {
		s.Layers, s.Positions, s.Heads, s.Type = 1, 2*n+600, 1, backends.KVF16
		kv, err := b.NewKV(s)
		if err != nil {
			t.Fatal(err)
		}
		return kv
	}
	kv, keys := cache(backends.KVShape{KeyDim: latent + rest, ValueDim: latent, Latent: true}), cache(backends.KVShape{KeyDim: index})
	chosen, err := b.NewKeys(n, 100)
	if err != nil {
		t.Fatal(err)
	}
	c, r, q, y, v := vec(latent), vec(rest), vec(heads*(latent+rest)), vec(heads*latent), vec(heads*value)
	ik, iq, iw := vec(index), vec(heads*index), vec(heads)
	w := make([]backends.Matrix, heads)
	for i := range w {
		w[i] = backends.Matrix{Type: quant.Q8_0, Rows: value, Cols: latent, Data: backendtest.Weights(rng, quant.Q8_0, value*latent)}
	}
	weight := backendtest.Vectors(rng, 1, index, 3)
	b.ChooseKeys(chosen, iq, iw, keys, 0, 600)
	return map[string]func(){
		"Store":       func() { b.Store(kv, 0, 600, r, c) },
		"Store keys":  func() { b.Store(keys, 0, 600, ik, nil) },
		"ChooseKeys":  func() { b.ChooseKeys(chosen, iq, iw, keys, 0, 600) },
		"Attend":      func() { b.Attend(y, q, kv, 0, 600, &backends.Attention{Scale: 0.1, Keys: chosen}) },
		"LayerNorm":   func() { b.LayerNorm(ik, ik, weight, weight, 1e-6) },
		"MatMulHeads": func() { b.MatMulHeads(v, w, y) },
	}
}

func TestLatentStepsDoNotAllocate(t *testing.T) {
	for _, threads := range []int{1, 3} {
		for _, n := range []int{1, 20} {
			for name, step := range latentSteps(t, open(t, threads), n) {
				if a := testing.AllocsPerRun(5, step); a != 0 {
					t.Errorf("%s of %d positions by %d threads: %g allocations", name, n, threads, a)
				}
			}
		}
	}
}

// The choice of keys is that of a stable sort, whatever the scores.
func TestLargestAt(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 10))
	for trial := range 300 {
		n := 2 + rng.IntN(300)
		score := backendtest.Vectors(rng, 1, n, trial)
		if trial%3 == 0 {
			for i := range score {
				score[i] = float32(rng.IntN(4) - 2)
			}
		}
		at := make([]int32, 1+rng.IntN(n-1))
		largestAt(at, score)
		for i, k := range at {
			better := 0 // keys that come before k
			for j, s := range score {
				if s > score[k] || s == score[k] && int32(j) < k {
					better++
				}
			}
			if better >= len(at) || i > 0 && at[i-1] >= k {
				t.Fatalf("trial %d: %d of %d scores: place %d is key %d, which %d are better than", trial, len(at), n, i, k, better)
			}
		}
	}
}
