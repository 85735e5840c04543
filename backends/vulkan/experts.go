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

	control  *buffer // near: parameters, jobs, index
	onDevice *buffer // room for a copy of that, then the scratch
	params   *buffer // of them, where kernels read the control block
	in, out  *buffer
	lent     []*buffer // memory of the host that needs no staging
	borrowed bool      // some of what waits for Send lies there
	staging  [2]stage  // by turns
	turn     int
	copied   point      // of the last copy
	laid     point      // of the last planes
	steps    parameters // of the last group
	programs map[program]*commands
	times    *queries // of a program's steps; nil: nobody asks
	running  point    // of the group under way or, if it was given, of the last one; no value: none

	from  *denseDriver  // of the vector that was taken last
	x     uint64        // where that lies
	fail  dense.Failure // where its steps tell of theirs
	stays bool          // outputs of the group under way are in the scratch
	fetch *commands     // that brings them from there; nil: nobody has asked
}

// A stage is what uploads pass through: blocks come to raw, in the device's memory,
// where they become planes; what is no blocks goes where it belongs at once.
type stage struct {
	host   *buffer // what is copied from; raw itself where the host writes the device's memory
	raw    *buffer
	filled int       // bytes of both that wait for Send
	copies []segment // of them, or of lent memory
	blocks []blocks  // in raw
	copy   *commands
	lay    *commands // makes the planes
	free   point     // when it may be used again
}

// A segment waits to be copied.
type segment struct {
	to, from     *buffer
	toAt, fromAt uint64
	size         uint64
}

// Blocks wait to become planes: a kernel and its parameters.
type blocks struct {
	kernel
	planesParams
}

// parameters are those of a group's steps.
type parameters struct {
	quantize [3]quantizeParams // x for gate and for up, what down multiplies
	rows     [3]rowsParams     // gate, up, down
}

// slots of parameters in the control block: of step i of the kind.
func quantizeSlot(i int) uint64 { return slot([]int{0, 1, 4}[i]) }
func rowsSlot(i int) uint64     { return slot([]int{2, 3, 5}[i]) }

// A program is a recording: what it depends on.
type program struct {
	layer backends.HeldLayer
	act   backends.Activation
	small bool
	stays bool // no outputs go to the host
	jobs  int  // of one position, each with one row: counts are known and outputs go to the host directly; 0: any group
}

const (
	// The head of the control block are parameters. If it lies in the host's memory the
	// first kernel copies all but its own.
	slotsAt = 0
	head    = slotsAt + 6*slotBytes
	// resultsAt is where outputs begin behind that word.
	resultsAt = 16

	smallRows   = 64
	stagingSize = 32 << 20
	stageRuns   = 256 // of blocks in a stage, at most
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
	e.control = buffer(near, p.Control)
	e.onDevice = buffer(weights, p.Size)
	e.in = buffer(near, max(p.Input, held.Align)) // a dense model has no experts
	e.out = buffer(down, p.Output+resultsAt)
	if e.params = e.control; d.place.near < 0 {
		e.params = e.onDevice
	}
	const size = stagingSize + held.Align + stageRuns*slotBytes
	for i := range e.staging {
		st := &e.staging[i]
		st.raw = buffer(weights, size)
		if st.host = st.raw; !d.place.direct {
			st.host = buffer(up, size)
		}
		if err == nil {
			st.copy, err = d.copies.commands()
		}
		if err == nil {
			st.lay, err = d.kernels.commands()
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

func (e *experts) Write(at uint64, t quant.Type, data []byte, lent int) error {
	to := e.arenas[slices.IndexFunc(e.arenas, func(b *buffer) bool { return at >= b.at && at < b.at+b.size })]
	laid := t.Kind() != quant.Float
	if to.host != nil && !laid {
		copy(to.host[at-to.at:], data)
		return nil
	}
	_, block := t.Block()
	for offset := 0; offset < len(data); {
		st := &e.staging[e.turn]
		if st.filled == 0 {
			if err := e.d.waitFor(st.free); err != nil {
				return err
			}
		}
		n := min(len(data)-offset, stagingSize-st.filled)
		if laid && offset+n < len(data) {
			n -= n % (planesBlocks * block)
		}
		if n == 0 || len(st.blocks) == stageRuns {
			if err := e.Send(); err != nil {
				return err
			}
			continue
		}
		run := data[offset : offset+n]
		s := segment{st.raw, st.host, uint64(st.filled), uint64(st.filled), uint64(n)}
		if lent >= 0 {
			s.from = e.lent[lent]
			s.fromAt = uint64(uintptr(unsafe.Pointer(&run[0])) - uintptr(unsafe.Pointer(&s.from.host[0])))
			e.borrowed = true
		} else {
			copy(st.host.host[st.filled:], run)
		}
		if laid {
			k, p := planes(t, st.raw.at+uint64(st.filled), at, offset, n, len(data))
			st.blocks = append(st.blocks, blocks{k, p})
		} else {
			s.to, s.toAt = to, at-to.at+uint64(offset)
		}
		if s.to != s.from {
			st.copies = append(st.copies, s)
		}
		st.filled = min(stagingSize, (st.filled+n+15)&^15)
		offset += n
	}
	return nil
}

// Send hands what Write has gathered to the queue of copies, where it is copied
// while kernels run, and to the kernels that make planes of it; a group that is
// started later waits for both.
func (e *experts) Send() error {
	st := &e.staging[e.turn]
	copies, made, wait := st.copies, st.blocks, e.borrowed
	if st.filled == 0 {
		return nil
	}
	st.copies, st.blocks, st.filled, e.borrowed, e.turn = copies[:0], made[:0], 0, false, 1-e.turn
	if len(copies) > 0 {
		c := st.copy
		c.begin()
		for _, s := range copies {
			c.copy(s.to, s.toAt, s.from, s.fromAt, s.size)
		}
		c.barrier()
		if err := c.end(); err != nil {
			return err
		}
		var err error
		if e.copied, err = c.submit(); err != nil {
			return err
		}
		st.free = e.copied
	}
	if len(made) > 0 {
		c := st.lay
		c.begin()
		c.wrote = stageCompute | stageTransfer // groups may still read what is replaced
		c.before(stageCompute, accessShaderRead|accessShaderWrite)
		for i := range made {
			p, err := e.d.pipeline(made[i].kernel)
			if err != nil {
				return err
			}
			at := uint64(stagingSize + held.Align + i*slotBytes)
			*(*planesParams)(unsafe.Pointer(&st.host.host[at])) = made[i].planesParams
			c.dispatch(p, st.host.at+at, nil, [3]uint32(made[i].groups[:3]))
		}
		c.barrier()
		if err := c.end(); err != nil {
			return err
		}
		var err error
		if st.free, err = c.submit(e.copied); err != nil {
			return err
		}
		e.laid = st.free
	}
	if wait {
		return e.d.waitFor(e.copied)
	}
	return nil
}

func (e *experts) Wait() error {
	err := errors.Join(e.Send(), e.d.waitFor(e.copied), e.d.waitFor(e.laid))
	if err == nil {
		e.copied, e.laid = point{}, point{} // what is past needs no waiting for by the device
	}
	return err
}

func (e *experts) Launch(g *held.Group) error {
	d, l, p, dev := e.d, g.Layer, &e.Places, e.onDevice.at
	xA, xB, hidden := formAt(dev+uint64(p.XA), g.N*l.Dim), formAt(dev+uint64(p.XB), g.N*l.Dim), formAt(dev+uint64(p.Hidden), g.Rows*l.FF)
	if l.Types[0].ActBlock() == l.Types[1].ActBlock() {
		xB = xA
	}
	indexOn := e.params.at + uint64(p.Index)
	jobsOf := func(part int) uint64 { return e.params.at + uint64(p.Jobs) + uint64(part*g.Jobs*jobBytes) }
	x, fail := e.in.at, dense.Failure{At: e.out.at, Step: 1}
	if e.stays = g.Taken; g.Taken {
		if err := e.from.flush(); err != nil { // which makes x, and uses what groups before have put into the scratch
			return err
		}
		x, fail = e.x, e.fail
	}
	*at[uint32](e.out, 0) = 0
	run := program{layer: l, act: g.Act, small: g.Rows <= smallRows, stays: g.Taken}
	longest := g.Longest
	if g.Single() {
		run.jobs = g.Jobs
	} else {
		longest = max(2, longest) // the recording is of any group
	}
	gates := g.Jobs
	if l.Types[0] == l.Types[1] {
		gates *= 2 // gate and up in one dispatch
	}
	e.steps = parameters{
		quantize: [3]quantizeParams{
			xA.quantize(x, 0, fail, g.N*l.Dim), xB.quantize(x, 0, fail, g.N*l.Dim),
			hidden.quantize(dev+uint64(p.Gate), dev+uint64(p.Up), fail, g.Rows*l.FF)},
		rows: [3]rowsParams{
			xA.rows(d.rows(l.Types[0], longest), jobsOf(0), indexOn, gates, g.Longest, l.FF, l.Dim, l.Types[0]),
			xB.rows(d.rows(l.Types[1], longest), jobsOf(1), indexOn, g.Jobs, g.Longest, l.FF, l.Dim, l.Types[1]),
			hidden.rows(d.rows(l.Types[2], longest), jobsOf(2), indexOn, g.Jobs, g.Longest, l.Dim, l.FF, l.Types[2])},
	}
	if rest := e.rest(run); rest > 0 {
		first := &e.steps.quantize[0]
		first.from, first.to, first.words = e.control.at+slot(1), dev+slot(1), uint32(rest/4)
		first.groups[0] += (first.words + 255) / 256
	}
	for i := range e.steps.rows {
		*at[quantizeParams](e.control, quantizeSlot(i)) = e.steps.quantize[i]
		*at[rowsParams](e.control, rowsSlot(i)) = e.steps.rows[i]
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

// rest is the bytes of the control block that a program's first kernel copies, from
// slot 1 on.
func (e *experts) rest(p program) int64 {
	if e.params == e.control {
		return 0
	}
	return e.Places.Index + held.IndexBytes(e.most(p)) - int64(slot(1))
}

// most is the rows of a program's group at most.
func (e *experts) most(p program) int {
	if p.small {
		return min(e.rows, smallRows)
	}
	return e.rows
}

// record records a group's steps; q, if there is one, takes the time between them.
func (e *experts) record(c *commands, p program, q *queries) {
	d, l := e.d, p.layer
	q.stamp(c, 0)
	if p.stays {
		c.wrote = stageCompute // of what x comes from
	}
	// Of one position all counts are known, and parameters too, but where a backend's
	// vector is the input.
	quantize := func(k kernel, b *buffer, i int) {
		switch params := &e.steps.quantize[i]; {
		case p.jobs > 0 && !p.stays:
			c.with(k, b.at+quantizeSlot(i), behind(params), [3]uint32(params.groups[:3]))
		case p.jobs > 0:
			c.run(k, b, quantizeSlot(i), params.groups[:3]...)
		default:
			c.run(k, b, quantizeSlot(i))
		}
	}
	multiply := func(i int) {
		t := l.Types[i]
		if params := &e.steps.rows[i]; p.jobs > 0 {
			c.with(d.rows(t, 1).kernel, e.params.at+rowsSlot(i), behind(params), [3]uint32(params.groups[:3]))
		} else {
			c.run(d.rows(t, 2).kernel, e.params, rowsSlot(i))
		}
	}
	quantize(quantizer(l.Types[0]), e.control, 0)
	if l.Types[0].ActBlock() != l.Types[1].ActBlock() {
		quantize(quantizer(l.Types[1]), e.params, 1)
	}
	q.stamp(c, 1)
	multiply(0)
	if l.Types[0] != l.Types[1] {
		multiply(1)
	}
	q.stamp(c, 2)
	quantize(gatedQuantizer(l.Types[2], p.act), e.params, 2)
	q.stamp(c, 3)
	multiply(2)
	q.stamp(c, 4)
	if p.stays {
		return
	}
	if p.jobs == 0 {
		c.barrier()
		c.copy(e.out, resultsAt, e.onDevice, uint64(e.Places.Out), 4*uint64(e.most(p))*uint64(l.Dim))
	}
	q.stamp(c, 5)
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
	err := errors.Join(e.d.waitFor(e.running), e.d.waitFor(e.copied), e.d.waitFor(e.laid))
	for _, c := range e.programs {
		c.free()
	}
	e.fetch.free()
	e.times.free()
	err = errors.Join(err, e.Return())
	for i := range e.staging {
		st := &e.staging[i]
		st.copy.free()
		st.lay.free()
		e.d.drop(st.host)
		e.d.drop(st.raw)
	}
	for _, b := range append(e.arenas, e.control, e.onDevice, e.in, e.out) {
		e.d.drop(b)
	}
	e.arenas, e.programs = nil, nil
	return err
}
