package tiers

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"sluice/storage"
)

// A use is one step of a script that several caches are run through.
type use struct {
	layer     int
	ids       []int32 // [positions, top-k]
	scores    []float32
	guess     []int32 // of the next layer
	rejected  []int32 // afterwards, by drafts
	shrink    int     // afterwards, to this cap; 0: not
	unordered bool    // Routed is not called
}

// texts make steps whose experts repeat: popular ones, and runs.
func makeUses(rng *rand.Rand, layers, experts, topK, tokens int, batches, drafts bool) (all []use) {
	popular := rng.Perm(experts)
	draw := func() int32 { return int32(popular[min(rng.IntN(experts), rng.IntN(experts), rng.IntN(experts))]) }
	for range tokens {
		positions := 1
		if batches && rng.IntN(8) == 0 {
			positions = 2 + rng.IntN(12)
		}
		shrink := rng.IntN(40)
		for l := range layers {
			u := use{layer: l}
			for range positions {
				for from := len(u.ids); len(u.ids) < from+topK; {
					if e := draw(); !slices.Contains(u.ids[from:], e) {
						u.ids = append(u.ids, e)
					}
				}
			}
			u.unordered = rng.IntN(8) == 0
			if positions == 1 {
				for range experts {
					u.scores = append(u.scores, rng.Float32())
				}
				for range topK {
					if e := draw(); !slices.Contains(u.guess, e) {
						u.guess = append(u.guess, e)
					}
				}
			} else if drafts && rng.IntN(2) == 0 {
				u.rejected = u.ids[topK*(positions-1):]
			}
			if shrink == 0 && l == layers-1 {
				u.shrink = 1 + rng.IntN(experts)
			}
			all = append(all, u)
		}
	}
	return all
}

// runUses runs the steps, and says what came of them.
func runUses(t *testing.T, c *Cache, all []use) Stats {
	t.Helper()
	ctx := context.Background()
	if err := c.Preload(ctx); err != nil {
		t.Fatal(err)
	}
	for _, u := range all {
		var distinct, uses []int32
		for _, e := range u.ids {
			if i := slices.Index(distinct, e); i >= 0 {
				uses[i]++
			} else {
				distinct, uses = append(distinct, e), append(uses, 1)
			}
		}
		if !u.unordered {
			c.Routed(u.ids, u.scores)
		}
		s, err := c.Begin(ctx, u.layer, distinct, uses)
		if err != nil {
			t.Fatal(err)
		}
		if s.Guesses() {
			s.Guess((u.layer+1)%len(c.layers), u.guess)
		}
		compute(t, s)
		if u.rejected != nil {
			c.Rejected(u.layer, u.rejected)
		}
		if u.shrink > 0 && u.shrink < c.cap {
			c.Shrink(u.shrink)
		}
	}
	c.Land()
	return c.Stats()
}

// The marginal hits of a tier are the loads that the same steps need more without
// it, to the last one: under every policy, with prompts in waves, drafts that are
// rejected, prefetch, and a cap that falls.
func TestMarginalHitsAreTheDifference(t *testing.T) {
	for _, policy := range Policies() {
		for seed := range uint64(12) {
			t.Run(fmt.Sprintf("%s/seed=%d", policy, seed), func(t *testing.T) { marginal(t, policy, seed) })
		}
	}
}

func marginal(t *testing.T, policy string, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 17))
	layers, experts, topK := 2+rng.IntN(3), 6+rng.IntN(20), 1+rng.IntN(4)
	limit, prefetch := 1+rng.IntN(experts), PrefetchOff
	if seed%3 == 0 {
		// Reads ahead take staging slots. So that a step does not want for them it is of
		// one position, and all experts do not nearly fit.
		experts, limit, prefetch = 50, 1+rng.IntN(10), PrefetchOn
	}
	el, fl := small(layers, experts)
	fl[0] = fakeLayer{3 * 1024, 300} // a class of its own
	opt := Options{Cap: limit, Prefetch: prefetch, TopK: topK, Layers: el, Policy: policy, FixVRAM: true,
		History: func(k Key) float64 { return float64(k.Expert%5) / 8 }}
	for l := range layers {
		for e := range experts {
			k := Key{Layer: int32(l), Expert: int32(e)}
			switch rng.IntN(5) {
			case 0:
				opt.Pinned = append(opt.Pinned, k)
			case 1:
				opt.VRAM = append(opt.VRAM, k)
			}
		}
	}
	script := makeUses(rng, layers, experts, topK, 60, prefetch == PrefetchOff, seed%3 == 1)
	run := func(o Options) Stats {
		f := newFake(t, []Mode{storage.Slab, storage.MMap}[seed%2], fl)
		f.pick = func(n int) int { return 0 }
		o.Device = &fakeDevice{f: f}
		return runUses(t, open(t, f, o), script)
	}
	st := run(opt)
	without := func(change func(*Options)) int64 {
		o := opt
		change(&o)
		return run(o).Misses - st.Misses
	}
	if want := without(func(o *Options) { o.VRAM = nil }); st.Marginal.VRAM != want {
		t.Errorf("marginal hits of VRAM %d, without it there are %d misses more: %+v", st.Marginal.VRAM, want, st)
	}
	if want := without(func(o *Options) { o.Pinned = nil }); st.Marginal.Pinned != want {
		t.Errorf("marginal hits of the pinned set %d, without it there are %d misses more: %+v", st.Marginal.Pinned, want, st)
	}
	bounds(t, policy, st)

	// What is in RAM too costs no load when VRAM is not there.
	o := opt
	o.KeepHost = true
	if st := run(o); st.Marginal.VRAM != 0 || st.Avoided.VRAM == 0 && len(o.VRAM) > layers {
		t.Errorf("with copies in RAM: %+v", st)
	}
	o = opt
	o.VRAM, o.Pinned = nil, nil
	if st := run(o); st.Marginal.VRAM != 0 || st.Marginal.Pinned != 0 {
		t.Errorf("of tiers that are not there: %+v", st)
	}
}

// bounds holds what is true of every run.
func bounds(t *testing.T, policy string, st Stats) {
	t.Helper()
	if st.Marginal.LRU != st.Avoided.LRU {
		t.Errorf("without the pool all that it served is loaded: marginal %d, avoided %d", st.Marginal.LRU, st.Avoided.LRU)
	}
	for _, x := range []struct {
		name              string
		marginal, avoided int64
	}{{"vram", st.Marginal.VRAM, st.Avoided.VRAM}, {"pinned", st.Marginal.Pinned, st.Avoided.Pinned}} {
		if x.marginal > x.avoided+st.Avoided.LRU {
			t.Errorf("%s: %d marginal hits; it and the pool served %d and %d", x.name, x.marginal, x.avoided, st.Avoided.LRU)
		}
		if policy == "lru" && x.marginal < 0 { // a pool that keeps the latest has no use for more to keep
			t.Errorf("%s: %d marginal hits under lru", x.name, x.marginal)
		}
	}
}

// VRAM follows what is used, and the shadows follow it: their books stay whole,
// and no expert of VRAM is in the shadow of the pinned set.
func TestShadowsFollowSwaps(t *testing.T) {
	for seed := range uint64(6) {
		rng := rand.New(rand.NewPCG(seed, 23))
		const layers, experts, topK = 3, 16, 2
		el, fl := small(layers, experts)
		f := newFake(t, storage.Slab, fl)
		f.pick = func(n int) int { return 0 }
		opt := Options{Cap: 3, TopK: topK, Layers: el, Policy: Policies()[int(seed)%len(Policies())], Device: &fakeDevice{f: f}}
		for l := range layers {
			for e := range 6 {
				k := Key{Layer: int32(l), Expert: int32(e)}
				if e < 3 {
					opt.VRAM = append(opt.VRAM, k)
				} else {
					opt.Pinned = append(opt.Pinned, k)
				}
			}
		}
		c := open(t, f, opt)
		st := runUses(t, c, makeUses(rng, layers, experts, topK, 6*swapEvery, false, false))
		if st.VRAMSwaps == 0 {
			t.Fatalf("seed %d: no swap: %+v", seed, st)
		}
		bounds(t, opt.Policy, st)
		for _, w := range c.classes[0].kept.shadows {
			b, n := booksOf(w.policy), 0
			for l, here := range w.here {
				for e, in := range here {
					if !in {
						continue
					}
					n++
					if k := (Key{Layer: int32(l), Expert: int32(e)}); !b.resident[b.number(k)] || w.apart(&c.layers[l], k.Expert) {
						t.Errorf("seed %d: %v is in the shadow without tier %d", seed, k, w.tier)
					}
				}
			}
			if n != w.n || int64(n) != b.bytes || n > w.keep {
				t.Errorf("seed %d: %d experts, %d counted, %d by the policy, %d to keep", seed, n, w.n, b.bytes, w.keep)
			}
		}
	}
}

// More of a tier that serves what RAM would have held takes over the work of RAM
// in part: its marginal hits grow by less than the loads that it avoids, and by
// no more than the loads become fewer.
func TestMarginalHitsOfMoreVRAM(t *testing.T) {
	const layers, experts, topK = 6, 64, 4
	var last Stats
	for i, n := range []int{0, 4, 8, 16} {
		rng := rand.New(rand.NewPCG(5, 29))
		script := makeUses(rng, layers, experts, topK, 150, false, false)
		count := map[Key]int{}
		for _, u := range script {
			for _, e := range u.ids {
				count[Key{Layer: int32(u.layer), Expert: e}]++
			}
		}
		el, fl := small(layers, experts)
		f := newFake(t, storage.Slab, fl)
		f.pick = func(n int) int { return 0 }
		opt := Options{Cap: 16, TopK: topK, Layers: el, Policy: "lru", FixVRAM: true, Device: &fakeDevice{f: f}}
		for l := range layers { // the most used
			keys := make([]Key, experts)
			for e := range keys {
				keys[e] = Key{Layer: int32(l), Expert: int32(e)}
			}
			slices.SortFunc(keys, func(a, b Key) int { return count[b] - count[a] })
			opt.VRAM = append(opt.VRAM, keys[:n]...)
		}
		st := runUses(t, open(t, f, opt), script)
		if i > 0 {
			avoided, marginal, fewer := st.Avoided.VRAM-last.Avoided.VRAM, st.Marginal.VRAM-last.Marginal.VRAM, last.Misses-st.Misses
			if !(0 < marginal && marginal < avoided) || marginal != fewer {
				t.Errorf("%d experts a layer in VRAM: %d loads avoided more, %d marginal hits more, %d loads fewer", n, avoided, marginal, fewer)
			}
		}
		last = st
	}
}
