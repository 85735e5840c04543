package tiers

import (
	"fmt"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"sluice/internal/invariants"
	"sluice/internal/offheap"
)

// This file lowers the cap of a running cache when memory gets scarce.

// pressure is the share of time, in percent over ten seconds, in which some
// task stood still for memory, that counts as scarcity. The kernel's own users
// of the figure act between 5 and 20; reads by O_DIRECT do not add to it.
const pressure = 10.0

// A Watch looks at the machine's memory once a second, in a goroutine of its
// own, and tells a cache when to give some back.
//
// Memory is scarce if less than the floor is available, or if tasks of the machine
// or of a cgroup that this process is in stand still for memory while less than
// eight floors are available. Where there is more, others thrash inside of limits
// of their own, be they in a cgroup beside ours or below one of ours (the root
// has a figure too), which is not for us to cure.
type Watch struct {
	floor int64
	quiet int // looks to let pass; the goroutine's

	found  atomic.Pointer[Strain] // not yet answered
	failed atomic.Pointer[error]
	stop   chan struct{}
	done   chan struct{}
}

// Floor is the memory that a process within a budget of bytes leaves available
// while it runs: 64 MiB, but no more than a sixteenth. MemAvailable has the
// kernel's own reserve taken off already.
func Floor(budget int64) int64 { return min(64<<20, budget/16) }

// NewWatch begins to watch. The caller closes it, after the cache.
func NewWatch(mem Memory, floor int64) (*Watch, error) {
	g, err := mem.Gauge()
	if err != nil {
		return nil, err
	}
	w := &Watch{floor: floor, stop: make(chan struct{}), done: make(chan struct{})}
	go w.loop(g)
	return w, nil
}

func (w *Watch) loop(g *Gauge) {
	defer close(w.done)
	defer g.Close()
	t := time.NewTicker(time.Second)
	defer t.Stop()
	for w.look(g) {
		select {
		case <-w.stop:
			return
		case <-t.C:
		}
	}
}

// look reads the gauge, and says whether to go on.
func (w *Watch) look(g *Gauge) bool {
	if w.quiet > 0 {
		w.quiet--
		return true
	}
	s, err := g.Read()
	if err != nil {
		w.fail(err)
		return false
	}
	if w.found.Load() == nil && w.scarce(s) {
		w.find(s)
		// An average over ten seconds shows the relief after as many; what is
		// available shows it at once.
		w.quiet = 10
		if s.Available < w.floor {
			w.quiet = 2
		}
	}
	return true
}

// find and fail take what they keep to the heap, which a look that finds nothing
// does not.
func (w *Watch) find(s Strain)  { w.found.Store(&s) }
func (w *Watch) fail(err error) { w.failed.Store(&err) }

func (w *Watch) scarce(s Strain) bool {
	return s.Available < w.floor || (max(s.Group, s.Machine) >= pressure && s.Available < 8*w.floor)
}

// Close ends the goroutine.
func (w *Watch) Close() {
	close(w.stop)
	<-w.done
}

// Adapt lowers the cap if the watch has found memory to be scarce: by a
// quarter, or by as much as brings two floors back, but not below 1. It is
// called between tokens. The cap does not rise again: whoever took the memory
// may take more, and each change of the cap costs reads.
func (c *Cache) Adapt() {
	w := c.opt.Watch
	if w == nil {
		return
	}
	if err := w.failed.Swap(nil); err != nil {
		c.notices = append(c.notices, fmt.Sprintf("memory is no longer watched, the cap stays: %v", *err))
	}
	s := w.found.Swap(nil)
	if s == nil || c.cap <= 1 { // 0: of nothing
		return
	}
	limit := c.cap - max(1, c.cap/4)
	have := c.poolBytes(c.cap)
	for limit > 1 && have-c.poolBytes(limit) < 2*w.floor-s.Available {
		limit--
	}
	before := c.cap
	c.Shrink(limit)
	c.notices = append(c.notices, fmt.Sprintf("cap lowered %d -> %d (memory pressure: %v)", before, limit, s))
}

func (c *Cache) poolBytes(limit int) (n int64) {
	for _, cl := range c.classes {
		s := sizeClass(cl.slotBytes, cl.experts, c.inFlight, limit)
		n += int64(s.Keep+s.Staging) * s.Bytes
	}
	return n
}

// Shrink lowers the cap to limit, at least 1, between two steps. What is above
// it leaves, least wanted first; the memory goes back to the system, and its
// bytes to the ledger. A limit that is not below the cap changes nothing.
func (c *Cache) Shrink(limit int) {
	if limit < 1 || !c.step.ended {
		panic(fmt.Sprintf("tiers: shrink to cap %d, step ended %v", limit, c.step.ended))
	}
	if limit >= c.cap || c.closed {
		return
	}
	c.landAll()
	for _, cl := range c.classes {
		size := sizeClass(cl.slotBytes, cl.experts, c.inFlight, limit)
		cl.kept.policy.Resize(int64(size.Keep))
		c.trim(cl, size.Keep)
		for i := range cl.kept.shadows {
			cl.kept.shadows[i].shrink(cl.slotBytes, c.inFlight, limit)
		}
		if cl.slotBytes > 0 {
			cl.cut(size.Keep + size.Staging)
			c.src.Register(c.arenas()) // or the pages behind them would stay
			offheap.Discard(cl.arena[int64(len(cl.slots))*cl.size.Bytes:])
		}
		c.regrant(cl, size)
		cl.size = size
	}
	c.cap = limit
	c.mu.Lock()
	c.stats.Cap = limit
	c.stats.CapChanges++
	c.mu.Unlock()
	if invariants.Enabled {
		c.check()
	}
}

// regrant tells the ledger the new size of a class.
func (c *Cache) regrant(cl *class, size ClassSize) {
	led := c.opt.Ledger
	if led == nil {
		return
	}
	for _, g := range []struct {
		p Purpose
		n int64
	}{{LRU, int64(size.Keep) * size.Bytes}, {Staging, int64(size.Staging) * size.Bytes}} {
		if give := cl.granted[g.p] - g.n; give > 0 {
			led.Return(g.p, give)
		} else if err := led.Grant(g.p, -give); err != nil {
			panic(fmt.Sprintf("tiers: a smaller pool is refused: %v", err)) // it is smaller in all, and LRU came first
		}
		cl.granted[g.p] = g.n
	}
}

// cut leaves the first n slots of a class. Experts behind them move to free
// slots before them, so that what can be given back is one piece, in whole huge
// pages. No slot is in use or in flight.
func (cl *class) cut(n int) {
	if n >= len(cl.slots) {
		return
	}
	behind := make(map[*slot]bool, len(cl.slots)-n)
	for i := range cl.slots[n:] {
		behind[&cl.slots[n+i]] = true
	}
	cl.free = slices.DeleteFunc(cl.free, func(s *slot) bool { return behind[s] })
	for k, s := range cl.kept.all() {
		if behind[s] {
			to := cl.free[len(cl.free)-1]
			cl.free = cl.free[:len(cl.free)-1]
			s.move(to)
			cl.kept.slots[k.Layer][k.Expert] = to
		}
	}
	cl.slots = cl.slots[:n]
}

// move takes the expert of s to another slot of the class.
func (s *slot) move(to *slot) {
	copy(to.fetch.Slot, s.fetch.Slot)
	to.fetch.Key, to.used, to.full = s.fetch.Key, s.used, s.full
	base := uintptr(unsafe.Pointer(unsafe.SliceData(s.fetch.Slot)))
	for p, b := range s.fetch.Parts {
		to.fetch.Parts[p] = nil
		if b != nil {
			at := int(uintptr(unsafe.Pointer(unsafe.SliceData(b))) - base)
			to.fetch.Parts[p] = to.fetch.Slot[at : at+len(b) : at+len(b)]
		}
	}
	s.fetch.Parts, s.full = [MaxParts][]byte{}, false
}

// Notices gives what happened since it was last asked, in words: a lowered cap,
// a prefetch that pauses or goes on. The cache's user calls it.
func (c *Cache) Notices() []string {
	n := c.notices
	c.notices = nil
	return n
}
