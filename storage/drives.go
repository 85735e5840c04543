package storage

import (
	"io"
	"time"
)

// MaxDrives bounds the copies of a model that are read at once.
const MaxDrives = 4

// A drive is a copy of the model, with what waits for it and what is known of
// it. Copies should lie on drives of their own.
type drive struct {
	files       []openFile // by index into Model.Files
	todo, later readList   // waiting; later: in the background
	flying      int        // tries under way
	flyingLater int        // of these, in the background
	queued      int64      // bytes of the reads that wait or are under way
	used        time.Time  // when a read was last sent here, if there are other drives

	mark  time.Time // until when busy time has been counted
	bytes int64     // that came since the rate was last looked at,
	nanos int64     // and the time in which reads were under way
	harm  int       // grows with failed reads, shrinks with good ones

	stat DriveStats // guarded by Reader.mu
}

// An openFile is a file as a reader reads it.
type openFile struct {
	*File
	fd  int    // what first tries read: direct, or the buffered one of File
	own bool   // fd is ours to close
	mem []byte // the mapping, in mmap mode
}

// DriveStats counts what a drive did for a reader.
type DriveStats struct {
	Path      string  // of the copy's first file
	ReadBytes int64   // bytes of experts that came, before any were dropped as rounding
	Rate      float64 // bytes a second while reads were under way, of late; 0: too little was read to tell
	Errors    int64   // tries that failed or met an unexpected end
	Dropped   bool    // it failed too often and is asked no more
}

// Drives tells of each drive, in the order in which the copies were named.
func (s *Reader) Drives() []DriveStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]DriveStats, len(s.drives))
	for i := range s.drives {
		all[i] = s.drives[i].stat
	}
	return all
}

const (
	// A rate is taken over this much busy time: some large reads, or many small ones.
	rateNanos = 5e6
	// Each new rate counts for this share of the moving mean: after ten of them,
	// 50 ms, a drive that has slowed down is known to be slow.
	rateShare = 0.25
	// A drive that got no read for so long gets the next, so that its rate is
	// known: a drive 30 times slower than the other then costs about a percent.
	idleNanos = 1e9

	// A failed read harms as much as so many good reads heal.
	harmOfError = 16
	// Five failures in a row, or one in 16 for long, and a drive is dropped.
	harmOfDrop = 5 * harmOfError
)

// measure counts n bytes from d and brings its rate up to date. Bytes of experts
// are counted for Drives.
func (s *Reader) measure(d *drive, n int, expert bool) {
	now := s.dev.clock()
	d.bytes += int64(n)
	d.nanos += int64(now.Sub(d.mark))
	d.mark = now
	s.mu.Lock()
	defer s.mu.Unlock()
	if expert {
		d.stat.ReadBytes += int64(n)
	}
	if d.nanos < rateNanos || d.bytes == 0 {
		return
	}
	rate := float64(d.bytes) / float64(d.nanos) * 1e9
	if d.stat.Rate > 0 {
		rate = d.stat.Rate + (rate-d.stat.Rate)*rateShare
	}
	d.stat.Rate, d.bytes, d.nanos = rate, 0, 0
}

// choose is the drive that would be the first to finish a read of size bytes
// behind all that waits for it. Only the caller's goroutine writes rates, so it
// reads them without the lock.
func (s *Reader) choose(size int64) int {
	if len(s.drives) == 1 {
		return 0
	}
	now := s.dev.clock()
	best, least, fastest := -1, 0.0, 1.0
	for i := range s.drives {
		fastest = max(fastest, s.drives[i].stat.Rate)
	}
	for i := range s.drives {
		d := &s.drives[i]
		if d.stat.Dropped {
			continue
		}
		rate := d.stat.Rate
		if rate == 0 {
			rate = fastest // until it is known
		}
		cost := float64(d.queued+size) / rate
		if d.queued == 0 && now.Sub(d.used) > idleNanos {
			cost = 0
		}
		if best < 0 || cost < least {
			best, least = i, cost
		}
	}
	s.drives[best].used = now
	return best
}

// other is the drive for the second try of a read that drive not has failed: the
// one with the least to do. One that was dropped is better than none; -1: none.
func (s *Reader) other(not int) int {
	best := -1
	for i := range s.drives {
		if i == not {
			continue
		}
		if best < 0 {
			best = i
			continue
		}
		d, b := &s.drives[i], &s.drives[best]
		if d.stat.Dropped == b.stat.Dropped && d.queued < b.queued || !d.stat.Dropped && b.stat.Dropped {
			best = i
		}
	}
	return best
}

// blame notes that a drive failed a read, and drops the drive if that happens
// too often and another is left.
func (s *Reader) blame(r *read, err error) {
	d := &s.drives[r.drive]
	d.harm += harmOfError
	s.mu.Lock()
	d.stat.Errors++
	failures := d.stat.Errors
	s.mu.Unlock()
	live := -1
	for i := range s.drives {
		if i != r.drive && !s.drives[i].stat.Dropped {
			live = i
		}
	}
	if live < 0 || d.stat.Dropped {
		return
	}
	elsewhere := s.drives[live].files[r.file].Path
	if d.harm < harmOfDrop {
		if failures == 1 {
			s.notice("%s: byte %d: %v; read from %s instead", d.files[r.file].Path, r.off+r.done, plainError(err), elsewhere)
		}
		return
	}
	s.mu.Lock()
	d.stat.Dropped = true
	s.mu.Unlock()
	s.notice("%s: %d reads failed, at last at byte %d: %v; this copy is left out from now on, %s is read alone: check the drive and the kernel's log",
		d.files[r.file].Path, failures, r.off+r.done, plainError(err), elsewhere)
	for _, list := range []*readList{&d.todo, &d.later} {
		for w := list.pop(); w != nil; w = list.pop() {
			d.queued -= w.size
			s.put(w, s.choose(w.size))
		}
	}
}

// errEnd is what a try that came short, for no reason given, stands for.
var errEnd = io.ErrUnexpectedEOF

// plainError is err, or what its absence after a broken read means.
func plainError(err error) error {
	if err == nil || err == io.EOF {
		return errEnd
	}
	return err
}
