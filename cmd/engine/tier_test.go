package engine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"sluice/internal/invariants"
	"sluice/moe"
	"sluice/storage"
	"sluice/tiers"
)

// A rough is a source whose reads come back late and in any order, some of them
// broken.
type rough struct {
	storage.Source
	rng    *rand.Rand
	fail   int // one of so many reads fails; 0: none
	flying atomic.Int64
	held   []*storage.Fetch
}

func (s *rough) Submit(fetches []*storage.Fetch) {
	s.Source.Submit(fetches)
	s.flying.Add(int64(len(fetches))) // not before: Reap, in its own goroutine, waits for as many of them
}

func (s *rough) Reap() *storage.Fetch {
	for want := 1 + s.rng.IntN(int(s.flying.Load())); len(s.held) < want; {
		s.held = append(s.held, s.Source.Reap())
		if s.rng.IntN(3) == 0 {
			runtime.Gosched()
		}
	}
	i := s.rng.IntN(len(s.held))
	f := s.held[i]
	s.held = slices.Delete(s.held, i, i+1)
	s.flying.Add(-1)
	return f
}

// Poll leaves all to Reap.
func (s *rough) Poll() (*storage.Fetch, bool) { return nil, s.flying.Load() > 0 }

// Stats counts what was given back, not what is held here.
func (s *rough) Stats() storage.SourceStats {
	st := s.Source.Stats()
	for _, f := range s.held {
		if f.Err == nil {
			st.Loads--
			st.LoadBytes -= s.ExpertBytes(int(f.Key.Layer))
		}
	}
	return st
}

// Close of the source is the engine's; what is held here has been reaped.

func openRough(t testing.TB, o Options, seed uint64) (*Engine, *rough) {
	t.Helper()
	p := prepare(t, o)
	s := &rough{rng: rand.New(rand.NewPCG(seed, 77))}
	s.Source = &tap{Source: p.Source, broken: func(storage.Key) error {
		if s.fail > 0 && s.rng.IntN(s.fail) == 0 {
			return errors.New("a loose cable")
		}
		return nil
	}}
	p.Source = s
	return load(t, p), s
}

// sums fails the test unless every routed expert and every load is accounted for.
func sums(t testing.TB, e *Engine) {
	t.Helper()
	e.Cache.Land()
	st, p := e.Cache.Stats(), e.Cache.Stats().Prefetch
	if st.Hits.VRAM+st.Hits.Pinned+st.Hits.LRU+st.Misses != st.RoutedExperts {
		t.Errorf("hits and misses do not sum: %+v", st)
	}
	loads := st.Source.Loads + st.LoadsDropped + st.LoadsFailed
	if st.Misses+p.Issued-p.Used+st.PreloadLoads != loads || p.Used+p.Wasted != p.Issued {
		t.Errorf("loads do not sum: %+v", st)
	}
}

// The bits never depend on what is pinned, read ahead, or taken away meanwhile,
// whatever the drive does; a failed read fails its request and nothing else.
func TestSameBitsInAllTiers(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for _, path := range []string{demo, qwen, glm, gptOSS, llama4} {
		plain := open(t, Options{Path: path, Ctx: 128})
		ids := heldout(t, plain, 60)
		want, _ := allLogits(t, plain, ids)
		vocab := plain.Spec.Vocab
		rounds := 8
		if raceEnabled {
			rounds = 3
		}
		for round := range rounds {
			o := Options{
				Path: path, Ctx: 128,
				Policy:   tiers.Policies()[rng.IntN(len(tiers.Policies()))],
				Cap:      1 + rng.IntN(plain.Spec.Experts),
				Pin:      Budget{Experts: []int{0, 0, 5, 40, 1000}[rng.IntN(5)]},
				Prefetch: tiers.Prefetch(rng.IntN(3)),
				Chunk:    []int{1, 5, 64}[rng.IntN(3)],
				Storage:  modes[rng.IntN(len(modes))],
				Threads:  1 + rng.IntN(2),
			}
			what := fmt.Sprintf("seed %d, round %d: %s, %s, pin %d, prefetch %v", seed, round, options(o), o.Policy, o.Pin.Experts, o.Prefetch)
			e, source := openRough(t, o, rng.Uint64())
			for try := range 3 {
				e.Cache.Land() // nothing looks at the source now
				source.fail = []int{0, 60, 0}[try]
				got := make([]float32, 0, len(want))
				failed := func() error {
					e.Model.Rewind(0)
					for at := 0; at < len(ids); {
						n := 1
						if at == 0 {
							n = min(1+rng.IntN(40), e.Model.Chunk())
						}
						if rng.IntN(20) == 0 {
							e.Cache.Shrink(1 + rng.IntN(e.Cache.Stats().Cap))
						}
						if err := e.Model.Forward(context.Background(), ids[at:at+n]); err != nil {
							return err
						}
						rows := make([]int32, n)
						for i := range rows {
							rows[i] = int32(i)
						}
						got = append(got, make([]float32, n*vocab)...)
						if err := e.Model.Logits(got[len(got)-n*vocab:], rows); err != nil {
							return err
						}
						at += n
					}
					return nil
				}()
				if failed != nil && (source.fail == 0 || !strings.Contains(failed.Error(), "a loose cable")) {
					t.Fatalf("%s: %v", what, failed)
				}
				same(t, what, got, want[:len(got)])
				sums(t, e)
			}
			if t.Failed() {
				return
			}
			if err := e.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// A broken read ahead fails at most the request that asked for it.
func TestBrokenReadAhead(t *testing.T) {
	o := Options{Path: qwen, Cap: 2, Ctx: 128}
	e := open(t, o)
	prompt := heldout(t, e, 20)
	want := generate(t, e, prompt, 12)
	o.Prefetch = tiers.PrefetchOn
	e, source := openTapped(t, o)
	for n := 40; n < 200; n += 7 {
		left := n
		e.Cache.Land() // nothing looks at the tap now
		source.broken = func(k storage.Key) error {
			if left--; left == 0 {
				return errors.New("a loose cable")
			}
			return nil
		}
		e.Model.Rewind(0)
		_, err := moe.Generate(context.Background(), e.Model, greedy(e), generation(e, prompt, 12))
		if err != nil && !strings.Contains(err.Error(), "a loose cable") {
			t.Fatal(err)
		}
		e.Cache.Land()
		source.broken = nil
		if got := generate(t, e, prompt, 12); got.Witness != want.Witness {
			t.Fatalf("after load %d failed: logits %08x, want %08x", n, got.Witness, want.Witness)
		}
	}
	sums(t, e)
}

// The next layer's router on the state of this one names most of what that
// layer then chooses; chance would name top-k of all.
func TestGuess(t *testing.T) {
	for _, path := range []string{demo, qwen, glm, gptOSS, llama4} {
		e := open(t, Options{Path: path, Cap: 4, Ctx: 128, Prefetch: tiers.PrefetchOn})
		generate(t, e, heldout(t, e, 20), 60)
		sums(t, e)
		st := e.Cache.Stats()
		p := st.Prefetch
		if n := int64(59 * (len(e.Spec.Roles) - 1) * e.Spec.TopK); p.Guessed != n {
			t.Errorf("%s: %d experts guessed, want %d", path, p.Guessed, n)
		}
		right, chance := float64(p.Right)/float64(p.Guessed), float64(e.Spec.TopK)/float64(e.Spec.Experts)
		t.Logf("%s: %.1f %% of the guesses are right (chance %.1f %%), %d issued, %d used, %d late", path, 100*right, 100*chance, p.Issued, p.Used, p.Late)
		if right < 1.5*chance {
			t.Errorf("%s: %.1f %% of the guesses are right, by chance %.1f %% were", path, 100*right, 100*chance)
		}
	}
}

// Guesses, reads ahead and the watch over memory allocate nothing in a token.
func TestPrefetchAllocates(t *testing.T) {
	if raceEnabled || invariants.Enabled {
		t.Skip("the checks of this build allocate")
	}
	e := open(t, Options{Path: demo, Ctx: 128, Threads: 1, Prefetch: tiers.PrefetchOn})
	generate(t, e, heldout(t, e, 40), 20)
	at, one := e.Model.Pos()-1, []int32{7}
	step := func() {
		e.Model.Rewind(at)
		if _, err := e.Model.Extend(context.Background(), one); err != nil {
			t.Fatal(err)
		}
	}
	step()
	guessed := e.Cache.Stats().Prefetch.Guessed
	if n := testing.AllocsPerRun(50, step); n != 0 {
		t.Errorf("a token allocates %v times", n)
	}
	if e.Cache.Stats().Prefetch.Guessed == guessed {
		t.Error("nothing was guessed")
	}
}

// Reads ahead, and the checksums of what comes from a slab, allocate nothing either.
func TestReadsAheadAllocate(t *testing.T) {
	if raceEnabled || invariants.Enabled {
		t.Skip("the checks of this build allocate")
	}
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // see TestDecodeAllocates
	gguf, slab := packed(t, demo)
	for _, o := range []Options{
		{Path: gguf, NoSlab: true}, {Path: gguf, NoSlab: true, Storage: storage.Pread},
		{Path: slab}, {Path: slab, Storage: storage.Pread}, {Path: slab, Storage: storage.MMap},
	} {
		o.Ctx, o.Cap, o.Threads, o.Prefetch = 128, 2, 1, tiers.PrefetchOn
		e := open(t, o)
		ids := heldout(t, e, 70)
		generate(t, e, ids[:20], 10)
		from := e.Model.Pos()
		for try := 0; ; try++ { // until the runtime has all the records of waiting that it needs
			if err := e.Model.Rewind(from); err != nil {
				t.Fatal(err)
			}
			before, at := e.Cache.Stats().Prefetch.Used, mallocs()
			for p := from; p < len(ids); p++ {
				if _, err := e.Model.Extend(context.Background(), ids[p:p+1]); err != nil {
					t.Fatal(err)
				}
			}
			made, used := mallocs()-at, e.Cache.Stats().Prefetch.Used-before
			if used < 20 {
				t.Fatalf("%s by %v: only %d reads ahead were used: this tests nothing", o.Path, o.Storage, used)
			}
			if made <= 10 { // far less than one for each token
				break
			}
			if try == 10 {
				t.Fatalf("%s by %v: %d allocations in %d tokens with %d reads ahead", o.Path, o.Storage, made, len(ids)-from, used)
			}
		}
	}
}

// A live history is counted, written, and read again; a frozen one stays; the
// pinned set is what it says; that of another model is refused by name.
func TestHistory(t *testing.T) {
	path := filepath.Join(t.TempDir(), "usage")
	e, source := openTapped(t, Options{Path: qwen, Cap: 4, Ctx: 128, Usage: path})
	if len(source.asked) > 0 {
		t.Error("experts are read before the first token, and none is pinned")
	}
	prompt := heldout(t, e, 30)
	want := generate(t, e, prompt, 10)
	notices, err := e.Finish()
	if err != nil || len(notices) != 1 || !strings.Contains(notices[0], "sha256") {
		t.Fatal(notices, err)
	}
	st := e.Cache.Stats()
	id := tiers.Identify(e.Spec.Arch, e.Spec.Name, e.File, e.Spec.Roles)
	h, hash, err := tiers.ReadHistory(path, id, e.Spec.Roles)
	if err != nil || h.Total() != st.RoutedExperts || !strings.Contains(notices[0], hash) {
		t.Fatalf("%d choices of %d, %s, %v", h.Total(), st.RoutedExperts, notices[0], err)
	}
	generate(t, e, prompt, 10)
	if _, err := e.Finish(); err != nil {
		t.Fatal(err)
	}
	if h, _, err = tiers.ReadHistory(path, id, e.Spec.Roles); err != nil || h.Total() != 2*st.RoutedExperts {
		t.Fatalf("%d choices of %d, %v", h.Total(), 2*st.RoutedExperts, err)
	}
	text := readText(t, path)

	const pinned = 9
	e, source = openTapped(t, Options{Path: qwen, Cap: 2, Ctx: 128, UsageFreeze: path, Pin: Budget{Experts: pinned}})
	asked := slices.Clone(source.asked)
	if len(asked) != pinned {
		t.Fatalf("%d experts are read at the start, %d are pinned", len(asked), pinned)
	}
	least := int64(1) << 60
	for _, k := range asked {
		least = min(least, h.Count(k))
	}
	for _, k := range h.Ranked()[:pinned] {
		if h.Count(k) < least || !slices.Contains(asked, k) {
			t.Errorf("%v with %d choices is not pinned", k, h.Count(k))
		}
	}
	if got := generate(t, e, prompt, 10); got.Witness != want.Witness {
		t.Errorf("with a pinned set: logits %08x, want %08x", got.Witness, want.Witness)
	}
	for _, k := range source.asked[pinned:] {
		if slices.Contains(asked, k) {
			t.Errorf("%v is pinned and read again", k)
		}
	}
	st = e.Cache.Stats()
	if st.PreloadLoads != pinned || st.PreloadBytes != pinned*e.Source.ExpertBytes(e.Spec.Roles[0].Layer) || st.Hits.Pinned == 0 {
		t.Errorf("%+v", st)
	}
	if got := e.Ledger.Of(tiers.Pinned); got != pinned*tiers.SlotSize(e.Source.SlotBytes(e.Spec.Roles[0].Layer)) {
		t.Errorf("%d bytes granted", got)
	}
	sums(t, e)
	if _, err := e.Finish(); err != nil || readText(t, path) != text {
		t.Errorf("a frozen history was written, %v", err)
	}

	for _, o := range []Options{{Path: glm, Usage: path}, {Path: glm, UsageFreeze: path}} {
		_, err := Prepare(o)
		var other *tiers.HistoryError
		if !errors.As(err, &other) || !strings.Contains(err.Error(), "qwen3moe") || !strings.Contains(err.Error(), "glm4moe") {
			t.Errorf("the history of another model: %v", err)
		}
	}
	if _, err := Prepare(Options{Path: qwen, UsageFreeze: path + ".none"}); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}

// What was asked for and what can be had, in words.
func TestMemoryInWords(t *testing.T) {
	p := prepare(t, Options{Path: qwen, Ctx: 128})
	all := len(p.Spec.Roles) * p.Spec.Experts
	free := p.Cap.Peak
	p.Close()
	for _, tt := range []struct {
		o     Options
		words string // of a notice; "" for none
		cap   int
		pins  int
	}{
		{Options{}, "", 16, 0},
		{Options{Pin: Budget{Experts: 5}}, "pin: 5 experts, 0.0 GB", 16, 5},
		{Options{Pin: Budget{Experts: 1e6}}, fmt.Sprintf("pin lowered 1000000 -> %d (that is all %d experts", all, all), 16, all},
		{Options{Pin: Budget{Bytes: 1 << 40}}, fmt.Sprintf("pin lowered 1099.5 GB -> %d (that is all %d experts", all, all), 16, all},
		{Options{Pin: Budget{Bytes: 100_000}}, "pin: ", 16, 100_000 / int(tiers.SlotSize(p.Source.SlotBytes(p.Spec.Roles[0].Layer)))},
		{Options{Cap: 300}, "cap lowered 300 -> 16 (the model has 16 experts per layer)", 16, 0},
	} {
		tt.o.Path, tt.o.Ctx = qwen, 128
		p := prepare(t, tt.o)
		told := strings.Join(p.Notices, "; ")
		if tt.words == "" && told != "" || !strings.Contains(told, tt.words) || p.Cap.Cap != tt.cap || len(p.Pinned) != tt.pins {
			t.Errorf("%+v: %q, cap %d, %d pinned; want %q, %d, %d", tt.o, told, p.Cap.Cap, len(p.Pinned), tt.words, tt.cap, tt.pins)
		}
		p.Close()
	}
	// A bound on the resident set lowers the cap, and in the end is refused; the
	// base moves a little from plan to plan.
	slack := int64(4 << 20)
	p = prepare(t, Options{Path: demo, Ctx: 128, Cap: 32})
	at32, expert := p.Cap.Peak, p.Source.ExpertBytes(p.Spec.Roles[0].Layer)
	p.Close()
	p = prepare(t, Options{Path: demo, Ctx: 128, Cap: 32, RAM: at32 - 100*expert})
	if p.Cap.Cap >= 32 || p.Cap.Peak > at32-100*expert || len(p.Notices) != 1 || !strings.HasPrefix(p.Notices[0], "cap lowered 32 -> ") {
		t.Errorf("cap %d, peak %d of %d: %q", p.Cap.Cap, p.Cap.Peak, at32-100*expert, p.Notices)
	}
	// Of what is pinned, that for which there is no room is left out.
	one := tiers.SlotSize(p.Source.SlotBytes(p.Spec.Roles[0].Layer))
	p.Close()
	p = prepare(t, Options{Path: demo, Ctx: 128, RAM: at32 - 100*one, Pin: Budget{Experts: 1000}})
	if n := len(p.Pinned); n == 0 || n > 192-100+int(slack/one) || p.Cap.Cap < 1 || !strings.Contains(strings.Join(p.Notices, "; "), fmt.Sprintf("-> %d (there is no memory for more beside cap 1)", n)) {
		t.Errorf("%d pinned, cap %d: %q", n, p.Cap.Cap, p.Notices)
	}
	p.Close()
	var none *tiers.NoRoomError
	if _, err := Prepare(Options{Path: demo, Ctx: 128, RAM: free / 100}); !errors.As(err, &none) {
		t.Errorf("a hundredth of what is needed: %v", err)
	}
	var no *RefusedError
	if _, err := Prepare(Options{Path: demo, Ctx: 128, RAM: 1 << 50}); !errors.As(err, &no) || !strings.Contains(err.Error(), "--ram 1125899.9 GB is more than the ") {
		t.Error(err)
	}
	if p, err := Prepare(Options{Path: demo, VRAM: Budget{Experts: 3}}); err == nil {
		p.Close() // there is a GPU
	} else if !errors.As(err, &no) || !strings.HasPrefix(err.Error(), "--vram 3: ") {
		t.Error(err)
	}
	p = prepare(t, Options{Path: demo, Ctx: 128, RAM: 1 << 50, VRAM: Budget{Experts: 3}, PlanOnly: true})
	var three int64
	for _, r := range p.Spec.Roles[:3] {
		three += p.Source.ExpertBytes(r.Layer)
	}
	if len(p.VRAM) != 3 || p.VRAMBytes != three || !strings.Contains(strings.Join(p.Notices, "; "), "--ram 1125899.9 GB is more than") {
		t.Errorf("%d in VRAM, %d bytes: %q", len(p.VRAM), p.VRAMBytes, p.Notices)
	}
	p.Close()
	if _, err := Prepare(Options{Path: demo, Memory: tiers.Memory{Root: t.TempDir()}}); err == nil {
		t.Error("memory that nobody can read of is planned")
	}
}

// What is scarce while the model runs lowers the cap between two tokens, in
// words, and the settings say so.
func TestCapUnderPressure(t *testing.T) {
	root := t.TempDir()
	available := func(kib int) {
		if err := os.MkdirAll(filepath.Join(root, "proc"), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, "proc/meminfo"), []byte(fmt.Sprintf("MemAvailable: %d kB\n", kib)), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	available(8 << 20)
	p := prepare(t, Options{Path: demo, Ctx: 128, Cap: 16, Memory: tiers.Memory{Root: root}})
	available(1) // before the first look
	e := load(t, p)
	prompt := heldout(t, e, 30)
	want := generate(t, open(t, Options{Path: demo, Ctx: 128}), prompt, 10)
	for e.Cache.Stats().CapChanges == 0 {
		if got := generate(t, e, prompt, 10); got.Witness != want.Witness {
			t.Fatalf("logits %08x, want %08x", got.Witness, want.Witness)
		}
	}
	notices, err := e.Finish()
	if err != nil || len(notices) == 0 || notices[0] != "cap lowered 16 -> 1 (memory pressure: available 0.0 GB)" {
		t.Errorf("%q, %v", notices, err)
	}
	if s := e.Settings.Map()["cap"]; s.Value != 1 || s.Requested != 16 {
		t.Errorf("%+v", s)
	}
}

// A plan's table and its drive.
func TestForecast(t *testing.T) {
	for _, mode := range modes {
		p := prepare(t, Options{Path: demo, Ctx: 128, Cap: 8, Storage: mode, PlanOnly: true})
		cold := p.BytesPerToken()
		var want int64
		for _, r := range p.Spec.Roles {
			for _, name := range r.Parts {
				x, _ := p.File.Tensor(name)
				want += x.Bytes * int64(p.Spec.TopK) / int64(r.Experts)
			}
		}
		if cold != want {
			t.Errorf("%d bytes per token, want %d", cold, want)
		}
		rows := p.Forecast(1e9)
		if len(rows) != 7 || rows[0].BytesPerToken != cold || rows[2].BytesPerToken != cold/2 || rows[6].HitPercent != 99 ||
			rows[0].TokensPerSec != 1e9/float64(cold) {
			t.Errorf("%+v", rows)
		}
		if got := p.Held(); got != 0.25 {
			t.Errorf("%v of the experts are in memory, want a quarter", got)
		}
		if rate, err := p.DriveRate(); err != nil || rate <= 0 {
			t.Errorf("%v: %v, %v", mode, rate, err)
		}
		if n := p.Ledger.Total() + p.Cap.LRU + p.Cap.Staging; n != p.Cap.Peak {
			t.Errorf("%v: %d bytes in the ledger, %d at the peak", mode, n, p.Cap.Peak)
		}
		p.Close()
	}
}

// Nothing runs on when an engine is closed, with all that it can have.
func TestNothingRunsOn(t *testing.T) {
	before := runtime.NumGoroutine()
	for range 3 {
		e := load(t, prepare(t, Options{Path: qwen, Cap: 2, Ctx: 128, Threads: 2, Prefetch: tiers.PrefetchOn, Pin: Budget{Experts: 4}}))
		generate(t, e, heldout(t, e, 10), 10)
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
	}
	for deadline := 0; runtime.NumGoroutine() > before; deadline++ {
		if deadline > 1e7 {
			t.Fatalf("%d goroutines, %d before", runtime.NumGoroutine(), before)
		}
		runtime.Gosched()
	}
}

// What is announced when all is loaded is what the process takes from then on,
// to 5 %, beside a few megabytes of the Go heap: nothing grows with the prompt or
// the text.
func TestAnnouncedHolds(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector's own memory grows")
	}
	const heap = 8 << 20
	e := open(t, Options{Path: demo, Cap: 8, Prefetch: tiers.PrefetchOn})
	generate(t, e, heldout(t, e, 1500), 60)
	usage, err := tiers.Memory{}.Usage()
	if err != nil {
		t.Fatal(err)
	}
	if grown := usage.RSS - e.Announced; grown > e.Announced/20+heap {
		t.Errorf("%d bytes are announced, %d more are taken", e.Announced, grown)
	}
	if n := e.Ledger.Total() - e.Announced; max(n, -n) > e.Announced/20+heap {
		t.Errorf("the ledger has %d bytes, %d are resident", e.Ledger.Total(), e.Announced)
	}
}
