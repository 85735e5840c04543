package engine

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"sluice/backends"
	"sluice/moe"
	"sluice/storage"
	"sluice/tiers"
)

// An answer is all that a model says about a prompt and after it.
type answer struct {
	logits  []float32 // after each token of the prompt
	text    []int32   // greedy
	witness uint32    // of the bits of the logits that the text was chosen by
	usage   backends.HeldUsage
}

func ask(t testing.TB, o Options, prompt []int32, tokens int) answer {
	t.Helper()
	e := open(t, o)
	defer func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}()
	logits, _ := allLogits(t, e, prompt)
	r := generate(t, e, prompt, tokens)
	return answer{logits, r.IDs, r.Witness, e.Usage()}
}

// A sameCase is a model with a prompt and an answer for each number format of the
// KV cache, which is the only option here that may change a bit.
type sameCase struct {
	path   string
	prompt []int32
	tokens int
	want   map[backends.KVType]answer
}

func (c *sameCase) check(t *testing.T, o Options) {
	t.Helper()
	o.Path, o.Ctx = c.path, 128
	got, want := ask(t, o, c.prompt, c.tokens), c.want[o.KV]
	what := fmt.Sprintf("%s with %s", o.Path, options(o))
	same(t, what, got.logits, want.logits)
	if got.witness != want.witness || !slices.Equal(got.text, want.text) {
		t.Errorf("%s: text %v (logits %08x), want %v (%08x)", what, got.text, got.witness, want.text, want.witness)
	}
}

func options(o Options) string {
	return fmt.Sprintf("cap %d, policy %q, %v, %d threads, chunks of %d, kv %v", o.Cap, o.Policy, o.Storage, o.Threads, o.Chunk, o.KV)
}

// A token never depends on where its experts were, how they came there, how
// many threads computed it, or how many positions were computed at once: same
// text, and same bits of every logit.
func TestSameBits(t *testing.T) {
	var (
		caps    = []int{1, 2, 4, 8, 32}
		modes   = []storage.Mode{storage.Slab, storage.Pread, storage.MMap}
		threads = []int{1, 2, 5}
		chunks  = []int{1, 7, 64, 512}
		names   = tiers.Policies()
		kvs     = []backends.KVType{backends.KVF16, backends.KVF32, backends.KVQ8}
	)
	plain := Options{Cap: 32, Threads: 1, Chunk: 512} // slab, f16
	positions, tokens, combinations := 70, 20, 24     // 70 positions are chunks of 64 and 6
	if raceEnabled {                                  // minutes otherwise; what is shared is shared all the same
		positions, tokens, combinations = 16, 4, 6
	}
	var cases []*sameCase
	for _, path := range []string{light(demo), qwen, next35} {
		c := &sameCase{path: path, tokens: tokens, want: map[backends.KVType]answer{}}
		e := open(t, Options{Path: path, Cap: 1})
		c.prompt = heldout(t, e, positions)
		for _, kv := range kvs {
			o := plain
			o.Path, o.Ctx, o.KV = path, 128, kv
			c.want[kv] = ask(t, o, c.prompt, c.tokens)
			if len(c.want[kv].text) != c.tokens {
				t.Fatalf("%s: %d tokens, want %d", path, len(c.want[kv].text), c.tokens)
			}
		}
		if f16, f32 := c.want[backends.KVF16], c.want[backends.KVF32]; f16.witness == f32.witness {
			t.Errorf("%s: the KV cache changes nothing: is it used?", path)
		}
		cases = append(cases, c)
	}

	t.Run("one by one", func(t *testing.T) {
		for _, c := range cases {
			vary := func(set func(o *Options)) {
				o := plain
				set(&o)
				c.check(t, o)
			}
			for _, v := range caps {
				vary(func(o *Options) { o.Cap = v })
			}
			for _, v := range names {
				vary(func(o *Options) { o.Policy, o.Cap = v, 2 })
			}
			for _, v := range modes {
				vary(func(o *Options) { o.Storage, o.Cap = v, 4 })
			}
			for _, v := range threads {
				vary(func(o *Options) { o.Threads = v })
			}
			for _, v := range chunks {
				vary(func(o *Options) { o.Chunk, o.Cap = v, 8 })
			}
		}
	})

	t.Run("random", func(t *testing.T) {
		seed := uint64(time.Now().UnixNano())
		t.Logf("seed %d", seed)
		rng := rand.New(rand.NewPCG(seed, 0))
		for i := range combinations {
			o := Options{
				Cap:     caps[rng.IntN(len(caps))],
				Policy:  names[rng.IntN(len(names))],
				Storage: modes[rng.IntN(len(modes))],
				Threads: threads[rng.IntN(len(threads))],
				Chunk:   chunks[rng.IntN(len(chunks))],
				KV:      kvs[i%len(kvs)],
			}
			cases[i/len(kvs)%len(cases)].check(t, o)
			if t.Failed() {
				t.Fatalf("seed %d, combination %d", seed, i)
			}
		}
	})
}

// What a model was asked before changes nothing: one engine, warm, asked in
// other chunks, rewound, interrupted.
func TestSameBitsAgain(t *testing.T) {
	e, source := openTapped(t, Options{Path: light(demo), Cap: 2, Ctx: 128, Chunk: 32})
	prompt := heldout(t, e, 70)
	logits, _ := allLogits(t, e, prompt)
	want := generate(t, e, prompt, 12)

	again, _ := allLogits(t, e, prompt)
	same(t, "warm", again, logits)

	// Single positions behind a prefix, then a rewind into the middle of it.
	ctx := context.Background()
	row := func(p int) []float32 { return logits[p*e.Spec.Vocab : (p+1)*e.Spec.Vocab] }
	e.Model.Rewind(0)
	if _, err := e.Model.Extend(ctx, prompt[:40]); err != nil {
		t.Fatal(err)
	}
	for p := 40; p < 50; p++ {
		got, err := e.Model.Extend(ctx, prompt[p:p+1])
		if err != nil {
			t.Fatal(err)
		}
		same(t, fmt.Sprintf("position %d alone", p), got, row(p))
	}
	e.Model.Rewind(33)
	got, err := e.Model.Extend(ctx, prompt[33:])
	if err != nil {
		t.Fatal(err)
	}
	same(t, "after a rewind", got, row(69))

	// Interrupted while experts are on their way, at each third submission.
	for n := 1; n < 12; n += 3 {
		ctx, cancel := context.WithCancel(context.Background())
		left := n
		source.submit = func() {
			if left--; left == 0 {
				cancel()
			}
		}
		e.Model.Rewind(0)
		r, err := moe.Generate(ctx, e.Model, greedy(e), generation(e, prompt, 12))
		if err != nil || r.Why != moe.WhyInterrupted {
			t.Fatalf("interrupted at submission %d: %q, %v", n, r.Why, err)
		}
		cancel()
	}
	source.submit = nil
	if r := generate(t, e, prompt, 12); r.Witness != want.Witness || !slices.Equal(r.IDs, want.IDs) {
		t.Errorf("after interruptions: %v (logits %08x), want %v (%08x)", r.IDs, r.Witness, want.IDs, want.Witness)
	}
}

// The bits are the same on every machine. They change only with the definition
// of the arithmetic, for all backends at once; then these lines do too.
func TestKnownAnswer(t *testing.T) {
	if raceEnabled {
		t.Skip("minutes under the race detector")
	}
	const why = " the king of Israel said unto him, Why hast thou not done this thing? And he said, I will not"
	const what = " the king of Israel said unto him, What is this that thou hast done? And he said, I will not"
	for _, tt := range []struct {
		kv      backends.KVType
		text    string
		witness uint32
	}{
		{backends.KVF16, why, 0x088609a3},
		{backends.KVF32, why, 0x7dcb49c4},
		{backends.KVQ8, what, 0x14f072cb}, // the unquantized weights say so too
	} {
		e := open(t, Options{Path: demo, Cap: 8, KV: tt.kv})
		r := generate(t, e, must(e.Tokens.EncodePrompt(psalm)), 24)
		if got := e.Tokens.Decode(r.IDs, false); got != tt.text || r.Witness != tt.witness {
			t.Errorf("kv %v: %q, logits %08x; want %q, %08x", tt.kv, got, r.Witness, tt.text, tt.witness)
		}
	}
}
