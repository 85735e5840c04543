package storage

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"sluice/internal/offheap"
)

// SourceOptions choose how experts are read. The zero value is slab mode.
type SourceOptions struct {
	Mode Mode
	// Depth is how many reads are at a drive at once, 1 to 4096; more wait in
	// line. 0: what Load finds out, and a default until then.
	Depth int

	dev device // faults, in tests
}

const (
	// Large direct reads, each split by the block layer: 16 keep every drive
	// busy that was measured, and are not so many that one must wait long.
	defaultDepth = 16
	// Read-ahead of the page cache has a depth of its own.
	defaultMaps = 4
	maxDepth    = 4096
)

// Source makes a reader of the model with the experts of the layers; without
// layers it has Load alone to do. The model must stay open until the reader is closed.
//
// Where another mode than the wished one, or reads through the page cache, have
// to do, Notices says so in words; Mode tells the mode that runs. Errors are bad
// data (*FormatError), a bad Depth, or files that changed since the model was
// opened.
func (m *Model) Source(layers []ExpertLayer, opt SourceOptions) (*Reader, error) {
	if opt.Depth < 0 || opt.Depth > maxDepth {
		return nil, fmt.Errorf("storage: depth %d: use 1 to %d, or 0 for the default", opt.Depth, maxDepth)
	}
	if opt.Mode > MMap {
		return nil, fmt.Errorf("storage: there is no storage mode %d", opt.Mode)
	}
	s := &Reader{mode: opt.Mode, align: 1, dev: opt.dev, depth: cmp.Or(opt.Depth, defaultDepth), fixed: opt.Depth > 0}
	if err := s.plan(m, layers); err != nil {
		return nil, err
	}
	if s.woven > 0 {
		if s.mode == MMap {
			s.notice("mmap mode cannot be had: this model's experts are not in the file as they are computed with; using slab. Pack the model to map it")
			s.mode = Slab
		}
		var err error
		if s.scratch, err = offheap.Alloc(s.woven); err != nil {
			return nil, fmt.Errorf("storage: %w", err)
		}
	}
	if err := s.open(m); err != nil {
		s.close()
		return nil, err
	}
	if s.dev.wrap != nil {
		s.via = s.dev.wrap(s.via)
	}
	return s, nil
}

// open opens the files and chooses the transport.
func (s *Reader) open(m *Model) error {
	if s.mode == MMap {
		if !s.fixed {
			s.depth = defaultMaps
		}
		s.addDrive(m.Files)
		if len(m.copies) > 0 {
			s.notice("mmap mode reads the first copy of the model alone; use the storage mode slab or pread to read from %d drives", 1+len(m.copies))
		}
		s.via = newPool(s)
		return s.mapFiles()
	}
	s.addDrive(m.Files)
	for _, files := range m.copies {
		s.addDrive(files)
	}
	if err := s.openFiles(); err != nil {
		return err
	}
	s.noteSharedDrives()
	if s.mode == Slab && s.direct {
		ring, err := newRing(s)
		if err == nil {
			s.via = ring
			return nil
		}
		s.notice("io_uring is not to be had (%s); using pread", ringReason(err))
	}
	s.mode, s.via = Pread, newPool(s)
	return nil
}

// noteSharedDrives says so where copies seem to lie on one drive.
func (s *Reader) noteSharedDrives() {
	first := make(map[uint64]string)
	for i := range s.drives {
		o := &s.drives[i].files[0]
		var st unix.Stat_t
		if unix.Fstat(int(o.f.Fd()), &st) != nil {
			continue
		}
		if other := first[st.Dev]; other != "" {
			s.notice("%s and %s lie on one file system: unless that spans several drives, the second copy makes nothing faster", other, o.Path)
			continue
		}
		first[st.Dev] = o.Path
	}
}

// addDrive adds a copy whose files are read through the page cache, so far.
func (s *Reader) addDrive(files []File) {
	d := drive{files: make([]openFile, len(files)), stat: DriveStats{Path: files[0].Path}}
	for i := range files {
		d.files[i] = openFile{File: &files[i], fd: int(files[i].f.Fd())}
	}
	s.drives = append(s.drives, d)
}

// plan checks the layers against the model and fills s.layers, slots aside, and
// s.holds.
func (s *Reader) plan(m *Model, layers []ExpertLayer) error {
	s.layers = make(map[int32]*layer, len(layers))
	s.holds = make([]bool, len(m.Files))
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
			t, err := m.View(name)
			var missing *FormatError
			switch {
			case errors.As(err, &missing) && strings.ContainsAny(name, "*["):
				return &FormatError{File: missing.File, Off: -1, Msg: fmt.Sprintf("layer %d: %s", el.Layer, missing.Msg)}
			case err != nil:
				return bad(Tensor{Name: name, File: -1}, "the model has none of that name; the file is incomplete or of another kind than its metadata says")
			}
			if t.File < 0 || t.File >= len(m.Files) {
				return bad(t, "lies in file %d of %d", t.File, len(m.Files))
			}
			f := &m.Files[t.File]
			n := int64(el.Experts)
			switch {
			case len(t.Dims) == 3 && t.Dims[2] < n && strings.Contains(name, "*"):
				return bad(t, "expert %d is missing, of %d: the model has no %s", t.Dims[2], n, strings.Replace(name, "*", fmt.Sprint(t.Dims[2]), 1))
			case len(t.Dims) < 2 || t.Dims[len(t.Dims)-1] != n || t.form != nil && t.shares() != n:
				return bad(t, "has dims %v; the last must be the number of experts, %d", t.Dims, n)
			case t.Bytes < n || t.Bytes%n != 0:
				return bad(t, "its %d bytes are not the same share for each of %d experts", t.Bytes, n)
			case t.form == nil && t.Stride == 0 && (t.Off < 0 || t.Off > f.Size || t.Bytes > f.Size-t.Off): // the others are checked by Open
				return bad(t, "its %d bytes do not lie inside the file, which has %d; fetch the file again", t.Bytes, f.Size)
			case i == 0:
				l.stack = t.stack
			}
			if t.stack != l.stack || l.stack != nil && len(l.stack.parts) != len(el.Parts) {
				return bad(t, "is packed with other tensors than the layer's experts are made of: pack the model again")
			}
			p := part{from: t.sources(n), share: t.Bytes / n}
			if t.form != nil && t.form.weave != unwoven {
				p.form, l.woven = t.form, true
			}
			for i := range p.from {
				if p.from[i].n > 0 {
					for e := range n {
						s.holds[p.from[i].of(e).file] = true
					}
				}
			}
			l.parts = append(l.parts, p)
			l.payload += p.share
		}
		s.woven = max(s.woven, l.wovenBytes())
		s.layers[int32(el.Layer)] = l
	}
	return nil
}

// openFiles opens the files for direct reads, or keeps the buffered descriptors
// where those are refused, and settles the alignment and the slots.
func (s *Reader) openFiles() error {
	s.align, s.direct = slotAlign, true
	for i := range s.drives {
		for j := range s.drives[i].files {
			o := &s.drives[i].files[j]
			fd, align, err := s.dev.openDirect(o.File)
			if err == nil {
				o.fd, o.own = fd, true
				s.align = max(s.align, align)
				continue
			}
			if err == errReplaced {
				return fmt.Errorf("storage: %s: %w", o.Path, err)
			}
			s.direct = false
			s.notice("O_DIRECT refused by the file system (%s: %s); using buffered pread", fileSystem(o.File), errName(err))
		}
	}
	var st fetchState
	for _, l := range s.layers {
		for e := range l.experts {
			l.slot = max(l.slot, l.layout(&st, e, s.align))
		}
		l.slot = max(l.slot, roundUp(l.wovenBytes(), s.align))
	}
	return nil
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

// registerWords says that memory could not be registered, and what to do.
func registerWords(err error, arenas [][]byte) string {
	var total int64
	for _, a := range arenas {
		total += int64(len(a))
	}
	const without = "reads go on without registered memory, at up to twice the CPU time a byte"
	if !errors.Is(err, unix.ENOMEM) {
		return fmt.Sprintf("%.4g GB of slots could not be registered with io_uring (%s); %s", float64(total)/1e9, errName(err), without)
	}
	limit := "unknown"
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &l) == nil {
		if limit = fmt.Sprintf("%d KiB", l.Cur>>10); l.Cur == unix.RLIM_INFINITY {
			limit = "unlimited"
		}
	}
	return fmt.Sprintf("%.4g GB of slots could not be locked for io_uring: the limit on locked memory, RLIMIT_MEMLOCK, is %s; %s. "+
		"To raise it: ulimit -l unlimited, a memlock line in /etc/security/limits.conf, LimitMEMLOCK=infinity in a systemd unit, or --ulimit memlock=-1 for a container",
		float64(total)/1e9, limit, without)
}
