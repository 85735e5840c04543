package storage

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"sluice/internal/offheap"
)

// A Reader reads a model from its drives: resident tensors whole, with Load,
// and experts one by one, as a Source. One goroutine calls it, another may be in
// Reap meanwhile, and any may call Notices and Drives.
//
// It decides what is asked of which drive and when, continues what comes short
// and tries again what fails; a transport does the tries.
type Reader struct {
	mode    Mode
	align   int64 // of offsets and sizes in files; 1 in mmap mode
	layers  map[int32]*layer
	holds   []bool  // by index into Model.Files: has experts
	drives  []drive // one for each copy of the model
	direct  bool    // reads go past the page cache
	dev     device
	via     transport
	depth   int                 // most tries at a drive at once
	woven   int64               // bytes of the largest expert that is made of what is read; 0: none is
	scratch []byte              // what weave makes an expert in; of who reaps
	sum     func([]byte) uint32 // of who polls; nil: it leaves what has a checksum to who reaps

	books  sync.Mutex // guards the rest, but for the reads of fetches that are finished
	fixed  bool       // the depth was asked for
	busy   int        // fetches in flight
	closed bool
	stats  SourceStats
	ready  fetchList // finished, for Reap
	loaded readList  // finished, for Load

	mu      sync.Mutex // guards notices, and stat and told of the drives
	notices []string
}

// A transport carries tries of reads out. One goroutine at a time calls it, but
// for wait, beside which others may start and submit.
type transport interface {
	// start takes a try of r's rest, which begins at the next submit.
	// There is room for 2 x depth x drives of them.
	start(r *read)
	// submit begins what was started, in one go.
	submit()
	// next gives a try that has ended, in any order, its outcome in r.n and
	// r.fault, or nil if none has.
	next() *read
	// wait waits until next gives one. Some have been submitted.
	wait()
	// polls says that next gives what has ended though nobody is in wait, and that
	// no other goroutine of the process is needed for it to end.
	polls() bool
	// register is Source.Register.
	register(arenas [][]byte) error
	// close gives back what the transport holds. Nothing is in flight.
	close()
}

func (s *Reader) Mode() Mode { return s.mode }

func (s *Reader) Stats() SourceStats {
	s.books.Lock()
	defer s.books.Unlock()
	return s.stats
}

func (s *Reader) SlotBytes(layer int) int64   { return s.layer(int32(layer)).slot }
func (s *Reader) ExpertBytes(layer int) int64 { return s.layer(int32(layer)).payload }

// Depth is how many reads are at work at a drive at once, at most, and as many in
// the background: what SourceOptions said, else what Load found, else a default.
func (s *Reader) Depth() int { return s.depth }

// Direct says whether reads go past the page cache.
func (s *Reader) Direct() bool { return s.direct }

// Notices are what there was to say since the last call, in words: what had to
// do in place of what was wished, which drive fails.
func (s *Reader) Notices() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.notices
	s.notices = nil
	return n
}

// notice keeps words for the caller, each once until they are fetched.
func (s *Reader) notice(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if text := fmt.Sprintf("storage: "+format, args...); !slices.Contains(s.notices, text) {
		s.notices = append(s.notices, text)
	}
}

func (s *Reader) layer(i int32) *layer {
	l := s.layers[i]
	if l == nil {
		panic(fmt.Sprintf("storage: layer %d is not a layer of this source", i))
	}
	return l
}

// Submit is Source.Submit. No more than Depth reads are at a drive at once, and as
// many in the background; the others follow as those end, in Reap.
func (s *Reader) Submit(fetches []*Fetch) {
	s.books.Lock()
	defer s.books.Unlock()
	for _, f := range fetches {
		s.begin(f)
		for i := range f.src.n {
			r := &f.src.reads[i]
			s.put(r, s.choose(r.size))
		}
	}
	s.dispatch()
	s.via.submit()
}

// Hurry is Source.Hurry: what of a fetch is not yet at a drive waits among the others.
func (s *Reader) Hurry(f *Fetch) {
	s.books.Lock()
	defer s.books.Unlock()
	if !f.src.busy || !f.Background {
		return
	}
	f.Background = false // for reads that come short
	for i := range s.drives {
		d := &s.drives[i]
		for r := d.later.take(f); r != nil; r = d.later.take(f) {
			r.background = false
			d.todo.push(r)
		}
	}
	s.dispatch()
	s.via.submit()
}

func (s *Reader) Reap() *Fetch {
	s.books.Lock()
	defer s.books.Unlock()
	if s.busy == 0 {
		panic("storage: Reap with nothing in flight")
	}
	for {
		s.poll()
		f := s.ready.pop()
		if f == nil {
			s.beside(s.via.wait)
			continue
		}
		var sum uint32
		s.beside(func() { sum = s.checksum(f, sumAlone) })
		if s.verify(f, sum) {
			return s.deliver(f)
		}
	}
}

// Poll is Source.Poll.
func (s *Reader) Poll() (f *Fetch, beside bool) {
	s.books.Lock()
	defer s.books.Unlock()
	if s.busy == 0 {
		return nil, false
	}
	if !s.via.polls() {
		return nil, true
	}
	s.poll()
	if f = s.ready.head; f == nil {
		return nil, false
	}
	l := s.layers[f.Key.Layer]
	if l.woven || l.stack != nil && s.sum == nil {
		return nil, true
	}
	f = s.ready.pop()
	if l.stack != nil {
		var sum uint32
		s.beside(func() { sum = s.checksum(f, s.sum) })
		if !s.verify(f, sum) {
			return nil, false
		}
	}
	return s.deliver(f), false
}

// SumBy has Poll take checksums, CRC-32C, by a function of its caller's, in which all
// processors may have a part. Without one they are taken by one goroutine, in Reap,
// which then needs a processor beside those that compute.
func (s *Reader) SumBy(sum func([]byte) uint32) { s.sum = sum }

// beside does what takes long while others may submit.
func (s *Reader) beside(work func()) {
	s.books.Unlock()
	defer s.books.Lock()
	work()
}

// poll looks at all tries that have ended and submits others in their place.
func (s *Reader) poll() {
	for r := s.via.next(); r != nil; r = s.via.next() {
		s.ended(r)
	}
	s.dispatch()
	s.via.submit()
}

// put queues r at a drive.
func (s *Reader) put(r *read, drive int) {
	d := &s.drives[drive]
	r.drive = drive
	r.background = r.fetch != nil && r.fetch.Background
	d.queued += r.size
	if r.background {
		d.later.push(r)
	} else {
		d.todo.push(r)
	}
}

// dispatch starts what waits and has room. Background reads have room of their
// own, as much again, and start where nothing else waits: who reaps may get no
// processor while experts compute, and what is not at the drive by then would
// leave it idle; and nobody has to wait for one of them to make room.
func (s *Reader) dispatch() {
	for i := range s.drives {
		d := &s.drives[i]
		for {
			var r *read
			switch {
			case d.todo.head != nil && d.flying-d.flyingLater < s.depth:
				r = d.todo.pop()
			case d.todo.head == nil && d.flyingLater < s.depth:
				r = d.later.pop()
			}
			if r == nil {
				break
			}
			if d.flying == 0 {
				d.mark = s.dev.clock()
			}
			d.flying++
			if r.background {
				d.flyingLater++
			}
			r.asked += int64(len(r.rest()))
			s.via.start(r)
		}
	}
}

// ended says what follows from the outcome of a try.
func (s *Reader) ended(r *read) {
	d := &s.drives[r.drive]
	d.flying--
	if r.background {
		d.flyingLater--
	}
	d.queued -= r.size
	n, err := s.seen(r, r.rest(), r.n, r.fault)
	s.measure(d, n, r.fetch != nil)
	switch r.advance(n, err, s.align) {
	case whole:
		d.harm = max(0, d.harm-1)
		s.finish(r)
	case more:
		s.put(r, r.drive)
	case broken:
		s.again(r, n, err)
	}
}

// again makes the second and last try of a broken read: of another drive, if
// there is one, else through the page cache, which wants no alignment.
func (s *Reader) again(r *read, n int, err error) {
	s.blame(r, err)
	if r.retries > 0 {
		r.err = s.readError(r, n, err)
		s.finish(r)
		return
	}
	r.retries++
	if other := s.other(r.drive); other >= 0 {
		r.first = plainError(err)
		s.put(r, other)
		return
	}
	r.buffered = !r.view
	s.put(r, r.drive)
}

// finish notes that a read is over.
func (s *Reader) finish(r *read) {
	f := r.fetch
	if f == nil {
		s.loaded.push(r)
		return
	}
	if f.src.left--; f.src.left == 0 {
		s.ready.push(f)
	}
}

// Register is Source.Register.
func (s *Reader) Register(arenas [][]byte) {
	if s.closed {
		return
	}
	if s.busy > 0 {
		panic("storage: Register while reads are in flight")
	}
	if len(arenas) > 0 && s.direct && offheap.HugePagesOff() {
		s.notice("huge pages are off (/sys/kernel/mm/transparent_hugepage/enabled is never): direct reads are slower and take several times the CPU; to allow them: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")
	}
	if err := s.via.register(arenas); err != nil {
		s.notice("%s", registerWords(err, arenas))
	}
}

// Close is Source.Close.
func (s *Reader) Close() error {
	if s.closed {
		return nil
	}
	for s.busy > 0 {
		s.Reap()
	}
	if s.via != nil {
		s.via.close()
	}
	return s.close()
}

// close gives back what the reader opened.
func (s *Reader) close() error {
	s.closed = true
	var errs []error
	if s.scratch != nil {
		offheap.Free(s.scratch)
		s.scratch = nil
	}
	for i := range s.drives {
		for j := range s.drives[i].files {
			o := &s.drives[i].files[j]
			var err error
			if o.own {
				err = unix.Close(o.fd)
			}
			if o.mem != nil {
				err = unix.Munmap(o.mem)
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("storage: close %s: %w", o.Path, err))
			}
			o.own, o.mem = false, nil
		}
	}
	return errors.Join(errs...)
}
