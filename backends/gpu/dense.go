package gpu

import (
	"errors"
	"fmt"

	"sluice/backends"
	"sluice/backends/dense"
	"sluice/backends/held"
	"sluice/internal/quant"
)

// groupThreads are the threads of a group of the kernels of shaders/dense.cu.
var groupThreads = map[string]int{
	"normalize": 256, "rope": 256, "store": 256, "attendScores": 256, "attendSoftmax": 256, "attendWeigh": 128, "attendSum": 256, "indexScores": 256, "choose": 256,
	"combine": 256, "each": 256, "runs": 256, "deltaInputs": 128, "deltaSteps": 256,
}

// A denseDriver implements dense.Driver.
type denseDriver struct {
	d       *Device
	name    string
	buffers []*buffer
	stage   *buffer // host memory that uploads pass through
	blocks  *buffer // where blocks lie that become planes
}

// denseStage is the bytes of an upload at a time.
const denseStage = 4 << 20

// NewDense makes a backend whose vectors and dense weights are on the device, which
// has a name, beside one of the host, which it closes. The device is the caller's.
func (d *Device) NewDense(name string, host backends.Backend, o dense.Options) (*dense.Backend, error) {
	s := &denseDriver{d: d, name: name}
	var err error
	if s.stage, err = d.hostBuffer(denseStage); err == nil {
		s.blocks, err = d.buffer(denseStage)
	}
	if err != nil {
		return nil, errors.Join(err, s.Close(), host.Close())
	}
	return dense.New(s, host, o)
}

func (s *denseDriver) Name() string            { return s.name }
func (s *denseDriver) Knows(t quant.Type) bool { return Supports(t) }

func (s *denseDriver) MatrixBytes(t quant.Type, rows, cols int) int64 {
	return matrixBytes(t, rows, cols)
}

func (s *denseDriver) Alloc(size int64) (uint64, error) {
	b, err := s.d.buffer(size)
	if err != nil {
		return 0, err
	}
	s.buffers = append(s.buffers, b)
	return b.at, nil
}

func (s *denseDriver) Share(size int64) (uint64, []byte, error) {
	b, err := s.d.hostBuffer(size)
	if err != nil {
		return 0, nil, err
	}
	s.buffers = append(s.buffers, b)
	return b.at, b.host, nil
}

// Upload copies by the stream of kernels: what was launched before may read what is
// there, and what is launched later reads what comes.
func (s *denseDriver) Upload(at uint64, t quant.Type, data []byte) error {
	d := s.d
	if d.lost != nil {
		return d.lost
	}
	defer d.enter()()
	_, block := t.Block()
	blocks := int64(len(data) / block)
	for done := int64(0); done < blocks; {
		n := min(blocks-done, denseStage/int64(block))
		copy(s.stage.host, data[done*int64(block):][:n*int64(block)])
		if err := d.bring(d.kernels, at, t, span{done, n, blocks}, &s.stage.host[0], s.blocks.at); err != nil {
			return err
		}
		if err := d.check("stream synchronize", d.dr.f.waitStream.call(d.kernels)); err != nil {
			return err
		}
		done += n
	}
	return nil
}

func (s *denseDriver) Launch(kernel string, groups [3]int, params []byte) error {
	d := s.d
	if d.lost != nil {
		return d.lost
	}
	f, err := d.kernel("dense", kernel)
	if err != nil {
		return err
	}
	defer d.enter()()
	w := d.dr.words
	copy(w.args[:], params)
	return d.launchArgs(d.kernels, f, groups, groupThreads[kernel])
}

func (s *denseDriver) Quantize(t quant.Type, to held.Form, x, u uint64, act backends.Activation, floats int, fail dense.Failure) error {
	if s.d.lost != nil {
		return s.d.lost
	}
	var gate uint32
	if u != 0 {
		gate = gateOf(act)
	}
	defer s.d.enter()()
	return s.d.quantize(t, to, x, u, fail.At, floats, gate, fail.Step)
}

func (s *denseDriver) Multiply(p *dense.Product) error {
	if s.d.lost != nil {
		return s.d.lost
	}
	defer s.d.enter()()
	return s.d.multiply(p.Type, rowsParams{code: p.In.Code, scale: p.In.Scale, sum: p.In.Sum, rows: uint32(p.Rows), cols: uint32(p.Cols),
		one: rowsJob{W: p.W, Y: p.Y, Bias: p.Bias, First: uint32(p.First), N: uint32(p.N), Stride: uint32(p.Stride), Step: uint32(p.Step)}}, 1, p.N)
}

func (s *denseDriver) Wait() error {
	if s.d.lost != nil {
		return s.d.lost
	}
	defer s.d.enter()()
	return s.d.waitKernels()
}

func (s *denseDriver) Close() error {
	var err error
	if s.d.lost == nil {
		err = s.Wait()
	}
	for _, b := range append(s.buffers, s.stage, s.blocks) {
		s.d.drop(b)
	}
	s.buffers = nil
	if err != nil {
		return fmt.Errorf("%s: %w", s.name, err)
	}
	return nil
}
