package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"sluice/storage"
	drive "sluice/storage/bench"
)

// A LimitTrial runs a model from a cold start under a limit of memory, and holds
// its decode time against what the drive and the arithmetic allow.
type LimitTrial struct {
	Program  string   // path of sluice
	Model    string   // a file of the model
	Modes    []string // storage modes, one run of each after the other
	Runs     int      // of each mode; the order turns from round to round
	Memory   int64    // bytes
	Args     []string // of run: the model, prompt, number of tokens, further flags
	ReadSize int64    // of the reads that measure the drive: an expert
	Seconds  float64  // of each measurement of the drive
	Did      func(LimitSample)
}

// A LimitSample is one run.
type LimitSample struct {
	Mode      string  `json:"mode"` // as asked for
	Run       Run     `json:"run"`
	TokPerSec float64 `json:"tok_per_s"`
	// Missed is the payload of the experts that decoding missed, by token, what was
	// read ahead for nothing left out; Read what
	// the kernel read from the drive meanwhile, which in mmap mode is the truth:
	// there pages that were dropped come back by page faults, which no tier sees.
	Missed float64 `json:"missed_bytes_per_token"`
	Read   float64 `json:"device_read_bytes_per_token"`
	// Before and After are rates of the drive, measured right before and after the
	// run by direct reads of whole experts; Rate is their mean.
	Before float64 `json:"drive_before_bytes_per_s"`
	After  float64 `json:"drive_after_bytes_per_s"`
	Rate   float64 `json:"drive_bytes_per_s"`
	// Compute is the decode time in which nothing waited for experts, the least of
	// all runs in other modes than mmap: the arithmetic is the same in each, and in
	// mmap mode faults wait in the midst of it. IO is the time that the missed bytes,
	// in mmap mode those read, take at Rate.
	ComputeNanos int64   `json:"compute_ns"`
	IONanos      int64   `json:"io_ns"`
	Ratio        float64 `json:"decode_over_bound"` // decode time over the larger of the two
	WaitPct      float64 `json:"expert_wait_pct"`
	Faults       float64 `json:"major_faults_per_token"`
	// Cache counts the page cache of the cgroup after the run, which began with none.
	Cache        int64 `json:"cgroup_cache_bytes"`
	InactiveFile int64 `json:"cgroup_inactive_file_bytes"`
	Peak         int64 `json:"cgroup_peak_bytes"`
	// ModelCached counts pages of the model in the page cache, before and after;
	// -1: the kernel does not tell.
	CachedBefore int64 `json:"model_cached_before_bytes"`
	CachedAfter  int64 `json:"model_cached_after_bytes"`
}

// Run makes the runs. It needs the right to make cgroups.
func (l LimitTrial) Run(ctx context.Context) (samples []LimitSample, err error) {
	m, err := storage.Open(l.Model)
	if err != nil {
		return nil, err
	}
	var files []string
	largest := m.Files[0]
	for _, f := range m.Files {
		files = append(files, f.Path)
		if f.Size > largest.Size {
			largest = f
		}
	}
	if side, _ := m.Sidecar(); side != nil {
		files = append(files, side.Files[0].Path)
		side.Close()
	}
	m.Close()
	for round := range l.Runs {
		for i := range l.Modes {
			s, err := l.one(ctx, l.Modes[(i+round)%len(l.Modes)], files, largest.Path)
			if err != nil {
				return samples, err
			}
			samples = append(samples, s)
			settle(samples)
			if l.Did != nil {
				l.Did(s)
			}
			if w := samples[0].Run.Witness; s.Run.Witness != w {
				return samples, refusef("the outputs differ (logits: %s %s, %s %s), though neither mode nor memory may change them; please report this", samples[0].Mode, w, s.Mode, s.Run.Witness)
			}
		}
	}
	return samples, nil
}

func (l LimitTrial) one(ctx context.Context, mode string, files []string, largest string) (s LimitSample, err error) {
	s.Mode = mode
	if s.Before, err = l.rate(ctx, largest); err != nil {
		return s, err
	}
	left, known, err := Evict(files)
	switch {
	case err != nil:
		return s, err
	case left >= 0.01:
		return s, refusef("%.0f %% of the model stay in the page cache, perhaps mapped or being read by another process: end that", 100*left)
	}
	s.CachedBefore, s.CachedAfter = -1, -1
	if known {
		if s.CachedBefore, _, _, err = Cached(files); err != nil {
			return s, err
		}
	}
	g, err := newGroup(l.Memory)
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, g.remove()) }()
	if s.Run, err = g.program(l.Program).run(ctx, append([]string{"run", "--storage", mode, "--draft", "off", "--json"}, l.Args...)...); err != nil {
		return s, fmt.Errorf("bench: %s mode under a limit of %d bytes: %w", mode, l.Memory, err)
	}
	if s.Cache, err = g.stat("total_cache", "file"); err != nil {
		return s, err
	}
	if s.InactiveFile, err = g.stat("total_inactive_file", "inactive_file"); err != nil {
		return s, err
	}
	s.Peak = g.peak()
	if known {
		if s.CachedAfter, _, _, err = Cached(files); err != nil {
			return s, err
		}
	}
	if s.After, err = l.rate(ctx, largest); err != nil {
		return s, err
	}
	s.TokPerSec, err = s.Run.speed()
	return s, err
}

// settle derives what follows from the counts of runs that decoded something.
func settle(samples []LimitSample) {
	compute := int64(0) // by token
	for _, s := range samples {
		if own := (s.Run.DecodeNanos - s.Run.WaitNanos) / s.Run.DecodeTokens; s.Mode != storage.MMap.String() && (compute == 0 || own < compute) {
			compute = own
		}
	}
	for i := range samples {
		s := &samples[i]
		r, tokens := s.Run, float64(s.Run.DecodeTokens)
		s.Rate = (s.Before + s.After) / 2
		missed := float64(r.Decode.LoadBytes)
		if r.Decode.Loads > r.Decode.Misses {
			missed *= float64(r.Decode.Misses) / float64(r.Decode.Loads)
		}
		s.Missed, s.Read = missed/tokens, float64(r.Decode.DeviceReads)/tokens
		s.ComputeNanos = compute * r.DecodeTokens
		if compute == 0 {
			s.ComputeNanos = r.DecodeNanos - r.WaitNanos
		}
		bytes := missed
		if s.Mode == storage.MMap.String() {
			bytes = float64(r.Decode.DeviceReads)
		}
		s.IONanos = 0
		if s.Rate > 0 {
			s.IONanos = int64(bytes / s.Rate * 1e9)
		}
		s.Ratio = float64(r.DecodeNanos) / float64(max(1, s.ComputeNanos, s.IONanos))
		s.WaitPct = 100 * float64(r.WaitNanos) / float64(r.DecodeNanos)
		s.Faults = float64(r.Decode.MajorFaults) / tokens
	}
}

// rate measures the drive by direct reads of an expert's size in random order,
// 16 at once, by io_uring, or by pread where that is not to be had.
func (l LimitTrial) rate(ctx context.Context, file string) (float64, error) {
	d := drive.NewDrive(file, rand.Uint64())
	c := drive.Cell{Mode: storage.Slab, Size: drive.RoundSize(l.ReadSize), Depth: 16}
	each := time.Duration(l.Seconds * 1e9)
	s, _, err := d.Measure(ctx, c, each)
	if err != nil && ctx.Err() == nil {
		c.Mode = storage.Pread
		s, _, err = d.Measure(ctx, c, each)
	}
	return s.Rate, err
}

// A group is a cgroup of version 1 or 2 with a limit of memory.
type group struct {
	dir string
	v2  bool
}

// Confine is the program at a path with so many bytes of memory, all its runs
// together, until release. It needs the right to make cgroups.
func Confine(path string, memory int64) (s Sluice, release func() error, err error) {
	g, err := newGroup(memory)
	if err != nil {
		return nil, nil, err
	}
	return g.program(path), g.remove, nil
}

// program runs in the group: the shell enters it and becomes the program.
func (g group) program(path string) Sluice {
	return Program(path, "/bin/sh", "-c", `echo 0 > "$0" && exec "$@"`, filepath.Join(g.dir, "cgroup.procs"))
}

// newGroup makes one, which is to be removed. Its name begins with that of this
// process, and is no other's, not even where process ids are counted anew.
func newGroup(limit int64) (g group, err error) {
	var errs []error
	for _, root := range []string{"/sys/fs/cgroup/memory", "/sys/fs/cgroup"} {
		g := group{v2: root == "/sys/fs/cgroup"}
		limits := []string{"memory.limit_in_bytes"}
		value := strconv.FormatInt(limit, 10)
		if g.v2 {
			limits = []string{"memory.max"}
			os.WriteFile(filepath.Join(root, "cgroup.subtree_control"), []byte("+memory"), 0) // it may be on already
		}
		if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); err != nil {
			errs = append(errs, err)
			continue
		}
		if g.dir, err = os.MkdirTemp(root, fmt.Sprintf("sluice-bench-%d-*", os.Getpid())); err != nil {
			errs = append(errs, err)
			continue
		}
		if err := os.WriteFile(filepath.Join(g.dir, limits[0]), []byte(value), 0); err != nil {
			errs = append(errs, err, g.remove())
			continue
		}
		// No way out by swap, where swap is counted.
		if g.v2 {
			os.WriteFile(filepath.Join(g.dir, "memory.swap.max"), []byte("0"), 0)
		} else {
			os.WriteFile(filepath.Join(g.dir, "memory.memsw.limit_in_bytes"), []byte(value), 0)
		}
		return g, nil
	}
	return group{}, fmt.Errorf("bench: no cgroup with a limit of memory can be made, which takes root and a writable /sys/fs/cgroup: %w", errors.Join(errs...))
}

// stat is a line of memory.stat, by its name in version 1 or 2.
func (g group) stat(v1, v2 string) (int64, error) {
	name := v1
	if g.v2 {
		name = v2
	}
	b, err := os.ReadFile(filepath.Join(g.dir, "memory.stat"))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) == 2 && f[0] == name {
			return strconv.ParseInt(f[1], 10, 64)
		}
	}
	return 0, fmt.Errorf("bench: %s/memory.stat has no line %s", g.dir, name)
}

// peak is the most memory that the group had, page cache included; 0 where the
// kernel does not tell.
func (g group) peak() (n int64) {
	name := "memory.max_usage_in_bytes"
	if g.v2 {
		name = "memory.peak"
	}
	if b, err := os.ReadFile(filepath.Join(g.dir, name)); err == nil {
		fmt.Sscan(string(b), &n)
	}
	return n
}

// remove ends the group, which has no process any more.
func (g group) remove() error {
	err := os.Remove(g.dir)
	for try := 0; err != nil && !os.IsNotExist(err) && try < 50; try++ {
		time.Sleep(20 * time.Millisecond) // the kernel is still taking the last process away
		err = os.Remove(g.dir)
	}
	return err
}
