package moe

import (
	"math"
	"path/filepath"
	"testing"

	"sluice/storage"
)

// loaderOf is a loader over a header's metadata alone.
func loaderOf(t *testing.T, h header) *loader {
	t.Helper()
	path := filepath.Join(t.TempDir(), "m.gguf")
	w, err := storage.CreateGGUF(path, h.meta, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Finish(); err != nil {
		t.Fatal(err)
	}
	m, err := storage.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	arch, _ := m.Meta.String("general.architecture")
	return &loader{file: m, arch: arch}
}

// The temperature of the published models: 1 for 8191 positions, then steps of
// logarithms.
func TestLlama4Temperature(t *testing.T) {
	h := headers()["llama4"]
	h.unset("llama4.attention.temperature_scale")
	h.unset("llama4.attention.temperature_length")
	l := loaderOf(t, h)
	got := l.llama4Temperature(30000)
	for p, want := range map[int]float64{0: 1, 8190: 1, 8191: 1 + 0.1*math.Ln2, 16382: 1 + 0.1*math.Ln2, 16383: 1 + 0.1*math.Log(3), 29999: 1 + 0.1*math.Log(4)} {
		if got[p] != float32(want) {
			t.Errorf("position %d: %v, want %v", p, got[p], float32(want))
		}
	}
	h.set("llama4.attention.temperature_scale", float32(0))
	if l := loaderOf(t, h); l.llama4Temperature(10) != nil || l.err != nil {
		t.Errorf("a scale of 0 is a temperature (%v)", l.err)
	}
}

// The rotations of published models for long contexts: fast pairs stay, slow
// ones are slowed by the factor, and between the two the share goes linearly
// with the turns within the original context.
func TestLlama4Rope(t *testing.T) {
	h := headers()["llama4"]
	h.set("llama4.rope.freq_base", float32(500000))
	h.set("llama4.rope.scaling.original_context_length", uint32(8192))
	l := loaderOf(t, h)
	spec := &Spec{RopeDims: 128}
	r := l.llama4Rope(spec, 2)
	if l.err != nil || !r.Interleaved || r.Half != 64 {
		t.Fatalf("%v, %+v", l.err, r)
	}
	kinds := map[string]int{}
	for i := range r.Half {
		f := math.Pow(500000, -float64(i)/64)
		length := 2 * math.Pi / f // positions of a turn
		want, kind := f, "kept"
		switch {
		case length > 8192:
			want, kind = f/8, "slowed"
		case length > 8192.0/4:
			share := (8192/length - 1) / 3
			want, kind = (1-share)*f/8+share*f, "between"
		}
		kinds[kind]++
		if got := math.Asin(float64(r.Sin[r.Half+i])); math.Abs(got/want-1) > 1e-6 {
			t.Errorf("pair %d, %s, turns by %v, want %v", i, kind, got, want)
		}
	}
	if kinds["kept"] == 0 || kinds["between"] == 0 || kinds["slowed"] == 0 {
		t.Errorf("pairs of each kind: %v", kinds)
	}
}
