package gpu

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"unsafe"
)

// Bytes come from one device to another directly and through the host, in the order
// of both streams, and what a link needs is gone with it.
func TestLink(t *testing.T) {
	pair := func(t *testing.T, dr *Driver, direct bool) {
		var d [2]*Device
		for i := range d {
			var err error
			if d[i], err = dr.Open(i, Options{Cache: t.TempDir()}); err != nil {
				t.Fatal(err)
			}
			defer d[i].Close()
		}
		const n = 100_000
		l, err := newLink(d[0], d[1], n)
		if err != nil {
			t.Fatal(err)
		}
		defer l.close()
		if l.direct != direct {
			t.Errorf("direct: %v, want %v", l.direct, direct)
		}
		var host, device [2]*buffer
		for i := range d {
			if host[i], err = d[i].hostBuffer(n); err != nil {
				t.Fatal(err)
			}
			if device[i], err = d[i].buffer(n); err != nil {
				t.Fatal(err)
			}
		}
		copyBy := func(f fn, to, from uint64, d *Device) {
			t.Helper()
			defer d.enter()()
			if err := d.check("copy", f.call(uintptr(to), uintptr(from), n, d.kernels)); err != nil {
				t.Fatal(err)
			}
		}
		for round := range 3 {
			for i := range host[0].host {
				host[0].host[i] = byte(i*(round+3) + i>>9)
			}
			clear(host[1].host)
			copyBy(dr.f.copyIn, device[0].at, uint64(addr(&host[0].host[0])), d[0])
			if err := l.copy(device[1].at, device[0].at, n); err != nil {
				t.Fatal(err)
			}
			copyBy(dr.f.copyOut, uint64(addr(&host[1].host[0])), device[1].at, d[1])
			leave := d[1].enter()
			err := d[1].check("stream synchronize", dr.f.waitStream.call(d[1].kernels))
			leave()
			if err != nil {
				t.Fatal(err)
			}
			for i, b := range host[1].host {
				if b != host[0].host[i] {
					t.Fatalf("round %d, byte %d: %d, want %d", round, i, b, host[0].host[i])
				}
			}
		}
	}
	for _, a := range []API{CUDA, HIP} {
		if dr, err := Open(a); err == nil {
			if len(dr.Devices()) > 1 {
				t.Run(a.String(), func(t *testing.T) { pair(t, dr, dr.able(0, 1)) })
			}
			dr.Close()
		}
		f := fakeDriver(t)
		f.device(60000000, "gfx1030", 2)
		for _, direct := range []bool{true, false} {
			f.call("fakeApart", map[bool]uintptr{false: 1}[direct])
			t.Run(fmt.Sprintf("fake %v, direct %v", a, direct), func(t *testing.T) {
				dr := f.open(t, a)
				pair(t, dr, direct)
				if n := f.live(); n != 0 {
					t.Errorf("%d things are left", n)
				}
			})
		}
		f.call("fakeApart", 0)
		for _, c := range []struct {
			call string
			code int
			want string
		}{{"reaches", 999, "lost the device"}, {"reach", 2, "no memory"}, {"reach", reachedAlready, ""}, {"reach", unreachable, ""}} {
			dr := f.open(t, a)
			one, err := dr.Open(0, Options{Cache: t.TempDir()})
			if err != nil {
				t.Fatal(err)
			}
			other, err := dr.Open(1, Options{Cache: t.TempDir()})
			if err != nil {
				t.Fatal(err)
			}
			f.fail(c.call, 0, c.code)
			l, err := newLink(one, other, 1000)
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("%s %d: %v, want %q", c.call, c.code, err, c.want)
			}
			if err == nil {
				l.close()
			}
			other.Close()
			one.Close()
			f.fail("", 0, 0)
			if n := f.live(); n != 0 {
				t.Errorf("%s %d: %d things are left", c.call, c.code, n)
			}
		}
		f.device(13000, "gfx1030", 1)
	}
}

// able says whether the hardware lets one device write another's memory.
func (d *Driver) able(from, to int) bool {
	return d.f.reaches.call(addr(&d.words.number), d.devices[from].handle, d.devices[to].handle) == 0 && d.words.number != 0
}

// A handle of a device's memory is one of 64 bytes, which C takes by value. Nothing
// in Sluice shares memory between processes yet.
func TestShared(t *testing.T) {
	f := fakeDriver(t)
	for _, a := range []API{CUDA, HIP} {
		d, err := f.open(t, a).Open(0, Options{Cache: t.TempDir()})
		if err != nil {
			t.Fatal(err)
		}
		b, err := d.buffer(1000)
		if err != nil {
			t.Fatal(err)
		}
		leave := d.enter()
		w, fs := d.dr.words, &d.dr.f
		handle := (*[8]uintptr)(unsafe.Pointer(&w.args))
		if err := d.check("share", fs.share.call(addr(handle), uintptr(b.at))); err != nil {
			t.Fatal(err)
		}
		const lazily = 1
		args := []uintptr{addr(&w.out[0]), addr(handle), lazily} // arm64 takes it by its address,
		if runtime.GOARCH == "amd64" {                           // amd64 on the stack, behind six registers
			args = append([]uintptr{addr(&w.out[0]), lazily, 0, 0, 0, 0}, handle[:]...)
		}
		if err := d.check("open", fs.open.call(args...)); err != nil || w.out[0] != b.at {
			t.Errorf("%v: memory at %#x is opened at %#x: %v", a, b.at, w.out[0], err)
		}
		if err := d.check("close", fs.unshare.call(uintptr(w.out[0]))); err != nil {
			t.Error(err)
		}
		f.fail("share", 0, 801)
		var e *Error
		if err := d.check("share", fs.share.call(addr(handle), uintptr(b.at))); !errors.As(err, &e) || e.Code != notSupported {
			t.Errorf("%v: sharing that is not supported: %v", a, err)
		}
		leave()
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
}
