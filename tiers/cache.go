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
	Cap     int               // experts per layer that stay in RAM, at least 1; more than a layer has counts as all of it
	TopK    int               // experts of one position and layer: the staging slots of a class
	Layers  []ExpertLayer     // the model's MoE layers
	Policy  string            // who leaves the pool: a name that NewPolicy knows, "" is the default
	History func(Key) float64 // for the policy, see PolicyConfig; nil: unknown
	Ledger  *Ledger           // grants the slots' bytes; nil: nobody is asked
	Now     func() time.Time  // nil: time.Now
}

// A Cache keeps routed experts in the LRU pool in RAM and reads those that are
// missing. One goroutine uses it, one step at a time; Stats may be called from
// any. The memory of all slots is mapped and resident from New on, so what the
// ledger announces is true.
type Cache struct {
	src     Source
	opt     Options
	layers  []layer // by number; no experts: not a MoE layer
	classes []*class
	step    Step
	routed  routed
	work    chan work
	arrived chan *slot // room for every slot, so that io never waits for the step
	stopped chan struct{}
	closed  bool

	mu    sync.Mutex // guards stats
	stats Stats
}

type layer struct {
	experts int
	class   *class
}

// Stats are counters since New. At every moment Hits and Misses sum to
// RoutedExperts; between steps Misses = Source.Loads + LoadsFailed +
// LoadsDropped.
type Stats struct {
	RoutedExperts   int64 // experts that the router chose, once per position
	DistinctExperts int64 // the same, once per step (layer and batch)
	Hits            Hits
	Misses          int64 // routed experts for which a load was needed
	LoadsFailed     int64 // loads that came back with an error
	LoadsDropped    int64 // misses never read, because their step ended early
	LoadWaitNanos   int64 // time that Next waited for a drive
	Evictions       int64 // experts that left the LRU pool
	Source          SourceStats
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
	missed
)

// count decides the bucket of an expert that uses positions of a batch chose,
// and counts it there and nowhere else. Tiers are asked in the order VRAM,
// pinned, LRU. This is the only place that counts hits and misses.
func (st *Stats) count(vram, pinned, lru bool, uses int64) bucket {
	st.RoutedExperts += uses
	st.DistinctExperts++
	switch {
	case vram:
		st.Hits.VRAM += uses
		return inVRAM
	case pinned:
		st.Hits.Pinned += uses
		return inPinned
	case lru:
		st.Hits.LRU += uses
		return inLRU
	}
	st.Misses++ // one load
	st.Hits.LRU += uses - 1
	return missed
}

// New maps the slots and starts the goroutine that talks to src; nobody else
// may call src until Close has returned, which leaves src open. Errors: a cap
// or top-k below 1, layers that make no sense, no memory.
func New(src Source, opt Options) (*Cache, error) {
	if opt.Cap < 1 {
		return nil, fmt.Errorf("tiers: cap %d: it must be at least 1", opt.Cap)
	}
	if opt.TopK < 1 {
		return nil, fmt.Errorf("tiers: top-k %d: it must be at least 1", opt.TopK)
	}
	if len(opt.Layers) == 0 {
		return nil, errors.New("tiers: the model has no MoE layer")
	}
	if err := CheckPolicy(opt.Policy); err != nil {
		return nil, fmt.Errorf("tiers: %w", err)
	}
	if opt.Now == nil {
		opt.Now = time.Now
	}
	c := &Cache{src: src, opt: opt}
	if err := c.open(); err != nil {
		c.free()
		return nil, err
	}
	return c, nil
}

func (c *Cache) open() error {
	widest := 0
	byClass := make(map[*class][]int) // experts of each layer
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
		byClass[cl] = append(byClass[cl], l.Experts)
		c.layers[l.Layer] = layer{l.Experts, cl}
		widest = max(widest, l.Experts)
	}
	slots := 0
	var arenas [][]byte
	for _, cl := range c.classes {
		cl.size = sizeClass(cl.slotBytes, byClass[cl], c.opt.TopK, c.opt.Cap)
		if led := c.opt.Ledger; led != nil {
			if err := led.Grant(LRU, int64(cl.size.Keep)*cl.size.Bytes); err != nil {
				return err
			}
			if err := led.Grant(Staging, int64(cl.size.Staging)*cl.size.Bytes); err != nil {
				led.Return(LRU, int64(cl.size.Keep)*cl.size.Bytes)
				return err
			}
		}
		cl.granted = true
		if err := cl.open(); err != nil {
			return err
		}
		if err := cl.kept.open(c, cl); err != nil {
			return err
		}
		slots += len(cl.slots)
		if cl.arena != nil {
			arenas = append(arenas, cl.arena)
		}
	}
	c.src.Register(arenas)
	c.step = Step{
		c:     c,
		items: make([]item, 0, widest),
		turn:  make([]int32, 0, widest),
		queue: make([]*slot, 0, widest),
		spare: make([]int32, 0, widest),
		seen:  make([]bool, widest),
		ended: true,
	}
	c.work = make(chan work, 2*c.opt.TopK)
	c.arrived = make(chan *slot, slots)
	c.stopped = make(chan struct{})
	go c.io(widest)
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

// free gives back what open took.
func (c *Cache) free() error {
	var errs []error
	c.src.Register(nil) // or the pages would stay
	for _, cl := range c.classes {
		errs = append(errs, offheap.Free(cl.arena))
		cl.arena = nil
		if led := c.opt.Ledger; led != nil && cl.granted {
			led.Return(LRU, int64(cl.size.Keep)*cl.size.Bytes)
			led.Return(Staging, int64(cl.size.Staging)*cl.size.Bytes)
		}
		cl.granted = false
	}
	return errors.Join(errs...)
}

// Close ends the step if there is one, stops the goroutine and unmaps the
// slots: no parts may be used any more. The source stays open; whoever opened
// it closes it.
func (c *Cache) Close() error {
	if c.closed {
		return nil
	}
	c.closed = true
	c.step.End()
	close(c.work)
	<-c.stopped
	return c.free()
}

// Stats returns the counters as they are now.
func (c *Cache) Stats() Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stats
}

// work is what the step asks of io: to load slots in one submission, or to
// drop one slot's expert.
type work struct {
	load []*slot
	drop *slot
}

// io is the one goroutine that calls the source.
func (c *Cache) io(widest int) {
	defer close(c.stopped)
	owner := make(map[*storage.Fetch]*slot)
	for _, cl := range c.classes {
		for i := range cl.slots {
			owner[&cl.slots[i].fetch] = &cl.slots[i]
		}
	}
	// The source hears of each expert that leaves: of a view at once (drop of
	// work), of bytes in our memory when they are about to be loaded over.
	drop := func(s *slot) {
		if s.full {
			c.src.Evict(&s.fetch)
		}
		s.full = false
		s.fetch.Parts = [MaxParts][]byte{}
	}
	// What was submitted since nothing was in flight: one step at most.
	fetches := make([]*storage.Fetch, 0, widest)
	inFlight := 0
	for {
		var w work
		ok := true
		if inFlight == 0 {
			w, ok = <-c.work
			fetches = fetches[:0]
		} else {
			select {
			case w, ok = <-c.work:
			default:
			}
		}
		switch {
		case !ok:
			return // Close has ended the step, so nothing is in flight
		case w.drop != nil:
			drop(w.drop)
		case w.load != nil:
			from := len(fetches)
			for _, s := range w.load {
				drop(s)
				s.fetch.Key, s.fetch.Err = s.next, nil
				fetches = append(fetches, &s.fetch)
			}
			c.src.Submit(fetches[from:])
			inFlight += len(w.load)
		default:
			s := owner[c.src.Reap()]
			s.full = s.fetch.Err == nil
			inFlight--
			c.mu.Lock()
			c.stats.Source = c.src.Stats()
			c.mu.Unlock()
			c.arrived <- s
		}
	}
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

	seen []bool // scratch of Begin, by expert
}

type item struct {
	expert int32
	hit    bool
	state  itemState
	slot   *slot // nil: waiting, let go, or failed and told
}

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
// follow as Done frees slots. It does not wait for a drive. The caller owes
// the step one End, whatever happens; Begin again before End panics. Errors,
// with no step: ctx is done, the cache is closed.
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

	s.class, s.layer, s.ended = l.class, int32(layer), false
	s.items, s.turn, s.queue, s.spare = s.items[:0], s.turn[:0], s.queue[:0], s.spare[:0]
	s.next, s.inFlight, s.unread, s.waiting, s.spared = 0, 0, 0, 0, 0
	s.left = len(experts)

	c.mu.Lock()
	for i, e := range experts {
		sl, hit := l.class.kept.peek(Key{Layer: s.layer, Expert: e})
		it := item{expert: e}
		if c.stats.count(false, false, hit, int64(uses[i])) == inLRU {
			sl.held = true
			it = item{expert: e, hit: true, state: ready, slot: sl}
			s.turn = append(s.turn, int32(i))
		} else {
			s.waiting++
		}
		s.items = append(s.items, it)
	}
	c.mu.Unlock()
	s.enter(experts, uses)

	s.submit()
	s.inOrder = s.waiting > 0
	if s.inOrder {
		for i := range s.items {
			if !s.items[i].hit {
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
		s.c.work <- work{load: batch}
	}
}

// arrive takes a slot that io has loaded.
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
}

// Next returns the next expert that is in memory, waiting for it if it must:
// i indexes the experts of Begin; parts are its matrices in the order of the
// roles, valid until Done(i) or End. Hits come first, in the order given, then
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

// poll says whether an expert can be taken now.
func (s *Step) poll() bool {
	for !s.due() {
		select {
		case sl := <-s.c.arrived:
			s.arrive(sl)
		default:
			return false
		}
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
		select {
		case sl := <-s.c.arrived:
			s.arrive(sl)
		case <-ctx.Done():
			err = ctx.Err()
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
	return !s.items[i].slot.used
}

// Done says that expert i, returned by Next, has been computed: its slot may
// be used for a miss of this step that waits for one, which is submitted at
// the next Next or TryNext, together with others. For counters that are the
// same in every run, call it in the order in which Next returned.
func (s *Step) Done(i int) {
	if s.ended || i < 0 || i >= len(s.items) || s.items[i].state != returned {
		panic(fmt.Sprintf("tiers: Done(%d) of an expert that is not in use", i))
	}
	s.items[i].state = done
	s.items[i].slot.used = true
	if s.waiting > 0 {
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
		s.arrive(<-s.c.arrived)
	}
	s.settle()
	s.c.mu.Lock()
	s.c.stats.LoadsDropped += int64(s.waiting)
	s.c.mu.Unlock()
	s.ended = true
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
		for k, s := range cl.kept.all() {
			seen[s] = true
			switch {
			case s.held:
				panic(fmt.Sprintf("tiers: %v is held after its step", s.fetch.Key))
			case s.fetch.Key != k:
				panic(fmt.Sprintf("tiers: the slot of %v holds %v", k, s.fetch.Key))
			}
		}
		if n := len(cl.free) + cl.kept.n; len(seen) != len(cl.slots) || n != len(cl.slots) {
			panic(fmt.Sprintf("tiers: %d of %d slots accounted for, %d distinct", n, len(cl.slots), len(seen)))
		}
		if cl.kept.n > cl.size.Keep {
			panic(fmt.Sprintf("tiers: %d experts stay, the cap keeps %d", cl.kept.n, cl.size.Keep))
		}
	}
	st := c.Stats()
	if st.Hits.VRAM+st.Hits.Pinned+st.Hits.LRU+st.Misses != st.RoutedExperts {
		panic(fmt.Sprintf("tiers: hits and misses do not sum to the routed experts: %+v", st))
	}
	if st.Misses != st.Source.Loads+st.LoadsFailed+st.LoadsDropped {
		panic(fmt.Sprintf("tiers: misses are not the loads: %+v", st))
	}
}
