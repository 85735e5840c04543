package tiers

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/internal/invariants"
	"sluice/storage"
)

// Random layers, guesses good and bad, pinned experts, experts in VRAM,
// failures, cancellations and shrinks: whoever asks gets the bytes of the
// expert it asked for, every expert is counted once, and the books stay right.
func TestTiersTogether(t *testing.T) {
	for _, mode := range []Mode{storage.Slab, storage.MMap} {
		for round := range 60 {
			seed := uint64(round) + 1000*uint64(mode)
			t.Run(fmt.Sprintf("%v/seed=%d", mode, seed), func(t *testing.T) { tiersTogether(t, mode, seed) })
		}
	}
}

func tiersTogether(t *testing.T, mode Mode, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 1))
	layers, experts, topK := 2+rng.IntN(3), 3+rng.IntN(10), 1+rng.IntN(3)
	el, fl := small(layers, experts)
	if rng.IntN(2) == 0 {
		fl[0] = fakeLayer{3 * 2048, 2000}
	}
	f := newFake(t, mode, fl)
	finish := rand.New(rand.NewPCG(seed, 2)) // io's
	f.pick = func(n int) int {
		if finish.IntN(2) == 0 {
			runtime.Gosched()
		}
		return finish.IntN(n)
	}
	opt := Options{Cap: 1 + rng.IntN(experts), TopK: topK, Layers: el, Policy: Policies()[rng.IntN(len(Policies()))], Prefetch: []Prefetch{PrefetchOff, PrefetchAuto, PrefetchOn}[rng.IntN(3)],
		KeepHost: rng.IntN(2) == 0, Ledger: NewLedger(0)}
	vram, fixed := map[Key]bool{}, map[Key]bool{}
	for l := range layers {
		for e := range experts {
			k := Key{Layer: int32(l), Expert: int32(e)}
			switch rng.IntN(8) {
			case 0:
				opt.Pinned, fixed[k] = append(opt.Pinned, k), true
			case 1:
				opt.VRAM, vram[k] = append(opt.VRAM, k), true
			}
		}
	}
	opt.Device = &fakeDevice{f: f}
	opt.Ledger.Device(1 << 30)
	c := open(t, f, opt)
	ctx := context.Background()
	if err := c.Preload(ctx); err != nil {
		t.Fatal(err)
	}
	if st := c.Stats(); st.PreloadLoads != int64(len(opt.Pinned)+len(opt.VRAM)) || st.Source.Loads != st.PreloadLoads {
		t.Fatalf("%d pinned and %d in VRAM: %+v", len(opt.Pinned), len(opt.VRAM), st)
	}
	if mode == storage.Slab {
		n := opt.Ledger.Of(LRU) + opt.Ledger.Of(Staging) + opt.Ledger.Of(Pinned)
		for _, cl := range c.classes {
			n -= int64(len(cl.arena) + len(cl.fixedArena))
		}
		if n != 0 {
			t.Fatalf("the ledger has %d bytes more than are mapped: %v", n, opt.Ledger)
		}
	}

	for n := range 120 {
		layer := n % layers
		single := rng.IntN(4) > 0
		ex := rng.Perm(experts)
		if single {
			ex = ex[:topK]
		} else {
			ex = ex[:1+rng.IntN(experts)]
		}
		var keys, uses []int32
		f.mu.Lock()
		clear(f.broken)
		for _, e := range ex {
			keys = append(keys, int32(e))
			uses = append(uses, 1)
			if !single {
				uses[len(uses)-1] += int32(rng.IntN(2))
			}
		}
		if rng.IntN(5) == 0 {
			f.broken[Key{Layer: int32(rng.IntN(layers)), Expert: int32(rng.IntN(experts))}] = true
		}
		f.mu.Unlock()
		step, err := c.Begin(ctx, layer, keys, uses)
		if err != nil {
			t.Fatal(err)
		}
		if step.Guesses() {
			var guess []int32
			for _, e := range rng.Perm(experts)[:rng.IntN(topK+2)%(experts+1)] {
				guess = append(guess, int32(e))
			}
			step.Guess((layer+1)%layers, guess)
		}
		for left := rng.IntN(len(keys) + 3); left > 0; left-- {
			i, parts, ok, err := step.Next(ctx)
			if err != nil {
				if !errors.Is(err, errBroken) {
					t.Fatal(err)
				}
				continue
			}
			if !ok {
				break
			}
			k := Key{Layer: int32(layer), Expert: keys[i]}
			if got := step.InVRAM(i); got != vram[k] {
				t.Fatalf("%v in VRAM: %v", k, got)
			}
			if !vram[k] || opt.KeepHost {
				if err := f.verify(k, parts); err != nil {
					t.Fatal(err)
				}
			}
			step.Fresh(i)
			step.Done(i)
		}
		step.End()
		if rng.IntN(20) == 0 {
			before := c.cap
			c.Shrink(1 + rng.IntN(c.cap))
			if c.cap > before {
				t.Fatalf("cap %d grew to %d", before, c.cap)
			}
			for k := range fixed {
				if where, sl := c.find(k); where != inPinned || f.verify(k, &sl.fetch.Parts) != nil {
					t.Fatalf("%v is not pinned any more", k)
				}
			}
			for _, cl := range c.classes {
				for k, sl := range cl.kept.all() {
					if err := f.verify(k, &sl.fetch.Parts); err != nil {
						t.Fatalf("after a shrink: %v", err)
					}
				}
			}
		}
		c.check()
	}
	c.Land()
	st := c.Stats()
	p := st.Prefetch
	if p.Used+p.Wasted != p.Issued || p.Late > p.Used || p.Right > p.Guessed || p.Missing > p.Guessed {
		t.Errorf("%+v", p)
	}
	if got, want := st.Source.Loads+st.LoadsFailed+st.LoadsDropped, st.Misses+p.Issued-p.Used+st.PreloadLoads; got != want {
		t.Errorf("%d loads, failed and dropped, %d asked for: %+v", got, want, st)
	}
	if opt.Prefetch == PrefetchOff && p != (PrefetchStats{}) {
		t.Errorf("prefetch is off: %+v", p)
	}
}

// Prefetch moves no hit and no miss: the same steps give the same ones with any
// guesses and with none, under a policy that takes no hints.
func TestPrefetchMovesNoHit(t *testing.T) {
	run := func(prefetch Prefetch, seed uint64) Stats {
		el, fl := small(4, 16)
		f := newFake(t, storage.Slab, fl)
		finish := rand.New(rand.NewPCG(seed, 1))
		f.pick = func(n int) int { return finish.IntN(n) }
		c := open(t, f, Options{Cap: 3, TopK: 3, Layers: el, Policy: "lru", Prefetch: prefetch})
		steps, guesses := rand.New(rand.NewPCG(9, 9)), rand.New(rand.NewPCG(seed, 3))
		some := func(rng *rand.Rand) (keys []int32) {
			for _, e := range rng.Perm(16)[:3] {
				keys = append(keys, int32(e))
			}
			return keys
		}
		next := some(steps)
		for n := range 400 {
			keys := next
			next = some(steps)
			guess := next
			if guesses.IntN(4) == 0 {
				guess = some(guesses)
			}
			s, err := c.Begin(context.Background(), n%4, keys, []int32{1, 1, 1})
			if err != nil {
				t.Fatal(err)
			}
			s.Guess((n+1)%4, guess)
			compute(t, s)
			for range steps.IntN(4) {
				c.Look()
			}
		}
		c.Land()
		st := c.Stats()
		if prefetch == PrefetchOn && (st.Prefetch.Used == 0 || st.Prefetch.Wasted == 0) {
			t.Errorf("nothing was read ahead: %+v", st.Prefetch)
		}
		st.Prefetch, st.Source, st.LoadWaitNanos = PrefetchStats{}, SourceStats{}, 0
		return st
	}
	want := run(PrefetchOff, 0)
	for seed := range uint64(4) {
		if got := run(PrefetchOn, seed); got != want {
			t.Errorf("seed %d: %+v, without prefetch %+v", seed, got, want)
		}
	}
}

// A token with guesses, reads ahead and hits of them allocates the entry of the
// recency order of each expert that comes in, and nothing else.
func TestPrefetchAllocs(t *testing.T) {
	if invariants.Enabled {
		t.Skip("the checks of -tags invariants allocate")
	}
	const layers, experts, topK = 4, 32, 4
	el, _ := small(layers, experts)
	c, err := New(&instant{}, Options{Cap: 2, TopK: topK, Layers: el, Policy: "lru", Prefetch: PrefetchOn})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx := context.Background()
	keys, uses := make([]int32, topK), []int32{1, 1, 1, 1}
	first := int32(0)
	token := func() {
		for l := range layers {
			for i := range keys {
				keys[i] = (first + int32(i)) % experts
			}
			s, err := c.Begin(ctx, l, keys, uses)
			if err != nil {
				t.Fatal(err)
			}
			s.Guess((l+1)%layers, keys) // right for the layers of this token
			compute(t, s)
		}
		first += topK
	}
	for range 50 {
		token()
	}
	before := c.Stats()
	got := testing.AllocsPerRun(100, token)
	st := c.Stats()
	if got > layers*topK {
		t.Errorf("a token of %d loads allocates %v times", layers*topK, got)
	}
	if st.Prefetch.Issued-before.Prefetch.Issued < 100 {
		t.Errorf("hardly anything was read ahead: %+v", st.Prefetch)
	}
}

// Close ends everything with reads ahead in flight and in memory.
func TestCloseWithReadsAhead(t *testing.T) {
	el, fl := small(2, 8)
	f := newFake(t, storage.Slab, fl)
	before := runtime.NumGoroutine()
	c, err := New(f, Options{Cap: 2, TopK: 4, Layers: el, Prefetch: PrefetchOn})
	if err != nil {
		t.Fatal(err)
	}
	s, err := c.Begin(context.Background(), 0, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	s.Guess(1, []int32{1, 2, 3, 4})
	f.finish(Key{Layer: 1, Expert: 1})
	f.settle(c)
	c.Look()
	closed := make(chan error, 1)
	go func() { closed <- c.Close() }()
	for done := false; !done; {
		select {
		case err := <-closed:
			if done = true; err != nil {
				t.Fatal(err)
			}
		default:
			f.mu.Lock()
			if len(f.inFlight) > 0 {
				f.end(0)
			}
			f.mu.Unlock()
			runtime.Gosched()
		}
	}
	// The second was on its way once the first had landed; the others were yet to go.
	if st := c.Stats(); st.Prefetch.Issued != 2 || st.Prefetch.Wasted != st.Prefetch.Issued || st.Source.Loads != st.Prefetch.Issued {
		t.Errorf("%+v", st)
	}
	for runtime.NumGoroutine() > before {
		runtime.Gosched()
	}
}

func TestGuessMisuse(t *testing.T) {
	el, fl := small(2, 8)
	c := open(t, newFake(t, storage.Slab, fl), Options{Cap: 2, TopK: 4, Layers: el, Prefetch: PrefetchOn})
	for want, guess := range map[string]func(s *Step){
		"layer 2":  func(s *Step) { s.Guess(2, nil) },
		"layer -1": func(s *Step) { s.Guess(-1, nil) },
		"expert 8": func(s *Step) { s.Guess(1, []int32{8}) },
	} {
		func() {
			s, err := c.Begin(context.Background(), 0, nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if r := recover(); r == nil || !strings.Contains(fmt.Sprint(r), want) {
					t.Errorf("got %v, want %q", r, want)
				}
				c.mu.TryLock()
				c.mu.Unlock()
				s.End()
			}()
			guess(s)
		}()
	}
}

// The words come out of the cache, which sees tokens by their layers.
func TestPrefetchPausesInWords(t *testing.T) {
	el, fl := small(2, 8)
	f := newFake(t, storage.Slab, fl)
	f.pick = func(int) int { return 0 }
	c := open(t, f, Options{Cap: 8, TopK: 2, Layers: el, Prefetch: PrefetchAuto, Now: func() time.Time { return time.Unix(1, 0) }})
	var words []string
	guesses := 0
	for n := range 2 * 400 {
		s, err := c.Begin(context.Background(), n%2, []int32{1, 2}, []int32{1, 1})
		if err != nil {
			t.Fatal(err)
		}
		if s.Guesses() {
			guesses++
			s.Guess((n+1)%2, []int32{1, 2})
		}
		s.End()
		words = append(words, c.Notices()...)
	}
	if len(words) != 1 || !strings.HasPrefix(words[0], "prefetch paused: every expert") {
		t.Errorf("%q", words)
	}
	if guesses == 0 || guesses > 2*200 {
		t.Errorf("%d guesses", guesses)
	}
}

func TestParsePrefetch(t *testing.T) {
	for _, p := range []Prefetch{PrefetchOff, PrefetchAuto, PrefetchOn} {
		if got, err := ParsePrefetch(p.String()); err != nil || got != p {
			t.Errorf("%v: %v, %v", p, got, err)
		}
	}
	if _, err := ParsePrefetch("maybe"); err == nil || !strings.Contains(err.Error(), "off, auto or on") {
		t.Error(err)
	}
}

// A read ahead that nobody asked for has its slot until it lands. A batch that wants
// more slots than there are finds as many, and leaves the same experts in memory,
// whether it lands before the batch or not.
func TestBatchAfterReadAhead(t *testing.T) {
	run := func(before bool) (stay []Key, hits Hits) {
		tries := 1000
		el, fl := small(2, 12)
		f := newFake(t, storage.Slab, fl)
		f.aside = true // nothing lands in Begin by itself
		f.pick = func(int) int { return 0 }
		c := open(t, f, Options{Cap: 3, TopK: 2, Layers: el, Policy: "lru", Prefetch: PrefetchOn})
		begin := func(layer, use int, experts ...int32) *Step {
			uses := make([]int32, len(experts))
			for i := range uses {
				uses[i] = int32(use)
			}
			s, err := c.Begin(context.Background(), layer, experts, uses)
			if err != nil {
				t.Fatal(err)
			}
			return s
		}
		compute(t, begin(0, 1, 4, 5))
		compute(t, begin(1, 1, 10, 11))
		compute(t, begin(0, 1, 6, 7))
		s := begin(0, 1, 6, 7)
		f.mu.Lock()
		f.pick = nil
		f.mu.Unlock()
		s.Guess(1, []int32{0})
		s.End()
		if before {
			f.finish(Key{Layer: 1, Expert: 0})
			f.settle(c)
			c.Look()
		}
		compute(t, begin(0, 1, 6, 7)) // it is not wanted any more
		go func() {                   // what is ahead comes last, if Begin does not wait for it
			for alone := true; alone; {
				f.mu.Lock()
				if tries--; tries == 0 || len(f.inFlight) > 1 {
					f.pick, alone = func(n int) int { return n - 1 }, false
					f.cond.Broadcast()
				}
				f.mu.Unlock()
				runtime.Gosched()
			}
		}()
		compute(t, begin(1, 2, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11))
		c.Land()
		for k := range c.classes[0].kept.all() {
			stay = append(stay, k)
		}
		return stay, c.Stats().Hits
	}
	want, wantHits := run(true)
	if got, hits := run(false); !slices.Equal(got, want) || hits != wantHits {
		t.Errorf("%v stay after %+v; if the read ahead has come before, %v after %+v", got, hits, want, wantHits)
	}
}
