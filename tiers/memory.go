package tiers

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
)

// Memory reads what Linux says of memory, from /proc and /sys under Root
// ("" is the machine itself; tests give a folder).
type Memory struct{ Root string }

// Room is memory that a process may still take.
type Room struct {
	Bytes int64
	From  string // what sets the bound: "MemAvailable", or a cgroup's folder
}

// Available is the least of MemAvailable and of what each cgroup above this
// process, version 1 or 2, leaves of its limit. Clean page cache counts as
// available, as it does in MemAvailable: of a cgroup, its inactive file pages.
func (m Memory) Available() (Room, error) {
	kib, err := m.field("/proc/meminfo", "MemAvailable")
	if err != nil {
		return Room{}, err
	}
	room := Room{kibibytes(kib), "MemAvailable"}
	groups, err := m.groups()
	if err != nil {
		return Room{}, err
	}
	for _, g := range groups {
		left, limited, err := m.left(g)
		if err != nil {
			return Room{}, err
		}
		if limited && left < room.Bytes {
			room = Room{left, g.dir}
		}
	}
	return room, nil
}

// Usage is what this process has taken.
type Usage struct {
	RSS, PeakRSS             int64 // bytes resident, now and at most
	MajorFaults, MinorFaults int64 // page faults since start: with and without a read
	DeviceReads              int64 // bytes read from drives since start, page faults included; 0 where the kernel does not count
}

// Usage reads /proc/self/status, /proc/self/stat and /proc/self/io.
func (m Memory) Usage() (u Usage, err error) {
	if u.RSS, err = m.field("/proc/self/status", "VmRSS"); err != nil {
		return Usage{}, err
	}
	if u.PeakRSS, err = m.field("/proc/self/status", "VmHWM"); err != nil {
		return Usage{}, err
	}
	u.RSS, u.PeakRSS = kibibytes(u.RSS), kibibytes(u.PeakRSS)
	const name = "/proc/self/stat"
	text, err := m.read(name)
	if err != nil {
		return Usage{}, err
	}
	// The second field is a program's name in parentheses, of any characters.
	// Of the whole line, minflt is field 10 and majflt field 12 (proc(5)).
	f := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(f) < 10 {
		return Usage{}, fmt.Errorf("tiers: %s: %d fields after the name, want at least 10", name, len(f))
	}
	if u.MinorFaults, err = number(name, f[7]); err != nil {
		return Usage{}, err
	}
	if u.MajorFaults, err = number(name, f[9]); err != nil {
		return Usage{}, err
	}
	if u.DeviceReads, err = m.field("/proc/self/io", "read_bytes"); errors.Is(err, fs.ErrNotExist) {
		err = nil // a kernel without accounting of I/O
	}
	return u, err
}

// Budget is what a process that now holds base bytes may hold in all: the
// Available of a Plan and the limit of a Ledger.
func (r Room) Budget(base int64) int64 { return r.Bytes + base }

// A group is a cgroup above this process, or its own.
type group struct {
	dir string // under Root
	v2  bool
}

// left is what a cgroup leaves of its limits, at least 0. A folder without the
// files of the memory controller (the root of version 2) has no limit.
func (m Memory) left(g group) (n int64, limited bool, err error) {
	f := g.files()
	limit := int64(math.MaxInt64)
	for _, name := range f.limits {
		v, err := m.value(path.Join(g.dir, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return 0, false, err
		}
		limit = min(limit, v)
	}
	if limit >= unlimited {
		return 0, false, nil
	}
	used, err := m.value(path.Join(g.dir, f.usage))
	if err != nil {
		return 0, false, err
	}
	cache, err := m.field(path.Join(g.dir, "memory.stat"), f.reclaim)
	if err != nil {
		return 0, false, err
	}
	return leftOf(limit, used, cache), true, nil
}

// groupFiles are the names of a cgroup's files, and of the line of memory.stat
// that tells the page cache which is given back first.
type groupFiles struct {
	limits         []string
	usage, reclaim string
}

func (g group) files() groupFiles {
	if g.v2 {
		return groupFiles{[]string{"memory.max", "memory.high"}, "memory.current", "inactive_file"}
	}
	return groupFiles{[]string{"memory.limit_in_bytes"}, "memory.usage_in_bytes", "total_inactive_file"}
}

// unlimited and more is no limit: version 1 writes the largest whole number of
// pages.
const unlimited = math.MaxInt64 >> 1

func leftOf(limit, used, cache int64) int64 { return max(0, limit-max(0, used-cache)) }

// groups lists the cgroups with a memory controller from this process's own up
// to the root of each mounted hierarchy.
func (m Memory) groups() ([]group, error) {
	text, err := m.read("/proc/self/cgroup")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // a kernel without cgroups
	}
	if err != nil {
		return nil, err
	}
	v1, v2 := "", "" // this process's path in the hierarchy
	for line := range strings.Lines(text) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		switch {
		case len(f) != 3:
		case f[0] == "0" && f[1] == "":
			v2 = f[2]
		case has(f[1], "memory"):
			v1 = f[2]
		}
	}
	mounts, err := m.read("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var groups []group
	for line := range strings.Lines(mounts) {
		// 32 31 0:29 ROOT POINT OPTIONS [OPTIONAL...] - TYPE SOURCE SUPER (proc(5))
		before, after, ok := strings.Cut(line, " - ")
		f, t := strings.Fields(before), strings.Fields(after)
		if !ok || len(f) < 6 || len(t) < 3 {
			continue
		}
		root, point := unescape.Replace(f[3]), unescape.Replace(f[4])
		switch {
		case t[0] == "cgroup2" && v2 != "":
			groups = append(groups, climb(point, root, v2, true)...)
		case t[0] == "cgroup" && v1 != "" && has(t[2], "memory"):
			groups = append(groups, climb(point, root, v1, false)...)
		}
	}
	return groups, nil
}

// climb lists the folders from a cgroup up to the mount point. The mount shows
// the hierarchy from root on; a cgroup that lies outside of it (another
// namespace) is taken as the mount point itself.
func climb(point, root, own string, v2 bool) (groups []group) {
	own = path.Clean("/" + own)
	rel := "/"
	switch {
	case root == "/":
		rel = own
	case strings.HasPrefix(own, root+"/"):
		rel = own[len(root):]
	}
	for ; rel != "/"; rel = path.Dir(rel) {
		groups = append(groups, group{path.Join(point, rel), v2})
	}
	return append(groups, group{point, v2})
}

// has says whether a list with commas names a word.
func has(list, word string) bool {
	for w := range strings.SplitSeq(list, ",") {
		if w == word {
			return true
		}
	}
	return false
}

// unescape undoes what the kernel does to paths in mountinfo.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

func (m Memory) read(name string) (string, error) {
	b, err := os.ReadFile(filepath.Join(m.Root, name))
	if err != nil {
		return "", fmt.Errorf("tiers: available memory: %w", err)
	}
	return string(b), nil
}

// value reads a file of one number, or of "max": no limit.
func (m Memory) value(name string) (int64, error) {
	text, err := m.read(name)
	if err != nil {
		return 0, err
	}
	if text = strings.TrimSpace(text); text == "max" {
		return math.MaxInt64, nil
	}
	return number(name, text)
}

// field reads the number after a key at the start of a line: "KEY: 5 kB" or
// "KEY 5".
func (m Memory) field(name, key string) (int64, error) {
	text, err := m.read(name)
	if err != nil {
		return 0, err
	}
	for sc := bufio.NewScanner(strings.NewReader(text)); sc.Scan(); {
		f := strings.Fields(sc.Text())
		if len(f) >= 2 && strings.TrimSuffix(f[0], ":") == key {
			return number(name, f[1])
		}
	}
	return 0, fmt.Errorf("tiers: %s has no line %s: Linux 3.14 or later is needed", name, key)
}

func kibibytes(n int64) int64 { return min(n, math.MaxInt64>>10) << 10 }

func number(name, text string) (int64, error) {
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("tiers: %s: %q is not a number", name, text)
	}
	return int64(min(n, math.MaxInt64)), nil
}
