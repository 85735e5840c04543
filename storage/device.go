package storage

import (
	"errors"
	"fmt"
	"io"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"sluice/internal/offheap"
)

const (
	slotAlign = 4096    // of slots, and the least alignment of direct reads
	maxRead   = 1 << 30 // bytes of one read; the kernel's own limit is just under 2 GiB
)

// A ReadError is a read that failed twice: the range asked for and what came of
// it. The failure stands at byte Off+Got. Err is io.ErrUnexpectedEOF where the
// file ended early, else what the operating system said.
type ReadError struct {
	File     string
	Off, Len int64
	Got      int64
	Err      error
	Before   string // what the first try said, where it asked another drive
}

func (e *ReadError) Error() string {
	hint := "check the drive and the kernel's log"
	if errors.Is(e.Err, io.ErrUnexpectedEOF) {
		hint = "the file is shorter than when it was opened; fetch it again"
	}
	tries := ", twice"
	if e.Before != "" {
		tries = ", after " + e.Before
	}
	return fmt.Sprintf("storage: %s: byte %d: read %d of the %d bytes at byte %d%s: %v; %s",
		e.File, e.Off+e.Got, e.Got, e.Len, e.Off, tries, e.Err, hint)
}

func (e *ReadError) Unwrap() error { return e.Err }

// device is where sources touch the operating system. The zero value is the real
// one; tests set a func to put a fault in its place.
type device struct {
	// directErr is what open with O_DIRECT says instead of opening.
	directErr error
	// ringErr is what io_uring_setup says instead of making a ring.
	ringErr error
	// noPopulate does as a kernel before 5.14 does, which lacks MADV_POPULATE_READ.
	noPopulate bool
	// registerErr is what the kernel says to registering buffers.
	registerErr error
	// buffer bounds one registered buffer; 0: the kernel's bound.
	buffer int64
	// result, if set, sees what a try of p at off of a file came to, and says
	// what the reader sees. In mmap mode p cannot be written to.
	result func(file string, off int64, p []byte, n int, err error) (int, error)
	// wrap, if set, stands between the reader and its transport.
	wrap func(transport) transport
	// now, if set, is the time.
	now func() time.Time
}

func (d *device) clock() time.Time {
	if d.now != nil {
		return d.now()
	}
	return time.Now()
}

// seen is the outcome of a try to read p, r's rest, as the reader is to see it.
func (s *Reader) seen(r *read, p []byte, n int, err error) (int, error) {
	if s.dev.result == nil {
		return n, err
	}
	return s.dev.result(s.file(r).Path, r.off+r.done, p, n, err)
}

// file is the file that r's next try asks.
func (s *Reader) file(r *read) *openFile { return &s.drives[r.drive].files[r.file] }

// fd is its descriptor.
func (s *Reader) fd(r *read) int {
	if o := s.file(r); !r.buffered {
		return o.fd
	} else {
		return int(o.f.Fd())
	}
}

// rest is the memory that the next try of r has to fill.
func (r *read) rest() []byte {
	end := r.size
	if r.buffered {
		end = r.need
	}
	return r.buf[r.done:min(end, r.done+maxRead)]
}

// A verdict says what follows from the result of a try.
type verdict uint8

const (
	whole  verdict = iota // the read is finished
	more                  // it came short: go on where it stopped
	broken                // an error or an unexpected end
)

// advance notes that a try of r's rest gave n bytes or an error. Going on
// happens at an aligned position; a try that gains no whole block is an
// unexpected end. Behind need the file may end, so that no more is wanted. The
// pages of a view are made resident all at once or not at all.
func (r *read) advance(n int, err error, align int64) verdict {
	if err == unix.EINTR {
		return more
	}
	if err != nil {
		return broken
	}
	if r.done+int64(n) >= r.need {
		r.done += int64(n)
		return whole
	}
	got := r.done + int64(n)
	if !r.buffered {
		got &^= align - 1
	}
	if r.view || got == r.done {
		return broken
	}
	r.done = got
	return more
}

// readError is the end of r after its second try, which gave n bytes or err.
func (s *Reader) readError(r *read, n int, err error) error {
	e := &ReadError{File: s.file(r).Path, Off: r.off, Len: r.need, Got: r.done + int64(n), Err: plainError(err)}
	if r.first != nil {
		e.Before = fmt.Sprintf("the same of another drive gave %q", r.first)
	}
	return e
}

// errReplaced says that a path has another file than the one that was opened.
var errReplaced = errors.New("the file was replaced since it was opened; open the model again")

// openDirect opens f once more, past the page cache, and returns the alignment
// that its reads want. It tries one, since some file systems take the flag and
// refuse the reads.
func (d *device) openDirect(f *File) (fd int, align int64, err error) {
	if d.directErr != nil {
		return -1, 0, d.directErr
	}
	fd, err = unix.Open(f.Path, unix.O_RDONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, 0, err
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
			fd = -1
		}
	}()
	var now, then unix.Stat_t
	if err = unix.Fstat(fd, &now); err != nil {
		return fd, 0, err
	}
	if err = unix.Fstat(int(f.f.Fd()), &then); err != nil {
		return fd, 0, err
	}
	if now.Dev != then.Dev || now.Ino != then.Ino {
		return fd, 0, errReplaced
	}
	align = slotAlign
	var x unix.Statx_t // Linux 6.1 tells the alignment
	if unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &x) == nil && x.Mask&unix.STATX_DIOALIGN != 0 {
		align = max(align, int64(x.Dio_offset_align))
		if x.Dio_offset_align == 0 || x.Dio_mem_align > slotAlign || align&(align-1) != 0 {
			return fd, 0, unix.EINVAL
		}
	}
	probe, err := offheap.Alloc(align)
	if err != nil {
		return fd, 0, err
	}
	defer offheap.Free(probe)
	_, err = unix.Pread(fd, probe, 0)
	return fd, align, err
}

// fileSystem names the kind of file system that holds f.
func fileSystem(f *File) string {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.f.Fd()), &st); err != nil {
		return "unknown kind"
	}
	switch kind := uint32(st.Type); kind {
	case unix.TMPFS_MAGIC:
		return "tmpfs"
	case unix.OVERLAYFS_SUPER_MAGIC:
		return "overlay"
	case unix.FUSE_SUPER_MAGIC:
		return "fuse"
	case unix.NFS_SUPER_MAGIC:
		return "nfs"
	case unix.V9FS_MAGIC:
		return "9p"
	case 0x2fc12fc1:
		return "zfs"
	case unix.EXT4_SUPER_MAGIC:
		return "ext4"
	case unix.XFS_SUPER_MAGIC:
		return "xfs"
	case unix.BTRFS_SUPER_MAGIC:
		return "btrfs"
	default:
		return fmt.Sprintf("kind %#x", kind)
	}
}

// errName is the symbol of an errno, such as EINVAL, else the error's text.
func errName(err error) string {
	var no syscall.Errno
	if errors.As(err, &no) {
		return unix.ErrnoName(no)
	}
	return err.Error()
}
