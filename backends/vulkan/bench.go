package vulkan

import (
	"fmt"
	"time"
	"unsafe"

	"sluice/backends"
	"sluice/backends/bench"
	"sluice/internal/quant"
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
var Steps = []string{"parameters", "quantize", "gate and up", "activation", "down", "results"}

// Bench measures groups of experts against copies in the device's own memory.
func (d *Device) Bench(s bench.Shape) (*bench.Measurement, error) {
	l := Layer{Types: [3]quant.Type{s.Type, s.Type, s.Type}, Dim: s.Dim, FF: s.FF}
	parts, err := bench.Parts(l)
	if err != nil {
		return nil, err
	}
	e, err := d.NewExperts(map[int]Layer{0: l}, s.K, 1)
	if err != nil {
		return nil, err
	}
	defer e.Close()
	if e.times, err = d.queries(2); err != nil {
		return nil, err
	}
	for i := range s.Sets * s.K {
		if err := e.Upload(0, i, parts); err != nil {
			return nil, err
		}
	}
	if err := e.Settle(); err != nil {
		return nil, err
	}
	copies, err := d.newCopier(s.CopyBytes)
	if err != nil {
		return nil, err
	}
	defer copies.close()
	m := &bench.Measurement{Type: s.Type.String(), CopyBytes: s.CopyBytes, Steps: map[string]float64{}}
	for _, p := range parts {
		m.GroupBytes += int64(s.K) * int64(len(p))
	}
	x := e.Input(1, s.Dim)
	for i := range x {
		x[i] = float32(i%17-8) * 0x1p-6
	}
	jobs := make([]backends.HeldJob, s.K)
	group := func(set int) (ns []float64, wall time.Duration, err error) {
		for i := range jobs {
			jobs[i] = backends.HeldJob{Expert: int32(set%s.Sets*s.K + i), Rows: []int32{int32(i)}}
		}
		start := time.Now()
		if err := e.Start(0, jobs, s.K, 1, backends.SwiGLU, nil); err != nil {
			return nil, 0, err
		}
		if _, err := e.Finish(); err != nil {
			return nil, 0, err
		}
		wall = time.Since(start)
		ns, err = e.times.read()
		return ns, wall, err
	}
	for sample := -2; sample < s.Samples; sample++ { // two to warm up
		ns, wall, err := group(sample + 2)
		if err != nil {
			return nil, err
		}
		copied, err := copies.run()
		if err != nil {
			return nil, err
		}
		if sample >= 0 {
			m.Group, m.Wall, m.Copy = append(m.Group, ns[0]), append(m.Wall, float64(wall.Nanoseconds())), append(m.Copy, copied)
		}
	}
	if err := e.overlap(m); err != nil {
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
	each := make([][]float64, len(Steps))
	for set := range max(3, s.Samples/3) {
		ns, _, err := group(set)
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
	k.c.run(kernel{"copy", 0, 0}, k.param, 0, min(groups, 1<<15), (groups+(1<<15-1))>>15, 1)
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

// overlap measures how much of an upload through staging passes while groups are
// computed, by the host's clock: uploads alone, as many groups as take as long
// alone, both at once. The groups are those of the last Start.
func (e *Experts) overlap(m *bench.Measurement) error {
	d := e.d
	const each = 16 << 20
	stage, err := d.buffer(up, each)
	if err != nil {
		return err
	}
	defer d.drop(stage)
	to, err := d.buffer(weights, each)
	if err != nil {
		return err
	}
	defer d.drop(to)
	upload, err := d.copies.commands()
	if err != nil {
		return err
	}
	defer upload.free()
	const times = 8
	upload.begin()
	for range times {
		upload.copy(to, 0, stage, 0, each)
		upload.barrier()
	}
	if err := upload.end(); err != nil {
		return err
	}
	m.UploadSize = times * each
	var group program
	for p := range e.programs {
		group = p
	}
	run := func(all ...*commands) (float64, error) {
		best := 0.0
		for range 5 {
			start := time.Now()
			points := make([]point, len(all))
			for i, c := range all {
				if points[i], err = c.submit(); err != nil {
					return 0, err
				}
			}
			for _, p := range points {
				if err := d.waitFor(p); err != nil {
					return 0, err
				}
			}
			if ns := float64(time.Since(start).Nanoseconds()); best == 0 || ns < best {
				best = ns
			}
		}
		return best, nil
	}
	if m.Upload, err = run(upload); err != nil {
		return err
	}
	m.Groups = max(1, min(1000, int(m.Upload/bench.Median(m.Group))))
	groups, err := d.kernels.commands()
	if err != nil {
		return err
	}
	defer groups.free()
	groups.begin()
	s := e.scratch(e.k * e.most)
	for range m.Groups {
		e.record(groups, group, s, nil)
		groups.barrier()
	}
	if err := groups.end(); err != nil {
		return err
	}
	if m.Alone, err = run(groups); err != nil {
		return err
	}
	m.Both, err = run(groups, upload)
	return err
}
