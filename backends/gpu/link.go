package gpu

import (
	"errors"
	"fmt"
)

// A link copies from one device's memory to another's, in the order of both streams
// of kernels: directly where the devices reach each other, else through memory of
// the host.
type link struct {
	from, to *Device
	direct   bool
	through  *buffer // pinned; nil if it is direct
	sent     uintptr // event: what was copied has left
	used     uintptr // event: what the copy goes to, and through, may be written
}

// The codes of access that is there already, or is not.
const (
	reachedAlready = 704
	unreachable    = 217
)

// newLink makes a link for copies of at most so many bytes between two devices of a driver.
func newLink(from, to *Device, most int64) (l *link, err error) {
	if from.dr != to.dr || from == to {
		panic("gpu: a link is between two devices of one driver")
	}
	l = &link{from: from, to: to}
	defer func() {
		if err != nil {
			l.close()
			l, err = nil, fmt.Errorf("from device %d to device %d: %w", from.Index, to.Index, err)
		}
	}()
	if l.direct, err = from.reach(to); err != nil {
		return l, err
	}
	if !l.direct {
		if l.through, err = from.hostBuffer(most); err != nil {
			return l, err
		}
	}
	for _, e := range []struct {
		d  *Device
		at *uintptr
	}{{from, &l.sent}, {to, &l.used}} {
		leave := e.d.enter()
		*e.at, err = e.d.event()
		leave()
		if err != nil {
			return l, err
		}
	}
	return l, nil
}

// reach makes the memory of another device one that this one writes, if the
// hardware allows it.
func (d *Device) reach(other *Device) (bool, error) {
	w, f := d.dr.words, &d.dr.f
	w.number = 0
	if err := d.check("peer access", f.reaches.call(addr(&w.number), d.handle, other.handle)); err != nil || w.number == 0 {
		return false, err
	}
	defer d.enter()()
	switch code := f.reach.call(other.self(), 0); code {
	case 0:
		d.reached = append(d.reached, other.self())
		return true, nil
	case reachedAlready:
		return true, nil
	case unreachable:
		return false, nil
	default:
		return false, d.check("peer access", code)
	}
}

// copy starts a copy of n bytes. What the first device's kernels have been given
// before it writes them, what the second's are given after it reads them.
func (l *link) copy(to, from uint64, n int64) error {
	f := &l.from.dr.f
	leave := l.to.enter()
	err := l.to.check("event", f.record.call(l.used, l.to.kernels))
	leave()
	if err != nil {
		return err
	}
	leave = l.from.enter()
	err = l.from.check("stream wait", f.streamWaits.call(l.from.kernels, l.used, 0))
	switch {
	case err != nil:
	case l.direct:
		err = l.from.check("copy to another device", f.copyAcross.call(uintptr(to), l.to.self(), uintptr(from), l.from.self(), uintptr(n), l.from.kernels))
	default:
		err = l.from.check("copy from the device", f.copyOut.call(addr(&l.through.host[0]), uintptr(from), uintptr(n), l.from.kernels))
	}
	if err == nil {
		err = l.from.check("event", f.record.call(l.sent, l.from.kernels))
	}
	leave()
	if err != nil {
		return err
	}
	defer l.to.enter()()
	err = l.to.check("stream wait", f.streamWaits.call(l.to.kernels, l.sent, 0))
	if err == nil && !l.direct {
		err = l.to.put(to, &l.through.host[0], n, l.to.kernels)
	}
	return err
}

// close waits for what is under way.
func (l *link) close() error {
	var err error
	for _, e := range []struct {
		d  *Device
		at uintptr
	}{{l.from, l.sent}, {l.to, l.used}} {
		if e.at == 0 {
			continue
		}
		leave := e.d.enter()
		if e.d.lost == nil {
			err = errors.Join(err, e.d.check("stream synchronize", e.d.dr.f.waitStream.call(e.d.kernels)))
		}
		e.d.dr.f.endEvent.call(e.at)
		leave()
	}
	l.from.drop(l.through)
	l.through, l.sent, l.used = nil, 0, 0
	return err
}
