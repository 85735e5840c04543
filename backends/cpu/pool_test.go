package cpu

import (
	"runtime"
	"sync/atomic"
	"testing"
)

// counted notes who was asked for what.
type counted struct{ item [1000]atomic.Int32 }

func (c *counted) run(_ *worker, lo, hi int) {
	for ; lo < hi; lo++ {
		c.item[lo].Add(1)
	}
}

// TestPoolDoesEachItemOnce over many steps, some of which find workers asleep.
func TestPoolDoesEachItemOnce(t *testing.T) {
	before := runtime.NumGoroutine()
	for _, threads := range []int{1, 2, 3, 8} {
		p := newPool(threads, kernelsFor(Go))
		var c counted
		const rounds = 300
		for round := range rounds {
			if round%100 == 50 { // let them fall asleep: each says so itself
				for _, w := range p.workers[1:] {
					for !w.parked.Load() {
						runtime.Gosched()
					}
				}
			}
			p.do(&c, round, 1+round%7)
		}
		for i := range c.item {
			if got, want := int(c.item[i].Load()), max(rounds-1-i, 0); got != want {
				t.Fatalf("%d threads: item %d was done %d times in steps of 0 to %d items, want %d", threads, i, got, rounds-1, want)
			}
		}
		p.close()
	}
	for runtime.NumGoroutine() > before { // close has waited for their last statement
		runtime.Gosched()
	}
}

// TestPoolParksAgain: a worker may be woken when it has done its part of the
// step already, by a start that was held up between its workers. It must not
// take part twice.
func TestPoolParksAgain(t *testing.T) {
	p := newPool(2, kernelsFor(Go))
	w := p.workers[1]
	ended := make(chan struct{})
	go func() {
		p.ended.Wait()
		close(ended)
	}()
	var c counted
	const rounds = 100
	for range rounds {
		for range 2 { // the second wait sees that it parked again
			for !w.parked.Load() {
				select {
				case <-ended:
					t.Fatal("the worker ended")
				default:
					runtime.Gosched()
				}
			}
			if w.parked.CompareAndSwap(true, false) { // as start does
				w.wake <- struct{}{}
			}
		}
		p.do(&c, len(c.item), 10)
		if left := p.pending.Load() &^ asleep; left != 0 {
			t.Fatalf("%d workers are still counted in after the step", left)
		}
	}
	for i := range c.item {
		if n := c.item[i].Load(); n != rounds {
			t.Fatalf("item %d was done %d times in %d steps", i, n, rounds)
		}
	}
	p.close()
}
