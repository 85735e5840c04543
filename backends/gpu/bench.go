package gpu

import (
	"time"

	"sluice/backends"
	"sluice/backends/bench"
)

// A clock takes times at points of the stream of kernels, by the device.
type clock struct {
	d      *Device
	events [3]uintptr
}

func (d *Device) newClock() (c clock, err error) {
	c.d = d
	for i := range c.events {
		w := d.dr.words
		if err := d.check("event", d.dr.f.event.call(addr(&w.out[0]), 0)); err != nil {
			return c, err
		}
		c.events[i] = uintptr(w.out[0])
	}
	return c, nil
}

func (c *clock) close() {
	for _, e := range c.events {
		if e != 0 {
			c.d.dr.f.endEvent.call(e)
		}
	}
}

func (c *clock) stamp(i int) error {
	return c.d.check("event", c.d.dr.f.record.call(c.events[i], c.d.kernels))
}

// since gives the nanoseconds from point i to the next, when both are past.
func (c *clock) since(i int) (float64, error) {
	w := c.d.dr.words
	err := c.d.check("event time", c.d.dr.f.elapsed.call(addr(&w.float), c.events[i], c.events[i+1]))
	return float64(w.float) * 1e6, err
}

// Bench measures groups of experts against copies in the device's own memory.
func (d *Device) Bench(s bench.Shape) (*bench.Measurement, error) {
	e, err := d.newExperts(map[int]backends.HeldLayer{0: s.Layer()}, s.K, 1)
	if err != nil {
		return nil, err
	}
	defer e.Close()
	b := &measured{e: e, run: program{layer: s.Layer(), act: backends.SwiGLU, jobs: s.K}}
	if b.from, err = d.buffer(s.CopyBytes); err != nil {
		return nil, err
	}
	defer d.drop(b.from)
	if b.to, err = d.buffer(s.CopyBytes); err != nil {
		return nil, err
	}
	defer d.drop(b.to)
	defer d.enter()()
	b.clock, err = d.newClock()
	defer b.clock.close()
	if err != nil {
		return nil, err
	}
	return bench.Measure(s, e.Experts, b)
}

// A measured implements bench.Driver.
type measured struct {
	e        *experts
	run      program
	from, to *buffer
	clock    clock
}

// Sample lets the group follow a copy, so that it lies ready when its turn comes, as
// it does behind other work, and runs one alone by the host's clock.
func (b *measured) Sample(start, finish func() error) (group, wall, copied float64, err error) {
	d, c := b.e.d, &b.clock
	for _, step := range []func() error{
		func() error { return c.stamp(0) },
		func() error {
			return d.check("copy", d.dr.f.copyWithin.call(uintptr(b.to.at), uintptr(b.from.at), uintptr(b.to.size), d.kernels))
		},
		func() error { return c.stamp(1) },
		start,
		func() error { return c.stamp(2) },
		finish,
	} {
		if err := step(); err != nil {
			return 0, 0, 0, err
		}
	}
	if copied, err = c.since(0); err != nil {
		return 0, 0, 0, err
	}
	if group, err = c.since(1); err != nil {
		return 0, 0, 0, err
	}
	begin := time.Now()
	if err := start(); err != nil {
		return 0, 0, 0, err
	}
	err = finish()
	return group, float64(time.Since(begin).Nanoseconds()), copied, err
}

func (b *measured) Upload() error {
	d, st := b.e.d, &b.e.staging[0]
	for range bench.UploadBytes / bench.UploadRun {
		if err := d.put(st.blocks.at, &st.host.host[0], bench.UploadRun, d.copies); err != nil {
			return err
		}
	}
	return nil
}

func (b *measured) Groups(n int) (func() error, error) {
	return func() error {
		for range n {
			if err := b.e.single(b.run); err != nil {
				return err
			}
		}
		return nil
	}, nil
}

func (b *measured) Wait() error {
	d := b.e.d
	for _, s := range []uintptr{d.kernels, d.copies} {
		if err := d.check("stream synchronize", d.dr.f.waitStream.call(s)); err != nil {
			return err
		}
	}
	return nil
}
