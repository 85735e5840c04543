package engine

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/backends"
	"sluice/internal/quant"
	"sluice/moe"
	"sluice/storage"
)

var modes = []storage.Mode{storage.Slab, storage.Pread, storage.MMap}

// fails runs a prompt and wants an error that holds all words.
func fails(t *testing.T, e *Engine, prompt []int32, words ...string) error {
	t.Helper()
	e.Model.Rewind(0)
	r, err := moe.Generate(context.Background(), e.Model, greedy(e), generation(e, prompt, 4))
	if err == nil {
		t.Fatalf("it generated %v, want an error with %q", r.IDs, words)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%v: lacks %q", err, w)
		}
	}
	return err
}

// A file that can be cut short and made whole again.
type cuttable struct {
	t     *testing.T
	path  string
	bytes []byte
}

func newCuttable(t *testing.T, from string) cuttable {
	t.Helper()
	b, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "m.gguf")
	if err := os.WriteFile(path, b, 0o666); err != nil {
		t.Fatal(err)
	}
	return cuttable{t, path, b}
}

func (c cuttable) cut(size int64) {
	c.t.Helper()
	if err := os.Truncate(c.path, size); err != nil {
		c.t.Fatal(err)
	}
}

// mend writes the same file again, not another of its name.
func (c cuttable) mend() {
	c.t.Helper()
	f, err := os.OpenFile(c.path, os.O_WRONLY, 0)
	if err != nil {
		c.t.Fatal(err)
	}
	_, err = f.Write(c.bytes)
	if err := errors.Join(err, f.Close()); err != nil {
		c.t.Fatal(err)
	}
}

// middle is a byte inside the experts of the model's last layer.
func middle(t *testing.T, e *Engine) int64 {
	t.Helper()
	role := e.Spec.Roles[len(e.Spec.Roles)-1]
	lowest := int64(math.MaxInt64)
	for _, name := range role.Parts {
		x, ok := e.File.Tensor(name)
		if !ok {
			t.Fatal(name)
		}
		lowest = min(lowest, x.Off+x.Bytes/2)
	}
	return lowest
}

// A file that is cut short after it was opened fails the request that needs
// what is gone, in words, and nothing else: the engine goes on when the file
// is whole again, and it closes.
func TestCutFile(t *testing.T) {
	for _, mode := range modes {
		t.Run(mode.String(), func(t *testing.T) {
			f := newCuttable(t, glm)
			e := open(t, Options{Path: f.path, Storage: mode, Ctx: 128})
			prompt := heldout(t, e, 40)
			f.cut(middle(t, e))
			for range 2 {
				var read *storage.ReadError
				if err := fails(t, e, prompt, "layer 2", "expert", f.path, "shorter than when it was opened"); !errors.As(err, &read) {
					t.Errorf("%v is no ReadError", err)
				}
			}
			if st := e.Cache.Stats(); st.LoadsFailed == 0 || st.Misses != st.Source.Loads+st.LoadsFailed+st.LoadsDropped {
				t.Errorf("the loads are not accounted for: %+v", st)
			}
			f.mend()
			got := generate(t, e, prompt, 4)

			whole := open(t, Options{Path: glm, Ctx: 128})
			if want := generate(t, whole, prompt, 4); got.Witness != want.Witness {
				t.Errorf("mended, it says %v (logits %08x), want %v (%08x)", got.IDs, got.Witness, want.IDs, want.Witness)
			}

			// Cut for good, it closes all the same (open sees to that).
			f.cut(middle(t, e))
			if mode == storage.MMap { // what is in memory is the file itself
				fails(t, e, prompt, "cut short")
			} else {
				generate(t, e, prompt, 4)
			}
		})
	}
}

// expiring is a context that is cancelled when it is asked for the n-th time.
type expiring struct {
	context.Context
	left int
}

func (c *expiring) Err() error {
	if c.left--; c.left < 0 {
		return context.Canceled
	}
	return nil
}

// A failure that nobody came to hear of, since its request was cancelled at any
// moment whatever, is not told to the next one. Nor is an expert that nobody
// came to check taken as good.
func TestFailureStaysWithItsRequest(t *testing.T) {
	f := newCuttable(t, glm)
	e := open(t, Options{Path: f.path, Storage: storage.MMap, Ctx: 128, Threads: 2})
	prompt := heldout(t, e, 20)
	want := generate(t, e, prompt, 2)
	for n := 1; ; n++ {
		ctx := &expiring{context.Background(), n}
		f.cut(middle(t, e))
		e.Model.Rewind(0)
		_, err := e.Model.Extend(ctx, prompt)
		f.mend()
		if got := generate(t, e, prompt, 2); got.Witness != want.Witness {
			t.Fatalf("after a cancellation at look %d: logits %08x, want %08x", n, got.Witness, want.Witness)
		}
		if err == nil {
			t.Fatal("a file that is cut short went unnoticed")
		}
		if !errors.Is(err, context.Canceled) {
			if n < 5 {
				t.Errorf("only %d looks at the context before the failure", n)
			}
			break
		}
	}
}

// An expert that arrived in a step which failed, so that nobody checked it, is
// checked when it is first used, even if the file is gone by then.
func TestUncheckedViewsOfCutFile(t *testing.T) {
	f := newCuttable(t, glm)
	e, source := openTapped(t, Options{Path: f.path, Storage: storage.MMap, Ctx: 128})
	prompt := heldout(t, e, 20)
	source.broken = func(k storage.Key) error {
		if k.Layer == 2 {
			source.broken = nil // only the first
			return errors.New("a loose cable")
		}
		return nil
	}
	fails(t, e, prompt, "layer 2", "a loose cable")
	f.cut(middle(t, e))
	fails(t, e, prompt, "layer 2", "cut short")
	f.mend()
	generate(t, e, prompt, 4)
}

// One expert that cannot be read fails its request and is read again by the next.
func TestBrokenRead(t *testing.T) {
	for _, limit := range []int{1, 16} {
		e := open(t, Options{Path: qwen, Cap: limit, Ctx: 128})
		prompt := heldout(t, e, 30)
		want := generate(t, e, prompt, 6)
		cold, source := openTapped(t, Options{Path: qwen, Cap: limit, Ctx: 128})
		for _, n := range []int{1, 2, 10, 20, 40} {
			left := n
			source.broken = func(k storage.Key) error {
				if left--; left == 0 {
					return errors.New("a loose cable")
				}
				return nil
			}
			cold.Model.Rewind(0)
			_, err := moe.Generate(context.Background(), cold.Model, greedy(cold), generation(cold, prompt, 6))
			if left <= 0 && (err == nil || !strings.Contains(err.Error(), "a loose cable") || !strings.Contains(err.Error(), "expert")) {
				t.Errorf("cap %d, load %d: %v", limit, n, err)
			}
			source.broken = nil
			if got := generate(t, cold, prompt, 6); got.Witness != want.Witness {
				t.Errorf("cap %d, after load %d failed: logits %08x, want %08x", limit, n, got.Witness, want.Witness)
			}
		}
	}
}

// Weights that are no numbers are refused: a dense tensor when the model is
// loaded, an expert whenever it arrives, and again when it is asked for again.
func TestWeightsThatAreNoNumbers(t *testing.T) {
	nan := func(at int) func(b []byte, x storage.Tensor) {
		return func(b []byte, x storage.Tensor) {
			if x.Type != quant.BF16 {
				t.Fatalf("%s is of %v, want BF16", x.Name, x.Type)
			}
			binary.LittleEndian.PutUint16(b[2*at:], 0x7fc0)
		}
	}
	for _, name := range []string{"token_embd.weight", "blk.0.attn_q.weight", "blk.2.ffn_up_shexp.weight", "output.weight"} {
		path := rewrite(t, glm, change{tensor: name, data: nan(7)})
		p := prepare(t, Options{Path: path})
		if e, err := p.Load(context.Background()); err == nil {
			e.Close()
			t.Errorf("NaN in %s is loaded", name)
		} else if !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "NaN") {
			t.Errorf("NaN in %s: %v", name, err)
		}
	}

	// The expert is one that the prompt needs.
	whole, source := openTapped(t, Options{Path: glm, Ctx: 128})
	prompt := heldout(t, whole, 40)
	generate(t, whole, prompt, 4)
	victim := source.asked[slices.IndexFunc(source.asked, func(k storage.Key) bool { return k.Layer == 2 })]
	for _, name := range []string{"gate", "up", "down"} {
		path := rewrite(t, glm, change{
			tensor: fmt.Sprintf("blk.2.ffn_%s_exps.weight", name),
			data: func(b []byte, x storage.Tensor) {
				share := int(x.Dims[0] * x.Dims[1])
				nan(int(victim.Expert)*share+share-1)(b, x)
			},
		})
		for _, mode := range modes {
			for _, limit := range []int{1, 16} {
				e := open(t, Options{Path: path, Cap: limit, Storage: mode, Ctx: 128})
				for range 3 {
					var bad *quant.RangeError
					err := fails(t, e, prompt, "layer 2", fmt.Sprintf("expert %d, %s", victim.Expert, name), "NaN")
					if !errors.As(err, &bad) {
						t.Errorf("%v is no RangeError", err)
					}
				}
			}
		}
	}
}

// Weights in range that drive the activations out of it fail the request, in
// words, each time.
func TestActivationsOutOfRange(t *testing.T) {
	path := rewrite(t, qwen, change{tensor: "blk.1.attn_norm.weight", data: func(b []byte, x storage.Tensor) {
		for i := 0; i < len(b); i += 4 {
			binary.LittleEndian.PutUint32(b[i:], math.Float32bits(0x1p50))
		}
	}})
	e := open(t, Options{Path: path, Ctx: 128})
	prompt := heldout(t, e, 20)
	for range 2 {
		var out *backends.ActivationError
		if err := fails(t, e, prompt, "2^50"); !errors.As(err, &out) {
			t.Errorf("%v is no ActivationError", err)
		}
	}
}

func TestContextAndIDs(t *testing.T) {
	ctx := context.Background()
	for _, chunk := range []int{512, 7, 1} {
		e := open(t, Options{Path: qwen, Ctx: 32, Chunk: chunk})
		ids := heldout(t, e, 33)

		// A prompt of the whole context leaves room for the token after it.
		for tokens, why := range map[int]moe.Why{1: moe.WhyLength, 2: moe.WhyContext, -1: moe.WhyContext} {
			if r := generate(t, e, ids[:32], tokens); len(r.IDs) != 1 || r.Why != why || e.Model.Pos() != 32 {
				t.Errorf("%d tokens of a full context: %v, %q, %d positions", tokens, r.IDs, r.Why, e.Model.Pos())
			}
		}
		// The text of a longer prompt is refused before it runs.
		e.Model.Rewind(0)
		var over *moe.ContextError
		_, err := moe.Generate(ctx, e.Model, greedy(e), generation(e, ids, 4))
		if !errors.As(err, &over) || *over != (moe.ContextError{Tokens: 33, Ctx: 32}) || e.Model.Pos() != 0 {
			t.Errorf("33 tokens in a context of 32: %v, %d positions", err, e.Model.Pos())
		}
		// So is the token behind the last position.
		if _, err := e.Model.Extend(ctx, ids[:32]); err != nil {
			t.Fatal(err)
		}
		if _, err := e.Model.Extend(ctx, ids[:1]); !errors.As(err, &over) || over.Tokens != 33 || e.Model.Pos() != 32 {
			t.Errorf("a token behind the last: %v, %d positions", err, e.Model.Pos())
		}
		if err := e.Model.Forward(ctx, ids[:1]); !errors.As(err, &over) {
			t.Errorf("a forward behind the last: %v", err)
		}
		// Until the context is full.
		if r := generate(t, e, ids[:20], -1); len(r.IDs) != 13 || r.Why != moe.WhyContext {
			t.Errorf("20 tokens until the context of 32 is full: %d more, %q", len(r.IDs), r.Why)
		}

		for _, id := range []int32{-1, 512, math.MaxInt32, math.MinInt32} {
			e.Model.Rewind(0)
			_, err := e.Model.Extend(ctx, []int32{id})
			if err == nil || !strings.Contains(err.Error(), fmt.Sprint(id)) || !strings.Contains(err.Error(), "0 to 511") || e.Model.Pos() != 0 {
				t.Errorf("token %d: %v", id, err)
			}
			text := slices.Clone(ids)
			text[16] = id
			if _, err := moe.MeasurePerplexity(ctx, e.Model, text, 16, -1, nil); err == nil || !strings.Contains(err.Error(), fmt.Sprint(id)) {
				t.Errorf("perplexity of token %d: %v", id, err)
			}
		}
		for size, words := range map[int]string{3: "chunks of 3", 33: "chunks of 33"} {
			if _, err := moe.MeasurePerplexity(ctx, e.Model, ids, size, -1, nil); err == nil || !strings.Contains(err.Error(), words) {
				t.Errorf("perplexity in chunks of %d: %v", size, err)
			}
		}
		if _, err := moe.MeasurePerplexity(ctx, e.Model, ids[:15], 16, -1, nil); err == nil || !strings.Contains(err.Error(), "15 tokens") {
			t.Errorf("perplexity of less than a chunk: %v", err)
		}
		cancelled, cancel := context.WithCancel(ctx)
		cancel()
		if _, err := moe.MeasurePerplexity(cancelled, e.Model, ids, 16, -1, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("perplexity, cancelled: %v", err)
		}
	}
}

// A cancellation keeps what came before it, and the next request is whole.
func TestCancelled(t *testing.T) {
	for _, mode := range modes {
		e, source := openTapped(t, Options{Path: light(demo), Cap: 2, Storage: mode, Ctx: 128})
		prompt := heldout(t, e, 10)
		want := generate(t, e, prompt, 12)
		for n := 0; n <= 12; n += 3 {
			ctx, cancel := context.WithCancel(context.Background())
			g := generation(e, prompt, 12)
			var got []int32
			g.Emit = func(id int32) error {
				got = append(got, id)
				if len(got) == n { // while the experts of the next token are read
					left := 2
					source.submit = func() {
						if left--; left == 0 {
							cancel()
						}
					}
				}
				return nil
			}
			if n == 0 {
				cancel()
			}
			e.Model.Rewind(0)
			r, err := moe.Generate(ctx, e.Model, greedy(e), g)
			source.submit = nil
			cancel()
			why := moe.WhyInterrupted
			if n == 12 {
				why = moe.WhyLength
			}
			if err != nil || r.Why != why || !slices.Equal(r.IDs, want.IDs[:n]) || !slices.Equal(got, want.IDs[:n]) {
				t.Errorf("%v, cancelled after %d tokens: %v, %q, %v, want %v", mode, n, r.IDs, r.Why, err, want.IDs[:n])
			}
		}
		if got := generate(t, e, prompt, 12); got.Witness != want.Witness {
			t.Errorf("%v: after cancellations logits %08x, want %08x", mode, got.Witness, want.Witness)
		}
	}
}

// A model that is written to while it runs may have given any bytes: Finish says so.
func TestWrittenWhileRead(t *testing.T) {
	f := newCuttable(t, glm)
	e := open(t, Options{Path: f.path, Cap: 1, Ctx: 128})
	prompt := heldout(t, e, 20)
	generate(t, e, prompt, 2)
	if _, err := e.Finish(); err != nil {
		t.Fatal(err)
	}
	stamp := time.Now().Add(-time.Hour) // whatever the clock of the file system
	f.mend()
	if err := os.Chtimes(f.path, stamp, stamp); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Finish(); err == nil || !strings.Contains(err.Error(), "was written to while it was read") {
		t.Errorf("got %v", err)
	}
}
