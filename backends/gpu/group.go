package gpu

import (
	"fmt"
	"math"
	"slices"

	"sluice/backends"
	"sluice/backends/held"
	"sluice/shaders"
)

// This file starts groups of single vectors in one launch, by shaders/group.cu.

// groupParams is Group there.
type groupParams struct {
	x, xCode, xScale, xSum     uint64
	gate, up, code, scale, sum uint64
	y, top, counts             uint64
	step, act                  uint32
	dim, ff, experts, steps    uint32
	block, pair                uint32
	w, bias                    [3][held.MostJobs]uint64
}

// What steps may be: one, the other, or both.
const (
	untilHidden = 1 // x, gate and up
	fromHidden  = 2 // down
)

// newCounts makes the counts of groups of experts of that width at most, all 0.
func (e *experts) newCounts(ff int) (err error) {
	d := e.d
	if e.counts, err = d.buffer(4 * (128 + held.MostJobs*int64((ff+255)/256))); err != nil {
		return err
	}
	zeros := e.staging[0].host.host[:e.counts.size]
	clear(zeros)
	if err := d.put(e.counts.at, &zeros[0], e.counts.size, d.kernels); err != nil {
		return err
	}
	return d.waitKernels()
}

// A whole is the kernels that compute groups of single vectors of a layer in one launch,
// or in two where down is of another type. Without any they take the launches of group:
// on devices without products of bytes on tensor cores, or where no compiler is that
// knows what they need, or after their outputs were wrong.
type whole struct {
	kernels []function
	proven  bool // see prove
}

// whole gives those of a layer.
func (e *experts) whole(l backends.HeldLayer) (*whole, error) {
	w := e.wholes[l]
	if w == nil {
		w = &whole{kernels: e.findWhole(l)}
		e.wholes[l] = w
	}
	return w, e.d.lost
}

// prove computes a group both ways. Only where their outputs are the same, to the bit,
// is that group's layer, and those like it, computed in one launch from then on: what a
// warp may see of another's writes no known answer of one vector tells.
func (e *experts) prove(p program, w *whole) error {
	floats := p.jobs * p.layer.Dim
	if err := e.replay(p); err != nil {
		return err
	}
	out, err := e.outputs(floats)
	if err != nil || e.outOfRange() {
		return err // what is out of range has no outputs; the next group will do
	}
	want := slices.Clone(out)
	for i := range out {
		out[i] = -1e30 // or the right ones would be there already
	}
	if err := e.restore(floats); err != nil {
		return err
	}
	if err := e.launchWhole(p, w.kernels); err != nil {
		return err
	}
	if out, err = e.outputs(floats); err != nil {
		return err
	}
	same := func(a, b float32) bool { return math.Float32bits(a) == math.Float32bits(b) }
	if w.proven = slices.EqualFunc(out, want, same) && !e.outOfRange(); w.proven {
		return nil
	}
	w.kernels = nil
	e.unequal++
	copy(out, want)
	*at[uint32](e.control, topAt) = 0
	return e.restore(floats)
}

// outputs waits for a group, and gives the memory of the host where its outputs are.
func (e *experts) outputs(floats int) ([]float32, error) {
	if e.stays {
		if err := e.copyOut(floats); err != nil {
			return nil, err
		}
	}
	if err := e.d.waitKernels(); err != nil {
		return nil, err
	}
	return slice[float32](e.out, 0, floats), nil
}

// restore puts them back to where a group leaves them on the device.
func (e *experts) restore(floats int) error {
	if !e.stays {
		return nil
	}
	if err := e.d.put(e.onDevice.at+uint64(e.Places.Out), &e.out.host[0], 4*int64(floats), e.d.kernels); err != nil {
		return err
	}
	return e.d.waitKernels()
}

// outOfRange says that a group has met an activation out of range, as far as the host
// is told.
func (e *experts) outOfRange() bool { return *at[uint32](e.control, topAt) != 0 }

func (e *experts) findWhole(l backends.HeldLayer) (kernels []function) {
	d := e.d
	if d.dr.API != CUDA || d.capability < 80 || d.compiler.lib == 0 || l.Types[0] != l.Types[1] || l.Dim%64 != 0 || l.FF%64 != 0 {
		return nil
	}
	for i, t := range l.Types[1:] {
		if !slices.Contains(shaders.Groups, uint32(t)) {
			return nil
		}
		if i == 1 && t == l.Types[1] {
			break
		}
		f, err := d.kernel(fmt.Sprintf("group%d", uint32(t)), fmt.Sprintf("group_%d", uint32(t)))
		if err != nil {
			return nil
		}
		kernels = append(kernels, f)
	}
	return kernels
}

// launchWhole starts such a group, which the control block describes.
func (e *experts) launchWhole(p program, kernels []function) error {
	d, s, l, dev := e.d, &e.Places, p.layer, e.onDevice.at
	x, hidden := formAt(dev+uint64(s.XA), l.Dim), formAt(dev+uint64(s.Hidden), p.jobs*l.FF)
	g := groupParams{
		x: e.in.at, xCode: x.Code, xScale: x.Scale, xSum: x.Sum,
		gate: dev + uint64(s.Gate), up: dev + uint64(s.Up), code: hidden.Code, scale: hidden.Scale, sum: hidden.Sum,
		y: e.out.at, top: e.control.at + topAt, counts: e.counts.at,
		step: 1, act: gateOf(p.act),
		dim: uint32(l.Dim), ff: uint32(l.FF), experts: uint32(p.jobs), steps: untilHidden | fromHidden,
		block: uint32(l.Types[2].ActBlock()),
	}
	if pairs(l.Types[2]) {
		g.pair = 1
	}
	if p.taken {
		g.x = dev + uint64(s.X)
	}
	if p.fail.At != 0 {
		g.y, g.top, g.step = dev+uint64(s.Out), p.fail.At, p.fail.Step
	}
	for i, job := range slice[rowsJob](e.control, int(s.Jobs), 3*p.jobs) {
		g.w[i/p.jobs][i%p.jobs], g.bias[i/p.jobs][i%p.jobs] = job.W, job.Bias
	}
	for i, f := range kernels {
		if len(kernels) > 1 {
			g.steps = untilHidden << i
		}
		const fewest = 8 // rows that a warp takes
		blocks := p.jobs * (2*l.FF + l.Dim) / fewest / (threads / 32)
		if wave := d.units * f.resident; wave > 0 {
			blocks = min(blocks, wave)
		}
		if err := launch(d, d.kernels, f, [3]int{max(1, blocks), 1, 1}, threads, g); err != nil {
			return err
		}
	}
	return nil
}
