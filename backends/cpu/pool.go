package cpu

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"sluice/backends"
	"sluice/internal/arith"
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
	patience
	done chan struct{} // the last worker's word to a caller that sleeps

	// INVARIANT: written by the caller alone, between steps.
	work  step
	items int
	grain int // items claimed at a time

	// Each on a cache line of its own: who waits for one must not slow those who
	// count on another.
	_       [64]byte
	turn    atomic.Uint32 // counts steps; a change starts one
	_       [60]byte
	next    atomic.Int64 // first item not claimed
	_       [56]byte
	pending atomic.Int32 // workers still in the step, and asleep if the caller waits on done
	_       [60]byte

	outOfRange atomic.Bool // an activation was NaN or above 2^50
	broken     atomic.Bool // a share of this step has panicked: its items will never be done

	mu    sync.Mutex // guards the rest
	fault error      // first memory fault in the step
	bug   any        // first other panic in the step
}

// asleep is added to pool.pending by a caller that goes to sleep. Being in the
// same word as the count, it is seen by exactly one worker, the last of this step.
const asleep = 1 << 30

// A worker is one goroutine's part: its sleep and its scratch.
type worker struct {
	scratch
	p      *pool
	parked atomic.Bool
	wake   chan struct{}
	_      [64]byte // keeps the next worker's flags off this one's cache line
}

// patience is how a goroutine waits for another. It looks, first again and
// again, longer than the pauses between most steps of a token. Then now and then
// it lets other goroutines run, for one of them may be what the other waits for
// (those that read experts have no thread to themselves). Then, after longer than
// a step waits for an expert from a fast drive, it sleeps; to be woken takes 10 us,
// in a virtual machine 100, and a layer may wait for its experts several times.
type patience struct {
	looks int // before it first yields
	every int // looks from one yield to the next
	most  int // looks before it sleeps
}

var (
	alone   = patience{1 << 15, 1 << 12, 1 << 21} // some 20 us, 2 us, 2 ms
	crowded = patience{0, 1, 1 << 8}              // more workers than processors: who is waited for may need this one
)

// more is asked before look i of a wait, and says no when it is time to sleep.
func (p *patience) more(i int) bool {
	if i < p.looks || i%p.every != 0 {
		return true
	}
	runtime.Gosched()
	return i < p.most
}

func newPool(threads int, k kernels) *pool {
	p := &pool{kernels: k, done: make(chan struct{}, 1), patience: alone}
	if threads > runtime.GOMAXPROCS(0) {
		p.patience = crowded
	}
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
	if p.broken.Load() {
		p.broken.Store(false)
		if bug := p.bug; bug != nil {
			p.bug = nil
			panic(bug)
		}
	}
}

// start lets the other workers go.
func (p *pool) start() {
	p.pending.Store(int32(len(p.workers) - 1))
	p.turn.Add(1)
	for _, w := range p.workers[1:] {
		if w.parked.Load() && w.parked.CompareAndSwap(true, false) {
			w.wake <- struct{}{}
		}
	}
}

// join waits until all of them are back.
func (p *pool) join() {
	for i := 0; p.more(i); i++ {
		if p.pending.Load() == 0 {
			return
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
		if p.pending.Add(-1) == asleep {
			p.done <- struct{}{}
		}
	}
}

// await returns the number of the step that follows step seen.
func (w *worker) await(seen uint32) uint32 {
	for i := 0; w.p.more(i); i++ {
		if t := w.p.turn.Load(); t != seen {
			return t
		}
	}
	for {
		w.parked.Store(true)
		if w.p.turn.Load() == seen || !w.parked.CompareAndSwap(true, false) {
			<-w.wake
		}
		// A caller that was held up in start may wake who has done step seen already.
		if t := w.p.turn.Load(); t != seen {
			return t
		}
	}
}

// wait waits inside a step until others have counted n down to zero, which they
// are about to do: items are claimed in order, and they claimed earlier ones.
// It says false if that will never be, because a share has panicked.
func (w *worker) wait(n *atomic.Int32) bool {
	for i := 0; n.Load() > 0; i++ {
		if w.p.broken.Load() {
			return false
		}
		if !w.p.more(i) {
			time.Sleep(50 * time.Microsecond) // its core is taken by another process: it shall have this one
		}
	}
	return true
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

// saw notes the bits of the largest activation that a step met.
func (w *worker) saw(top uint32) {
	if top > arith.LargestBits {
		w.p.outOfRange.Store(true)
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
	p.broken.Store(true)
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
