package storage

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// A File is one file of a model, open for reading.
type File struct {
	Path string
	Size int64
	f    *os.File
	head int64 // bytes of its header

	stamps []byte // of a file of a colibri container: what its header says of formats
}

// A Model is an open model: its metadata and where its tensors lie. Reading
// headers is all that Open does; no tensor byte is touched.
type Model struct {
	Format  string // "gguf", "safetensors", "colibri" or "slab"
	Files   []File
	Meta    Meta
	Tensors []Tensor // in file order
	byName  map[string]int
	views   sync.Map // by name: tensors made of others, see View
	slab    *slab    // of Format "slab": what else its header says

	copies [][]File // the same files on other drives: see OpenCopies
}

// ErrNoModel says that there is no file of the model's name.
var ErrNoModel = errors.New("no such model")

// Open opens the model at path: a GGUF file of version 2 or 3, or any shard of
// a split one, whose siblings are found by their names; a Hugging Face directory of
// safetensors, or its config.json, its index or a shard in it; or a slab, which
// Pack writes. What is wrong with the bytes is a *FormatError; what is wrong with the
// drive is the system's error.
func Open(path string) (*Model, error) {
	fi, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("storage: %w: %w", ErrNoModel, err)
	case err != nil:
		return nil, fmt.Errorf("storage: open model: %w", err)
	case fi.IsDir() && !hfModel(path, true):
		return nil, fmt.Errorf("storage: %s is a directory: name the .gguf file in it (of a split model, any shard); one without a config.json is no Hugging Face model", path)
	case fi.IsDir():
		return openHF(path, true)
	case !fi.Mode().IsRegular():
		return nil, fmt.Errorf("storage: %s is not a regular file: a model is read at many positions, so it must lie on a drive", path)
	}
	if isSlab(path) {
		return openSlab(path)
	}
	if hfModel(path, false) {
		return openHF(path, false)
	}
	return openGGUF(path)
}

// openUnwaiting opens a file for reading. It does not wait, as for the other end of a
// pipe; what it opens may be no regular file.
func openUnwaiting(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
}

// Paths are the paths of all files of the model and its copies.
func (m *Model) Paths() (paths []string) {
	for _, files := range append([][]File{m.Files}, m.copies...) {
		for _, f := range files {
			paths = append(paths, f.Path)
		}
	}
	return paths
}

// Stamps are the sizes and modification times of all files of the model and its
// copies as they are now, in the order of Paths, so that two of them show whether
// a file was written to in between. A file that was replaced under its name is
// not the one that is open, and does not show.
func (m *Model) Stamps() (stamps []FileStamp, err error) {
	for _, files := range append([][]File{m.Files}, m.copies...) {
		for _, f := range files {
			fi, err := f.f.Stat()
			if err != nil {
				return nil, fmt.Errorf("storage: %w", err)
			}
			stamps = append(stamps, FileStamp{f.Path, fi.Size(), fi.ModTime().UnixNano()})
		}
	}
	return stamps, nil
}

// A FileStamp is the size and modification time (Unix nanoseconds) of a file.
type FileStamp struct {
	Path       string
	Size, Time int64
}

// Close closes the model's files. Nothing may be reading from them.
func (m *Model) Close() error {
	var errs []error
	for _, files := range append([][]File{m.Files}, m.copies...) {
		for i := range files {
			if f := files[i].f; f != nil {
				errs = append(errs, f.Close())
				files[i].f = nil
			}
		}
	}
	return errors.Join(errs...)
}

// Tensor finds a tensor by its name, or one that View makes.
func (m *Model) Tensor(name string) (Tensor, bool) {
	if i, ok := m.byName[name]; ok {
		return m.Tensors[i], true
	}
	if !strings.ContainsAny(name, "*[") {
		return Tensor{}, false
	}
	t, err := m.View(name)
	return t, err == nil
}

// ReadTensor fills dst, which is exactly as long as the tensor, with its bytes.
// Short reads are continued. Of a slab, they are verified by their checksum: if
// it does not fit, even after a second read, that is a *ChecksumError. After an
// error the bytes in dst mean nothing. Several goroutines may read at once.
func (m *Model) ReadTensor(dst []byte, t Tensor) error {
	if int64(len(dst)) != t.Bytes {
		panic(fmt.Sprintf("storage: tensor %s holds %d bytes, dst %d", t.Name, t.Bytes, len(dst)))
	}
	if t.stack != nil {
		return m.gather(dst, t)
	}
	if t.form != nil {
		n := t.Bytes / t.shares()
		for e := range t.shares() {
			if err := m.readShare(dst[e*n:(e+1)*n], t, e); err != nil {
				return err
			}
		}
		return nil
	}
	err := m.read(dst, t, t.Off)
	if err == nil && m.checkSum(dst, t) != nil {
		m.Files[t.File].forget(t.Off, t.Bytes)
		if err = m.read(dst, t, t.Off); err == nil {
			err = m.checkSum(dst, t)
		}
	}
	return err
}

// readShare fills dst with the share of expert e of a tensor that has a form.
func (m *Model) readShare(dst []byte, t Tensor, e int64) error {
	var raw [2][]byte
	for i, s := range t.form.from {
		if s.n == 0 {
			continue
		}
		at := s.of(e)
		if raw[i] = dst; t.form.weave != unwoven {
			raw[i] = make([]byte, s.n)
		}
		if err := m.read(raw[i], Tensor{Name: t.Name, File: at.file, Bytes: s.n}, at.off); err != nil {
			return err
		}
	}
	if t.form.weave != unwoven {
		t.form.share(dst, raw[0], raw[1])
	}
	return nil
}

// read fills dst with bytes of the tensor's file from off on.
func (m *Model) read(dst []byte, t Tensor, off int64) error {
	file := &m.Files[t.File]
	if n, err := readFull(file.f, dst, off); err != nil {
		at := off + int64(n)
		if errors.Is(err, io.EOF) {
			return &FormatError{File: file.Path, Off: at, Msg: fmt.Sprintf(
				"the file ends here, inside tensor %q, which needs bytes %d to %d: it was cut short after it was opened; copy it again",
				t.Name, off, off+int64(len(dst)))}
		}
		return fmt.Errorf("storage: read tensor %q at byte %d: %w", t.Name, at, err)
	}
	return nil
}

// checkSum compares the bytes of a tensor that lies together with its checksum,
// if it has one.
func (m *Model) checkSum(b []byte, t Tensor) error {
	if t.sum == nil {
		return nil
	}
	if got := crc32.Checksum(b, castagnoli); got != *t.sum {
		return &ChecksumError{File: m.Files[t.File].Path, Tensor: t.Name, Off: t.Off, Want: *t.sum, Got: got}
	}
	return nil
}

// gather fills dst with a tensor whose shares lie among others, each expert
// verified as a whole.
func (m *Model) gather(dst []byte, t Tensor) error {
	one := make([]byte, t.stack.span)
	for e := range int64(t.stack.experts) {
		if err := m.readExpert(one, t.stack, e); err != nil {
			return err
		}
		off, share := t.at(e, int64(t.stack.experts))
		from := off - t.stack.at(e)
		copy(dst[e*share:(e+1)*share], one[from:])
	}
	return nil
}

// readFull fills dst from position off, however short the single reads are, and
// says how much it got. io.EOF: the end came first.
func readFull(r io.ReaderAt, dst []byte, off int64) (int, error) {
	n := 0
	for n < len(dst) {
		k, err := r.ReadAt(dst[n:], off+int64(n))
		n += k
		if n == len(dst) {
			break
		}
		if err != nil {
			return n, err
		}
		if k == 0 {
			return n, io.ErrNoProgress
		}
	}
	return n, nil
}
