package vulkan

import (
	"errors"
	"slices"
	"unsafe"

	"sluice/backends"
	"sluice/backends/dense"
	"sluice/backends/held"
	"sluice/internal/quant"
)

// experts are what Vulkan does for held.Experts.
type experts struct {
	*held.Experts
	d      *Device
	rows   int       // output vectors of a group at most
	arenas []*buffer // of Alloc

	control  *buffer // host: parameters, jobs, index; copied to the device first
	onDevice *buffer // that copy, then the scratch
	in, out  *buffer
	lent     []*buffer  // memory of the host that needs no staging
	borrowed bool       // some of what waits for Send lies there
	staging  [2]*buffer // by turns
	upload   [2]*commands
	staged   [2]point // at which each is free
	turn     int
	filled   int       // bytes of the staging buffer whose turn it is that wait for Send
	pending  []segment // of them
	copied   point     // of the last copy
	programs map[program]*commands
	times    *queries // of a program's steps; nil: nobody asks
	running  point    // of the group under way or, if it was given, of the last one; no value: none

	from  *denseDriver  // of the vector that was taken last
	x     uint64        // where that lies
	fail  dense.Failure // where its steps tell of theirs
	stays bool          // outputs of the group under way are in the scratch
	fetch *commands     // that brings them from there; nil: nobody has asked
}

// A segment is a part of the staging buffer, or of lent memory, that waits to be copied.
type segment struct {
	to, from     *buffer
	toAt, fromAt uint64
	size         uint64
}

// A program is a recording: what it depends on.
type program struct {
	layer backends.HeldLayer
	act   backends.Activation
	small bool
	stays bool // no outputs go to the host
	jobs  int  // of one position, each with one row: counts are known and outputs go to the host directly; 0: any group
}

const (
	// The head of the control block: one word that kernels change when an activation is
	// out of range, and parameters.
	topAt   = 0
	slotsAt = 128
	head    = slotsAt + 6*slotBytes
	// resultsAt is where outputs begin behind a copy of that word.
	resultsAt = 16

	smallRows   = 64
	stagingSize = 32 << 20
)

// slot is where the parameters of a step lie in the control block.
func slot(i int) uint64 { return uint64(slotsAt + i*slotBytes) }

// NewExperts makes room to compute experts of these layers for up to `most`
// positions with k choices each. The experts come with Upload.
func (d *Device) NewExperts(layers map[int]backends.HeldLayer, k, most int) (*held.Experts, error) {
	e, err := d.newExperts(layers, k, most)
	if err != nil {
		return nil, err
	}
	return e.Experts, nil
}

func (d *Device) newExperts(layers map[int]backends.HeldLayer, k, most int) (e *experts, err error) {
	e = &experts{d: d, rows: k * most, programs: map[program]*commands{}}
	opt := held.Options{Name: "vulkan", Types: types, Head: head, Most: int64(min(d.maxAllocation, d.maxBuffer))}
	if e.Experts, err = held.New(e, opt, layers, k, most); err != nil {
		return nil, err
	}
	buffer := func(w where, size int64) (b *buffer) {
		if err == nil {
			b, err = d.buffer(w, size)
		}
		return b
	}
	p := &e.Places
	e.control = buffer(up, p.Control)
	e.onDevice = buffer(weights, p.Size)
	e.in = buffer(up, max(p.Input, held.Align)) // a dense model has no experts
	e.out = buffer(down, p.Output+resultsAt)
	for i := range e.staging {
		if !d.place.direct {
			e.staging[i] = buffer(up, stagingSize)
		}
		if err == nil {
			e.upload[i], err = d.copies.commands()
		}
	}
	if err != nil {
		e.Close()
		return nil, err
	}
	e.Attach(held.Memory{Control: e.control.host, Input: e.in.host, At: e.onDevice.at, Direct: e.out.at + resultsAt})
	return e, nil
}

// MatrixBytes is held.Device's, as what follows is.
func (e *experts) MatrixBytes(t quant.Type, rows, cols int) int64 { return matrixBytes(t, rows, cols) }

func (e *experts) Alloc(size int64) (uint64, error) {
	b, err := e.d.buffer(weights, size)
	if err != nil {
		return 0, err
	}
	e.arenas = append(e.arenas, b)
	return b.at, nil
}

func (e *experts) Write(at uint64, _ quant.Type, data []byte, lent int) error {
	i := slices.IndexFunc(e.arenas, func(b *buffer) bool { return at >= b.at && at < b.at+b.size })
	to, offset := e.arenas[i], at-e.arenas[i].at
	if to.host != nil {
		copy(to.host[offset:], data)
		return nil
	}
	if lent >= 0 {
		b := e.lent[lent]
		from := uintptr(unsafe.Pointer(&data[0])) - uintptr(unsafe.Pointer(&b.host[0]))
		e.pending = append(e.pending, segment{to, b, offset, uint64(from), uint64(len(data))})
		e.borrowed = true
		return nil
	}
	for len(data) > 0 {
		if e.filled == stagingSize {
			if err := e.Send(); err != nil {
				return err
			}
		}
		if e.filled == 0 {
			if err := e.d.waitFor(e.staged[e.turn]); err != nil {
				return err
			}
		}
		n := copy(e.staging[e.turn].host[e.filled:], data)
		e.pending = append(e.pending, segment{to, e.staging[e.turn], offset, uint64(e.filled), uint64(n)})
		e.filled = min(stagingSize, (e.filled+n+15)&^15)
		data, offset = data[n:], offset+uint64(n)
	}
	return nil
}

// Send hands what Write has gathered to the queue of copies, where it is copied
// while kernels run; a group that is started later waits for it there.
func (e *experts) Send() error {
	if len(e.pending) == 0 {
		return nil
	}
	t := e.turn
	if err := e.d.waitFor(e.staged[t]); err != nil { // what lent memory alone fills has not waited
		return err
	}
	c := e.upload[t]
	c.begin()
	for _, s := range e.pending {
		c.copy(s.to, s.toAt, s.from, s.fromAt, s.size)
	}
	wait := e.borrowed
	e.pending, e.filled, e.borrowed = e.pending[:0], 0, false
	if err := c.end(); err != nil {
		return err
	}
	var err error
	e.staged[t], err = c.submit()
	e.copied, e.turn = e.staged[t], 1-t
	if wait && err == nil {
		err = e.d.waitFor(e.copied)
	}
	return err
}

func (e *experts) Wait() error { return errors.Join(e.Send(), e.d.waitFor(e.copied)) }

func (e *experts) Launch(g *held.Group) error {
	d, l, p, dev := e.d, g.Layer, &e.Places, e.onDevice.at
	xA, xB, hidden := formAt(dev+uint64(p.XA), g.N*l.Dim), formAt(dev+uint64(p.XB), g.N*l.Dim), formAt(dev+uint64(p.Hidden), g.Rows*l.FF)
	if l.Types[0].ActBlock() == l.Types[1].ActBlock() {
		xB = xA
	}
	indexOn := dev + uint64(p.Index)
	jobsOf := func(part int) uint64 { return dev + uint64(p.Jobs) + uint64(part*g.Jobs*jobBytes) }
	x, fail := e.in.at, dense.Failure{At: dev + topAt, Step: 1}
	if e.stays = g.Taken; g.Taken {
		if err := e.from.flush(); err != nil { // which makes x, and uses what groups before have put into the scratch
			return err
		}
		x, fail = e.x, e.fail
	}
	*at[uint32](e.control, topAt) = 0
	*at[quantizeParams](e.control, slot(0)) = xA.quantize(x, 0, fail, g.N*l.Dim)
	*at[quantizeParams](e.control, slot(1)) = xB.quantize(x, 0, fail, g.N*l.Dim)
	gates := g.Jobs
	if l.Types[0] == l.Types[1] {
		gates *= 2 // gate and up in one dispatch
	}
	_, per := d.rows(l.Types[0])
	*at[rowsParams](e.control, slot(2)) = xA.rows(jobsOf(0), indexOn, gates, g.Longest, per, l.FF, l.Dim, l.Types[0])
	_, per = d.rows(l.Types[1])
	*at[rowsParams](e.control, slot(3)) = xB.rows(jobsOf(1), indexOn, g.Jobs, g.Longest, per, l.FF, l.Dim, l.Types[1])
	*at[quantizeParams](e.control, slot(4)) = hidden.quantize(dev+uint64(p.Gate), dev+uint64(p.Up), fail, g.Rows*l.FF)
	_, per = d.rows(l.Types[2])
	*at[rowsParams](e.control, slot(5)) = hidden.rows(jobsOf(2), indexOn, g.Jobs, g.Longest, per, l.Dim, l.FF, l.Types[2])

	run := program{layer: l, act: g.Act, small: g.Rows <= smallRows, stays: g.Taken}
	if g.Single() {
		run.jobs = g.Jobs
	}
	c, err := e.program(run)
	if err != nil {
		return err
	}
	e.running, err = c.submit(e.copied)
	return err
}

// program records the steps of a group of a layer's kind, once.
func (e *experts) program(p program) (*commands, error) {
	if c, ok := e.programs[p]; ok {
		return c, nil
	}
	d := e.d
	c, err := d.kernels.commands()
	if err != nil {
		return nil, err
	}
	c.begin()
	e.times.reset(c)
	e.record(c, p, e.times)
	if err := c.end(); err != nil {
		c.free()
		return nil, err
	}
	d.recorded++
	e.programs[p] = c
	return c, nil
}

// record records a group's steps; q, if there is one, takes the time between them.
func (e *experts) record(c *commands, p program, q *queries) {
	d, l := e.d, p.layer
	rows := e.rows
	if p.small {
		rows = min(rows, smallRows)
	}
	q.stamp(c, 0)
	if p.stays {
		c.wrote = stageCompute // of what x comes from
	}
	c.copy(e.onDevice, 0, e.control, 0, uint64(e.Places.Index+held.IndexBytes(rows)))
	q.stamp(c, 1)
	quantize := func(k kernel, i, floats int) {
		if p.jobs > 0 {
			c.run(k, e.onDevice, slot(i), uint32(floats+255)/256, 1, 1)
		} else {
			c.run(k, e.onDevice, slot(i))
		}
	}
	multiply := func(t quant.Type, i, rows, jobs int) {
		k, per := d.rows(t)
		if p.jobs > 0 {
			c.run(k, e.onDevice, slot(i), uint32((rows+per-1)/per), uint32(jobs), 1)
		} else {
			c.run(k, e.onDevice, slot(i))
		}
	}
	quantize(quantizer(l.Types[0]), 0, l.Dim)
	if l.Types[0].ActBlock() != l.Types[1].ActBlock() {
		quantize(quantizer(l.Types[1]), 1, l.Dim)
	}
	q.stamp(c, 2)
	if l.Types[0] == l.Types[1] {
		multiply(l.Types[0], 2, l.FF, 2*p.jobs)
	} else {
		multiply(l.Types[0], 2, l.FF, p.jobs)
		multiply(l.Types[1], 3, l.FF, p.jobs)
	}
	q.stamp(c, 3)
	quantize(gatedQuantizer(l.Types[2], p.act), 4, p.jobs*l.FF)
	q.stamp(c, 4)
	multiply(l.Types[2], 5, l.Dim, p.jobs)
	q.stamp(c, 5)
	if p.stays {
		return
	}
	c.barrier()
	if p.jobs == 0 {
		c.copy(e.out, resultsAt, e.onDevice, uint64(e.Places.Out), 4*uint64(rows)*uint64(l.Dim))
	}
	c.copy(e.out, 0, e.onDevice, topAt, 4)
	q.stamp(c, 6)
}

func (e *experts) Collect(floats int) ([]float32, error) {
	if e.stays {
		return e.bring(floats)
	}
	err := e.d.waitFor(e.running)
	e.running = point{}
	if err != nil {
		return nil, err
	}
	if *at[uint32](e.out, 0) != 0 {
		return nil, &backends.ActivationError{Step: "ExpertGroup"}
	}
	return slice[float32](e.out, resultsAt, floats), nil
}

func (e *experts) Memory() backends.HeldUsage {
	u := backends.HeldUsage{Driver: -1, Recorded: e.d.recorded, Launches: e.d.launches}
	vram := e.d.Memory.vramHeap()
	for b := range e.d.buffers {
		if b.use == lent {
			u.Pinned += int64(b.size)
			u.PinAsked += int64(b.size)
		} else if e.d.Memory.Types[e.d.place.of(b.use)].Heap == vram {
			u.Allocated += int64(b.size)
		}
	}
	if used, ok := e.d.Usage(); ok {
		u.Driver = int64(used) - int64(e.d.before)
	}
	return u
}

func (e *experts) Free() error {
	err := errors.Join(e.d.waitFor(e.running), e.d.waitFor(e.copied))
	for _, c := range e.upload {
		c.free()
	}
	for _, c := range e.programs {
		c.free()
	}
	e.fetch.free()
	e.times.free()
	err = errors.Join(err, e.Return())
	for _, b := range append(e.arenas, e.control, e.onDevice, e.in, e.out, e.staging[0], e.staging[1]) {
		e.d.drop(b)
	}
	e.arenas, e.programs = nil, nil
	return err
}
