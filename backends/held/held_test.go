package held

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"sluice/backends"
	"sluice/internal/quant"
)

// A fake is a device whose memory is a map, and whose groups are what the control
// block says.
type fake struct {
	next   uint64
	taken  int64
	sizes  []int64
	memory map[uint64][]byte // by address, what was written there
	sent   int
	fail   map[string]error
	group  Group
	freed  bool
	from   []int // numbers of lent memory, of Writes
	lent   int
}

var errFake = errors.New("as asked")

func (f *fake) MatrixBytes(t quant.Type, rows, cols int) int64 {
	return aligned(int64(rows * t.RowBytes(cols)))
}
func (f *fake) Alloc(size int64) (uint64, error) {
	at := f.next
	f.next += uint64(aligned(size)) + 1<<20
	f.taken += size
	f.sizes = append(f.sizes, size)
	return at, f.fail["alloc"]
}
func (f *fake) Write(at uint64, t quant.Type, data []byte, lent int) error {
	f.from = append(f.from, lent)
	f.memory[at] = slices.Clone(data)
	return f.fail["write"]
}
func (f *fake) Lend([]byte) error                { f.lent++; return f.fail["lend"] }
func (f *fake) Return() error                    { f.lent = 0; return nil }
func (f *fake) Send() error                      { f.sent++; return f.fail["send"] }
func (f *fake) Wait() error                      { return f.fail["wait"] }
func (f *fake) Launch(g *Group) error            { f.group = *g; return f.fail["launch"] }
func (f *fake) Collect(n int) ([]float32, error) { return make([]float32, n), f.fail["collect"] }
func (f *fake) Memory() backends.HeldUsage       { return backends.HeldUsage{Allocated: f.taken, Driver: -1} }
func (f *fake) Free() error                      { f.freed = true; return nil }

var (
	narrow = backends.HeldLayer{Types: [3]quant.Type{quant.F32, quant.F32, quant.Q8_0}, Dim: 64, FF: 32}
	wide   = backends.HeldLayer{Types: [3]quant.Type{quant.F32, quant.F32, quant.F32}, Dim: 64, FF: 64}
)

const base, control, direct = 1 << 40, 1 << 50, 1 << 60

func newFake(t *testing.T, f *fake, opt Options) *Experts {
	t.Helper()
	f.next, f.memory, f.fail = base, map[uint64][]byte{}, map[string]error{}
	opt.Name, opt.Types, opt.Head = "fake", []quant.Type{quant.F32, quant.Q8_0}, 100
	e, err := New(f, opt, map[int]backends.HeldLayer{3: narrow, 4: wide, 5: narrow}, 2, 4)
	if err != nil {
		t.Fatal(err)
	}
	e.Attach(Memory{Control: make([]byte, e.Places.Control), Input: make([]byte, e.Places.Input), At: control, Direct: direct})
	return e
}

// parts are an expert's matrices of this layer, told apart by a number.
func parts(l backends.HeldLayer, number int) (p [3][]byte) {
	for i, n := range l.Parts() {
		p[i] = make([]byte, n)
		binary.LittleEndian.PutUint32(p[i], math.Float32bits(float32(number)))
		if l.Types[i] == quant.Q8_0 {
			binary.LittleEndian.PutUint32(p[i], uint32(number)<<16)
		}
	}
	return p
}

func upload(t *testing.T, e *Experts, layer, expert int) {
	t.Helper()
	if err := e.Upload(layer, expert, parts(e.layers[layer], expert)); err != nil {
		t.Fatal(err)
	}
}

func panics(t *testing.T, words string, f func()) {
	t.Helper()
	defer func() {
		t.Helper()
		if said := fmt.Sprint(recover()); !strings.Contains(said, words) {
			t.Errorf("panic %q, want %q", said, words)
		}
	}()
	f()
}

// Experts lie one behind the other in few allocations, each on its own place.
func TestPlaces(t *testing.T) {
	f := &fake{}
	size := 2*aligned(64*32*4) + aligned(64*34) // of narrow
	e := newFake(t, f, Options{Most: 3 * size})
	if e.ExpertBytes(3) != size {
		t.Fatalf("an expert takes %d bytes, want %d", e.ExpertBytes(3), size)
	}
	for i := range 7 {
		upload(t, e, 3, i)
	}
	upload(t, e, 4, 0) // larger than an arena
	if want := []int64{3 * size, 3 * size, 3 * size, max(3*size, e.ExpertBytes(4))}; !slices.Equal(f.sizes, want) {
		t.Errorf("allocations of %v, want %v", f.sizes, want)
	}
	seen := map[uint64]int{}
	for k, at := range e.slots {
		if other, ok := seen[at]; ok {
			t.Errorf("experts %d and %d lie at %d", k.expert, other, at)
		}
		seen[at] = k.expert
		if got := math.Float32frombits(binary.LittleEndian.Uint32(f.memory[at])); got != float32(k.expert) {
			t.Errorf("%v lies at %d, where %v was written", k, at, got)
		}
	}
	u := e.Usage()
	var payload int64
	for _, n := range narrow.Parts() {
		payload += 7 * n
	}
	for _, n := range wide.Parts() {
		payload += n
	}
	if u.Experts != 8 || u.Payload != payload || u.UploadBytes != payload || u.Allocated != f.taken {
		t.Errorf("%+v", u)
	}
	if err := e.Close(); err != nil || !f.freed {
		t.Error(err)
	}
}

// A pool that is larger than 4 GiB does not wrap: no place in it is another's, and
// what kernels are told has all of its bits.
func TestLargePool(t *testing.T) {
	f := &fake{}
	e := newFake(t, f, Options{Most: 4 << 30})
	f.next = 1<<32 - 3*uint64(e.ExpertBytes(3)) // an arena that lies across it
	upload(t, e, 3, 0)
	const rest = 1<<32/arenaBytes + 3
	last, size := e.slots[slotKey{3, 0}], uint64(e.ExpertBytes(3))
	for i := 1; i < rest; i++ {
		if i%2 == 0 { // fill the arena but for a little, as a large tier would
			e.arena, e.left = e.arena+uint64(e.left)-4*size, 4*int64(size)
		}
		for j := range 5 {
			n := 5*i + j
			upload(t, e, 3, n)
			if at := e.slots[slotKey{3, n}]; at < last+size {
				t.Fatalf("expert %d lies at %#x, behind one at %#x", n, at, last)
			} else {
				last = at
			}
		}
	}
	if last < 1<<32+uint64(rest/2-2)*arenaBytes || e.Usage().Allocated < 2<<30 {
		t.Fatalf("the last lies at %#x, of %d bytes", last, f.taken)
	}
	for _, n := range f.sizes {
		if n > 4<<30 {
			t.Errorf("an allocation of %d bytes", n)
		}
	}
	n := 5*(rest-1) + 4
	if err := e.Start(3, []backends.HeldJob{{Expert: int32(n), Rows: []int32{0}}}, 1, 1, backends.SwiGLU, nil); err != nil {
		t.Fatal(err)
	}
	if got := view[Job](e.mem.Control, e.Places.Jobs, 1)[0].W; got != last {
		t.Errorf("kernels are told %#x, want %#x", got, last)
	}
}

// One that takes another's place takes no memory; of layers unlike in size it
// cannot. A failed upload leaves its place to the next of that size.
func TestReplace(t *testing.T) {
	f := &fake{}
	e := newFake(t, f, Options{})
	upload(t, e, 3, 0)
	upload(t, e, 3, 1)
	at, before := e.slots[slotKey{3, 0}], e.Usage()
	if err := e.Replace(3, 0, 5, 9, parts(narrow, 9)); err != nil {
		t.Fatal(err)
	}
	if e.Has(3, 0) || !e.Has(5, 9) || e.slots[slotKey{5, 9}] != at {
		t.Error("the new one is not where the old was")
	}
	upload(t, e, 5, 9) // once more: the same place
	if u := e.Usage(); u.Payload != before.Payload || u.Allocated != before.Allocated || u.Experts != 2 || e.slots[slotKey{5, 9}] != at {
		t.Errorf("%+v, before %+v", u, before)
	}
	for _, call := range []string{"write", "send"} {
		f.fail[call] = errFake
		if err := e.Replace(5, 9, 3, 7, parts(narrow, 7)); !errors.Is(err, errFake) || !strings.Contains(err.Error(), "layer 3 expert 7") {
			t.Errorf("%s: %v", call, err)
		}
		delete(f.fail, call)
		if e.Has(5, 9) || e.Has(3, 7) {
			t.Errorf("%s: one of them is there", call)
		}
		upload(t, e, 4, 0) // of another size: not there
		if e.slots[slotKey{4, 0}] == at {
			t.Error("a larger expert lies in a smaller one's place")
		}
		upload(t, e, 5, 9)
		if e.slots[slotKey{5, 9}] != at {
			t.Error("the place is lost")
		}
	}
	f.fail["alloc"] = errFake
	e.left = 0
	if err := e.Upload(3, 8, parts(narrow, 8)); !errors.Is(err, errFake) || e.Has(3, 8) {
		t.Errorf("%v", err)
	}
	delete(f.fail, "alloc")
	nan := parts(wide, 0)
	binary.LittleEndian.PutUint32(nan[1], 0x7fc00000)
	if err := e.Upload(4, 1, nan); err == nil || !strings.Contains(err.Error(), "expert 1, up") || e.Has(4, 1) {
		t.Errorf("%v", err)
	}
	panics(t, "cannot take the place", func() { e.Replace(3, 1, 4, 1, parts(wide, 1)) })
	panics(t, "cannot take the place", func() { e.Replace(3, 99, 3, 98, parts(narrow, 1)) })
	panics(t, "which has none", func() { e.Upload(77, 0, parts(narrow, 1)) })
	if _, err := New(f, Options{Name: "fake"}, map[int]backends.HeldLayer{3: narrow}, 2, 4); err == nil || !strings.Contains(err.Error(), "fake: layer 3: experts of F32") {
		t.Errorf("%v", err)
	}
}

// The control block says what each expert computes, in the order of the jobs, and
// starting a group allocates nothing.
func TestGroup(t *testing.T) {
	f := &fake{}
	e := newFake(t, f, Options{X: true})
	for i := range 3 {
		upload(t, e, 3, i)
	}
	bias := &[3][]float32{make([]float32, 3*32), make([]float32, 3*32), make([]float32, 3*64)}
	jobs := []backends.HeldJob{{Expert: 2, Rows: []int32{0, 5}}, {Expert: 0, Rows: []int32{3}}}
	start := func(k, n int, bias *[3][]float32) {
		if err := e.Start(3, jobs, k, n, backends.ClampedSwiGLU, bias); err != nil {
			t.Fatal(err)
		}
		out, err := e.Finish()
		rows := 0
		for _, j := range jobs {
			rows += len(j.Rows)
		}
		if err != nil || len(out) != rows*narrow.Dim {
			t.Fatalf("%d floats, %v", len(out), err)
		}
	}
	start(2, 3, bias)
	p := &e.Places
	if want := (Group{Layer: narrow, Act: backends.ClampedSwiGLU, Jobs: 2, N: 3, Rows: 3, Longest: 2}); f.group != want {
		t.Errorf("%+v, want %+v", f.group, want)
	}
	at := func(expert, part int) uint64 {
		w := e.slots[slotKey{3, expert}]
		for i := range part {
			w += uint64(e.sizes(narrow)[i])
		}
		return w
	}
	b := e.biases[3]
	want := []Job{
		{W: at(2, 0), Y: control + uint64(p.Gate), Bias: b[0] + 2*32*4, First: 0, N: 2, Stride: 32},
		{W: at(0, 0), Y: control + uint64(p.Gate) + 2*32*4, Bias: b[0], First: 4, N: 1, Stride: 32},
		{W: at(2, 1), Y: control + uint64(p.Up), Bias: b[1] + 2*32*4, First: 0, N: 2, Stride: 32},
		{W: at(0, 1), Y: control + uint64(p.Up) + 2*32*4, Bias: b[1], First: 4, N: 1, Stride: 32},
		{W: at(2, 2), Y: control + uint64(p.Out), Bias: b[2] + 2*64*4, First: 6, N: 2, Stride: 64},
		{W: at(0, 2), Y: control + uint64(p.Out), Bias: b[2], First: 10, N: 1, Stride: 64},
	}
	if got := view[Job](e.mem.Control, p.Jobs, len(want)); !slices.Equal(got, want) {
		t.Errorf("jobs\n%+v, want\n%+v", got, want)
	}
	index := [][2]uint32{{0, 0}, {2, 1}, {1, 0}, {0, 0}, {1, 1}, {2, 2}}
	if got := view[[2]uint32](e.mem.Control, p.Index, len(index)); !slices.Equal(got, index) {
		t.Errorf("index %v, want %v", got, index)
	}
	// One vector, each expert once: outputs go where the host reads them.
	jobs = []backends.HeldJob{{Expert: 1, Rows: []int32{1}}, {Expert: 2, Rows: []int32{0}}}
	sent := f.sent
	start(2, 1, bias)
	if got := view[Job](e.mem.Control, p.Jobs, 6)[4]; got.Y != direct || f.sent != sent || !f.group.Single() {
		t.Errorf("%+v, %d sent", got, f.sent-sent)
	}
	if n := testing.AllocsPerRun(10, func() {
		if err := e.Start(3, jobs, 2, 1, backends.SwiGLU, nil); err != nil {
			t.Fatal(err)
		}
		e.running = false // Collect of the fake allocates
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}

	many := make([]backends.HeldJob, MostJobs+1)
	panics(t, "a group of 17 experts", func() { e.Start(3, many, 2, 1, 0, nil) })
	panics(t, "for 5 positions", func() { e.Start(3, jobs, 2, 5, 0, nil) })
	panics(t, "9 rows, at most 8", func() { e.Start(3, []backends.HeldJob{{Rows: make([]int32, 9)}}, 2, 4, 0, nil) })
	panics(t, "expert 9 of layer 3 is not on the device", func() { e.Start(3, []backends.HeldJob{{Expert: 9, Rows: []int32{0}}}, 2, 1, 0, nil) })
	if err := e.Start(3, nil, 2, 1, 0, nil); err != nil {
		t.Error(err)
	}
	if out, err := e.Finish(); out != nil || err != nil {
		t.Errorf("%v, %v without a group", out, err)
	}
	f.fail["launch"] = errFake
	if err := e.Start(3, jobs, 2, 1, 0, nil); !errors.Is(err, errFake) {
		t.Errorf("%v", err)
	}
	delete(f.fail, "launch")
	if err := e.Start(3, jobs, 2, 1, 0, nil); err != nil { // it was not begun
		t.Fatal(err)
	}
	panics(t, "before the Finish", func() { e.Start(3, jobs, 2, 1, 0, nil) })
	panics(t, "cannot take the place", func() { e.Replace(3, 0, 3, 9, parts(narrow, 9)) })
	f.fail["collect"] = errFake
	if _, err := e.Finish(); !errors.Is(err, errFake) {
		t.Errorf("%v", err)
	}
}

// What lies in memory that host and device share does not overlap, and is aligned.
func TestShared(t *testing.T) {
	p := places(Options{Head: 100, X: true}, 96, 32, 2, 3)
	at := []int64{0, p.Jobs, p.Index, p.Control, p.XA, p.XB, p.Hidden, p.Gate, p.Up, p.Out, p.Size}
	size := []int64{100, 3 * MostJobs * 40, IndexBytes(6), 4 * 3 * 96, FormBytes(3 * 96), FormBytes(3 * 96), FormBytes(6 * 32), 4 * 6 * 32, 4 * 6 * 32, 4 * 6 * 96, 0}
	for i := range at[1:] {
		if at[i]%Align != 0 || at[i]+size[i] > at[i+1] {
			t.Errorf("part %d: %d bytes from %d to %d", i, size[i], at[i], at[i+1])
		}
	}
	if p.X != p.Control || p.Input != 4*3*96 || p.Output != 4*6*96 {
		t.Errorf("%+v", p)
	}
	for _, n := range []int{32, 256, 1000} {
		f := FormAt(1<<20+256, n)
		if f.Code != 1<<20+256 || f.Scale < f.Code+4*uint64(n) || f.Sum < f.Scale+uint64(n)/8 || f.Sum+uint64(n)/4 > f.Code+uint64(FormBytes(n)) || f.Scale%Align != 0 || f.Sum%Align != 0 {
			t.Errorf("%d floats: %+v, %d bytes", n, f, FormBytes(n))
		}
	}
}

// Parts that lie in lent memory are written from there, by its number; what is not
// taken is counted, and nothing is lent then.
func TestLend(t *testing.T) {
	f := &fake{}
	e := newFake(t, f, Options{})
	mem, other := make([]byte, 1<<16), make([]byte, 1<<16)
	from := func(slot []byte) [3][]byte {
		p, at := parts(narrow, 1), 0
		for i := range p {
			n := copy(slot[at:], p[i])
			p[i] = slot[at : at+n]
			at += n
		}
		return p
	}
	write := func(p [3][]byte, want ...int) {
		t.Helper()
		f.from = nil
		if err := e.Upload(3, 0, p); err != nil || !slices.Equal(f.from, want) {
			t.Errorf("%v, from %v, want %v", err, f.from, want)
		}
	}
	write(from(mem), -1, -1, -1)
	if err := e.Lend([][]byte{mem[:16<<10], other}); err != nil {
		t.Fatal(err)
	}
	write(from(other), 1, 1, 1)
	write(from(mem), 0, 0, -1) // the last one lies behind what was lent
	all := narrow.Parts()
	if u := e.Usage(); u.DirectBytes != 2*(all[0]+all[1])+all[2] || u.Unpinned != 0 {
		t.Errorf("%+v", u)
	}
	for err, refused := range map[error]int64{errFake: 1, errors.ErrUnsupported: 0} {
		before := e.Usage().Unpinned
		f.fail["lend"] = err
		if got := e.Lend([][]byte{mem}); !errors.Is(got, err) || f.lent != 0 || e.Usage().Unpinned-before != refused {
			t.Errorf("%v, %d lent, %+v", got, f.lent, e.Usage())
		}
		delete(f.fail, "lend")
		write(from(mem), -1, -1, -1)
	}
	if err := e.Lend(nil); err != nil {
		t.Error(err)
	}
}
