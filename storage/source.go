package storage

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// SourceOptions choose how experts are read. The zero value is slab mode.
type SourceOptions struct {
	Mode Mode
	// Depth is how many reads are at work at once: requests in the ring in slab
	// mode (default 256), readers in the others (default 4). More wait in line.
	Depth int

	dev device // faults, in tests
}

const (
	// A layer of one token is some 8 experts of 3 parts: 256 hold ten of them.
	defaultRing = 256
	// 1 to 4 large reads at once are enough for a drive's full rate; each is
	// split by the block layer.
	defaultReaders = 4
	maxDepth       = 4096
)

// Source makes a source that reads the experts of the layers. The model must
// stay open until the source is closed.
//
// The strings are notices in words where another mode than the wished one, or
// reads through the page cache, had to do; Mode tells the mode that runs.
// Errors are bad data (*FormatError), a bad Depth, or files that changed since
// the model was opened.
func (m *Model) Source(layers []ExpertLayer, opt SourceOptions) (Source, []string, error) {
	if opt.Depth < 0 || opt.Depth > maxDepth {
		return nil, nil, fmt.Errorf("storage: depth %d: use 1 to %d, or 0 for the default", opt.Depth, maxDepth)
	}
	if opt.Mode > MMap {
		return nil, nil, fmt.Errorf("storage: there is no storage mode %d", opt.Mode)
	}
	s := experts{mode: opt.Mode, align: 1, dev: opt.dev}
	if err := s.plan(m, layers); err != nil {
		return nil, nil, err
	}
	readers := cmp.Or(opt.Depth, defaultReaders)
	if opt.Mode == MMap {
		if err := s.mapFiles(); err != nil {
			s.close()
			return nil, nil, err
		}
		return newPool(s, readers), nil, nil
	}

	notices, err := s.openFiles()
	if err != nil {
		s.close()
		return nil, nil, err
	}
	if opt.Mode == Slab && len(notices) == 0 {
		src, err := newRing(s, cmp.Or(opt.Depth, defaultRing))
		if err == nil {
			return src, nil, nil
		}
		notices = append(notices, fmt.Sprintf("storage: io_uring is not to be had (%s); using pread", ringReason(err)))
	}
	s.mode = Pread
	return newPool(s, readers), notices, nil
}

// plan checks the layers against the model and fills s.layers, slots aside, and
// s.files, unopened.
func (s *experts) plan(m *Model, layers []ExpertLayer) error {
	if len(layers) == 0 {
		return errors.New("storage: a source of no layers: the model has no experts to read")
	}
	s.layers = make(map[int32]*layer, len(layers))
	s.files = make([]openFile, len(m.Files))
	for _, el := range layers {
		bad := func(t Tensor, format string, args ...any) error {
			e := &FormatError{Off: -1, Msg: fmt.Sprintf("layer %d: tensor %q: ", el.Layer, t.Name) + fmt.Sprintf(format, args...)}
			if t.File >= 0 && t.File < len(m.Files) {
				e.File, e.Off = m.Files[t.File].Path, t.Off
			}
			return e
		}
		if el.Layer < 0 || el.Layer > 1<<20 || el.Experts < 1 || el.Experts > 1<<20 || len(el.Parts) < 1 || len(el.Parts) > MaxParts {
			return fmt.Errorf("storage: layer %d with %d experts of %d parts: wants a layer and experts below 2^20 and 1 to %d parts",
				el.Layer, el.Experts, len(el.Parts), MaxParts)
		}
		if s.layers[int32(el.Layer)] != nil {
			return fmt.Errorf("storage: layer %d is given twice", el.Layer)
		}
		l := &layer{experts: int32(el.Experts)}
		for i, name := range el.Parts {
			t, ok := m.Tensor(name)
			if !ok {
				return bad(Tensor{Name: name, File: -1}, "the model has none of that name; the file is incomplete or of another kind than its metadata says")
			}
			if t.File < 0 || t.File >= len(m.Files) {
				return bad(t, "lies in file %d of %d", t.File, len(m.Files))
			}
			f := &m.Files[t.File]
			n := int64(el.Experts)
			switch {
			case len(t.Dims) < 2 || t.Dims[len(t.Dims)-1] != n:
				return bad(t, "has dims %v; the last must be the number of experts, %d", t.Dims, n)
			case t.Bytes < n || t.Bytes%n != 0:
				return bad(t, "its %d bytes are not the same share for each of %d experts", t.Bytes, n)
			case t.Off < 0 || t.Off > f.Size || t.Bytes > f.Size-t.Off:
				return bad(t, "its %d bytes do not lie inside the file, which has %d; fetch the file again", t.Bytes, f.Size)
			}
			s.files[t.File].File = f
			l.parts = append(l.parts, part{file: t.File, off: t.Off, share: t.Bytes / n})
			l.order = append(l.order, i)
			l.payload += t.Bytes / n
		}
		slices.SortStableFunc(l.order, func(a, b int) int {
			x, y := l.parts[a], l.parts[b]
			return cmp.Or(cmp.Compare(x.file, y.file), cmp.Compare(x.off, y.off))
		})
		s.layers[int32(el.Layer)] = l
	}
	return nil
}

// openFiles opens the files for direct reads, or keeps the buffered descriptors
// where those are refused, and settles the alignment and the slots.
func (s *experts) openFiles() (notices []string, err error) {
	s.align = slotAlign
	for i := range s.files {
		o := &s.files[i]
		if o.File == nil {
			continue
		}
		fd, align, err := s.dev.openDirect(o.File)
		if err == nil {
			o.fd, o.own = fd, true
			s.align = max(s.align, align)
			continue
		}
		if err == errReplaced {
			return nil, fmt.Errorf("storage: %s: %w", o.Path, err)
		}
		o.fd = int(o.f.Fd())
		note := fmt.Sprintf("storage: O_DIRECT refused by the file system (%s: %s); using buffered pread", fileSystem(o.File), errName(err))
		if !slices.Contains(notices, note) {
			notices = append(notices, note)
		}
	}
	var st fetchState
	for _, l := range s.layers {
		for e := range l.experts {
			l.slot = max(l.slot, l.layout(&st, e, s.align))
		}
	}
	return notices, nil
}

// ringReason says why io_uring_setup failed.
func ringReason(err error) string {
	name := errName(err)
	switch {
	case errors.Is(err, unix.EPERM):
		b, _ := os.ReadFile("/proc/sys/kernel/io_uring_disabled")
		if v := strings.TrimSpace(string(b)); v != "" && v != "0" {
			return "kernel.io_uring_disabled=" + v + ": " + name
		}
		return "forbidden, as by a container's seccomp filter: " + name
	case errors.Is(err, unix.ENOSYS):
		return "not in this kernel, or hidden by a seccomp filter: " + name
	case errors.Is(err, unix.ENOMEM):
		return "too little lockable memory, see ulimit -l: " + name
	}
	return name
}
