package tiers

import (
	"fmt"
	"math"
	"strings"
)

// A Policy says which experts leave memory. It sees keys, sizes and hints,
// never bytes, and keeps its own books of what is resident: Use enters an
// expert, Remove takes it out. The same calls give the same victims on
// every run; ties are broken by key. One goroutine uses it. After its first
// rounds a policy allocates nothing, but for the entries of golang-lru.
//
// A batch is one layer's call for some positions, from Begin to End or to the
// next Begin. What it uses is never a victim as long as it lasts.
type Policy interface {
	// Begin starts a batch of a layer.
	Begin(layer, positions int)

	// Use says that position pos of the batch uses k, which is resident from now
	// on, or on its way. Positions come in order, and a position's experts in the
	// router's order; k may come again with another position.
	Use(k Key, pos int)

	// End ends the batch: what it used may be a victim.
	End()

	// Remove says that k, which is resident, has left.
	Remove(k Key)

	// Over says whether Victim must leave for the budget to hold, as the policy
	// splits it.
	Over() bool

	// Victim names the resident expert to leave next, without removing it; none
	// if the batch uses all.
	Victim() (k Key, ok bool)

	// Resize sets the budget in bytes. What is above it leaves when the caller
	// next asks Over and Victim.
	Resize(budget int64)
}

// Hinted is a Policy that also makes use of what a running engine knows and a
// replay does not. No hint is owed, and none names a victim: a wrong hint
// costs hits and nothing else.
type Hinted interface {
	Policy

	// Scores gives what the router chose by, for the one position of the batch
	// that has begun, after its uses: [experts of the layer], larger is better. It
	// is read before Scores returns.
	Scores(scores []float32)

	// Predict says that the next batch of a layer is likely to use these experts.
	Predict(layer int, experts []int32)
}

// PolicyConfig is what a policy is made for.
type PolicyConfig struct {
	Layers  []PolicyLayer     // by number
	Budget  int64             // bytes
	History func(Key) float64 // uses per position of an expert in earlier sessions, 0 to 1; nil: unknown
}

// A PolicyLayer is one layer as a policy sees it.
type PolicyLayer struct {
	Experts int   // 0: not a MoE layer
	Bytes   int64 // of one expert
}

// DefaultPolicy is the policy of a run that names none.
const DefaultPolicy = "layer-aware"

// Policies are the names that NewPolicy knows. "belady" is not among them: it
// is given the future, which only a replay has (NewBelady).
func Policies() []string { return []string{"lru", "lfu", "layer", "layerlfu", "layer-aware"} }

// CheckPolicy refuses a name that NewPolicy does not know. "" is the default.
func CheckPolicy(name string) error {
	if name == "" {
		return nil
	}
	for _, n := range Policies() {
		if n == name {
			return nil
		}
	}
	if name == "belady" {
		return fmt.Errorf("policy belady knows the future, so it only works in a replay: use one of %s", strings.Join(Policies(), ", "))
	}
	return fmt.Errorf("there is no policy %q: use one of %s", name, strings.Join(Policies(), ", "))
}

// NewPolicy makes the policy of a name; "" is the default. Errors: an unknown
// name, layers that make no sense.
func NewPolicy(name string, c PolicyConfig) (Policy, error) {
	if err := CheckPolicy(name); err != nil {
		return nil, fmt.Errorf("tiers: %w", err)
	}
	b, err := newBooks(c)
	if err != nil {
		return nil, err
	}
	switch name {
	case "lru":
		return &shared{books: b, order: newLRU(b)}, nil
	case "lfu":
		return &shared{books: b, order: newLFU(b)}, nil
	case "layer":
		return newSliced(b, func() order { return newLRU(b) }), nil
	case "layerlfu":
		all := newLFU(b)
		return newSliced(b, func() order { return all.sibling() }), nil
	}
	return newLayerAware(b, c.History), nil
}

// books are what every policy counts: which experts are resident, their bytes,
// and which the batch uses. Inside the package an expert is its number, 0 to
// len(keys)-1, layer by layer.
type books struct {
	layers   []PolicyLayer
	first    []int32 // by layer: the number of its expert 0
	keys     []Key   // by number
	resident []bool
	open     bool     // a batch has begun and not ended
	batch    uint64   // counts Begins, from 1
	usedBy   []uint64 // the last batch that used each expert
	layer    int      // of the batch
	bytes    int64    // resident
	inLayer  []int64  // the same, by layer
	budget   int64
}

// maxPolicyExperts bounds what a config may ask for: a model of 1024 layers
// with 4096 experts each.
const maxPolicyExperts = 1 << 22

func newBooks(c PolicyConfig) (*books, error) {
	if c.Budget < 0 {
		return nil, fmt.Errorf("tiers: a policy with a budget of %d bytes: it must be 0 or more", c.Budget)
	}
	n := 0
	for l, layer := range c.Layers {
		if layer.Experts < 0 || layer.Experts > maxPolicyExperts || layer.Bytes < 0 || layer.Experts > 0 && layer.Bytes > math.MaxInt64/maxPolicyExperts {
			return nil, fmt.Errorf("tiers: layer %d with %d experts of %d bytes: the numbers are out of range", l, layer.Experts, layer.Bytes)
		}
		if n += layer.Experts; n > maxPolicyExperts {
			return nil, fmt.Errorf("tiers: more than %d experts", maxPolicyExperts)
		}
	}
	if n == 0 {
		return nil, fmt.Errorf("tiers: a policy for a model without experts")
	}
	b := &books{
		layers:   c.Layers,
		first:    make([]int32, len(c.Layers)),
		keys:     make([]Key, 0, n),
		resident: make([]bool, n),
		usedBy:   make([]uint64, n),
		inLayer:  make([]int64, len(c.Layers)),
		budget:   c.Budget,
	}
	for l, layer := range c.Layers {
		b.first[l] = int32(len(b.keys))
		for e := range layer.Experts {
			b.keys = append(b.keys, Key{Layer: int32(l), Expert: int32(e)})
		}
	}
	return b, nil
}

// number panics if there is no such expert.
func (b *books) number(k Key) int32 {
	if k.Layer < 0 || int(k.Layer) >= len(b.layers) || k.Expert < 0 || int(k.Expert) >= b.layers[k.Layer].Experts {
		panic(fmt.Sprintf("tiers: the policy is asked about %v, which the model does not have", k))
	}
	return b.first[k.Layer] + k.Expert
}

func (b *books) begin(layer int) {
	b.batch++
	b.open, b.layer = true, layer
}

// inBatch says whether the batch, if there is one, uses expert i.
func (b *books) inBatch(i int32) bool { return b.open && b.usedBy[i] == b.batch }

// use enters a use and says whether it is the batch's first of this expert. It
// panics if the expert is not of the batch's layer.
func (b *books) use(i int32) (first bool) {
	if int(b.keys[i].Layer) != b.layer || !b.open {
		panic(fmt.Sprintf("tiers: the policy is told that a batch of layer %d uses %v", b.layer, b.keys[i]))
	}
	if !b.resident[i] {
		b.resident[i] = true
		b.bytes += b.layers[b.layer].Bytes
		b.inLayer[b.layer] += b.layers[b.layer].Bytes
	}
	if b.inBatch(i) {
		return false
	}
	b.usedBy[i] = b.batch
	return true
}

// leave panics if i is not resident.
func (b *books) leave(i int32) {
	if !b.resident[i] {
		panic(fmt.Sprintf("tiers: %v leaves and is not resident", b.keys[i]))
	}
	b.resident[i] = false
	l := b.keys[i].Layer
	b.bytes -= b.layers[l].Bytes
	b.inLayer[l] -= b.layers[l].Bytes
}

// An order ranks resident experts. It is told of a batch's uses as they come,
// and when it is over.
type order interface {
	end()                    // the batch is over
	use(i int32, first bool) // first: the batch's first of i, which may be new
	remove(i int32)          // i may be one that the batch uses
	victim() (int32, bool)   // the first to leave that the batch does not use
}

// shared is a policy of one order over all layers, and so one budget.
type shared struct {
	*books
	order order
}

func (p *shared) Begin(layer, _ int) {
	p.End()
	p.begin(layer)
}

func (p *shared) End() {
	if p.open {
		p.open = false
		p.order.end()
	}
}

func (p *shared) Use(k Key, _ int) {
	i := p.number(k)
	p.order.use(i, p.use(i))
}

func (p *shared) Remove(k Key) {
	i := p.number(k)
	p.order.remove(i)
	p.leave(i)
}

func (p *shared) Over() bool { return p.bytes > p.budget }

func (p *shared) Victim() (Key, bool) {
	i, ok := p.order.victim()
	if !ok {
		return Key{}, false
	}
	return p.keys[i], true
}

func (p *shared) Resize(budget int64) { p.budget = budget }
