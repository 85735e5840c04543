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
func (s *Reader) mapFiles() error {
	for i, holds := range s.holds {
		if !holds {
			continue
		}
		o := &s.drives[0].files[i]
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

// populate makes the pages of r resident, waits until they are, and says as a
// read would how many of the bytes are there. MADV_WILLNEED starts all of its
// reads at once, MADV_POPULATE_READ waits for them and maps the pages; where a
// plain touch would die of SIGBUS it gives an error.
func (s *Reader) populate(r *read) (int, error) {
	o := s.file(r)
	b := pages(o.mem, r.off, r.size)
	unix.Madvise(b, unix.MADV_WILLNEED) // advice: what counts is below
	err := error(unix.EINVAL)
	if !s.dev.noPopulate {
		err = unix.Madvise(b, unix.MADV_POPULATE_READ)
	}
	if err == unix.EINVAL { // before Linux 5.14
		err = touch(b)
	}
	if err == unix.EAGAIN {
		err = unix.EINTR // to be done again
	}
	// Beyond an end inside its last page a file reads as zeros, without an error.
	var st unix.Stat_t
	if err != unix.EINTR && unix.Fstat(int(o.f.Fd()), &st) == nil && st.Size < r.off+r.need {
		return int(max(0, st.Size-r.off)), nil
	}
	switch err {
	case nil:
		return int(r.need), nil
	case unix.EFAULT:
		return 0, unix.EIO // what the SIGBUS would have meant
	}
	return 0, err
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
func (s *Reader) Evict(f *Fetch) {
	if s.mode != MMap {
		return
	}
	l, page := s.layer(f.Key.Layer), int64(os.Getpagesize())
	for _, x := range l.parts {
		at := x.from[0].of(int64(f.Key.Expert))
		start, end := (at.off+page-1)&^(page-1), (at.off+x.share)&^(page-1)
		if start < end {
			unix.Madvise(s.drives[0].files[at.file].mem[start:end], unix.MADV_DONTNEED) // cannot fail on what is mapped
		}
	}
}
