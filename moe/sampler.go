package moe

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
)

// Sampling says how a token is chosen from the logits. The steps and their
// order are llama.cpp's: repetition penalty, top-k, top-p, min-p, temperature,
// draw. Each has a value that switches it off.
type Sampling struct {
	Temp          float64 // 0: greedy, the largest logit, the lower id among equals
	TopK          int     // keep the k likeliest; 0: all
	TopP          float64 // keep the fewest whose probabilities reach this; 1: all
	MinP          float64 // drop those below this share of the likeliest; 0: none
	RepeatPenalty float64 // divide positive logits of the last RepeatLast tokens, multiply negative; 1: off
	RepeatLast    int     // tokens that the penalty looks back over
	Seed          uint64
}

// Check names the first value out of range.
func (s Sampling) Check() error {
	switch {
	case !(s.Temp >= 0 && s.Temp <= 100):
		return fmt.Errorf("temperature %v: use 0 (greedy) to 100", s.Temp)
	case s.TopK < 0:
		return fmt.Errorf("top-k %d: use 0 (all) or more", s.TopK)
	case !(s.TopP > 0 && s.TopP <= 1):
		return fmt.Errorf("top-p %v: use above 0, up to 1 (all)", s.TopP)
	case !(s.MinP >= 0 && s.MinP <= 1):
		return fmt.Errorf("min-p %v: use 0 (none) to 1", s.MinP)
	case !(s.RepeatPenalty > 0 && s.RepeatPenalty <= 100):
		return fmt.Errorf("repeat penalty %v: use above 0, 1 is off", s.RepeatPenalty)
	case s.RepeatLast < 0:
		return fmt.Errorf("repeat window %d: use 0 (off) or more tokens", s.RepeatLast)
	}
	return nil
}

// A Sampler draws tokens. The same settings, seed and logits give the same
// tokens. It allocates nothing after NewSampler.
type Sampler struct {
	Sampling
	rng  *rand.Rand
	cand []candidate // [vocab]
	seen []int32     // ring of the last RepeatLast tokens
	next int         // where the next token goes in the ring
}

type candidate struct {
	id    int32
	logit float32
	p     float64
}

// NewSampler makes a sampler for a vocabulary.
func NewSampler(s Sampling, vocab int) *Sampler {
	return &Sampler{
		Sampling: s,
		rng:      rand.New(rand.NewPCG(s.Seed, 0x51cede)),
		cand:     make([]candidate, vocab),
		seen:     make([]int32, 0, s.RepeatLast),
	}
}

// Accept tells the sampler of a token of the context, for the penalty.
func (s *Sampler) Accept(id int32) {
	if s.RepeatLast == 0 {
		return
	}
	if len(s.seen) < s.RepeatLast {
		s.seen = append(s.seen, id)
		return
	}
	s.seen[s.next] = id
	s.next = (s.next + 1) % s.RepeatLast
}

// Sample chooses a token. It changes logits [vocab] where the penalty applies.
func (s *Sampler) Sample(logits []float32) int32 {
	s.penalize(logits)
	if s.Temp == 0 {
		return argmax(logits)
	}
	cand := s.cand[:len(logits)]
	for i, l := range logits {
		cand[i] = candidate{id: int32(i), logit: l}
	}
	cand = s.keep(cand)
	for i := range cand {
		cand[i].p = math.Exp(float64(cand[i].logit-cand[0].logit) / s.Temp)
	}
	sum := 0.0
	for _, c := range cand {
		sum += c.p
	}
	r := s.rng.Float64() * sum
	for _, c := range cand {
		if r -= c.p; r < 0 {
			return c.id
		}
	}
	return cand[len(cand)-1].id
}

// keep sorts the candidates, likeliest first, and cuts them by top-k, top-p
// and min-p.
func (s *Sampler) keep(cand []candidate) []candidate {
	if s.TopK > 0 && s.TopK < len(cand) {
		cand = largest(cand, s.TopK)
	}
	slices.SortFunc(cand, likelier)
	if s.TopP < 1 {
		sum := 0.0
		for i := range cand {
			cand[i].p = math.Exp(float64(cand[i].logit - cand[0].logit))
			sum += cand[i].p
		}
		reached := 0.0
		for i := range cand {
			if reached += cand[i].p; reached >= s.TopP*sum {
				cand = cand[:i+1]
				break
			}
		}
	}
	if s.MinP > 0 {
		floor := cand[0].logit + float32(math.Log(s.MinP))
		for i := range cand {
			if cand[i].logit < floor {
				cand = cand[:i]
				break
			}
		}
	}
	return cand
}

// penalize applies the repetition penalty, once for each token in the window.
func (s *Sampler) penalize(logits []float32) {
	if s.RepeatPenalty == 1 {
		return
	}
	for i, id := range s.seen {
		if slices.Contains(s.seen[:i], id) {
			continue
		}
		if l := &logits[id]; *l > 0 {
			*l /= float32(s.RepeatPenalty)
		} else {
			*l *= float32(s.RepeatPenalty)
		}
	}
}

// likelier orders by logit, largest first, the lower id among equals.
func likelier(a, b candidate) int {
	if c := cmp.Compare(b.logit, a.logit); c != 0 {
		return c
	}
	return cmp.Compare(a.id, b.id)
}

// largest keeps the k likeliest candidates, in heap order: a heap of k whose
// root is the least likely of them, so that most of a large vocabulary costs
// one comparison each.
func largest(cand []candidate, k int) []candidate {
	heap := cand[:k]
	for i := k/2 - 1; i >= 0; i-- {
		sift(heap, i)
	}
	for _, c := range cand[k:] {
		if likelier(c, heap[0]) < 0 {
			heap[0] = c
			sift(heap, 0)
		}
	}
	return heap
}

func sift(heap []candidate, i int) {
	for {
		child := 2*i + 1
		if child >= len(heap) {
			return
		}
		if child+1 < len(heap) && likelier(heap[child+1], heap[child]) > 0 {
			child++
		}
		if likelier(heap[child], heap[i]) <= 0 {
			return
		}
		heap[i], heap[child] = heap[child], heap[i]
		i = child
	}
}

func argmax(logits []float32) int32 {
	best := 0
	for i, l := range logits {
		if l > logits[best] {
			best = i
		}
	}
	return int32(best)
}
