package moe

import (
	"context"
	"fmt"
	"math"

	"sluice/backends"
	"sluice/tiers"
)

// Config is what a model is opened with beside its file.
type Config struct {
	Ctx   int // positions of the KV cache
	Chunk int // most positions of one forward pass
	KV    backends.KVType
	Held  backends.Holder // of the experts that the tiers have in VRAM; nil: none

	// Drafts counts the caches for Draft, each of Ctx positions; 0: the drafting
	// layers are not loaded. With more, weights must know Spec.NextnDense and the
	// cache Spec.NextnRoles.
	Drafts int
}

// A Model is one sequence being decoded: resident weights, a KV cache, and the
// state of the last forward pass. It is used by one goroutine.
type Model struct {
	*Spec
	cfg Config
	weights
	s         state
	next      []float32 // [vocab] logits that Extend returns
	lastRow   [1]int32
	start     int // positions of the last Forward
	end       int
	positions int64 // run so far, since New
	forwards  int64
}

// headRows is how many positions the head computes at once: enough to use
// each of its weights many times, few enough that the logits of a large
// vocabulary stay small (32 x 150 000 floats are 19 MB).
const headRows = 32

// state is the vectors of a forward pass, for at most chunk positions, and what
// the steps of a layer hand each other.
type state struct {
	be    backends.Backend
	cache *tiers.Cache
	trace *tiers.TraceWriter // nil: nobody wants one
	kv    backends.KV
	delta backends.Delta // nil: the family has none
	index backends.KV    // of indexers; nil: there are none
	keys  backends.Keys  // that the last of them chose
	how   backends.Attention
	held  held
	pos   int // of the batch's first position
	clock clock

	cacheShift int // of the layer that keeps keys and values, against the layer that runs; 0 but in drafts
	drafts     drafts
	routes     routes
	missed     []bool // by expert: in no tier when its layer asked

	x, h backends.Vec   // [n, dim] residual stream; input or output of a step
	vec  []backends.Vec // the family page's own, by vecID
	y3   [3]backends.Vec
	w3   [3]backends.Linear
	y4   [4]backends.Vec
	y1   [1]backends.Vec
	w1   [1]backends.Linear

	topK       int
	scores     backends.Vec // [n, experts] of the router
	hostScores []float32
	ids        []int32      // [n, topK] chosen experts, best first
	weights    []float32    // [n, topK]
	ones       []float32    // [n] of 1
	out        backends.Vec // [n*topK, dim] an output for each choice
	guess      guessState
	shared     backends.Vec // [n, dim] of the shared expert or the dense feed-forward

	distinct []int32 // experts of the batch
	uses     []int32 // positions that chose each
	first    []int32 // where the rows of each begin in rows; one more at the end
	rows     []int32 // output rows, by distinct expert
	next     []int32
	count    []int32
	everyRow []int32 // 0, 1, 2, ...
	arrived  [maxJobs]int32
	job      [maxJobs]backends.Job

	last   backends.Vec // [headRows, dim] normalised rows for the head
	logits backends.Vec // [headRows, vocab]
}

// guessState is what the guess of the next layer's experts works on, apart from
// what the layer itself does.
type guessState struct {
	x, h       backends.Vec // [1, dim]
	none       backends.Vec // [0, dim]
	row        [1]int32     // the one row of a single position
	share      []float32    // [topK] weights of the experts that are computed, 0 of the others
	scores     backends.Vec // [1, experts]
	hostScores []float32
	ids        []int32
	weights    []float32

	drift  []backends.Vec // by layer: [1, dim] what comes between the guess of its experts and its router, driftShare of a mean over the last tokens
	known  []int          // by layer: tokens in drift, up to driftTokens
	from   backends.Vec   // [1, dim] the state of the last guess, without drift
	of     int            // the layer it was of, until that layer comes; -1: none
	factor [3][1]float32  // of learn
}

const (
	// driftTokens bounds the tokens whose mean a drift is, the last ones counting more.
	driftTokens = 8
	// driftShare of the mean is added: a trained model's tokens differ more than those
	// of random weights, which all of it would serve best.
	driftShare = 0.5
)

// maxJobs bounds the experts that are computed as one group.
const maxJobs = 16

// matMul is matMuls of one weight.
func (s *state) matMul(y backends.Vec, w backends.Linear, x backends.Vec) {
	s.y1[0], s.w1[0] = y, w
	s.matMuls(s.y1[:], s.w1[:], x)
}

// matMuls is MatMul, after a look at what is read ahead meanwhile.
func (s *state) matMuls(y []backends.Vec, w []backends.Linear, x backends.Vec) {
	s.cache.Look()
	s.be.MatMul(y, w, x)
}

// New opens a described model: the bytes of its resident tensors come from
// weights, its routed experts through the cache, whose layers are spec.Roles.
func New(spec *Spec, resident Weights, be backends.Backend, cache *tiers.Cache, cfg Config) (*Model, error) {
	if cfg.Ctx < 1 || cfg.Chunk < 1 {
		return nil, fmt.Errorf("moe: a context of %d and chunks of %d positions: both must be at least 1", cfg.Ctx, cfg.Chunk)
	}
	m := &Model{Spec: spec, cfg: cfg, next: make([]float32, spec.Vocab)}
	switch {
	case cfg.Drafts > 0 && spec.Nextn == 0:
		return nil, fmt.Errorf("moe: the model has no drafting (nextn) layers to open")
	case cfg.Drafts > 0 && spec.NextnErr != nil:
		return nil, spec.NextnErr
	}
	l := newLoader(spec, resident)
	with := *spec
	with.drafting = cfg.Drafts > 0
	m.weights = open(l, &with, cfg.Ctx)
	if l.err != nil {
		return nil, l.err
	}
	m.s.drafts.nextn = m.weights.nextn
	if err := m.s.init(spec, be, cache, cfg); err != nil {
		return nil, err
	}
	return m, m.s.warm(m.layers, spec, resident, cfg)
}

func (s *state) init(spec *Spec, be backends.Backend, cache *tiers.Cache, cfg Config) (err error) {
	n := min(cfg.Chunk, cfg.Ctx)
	s.be, s.cache, s.topK, s.held.by = be, cache, spec.TopK, cfg.Held
	vec := func(capacity, dim int) (v backends.Vec) {
		if err == nil {
			v, err = be.NewVec(capacity, dim)
		}
		return v
	}
	s.x, s.h = vec(n, spec.Hidden), vec(n, spec.Hidden)
	for _, width := range spec.vectors {
		s.vec = append(s.vec, vec(n, width))
	}
	s.shared = vec(n, spec.Hidden)
	if spec.Experts > 0 {
		s.scores, s.out = vec(n, spec.Experts), vec(n*spec.TopK, spec.Hidden)
		s.guess.x, s.guess.h, s.guess.none = vec(1, spec.Hidden), vec(1, spec.Hidden), vec(1, spec.Hidden)
		s.guess.from, s.guess.of = vec(1, spec.Hidden), -1
		for range spec.Layers {
			s.guess.drift = append(s.guess.drift, vec(1, spec.Hidden))
		}
		s.guess.known = make([]int, spec.Layers)
		s.guess.scores, s.guess.share = vec(1, spec.Experts), make([]float32, spec.TopK)
	}
	s.last, s.logits = vec(headRows, spec.Hidden), vec(headRows, spec.Vocab)
	if cfg.Drafts > 0 {
		s.drafts.init(vec, n, spec)
	}
	if err != nil {
		return err
	}
	s.kv, err = be.NewKV(spec.KV(cfg))
	if err != nil {
		return err
	}
	if spec.delta.Layers > 0 {
		if s.delta, err = be.NewDelta(spec.delta); err != nil {
			return err
		}
	}
	if index := spec.IndexKV(cfg); index.Layers > 0 {
		if s.index, err = be.NewKV(index); err != nil {
			return err
		}
		if s.keys, err = be.NewKeys(n, spec.chosenKeys(cfg)); err != nil {
			return err
		}
	}
	s.routes.init(spec)
	s.missed = make([]bool, spec.Experts)
	s.hostScores = make([]float32, n*spec.Experts)
	s.ids, s.weights = make([]int32, n*spec.TopK), make([]float32, n*spec.TopK)
	s.guess.hostScores = make([]float32, spec.Experts)
	s.guess.ids, s.guess.weights = make([]int32, spec.TopK), make([]float32, spec.TopK)
	s.rows = make([]int32, n*spec.TopK)
	s.distinct, s.uses = make([]int32, 0, spec.Experts), make([]int32, 0, spec.Experts)
	s.first, s.next, s.count = make([]int32, 0, spec.Experts+1), make([]int32, spec.Experts), make([]int32, spec.Experts+1)
	s.everyRow, s.ones = make([]int32, n), make([]float32, n)
	for i := range s.everyRow {
		s.everyRow[i], s.ones[i] = int32(i), 1
	}
	return nil
}

// Trace writes what the routers choose from now on to t; nil ends it.
func (m *Model) Trace(t *tiers.TraceWriter) { m.s.trace = t }

// KV is the shape of the key-value cache under a config.
func (s *Spec) KV(cfg Config) backends.KVShape {
	kv := s.cache
	kv.Positions, kv.Type = cfg.Ctx, cfg.KV
	if cfg.Drafts > 0 {
		kv.Layers += cfg.Drafts
	}
	return kv
}

// StateBytes is what a sequence takes beside its key-value cache: the states of
// gated delta net layers.
func (s *Spec) StateBytes() int64 { return s.delta.Bytes() }

// Made is what opening makes of resident tensors that are not used as they are,
// beside their own bytes.
func (s *Spec) Made(cfg Config) int64 {
	if cfg.Drafts > 0 {
		return s.MadeBytes + s.nextnMade
	}
	return s.MadeBytes
}

// IndexKV is the shape of the cache of keys by which indexers choose what
// queries see; without layers there is none.
func (s *Spec) IndexKV(cfg Config) backends.KVShape {
	kv := s.index
	if kv.Layers == 0 {
		return kv
	}
	kv.Positions, kv.Type = cfg.Ctx, cfg.KV
	kv.Layers += cfg.Drafts
	return kv
}

// chosenKeys is how many keys a position may see of those that indexers choose.
func (s *Spec) chosenKeys(cfg Config) int { return min(s.chosen, cfg.Ctx) }

// ScratchBytes is what the vectors of a forward pass take under a config, the
// backend's own for the widest step included, near enough to plan by.
func (s *Spec) ScratchBytes(cfg Config) int64 {
	n := int64(min(cfg.Chunk, cfg.Ctx))
	perPosition, widestVector := 3*s.Hidden+2*s.Experts+s.TopK*s.Hidden, s.Hidden
	for _, width := range s.vectors {
		perPosition += width
		widestVector = max(widestVector, width)
	}
	if cfg.Drafts > 0 {
		perPosition += 5 * s.Hidden
		widestVector = max(widestVector, 2*s.Hidden)
	}
	perPosition += s.headInput
	if s.chosen > 0 {
		perPosition += s.chosenKeys(cfg) + 1
	}
	widest := max(s.FF, s.TopK*s.ExpertFF, s.SharedFF)
	quantized := 2 * max(widestVector, widest)          // codes, scales and sums for both block sizes, in bytes
	rotations := int64(cfg.Ctx) * int64(s.RopeDims) * 4 // a cosine and a sine for each pair
	return n*int64(4*(perPosition+2*widest)+quantized) + headRows*4*int64(s.Hidden+s.Vocab) + rotations + s.floats
}

// Pos is the number of positions in the KV cache.
func (m *Model) Pos() int { return m.s.pos }

// A RewindError says that a model cannot go back to a position.
type RewindError struct {
	Pos    int
	Start  int  // where the last Forward began
	Inside bool // it can go back into it
}

func (e *RewindError) Error() string {
	to := fmt.Sprintf("0 or %d", e.Start)
	if e.Inside {
		to = fmt.Sprintf("0 or to those from %d on", e.Start)
	}
	return fmt.Sprintf("moe: rewind to position %d: the linear attention of this model keeps a state, not positions, and can go back to position %s: rewind to 0 and run the text again", e.Pos, to)
}

// Rewind forgets the positions from pos on, which is at most Pos. What runs then
// has the bits that it would have if they had never been.
//
// A model with gated delta net layers goes back to 0, to where the last Forward
// began, or into it if it had at most backends.DeltaReach positions. Rewind
// returns a *RewindError for any other pos, and forgets nothing. Models without
// such layers go back anywhere.
func (m *Model) Rewind(pos int) error {
	if pos < 0 || pos > m.s.pos {
		panic(fmt.Sprintf("moe: rewind to %d of %d positions", pos, m.s.pos))
	}
	inside := m.end-m.start <= backends.DeltaReach
	if m.s.delta != nil && pos != 0 && pos != m.start && pos != m.end && (pos < m.start || !inside) {
		return &RewindError{pos, m.start, inside}
	}
	m.s.pos = pos
	m.s.routes.rewind(pos)
	return nil
}

// A ContextError says that tokens do not fit into the context.
type ContextError struct{ Tokens, Ctx int }

func (e *ContextError) Error() string {
	return fmt.Sprintf("moe: %d tokens do not fit into a context of %d: shorten the text or raise --ctx", e.Tokens, e.Ctx)
}

// Chunk is the most positions that one Forward takes.
func (m *Model) Chunk() int { return min(m.cfg.Chunk, m.cfg.Ctx) }

// Forward runs ids, at most Chunk, as the next positions. After it, Logits and
// Hidden read them. After an error no position is added.
func (m *Model) Forward(ctx context.Context, ids []int32) error {
	return m.forward(ctx, ids, nil)
}

// ForwardStates is Forward, and copies the residual stream into dst
// [Layers+1, len(ids), Hidden]: as it goes into each layer, and last behind the
// final norm, as the head reads it.
func (m *Model) ForwardStates(ctx context.Context, ids []int32, dst []float32) error {
	if want := (m.Layers + 1) * len(ids) * m.Spec.Hidden; len(dst) != want {
		panic(fmt.Sprintf("moe: states of %d positions into %d floats, want %d", len(ids), len(dst), want))
	}
	return m.forward(ctx, ids, dst)
}

func (m *Model) forward(ctx context.Context, ids []int32, states []float32) error {
	s := &m.s
	if len(ids) == 0 || len(ids) > m.Chunk() {
		panic(fmt.Sprintf("moe: forward of %d positions, 1 to %d fit", len(ids), m.Chunk()))
	}
	if s.pos+len(ids) > m.cfg.Ctx {
		return &ContextError{s.pos + len(ids), m.cfg.Ctx}
	}
	if err := m.checkIDs(ids); err != nil {
		return err
	}
	m.start, m.end = s.pos, s.pos
	s.cache.Adapt() // between two passes: the memory may have become scarce
	s.clock.reset()
	s.be.Embed(s.x, m.embed, ids)
	if m.embedScale != 1 {
		s.be.Scale(s.x, m.embedScale)
	}
	s.clock.lap(StageDense)
	n := len(ids) * m.Spec.Hidden
	for l := range m.Layers {
		var err error
		if states != nil {
			err = s.be.Read(states[l*n:(l+1)*n], s.x)
		}
		if err == nil {
			err = m.layers.run(ctx, l, s)
		}
		if err != nil {
			s.forget()
			return err
		}
	}
	if states != nil {
		s.be.RMSNorm(s.h, s.x, m.norm, m.eps)
		if err := s.be.Read(states[m.Layers*n:], s.h); err != nil {
			return fmt.Errorf("moe: the last hidden state: %w", err)
		}
	}
	s.routes.ran(s.pos, len(ids))
	s.pos += len(ids)
	m.end = s.pos
	m.positions += int64(len(ids))
	m.forwards++
	return nil
}

// forget lets the backend forget a failure that it would tell at the next Read,
// so that it stays with the request that met it.
func (s *state) forget() {
	s.last.SetLen(0)
	s.be.Read(nil, s.last) // its error comes after the one that is told
}

// checkIDs says which of the ids, if any, is no token.
func (m *Model) checkIDs(ids []int32) error {
	for _, id := range ids {
		if id < 0 || int(id) >= m.Vocab {
			return fmt.Errorf("moe: token id %d: the vocabulary has ids 0 to %d", id, m.Vocab-1)
		}
	}
	return nil
}

// Logits computes the logits of rows of the last Forward into dst [len(rows), Vocab].
func (m *Model) Logits(dst []float32, rows []int32) error {
	return m.headOf(dst, m.s.x, rows, m.norm, m.head)
}

// headOf computes the logits of rows of x.
func (m *Model) headOf(dst []float32, x backends.Vec, rows []int32, norm []float32, head backends.Linear) error {
	s := &m.s
	for len(rows) > 0 {
		n := min(len(rows), headRows)
		s.clock.reset()
		s.be.Gather(s.last, x, rows[:n])
		s.be.RMSNorm(s.last, s.last, norm, m.eps)
		s.matMul(s.logits, head, s.last)
		if m.logitScale != 1 {
			s.be.Scale(s.logits, m.logitScale)
		}
		if err := s.be.Read(dst[:n*m.Vocab], s.logits); err != nil {
			return fmt.Errorf("moe: logits: %w", err)
		}
		s.clock.lap(StageDense)
		dst, rows = dst[n*m.Vocab:], rows[n:]
	}
	return nil
}

// Hidden copies the residual stream of the last Forward, before the final norm,
// into dst [n, Hidden].
func (m *Model) Hidden(dst []float32) error {
	if err := m.s.be.Read(dst, m.s.x); err != nil {
		return fmt.Errorf("moe: hidden: %w", err)
	}
	return nil
}

// Stats counts what a model has computed since New.
type Stats struct {
	Positions int64
	Forwards  int64
	Times     Times
}

// Stats reads the counters.
func (m *Model) Stats() Stats { return Stats{m.positions, m.forwards, m.s.clock.times} }

// rsqrtOf is 1/sqrt(n) as a constant of the host.
func rsqrtOf(n int) float32 { return float32(1 / math.Sqrt(float64(n))) }
