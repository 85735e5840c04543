package doctor

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"sluice/internal/pci"
	"sluice/storage"
	"sluice/storage/bench"
)

// A Drive is a file system that one or more places lie on, with the device
// under it.
type Drive struct {
	Places     []Place   `json:"places"`
	FileSystem string    `json:"file_system"`
	Source     string    `json:"source"`           // what is mounted
	Device     string    `json:"device,omitempty"` // block device; "": none, or several
	Name       string    `json:"device_name,omitempty"`
	Rotational bool      `json:"rotational"`
	BlockBytes int64     `json:"logical_block_bytes,omitempty"`
	Link       *pci.Link `json:"link,omitempty"` // PCI Express
	FreeBytes  int64     `json:"free_bytes"`

	Opened   bool     `json:"opened"`         // a file on it was opened as experts are read
	Direct   bool     `json:"direct"`         // O_DIRECT reads work
	Mode     string   `json:"mode,omitempty"` // how experts would be read: io_uring or pread
	Notices  []string `json:"notices,omitempty"`
	Rate     float64  `json:"bytes_per_s"` // 0: not measured
	Of       string   `json:"measured_on,omitempty"`
	Unproven string   `json:"not_measured,omitempty"` // why not

	lost error // why the model's file on it cannot be read
}

// A Place is a file or folder that matters, and for what.
type Place struct {
	What string `json:"what"`
	Path string `json:"path"`
}

const (
	// Drives are measured with reads of an expert's size, as many at once as keep
	// every drive busy.
	readBytes = 2_600_000
	readDepth = 16
	// A model below this size says little of a drive; nor does a smaller scratch file.
	leastFile    = 64 << 20
	scratchBytes = 512 << 20

	// Drives of virtual machines call themselves rotational; what reads so fast is not.
	rotationalRate = 500e6

	ioUringMode = "io_uring"
)

func (r *Report) drives(ctx context.Context, t tree, o Options, m *modelFile) error {
	r.Drives = []Drive{}
	var devices []uint64
	for _, p := range places(m) {
		var st unix.Stat_t
		if err := unix.Stat(p.Path, &st); err != nil {
			r.slow("create it, or choose another by TMPDIR or cd", "%s %s cannot be looked at (%v)", p.What, p.Path, err)
			continue
		}
		if i := slices.Index(devices, st.Dev); i >= 0 {
			r.Drives[i].Places = append(r.Drives[i].Places, p)
			continue
		}
		devices = append(devices, st.Dev)
		r.Drives = append(r.Drives, describeDrive(t, p, st.Dev))
	}
	for i := range r.Drives {
		d := &r.Drives[i]
		if err := d.try(ctx, o, m); err != nil {
			return err
		}
		r.driveProblems(d)
	}
	return nil
}

// driveProblems are those of one drive. What concerns folders alone is told, but
// is no problem: a model may lie elsewhere.
func (r *Report) driveProblems(d *Drive) {
	model := d.Places[0].What == "model"
	if model && d.Rotational && d.Rate < rotationalRate {
		r.slow("move the model to an SSD, best NVMe", "the model lies on a rotational drive (%s): experts are read in random order", d.Device)
	}
	if model && d.Opened && !d.Direct {
		r.slow("move the model to ext4, xfs or btrfs on a local drive",
			"the model's file system (%s) takes no O_DIRECT: reads go through the page cache, which grows beside our own memory", d.FileSystem)
	}
	if d.lost != nil && r.Model.Format != "" { // else it is told already
		r.broken("look at its permissions (ls -l) and at the kernel's log (dmesg)", "the model's file cannot be read: %v", d.lost)
	}
	if l := d.Link; l != nil && l.Narrow() {
		r.slow("put the drive into a slot that has all of its lanes", "drive %s runs on %v", d.Device, *l)
	}
}

// describeDrive says what /proc and /sys tell of the drive under a place.
func describeDrive(t tree, p Place, dev uint64) Drive {
	d := Drive{Places: []Place{p}}
	d.FileSystem, d.Source = mountOf(t, p.Path)
	var st unix.Statfs_t
	if unix.Statfs(p.Path, &st) == nil {
		d.FreeBytes = int64(st.Bavail) * st.Bsize
	}
	// btrfs, zfs and overlays have device numbers of their own: ask by name then.
	dir := t.real(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(dev), unix.Minor(dev)))
	if dir == "" && strings.HasPrefix(d.Source, "/dev/") {
		name := path.Base(d.Source)
		if at := t.real(d.Source); at != "" { // /dev/mapper/NAME is a link to ../dm-0
			name = path.Base(at)
		}
		dir = t.real("/sys/class/block/" + name)
	}
	if dir == "" {
		return d
	}
	d.Device = path.Base(dir)
	if t.has(dir + "/partition") {
		dir = path.Dir(dir)
	}
	rotational, _ := t.number(dir + "/queue/rotational")
	d.Rotational = rotational == 1
	d.BlockBytes, _ = t.number(dir + "/queue/logical_block_size")
	d.Name = t.text(dir + "/device/model")
	d.Link = pci.Slowest(t.path(dir))
	return d
}

// mountOf is the file system that a path lies on and what is mounted there: of
// the mount points above it the longest, and of equals the last.
func mountOf(t tree, name string) (kind, source string) {
	if real, err := filepath.EvalSymlinks(name); err == nil {
		name = real
	}
	best := -1
	for line := range strings.Lines(t.text("/proc/self/mountinfo")) {
		before, after, ok := strings.Cut(line, " - ")
		f, a := strings.Fields(before), strings.Fields(after)
		if !ok || len(f) < 5 || len(a) < 2 {
			continue
		}
		point := unescape.Replace(f[4])
		if point != "/" && name != point && !strings.HasPrefix(name, point+"/") || len(point) < best {
			continue
		}
		best, kind, source = len(point), a[0], unescape.Replace(a[1])
	}
	return kind, source
}

// unescape undoes what the kernel does to paths in mountinfo.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// try opens a file on the drive as experts are read, and measures: the model's
// file if it is large enough, else one that is written into the first folder that
// takes it, and removed.
func (d *Drive) try(ctx context.Context, o Options, m *modelFile) error {
	if d.Places[0].What == "model" {
		if d.lost = d.probe(m.path); d.lost == nil && m.size >= leastFile {
			d.lost = d.measure(ctx, o, m.path, m.path)
		}
		if d.lost != nil || m.size >= leastFile {
			return ctx.Err()
		}
	}
	if d.FileSystem == "tmpfs" || d.FileSystem == "ramfs" {
		d.Unproven = "it is memory, not a drive"
		return nil
	}
	for _, p := range d.Places {
		dir := p.Path
		if p.What == "model" {
			dir = filepath.Dir(dir)
		}
		name, err := scratch(ctx, dir, o, d.FreeBytes)
		if err == nil {
			if err = d.probe(name); err == nil {
				err = d.measure(ctx, o, name, "a scratch file in "+dir)
			}
			os.Remove(name)
		}
		if d.Unproven = ""; err == nil || ctx.Err() != nil {
			return ctx.Err()
		}
		d.Unproven = err.Error()
	}
	return nil
}

// probe opens a file as experts are read.
func (d *Drive) probe(name string) error {
	fi, err := os.Stat(name)
	if err != nil {
		return err
	}
	m, layers, err := storage.OpenBlocks(name, max(4096, bench.RoundSize(fi.Size()>>19)))
	if err != nil {
		return err
	}
	defer m.Close()
	src, err := m.Source(layers, storage.SourceOptions{})
	if err != nil {
		return err
	}
	defer src.Close()
	d.Opened, d.Direct, d.Notices, d.Mode = true, src.Direct(), src.Notices(), storage.Pread.String()
	if src.Mode() == storage.Slab {
		d.Mode = ioUringMode
	}
	return nil
}

// measure reads a file that was opened, if there is time for it.
func (d *Drive) measure(ctx context.Context, o Options, name, of string) error {
	if o.Seconds <= 0 {
		return nil
	}
	fi, err := os.Stat(name)
	if err != nil {
		return err
	}
	c := bench.Cell{Mode: storage.Pread, Size: bench.RoundSize(max(readBytes, fi.Size()>>19)), Depth: readDepth} // 2^20 blocks at most
	if d.Mode == ioUringMode {
		c.Mode = storage.Slab
	}
	s, _, err := bench.NewDrive(name, rand.Uint64()).Measure(ctx, c, o.time())
	if err != nil {
		return err
	}
	d.Rate, d.Of = s.Rate, of
	return nil
}

// scratch writes a file of bytes that no file system can compress, and brings
// them to the drive.
func scratch(ctx context.Context, dir string, o Options, free int64) (name string, err error) {
	size := o.Scratch
	if size == 0 {
		size = scratchBytes
	}
	if o.Seconds <= 0 {
		size = 2 * 4096 // only to be opened
	}
	if size > free/4 {
		return "", fmt.Errorf("a scratch file of %d MB would take more than a quarter of the free space", size/1e6)
	}
	f, err := os.CreateTemp(dir, ".sluice-doctor-*")
	if err != nil {
		return "", err
	}
	defer func() {
		f.Close()
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	var seed [32]byte
	src, b := rand.NewChaCha8(seed), make([]byte, 1<<20)
	for at := int64(0); at < size; at += int64(len(b)) {
		if err := ctx.Err(); err != nil {
			return "", err
		}
		src.Read(b)
		if _, err := f.Write(b[:min(int64(len(b)), size-at)]); err != nil {
			return "", err
		}
	}
	if err := f.Sync(); err != nil && !errors.Is(err, unix.EINVAL) {
		return "", err
	}
	return f.Name(), nil
}
