package moe

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"sluice/backends"
	"sluice/internal/quant"
)

// A nextn is what a drafting (multi-token prediction, MTP) layer has around its
// decoder layer (DeepSeek-V3, arXiv:2412.19437, section 2.2; GLM-4.5 alike):
//
//	x = eh [dim, 2*dim] of [RMSNorm(embed(token i+1)), RMSNorm(hidden i)]    [dim]
//	x = decoder layer of x, with keys and values of its own
//	logits of token i+2 = head(RMSNorm(x))
//
// hidden i is the residual stream behind the last decoder layer, before the
// final norm. x in its place, with token i+2, gives the logits of token i+3.
type nextn struct {
	embedNorm  []float32       // [dim]
	hiddenNorm []float32       // [dim]
	eh         backends.Linear // [dim, 2*dim]
	embed      backends.Matrix // the layer's own, or the model's
	norm       []float32       // [dim], before the head
	head       backends.Linear // the layer's own, or the model's
}

// nextn loads what layer blk.l has around its decoder layer.
func (s *Spec) nextn(l *loader, layer int, w *weights) nextn {
	p := fmt.Sprintf("blk.%d.nextn.", layer)
	n := nextn{
		embedNorm:  l.vector(p+"enorm.weight", s.Hidden),
		hiddenNorm: l.vector(p+"hnorm.weight", s.Hidden),
		eh:         backends.Linear{Matrix: l.matrix(p+"eh_proj.weight", s.Hidden, 2*s.Hidden)},
		embed:      w.embed,
		norm:       w.norm,
		head:       w.head,
	}
	if name := p + "embed_tokens.weight"; l.has(name) {
		n.embed = l.matrix(name, s.Vocab, s.Hidden)
	}
	if name := p + "shared_head_norm.weight"; l.has(name) {
		n.norm = l.vector(name, s.Hidden)
	}
	if l.has(p + "shared_head_head.weight") {
		n.head = l.linear(p+"shared_head_head", s.Vocab, s.Hidden)
	}
	return n
}

// describeNextn notes what the drafting layers would take, as far as the file
// has them and the page can run them.
func (s *Spec) describeNextn() {
	if s.Nextn == 0 {
		return
	}
	with := *s
	with.drafting = true
	l := newLoader(s, nil)
	open(l, &with, 0)
	switch {
	case l.err != nil:
		s.NextnErr = l.err
	case len(with.Roles) == len(s.Roles):
		s.NextnErr = fmt.Errorf("moe: drafting layers of the architecture %q are not supported", s.Arch)
	default:
		s.NextnDense, s.asked = l.dense[len(s.Dense):], l.asked
		s.nextnMade = with.MadeBytes - s.MadeBytes
	}
}

// NextnTypes are the types of the weights of the drafting layers that may be run:
// of eh_proj, which makes one vector of the token and the hidden state, and the one
// of the fewest bits among all other matrices. ok is false if there are none.
func (s *Spec) NextnTypes() (projection, least quant.Type, ok bool) {
	bits := func(t quant.Type) float64 {
		elems, bytes := t.Block()
		return 8 * float64(bytes) / float64(elems)
	}
	first := true
	for i, w := range slices.Concat(s.Dense, s.NextnDense) {
		switch a := s.asked[i]; {
		case layerOf(a.name) < s.Layers || !a.matrix:
		case strings.HasSuffix(a.name, ".nextn.eh_proj.weight"):
			if !ok || bits(w.Type) < bits(projection) {
				projection = w.Type
			}
			ok = true
		case first || bits(w.Type) < bits(least):
			least, first = w.Type, false
		}
	}
	for _, r := range s.NextnRoles {
		for _, part := range r.Parts {
			if t, found := s.file.Tensor(part); found && (first || bits(t.Type) < bits(least)) {
				least, first = t.Type, false
			}
		}
	}
	return projection, least, ok && s.NextnErr == nil
}

// NextnWarning says what weights below 8 bits in the drafting layers cost, "" where
// there are none. The halves of eh_proj's columns differ 20 to 30 times in scale, so
// that one scale a row at 4 bits leaves nothing of the smaller (measured by the
// authors of colibri's containers); blocks of their own scale do not have to.
func (s *Spec) NextnWarning() string {
	projection, least, ok := s.NextnTypes()
	const demo = "with the demo model Q4_K_M had 79 % of drafts accepted, Q8_0 78 %"
	switch {
	case !ok:
		return ""
	case below8(projection):
		return fmt.Sprintf("warning: the head of the drafting (MTP) layer, eh_proj, is %v, below 8 bits: of other models' drafts 39-59 %% were accepted with 8 bits, 0-4 %% with 4 bits and one scale a row; where each block has a scale less is lost (%s). If few are accepted, take a model that keeps MTP at 8 bits", projection, demo)
	case below8(least):
		return fmt.Sprintf("warning: the drafting (MTP) layer has weights of %v, below 8 bits, behind a head of %v: fewer drafts may be accepted (%s)", least, projection, demo)
	}
	return ""
}

// drafts is the state of drafting; all but len is nil in a model opened without.
type drafts struct {
	nextn  []nextn
	x      backends.Vec // [n, dim] of the last Draft, behind its layer
	embed  backends.Vec // [n, dim]
	hidden backends.Vec // [n, dim]
	both   backends.Vec // [n, 2*dim]
	layer  int          // of the last Draft
}

func (d *drafts) init(vec func(capacity, dim int) backends.Vec, n int, spec *Spec) {
	d.x, d.embed, d.hidden, d.both = vec(n, spec.Hidden), vec(n, spec.Hidden), vec(n, spec.Hidden), vec(n, 2*spec.Hidden)
}

// A DraftStep is one run of a drafting layer over some positions.
//
// Its hidden states are rows of the residual stream of the last Forward, or, to
// go one token further, of the last Draft. Its keys and values are rows of a
// cache of its own, which only the caller numbers: a step writes rows Pos, Pos+1,
// ... and sees those from 0 on.
type DraftStep struct {
	Layer   int     // 0 to Nextn-1
	Cache   int     // 0 to Config.Drafts-1
	Pos     int     // of the cache, where the step's first row goes
	Recycle bool    // hidden states of the last Draft
	Rows    []int32 // which of its positions, 1 to Chunk
	IDs     []int32 // the token behind each
}

// Draft runs a drafting layer. It changes neither the sequence nor what Logits
// and Hidden read; DraftLogits reads what it leaves. Misuse panics; after an error
// the rows that the step was to write mean nothing.
func (m *Model) Draft(ctx context.Context, step DraftStep) error {
	s, d := &m.s, &m.s.drafts
	if len(step.Rows) != len(step.IDs) || len(step.IDs) == 0 || len(step.IDs) > m.Chunk() || step.Layer >= len(d.nextn) || step.Cache >= m.cfg.Drafts {
		panic(fmt.Sprintf("moe: draft of %d rows and %d tokens by layer %d of %d in cache %d of %d", len(step.Rows), len(step.IDs), step.Layer, len(d.nextn), step.Cache, m.cfg.Drafts))
	}
	if step.Pos+len(step.IDs) > m.cfg.Ctx {
		return &ContextError{step.Pos + len(step.IDs), m.cfg.Ctx}
	}
	if err := m.checkIDs(step.IDs); err != nil {
		return err
	}
	w, from := &d.nextn[step.Layer], s.x
	if step.Recycle {
		from = d.x
	}
	s.clock.reset()
	s.be.Gather(d.hidden, from, step.Rows)
	s.be.Embed(d.embed, w.embed, step.IDs)
	s.be.RMSNorm(d.embed, d.embed, w.embedNorm, m.eps)
	s.be.RMSNorm(d.hidden, d.hidden, w.hiddenNorm, m.eps)
	s.be.Concat(d.both, d.embed, d.hidden)
	s.matMul(d.x, w.eh, d.both)
	s.clock.lap(StageDense)

	// The decoder layer works on s.x at s.pos, with rows of the layers' cache
	// behind those of decoding, and is in no trace of it.
	layer := m.Layers + step.Layer
	x, pos, trace := s.x, s.pos, s.trace
	s.x, s.pos, s.trace, s.cacheShift = d.x, step.Pos, nil, step.Cache-step.Layer
	err := m.layers.run(ctx, layer, s)
	s.x, s.pos, s.trace, s.cacheShift = x, pos, trace, 0
	d.layer = step.Layer
	if err != nil {
		s.forget()
		return fmt.Errorf("moe: draft: %w", err)
	}
	return nil
}

// DraftLogits computes the logits of rows of the last Draft into dst [len(rows), Vocab].
func (m *Model) DraftLogits(dst []float32, rows []int32) error {
	w := &m.s.drafts.nextn[m.s.drafts.layer]
	return m.headOf(dst, m.s.drafts.x, rows, w.norm, w.head)
}
