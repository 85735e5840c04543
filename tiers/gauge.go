package tiers

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"syscall"
)

// Strain is how scarce memory is.
type Strain struct {
	Machine   float64 // percent of the last 10 seconds in which some task of the machine stood still for memory
	Group     float64 // the same of the worst cgroup above this process
	Known     bool    // the kernel tells (PSI); else both are 0
	Available int64   // as Memory.Available
}

func (s *Strain) String() string {
	if !s.Known {
		return "available " + GB(s.Available)
	}
	return fmt.Sprintf("some avg10 %.1f %%, available %s", max(s.Machine, s.Group), GB(s.Available))
}

// A Gauge reads a Strain again and again: it keeps the files open and allocates
// nothing, so that a running model may be watched. One goroutine uses it.
type Gauge struct {
	meminfo  *os.File
	pressure *os.File // nil: the kernel does not tell
	groups   []groupGauge
	buf      []byte
}

// A groupGauge is the files of one cgroup.
type groupGauge struct {
	limits      []*os.File
	usage, stat *os.File
	reclaim     []byte
	pressure    *os.File // nil: it does not tell
}

// Gauge opens /proc/meminfo, /proc/pressure/memory, and the files of each cgroup
// above this process. What a kernel lacks beside the first tells nothing. The
// caller closes it.
func (m Memory) Gauge() (*Gauge, error) {
	g := &Gauge{buf: make([]byte, 64<<10)}
	if err := g.open(m); err != nil {
		g.Close()
		return nil, fmt.Errorf("tiers: available memory: %w", err)
	}
	return g, nil
}

func (g *Gauge) open(m Memory) (err error) {
	// maybe opens a file that need not be there, or need not be readable: PSI may
	// be switched off.
	maybe := func(name string) *os.File {
		f, ferr := os.Open(filepath.Join(m.Root, name))
		if ferr != nil && !errors.Is(ferr, fs.ErrNotExist) && err == nil {
			err = ferr
		}
		if ferr != nil {
			return nil
		}
		if _, rerr := f.ReadAt(g.buf[:1], 0); errors.Is(rerr, syscall.EOPNOTSUPP) {
			f.Close()
			return nil
		}
		return f
	}
	if g.meminfo, err = os.Open(filepath.Join(m.Root, "/proc/meminfo")); err != nil {
		return err
	}
	g.pressure = maybe("/proc/pressure/memory")
	groups, gerr := m.groups()
	if gerr != nil {
		return gerr
	}
	for _, c := range groups {
		names := c.files()
		x := groupGauge{reclaim: []byte(names.reclaim)}
		for _, name := range names.limits {
			if f := maybe(path.Join(c.dir, name)); f != nil {
				x.limits = append(x.limits, f)
			}
		}
		if len(x.limits) > 0 {
			x.usage, x.stat = maybe(path.Join(c.dir, names.usage)), maybe(path.Join(c.dir, "memory.stat"))
		}
		if c.v2 {
			x.pressure = maybe(path.Join(c.dir, "memory.pressure"))
		}
		g.groups = append(g.groups, x)
	}
	return err
}

// Close closes the files.
func (g *Gauge) Close() {
	files := []*os.File{g.meminfo, g.pressure}
	for _, x := range g.groups {
		files = append(append(files, x.limits...), x.usage, x.stat, x.pressure)
	}
	for _, f := range files {
		if f != nil {
			f.Close()
		}
	}
}

// Read reads the files as they are now.
func (g *Gauge) Read() (s Strain, err error) {
	kib, err := g.field(g.meminfo, memAvailable)
	if err != nil {
		return Strain{}, err
	}
	s.Available = kibibytes(kib)
	if g.pressure != nil {
		if s.Machine, err = g.some10(g.pressure); err != nil {
			return Strain{}, err
		}
		s.Known = true
	}
	for i := range g.groups {
		x := &g.groups[i]
		if x.pressure != nil {
			p, err := g.some10(x.pressure)
			if err != nil {
				return Strain{}, err
			}
			s.Group, s.Known = max(s.Group, p), true
		}
		limit := int64(math.MaxInt64)
		for _, f := range x.limits {
			v, err := g.value(f)
			if err != nil {
				return Strain{}, err
			}
			limit = min(limit, v)
		}
		if limit >= unlimited || x.usage == nil || x.stat == nil {
			continue
		}
		used, err := g.value(x.usage)
		if err != nil {
			return Strain{}, err
		}
		cache, err := g.field(x.stat, x.reclaim)
		if err != nil {
			return Strain{}, err
		}
		s.Available = min(s.Available, leftOf(limit, used, cache))
	}
	return s, nil
}

var (
	memAvailable = []byte("MemAvailable:")
	some10       = []byte("some avg10=")
	noValue      = []byte("max")
)

// text is a file's bytes, valid until the next read.
func (g *Gauge) text(f *os.File) ([]byte, error) {
	n, err := f.ReadAt(g.buf, 0)
	if err != nil && err != io.EOF {
		return nil, fmt.Errorf("tiers: available memory: %w", err)
	}
	return g.buf[:n], nil
}

// value is Memory.value.
func (g *Gauge) value(f *os.File) (int64, error) {
	b, err := g.text(f)
	if err != nil {
		return 0, err
	}
	if b = bytes.TrimSpace(b); bytes.Equal(b, noValue) {
		return math.MaxInt64, nil
	}
	return parse(f, b)
}

// field is Memory.field, of a key as it is written.
func (g *Gauge) field(f *os.File, key []byte) (int64, error) {
	b, err := g.text(f)
	if err != nil {
		return 0, err
	}
	for len(b) > 0 {
		line := b
		if i := bytes.IndexByte(b, '\n'); i >= 0 {
			line, b = b[:i], b[i+1:]
		} else {
			b = nil
		}
		if v, ok := bytes.CutPrefix(line, key); ok && len(v) > 0 && v[0] == ' ' {
			v = bytes.TrimLeft(v, " ")
			if i := bytes.IndexByte(v, ' '); i >= 0 {
				v = v[:i]
			}
			return parse(f, v)
		}
	}
	return 0, fmt.Errorf("tiers: %s has no line %s: Linux 3.14 or later is needed", f.Name(), key)
}

func parse(f *os.File, b []byte) (int64, error) {
	n, err := strconv.ParseUint(string(b), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("tiers: %s: %.40q is not a number", f.Name(), string(b))
	}
	return int64(min(n, math.MaxInt64)), nil
}

// some10 reads "some avg10=1.23 avg60=..." (PSI).
func (g *Gauge) some10(f *os.File) (percent float64, err error) {
	b, err := g.text(f)
	if err != nil {
		return 0, err
	}
	_, after, ok := bytes.Cut(b, some10)
	word := after
	if i := bytes.IndexByte(after, ' '); i >= 0 {
		word = after[:i]
	}
	percent, err = strconv.ParseFloat(string(word), 64)
	if !ok || err != nil || !(percent >= 0 && percent <= 100) {
		return 0, fmt.Errorf("tiers: %s: no line \"some avg10=\" with a percentage", f.Name())
	}
	return percent, nil
}
