package speculative

import (
	"context"
	"errors"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"sluice/moe"
)

// A world is a model, a drafter and a drive in simulated time.
//
// Each of its layers routes a position to some of its experts, with a memory of
// the position before; those not among the last used, which a cache of each
// layer keeps, are read from a drive that serves one in a set time. A pass also
// takes a set time of its own.
type world struct {
	vocab, ctx int
	truth      []int32 // the text that the model gives, by position
	pass       time.Duration
	perLoad    time.Duration
	perDraft   time.Duration
	accept     func(pos int) float64 // chance that a draft of a position is right
	cap        int
	drift      int32 // what the guard must find: added to logits of batches

	layers, experts, topK int

	now    time.Time
	luck   []float64 // of a draft, by position
	text   []int32
	last   int       // positions of the last Forward
	caches [][]uint8 // by layer, the oldest first
	routes []uint64  // [positions, layers]
	missed []uint64  // of them, what was in no tier
	times  moe.Times
	pos    int64
	passes int64
	loads  int64
	keeps  int
}

func newWorld(seed uint64, tokens int) *world {
	rng := rand.New(rand.NewPCG(seed, 0))
	w := &world{
		vocab: 32, ctx: tokens + 64, pass: time.Millisecond, accept: func(int) float64 { return 0.5 },
		layers: 4, experts: 32, topK: 4, cap: 8,
	}
	for range w.ctx + 16 {
		w.truth = append(w.truth, int32(rng.IntN(w.vocab)))
		w.luck = append(w.luck, rng.Float64())
	}
	w.caches = make([][]uint8, w.layers)
	return w
}

// chosen is what a layer routes a position to, as bits: half of it lasts for
// some positions, half goes by the token.
func (w *world) chosen(layer, pos int, id int32) (bits uint64) {
	mix := func(h uint64) uint64 { // splitmix64
		h += 0x9e3779b97f4a7c15
		h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
		h = (h ^ h>>27) * 0x94d049bb133111eb
		return h ^ h>>31
	}
	for i, n := uint64(0), 0; n < w.topK; i++ {
		h := mix(uint64(pos)<<8 | uint64(id))
		if n < w.topK/2 {
			h = mix(uint64(pos+7*n+layer) / 6)
		}
		h = mix(h + uint64(layer)<<32 + i)
		e := h % uint64(w.experts)
		if e2 := (h >> 32) % uint64(w.experts); e2 < e { // lower ones are more popular
			e = e2
		}
		if bits&(1<<e) == 0 {
			bits |= 1 << e
			n++
		}
	}
	return bits
}

func (w *world) Forward(_ context.Context, ids []int32) error {
	if len(w.text)+len(ids) > w.ctx {
		return errors.New("the context is full")
	}
	at := len(w.text)
	w.text = append(w.text, ids...)
	w.routes, w.missed = w.routes[:at*w.layers], w.missed[:at*w.layers]
	for p, id := range ids {
		for l := range w.layers {
			w.routes = append(w.routes, w.chosen(l, at+p, id))
		}
	}
	loads := 0
	w.missed = append(w.missed, w.routes[at*w.layers:]...)
	for l := range w.layers {
		var need uint64
		for p := range ids {
			need |= w.routes[(at+p)*w.layers+l]
		}
		gone := need
		for i := range w.caches[l] {
			if e := w.caches[l][i]; need&(1<<e) != 0 {
				gone &^= 1 << e
			}
		}
		// What the batch uses goes behind the rest; the oldest leave.
		keep := slices.DeleteFunc(w.caches[l], func(e uint8) bool { return need&(1<<e) != 0 })
		for e := range uint8(w.experts) {
			if need&(1<<e) != 0 {
				keep = append(keep, e)
			}
		}
		w.caches[l] = append(w.caches[l][:0], keep[max(0, len(keep)-w.cap):]...)
		loads += bits.OnesCount64(gone)
		for p := range ids {
			w.missed[(at+p)*w.layers+l] &= gone
		}
	}
	w.loads += int64(loads)
	wait := time.Duration(loads) * w.perLoad
	w.times[moe.StageExpertWait] += int64(wait)
	w.times[moe.StageDense] += int64(w.pass)
	w.now = w.now.Add(wait + w.pass)
	w.last = len(ids)
	w.pos += int64(len(ids))
	w.passes++
	return nil
}

func (w *world) Logits(dst []float32, rows []int32) error {
	clear(dst)
	at := len(w.text) - w.last
	for i, r := range rows {
		next := w.truth[at+int(r)+1]
		if w.last > 1 && w.drift != 0 {
			dst[i*w.vocab] += 1e-3
		}
		dst[i*w.vocab+int(next)] = 10
	}
	return nil
}

func (w *world) Keep(n int) error {
	w.keeps++
	w.text = w.text[:len(w.text)-w.last+n]
	return nil
}
func (w *world) Rewind(pos int) error { w.text = w.text[:pos]; return nil }
func (w *world) Pos() int             { return len(w.text) }
func (w *world) Chunk() int           { return 64 }
func (w *world) Stats() moe.Stats {
	return moe.Stats{Positions: w.pos, Forwards: w.passes, Times: w.times}
}

func (w *world) Unions(n int) (experts, missed float64, ok bool) {
	if n > len(w.text) {
		return 0, 0, false
	}
	var distinct, loads, misses int
	for l := range w.layers {
		var all, gone uint64
		for p := len(w.text) - n; p < len(w.text); p++ {
			all |= w.routes[p*w.layers+l]
			gone |= w.missed[p*w.layers+l]
			misses += bits.OnesCount64(w.missed[p*w.layers+l])
		}
		distinct += bits.OnesCount64(all)
		loads += bits.OnesCount64(gone)
	}
	missed = float64(n)
	if misses > 0 {
		missed = float64(loads) / float64(misses) * float64(n)
	}
	return float64(distinct) / float64(w.layers*w.topK), missed, true
}

// The drafter: right by chance.
func (w *world) Name() string                       { return "fake" }
func (w *world) Follow(context.Context, Text) error { return nil }

func (w *world) Propose(_ context.Context, t Text, n int, dst []int32) ([]int32, error) {
	w.now = w.now.Add(time.Duration(n) * w.perDraft)
	at := len(t.IDs)
	for i := range n {
		id := w.truth[at+i]
		if w.luck[at+i] >= w.accept(at+i) { // the same whenever it is drafted
			id = (id + 1 + int32(at+i)%int32(w.vocab-1)) % int32(w.vocab)
		}
		dst = append(dst, id)
	}
	return dst, nil
}

// generate runs the loop for so many tokens, and gives the text and the time that
// decoding took.
func (w *world) generate(t testing.TB, d moe.Decoder, tokens int) ([]int32, time.Duration) {
	t.Helper()
	var start time.Time
	s := moe.NewSampler(moe.Sampling{TopP: 1, RepeatPenalty: 1}, w.vocab)
	r, err := moe.Generate(context.Background(), d, s, moe.Generation{
		Prompt: w.truth[:32], Tokens: tokens, Ctx: w.ctx,
		Stop: func(int32) bool { return false }, Emit: func(int32) error { return nil }, Decodes: func() { start = w.now },
	})
	if err != nil {
		t.Fatal(err)
	}
	return r.IDs, w.now.Sub(start)
}

func (w *world) decoder(t testing.TB, depth int, force bool) *Decoder {
	t.Helper()
	w.now = time.Unix(0, 0)
	d, err := New(w, Options{Drafter: w, Vocab: w.vocab, Ctx: w.ctx, Depth: depth, Force: force, Now: func() time.Time { return w.now }})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// off decodes one by one.
type off struct{ w *world }

func (o off) Stats() moe.Stats { return o.w.Stats() }
func (o off) Extend(ctx context.Context, ids []int32) ([]float32, error) {
	for len(ids) > 0 {
		n := min(len(ids), 64)
		if err := o.w.Forward(ctx, ids[:n]); err != nil {
			return nil, err
		}
		ids = ids[n:]
	}
	row := make([]float32, o.w.vocab)
	return row, o.w.Logits(row, []int32{int32(o.w.last - 1)})
}
