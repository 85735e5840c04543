package moe

import (
	"context"
	"fmt"
	"math"
)

// A Perplexity is the mean surprise of a model over a text, as an exponential.
type Perplexity struct {
	Value  float64 // exp(mean negative log likelihood)
	Error  float64 // one standard deviation of Value, from the spread of the scores
	Chunks int
	Tokens int // scored
}

// MeasurePerplexity cuts ids into chunks of size tokens, each a sequence of
// its own, and scores the second half of each: a token at position i of a
// chunk is scored by the logits after position i-1, for i > size/2. What does
// not fill a chunk at the end is left out. This is how llama.cpp measures it.
// bos, if not negative, takes the place of each chunk's first token.
// progress, if not nil, hears of each chunk done.
func MeasurePerplexity(ctx context.Context, m *Model, ids []int32, size int, bos int32, progress func(done, of int, so Perplexity)) (Perplexity, error) {
	if size < 4 || size > m.cfg.Ctx {
		return Perplexity{}, fmt.Errorf("moe: perplexity in chunks of %d tokens: use 4 to the context of %d", size, m.cfg.Ctx)
	}
	chunks := len(ids) / size
	if chunks == 0 {
		return Perplexity{}, fmt.Errorf("moe: the text has %d tokens, fewer than one chunk of %d: use a longer text or a smaller --ctx", len(ids), size)
	}
	if err := m.checkIDs(ids); err != nil { // all of them: one is scored before it is run
		return Perplexity{}, err
	}
	var sum, squares float64
	var p Perplexity
	logits := make([]float32, headRows*m.Vocab)
	rows := make([]int32, 0, headRows)
	chunk := make([]int32, size)
	for c := range chunks {
		copy(chunk, ids[c*size:])
		if bos >= 0 {
			chunk[0] = bos
		}
		if err := m.Rewind(0); err != nil {
			return p, err
		}
		for at := 0; at < size; {
			n := min(size-at, m.Chunk())
			if err := m.Forward(ctx, chunk[at:at+n]); err != nil {
				return p, err
			}
			for from := max(at, size/2); from < min(at+n, size-1); from += len(rows) {
				rows = rows[:0]
				for i := from; i < min(at+n, size-1, from+headRows); i++ {
					rows = append(rows, int32(i-at))
				}
				if err := m.Logits(logits, rows); err != nil {
					return p, err
				}
				for i := range rows {
					nll := surprise(logits[i*m.Vocab:(i+1)*m.Vocab], chunk[from+i+1])
					sum += nll
					squares += nll * nll
					p.Tokens++
				}
			}
			at += n
		}
		p.Chunks = c + 1
		n := float64(p.Tokens)
		mean := sum / n
		p.Value = math.Exp(mean)
		p.Error = p.Value * math.Sqrt(max(0, squares/n-mean*mean)/max(1, n-1))
		if progress != nil {
			progress(c+1, chunks, p)
		}
	}
	return p, nil
}

// surprise is the negative log likelihood of id under the logits.
func surprise(logits []float32, id int32) float64 {
	top := logits[0]
	for _, l := range logits {
		top = max(top, l)
	}
	sum := 0.0
	for _, l := range logits {
		sum += math.Exp(float64(l) - float64(top))
	}
	return math.Log(sum) - (float64(logits[id]) - float64(top))
}
