package moe

import (
	"fmt"

	"sluice/backends"
)

// held is the share of a layer's experts that a device computes, a group at a
// time: those gathered for the next, those under way.
type held struct {
	by    backends.Holder
	jobs  [maxJobs]backends.HeldJob
	n     int     // of them gathered
	given bool    // the device has the layer's input
	rows  []int32 // of the jobs under way, one behind the other
}

// hold gathers the i-th distinct expert for the device, and starts what was
// gathered if that makes a whole group.
func (e *experts) hold(s *state, i int, x backends.Vec, perRow int) error {
	h := &s.held
	if h.by == nil {
		panic(fmt.Sprintf("moe: expert %d of layer %d is in VRAM, and no device computes it", s.distinct[i], e.layer))
	}
	h.jobs[h.n] = backends.HeldJob{Expert: s.distinct[i], Rows: s.rowsOf(i)}
	if h.n++; h.n < maxJobs {
		return nil
	}
	return e.start(s, x, perRow)
}

// start has the device compute what was gathered, after the group before.
func (e *experts) start(s *state, x backends.Vec, perRow int) error {
	h := &s.held
	if h.n == 0 {
		return nil
	}
	if err := h.finish(s); err != nil {
		return err
	}
	if !h.given {
		if err := h.give(s, x); err != nil {
			return err
		}
	}
	jobs := h.jobs[:h.n]
	h.n = 0
	if err := h.by.Start(e.layer, jobs, perRow, x.Len(), e.act, &e.bias); err != nil {
		return err
	}
	h.rows = h.rows[:0]
	for i := range jobs {
		h.rows = append(h.rows, jobs[i].Rows...)
	}
	return nil
}

// give hands the layer's input to the device, by way of the host if need be.
func (h *held) give(s *state, x backends.Vec) (err error) {
	if t, ok := h.by.(backends.Taker); ok {
		if h.given, err = t.Take(x); h.given || err != nil {
			return err
		}
	}
	err = s.be.Read(h.by.Input(x.Len(), x.Dim()), x)
	h.given = err == nil
	return err
}

// finish waits for the device and puts its outputs into their rows.
func (h *held) finish(s *state) error {
	if len(h.rows) == 0 {
		return nil
	}
	rows := h.rows
	h.rows = rows[:0]
	if t, ok := h.by.(backends.Taker); ok {
		if given, err := t.Give(s.out, rows); given || err != nil {
			return err
		}
	}
	data, err := h.by.Finish()
	if err == nil {
		s.be.Put(s.out, rows, data)
	}
	return err
}

// collect is finish at the end of a layer.
func (h *held) collect(s *state) error {
	err := h.finish(s)
	h.given = false
	return err
}

// drop forgets what is under way, which an error has made of no use.
func (h *held) drop() {
	if len(h.rows) > 0 {
		h.by.Finish() // whatever it says, another error is told
	}
	h.n, h.rows, h.given = 0, h.rows[:0], false
}
