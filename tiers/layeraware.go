package tiers

import "math"

// layerAware is the default policy. It lets the expert go whose next use is
// expected to be the farthest away.
//
// A layer's experts are asked for once a token, so distances are counted in
// token cycles. An expert that each token uses with probability p is next used,
// on average, after
//
//	wait = (layers until its own comes round)/(all layers) + 1/p
//
// and a constant; the longest wait goes. (Below one cycle lru throws out just
// what comes next.) What is left to know is p. Experts are used in runs, and
// some are popular for as long as the text stays what it is, so p is a sum of
// memories of an expert's uses, which fade at different speeds:
//
//	p = w[last]*last + w[fast]*fast + ... + w[anything]*1
//
// How much each memory is worth depends on the model and the text, so the
// weights are learnt, by online expectation maximisation for a sum of rates. A
// decoded use is shared out among the memories in proportion to what each had
// foretold; the weight of a memory is what it was given by what it had stood at,
// over all experts of the model, resident or not:
//
//	w[m] = sum over uses of w[m]*memory[m]/p  /  sum over experts and tokens of memory[m]
//
// So weights are never negative, and a memory that foretells nothing loses its
// say. Learning is cheap: a use shares out a few numbers, and the lower sum is
// kept by layer and fades as a whole. Experience fades towards the first
// weights, so that no phase of the text lasts for ever.
//
// The hints are memories like the others: what the router ranked just below
// its choice, what was predicted for the layer's next batch, and the usage
// history of earlier sessions.
type layerAware struct {
	*books
	experts []aware      // by number
	of      []awareLayer // by layer
	rank    []*ranking   // by layer: resident experts that the batch does not use, the lowest p first
	using   []int32      // experts of the batch
	single  bool         // the batch is of one position
	pos     int          // of the batch's last use, -1 before the first
	moe     int          // MoE layers
	decoded int          // layer of the last batch of one position

	weight memories
	given  memories // the upper sum
	stood  memories // the lower sum
	fades  [manyTicks][fading]float32
	near   []int32 // scratch of Scores
}

// The memories. A use adds 1 to some of those that fade, from where they halve
// in halfLife tokens of their own layer.
const (
	last     = iota // decoded uses: those of the token before, hardly more
	fast            // all uses
	middle          // decoded uses
	long            // decoded uses
	prompt          // uses of batches of many positions, which are less like what is decoded
	near            // ranked by the router just below its choice
	fading          // the number of those above
	guess    = iota - 1
	history  // uses by position in earlier sessions
	anything // 1
	numMemories
)

type memories [numMemories]float64

// Tuned on the traces of the tests and on synthetic ones, where all that is near
// does as well: see RATIONALE.md.
var (
	halfLife    = [fading]float64{last: 1. / 3, fast: 3, middle: 30, long: 1000, prompt: 20, near: 3}
	firstWeight = memories{last: .03, fast: .1, middle: .01, long: .01, prompt: .002, near: .005, guess: .3, history: .5, anything: .004}
)

const (
	// ticks is how finely a layer's clock counts a decoded token. A position of a
	// batch of many is one tick: there are more of them, and each tells less.
	ticks = 5
	// manyTicks bounds the table of fades; longer times are computed.
	manyTicks = 64
	// experience is how much the first weights count: as if each memory had stood
	// at 1 for so many experts of each layer.
	experience = 3
	// unused is how many experts of a layer there are for each that a token uses,
	// near enough.
	unused = 32
	// keep is what a token leaves of the experience before it.
	keep = .9
	// forgotten is where a memory becomes 0: far below what a weight can raise.
	forgotten = 1e-6
)

type aware struct {
	memory  [fading]float32 // at clock
	history float32
	clock   int64
	guessed uint64 // the batch of its layer that it was predicted for
}

type awareLayer struct {
	clock   int64    // ticks
	batches uint64   // so far
	guesses float64  // predicted for the next batch
	stood   memories // sums over the layer's experts, at clock
	stale   bool     // rank is by what was known before this layer's last batch
}

// prior is the experience of the first weight of a memory.
func (p *layerAware) prior(m int) float64 {
	n := experience * float64(p.moe)
	if m == anything {
		n *= unused // it stands at 1 for all experts
	}
	return n
}

func newLayerAware(b *books, rate func(Key) float64) *layerAware {
	n := len(b.keys)
	p := &layerAware{
		books:   b,
		experts: make([]aware, n),
		of:      make([]awareLayer, len(b.layers)),
		rank:    make([]*ranking, len(b.layers)),
		decoded: -1,
		weight:  firstWeight,
	}
	all := newRanking(n)
	widest := 0
	for l, layer := range b.layers {
		widest = max(widest, layer.Experts)
		if layer.Experts > 0 {
			p.moe++
		}
		p.rank[l] = &ranking{at: all.at, heap: make([]ranked, 0, layer.Experts)}
		p.of[l].stood[anything] = float64(layer.Experts)
	}
	p.using, p.near = make([]int32, 0, widest), make([]int32, 0, widest)
	for m := range numMemories {
		p.stood[m] = p.prior(m)
		p.given[m] = p.prior(m) * firstWeight[m]
	}
	for d := range manyTicks {
		for m := range fading {
			p.fades[d][m] = float32(fade(m, int64(d)))
		}
	}
	if rate != nil {
		for i, k := range b.keys {
			h := rate(k)
			if !(h > 0) { // a NaN too
				continue
			}
			h = min(h, 1)
			p.experts[i].history = float32(h)
			p.of[k.Layer].stood[history] += h
		}
	}
	return p
}

// fade is what a time leaves of a memory.
func fade(m int, time int64) float64 {
	return math.Exp2(-float64(time) / (ticks * halfLife[m]))
}

// tick moves a layer's clock on.
func (p *layerAware) tick(l *awareLayer, time int64) {
	l.clock += time
	for m := range fading {
		l.stood[m] *= fade(m, time)
	}
}

// recall brings an expert's memories to a time.
func (p *layerAware) recall(x *aware, clock int64) {
	time := clock - x.clock
	if time <= 0 {
		return
	}
	x.clock = clock
	for m, v := range x.memory {
		switch {
		case v == 0:
			continue
		case time < manyTicks:
			v *= p.fades[time][m]
		default:
			v *= float32(fade(m, time))
		}
		if v < forgotten {
			v = 0
		}
		x.memory[m] = v
	}
}

// remember adds a use to one memory.
func (p *layerAware) remember(l *awareLayer, x *aware, m int) {
	x.memory[m]++
	l.stood[m]++
}

// foretell is p of an expert for a batch of its layer, as its memories stand.
func (p *layerAware) foretell(x *aware, batch uint64) float64 {
	sum := p.weight[anything]
	for m, v := range x.memory {
		sum += float64(p.weight[m] * float64(v))
	}
	sum += float64(p.weight[history] * float64(x.history))
	if x.guessed == batch {
		sum += p.weight[guess]
	}
	return sum
}

// rankOf is the place of an expert among those of its layer.
func (p *layerAware) rankOf(i int32) rank {
	x, l := &p.experts[i], &p.of[p.keys[i].Layer]
	p.recall(x, l.clock)
	return rank{a: p.foretell(x, l.batches+1)}
}

func (p *layerAware) Begin(layer, positions int) {
	p.End()
	p.begin(layer)
	l := &p.of[layer]
	l.batches++
	l.stale = true
	p.pos, p.single = -1, positions == 1
	if p.single {
		if layer <= p.decoded {
			p.learn()
		}
		p.decoded = layer
		l.stood[guess] = l.guesses
		for m, v := range l.stood {
			p.stood[m] += v
		}
		p.tick(l, ticks)
	}
	l.guesses = 0
}

func (p *layerAware) End() {
	p.open = false
	for _, i := range p.using {
		if p.resident[i] {
			p.rank[p.layer].set(i, p.rankOf(i))
		}
	}
	p.using = p.using[:0]
}

// learn settles the weights, once a token.
func (p *layerAware) learn() {
	for m := range numMemories {
		stood := p.prior(m)
		given := stood * firstWeight[m]
		p.stood[m] = stood + float64((p.stood[m]-stood)*keep)
		p.given[m] = given + float64((p.given[m]-given)*keep)
		p.weight[m] = p.given[m] / p.stood[m]
	}
}

func (p *layerAware) Use(k Key, pos int) {
	i := p.number(k)
	x, l := &p.experts[i], &p.of[k.Layer]
	first := p.use(i)
	if p.single {
		if first {
			p.recall(x, l.clock-ticks) // as it stood when the batch began
			p.share(x, p.foretell(x, l.batches), x.guessed == l.batches)
		}
		p.recall(x, l.clock)
		for _, m := range [...]int{last, fast, middle, long} {
			p.remember(l, x, m)
		}
	} else {
		if pos > p.pos {
			p.tick(l, int64(pos-p.pos))
			p.pos = pos
		}
		p.recall(x, l.clock)
		p.remember(l, x, fast)
		p.remember(l, x, prompt)
	}
	if first {
		p.rank[k.Layer].remove(i)
		p.using = append(p.using, i)
	}
}

// share gives a use to the memories that foretold it.
func (p *layerAware) share(x *aware, sum float64, guessed bool) {
	for m, v := range x.memory {
		p.given[m] += float64(p.weight[m]*float64(v)) / sum
	}
	p.given[history] += float64(p.weight[history]*float64(x.history)) / sum
	p.given[anything] += p.weight[anything] / sum
	if guessed {
		p.given[guess] += p.weight[guess] / sum
	}
}

func (p *layerAware) Remove(k Key) {
	i := p.number(k)
	p.leave(i)
	p.rank[k.Layer].remove(i)
}

func (p *layerAware) Over() bool { return p.bytes > p.budget }

func (p *layerAware) Victim() (Key, bool) {
	best, longest := int32(-1), 0.0
	for l, r := range p.rank {
		if len(r.heap) == 0 {
			continue
		}
		if at := &p.of[l]; at.stale {
			at.stale = false
			for j := range r.heap {
				r.heap[j].rank = p.rankOf(r.heap[j].i)
			}
			r.sort()
		}
		away := l - p.layer
		if away <= 0 {
			away += len(p.rank)
		}
		wait := float64(away)/float64(len(p.rank)) + 1/r.heap[0].rank.a
		if wait > longest {
			best, longest = r.heap[0].i, wait
		}
	}
	if best < 0 {
		return Key{}, false
	}
	return p.keys[best], true
}

func (p *layerAware) Resize(budget int64) { p.budget = budget }

// Scores remembers as many near misses as there were uses.
func (p *layerAware) Scores(scores []float32) {
	if !p.open || !p.single || len(scores) != p.layers[p.layer].Experts {
		return
	}
	from, l := p.first[p.layer], &p.of[p.layer]
	best := p.near[:0] // the best by score, the best first, a tie to the lower expert
	for e, s := range scores {
		if p.inBatch(from + int32(e)) {
			continue
		}
		j := len(best)
		if j == len(p.using) {
			if j == 0 || !(s > scores[best[j-1]]) {
				continue
			}
			j--
		} else {
			best = append(best, 0)
		}
		for j > 0 && s > scores[best[j-1]] {
			best[j] = best[j-1]
			j--
		}
		best[j] = int32(e)
	}
	for _, e := range best {
		x := &p.experts[from+e]
		p.recall(x, l.clock)
		p.remember(l, x, near)
	}
	l.stale = true
}

func (p *layerAware) Predict(layer int, experts []int32) {
	l := &p.of[layer]
	for _, e := range experts {
		i := p.number(Key{Layer: int32(layer), Expert: e})
		x := &p.experts[i]
		if x.guessed == l.batches+1 {
			continue
		}
		x.guessed = l.batches + 1
		l.guesses++
		if p.rank[layer].has(i) {
			p.rank[layer].set(i, p.rankOf(i))
		}
	}
}
