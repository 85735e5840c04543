package vulkan

import (
	"errors"
	"fmt"
	"slices"
	"time"
	"unsafe"

	"sluice/backends"
	"sluice/internal/quant"
)

// A Layer says what the experts of a layer are made of.
type Layer = backends.HeldLayer

// bytesOf is what an expert takes in an arena: each matrix aligned, with padding
// behind it that kernels may read.
func bytesOf(l Layer) int64 {
	var n int64
	for _, p := range l.Parts() {
		n += padded(p)
	}
	return n
}

const matrixAlign = 256

func padded(n int64) int64 { return (n + 16 + matrixAlign - 1) &^ (matrixAlign - 1) }

// Experts are experts in a device's memory and the means to compute groups of
// them. It implements backends.Holder.
type Experts struct {
	d        *Device
	layers   map[int]Layer
	k        int // choices of a position
	dim, ff  int // the widest
	most     int // positions of a batch
	slots    map[slotKey]uint64
	biases   map[int]*[3]uint64 // by layer: of all its experts, in device memory
	arenas   []*buffer
	others   []*buffer // biases
	used     int64     // of the last arena
	holes    []uint64
	uploaded int64 // bytes since the start
	payload  int64 // bytes of what is there

	control  *buffer // host: parameters, jobs, index; copied to the device first
	onDevice *buffer // that copy, then the scratch
	in, out  *buffer
	staging  [2]*buffer // by turns
	upload   [2]*commands
	staged   [2]point // at which each is free
	turn     int
	filled   int       // bytes of the staging buffer whose turn it is that wait for flush
	pending  []segment // of them
	copied   point     // of the last copy
	programs map[program]*commands
	times    *queries // of a program's steps; nil: nobody asks
	running  point    // of the group under way; no value: none
	rows     int      // of it
	nanos    int64    // of uploads
}

// A segment is a part of the staging buffer that waits to be copied.
type segment struct {
	to         *buffer
	toAt, from uint64
	size       uint64
}

type slotKey struct{ layer, expert int }

// A program is a recording: what it depends on.
type program struct {
	layer Layer
	act   backends.Activation
	small bool
	jobs  int // of one position, each with one row: counts are known and outputs go to the host directly; 0: any group
}

// Places in the control block.
const (
	topAt   = 0 // one word that kernels raise: the largest activation out of range
	slotsAt = 128
	jobsAt  = slotsAt + 6*slotBytes
	mostJob = 16 // experts of a group
	indexAt = (jobsAt + 3*mostJob*int(unsafe.Sizeof(rowsJob{})) + 255) &^ 255

	smallRows   = 64
	arenaBytes  = 256 << 20
	stagingSize = 32 << 20
)

// NewExperts makes room to compute experts of these layers for up to `most`
// positions with k choices each. The experts come with Upload.
func (d *Device) NewExperts(layers map[int]Layer, k, most int) (*Experts, error) {
	e := &Experts{d: d, layers: layers, k: k, most: most, slots: map[slotKey]uint64{}, programs: map[program]*commands{}, biases: map[int]*[3]uint64{}}
	for i, l := range layers {
		for _, t := range l.Types {
			if !Supports(t) {
				return nil, fmt.Errorf("vulkan: layer %d: experts of %v: the kernels know %v; leave --vram out, or convert the model", i, t, types)
			}
		}
		e.dim, e.ff = max(e.dim, l.Dim), max(e.ff, l.FF)
	}
	rows := k * most
	var err error
	buffer := func(w where, size int64) (b *buffer) {
		if err == nil {
			b, err = d.buffer(w, size)
		}
		return b
	}
	scratch := e.scratch(rows)
	e.control = buffer(up, scratch.begin)
	e.onDevice = buffer(weights, scratch.size)
	e.in = buffer(up, 4*int64(most)*int64(e.dim))
	e.out = buffer(down, 4*int64(rows)*int64(e.dim)+16)
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
	return e, nil
}

// A scratch is how the device's copy of the control block and the vectors
// between the kernels lie, for so many output rows.
type scratch struct {
	begin          int64 // end of the control block
	xA, xB, hidden int64 // forms of x, for gate and for up, and of what down multiplies
	gate, up, out  int64 // floats
	size           int64
}

func (e *Experts) scratch(rows int) (s scratch) {
	take := func(n int64) int64 {
		at := s.size
		s.size += (n + 255) &^ 255
		return at
	}
	take(int64(indexAt) + 16*int64(rows))
	s.begin = s.size
	s.xA, s.xB = take(formBytes(e.most*e.dim)), take(formBytes(e.most*e.dim))
	s.hidden = take(formBytes(rows * e.ff))
	s.gate, s.up = take(4*int64(rows)*int64(e.ff)), take(4*int64(rows)*int64(e.ff))
	s.out = take(4 * int64(rows) * int64(e.dim))
	return s
}

// ScratchBytes is the device memory that the vectors between the kernels take.
func (e *Experts) ScratchBytes() int64 { return e.scratch(e.k * e.most).size }

// ExpertBytes is what an expert of the layer takes as allocated.
func (e *Experts) ExpertBytes(layer int) int64 { return bytesOf(e.layers[layer]) }

// Upload copies an expert's gate, up and down into the device's memory, after
// looking for numbers that the arithmetic does not take. The parts are the
// caller's again when it returns.
func (e *Experts) Upload(layer, expert int, parts [3][]byte) error {
	start := time.Now()
	defer func() { e.nanos += time.Since(start).Nanoseconds() }()
	l, ok := e.layers[layer]
	if !ok {
		panic(fmt.Sprintf("vulkan: upload of an expert of layer %d, which has none", layer))
	}
	if err := l.Check(expert, parts); err != nil {
		return err
	}
	at, arena, offset, err := e.place(slotKey{layer, expert}, l)
	if err != nil {
		return err
	}
	for i := range parts {
		if err := e.write(arena, offset, parts[i]); err != nil {
			return fmt.Errorf("layer %d expert %d: %w", layer, expert, err)
		}
		offset += uint64(padded(int64(len(parts[i]))))
		e.payload += int64(len(parts[i]))
		e.uploaded += int64(len(parts[i]))
	}
	if err := e.flush(); err != nil {
		return fmt.Errorf("layer %d expert %d: %w", layer, expert, err)
	}
	e.slots[slotKey{layer, expert}] = at
	return nil
}

// Replace copies an expert in, over one that takes as much, of which no group may
// be under way. After an error neither is there.
func (e *Experts) Replace(oldLayer, old, layer, expert int, parts [3][]byte) error {
	was := slotKey{oldLayer, old}
	at, ok := e.slots[was]
	if !ok || bytesOf(e.layers[oldLayer]) != bytesOf(e.layers[layer]) || e.running.value != 0 {
		panic(fmt.Sprintf("vulkan: expert %d of layer %d cannot take the place of expert %d of layer %d", expert, layer, old, oldLayer))
	}
	delete(e.slots, was)
	for _, n := range e.layers[oldLayer].Parts() {
		e.payload -= n
	}
	e.holes = append(e.holes, at)
	return e.Upload(layer, expert, parts)
}

// place finds room for an expert, in a new arena if need be.
func (e *Experts) place(k slotKey, l Layer) (at uint64, arena *buffer, offset uint64, err error) {
	n := bytesOf(l)
	if last := len(e.holes) - 1; last >= 0 { // Replace has made it, and it fits
		at, e.holes = e.holes[last], e.holes[:last]
		for _, b := range e.arenas {
			if at >= b.at && at < b.at+b.size {
				return at, b, at - b.at, nil
			}
		}
	}
	if len(e.arenas) == 0 || e.used+n > int64(e.arenas[len(e.arenas)-1].size) {
		size := min(int64(arenaBytes), int64(min(e.d.maxAllocation, e.d.maxBuffer)))
		b, err := e.d.buffer(weights, max(size, n))
		if err != nil {
			return 0, nil, 0, err
		}
		e.arenas, e.used = append(e.arenas, b), 0
	}
	b := e.arenas[len(e.arenas)-1]
	offset = uint64(e.used)
	e.used += n
	return b.at + offset, b, offset, nil
}

// write copies bytes to the device's memory, at the latest with the next flush.
// The bytes are the caller's again when it returns.
func (e *Experts) write(to *buffer, offset uint64, data []byte) error {
	if to.host != nil {
		copy(to.host[offset:], data)
		return nil
	}
	for len(data) > 0 {
		if e.filled == stagingSize {
			if err := e.flush(); err != nil {
				return err
			}
		}
		if e.filled == 0 {
			if err := e.d.waitFor(e.staged[e.turn]); err != nil {
				return err
			}
		}
		n := copy(e.staging[e.turn].host[e.filled:], data)
		e.pending = append(e.pending, segment{to, offset, uint64(e.filled), uint64(n)})
		e.filled = min(stagingSize, (e.filled+n+15)&^15)
		data, offset = data[n:], offset+uint64(n)
	}
	return nil
}

// flush hands what write has gathered to the queue of copies, where it is copied
// while kernels run; a group that is started later waits for it there.
func (e *Experts) flush() error {
	if len(e.pending) == 0 {
		return nil
	}
	t := e.turn
	c := e.upload[t]
	c.begin()
	for _, s := range e.pending {
		c.copy(s.to, s.toAt, e.staging[t], s.from, s.size)
	}
	e.pending, e.filled = e.pending[:0], 0
	if err := c.end(); err != nil {
		return err
	}
	var err error
	e.staged[t], err = c.submit()
	e.copied, e.turn = e.staged[t], 1-t
	return err
}

// Settle waits until all that was uploaded is in the device's memory.
func (e *Experts) Settle() error {
	start := time.Now()
	defer func() { e.nanos += time.Since(start).Nanoseconds() }()
	return errors.Join(e.flush(), e.d.waitFor(e.copied))
}

// Has says whether an expert is in the device's memory.
func (e *Experts) Has(layer, expert int) bool { _, ok := e.slots[slotKey{layer, expert}]; return ok }

// Input is where the n vectors [n, dim] of the next group belong.
func (e *Experts) Input(n, dim int) []float32 { return slice[float32](e.in, 0, n*dim) }

// bias gives the layer's biases on the device, copied there when first asked for.
func (e *Experts) bias(layer int, bias *[3][]float32) (*[3]uint64, error) {
	if bias == nil || bias[0] == nil {
		return &[3]uint64{}, nil
	}
	if b := e.biases[layer]; b != nil {
		return b, nil
	}
	var size uint64
	for _, part := range bias {
		size += uint64(padded(4 * int64(len(part))))
	}
	b, err := e.d.buffer(weights, int64(size))
	if err != nil {
		return nil, err
	}
	e.others = append(e.others, b)
	at, places := uint64(0), new([3]uint64)
	for i, part := range bias {
		if err := e.write(b, at, unsafe.Slice((*byte)(unsafe.Pointer(&part[0])), 4*len(part))); err != nil {
			return nil, err
		}
		places[i] = b.at + at
		at += uint64(padded(4 * int64(len(part))))
	}
	if err := e.flush(); err != nil {
		return nil, err
	}
	e.biases[layer] = places
	return places, nil
}

// Start computes a group of experts of one layer: see backends.Holder. What it
// panics at is the caller's bug.
func (e *Experts) Start(layer int, jobs []backends.HeldJob, k, n int, act backends.Activation, bias *[3][]float32) error {
	l := e.layers[layer]
	if e.running.value != 0 {
		panic("vulkan: Start before the Finish of another group")
	}
	if len(jobs) > mostJob || n > e.most {
		panic(fmt.Sprintf("vulkan: a group of %d experts for %d positions: at most %d and %d", len(jobs), n, mostJob, e.most))
	}
	rows, longest := 0, 0
	for i := range jobs {
		rows += len(jobs[i].Rows)
		longest = max(longest, len(jobs[i].Rows))
	}
	if rows == 0 {
		return nil
	}
	if rows > e.k*e.most {
		panic(fmt.Sprintf("vulkan: a group of %d rows, at most %d", rows, e.k*e.most))
	}
	b, err := e.bias(layer, bias)
	if err != nil {
		return err
	}
	s := e.scratch(e.k * e.most)
	dev := e.onDevice.at
	parts := l.Parts()
	list := slice[rowsJob](e.control, jobsAt, 3*mostJob)
	index := slice[uint32](e.control, uint64(indexAt), 4*e.k*e.most)
	down := 2 * rows // where the index of down begins
	out, direct := dev+uint64(s.out), 0
	if n == 1 && rows == len(jobs) {
		out, direct = e.out.at+16, rows
	}
	base := 0
	for j := range jobs {
		at, ok := e.slots[slotKey{layer, int(jobs[j].Expert)}]
		if !ok {
			panic(fmt.Sprintf("vulkan: expert %d of layer %d is not on the device", jobs[j].Expert, layer))
		}
		m := uint32(len(jobs[j].Rows))
		to := uint64(4 * base * l.FF)
		of := func(i, rows int) uint64 {
			if b[i] == 0 {
				return 0
			}
			return b[i] + 4*uint64(jobs[j].Expert)*uint64(rows)
		}
		one := rowsJob{w: at, bias: of(0, l.FF), y: dev + uint64(s.gate) + to, first: uint32(2 * base), n: m, stride: uint32(l.FF)}
		list[j] = one
		one.bias, one.w, one.y = of(1, l.FF), at+uint64(padded(parts[0])), dev+uint64(s.up)+to
		list[len(jobs)+j] = one
		list[2*len(jobs)+j] = rowsJob{bias: of(2, l.Dim), w: at + uint64(padded(parts[0])+padded(parts[1])), y: out, first: uint32(down + 2*base), n: m, stride: uint32(l.Dim)}
		for p, r := range jobs[j].Rows {
			index[2*(base+p)], index[2*(base+p)+1] = uint32(int(r)/k), uint32(p)
			index[down+2*(base+p)], index[down+2*(base+p)+1] = uint32(base+p), uint32(base+p)
		}
		base += int(m)
	}

	xA, xB, hidden := formAt(dev+uint64(s.xA), n*l.Dim), formAt(dev+uint64(s.xB), n*l.Dim), formAt(dev+uint64(s.hidden), rows*l.FF)
	if l.Types[0].ActBlock() == l.Types[1].ActBlock() {
		xB = xA
	}
	jobAt, indexOn := dev+jobsAt, dev+uint64(indexAt)
	size := uint64(unsafe.Sizeof(rowsJob{}))
	slot := func(i int) uint64 { return uint64(slotsAt + i*slotBytes) }
	*at[uint32](e.control, topAt) = 0
	*at[quantizeParams](e.control, slot(0)) = xA.quantize(e.in.at, 0, dev+topAt, n*l.Dim)
	*at[quantizeParams](e.control, slot(1)) = xB.quantize(e.in.at, 0, dev+topAt, n*l.Dim)
	gates := len(jobs)
	if l.Types[0] == l.Types[1] {
		gates *= 2 // gate and up in one dispatch
	}
	_, per := e.d.rows(l.Types[0])
	*at[rowsParams](e.control, slot(2)) = xA.rows(jobAt, indexOn, gates, longest, per, l.FF, l.Dim, l.Types[0])
	_, per = e.d.rows(l.Types[1])
	*at[rowsParams](e.control, slot(3)) = xB.rows(jobAt+uint64(len(jobs))*size, indexOn, len(jobs), longest, per, l.FF, l.Dim, l.Types[1])
	*at[quantizeParams](e.control, slot(4)) = hidden.quantize(dev+uint64(s.gate), dev+uint64(s.up), dev+topAt, rows*l.FF)
	_, per = e.d.rows(l.Types[2])
	*at[rowsParams](e.control, slot(5)) = hidden.rows(jobAt+2*uint64(len(jobs))*size, indexOn, len(jobs), longest, per, l.Dim, l.FF, l.Types[2])

	c, err := e.program(program{l, act, rows <= smallRows, direct}, s)
	if err != nil {
		return err
	}
	if e.running, err = c.submit(e.copied); err != nil {
		return err
	}
	e.rows = rows * l.Dim
	return nil
}

// program records the steps of a group of a layer's kind, once.
func (e *Experts) program(p program, s scratch) (*commands, error) {
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
	e.record(c, p, s, e.times)
	if err := c.end(); err != nil {
		c.free()
		return nil, err
	}
	d.recorded++
	e.programs[p] = c
	return c, nil
}

// record records a group's steps; q, if there is one, takes the time between them.
func (e *Experts) record(c *commands, p program, s scratch, q *queries) {
	d, l := e.d, p.layer
	rows := e.k * e.most
	if p.small {
		rows = min(rows, smallRows)
	}
	q.stamp(c, 0)
	c.copy(e.onDevice, 0, e.control, 0, uint64(indexAt+16*rows))
	q.stamp(c, 1)
	slot := func(i int) uint64 { return uint64(slotsAt + i*slotBytes) }
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
	c.barrier()
	if p.jobs == 0 {
		c.copy(e.out, 16, e.onDevice, uint64(s.out), 4*uint64(rows)*uint64(l.Dim))
	}
	c.copy(e.out, 0, e.onDevice, topAt, 4)
	q.stamp(c, 6)
}

// Finish waits for the group and gives its outputs, a vector for each row of
// each job, in their order. They are good until the next Start.
func (e *Experts) Finish() ([]float32, error) {
	if e.running.value == 0 {
		return nil, nil
	}
	err := e.d.waitFor(e.running)
	e.running = point{}
	if err != nil {
		return nil, err
	}
	if *at[uint32](e.out, 0) != 0 {
		return nil, &backends.ActivationError{Step: "ExpertGroup"}
	}
	return slice[float32](e.out, 16, e.rows), nil
}

// A Usage is what experts take of a device's memory.
type Usage = backends.HeldUsage

// Usage asks the driver too.
func (e *Experts) Usage() Usage {
	u := Usage{Experts: int64(len(e.slots)), Payload: e.payload, Driver: -1, UploadBytes: e.uploaded, UploadNanos: e.nanos, Recorded: e.d.recorded}
	vram := e.d.Memory.vramHeap()
	for b := range e.d.buffers {
		if e.d.Memory.Types[e.d.place.of(b.use)].Heap == vram {
			u.Allocated += int64(b.size)
		}
	}
	if used, ok := e.d.Usage(); ok {
		u.Driver = int64(used) - int64(e.d.before)
	}
	return u
}

// Close frees the experts' memory.
func (e *Experts) Close() error {
	err := errors.Join(e.d.waitFor(e.running), e.d.waitFor(e.copied))
	for _, c := range e.upload {
		c.free()
	}
	for _, c := range e.programs {
		c.free()
	}
	e.times.free()
	for _, b := range append(slices.Concat(e.arenas, e.others), e.control, e.onDevice, e.in, e.out, e.staging[0], e.staging[1]) {
		e.d.drop(b)
	}
	e.arenas, e.programs = nil, nil
	return err
}
