package tiers

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sluice/storage"
)

func historyModel() (ModelID, []ExpertLayer) {
	layers := []ExpertLayer{{Layer: 1, Experts: 3, Parts: []string{"a"}}, {Layer: 2, Experts: 4, Parts: []string{"b"}}}
	m := &Model{Tensors: []Tensor{{Name: "b", Dims: []int64{8, 4}}, {Name: "a", Dims: []int64{8, 3}}}}
	return Identify("qwen3moe", "A  Model\nof two lines", m, layers), layers
}

// fakeHistory has a count for each expert.
func fakeHistory() *History {
	id, layers := historyModel()
	h := NewHistory(id, layers)
	copy(h.counts[0], []int64{5, 0, 7})
	copy(h.counts[1], []int64{0, 7, 1 << 31, 0})
	return h
}

func TestHistoryFile(t *testing.T) {
	h := fakeHistory()
	path := filepath.Join(t.TempDir(), "usage")
	hash, err := h.Write(path)
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	want := "sluice usage 1\nmodel qwen3moe A Model of two lines\nidentity " + h.model.Hash +
		"\nlayer 1 5 0 7\nlayer 2 0 7 2147483648 0\nsha256 " + hash + "\n"
	if string(text) != want {
		t.Errorf("got\n%swant\n%s", text, want)
	}
	got, again, err := ReadHistory(path, h.model, h.layers)
	if err != nil || again != hash || fmt.Sprint(got.counts) != fmt.Sprint(h.counts) {
		t.Errorf("%v, %s, %v", got, again, err)
	}
	if got.Total() != 19+1<<31 || got.Count(Key{Layer: 2, Expert: 1}) != 7 || got.Count(Key{Layer: 0}) != 0 {
		t.Error(got)
	}
	ranked := ""
	for _, k := range got.Ranked() {
		ranked += fmt.Sprintf(" %d/%d", k.Layer, k.Expert)
	}
	if ranked != " 2/2 2/1 1/2 1/0 2/0 1/1 2/3" {
		t.Errorf("ranked%s", ranked)
	}
	if left, err := filepath.Glob(path + "*"); err != nil || len(left) != 1 {
		t.Errorf("files: %v, %v", left, err)
	}
}

// A file that is not what was written, or of something else, is refused in
// words; nothing of it is used.
func TestHistoryRefuses(t *testing.T) {
	h := fakeHistory()
	whole, _ := h.text()
	edit := func(old, new string) string { // with a sum that is right
		s := strings.Replace(string(whole), old, new, 1)
		s = s[:strings.LastIndex(s, "sha256 ")]
		return s + "sha256 " + sum(s) + "\n"
	}
	for _, tt := range []struct{ name, text, want string }{
		{"empty", "", "line 1: it is no usage history"},
		{"other", "GGUF\x03\x00", "line 1: it is no usage history"},
		{"version", strings.Replace(string(whole), "usage 1", "usage 2", 1), `line 1: it is of version "2"`},
		{"bit", strings.Replace(string(whole), " 7", " 6", 1), "its bytes are not those that were written"},
		{"hash", string(whole[:len(whole)-2]) + "g\n", "its bytes are not those that were written"},
		{"model", edit(h.model.Hash, strings.Repeat("0", 64)), `it is of the model "qwen3moe A Model of two lines" (0000000000000000), this one is "qwen3moe A Model of two lines"`},
		{"no model", edit("model", "nodel"), "line 2: it names no model"},
		{"layers", edit("layer 2 0 7 2147483648 0\n", ""), "it has 1 layers, the model 2"},
		{"layer", edit("layer 2", "layer 3"), "line 5: want the 4 counts of layer 2"},
		{"counts", edit("5 0 7", "5 0"), "line 4: want the 3 counts of layer 1"},
		{"negative", edit("5 0 7", "5 -1 7"), `line 4: count "-1" of expert 1`},
		{"large", edit("5 0 7", "5 4294967297 7"), `line 4: count "4294967297" of expert 1`},
	} {
		path := filepath.Join(t.TempDir(), "usage")
		if err := os.WriteFile(path, []byte(tt.text), 0o666); err != nil {
			t.Fatal(err)
		}
		_, _, err := ReadHistory(path, h.model, h.layers)
		var bad *HistoryError
		if !errors.As(err, &bad) || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: got %v, want %q", tt.name, err, tt.want)
		}
	}
	for n := range whole {
		if _, _, err := parseHistory("f", string(whole[:n]), h.model, h.layers); err == nil {
			t.Errorf("the first %d of %d bytes are taken for the whole", n, len(whole))
		}
	}
	if _, _, err := ReadHistory(filepath.Join(t.TempDir(), "none"), h.model, h.layers); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	if _, _, err := ReadHistory(t.TempDir(), h.model, h.layers); err == nil {
		t.Error("a folder is read")
	}
	if _, err := h.Write(filepath.Join(t.TempDir(), "no", "such", "folder")); err == nil {
		t.Error("written into no folder")
	}
}

func sum(s string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(s))) }

// A killed writer leaves the old file, and what it began is no hindrance.
func TestHistoryIsWrittenWhole(t *testing.T) {
	h := fakeHistory()
	path := filepath.Join(t.TempDir(), "usage")
	hash, err := h.Write(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path+".part", []byte("sluice usage 1\nmod"), 0o666); err != nil {
		t.Fatal(err)
	}
	if _, got, err := ReadHistory(path, h.model, h.layers); err != nil || got != hash {
		t.Errorf("%s, %v", got, err)
	}
	h.counts[0][1]++
	if _, err := h.Write(path); err != nil {
		t.Fatal(err)
	}
	if got, _, err := ReadHistory(path, h.model, h.layers); err != nil || got.counts[0][1] != 1 {
		t.Errorf("%v, %v", got, err)
	}
}

// What a policy reads: the share of a layer's positions that chose an expert.
func TestHistoryFrequency(t *testing.T) {
	id, layers := historyModel()
	h := NewHistory(id, layers)
	copy(h.counts[1], []int64{0, 3, 5, 2}) // 5 positions of top-2
	f := h.Frequency(2)
	for e, want := range []float64{0, 0.6, 1, 0.4} {
		if got := f(Key{Layer: 2, Expert: int32(e)}); got != want {
			t.Errorf("expert %d: %v, want %v", e, got, want)
		}
	}
	if got := f(Key{Layer: 1, Expert: 1}); got != 0 {
		t.Errorf("a layer that never ran: %v", got)
	}
}

// Old choices weigh less: counts are halved before they grow without bound.
func TestHistoryAges(t *testing.T) {
	h := fakeHistory()
	h.counts[0][0] = 3 * usageMost
	if _, err := h.Write(filepath.Join(t.TempDir(), "usage")); err != nil {
		t.Fatal(err)
	}
	if h.Total() >= usageMost || h.counts[0][0] != 3*usageMost/4 || h.counts[0][2] != 1 {
		t.Error(h.counts)
	}
}

// What decides which expert is which is the identity, and nothing else.
func TestIdentify(t *testing.T) {
	model := func() (string, *Model, []ExpertLayer) {
		return "arch", &Model{Tensors: []Tensor{{Name: "b", Type: 1, Dims: []int64{8, 4}, Off: 5}, {Name: "a", Dims: []int64{8, 3}}}},
			[]ExpertLayer{{Layer: 1, Experts: 3, Parts: []string{"a"}}}
	}
	arch, m, layers := model()
	want := Identify(arch, "x", m, layers).Hash
	arch, m, layers = model()
	slices.Reverse(m.Tensors)
	m.Tensors[0].Off, m.Tensors[0].File = 99, 1
	if got := Identify(arch, "y", m, layers).Hash; got != want {
		t.Error("names and places enter")
	}
	for what, change := range map[string]func(arch *string, m *Model, l []ExpertLayer){
		"arch":    func(a *string, m *Model, l []ExpertLayer) { *a = "b" },
		"experts": func(a *string, m *Model, l []ExpertLayer) { l[0].Experts++ },
		"layer":   func(a *string, m *Model, l []ExpertLayer) { l[0].Layer++ },
		"part":    func(a *string, m *Model, l []ExpertLayer) { l[0].Parts[0] = "b" },
		"tensor":  func(a *string, m *Model, l []ExpertLayer) { m.Tensors[0].Name = "c" },
		"type":    func(a *string, m *Model, l []ExpertLayer) { m.Tensors[0].Type = 2 },
		"dims":    func(a *string, m *Model, l []ExpertLayer) { m.Tensors[1].Dims[0]++ },
	} {
		arch, m, layers := model()
		change(&arch, m, layers)
		if got := Identify(arch, "x", m, layers).Hash; got == want {
			t.Errorf("another %s is the same model", what)
		}
	}
}

// The router's choices are counted once for each position, and taken once.
func TestTakeUses(t *testing.T) {
	el, fl := small(2, 4)
	f := newFake(t, storage.Slab, fl)
	f.pick = func(int) int { return 0 }
	c := open(t, f, Options{Cap: 2, TopK: 2, Layers: el, Pinned: []Key{{Layer: 1, Expert: 3}}})
	if err := c.Preload(context.Background()); err != nil {
		t.Fatal(err)
	}
	for l := range 2 {
		s, err := c.Begin(context.Background(), l, []int32{3, 1}, []int32{4, 1})
		if err != nil {
			t.Fatal(err)
		}
		s.End()
	}
	h := NewHistory(ModelID{}, el)
	c.TakeUses(h)
	c.TakeUses(h)
	if got := fmt.Sprint(h.counts); got != "[[0 1 0 4] [0 1 0 4]]" {
		t.Error(got)
	}
}

func FuzzHistory(f *testing.F) {
	h := fakeHistory()
	whole, _ := h.text()
	f.Add(string(whole))
	f.Add("sluice usage 1\n\nsha256 ")
	f.Fuzz(func(t *testing.T, text string) {
		got, hash, err := parseHistory("f", text, h.model, h.layers)
		if err != nil {
			return
		}
		again, sum := got.text()
		if back, _, err := parseHistory("f", string(again), h.model, h.layers); err != nil || fmt.Sprint(back.counts) != fmt.Sprint(got.counts) {
			t.Errorf("%q (%s) is written as %q (%s): %v", text, hash, again, sum, err)
		}
	})
}
