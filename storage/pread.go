package storage

import (
	"runtime"
	"sync"

	"golang.org/x/sys/unix"
)

// A pool is the transport of preads, by goroutines; and of mmap mode, where a
// try makes pages resident instead. It has as many goroutines as there were
// ever tries at once.
type pool struct {
	s     *Reader
	fresh readList // started, not yet submitted; the caller's alone
	wg    sync.WaitGroup

	mu    sync.Mutex // guards the rest
	todo  readList
	idle  int // goroutines that wait for work, less the tries that wait for them
	ended readList
	stop  bool
	work  sync.Cond // todo or stop
	news  sync.Cond // ended
}

func newPool(s *Reader) *pool {
	p := &pool{s: s}
	p.work.L, p.news.L = &p.mu, &p.mu
	return p
}

func (p *pool) start(r *read) { p.fresh.push(r) }

func (p *pool) submit() {
	if p.fresh.head == nil {
		return
	}
	p.mu.Lock()
	for r := p.fresh.pop(); r != nil; r = p.fresh.pop() {
		p.todo.push(r)
		if p.idle--; p.idle < 0 {
			p.idle = 0
			p.wg.Go(p.reader)
		}
	}
	p.mu.Unlock()
	p.work.Broadcast()
}

func (p *pool) next() *read {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ended.pop()
}

func (p *pool) wait() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.ended.head == nil {
		p.news.Wait()
	}
}

func (p *pool) polls() bool { return false } // a reader may be waiting for the caller's processor

// reader does tries until the pool is stopped.
func (p *pool) reader() {
	var prio priority
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		r := p.todo.pop()
		if r == nil {
			if p.stop {
				return
			}
			p.work.Wait()
			continue
		}
		p.mu.Unlock()
		prio.set(r.background)
		if r.view {
			r.n, r.fault = p.s.populate(r)
		} else {
			r.n, r.fault = unix.Pread(p.s.fd(r), r.rest(), r.off+r.done)
			r.n = max(r.n, 0)
		}
		p.mu.Lock()
		p.idle++
		p.ended.push(r)
		p.news.Signal()
	}
}

// register has nothing to prepare.
func (p *pool) register([][]byte) error { return nil }

func (p *pool) close() {
	p.mu.Lock()
	p.stop = true
	p.mu.Unlock()
	p.work.Broadcast()
	p.wg.Wait()
}

// ioprioIdle is the lowest I/O priority: the idle class, as ioprio_set(2) and an
// sqe's ioprio write it. An I/O scheduler may heed it; most NVMe drives have none.
const ioprioIdle = 3 << 13

// A priority is the I/O priority of a goroutine that reads. It is a thread's, so
// from its first background read on the goroutine keeps its thread, which ends
// with it.
type priority struct{ locked, low bool }

func (p *priority) set(low bool) {
	if low == p.low {
		return
	}
	if !p.locked {
		runtime.LockOSThread()
		p.locked = true
	}
	value := uintptr(0) // that of the process
	if low {
		value = ioprioIdle
	}
	const whoProcess, thisThread = 1, 0
	unix.Syscall(unix.SYS_IOPRIO_SET, whoProcess, thisThread, value) // a wish: without it reads have the common priority
	p.low = low
}
