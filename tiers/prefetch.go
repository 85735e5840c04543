package tiers

import (
	"context"
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
	WastedLoads int64 // of the wasted, those that were read whole
	WastedBytes int64 // their payload
	SkippedVRAM int64 // guessed experts that were in VRAM
}

// flight is where an expert of prefetch is.
type flight uint8

const (
	onGround flight = iota // not of prefetch
	queued                 // to be read when the drive has nothing else to do
	flying                 // in flight
	landed                 // in memory
)

// ahead is what was read, or is being read, for a layer that has not asked yet.
// Its slots are staging slots of their own, so that nothing leaves for a guess.
type ahead struct {
	most  int     // slots at once
	slots []*slot // queued, flying or landed
	queue []*slot // queued, the surest first

	guess    []int32 // for layer, from Guess until its Begin, best first
	absent   []bool  // of each: it was in no tier
	ranks    []sureness
	layer    int32
	last     int32 // layer of the last step: a smaller one begins a token
	governor governor
}

func (a *ahead) open(opt Options) {
	if opt.Prefetch != PrefetchOff {
		a.most = opt.TopK
	}
	a.slots, a.queue, a.guess = make([]*slot, 0, a.most), make([]*slot, 0, a.most), make([]int32, 0, a.most)
	a.absent, a.ranks = make([]bool, a.most), make([]sureness, a.most)
	a.last = -1
	a.governor = newGovernor(opt.Prefetch)
}

// Guesses says whether a guess of the next layer's experts is wanted now: for
// a single position, with prefetch neither off nor paused.
func (s *Step) Guesses() bool { return s.single && s.c.ahead.governor.on }

// Guess names experts that a later layer is expected to want, best first. What
// is in no tier, and is likely enough, is read in the background, after the
// misses of this step, one after the other and as far as there are slots to spare;
// the next Begin takes what it wants of it, and the rest is given up. A guess
// changes what is read and when, never a bit of what a layer gets.
func (s *Step) Guess(layer int, experts []int32) {
	c, a := s.c, &s.c.ahead
	if s.ended || !s.Guesses() || len(a.guess) > 0 {
		return
	}
	if layer < 0 || layer >= len(c.layers) || c.layers[layer].experts == 0 {
		panic(fmt.Sprintf("tiers: a guess of layer %d, which has no experts", layer))
	}
	l := &c.layers[layer]
	// A policy hears of guesses only where they always come: what it makes of them
	// must not depend on when a governor lets them be made.
	if a.governor.fixed {
		l.class.kept.predict(layer, experts)
	}
	a.layer = int32(layer)
	c.mu.Lock()
	p := &c.stats.Prefetch
	for i, e := range experts[:min(len(experts), a.most)] {
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
		a.absent[i] = where == missed
		if where != missed {
			continue
		}
		p.Missing++
		cl := l.class
		if s.waiting > 0 || !a.ranks[i].sure() || len(a.slots) == a.most || len(cl.free) == 0 {
			continue
		}
		sl := cl.free[len(cl.free)-1]
		cl.free = cl.free[:len(cl.free)-1]
		sl.next, sl.ahead, sl.unwanted, sl.used = k, queued, false, false
		a.slots = append(a.slots, sl)
		a.queue = append(a.queue, sl)
	}
	c.mu.Unlock()
	c.goAhead()
}

// goAhead submits the surest of what was guessed, if the drive has nothing else to
// do: beside the misses it would only make them late, and what is at the drive when
// the layer's misses come holds them up if it was guessed wrong.
func (c *Cache) goAhead() {
	a := &c.ahead
	if len(a.queue) == 0 || c.step.inFlight > 0 || c.step.waiting > 0 || a.flying() {
		return
	}
	a.queue[0].ahead = flying
	c.mu.Lock()
	c.stats.Prefetch.Issued++
	c.mu.Unlock()
	c.load(a.queue[:1], true)
	a.queue = slices.Delete(a.queue, 0, 1)
}

// Look takes what the source is done with and has it read the next guess, if there
// is one: between two products of a layer, so that the drive goes on meanwhile.
func (c *Cache) Look() {
	if !c.ahead.flying() {
		return
	}
	for sl := c.come(); sl != nil; sl = c.come() {
		c.land(sl)
	}
}

// recall takes back what is not yet at a drive.
func (a *ahead) recall() {
	for _, sl := range a.queue {
		a.remove(sl)
		sl.class.free = append(sl.class.free, sl)
	}
	a.queue = a.queue[:0]
}

// meet is the start of Begin: it looks at what has landed, takes back what is not on
// its way, and compares the guess with what the layer chose.
func (c *Cache) meet(layer int32, experts, uses []int32) {
	a := &c.ahead
	s := &c.step
	s.single = len(experts) <= c.opt.TopK
	for _, u := range uses {
		s.single = s.single && u == 1
	}
	if !s.single { // it may want all slots, and who leaves for it must not hang on when a read ends
		c.landAll()
	}
	a.recall()
	for sl := c.come(); sl != nil; sl = c.come() {
		c.land(sl)
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
		for i, e := range a.guess {
			right := slices.Contains(experts, e)
			if right {
				c.stats.Prefetch.Right++
			}
			if a.absent[i] {
				a.ranks[i].note(right)
			}
		}
	}
	a.guess = a.guess[:0]
	words := ""
	switch {
	case !s.single:
		a.governor.restart()
	case newToken && !a.governor.fixed:
		words = a.governor.token(&c.stats.Prefetch, c.opt.Now())
	}
	c.mu.Unlock()
	if words != "" {
		c.notices = append(c.notices, words)
	}
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
	c.goAhead()
}

// waste frees the slot of what was read for nothing.
func (c *Cache) waste(sl *slot) {
	c.ahead.remove(sl)
	c.mu.Lock()
	p := &c.stats.Prefetch
	p.Wasted++
	if sl.fetch.Err == nil {
		p.WastedLoads++
		p.WastedBytes += sl.class.payload
	}
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
	c.ahead.recall()
	for c.ahead.flying() {
		sl, _ := c.await(context.Background())
		c.land(sl)
	}
	c.dropAhead()
}

func (a *ahead) flying() bool {
	return slices.ContainsFunc(a.slots, func(sl *slot) bool { return sl.ahead == flying })
}

// sureness is how often the guesses of one rank that were missing came true, of
// late. The router's first choice is nearly always right, its last one about as
// often as not: only ranks that are right every other time are read. A wrong read
// takes from the drive what a right one saves.
type sureness struct{ missing, right int }

const (
	sureTries = 8  // guesses of a rank that are read before there is a word on it
	sureFades = 64 // guesses after which both counts are halved
)

func (r *sureness) sure() bool { return r.missing < sureTries || 2*r.right >= r.missing }

func (r *sureness) note(right bool) {
	if right {
		r.right++
	}
	if r.missing++; r.missing == sureFades {
		r.missing, r.right = r.missing/2, r.right/2
	}
}
