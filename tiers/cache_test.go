package tiers

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/internal/invariants"
	"sluice/storage"
)

// open makes a cache over a fake and closes it when the test ends.
func open(t testing.TB, f *fake, opt Options) *Cache {
	t.Helper()
	c, err := New(f, opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if f.arenas != nil {
			t.Error("memory stays registered when the cache is closed")
		}
	})
	return c
}

func small(layers, experts int) ([]ExpertLayer, map[int]fakeLayer) {
	el, fl := make([]ExpertLayer, layers), map[int]fakeLayer{}
	for l := range el {
		el[l] = ExpertLayer{Layer: l, Experts: experts}
		fl[l] = fakeLayer{3 * 512, 100}
	}
	return el, fl
}

// leaving lists what is in memory: under lru in the order in which it would
// leave, else by key.
func (cl *class) leaving() (keys []Key) {
	if p, ok := cl.kept.policy.(*shared); ok {
		if o, ok := p.order.(*lru); ok {
			for _, i := range o.list.Keys() {
				keys = append(keys, p.keys[i])
			}
			return keys
		}
	}
	for k := range cl.kept.all() {
		keys = append(keys, k)
	}
	return keys
}

// A pool is a second telling of the rules of one class, with plain slices: what
// is in memory, oldest first, and how the slots move during a step.
type pool struct {
	slots, keep int
	order       []Key
	want        Stats
}

// step is a step in a pool.
type poolStep struct {
	p       *pool
	layer   int32
	experts []int32
	hits    []int32        // expected first, in this order
	misses  []int32        // in the order of submission
	sent    int            // of misses
	state   map[int32]byte // h held, l loading, r returned, d done, g gone, f failed and told
	spare   []int32
	free    int
	inOrder bool
	told    int // of misses, if inOrder
}

func (p *pool) begin(layer int32, experts, uses []int32) *poolStep {
	s := &poolStep{p: p, layer: layer, experts: experts, state: map[int32]byte{}, free: p.slots - len(p.order)}
	for i, e := range experts {
		p.want.RoutedExperts += int64(uses[i])
		p.want.DistinctExperts++
		if slices.Contains(p.order, Key{Layer: layer, Expert: e}) {
			p.want.Hits.LRU += int64(uses[i])
			p.want.Avoided.LRU++
			p.want.Marginal.LRU++
			s.hits = append(s.hits, e)
			s.state[e] = 'h'
		} else {
			p.want.Misses++
			p.want.Hits.LRU += int64(uses[i]) - 1
			s.misses = append(s.misses, e)
		}
	}
	s.send()
	s.inOrder = s.sent < len(s.misses)
	return s
}

func (s *poolStep) send() {
	for s.sent < len(s.misses) {
		old := slices.IndexFunc(s.p.order, func(k Key) bool { return k.Layer != s.layer || s.state[k.Expert] == 0 })
		switch {
		case s.free > 0:
			s.free--
		case old >= 0:
			s.p.order = slices.Delete(s.p.order, old, old+1)
			s.p.want.Evictions++
		case len(s.spare) > 0:
			e := s.spare[0]
			s.spare = s.spare[1:]
			s.state[e] = 'g'
			s.p.order = slices.DeleteFunc(s.p.order, func(k Key) bool { return k == Key{Layer: s.layer, Expert: e} })
			s.p.want.Evictions++
		default:
			return
		}
		s.state[s.misses[s.sent]] = 'l'
		s.sent++
	}
}

// returned checks that expert e may be returned now.
func (s *poolStep) returned(e int32, failed bool) error {
	switch {
	case len(s.hits) > 0:
		if s.hits[0] != e || failed {
			return fmt.Errorf("expert %d is returned, the next hit is %d", e, s.hits[0])
		}
		s.hits = s.hits[1:]
	case s.state[e] != 'l':
		return fmt.Errorf("expert %d is returned, its state is %q", e, s.state[e])
	case s.inOrder:
		if s.misses[s.told] != e {
			return fmt.Errorf("expert %d is returned, the next is %d", e, s.misses[s.told])
		}
		s.told++
	}
	s.state[e] = 'r'
	if failed {
		s.state[e] = 'f'
		s.free++
		s.p.want.LoadsFailed++
	}
	return nil
}

func (s *poolStep) done(e int32) {
	s.state[e] = 'd'
	if s.sent < len(s.misses) {
		s.spare = append(s.spare, e)
	}
}

func (s *poolStep) end(broken map[Key]bool) {
	for _, e := range s.experts {
		k := Key{Layer: s.layer, Expert: e}
		switch st := s.state[e]; {
		case st == 'l' && broken[k]:
			s.p.want.LoadsFailed++
		case st == 'g' || st == 'f' || st == 0:
		default:
			s.p.order = slices.DeleteFunc(s.p.order, func(o Key) bool { return o == k })
			s.p.order = append(s.p.order, k)
		}
	}
	s.p.want.LoadsDropped += int64(len(s.misses) - s.sent)
	if n := len(s.p.order) - s.p.keep; n > 0 {
		s.p.order = s.p.order[n:]
		s.p.want.Evictions += int64(n)
	}
}

// Random steps, with reads that fail, finish out of order, and steps that end
// early, leave the cache as the plain pool says, and every expert that is
// returned has its own bytes, until its Done.
func TestAgainstPlainPool(t *testing.T) {
	for _, mode := range []Mode{storage.Slab, storage.MMap} {
		for round := range 40 {
			seed := uint64(round) + 1000*uint64(mode)
			t.Run(fmt.Sprintf("%v/seed=%d", mode, seed), func(t *testing.T) { againstPlainPool(t, mode, seed) })
		}
	}
}

func againstPlainPool(t *testing.T, mode Mode, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 1))
	layers, experts, topK := 1+rng.IntN(4), 2+rng.IntN(12), 1+rng.IntN(4)
	limit := 1 + rng.IntN(experts)
	el, fl := small(layers, experts)
	f := newFake(t, mode, fl)
	finish := rand.New(rand.NewPCG(seed, 2)) // io's
	f.pick = func(n int) int {
		if finish.IntN(2) == 0 {
			runtime.Gosched()
		}
		return finish.IntN(n)
	}
	c := open(t, f, Options{Cap: limit, TopK: topK, Layers: el, Policy: "lru"})
	p := &pool{keep: layers * limit, slots: min(layers*limit+topK, layers*experts)}

	for n := range 150 {
		layer := int32(rng.IntN(layers))
		ex := rng.Perm(experts)[:1+rng.IntN(experts)]
		var keys, uses []int32
		f.mu.Lock() // io is idle, but the race detector cannot know
		clear(f.broken)
		for _, e := range ex {
			keys = append(keys, int32(e))
			uses = append(uses, int32(1+rng.IntN(3)))
			if rng.IntN(20) == 0 {
				f.broken[Key{Layer: layer, Expert: int32(e)}] = true
			}
		}
		f.batches = nil
		f.mu.Unlock()

		ctx, cancel := context.WithCancel(context.Background())
		step, err := c.Begin(ctx, int(layer), keys, uses)
		if err != nil {
			t.Fatal(err)
		}
		ps := p.begin(layer, keys, uses)
		first := ps.sent
		var held []int
		views := map[int]*[MaxParts][]byte{}
		check := func(i int) {
			if err := f.verify(Key{Layer: layer, Expert: keys[i]}, views[i]); err != nil {
				t.Fatalf("step %d: %v", n, err)
			}
		}
		quit := -1
		if rng.IntN(6) == 0 {
			quit = rng.IntN(len(keys) + 1)
		}
		for told := 0; told < len(keys); {
			if told == quit {
				cancel()
				if _, _, _, err := step.Next(ctx); !errors.Is(err, context.Canceled) {
					t.Fatalf("step %d: Next after the cancellation: %v", n, err)
				}
				break
			}
			ps.send()
			var i int
			var parts *[MaxParts][]byte
			var ok bool
			var err error
			// It must not wait while it holds all slots: then the others are Done first.
			if len(held) > 0 && rng.IntN(3) > 0 {
				var pending int
				i, parts, ok, pending, err = step.TryNext()
				if !ok && err == nil {
					if pending != len(keys)-told {
						t.Fatalf("step %d: %d pending, want %d", n, pending, len(keys)-told)
					}
					for _, i := range held {
						check(i)
						step.Done(i)
						ps.done(keys[i])
					}
					held = held[:0]
					continue
				}
			} else if len(held) > 0 {
				i := held[0]
				held = held[1:]
				check(i)
				step.Done(i)
				ps.done(keys[i])
				continue
			} else if i, parts, ok, err = step.Next(ctx); !ok && err == nil {
				t.Fatalf("step %d: Next says that all were returned after %d of %d", n, told, len(keys))
			}
			told++
			if e := ps.returned(keys[i], err != nil); e != nil {
				t.Fatalf("step %d: %v", n, e)
			}
			if err != nil {
				if k := (Key{Layer: layer, Expert: keys[i]}); !errors.Is(err, errBroken) || !f.broken[k] || !strings.Contains(err.Error(), k.String()) {
					t.Fatalf("step %d: %v", n, err)
				}
				continue
			}
			views[i] = parts
			check(i)
			held = append(held, i)
		}
		if quit < 0 {
			if _, _, ok, err := step.Next(ctx); ok || err != nil {
				t.Fatalf("step %d: Next at the end: %v, %v", n, ok, err)
			}
		}
		for _, i := range held {
			check(i)
		}
		step.End()
		step.End() // does nothing
		cancel()
		ps.end(f.broken)
		f.settle(c)
		if got := c.classes[0].leaving(); !slices.Equal(got, p.order) {
			t.Fatalf("step %d: in memory%s, want%s", n, list(got), list(p.order))
		}
		got := c.Stats()
		p.want.LoadWaitNanos = got.LoadWaitNanos
		p.want.Cap = limit
		p.want.Source = got.Source
		if got != p.want {
			t.Fatalf("step %d:\ngot  %+v\nwant %+v", n, got, p.want)
		}
		if got.Misses != got.Source.Loads+got.LoadsFailed+got.LoadsDropped {
			t.Fatalf("step %d: misses are not the loads: %+v", n, got)
		}
		// Begin asks once for all that has room, and nothing is read twice.
		read := slices.Concat(f.batches...)
		if len(f.batches) > 0 && len(f.batches[0]) != first {
			t.Fatalf("step %d: %d experts in the first submission, want %d", n, len(f.batches[0]), first)
		}
		if len(read) != ps.sent {
			t.Fatalf("step %d: %d experts submitted, want %d", n, len(read), ps.sent)
		}
		c.check()
	}
}

// The same steps give the same counters, whatever order the drive answers in.
func TestCountersAreDeterministic(t *testing.T) {
	run := func(finish *rand.Rand) (Stats, []Key) {
		el, fl := small(3, 16)
		f := newFake(t, storage.Slab, fl)
		f.pick = func(n int) int { return finish.IntN(n) }
		c := open(t, f, Options{Cap: 2, TopK: 3, Layers: el, Now: func() time.Time { return time.Time{} }})
		rng := rand.New(rand.NewPCG(7, 7))
		ctx := context.Background()
		for n := range 200 {
			ex := rng.Perm(16)[:1+rng.IntN(16)]
			var keys, uses []int32
			for _, e := range ex {
				keys, uses = append(keys, int32(e)), append(uses, 1)
			}
			s, err := c.Begin(ctx, n%3, keys, uses)
			if err != nil {
				t.Fatal(err)
			}
			for {
				// Groups of whatever is ready, as a backend takes them.
				i, _, ok, err := s.Next(ctx)
				if err != nil {
					t.Fatal(err)
				}
				if !ok {
					break
				}
				group := []int{i}
				for {
					i, _, ok, _, err := s.TryNext()
					if err != nil {
						t.Fatal(err)
					}
					if !ok {
						break
					}
					group = append(group, i)
				}
				for _, i := range group {
					s.Done(i)
				}
			}
			s.End()
		}
		return c.Stats(), c.classes[0].leaving()
	}
	want, wantKeys := run(rand.New(rand.NewPCG(1, 1)))
	for seed := range uint64(5) {
		got, keys := run(rand.New(rand.NewPCG(seed, 2)))
		if got != want || !slices.Equal(keys, wantKeys) {
			t.Errorf("seed %d:\ngot  %+v%s\nwant %+v%s", seed, got, list(keys), want, list(wantKeys))
		}
	}
}

// A cancelled Next returns while its read is still out, and End waits for it.
func TestCancelWhileWaiting(t *testing.T) {
	el, fl := small(1, 8)
	f := newFake(t, storage.Slab, fl)
	c := open(t, f, Options{Cap: 1, TopK: 2, Layers: el})
	ctx, cancel := context.WithCancel(context.Background())
	s, err := c.Begin(ctx, 0, []int32{3, 4}, []int32{1, 1})
	if err != nil {
		t.Fatal(err)
	}
	f.settle(c) // both are in flight
	failed := make(chan error)
	go func() {
		_, _, _, err := s.Next(ctx)
		failed <- err
	}()
	cancel()
	if err := <-failed; !errors.Is(err, context.Canceled) {
		t.Fatalf("Next: %v", err)
	}
	ended := make(chan bool)
	go func() {
		s.End()
		close(ended)
	}()
	f.finish(Key{Layer: 0, Expert: 4})
	for f.Stats().Loads < 1 {
		runtime.Gosched()
	}
	select {
	case <-ended:
		t.Fatal("End returned with a read in flight")
	default:
	}
	f.finish(Key{Layer: 0, Expert: 3})
	<-ended
	if _, err := c.Begin(ctx, 0, nil, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("Begin with a cancelled context: %v", err)
	}
	if got := c.Stats(); got.Source.Loads != 2 || got.LoadsDropped != 0 {
		t.Errorf("%+v", got)
	}
}

// Close ends an open step, waits for its reads, gives back what the ledger
// granted, and may be called again.
func TestClose(t *testing.T) {
	el, fl := small(2, 8)
	f := newFake(t, storage.Slab, fl)
	f.pick = func(n int) int { return n - 1 }
	before := runtime.NumGoroutine()
	led := NewLedger(7 * 4096)
	c, err := New(f, Options{Cap: 2, TopK: 3, Layers: el, Ledger: led})
	if err != nil {
		t.Fatal(err)
	}
	if led.Of(LRU) != 4*4096 || led.Of(Staging) != 3*4096 {
		t.Errorf("granted %d and %d bytes", led.Of(LRU), led.Of(Staging))
	}
	if _, err := c.Begin(context.Background(), 1, []int32{0, 1, 2}, []int32{1, 1, 1}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if led.Total() != 0 {
		t.Errorf("%d bytes are still granted", led.Total())
	}
	if got := c.Stats(); got.Source.Loads != 3 {
		t.Errorf("%+v", got)
	}
	if _, err := c.Begin(context.Background(), 1, nil, nil); err == nil {
		t.Error("a closed cache begins a step")
	}
	for runtime.NumGoroutine() > before { // it has said that it ends
		runtime.Gosched()
	}
}

func TestNewRefuses(t *testing.T) {
	el, fl := small(2, 8)
	f := newFake(t, storage.Slab, fl)
	led := NewLedger(6 * 4096)
	for _, tt := range []struct {
		opt  Options
		want string
	}{
		{Options{Cap: 0, TopK: 1, Layers: el}, "cap 0"},
		{Options{Cap: 1, TopK: 0, Layers: el}, "top-k 0"},
		{Options{Cap: 1, TopK: 1}, "no MoE layer"},
		{Options{Cap: 0, TopK: 1}, "cap 0"},
		{Options{Cap: 1, TopK: 0}, "top-k 0"},
		{Options{Cap: 1, TopK: 1, Layers: el, Policy: "mru"}, "no policy \"mru\""},
		{Options{Cap: 1, TopK: 1, Layers: el, Policy: "belady"}, "knows the future"},
		{Options{Cap: 1, TopK: 1, Layers: []ExpertLayer{{Layer: -1, Experts: 4}}}, "layer -1"},
		{Options{Cap: 1, TopK: 1, Layers: []ExpertLayer{{Layer: 0, Experts: 0}}}, "0 experts"},
		{Options{Cap: 1, TopK: 1, Layers: []ExpertLayer{el[0], el[0]}}, "given twice"},
		{Options{Cap: 2, TopK: 3, Layers: el, Ledger: led}, "not enough memory for staging"},
		{Options{Cap: 4, TopK: 3, Layers: el, Ledger: led}, "not enough memory for lru"},
	} {
		if _, err := New(f, tt.opt); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("got %v, want %q", err, tt.want)
		}
	}
	if led.Total() != 0 {
		t.Errorf("a refused cache keeps %d bytes", led.Total())
	}
}

// The cache of a dense model holds nothing, and all that is asked between tokens and
// at the end works.
func TestNoLayers(t *testing.T) {
	f := newFake(t, storage.Slab, nil)
	led := NewLedger(1)
	c, err := New(f, Options{Ledger: led, Prefetch: PrefetchAuto})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Preload(context.Background()); err != nil {
		t.Error(err)
	}
	c.Adapt()
	c.Land()
	c.TakeUses(NewHistory(ModelID{}, nil))
	if st := c.Stats(); st != (Stats{}) || led.Total() != 0 || len(c.Notices()) != 0 {
		t.Errorf("%+v, %d bytes granted", st, led.Total())
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}

// A caller's bug panics, and says which.
func TestMisuse(t *testing.T) {
	el, fl := small(2, 8)
	f := newFake(t, storage.Slab, fl)
	f.pick = func(int) int { return 0 }
	c := open(t, f, Options{Cap: 1, TopK: 1, Layers: el})
	ctx := context.Background()
	one := []int32{1}
	panics := func(want string, fn func()) {
		t.Helper()
		defer func() {
			if r := recover(); r == nil || !strings.Contains(fmt.Sprint(r), want) {
				t.Errorf("got %v, want %q", r, want)
			}
		}()
		fn()
	}
	begin := func(layer int, experts, uses []int32) *Step {
		s, err := c.Begin(ctx, layer, experts, uses)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	panics("layer 2 has no experts", func() { begin(2, one, one) })
	panics("layer -1 has no experts", func() { begin(-1, one, one) })
	panics("expert 8 of a layer of 8", func() { begin(0, []int32{8}, one) })
	panics("expert -1 of a layer of 8", func() { begin(0, []int32{-1}, one) })
	panics("given twice", func() { begin(0, []int32{3, 3}, []int32{1, 1}) })
	clear(c.step.seen) // a program that has panicked is not expected to go on; this one does
	panics("has 0 uses", func() { begin(0, one, []int32{0}) })
	clear(c.step.seen)
	panics("2 uses", func() { begin(0, one, []int32{1, 1}) })

	s := begin(0, []int32{0, 1, 2, 3}, []int32{1, 1, 1, 1})
	panics("Begin before the End", func() { begin(0, one, one) })
	panics("Done(0)", func() { s.Done(0) })
	panics("Done(4)", func() { s.Done(4) })
	for range 3 {
		if _, _, ok, err := s.Next(ctx); !ok {
			t.Fatal(err)
		}
	}
	panics("every slot is held", func() { s.Next(ctx) })
	s.Done(0)
	panics("Done(0)", func() { s.Done(0) })
	if i, _, ok, err := s.Next(ctx); !ok || i != 3 {
		t.Fatal(i, ok, err)
	}
	s.End()
	panics("Done(3)", func() { s.Done(3) })
	if _, _, ok, err := s.Next(ctx); ok || err != nil {
		t.Error("Next after End:", ok, err)
	}
}

// What was read and not Done is fresh, in later steps too: nobody has checked
// it, or somebody has and refused it.
func TestFresh(t *testing.T) {
	el, fl := small(1, 8)
	f := newFake(t, storage.Slab, fl)
	f.pick = func(int) int { return 0 }
	c := open(t, f, Options{Cap: 3, TopK: 3, Layers: el, Policy: "lru"})
	ctx := context.Background()
	// step uses experts 0, 1, 2, says Done of those in done, and returns who was fresh.
	step := func(done ...int) (fresh string) {
		s, err := c.Begin(ctx, 0, []int32{0, 1, 2}, []int32{1, 1, 1})
		if err != nil {
			t.Fatal(err)
		}
		defer s.End()
		for {
			i, _, ok, err := s.Next(ctx)
			if err != nil {
				t.Fatal(err)
			}
			if !ok {
				return fresh
			}
			if s.Fresh(i) {
				fresh += fmt.Sprint(i)
			}
			if slices.Contains(done, i) {
				s.Done(i)
			}
		}
	}
	if s, err := c.Begin(ctx, 0, []int32{0, 1}, []int32{1, 1}); err != nil {
		t.Fatal(err)
	} else {
		s.End() // nobody saw them
	}
	for i, tt := range []struct {
		done []int
		want string
	}{{[]int{0}, "012"}, {[]int{2}, "12"}, {[]int{0, 1, 2}, "1"}, {nil, ""}} {
		if got := step(tt.done...); got != tt.want {
			t.Errorf("step %d: %q are fresh, want %q", i, got, tt.want)
		}
	}
	// Read anew, fresh anew.
	s, err := c.Begin(ctx, 0, []int32{3, 4, 5}, []int32{1, 1, 1})
	if err != nil {
		t.Fatal(err)
	}
	s.End()
	if got := step(); got != "012" {
		t.Errorf("after they left: %q are fresh", got)
	}
}

// Slots are what the ledger announces: whole pages, side by side, resident.
func TestArena(t *testing.T) {
	el, fl := small(3, 8)
	fl[1] = fakeLayer{3 * 2048, 2000}
	c := open(t, newFake(t, storage.Slab, fl), Options{Cap: 2, TopK: 2, Layers: el})
	var sizes []LayerSize
	for _, l := range el {
		sizes = append(sizes, LayerSize{Experts: l.Experts, SlotBytes: c.src.SlotBytes(l.Layer), ExpertBytes: c.src.ExpertBytes(l.Layer)})
	}
	lru, staging := PoolBytes(sizes, 2, 2)
	var n int64
	for _, cl := range c.classes {
		n += int64(len(cl.arena))
		for i := range cl.slots {
			at := int64(i) * cl.size.Bytes
			if at%4096 != 0 || &cl.slots[i].fetch.Slot[0] != &cl.arena[at] || int64(cap(cl.slots[i].fetch.Slot)) != cl.slotBytes {
				t.Errorf("slot %d is not at %d", i, at)
			}
		}
	}
	if n != lru+staging {
		t.Errorf("%d bytes mapped, PoolBytes says %d + %d", n, lru, staging)
	}
}

func TestPoison(t *testing.T) {
	if !invariants.Enabled {
		t.Skip("slots are overwritten with -tags invariants only")
	}
	el, fl := small(1, 8)
	f := newFake(t, storage.Slab, fl)
	f.pick = func(int) int { return 0 }
	c := open(t, f, Options{Cap: 1, TopK: 1, Layers: el})
	s, err := c.Begin(context.Background(), 0, []int32{0, 1}, []int32{1, 1})
	if err != nil {
		t.Fatal(err)
	}
	_, parts, _, _ := s.Next(context.Background())
	view := parts[0]
	s.End()
	for i, b := range view {
		if b != poison {
			t.Fatalf("byte %d of a slot that was let go is %#x", i, b)
		}
	}
}

// instant is a source that has read as soon as it is asked, and allocates
// nothing.
type instant struct {
	mu    sync.Mutex
	queue []*storage.Fetch
	next  int
	stats SourceStats
}

func (s *instant) Mode() Mode            { return storage.Slab }
func (s *instant) SlotBytes(int) int64   { return 4096 }
func (s *instant) ExpertBytes(int) int64 { return 4000 }
func (s *instant) Submit(f []*storage.Fetch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next == len(s.queue) {
		s.queue, s.next = s.queue[:0], 0
	}
	s.queue = append(s.queue, f...)
}

func (s *instant) Reap() *storage.Fetch {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.queue[s.next]
	s.next++
	f.Parts[0] = f.Slot[:4000]
	s.stats.Loads++
	return f
}

func (s *instant) Poll() (*storage.Fetch, bool) {
	s.mu.Lock()
	none := s.next == len(s.queue)
	s.mu.Unlock()
	if none {
		return nil, false
	}
	return s.Reap(), false
}
func (s *instant) Register([][]byte)    {}
func (s *instant) Hurry(*storage.Fetch) {}
func (s *instant) Evict(*storage.Fetch) {}
func (s *instant) Stats() SourceStats   { return s.stats }
func (s *instant) Close() error         { return nil }

// A hit allocates nothing; a load allocates the one entry that simplelru makes
// when the expert enters its list, and nothing under the other policies.
func TestAllocs(t *testing.T) {
	if invariants.Enabled {
		t.Skip("the checks of -tags invariants allocate")
	}
	for _, policy := range Policies() {
		t.Run(policy, func(t *testing.T) { allocs(t, policy) })
	}
}

func allocs(t *testing.T, policy string) {
	const layers, experts, topK = 4, 32, 4
	el, _ := small(layers, experts)
	c, err := New(&instant{}, Options{Cap: 4, TopK: topK, Layers: el, Policy: policy})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	scores := make([]float32, experts)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	keys, uses := make([]int32, topK), make([]int32, topK)
	token := func(first int32) {
		for l := range layers {
			for i := range keys {
				keys[i], uses[i] = (first+int32(i))%experts, 1
				scores[(first+int32(i)+topK)%experts] = float32(first % 7)
			}
			c.Routed(keys, scores)
			s, err := c.Begin(ctx, l, keys, uses)
			if err != nil {
				t.Fatal(err)
			}
			compute(t, s)
		}
	}
	n := int32(0)
	for range 50 {
		token(n)
		n += topK
	}
	before := c.Stats()
	if got := testing.AllocsPerRun(100, func() { token(n) }); got != 0 {
		t.Errorf("a token of hits allocates %v times", got)
	}
	recent := policy == "lru" || policy == "layer"
	if st := c.Stats(); recent && st.Misses-before.Misses > layers*topK {
		t.Fatalf("it was not a token of hits: %+v", st)
	}
	most := 0.0
	if recent {
		most = layers * topK
	}
	before = c.Stats()
	got := testing.AllocsPerRun(100, func() { token(n); n += topK })
	if got > most {
		t.Errorf("a token of at most %d loads allocates %v times", layers*topK, got)
	}
	if st := c.Stats(); st.Source.Loads != st.Misses || st.Misses == before.Misses || recent && st.Misses < before.Misses+100*layers*topK {
		t.Errorf("it was not a token of misses: %+v", st)
	}
	// A batch larger than the slots goes in waves, at the same price.
	all, one := make([]int32, experts), make([]int32, experts)
	for i := range all {
		all[i], one[i] = int32(i), 1
	}
	wave := func() {
		s, err := c.Begin(ctx, 0, all, one)
		if err != nil {
			t.Fatal(err)
		}
		compute(t, s)
	}
	wave()
	if most > 0 {
		most = experts
	}
	if got := testing.AllocsPerRun(100, wave); got > most {
		t.Errorf("a batch of %d experts allocates %v times", experts, got)
	}
}

// LoadWaitNanos is the time in which Next waited, and nothing else.
func TestLoadWait(t *testing.T) {
	el, fl := small(1, 8)
	f := newFake(t, storage.Slab, fl)
	var reads int
	c := open(t, f, Options{Cap: 2, TopK: 2, Layers: el, Now: func() time.Time {
		reads++
		if reads == 1 { // Next starts to wait
			f.finish(Key{Layer: 0, Expert: 5})
		}
		return time.Unix(0, int64(reads)*1000)
	}})
	ctx := context.Background()
	for want := range 2 {
		s, err := c.Begin(ctx, 0, []int32{5}, []int32{1})
		if err != nil {
			t.Fatal(err)
		}
		if want == 0 {
			f.settle(c)
			if i, _, ok, err := s.Next(ctx); !ok || i != 0 {
				t.Fatal(err)
			}
		} else if _, _, ok, _ := s.Next(ctx); !ok {
			t.Fatal("not a hit")
		}
		s.End()
	}
	if got := c.Stats().LoadWaitNanos; got != 1000 || reads != 2 {
		t.Errorf("waited %d ns, %d looks at the clock", got, reads)
	}
}

// What a step of 8 experts costs beside the drive and the arithmetic.
func BenchmarkStep(b *testing.B) {
	for _, misses := range []int32{0, 1, 8} {
		b.Run(fmt.Sprintf("misses=%d", misses), func(b *testing.B) {
			el, _ := small(1, 64)
			c, err := New(&instant{}, Options{Cap: 16, TopK: 8, Layers: el})
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			ctx := context.Background()
			keys, uses := make([]int32, 8), []int32{1, 1, 1, 1, 1, 1, 1, 1}
			first := int32(0)
			for b.Loop() {
				for i := range keys {
					keys[i] = (first + int32(i)) % 64
				}
				first += misses
				s, err := c.Begin(ctx, 0, keys, uses)
				if err != nil {
					b.Fatal(err)
				}
				compute(b, s)
			}
		})
	}
}
