package gpu

import (
	"time"
	"unsafe"

	"sluice/backends"
	"sluice/backends/bench"
	"sluice/internal/quant"
)

// A clock takes the time between two points of a stream, by the device.
type clock struct {
	d        *Device
	from, to uintptr // events
}

func (d *Device) newClock() (c clock, err error) {
	c.d = d
	for _, e := range []*uintptr{&c.from, &c.to} {
		w := d.dr.words
		if err := d.check("event", d.dr.f.event.call(addr(&w.out[0]), 0)); err != nil {
			return c, err
		}
		*e = uintptr(w.out[0])
	}
	return c, nil
}

func (c *clock) close() {
	for _, e := range []uintptr{c.from, c.to} {
		if e != 0 {
			c.d.dr.f.endEvent.call(e)
		}
	}
}

// around times what do puts into the stream of kernels, in nanoseconds.
func (c *clock) around(do func() error) (float64, error) {
	d, f, w := c.d, &c.d.dr.f, c.d.dr.words
	if err := d.check("event", f.record.call(c.from, d.kernels)); err != nil {
		return 0, err
	}
	if err := do(); err != nil {
		return 0, err
	}
	if err := d.check("event", f.record.call(c.to, d.kernels)); err != nil {
		return 0, err
	}
	if err := d.check("event synchronize", f.waitEvent.call(c.to)); err != nil {
		return 0, err
	}
	err := d.check("event time", f.elapsed.call(addr(&w.float), c.from, c.to))
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
	for sample := -2; sample < s.Samples; sample++ { // two to warm up
		for i := range jobs {
			jobs[i] = backends.HeldJob{Expert: int32((sample+2)%s.Sets*s.K + i), Rows: []int32{int32(i)}}
		}
		start := time.Now()
		group, err := c.around(func() error { return e.Start(0, jobs, s.K, 1, backends.SwiGLU, nil) })
		if err != nil {
			return nil, err
		}
		if _, err := e.Finish(); err != nil {
			return nil, err
		}
		wall := time.Since(start)
		copied, err := c.around(func() error {
			return d.check("copy", d.dr.f.copyWithin.call(uintptr(to.at), uintptr(from.at), uintptr(s.CopyBytes), d.kernels))
		})
		if err != nil {
			return nil, err
		}
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
