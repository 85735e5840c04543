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

func (e *experts) Lend(mem []byte) error {
	d := e.d
	defer d.enter()()
	const portable = 1
	code := d.dr.f.register.call(uintptr(unsafe.Pointer(&mem[0])), uintptr(len(mem)), portable)
	if code != registered {
		if err := d.check("pin", code); err != nil {
			return fmt.Errorf("%w (%d bytes of the host's memory)", err, len(mem))
		}
	}
	e.lent = append(e.lent, lending{mem, code == 0})
	return nil
}

func (e *experts) Return() (err error) {
	d, f := e.d, &e.d.dr.f
	if len(e.lent) == 0 {
		return nil
	}
	defer d.enter()()
	if d.lost == nil { // after a failed upload a copy may be under way
		err = d.check("stream synchronize", f.waitStream.call(d.copies))
	}
	for _, l := range e.lent {
		if !l.own {
			continue
		}
		if code := f.unregister.call(uintptr(unsafe.Pointer(&l.mem[0]))); d.lost == nil {
			err = errors.Join(err, d.check("unpin", code))
		}
	}
	e.lent = nil
	return err
}

// pinned is what the kernel pins for n bytes: whole pages.
func pinned(n int64) int64 {
	page := int64(os.Getpagesize())
	return (n + page - 1) &^ (page - 1)
}
