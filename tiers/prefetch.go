package tiers

import (
	"fmt"
	"slices"
)

// Prefetch says whether experts are read before their layer asks for them.
type Prefetch uint8

const (
	PrefetchOff  Prefetch = iota
	PrefetchAuto          // while it gives more than it costs
	PrefetchOn            // always
)

func (p Prefetch) String() string { return [...]string{"off", "auto", "on"}[p] }

// ParsePrefetch reads the value of --prefetch.
func ParsePrefetch(s string) (Prefetch, error) {
	for p := PrefetchOff; p <= PrefetchOn; p++ {
		if p.String() == s {
			return p, nil
		}
	}
	return 0, fmt.Errorf("unknown prefetch mode %q: use off, auto or on", s)
}

// PrefetchStats counts what was read ahead. Used, Wasted and what is still in
// flight or in memory sum to Issued.
type PrefetchStats struct {
	Guessed     int64 // experts that Guess named
	Right       int64 // of them, those that their layer then chose
	Missing     int64 // of the guessed, those that were in no tier
	Issued      int64 // reads submitted
	Used        int64 // of them, those whose layer asked for the expert
	Late        int64 // of the used, those not yet in memory when their layer asked
	Wasted      int64 // those that nobody asked for, or that failed before
	SkippedVRAM int64 // guessed experts that were in VRAM
}

// aheadAtOnce bounds the reads of prefetch that are in flight: with two the
// drive never rests between them, and a miss has at most two in front of it.
const aheadAtOnce = 2

// flight is where an expert of prefetch is.
type flight uint8

const (
	onGround flight = iota // not of prefetch
	flying                 // in the queue, or in flight
	landed                 // in memory
)

// ahead is what was read, or is being read, for a layer that has not asked yet.
// Its slots are staging slots of their own, so that nothing leaves for a guess.
type ahead struct {
	most  int     // slots at once
	slots []*slot // flying or landed

	guess    []int32 // for layer, from Guess until its Begin
	layer    int32
	last     int32 // layer of the last step: a smaller one begins a token
	governor governor
}

// An aheadQueue is the reads of prefetch that are not submitted yet, guarded by
// Cache.mu.
type aheadQueue struct {
	queue    []*slot
	head     int // of queue: submitted before
	inFlight int
}

func (a *ahead) open(opt Options) {
	if opt.Prefetch != PrefetchOff {
		a.most = opt.TopK
	}
	a.slots, a.guess = make([]*slot, 0, a.most), make([]int32, 0, a.most)
	a.last = -1
	a.governor = newGovernor(opt.Prefetch)
}

// Guesses says whether a guess of the next layer's experts is wanted now: for
// a single position, with prefetch neither off nor paused.
func (s *Step) Guesses() bool { return s.single && s.c.ahead.governor.on }

// Guess names experts that a later layer is expected to want, best first. What
// is in no tier is read in the background, as far as there are slots to spare
// and once no miss waits; the next Begin takes what it wants of it, and the
// rest is given up. A guess changes what is read and when, never a bit of what
// a layer gets.
func (s *Step) Guess(layer int, experts []int32) {
	c, a := s.c, &s.c.ahead
	if s.ended || !s.Guesses() || len(a.guess) > 0 {
		return
	}
	if layer < 0 || layer >= len(c.layers) || c.layers[layer].experts == 0 {
		panic(fmt.Sprintf("tiers: a guess of layer %d, which has no experts", layer))
	}
	l := &c.layers[layer]
	if h := l.class.kept.hinted; h != nil {
		h.Predict(layer, experts)
	}
	a.layer = int32(layer)
	queued := false
	c.mu.Lock()
	p := &c.stats.Prefetch
	for _, e := range experts[:min(len(experts), a.most)] {
		if e < 0 || int(e) >= l.experts {
			panic(fmt.Sprintf("tiers: a guess of expert %d of a layer of %d", e, l.experts))
		}
		a.guess = append(a.guess, e)
		p.Guessed++
		k := Key{Layer: a.layer, Expert: e}
		where, _ := c.find(k)
		if where == inVRAM {
			p.SkippedVRAM++
		}
		if where != missed {
			continue
		}
		p.Missing++
		cl := l.class
		if s.waiting > 0 || len(a.slots) == a.most || len(cl.free) == 0 {
			continue
		}
		sl := cl.free[len(cl.free)-1]
		cl.free = cl.free[:len(cl.free)-1]
		sl.next, sl.ahead, sl.unwanted, sl.used = k, flying, false, false
		a.slots = append(a.slots, sl)
		c.behind.queue = append(c.behind.queue, sl)
		queued = true
	}
	c.mu.Unlock()
	if queued {
		select {
		case c.work <- work{}:
		default: // io has work, and looks at the queue after it
		}
	}
}

// nextAhead takes the next read of prefetch to be submitted, or nil.
func (c *Cache) nextAhead() *slot {
	c.mu.Lock()
	defer c.mu.Unlock()
	q := &c.behind
	if q.head == len(q.queue) {
		return nil
	}
	s := q.queue[q.head]
	q.head++
	q.inFlight++
	c.stats.Prefetch.Issued++
	return s
}

// meet is the start of Begin: it looks at what has landed, takes back what was
// not submitted, and compares the guess with what the layer chose.
func (c *Cache) meet(layer int32, experts, uses []int32) {
	a := &c.ahead
	for waiting := true; waiting; {
		select {
		case sl := <-c.arrived:
			c.land(sl)
		default:
			waiting = false
		}
	}
	c.takeBack()

	s := &c.step
	s.single = len(experts) <= c.opt.TopK
	for _, u := range uses {
		s.single = s.single && u == 1
	}
	if c.opt.Nextn > 0 && int(layer) >= c.opt.Nextn {
		return
	}
	newToken := layer <= a.last
	a.last = layer
	if a.most == 0 {
		return
	}
	c.mu.Lock()
	if a.layer == layer {
		for _, e := range a.guess {
			if slices.Contains(experts, e) {
				c.stats.Prefetch.Right++
			}
		}
	}
	a.guess = a.guess[:0]
	words := ""
	switch {
	case !s.single:
		a.governor.restart(&c.stats)
	case newToken:
		words = a.governor.token(&c.stats)
	}
	c.mu.Unlock()
	if words != "" {
		c.notices = append(c.notices, words)
	}
}

// takeBack frees the slots of what was not submitted.
func (c *Cache) takeBack() {
	c.mu.Lock()
	q := &c.behind
	for _, sl := range q.queue[q.head:] {
		c.ahead.remove(sl)
		sl.class.free = append(sl.class.free, sl)
	}
	q.queue, q.head = q.queue[:0], 0
	c.mu.Unlock()
}

func (a *ahead) remove(sl *slot) {
	i := slices.Index(a.slots, sl)
	a.slots = slices.Delete(a.slots, i, i+1)
	sl.ahead = onGround
}

// of finds the slot that prefetch has for an expert, or nil.
func (a *ahead) of(k Key) *slot {
	for _, sl := range a.slots {
		if sl.next == k {
			return sl
		}
	}
	return nil
}

// claimAhead gives what was read ahead to item i of the step, and says where it
// was.
func (c *Cache) claimAhead(sl *slot, i int) flight {
	was := sl.ahead
	c.ahead.remove(sl)
	sl.item, sl.held = i, true
	return was
}

// dropAhead gives up what no step has asked for: what landed leaves, what flies
// leaves when it lands.
func (c *Cache) dropAhead() {
	a := &c.ahead
	for i := len(a.slots) - 1; i >= 0; i-- {
		if sl := a.slots[i]; sl.ahead == landed {
			c.waste(sl)
		} else {
			sl.unwanted = true
		}
	}
}

// landAhead takes a slot of prefetch that io has loaded.
func (c *Cache) landAhead(sl *slot) {
	switch {
	case sl.fetch.Err != nil: // whoever asks for it reads it again
		c.mu.Lock()
		c.stats.LoadsFailed++
		c.mu.Unlock()
		c.waste(sl)
	case sl.unwanted:
		c.waste(sl)
	default:
		sl.ahead = landed
	}
}

// waste frees the slot of what was read for nothing.
func (c *Cache) waste(sl *slot) {
	c.ahead.remove(sl)
	c.mu.Lock()
	c.stats.Prefetch.Wasted++
	c.mu.Unlock()
	c.release(sl)
}

// Land waits for what prefetch has in flight and gives it up, between two steps,
// so that the counters are whole.
func (c *Cache) Land() {
	if !c.step.ended {
		panic("tiers: Land before the End of a step")
	}
	c.landAll()
}

// landAll waits until nothing of prefetch is in flight, and gives it up.
func (c *Cache) landAll() {
	c.takeBack()
	for c.ahead.flying() {
		c.land(<-c.arrived)
	}
	c.dropAhead()
}

func (a *ahead) flying() bool {
	return slices.ContainsFunc(a.slots, func(sl *slot) bool { return sl.ahead == flying })
}

// A governor says when prefetch reads: always, never, or while it gives more
// than it costs. That is measured, in windows of tokens with it, without it and
// with it again, so that a trend is not taken for an effect: it goes on if the
// decode loop waited less for reads with it than without, else it pauses.
type governor struct {
	on      bool
	fixed   bool
	phase   phase
	left    int // tokens to the end of the phase
	pause   int // tokens of the next pause
	paused  bool
	from    reading // at the start of the phase
	with    reading // sums of the windows
	without reading
}

type phase uint8

const (
	steady   phase = iota // on, not measured
	withA                 // on
	withoutB              // off
	withC                 // on; the verdict comes after it
	paused                // off
)

// Tokens of the phases. A trial of 48 tokens, 16 of them without prefetch, costs
// 3 % of what it gives if it comes after 512. A pause starts short, so that
// another prompt gets its chance, and doubles as long as nothing changes.
const (
	firstTokens  = 32
	trialTokens  = 16
	steadyTokens = 512
	leastPause   = 256
	mostPause    = 4096
)

// leastUsed is the share of its reads that must be asked for. Below it most of
// what the drive does for prefetch is for nothing, whatever the waits say.
const leastUsed = 0.25

// A reading is what a governor looks at, in one window or since New.
type reading struct{ tokens, wait, guessed, missing, issued, used int64 }

func (r reading) plus(o reading, sign int64) reading {
	return reading{r.tokens + sign*o.tokens, r.wait + sign*o.wait, r.guessed + sign*o.guessed,
		r.missing + sign*o.missing, r.issued + sign*o.issued, r.used + sign*o.used}
}

// perToken is the milliseconds of waiting for reads.
func (r reading) perToken() float64 { return float64(r.wait) / 1e6 / float64(max(r.tokens, 1)) }

func newGovernor(p Prefetch) governor {
	return governor{on: p != PrefetchOff, fixed: p != PrefetchAuto, left: firstTokens, pause: leastPause}
}

func read(st *Stats) reading {
	p := &st.Prefetch
	return reading{wait: st.LoadWaitNanos, guessed: p.Guessed, missing: p.Missing, issued: p.Issued, used: p.Used}
}

// restart begins the current window anew, since something else than single
// tokens came between.
func (g *governor) restart(st *Stats) {
	if g.phase == withA || g.phase == withoutB || g.phase == withC {
		g.enter(withA, st)
	}
}

// enter begins a phase.
func (g *governor) enter(p phase, st *Stats) {
	g.phase, g.from = p, read(st)
	g.on = p != withoutB && p != paused
	switch p {
	case withA:
		g.with, g.left = reading{}, trialTokens
	case withoutB, withC:
		g.left = trialTokens
	case steady:
		g.left = steadyTokens
	case paused:
		g.left = g.pause
		g.pause = min(2*g.pause, mostPause)
	}
}

// token is told that a token begins. It returns words if prefetch pauses or
// goes on again.
func (g *governor) token(st *Stats) (words string) {
	if g.fixed {
		return ""
	}
	if g.left--; g.left > 0 {
		return ""
	}
	window := read(st).plus(g.from, -1)
	window.tokens = trialTokens
	switch g.phase {
	case steady, paused:
		g.enter(withA, st)
	case withA:
		g.with = window
		g.enter(withoutB, st)
	case withoutB:
		g.without = window
		g.enter(withC, st)
	case withC:
		g.with = g.with.plus(window, 1)
		why := g.verdict()
		switch {
		case why == "" && g.paused:
			g.paused, g.pause = false, leastPause
			words = fmt.Sprintf("prefetch again: reads are waited for %.3g ms a token with it, %.3g ms without", g.with.perToken(), g.without.perToken())
		case why != "" && !g.paused:
			g.paused = true
			words = fmt.Sprintf("prefetch paused: %s; it is tried again in %d tokens", why, g.pause)
		}
		if why == "" {
			g.enter(steady, st)
		} else {
			g.enter(paused, st)
		}
	}
	return words
}

// verdict says why prefetch is to pause, or "".
func (g *governor) verdict() string {
	w := g.with
	switch {
	case w.missing == 0:
		return "every expert that it would read is in memory"
	case w.issued*20 < w.missing:
		return fmt.Sprintf("the drive is saturated, misses leave it no time (%d of %d experts were read ahead)", w.issued, w.missing)
	case float64(w.used) < leastUsed*float64(w.issued):
		return fmt.Sprintf("%d of %d experts read ahead were used", w.used, w.issued)
	case w.perToken() >= g.without.perToken():
		return fmt.Sprintf("it does not shorten the waits (reads are waited for %.3g ms a token with it, %.3g ms without)", w.perToken(), g.without.perToken())
	}
	return ""
}
