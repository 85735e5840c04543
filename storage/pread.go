package storage

import (
	"sync"

	"golang.org/x/sys/unix"
)

// A poolSource reads with a pool of goroutines: pread mode, and mmap mode, which
// makes pages resident instead.
type poolSource struct {
	experts
	wg sync.WaitGroup

	mu    sync.Mutex // guards the rest, and the finished state of fetches in flight
	todo  readList
	ready fetchList
	stop  bool
	work  sync.Cond // todo or stop
	news  sync.Cond // ready
}

func newPool(s experts, readers int) *poolSource {
	p := &poolSource{experts: s}
	p.work.L, p.news.L = &p.mu, &p.mu
	do := p.pread
	if s.mode == MMap {
		do = p.populate
	}
	for range readers {
		p.wg.Go(func() { p.reader(do) })
	}
	return p
}

// reader does reads until the pool is stopped.
func (p *poolSource) reader(do func(*read)) {
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
		do(r)
		p.mu.Lock()
		if p.ready.finish(r) {
			p.news.Signal()
		}
	}
}

// pread does one read with pread(2).
func (p *poolSource) pread(r *read) {
	for {
		b := r.rest()
		r.asked += int64(len(b))
		n, err := unix.Pread(p.files[r.file].fd, b, r.off+r.done)
		n, err = p.seen(r, b, max(n, 0), err)
		switch r.advance(n, err, p.align) {
		case whole:
			return
		case broken:
			p.again(r)
			return
		}
	}
}

func (p *poolSource) Submit(fetches []*Fetch) {
	for _, f := range fetches {
		p.start(f)
	}
	p.mu.Lock()
	for _, f := range fetches {
		for i := range f.src.n {
			p.todo.push(&f.src.reads[i])
		}
	}
	p.mu.Unlock()
	p.work.Broadcast()
}

func (p *poolSource) Reap() *Fetch {
	p.mustBeBusy()
	p.mu.Lock()
	f := p.ready.pop()
	for f == nil {
		p.news.Wait()
		f = p.ready.pop()
	}
	p.mu.Unlock()
	return p.deliver(f)
}

func (p *poolSource) Close() error {
	if p.closed {
		return nil
	}
	for p.busy > 0 {
		p.Reap()
	}
	p.mu.Lock()
	p.stop = true
	p.mu.Unlock()
	p.work.Broadcast()
	p.wg.Wait()
	return p.close()
}
