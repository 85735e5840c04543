// Package atomicfile writes a file that is whole or not there: its bytes go to
// PATH.part beside it, which takes the name when all of them are on the drive.
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
	f    *os.File // nil once ended
	w    *bufio.Writer
	n    int64 // bytes written
	err  error // the failure that ended it
}

// Create begins to write path, which stays as it is until Commit.
func Create(path string) (*File, error) {
	f, err := os.OpenFile(path+".part", os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("create %s: %s.part is there: another program writes it, or one was killed; remove it if none does: %w", path, path, err)
	}
	if err != nil {
		return nil, fmt.Errorf("create %s: %w", path, err)
	}
	return &File{path: path, f: f, w: bufio.NewWriterSize(f, 1<<20)}, nil
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
	if err := f.f.Sync(); err != nil {
		return f.fail(err)
	}
	if err := f.f.Close(); err != nil {
		return f.fail(err)
	}
	if err := os.Rename(f.path+".part", f.path); err != nil {
		return f.fail(err)
	}
	f.f = nil
	// The bytes are on the drive. Not every file system can say the same of the
	// name, so that this may fail: the name then gets there a little later.
	if dir, err := os.Open(filepath.Dir(f.path)); err == nil {
		dir.Sync()
		dir.Close()
	}
	return nil
}

// Abort gives up the file and leaves nothing behind. After Commit it does nothing.
func (f *File) Abort() {
	if f.f == nil {
		return
	}
	f.f.Close()
	f.f = nil
	os.Remove(f.path + ".part")
}

func (f *File) ended() error {
	if f.err != nil {
		return f.err
	}
	return fmt.Errorf("write %s: %w", f.path, fs.ErrClosed)
}

func (f *File) fail(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		f.err = fmt.Errorf("write %s: no space for more than about %d bytes, removed what was written: free some space or write elsewhere: %w", f.path, f.n, err)
	} else {
		f.err = fmt.Errorf("write %s: at about byte %d, removed what was written: %w", f.path, f.n, err)
	}
	f.Abort()
	return f.err
}
