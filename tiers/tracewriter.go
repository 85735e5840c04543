package tiers

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode"
)

// A TraceWriter writes what a router chooses as a Trace, while a model runs.
//
// The format knows prompts, which are one batch by layer, and decoded steps of
// one position. Until Decodes each forward pass is a prompt, whose step is the
// position, and so a turn of its own: a prompt of several chunks is as many
// turns, since it ran as as many batches. After it passes of one position are
// steps of the turn, and those of more are prompts of a next turn again.
type TraceWriter struct {
	w         io.Writer
	t         *Trace
	err       error
	line      []byte
	turn      int64
	phase     int64
	step      int64 // of the first position of the pass
	positions int   // of the pass
	layer     int   // of the last batch, -1 before the first
	decodes   bool
	read      []bool // by expert of the batch: it is still to be read
}

// NewTraceWriter writes the header of t, whose batches are not looked at. An
// error of w ends it; Err tells.
func NewTraceWriter(w io.Writer, t *Trace) *TraceWriter {
	tw := &TraceWriter{w: w, t: t, layer: -1, turn: -1, read: make([]bool, t.Experts)}
	tw.line = fmt.Appendf(tw.line, "%s\n# model=%s arch=%s n_layer=%d n_expert=%d n_expert_used=%d\n", traceVersion, word(t.Model), word(t.Arch), len(t.Layers), t.Experts, t.TopK)
	for l, layer := range t.Layers {
		tw.line = fmt.Appendf(tw.line, "# layer=%d expert_bytes=%d dense_bytes=%d\n", l, layer.ExpertBytes, layer.DenseBytes)
	}
	tw.line = append(tw.line, traceColumns...)
	tw.line = append(tw.line, '\n')
	tw.flush()
	return tw
}

// word writes a name so that the header stays a line of KEY=VALUE words.
func word(name string) string {
	return strings.Map(func(r rune) rune {
		if r <= ' ' || r == '=' || unicode.IsSpace(r) || !unicode.IsPrint(r) {
			return '_'
		}
		return r
	}, name)
}

// Decodes says that the next pass decodes.
func (tw *TraceWriter) Decodes() { tw.decodes = true }

// Batch writes the choices of a step that has begun.
//
//	ids      [positions, top-k]  best first for each position
//	weights  [positions, top-k]
func (tw *TraceWriter) Batch(s *Step, ids []int32, weights []float32) {
	if tw.err != nil {
		return
	}
	k, layer := tw.t.TopK, int(s.layer)
	positions := len(ids) / k
	if layer <= tw.layer || tw.layer < 0 { // a new pass
		tw.step += int64(tw.positions)
		tw.positions = positions
		tw.phase = 0
		if tw.decodes && positions == 1 && tw.turn >= 0 {
			tw.phase = 1
		} else {
			tw.turn++
		}
	}
	tw.layer = layer
	for _, it := range s.items {
		tw.read[it.expert] = it.from == missed || it.from == inAhead
	}
	for i, id := range ids {
		for _, n := range [...]int64{tw.turn, tw.phase, tw.step + int64(i/k), int64(layer), int64(i % k), int64(id)} {
			tw.line = append(strconv.AppendInt(tw.line, n, 10), ',')
		}
		tw.line = strconv.AppendFloat(tw.line, float64(weights[i]), 'g', 6, 32)
		residency, read := int64(1), int64(0)
		if tw.read[id] { // and from here on it is there
			residency, read = 0, tw.t.Layers[layer].ExpertBytes
			tw.read[id] = false
		}
		tw.line = strconv.AppendInt(append(tw.line, ','), residency, 10)
		tw.line = strconv.AppendInt(append(tw.line, ','), read, 10)
		tw.line = append(tw.line, '\n')
	}
	tw.flush()
}

func (tw *TraceWriter) flush() {
	if tw.err == nil {
		_, tw.err = tw.w.Write(tw.line)
	}
	tw.line = tw.line[:0]
}

// Err is the first error of the writer underneath.
func (tw *TraceWriter) Err() error { return tw.err }
