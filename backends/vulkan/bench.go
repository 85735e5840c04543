package vulkan

import (
	"errors"
	"fmt"
	"time"
	"unsafe"

	"sluice/backends"
	"sluice/backends/bench"
)

// A queries is a pool of timestamps.
type queries struct {
	d      *Device
	handle uint64
	n      int
}

func (d *Device) queries(n int) (*queries, error) {
	if d.timestamp == 0 {
		return nil, fmt.Errorf("vulkan: %s has no clock of its own (timestampComputeAndGraphics): nothing can be measured on it", d.Name)
	}
	mark := d.a.mark()
	defer d.a.release(mark)
	out := put(d.a, uint64(0))
	info := put(d.a, queryPoolCreateInfo{header: header{sType: stQueryPoolCreateInfo}, kind: queryTimestamp, count: uint32(n)})
	if err := check("vkCreateQueryPool", d.f.createQueries.call(d.handle, addr(info), 0, addr(out))); err != nil {
		return nil, err
	}
	return &queries{d, *out, n}, nil
}

func (q *queries) free() {
	if q != nil && q.handle != 0 {
		q.d.f.destroyQueries.call(q.d.handle, uintptr(q.handle), 0)
		q.handle = 0
	}
}

// reset must come first in a recording, stamp notes the time when all before it
// is done.
func (q *queries) reset(c *commands) {
	if q != nil {
		q.d.f.resetQueries.call(c.handle, uintptr(q.handle), 0, uintptr(q.n))
	}
}

func (q *queries) stamp(c *commands, i int) {
	if q != nil && q.n == 2 { // the whole alone
		if i != 0 && i != len(Steps) {
			return
		}
		i = min(i, 1)
	}
	if q != nil {
		q.d.f.writeTimestamp.call(c.handle, stageBottom, uintptr(q.handle), uintptr(i))
	}
}

// read gives the nanoseconds between the stamps of a recording that is done.
func (q *queries) read() ([]float64, error) {
	d := q.d
	mark := d.a.mark()
	defer d.a.release(mark)
	ticks := unsafe.Slice((*uint64)(d.a.take(8*q.n)), q.n)
	const as64, wait = 1, 2
	if err := d.failed("vkGetQueryPoolResults", d.f.queryResults.call(d.handle, uintptr(q.handle), 0, uintptr(q.n), uintptr(8*q.n), addr(&ticks[0]), 8, as64|wait)); err != nil {
		return nil, err
	}
	between := make([]float64, q.n-1)
	for i := range between {
		between[i] = float64(ticks[i+1]-ticks[i]) * float64(d.timestamp)
	}
	return between, nil
}

// Steps are what a group's device time is divided into.
var Steps = []string{"input", "gate and up", "activation", "down", "results"}

// Bench measures groups of experts against copies in the device's own memory.
func (d *Device) Bench(s bench.Shape) (*bench.Measurement, error) {
	e, err := d.newExperts(map[int]backends.HeldLayer{0: s.Layer()}, s.K, 1)
	if err != nil {
		return nil, err
	}
	defer e.Close()
	if e.times, err = d.queries(2); err != nil {
		return nil, err
	}
	b := &measured{e: e}
	defer b.close()
	if err := b.open(s); err != nil {
		return nil, err
	}
	m, err := bench.Measure(s, e.Experts, b)
	if err != nil {
		return nil, err
	}
	// Once more with a stamp between the steps, which costs time.
	for _, c := range e.programs {
		c.free()
	}
	clear(e.programs)
	e.times.free()
	if e.times, err = d.queries(len(Steps) + 1); err != nil {
		return nil, err
	}
	start, finish := bench.Groups(s, e.Experts)
	each := make([][]float64, len(Steps))
	for range max(3, s.Samples/3) {
		ns, _, err := b.group(start, finish)
		if err != nil {
			return nil, err
		}
		for i := range ns {
			each[i] = append(each[i], ns[i])
		}
	}
	for i, name := range Steps {
		m.Steps[name] = bench.Median(each[i])
	}
	return m, nil
}

// A measured implements bench.Driver.
type measured struct {
	e              *experts
	copies         *copier
	stage, to      *buffer
	upload, groups *commands
	points         [2]point // of what was begun
}

func (b *measured) open(s bench.Shape) (err error) {
	d := b.e.d
	if b.copies, err = d.newCopier(s.CopyBytes); err != nil {
		return err
	}
	if b.stage, err = d.buffer(up, bench.UploadRun); err != nil {
		return err
	}
	if b.to, err = d.buffer(weights, bench.UploadRun); err != nil {
		return err
	}
	if b.upload, err = d.copies.commands(); err != nil {
		return err
	}
	b.upload.begin()
	for range bench.UploadBytes / bench.UploadRun {
		b.upload.copy(b.to, 0, b.stage, 0, bench.UploadRun)
		b.upload.barrier()
	}
	return b.upload.end()
}

func (b *measured) close() {
	b.Wait()
	b.upload.free()
	b.groups.free()
	b.e.d.drop(b.stage)
	b.e.d.drop(b.to)
	if b.copies != nil {
		b.copies.close()
	}
}

// group runs one and gives the times between its stamps.
func (b *measured) group(start, finish func() error) (ns []float64, wall time.Duration, err error) {
	begin := time.Now()
	if err := start(); err != nil {
		return nil, 0, err
	}
	if err := finish(); err != nil {
		return nil, 0, err
	}
	wall = time.Since(begin)
	ns, err = b.e.times.read()
	return ns, wall, err
}

// Sample lets a group follow another one, as it does while a model runs: what a copy
// has written is on its way from the device's caches to its memory for a while.
func (b *measured) Sample(start, finish func() error) (group, wall, copied float64, err error) {
	if copied, err = b.copies.run(); err != nil {
		return 0, 0, 0, err
	}
	if _, _, err := b.group(start, finish); err != nil {
		return 0, 0, 0, err
	}
	ns, w, err := b.group(start, finish)
	if err != nil {
		return 0, 0, 0, err
	}
	return ns[0], float64(w.Nanoseconds()), copied, nil
}

func (b *measured) Upload() (err error) {
	b.points[0], err = b.upload.submit()
	return err
}

// Groups records n of the one program that there is.
func (b *measured) Groups(n int) (func() error, error) {
	e := b.e
	var err error
	if b.groups, err = e.d.kernels.commands(); err != nil {
		return nil, err
	}
	b.groups.begin()
	for range n {
		for p := range e.programs {
			e.record(b.groups, p, nil)
		}
		b.groups.barrier()
	}
	return func() error {
		var err error
		b.points[1], err = b.groups.submit()
		return err
	}, b.groups.end()
}

func (b *measured) Wait() error {
	return errors.Join(b.e.d.waitFor(b.points[0]), b.e.d.waitFor(b.points[1]))
}

// A copier copies within the device's memory, by its clock: by the driver's own
// command and by a kernel, of which the faster counts.
type copier struct {
	d     *Device
	a, b  *buffer
	c     *commands
	param *buffer
	times *queries
}

// copyParams are those of the kernel that copies.
type copyParams struct {
	_        [4]uint32 // groups, which the recording knows
	from, to uint64
}

const copyGroup = 4 * 256 * 16 // bytes

func (d *Device) newCopier(bytes int64) (k *copier, err error) {
	k = &copier{d: d}
	defer func() {
		if err != nil {
			k.close()
		}
	}()
	if k.a, err = d.buffer(weights, bytes); err != nil {
		return k, err
	}
	if k.b, err = d.buffer(weights, bytes); err != nil {
		return k, err
	}
	if k.param, err = d.buffer(up, 4096); err != nil {
		return k, err
	}
	*at[copyParams](k.param, 0) = copyParams{from: k.a.at, to: k.b.at}
	if k.times, err = d.queries(3); err != nil {
		return k, err
	}
	if k.c, err = d.kernels.commands(); err != nil {
		return k, err
	}
	k.c.begin()
	k.times.reset(k.c)
	k.times.stamp(k.c, 0)
	k.c.copy(k.b, 0, k.a, 0, uint64(bytes))
	k.times.stamp(k.c, 1)
	groups := uint32(bytes / copyGroup)
	k.c.run(kernel{shader: "copy"}, k.param, 0, min(groups, 1<<15), (groups+(1<<15-1))>>15, 1)
	k.times.stamp(k.c, 2)
	return k, k.c.end()
}

func (k *copier) run() (float64, error) {
	p, err := k.c.submit()
	if err != nil {
		return 0, err
	}
	if err := k.d.waitFor(p); err != nil {
		return 0, err
	}
	ns, err := k.times.read()
	if err != nil {
		return 0, err
	}
	return min(ns[0], ns[1]), nil
}

func (k *copier) close() {
	k.c.free()
	k.times.free()
	k.d.drop(k.a)
	k.d.drop(k.b)
	k.d.drop(k.param)
}
