package storage

import (
	"fmt"
	"os"
	"runtime/debug"

	"golang.org/x/sys/unix"
)

// mapFiles maps the files that hold experts, read-only and shared with the page
// cache. The mapping as a whole gets no advice: each read says for itself what
// is needed, and MADV_RANDOM would turn off the read-ahead that does the work.
func (s *experts) mapFiles() error {
	for i := range s.files {
		o := &s.files[i]
		if o.File == nil {
			continue
		}
		b, err := unix.Mmap(int(o.f.Fd()), 0, int(o.Size), unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			return fmt.Errorf("storage: %s: cannot map its %d bytes: %w; use the storage mode slab", o.Path, o.Size, err)
		}
		o.mem = b
	}
	return nil
}

// pages rounds [off, off+n) of a mapping out to whole pages. The last page of a
// file is whole in memory, though not in the mapping's length.
func pages(mem []byte, off, n int64) []byte {
	page := int64(os.Getpagesize())
	return mem[off&^(page-1) : min(int64(len(mem)), (off+n+page-1)&^(page-1))]
}

// populate makes the pages of r resident and waits until they are. MADV_WILLNEED
// starts all of its reads at once, MADV_POPULATE_READ waits for them and maps
// the pages; where a plain touch would die of SIGBUS it gives an error.
func (p *poolSource) populate(r *read) {
	o := &p.files[r.file]
	b := pages(o.mem, r.off, r.size)
	for try := 0; ; try++ {
		r.asked += int64(len(b))
		unix.Madvise(b, unix.MADV_WILLNEED) // advice: what counts is below
		err := error(unix.EINVAL)
		if !p.dev.noPopulate {
			err = unix.Madvise(b, unix.MADV_POPULATE_READ)
		}
		if err == unix.EINVAL { // before Linux 5.14
			err = touch(b)
		}
		n := 0
		var st unix.Stat_t
		switch end := r.off + r.need; {
		case err == unix.EINTR || err == unix.EAGAIN:
			try--
			continue
		// Beyond an end inside its last page a file reads as zeros, without an error.
		case unix.Fstat(int(o.f.Fd()), &st) == nil && st.Size < end:
			n, err = int(max(0, st.Size-r.off)), nil
		case err == unix.EFAULT:
			err = unix.EIO // what the SIGBUS would have meant
		case err == nil:
			n = int(r.need)
		}
		n, err = p.seen(r, r.buf, n, err)
		if err == nil && int64(n) == r.need {
			return
		}
		if try == 1 {
			r.err = p.readError(r, n, err)
			return
		}
		r.retries++
	}
}

// touch reads a byte of each page of b, which starts on a page.
func touch(b []byte) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true)) // of this goroutine alone
	defer func() {
		if e := recover(); e != nil {
			if _, fault := e.(interface{ Addr() uintptr }); !fault {
				panic(e)
			}
			err = unix.EFAULT
		}
	}()
	var sum byte
	for i := 0; i < len(b); i += 4096 {
		sum += b[i]
	}
	touched(sum)
	return nil
}

// touched keeps the loads of touch from being optimized away.
//
//go:noinline
func touched(byte) {}

// Evict lets go of the pages that hold bytes of this expert alone. They leave the
// resident set at once, the page cache when the kernel wants the memory. In the
// other modes the memory is the caller's, and nothing is to be done.
func (s *experts) Evict(f *Fetch) {
	if s.mode != MMap {
		return
	}
	l, page := s.layer(f.Key.Layer), int64(os.Getpagesize())
	for _, x := range l.parts {
		off := x.off + int64(f.Key.Expert)*x.share
		start, end := (off+page-1)&^(page-1), (off+x.share)&^(page-1)
		if start < end {
			unix.Madvise(s.files[x.file].mem[start:end], unix.MADV_DONTNEED) // cannot fail on what is mapped
		}
	}
}
