package storage

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"sluice/internal/offheap"
	"sluice/internal/quant"
)

// sparse writes a header as a file of size bytes that takes hardly any space, or
// skips the test where the file system cannot.
func sparse(t *testing.T, path string, header []byte, size int64) *os.File {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if _, err := f.Write(header); err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(size); err != nil {
		t.Skipf("needs a file system with sparse files of %d bytes (set TMPDIR): %v", size, err)
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil || st.Blocks*512 > 1<<30 {
		t.Skipf("needs a file system with sparse files (set TMPDIR): %d bytes take %d, %v", size, st.Blocks*512, err)
	}
	return f
}

// Experts whose offsets need 33 and 41 bits are read right in every mode, as are
// tensors that are read whole.
func TestHugeOffsets(t *testing.T) {
	const experts = 5
	stack := func(name string, share int64) TensorSpec {
		return TensorSpec{name, quant.I8, []int64{share, experts}}
	}
	specs := []TensorSpec{
		stack("near", 33_001),
		{"gap32", quant.I8, []int64{1 << 16, 1 << 16}}, // 2^32 bytes
		stack("middle", 70_003),
		{"gap40", quant.I8, []int64{1 << 20, 1 << 20}}, // 2^40 bytes
		stack("far", 12_289),
		stack("aligned", 1<<20),
		{"dense", quant.I8, []int64{100_001}},
	}
	meta := []KV{{"general.architecture", "test"}}
	header, _, size, err := ggufHeader("huge", meta, specs)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "huge.gguf")
	w := sparse(t, path, header, size)
	m, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	src := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)})
	want := map[string][]byte{}
	for _, tn := range m.Tensors {
		if strings.HasPrefix(tn.Name, "gap") {
			continue
		}
		b := make([]byte, tn.Bytes)
		src.Read(b)
		want[tn.Name] = b
		if _, err := w.WriteAt(b, tn.Off); errors.Is(err, unix.EFBIG) || errors.Is(err, unix.ENOSPC) {
			t.Skipf("needs a file system with room at byte %d of a file (set TMPDIR): %v", tn.Off, err)
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Sync(); err != nil {
		t.Fatal(err)
	}
	for name, least := range map[string]int64{"middle": 1 << 32, "far": 1 << 40, "dense": 1 << 40} {
		if tn, _ := m.Tensor(name); tn.Off <= least {
			t.Fatalf("%s begins at byte %d, not behind %d", name, tn.Off, least)
		}
	}
	layers := []ExpertLayer{
		{Layer: 0, Experts: experts, Parts: []string{"near", "middle", "far"}},
		{Layer: 1, Experts: experts, Parts: []string{"aligned"}},
	}
	check := func(t *testing.T, name string, got []byte, e int) {
		t.Helper()
		all := want[name]
		if n := len(all) / experts; !bytes.Equal(got, all[e*n:(e+1)*n]) {
			t.Errorf("%s, expert %d: the bytes are not those of the file", name, e)
		}
	}
	eachMode(t, func(t *testing.T, mode Mode) {
		src, err := m.Source(layers, SourceOptions{Mode: mode})
		if err != nil {
			t.Fatal(err)
		}
		defer src.Close()
		if src.Mode() != mode {
			t.Skipf("needs the storage mode %v: %s", mode, strings.Join(src.Notices(), "; "))
		}
		var flying []*Fetch
		for _, l := range layers {
			for e := range experts {
				f := &Fetch{Key: Key{int32(l.Layer), int32(e)}}
				if n := src.SlotBytes(l.Layer); n > 0 {
					if f.Slot, err = offheap.Alloc(n); err != nil {
						t.Fatal(err)
					}
					defer offheap.Free(f.Slot)
				}
				flying = append(flying, f)
			}
		}
		src.Submit(flying)
		for range flying {
			f := src.Reap()
			if f.Err != nil {
				t.Fatalf("%v: %v", f.Key, f.Err)
			}
			for i, name := range layers[f.Key.Layer].Parts {
				check(t, name, f.Parts[i], int(f.Key.Expert))
			}
			src.Evict(f)
		}
		// Resident tensors: from all three regions, in one arena.
		var dense []Tensor
		for _, name := range []string{"near", "middle", "far", "dense"} {
			tn, _ := m.Tensor(name)
			dense = append(dense, tn)
		}
		arena, err := offheap.Alloc(src.ResidentBytes(dense))
		if err != nil {
			t.Fatal(err)
		}
		defer offheap.Free(arena)
		data, _, err := src.Load(context.Background(), arena, dense)
		if err != nil {
			t.Fatal(err)
		}
		for i, tn := range dense {
			if !bytes.Equal(data[i], want[tn.Name]) {
				t.Errorf("%s is not loaded as it is in the file", tn.Name)
			}
		}
	})
	for name, b := range want {
		tn, _ := m.Tensor(name)
		got := make([]byte, tn.Bytes)
		if err := m.ReadTensor(got, tn); err != nil || !bytes.Equal(got, b) {
			t.Errorf("%s is not read as it is in the file: %v", name, err)
		}
	}
}
