package vulkan

import (
	"errors"
	"fmt"
	"unsafe"

	"sluice/backends"
	"sluice/backends/dense"
	"sluice/backends/held"
	"sluice/internal/quant"
)

// A denseDriver implements dense.Driver. Launches are recorded, and handed to the
// queue of kernels together: when somebody waits, or when there is no room for more.
type denseDriver struct {
	d         *Device
	name      string
	regions   []*region
	shared    []*buffer
	pipelines map[string]uint64 // of the kernels of Launch
	stage     *buffer           // host memory that uploads pass through
	upload    *commands

	batches  [batches]batch // by turns
	turn     int
	params   *buffer // of all launches of all batches, as the host writes them
	onDevice *buffer // that copy which kernels read; params itself where the host writes the device's memory
	last     point   // of the last batch that was handed over
	form     held.Form
	beside   bool // the launch before multiplies by form, and nothing else is recorded behind it
}

// A batch is launches that are recorded one behind the other.
type batch struct {
	c    *commands
	open bool  // there are launches, not handed over yet
	used int   // of its slots
	done point // when its memory may be used again
}

// A region is an allocation, from which Alloc takes pieces.
type region struct {
	*buffer
	used uint64
}

const (
	batches = 8
	// batchSlots is so small that the device computes the first launches of a layer
	// while others are recorded: 103 tok/s in place of 99 with 64, on an H200.
	batchSlots = 16
	slotSize   = 256 // of the parameters of a launch
	batchBytes = batchSlots * slotSize

	// regionBytes are taken at a time: drivers have a limited number of allocations.
	// What takes ownBytes has one of its own.
	regionBytes = 32 << 20
	ownBytes    = 4 << 20
	// denseStage is the bytes of an upload at a time.
	denseStage = 4 << 20
)

// NewDense makes a backend whose vectors and dense weights are on the device, which
// has a name, beside one of the host, which it closes. The device is the caller's.
func (d *Device) NewDense(name string, host backends.Backend, o dense.Options) (*dense.Backend, error) {
	s, err := d.newDense(name)
	if err != nil {
		return nil, errors.Join(err, host.Close())
	}
	return dense.New(s, host, o)
}

func (d *Device) newDense(name string) (s *denseDriver, err error) {
	s = &denseDriver{d: d, name: name, pipelines: map[string]uint64{}}
	if s.onDevice, err = d.buffer(weights, batches*batchBytes); err == nil {
		if s.params = s.onDevice; s.params.host == nil {
			s.params, err = d.buffer(up, batches*batchBytes)
		}
	}
	if err == nil {
		s.stage, err = d.buffer(up, denseStage+held.Align)
	}
	for i := range s.batches {
		if err == nil {
			s.batches[i].c, err = d.kernels.commands()
		}
	}
	if err == nil {
		s.upload, err = d.kernels.commands()
	}
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (s *denseDriver) Name() string            { return s.name }
func (s *denseDriver) Knows(t quant.Type) bool { return Supports(t) }

func (s *denseDriver) MatrixBytes(t quant.Type, rows, cols int) int64 {
	return matrixBytes(t, rows, cols)
}

func (s *denseDriver) Alloc(size int64) (uint64, error) {
	if s.d.lost != nil {
		return 0, s.d.lost
	}
	n := uint64(size+held.Align-1) &^ (held.Align - 1)
	for _, r := range s.regions {
		if r.used+n <= r.size {
			return r.take(n), nil
		}
	}
	all := n
	if n < ownBytes {
		all = regionBytes
	}
	b, err := s.d.buffer(weights, int64(all))
	if err != nil {
		return 0, err
	}
	r := &region{buffer: b}
	s.regions = append(s.regions, r)
	return r.take(n), nil
}

func (r *region) take(n uint64) uint64 {
	at := r.at + r.used
	r.used += n
	return at
}

func (s *denseDriver) Share(size int64) (uint64, []byte, error) {
	b, err := s.d.buffer(down, size)
	if err != nil {
		return 0, nil, err
	}
	s.shared = append(s.shared, b)
	return b.at, b.host, nil
}

// Upload waits for all that was launched, which may read what is there.
func (s *denseDriver) Upload(at uint64, t quant.Type, data []byte) error {
	if err := s.Wait(); err != nil {
		return err
	}
	blocks := t.Kind() != quant.Float
	var to *region
	for _, r := range s.regions {
		if at >= r.at && at < r.at+r.size {
			to = r
		}
	}
	if to.host != nil && !blocks {
		copy(to.host[at-to.at:], data)
		return nil
	}
	for offset := 0; offset < len(data); {
		n := copy(s.stage.host[:denseStage], data[offset:])
		c := s.upload
		c.begin()
		if blocks {
			_, block := t.Block()
			if offset+n < len(data) {
				n -= n % (planesBlocks * block)
			}
			k, p := planes(t, s.stage.at, at, offset, n, len(data))
			*(*planesParams)(unsafe.Pointer(&s.stage.host[denseStage])) = p
			c.run(k, s.stage, denseStage, p.groups[0], 1, 1)
		} else {
			c.copy(to.buffer, at-to.at+uint64(offset), s.stage, 0, uint64(n))
		}
		c.barrier()
		if err := c.end(); err != nil {
			return err
		}
		p, err := c.submit()
		if err != nil {
			return err
		}
		if err := s.d.waitFor(p); err != nil {
			return err
		}
		offset += n
	}
	return nil
}

func (s *denseDriver) Launch(kernel string, groups [3]int, params []byte) error {
	p, ok := s.pipelines[kernel]
	if !ok {
		var err error
		if p, err = s.d.pipeline(named(kernel)); err != nil {
			return err
		}
		s.pipelines[kernel] = p
	}
	mem, at, err := s.slot()
	if err != nil {
		return err
	}
	copy(mem, params)
	// Only kernels with one number for a group have so many, and count x and y as one.
	if most := int(s.d.groupCount); groups[0] > most && groups[1] == 1 && groups[2] == 1 {
		groups[0], groups[1] = most, (groups[0]+most-1)/most
	}
	return s.launch(p, at, groups)
}

// named is a kernel of Launch.
func named(name string) kernel { return kernel{shader: "dense_" + name} }

// slot is where the parameters of the next launch belong, by the host's view and by
// the device's.
func (s *denseDriver) slot() (mem []byte, at uint64, err error) {
	if s.d.lost != nil {
		return nil, 0, s.d.lost
	}
	b := &s.batches[s.turn]
	if b.open && b.used == batchSlots {
		if err := s.flush(); err != nil {
			return nil, 0, err
		}
		b = &s.batches[s.turn]
	}
	first := uint64(s.turn) * batchBytes
	if !b.open {
		if err := s.d.waitFor(b.done); err != nil {
			return nil, 0, err
		}
		b.open, b.used = true, 0
		b.c.begin()
		if s.params != s.onDevice {
			b.c.copy(s.onDevice, first, s.params, first, batchBytes)
		}
		b.c.wrote = stageCompute | stageTransfer // what was handed over before may be under way
	}
	offset := first + uint64(b.used)*slotSize
	b.used++
	return s.params.host[offset : offset+slotSize], s.onDevice.at + offset, nil
}

// launch records a kernel behind all before it.
func (s *denseDriver) launch(pipeline, params uint64, groups [3]int) error {
	c := s.batches[s.turn].c
	c.before(stageCompute, accessShaderRead|accessShaderWrite)
	s.beside = false
	return s.start(pipeline, params, groups)
}

// start records a kernel beside those before it.
func (s *denseDriver) start(pipeline, params uint64, groups [3]int) error {
	c := s.batches[s.turn].c
	if c.err != nil {
		return c.err
	}
	var n [3]uint32
	for i, g := range groups {
		most := 65535 // which every device takes
		if i == 0 {
			most = int(s.d.groupCount)
		}
		if n[i] = uint32(g); g > most {
			return fmt.Errorf("vulkan: %s starts %d groups of threads at most, and a step wants %d: lower --chunk or --ctx, or leave --gpu-dense out", s.d.Name, most, g)
		}
	}
	c.dispatch(pipeline, params, nil, n)
	return nil
}

// flush hands what is recorded to the queue.
func (s *denseDriver) flush() error {
	b := &s.batches[s.turn]
	if !b.open {
		return nil
	}
	b.open, s.beside = false, false
	s.turn = (s.turn + 1) % batches
	if err := b.c.end(); err != nil {
		return err
	}
	var err error
	b.done, err = b.c.submit()
	s.last = b.done
	return err
}

func (s *denseDriver) Quantize(t quant.Type, to held.Form, x, u uint64, act backends.Activation, floats int, fail dense.Failure) error {
	k := quantizer(t)
	if u != 0 {
		k = gatedQuantizer(t, act)
	}
	pipeline, err := s.d.pipeline(k)
	if err != nil {
		return err
	}
	mem, at, err := s.slot()
	if err != nil {
		return err
	}
	*(*quantizeParams)(unsafe.Pointer(&mem[0])) = form(to).quantize(x, u, fail, floats)
	return s.launch(pipeline, at, [3]int{(floats + 255) / 256, 1, 1})
}

// A multiplyParams are the parameters of rows of one job, with the job.
type multiplyParams struct {
	rowsParams
	_   uint64
	job rowsJob
}

// Multiply waits for the form that is multiplied, but not for another Multiply of
// the same.
func (s *denseDriver) Multiply(p *dense.Product) error {
	k := s.d.rows(p.Type, p.N)
	pipeline, err := s.d.pipeline(k.kernel)
	if err != nil {
		return err
	}
	mem, at, err := s.slot()
	if err != nil {
		return err
	}
	m := multiplyParams{
		rowsParams: form(p.In).rows(k, at+uint64(unsafe.Offsetof(multiplyParams{}.job)), 0, 1, p.N, p.Rows, p.Cols, p.Type),
		job:        rowsJob{W: p.W, Y: p.Y, Bias: p.Bias, First: uint32(p.First), N: uint32(p.N), Stride: uint32(p.Stride), Step: uint32(p.Step)},
	}
	*(*multiplyParams)(unsafe.Pointer(&mem[0])) = m
	groups := [3]int{int(m.groups[0]), int(m.groups[1]), int(m.groups[2])}
	if s.beside && s.form == p.In {
		return s.start(pipeline, at, groups)
	}
	err = s.launch(pipeline, at, groups)
	s.beside, s.form = err == nil, p.In
	return err
}

func (s *denseDriver) Wait() error {
	if s.d.lost != nil {
		return s.d.lost
	}
	if err := s.flush(); err != nil {
		return err
	}
	return s.d.waitFor(s.last)
}

func (s *denseDriver) Close() error {
	var err error
	if s.d.lost == nil {
		err = s.Wait()
	}
	for i := range s.batches {
		s.batches[i].c.free()
	}
	s.upload.free()
	for _, r := range s.regions {
		s.d.drop(r.buffer)
	}
	for _, b := range append(s.shared, s.stage, s.params, s.onDevice) {
		s.d.drop(b)
	}
	s.regions, s.shared = nil, nil
	if err != nil {
		return fmt.Errorf("%s: %w", s.name, err)
	}
	return nil
}
