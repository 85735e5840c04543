package storage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"
	"unsafe"

	"sluice/internal/offheap"
)

// A LoadReport says what Load read and what it learned of the drives.
type LoadReport struct {
	Bytes int64 // read, with what rounding to blocks added
	Nanos int64
	Depth int     // what Reader.Depth is from here on
	Found bool    // the depth was measured; else it was asked for, or there was too little to read to tell
	Rate  float64 // bytes a second of all drives together, at that depth; 0: too little was read past the page cache to tell
	// Trials are the measurements behind Depth, in the order in which they were made.
	Trials []Trial
}

// A Trial is a rate at a depth.
type Trial struct {
	Depth int
	Rate  float64 // bytes a second of all drives together
}

// ResidentBytes is the memory that Load needs for the tensors.
func (s *Reader) ResidentBytes(tensors []Tensor) int64 {
	_, _, size := s.runs(tensors)
	for _, t := range tensors {
		if t.form != nil {
			size = roundUp(size, wovenAlign) + t.Bytes
		}
	}
	return size
}

// Load reads whole tensors into arena, of ResidentBytes and on a page boundary,
// and returns the bytes of each, as views. It reads like experts are read, past
// the page cache where possible, each byte once, and no block that holds nothing
// of the tensors.
//
// On the way it finds the depth that the drives want, if none was asked for and
// the tensors are large enough to tell. Nothing may be in flight. Errors: ctx's,
// *ReadError, *FormatError for a file that has been cut short, and of a slab
// *ChecksumError. After an error the bytes mean nothing.
func (s *Reader) Load(ctx context.Context, arena []byte, tensors []Tensor) (data [][]byte, report LoadReport, err error) {
	for _, t := range tensors {
		if t.stack != nil {
			return nil, LoadReport{}, &FormatError{File: s.drives[0].files[t.File].Path, Off: t.Off, Msg: fmt.Sprintf(
				"tensor %q is packed as experts of layer %d, and the model uses it whole: pack the model again", t.Name, t.stack.layer)}
		}
	}
	runs, views, size := s.runs(tensors)
	whole := s.ResidentBytes(tensors)
	switch {
	case s.busy > 0 || s.closed:
		panic("storage: Load while fetches are in flight, or of a closed reader")
	case int64(len(arena)) < whole:
		panic(fmt.Sprintf("storage: Load into %d bytes, which needs %d", len(arena), whole))
	case uintptr(unsafe.Pointer(unsafe.SliceData(arena)))%slotAlign != 0:
		panic(fmt.Sprintf("storage: Load into memory that does not start at a multiple of %d", slotAlign))
	}
	if whole == 0 {
		return make([][]byte, len(tensors)), LoadReport{Depth: s.depth}, nil
	}
	l := loading{s: s, chunk: s.chunkBytes()}
	l.cut(runs, arena)
	made := arena[size:whole]
	arena = arena[:size]
	if s.direct {
		l.plan()
	}
	// The kernel would map the memory at each first read into it, which takes
	// longer than to read from a fast drive: the trials must not see that.
	first := l.trialBytes(arena)
	offheap.Populate(arena[:first])
	var rest sync.WaitGroup
	rest.Go(func() { offheap.Populate(arena[first:size]) })
	err = l.run(ctx)
	rest.Wait()
	if err != nil {
		return nil, LoadReport{}, s.loadError(err, tensors)
	}
	data = make([][]byte, len(tensors))
	for i, at := range views {
		n := tensors[i].Bytes
		if tensors[i].form != nil {
			continue
		}
		data[i] = arena[at : at+n : at+n]
		if err := s.checkLoaded(data[i], tensors[i]); err != nil {
			return nil, LoadReport{}, err
		}
	}
	report = l.report()
	start := s.dev.clock()
	at := size
	for i, t := range tensors {
		if t.form == nil {
			continue
		}
		skip := roundUp(at, wovenAlign) - at
		at += skip + t.Bytes
		data[i] = made[skip : skip+t.Bytes : skip+t.Bytes]
		made = made[skip+t.Bytes:]
		read, err := s.loadMade(ctx, data[i], t)
		report.Bytes += read
		if err != nil {
			return nil, LoadReport{}, err
		}
	}
	report.Nanos += int64(s.dev.clock().Sub(start))
	return data, report, nil
}

// loadMade reads what a tensor is made of, share by share, and makes it in dst.
// It says how many bytes were read.
func (s *Reader) loadMade(ctx context.Context, dst []byte, t Tensor) (read int64, err error) {
	n := t.Bytes / t.shares()
	for e := range t.shares() {
		var raws []Tensor
		for _, src := range t.form.from {
			if src.n > 0 {
				at := src.of(e)
				raws = append(raws, Tensor{Name: t.Name, File: at.file, Off: at.off, Bytes: src.n})
			}
		}
		runs, views, size := s.runs(raws)
		arena, err := offheap.Alloc(size)
		if err != nil {
			return read, fmt.Errorf("storage: no memory to read tensor %q: %w", t.Name, err)
		}
		l := loading{s: s, chunk: maxChunk}
		l.cut(runs, arena)
		read += l.bytes
		if err = l.run(ctx); err == nil {
			raw := [2][]byte{}
			for i, x := range raws {
				raw[i] = arena[views[i]:][:x.Bytes]
			}
			t.form.share(dst[e*n:(e+1)*n], raw[0], raw[1])
		} else {
			err = s.loadError(err, raws)
		}
		offheap.Free(arena)
		if err != nil {
			return read, err
		}
	}
	return read, nil
}

// A run is a stretch of a file that resident tensors lie on without a gap of a
// block.
type run struct {
	file      int
	off, size int64 // multiples of the alignment
	need      int64 // of size: behind it the file may end
	at        int64 // where in the arena
}

// runs lays tensors out: the runs, where in the arena each tensor begins, and
// the size of the whole.
func (s *Reader) runs(tensors []Tensor) (runs []run, views []int64, size int64) {
	align := max(s.align, slotAlign)
	var order []int
	for i := range tensors {
		if tensors[i].form == nil { // the others need other bytes, see loadMade
			order = append(order, i)
		}
	}
	slices.SortFunc(order, func(a, b int) int {
		x, y := tensors[a], tensors[b]
		return cmp.Or(cmp.Compare(x.File, y.File), cmp.Compare(x.Off, y.Off))
	})
	views = make([]int64, len(tensors))
	for _, i := range order {
		t := tensors[i]
		start, end := t.Off&^(align-1), (t.Off+t.Bytes+align-1)&^(align-1)
		if n := len(runs); n == 0 || runs[n-1].file != t.File || start > runs[n-1].off+runs[n-1].size {
			runs = append(runs, run{file: t.File, off: start, at: size})
		}
		r := &runs[len(runs)-1]
		r.size = max(r.size, end-r.off)
		r.need = max(r.need, t.Off+t.Bytes-r.off)
		views[i] = r.at + t.Off - r.off
		size = r.at + r.size
	}
	return runs, views, size
}

// loadError names the tensor of a read that failed: the first that the missing
// bytes belong to.
func (s *Reader) loadError(err error, tensors []Tensor) error {
	var e *ReadError
	if !errors.As(err, &e) {
		return err
	}
	at := e.Off + e.Got
	var lost *Tensor
	for i, t := range tensors {
		here := slices.ContainsFunc(s.drives, func(d drive) bool { return d.files[t.File].Path == e.File })
		if here && t.Off < e.Off+e.Len && t.Off+t.Bytes > at && (lost == nil || t.Off < lost.Off) {
			lost = &tensors[i]
		}
	}
	switch {
	case lost == nil:
		return err
	case errors.Is(e.Err, io.ErrUnexpectedEOF):
		return &FormatError{File: e.File, Off: at, Msg: fmt.Sprintf(
			"the file ends here, inside tensor %q, which needs bytes %d to %d: it was cut short after it was opened; copy it again",
			lost.Name, lost.Off, lost.Off+lost.Bytes)}
	}
	return fmt.Errorf("storage: read tensor %q: %w", lost.Name, err)
}

const (
	// Chunks are as large as what is read later, a part of an expert, within
	// bounds: smaller ones would measure requests instead of bytes, and of larger
	// ones there are too few to fill a queue.
	minChunk, maxChunk = 256 << 10, 8 << 20

	// A depth is tried on so many bytes at least: some ms of a fast drive.
	trialBytes = 16 << 20
	// Depths are tried up to 64; below 4 it would be no probe.
	maxProbe, leastProbe = 64, 4
	// Every depth is tried twice or the probe says nothing; more than five times
	// tells nothing more.
	minRounds, maxRounds = 2, 5
	// The smallest depth within 3 % of the best is taken: a longer queue would
	// only make the first of a batch wait.
	nearBest = 0.97
)

// chunkBytes is the mean size of an expert's reads, in whole blocks, bounded; the
// bound where there are no experts.
func (s *Reader) chunkBytes() int64 {
	align := max(s.align, slotAlign)
	var sum, n int64
	var st fetchState
	for _, l := range s.layers {
		sum += l.layout(&st, 0, align)
		n += int64(st.n)
	}
	if n == 0 {
		return maxChunk
	}
	return (max(minChunk, min(sum/n, maxChunk)) + align - 1) &^ (align - 1)
}

// loading is one Load under way.
type loading struct {
	s     *Reader
	chunk int64
	reads []read // all of them, whole chunks first
	whole int    // of reads: whole chunks

	bytes int64

	trials []trial
	trial  int // the one under way
	nanos  int64
}

// A trial counts the bytes of some reads at a depth, behind some that are left
// out because others were queued when they began.
type trial struct {
	depth       int
	skip, count int // reads left: to leave out, to count
	mark        time.Time
	bytes       int64
	rate        float64
}

// cut divides the runs into reads.
func (l *loading) cut(runs []run, arena []byte) {
	var rest []read
	for _, r := range runs {
		for at := int64(0); at < r.size; at += l.chunk {
			n := min(l.chunk, r.size-at)
			x := read{file: r.file, off: r.off + at, size: n, need: min(n, r.need-at), buf: arena[r.at+at : r.at+at+n]}
			l.bytes += n
			if n == l.chunk {
				l.reads = append(l.reads, x)
			} else {
				rest = append(rest, x)
			}
		}
	}
	l.whole = len(l.reads)
	l.reads = append(l.reads, rest...)
}

// plan makes the trials that the whole chunks are enough for: depths 1, 2, 4 and
// on, up and down again so that a drift of the drive meets each alike; or the one
// depth that was asked for, to know its rate.
func (l *loading) plan() {
	drives := len(l.s.drives)
	least, most := 1, maxProbe
	if l.s.fixed {
		least, most = l.s.depth, l.s.depth
	}
	for ; most >= least && (most >= leastProbe || l.s.fixed); most /= 2 {
		var up []trial
		for depth := least; depth <= most; depth *= 2 {
			up = append(up, trial{depth: depth, count: max(2*depth*drives, int(trialBytes/l.chunk), 4)})
		}
		var all []trial
		used, before := 0, 0
		for round := range maxRounds {
			for _, t := range up {
				t.skip = max(t.depth, before) * drives
				before = t.depth
				if used += t.skip + t.count; used <= l.whole {
					all = append(all, t)
				}
			}
			if used > l.whole {
				all = all[:round*len(up)]
				break
			}
			slices.Reverse(up)
		}
		if len(all) >= minRounds*len(up) {
			l.trials = all
			return
		}
	}
}

// trialBytes is the start of the arena that the trials read into.
func (l *loading) trialBytes(arena []byte) int64 {
	n := 0
	for _, t := range l.trials {
		n += t.skip + t.count
	}
	if n == 0 {
		return 0
	}
	last := l.reads[min(n, len(l.reads))-1].buf
	start := uintptr(unsafe.Pointer(unsafe.SliceData(arena)))
	return int64(uintptr(unsafe.Pointer(unsafe.SliceData(last)))-start) + int64(len(last))
}

// run does all reads. It leaves none under way, whatever happens.
func (l *loading) run(ctx context.Context) error {
	s, drives := l.s, len(l.s.drives)
	if len(l.trials) > 0 {
		depth := s.depth
		s.depth = l.trials[0].depth
		defer func() { // if it ends early
			if l.trial < len(l.trials) {
				s.depth = depth
			}
		}()
	}
	start := s.dev.clock()
	var err error
	next, out := 0, 0
	for {
		// One more than fits, so that a drive that has room never waits for this loop.
		for err == nil && next < len(l.reads) && out <= s.depth*drives {
			r := &l.reads[next]
			s.put(r, s.choose(r.size))
			next++
			out++
		}
		if out == 0 {
			break
		}
		r := s.reapRead()
		out--
		if err == nil {
			if err = r.err; err == nil {
				err = ctx.Err()
			}
		}
		l.arrived(r)
	}
	l.nanos = int64(s.dev.clock().Sub(start))
	return err
}

// reapRead waits for the next read that Load has put.
func (s *Reader) reapRead() *read {
	for {
		s.poll()
		if r := s.loaded.pop(); r != nil {
			return r
		}
		s.via.wait()
	}
}

// arrived counts a read for the trial under way, and begins the next after its last.
func (l *loading) arrived(r *read) {
	if l.trial == len(l.trials) {
		return
	}
	t := &l.trials[l.trial]
	if t.skip > 0 {
		if t.skip--; t.skip == 0 {
			t.mark = l.s.dev.clock()
		}
		return
	}
	t.bytes += r.size
	if t.count--; t.count > 0 {
		return
	}
	now := l.s.dev.clock()
	t.rate = float64(t.bytes) / max(1, float64(now.Sub(t.mark))) * 1e9
	if l.trial++; l.trial < len(l.trials) {
		l.s.depth = l.trials[l.trial].depth
		return
	}
	l.s.depth, _ = bestDepth(l.trials)
}

// bestDepth is the smallest depth whose rate is near the best, and its rate. A
// depth's rate is the median of its trials, of two the better.
func bestDepth(trials []trial) (depth int, rate float64) {
	rates := map[int][]float64{}
	for _, t := range trials {
		rates[t.depth] = append(rates[t.depth], t.rate)
	}
	best := 0.0
	median := map[int]float64{}
	for d, r := range rates {
		slices.Sort(r)
		median[d] = r[len(r)/2]
		best = max(best, median[d])
	}
	for d, r := range median {
		if r >= nearBest*best && (depth == 0 || d < depth) {
			depth = d
		}
	}
	return depth, median[depth]
}

func (l *loading) report() LoadReport {
	r := LoadReport{Bytes: l.bytes, Nanos: l.nanos, Depth: l.s.depth}
	for _, t := range l.trials {
		r.Trials = append(r.Trials, Trial{t.depth, t.rate})
	}
	if len(l.trials) > 0 {
		r.Found = !l.s.fixed
		_, r.Rate = bestDepth(l.trials)
	}
	return r
}
