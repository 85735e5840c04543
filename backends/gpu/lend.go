package gpu

import (
	"errors"
	"fmt"
	"os"
	"unsafe"
)

// A lending is memory of the host that is pinned where it lies, by this device or by
// another that was first.
type lending struct {
	mem []byte
	own bool
}

func (e *experts) Lend(mem [][]byte) (err error) {
	d, f := e.d, &e.d.dr.f
	defer d.enter()()
	if len(e.lent) > 0 && d.lost == nil { // after a failed upload a copy may be under way
		err = d.check("stream synchronize", f.waitStream.call(d.copies))
	}
	for _, l := range e.lent {
		if l.own {
			if code := f.unregister.call(uintptr(unsafe.Pointer(&l.mem[0]))); d.lost == nil {
				err = errors.Join(err, d.check("unpin", code))
			}
		}
	}
	e.lent = e.lent[:0]
	for _, m := range mem {
		if err != nil {
			break
		}
		const portable = 1
		code := f.register.call(uintptr(unsafe.Pointer(&m[0])), uintptr(len(m)), portable)
		if code != registered {
			if err := d.check("pin", code); err != nil {
				e.unlent++
				err = fmt.Errorf("%w (%d bytes of the host's memory)", err, len(m))
				return errors.Join(err, e.Lend(nil))
			}
		}
		e.lent = append(e.lent, lending{m, code == 0})
	}
	return err
}

// borrowed says that data lie in memory that was lent.
func (e *experts) borrowed(data []byte) bool {
	at := uintptr(unsafe.Pointer(unsafe.SliceData(data)))
	for _, l := range e.lent {
		begin := uintptr(unsafe.Pointer(&l.mem[0]))
		if at >= begin && at-begin+uintptr(len(data)) <= uintptr(len(l.mem)) {
			return true
		}
	}
	return false
}

// pinned is what the kernel pins for n bytes: whole pages.
func pinned(n int64) int64 {
	page := int64(os.Getpagesize())
	return (n + page - 1) &^ (page - 1)
}
