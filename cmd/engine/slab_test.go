package engine

import (
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sluice/moe"
	"sluice/storage"
)

// packed copies a model into a folder and packs it there, and returns both paths.
func packed(t *testing.T, model string) (gguf, slab string) {
	t.Helper()
	b, err := os.ReadFile(model)
	if err != nil {
		t.Fatal(err)
	}
	gguf = filepath.Join(t.TempDir(), "m.gguf")
	if err := os.WriteFile(gguf, b, 0o600); err != nil {
		t.Fatal(err)
	}
	file, err := storage.Open(gguf)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	spec, err := moe.Describe(file)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := storage.Pack(context.Background(), file, slices.Concat(spec.Roles, spec.NextnRoles), file.SlabPath(), storage.PackOptions{}); err != nil {
		t.Fatal(err)
	}
	return gguf, file.SlabPath()
}

// A slab gives the tokens and the bits of its model, in every way to read it,
// named or found beside the model.
func TestSlabSameBits(t *testing.T) {
	for _, model := range []string{"../../models/demo-q4_k_m.gguf", "testdata/qwen3_moe.gguf"} {
		t.Run(filepath.Base(model), func(t *testing.T) {
			gguf, slab := packed(t, model)
			ids := []int32{5, 17, 3, 99, 4, 20}
			plain := open(t, Options{Path: gguf, NoSlab: true, Cap: 2})
			if got := plain.Settings.Map()["slab"]; got.Value != "off" || got.Origin != FromFlag {
				t.Errorf("the slab is %+v with NoSlab", got)
			}
			want := generate(t, plain, ids, 12)
			for mode := storage.Slab; mode <= storage.MMap; mode++ {
				for _, path := range []string{gguf, slab} {
					e := open(t, Options{Path: path, Storage: mode, Cap: 2})
					if e.File.Format != "slab" || e.Settings.Map()["slab"].Value != slab {
						t.Fatalf("%s: the slab is %+v", path, e.Settings.Map()["slab"])
					}
					if got := generate(t, e, ids, 12); !slices.Equal(got.IDs, want.IDs) || got.Witness != want.Witness {
						t.Errorf("%v of %s: tokens %v with logits %08x, want %v with %08x", mode, path, got.IDs, got.Witness, want.IDs, want.Witness)
					}
				}
			}
		})
	}
}

// An expert whose bytes were damaged fails the requests that need it, by its name,
// and no other; those that do not need it give the same bits as ever.
func TestSlabDamagedExpert(t *testing.T) {
	gguf, slab := packed(t, "../../models/demo-q4_k_m.gguf")
	whole := open(t, Options{Path: gguf, NoSlab: true, Cap: 1})
	want := make([][]float32, 40)
	for id := range want {
		want[id] = logits(t, whole, int32(id))
	}
	// The expert is the one that most of what follows does not need: any.
	key := storage.Key{Layer: 3, Expert: 7}
	damage(t, slab, key)
	e := open(t, Options{Path: slab, Cap: 1})
	failed := 0
	for id := range want {
		e.Model.Rewind(0)
		got, err := e.Model.Extend(context.Background(), []int32{int32(id)})
		if err == nil {
			for i, x := range got {
				if math.Float32bits(x) != math.Float32bits(want[id][i]) {
					t.Fatalf("token %d: other logits", id)
				}
			}
			continue
		}
		failed++
		var ce *storage.ChecksumError
		if !errors.As(err, &ce) || ce.Key != key || !strings.Contains(err.Error(), key.String()) {
			t.Fatalf("token %d: %v", id, err)
		}
	}
	if failed == 0 || failed == len(want) {
		t.Errorf("%d of %d requests need the expert: the test shows nothing", failed, len(want))
	}
	if st := e.Cache.Stats(); st.LoadsFailed != int64(failed) || st.Source.Checksums != int64(failed) {
		t.Errorf("%d requests failed: %+v", failed, st)
	}
}

func logits(t *testing.T, e *Engine, id int32) []float32 {
	t.Helper()
	e.Model.Rewind(0)
	l, err := e.Model.Extend(context.Background(), []int32{id})
	if err != nil {
		t.Fatal(err)
	}
	return slices.Clone(l)
}

// damage flips a bit in the middle of an expert's first part.
func damage(t *testing.T, slab string, key storage.Key) {
	t.Helper()
	m, err := storage.Open(slab)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	spec, err := moe.Describe(m)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range spec.Roles {
		if int32(r.Layer) == key.Layer {
			x, _ := m.Tensor(r.Parts[0])
			f, err := os.OpenFile(slab, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			at, b := x.Off+int64(key.Expert)*x.Stride+1000, make([]byte, 1)
			if _, err := f.ReadAt(b, at); err != nil {
				t.Fatal(err)
			}
			b[0] ^= 8
			if _, err := f.WriteAt(b, at); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// Damage to a dense tensor is found while the model is loaded; a slab that does not
// fit its model is passed over in words.
func TestSlabNotUsed(t *testing.T) {
	gguf, slab := packed(t, "testdata/qwen3_moe.gguf")
	whole, err := os.ReadFile(slab)
	if err != nil {
		t.Fatal(err)
	}
	m, err := storage.Open(slab)
	if err != nil {
		t.Fatal(err)
	}
	x, _ := m.Tensor("output_norm.weight")
	m.Close()
	bad := slices.Clone(whole)
	bad[x.Off+2] ^= 1
	if err := os.WriteFile(slab, bad, 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := Prepare(Options{Path: gguf})
	if err != nil {
		t.Fatal(err)
	}
	var ce *storage.ChecksumError
	if _, err := p.Load(context.Background()); !errors.As(err, &ce) || ce.Tensor != x.Name {
		t.Errorf("a damaged dense tensor: %v", err)
	}
	for want, change := range map[string][]byte{"cut short": whole[:len(whole)-1], "damaged": append(slices.Clone(whole[:5000]), append([]byte{whole[5000] ^ 1}, whole[5001:]...)...)} {
		if err := os.WriteFile(slab, change, 0o600); err != nil {
			t.Fatal(err)
		}
		p, err := Prepare(Options{Path: gguf})
		if err != nil {
			t.Fatal(err)
		}
		if p.File.Format != "gguf" || !slices.ContainsFunc(p.Notices, func(n string) bool { return strings.Contains(n, want) && strings.Contains(n, "is not used") }) {
			t.Errorf("%s: format %s, notices %q", want, p.File.Format, p.Notices)
		}
		p.Close()
	}
}
