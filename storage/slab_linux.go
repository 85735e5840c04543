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

// A ringSource reads with io_uring. Everything happens in the caller's goroutine:
// Submit hands reads to the kernel, Reap looks at what came of them.
//
// INVARIANT: no more reads are at work in the kernel than the ring has entries,
// so that the completion queue, twice as long, never overflows.
type ringSource struct {
	experts
	ring  *giouring.Ring
	work  []*read // by user data: what the kernel writes to; this also keeps it alive
	free  []uint64
	todo  readList // waits for room in work
	ready fetchList
}

func newRing(s experts, depth int) (Source, error) {
	if s.dev.ringErr != nil {
		return nil, s.dev.ringErr
	}
	ring, err := giouring.CreateRing(uint32(depth)) // entries are rounded up to a power of two
	if err != nil {
		return nil, err
	}
	r := &ringSource{experts: s, ring: ring, work: make([]*read, depth), free: make([]uint64, depth)}
	for i := range r.free {
		r.free[i] = uint64(i)
	}
	if err := r.probe(); err != nil {
		ring.QueueExit()
		return nil, err
	}
	return r, nil
}

// probe reads a block, since a kernel may have io_uring but not this kind of
// read, and a filter may allow the setup but not the rest.
func (s *ringSource) probe() error {
	b, err := offheap.Alloc(s.align)
	if err != nil {
		return err
	}
	defer offheap.Free(b)
	for _, o := range s.files {
		if o.File == nil {
			continue
		}
		s.ring.GetSQE().PrepareRead(o.fd, uintptr(unsafe.Pointer(&b[0])), uint32(len(b)), 0)
		for s.ring.CQReady() == 0 {
			if _, err := s.ring.SubmitAndWait(1); err != nil && err != unix.EINTR {
				return err
			}
		}
		cqe, err := s.ring.PeekCQE()
		if err != nil {
			return err
		}
		res := cqe.Res
		s.ring.CQESeen(cqe)
		if res < 0 {
			return syscall.Errno(-res)
		}
		return nil
	}
	return nil
}

func (s *ringSource) Submit(fetches []*Fetch) {
	for _, f := range fetches {
		s.start(f)
		for i := range f.src.n {
			s.todo.push(&f.src.reads[i])
		}
	}
	s.submit()
}

// submit hands to the kernel, in one submission, what waits and has room.
func (s *ringSource) submit() {
	for len(s.free) > 0 && s.todo.head != nil {
		r, id := s.todo.pop(), s.free[len(s.free)-1]
		s.free = s.free[:len(s.free)-1]
		s.work[id] = r
		b := r.rest()
		r.asked += int64(len(b))
		sqe := s.ring.GetSQE()
		sqe.PrepareRead(s.files[r.file].fd, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uint32(len(b)), uint64(r.off+r.done))
		sqe.SetData64(id)
	}
	for s.ring.SQReady() > 0 {
		if _, err := s.ring.Submit(); err != nil && !s.passes(err) {
			return // the next wait submits the rest
		}
	}
}

// passes says that a call of the kernel is to be repeated at once. Of the other
// errors, being out of memory or completions unseen also pass, later; the rest
// would mean that the ring itself is misused.
func (s *ringSource) passes(err error) bool {
	switch err {
	case unix.EINTR:
		return true
	case unix.EAGAIN, unix.EBUSY:
		return false
	}
	panic(fmt.Sprintf("storage: io_uring_enter: %v", err))
}

func (s *ringSource) Reap() *Fetch {
	s.mustBeBusy()
	for {
		s.complete()
		s.submit()
		if f := s.ready.pop(); f != nil {
			return s.deliver(f)
		}
		if _, err := s.ring.SubmitAndWait(1); err != nil && !s.passes(err) {
			runtime.Gosched()
		}
	}
}

// complete looks at all results that are there.
func (s *ringSource) complete() {
	for s.ring.CQReady() > 0 {
		cqe, err := s.ring.PeekCQE()
		if err != nil {
			return
		}
		id, n := cqe.UserData, int(cqe.Res)
		s.ring.CQESeen(cqe)
		r := s.work[id]
		s.work[id] = nil
		s.free = append(s.free, id)
		if n < 0 {
			n, err = 0, syscall.Errno(-n)
		}
		n, err = s.seen(r, r.rest(), n, err)
		switch r.advance(n, err, s.align) {
		case more:
			s.todo.push(r)
			continue
		case broken:
			s.again(r)
		}
		s.ready.finish(r)
	}
}

func (s *ringSource) Close() error {
	if s.closed {
		return nil
	}
	for s.busy > 0 {
		s.Reap()
	}
	s.ring.QueueExit()
	return s.close()
}
