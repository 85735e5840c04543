package vulkan

import (
	"sluice/backends"
	"sluice/backends/dense"
)

// Fetch is held.Fetcher's: groups read x where it lies, if that is on this device.
func (e *experts) Fetch(x backends.Vec) (bool, error) {
	v, ok := x.(dense.Vec)
	if !ok {
		return false, nil
	}
	driver, at := v.Lies()
	s, ok := driver.(*denseDriver)
	if !ok || s.d != e.d {
		return false, nil
	}
	e.from, e.x, e.fail = s, at, v.Failure()
	return true, e.d.lost
}

// Hand is held.Fetcher's: the outputs go from the scratch to the vector, on the device.
func (e *experts) Hand(out backends.Vec, rows []int32, from uint64) (bool, error) {
	v, ok := out.(dense.Vec)
	if !ok || !e.stays {
		return false, nil
	}
	if driver, _ := v.Lies(); driver != e.from {
		return false, nil
	}
	v.Place(rows, from)
	return true, e.d.lost
}

// Drain is held.Fetcher's.
func (e *experts) Drain() error { return e.d.waitFor(e.running) }

// bring waits for the outputs of a group that were to stay, and copies them from the
// scratch.
func (e *experts) bring(floats int) ([]float32, error) {
	e.running = point{}
	if e.fetch == nil {
		var err error
		if e.fetch, err = e.d.kernels.commands(); err != nil {
			return nil, err
		}
	}
	c := e.fetch
	c.begin()
	c.wrote = stageCompute
	c.barrier()
	c.copy(e.out, resultsAt, e.onDevice, uint64(e.Places.Out), 4*uint64(floats))
	if err := c.end(); err != nil {
		return nil, err
	}
	p, err := c.submit()
	if err == nil {
		err = e.d.waitFor(p)
	}
	if err != nil {
		return nil, err
	}
	return slice[float32](e.out, resultsAt, floats), nil
}
