package storage

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"sluice/internal/offheap"
)

// An expertModel is a model of random bytes, its tensors at odd places, made by
// hand; it knows what every expert's parts are.
type expertModel struct {
	*Model
	data   [][]byte // of the files
	layers []ExpertLayer
}

// newExpertModel writes two files. Offsets are odd except where said, the last
// tensor of each file ends at the odd end of the file.
func newExpertModel(t testing.TB, seed uint64) *expertModel {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 1))
	m := &expertModel{Model: &Model{byName: map[string]int{}}, data: make([][]byte, 2)}
	for i := range m.data {
		m.data[i] = make([]byte, 777+rng.IntN(5000)|1)
	}
	add := func(layer, experts int, shares ...int64) {
		el := ExpertLayer{Layer: layer, Experts: experts}
		for i, n := range shares {
			file := (layer + i) / 2 % 2
			if n%4096 == 0 {
				m.data[file] = append(m.data[file], make([]byte, -len(m.data[file])&4095)...)
			} else if layer != 7 { // the tensors of layer 7 stand one at the other
				m.data[file] = append(m.data[file], make([]byte, rng.IntN(9000))...)
				m.data[file] = append(m.data[file], make([]byte, 1-len(m.data[file])&1)...)
			}
			tn := Tensor{
				Name: fmt.Sprintf("l%d.%d", layer, i), Dims: []int64{n, int64(experts)},
				File: file, Off: int64(len(m.data[file])), Bytes: n * int64(experts),
			}
			m.data[file] = append(m.data[file], make([]byte, tn.Bytes)...)
			m.byName[tn.Name] = len(m.Tensors)
			m.Tensors = append(m.Tensors, tn)
			el.Parts = append(el.Parts, tn.Name)
		}
		m.layers = append(m.layers, el)
	}
	add(0, 7, 20001, 12289, 99) // two files
	add(1, 16, 8192, 4096)      // already aligned
	add(2, 5, 1, 90001, 4097, 12287)
	add(7, 1, 301, 302, 303) // neighbours: one read a file
	add(8, 12, 33331, 33333, 33335)
	add(9, 3, 15002, 777, 15004)
	slices.Reverse(m.layers[0].Parts) // roles need not come in file order
	dir := t.TempDir()
	for i := range m.data {
		if len(m.data[i])&1 == 0 {
			t.Fatalf("file %d ends at an even byte", i)
		}
		words := make([]byte, 0, len(m.data[i])+8)
		for len(words) < len(m.data[i]) {
			words = binary.LittleEndian.AppendUint64(words, rng.Uint64())
		}
		copy(m.data[i], words)
		path := filepath.Join(dir, fmt.Sprintf("part%d.bin", i))
		if err := os.WriteFile(path, m.data[i], 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		m.Files = append(m.Files, File{Path: path, Size: int64(len(m.data[i])), f: f})
	}
	return m
}

// keys are all experts of the model.
func (m *expertModel) keys() (all []Key) {
	for _, l := range m.layers {
		for e := range l.Experts {
			all = append(all, Key{int32(l.Layer), int32(e)})
		}
	}
	return all
}

func (m *expertModel) layer(i int32) ExpertLayer {
	return m.layers[slices.IndexFunc(m.layers, func(l ExpertLayer) bool { return l.Layer == int(i) })]
}

// extent is where a part of an expert lies.
func (m *expertModel) extent(k Key, part int) (file int, off, n int64) {
	l := m.layer(k.Layer)
	tn, _ := m.Tensor(l.Parts[part])
	n = tn.Bytes / int64(l.Experts)
	return tn.File, tn.Off + n*int64(k.Expert), n
}

// check wants f to hold its expert, and nothing else.
func (m *expertModel) check(t *testing.T, f *Fetch) {
	t.Helper()
	if f.Err != nil {
		t.Fatalf("%v: %v", f.Key, f.Err)
	}
	parts := len(m.layer(f.Key.Layer).Parts)
	for p := range f.Parts {
		if p >= parts {
			if f.Parts[p] != nil {
				t.Fatalf("%v: part %d is there, but the layer has %d", f.Key, p, parts)
			}
			continue
		}
		file, off, n := m.extent(f.Key, p)
		if !bytes.Equal(f.Parts[p], m.data[file][off:off+n]) {
			t.Fatalf("%v: part %d is not bytes %d to %d of file %d", f.Key, p, off, off+n, file)
		}
		if int64(cap(f.Parts[p])) != n {
			t.Fatalf("%v: part %d reaches into its neighbour", f.Key, p)
		}
	}
}

// source opens a source of all layers in the mode, or skips the test.
func (m *expertModel) source(t testing.TB, opt SourceOptions) *Reader {
	t.Helper()
	src, err := m.Source(m.layers, opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { src.Close() })
	if src.Mode() != opt.Mode {
		t.Skipf("needs the storage mode %v: %s", opt.Mode, strings.Join(src.Notices(), "; "))
	}
	return src
}

// fetches makes n of them, each with a slot for any layer and a guard behind it,
// which the test's end looks at.
func (m *expertModel) fetches(t testing.TB, src Source, n int) []*Fetch {
	t.Helper()
	var size int64
	for _, l := range m.layers {
		size = max(size, src.SlotBytes(l.Layer))
	}
	all := make([]*Fetch, n)
	for i := range all {
		all[i] = new(Fetch)
		if size == 0 { // mmap
			continue
		}
		b, err := offheap.Alloc(size + 4096)
		if err != nil {
			t.Fatal(err)
		}
		guard := bytes.Repeat([]byte{0xa5}, 4096)
		copy(b[size:], guard)
		all[i].Slot = b[:size:size]
		t.Cleanup(func() {
			if !bytes.Equal(b[size:], guard) {
				t.Error("bytes were written behind a slot")
			}
			offheap.Free(b)
		})
	}
	return all
}

// eachMode runs a test for each way to read.
func eachMode(t *testing.T, f func(t *testing.T, mode Mode)) {
	for mode := Slab; mode <= MMap; mode++ {
		t.Run(mode.String(), func(t *testing.T) { f(t, mode) })
	}
}

// Whatever the mode, the depth, the order and the number in flight, the bytes
// are those of the files, and the counters add up.
func TestSourceBytes(t *testing.T) {
	eachMode(t, func(t *testing.T, mode Mode) {
		for _, depth := range []int{0, 1, 3, 64} {
			seed := rand.Uint64()
			t.Logf("depth %d seed %d", depth, seed)
			rng := rand.New(rand.NewPCG(seed, 2))
			m := newExpertModel(t, seed)
			src := m.source(t, SourceOptions{Mode: mode, Depth: depth})
			idle := m.fetches(t, src, 64)
			todo := slices.Concat(m.keys(), m.keys())
			rng.Shuffle(len(todo), func(i, j int) { todo[i], todo[j] = todo[j], todo[i] })
			var payload int64
			flying := map[*Fetch]bool{}
			reap := func() {
				f := src.Reap()
				if !flying[f] {
					t.Fatal("Reap gave a fetch that was not in flight")
				}
				delete(flying, f)
				m.check(t, f)
				payload += src.ExpertBytes(int(f.Key.Layer))
				src.Evict(f)
				idle = append(idle, f)
			}
			loads := int64(len(todo))
			for len(todo) > 0 {
				n := min(len(todo), len(idle), rng.IntN(64))
				batch := idle[len(idle)-n:]
				for i, f := range batch {
					f.Key = todo[i]
					flying[f] = true
				}
				src.Submit(batch)
				todo, idle = todo[n:], slices.Clone(idle[:len(idle)-n])
				for k := rng.IntN(len(flying) + 1); k > 0; k-- {
					reap()
				}
			}
			for len(flying) > 0 {
				reap()
			}
			st := src.Stats()
			if st.Loads != loads || st.LoadBytes != payload || st.Retries != 0 || st.ReadBytes < payload {
				t.Errorf("stats %+v; want %d loads of %d bytes and no retries", st, loads, payload)
			}
			if err := src.Close(); err != nil {
				t.Error(err)
			}
		}
	})
}

// Slots are as the contract says, and neighbouring parts share their blocks.
func TestSlotBytes(t *testing.T) {
	m := newExpertModel(t, 1)
	src := m.source(t, SourceOptions{Mode: Pread})
	if got := src.SlotBytes(1); got != 12288 {
		t.Errorf("an expert of 8192+4096 aligned bytes takes a slot of %d", got)
	}
	if got := src.SlotBytes(7); got > 3*4096 {
		t.Errorf("an expert of 906 bytes in two files takes a slot of %d", got)
	}
	for _, l := range m.layers {
		var payload int64
		for p := range l.Parts {
			_, _, n := m.extent(Key{int32(l.Layer), 0}, p)
			payload += n
		}
		if got := src.ExpertBytes(l.Layer); got != payload {
			t.Errorf("layer %d: an expert has %d bytes, not %d", l.Layer, got, payload)
		}
		if got := src.SlotBytes(l.Layer); got < payload || got%4096 != 0 || got > payload+int64(len(l.Parts))*2*4096 {
			t.Errorf("layer %d: a slot of %d bytes for %d", l.Layer, got, payload)
		}
	}
	if got := m.source(t, SourceOptions{Mode: MMap}).SlotBytes(0); got != 0 {
		t.Errorf("a mapping needs slots of %d bytes", got)
	}
}

// The plan of any expert covers its parts, is aligned, and does not overlap in memory.
func TestLayout(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	rng := rand.New(rand.NewPCG(seed, 3))
	for range 20000 {
		l, align := layer{experts: 1 + rng.Int32N(9)}, int64(1)<<rng.IntN(15)
		for p := range 1 + rng.IntN(MaxParts) {
			var x part
			for i := range 1 + p%2 { // some have bytes in two places
				share := 1 + rng.Int64N(3*align)
				x.from[i] = source{n: share, at: place{rng.IntN(2), rng.Int64N(3 * align)}, stride: share}
				if rng.IntN(2) == 0 { // or a tensor of its own for each expert
					for range l.experts {
						x.from[i].places = append(x.from[i].places, place{rng.IntN(2), rng.Int64N(9 * align)})
					}
				}
			}
			l.parts = append(l.parts, x)
		}
		var st fetchState
		e := rng.Int32N(l.experts)
		size := l.layout(&st, e, align)
		at := int64(0)
		for _, r := range st.reads[:st.n] {
			if r.off%align != 0 || r.size%align != 0 || r.need > r.size || r.need <= r.size-align || r.at != at {
				t.Fatalf("align %d parts %v expert %d: read %+v", align, l.parts, e, r)
			}
			at += r.size
		}
		if at != size {
			t.Fatalf("align %d parts %v expert %d: reads of %d bytes, slot %d", align, l.parts, e, at, size)
		}
		for p, x := range l.parts {
			for i, src := range x.from {
				at := src.of(int64(e))
				if src.n > 0 && !slices.ContainsFunc(st.reads[:st.n], func(r read) bool {
					return r.file == at.file && at.off >= r.off && at.off+src.n <= r.off+r.need && st.view[p][i] == r.at+at.off-r.off
				}) {
					t.Fatalf("align %d parts %v expert %d: part %d is in no read of %+v", align, l.parts, e, p, st.reads[:st.n])
				}
			}
		}
	}
}

// faults puts results in the place of those of one read, one after the other;
// all else it lets through.
type faults struct {
	mu       sync.Mutex
	file     string
	from, to int64
	script   []fault
}

type fault struct {
	n   int   // bytes that arrive, if err is nil
	err error // or this
}

func (x *faults) result(file string, off int64, p []byte, n int, err error) (int, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if file != x.file || off < x.from || off >= x.to || len(x.script) == 0 {
		return n, err
	}
	s := x.script[0]
	x.script = x.script[1:]
	if s.err != nil {
		s.n = 0
	}
	return min(s.n, n), s.err
}

// spoil is a result like faults', which also overwrites what did not arrive, as
// memory that a device left half done.
func (x *faults) spoil(file string, off int64, p []byte, n int, err error) (int, error) {
	k, e := x.result(file, off, p, n, err)
	if e != nil || k < n {
		for i := range p[k:] {
			p[k+i] = 0x5a
		}
	}
	return k, e
}

// One read of one fetch goes wrong in every way, among others in flight.
func TestSourceFaults(t *testing.T) {
	const large = 1 << 30
	eof := io.ErrUnexpectedEOF
	m := newExpertModel(t, 4)
	victim := Key{8, 5}
	file, off, n := m.extent(victim, 1)
	start, need := off&^4095, off&4095+n
	for _, c := range []struct {
		name    string
		script  []fault
		retries int64
		err     error
		got     int64 // bytes that arrived before err, from the read's start
	}{
		{"one block", []fault{{n: 4096}}, 0, nil, 0},
		{"blocks one by one", []fault{{n: 4096}, {n: 4096}, {n: 4096}}, 0, nil, 0},
		{"odd shorts", []fault{{n: 4097}, {n: 8191}, {n: 5000}}, 0, nil, 0},
		{"all but a byte", []fault{{n: int(need) - 1}}, 0, nil, 0},
		{"exactly what is needed", []fault{{n: int(need)}}, 0, nil, 0},
		{"interrupted", []fault{{err: unix.EINTR}, {n: 4096}, {err: unix.EINTR}, {err: unix.EINTR}}, 0, nil, 0},
		{"nothing", []fault{{n: 0}}, 1, nil, 0},
		{"a byte", []fault{{n: 1}}, 1, nil, 0},
		{"a sector", []fault{{n: 512}}, 1, nil, 0},
		{"all but a byte of a block", []fault{{n: 4095}}, 1, nil, 0},
		{"an end after a block", []fault{{n: 4096}, {n: 0}}, 1, nil, 0},
		{"EIO", []fault{{err: unix.EIO}}, 1, nil, 0},
		{"EAGAIN", []fault{{err: unix.EAGAIN}}, 1, nil, 0},
		{"a block, EIO", []fault{{n: 4096}, {err: unix.EIO}}, 1, nil, 0},
		{"EIO, then all of it", []fault{{err: unix.EIO}, {n: large}}, 1, nil, 0},
		{"EIO twice", []fault{{err: unix.EIO}, {err: unix.EIO}}, 1, unix.EIO, 0},
		{"two blocks, EIO twice", []fault{{n: 8192 + 5}, {err: unix.EIO}, {err: unix.EIO}}, 1, unix.EIO, 8192},
		{"nothing twice", []fault{{n: 0}, {n: 0}}, 1, eof, 0},
		{"nothing, then bit by bit", []fault{{n: 0}, {n: 100}, {n: 1}, {n: 5000}}, 1, nil, 0},
		{"nothing, then too little", []fault{{n: 0}, {n: 100}, {n: 0}}, 1, eof, 100},
		{"EIO, then all but a byte", []fault{{err: unix.EIO}, {n: int(need) - 1}, {n: 0}}, 1, eof, need - 1},
		{"a block, EIO, a bit", []fault{{n: 4096}, {err: unix.EIO}, {n: 7}, {n: 0}}, 1, eof, 4096 + 7},
		{"EIO, a bit, EIO", []fault{{err: unix.EIO}, {n: 7}, {err: unix.EIO}}, 1, unix.EIO, 7},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, mode := range []Mode{Slab, Pread} {
				t.Run(mode.String(), func(t *testing.T) {
					x := &faults{file: m.Files[file].Path, from: start, to: off + n, script: slices.Clone(c.script)}
					src := m.source(t, SourceOptions{Mode: mode, dev: device{result: x.spoil}})
					testFault(t, m, src, x, victim, c.retries, c.err, start, need, c.got)
				})
			}
		})
	}
}

// The same for a mapping, whose tries are all or nothing, in both ways to populate it.
func TestMMapFaults(t *testing.T) {
	m := newExpertModel(t, 5)
	victim := Key{8, 5}
	file, off, n := m.extent(victim, 1)
	for _, c := range []struct {
		name    string
		script  []fault
		retries int64
		err     error
		got     int64
	}{
		{"short", []fault{{n: 4096}}, 1, nil, 0},
		{"EIO", []fault{{err: unix.EIO}}, 1, nil, 0},
		{"EIO twice", []fault{{err: unix.EIO}, {err: unix.EIO}}, 1, unix.EIO, 0},
		{"short twice", []fault{{n: 4096}, {n: 4097}}, 1, io.ErrUnexpectedEOF, 4097},
	} {
		for _, old := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/noPopulate=%v", c.name, old), func(t *testing.T) {
				x := &faults{file: m.Files[file].Path, from: off, to: off + n, script: slices.Clone(c.script)}
				src := m.source(t, SourceOptions{Mode: MMap, dev: device{result: x.result, noPopulate: old}})
				testFault(t, m, src, x, victim, c.retries, c.err, off, n, c.got)
			})
		}
	}
}

// testFault reads the victim among others: it meets what x does to it, they do
// not, and its slot serves again.
func testFault(t *testing.T, m *expertModel, src Source, x *faults, victim Key, retries int64, want error, off, n, got int64) {
	t.Helper()
	all := m.fetches(t, src, 16)
	for i, k := range m.keys()[:16] {
		all[i].Key = k
	}
	bad := all[9]
	bad.Key = victim
	src.Submit(all)
	for range all {
		f := src.Reap()
		if f != bad || want == nil {
			m.check(t, f)
			continue
		}
		var re *ReadError
		if !errors.As(f.Err, &re) || !errors.Is(f.Err, want) {
			t.Fatalf("error %v, want a ReadError of %v", f.Err, want)
		}
		if re.File != x.file || re.Off != off || re.Len != n || re.Got != got {
			t.Errorf("error %+v, want bytes %d+%d of %s, %d got", re, off, n, x.file, got)
		}
		if s := re.Error(); !strings.Contains(s, x.file) || !strings.Contains(s, fmt.Sprintf("byte %d:", off+got)) {
			t.Errorf("the error does not name file and byte: %s", s)
		}
		for _, p := range f.Parts {
			if p != nil {
				t.Error("a failed fetch has parts")
			}
		}
	}
	if len(x.script) > 0 {
		t.Errorf("%d faults never met", len(x.script))
	}
	loads := int64(16)
	if want != nil {
		loads--
	}
	if st := src.Stats(); st.Retries != retries || st.Loads != loads {
		t.Errorf("stats %+v, want %d retries and %d loads", st, retries, loads)
	}
	src.Submit([]*Fetch{bad})
	m.check(t, src.Reap())
}

// A file that is cut after it was opened is an error of the experts that are
// gone, at the byte where it ends now, in every mode; never a crash. When the
// bytes are back, so are the experts.
func TestSourceTruncated(t *testing.T) {
	test := func(t *testing.T, opt SourceOptions) {
		m := newExpertModel(t, 6)
		src := m.source(t, opt)
		all := m.fetches(t, src, 12)
		victim := Key{8, 7}
		file, off, n := m.extent(victim, 0)
		path := m.Files[file].Path
		// Cuts in the middle of the expert: at a block, in one, just short of its
		// end, and far before it.
		for _, cut := range []int64{off&^4095 + 8192, off + n/2, off + n - 1, off - 20000} {
			if err := os.Truncate(path, cut); err != nil {
				t.Fatal(err)
			}
			for i, f := range all {
				f.Key = Key{8, int32(i)}
			}
			src.Submit(all)
			for range all {
				f := src.Reap()
				gone, at := false, int64(0)
				for p := range 3 {
					if fl, o, n := m.extent(f.Key, p); fl == file && o+n > cut {
						if !gone {
							at = max(o, cut)
						}
						gone = true
					}
				}
				if !gone {
					m.check(t, f)
					continue
				}
				var re *ReadError
				if !errors.As(f.Err, &re) || !errors.Is(f.Err, io.ErrUnexpectedEOF) || re.File != path {
					t.Fatalf("cut at %d: %v: error %v, want an unexpected end of %s", cut, f.Key, f.Err, path)
				}
				if end := re.Off + re.Got; end != cut && re.Got > 0 || end > at {
					t.Errorf("cut at %d: %v: the error names byte %d, want %d: %v", cut, f.Key, end, at, re)
				}
			}
			w, err := os.OpenFile(path, os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := w.WriteAt(m.data[file][cut:], cut); err != nil {
				t.Fatal(err)
			}
			w.Close()
			src.Submit(all)
			for range all {
				m.check(t, src.Reap())
			}
		}
	}
	eachMode(t, func(t *testing.T, mode Mode) { test(t, SourceOptions{Mode: mode}) })
	t.Run("mmap/noPopulate", func(t *testing.T) { test(t, SourceOptions{Mode: MMap, dev: device{noPopulate: true}}) })
	t.Run("pread/buffered", func(t *testing.T) {
		test(t, SourceOptions{Mode: Pread, dev: device{directErr: unix.EINVAL}})
	})
}

// In a steady state nothing is allocated on the heap.
func TestSourceAllocs(t *testing.T) {
	eachMode(t, func(t *testing.T, mode Mode) {
		m := newExpertModel(t, 7)
		src := m.source(t, SourceOptions{Mode: mode})
		all := m.fetches(t, src, 8)
		for i, f := range all {
			f.Key = Key{8, int32(i)}
		}
		round := func() {
			src.Submit(all)
			for range all {
				if f := src.Reap(); f.Err != nil {
					t.Fatal(f.Err)
				}
			}
			for _, f := range all {
				src.Evict(f)
			}
		}
		if n := testing.AllocsPerRun(50, round); n != 0 {
			t.Errorf("%v allocations for 8 experts", n)
		}
	})
}

// Close waits for what is in flight, may come twice, and ends all goroutines.
func TestSourceClose(t *testing.T) {
	eachMode(t, func(t *testing.T, mode Mode) {
		m := newExpertModel(t, 8)
		m.source(t, SourceOptions{Mode: mode})
		before := runtime.NumGoroutine()
		src, err := m.Source(m.layers, SourceOptions{Mode: mode, Depth: 7})
		if err != nil {
			t.Fatal(err)
		}
		all := m.fetches(t, src, 12)
		for i, f := range all {
			f.Key = Key{8, int32(i)}
		}
		src.Submit(all)
		for range 2 {
			if err := src.Close(); err != nil {
				t.Error(err)
			}
		}
		// A goroutine that is done may still be on its way out, on a busy machine for long.
		for start := time.Now(); runtime.NumGoroutine() > before && time.Since(start) < 20*time.Second; {
			runtime.Gosched()
		}
		if n := runtime.NumGoroutine(); n > before {
			t.Errorf("%d goroutines before, %d after Close", before, n)
		}
		if mode != MMap {
			for _, f := range all {
				m.check(t, f) // it came in before Close returned
			}
		}
		mustPanic(t, "closed", func() { src.Submit(all[:1]) })
		next := m.source(t, SourceOptions{Mode: mode})
		next.Submit(all) // the fetches are the caller's again
		for range all {
			m.check(t, next.Reap())
		}
	})
}

// Evict drops the pages of the expert, not those that it shares with a neighbour.
func TestEvict(t *testing.T) {
	m := newExpertModel(t, 9)
	src := m.source(t, SourceOptions{Mode: MMap})
	all := m.fetches(t, src, 3)
	for i, f := range all {
		f.Key = Key{8, int32(4 + i)}
	}
	src.Submit(all)
	for range all {
		m.check(t, src.Reap())
	}
	present := func(part int) (inner, edges int) { // pages of all[1] that are mapped now
		pm, err := os.Open("/proc/self/pagemap")
		if err != nil {
			t.Skip("needs /proc/self/pagemap: ", err)
		}
		defer pm.Close()
		b := all[1].Parts[part]
		page := uint64(os.Getpagesize())
		lo := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
		hi := lo + uint64(len(b))
		for a := lo &^ (page - 1); a < hi; a += page {
			var e [8]byte
			if _, err := pm.ReadAt(e[:], int64(a/page*8)); err != nil {
				t.Skip("needs /proc/self/pagemap: ", err)
			}
			if e[7]&0x80 == 0 {
				continue
			}
			if a >= lo && a+page <= hi {
				inner++
			} else {
				edges++
			}
		}
		return inner, edges
	}
	for p := range 3 {
		if inner, edges := present(p); inner < 6 || edges != 2 {
			t.Fatalf("part %d: %d pages and %d edges are resident after the fetch", p, inner, edges)
		}
	}
	src.Evict(all[1])
	for p := range 3 {
		if inner, edges := present(p); inner != 0 || edges != 2 {
			t.Errorf("part %d: %d pages and %d edges are resident after Evict, want 0 and 2", p, inner, edges)
		}
	}
	for _, f := range all {
		m.check(t, f) // they come back by themselves
	}
}

// What the machine lacks is made good and said in words; the bytes stay right.
func TestSourceFallback(t *testing.T) {
	m := newExpertModel(t, 10)
	run := func(t *testing.T, opt SourceOptions, want ...string) {
		t.Helper()
		src, err := m.Source(m.layers, opt)
		if err != nil {
			t.Fatal(err)
		}
		defer src.Close()
		notices := src.Notices()
		if src.Mode() != Pread {
			t.Errorf("mode %v", src.Mode())
		}
		if len(notices) != len(want) {
			t.Fatalf("notices %q, want %q", notices, want)
		}
		for i, w := range want {
			a, b, _ := strings.Cut(w, "*")
			if !strings.HasPrefix(notices[i], a) || !strings.HasSuffix(notices[i], b) {
				t.Errorf("notice %q, want %q", notices[i], w)
			}
		}
		all := m.fetches(t, src, 8)
		for i, f := range all {
			f.Key = Key{8, int32(i)}
		}
		src.Submit(all)
		for range all {
			m.check(t, src.Reap())
		}
	}
	refused := "storage: O_DIRECT refused by the file system (*: EINVAL); using buffered pread"
	direct := device{directErr: unix.EINVAL}
	run(t, SourceOptions{Mode: Pread, dev: direct}, refused)
	run(t, SourceOptions{Mode: Slab, dev: direct}, refused)

	if src, err := m.Source(m.layers, SourceOptions{Mode: Slab}); err != nil || src.Mode() != Slab {
		t.Skip("needs io_uring and a file system with O_DIRECT")
	} else {
		src.Close()
	}
	for _, no := range []syscall.Errno{unix.EPERM, unix.ENOSYS, unix.ENOMEM} {
		run(t, SourceOptions{Mode: Slab, dev: device{ringErr: no}},
			"storage: io_uring is not to be had (*"+unix.ErrnoName(no)+"); using pread")
	}
}

// A path that has another file by now is not read.
func TestSourceReplaced(t *testing.T) {
	m := newExpertModel(t, 11)
	path := m.Files[1].Path
	if err := os.WriteFile(path+".new", m.data[1], 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	_, err := m.Source(m.layers, SourceOptions{Mode: Pread})
	if !errors.Is(err, errReplaced) || !strings.Contains(err.Error(), path) {
		t.Errorf("error %v", err)
	}
}

// Bad data and bad options are errors that say what and where.
func TestSourceErrors(t *testing.T) {
	for _, c := range []struct {
		name, want string
		bad        bool // *FormatError
		do         func(m *expertModel, opt *SourceOptions)
	}{
		{"no parts", "1 to 4 parts", false, func(m *expertModel, _ *SourceOptions) { m.layers[1].Parts = nil }},
		{"five parts", "1 to 4 parts", false, func(m *expertModel, _ *SourceOptions) { m.layers[1].Parts = make([]string, 5) }},
		{"no experts", "0 experts", false, func(m *expertModel, _ *SourceOptions) { m.layers[1].Experts = 0 }},
		{"negative layer", "layer -1", false, func(m *expertModel, _ *SourceOptions) { m.layers[1].Layer = -1 }},
		{"twice", "layer 0 is given twice", false, func(m *expertModel, _ *SourceOptions) { m.layers[1].Layer = 0 }},
		{"missing", `layer 1: tensor "nix": the model has none`, true, func(m *expertModel, _ *SourceOptions) { m.layers[1].Parts[0] = "nix" }},
		{"experts", "the last must be the number of experts, 17", true, func(m *expertModel, _ *SourceOptions) { m.layers[1].Experts = 17 }},
		{"one dim", "the last must be the number of experts", true, func(m *expertModel, _ *SourceOptions) { m.Tensors[0].Dims = []int64{7} }},
		{"uneven", "are not the same share for each of 7", true, func(m *expertModel, _ *SourceOptions) { m.Tensors[0].Bytes-- }},
		{"empty", "are not the same share", true, func(m *expertModel, _ *SourceOptions) { m.Tensors[0].Bytes = 0 }},
		{"beyond the end", "do not lie inside the file", true, func(m *expertModel, _ *SourceOptions) { m.Tensors[0].Off = m.Files[0].Size }},
		{"far beyond", "do not lie inside the file", true, func(m *expertModel, _ *SourceOptions) { m.Tensors[0].Off = 1<<63 - 1 }},
		{"negative offset", "do not lie inside the file", true, func(m *expertModel, _ *SourceOptions) { m.Tensors[0].Off = -4096 }},
		{"no such file", "lies in file 2 of 2", true, func(m *expertModel, _ *SourceOptions) { m.Tensors[0].File = 2 }},
		{"depth", "use 1 to 4096", false, func(_ *expertModel, o *SourceOptions) { o.Depth = 4097 }},
		{"negative depth", "use 1 to 4096", false, func(_ *expertModel, o *SourceOptions) { o.Depth = -1 }},
		{"mode", "no storage mode 9", false, func(_ *expertModel, o *SourceOptions) { o.Mode = 9 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, opt := newExpertModel(t, 12), SourceOptions{Mode: Pread}
			c.do(m, &opt)
			src, err := m.Source(m.layers, opt)
			if err == nil {
				src.Close()
				t.Fatal("no error")
			}
			if !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %q, want %q in it", err, c.want)
			}
			if _, ok := err.(*FormatError); ok != c.bad {
				t.Errorf("error of type %T", err)
			}
		})
	}
}

// Bugs of the caller panic, and say what is wrong.
func TestSourceMisuse(t *testing.T) {
	eachMode(t, func(t *testing.T, mode Mode) {
		m := newExpertModel(t, 13)
		src := m.source(t, SourceOptions{Mode: mode})
		f := m.fetches(t, src, 1)[0]
		submit := func(f *Fetch) func() { return func() { src.Submit([]*Fetch{f}) } }
		mustPanic(t, "nothing in flight", func() { src.Reap() })
		mustPanic(t, "layer 5", submit(&Fetch{Key: Key{5, 0}, Slot: f.Slot}))
		mustPanic(t, "has 12 experts", submit(&Fetch{Key: Key{8, 12}, Slot: f.Slot}))
		mustPanic(t, "has 12 experts", submit(&Fetch{Key: Key{8, -1}, Slot: f.Slot}))
		mustPanic(t, "layer 5", func() { src.SlotBytes(5) })
		if mode != MMap {
			mustPanic(t, "the slot has", submit(&Fetch{Key: Key{8, 0}, Slot: f.Slot[:src.SlotBytes(8)-1]}))
			mustPanic(t, "does not start at", submit(&Fetch{Key: Key{7, 0}, Slot: f.Slot[512:]}))
		}
		f.Key = Key{8, 0}
		src.Submit([]*Fetch{f})
		mustPanic(t, "in flight", submit(f))
		m.check(t, src.Reap())
	})
}

func mustPanic(t *testing.T, want string, f func()) {
	t.Helper()
	defer func() {
		t.Helper()
		if got := fmt.Sprint(recover()); !strings.Contains(got, want) {
			t.Errorf("panic %q, want %q in it", got, want)
		}
	}()
	f()
}
