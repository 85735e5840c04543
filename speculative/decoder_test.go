package speculative

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/moe"
)

// dice is a model whose next token depends on the last alone.
type dice struct {
	logits [][]float32 // by the last token
	text   []int32
	last   int
	fail   int // Forward that fails, counted down; 0: none
}

func newDice(rng *rand.Rand, vocab int) *dice {
	d := &dice{}
	for range vocab {
		row := make([]float32, vocab)
		for i := range row {
			row[i] = float32(rng.NormFloat64())
		}
		d.logits = append(d.logits, row)
	}
	return d
}

var errDice = errors.New("input/output error")

func (d *dice) Forward(_ context.Context, ids []int32) error {
	if d.fail--; d.fail == 0 {
		return errDice
	}
	d.text = append(d.text, ids...)
	d.last = len(ids)
	return nil
}

func (d *dice) Logits(dst []float32, rows []int32) error {
	n := len(d.logits)
	for i, r := range rows {
		copy(dst[i*n:(i+1)*n], d.logits[d.text[len(d.text)-d.last+int(r)]])
	}
	return nil
}

func (d *dice) Keep(n int) error                    { d.text = d.text[:len(d.text)-d.last+n]; return nil }
func (d *dice) Rewind(pos int) error                { d.text = d.text[:pos]; return nil }
func (d *dice) Pos() int                            { return len(d.text) }
func (d *dice) Chunk() int                          { return 16 }
func (d *dice) Unions(int) (float64, float64, bool) { return 1, 1, true }
func (d *dice) Stats() moe.Stats                    { return moe.Stats{} }
func (d *dice) Name() string                        { return "dice" }
func (d *dice) Follow(context.Context, Text) error  { return nil }

// Propose says what is likeliest, and now and then nothing, or nonsense.
func (d *dice) Propose(_ context.Context, t Text, n int, dst []int32) ([]int32, error) {
	last := t.IDs[len(t.IDs)-1]
	if len(t.IDs)%7 == 3 {
		return dst, nil
	}
	for i := range n {
		last = likeliest(d.logits[last])
		if (len(t.IDs)+i)%5 == 0 {
			last = (last + 1) % int32(len(d.logits))
		}
		dst = append(dst, last)
	}
	return dst, nil
}

// draws samples so many tokens.
func draws(t *testing.T, d moe.Decoder, s moe.Sampling, vocab, tokens int) []int32 {
	t.Helper()
	r, err := moe.Generate(context.Background(), d, moe.NewSampler(s, vocab), moe.Generation{
		Prompt: []int32{0, 1, 2}, Tokens: tokens, Ctx: tokens + 10,
		Stop: func(int32) bool { return false }, Emit: func(int32) error { return nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	return r.IDs
}

func samplings() map[string]moe.Sampling {
	return map[string]moe.Sampling{
		"plain":   {Temp: 1, TopP: 1, RepeatPenalty: 1},
		"cut":     {Temp: 0.8, TopK: 5, TopP: 0.9, MinP: 0.1, RepeatPenalty: 1},
		"penalty": {Temp: 1.3, TopP: 1, RepeatPenalty: 1.4, RepeatLast: 4},
		"greedy":  {TopP: 1, RepeatPenalty: 1},
	}
}

// Drafting changes no token, greedy or sampled, and so no distribution: the same
// text for the same seed, and over 20,000 draws with other seeds the same frequency
// of each token behind each.
func TestSamplingKeepsDistribution(t *testing.T) {
	const vocab, tokens = 6, 20000
	for name, s := range samplings() {
		rng := rand.New(rand.NewPCG(11, 1))
		model := newDice(rng, vocab)
		run := func(depth int, seed uint64) []int32 {
			m := &dice{logits: model.logits}
			s.Seed = seed
			if depth == 0 {
				return draws(t, offDice{m}, s, vocab, tokens)
			}
			d, err := New(m, Options{Drafter: m, Vocab: vocab, Ctx: tokens + 10, Depth: depth, Force: true})
			if err != nil {
				t.Fatal(err)
			}
			ids := draws(t, d, s, vocab, tokens)
			if r := d.Report(); r.Accepted == 0 || r.Accepted == r.Proposed || r.Tokens != r.Forwards+r.Accepted {
				t.Errorf("%s, depth %d: %+v", name, depth, r)
			}
			return ids
		}
		plain := run(0, 1)
		for depth := 1; depth <= moe.MostDrafts; depth++ {
			if !slices.Equal(run(depth, 1), plain) {
				t.Errorf("%s, depth %d: another text", name, depth)
			}
		}
		if s.Temp == 0 {
			continue
		}
		a, b := pairs(plain, vocab), pairs(run(3, 2), vocab)
		chi, cells := 0.0, 0
		for i := range a {
			if n := a[i] + b[i]; n >= 10 {
				chi += (a[i] - b[i]) * (a[i] - b[i]) / n
				cells++
			}
		}
		// Mean of chi-square is its degrees of freedom, at most cells; five standard
		// deviations above are chance once in some million.
		if limit := float64(cells) + 5*math.Sqrt(2*float64(cells)); chi > limit {
			t.Errorf("%s: chi-square %.1f over %d cells, at most %.1f", name, chi, cells, limit)
		} else {
			t.Logf("%s: chi-square %.1f over %d cells", name, chi, cells)
		}
	}
}

func pairs(ids []int32, vocab int) []float64 {
	n := make([]float64, vocab*vocab)
	for i := 1; i < len(ids); i++ {
		n[int(ids[i-1])*vocab+int(ids[i])]++
	}
	return n
}

type offDice struct{ m *dice }

func (o offDice) Stats() moe.Stats { return moe.Stats{} }
func (o offDice) Extend(ctx context.Context, ids []int32) ([]float32, error) {
	if err := o.m.Forward(ctx, ids); err != nil {
		return nil, err
	}
	row := make([]float32, len(o.m.logits))
	return row, o.m.Logits(row, []int32{int32(o.m.last - 1)})
}

// The context is used to its last position and no further, and after an error
// the sequence ends where it was.
func TestLimits(t *testing.T) {
	const vocab, ctx = 6, 40
	m := newDice(rand.New(rand.NewPCG(1, 1)), vocab)
	d, err := New(m, Options{Drafter: m, Vocab: vocab, Ctx: ctx, Force: true})
	if err != nil {
		t.Fatal(err)
	}
	bg := context.Background()
	logits, err := d.Extend(bg, []int32{0, 1, 2})
	for i := 3; i < ctx; i++ {
		if err != nil {
			t.Fatalf("position %d: %v", i, err)
		}
		id := likeliest(logits)
		if i%11 == 0 {
			id = (id + 1) % vocab
		}
		if i == 20 { // the next pass fails, and is done again
			m.fail = 1
			if d.at < len(d.batch) && d.batch[d.at] == id { // the batch would answer without a pass
				id = (id + 1) % vocab
			}
			if _, err := d.Extend(bg, []int32{id}); !errors.Is(err, errDice) {
				t.Fatalf("a pass that fails: %v", err)
			}
			if m.Pos() != i || len(d.text) != i {
				t.Fatalf("after an error at position %d: %d run, %d known", i, m.Pos(), len(d.text))
			}
		}
		logits, err = d.Extend(bg, []int32{id})
	}
	var full *moe.ContextError
	if _, err := d.Extend(bg, []int32{0}); err != nil && !errors.As(err, &full) || m.Pos() > ctx {
		t.Errorf("behind the context: %v, position %d", err, m.Pos())
	}
	for _, o := range []Options{{}, {Drafter: m, Vocab: 1, Ctx: 1, Depth: 9}, {Drafter: m, Ctx: 1}} {
		if _, err := New(m, o); err == nil {
			t.Errorf("%+v is accepted", o)
		}
	}
}

// Kernels that give a batch other bits end drafting for good, with the text as it
// would be without.
func TestGuard(t *testing.T) {
	w := newWorld(1, 200)
	plain, _ := w.generate(t, off{w}, 200)
	w = newWorld(1, 200)
	w.drift = 1
	d := w.decoder(t, 2, true)
	got, _ := w.generate(t, d, 200)
	if !equal(got, plain) {
		t.Error("another text")
	}
	if l := d.Report().Lines(); len(l) != 1 || l[0] != "draft off: numerical guard (draft and verify kernels differ)" {
		t.Errorf("%q", l)
	}
}

// What is said: exact words of the requirements, counts that are whole, and never
// a share of nothing.
func TestReport(t *testing.T) {
	w := newWorld(2, 1000) // I/O-bound, and few drafts are right: off
	w.perLoad, w.perDraft = 4*time.Millisecond, 20*time.Microsecond
	w.accept = func(int) float64 { return 0.3 }
	d := w.decoder(t, 1, false)
	w.generate(t, d, 600)
	r := d.Report()
	if l := r.Lines(); r.Proposed != 0 || len(l) != 1 || !strings.HasPrefix(l[0], "draft off: I/O-bound (cost ") || !strings.HasSuffix(l[0], "); override with --draft-force") ||
		!strings.Contains(l[0], " tokens at depth 1; I/O share 0.") {
		t.Errorf("%q", l)
	}

	w = newWorld(2, 1000) // nothing is read, and all drafts are right until they are not
	w.perDraft = 20 * time.Microsecond
	w.accept = func(pos int) float64 {
		if pos < 500 {
			return 0.95
		}
		return 0.02
	}
	d = w.decoder(t, 4, false)
	w.generate(t, d, 900)
	r = d.Report()
	words := strings.Join(d.Notices(), "\n")
	if !strings.Contains(words, "draft on at depth 4: cost ") || !strings.Contains(words, "draft paused: acceptance ") || !strings.Contains(words, "% over 24 proposals") {
		t.Errorf("%s", words)
	}
	if r.Changes < 2 || r.Tokens != r.Forwards+r.Accepted || math.Abs(r.Predicted()/r.Counted()-1) > 0.02 {
		t.Errorf("%+v", r)
	}
	want := fmt.Sprintf("draft: fake, %.2f tok/forward: %d proposed, %d accepted (", float64(r.Tokens)/float64(r.Forwards), r.Proposed, r.Accepted)
	if l := r.Lines(); !strings.HasPrefix(l[0], want) {
		t.Errorf("%q, want %q", l, want)
	}

	w = newWorld(3, 50)
	d = w.decoder(t, 1, false)
	if l := d.Report().Lines(); len(l) != 1 || l[0] != "draft off (no draft could be compared with the text yet)" {
		t.Errorf("%q", l)
	}
}

// The lookup finds the longest and latest match, and lets what repeats repeat.
func TestLookup(t *testing.T) {
	for _, c := range []struct {
		text []int32
		n    int
		want []int32
	}{
		{[]int32{1, 2, 3, 4, 1, 2}, 3, []int32{3, 4, 1}},
		{[]int32{1, 2, 3, 9, 1, 2, 4, 9, 1, 2}, 1, []int32{4}},             // the later of two
		{[]int32{5, 1, 2, 3, 9, 6, 1, 2, 4, 9, 5, 1, 2}, 2, []int32{3, 9}}, // the longer
		{[]int32{1, 2, 1, 2}, 5, []int32{1, 2, 1, 2, 1}},
		{[]int32{7, 7, 7}, 2, []int32{7, 7}},
		{[]int32{1, 2, 3}, 2, nil},
		{[]int32{2, 1, 3, 1}, 2, nil}, // one token is too little
		{[]int32{1}, 2, nil},
	} {
		got, err := Lookup{}.Propose(context.Background(), Text{IDs: c.text, To: len(c.text) - 1}, c.n, nil)
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%v: %v, %v; want %v", c.text, got, err, c.want)
		}
	}
}

// What is decoded allocates nothing.
func TestNoAllocations(t *testing.T) {
	const vocab = 6
	m := newDice(rand.New(rand.NewPCG(1, 1)), vocab)
	m.text = make([]int32, 0, 5000)
	d, err := New(m, Options{Drafter: m, Vocab: vocab, Ctx: 4000, Depth: 3, Force: true})
	if err != nil {
		t.Fatal(err)
	}
	logits, err := d.Extend(context.Background(), []int32{0, 1, 2})
	step := make([]int32, 1)
	if n := testing.AllocsPerRun(2000, func() {
		if err != nil {
			t.Fatal(err)
		}
		step[0] = likeliest(logits)
		logits, err = d.Extend(context.Background(), step)
	}); n != 0 {
		t.Errorf("%v allocations a token", n)
	}
}

// Forced drafts of which hardly any is right are few, though no pass without
// drafts tells what they cost; and of which most are right, several.
func TestForcedDepth(t *testing.T) {
	for _, c := range []struct{ accept, least, most float64 }{{0.02, 1, 1.3}, {0.95, 2, 8}} {
		w := newWorld(1, 600)
		w.accept = func(int) float64 { return c.accept }
		d := w.decoder(t, 0, true)
		w.generate(t, d, 500)
		if r := d.Report(); float64(r.Proposed) < c.least*float64(r.Forwards-1) || float64(r.Proposed) > c.most*float64(r.Forwards) {
			t.Errorf("%.0f %% right: %d proposed in %d forwards, want %.3g to %.3g in each", 100*c.accept, r.Proposed, r.Forwards, c.least, c.most)
		}
	}
}
