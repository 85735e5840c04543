package gpu

import (
	"errors"
	"unsafe"

	"sluice/backends"
	"sluice/backends/dense"
	"sluice/backends/held"
	"sluice/internal/quant"
)

// experts are what CUDA and HIP do for held.Experts.
//
// Matrices whose blocks are not aligned lie in the device's memory as planes: all
// codes, behind them all scales. The device makes planes of what is uploaded.
type experts struct {
	*held.Experts
	d      *Device
	arenas []*buffer // of Alloc

	lent    []lending // memory of the host that needs no staging
	wait    bool      // for what Send sends, as some of it lies there
	staging [2]stage  // by turns
	turn    int
	copied  uintptr // event: after the last upload
	fresh   bool    // kernels have not waited for it yet

	control  *buffer // host: jobs, index; copied to the device first
	onDevice *buffer // that copy, then the scratch
	counts   *buffer // of groups in one launch
	in, out  *buffer // host
	programs map[program]graph
	wholes   map[backends.HeldLayer]*whole // kernels of groups in one launch, where these were looked for
	unequal  int64                         // of them, those that were wrong
	links    map[*Device]*link             // from devices whose vectors were taken
	fail     dense.Failure                 // of the device's backend, whose vector was taken; the zero value: of none
	stays    bool                          // the outputs of the last group are on the device alone
	launched int64                         // waits of the device before that group
}

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
	taken bool          // the input is there
	fail  dense.Failure // the outputs stay on the device, and what is out of range is left there; the zero value: neither
}

type graph struct{ graph, exec uintptr }

const (
	// The head of the control block: one word of the host that kernels set, an
	// activation out of range.
	topAt = 0
	head  = 4

	stagingSize = 32 << 20
)

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
	e = &experts{d: d, programs: map[program]graph{}, wholes: map[backends.HeldLayer]*whole{}, links: map[*Device]*link{}}
	if e.Experts, err = held.New(e, held.Options{Name: d.dr.API.String(), Types: types, Head: head, X: true}, layers, k, most); err != nil {
		return nil, err
	}
	ff := 0
	for _, l := range layers {
		ff = max(ff, l.FF)
	}
	if err := e.allocate(ff); err != nil {
		e.Close()
		return nil, err
	}
	e.Attach(held.Memory{Control: e.control.host, Input: e.in.host, At: e.onDevice.at})
	return e, nil
}

func (e *experts) allocate(ff int) (err error) {
	d, p := e.d, &e.Places
	defer d.enter()()
	if e.onDevice, err = d.buffer(p.Size); err != nil {
		return err
	}
	for _, b := range []struct {
		at   **buffer
		size int64
	}{{&e.control, p.Control}, {&e.in, p.Input}, {&e.out, p.Output}} {
		if *b.at, err = d.hostBuffer(max(b.size, held.Align)); err != nil { // of no experts nothing
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
	return e.newCounts(ff)
}

// event makes an event without a time.
func (d *Device) event() (uintptr, error) {
	const noTiming = 2
	w := d.dr.words
	err := d.check("event", d.dr.f.event.call(addr(&w.out[0]), noTiming))
	return uintptr(w.out[0]), err
}

// MatrixBytes is held.Device's, as what follows is.
func (e *experts) MatrixBytes(t quant.Type, rows, cols int) int64 { return matrixBytes(t, rows, cols) }

func (e *experts) Alloc(size int64) (uint64, error) {
	b, err := e.d.buffer(size)
	if err != nil {
		return 0, err
	}
	e.arenas = append(e.arenas, b)
	return b.at, nil
}

// Write copies on the stream of copies, and makes planes there.
func (e *experts) Write(to uint64, t quant.Type, data []byte, lent int) error {
	if e.d.lost != nil {
		return e.d.lost
	}
	defer e.d.enter()()
	_, block := t.Block()
	blocks := int64(len(data) / block)
	e.wait = e.wait || lent >= 0
	for done := int64(0); done < blocks; {
		st, err := e.room()
		if err != nil {
			return err
		}
		n := min(blocks-done, (stagingSize-st.filled)/int64(block))
		if n == 0 {
			if err := e.Send(); err != nil {
				return err
			}
			continue
		}
		from, size := st.filled, n*int64(block)
		source := &data[done*int64(block)]
		if lent < 0 {
			copy(st.host.host[from:], data[done*int64(block):(done+n)*int64(block)])
			source = &st.host.host[from]
		}
		st.filled = min(stagingSize, (from+size+255)&^255)
		if err := e.d.bring(e.d.copies, to, t, span{done, n, blocks}, source, st.blocks.at+uint64(from)); err != nil {
			return err
		}
		done += n
	}
	return nil
}

// room gives the stage whose turn it is, when its last copy is done.
func (e *experts) room() (*stage, error) {
	st := &e.staging[e.turn]
	if st.filled == 0 && st.busy {
		st.busy = false
		if err := e.d.check("event synchronize", e.d.dr.f.waitEvent.call(st.free)); err != nil {
			return nil, err
		}
	}
	return st, nil
}

// Send ends what was put into a stage: the other has its turn, and a group that is
// started later waits on the device for what was copied.
func (e *experts) Send() error {
	st := &e.staging[e.turn]
	if st.filled == 0 {
		return nil
	}
	defer e.d.enter()()
	for _, event := range []uintptr{st.free, e.copied} {
		if err := e.d.check("event", e.d.dr.f.record.call(event, e.d.copies)); err != nil {
			return err
		}
	}
	st.filled, st.busy, e.fresh = 0, true, true
	e.turn = 1 - e.turn
	if e.wait {
		e.wait = false
		return e.d.check("event synchronize", e.d.dr.f.waitEvent.call(st.free))
	}
	return nil
}

func (e *experts) Wait() error {
	if e.d.lost != nil {
		return e.d.lost
	}
	defer e.d.enter()()
	return e.d.check("stream synchronize", e.d.dr.f.waitStream.call(e.d.copies))
}

func (e *experts) Launch(g *held.Group) error {
	d := e.d
	if d.lost != nil {
		return d.lost
	}
	defer d.enter()()
	*at[uint32](e.control, topAt) = 0
	p := program{layer: g.Layer, act: g.Act, jobs: g.Jobs, taken: g.Taken}
	if g.Taken {
		p.fail = e.fail
	}
	e.stays, e.launched = p.fail.At != 0, d.waits
	if e.fresh {
		e.fresh = false
		if err := d.check("stream wait", d.dr.f.streamWaits.call(d.kernels, e.copied, 0)); err != nil {
			return err
		}
	}
	if g.Single() {
		return e.single(p)
	}
	return e.group(p, g.Longest, g.N, g.Rows)
}

// single starts a group of single vectors, which the control block describes.
func (e *experts) single(p program) error {
	w, err := e.whole(p.layer)
	switch {
	case err != nil:
		return err
	case w.kernels == nil:
		return e.replay(p)
	case !w.proven:
		return e.prove(p, w)
	}
	return e.launchWhole(p, w.kernels)
}

// Fetch is held.Fetcher's: x may lie on this device or on another of its driver. The
// copy is between what was launched before and the next group.
func (e *experts) Fetch(x backends.Vec) (bool, error) {
	e.fail = dense.Failure{}
	v, ok := x.(dense.Vec)
	if !ok {
		return false, nil
	}
	driver, from := v.Lies()
	s, ok := driver.(*denseDriver)
	if !ok || s.d.dr != e.d.dr {
		return false, nil
	}
	if e.d.lost != nil {
		return false, e.d.lost
	}
	to, n := e.onDevice.at+uint64(e.Places.X), 4*int64(x.Len())*int64(x.Dim())
	if s.d == e.d {
		e.fail = v.Failure()
		defer e.d.enter()()
		return true, e.d.check("copy", e.d.dr.f.copyWithin.call(uintptr(to), uintptr(from), uintptr(n), e.d.kernels))
	}
	l := e.links[s.d]
	if l == nil {
		var err error
		if l, err = newLink(s.d, e.d, e.Places.Input); err != nil {
			return false, err
		}
		e.links[s.d] = l
	}
	return true, l.copy(to, from, n)
}

// Hand is held.Fetcher's: the outputs go from the scratch to the vector, on the device.
func (e *experts) Hand(out backends.Vec, rows []int32, from uint64) (bool, error) {
	v, ok := out.(dense.Vec)
	if !ok || !e.stays {
		return false, nil
	}
	if driver, _ := v.Lies(); driver.(*denseDriver).d != e.d {
		return false, nil
	}
	v.Place(rows, from)
	return true, e.d.lost
}

// Drain is held.Fetcher's: whoever has waited for the stream has waited for the group.
func (e *experts) Drain() error {
	if e.d.lost != nil || e.launched != e.d.waits {
		return e.d.lost
	}
	defer e.d.enter()()
	return e.d.waitKernels()
}

// group starts the steps of a group that describe has described: what does not depend
// on its rows is p.
func (e *experts) group(p program, longest, n, rows int) error {
	d := e.d
	l, act, jobs := p.layer, p.act, p.jobs
	s, dev, top, step := &e.Places, e.onDevice.at, e.control.at+topAt, uint32(1)
	if p.fail.At != 0 {
		top, step = p.fail.At, p.fail.Step
	}
	k, err := d.kernel("", "fetch")
	if err != nil {
		return err
	}
	x := dev + uint64(s.X)
	fetch := fetchParams{from: [2]uint64{e.control.at, e.in.at}, to: [2]uint64{dev, x}, words: [2]uint32{uint32(s.Index+held.IndexBytes(rows)) / 4, uint32(n * l.Dim)}}
	if p.taken {
		fetch.words[1] = 0
	}
	if err := launch(d, d.kernels, k, [3]int{int(fetch.words[0]+fetch.words[1]+255) / 256, 1, 1}, 256, fetch); err != nil {
		return err
	}
	xA, xB, hidden := formAt(dev+uint64(s.XA), n*l.Dim), formAt(dev+uint64(s.XB), n*l.Dim), formAt(dev+uint64(s.Hidden), rows*l.FF)
	if err := d.quantize(l.Types[0], xA, x, 0, top, n*l.Dim, 0, step); err != nil {
		return err
	}
	if alike(l.Types[0], l.Types[1]) {
		xB = xA
	} else if err := d.quantize(l.Types[1], xB, x, 0, top, n*l.Dim, 0, step); err != nil {
		return err
	}
	size := uint64(unsafe.Sizeof(rowsJob{}))
	of := func(first int, x form, rows, cols int) rowsParams {
		return rowsParams{jobs: dev + uint64(s.Jobs) + uint64(first)*size, index: dev + uint64(s.Index), code: x.Code, scale: x.Scale, sum: x.Sum, rows: uint32(rows), cols: uint32(cols)}
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
	if err := d.quantize(l.Types[2], hidden, dev+uint64(s.Gate), dev+uint64(s.Up), top, rows*l.FF, gateOf(act), step); err != nil {
		return err
	}
	if err := d.multiply(l.Types[2], of(2*jobs, hidden, l.Dim, l.FF), jobs, longest); err != nil {
		return err
	}
	if p.fail.At != 0 {
		return nil
	}
	return e.copyOut(rows * l.Dim)
}

// replay launches a group of single vectors as a graph, recorded once.
func (e *experts) replay(p program) error {
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
		failed := e.group(p, 1, 1, p.jobs)
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

// copyOut starts the copy of a group's outputs to the host.
func (e *experts) copyOut(floats int) error {
	return e.d.check("copy from the device", e.d.dr.f.copyOut.call(uintptr(unsafe.Pointer(&e.out.host[0])), uintptr(e.onDevice.at+uint64(e.Places.Out)), uintptr(4*floats), e.d.kernels))
}

func (e *experts) Collect(floats int) ([]float32, error) {
	if e.d.lost != nil {
		return nil, e.d.lost
	}
	defer e.d.enter()()
	out, err := e.outputs(floats)
	if err == nil && e.outOfRange() {
		err = &backends.ActivationError{Step: "ExpertGroup"}
	}
	return out, err
}

func (e *experts) Memory() backends.HeldUsage {
	u := backends.HeldUsage{Driver: -1, Recorded: e.d.recorded, Launches: e.d.launches, Unpinned: e.d.unpinned, Unequal: e.unequal}
	for _, l := range e.lent {
		if l.own {
			u.Pinned += pinned(int64(len(l.mem)))
			u.PinAsked += int64(len(l.mem))
		}
	}
	for b := range e.d.buffers {
		switch {
		case b.host == nil:
			u.Allocated += b.size
		case b.pinned:
			u.Pinned += b.size
			fallthrough
		default:
			u.PinAsked += b.size
		}
	}
	if free, err := e.d.Free(); err == nil {
		u.Driver = e.d.Memory - free - e.d.before
	}
	return u
}

func (e *experts) Free() error {
	d, f := e.d, &e.d.dr.f
	var err error
	for _, l := range e.links {
		err = errors.Join(err, l.close())
	}
	e.links = nil
	defer d.enter()()
	if d.lost == nil {
		err = errors.Join(err, d.check("stream synchronize", f.waitStream.call(d.kernels)), d.check("stream synchronize", f.waitStream.call(d.copies)))
	}
	err = errors.Join(err, e.Return())
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
	for _, b := range append(e.arenas, e.control, e.onDevice, e.counts, e.in, e.out) {
		d.drop(b)
	}
	e.arenas, e.programs = nil, nil
	return err
}
