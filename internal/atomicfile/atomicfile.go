// Package atomicfile writes a file that is whole or not there: its bytes go to
// PATH.sluice-part beside it, which takes the name when all of them are on the drive.
// The name says whose it is: one that a killed program left is written over, while a
// PATH.part may be a download of the user's.
// A PATH that is no regular file, such as a pipe or a device, cannot be
// replaced so and is written to as it comes.
package atomicfile

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// A File is being written. Either Commit or Abort ends it; a failed Write or
// Commit has already done what Abort does.
type File struct {
	path string
	temp string   // what the bytes go to until Commit; "" if that is path itself
	f    *os.File // nil once ended
	w    *bufio.Writer
	n    int64 // bytes written
	err  error // the failure that ended it
}

// tempEnd ends the names of unfinished files of Create.
const tempEnd = ".sluice-part"

// Create begins to write path, which stays as it is until Commit. What a killed
// program left in PATH.sluice-part is written over; one that another program is
// writing now is an error.
func Create(path string) (*File, error) {
	var err error
	if real, lerr := filepath.EvalSymlinks(path); lerr == nil {
		path = real // a link stays, what it names is replaced
	}
	f := &File{path: path, temp: path + tempEnd}
	if fi, serr := os.Stat(path); serr == nil && !fi.Mode().IsRegular() {
		f.temp = ""
		f.f, err = os.OpenFile(path, os.O_WRONLY, 0)
	} else {
		if f.f, err = openLocked(f.temp); err == nil {
			if err = f.f.Truncate(0); err != nil {
				f.f.Close()
			}
		}
	}
	if err != nil {
		return nil, fmt.Errorf("create %s: %w", path, err)
	}
	f.w = bufio.NewWriterSize(f.f, 1<<20)
	return f, nil
}

// OpenPart opens PATH.part for reading and writing, with the bytes that an
// earlier program left in it, for a writer that goes on where it stopped, and that
// knows what it has written from what others have: Publish ends it. One that another program is writing now is an error.
func OpenPart(path string) (*os.File, error) {
	f, err := openLocked(path + ".part")
	if err != nil {
		return nil, fmt.Errorf("create %s: %w", path, err)
	}
	return f, nil
}

// Publish puts f, which OpenPart opened for path, in place of whatever has that
// name, when its bytes are on the drive, and closes it. After an error f is still
// open and still PATH.part.
func Publish(f *os.File, path string) error { return publish(f, path+".part", path) }

func publish(f *os.File, temp, path string) error {
	if err := f.Sync(); err != nil {
		return err
	}
	// Renamed while it is open, and so locked: nobody else takes it for his own.
	if err := os.Rename(temp, path); err != nil {
		return err
	}
	f.Close() // after Sync it has nothing left to fail at
	// The bytes are on the drive. Not every file system can say the same of the
	// name, so that this may fail: the name then gets there a little later.
	if dir, err := os.Open(filepath.Dir(path)); err == nil {
		dir.Sync()
		dir.Close()
	}
	return nil
}

// openLocked opens the file name for this process alone.
func openLocked(name string) (*os.File, error) {
	for {
		f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o666)
		if errors.Is(err, syscall.ELOOP) {
			return nil, fmt.Errorf("%s is a symbolic link, which is not followed: remove it", name)
		}
		if err != nil {
			return nil, err
		}
		if fi, err := f.Stat(); err != nil || !fi.Mode().IsRegular() {
			f.Close()
			return nil, fmt.Errorf("%s is no regular file: remove it", name)
		}
		if err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
			f.Close()
			if errors.Is(err, syscall.EWOULDBLOCK) {
				err = fmt.Errorf("another program is writing %s now: wait for it or stop it", name)
			}
			return nil, err
		}
		// Who held the lock until now may have renamed the file since it was opened.
		mine, err := f.Stat()
		if err != nil {
			f.Close()
			return nil, err
		}
		if now, err := os.Stat(name); err != nil || !os.SameFile(mine, now) {
			f.Close()
			continue
		}
		return f, nil
	}
}

// Write appends to the file.
func (f *File) Write(b []byte) (int, error) {
	if f.f == nil {
		return 0, f.ended()
	}
	n, err := f.w.Write(b)
	f.n += int64(n)
	if err != nil {
		return n, f.fail(err)
	}
	return n, nil
}

// Commit puts the file in place of whatever had its name.
func (f *File) Commit() error {
	if f.f == nil {
		return f.ended()
	}
	if err := f.w.Flush(); err != nil {
		return f.fail(err)
	}
	if f.temp == "" {
		if err := f.f.Close(); err != nil {
			return f.fail(err)
		}
		f.f = nil
		return nil
	}
	if err := publish(f.f, f.temp, f.path); err != nil {
		return f.fail(err)
	}
	f.f = nil
	return nil
}

// Abort gives up the file and leaves nothing behind. After Commit it does nothing.
func (f *File) Abort() {
	if f.f == nil {
		return
	}
	if f.temp != "" {
		os.Remove(f.temp) // before Close, which lets go of the lock
	}
	f.f.Close()
	f.f = nil
}

func (f *File) ended() error {
	if f.err != nil {
		return f.err
	}
	return fmt.Errorf("write %s: %w", f.path, fs.ErrClosed)
}

func (f *File) fail(err error) error {
	left := "removed what was written"
	if f.temp == "" {
		left = "what was written stays there"
	}
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		f.err = fmt.Errorf("write %s: no space for more than about %d bytes, %s: free some space or write elsewhere: %w", f.path, f.n, left, err)
	} else {
		f.err = fmt.Errorf("write %s: at about byte %d, %s: %w", f.path, f.n, left, err)
	}
	f.Abort()
	return f.err
}
