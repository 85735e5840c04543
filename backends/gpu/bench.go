package gpu

import (
	"time"
	"unsafe"

	"sluice/backends"
	"sluice/backends/bench"
	"sluice/internal/quant"
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
	l := backends.HeldLayer{Types: [3]quant.Type{s.Type, s.Type, s.Type}, Dim: s.Dim, FF: s.FF}
	parts, err := bench.Parts(l)
	if err != nil {
		return nil, err
	}
	e, err := d.NewExperts(map[int]backends.HeldLayer{0: l}, s.K, 1)
	if err != nil {
		return nil, err
	}
	defer e.Close()
	for i := range s.Sets * s.K {
		if err := e.Upload(0, i, parts); err != nil {
			return nil, err
		}
	}
	if err := e.Settle(); err != nil {
		return nil, err
	}
	from, err := d.buffer(s.CopyBytes)
	if err != nil {
		return nil, err
	}
	defer d.drop(from)
	to, err := d.buffer(s.CopyBytes)
	if err != nil {
		return nil, err
	}
	defer d.drop(to)
	defer d.enter()()
	c, err := d.newClock()
	defer c.close()
	if err != nil {
		return nil, err
	}
	m := &bench.Measurement{Type: s.Type.String(), CopyBytes: s.CopyBytes, Steps: map[string]float64{}}
	for _, p := range parts {
		m.GroupBytes += int64(s.K) * int64(len(p))
	}
	x := e.Input(1, s.Dim)
	for i := range x {
		x[i] = float32(i%17-8) * 0x1p-6
	}
	jobs := make([]backends.HeldJob, s.K)
	choose := func(set int) {
		for i := range jobs {
			jobs[i] = backends.HeldJob{Expert: int32(set%s.Sets*s.K + i), Rows: []int32{int32(i)}}
		}
	}
	for sample := -2; sample < s.Samples; sample++ { // two to warm up
		choose(2*sample + 4)
		// The group follows a copy, so that it lies ready when its turn comes, as it does
		// behind other work.
		if err := c.stamp(0); err != nil {
			return nil, err
		}
		if err := d.check("copy", d.dr.f.copyWithin.call(uintptr(to.at), uintptr(from.at), uintptr(s.CopyBytes), d.kernels)); err != nil {
			return nil, err
		}
		if err := c.stamp(1); err != nil {
			return nil, err
		}
		if err := e.Start(0, jobs, s.K, 1, backends.SwiGLU, nil); err != nil {
			return nil, err
		}
		if err := c.stamp(2); err != nil {
			return nil, err
		}
		if _, err := e.Finish(); err != nil {
			return nil, err
		}
		copied, err := c.since(0)
		if err != nil {
			return nil, err
		}
		group, err := c.since(1)
		if err != nil {
			return nil, err
		}
		// And alone, by the host's clock.
		choose(2*sample + 5)
		start := time.Now()
		if err := e.Start(0, jobs, s.K, 1, backends.SwiGLU, nil); err != nil {
			return nil, err
		}
		if _, err := e.Finish(); err != nil {
			return nil, err
		}
		wall := time.Since(start)
		if sample >= 0 {
			m.Group, m.Wall, m.Copy = append(m.Group, group), append(m.Wall, float64(wall.Nanoseconds())), append(m.Copy, copied)
		}
	}
	return m, e.overlap(m, program{l, backends.SwiGLU, s.K})
}

// overlap measures how much of an upload from pinned memory passes while groups are
// computed, by the host's clock: uploads alone, as many groups as take as long
// alone, both at once. The groups are those of the last Start.
func (e *Experts) overlap(m *bench.Measurement, p program) error {
	const times, each = 8, 16 << 20
	d, f := e.d, &e.d.dr.f
	st := &e.staging[0]
	m.UploadSize = times * each
	upload := func() error {
		for range times {
			if err := d.check("copy to the device", f.copyIn.call(uintptr(st.blocks.at), uintptr(unsafe.Pointer(&st.host.host[0])), each, d.copies)); err != nil {
				return err
			}
		}
		return nil
	}
	groups := func() error {
		for range m.Groups {
			if err := e.replay(p); err != nil {
				return err
			}
		}
		return nil
	}
	run := func(all ...func() error) (float64, error) {
		best := 0.0
		for range 5 {
			start := time.Now()
			for _, put := range all {
				if err := put(); err != nil {
					return 0, err
				}
			}
			for _, s := range []uintptr{d.kernels, d.copies} {
				if err := d.check("stream synchronize", f.waitStream.call(s)); err != nil {
					return 0, err
				}
			}
			if ns := float64(time.Since(start).Nanoseconds()); best == 0 || ns < best {
				best = ns
			}
		}
		return best, nil
	}
	var err error
	if m.Upload, err = run(upload); err != nil {
		return err
	}
	m.Groups = max(1, min(1000, int(m.Upload/bench.Median(m.Group))))
	if m.Alone, err = run(groups); err != nil {
		return err
	}
	m.Both, err = run(upload, groups)
	return err
}
