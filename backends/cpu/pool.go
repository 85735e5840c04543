package cpu

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"

	"sluice/backends"
)

// A step is work in equal items, which any worker may do in any order: an item
// writes what no other item reads or writes.
type step interface {
	run(w *worker, lo, hi int) // items lo <= i < hi
}

// A pool is threads-1 goroutines and the caller, who share the items of one
// step after another. Nothing in it depends on who did what.
//
// Each step, every worker takes part, if only to find that nothing is left:
// so the fields of a step are written only while no worker looks at them.
type pool struct {
	kernels kernels
	workers []*worker // the first is the caller's
	ended   sync.WaitGroup

	// INVARIANT: written by the caller alone, between steps.
	work  step
	items int
	grain int // items claimed at a time

	turn    atomic.Uint32 // counts steps; a change starts one
	next    atomic.Int64  // first item not claimed
	pending atomic.Int32  // workers still in the step, and asleep if the caller waits on done
	done    chan struct{}

	outOfRange atomic.Bool // an activation was NaN or above 2^50

	mu    sync.Mutex // guards the rest
	fault error      // first memory fault in the step
	bug   any        // first other panic in the step
}

// A worker is one goroutine's part: its sleep and its scratch.
type worker struct {
	scratch
	p      *pool
	parked atomic.Bool
	wake   chan struct{}
	_      [64]byte // keeps the next worker's flags off this one's cache line
}

// spins is how often a waiting goroutine looks before it sleeps: some 20 us,
// more than the pause between the steps of a token, less than a read of a drive.
const spins = 20000

func newPool(threads int, k kernels) *pool {
	p := &pool{kernels: k, done: make(chan struct{}, 1)}
	for i := range threads {
		w := &worker{p: p, scratch: scratch{k: &p.kernels}, wake: make(chan struct{}, 1)}
		p.workers = append(p.workers, w)
		if i > 0 {
			p.ended.Add(1)
			go w.loop()
		}
	}
	return p
}

// do runs items 0 <= i < items of s, grain at a time, and returns when all are
// done. A memory fault is kept in p.fault; any other panic becomes the caller's.
func (p *pool) do(s step, items, grain int) {
	p.work, p.items, p.grain = s, items, max(grain, 1)
	p.next.Store(0)
	if items > p.grain && len(p.workers) > 1 {
		p.start()
		p.workers[0].share()
		p.join()
	} else {
		p.workers[0].share()
	}
	p.work = nil
	if p.bug != nil {
		bug := p.bug
		p.bug = nil
		panic(bug)
	}
}

// start lets the other workers go.
func (p *pool) start() {
	p.pending.Store(int32(len(p.workers) - 1))
	p.turn.Add(1)
	for _, w := range p.workers[1:] {
		if w.parked.CompareAndSwap(true, false) {
			w.wake <- struct{}{}
		}
	}
}

// asleep is added to pending by a caller that goes to sleep. Both being one
// number, a worker that is late to look cannot take the sleep of the next step
// for that of its own.
const asleep = 1 << 20

// join waits until all of them are back.
func (p *pool) join() {
	for i := range spins {
		if p.pending.Load() == 0 {
			return
		}
		if i&63 == 63 {
			runtime.Gosched()
		}
	}
	if p.pending.Add(asleep) != asleep {
		<-p.done
	}
}

// loop is the life of a worker: a share of each step, until close.
func (w *worker) loop() {
	defer w.p.ended.Done()
	p := w.p
	for seen := uint32(0); ; {
		seen = w.await(seen)
		if p.work == nil {
			return
		}
		w.share()
		if p.pending.Add(-1) == asleep { // if it is 0, the next step may have begun: look at nothing more
			p.done <- struct{}{}
		}
	}
}

// await returns the number of the step that follows step seen.
func (w *worker) await(seen uint32) uint32 {
	for i := range spins {
		if t := w.p.turn.Load(); t != seen {
			return t
		}
		if i&63 == 63 {
			runtime.Gosched()
		}
	}
	for {
		w.parked.Store(true)
		if w.p.turn.Load() == seen || !w.parked.CompareAndSwap(true, false) {
			<-w.wake
		}
		// A start that was held up between its workers wakes one that has done
		// its part of that step already, and has parked since: it parks again.
		if t := w.p.turn.Load(); t != seen {
			return t
		}
	}
}

// share claims and runs items until none is left. Weights may be a view of a
// file: a fault on them ends this share (the others go on), not the process.
func (w *worker) share() {
	defer w.caught(debug.SetPanicOnFault(true))
	p := w.p
	for {
		hi := int(p.next.Add(int64(p.grain)))
		lo := hi - p.grain
		if lo >= p.items {
			return
		}
		p.work.run(w, lo, min(hi, p.items))
	}
}

// caught is deferred by share: it keeps what the share panicked with.
func (w *worker) caught(panicOnFault bool) {
	debug.SetPanicOnFault(panicOnFault)
	r := recover()
	if r == nil {
		return
	}
	p := w.p
	p.mu.Lock()
	defer p.mu.Unlock()
	if f, ok := r.(interface{ Addr() uintptr }); ok { // package debug, SetPanicOnFault
		if p.fault == nil {
			p.fault = fmt.Errorf("backends/cpu: the mapped model file could not be read (memory fault at %#x): it was cut short or its drive failed while in use; check the file, then start again, or read it with --storage pread", f.Addr())
		}
		return
	}
	if p.bug == nil {
		p.bug = fmt.Sprintf("%v\n\nin the share of a worker:\n%s", r, debug.Stack())
	}
}

// take returns what went wrong since it was last asked: a fault, else an
// activation out of range at the step of this name, else nil.
func (p *pool) take(name string) error {
	if p.fault != nil {
		err := p.fault
		p.fault = nil
		return err
	}
	if p.outOfRange.Load() {
		p.outOfRange.Store(false)
		return &backends.ActivationError{Step: name}
	}
	return nil
}

// close ends the workers and waits for them.
func (p *pool) close() {
	p.work = nil
	p.start()
	p.ended.Wait()
}
