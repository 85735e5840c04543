package moe

import (
	"context"
	"fmt"
	"runtime/debug"

	"sluice/backends"
	"sluice/internal/quant"
	"sluice/tiers"
)

// experts is the feed-forward of a layer whose router picks k of its experts
// for each position. Their weights come through the tiers.
type experts struct {
	layer  int
	norm   []float32 // [dim], before the router and the experts
	eps    float32
	router backends.Linear
	route  func(ids []int32, weights, scores []float32) // of one position: the family's choice
	kinds  [3]backends.Matrix                           // gate, up, down without data: types and shapes of every expert of the layer
	act    backends.Activation                          // of the routed experts
	bias   [3][]float32                                 // of gate, up and down: [experts, rows], nil: none
	scaled *vecID                                       // where a weight multiplies its expert's input, not its output; nil: the output
	shared sharedExpert                                 // what every position passes beside them, nil: none
	next   *experts                                     // of the next layer that has a router, nil: none
}

// A sharedExpert leaves in y what it makes of s.h.
type sharedExpert interface {
	compute(y backends.Vec, s *state)
}

// compute adds the layer's experts, as its router picks them, to the residual
// stream s.x [n, dim].
//
// The work is expert-major: each distinct expert of the batch is held once and
// computes all the positions that chose it, in whatever order the experts come
// into memory. Every choice has an output vector of its own, and they are added
// in the router's order when all are there, so the order of arrival never shows.
func (e *experts) compute(ctx context.Context, s *state) error {
	e.learn(s)
	s.be.RMSNorm(s.h, s.x, e.norm, e.eps)
	l, n, k, all := e.layer, s.h.Len(), s.topK, e.router.Rows
	s.matMul(s.scores, e.router, s.h)
	if err := s.be.Read(s.hostScores[:n*all], s.scores); err != nil { // the layer's only trip to the host
		return fmt.Errorf("moe: layer %d: router: %w", l, err)
	}
	for p := range n {
		e.route(s.ids[p*k:(p+1)*k], s.weights[p*k:(p+1)*k], s.hostScores[p*all:(p+1)*all])
	}
	s.group(s.ids[:n*k], all)
	var scores []float32
	if n == 1 {
		scores = s.hostScores[:all]
	}
	s.cache.Routed(s.ids[:n*k], scores)
	step, err := s.cache.Begin(ctx, l, s.distinct, s.uses)
	if err != nil {
		return fmt.Errorf("moe: layer %d: %w", l, err)
	}
	defer step.End()
	for i, id := range s.distinct {
		s.missed[id] = step.Missed(i)
	}
	s.routes.note(l, s.pos, s.ids[:n*k], s.missed)
	if s.trace != nil {
		s.trace.Batch(step, s.ids[:n*k], s.weights[:n*k])
	}
	guess := n == 1 && e.next != nil && step.Guesses()
	first := 0 // experts that are to be computed before the guess
	if guess {
		clear(s.guess.share)
		first = s.before(step)
	}
	s.clock.lap(StageRouter)

	var shared backends.Vec
	if e.shared != nil { // while the reads are under way
		shared = s.shared
		e.shared.compute(shared, s)
	}
	x, perRow, weights := s.h, k, s.weights[:n*k]
	if e.scaled != nil { // k is 1
		x, perRow = s.vec[*e.scaled], 1
		s.be.ScaleRows(x, s.h, weights)
		weights = s.ones[:n]
	}
	s.out.SetLen(n * k)
	defer s.held.drop() // after an error
	group := s.groupOf(n)
	for done := 0; done < len(s.distinct); {
		if guess && first == 0 {
			guess = false
			if err := e.next.guess(step, s, shared); err != nil {
				return fmt.Errorf("moe: layer %d: %w", l, err)
			}
		}
		i, parts, ok, err := step.Next(ctx)
		s.clock.lap(StageExpertWait)
		jobs := 0
		for ok && err == nil {
			if step.InVRAM(i) {
				if err = e.hold(s, i, x, perRow); err != nil {
					break
				}
				step.Done(i)
				done++
				i, parts, ok, _, err = step.TryNext()
				continue
			}
			fresh := step.Fresh(i)
			if fresh && step.Views() { // of a file that may be shorter by now
				if err = e.check(s, i, parts); err != nil {
					break
				}
				fresh = false
			}
			s.arrived[jobs] = int32(i)
			s.job[jobs] = e.job(int(s.distinct[i]), parts, s.rowsOf(i))
			s.job[jobs].Fresh = fresh
			if jobs++; jobs == group {
				break
			}
			i, parts, ok, _, err = step.TryNext()
		}
		if err != nil {
			return fmt.Errorf("moe: layer %d: %w", l, err)
		}
		if err := e.start(s, x, perRow); err != nil { // the device's share, beside the processor's
			return fmt.Errorf("moe: layer %d: %w", l, err)
		}
		if bad := s.be.ExpertGroup(s.out, perRow, s.job[:jobs], x); bad >= 0 {
			x := &s.job[bad].Expert
			return fmt.Errorf("moe: layer %d: %w", l, e.check(s, int(s.arrived[bad]), &tiers.Parts{x.Gate.Data, x.Up.Data, x.Down.Data}))
		}
		for _, i := range s.arrived[:jobs] {
			step.Done(int(i))
			if guess && step.Held(int(i)) {
				s.guess.share[i] = weights[i]
				first--
			}
		}
		done += jobs
		s.clock.lap(StageExperts)
	}
	if guess {
		if err := e.next.guess(step, s, shared); err != nil {
			return fmt.Errorf("moe: layer %d: %w", l, err)
		}
	}
	if err := s.held.collect(s); err != nil {
		return fmt.Errorf("moe: layer %d: %w", l, err)
	}
	s.clock.lap(StageExperts)
	s.be.Combine(s.x, s.out, k, weights, shared)
	s.clock.lap(StageReduction)
	return ctx.Err()
}

// before is how many experts of a single position are to be computed before the
// next layer's are guessed: those in RAM, whose outputs make the guess better while
// the drive reads the others; none if it has nothing else to read. So a guess does
// not depend on when reads arrive.
func (s *state) before(step *tiers.Step) (n int) {
	for i := range s.distinct {
		if step.Held(i) && !step.InVRAM(i) {
			n++
		}
	}
	return n % len(s.distinct)
}

// guess tells the tiers which experts this layer will want, as far as the state of
// a single position in the layer above shows it: the router's choice for the
// residual stream with what that layer's shared expert, and those of its experts
// that were in RAM and are computed, add to it, and with the drift: what came
// behind that, up to the router, for the tokens before. It writes no vector that a
// later step reads, and what the backend says of it stays here. Errors: what it has
// to say of the layer above.
func (e *experts) guess(step *tiers.Step, s *state, shared backends.Vec) error {
	g := &s.guess
	g.none.SetLen(0)
	if err := s.be.Read(nil, g.none); err != nil { // or it would be taken for one of the guess
		return err
	}
	s.be.Gather(g.x, s.x, g.row[:])
	s.be.Combine(g.x, s.out, s.topK, g.share, shared) // of the others old outputs, by 0
	s.be.Gather(g.from, g.x, g.row[:])
	g.of = e.layer
	if g.known[e.layer] > 0 {
		s.be.Add(g.x, g.drift[e.layer])
	}
	s.be.RMSNorm(g.h, g.x, e.norm, e.eps)
	s.matMul(g.scores, e.router, g.h)
	if s.be.Read(g.hostScores, g.scores) == nil { // no guess of a state that is no number; the layer itself will say so
		e.route(g.ids, g.weights, g.hostScores)
		step.Guess(e.layer, g.ids)
	} else {
		g.known[e.layer] = 0
	}
	s.clock.lap(StageRouter)
	return nil
}

// learn brings the drift of the layer up to date, if its experts were guessed: what
// its router sees now, less what the guess saw. The layer above's missing experts and
// the attention between add much the same for each token, in a good part.
func (e *experts) learn(s *state) {
	g := &s.guess
	guessed := g.of == e.layer && s.x.Len() == 1
	g.of = -1
	if !guessed {
		return
	}
	drift, n := g.drift[e.layer], min(g.known[e.layer]+1, driftTokens)
	g.known[e.layer] = n
	g.factor = [3][1]float32{{-1}, {driftShare / float32(n)}, {1 - 1/float32(n)}}
	s.be.ScaleRows(g.from, g.from, g.factor[0][:])
	s.be.Add(g.from, s.x)
	s.be.ScaleRows(g.from, g.from, g.factor[1][:])
	if n == 1 { // whatever is in it
		s.be.Gather(drift, g.from, g.row[:])
		return
	}
	s.be.ScaleRows(drift, drift, g.factor[2][:])
	s.be.Add(drift, g.from)
}

// groupOf is how many experts are computed together for n positions. An expert
// of a batch is much work, and its slot is wanted for the next read: half of the
// slots compute while the others fill.
func (s *state) groupOf(n int) int {
	if n == 1 {
		return maxJobs
	}
	return max(1, min(maxJobs, s.topK/2))
}

// job is expert id with the rows of the batch that chose it.
func (e *experts) job(id int, parts *tiers.Parts, rows []int32) backends.Job {
	x := backends.Expert{Gate: e.kinds[0], Up: e.kinds[1], Down: e.kinds[2], Act: e.act}
	x.Gate.Data, x.Up.Data, x.Down.Data = parts[0], parts[1], parts[2]
	if e.bias[0] != nil {
		of := func(i, rows int) []float32 { return e.bias[i][id*rows : (id+1)*rows] }
		x.GateBias, x.UpBias, x.DownBias = of(0, x.Gate.Rows), of(1, x.Up.Rows), of(2, x.Down.Rows)
	}
	return backends.Job{Expert: x, Rows: rows}
}

// group sorts a batch's choices by expert: distinct experts, in the router's
// order for a single position and ascending for more, with their rows.
func (s *state) group(ids []int32, all int) {
	s.distinct, s.uses = s.distinct[:0], s.uses[:0]
	count := s.count[:all+1]
	clear(count)
	for _, id := range ids {
		count[id]++
	}
	if len(ids) == s.topK {
		s.distinct = append(s.distinct, ids...)
	} else {
		for id, c := range count[:all] {
			if c > 0 {
				s.distinct = append(s.distinct, int32(id))
			}
		}
	}
	at := int32(0)
	s.first = s.first[:0]
	for i, id := range s.distinct {
		s.uses = append(s.uses, count[id])
		s.first = append(s.first, at)
		at += count[id]
		count[id] = int32(i) // from here on: its place in distinct
	}
	s.first = append(s.first, at)
	next := s.next[:len(s.distinct)]
	copy(next, s.first)
	for r, id := range ids {
		i := count[id]
		s.rows[next[i]] = int32(r)
		next[i]++
	}
}

// rowsOf gives the output rows of the i-th distinct expert, ascending.
func (s *state) rowsOf(i int) []int32 { return s.rows[s.first[i]:s.first[i+1]] }

// check says why an expert is refused that holds a scale or a weight outside the
// range of the arithmetic.
func (e *experts) check(s *state, i int, parts *tiers.Parts) (err error) {
	// The parts may be views of a file that is shorter by now.
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch r := recover().(type) {
		case nil:
		case interface{ Addr() uintptr }: // a fault, see debug.SetPanicOnFault
			err = fmt.Errorf("expert %d: the mapped model file could not be read (memory fault at %#x): it was cut short or its drive failed while in use; check the file, then start again, or read it with --storage pread", s.distinct[i], r.Addr())
		default:
			panic(r)
		}
	}()
	for p, kind := range e.kinds {
		if err := quant.Check(kind.Type, parts[p]); err != nil {
			return fmt.Errorf("expert %d, %s: %w", s.distinct[i], [...]string{"gate", "up", "down"}[p], err)
		}
	}
	return nil
}
