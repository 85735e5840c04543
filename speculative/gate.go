package speculative

import (
	"fmt"
	"math"
	"time"

	"sluice/moe"
)

// The gate says when drafting pays and how deep. With shares of the time of a
// pass over one position
//
//	io     waiting for experts            u_io   loads of a batch by loads of one position
//	comp   computing routed experts       u_c    distinct experts of a batch by those of one position
//	1-f    the rest, f = io + comp        f*u  = io*u_io + comp*u_c
//	d      a proposal of the drafter      a_j    share of drafts that are right at position j where all before were
//
// a batch of k drafts costs u*f + (1-f) + k*d passes and yields 1 + a_1 + a_1*a_2
// + ... tokens: 1 + k*a, with a the share of all drafts that are accepted. The gain is
// yield by cost. All of it is measured, and nothing asks which backend runs.
//
// While drafting is off, u comes from the routes of consecutive tokens and a from
// shadow drafts, which are compared with the text and never run. When it is on,
// the cost of a batch is measured as a whole, against passes over one position of the
// same run.
type gate struct {
	fixed int // the one depth to use; 0: any
	force bool

	depth   int // of the next batch; 0: drafting is off
	guarded bool
	trial   int // batches that a trial has yet to run

	total, io, comp mean                     // nanoseconds of a pass over one position, and shares of them
	loads, experts  [1 + moe.MostDrafts]mean // u_io and u_c, by drafts in the batch
	cost            [1 + moe.MostDrafts]mean // of a batch in passes, as measured, by drafts
	draft           mean                     // nanoseconds of a proposal
	right           [moe.MostDrafts]mean     // a_j
	pool            mean                     // all a_j together
	recent          ring

	elapsed, cast float64 // nanoseconds in all, and of shadows
	unused        int     // passes since fade
	sincePlain    int     // batches since the last pass over one position
	changes       int64   // draft_state_changes
	notices       []string
	paused        string // why it was stopped last
}

// Constants of the gate.
const (
	start = 1.05 // gain above which drafting starts, on few proposals
	stop  = 1.00 // and below which it stops

	enough     = 24   // proposals for the threshold above; more of them lower its margin like an error does
	unknown    = 0.5  // share of a pass that goes by its experts, as long as none has told
	few        = 6    // proposals for a start on the lower bound of their acceptance
	shadowPart = 0.01 // of the time may go into shadows, beside that of one pass
	passes     = 128  // passes that a measure of time looks back over
	outcomes   = 256  // drafts that a measure of acceptance looks back over
	settled    = 8    // batches of a depth before their cost is believed
	hope       = 0.8  // gain above which a trial is made, since the shares can only guess what a batch costs,
	tried      = 16   // of so many batches
	near       = 1.3  // gain below which the cost is kept fresh,
	probe      = 32   // by a pass over one position after so many batches
	forget     = 64   // passes without drafts after which a batch's cost counts one batch less
	deeper     = 1.02 // gain by which another depth must be better
	beside     = 0.9  // of the gain that a depth to be explored may have at least
	firstCast  = 4    // drafts of a shadow at first
	collapse   = 0.97 // gain of the last proposals below which drafting stops at once
)

// A mean looks back over some values.
type mean struct {
	v float64
	n int
}

func (m *mean) add(v float64, most int) {
	m.n = min(m.n+1, most)
	m.v += (v - m.v) / float64(m.n)
}

// ring is the acceptance of the last proposals.
type ring struct {
	right [enough]bool
	n     int // so far
}

func (r *ring) add(right bool) {
	r.right[r.n%enough] = right
	r.n++
}

func (r *ring) share() float64 {
	n := 0
	for _, ok := range r.right {
		if ok {
			n++
		}
	}
	return float64(n) / enough
}

func newGate(depth int, force bool) gate {
	g := gate{fixed: depth, force: force}
	return g
}

// passed adds time that is no decoding.
func (g *gate) passed(t time.Duration) { g.elapsed += float64(t) }

// refuse ends drafting for good: the numerical guard.
func (g *gate) refuse() {
	g.guarded = true
	g.set(0, "draft off: numerical guard (draft and verify kernels differ)")
}

// set changes the depth, and says so when drafting begins or ends.
func (g *gate) set(depth int, words string) {
	if (g.depth == 0) != (depth == 0) {
		g.changes++
		g.notices = append(g.notices, words)
		if depth == 0 {
			g.paused = words
		}
	}
	g.depth = depth
}

// choose gives the depth of the next batch, at most room; 0: no drafts.
func (g *gate) choose(room int) int {
	if g.guarded || room < 1 {
		return 0
	}
	if g.force {
		if g.depth, _ = g.best(); g.depth == 0 {
			g.depth = 1
		}
		return min(g.explore(), room)
	}
	g.decide()
	if g.depth > 0 && g.sincePlain >= probe && g.gain(g.depth) < near {
		return 0
	}
	return min(g.explore(), room)
}

// explore is the depth to use: one beside it as long as nobody has measured what
// that costs, if it may be nearly as good.
func (g *gate) explore() int {
	if g.fixed > 0 || g.depth == 0 || g.trial > 0 {
		return g.depth
	}
	for _, k := range [2]int{g.depth + 1, g.depth - 1} {
		if k >= 1 && k <= moe.MostDrafts && g.cost[k].n < settled && g.cost[g.depth].n >= settled && g.gain(k) > beside*g.gain(g.depth) {
			return k
		}
	}
	return g.depth
}

// decide opens or shuts the gate, and sets the depth.
func (g *gate) decide() {
	if g.total.n < 4 || g.pool.n < few {
		return
	}
	best, gain := g.best()
	if g.trial > 0 {
		return
	}
	switch {
	case g.depth == 0 && g.starts(best, gain):
		g.recent = ring{}
		g.set(best, fmt.Sprintf("draft on at depth %d: %s", best, g.words(best)))
	case g.depth == 0 && g.untried(best) && g.pool.n >= enough && gain > hope:
		g.trial = tried
		g.recent = ring{}
		g.set(best, fmt.Sprintf("draft tried at depth %d: %s", best, g.words(best)))
	case g.depth == 0:
	case gain < stop:
		g.set(0, fmt.Sprintf("draft paused: acceptance %.0f%% over %d proposals (%s)", 100*g.pool.v, g.pool.n, g.words(best)))
	case g.collapsed():
		share := g.recent.share()
		for j := range g.right {
			g.right[j] = mean{}
		}
		g.pool = mean{share, enough}
		g.set(0, fmt.Sprintf("draft paused: acceptance %.0f%% over %d proposals", 100*share, enough))
	case best != g.depth && gain > deeper*g.gain(g.depth):
		g.depth = best
	}
}

// starts says whether a gain is enough to begin: clearly above 1 for what it rests on.
func (g *gate) starts(depth int, gain float64) bool {
	if g.pool.n < enough {
		return g.gainAt(depth, g.bound) > start
	}
	return gain > 1+(start-1)*math.Sqrt(enough/float64(g.pool.n))
}

// untried says that no batch has told its cost lately.
func (g *gate) untried(depth int) bool {
	for i := 1; i <= moe.MostDrafts; i++ {
		if g.cost[i].n >= settled {
			return false
		}
	}
	return depth > 0
}

// collapsed says whether the last proposals are another text than those before.
func (g *gate) collapsed() bool {
	if g.recent.n < enough {
		return false
	}
	now, before := g.recent.share(), g.pool.v
	if before-now < 3*math.Sqrt(max(before*(1-before), 0.04)/enough) {
		return false
	}
	return g.gainAt(g.depth, func(int) float64 { return now }) < collapse
}

// best is the depth of the largest gain.
func (g *gate) best() (depth int, gain float64) {
	if g.fixed > 0 {
		return g.fixed, g.gain(g.fixed)
	}
	for k := 1; k <= moe.MostDrafts; k++ {
		if v := g.gain(k); v > gain {
			depth, gain = k, v
		}
	}
	return depth, gain
}

func (g *gate) gain(k int) float64 { return g.gainAt(k, g.acceptance) }

func (g *gate) gainAt(k int, acceptance func(j int) float64) float64 {
	return yield(k, acceptance) / g.price(k)
}

// yield is the tokens that a batch of k drafts is expected to give.
func yield(k int, acceptance func(j int) float64) float64 {
	sum, all := 1.0, 1.0
	for j := range k {
		all *= acceptance(j)
		sum += all
	}
	return sum
}

// acceptance is a_j, drawn to that of all positions while there are few.
func (g *gate) acceptance(j int) float64 {
	const prior = 4
	r := g.right[j]
	return (float64(r.n)*r.v + prior*g.pool.v) / float64(r.n+prior)
}

// bound is a lower bound of the acceptance of all positions: Wilson's, one
// standard deviation away.
func (g *gate) bound(int) float64 {
	n, p := float64(g.pool.n), g.pool.v
	return (p + 1/(2*n) - math.Sqrt(p*(1-p)/n+1/(4*n*n))) / (1 + 1/n)
}

// shares are f and the part of it that is waiting.
func (g *gate) shares() (f, io float64) {
	if g.total.v == 0 {
		return 0, 0
	}
	io = g.io.v / g.total.v
	return io + g.comp.v/g.total.v, io
}

// union is u of a batch of k drafts. What was not seen yet shares nothing.
func (g *gate) union(k int) float64 {
	of := func(m mean) float64 {
		if m.n == 0 {
			return float64(1 + k)
		}
		return m.v
	}
	f, io := g.shares()
	if f == 0 {
		return of(g.experts[k])
	}
	return (io*of(g.loads[k]) + (f-io)*of(g.experts[k])) / f
}

// price is what a batch of k drafts costs, in passes over one position: as
// measured, else by the shares, corrected by what the nearest depth was measured at.
func (g *gate) price(k int) float64 {
	model := func(k int) float64 {
		f, _ := g.shares()
		if g.total.n == 0 { // drafts are forced, and no pass without them has told
			f = unknown
		}
		return g.union(k)*f + 1 - f
	}
	c := model(k)
	for away := range moe.MostDrafts {
		for _, i := range [2]int{k - away, k + away} {
			if i < 1 || i > moe.MostDrafts || g.cost[i].n < settled {
				continue
			}
			if m := model(i); m > 1.001 {
				return 1 + (c-1)*max(0, g.cost[i].v-1)/(m-1) + float64(k)*g.d()
			}
			return max(c, g.cost[i].v) + float64(k)*g.d()
		}
	}
	return c + float64(k)*g.d()
}

// d is the price of a proposal in passes.
func (g *gate) d() float64 {
	if g.total.v == 0 {
		return 0
	}
	return g.draft.v / g.total.v
}

// shadow says how many tokens to draft for comparison alone, 0: none.
func (g *gate) shadow(room int) int {
	if g.guarded || g.force || g.depth > 0 || g.total.n == 0 {
		return 0
	}
	n := firstCast
	if g.pool.n >= enough {
		n, _ = g.best()
		n++
	}
	if g.fixed > 0 {
		n = g.fixed
	}
	n = min(n, room, moe.MostDrafts)
	if g.draft.v > 0 {
		n = min(n, int((shadowPart*g.elapsed+g.total.v-g.cast)/g.draft.v))
	}
	return max(n, 0)
}

// proposed notes that n tokens were proposed for a batch.
func (g *gate) proposed(n int, t time.Duration) {
	g.elapsed += float64(t)
	if n > 0 {
		g.draft.add(float64(t)/float64(n), passes)
	}
}

// shadowed notes the same of a shadow.
func (g *gate) shadowed(n int, t time.Duration) {
	g.cast += float64(t)
	g.proposed(n, t)
}

// caught notes time that a drafter took to catch up with the text, for a shadow.
func (g *gate) caught(t time.Duration) {
	g.elapsed += float64(t)
	g.cast += float64(t)
}

// outcome notes whether the draft at a position, all before it being right, was right.
func (g *gate) outcome(j int, right bool) {
	v := 0.0
	if right {
		v = 1
	}
	g.right[j].add(v, outcomes)
	g.pool.add(v, outcomes)
	if g.depth > 0 {
		g.recent.add(right)
	}
}

// ran notes a pass over the last token and k drafts.
func (g *gate) ran(k int, t time.Duration, times moe.Times, u interface {
	Unions(n int) (experts, missed float64, ok bool)
}) {
	total, io, comp := float64(t), float64(times[moe.StageExpertWait]), float64(times[moe.StageExperts])
	g.elapsed += total
	for i := 1; i <= moe.MostDrafts; i++ {
		if k > 0 && i != k {
			continue
		}
		if experts, missed, ok := u.Unions(1 + i); ok {
			g.experts[i].add(experts, passes)
			g.loads[i].add(missed, passes)
		}
	}
	if k == 0 {
		g.total.add(total, passes)
		g.io.add(io, passes)
		g.comp.add(comp, passes)
		if g.sincePlain = 0; g.depth == 0 && g.total.n > 0 {
			g.fade()
		}
		return
	}
	g.sincePlain++
	g.trial = max(0, g.trial-1)
	if g.total.v > 0 {
		g.cost[k].add(total/g.total.v, passes)
	}
}

// fade makes what batches cost count for less while none are run.
func (g *gate) fade() {
	g.unused++
	if g.unused < forget {
		return
	}
	g.unused = 0
	for k := range g.cost {
		g.cost[k].n = max(0, g.cost[k].n-1)
	}
}

// words are the numbers that a decision rests on.
func (g *gate) words(k int) string {
	f, _ := g.shares()
	y := yield(k, g.acceptance)
	return fmt.Sprintf("cost %.2f, yield %.2f tokens; I/O share %.2f, union %.2f, acceptance %.2f", g.price(k), y, f, g.union(k), (y-1)/float64(k))
}

// reason says why nothing is drafted, in words.
func (g *gate) reason() string {
	if g.guarded {
		return "draft off: numerical guard (draft and verify kernels differ)"
	}
	if g.pool.n == 0 {
		return "draft off (no draft could be compared with the text yet)"
	}
	if g.total.n < 4 {
		return "draft off (too few passes to judge by)"
	}
	k, gain := g.best()
	f, io := g.shares()
	y := yield(k, g.acceptance)
	if gain > stop {
		return fmt.Sprintf("draft off (expected gain %.2f over %d proposals is too near 1: cost %.2f, yield %.2f tokens at depth %d)", gain, g.pool.n, g.price(k), y, k)
	}
	bound := "I/O-bound"
	if io <= f/2 { // both are 0 where nothing is routed
		bound = "compute-bound"
	}
	return fmt.Sprintf("draft off: %s (cost %.2f >= yield %.2f tokens at depth %d; I/O share %.2f, union %.2f, acceptance %.2f); override with --draft-force",
		bound, g.price(k), y, k, f, g.union(k), (y-1)/float64(k))
}
