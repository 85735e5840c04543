package storage

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"sluice/internal/quant"
)

// requantizable is a directory with experts of each layout that floats may have,
// two layers of them, and dense weights of each type of floats. parts are all
// matrices of experts.
func requantizable(t testing.TB) (m *Model, layers []ExpertLayer, parts []string) {
	const experts, ff, dim = 3, 256, 512
	rng := rand.New(rand.NewPCG(4, 2))
	var ts []st
	for e := range experts {
		ts = append(ts, bf16s(rng, fmt.Sprintf("e.%d.gate", e), ff, dim), bf16s(rng, fmt.Sprintf("e.%d.up", e), ff, dim))
		f8 := st{fmt.Sprintf("e.%d.down", e), "F8_E4M3", []int64{dim, ff}, nil}
		for range f8.bytes() {
			f8.data = append(f8.data, byte(rng.IntN(0x7f))|byte(rng.IntN(2)<<7))
		}
		scale := st{f8.name + "_scale_inv", "F32", []int64{dim / 128, ff / 128}, nil}
		for range scale.bytes() / 4 {
			scale.data = binary.LittleEndian.AppendUint32(scale.data, math.Float32bits(float32(rng.Float64()+0.1)))
		}
		ts = append(ts, f8, scale)
	}
	ts = append(ts, bf16s(rng, "gu", experts, dim, 2*ff), bf16s(rng, "down", experts, dim, ff), bf16s(rng, "norm", dim))
	f32, f16 := st{"f32", "F32", []int64{7, 256}, nil}, st{"f16", "F16", []int64{5, 256}, nil}
	for range f32.bytes() / 4 {
		f32.data = binary.LittleEndian.AppendUint32(f32.data, math.Float32bits(float32(rng.NormFloat64())))
	}
	for range f16.bytes() / 2 {
		f16.data = binary.LittleEndian.AppendUint16(f16.data, quant.ToF16(float32(rng.NormFloat64())))
	}
	m = directory(t, `{"model_type":"x"}`, append(ts, f32, f16)...)
	layers = []ExpertLayer{{Layer: 1, Experts: experts, Parts: []string{"e.*.gate", "e.*.up", "e.*.down"}},
		{Layer: 2, Experts: experts, Parts: []string{"gu[T0%2]", "gu[T1%2]", "down"}}}
	return m, layers, append(append([]string{}, layers[0].Parts...), layers[1].Parts...)
}

// reencoded is what a tensor of the model is as another type: row by row.
func reencoded(t testing.TB, m *Model, name string, typ quant.Type) (out []byte) {
	t.Helper()
	x, err := m.View(name)
	if err != nil {
		t.Fatal(err)
	}
	v := decode(x.Type, x.Dims[0], tensorBytes(t, m, name))
	for cols := int(x.Dims[0]); len(v) > 0; v = v[cols:] {
		row := make([]byte, typ.RowBytes(cols))
		if err := quant.Encode(typ, row, v[:cols]); err != nil {
			t.Fatal(err)
		}
		out = append(out, row...)
	}
	return out
}

// A requantized slab has the weights that were to be, as the encoder makes them of
// each row, all others as they are, on any number of cores; it says what it is of,
// and never passes for the model.
func TestRequantize(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	m, layers, parts := requantizable(t)
	out := filepath.Join(t.TempDir(), "out.slab")
	hashes := map[[32]byte]bool{}
	for i, typ := range []quant.Type{quant.Q4_K, quant.Q8_0, quant.Q4_0, quant.MXFP4} {
		runtime.GOMAXPROCS(1 + i)
		types := map[string]quant.Type{"f32": typ, "f16": quant.Q8_0}
		for _, p := range parts {
			types[p] = typ
		}
		if _, err := Pack(context.Background(), m, layers, out, PackOptions{Requantize: types}); err != nil {
			t.Fatal(err)
		}
		s := open(t, out)
		for _, x := range s.Tensors {
			want := tensorBytes(t, m, x.Name)
			if to, ok := types[x.Name]; ok {
				want = reencoded(t, m, x.Name, to)
				if x.Type != to {
					t.Errorf("%s is of %v, want %v", x.Name, x.Type, to)
				}
			}
			if !bytes.Equal(tensorBytes(t, s, x.Name), want) {
				t.Errorf("%v: %s has other bytes", typ, x.Name)
			}
		}
		if err := verified(s, nil); err != nil {
			t.Error(err)
		}
		if err := verified(s, m); err == nil || !strings.Contains(err.Error(), "cannot be compared") {
			t.Errorf("compared with the model: %v", err)
		}
		if words := s.Requantized(); !strings.Contains(words, fmt.Sprintf("5 tensors of BF16 to %v", typ)) || !strings.Contains(words, fmt.Sprintf("1 tensors of F8_128 to %v", typ)) {
			t.Errorf("it was requantized: %q", words)
		}
		id, err := s.Identity()
		if err != nil {
			t.Fatal(err)
		}
		if why, timeOnly := id.Differs(must(m.Identity())); timeOnly || why != "its weights were requantized" {
			t.Errorf("it differs from the model: %q, %v", why, timeOnly)
		}
		if hashes[id.Hash()] {
			t.Error("two slabs of other types have one identity")
		}
		hashes[id.Hash()] = true
	}
	// Whatever its name.
	if err := os.Rename(out, m.SlabPath()); err != nil {
		t.Fatal(err)
	}
	side, words := m.Sidecar()
	if side != nil || !strings.Contains(words, "requantized") || !strings.Contains(words, "name it as MODEL") {
		t.Errorf("beside the model: %v, %q", side, words)
	}
	if m.Requantized() != "" || pack(t, m, layers).Requantized() != "" {
		t.Error("the model, or its own slab, was requantized")
	}
}

// A requantizing that was killed at any write goes on to the same bytes; that of
// other types is not gone on with.
func TestRequantizeResume(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	rng := rand.New(rand.NewPCG(seed, 6))
	m, layers, parts := requantizable(t)
	types := map[string]quant.Type{}
	for _, p := range parts {
		types[p] = quant.Q8_0
	}
	out := filepath.Join(t.TempDir(), "out.slab")
	writes := 0
	opt := func(fault func(int64, []byte) (int, error)) PackOptions {
		return PackOptions{Requantize: types, chunk: 64 << 10, journal: 100_000, fault: fault}
	}
	if _, err := Pack(context.Background(), m, layers, out, opt(func(int64, []byte) (int, error) { writes++; return 0, nil })); err != nil {
		t.Fatal(err)
	}
	good := readFile(t, out)
	resumed := false
	for kill := 1; kill < writes; kill += 1 + rng.IntN(1+writes/8) {
		os.Remove(out)
		if _, err := Pack(context.Background(), m, layers, out, opt(killer(kill, rng))); !errors.Is(err, errKilled) {
			t.Fatalf("kill %d of %d: %v", kill, writes, err)
		}
		if kill > 3 { // the header is there
			other := PackOptions{Requantize: map[string]quant.Type{parts[0]: quant.Q4_K}}
			if _, err := Pack(context.Background(), m, layers, out, other); err == nil || !strings.Contains(err.Error(), "requantized to other types") {
				t.Errorf("of other types: %v", err)
			}
			if _, err := Pack(context.Background(), m, layers, out, PackOptions{}); err == nil || !strings.Contains(err.Error(), "its weights were requantized") {
				t.Errorf("of none: %v", err)
			}
		}
		r, err := Pack(context.Background(), m, layers, out, opt(nil))
		if err != nil {
			t.Fatal(err)
		}
		resumed = resumed || r.Resumed > 0
		if !bytes.Equal(readFile(t, out), good) {
			t.Fatalf("kill %d: other bytes than at once", kill)
		}
	}
	if !resumed {
		t.Error("nothing was ever resumed")
	}
}

// What cannot be requantized is refused before anything is written; a weight that is
// no number when it is met, by its name.
func TestRequantizeRefuses(t *testing.T) {
	m, layers, _ := requantizable(t)
	for name, tt := range map[string]struct {
		to   quant.Type
		want string
	}{
		"norm":     {quant.Q8_0, "only matrices"},
		"none":     {quant.Q8_0, "not in the model"},
		"f32":      {quant.Q5_0, "no encoder for Q5_0"},
		"f16":      {quant.F16, "only weights of"},
		"e.*.gate": {quant.IQ1_S, "no encoder"},
	} {
		out := filepath.Join(t.TempDir(), "out.slab")
		_, err := Pack(context.Background(), m, layers, out, PackOptions{Requantize: map[string]quant.Type{name: tt.to}})
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s to %v: %v", name, tt.to, err)
		}
		if _, err := os.Stat(out + ".part"); err == nil {
			t.Errorf("%s: something was written", name)
		}
	}
	rng := rand.New(rand.NewPCG(1, 1))
	bad := bf16s(rng, "e", 2, 3, 64)
	binary.LittleEndian.PutUint16(bad.data[2*(64*4+7):], 0x7fc0) // of expert 1, row 1
	m = directory(t, `{}`, bad, bf16s(rng, "narrow", 4, 48))
	layers = []ExpertLayer{{Layer: 0, Experts: 2, Parts: []string{"e"}}}
	_, err := Pack(context.Background(), m, layers, filepath.Join(t.TempDir(), "s.slab"), PackOptions{Requantize: map[string]quant.Type{"e": quant.Q8_0}})
	if err == nil || !strings.Contains(err.Error(), `requantize tensor "e" expert 1, row 1`) || !strings.Contains(err.Error(), "NaN") {
		t.Errorf("a NaN: %v", err)
	}
	for name, want := range map[string]string{"e": "64 columns", "narrow": "48 columns"} {
		if _, err := Pack(context.Background(), m, layers, filepath.Join(t.TempDir(), "s.slab"), PackOptions{Requantize: map[string]quant.Type{name: quant.Q4_K}}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
