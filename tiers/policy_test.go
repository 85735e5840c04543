package tiers

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"

	"sluice/internal/invariants"
	"sluice/storage"
)

// A naive policy tells the rules a second time, with plain scans.
type naive struct {
	rule     string
	layers   []PolicyLayer
	budget   int64
	clock    int
	layer    int
	batch    map[Key]bool
	resident map[Key]bool
	last     map[Key]int
	count    map[Key]int
}

func newNaive(rule string, c PolicyConfig) *naive {
	return &naive{rule: rule, layers: c.Layers, budget: c.Budget, batch: map[Key]bool{}, resident: map[Key]bool{}, last: map[Key]int{}, count: map[Key]int{}}
}

func (n *naive) use(k Key) {
	n.clock++
	n.last[k] = n.clock
	if !n.batch[k] {
		n.count[k]++
	}
	n.batch[k], n.resident[k] = true, true
}

func (n *naive) bytes(layer int) (sum int64) {
	for k := range n.resident {
		if layer < 0 || int(k.Layer) == layer {
			sum += n.layers[k.Layer].Bytes
		}
	}
	return sum
}

func (n *naive) slice() int64 {
	moe := int64(0)
	for _, l := range n.layers {
		if l.Experts > 0 {
			moe++
		}
	}
	return n.budget / moe
}

// victim is the first to leave of one layer, or of all.
func (n *naive) victim(layer int) (best Key, ok bool) {
	for k := range n.resident {
		if n.batch[k] || layer >= 0 && int(k.Layer) != layer {
			continue
		}
		before := cmp.Compare(n.last[k], n.last[best])
		if strings.HasSuffix(n.rule, "lfu") {
			before = cmp.Or(cmp.Compare(n.count[k], n.count[best]), before)
		}
		before = cmp.Or(before, cmp.Compare(k.Layer, best.Layer), cmp.Compare(k.Expert, best.Expert))
		if !ok || before < 0 {
			best, ok = k, true
		}
	}
	return best, ok
}

func (n *naive) over() (Key, bool) {
	if strings.HasPrefix(n.rule, "layer") {
		if n.bytes(n.layer) <= n.slice() {
			return Key{}, false
		}
		return n.victim(n.layer)
	}
	if n.bytes(-1) <= n.budget {
		return Key{}, false
	}
	return n.victim(-1)
}

// operation is what a policy is told; choose draws them.
type operation struct {
	begin     bool
	end       bool
	layer     int
	positions int
	use       []Key
	pos       []int
	resize    int64
}

func randomOperations(rng *rand.Rand, c PolicyConfig, n int) (ops []operation) {
	key := func(layer int) Key {
		e := rng.IntN(c.Layers[layer].Experts)
		return Key{Layer: int32(layer), Expert: int32(min(e, rng.IntN(c.Layers[layer].Experts)))} // the lower the more often
	}
	anyLayer := func() int {
		for {
			if l := rng.IntN(len(c.Layers)); c.Layers[l].Experts > 0 {
				return l
			}
		}
	}
	for i := range n {
		o := operation{begin: true, layer: i % len(c.Layers), positions: 1}
		if c.Layers[o.layer].Experts == 0 {
			o.layer = anyLayer()
		}
		if rng.IntN(10) == 0 {
			o.positions = 1 + rng.IntN(6)
		}
		for p := range o.positions {
			for range 1 + rng.IntN(3) {
				o.use, o.pos = append(o.use, key(o.layer)), append(o.pos, p)
			}
		}
		if rng.IntN(25) == 0 {
			o.resize = 1 + rng.Int64N(c.Budget)
		}
		o.end = rng.IntN(3) == 0
		ops = append(ops, o)
	}
	return ops
}

func randomConfig(rng *rand.Rand) PolicyConfig {
	c := PolicyConfig{Layers: make([]PolicyLayer, 1+rng.IntN(5))}
	all := int64(0)
	for l := range c.Layers {
		if l > 0 && rng.IntN(6) == 0 {
			continue // a dense layer
		}
		c.Layers[l] = PolicyLayer{Experts: 1 + rng.IntN(12), Bytes: 1 + rng.Int64N(3)}
		all += int64(c.Layers[l].Experts) * c.Layers[l].Bytes
	}
	c.Budget = 1 + rng.Int64N(all)
	return c
}

// apply runs one operation. While the policy is over its budget its victims
// leave, each of which check sees before.
func (o *operation) apply(p Policy, check func(k Key)) {
	p.Begin(o.layer, o.positions)
	for i, k := range o.use {
		p.Use(k, o.pos[i])
	}
	if o.resize > 0 {
		p.Resize(o.resize)
	}
	if o.end {
		p.End()
	}
	for p.Over() {
		k, ok := p.Victim()
		if !ok {
			return
		}
		check(k)
		p.Remove(k)
	}
}

// Random batches and changes of the budget give the victims that
// plain scans give.
func TestAgainstNaivePolicies(t *testing.T) {
	for _, rule := range []string{"lru", "lfu", "layer", "layerlfu"} {
		for seed := range uint64(60) {
			t.Run(fmt.Sprintf("%s/seed=%d", rule, seed), func(t *testing.T) {
				rng := rand.New(rand.NewPCG(seed, 3))
				c := randomConfig(rng)
				p, err := NewPolicy(rule, c)
				if err != nil {
					t.Fatal(err)
				}
				n := newNaive(rule, c)
				for i, o := range randomOperations(rng, c, 150) {
					clear(n.batch)
					n.layer = o.layer
					for _, k := range o.use {
						n.use(k)
					}
					if o.resize > 0 {
						n.budget = o.resize
					}
					if o.end {
						clear(n.batch)
					}
					o.apply(p, func(k Key) {
						if want, ok := n.over(); !ok || k != want {
							t.Fatalf("operation %d: %v leaves, want %v (%v)", i, k, want, ok)
						}
						delete(n.resident, k)
					})
					if k, ok := n.over(); ok {
						t.Fatalf("operation %d: nobody leaves, want %v", i, k)
					}
				}
			})
		}
	}
}

// Whatever comes, a policy keeps to its budget but for what the batch holds, gives up only what is resident and
// not in use, and decides the same again.
func TestPolicyInvariants(t *testing.T) {
	for _, rule := range Policies() {
		for seed := range uint64(30) {
			t.Run(fmt.Sprintf("%s/seed=%d", rule, seed), func(t *testing.T) {
				c := randomConfig(rand.New(rand.NewPCG(seed, 4)))
				first := victims(t, rule, c, seed)
				if again := victims(t, rule, c, seed); !slices.Equal(first, again) {
					t.Errorf("the same operations: %v, then %v", first, again)
				}
			})
		}
	}
}

func victims(t *testing.T, rule string, c PolicyConfig, seed uint64) (left []Key) {
	p, err := NewPolicy(rule, c)
	if err != nil {
		t.Fatal(err)
	}
	resident := map[Key]bool{}
	budget := c.Budget
	rng := rand.New(rand.NewPCG(seed, 5))
	for i, o := range randomOperations(rng, c, 150) {
		batch := map[Key]bool{}
		for _, k := range o.use {
			batch[k], resident[k] = true, true
		}
		if o.resize > 0 {
			budget = o.resize
		}
		if h, ok := p.(Hinted); ok && rng.IntN(2) == 0 {
			layer := slices.IndexFunc(c.Layers, func(l PolicyLayer) bool { return l.Experts > 0 })
			h.Predict(layer, []int32{int32(rng.IntN(c.Layers[layer].Experts)), 0})
			o.end = o.end || rng.IntN(2) == 0
		}
		o.apply(p, func(k Key) {
			if !resident[k] || batch[k] && !o.end {
				t.Fatalf("operation %d: %v leaves, resident %v, in use %v", i, k, resident[k], batch[k])
			}
			left = append(left, k)
			delete(resident, k)
		})
		if h, ok := p.(Hinted); ok {
			scores := make([]float32, c.Layers[o.layer].Experts)
			for e := range scores {
				scores[e] = rng.Float32()
			}
			h.Scores(scores)
		}
		sum, idle := int64(0), 0
		for k := range resident {
			sum += c.Layers[k.Layer].Bytes
			if !batch[k] || o.end {
				idle++
			}
		}
		if !strings.HasPrefix(rule, "layer") || rule == DefaultPolicy { // slices are held layer by layer
			if sum > budget && idle > 0 {
				t.Fatalf("operation %d: %d bytes in a budget of %d, %d experts are not in use", i, sum, budget, idle)
			}
		}
	}
	return left
}

// A ranking is a sorted list, whatever is set, moved and taken out.
func TestRanking(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 6))
	const n = 40
	r := newRanking(n)
	want := map[int32]rank{}
	for range 5000 {
		i := int32(rng.IntN(n))
		switch rng.IntN(4) {
		case 0:
			r.remove(i)
			delete(want, i)
		case 1: // all ranks change
			for j := range r.heap {
				to := rank{float64(rng.IntN(5)), uint64(rng.IntN(3))}
				r.heap[j].rank, want[r.heap[j].i] = to, to
			}
			r.sort()
		default:
			to := rank{float64(rng.IntN(5)), uint64(rng.IntN(3))}
			r.set(i, to)
			want[i] = to
		}
		var low ranked
		found := false
		for j, to := range want {
			if x := (ranked{to, j}); !found || x.less(low) {
				low, found = x, true
			}
		}
		if got, ok := r.first(); ok != found || got != low {
			t.Fatalf("first is %v (%v), want %v (%v)", got, ok, low, found)
		}
		for j := range int32(n) {
			if _, ok := want[j]; ok != r.has(j) {
				t.Fatalf("has(%d) is %v", j, r.has(j))
			}
		}
	}
}

// alike is a model of equal layers, sizes counted in experts.
func alike(layers, experts int, budget int64) PolicyConfig {
	c := PolicyConfig{Budget: budget}
	for range layers {
		c.Layers = append(c.Layers, PolicyLayer{Experts: experts, Bytes: 1})
	}
	return c
}

// tokens decodes: every layer uses the same experts for n tokens, and evicts.
func tokens(p Policy, layers, n int, use func(token, layer int) []int32, hint func(token, layer int)) {
	for token := range n {
		for l := range layers {
			p.Begin(l, 1)
			for _, e := range use(token, l) {
				p.Use(Key{Layer: int32(l), Expert: e}, 0)
			}
			if hint != nil {
				hint(token, l)
			}
			for p.Over() {
				k, ok := p.Victim()
				if !ok {
					break
				}
				p.Remove(k)
			}
		}
	}
}

// Below one token cycle, where lru keeps nothing that is of use, layer-aware
// keeps what it can: the same experts again and again hit.
func TestLayerAwareBelowOneCycle(t *testing.T) {
	const layers, topK, budget = 10, 2, 8
	for _, name := range []string{"lru", DefaultPolicy} {
		p, err := NewPolicy(name, alike(layers, 16, budget))
		if err != nil {
			t.Fatal(err)
		}
		hits := 0
		resident := func(k Key) bool {
			switch p := p.(type) {
			case *shared:
				return p.resident[p.number(k)]
			case *layerAware:
				return p.resident[p.number(k)]
			}
			return false
		}
		tokens(p, layers, 50, func(_, l int) []int32 {
			for _, e := range []int32{3, 5} {
				if resident(Key{Layer: int32(l), Expert: e}) {
					hits++
				}
			}
			return []int32{3, 5}
		}, nil)
		// At least what does not fit with the batch in flight stays: budget - top-k.
		if want := 49 * (budget - topK); name == DefaultPolicy && hits < want {
			t.Errorf("%s: %d hits, want %d", name, hits, want)
		} else if name == "lru" && hits != 0 {
			t.Errorf("lru: %d hits", hits)
		}
	}
}

// Each hint speaks for its experts: of two that are otherwise alike the one
// that is hinted stays.
func TestHints(t *testing.T) {
	const layers, experts = 3, 8
	use := func(int, int) []int32 { return []int32{0} }
	both := func(p Policy) { // experts 6 and 7 of layer 1 are there, from a prompt long ago
		p.Begin(1, 2)
		p.Use(Key{Layer: 1, Expert: 6}, 0)
		p.Use(Key{Layer: 1, Expert: 7}, 0)
	}
	open := func(history func(Key) float64) *layerAware {
		c := alike(layers, experts, 100)
		c.History = history
		p, err := NewPolicy("", c)
		if err != nil {
			t.Fatal(err)
		}
		return p.(*layerAware)
	}
	// Of the two 7 is hinted.
	stays := func(what string, p *layerAware) {
		t.Helper()
		p.End()
		if k, _ := p.Victim(); k != (Key{Layer: 1, Expert: 6}) {
			t.Errorf("%s: %v leaves first, want 1/6", what, k)
		}
	}
	p := open(func(k Key) float64 {
		if k.Expert == 7 {
			return .5
		}
		return math.NaN() // no number is no history
	})
	both(p)
	tokens(p, layers, 5, use, nil)
	stays("history", p)

	p = open(nil)
	scores := make([]float32, experts)
	scores[0], scores[7] = 1, .5
	both(p)
	tokens(p, layers, 5, use, func(int, int) { p.Scores(scores) })
	stays("near miss", p)

	p = open(nil)
	both(p)
	tokens(p, layers, 5, use, nil)
	p.Begin(0, 1)
	p.Use(Key{}, 0)
	p.Predict(1, []int32{7})
	stays("prediction", p)

	// A prediction is for the next batch of its layer, and ends with it.
	p.Begin(1, 1)
	p.Use(Key{Layer: 1, Expert: 0}, 0)
	p.End()
	a, b := p.rankOf(p.number(Key{Layer: 1, Expert: 6})), p.rankOf(p.number(Key{Layer: 1, Expert: 7}))
	if a != b {
		t.Errorf("after the batch that was predicted: ranks %v and %v", a, b)
	}
}

// What foretells uses gains weight, what does not loses it.
func TestWeightsAreLearnt(t *testing.T) {
	const layers, experts = 4, 16
	run := func(right bool) float64 {
		p, err := NewPolicy("", alike(layers, experts, 20))
		if err != nil {
			t.Fatal(err)
		}
		q := p.(*layerAware)
		rng := rand.New(rand.NewPCG(2, 7))
		next := int32(0)
		tokens(p, layers, 200, func(int, int) []int32 { return []int32{next} }, func(_, l int) {
			next = int32(rng.IntN(experts))
			guess := next
			if !right {
				guess = (next + 1) % experts
			}
			q.Predict((l+1)%layers, []int32{guess})
		})
		return q.weight[guess]
	}
	if w := run(true); w < .8 {
		t.Errorf("predictions that always come true weigh %.3f", w)
	}
	if w := run(false); w > .1 {
		t.Errorf("predictions that never come true weigh %.3f", w)
	}
}

// A policy in steady state allocates nothing; TestAllocs holds the same of the
// whole cache.
func TestPolicyAllocs(t *testing.T) {
	if invariants.Enabled {
		t.Skip("the checks of -tags invariants allocate")
	}
	for _, name := range []string{"lfu", "layerlfu", DefaultPolicy} {
		p, err := NewPolicy(name, alike(6, 32, 50))
		if err != nil {
			t.Fatal(err)
		}
		rng := rand.New(rand.NewPCG(3, 8))
		var e [4]int32
		use := func(int, int) []int32 {
			for i := range e {
				e[i] = int32(rng.IntN(32))
			}
			return e[:]
		}
		tokens(p, 6, 20, use, nil)
		if n := testing.AllocsPerRun(50, func() { tokens(p, 6, 1, use, nil) }); n != 0 {
			t.Errorf("%s: a token allocates %v times", name, n)
		}
	}
}

// What makes no sense is refused.
func TestBadPolicies(t *testing.T) {
	for _, tt := range []struct {
		name string
		c    PolicyConfig
		want string
	}{
		{"mru", alike(1, 1, 1), `no policy "mru": use one of lru, lfu, layer, layerlfu, layer-aware`},
		{"belady", alike(1, 1, 1), "knows the future"},
		{"lru", alike(1, 1, -1), "budget of -1"},
		{"lru", PolicyConfig{}, "without experts"},
		{"lru", alike(2, maxPolicyExperts, 1), "more than"},
		{"lru", PolicyConfig{Layers: []PolicyLayer{{Experts: 1, Bytes: math.MaxInt64}}}, "out of range"},
		{"lru", PolicyConfig{Layers: []PolicyLayer{{Experts: -1}}}, "out of range"},
	} {
		if _, err := NewPolicy(tt.name, tt.c); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
	}
	for what, f := range map[string]func(Policy){
		"a use without a batch":         func(p Policy) { p.Use(Key{}, 0) },
		"a use of another layer":        func(p Policy) { p.Begin(0, 1); p.Use(Key{Layer: 1}, 0) },
		"an expert that there is not":   func(p Policy) { p.Begin(0, 1); p.Use(Key{Expert: 4}, 0) },
		"removing what is not resident": func(p Policy) { p.Remove(Key{}) },
	} {
		for _, name := range Policies() {
			func() {
				p, err := NewPolicy(name, alike(2, 4, 4))
				if err != nil {
					t.Fatal(err)
				}
				defer func() {
					if recover() == nil {
						t.Errorf("%s: %s does not panic", name, what)
					}
				}()
				f(p)
			}()
		}
	}
}

// Every expert that a cache hands out has its own bytes and the books are right
// after every step, under each policy, with reads that fail or come late, and
// with steps that end early.
func TestCacheUnderEachPolicy(t *testing.T) {
	for _, policy := range Policies() {
		for seed := range uint64(12) {
			t.Run(fmt.Sprintf("%s/seed=%d", policy, seed), func(t *testing.T) { underPolicy(t, policy, seed) })
		}
	}
}

func underPolicy(t *testing.T, policy string, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 9))
	layers, experts, topK := 1+rng.IntN(4), 4+rng.IntN(12), 1+rng.IntN(4)
	el, fl := small(layers, experts)
	fl[0] = fakeLayer{3 * 1024, 300} // a class of its own
	f := newFake(t, []Mode{storage.Slab, storage.MMap}[seed%2], fl)
	finish := rand.New(rand.NewPCG(seed, 10)) // io's
	f.pick = func(n int) int {
		if finish.IntN(2) == 0 {
			runtime.Gosched()
		}
		return finish.IntN(n)
	}
	c := open(t, f, Options{Cap: 1 + rng.IntN(experts), TopK: topK, Layers: el, Policy: policy})
	ctx := context.Background()
	for n := range 120 {
		layer := n % layers
		positions := 1
		if rng.IntN(6) == 0 {
			positions = 2 + rng.IntN(6)
		}
		var ids []int32
		for range positions {
			for _, e := range rng.Perm(experts)[:topK] {
				ids = append(ids, int32(e))
			}
		}
		distinct := slices.Clone(ids)
		if positions > 1 {
			slices.Sort(distinct)
			distinct = slices.Compact(distinct)
		}
		uses := make([]int32, len(distinct))
		f.mu.Lock() // io is idle, but the race detector cannot know
		clear(f.broken)
		for i, e := range distinct {
			for _, id := range ids {
				if id == e {
					uses[i]++
				}
			}
			if rng.IntN(15) == 0 {
				f.broken[Key{Layer: int32(layer), Expert: e}] = true
			}
		}
		f.mu.Unlock()
		if rng.IntN(4) > 0 {
			var scores []float32
			if positions == 1 {
				scores = make([]float32, experts)
				for i := range scores {
					scores[i] = rng.Float32()
				}
			}
			c.Routed(ids, scores)
		}
		s, err := c.Begin(ctx, layer, distinct, uses)
		if err != nil {
			t.Fatal(err)
		}
		for rng.IntN(20) > 0 { // else it ends early
			i, parts, ok, err := s.Next(ctx)
			if err != nil {
				continue // broken
			}
			if !ok {
				break
			}
			if err := f.verify(Key{Layer: int32(layer), Expert: distinct[i]}, parts); err != nil {
				t.Fatal(err)
			}
			s.Done(i)
		}
		s.End()
		c.check()
		for _, cl := range c.classes { // the policy's books are the cache's
			n := 0
			for k := range cl.kept.all() {
				n++
				if b := booksOf(cl.kept.policy); !b.resident[b.number(k)] {
					t.Fatalf("step %d: %v is here, the policy does not know", n, k)
				}
			}
			if b := booksOf(cl.kept.policy); int64(n) != b.bytes {
				t.Fatalf("%d experts are here, the policy counts %d", n, b.bytes)
			}
		}
	}
}

func booksOf(p Policy) *books {
	switch p := p.(type) {
	case *shared:
		return p.books
	case *sliced:
		return p.books
	}
	return p.(*layerAware).books
}
