package storage

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sluice/internal/offheap"
	"sluice/internal/quant"
)

// packable writes a GGUF model of random bytes with three layers of experts and
// tensors around them, in so many files, and opens it.
func packable(t testing.TB, path string, shards int, seed uint64) (*Model, []ExpertLayer) {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 1))
	specs := []TensorSpec{{"tok", quant.I8, []int64{100, 37}}, {"bias", quant.F32, []int64{3}}}
	var layers []ExpertLayer
	for i, n := range []int64{5, 1, 12} {
		l := ExpertLayer{Layer: 2*i + 1, Experts: int(n)}
		for j, name := range []string{"down", "gate", "up"}[i/2:] {
			s := TensorSpec{fmt.Sprintf("l%d.%s", l.Layer, name), quant.I8, []int64{int64(1 + 1500*i*j), 1 + rng.Int64N(9), n}}
			specs = append(specs, s, TensorSpec{s.Name + ".norm", quant.I8, []int64{1 + rng.Int64N(200)}})
			l.Parts = append(l.Parts, s.Name)
		}
		slices.Reverse(l.Parts) // roles are not in the file's order
		layers = append(layers, l)
	}
	per := (len(specs) + shards - 1) / shards
	first := path
	for i := range shards {
		mine := specs[i*per : min(len(specs), (i+1)*per)]
		meta := []KV{}
		if i == 0 {
			meta = sampleMeta()
		}
		if shards > 1 {
			meta = append(meta, KV{"split.no", uint16(i)}, KV{"split.count", uint16(shards)}, KV{"split.tensors.count", int32(len(specs))})
			path = fmt.Sprintf("%s-%05d-of-%05d.gguf", strings.TrimSuffix(first, ".gguf"), i+1, shards)
		}
		w, err := CreateGGUF(path, meta, mine)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range mine {
			b := make([]byte, s.Bytes())
			for i := range b {
				b[i] = byte(rng.Uint32()) & 0x3f // as floats, small ones
			}
			if _, err := w.Write(b); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Finish(); err != nil {
			t.Fatal(err)
		}
	}
	return open(t, path), layers
}

func open(t testing.TB, path string) *Model {
	t.Helper()
	m, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

// pack packs m beside itself and opens the slab.
func pack(t testing.TB, m *Model, layers []ExpertLayer) *Model {
	t.Helper()
	if _, err := Pack(context.Background(), m, layers, m.SlabPath(), PackOptions{}); err != nil {
		t.Fatal(err)
	}
	return open(t, m.SlabPath())
}

// small makes the writes and journals of a packing of a few KiB many.
func small(o PackOptions) PackOptions {
	o.chunk, o.journal = 512, 2000
	return o
}

func tensorBytes(t testing.TB, m *Model, name string) []byte {
	t.Helper()
	x, ok := m.Tensor(name)
	if !ok {
		t.Fatalf("no tensor %s", name)
	}
	b := make([]byte, x.Bytes)
	if err := m.ReadTensor(b, x); err != nil {
		t.Fatal(err)
	}
	return b
}

// expertFetches are fetches with slots for a source of the layers.
func expertFetches(t testing.TB, src Source, layers []ExpertLayer, n int) []*Fetch {
	t.Helper()
	x := &expertModel{layers: layers}
	return x.fetches(t, src, n)
}

// load reads one expert.
func load(src Source, f *Fetch, k Key) error {
	f.Key = k
	src.Submit([]*Fetch{f})
	return src.Reap().Err
}

// pollLoad is load for one who polls.
func pollLoad(src Source, f *Fetch, k Key) error {
	f.Key = k
	src.Submit([]*Fetch{f})
	return pollOne(src).Err
}

// pollOne is Reap by Poll, as far as that goes.
func pollOne(src Source) *Fetch {
	for {
		switch f, beside := src.Poll(); {
		case beside:
			return src.Reap()
		case f != nil:
			return f
		}
		runtime.Gosched()
	}
}

func allKeys(layers []ExpertLayer) []Key { return (&expertModel{layers: layers}).keys() }

func slabSource(t testing.TB, m *Model, layers []ExpertLayer, opt SourceOptions) Source {
	t.Helper()
	return (&expertModel{Model: m, layers: layers}).source(t, opt)
}

// A slab has the metadata and the tensors of its model, byte for byte, in every
// way to read them, and one read brings an expert.
func TestPackLossless(t *testing.T) {
	for _, shards := range []int{1, 3} {
		dir := t.TempDir()
		m, layers := packable(t, filepath.Join(dir, "m.gguf"), shards, 1)
		r, err := Pack(context.Background(), m, layers, m.SlabPath(), PackOptions{})
		if err != nil {
			t.Fatal(err)
		}
		s := open(t, filepath.Join(dir, "m.slab"))
		if want := (PackReport{Bytes: s.Files[0].Size, Tensors: len(m.Tensors) - 8, Experts: 18, Verified: true}); r != want {
			t.Errorf("report %+v, want %+v", r, want)
		}
		if s.Format != "slab" || len(s.Tensors) != len(m.Tensors) {
			t.Fatalf("format %s, %d tensors", s.Format, len(s.Tensors))
		}
		for i, x := range m.Tensors {
			y := s.Tensors[i]
			if x.Name != y.Name || x.Type != y.Type || !slices.Equal(x.Dims, y.Dims) || x.Bytes != y.Bytes {
				t.Errorf("tensor %+v became %+v", x, y)
			}
			if !bytes.Equal(tensorBytes(t, m, x.Name), tensorBytes(t, s, x.Name)) {
				t.Errorf("tensor %s has other bytes", x.Name)
			}
		}
		var keys []string
		for _, k := range m.Meta.Keys() {
			if !strings.HasPrefix(k, "split.") {
				keys = append(keys, k)
				if !reflect.DeepEqual(m.Meta.Value(k), s.Meta.Value(k)) {
					t.Errorf("metadata %s is %v, was %v", k, s.Meta.Value(k), m.Meta.Value(k))
				}
			}
		}
		if !slices.Equal(keys, s.Meta.Keys()) {
			t.Errorf("metadata %v, want %v", s.Meta.Keys(), keys)
		}
		eachMode(t, func(t *testing.T, mode Mode) {
			src := slabSource(t, s, layers, SourceOptions{Mode: mode})
			fetches := expertFetches(t, src, layers, 18)
			for i, k := range allKeys(layers) {
				fetches[i].Key = k
			}
			src.Submit(fetches)
			for range fetches {
				for beside := false; !beside; runtime.Gosched() { // its checksum is not for one who polls
					var f *Fetch
					if f, beside = src.Poll(); f != nil {
						t.Fatalf("Poll gives %v, with no checksum made", f.Key)
					}
				}
				f := src.Reap()
				if f.Err != nil {
					t.Fatal(f.Err)
				}
				l := layers[f.Key.Layer/2]
				for p, name := range l.Parts {
					all := tensorBytes(t, m, name)
					share := len(all) / l.Experts
					if !bytes.Equal(f.Parts[p], all[share*int(f.Key.Expert):][:share]) {
						t.Errorf("%v: part %d has other bytes", f.Key, p)
					}
				}
				if f.src.n != 1 && mode != MMap {
					t.Errorf("%v took %d reads", f.Key, f.src.n)
				}
				src.Evict(f)
			}
			if st := src.Stats(); st.Loads != 18 || st.Retries != 0 || st.Checksums != 0 {
				t.Errorf("stats %+v", st)
			}
		})
		if v, err := Verify(context.Background(), s, m, nil); err != nil || len(v.Bad) > 0 || !v.Compared || v.Experts != 18 || v.Bytes != s.Files[0].Size {
			t.Errorf("verification %+v, %v", v, err)
		}
		// The same model gives the same bytes.
		again := filepath.Join(dir, "again.slab")
		if _, err := Pack(context.Background(), m, layers, again, small(PackOptions{NoVerify: true})); err != nil {
			t.Fatal(err)
		}
		if a, b := readFile(t, m.SlabPath()), readFile(t, again); !bytes.Equal(a, b) {
			t.Error("two packings differ")
		}
	}
}

func readFile(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func writeFile(t testing.TB, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// A bit that flips is found: in header and index when the slab is opened, in a
// dense tensor when it is read, in an expert when it is read, with its name; all
// else still serves. The checker finds every bit of the file.
func TestSlabFlippedBit(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	rng := rand.New(rand.NewPCG(seed, 4))
	dir := t.TempDir()
	m, layers := packable(t, filepath.Join(dir, "m.gguf"), 1, 2)
	whole := pack(t, m, layers)
	good := readFile(t, m.SlabPath())
	front := int(slabBlock + whole.slab.front())
	path := filepath.Join(dir, "bad.slab")
	flip := func(i int) *Model {
		bad := slices.Clone(good)
		bad[i] ^= 1 << rng.IntN(8)
		writeFile(t, path, bad)
		if i < front {
			s, err := Open(path)
			var fe *FormatError
			if !errors.As(err, &fe) || fe.File != path && !strings.HasPrefix(fe.File, path) {
				t.Fatalf("byte %d of the header and index flipped: %v, %v", i, s, err)
			}
			return nil
		}
		return open(t, path)
	}
	for i := 0; i < front; i += 1 + rng.IntN(40) {
		flip(i)
	}
	for i := range slabBlock {
		if i < atEnd || i >= atHeadSum {
			flip(i)
		}
	}
	for _, it := range whole.slab.items() {
		i := int(it.off + rng.Int64N(it.n))
		s := flip(i)
		v, err := Verify(context.Background(), s, nil, nil)
		var ce *ChecksumError
		if err != nil || len(v.Bad) == 0 || !errors.As(v.Bad[len(v.Bad)-1].Err, &ce) {
			t.Fatalf("byte %d: verification %+v, %v", i, v, err)
		}
		if it.stack == nil {
			x := s.Tensors[it.tensor]
			if err := s.ReadTensor(make([]byte, x.Bytes), x); !errors.As(err, &ce) || ce.Tensor != x.Name || ce.File != path || ce.Off != x.Off {
				t.Fatalf("byte %d of tensor %s flipped: %v", i, x.Name, err)
			}
			continue
		}
		key := Key{int32(it.stack.layer), int32(it.expert)}
		if v.Bad[0].Key != key || len(v.Bad) != 1 {
			t.Errorf("verification %+v, want %v", v.Bad, key)
		}
		for mode := Slab; mode <= MMap; mode++ {
			src, err := s.Source(layers, SourceOptions{Mode: mode})
			if err != nil {
				t.Fatal(err)
			}
			f := expertFetches(t, src, layers, 1)[0]
			for _, k := range allKeys(layers) {
				err := load(src, f, k)
				if k != key {
					if err != nil {
						t.Errorf("%v is bad, and %v: %v", key, k, err)
					}
					continue
				}
				if !errors.As(err, &ce) || ce.Key != key || ce.Off != it.off || ce.Want != *it.sum || ce.File != path {
					t.Errorf("%v is bad: %v", key, err)
				}
				if text := fmt.Sprint(err); !strings.Contains(text, key.String()) || !strings.Contains(text, path) {
					t.Errorf("the error does not name file and expert: %s", text)
				}
				if f.Parts[0] != nil {
					t.Error("a failed fetch has parts")
				}
			}
			if st := src.Stats(); st.Checksums != 1 || st.Retries < 1 || st.Loads != 17 {
				t.Errorf("stats %+v", st)
			}
			src.Close()
		}
	}
	// What no item covers is zero.
	covered := make([]bool, len(good))
	for _, it := range whole.slab.items() {
		for i := it.off; i < it.off+it.n; i++ {
			covered[i] = true
		}
	}
	for i := front; i < len(good); i += 1 + rng.IntN(300) {
		if !covered[i] {
			if v, err := Verify(context.Background(), flip(i), nil, nil); err != nil || len(v.Bad) != 1 || v.Bad[0].Off > int64(i) {
				t.Errorf("padding byte %d flipped: %+v, %v", i, v, err)
			}
		}
	}
}

// A read that brings other bytes the first time is read again, counted and served;
// one that does so twice fails its expert alone: the same for one who reaps and for
// one who polls, by a checksum of its own.
func TestChecksumRetry(t *testing.T) {
	m, layers := packable(t, filepath.Join(t.TempDir(), "m.gguf"), 1, 3)
	s := pack(t, m, layers)
	victim := Key{5, 7}
	at := s.slab.stacks[2].at(7)
	for _, test := range []struct {
		mode Mode
		by   string
		load func(src Source, f *Fetch, k Key) error
	}{{Slab, "reap", load}, {Slab, "poll", pollLoad}, {Pread, "reap", load}, {Pread, "poll", pollLoad}} {
		mode, load := test.mode, test.load
		t.Run(mode.String()+"/"+test.by, func(t *testing.T) {
			var flips atomic.Int32
			result := func(_ string, off int64, p []byte, n int, err error) (int, error) {
				if off <= at && at < off+int64(len(p)) && flips.Load() > 0 {
					flips.Add(-1)
					p[at-off] ^= 0x10
				}
				return n, err
			}
			src := slabSource(t, s, layers, SourceOptions{Mode: mode, dev: device{result: result}})
			sums := 0
			if test.by == "poll" {
				src.(*Reader).SumBy(func(b []byte) uint32 {
					sums++
					return sumAlone(b)
				})
			}
			f := expertFetches(t, src, layers, 1)[0]
			flips.Store(1)
			if err := load(src, f, victim); err != nil {
				t.Fatal(err)
			}
			span := s.slab.stacks[2].span
			if got := crc32.Checksum(f.Slot[:span], castagnoli); got != s.slab.stacks[2].sums[7] {
				t.Error("the second read's bytes are not served")
			}
			if st := src.Stats(); st.Checksums != 1 || st.Retries != 1 || st.Loads != 1 || st.ReadBytes < 2*span {
				t.Errorf("stats %+v", st)
			}
			flips.Store(2)
			var ce *ChecksumError
			if err := load(src, f, victim); !errors.As(err, &ce) || ce.Key != victim {
				t.Errorf("bad twice: %v", err)
			}
			if err := load(src, f, victim); err != nil {
				t.Errorf("good again: %v", err)
			}
			if st := src.Stats(); st.Checksums != 2 || st.Loads != 2 {
				t.Errorf("stats %+v", st)
			}
			if want := 5; mode == Slab && test.by == "poll" && sums != want {
				t.Errorf("the poller took %d checksums, want %d", sums, want)
			}
		})
	}
}

// Reading from a slab allocates nothing, checksums included.
func TestSlabAllocs(t *testing.T) {
	m, layers := packable(t, filepath.Join(t.TempDir(), "m.gguf"), 1, 4)
	s := pack(t, m, layers)
	eachMode(t, func(t *testing.T, mode Mode) {
		src := slabSource(t, s, layers, SourceOptions{Mode: mode})
		f := expertFetches(t, src, layers, 1)
		f[0].Key = Key{5, 3}
		src.(*Reader).SumBy(sumAlone)
		for _, next := range []func(Source) *Fetch{Source.Reap, pollOne} {
			if n := testing.AllocsPerRun(50, func() {
				src.Submit(f)
				if next(src).Err != nil {
					t.Fatal("failed")
				}
			}); n != 0 {
				t.Errorf("%v allocations", n)
			}
		}
	})
}

// A slab that was cut anywhere is refused when it is opened.
func TestSlabTruncated(t *testing.T) {
	dir := t.TempDir()
	m, layers := packable(t, filepath.Join(dir, "m.gguf"), 1, 5)
	pack(t, m, layers)
	good := readFile(t, m.SlabPath())
	path := filepath.Join(dir, "cut.slab")
	for i := range 200 {
		n := i * len(good) / 200
		if i == 199 {
			n = len(good) - 1
		}
		writeFile(t, path, good[:n])
		var fe *FormatError
		if _, err := Open(path); !errors.As(err, &fe) || fe.File != path || !strings.Contains(fe.Msg, "cut short") {
			t.Errorf("cut at %d of %d: %v", n, len(good), err)
		}
	}
	writeFile(t, path, append(slices.Clone(good), 0))
	if _, err := Open(path); err == nil {
		t.Error("a byte behind the end is not noticed")
	}
	// One that is cut while it is open fails the experts that are gone.
	writeFile(t, path, good)
	s := open(t, path)
	eachMode(t, func(t *testing.T, mode Mode) {
		src := slabSource(t, s, layers, SourceOptions{Mode: mode})
		f := expertFetches(t, src, layers, 1)[0]
		if err := os.Truncate(path, s.slab.stacks[2].at(5)+100); err != nil {
			t.Fatal(err)
		}
		var re *ReadError
		if err := load(src, f, Key{5, 9}); !errors.As(err, &re) {
			t.Errorf("an expert behind the end: %v", err)
		}
		if err := load(src, f, Key{5, 4}); err != nil {
			t.Errorf("one before it: %v", err)
		}
		writeFile(t, path, good)
	})
}

var errKilled = errors.New("killed")

// killer lets n writes happen and tears the next; no later one happens.
func killer(n int, rng *rand.Rand) func(int64, []byte) (int, error) {
	dead := false
	return func(_ int64, b []byte) (int, error) {
		if n--; n >= 0 {
			return 0, nil
		}
		if dead {
			return 0, errKilled
		}
		dead = true
		return rng.IntN(len(b) + 1), errKilled
	}
}

// A packing that was killed at any write goes on to the same bytes, from what
// was noted; its .part is never taken for a slab that is whole.
func TestPackResume(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	rng := rand.New(rand.NewPCG(seed, 6))
	dir := t.TempDir()
	m, layers := packable(t, filepath.Join(dir, "m.gguf"), 2, 6)
	pack(t, m, layers)
	good := readFile(t, m.SlabPath())
	out := filepath.Join(dir, "out.slab")
	writes := 0
	if _, err := Pack(context.Background(), m, layers, out, small(PackOptions{fault: func(int64, []byte) (int, error) { writes++; return 0, nil }})); err != nil {
		t.Fatal(err)
	}
	resumed := 0
	for kill := 0; kill < writes; kill += 1 + rng.IntN(1+writes/60) {
		os.Remove(out)
		last, kills := int64(0), 0
		for at := kill; ; at = rng.IntN(writes) {
			r, err := Pack(context.Background(), m, layers, out, small(PackOptions{fault: killer(at, rng)}))
			if r.Resumed < last {
				t.Errorf("kill %d: resumed from %d bytes, before from %d", kill, r.Resumed, last)
			}
			last = r.Resumed
			if err == nil {
				break
			}
			if kills++; !errors.Is(err, errKilled) || kills > 1000 {
				t.Fatalf("kill %d: %v", kill, err)
			}
			if _, err := os.Stat(out); !errors.Is(err, fs.ErrNotExist) {
				t.Fatalf("kill %d: the output is there: %v", kill, err)
			}
		}
		if last > 0 {
			resumed++
		}
		if !bytes.Equal(readFile(t, out), good) {
			t.Fatalf("kill %d: other bytes than at once", kill)
		}
		if _, err := os.Stat(out + ".part"); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("kill %d: the .part is still there", kill)
		}
	}
	if resumed == 0 {
		t.Error("nothing was ever resumed")
	}
}

// A cancelled packing keeps its .part, which the next one verifies before it
// goes on: damage to it, or a cut, costs what was behind it.
func TestPackCancelled(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	rng := rand.New(rand.NewPCG(seed, 7))
	dir := t.TempDir()
	m, layers := packable(t, filepath.Join(dir, "m.gguf"), 1, 7)
	s := pack(t, m, layers)
	good := readFile(t, m.SlabPath())
	out := filepath.Join(dir, "out.slab")
	half := func() int64 {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		stop := s.Files[0].Size/2 + rng.Int64N(s.Files[0].Size/3)
		_, err := Pack(ctx, m, layers, out, small(PackOptions{Progress: func(what string, done, total int64) {
			if done >= stop {
				cancel()
			}
		}}))
		if !errors.Is(err, context.Canceled) || !strings.Contains(fmt.Sprint(err), "out.slab.part stays") {
			t.Fatalf("cancelled: %v", err)
		}
		return stop
	}
	finish := func(opt PackOptions) PackReport {
		t.Helper()
		r, err := Pack(context.Background(), m, layers, out, small(opt))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(readFile(t, out), good) {
			t.Fatal("other bytes than at once")
		}
		os.Remove(out)
		return r
	}
	var before int64 // payload up to the middle
	for _, it := range s.slab.items() {
		if it.off+it.n <= s.Files[0].Size/2 {
			before += it.n
		}
	}
	for range 10 {
		half()
		if _, err := Open(out + ".part"); err == nil || !strings.Contains(err.Error(), "not whole") {
			t.Fatalf("a .part opens as a model: %v", err)
		}
		if r := finish(PackOptions{}); r.Resumed < before {
			t.Errorf("resumed %d bytes, want %d", r.Resumed, before)
		}
		half()
		bad := readFile(t, out+".part")
		at := s.slab.stacks[1].off
		bad[at+rng.Int64N(s.slab.stacks[1].span)] ^= 1
		writeFile(t, out+".part", bad)
		if r := finish(PackOptions{}); r.Resumed == 0 || r.Resumed > at {
			t.Errorf("resumed %d bytes past the damage at %d", r.Resumed, at)
		}
		half()
		if err := os.Truncate(out+".part", at+1); err != nil {
			t.Fatal(err)
		}
		finish(PackOptions{})
		half()
		if r := finish(PackOptions{Restart: true}); r.Resumed != 0 {
			t.Errorf("resumed %d bytes after a restart", r.Resumed)
		}
	}
	// Damage to its header or index is refused, in words; --restart helps.
	for _, at := range []int64{3, atSize, atHead, slabBlock + 5, slabBlock + sourceSize + 3, s.slab.sumsAt() + int64(len(s.slab.sums))*sumSize + 40} {
		half()
		bad := readFile(t, out+".part")
		bad[at] ^= 4
		writeFile(t, out+".part", bad)
		if _, err := Pack(context.Background(), m, layers, out, PackOptions{}); err == nil || !strings.Contains(err.Error(), "--restart") {
			t.Errorf("byte %d of the .part flipped: %v", at, err)
		}
		finish(PackOptions{Restart: true})
	}
}

// A .part of another model is refused, saying how it differs.
func TestPackOtherModel(t *testing.T) {
	dir := t.TempDir()
	m, layers := packable(t, filepath.Join(dir, "m.gguf"), 1, 8)
	out := filepath.Join(dir, "out.slab")
	if _, err := Pack(context.Background(), m, layers, out, small(PackOptions{fault: killer(30, rand.New(rand.NewPCG(1, 1)))})); !errors.Is(err, errKilled) {
		t.Fatal(err)
	}
	refused := func(other *Model, want string) {
		t.Helper()
		if _, err := Pack(context.Background(), other, layers, out, PackOptions{}); err == nil || !strings.Contains(err.Error(), "of another model: the model had another "+want) || !strings.Contains(err.Error(), "--restart") {
			t.Errorf("another %s: %v", want, err)
		}
	}
	path := m.Files[0].Path
	b, stamp := readFile(t, path), must(os.Stat(path)).ModTime()
	writeFile(t, path+"2", append(slices.Clone(b), 0))
	refused(open(t, path+"2"), "size")
	b[bytes.Index(b, []byte("general.arch"))+len("general.architecture")+4+8] ^= 1 // a letter of its value
	writeFile(t, path+"2", b)
	refused(open(t, path+"2"), "header")
	os.Chtimes(path, time.Time{}, time.Unix(1e9, 0))
	refused(open(t, path), "time")
	os.Chtimes(path, time.Time{}, stamp)
	// One that changes while it is packed gives no slab.
	_, err := Pack(context.Background(), m, layers, out, PackOptions{Restart: true, Progress: func(string, int64, int64) {
		os.Chtimes(m.Files[0].Path, time.Time{}, time.Unix(2e9, 0))
	}})
	if err == nil || !strings.Contains(err.Error(), "changed while") {
		t.Errorf("changed while it is packed: %v", err)
	}
	if _, err := os.Stat(out); err == nil {
		t.Error("and the slab is there")
	}
}

// Packing onto the model, onto something that is no file, or a slab is refused
// before anything is written.
func TestPackRefuses(t *testing.T) {
	dir := t.TempDir()
	m, layers := packable(t, filepath.Join(dir, "m.gguf"), 1, 10)
	s := pack(t, m, layers)
	link := filepath.Join(dir, "link.slab")
	if err := os.Link(m.Files[0].Path, link); err != nil {
		t.Fatal(err)
	}
	for out, m := range map[string]*Model{m.Files[0].Path: m, link: m, "/dev/null": m, dir: m, filepath.Join(dir, "x.slab"): s, filepath.Join(dir, "none", "x.slab"): m} {
		if _, err := Pack(context.Background(), m, layers, out, PackOptions{}); err == nil {
			t.Errorf("packing %s to %s went through", m.Files[0].Path, out)
		}
	}
	twice := append(slices.Clone(layers), layers[0])
	short := []ExpertLayer{{Layer: 1, Experts: 4, Parts: layers[0].Parts}}
	for _, bad := range [][]ExpertLayer{twice, short, {{Layer: 1, Experts: 5, Parts: []string{"none"}}}, {{Layer: -1, Experts: 5, Parts: layers[0].Parts}}} {
		if _, err := Pack(context.Background(), m, bad, filepath.Join(dir, "x.slab"), PackOptions{}); err == nil {
			t.Errorf("layers %v went through", bad)
		}
	}
	for _, e := range must(os.ReadDir(dir)) {
		if strings.HasSuffix(e.Name(), ".part") || e.Name() == "x.slab" {
			t.Errorf("%s was left", e.Name())
		}
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// A drive that fills up stops the packing, in words; with room it goes on.
func TestPackFull(t *testing.T) {
	dir := t.TempDir()
	m, layers := packable(t, filepath.Join(dir, "m.gguf"), 1, 11)
	pack(t, m, layers)
	out := filepath.Join(dir, "out.slab")
	n := 0
	_, err := Pack(context.Background(), m, layers, out, small(PackOptions{fault: func(off int64, b []byte) (int, error) {
		if n++; n > 40 && n < 60 {
			return len(b) / 2, unix.ENOSPC
		}
		return 0, nil
	}}))
	if !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), "free some space") || !strings.Contains(err.Error(), "goes on") {
		t.Fatalf("full: %v", err)
	}
	r, err := Pack(context.Background(), m, layers, out, PackOptions{})
	if err != nil || r.Resumed == 0 || !bytes.Equal(readFile(t, out), readFile(t, m.SlabPath())) {
		t.Errorf("after room was made: %+v, %v", r, err)
	}

	tiny := t.TempDir()
	if err := unix.Mount("tmpfs", tiny, "tmpfs", 0, "size=32768"); err != nil {
		t.Skipf("needs the right to mount a small tmpfs: %v", err)
	}
	defer unix.Unmount(tiny, 0)
	_, err = Pack(context.Background(), m, layers, filepath.Join(tiny, "out.slab"), PackOptions{})
	if !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), "free some space") {
		t.Errorf("a drive of 32 KiB: %v", err)
	}
	if left := must(os.ReadDir(tiny)); len(left) > 0 {
		t.Errorf("%s was left on the full drive", left[0].Name())
	}
}

// Two packings of one file notice each other.
func TestPackTwice(t *testing.T) {
	dir := t.TempDir()
	m, layers := packable(t, filepath.Join(dir, "m.gguf"), 1, 12)
	var second error
	_, err := Pack(context.Background(), m, layers, m.SlabPath(), PackOptions{Progress: func(string, int64, int64) {
		if second == nil {
			_, second = Pack(context.Background(), m, layers, m.SlabPath(), PackOptions{})
		}
	}})
	if err != nil || second == nil || !strings.Contains(second.Error(), "another program") {
		t.Errorf("first %v, second %v", err, second)
	}
}

// The slab beside a model is found under its names and taken if it is of this
// very model; else the words say what differs.
func TestSidecar(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "m.gguf")
	m, layers := packable(t, path, 1, 13)
	if side, words := m.Sidecar(); side != nil || words != "" {
		t.Errorf("none: %v, %q", side, words)
	}
	pack(t, m, layers)
	good := readFile(t, filepath.Join(dir, "m.slab"))
	stamp := must(os.Stat(path)).ModTime()
	fits := func(m *Model, at string) {
		t.Helper()
		side, words := m.Sidecar()
		if side == nil || words != "" || side.Files[0].Path != at {
			t.Fatalf("%v, %q, want %s", side, words, at)
		}
		if up, err := side.Unpacked(); err != nil || up == nil || up.Files[0].Path != m.Files[0].Path {
			t.Errorf("the slab's model is %v, %v", up, err)
		} else {
			up.Close()
		}
		side.Close()
	}
	fits(m, filepath.Join(dir, "m.slab"))
	if err := os.Rename(filepath.Join(dir, "m.slab"), path+".slab"); err != nil {
		t.Fatal(err)
	}
	fits(m, path+".slab")
	not := func(m *Model, want string) {
		t.Helper()
		if side, words := m.Sidecar(); side != nil || !strings.Contains(words, want) || !strings.Contains(words, path+".slab") {
			t.Errorf("%v, %q, want %q", side, words, want)
		}
	}
	os.Chtimes(path, stamp, stamp.Add(time.Nanosecond*1000))
	not(m, "another time")
	os.Chtimes(path, stamp, stamp)
	fits(m, path+".slab")
	writeFile(t, path, append(readFile(t, path), 0))
	not(open(t, path), "another size")
	b := readFile(t, path)
	b = b[:len(b)-1]
	b[bytes.Index(b, []byte("general.arch"))+len("general.architecture")+4+8] ^= 1 // a letter of its value
	writeFile(t, path, b)
	not(open(t, path), "another header")
	good[slabBlock] ^= 1
	writeFile(t, path+".slab", good)
	not(open(t, path), "damaged")

	split, layers := packable(t, filepath.Join(dir, "s.gguf"), 3, 14)
	pack(t, split, layers)
	fits(split, filepath.Join(dir, "s.slab"))
	last := open(t, filepath.Join(dir, "s-00003-of-00003.gguf"))
	fits(last, filepath.Join(dir, "s.slab"))
	os.Chtimes(last.Files[2].Path, stamp, time.Unix(1, 0))
	if side, words := split.Sidecar(); side != nil || !strings.Contains(words, "file 3 had another time") {
		t.Errorf("%v, %q", side, words)
	}
}

// The checker names tensor, expert and byte of numbers that are out of range, of
// bytes that differ from the packed model's, and of what cannot be read.
func TestVerify(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "m.gguf")
	specs := []TensorSpec{{"norm", quant.F32, []int64{5}}, {"ff", quant.Q8_0, []int64{64, 3, 4}}}
	write := func(spoil func(norm, ff []byte)) *Model {
		norm, ff := make([]byte, specs[0].Bytes()), make([]byte, specs[1].Bytes())
		spoil(norm, ff)
		w := must(CreateGGUF(path, sampleMeta(), specs))
		w.Write(norm)
		w.Write(ff)
		if err := w.Finish(); err != nil {
			t.Fatal(err)
		}
		return open(t, path)
	}
	layers := []ExpertLayer{{Layer: 3, Experts: 4, Parts: []string{"ff"}}}
	m := write(func(norm, ff []byte) {
		binary.LittleEndian.PutUint32(norm[12:], 0x7fc00000)        // NaN
		binary.LittleEndian.PutUint16(ff[34*(6*2+3):], 0x7c00)      // infinite: block 3 of expert 2
		binary.LittleEndian.PutUint16(ff[34*(6*2+5)+2:], 0x7c00)    // a code
		binary.LittleEndian.PutUint16(ff[34*(6*3+1)+4:], 0x1234)    // a code
		binary.LittleEndian.PutUint16(ff[34*(6*3+1)+30:], 0x1234)   // a code
		binary.LittleEndian.PutUint16(ff[len(ff)-2:], uint16(4321)) // a code
	})
	v, err := Verify(context.Background(), m, nil, nil)
	if err != nil || len(v.Bad) != 2 {
		t.Fatalf("%+v, %v", v, err)
	}
	if b, x := v.Bad[0], m.Tensors[0]; b.Tensor != "norm" || b.Off != x.Off+12 || b.Key != (Key{-1, -1}) || !strings.Contains(b.Err.Error(), "element 3") {
		t.Errorf("%+v", b)
	}
	if b, x := v.Bad[1], m.Tensors[1]; b.Tensor != "ff" || b.Off != x.Off+34*15 || b.Key != (Key{-1, 2}) || !strings.Contains(b.Err.Error(), "block 15") {
		t.Errorf("%+v", b)
	}
	s := pack(t, m, layers)
	v, err = Verify(context.Background(), s, m, nil)
	if err != nil || len(v.Bad) != 2 || v.Bad[1].Key != (Key{3, 2}) || v.Bad[1].Tensor != "ff" {
		t.Fatalf("%+v, %v", v, err)
	}

	ok := write(func(norm, ff []byte) {})
	s = pack(t, ok, layers)
	other := write(func(norm, ff []byte) { ff[34*6*1+9] = 1; norm[17] = 1 })
	v, err = Verify(context.Background(), s, other, nil)
	if err != nil || len(v.Bad) != 2 || v.Bad[0].Off != s.Tensors[0].Off+17 || v.Bad[1].Key != (Key{3, 1}) || v.Bad[1].Off != s.slab.stacks[0].at(1)+9 {
		t.Errorf("%+v, %v", v, err)
	}
	if err := os.Truncate(path, other.Tensors[1].Off+10); err != nil {
		t.Fatal(err)
	}
	if v, err = Verify(context.Background(), other, nil, nil); err != nil || len(v.Bad) != 1 || v.Bad[0].Tensor != "ff" {
		t.Errorf("%+v, %v", v, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Verify(ctx, s, nil, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// A slab of more than a terabyte opens by its index alone, which is small, and
// its last expert, far behind 2^40, is read right.
func TestSlabHuge(t *testing.T) {
	dir := t.TempDir()
	const experts, count = 256, 60
	var specs []TensorSpec
	var layers []ExpertLayer
	for i := range count {
		l := ExpertLayer{Layer: i, Experts: experts}
		for _, p := range []string{"gate", "up", "down"} {
			s := TensorSpec{fmt.Sprintf("blk.%d.%s", i, p), quant.I8, []int64{4096, 9000, experts}}
			specs, l.Parts = append(specs, s), append(l.Parts, s.Name)
		}
		layers = append(layers, l)
	}
	head, _, size, err := ggufHeader("m", sampleMeta(), specs)
	if err != nil {
		t.Fatal(err)
	}
	sparse := func(name string, size int64, at map[int64][]byte) string {
		path := filepath.Join(dir, name)
		f := must(os.Create(path))
		defer f.Close()
		if err := f.Truncate(size); err != nil {
			t.Skipf("needs a file system with sparse files of %d bytes: %v", size, err)
		}
		for off, b := range at {
			if _, err := f.WriteAt(b, off); err != nil {
				t.Fatal(err)
			}
		}
		return path
	}
	m := open(t, sparse("m.gguf", size, map[int64][]byte{0: head}))
	s, err := layOut(m, layers, nil, "s")
	if err != nil {
		t.Fatal(err)
	}
	if s.size < 1<<40 || s.front() > 1<<20 {
		t.Fatalf("a slab of %d bytes, %d of them index", s.size, s.front())
	}
	last := s.stacks[count-1]
	b := make([]byte, last.span)
	zero := crc32.Checksum(b, castagnoli)
	for i := range s.sums {
		s.sums[i] = zero
	}
	copy(b[last.span-3:], "end")
	last.sums[experts-1] = crc32.Checksum(b, castagnoli)
	front := s.frontData()
	p := open(t, sparse("m.slab", s.size, map[int64][]byte{
		0: s.header(slabMagic, crc32.Checksum(front, castagnoli)), slabBlock: front,
		last.at(experts-1) + last.span - 3: []byte("end"),
	}))
	if side, words := m.Sidecar(); side == nil {
		t.Error(words)
	} else {
		side.Close()
	}
	eachMode(t, func(t *testing.T, mode Mode) {
		src := slabSource(t, p, layers, SourceOptions{Mode: mode})
		f := &Fetch{}
		if n := src.SlotBytes(0); n > 0 {
			slot := must(offheap.Alloc(n))
			defer offheap.Free(slot)
			f.Slot = slot
		}
		if err := load(src, f, Key{count - 1, experts - 1}); err != nil {
			t.Fatal(err)
		}
		if !bytes.HasSuffix(f.Parts[2], []byte("\x00end")) {
			t.Error("other bytes")
		}
		src.Evict(f)
	})
}

// Whatever a file says, the parser answers with a slab whose items lie in the file
// and apart, or with an error; also when its checksums fit. The input is the
// header's fields, then the front; behind them, and between, are zeros.
func FuzzSlab(f *testing.F) {
	m, layers := packable(f, filepath.Join(f.TempDir(), "m.gguf"), 1, 15)
	s := pack(f, m, layers)
	good := readFile(f, m.SlabPath())
	f.Add(slices.Concat(good[:atEnd], good[slabBlock:][:s.slab.front()]))
	f.Fuzz(func(t *testing.T, fields []byte) {
		b := make([]byte, slabBlock+max(0, len(fields)-atEnd))
		copy(b[:atEnd], fields)
		copy(b[slabBlock:], fields[min(len(fields), atEnd):])
		le := binary.LittleEndian
		size := int64(le.Uint64(b[atSize:]) % (1 << 50))
		le.PutUint64(b[atSize:], uint64(size))
		checkParse(t, b, size)
		n := frontBytes(int(le.Uint32(b[atSources:])), int(le.Uint32(b[atTensors:])), int(le.Uint32(b[atStacks:])), int(le.Uint32(b[atSums:])), int(le.Uint32(b[atHead:])))
		front := b[slabBlock:]
		if n > int64(len(front)) {
			return
		}
		front = front[:n]
		le.PutUint32(b[atFrontSum:], crc32.Checksum(front, castagnoli))
		id := decodeIdentity(front[:min(n, int64(le.Uint32(b[atSources:]))*sourceSize)]).Hash()
		copy(b[atIdentity:], id[:])
		le.PutUint32(b[atHeadSum:], crc32.Checksum(b[:atHeadSum], castagnoli))
		checkParse(t, b, size)
	})
}

// longer is bytes with zeros behind them.
type longer []byte

func (b longer) ReadAt(p []byte, off int64) (int, error) {
	clear(p)
	if off < int64(len(b)) {
		copy(p, b[off:])
	}
	return len(p), nil
}

// checkParse parses a slab of size bytes that begins with b.
func checkParse(t *testing.T, b []byte, size int64) {
	s, err := parseSlab(longer(b), size, "fuzz")
	if err != nil {
		return
	}
	at := int64(slabBlock)
	for i, it := range s.items() {
		if it.off < at || it.n < 1 || it.n > size-it.off {
			t.Fatalf("item %d: %+v, the last ends at %d, the file at %d", i, it, at, size)
		}
		at = it.off + it.n
	}
	for _, x := range s.tensors {
		if x.stack != nil {
			n := int64(x.stack.experts)
			if off, share := x.at(n-1, n); off < 0 || share > size-off {
				t.Fatalf("tensor %+v lies outside the file", x)
			}
		}
	}
}

// A header made from random fields, its checksums right, never panics and never
// describes what the file does not hold.
func TestSlabRandomFields(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	rng := rand.New(rand.NewPCG(seed, 16))
	m, layers := packable(t, filepath.Join(t.TempDir(), "m.gguf"), 1, 16)
	pack(t, m, layers)
	good := readFile(t, m.SlabPath())
	le := binary.LittleEndian
	records := slabBlock + sourceSize // to the stacks' end
	end := records + len(m.Tensors)*tensorSize + 3*stackSize
	odd := []uint64{0, 1, 63, 64, 4095, 4096, 1 << 31, 1<<32 - 1, 1 << 32, 1 << 61, 1<<63 - 4096, 1 << 63, 1<<64 - 4096, 1<<64 - 1}
	for range 3000 {
		b := slices.Clone(good)
		for range 1 + rng.IntN(3) {
			at := records + rng.IntN(end-records)&^7
			if rng.IntN(4) == 0 {
				at = atFlags + rng.IntN(atFrontSum-atFlags)&^3
			}
			v := odd[rng.IntN(len(odd))]
			if rng.IntN(2) == 0 {
				v = le.Uint64(b[at:]) + uint64(rng.IntN(9)-4)*uint64(1<<rng.IntN(14))
			}
			if rng.IntN(2) == 0 {
				le.PutUint32(b[at:], uint32(v))
			} else {
				le.PutUint64(b[at:], v)
			}
		}
		if n := frontBytes(int(le.Uint32(b[atSources:])), int(le.Uint32(b[atTensors:])), int(le.Uint32(b[atStacks:])), int(le.Uint32(b[atSums:])), int(le.Uint64(b[atHead:])&(1<<40-1))); n < int64(len(b))-slabBlock {
			le.PutUint32(b[atFrontSum:], crc32.Checksum(b[slabBlock:slabBlock+n], castagnoli))
		}
		le.PutUint32(b[atHeadSum:], crc32.Checksum(b[:atHeadSum], castagnoli))
		checkParse(t, b, int64(len(b)))
	}
}

// Of two copies of a slab, one damaged, the other answers: every expert and every
// dense tensor is served, and the bad reads are counted.
func TestChecksumOtherCopy(t *testing.T) {
	dir := t.TempDir()
	m, layers := packable(t, filepath.Join(dir, "m.gguf"), 1, 17)
	good := pack(t, m, layers)
	b := readFile(t, m.SlabPath())
	for _, it := range good.slab.items() {
		b[it.off+it.n/2] ^= 2
	}
	bad := filepath.Join(dir, "bad.slab")
	writeFile(t, bad, b)
	for mode := Slab; mode <= Pread; mode++ {
		s, err := OpenCopies(bad, m.SlabPath())
		if err != nil {
			t.Fatal(err)
		}
		src := slabSource(t, s, layers, SourceOptions{Mode: mode})
		f := expertFetches(t, src, layers, 1)[0]
		for _, k := range allKeys(layers) {
			if err := load(src, f, k); err != nil {
				t.Fatal(err)
			}
			st := good.slab.stacks[k.Layer/2]
			if crc32.Checksum(f.Slot[:st.span], castagnoli) != st.sums[k.Expert] {
				t.Errorf("%v: the damaged bytes are served", k)
			}
		}
		if st := src.Stats(); st.Checksums == 0 || st.Loads != 18 {
			t.Errorf("stats %+v", st)
		}
		src.Close()
		s.Close()
	}
	// Load heals dense tensors too, and refuses the experts' as whole tensors.
	s, err := OpenCopies(bad, m.SlabPath())
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	src, err := s.Source(layers, SourceOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	dense := slices.DeleteFunc(slices.Clone(s.Tensors), func(x Tensor) bool { return x.stack != nil })
	arena := must(offheap.Alloc(src.ResidentBytes(dense)))
	defer offheap.Free(arena)
	data, _, err := src.Load(context.Background(), arena, dense)
	if err != nil {
		t.Fatal(err)
	}
	for i, x := range dense {
		if !bytes.Equal(data[i], tensorBytes(t, m, x.Name)) {
			t.Errorf("tensor %s has other bytes", x.Name)
		}
	}
	x, _ := s.Tensor(layers[0].Parts[0])
	var fe *FormatError
	if _, _, err := src.Load(context.Background(), arena, []Tensor{x}); !errors.As(err, &fe) {
		t.Errorf("an expert's part as a whole tensor: %v", err)
	}
}

// A .part that no packing has begun is somebody's: it stays, unless told otherwise.
func TestPackForeignPart(t *testing.T) {
	dir := t.TempDir()
	m, layers := packable(t, filepath.Join(dir, "m.gguf"), 1, 9)
	for name, text := range map[string]string{"short": "half of a download", "magic": "SLUICEPT and more", "long": strings.Repeat("half of a download ", 1000), "zeros": strings.Repeat("\x00", 10000) + "rest"} {
		out := filepath.Join(dir, name+".slab")
		writeFile(t, out+".part", []byte(text))
		if _, err := Pack(t.Context(), m, layers, out, PackOptions{}); err == nil || !strings.Contains(err.Error(), "not what an interrupted packing leaves") {
			t.Errorf("%s: error %v", name, err)
		}
		if string(readFile(t, out+".part")) != text {
			t.Errorf("%s: the file was changed", name)
		}
		if _, err := Pack(t.Context(), m, layers, out, PackOptions{Restart: true}); err != nil {
			t.Errorf("%s, --restart: %v", name, err)
		}
	}
}
