package held

import (
	"fmt"
	"unsafe"

	"sluice/backends"
)

// A Group is experts of one layer and the vectors that they compute.
type Group struct {
	Layer   backends.HeldLayer
	Act     backends.Activation
	Jobs    int  // experts
	N       int  // input vectors
	Rows    int  // output vectors of all jobs
	Longest int  // output vectors of a job at most
	Taken   bool // the input is there, by the device's Fetch
}

// Single says that each expert computes the one input vector, once.
func (g *Group) Single() bool { return g.N == 1 && g.Rows == g.Jobs }

// A Job is one matrix times some vectors, as kernels read it.
type Job struct {
	W, Y, Bias uint64 // of the matrix, of the output rows, of the matrix's biases or 0
	First      uint32 // of its vectors in the index, two words each: input row, output row
	N          uint32
	Stride     uint32 // of output rows, in floats
	Step       uint32 // without an index: from one input row to the next
}

// Places are how memory lies that host and device share: offsets from the control
// block's copy on the device on. Input and Output are the bytes of buffers of their own.
//
// The control block is the driver's head, 3*MostJobs jobs (of a group of j experts
// first j for gate, then j for up, then j for down), and an index of a group's rows
// for gate and up, behind it one for down.
type Places struct {
	Jobs, Index    int64
	Control        int64 // bytes of the control block; the scratch is behind it
	X              int64 // floats, if there is a copy
	XA, XB, Hidden int64 // forms of x, for gate and for up, and of what down multiplies
	Gate, Up, Out  int64 // floats
	Size           int64 // bytes of all
	Input, Output  int64
}

func places(opt Options, dim, ff, k, most int) (p Places) {
	rows := k * most
	take := func(n int64) int64 {
		at := p.Size
		p.Size += aligned(n)
		return at
	}
	take(int64(opt.Head))
	p.Jobs = take(3 * MostJobs * int64(unsafe.Sizeof(Job{})))
	p.Index = take(IndexBytes(rows))
	p.Control = p.Size
	if opt.X {
		p.X = take(4 * int64(most*dim))
	}
	p.XA, p.XB = take(FormBytes(most*dim)), take(FormBytes(most*dim))
	p.Hidden = take(FormBytes(rows * ff))
	p.Gate, p.Up = take(4*int64(rows)*int64(ff)), take(4*int64(rows)*int64(ff))
	p.Out = take(4 * int64(rows) * int64(dim))
	p.Input, p.Output = 4*int64(most)*int64(dim), 4*int64(rows)*int64(dim)
	return p
}

// IndexBytes is what the index of a group of so many rows takes.
func IndexBytes(rows int) int64 { return 16 * int64(rows) }

// A Form is a batch of vectors as rows meet them, in device memory.
type Form struct {
	Code, Scale, Sum uint64 // Code holds floats for float rows
}

// formRun is the floats of eight blocks of 256, which a driver may lay side by side.
const formRun = 2048

// FormBytes is what a form of so many floats takes, whatever the type.
func FormBytes(floats int) int64 {
	n := (int64(floats) + formRun - 1) &^ (formRun - 1)
	return 4*n + 4*n/32 + 4*n/16 + 3*Align
}

// FormAt lays a form of so many floats out from an address on.
func FormAt(at uint64, floats int) Form {
	n := (int64(floats) + formRun - 1) &^ (formRun - 1)
	f := Form{Code: at}
	f.Scale = uint64(aligned(int64(f.Code) + 4*n))
	f.Sum = uint64(aligned(int64(f.Scale) + n/8))
	return f
}

// Input is where the n vectors [n, dim] of the next group belong.
func (e *Experts) Input(n, dim int) []float32 {
	e.taken = false
	return view[float32](e.mem.Input, 0, n*dim)
}

// A Fetcher is a Device that may copy the input of groups to Places.X from where a
// backend keeps it; it says no if it does not reach x.
//
// It may also Hand over the outputs of a group whose input it fetched, as Give of backends.Taker
// says. Drain then waits until the control block and the experts are not read any more.
type Fetcher interface {
	Fetch(x backends.Vec) (bool, error)
	Hand(out backends.Vec, rows []int32, from uint64) (bool, error)
	Drain() error
}

// Take is backends.Taker's, where the device is a Fetcher.
func (e *Experts) Take(x backends.Vec) (bool, error) {
	e.taken = false
	f, ok := e.d.(Fetcher)
	if !ok || x.Len() > e.most {
		return false, nil
	}
	var err error
	e.taken, err = f.Fetch(x)
	return e.taken, err
}

// Give is backends.Taker's, where the device is a Fetcher.
func (e *Experts) Give(out backends.Vec, rows []int32) (given bool, err error) {
	if !e.running || !e.group.Taken {
		return false, nil
	}
	given, err = e.d.(Fetcher).Hand(out, rows, e.mem.At+uint64(e.Places.Out))
	if given || err != nil {
		e.running, e.given = false, true
	}
	return given, err
}

// drain waits for a group that was given, and may be under way.
func (e *Experts) drain() error {
	if !e.given {
		return nil
	}
	e.given = false
	return e.d.(Fetcher).Drain()
}

// view is n values of type T in memory.
func view[T any](mem []byte, at int64, n int) []T {
	var v T
	_ = mem[at : at+int64(n)*int64(unsafe.Sizeof(v))]
	return unsafe.Slice((*T)(unsafe.Pointer(&mem[at])), n)
}

// Start computes a group of experts of one layer: see backends.Holder. What it
// panics at is the caller's bug.
func (e *Experts) Start(layer int, jobs []backends.HeldJob, k, n int, act backends.Activation, bias *[3][]float32) error {
	if e.running {
		panic(e.opt.Name + ": Start before the Finish of another group")
	}
	if len(jobs) > MostJobs || n > e.most {
		panic(fmt.Sprintf("%s: a group of %d experts for %d positions: at most %d and %d", e.opt.Name, len(jobs), n, MostJobs, e.most))
	}
	g := &e.group
	*g = Group{Layer: e.layers[layer], Act: act, Jobs: len(jobs), N: n, Taken: e.taken}
	for i := range jobs {
		g.Rows += len(jobs[i].Rows)
		g.Longest = max(g.Longest, len(jobs[i].Rows))
	}
	if g.Rows == 0 {
		return nil
	}
	if g.Rows > e.k*e.most {
		panic(fmt.Sprintf("%s: a group of %d rows, at most %d", e.opt.Name, g.Rows, e.k*e.most))
	}
	if err := e.drain(); err != nil {
		return err
	}
	b, err := e.bias(layer, bias)
	if err != nil {
		return err
	}
	e.describe(layer, jobs, k, b)
	if err := e.d.Launch(g); err != nil {
		return err
	}
	e.running = true
	return nil
}

// describe writes the jobs and the index of the group into the control block.
func (e *Experts) describe(layer int, jobs []backends.HeldJob, k int, bias [3]uint64) {
	l, g, p, dev := e.group.Layer, &e.group, &e.Places, e.mem.At
	sizes := e.sizes(l)
	list := view[Job](e.mem.Control, p.Jobs, 3*MostJobs)
	index := view[[2]uint32](e.mem.Control, p.Index, 2*g.Rows)
	out := dev + uint64(p.Out)
	if e.mem.Direct != 0 && g.Single() && !g.Taken { // what was taken may be given
		out = e.mem.Direct
	}
	base := 0
	for j := range jobs {
		w, ok := e.slots[slotKey{layer, int(jobs[j].Expert)}]
		if !ok {
			panic(fmt.Sprintf("%s: expert %d of layer %d is not on the device", e.opt.Name, jobs[j].Expert, layer))
		}
		for part, one := range [3]Job{
			{Y: dev + uint64(p.Gate+int64(4*base*l.FF)), First: uint32(2 * base), Stride: uint32(l.FF)},
			{Y: dev + uint64(p.Up+int64(4*base*l.FF)), First: uint32(2 * base), Stride: uint32(l.FF)},
			{Y: out, First: uint32(2 * (g.Rows + base)), Stride: uint32(l.Dim)},
		} {
			one.W, one.N = w, uint32(len(jobs[j].Rows))
			if bias[part] != 0 {
				one.Bias = bias[part] + 4*uint64(jobs[j].Expert)*uint64(one.Stride)
			}
			list[part*len(jobs)+j] = one
			w += uint64(sizes[part])
		}
		for i, r := range jobs[j].Rows {
			index[base+i] = [2]uint32{uint32(int(r) / k), uint32(i)}
			index[g.Rows+base+i] = [2]uint32{uint32(base + i), uint32(base + i)}
		}
		base += len(jobs[j].Rows)
	}
}

// Finish waits for the group and gives its outputs, a vector for each row of
// each job, in their order. They are good until the next Start.
func (e *Experts) Finish() ([]float32, error) {
	if !e.running {
		return nil, nil
	}
	e.running = false
	return e.d.Collect(e.group.Rows * e.group.Layer.Dim)
}
