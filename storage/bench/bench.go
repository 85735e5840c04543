// Package bench measures drives through the sources that experts are read by,
// and sets the figures beside those of fio.
package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"golang.org/x/sys/unix"

	"sluice/internal/offheap"
	"sluice/storage"
)

// A Cell is one thing that is measured.
type Cell struct {
	Mode       storage.Mode `json:"-"`
	Size       int64        `json:"size"`  // of a read: a multiple of 4096, so that nothing is rounded
	Depth      int          `json:"depth"` // reads at work at once
	Sequential bool         `json:"sequential"`
}

// Order says in words in what order a cell reads.
func (c Cell) Order() string {
	if c.Sequential {
		return "sequential"
	}
	return "random"
}

// A Sample is one measurement of a cell. Time runs from the first submission
// until the last byte is there.
type Sample struct {
	Bytes    int64   `json:"bytes"`
	Nanos    int64   `json:"ns"`
	CPUNanos int64   `json:"cpu_ns"` // of the whole process, user and system
	Rate     float64 `json:"bytes_per_s"`
	CPUPerGB float64 `json:"cpu_s_per_gb"` // seconds for 10^9 bytes
	Buffers  int64   `json:"buffer_bytes"` // memory that was read into, views of the page cache aside
	Huge     int64   `json:"huge_bytes"`   // of it, on huge pages
}

func sample(bytes, nanos, cpu int64) Sample {
	s := Sample{Bytes: bytes, Nanos: nanos, CPUNanos: cpu}
	if bytes > 0 && nanos > 0 {
		s.Rate = float64(bytes) / float64(nanos) * 1e9
		s.CPUPerGB = float64(cpu) / float64(bytes)
	}
	return s
}

// A Drive is a file that cells are measured on. One goroutine uses it.
type Drive struct {
	Path string
	rng  *rand.Rand
	turn int64 // where sequential reads go on: each cell reads another stretch
}

// NewDrive measures on a file of any kind, larger than what a cell reads. The
// seed chooses the order of random reads.
func NewDrive(path string, seed uint64) *Drive {
	return &Drive{Path: path, rng: rand.New(rand.NewPCG(seed, 0))}
}

// RoundSize is the size that a read of n bytes is measured with.
func RoundSize(n int64) int64 { return (n + 4095) &^ 4095 }

// Measure reads for about the given time, or until every block of the file has
// been read: none is read twice. The page cache is asked to forget the file
// before, which matters to mmap mode alone. Notices say what was not as wished.
//
// Errors: the file is too small, another mode than the cell's would run, a read
// failed, ctx is done.
func (d *Drive) Measure(ctx context.Context, c Cell, time_ time.Duration) (s Sample, notices []string, err error) {
	if c.Size != RoundSize(c.Size) {
		panic(fmt.Sprintf("bench: reads of %d bytes", c.Size))
	}
	m, layers, err := storage.OpenBlocks(d.Path, c.Size)
	if err != nil {
		return s, nil, err
	}
	defer m.Close()
	src, err := m.Source(layers, storage.SourceOptions{Mode: c.Mode, Depth: c.Depth})
	if err != nil {
		return s, nil, err
	}
	defer src.Close()
	if notices = src.Notices(); src.Mode() != c.Mode {
		return s, nil, fmt.Errorf("bench: the mode %s is not to be had: %v", c.Mode, notices)
	}
	fetches := make([]storage.Fetch, c.Depth)
	var buffers, huge int64
	if slot := src.SlotBytes(0); slot > 0 {
		// Whole huge pages, so that the last slot lies on them like the others.
		arena, err := offheap.Alloc((slot*int64(c.Depth) + offheap.HugePage - 1) &^ (offheap.HugePage - 1))
		if err != nil {
			return s, nil, err
		}
		defer offheap.Free(arena)
		offheap.Populate(arena)
		buffers = int64(len(arena))
		if huge, err = offheap.Huge(arena); err != nil {
			return s, nil, err
		}
		src.Register([][]byte{arena})
		defer src.Register(nil)
		for i := range fetches {
			fetches[i].Slot = arena[int64(i)*slot : int64(i+1)*slot]
		}
	}
	notices = append(notices, src.Notices()...)
	if err := forget(d.Path); err != nil {
		return s, nil, err
	}
	s, err = d.read(ctx, src, fetches, layers[0].Experts, c, time_)
	s.Buffers, s.Huge = buffers, huge
	return s, notices, err
}

// read keeps the fetches in flight until the time is over.
func (d *Drive) read(ctx context.Context, src *storage.Reader, fetches []storage.Fetch, blocks int, c Cell, time_ time.Duration) (Sample, error) {
	var order []int
	if c.Sequential {
		d.turn = d.turn / c.Size * c.Size
	} else {
		order = d.rng.Perm(blocks)
	}
	next, first := 0, int(d.turn/c.Size)
	block := func() int32 {
		defer func() { next++ }()
		if c.Sequential {
			return int32((first + next) % blocks)
		}
		return int32(order[next])
	}
	cpu, err := cpuTime()
	if err != nil {
		return Sample{}, err
	}
	start := time.Now()
	var batch []*storage.Fetch
	for i := range fetches[:min(len(fetches), blocks)] {
		fetches[i].Key.Expert = block()
		batch = append(batch, &fetches[i])
	}
	src.Submit(batch)
	one := batch[:1]
	bytes := int64(0)
	for flying := len(batch); flying > 0; flying-- {
		f := src.Reap()
		if f.Err != nil && err == nil {
			err = f.Err
		}
		bytes += c.Size
		src.Evict(f)
		if err == nil {
			err = ctx.Err()
		}
		if err == nil && next < blocks && time.Since(start) < time_ {
			f.Key.Expert = block()
			one[0] = f
			src.Submit(one)
			flying++
		}
	}
	nanos := time.Since(start)
	if err != nil {
		return Sample{}, err
	}
	if c.Sequential {
		d.turn = int64((first+next)%blocks) * c.Size
	}
	after, err := cpuTime()
	return sample(bytes, int64(nanos), after-cpu), err
}

// cpuTime is what this process has used, in ns.
func cpuTime() (int64, error) {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0, fmt.Errorf("bench: CPU time: %w", err)
	}
	return u.Utime.Nano() + u.Stime.Nano(), nil
}

// forget drops a file's clean pages from the page cache.
func forget(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("bench: %s: %w", path, err)
	}
	defer unix.Close(fd)
	if err := unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED); err != nil {
		return fmt.Errorf("bench: %s: drop it from the page cache: %w", path, err)
	}
	return nil
}
