package engine

import (
	"context"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"testing"

	"sluice/internal/safetensors"
	"sluice/moe"
	"sluice/storage"
	"sluice/tiers"
)

const (
	demo  = "../../models/demo-q4_k_m.gguf"
	glm   = "testdata/glm4_moe.gguf"
	qwen  = "testdata/qwen3_moe.gguf"
	psalm = "And it came to pass in those days, that"
)

// light is the model itself, or a tiny one under the race detector, where the
// demo would take minutes.
func light(path string) string {
	if raceEnabled {
		return glm
	}
	return path
}

// shared is the path of a file of the oracles that are too large for the
// repository. Without them the test is skipped, loudly.
func shared(t testing.TB, name string) string {
	t.Helper()
	root := os.Getenv("SLUICE_SHARED")
	if root == "" {
		root = "../../../shared"
	}
	path := filepath.Join(root, name)
	if _, err := os.Stat(path); err != nil {
		t.Skip("needs the shared oracles: set SLUICE_SHARED")
	}
	return path
}

// open runs a model until the test ends.
func open(t testing.TB, o Options) *Engine {
	t.Helper()
	return load(t, prepare(t, o))
}

// prepare plans for a machine of 8 GB that nothing else runs on, if the options
// name none: what else this one does would lower the cap.
func prepare(t testing.TB, o Options) *Plan {
	t.Helper()
	if o.Memory == (tiers.Memory{}) {
		o.Memory.Root = t.TempDir()
		err := os.Mkdir(filepath.Join(o.Memory.Root, "proc"), 0o777)
		if err == nil {
			err = os.WriteFile(filepath.Join(o.Memory.Root, "proc/meminfo"), []byte("MemAvailable: 8388608 kB\n"), 0o666)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	p, err := Prepare(o)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func load(t testing.TB, p *Plan) *Engine {
	t.Helper()
	e, err := p.Load(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

// generation is greedy text of n tokens from where the model is, however the
// model ends it.
func generation(e *Engine, prompt []int32, n int) moe.Generation {
	return moe.Generation{
		Prompt: prompt, Tokens: n, Ctx: e.Config.Ctx,
		Stop: func(int32) bool { return false },
		Emit: func(int32) error { return nil },
	}
}

func greedy(e *Engine) *moe.Sampler {
	return moe.NewSampler(moe.Sampling{TopP: 1, RepeatPenalty: 1}, e.Spec.Vocab)
}

// generate extends a prompt from an empty context.
func generate(t testing.TB, e *Engine, prompt []int32, n int) moe.Result {
	t.Helper()
	e.Model.Rewind(0)
	r, err := moe.Generate(context.Background(), e.Model, greedy(e), generation(e, prompt, n))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// allLogits runs ids from an empty context and returns the logits after each
// [len(ids), vocab], and the residual stream [len(ids), hidden].
func allLogits(t testing.TB, e *Engine, ids []int32) (logits, hidden []float32) {
	t.Helper()
	m := e.Model
	m.Rewind(0)
	logits, hidden = make([]float32, len(ids)*m.Vocab), make([]float32, len(ids)*m.Spec.Hidden)
	for at := 0; at < len(ids); {
		n := min(m.Chunk(), len(ids)-at)
		if err := m.Forward(context.Background(), ids[at:at+n]); err != nil {
			t.Fatal(err)
		}
		rows := make([]int32, n)
		for i := range rows {
			rows[i] = int32(i)
		}
		if err := m.Logits(logits[at*m.Vocab:(at+n)*m.Vocab], rows); err != nil {
			t.Fatal(err)
		}
		if err := m.Hidden(hidden[at*m.Spec.Hidden : (at+n)*m.Spec.Hidden]); err != nil {
			t.Fatal(err)
		}
		at += n
	}
	return logits, hidden
}

// heldout is the first n tokens of a text that no model was trained on.
func heldout(t testing.TB, e *Engine, n int) []int32 {
	t.Helper()
	ids := must(e.Tokens.Encode(readText(t, "testdata/heldout.txt"), false))
	if len(ids) < n {
		t.Fatalf("heldout.txt has %d tokens, want %d", len(ids), n)
	}
	return ids[:n]
}

func readText(t testing.TB, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func readJSON(t testing.TB, path string, v any) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(b, v)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// An oracle is the output of another implementation.
type oracle struct {
	t testing.TB
	*safetensors.File
}

func openOracle(t testing.TB, path string) oracle {
	t.Helper()
	f, err := safetensors.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return oracle{t, f}
}

func (o oracle) floats(name string) []float32 {
	o.t.Helper()
	v, err := o.Floats(name)
	if err != nil {
		o.t.Fatal(err)
	}
	return v
}

func (o oracle) ints(name string) []int32 {
	o.t.Helper()
	v, err := o.Ints(name)
	if err != nil {
		o.t.Fatal(err)
	}
	return v
}

// A change of a tensor's bytes, or of the header's entries, for rewrite.
type change struct {
	tensor string
	data   func(b []byte, t storage.Tensor) // in place
	meta   map[string]any
}

// rewrite copies a model with changes and returns the path of the copy.
func rewrite(t testing.TB, from string, c change) string {
	t.Helper()
	m, err := storage.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	var meta []storage.KV
	for _, k := range m.Meta.Keys() {
		v := m.Meta.Value(k)
		if other, ok := c.meta[k]; ok {
			v = other
		}
		meta = append(meta, storage.KV{Key: k, Value: v})
	}
	for k, v := range c.meta {
		if !m.Meta.Has(k) {
			meta = append(meta, storage.KV{Key: k, Value: v})
		}
	}
	var specs []storage.TensorSpec
	for _, x := range m.Tensors {
		specs = append(specs, storage.TensorSpec{Name: x.Name, Type: x.Type, Dims: x.Dims})
	}
	to := filepath.Join(t.TempDir(), "m.gguf")
	w, err := storage.CreateGGUF(to, meta, specs)
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range m.Tensors {
		b := make([]byte, x.Bytes)
		if err := m.ReadTensor(b, x); err != nil {
			t.Fatal(err)
		}
		if x.Name == c.tensor {
			c.data(b, x)
			c.tensor = ""
		}
		if _, err := w.Write(b); err != nil {
			t.Fatal(err)
		}
	}
	if c.tensor != "" {
		t.Fatalf("%s has no tensor %s", from, c.tensor)
	}
	if err := w.Finish(); err != nil {
		t.Fatal(err)
	}
	return to
}

// A tap is a source that tells what is asked of it, and can break it.
type tap struct {
	storage.Source
	asked  []storage.Key             // by Submit, in order
	submit func()                    // before each Submit; nil: nothing
	broken func(k storage.Key) error // of each expert that arrives; nil: none is
	lost   storage.SourceStats
}

func (s *tap) Submit(fetches []*storage.Fetch) {
	if s.submit != nil {
		s.submit()
	}
	for _, f := range fetches {
		s.asked = append(s.asked, f.Key)
	}
	s.Source.Submit(fetches)
}

func (s *tap) Reap() *storage.Fetch { return s.reaped(s.Source.Reap()) }

func (s *tap) Poll() (*storage.Fetch, bool) {
	f, beside := s.Source.Poll()
	if f == nil {
		return nil, beside
	}
	return s.reaped(f), false
}

func (s *tap) reaped(f *storage.Fetch) *storage.Fetch {
	if s.broken != nil && f.Err == nil {
		if f.Err = s.broken(f.Key); f.Err != nil {
			f.Parts = [storage.MaxParts][]byte{}
			s.lost.Loads++
			s.lost.LoadBytes += s.ExpertBytes(int(f.Key.Layer))
		}
	}
	return f
}

func (s *tap) Stats() storage.SourceStats {
	st := s.Source.Stats()
	st.Loads -= s.lost.Loads
	st.LoadBytes -= s.lost.LoadBytes
	return st
}

// openTapped is open with a tap before the source. The tap's fields may be set
// before the first token runs.
func openTapped(t testing.TB, o Options) (*Engine, *tap) {
	t.Helper()
	p := prepare(t, o)
	s := &tap{Source: p.Source}
	p.Source = s
	return load(t, p), s
}

// same fails the test at the first float whose bits differ.
func same(t testing.TB, what string, got, want []float32) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("%s: %d floats, want %d", what, len(got), len(want))
		return
	}
	for i := range got {
		if math.Float32bits(got[i]) != math.Float32bits(want[i]) {
			t.Errorf("%s: float %d is %v, want %v to the bit", what, i, got[i], want[i])
			return
		}
	}
}

// must is a result that cannot fail here.
func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
