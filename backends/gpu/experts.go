package gpu

import (
	"errors"
	"fmt"
	"time"
	"unsafe"

	"sluice/backends"
	"sluice/internal/quant"
)

// Experts are experts in a device's memory and the means to compute groups of
// them. It implements backends.Holder.
//
// Matrices whose blocks are not aligned lie there as planes: all codes, behind them
// all scales. The device makes planes of what is uploaded.
type Experts struct {
	d        *Device
	layers   map[int]backends.HeldLayer
	k        int // choices of a position
	dim, ff  int // the widest
	most     int // positions of a batch
	slots    map[slotKey]uint64
	biases   map[int]*[3]uint64 // by layer: of all its experts, in device memory
	arenas   []*buffer
	used     int64 // of the last arena
	holes    []uint64
	uploaded int64 // bytes since the start
	payload  int64 // bytes of what is there
	nanos    int64 // of uploads

	staging [2]stage // by turns
	turn    int
	copied  uintptr // event: after the last upload
	fresh   bool    // kernels have not waited for it yet

	control  *buffer // host: jobs, index; copied to the device first
	onDevice *buffer // that copy, then the scratch
	in, out  *buffer // host
	programs map[program]graph
	running  bool
	rows     int // floats of the group under way
}

type slotKey struct{ layer, expert int }

// A stage is host memory that uploads pass through, and memory of the device where
// blocks lie that become planes.
type stage struct {
	host, blocks *buffer
	filled       int64
	free         uintptr // event: its last copy is done
	busy         bool    // that event was recorded
}

// A program is a recorded group of single vectors: what it depends on.
type program struct {
	layer backends.HeldLayer
	act   backends.Activation
	jobs  int
}

type graph struct{ graph, exec uintptr }

// Places in the control block.
const (
	topAt   = 0 // one word of the host that kernels set: an activation out of range
	jobsAt  = 256
	mostJob = 16 // experts of a group
	indexAt = (jobsAt + 3*mostJob*int(unsafe.Sizeof(rowsJob{})) + 255) &^ 255

	arenaBytes  = 256 << 20
	stagingSize = 32 << 20
)

// bytesOf is what an expert takes in an arena.
func bytesOf(l backends.HeldLayer) int64 {
	return matrixBytes(l.Types[0], l.FF, l.Dim) + matrixBytes(l.Types[1], l.FF, l.Dim) + matrixBytes(l.Types[2], l.Dim, l.FF)
}

// NewExperts makes room to compute experts of these layers for up to `most`
// positions with k choices each. The experts come with Upload.
func (d *Device) NewExperts(layers map[int]backends.HeldLayer, k, most int) (*Experts, error) {
	e := &Experts{d: d, layers: layers, k: k, most: most, slots: map[slotKey]uint64{}, programs: map[program]graph{}, biases: map[int]*[3]uint64{}}
	for i, l := range layers {
		for _, t := range l.Types {
			if !Supports(t) {
				return nil, fmt.Errorf("%v: layer %d: experts of %v: the kernels know %v; leave --vram out, or convert the model", d.dr.API, i, t, types)
			}
		}
		e.dim, e.ff = max(e.dim, l.Dim), max(e.ff, l.FF)
	}
	if err := e.allocate(); err != nil {
		e.Close()
		return nil, err
	}
	return e, nil
}

func (e *Experts) allocate() (err error) {
	d := e.d
	defer d.enter()()
	s := e.scratch()
	if e.onDevice, err = d.buffer(s.size); err != nil {
		return err
	}
	for _, b := range []struct {
		at   **buffer
		size int64
	}{{&e.control, s.begin}, {&e.in, 4 * int64(e.most) * int64(e.dim)}, {&e.out, 4 * int64(e.k*e.most) * int64(e.dim)}} {
		if *b.at, err = d.hostBuffer(b.size); err != nil {
			return err
		}
	}
	if e.copied, err = d.event(); err != nil {
		return err
	}
	for i := range e.staging {
		st := &e.staging[i]
		if st.host, err = d.stagingBuffer(stagingSize); err != nil {
			return err
		}
		if st.blocks, err = d.buffer(stagingSize); err != nil {
			return err
		}
		if st.free, err = d.event(); err != nil {
			return err
		}
	}
	return nil
}

// event makes an event without a time.
func (d *Device) event() (uintptr, error) {
	const noTiming = 2
	w := d.dr.words
	err := d.check("event", d.dr.f.event.call(addr(&w.out[0]), noTiming))
	return uintptr(w.out[0]), err
}

// A scratch is how the device's copy of the control block and the vectors between
// the kernels lie.
type scratch struct {
	begin          int64 // end of the control block
	x              int64 // floats
	xA, xB, hidden int64 // forms of x, for gate and for up, and of what down multiplies
	gate, up, out  int64 // floats
	size           int64
}

func (e *Experts) scratch() (s scratch) {
	rows := e.k * e.most
	take := func(n int64) int64 {
		at := s.size
		s.size += (n + 255) &^ 255
		return at
	}
	take(int64(indexAt) + 16*int64(rows))
	s.begin = s.size
	s.x = take(4 * int64(e.most*e.dim))
	s.xA, s.xB = take(formBytes(e.most*e.dim)), take(formBytes(e.most*e.dim))
	s.hidden = take(formBytes(rows * e.ff))
	s.gate, s.up = take(4*int64(rows)*int64(e.ff)), take(4*int64(rows)*int64(e.ff))
	s.out = take(4 * int64(rows) * int64(e.dim))
	return s
}

// ScratchBytes is the device memory that all but experts takes.
func (e *Experts) ScratchBytes() int64 { return e.scratch().size + 2*stagingSize }

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
		panic(fmt.Sprintf("gpu: upload of an expert of layer %d, which has none", layer))
	}
	if err := l.Check(expert, parts); err != nil {
		return err
	}
	defer e.d.enter()()
	at, err := e.place(bytesOf(l))
	if err != nil {
		return err
	}
	to := at
	for i, t := range l.Types {
		rows, cols := l.FF, l.Dim
		if i == 2 {
			rows, cols = l.Dim, l.FF
		}
		if err := e.write(to, t, parts[i]); err != nil {
			e.holes = append(e.holes, at)
			return fmt.Errorf("layer %d expert %d: %w", layer, expert, err)
		}
		to += uint64(matrixBytes(t, rows, cols))
		e.payload += int64(len(parts[i]))
		e.uploaded += int64(len(parts[i]))
	}
	if err := e.sent(); err != nil {
		return err
	}
	e.slots[slotKey{layer, expert}] = at
	return nil
}

// Replace copies an expert in, over one that takes as much, of which no group may
// be under way. After an error neither is there.
func (e *Experts) Replace(oldLayer, old, layer, expert int, parts [3][]byte) error {
	was := slotKey{oldLayer, old}
	at, ok := e.slots[was]
	if !ok || bytesOf(e.layers[oldLayer]) != bytesOf(e.layers[layer]) || e.running {
		panic(fmt.Sprintf("gpu: expert %d of layer %d cannot take the place of expert %d of layer %d", expert, layer, old, oldLayer))
	}
	delete(e.slots, was)
	for _, n := range e.layers[oldLayer].Parts() {
		e.payload -= n
	}
	e.holes = append(e.holes, at)
	return e.Upload(layer, expert, parts)
}

// place finds room for an expert, in a new arena if need be.
func (e *Experts) place(n int64) (uint64, error) {
	if last := len(e.holes) - 1; last >= 0 { // Replace has made it, and it fits
		at := e.holes[last]
		e.holes = e.holes[:last]
		return at, nil
	}
	if len(e.arenas) == 0 || e.used+n > e.arenas[len(e.arenas)-1].size {
		b, err := e.d.buffer(max(arenaBytes, n))
		if err != nil {
			return 0, err
		}
		e.arenas, e.used = append(e.arenas, b), 0
	}
	at := e.arenas[len(e.arenas)-1].at + uint64(e.used)
	e.used += n
	return at, nil
}

// write copies a matrix of type t to the device's memory on the stream of copies,
// and makes planes of it there.
func (e *Experts) write(to uint64, t quant.Type, data []byte) error {
	_, block := t.Block()
	planes := planesOf(t)
	blocks := int64(len(data) / block)
	for done := int64(0); done < blocks; {
		st, err := e.room()
		if err != nil {
			return err
		}
		n := min(blocks-done, (stagingSize-st.filled)/int64(block))
		if n == 0 {
			if err := e.sent(); err != nil {
				return err
			}
			continue
		}
		from, size := st.filled, n*int64(block)
		copy(st.host.host[from:], data[done*int64(block):(done+n)*int64(block)])
		st.filled = min(stagingSize, (from+size+255)&^255)
		target := to + uint64(done*int64(block))
		if planes != nil {
			target = st.blocks.at + uint64(from)
		}
		if err := e.d.check("copy to the device", e.d.dr.f.copyIn.call(uintptr(target), uintptr(unsafe.Pointer(&st.host.host[from])), uintptr(size), e.d.copies)); err != nil {
			return err
		}
		var at int64
		for _, f := range planes {
			at = even(at)
			if err := e.plane(to+uint64(at+done*int64(f.size)), target, n, block, f); err != nil {
				return err
			}
			at += blocks * int64(f.size)
		}
		done += n
	}
	return nil
}

// plane starts the kernel that gathers a field of n blocks.
func (e *Experts) plane(to, from uint64, n int64, block int, f field) error {
	k, err := e.d.kernel("", "planes")
	if err != nil {
		return err
	}
	p := planesParams{from: from, to: to, bytes: uint64(n) * uint64(f.size), block: uint32(block), offset: uint32(f.offset), size: uint32(f.size)}
	return launch(e.d, e.d.copies, k, [3]int{int(min(1024, (p.bytes+255)/256)), 1, 1}, 256, p)
}

// room gives the stage whose turn it is, when its last copy is done.
func (e *Experts) room() (*stage, error) {
	st := &e.staging[e.turn]
	if st.filled == 0 && st.busy {
		st.busy = false
		if err := e.d.check("event synchronize", e.d.dr.f.waitEvent.call(st.free)); err != nil {
			return nil, err
		}
	}
	return st, nil
}

// sent ends what was put into a stage: the other has its turn, and a group that is
// started later waits on the device for what was copied.
func (e *Experts) sent() error {
	st := &e.staging[e.turn]
	if st.filled == 0 {
		return nil
	}
	for _, event := range []uintptr{st.free, e.copied} {
		if err := e.d.check("event", e.d.dr.f.record.call(event, e.d.copies)); err != nil {
			return err
		}
	}
	st.filled, st.busy, e.fresh = 0, true, true
	e.turn = 1 - e.turn
	return nil
}

// Settle waits until all that was uploaded is in the device's memory.
func (e *Experts) Settle() error {
	if e.d.lost != nil {
		return e.d.lost
	}
	defer e.d.enter()()
	start := time.Now()
	defer func() { e.nanos += time.Since(start).Nanoseconds() }()
	return e.d.check("stream synchronize", e.d.dr.f.waitStream.call(e.d.copies))
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
	var size int64
	for _, part := range bias {
		size += even(4 * int64(len(part)))
	}
	b, err := e.d.buffer(size)
	if err != nil {
		return nil, err
	}
	e.arenas = append([]*buffer{b}, e.arenas...) // before the last, where experts are placed
	at, places := b.at, new([3]uint64)
	for i, part := range bias {
		if err := e.write(at, quant.F32, unsafe.Slice((*byte)(unsafe.Pointer(&part[0])), 4*len(part))); err != nil {
			return nil, err
		}
		places[i] = at
		at += uint64(even(4 * int64(len(part))))
	}
	if err := e.sent(); err != nil {
		return nil, err
	}
	e.biases[layer] = places
	return places, nil
}

// Start computes a group of experts of one layer: see backends.Holder. What it
// panics at is the caller's bug.
func (e *Experts) Start(layer int, jobs []backends.HeldJob, k, n int, act backends.Activation, bias *[3][]float32) error {
	d, l := e.d, e.layers[layer]
	if e.running {
		panic("gpu: Start before the Finish of another group")
	}
	if len(jobs) > mostJob || n > e.most {
		panic(fmt.Sprintf("gpu: a group of %d experts for %d positions: at most %d and %d", len(jobs), n, mostJob, e.most))
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
		panic(fmt.Sprintf("gpu: a group of %d rows, at most %d", rows, e.k*e.most))
	}
	if d.lost != nil {
		return d.lost
	}
	defer d.enter()()
	b, err := e.bias(layer, bias)
	if err != nil {
		return err
	}
	e.describe(layer, jobs, k, rows, b)
	if e.fresh {
		e.fresh = false
		if err := d.check("stream wait", d.dr.f.streamWaits.call(d.kernels, e.copied, 0)); err != nil {
			return err
		}
	}
	if n == 1 && rows == len(jobs) {
		err = e.replay(program{l, act, len(jobs)})
	} else {
		err = e.group(l, act, len(jobs), longest, n, rows)
	}
	if err != nil {
		return err
	}
	e.running, e.rows = true, rows*l.Dim
	return nil
}

// describe writes the jobs and the index of a group into the control block.
func (e *Experts) describe(layer int, jobs []backends.HeldJob, k, rows int, b *[3]uint64) {
	l, s, dev := e.layers[layer], e.scratch(), e.onDevice.at
	up := uint64(matrixBytes(l.Types[0], l.FF, l.Dim))
	down := up + uint64(matrixBytes(l.Types[1], l.FF, l.Dim))
	list := slice[rowsJob](e.control, jobsAt, 3*mostJob)
	index := slice[uint32](e.control, indexAt, 4*rows)
	*at[uint32](e.control, topAt) = 0
	base := 0
	for j := range jobs {
		w, ok := e.slots[slotKey{layer, int(jobs[j].Expert)}]
		if !ok {
			panic(fmt.Sprintf("gpu: expert %d of layer %d is not on the device", jobs[j].Expert, layer))
		}
		of := func(i, rows int) uint64 {
			if b[i] == 0 {
				return 0
			}
			return b[i] + 4*uint64(jobs[j].Expert)*uint64(rows)
		}
		m, to := uint32(len(jobs[j].Rows)), uint64(4*base*l.FF)
		list[j] = rowsJob{w: w, bias: of(0, l.FF), y: dev + uint64(s.gate) + to, first: uint32(2 * base), n: m, stride: uint32(l.FF)}
		list[len(jobs)+j] = rowsJob{w: w + up, bias: of(1, l.FF), y: dev + uint64(s.up) + to, first: uint32(2 * base), n: m, stride: uint32(l.FF)}
		list[2*len(jobs)+j] = rowsJob{w: w + down, bias: of(2, l.Dim), y: dev + uint64(s.out), first: uint32(2*rows + 2*base), n: m, stride: uint32(l.Dim)}
		for p, r := range jobs[j].Rows {
			index[2*(base+p)], index[2*(base+p)+1] = uint32(int(r)/k), uint32(p)
			index[2*(rows+base+p)], index[2*(rows+base+p)+1] = uint32(base+p), uint32(base+p)
		}
		base += int(m)
	}
}

// group starts the steps of a group that describe has described.
func (e *Experts) group(l backends.HeldLayer, act backends.Activation, jobs, longest, n, rows int) error {
	d, f := e.d, &e.d.dr.f
	s, dev, top := e.scratch(), e.onDevice.at, e.control.at+topAt
	k, err := d.kernel("", "fetch")
	if err != nil {
		return err
	}
	x := dev + uint64(s.x)
	fetch := fetchParams{from: [2]uint64{e.control.at, e.in.at}, to: [2]uint64{dev, x}, words: [2]uint32{uint32(indexAt+16*rows) / 4, uint32(n * l.Dim)}}
	if err := launch(d, d.kernels, k, [3]int{int(fetch.words[0]+fetch.words[1]+255) / 256, 1, 1}, 256, fetch); err != nil {
		return err
	}
	xA, xB, hidden := formAt(dev+uint64(s.xA), n*l.Dim), formAt(dev+uint64(s.xB), n*l.Dim), formAt(dev+uint64(s.hidden), rows*l.FF)
	if err := d.quantize(l.Types[0], xA, x, 0, top, n*l.Dim, 0); err != nil {
		return err
	}
	if alike(l.Types[0], l.Types[1]) {
		xB = xA
	} else if err := d.quantize(l.Types[1], xB, x, 0, top, n*l.Dim, 0); err != nil {
		return err
	}
	size := uint64(unsafe.Sizeof(rowsJob{}))
	of := func(first int, x form, rows, cols int) rowsParams {
		return rowsParams{jobs: dev + jobsAt + uint64(first)*size, index: dev + uint64(indexAt), code: x.code, scale: x.scale, sum: x.sum, rows: uint32(rows), cols: uint32(cols)}
	}
	gates := jobs
	if l.Types[0] == l.Types[1] {
		gates *= 2 // gate and up in one launch
	}
	if err := d.multiply(l.Types[0], of(0, xA, l.FF, l.Dim), gates, longest); err != nil {
		return err
	}
	if gates == jobs {
		if err := d.multiply(l.Types[1], of(jobs, xB, l.FF, l.Dim), jobs, longest); err != nil {
			return err
		}
	}
	if err := d.quantize(l.Types[2], hidden, dev+uint64(s.gate), dev+uint64(s.up), top, rows*l.FF, gateOf(act)); err != nil {
		return err
	}
	if err := d.multiply(l.Types[2], of(2*jobs, hidden, l.Dim, l.FF), jobs, longest); err != nil {
		return err
	}
	return d.check("copy from the device", f.copyOut.call(uintptr(unsafe.Pointer(&e.out.host[0])), uintptr(dev+uint64(s.out)), uintptr(4*rows*l.Dim), d.kernels))
}

// replay launches a group of single vectors as a graph, recorded once.
func (e *Experts) replay(p program) error {
	d, f, w := e.d, &e.d.dr.f, e.d.dr.words
	g, ok := e.programs[p]
	if !ok {
		// Kernels are loaded before, as nothing may be loaded while a stream records.
		if _, err := d.kernel("", "fetch"); err != nil {
			return err
		}
		for _, t := range p.layer.Types {
			if _, _, _, err := d.rows(t, 1); err != nil {
				return err
			}
		}
		const ofThisThread = 1
		if err := d.check("begin of recording", f.beginCapture.call(d.kernels, ofThisThread)); err != nil {
			return err
		}
		w.out[0] = 0
		failed := e.group(p.layer, p.act, p.jobs, 1, 1, p.jobs)
		err := d.check("end of recording", f.endCapture.call(d.kernels, addr(&w.out[0])))
		g.graph = uintptr(w.out[0])
		if err = errors.Join(failed, err); err != nil {
			if g.graph != 0 {
				f.endGraph.call(g.graph)
			}
			return err
		}
		if err := d.check("graph", f.instantiate.call(addr(&w.out[0]), g.graph, 0, 0, 0)); err != nil {
			f.endGraph.call(g.graph)
			return err
		}
		g.exec = uintptr(w.out[0])
		e.programs[p] = g
		d.recorded++
	}
	d.launches++
	return d.check("launch of a graph", f.launchGraph.call(g.exec, d.kernels))
}

// Finish waits for the group and gives its outputs, a vector for each row of
// each job, in their order. They are good until the next Start.
func (e *Experts) Finish() ([]float32, error) {
	if !e.running {
		return nil, nil
	}
	e.running = false
	if e.d.lost != nil {
		return nil, e.d.lost
	}
	defer e.d.enter()()
	if err := e.d.check("stream synchronize", e.d.dr.f.waitStream.call(e.d.kernels)); err != nil {
		return nil, err
	}
	if *at[uint32](e.control, topAt) != 0 {
		return nil, &backends.ActivationError{Step: "ExpertGroup"}
	}
	return slice[float32](e.out, 0, e.rows), nil
}

// Usage asks the driver too.
func (e *Experts) Usage() backends.HeldUsage {
	u := backends.HeldUsage{Experts: int64(len(e.slots)), Payload: e.payload, Driver: -1, UploadBytes: e.uploaded, UploadNanos: e.nanos, Recorded: e.d.recorded}
	for b := range e.d.buffers {
		if b.host == nil {
			u.Allocated += b.size
		}
	}
	if free, err := e.d.Free(); err == nil {
		u.Driver = e.d.Memory - free - e.d.before
	}
	return u
}

// Pinned are the bytes of host memory that are pinned, those that were asked for,
// and how many of the buffers could not be.
func (e *Experts) Pinned() (pinned, asked, failures int64) {
	for b := range e.d.buffers {
		if b.host != nil {
			asked += b.size
			if b.pinned {
				pinned += b.size
			}
		}
	}
	return pinned, asked, e.d.unpinned
}

// Close frees the experts' memory.
func (e *Experts) Close() error {
	d, f := e.d, &e.d.dr.f
	defer d.enter()()
	var err error
	if d.lost == nil {
		err = errors.Join(d.check("stream synchronize", f.waitStream.call(d.kernels)), d.check("stream synchronize", f.waitStream.call(d.copies)))
	}
	for _, g := range e.programs {
		f.endProgram.call(g.exec)
		f.endGraph.call(g.graph)
	}
	for i := range e.staging {
		st := &e.staging[i]
		d.drop(st.host)
		d.drop(st.blocks)
		if st.free != 0 {
			f.endEvent.call(st.free)
		}
	}
	if e.copied != 0 {
		f.endEvent.call(e.copied)
	}
	for _, b := range append(e.arenas, e.control, e.onDevice, e.in, e.out) {
		d.drop(b)
	}
	e.arenas, e.programs, e.running = nil, nil, false
	return err
}
