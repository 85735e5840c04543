package tiers

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"unsafe"

	"sluice/internal/offheap"
	"sluice/storage"
)

// fake is a source with real content: each byte of an expert follows from its
// key, part and place. It finishes reads when and in the order that it is
// told, tears those that fail, and checks the contract from its own side.
type fake struct {
	t      testing.TB
	mode   Mode
	layers map[int]fakeLayer
	aside  bool            // who cannot be polled, as reads by other goroutines
	pick   func(n int) int // which of n reads in flight finishes; nil: only those that finish names
	broken map[Key]bool    // reads of these fail

	mu         sync.Mutex
	arenas     [][]byte // registered
	cond       *sync.Cond
	inFlight   []*storage.Fetch
	finished   []*storage.Fetch
	batches    [][]Key // submitted, since the last look
	background []bool  // of each batch
	mapped     map[Key]*storage.Fetch
	evicts     int
	hurried    int
	stats      SourceStats
}

type fakeLayer struct{ slot, part int64 } // part: bytes of each of three matrices

const fakeParts = 3

var errBroken = errors.New("input/output error")

func newFake(t testing.TB, mode Mode, layers map[int]fakeLayer) *fake {
	f := &fake{t: t, mode: mode, layers: layers, broken: map[Key]bool{}, mapped: map[Key]*storage.Fetch{}, aside: rand.IntN(2) == 0}
	t.Logf("reads that cannot be polled: %v", f.aside)
	f.cond = sync.NewCond(&f.mu)
	return f
}

func (f *fake) Mode() Mode { return f.mode }

// Register notes where slots may lie.
func (f *fake) Register(arenas [][]byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.inFlight)+len(f.finished) > 0 {
		f.t.Error("memory is registered while reads are in flight")
	}
	f.arenas = arenas
}

// registered says whether a slot lies in memory that was registered.
func (f *fake) registered(slot []byte) bool {
	for _, a := range f.arenas {
		if offheap.Holds(a, slot) {
			return true
		}
	}
	return len(slot) == 0
}

func (f *fake) SlotBytes(layer int) int64 {
	if f.mode == storage.MMap {
		return 0
	}
	return f.layers[layer].slot
}

func (f *fake) ExpertBytes(layer int) int64 { return fakeParts * f.layers[layer].part }

func (f *fake) Submit(fetches []*storage.Fetch) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var keys []Key
	for _, x := range fetches {
		if !f.registered(x.Slot) {
			f.t.Errorf("%v: the slot does not lie in registered memory", x.Key)
		}
		if int64(len(x.Slot)) != f.SlotBytes(int(x.Key.Layer)) {
			f.t.Errorf("%v: a slot of %d bytes", x.Key, len(x.Slot))
		}
		for _, y := range f.inFlight {
			if x == y || x.Key == y.Key {
				f.t.Errorf("%v is submitted while it is in flight", x.Key)
			}
		}
		if f.mapped[x.Key] != nil {
			f.t.Errorf("%v is submitted while it is mapped", x.Key)
		}
		f.inFlight = append(f.inFlight, x)
		keys = append(keys, x.Key)
	}
	f.batches = append(f.batches, keys)
	f.background = append(f.background, fetches[0].Background)
	f.cond.Broadcast()
}

// finish ends the read of a key that is in flight.
func (f *fake) finish(k Key) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, x := range f.inFlight {
		if x.Key == k {
			f.end(i)
			return
		}
	}
	f.t.Errorf("%v is not in flight", k)
}

func (f *fake) end(i int) {
	x := f.inFlight[i]
	f.inFlight = append(f.inFlight[:i], f.inFlight[i+1:]...)
	f.finished = append(f.finished, x)
	f.cond.Broadcast()
}

func (f *fake) Poll() (x *storage.Fetch, beside bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case len(f.inFlight)+len(f.finished) == 0:
		return nil, false
	case f.aside:
		return nil, true
	case len(f.finished) == 0 && f.pick == nil:
		return nil, false
	}
	return f.reap(), false
}

func (f *fake) Reap() *storage.Fetch {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.reap()
}

// reap is Reap under the lock.
func (f *fake) reap() *storage.Fetch {
	if len(f.inFlight)+len(f.finished) == 0 {
		panic("nothing is in flight")
	}
	for len(f.finished) == 0 {
		if f.pick == nil {
			f.cond.Wait()
			continue
		}
		f.end(f.pick(len(f.inFlight)))
	}
	x := f.finished[0]
	f.finished = f.finished[1:]
	l := f.layers[int(x.Key.Layer)]
	b := x.Slot
	if f.mode == storage.MMap {
		b = make([]byte, fakeParts*l.part)
	}
	if f.broken[x.Key] {
		x.Err = errBroken
		for i := range x.Slot {
			x.Slot[i] = byte(i) // torn
		}
		return x
	}
	step := l.part
	if f.mode != storage.MMap {
		step = l.slot / fakeParts
	}
	for p := range fakeParts {
		x.Parts[p] = b[int64(p)*step:][:l.part]
		for i := range x.Parts[p] {
			x.Parts[p][i] = content(x.Key, p, i)
		}
	}
	if f.mode == storage.MMap {
		f.mapped[x.Key] = x
	}
	f.stats.Loads++
	f.stats.LoadBytes += fakeParts * l.part
	return x
}

func (f *fake) Hurry(x *storage.Fetch) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !x.Background {
		f.t.Errorf("%v is to hurry and was not read in the background", x.Key)
	}
	f.hurried++
}

func (f *fake) Evict(x *storage.Fetch) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mapped[x.Key] != x && f.mode == storage.MMap {
		f.t.Errorf("%v is evicted and is not mapped", x.Key)
	}
	delete(f.mapped, x.Key)
	for _, p := range x.Parts {
		for i := range p {
			p[i] = 0xee // whoever uses it now sees it
		}
	}
	f.evicts++
}

func (f *fake) Stats() SourceStats {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.stats
}

func (f *fake) Close() error { return nil }

// fakeDevice keeps what is uploaded, and checks it.
type fakeDevice struct {
	f    *fake
	keys []Key
	err  error
	lent [][]byte
	from int // uploads from there
}

func (d *fakeDevice) Lend(mem [][]byte) {
	for _, m := range mem {
		if len(m)%page != 0 || uintptr(unsafe.Pointer(&m[0]))%page != 0 {
			d.f.t.Errorf("%d bytes at %p are lent, which are no whole pages", len(m), m)
		}
	}
	d.lent = mem
}

// ExpertBytes adds a scale for each 64 bytes.
func (d *fakeDevice) ExpertBytes(layer int, payload int64) int64 { return payload + payload/64*4 }

func (d *fakeDevice) Upload(k Key, parts *Parts) error {
	if d.err != nil {
		return d.err
	}
	if err := d.f.verify(k, parts); err != nil {
		d.f.t.Error(err)
	}
	at := uintptr(unsafe.Pointer(&parts[0][0]))
	for _, m := range d.lent {
		if from := uintptr(unsafe.Pointer(&m[0])); at >= from && at < from+uintptr(len(m)) {
			d.from++
		}
	}
	d.keys = append(d.keys, k)
	return nil
}

func (d *fakeDevice) Replace(old, k Key, parts *Parts) error {
	at := slices.Index(d.keys, old)
	if at < 0 {
		d.f.t.Errorf("%v is to be replaced and is not on the device", old)
		return nil
	}
	d.keys = slices.Delete(d.keys, at, at+1)
	return d.Upload(k, parts)
}

// content is byte i of part p of an expert.
func content(k Key, p, i int) byte {
	h := uint32(k.Layer)*2654435761 ^ uint32(k.Expert)*40503 ^ uint32(p)*97 ^ uint32(i)*31
	h ^= h >> 15
	h *= 2246822519
	return byte(h >> 24)
}

// verify fails if parts are not those of the expert.
func (f *fake) verify(k Key, parts *[MaxParts][]byte) error {
	for p := range MaxParts {
		want := int64(0)
		if p < fakeParts {
			want = f.layers[int(k.Layer)].part
		}
		if int64(len(parts[p])) != want {
			return fmt.Errorf("%v part %d: %d bytes, want %d", k, p, len(parts[p]), want)
		}
		for i, b := range parts[p] {
			if b != content(k, p, i) {
				return fmt.Errorf("%v part %d byte %d: got %#x, want %#x", k, p, i, b, content(k, p, i))
			}
		}
	}
	return nil
}

// settle waits until io has done all that it can do now; who polls needs no io.
func (f *fake) settle(c *Cache) {
	for {
		air, beside := c.flying()
		if !f.aside && !beside {
			return
		}
		if air > 0 && !beside {
			c.besides()
		}
		f.mu.Lock()
		quiet := len(f.finished) == 0 && len(f.inFlight) == air && (f.pick == nil || air == 0)
		f.mu.Unlock()
		if quiet {
			return
		}
		runtime.Gosched()
	}
}

// compute takes all of a step as computed, in the order in which Next returns it, and ends it.
func compute(t testing.TB, s *Step) {
	for {
		i, _, ok, err := s.Next(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			break
		}
		s.Done(i)
	}
	s.End()
}
