package tiers

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"sluice/internal/invariants"
	"sluice/internal/offheap"
	"sluice/storage"
)

// Options of a Cache.
type Options struct {
	Cap      int               // experts per layer that stay in RAM, at least 1; more than a layer has counts as all of it
	TopK     int               // experts of one position and layer: the staging slots of a class
	Layers   []ExpertLayer     // the model's MoE layers; none, with Cap and TopK 0: a cache of nothing, for a dense model
	Policy   string            // who leaves the pool: a name that NewPolicy knows, "" is the default
	History  func(Key) float64 // for the policy, see PolicyConfig; nil: unknown
	Pinned   []Key             // experts that never leave, read by Preload
	VRAM     []Key             // experts of Device, read by Preload; none of them is in Pinned
	Device   Device            // nil: there is no VRAM
	KeepHost bool              // keep what is in VRAM in RAM too, where nobody is served from
	FixVRAM  bool              // what is in VRAM stays there; else it follows what is used, see swap.go
	Prefetch Prefetch          // the zero value is off
	Nextn    int               // layers from this one on are drafting layers, no part of a token's cycle; 0: there are none
	Ledger   *Ledger           // grants the slots' bytes; nil: nobody is asked
	Watch    *Watch            // of the machine's memory; nil: the cap stays
	Now      func() time.Time  // nil: time.Now
}

// A Cache keeps routed experts in tiers: VRAM, the pinned set and the LRU pool
// in RAM, each expert in one of them, and reads those that are missing. One
// goroutine uses it, one step at a time; Stats may be called from any. The
// memory of all slots is mapped and resident from New on, so what the ledger
// announces is true.
type Cache struct {
	src      Source
	opt      Options
	layers   []layer // by number; no experts: not a MoE layer
	classes  []*class
	cap      int // now; Adapt lowers it
	inFlight int // staging slots of a class: top-k, and as many for prefetch
	step     Step
	routed   routed
	ahead    ahead
	swaps    swaps
	fetches  []*storage.Fetch // of one submission
	owner    map[*storage.Fetch]*slot
	kick     chan struct{} // io is to wait for what is in flight
	arrived  chan *slot    // room for every slot, so that io never waits for the step
	stopped  chan struct{}
	closed   bool
	notices  []string

	mu    sync.Mutex // guards the rest
	stats Stats
	air   int // slots submitted and not yet reaped
	// beside says that io waits for the source, until nothing is in flight; else the
	// goroutine of the steps looks for itself.
	beside bool
}

type layer struct {
	experts int
	class   *class
	fixed   []*slot // by expert: its slot outside the pool; nil: none
	vram    []bool  // by expert: it is in VRAM
	uses    []int64 // by expert: how often the router chose it
	loaded  []int32 // experts that its last step found in no tier
	evicted int64   // experts that left the pool during it
}

// Stats are counters since New. At every moment Hits and Misses sum to
// RoutedExperts; between steps, with no prefetch in flight, Misses +
// Prefetch.Issued - Prefetch.Used + PreloadLoads = Source.Loads + LoadsFailed +
// LoadsDropped.
type Stats struct {
	RoutedExperts   int64 // experts that the router chose, once per position
	DistinctExperts int64 // the same, once per step (layer and batch)
	Hits            Hits
	Avoided         Hits  // distinct experts that were in a tier: each would have been a load
	Marginal        Hits  // loads that there would have been more without the tier, see shadow.go
	Misses          int64 // routed experts for which a load was needed, those read ahead included
	LoadsFailed     int64 // loads that came back with an error
	LoadsDropped    int64 // misses never read, because their step ended early
	LoadWaitNanos   int64 // time that Next waited for a drive
	Evictions       int64 // experts that left the LRU pool
	VRAMEvictions   int64 // experts that left VRAM
	VRAMSwaps       int64 // of them, those that one of the LRU pool took the place of
	PreloadLoads    int64 // experts read by Preload
	PreloadBytes    int64 // their payload
	Prefetch        PrefetchStats
	Drafts          DraftStats
	Cap             int   // experts per layer, now
	CapChanges      int64 // how often Adapt lowered it
	Source          SourceStats
}

// Wanted is the loads and their payload, but for what prefetch read for nothing:
// once Land has been called, and without prefetch failing, the misses and Preload.
func (st *Stats) Wanted() (loads, bytes int64) {
	return st.Source.Loads - st.Prefetch.WastedLoads, st.Source.LoadBytes - st.Prefetch.WastedBytes
}

// Hits counts routed experts by the tier that served them. Positions of a
// batch that share one load hit, all but the first, the tier that it loads to.
type Hits struct{ VRAM, Pinned, LRU int64 }

// A bucket is where an expert of a step is counted.
type bucket uint8

const (
	inVRAM bucket = iota
	inPinned
	inLRU
	inAhead // a prefetch has brought it, or is bringing it
	missed
)

// count decides the bucket of an expert that uses positions of a batch chose,
// and counts it there and nowhere else. Tiers are asked in the order VRAM,
// pinned, LRU; what is in none is a miss, whether or not a prefetch has read it
// ahead: so prefetch moves no hit and no miss, but for what a policy makes of
// the guesses; it moves when they are waited for.
// This is the only place that counts hits and misses.
func (st *Stats) count(vram, pinned, lru, ahead bool, uses int64) bucket {
	st.RoutedExperts += uses
	st.DistinctExperts++
	switch {
	case vram:
		st.Hits.VRAM += uses
		st.Avoided.VRAM++
		return inVRAM
	case pinned:
		st.Hits.Pinned += uses
		st.Avoided.Pinned++
		return inPinned
	case lru:
		st.Hits.LRU += uses
		st.Avoided.LRU++
		return inLRU
	}
	// A load, now or before its layer asked.
	st.Misses++
	st.Hits.LRU += uses - 1
	if ahead {
		st.Prefetch.Used++
		return inAhead
	}
	return missed
}

// New maps the slots and starts the goroutine that reaps from src; nobody else
// may call src until Close has returned, which leaves src open. Errors: a cap
// or top-k below 1 of a model that has experts, layers that make no sense, no memory.
func New(src Source, opt Options) (*Cache, error) {
	dense := len(opt.Layers) == 0 && opt.Cap == 0 && opt.TopK == 0
	if opt.Cap < 1 && !dense {
		return nil, fmt.Errorf("tiers: cap %d: it must be at least 1", opt.Cap)
	}
	if opt.TopK < 1 && !dense {
		return nil, fmt.Errorf("tiers: top-k %d: it must be at least 1", opt.TopK)
	}
	if len(opt.Layers) == 0 && !dense {
		return nil, errors.New("tiers: the model has no MoE layer")
	}
	if err := CheckPolicy(opt.Policy); err != nil {
		return nil, fmt.Errorf("tiers: %w", err)
	}
	if opt.Now == nil {
		opt.Now = time.Now
	}
	c := &Cache{src: src, opt: opt, cap: opt.Cap}
	if err := c.open(); err != nil {
		c.free()
		return nil, err
	}
	return c, nil
}

func (c *Cache) open() error {
	widest := 0
	for _, l := range c.opt.Layers {
		if l.Layer < 0 || l.Layer > 1<<16 || l.Experts < 1 || l.Experts > 1<<20 {
			return fmt.Errorf("tiers: layer %d with %d experts: the model's numbers are out of range", l.Layer, l.Experts)
		}
		for len(c.layers) <= l.Layer {
			c.layers = append(c.layers, layer{})
		}
		if c.layers[l.Layer].experts != 0 {
			return fmt.Errorf("tiers: layer %d is given twice", l.Layer)
		}
		cl := c.classOf(c.src.SlotBytes(l.Layer), c.src.ExpertBytes(l.Layer))
		c.layers[l.Layer] = layer{
			experts: l.Experts, class: cl, fixed: make([]*slot, l.Experts), vram: make([]bool, l.Experts), uses: make([]int64, l.Experts),
			loaded: make([]int32, 0, l.Experts),
		}
		widest = max(widest, l.Experts)
	}
	apart, err := c.setApart()
	if err != nil {
		return err
	}
	for _, l := range c.opt.Layers {
		cl := c.layers[l.Layer].class
		cl.experts = append(cl.experts, l.Experts-apart[l.Layer])
	}
	c.inFlight = c.opt.TopK
	if c.opt.Prefetch != PrefetchOff {
		c.inFlight += c.opt.TopK
	}
	slots := 0
	for _, cl := range c.classes {
		cl.size = sizeClass(cl.slotBytes, cl.experts, c.inFlight, c.opt.Cap)
		if err := c.grant(cl); err != nil {
			return err
		}
		if err := cl.open(); err != nil {
			return err
		}
		if err := cl.kept.open(c, cl); err != nil {
			return err
		}
		slots += len(cl.slots) + len(cl.fixed)
	}
	c.placeFixed()
	c.stats.Cap = c.cap
	c.src.Register(c.arenas())
	c.step = Step{
		c:     c,
		items: make([]item, 0, widest),
		turn:  make([]int32, 0, widest),
		queue: make([]*slot, 0, widest),
		spare: make([]int32, 0, widest),
		seen:  make([]bool, widest),
		ended: true,
	}
	c.ahead.open(c.opt)
	c.swaps.open(c)
	c.fetches = make([]*storage.Fetch, 0, max(widest, preloadAtOnce))
	c.kick = make(chan struct{}, 1)
	c.arrived = make(chan *slot, slots)
	c.stopped = make(chan struct{})
	c.owner = c.owners()
	go c.io()
	return nil
}

func (c *Cache) classOf(slotBytes, payload int64) *class {
	for _, cl := range c.classes {
		if cl.slotBytes == slotBytes && cl.payload == payload {
			return cl
		}
	}
	cl := &class{slotBytes: slotBytes, payload: payload}
	c.classes = append(c.classes, cl)
	return cl
}

// grant asks the ledger for the slots of a class; free returns what it gave.
func (c *Cache) grant(cl *class) error {
	if c.opt.Ledger == nil {
		return nil
	}
	for _, g := range []struct {
		p Purpose
		n int64
	}{
		{VRAM, cl.vramBytes},
		{Pinned, int64(len(cl.fixed)) * cl.size.Bytes},
		{LRU, int64(cl.size.Keep) * cl.size.Bytes},
		{Staging, int64(cl.size.Staging) * cl.size.Bytes},
	} {
		if err := c.opt.Ledger.Grant(g.p, g.n); err != nil {
			return err
		}
		cl.granted[g.p] = g.n
	}
	return nil
}

// arenas is the memory that slots lie in now.
func (c *Cache) arenas() (all [][]byte) {
	for _, cl := range c.classes {
		if cl.arena != nil {
			all = append(all, cl.arena[:int64(len(cl.slots))*cl.size.Bytes])
		}
		if cl.fixedArena != nil {
			all = append(all, cl.fixedArena)
		}
	}
	return all
}

// free gives back what open took.
func (c *Cache) free() error {
	var errs []error
	c.src.Register(nil) // or the pages would stay
	for _, cl := range c.classes {
		errs = append(errs, offheap.Free(cl.arena), offheap.Free(cl.fixedArena))
		cl.arena, cl.fixedArena = nil, nil
		for p, n := range cl.granted {
			if n > 0 {
				c.opt.Ledger.Return(Purpose(p), n)
			}
		}
		cl.granted = [purposes]int64{}
	}
	return errors.Join(errs...)
}

// Close ends the step if there is one, stops the goroutine and unmaps the
// slots: no parts may be used any more. The source stays open; whoever opened
// it closes it, and so the device.
func (c *Cache) Close() error {
	if c.closed {
		return nil
	}
	c.closed = true
	c.step.End()
	c.landAll()
	close(c.kick)
	<-c.stopped
	return c.free()
}

// Stats returns the counters as they are now.
func (c *Cache) Stats() Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stats.Marginal.LRU = c.stats.Avoided.LRU // without the pool each was a load
	return c.stats
}

// load asks for the next expert of each slot, in one submission: here and now, not
// in a goroutine that would have to wait for a processor while the experts that are
// in memory compute.
func (c *Cache) load(slots []*slot, background bool) {
	c.fetches = c.fetches[:0]
	for _, s := range slots {
		c.drop(s) // of bytes in our memory the source hears when they are about to be loaded over
		s.fetch.Key, s.fetch.Err, s.fetch.Background = s.next, nil, background
		c.fetches = append(c.fetches, &s.fetch)
	}
	c.src.Submit(c.fetches)
	c.mu.Lock()
	c.air += len(slots)
	c.mu.Unlock()
}

// drop tells the source of an expert that is not wanted any more.
func (c *Cache) drop(s *slot) {
	if s.full {
		c.src.Evict(&s.fetch)
		s.full = false
		s.fetch.Parts = [MaxParts][]byte{}
	}
}

// owners finds the slot of a fetch.
func (c *Cache) owners() map[*storage.Fetch]*slot {
	owner := make(map[*storage.Fetch]*slot)
	for _, cl := range c.classes {
		for _, slots := range [][]slot{cl.slots, cl.fixed} {
			for i := range slots {
				owner[&slots[i].fetch] = &slots[i]
			}
		}
	}
	return owner
}

// come returns a slot that the source is done with, or nil if there is none now.
// It looks at the source itself unless io does: a goroutine that is asleep gets
// its word late while experts compute on every processor.
func (c *Cache) come() *slot {
	select {
	case sl := <-c.arrived:
		return sl
	default:
	}
	if air, beside := c.flying(); beside || air == 0 {
		return nil
	}
	f, beside := c.src.Poll()
	switch {
	case beside:
		c.besides()
	case f != nil:
		return c.reaped(f)
	}
	return nil
}

// await is come for a caller that waits. For some time it looks again and again,
// longer than most reads of an expert take: to be woken takes as long as a part of
// a read, and the threads that compute would fall asleep too. Then io waits for it.
func (c *Cache) await(ctx context.Context) (*slot, error) {
	var from time.Time
	for i := 0; ; i++ {
		if sl := c.come(); sl != nil {
			return sl, nil
		}
		if _, beside := c.flying(); beside {
			break
		}
		if i%looks != 0 {
			continue
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		default:
		}
		if now := time.Now(); i == 0 {
			from = now
		} else if now.Sub(from) > patience {
			c.besides()
			break
		}
	}
	select {
	case sl := <-c.arrived:
		return sl, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

const (
	patience = 2 * time.Millisecond
	looks    = 64 // from one look at the clock to the next
)

// besides has io wait for all that is in flight.
func (c *Cache) besides() {
	c.mu.Lock()
	c.beside = true
	c.mu.Unlock()
	c.kick <- struct{}{}
}

// reaped books what the source has given back.
func (c *Cache) reaped(f *storage.Fetch) *slot {
	stats := c.src.Stats()
	c.mu.Lock()
	c.stats.Source = stats
	c.air--
	c.mu.Unlock()
	return c.owner[f]
}

// io is the goroutine that waits for the source when it is told to, until nothing
// is in flight.
func (c *Cache) io() {
	defer close(c.stopped)
	for range c.kick { // until Close, which has waited for all that was in flight
		for c.more() {
			c.arrived <- c.reaped(c.src.Reap())
		}
	}
}

// more says whether io has something to wait for, and ends its turn if not.
func (c *Cache) more() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.beside = c.air > 0
	return c.beside
}

// flying is how many slots are submitted and not yet reaped, and whether io waits
// for them.
func (c *Cache) flying() (air int, beside bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.air, c.beside
}

// A Step is the use of some experts of one layer by one batch, from Begin to
// End.
type Step struct {
	c     *Cache
	class *class
	layer int32
	ended bool

	items []item  // in the order given to Begin
	turn  []int32 // items in the order in which Next returns them; grows
	next  int     // of turn

	inOrder  bool    // misses take their turn as submitted: they do not all fit at once
	queue    []*slot // submitted, in that order
	inFlight int
	unread   int     // items before here have a slot or had one
	waiting  int     // misses without a slot yet
	spare    []int32 // items done while misses wait, in that order
	spared   int     // of spare: already reused
	left     int     // items that Next has yet to return

	single  bool   // one position
	seen    []bool // scratch of Begin, by expert
	noParts Parts  // of what is in VRAM alone
}

type item struct {
	expert int32
	from   bucket // where Begin found it
	state  itemState
	slot   *slot // nil: waiting, let go, failed and told, or in VRAM alone
}

// hit says that the expert is in the pool's order, fixed that its slot is not
// one of the pool's.
func (it *item) hit() bool   { return it.from == inLRU }
func (it *item) fixed() bool { return it.from == inVRAM || it.from == inPinned }

type itemState uint8

const (
	waiting  itemState = iota // for a slot
	loading                   // in flight
	ready                     // in memory, not yet returned
	failed                    // came back with an error, not yet returned
	returned                  // the caller computes it
	done                      // computed, or failed and told
)

// Begin holds experts of one layer for one batch and starts to read those that
// are not in memory.
//
//	experts [n]  distinct, in the router's order, or ascending for a batch
//	uses    [n]  how many of the batch's routed positions chose each, at least 1
//
// It counts each expert in exactly one bucket, holds all that are in memory,
// and submits as many misses as there are slots in one submission; the others
// follow as Done frees slots. It does not wait for a drive, but in a batch for the
// one read ahead that may be at it. The caller owes the step one End, whatever
// happens; Begin again before End panics. Errors, with no step: ctx is done, the
// cache is closed.
func (c *Cache) Begin(ctx context.Context, layer int, experts, uses []int32) (*Step, error) {
	s := &c.step
	if !s.ended {
		panic("tiers: Begin before the End of the last step")
	}
	if c.closed {
		return nil, errors.New("tiers: the cache is closed")
	}
	if layer < 0 || layer >= len(c.layers) || c.layers[layer].experts == 0 {
		panic(fmt.Sprintf("tiers: layer %d has no experts", layer))
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	l := &c.layers[layer]
	s.check(l, experts, uses)
	c.meet(int32(layer), experts, uses)

	s.class, s.layer, s.ended = l.class, int32(layer), false
	s.items, s.turn, s.queue, s.spare = s.items[:0], s.turn[:0], s.queue[:0], s.spare[:0]
	s.next, s.inFlight, s.unread, s.waiting, s.spared = 0, 0, 0, 0, 0
	s.left = len(experts)
	l.loaded, l.evicted = l.loaded[:0], 0

	c.mu.Lock()
	for i, e := range experts {
		l.uses[e] += int64(uses[i])
		where, sl := c.find(Key{Layer: s.layer, Expert: e})
		it := item{expert: e, state: ready, slot: sl}
		it.from = c.stats.count(where == inVRAM, where == inPinned, where == inLRU, where == inAhead, int64(uses[i]))
		if it.from == missed || it.from == inAhead {
			l.loaded = append(l.loaded, e)
		}
		switch it.from {
		case inLRU:
			sl.held = true
			l.class.kept.cold.remove(Key{Layer: s.layer, Expert: e})
		case inAhead:
			if c.claimAhead(sl, i) == flying {
				it.state = loading
				c.stats.Prefetch.Late++
				s.inFlight++
				c.src.Hurry(&sl.fetch)
			}
		case missed:
			it.state = waiting
			s.waiting++
		}
		if it.state == ready {
			s.turn = append(s.turn, int32(i))
		}
		s.items = append(s.items, it)
	}
	c.mu.Unlock()
	s.enter(experts, uses)
	c.dropAhead()

	s.submit()
	s.inOrder = s.waiting > 0
	if s.inOrder {
		for i := range s.items {
			if s.items[i].state != ready {
				s.turn = append(s.turn, int32(i))
			}
		}
	}
	return s, nil
}

// check panics if the arguments of Begin break its contract.
func (s *Step) check(l *layer, experts, uses []int32) {
	if len(experts) != len(uses) {
		panic(fmt.Sprintf("tiers: %d experts, %d uses", len(experts), len(uses)))
	}
	for i, e := range experts {
		switch {
		case e < 0 || int(e) >= l.experts:
			panic(fmt.Sprintf("tiers: expert %d of a layer of %d", e, l.experts))
		case s.seen[e]:
			panic(fmt.Sprintf("tiers: expert %d is given twice", e))
		case uses[i] < 1:
			panic(fmt.Sprintf("tiers: expert %d has %d uses", e, uses[i]))
		}
		s.seen[e] = true
	}
	for _, e := range experts {
		s.seen[e] = false
	}
}

// submit gives slots to the misses that wait for one, as far as they go, and
// asks for them in one submission.
func (s *Step) submit() {
	from := len(s.queue)
	for s.waiting > 0 {
		sl := s.claim()
		if sl == nil {
			break
		}
		for s.items[s.unread].state != waiting {
			s.unread++
		}
		it := &s.items[s.unread]
		it.slot, it.state = sl, loading
		sl.item, sl.held, sl.used = s.unread, true, false
		sl.next = Key{Layer: s.layer, Expert: it.expert}
		s.queue = append(s.queue, sl)
		s.waiting--
		s.inFlight++
	}
	if batch := s.queue[from:]; len(batch) > 0 {
		s.c.load(batch, false)
	}
}

// land takes a slot that io has loaded.
func (c *Cache) land(sl *slot) {
	sl.full = sl.fetch.Err == nil
	switch {
	case sl.ahead != onGround:
		c.landAhead(sl)
	case sl.preload:
		c.landFixed(sl)
	default:
		c.step.arrive(sl)
	}
}

// arrive takes a slot that io has loaded for this step.
func (s *Step) arrive(sl *slot) {
	it := &s.items[sl.item]
	it.state = ready
	if sl.fetch.Err != nil {
		it.state = failed
		s.c.mu.Lock()
		s.c.stats.LoadsFailed++
		s.c.mu.Unlock()
	}
	if !s.inOrder {
		s.turn = append(s.turn, int32(sl.item))
	}
	s.inFlight--
	s.c.goAhead()
}

// Next returns the next expert that is in memory, waiting for it if it must:
// i indexes the experts of Begin; parts are its matrices in the order of the
// roles, valid until Done(i) or End; nil for an expert in VRAM alone. Hits come first, in the order given, then
// misses as they arrive, or in the order given if they do not all fit into
// memory at once. ok is false when all were returned.
//
// An error that is ctx's leaves the step as it is. Any other tells that expert
// i could not be read; it needs no Done, and the others are unharmed. Next
// panics if every slot is held by experts that were returned and not Done.
func (s *Step) Next(ctx context.Context) (i int, parts *[MaxParts][]byte, ok bool, err error) {
	if err := ctx.Err(); err != nil {
		return 0, nil, false, err
	}
	if s.left == 0 || s.ended {
		return 0, nil, false, nil
	}
	s.submit()
	if !s.poll() {
		if err := s.wait(ctx); err != nil {
			return 0, nil, false, err
		}
	}
	i, parts, err = s.take()
	return i, parts, err == nil, err
}

// TryNext is Next for a caller that has something better to do than to wait:
// if no expert is ready now, ok is false and pending, the number of experts
// yet to be returned, is above 0. When all were returned pending is 0.
func (s *Step) TryNext() (i int, parts *[MaxParts][]byte, ok bool, pending int, err error) {
	if s.left == 0 || s.ended {
		return 0, nil, false, 0, nil
	}
	s.submit()
	if !s.poll() {
		return 0, nil, false, s.left, nil
	}
	i, parts, err = s.take()
	return i, parts, err == nil, s.left, err
}

// Held says whether expert i was in a tier when Begin asked, whatever a prefetch
// had read ahead: Next returns those first.
func (s *Step) Held(i int) bool { return s.items[i].hit() || s.items[i].fixed() }

// poll says whether an expert can be taken now.
func (s *Step) poll() bool {
	for !s.due() {
		sl := s.c.come()
		if sl == nil {
			return false
		}
		s.c.land(sl)
	}
	return true
}

// due says whether the expert whose turn it is has arrived.
func (s *Step) due() bool {
	if s.next == len(s.turn) {
		return false
	}
	st := s.items[s.turn[s.next]].state
	return st == ready || st == failed
}

// wait waits until an expert can be taken.
func (s *Step) wait(ctx context.Context) (err error) {
	if s.inFlight == 0 {
		panic(fmt.Sprintf("tiers: layer %d: every slot is held: call Done before Next", s.layer))
	}
	start := s.c.opt.Now()
	for err == nil && !s.due() {
		var sl *slot
		if sl, err = s.c.await(ctx); err == nil {
			s.c.land(sl)
		}
	}
	nanos := s.c.opt.Now().Sub(start).Nanoseconds()
	s.c.mu.Lock()
	s.c.stats.LoadWaitNanos += nanos
	s.c.mu.Unlock()
	return err
}

// take returns the expert that is due.
func (s *Step) take() (int, *[MaxParts][]byte, error) {
	i := int(s.turn[s.next])
	s.next++
	s.left--
	it := &s.items[i]
	if it.state == ready {
		it.state = returned
		if it.slot == nil {
			return i, &s.noParts, nil
		}
		return i, &it.slot.fetch.Parts, nil
	}
	sl := it.slot
	it.slot, it.state = nil, done
	sl.held = false
	s.class.kept.policy.Remove(sl.fetch.Key)
	s.class.free = append(s.class.free, sl)
	return i, nil, fmt.Errorf("tiers: load %v: %w", sl.fetch.Key, sl.fetch.Err)
}

// Fresh says whether nobody has yet said Done of the bytes of expert i, which
// Next has returned: what checks bytes before their first use checks these. A
// hit is fresh too if the step that read it ended early, by a cancellation or
// because the check refused it or another.
func (s *Step) Fresh(i int) bool {
	if s.ended || s.items[i].state != returned {
		panic(fmt.Sprintf("tiers: Fresh(%d) of an expert that is not in use", i))
	}
	sl := s.items[i].slot
	return sl != nil && !sl.used
}

// Views says that the parts of experts are views of a file (mmap), so that to read
// them may fault, and not slots of memory.
func (s *Step) Views() bool { return s.c.src.Mode() == storage.MMap }

// InVRAM says that expert i is in the device's
// memory: its parts are nil, or a copy that the device need not be asked for.
func (s *Step) InVRAM(i int) bool { return s.items[i].from == inVRAM }

// Done says that expert i, returned by Next, has been computed: its slot may
// be used for a miss of this step that waits for one, which is submitted at
// the next Next or TryNext, together with others. For counters that are the
// same in every run, call it in the order in which Next returned.
func (s *Step) Done(i int) {
	if s.ended || i < 0 || i >= len(s.items) || s.items[i].state != returned {
		panic(fmt.Sprintf("tiers: Done(%d) of an expert that is not in use", i))
	}
	it := &s.items[i]
	it.state = done
	if it.slot != nil {
		it.slot.used = true
	}
	if s.waiting > 0 && !it.fixed() {
		s.spare = append(s.spare, int32(i))
	}
}

// End releases every hold; what is above the cap leaves. After an error or a
// cancellation it first waits for the reads in flight, so that none lands in a
// slot of another; what they bring stays as if it had been used. A second End
// does nothing.
func (s *Step) End() {
	if s.ended {
		return
	}
	for s.inFlight > 0 {
		sl, _ := s.c.await(context.Background())
		s.c.land(sl)
	}
	s.settle()
	s.c.mu.Lock()
	s.c.stats.LoadsDropped += int64(s.waiting)
	s.c.mu.Unlock()
	s.ended = true
	s.c.swaps.passed(s.c, s.layer)
	if invariants.Enabled {
		s.c.check()
	}
}

// check panics if the books are wrong between two steps.
func (c *Cache) check() {
	for _, cl := range c.classes {
		seen := make(map[*slot]bool, len(cl.slots))
		for _, s := range cl.free {
			seen[s] = true
		}
		ahead := 0
		for _, s := range c.ahead.slots {
			if s.class == cl {
				seen[s] = true
				ahead++
			}
		}
		for k, s := range cl.kept.all() {
			seen[s] = true
			switch {
			case s.held, s.ahead != onGround:
				panic(fmt.Sprintf("tiers: %v is held after its step", s.fetch.Key))
			case s.fetch.Key != k:
				panic(fmt.Sprintf("tiers: the slot of %v holds %v", k, s.fetch.Key))
			case c.layers[k.Layer].fixed[k.Expert] != nil, c.layers[k.Layer].vram[k.Expert]:
				panic(fmt.Sprintf("tiers: %v is in two tiers", k))
			}
		}
		if n := len(cl.free) + cl.kept.n + ahead; len(seen) != len(cl.slots) || n != len(cl.slots) {
			panic(fmt.Sprintf("tiers: %d of %d slots accounted for, %d distinct", n, len(cl.slots), len(seen)))
		}
		if cl.kept.n > cl.size.Keep {
			panic(fmt.Sprintf("tiers: %d experts stay, the cap keeps %d", cl.kept.n, cl.size.Keep))
		}
	}
	c.mu.Lock()
	st, flying := c.stats, int64(c.air)
	c.mu.Unlock()
	if st.Hits.VRAM+st.Hits.Pinned+st.Hits.LRU+st.Misses != st.RoutedExperts {
		panic(fmt.Sprintf("tiers: hits and misses do not sum to the routed experts: %+v", st))
	}
	// A read that failed is counted when its slot lands, which may come later
	// than its end.
	known, over := st.Misses+st.Prefetch.Issued-st.Prefetch.Used+st.PreloadLoads, st.Source.Loads+st.LoadsFailed+st.LoadsDropped
	if known < over+flying || known > over+flying+int64(len(c.arrived)) {
		panic(fmt.Sprintf("tiers: misses, prefetches and preloads are not the loads, %d in flight: %+v", flying, st))
	}
}
