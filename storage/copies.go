package storage

import (
	"bytes"
	"fmt"
	"io"
	"os"
)

// OpenCopies opens a model of which there are copies on several drives, at most
// MaxDrives, each named by the path of one of its files. Reads are shared among
// the copies (see Model.Source); what else is asked of the model is answered from
// the first. The copies must have the same files, of the same sizes and with the
// same headers, and the same bytes at three places of each tensor, and not be the
// same files under another name; the error names the first difference.
func OpenCopies(paths ...string) (*Model, error) {
	if len(paths) == 0 || len(paths) > MaxDrives {
		return nil, fmt.Errorf("storage: %d copies of a model: 1 to %d can be read at once", len(paths), MaxDrives)
	}
	m, err := Open(paths[0])
	if err != nil {
		return nil, err
	}
	for _, path := range paths[1:] {
		c, err := Open(path)
		if err == nil {
			if err = m.addCopy(c); err == nil {
				m.copies = append(m.copies, c.Files)
				continue
			}
			c.Close()
		}
		m.Close()
		return nil, err
	}
	return m, nil
}

// addCopy checks that c has the files of m.
func (m *Model) addCopy(c *Model) error {
	if len(c.Files) != len(m.Files) {
		return fmt.Errorf("storage: %s has %d files and %s has %d: they are not copies of one model", c.Files[0].Path, len(c.Files), m.Files[0].Path, len(m.Files))
	}
	header := make([]int64, len(m.Files)) // of each file: the bytes before the first tensor
	for i := range header {
		header[i] = m.Files[i].Size
	}
	for _, t := range m.Tensors {
		header[t.File] = min(header[t.File], t.Off)
	}
	for i := range m.Files {
		a, b := &m.Files[i], &c.Files[i]
		for _, known := range append([][]File{m.Files}, m.copies...) {
			if same, err := sameFile(&known[i], b); err != nil || same {
				if err == nil {
					err = fmt.Errorf("storage: %s and %s are the same file: a second --model is a copy on another drive", known[i].Path, b.Path)
				}
				return err
			}
		}
		if a.Size != b.Size {
			return fmt.Errorf("storage: %s has %d bytes and %s has %d: they are not copies of one model; copy it again", b.Path, b.Size, a.Path, a.Size)
		}
		at, err := difference(a.f, b.f, header[i])
		if err != nil {
			return fmt.Errorf("storage: compare %s with %s: %w", b.Path, a.Path, err)
		}
		if at >= 0 {
			return fmt.Errorf("storage: %s and %s differ at byte %d, in their headers: they are not copies of one model; copy it again", b.Path, a.Path, at)
		}
	}
	for _, name := range hfTexts {
		if a, b := m.Meta.Value("hf."+name), c.Meta.Value("hf."+name); m.directory() && a != b {
			return fmt.Errorf("storage: %s beside %s and %s is not the same: they are not copies of one model; copy it again", name, m.Files[0].Path, c.Files[0].Path)
		}
	}
	return m.sample(c)
}

// sample compares the bytes of each tensor at its start, its middle and its end
// with those of c. It finds a copy that was cut, or is of another model of the
// same shape; single wrong bits only checksums find. A slab has those, and so
// needs no sample.
func (m *Model) sample(c *Model) error {
	if m.Format == "slab" {
		return nil
	}
	const piece = 4096
	var x, y [piece]byte
	var all []Tensor // as they lie in the files
	for _, t := range m.Tensors {
		if t.form == nil {
			all = append(all, t)
			continue
		}
		for _, s := range t.form.from { // of a tensor of the model's own: shares that follow each other
			if s.n > 0 {
				all = append(all, Tensor{Name: t.Name, File: s.at.file, Off: s.at.off, Bytes: s.n * t.shares()})
			}
		}
	}
	for _, t := range all {
		n := min(piece, t.Bytes)
		for _, at := range [...]int64{0, (t.Bytes - n) / 2, t.Bytes - n} {
			a, b := &m.Files[t.File], &c.Files[t.File]
			if _, err := readFull(a.f, x[:n], t.Off+at); err != nil {
				return fmt.Errorf("storage: compare copies: %s: byte %d: %w", a.Path, t.Off+at, err)
			}
			if _, err := readFull(b.f, y[:n], t.Off+at); err != nil {
				return fmt.Errorf("storage: compare copies: %s: byte %d: %w", b.Path, t.Off+at, err)
			}
			if i := differAt(x[:n], y[:n]); i >= 0 {
				return fmt.Errorf("storage: %s and %s differ at byte %d, in tensor %s: they are not copies of one model; copy it again", b.Path, a.Path, t.Off+at+int64(i), t.Name)
			}
		}
	}
	return nil
}

// Compared says in words how far the copies of a model were compared; "" if there
// are none.
func (m *Model) Compared() string {
	switch n := 1 + len(m.copies); {
	case n == 1:
		return ""
	case m.Format == "slab":
		return fmt.Sprintf("copies: %d slabs with equal sizes and headers, their checksums included; each expert is checked as it is read", n)
	default:
		return fmt.Sprintf("copies: %d with equal sizes and headers, and equal bytes at the start, the middle and the end of each of %d tensors; the rest was not compared (slabs have checksums: sluice pack)", n, len(m.Tensors))
	}
}

// differAt is the first index at which two slices of one length differ, or -1.
func differAt(x, y []byte) int {
	if bytes.Equal(x, y) {
		return -1
	}
	i := 0
	for x[i] == y[i] {
		i++
	}
	return i
}

// sameFile says whether two open files are one.
func sameFile(a, b *File) (bool, error) {
	x, err := a.f.Stat()
	if err != nil {
		return false, fmt.Errorf("storage: %w", err)
	}
	y, err := b.f.Stat()
	if err != nil {
		return false, fmt.Errorf("storage: %w", err)
	}
	return os.SameFile(x, y), nil
}

// difference is the first of the first n bytes in which a and b differ, or -1.
func difference(a, b io.ReaderAt, n int64) (int64, error) {
	x, y := make([]byte, 1<<20), make([]byte, 1<<20)
	for at := int64(0); at < n; at += int64(len(x)) {
		k := min(int64(len(x)), n-at)
		if _, err := readFull(a, x[:k], at); err != nil {
			return 0, err
		}
		if _, err := readFull(b, y[:k], at); err != nil {
			return 0, err
		}
		if i := differAt(x[:k], y[:k]); i >= 0 {
			return at + int64(i), nil
		}
	}
	return -1, nil
}
