//go:build giouring

package storage

import (
	"fmt"
	"runtime"
	"syscall"
	"unsafe"

	"github.com/pawelgaczynski/giouring"
	"golang.org/x/sys/unix"

	"sluice/internal/offheap"
)

// A ring is the transport of io_uring. Everything happens in the callers'
// goroutines; there is no other.
//
// INVARIANT: no more tries are in the kernel than the ring has entries, so that
// the completion queue, twice as long, never overflows.
type ring struct {
	s     *Reader
	ring  *giouring.Ring
	work  []*read // by user data: what the kernel writes to; this also keeps it alive
	free  []uint64
	fixed []span // registered buffers, by their index in the ring
	files bool   // descriptors are registered: see place
}

// A span is memory from one address up to another.
type span struct{ from, to uintptr }

const (
	// ringRoom is how many tries a drive may have in a ring whose depth is yet to be found.
	ringRoom = maxProbe
	// maxBuffer is the kernel's bound on one registered buffer.
	maxBuffer = 1 << 30
)

func newRing(s *Reader) (transport, error) {
	if s.dev.ringErr != nil {
		return nil, s.dev.ringErr
	}
	room := max(s.depth, ringRoom)
	if s.fixed {
		room = s.depth
	}
	room *= 2 * len(s.drives)                   // in the background as many again
	r, err := giouring.CreateRing(uint32(room)) // entries are rounded up to a power of two
	if err != nil {
		return nil, err
	}
	t := &ring{s: s, ring: r, work: make([]*read, room), free: make([]uint64, room)}
	for i := range t.free {
		t.free[i] = uint64(i)
	}
	if err := t.probe(); err != nil {
		r.QueueExit()
		return nil, err
	}
	t.registerFiles()
	return t, nil
}

// probe reads a block, since a kernel may have io_uring but not this kind of
// read, and a filter may allow the setup but not the rest.
func (t *ring) probe() error {
	b, err := offheap.Alloc(t.s.align)
	if err != nil {
		return err
	}
	defer offheap.Free(b)
	fd := t.s.drives[0].files[0].fd
	t.ring.GetSQE().PrepareRead(fd, uintptr(unsafe.Pointer(&b[0])), uint32(len(b)), 0)
	for t.ring.CQReady() == 0 {
		if _, err := t.ring.SubmitAndWait(1); err != nil && err != unix.EINTR {
			return err
		}
	}
	cqe, err := t.ring.PeekCQE()
	if err != nil {
		return err
	}
	res := cqe.Res
	t.ring.CQESeen(cqe)
	if res < 0 {
		return syscall.Errno(-res)
	}
	return nil
}

// place is the index of a read's descriptor among the registered ones.
func (t *ring) place(r *read) int {
	i := 2 * (r.drive*len(t.s.drives[0].files) + r.file)
	if r.buffered {
		i++
	}
	return i
}

// registerFiles spares the kernel the look-up of a descriptor for each read.
// giouring's own method hands over 64-bit numbers to a kernel that reads int32,
// and drops the error; so this is the raw call.
func (t *ring) registerFiles() {
	var fds []int32
	for i := range t.s.drives {
		for _, o := range t.s.drives[i].files {
			fds = append(fds, int32(o.fd), int32(o.f.Fd()))
		}
	}
	_, errno := t.ring.Register(t.ring.RingFd(), giouring.RegisterFiles, unsafe.Pointer(unsafe.SliceData(fds)), uint32(len(fds)))
	if t.files = errno == 0; !t.files {
		t.s.notice("the model's files could not be registered with io_uring (%s); each read looks them up", unix.ErrnoName(errno))
	}
}

// register pins the arenas, in buffers of at most 1 GiB. A read that lies across
// two of them is made without.
func (t *ring) register(arenas [][]byte) error {
	if len(t.fixed) > 0 {
		if _, err := t.ring.UnregisterBuffers(); err != nil {
			return err
		}
		t.fixed = nil
	}
	if t.s.dev.registerErr != nil && arenas != nil {
		return t.s.dev.registerErr
	}
	most := uintptr(maxBuffer)
	if t.s.dev.buffer > 0 {
		most = uintptr(t.s.dev.buffer)
	}
	var vecs []syscall.Iovec
	var fixed []span
	for _, a := range arenas {
		for len(a) > 0 {
			n := min(uintptr(len(a)), most)
			base := unsafe.SliceData(a)
			vecs = append(vecs, syscall.Iovec{Base: base, Len: uint64(n)})
			from := uintptr(unsafe.Pointer(base))
			fixed = append(fixed, span{from, from + n})
			a = a[n:]
		}
	}
	if len(vecs) == 0 {
		return nil
	}
	if _, err := t.ring.RegisterBuffers(vecs); err != nil {
		return err
	}
	t.fixed = fixed
	return nil
}

// buffer is the index of the registered buffer that b lies in, or -1.
func (t *ring) buffer(b []byte) int {
	from := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	for i, x := range t.fixed {
		if from >= x.from && from+uintptr(len(b)) <= x.to {
			return i
		}
	}
	return -1
}

func (t *ring) start(r *read) {
	id := t.free[len(t.free)-1]
	t.free = t.free[:len(t.free)-1]
	t.work[id] = r
	b := r.rest()
	at, n, off := uintptr(unsafe.Pointer(unsafe.SliceData(b))), uint32(len(b)), uint64(r.off+r.done)
	fd := t.s.fd(r)
	if t.files {
		fd = t.place(r)
	}
	sqe := t.ring.GetSQE()
	if i := t.buffer(b); i >= 0 {
		sqe.PrepareReadFixed(fd, at, n, off, i)
	} else {
		sqe.PrepareRead(fd, at, n, off)
	}
	if t.files {
		sqe.Flags |= giouring.SqeFixedFile
	}
	if r.background {
		sqe.IoPrio = ioprioIdle
	}
	sqe.SetData64(id)
}

func (t *ring) submit() {
	for t.ring.SQReady() > 0 {
		if _, err := t.ring.Submit(); err != nil && !passes(err) {
			runtime.Gosched()
		}
	}
}

// passes says that a call of the kernel is to be repeated at once. Of the other
// errors, being out of memory or completions unseen also pass, later; the rest
// would mean that the ring itself is misused.
func passes(err error) bool {
	switch err {
	case unix.EINTR:
		return true
	case unix.EAGAIN, unix.EBUSY:
		return false
	}
	panic(fmt.Sprintf("storage: io_uring_enter: %v", err))
}

func (t *ring) next() *read {
	if t.ring.CQReady() == 0 {
		return nil
	}
	cqe, err := t.ring.PeekCQE()
	if err != nil {
		return nil
	}
	id, n := cqe.UserData, cqe.Res
	t.ring.CQESeen(cqe)
	r := t.work[id]
	t.work[id] = nil
	t.free = append(t.free, id)
	r.n, r.fault = int(n), nil
	if n < 0 {
		r.n, r.fault = 0, syscall.Errno(-n)
	}
	return r
}

func (t *ring) polls() bool { return true }

// wait touches the completion queue alone, which nobody else does meanwhile.
func (t *ring) wait() {
	for t.ring.CQReady() == 0 {
		if _, err := t.ring.Enter(0, 1, giouring.EnterGetEvents, nil); err != nil && !passes(err) {
			runtime.Gosched()
		}
	}
}

func (t *ring) close() {
	t.register(nil)
	t.ring.QueueExit()
}
