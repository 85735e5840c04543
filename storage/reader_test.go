package storage

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sluice/internal/offheap"
)

// rough is a transport that holds tries back and gives them out of order, and
// that watches what the reader asks of it.
type rough struct {
	transport
	t       *testing.T
	rng     *rand.Rand // nil: in order, at once
	held    []*read
	depth   int // most tries at a drive, and as many in the background; 0: any
	flying  map[queue]int
	started []*read     // since the last submit
	batches []int       // sizes of submissions
	saw     func(*read) // each try as it starts
}

// queue names one of the two queues of a drive.
type queue struct {
	drive      int
	background bool
}

func (x *rough) start(r *read) {
	if x.flying == nil {
		x.flying = map[queue]int{}
	}
	q := queue{r.drive, r.background}
	if x.flying[q]++; x.depth > 0 && x.flying[q] > x.depth {
		x.t.Errorf("%d tries in %v, the depth is %d", x.flying[q], q, x.depth)
	}
	if x.saw != nil {
		x.saw(r)
	}
	x.started = append(x.started, r)
	x.transport.start(r)
}

func (x *rough) submit() {
	if len(x.started) > 0 {
		x.batches = append(x.batches, len(x.started))
		x.started = x.started[:0]
	}
	x.transport.submit()
}

func (x *rough) next() *read {
	x.drain()
	if len(x.held) == 0 || x.rng != nil && x.rng.IntN(3) > 0 {
		return nil
	}
	i := 0
	if x.rng != nil {
		i = x.rng.IntN(len(x.held))
	}
	r := x.held[i]
	x.held = slices.Delete(x.held, i, i+1)
	x.flying[queue{r.drive, r.background}]--
	return r
}

func (x *rough) drain() {
	for r := x.transport.next(); r != nil; r = x.transport.next() {
		x.held = append(x.held, r)
	}
}

func (x *rough) wait() {
	for x.drain(); len(x.held) == 0; x.drain() {
		x.transport.wait()
	}
}

// copyTo makes a second drive of the model, in a folder of its own.
func (m *expertModel) copyTo(t testing.TB) (paths []string) {
	t.Helper()
	dir := t.TempDir()
	var files []File
	for i := range m.data {
		path := filepath.Join(dir, filepath.Base(m.Files[i].Path))
		if err := os.WriteFile(path, m.data[i], 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		files = append(files, File{Path: path, Size: int64(len(m.data[i])), f: f})
		paths = append(paths, path)
	}
	m.copies = append(m.copies, files)
	return paths
}

// readAll reads each key once, all in one submission, and gives the fetches back.
func (m *expertModel) readAll(t *testing.T, src *Reader, fetches []*Fetch, keys []Key) {
	t.Helper()
	for len(keys) > 0 {
		n := min(len(keys), len(fetches))
		for i, k := range keys[:n] {
			fetches[i].Key = k
		}
		src.Submit(fetches[:n])
		for i := range n {
			if i%2 == 0 {
				m.check(t, src.Reap())
			} else {
				m.check(t, polled(t, src))
			}
		}
		keys = keys[n:]
	}
}

// polled is the next fetch for one who polls, as far as Poll lets it: reads of
// io_uring need nobody beside.
func polled(t *testing.T, src *Reader) *Fetch {
	t.Helper()
	for {
		f, beside := src.Poll()
		switch {
		case beside != (src.Mode() != Slab):
			t.Fatalf("%v: Poll wants Reap beside: %v", src.Mode(), beside)
		case beside:
			return src.Reap()
		case f != nil:
			return f
		}
		runtime.Gosched()
	}
}

// Poll with nothing in flight has nothing, and nobody is needed beside.
func TestPollOfNothing(t *testing.T) {
	m := newExpertModel(t, 5)
	for mode := Slab; mode <= MMap; mode++ {
		src := m.source(t, SourceOptions{Mode: mode})
		if f, beside := src.Poll(); f != nil || beside {
			t.Errorf("%v: Poll gives %v, %v", mode, f, beside)
		}
	}
}

// A drive that delays, reorders, shortens and fails reads gives the same bytes,
// by any mode, depth and number of drives, with no more at a drive than its depth.
func TestRoughDrives(t *testing.T) {
	for mode := Slab; mode <= MMap; mode++ {
		for _, copies := range []int{0, 1, 2} {
			t.Run(fmt.Sprintf("%v/copies=%d", mode, copies), func(t *testing.T) {
				seed := rand.Uint64()
				t.Log("seed", seed)
				rng := rand.New(rand.NewPCG(seed, 4))
				m := newExpertModel(t, seed)
				for range copies {
					m.copyTo(t)
				}
				for _, depth := range []int{1, 3, 16} {
					x := &rough{t: t, rng: rng, depth: depth}
					wrong := map[string]bool{} // each range goes wrong once
					src := m.source(t, SourceOptions{Mode: mode, Depth: depth, dev: device{
						wrap: func(in transport) transport { x.transport = in; return x },
						result: func(file string, off int64, p []byte, n int, err error) (int, error) {
							k := fmt.Sprint(filepath.Base(file), (off+int64(n)+4095)&^4095) // a range is known by its end
							if wrong[k] || err != nil {
								return n, err
							}
							wrong[k] = true
							switch rng.IntN(4) {
							case 0:
								return 0, unix.EIO
							case 1:
								return rng.IntN(n + 1), nil
							case 2:
								return 0, unix.EINTR
							}
							return n, err
						},
					}})
					fetches := m.fetches(t, src, 24)
					keys := m.keys()
					rng.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
					m.readAll(t, src, fetches, keys)
					for _, f := range fetches {
						f.Background = rng.IntN(2) == 0
					}
					m.readAll(t, src, fetches, keys)
					if err := src.Close(); err != nil {
						t.Error(err)
					}
				}
			})
		}
	}
}

// The reads of a Submit go out in one submission, as many as the depth allows.
func TestOneSubmission(t *testing.T) {
	for _, mode := range []Mode{Slab, Pread} {
		m := newExpertModel(t, 20)
		x := &rough{t: t}
		src := m.source(t, SourceOptions{Mode: mode, Depth: 100, dev: device{wrap: func(in transport) transport { x.transport = in; return x }}})
		fetches := m.fetches(t, src, 12)
		m.readAll(t, src, fetches, m.keys()[7+16+5+1:][:12])
		if len(x.batches) != 1 || x.batches[0] != 36 {
			t.Errorf("%v: submissions of %v reads, want one of 36", mode, x.batches)
		}
	}
}

// Background reads start when nothing else waits, have a depth of their own, and
// Hurry puts those that wait among the others.
func TestBackground(t *testing.T) {
	m := newExpertModel(t, 21)
	var order []int32
	x := &rough{t: t, depth: 4, saw: func(r *read) {
		order = append(order, r.fetch.Key.Expert)
		if r.background != r.fetch.Background {
			t.Errorf("expert %d goes as background=%v", r.fetch.Key.Expert, r.background)
		}
	}}
	src := m.source(t, SourceOptions{Mode: Pread, Depth: 4, dev: device{wrap: func(in transport) transport { x.transport = in; return x }}})
	all := m.fetches(t, src, 8)
	for i, f := range all {
		f.Key, f.Background = Key{8, int32(i)}, i < 4 // three reads each
	}
	src.Submit(all[:4])
	if len(order) != 4 {
		t.Fatalf("of a depth of 4, background reads take %d", len(order))
	}
	src.Submit(all[4:6])
	if got := order[4:]; !slices.Equal(got, []int32{4, 4, 4, 5}) {
		t.Fatalf("beside them start %v", got)
	}
	src.Hurry(all[3])
	for range 6 {
		m.check(t, src.Reap())
	}
	// The start, then the rest of 5 and what was hurried, then the others.
	want := []int32{0, 0, 0, 1, 4, 4, 4, 5, 5, 5, 3, 3, 3, 1, 1, 2, 2, 2}
	if !slices.Equal(order, want) {
		t.Errorf("reads start in the order %v, want %v", order, want)
	}
	src.Hurry(all[0]) // over: nothing to do
}

// Slots in registered memory, whole or across the bounds of its buffers, hold the
// same bytes; memory can be let go and registered again; nothing is allocated.
func TestRegister(t *testing.T) {
	eachMode(t, func(t *testing.T, mode Mode) {
		m := newExpertModel(t, 22)
		src := m.source(t, SourceOptions{Mode: mode, dev: device{buffer: 5 << 14}})
		size := int64(0)
		for _, l := range m.layers {
			size = max(size, src.SlotBytes(l.Layer))
		}
		fetches := make([]*Fetch, 12)
		for i := range fetches {
			fetches[i] = new(Fetch)
		}
		var arenas [][]byte
		if size > 0 {
			arena, err := offheap.Alloc(size * int64(len(fetches)))
			if err != nil {
				t.Fatal(err)
			}
			defer offheap.Free(arena)
			defer src.Close() // first
			for i, f := range fetches {
				f.Slot = arena[int64(i)*size : int64(i+1)*size]
			}
			arenas = [][]byte{arena[:7*size], arena[7*size:]}
		}
		for _, a := range [][][]byte{arenas, nil, arenas[:len(arenas)/2], arenas} {
			src.Register(a)
			m.readAll(t, src, fetches, m.keys())
		}
		if n := src.Notices(); len(n) > 0 {
			t.Fatalf("notices %q", n)
		}
		batch := slices.Clone(fetches)
		for i, f := range batch {
			f.Key = Key{8, int32(i)}
		}
		if n := testing.AllocsPerRun(20, func() {
			src.Submit(batch)
			for range batch {
				if f := src.Reap(); f.Err != nil {
					t.Fatal(f.Err)
				}
			}
		}); n != 0 {
			t.Errorf("%v allocations", n)
		}
		src.Submit(batch[:1])
		mustPanic(t, "in flight", func() { src.Register(nil) })
		src.Reap()
	})
}

// Memory that may not be locked is said in words, with the limit, and the reads go on.
func TestRegisterRefused(t *testing.T) {
	for no, want := range map[error][]string{
		unix.ENOMEM: {"RLIMIT_MEMLOCK", "ulimit -l", "without registered memory"},
		unix.EINVAL: {"EINVAL", "without registered memory"},
	} {
		m := newExpertModel(t, 23)
		src := m.source(t, SourceOptions{Mode: Slab, dev: device{registerErr: no}})
		fetches := m.fetches(t, src, 4)
		src.Register([][]byte{fetches[0].Slot})
		n := src.Notices()
		if len(n) != 1 {
			t.Fatalf("notices %q", n)
		}
		for _, w := range want {
			if !strings.Contains(n[0], w) {
				t.Errorf("notice %q lacks %q", n[0], w)
			}
		}
		if again := src.Notices(); len(again) > 0 {
			t.Errorf("notices come again: %q", again)
		}
		m.readAll(t, src, fetches, m.keys())
	}
}

// Of two drives each does a share; where one fails a read the other gives it, and
// one that goes on failing is left out, in words. Without a good drive the error
// names what both said.
func TestTwoDrives(t *testing.T) {
	for _, mode := range []Mode{Slab, Pread} {
		t.Run(mode.String(), func(t *testing.T) {
			m := newExpertModel(t, 24)
			second := m.copyTo(t)
			bad := map[string]error{}
			short := map[string]bool{}
			dev := device{result: func(file string, off int64, p []byte, n int, err error) (int, error) {
				if bad[file] != nil {
					clear(p)
					return 0, bad[file]
				}
				if short[file] {
					clear(p)
					return 0, nil
				}
				return n, err
			}}
			src := m.source(t, SourceOptions{Mode: mode, dev: dev})
			if n := src.Notices(); len(n) != 1 || !strings.Contains(n[0], "one file system") {
				t.Errorf("notices %q, want one of the shared file system", n)
			}
			fetches := m.fetches(t, src, 12)
			m.readAll(t, src, fetches, m.keys())
			for _, d := range src.Drives() {
				if d.ReadBytes == 0 || d.Errors > 0 || d.Dropped {
					t.Errorf("a good drive: %+v", d)
				}
			}
			short[second[0]] = true
			for i := 0; i < 100 && !src.Drives()[1].Dropped; i++ {
				m.readAll(t, src, fetches, m.keys())
			}
			d := src.Drives()
			if !d[1].Dropped || d[0].Dropped || d[1].Errors == 0 || src.Stats().Retries != d[1].Errors {
				t.Errorf("drives %+v, %d retries", d, src.Stats().Retries)
			}
			n := src.Notices()
			if len(n) != 2 || !strings.Contains(n[0], "instead") || !strings.Contains(n[1], "left out") || !strings.Contains(n[1], second[0]) {
				t.Errorf("notices %q", n)
			}
			before := d[1].ReadBytes
			m.readAll(t, src, fetches, m.keys())
			if d := src.Drives(); d[1].ReadBytes != before {
				t.Error("a dropped drive is asked")
			}
			// Now the good one fails: the dropped one is the last resort.
			clear(short)
			bad[m.Files[0].Path] = unix.EIO
			m.readAll(t, src, fetches, m.keys())
			if d := src.Drives(); d[1].ReadBytes == before || d[0].Dropped {
				t.Errorf("drives %+v: the second was to help out, the first to stay", d)
			}
			// And both: the fetch fails, the next does not.
			bad[second[0]] = unix.EREMOTEIO
			victim := slices.IndexFunc(m.keys(), func(k Key) bool { f, _, _ := m.extent(k, 0); return f == 0 })
			fetches[0].Key = m.keys()[victim]
			src.Submit(fetches[:1])
			err := src.Reap().Err
			var re *ReadError
			if !errors.As(err, &re) || re.File != second[0] || !errors.Is(err, unix.EREMOTEIO) || !strings.Contains(err.Error(), unix.EIO.Error()) {
				t.Errorf("error %v", err)
			}
			clear(bad)
			m.readAll(t, src, fetches, m.keys())
		})
	}
}

// modelled is a transport of drives that exist on paper: each does up to lanes
// reads side by side, each at a lane's rate. Its clock moves as reads end.
type modelled struct {
	now    time.Duration
	bps    []float64 // of a lane, by drive
	lanes  int
	line   [][]*read
	came   *read // to be given by next
	flying []landing
}

type landing struct {
	at time.Duration
	r  *read
}

func (x *modelled) clock() time.Time { return time.Unix(0, 0).Add(x.now) }

func (x *modelled) start(r *read) {
	for len(x.line) <= r.drive {
		x.line = append(x.line, nil)
	}
	x.line[r.drive] = append(x.line[r.drive], r)
}

func (x *modelled) submit() {
	for d := range x.line {
		busy := 0
		for _, l := range x.flying {
			if l.r.drive == d {
				busy++
			}
		}
		for ; busy < x.lanes && len(x.line[d]) > 0; busy++ {
			r := x.line[d][0]
			x.line[d] = x.line[d][1:]
			x.flying = append(x.flying, landing{x.now + time.Duration(float64(r.size)/x.bps[d]*1e9), r})
		}
	}
}

// next gives none before wait has let the time pass.
func (x *modelled) next() *read {
	r := x.came
	x.came = nil
	return r
}

func (x *modelled) polls() bool { return false } // its time passes in wait

func (x *modelled) wait() {
	i := 0
	for j := range x.flying {
		if x.flying[j].at < x.flying[i].at {
			i = j
		}
	}
	l := x.flying[i]
	x.flying = slices.Delete(x.flying, i, i+1)
	x.now = max(x.now, l.at)
	l.r.n, l.r.fault = len(l.r.rest()), nil
	x.came = l.r
}

func (x *modelled) register([][]byte) error { return nil }
func (x *modelled) close()                  {}

// Two drives share the reads by their rates, whatever they are, and when one
// slows down or recovers the shares follow.
func TestSharesFollowRates(t *testing.T) {
	const size = 1 << 20
	path := filepath.Join(t.TempDir(), "blocks")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 64*size); err != nil {
		t.Fatal(err)
	}
	m, layers, err := OpenBlocks(path, size)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	m.copies = [][]File{m.Files}
	x := &modelled{bps: []float64{3e9, 1e9}, lanes: 1}
	src, err := m.Source(layers, SourceOptions{Mode: Pread, dev: device{now: x.clock, wrap: func(in transport) transport { in.close(); return x }}})
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	slot, err := offheap.Alloc(size)
	if err != nil {
		t.Fatal(err)
	}
	defer offheap.Free(slot)
	fetches := make([]*Fetch, 24)
	for i := range fetches {
		fetches[i] = &Fetch{Key: Key{0, int32(i)}, Slot: slot}
	}
	rounds := func(n int) (share float64) { // of the first drive
		a := src.Drives()
		for range n {
			src.Submit(fetches)
			for range fetches {
				src.Reap()
			}
		}
		b := src.Drives()
		return float64(b[0].ReadBytes-a[0].ReadBytes) / float64(n*len(fetches)*size)
	}
	for _, c := range []struct{ a, b, want float64 }{{3e9, 1e9, 0.75}, {1e9, 1e9, 0.5}, {1e8, 1e9, 1. / 11}, {3e9, 1e9, 0.75}} {
		x.bps = []float64{c.a, c.b}
		rounds(60)
		if got := rounds(40); got < c.want-0.06 || got > c.want+0.06 {
			t.Errorf("rates %g and %g: the first drive reads %.3f, want about %.3f; %+v", c.a, c.b, got, c.want, src.Drives())
		}
	}
	// A drive so slow that it is never the better one is asked again now and then.
	x.bps = []float64{3e9, 1e6}
	rounds(100)
	before := src.Drives()[1].ReadBytes
	x.now += 3 * time.Second
	x.bps[1] = 3e9
	rounds(200)
	if after := src.Drives()[1]; after.ReadBytes == before {
		t.Errorf("a drive that recovers is not found out: %+v", after)
	}
}

// The depth that Load settles on is the smallest that gives nearly all of what
// the drive can do, whatever number of reads it does at once.
func TestProbe(t *testing.T) {
	m := newExpertModel(t, 25)
	for _, lanes := range []int{1, 2, 4, 8, 16, 64} {
		for _, drives := range []int{1, 2} {
			x := &modelled{bps: []float64{1e9, 1e9}, lanes: lanes}
			src := m.source(t, SourceOptions{Mode: Pread, dev: device{now: x.clock, wrap: func(in transport) transport { in.close(); return x }}})
			for range drives - 1 {
				src.drives = append(src.drives, drive{files: make([]openFile, len(m.Files))})
			}
			l := loading{s: src, chunk: 1 << 20}
			buf := make([]byte, l.chunk)
			for range 4000 {
				l.reads = append(l.reads, read{size: l.chunk, need: l.chunk, buf: buf})
			}
			l.whole = len(l.reads)
			l.plan()
			if err := l.run(context.Background()); err != nil {
				t.Fatal(err)
			}
			r := l.report()
			want := 1e9 * float64(lanes*drives)
			if !r.Found || r.Depth != lanes || src.Depth() != lanes || r.Rate < 0.95*want || r.Rate > 1.05*want {
				t.Errorf("%d drives of %d lanes of 1 GB/s: depth %d, %.3g B/s (found %v)", drives, lanes, r.Depth, r.Rate, r.Found)
			}
			if len(r.Trials) < 2*7 || r.Trials[0].Depth != 1 || r.Trials[7].Depth != 64 {
				t.Errorf("trials %v: want up and down", r.Trials)
			}
		}
	}
	// With less to read it tries less, and with little nothing.
	for whole, most := range map[int]int{100: 0, 200: 8, 4000: 64} {
		l := loading{s: m.source(t, SourceOptions{Mode: Pread}), chunk: 1 << 20, whole: whole}
		l.plan()
		got := 0
		for _, x := range l.trials {
			got = max(got, x.depth)
		}
		if got != most {
			t.Errorf("%d chunks: depths up to %d are tried, want %d", whole, got, most)
		}
	}
}

// resident are the tensors that a test loads: all parts of some layers, one twice.
func (m *expertModel) resident() (tensors []Tensor) {
	for _, tn := range m.Tensors {
		if !strings.HasPrefix(tn.Name, "l8.") {
			tensors = append(tensors, tn)
		}
	}
	rand.Shuffle(len(tensors), func(i, j int) { tensors[i], tensors[j] = tensors[j], tensors[i] })
	return append(tensors, tensors[0])
}

// Load gives the bytes of the tensors, in every mode and over several drives, by
// reads that touch no block without them, and counts no expert.
func TestLoad(t *testing.T) {
	eachMode(t, func(t *testing.T, mode Mode) {
		for _, copies := range []int{0, 1} {
			seed := rand.Uint64()
			t.Log("seed", seed)
			m := newExpertModel(t, seed)
			for range copies {
				m.copyTo(t)
			}
			var tensors []Tensor
			x := &rough{t: t, rng: rand.New(rand.NewPCG(seed, 5)), saw: func(r *read) {
				for at := r.off; at < r.off+r.need; at += 4096 {
					if !slices.ContainsFunc(tensors, func(tn Tensor) bool {
						return tn.File == r.file && tn.Off < at+4096 && tn.Off+tn.Bytes > at
					}) {
						t.Errorf("byte %d of file %d is read and holds nothing resident", at, r.file)
					}
				}
			}}
			src := m.source(t, SourceOptions{Mode: mode, dev: device{
				wrap: func(in transport) transport { x.transport = in; return x },
				result: func(file string, off int64, p []byte, n int, err error) (int, error) {
					if x.rng.IntN(3) == 0 && n > 4096 && x.saw != nil {
						return 4096 + x.rng.IntN(n-4096), err
					}
					return n, err
				},
			}})
			tensors = m.resident()
			arena, err := offheap.Alloc(src.ResidentBytes(tensors))
			if err != nil {
				t.Fatal(err)
			}
			defer offheap.Free(arena)
			data, report, err := src.Load(context.Background(), arena, tensors)
			if err != nil {
				t.Fatal(err)
			}
			for i, tn := range tensors {
				if !bytes.Equal(data[i], m.data[tn.File][tn.Off:tn.Off+tn.Bytes]) || int64(cap(data[i])) != tn.Bytes {
					t.Errorf("tensor %s has other bytes", tn.Name)
				}
			}
			if report.Found || report.Rate != 0 || report.Depth != src.Depth() || report.Bytes < 200000 {
				t.Errorf("report %+v of some hundred KB", report)
			}
			if st := src.Stats(); st != (SourceStats{}) {
				t.Errorf("Load counts as experts: %+v", st)
			}
			for _, d := range src.Drives() {
				if d.ReadBytes != 0 {
					t.Errorf("Load counts as experts: %+v", d)
				}
			}
			if data, _, err := src.Load(context.Background(), nil, nil); err != nil || len(data) != 0 {
				t.Errorf("nothing to load: %v, %v", data, err)
			}
			x.saw = nil
			m.readAll(t, src, m.fetches(t, src, 8), m.keys())
			src.Close()
		}
	})
}

// A model without experts is loaded all the same.
func TestLoadDense(t *testing.T) {
	eachMode(t, func(t *testing.T, mode Mode) {
		m := newExpertModel(t, 31)
		m.layers = nil
		src := m.source(t, SourceOptions{Mode: mode})
		arena, err := offheap.Alloc(src.ResidentBytes(m.Tensors))
		if err != nil {
			t.Fatal(err)
		}
		defer offheap.Free(arena)
		data, _, err := src.Load(context.Background(), arena, m.Tensors)
		if err != nil {
			t.Fatal(err)
		}
		for i, tn := range m.Tensors {
			if !bytes.Equal(data[i], m.data[tn.File][tn.Off:tn.Off+tn.Bytes]) {
				t.Errorf("tensor %s has other bytes", tn.Name)
			}
		}
		if err := src.Close(); err != nil {
			t.Error(err)
		}
	})
}

// A Load that fails or is cancelled leaves nothing under way, and says where.
func TestLoadFails(t *testing.T) {
	eachMode(t, func(t *testing.T, mode Mode) {
		m := newExpertModel(t, 26)
		var fail func(off int64, n int, err error) (int, error)
		src := m.source(t, SourceOptions{Mode: mode, dev: device{result: func(_ string, off int64, _ []byte, n int, err error) (int, error) {
			if fail != nil {
				return fail(off, n, err)
			}
			return n, err
		}}})
		tensors := m.resident()
		arena, err := offheap.Alloc(src.ResidentBytes(tensors))
		if err != nil {
			t.Fatal(err)
		}
		defer offheap.Free(arena)
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if _, _, err := src.Load(ctx, arena, tensors); !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled: %v", err)
		}
		fail = func(off int64, n int, err error) (int, error) { return 0, unix.EIO }
		if _, _, err := src.Load(context.Background(), arena, tensors); !errors.Is(err, unix.EIO) || !strings.Contains(err.Error(), "tensor") {
			t.Errorf("EIO: %v", err)
		}
		fail = nil
		tn, _ := m.Tensor("l9.2")
		path := m.Files[tn.File].Path
		if err := os.Truncate(path, tn.Off+100); err != nil {
			t.Fatal(err)
		}
		var fe *FormatError
		if _, _, err := src.Load(context.Background(), arena, []Tensor{tn}); !errors.As(err, &fe) || fe.File != path || fe.Off != tn.Off+100 || !strings.Contains(err.Error(), `"l9.2"`) {
			t.Errorf("cut short: %v", err)
		}
		mustPanic(t, "which needs", func() { src.Load(context.Background(), arena[:4096], tensors) })
		mustPanic(t, "multiple of", func() { src.Load(context.Background(), arena[64:], tensors[:1]) })
		fetches := m.fetches(t, src, 4)
		fetches[0].Key = Key{8, 1}
		src.Submit(fetches[:1])
		mustPanic(t, "in flight", func() { src.Load(context.Background(), arena, tensors) })
		m.check(t, src.Reap())
	})
}

// Offsets behind 2^32 and 2^40 are read right, in every mode.
func TestLargeOffsets(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sparse")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const n = 9001
	m := &expertModel{Model: &Model{byName: map[string]int{}}}
	want := map[Key][]byte{}
	size := int64(0)
	for layer, off := range []int64{1<<31 + 3, 1<<32 - 4097, 1<<40 - 12, 1<<40 + 1<<33 + 5} {
		name := fmt.Sprint("t", layer)
		m.byName[name] = len(m.Tensors)
		m.Tensors = append(m.Tensors, Tensor{Name: name, Dims: []int64{n, 2}, Off: off, Bytes: 2 * n})
		m.layers = append(m.layers, ExpertLayer{Layer: layer, Experts: 2, Parts: []string{name}})
		for e := range int64(2) {
			b := bytes.Repeat([]byte{byte(layer + 1), byte(e + 7), 3}, n/3+1)[:n]
			want[Key{int32(layer), int32(e)}] = b
			if _, err := f.WriteAt(b, off+e*n); err != nil {
				t.Skip("needs a file system with sparse files of 1 TiB: ", err)
			}
		}
		size = off + 2*n
	}
	m.Files = []File{{Path: path, Size: size, f: f}}
	eachMode(t, func(t *testing.T, mode Mode) {
		src := m.source(t, SourceOptions{Mode: mode})
		fetch := m.fetches(t, src, 1)
		for k, b := range want {
			fetch[0].Key = k
			src.Submit(fetch)
			if got := src.Reap(); got.Err != nil || !bytes.Equal(got.Parts[0], b) {
				t.Errorf("%v: wrong bytes, error %v", k, got.Err)
			}
		}
	})
}

// Copies must be copies: the error names the first difference.
func TestOpenCopies(t *testing.T) {
	demo, err := os.ReadFile("../models/demo-q4_k_m.gguf")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write := func(name string, b []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	a := write("a.gguf", demo)
	b := write("b.gguf", demo)
	at := bytes.Index(demo, []byte("general.name")) + 24 // in its value
	other := slices.Clone(demo)
	other[at] ^= 1
	header := write("header.gguf", other)
	other = slices.Clone(demo)
	other[len(other)-1] ^= 1 // the end of the last tensor
	weights := write("weights.gguf", other)
	long := write("long.gguf", append(slices.Clone(demo), 0))
	link := filepath.Join(dir, "link.gguf")
	if err := os.Symlink(b, link); err != nil {
		t.Fatal(err)
	}
	m, err := OpenCopies(a, b)
	if err != nil {
		t.Fatal(err)
	}
	if len(m.copies) != 1 || m.copies[0][0].Path != b {
		t.Errorf("copies %v", m.copies)
	}
	if err := m.Close(); err != nil || m.copies[0][0].f != nil {
		t.Errorf("Close: %v", err)
	}
	for _, c := range []struct {
		paths []string
		want  string
	}{
		{nil, "1 to 4"},
		{[]string{a, b, a, a, a}, "1 to 4"},
		{[]string{a, filepath.Join(dir, "none.gguf")}, "none.gguf"},
		{[]string{a, long}, "bytes"},
		{[]string{a, header}, fmt.Sprintf("differ at byte %d", at)},
		{[]string{a, weights}, "in tensor "},
		{[]string{a, a}, "the same file"},
		{[]string{a, b, link}, "the same file"},
	} {
		m, err := OpenCopies(c.paths...)
		if err == nil {
			m.Close()
			t.Errorf("%v: no error", c.paths)
		} else if !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: error %q, want %q", c.paths, err, c.want)
		}
	}
}

// Blocks of a file are experts; files without two are refused.
func TestOpenBlocks(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	if err := os.WriteFile(path, bytes.Repeat([]byte("0123456789abcdef"), 1000), 0o600); err != nil {
		t.Fatal(err)
	}
	m, layers, err := OpenBlocks(path, 4096)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if layers[0].Experts != 3 {
		t.Errorf("%d blocks", layers[0].Experts)
	}
	for _, size := range []int64{0, -1, 8001, 1 << 40} {
		if _, _, err := OpenBlocks(path, size); err == nil || !strings.Contains(err.Error(), "blocks") {
			t.Errorf("size %d: %v", size, err)
		}
	}
	if _, _, err := OpenBlocks(filepath.Dir(path), 4096); err == nil {
		t.Error("a folder is no file")
	}
	if _, _, err := OpenBlocks(path+"no", 4096); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing: %v", err)
	}
}
