// Package held keeps experts in the memory of a device and describes groups of them
// to its kernels: what is the same whoever's driver copies and launches. A driver
// implements Device; what its users get are Experts.
//
// One goroutine at a time uses Experts.
package held

import (
	"errors"
	"fmt"
	"slices"
	"time"
	"unsafe"

	"sluice/backends"
	"sluice/internal/offheap"
	"sluice/internal/quant"
)

// A Device is what a driver does for Experts. Addresses are the device's.
type Device interface {
	// MatrixBytes is what a matrix takes there, a multiple of Align.
	MatrixBytes(t quant.Type, rows, cols int) int64
	// Alloc takes memory of the device, aligned to Align; Free gives it back.
	Alloc(size int64) (at uint64, err error)
	// Write begins to copy a matrix of type t to where there is room for it. The data
	// are the caller's again after the next Send. They lie in lent memory of that number,
	// from where they are copied without staging; -1: elsewhere.
	Write(at uint64, t quant.Type, data []byte, lent int) error
	// Lend takes memory of the host, beside what it has: number 0, then 1. After an error
	// wrapping errors.ErrUnsupported none was to be expected. Return gives all back.
	Lend(mem []byte) error
	Return() error
	// Send ends a run of Writes: a group that is launched later meets what they wrote.
	Send() error
	// Wait waits until all that was sent is in the device's memory.
	Wait() error
	// Launch starts the group that the control block describes.
	Launch(g *Group) error
	// Collect waits for the group and gives its outputs, so many floats, good until
	// the next Launch. An activation out of range is a *backends.ActivationError.
	Collect(floats int) ([]float32, error)
	// Memory is what the driver knows of a HeldUsage: all but Experts, Payload,
	// uploads and refusals of Lend.
	Memory() backends.HeldUsage
	// Free waits for what is under way and frees everything.
	Free() error
}

// Align is the alignment of matrices in the device's memory.
const Align = 256

// aligned is n, rounded up to it.
func aligned(n int64) int64 { return (n + Align - 1) &^ (Align - 1) }

const (
	// MostJobs are the experts of a group at most.
	MostJobs = 16
	// arenaBytes: few large allocations, of which drivers have a limited number.
	arenaBytes = 256 << 20
)

// Options are what differs between drivers.
type Options struct {
	Name  string       // of the driver, in errors
	Types []quant.Type // that its kernels know
	Head  int          // bytes at the beginning of the control block that are the driver's own
	X     bool         // the scratch has a copy of the input
	Most  int64        // bytes of an allocation at most; 0: no limit that matters
}

// Experts are experts in a device's memory and the means to compute groups of them.
// It implements backends.Holder.
type Experts struct {
	Places Places // for the driver
	d      Device
	opt    Options
	mem    Memory
	layers map[int]backends.HeldLayer
	k      int // choices of a position
	most   int // positions of a batch

	slots    map[slotKey]uint64
	free     map[int64][]uint64 // places without an expert, by size
	biases   map[int][3]uint64  // by layer: of all its experts
	arena    uint64             // the last one
	left     int64              // bytes at its end
	payload  int64              // bytes of what is there
	uploaded int64              // bytes since the start
	nanos    int64              // of uploads
	lent     [][]byte           // memory of the host that needs no staging
	direct   int64              // bytes that came from there
	refused  int64              // times that it was not taken

	group   Group
	running bool
	taken   bool // the input of groups is there
	given   bool // a group may be under way whose outputs were given
}

type slotKey struct{ layer, expert int }

// A Memory is what a driver has allocated for Places.
type Memory struct {
	Control, Input []byte // the host's view of what the device reads
	At             uint64 // of the control block's copy, with the scratch behind it
	Direct         uint64 // where the outputs of a group of single vectors go; 0: to the scratch like others
}

// New makes room to compute experts of these layers for up to `most` positions with
// k choices each, of which the driver then allocates Places and tells with Attach.
func New(d Device, opt Options, layers map[int]backends.HeldLayer, k, most int) (*Experts, error) {
	e := &Experts{d: d, opt: opt, layers: layers, k: k, most: most, slots: map[slotKey]uint64{}, free: map[int64][]uint64{}, biases: map[int][3]uint64{}}
	dim, ff := 0, 0
	for i, l := range layers {
		for _, t := range l.Types {
			if !slices.Contains(opt.Types, t) {
				return nil, fmt.Errorf("%s: layer %d: experts of %v: the kernels know %v; leave --vram out, or convert the model", opt.Name, i, t, opt.Types)
			}
		}
		dim, ff = max(dim, l.Dim), max(ff, l.FF)
	}
	e.Places = places(opt, dim, ff, k, most)
	return e, nil
}

// Attach tells of the memory of Places.
func (e *Experts) Attach(m Memory) { e.mem = m }

// ExpertBytes is what an expert of the layer takes as allocated.
func (e *Experts) ExpertBytes(layer int) int64 {
	sizes := e.sizes(e.layers[layer])
	return sizes[0] + sizes[1] + sizes[2]
}

func (e *Experts) sizes(l backends.HeldLayer) [3]int64 {
	return [3]int64{e.d.MatrixBytes(l.Types[0], l.FF, l.Dim), e.d.MatrixBytes(l.Types[1], l.FF, l.Dim), e.d.MatrixBytes(l.Types[2], l.Dim, l.FF)}
}

// Upload copies an expert's gate, up and down into the device's memory, after
// looking for numbers that the arithmetic does not take. The parts are the
// caller's again when it returns. After an error it is not there.
func (e *Experts) Upload(layer, expert int, parts [3][]byte) error {
	l, ok := e.layers[layer]
	if !ok {
		panic(fmt.Sprintf("%s: upload of an expert of layer %d, which has none", e.opt.Name, layer))
	}
	if err := l.Check(expert, parts); err != nil {
		return err
	}
	if err := e.drain(); err != nil {
		return err
	}
	defer e.clock(time.Now())
	e.remove(layer, expert)
	size := e.ExpertBytes(layer)
	at, err := e.place(size)
	if err == nil {
		if err = e.write(at, l, parts); err != nil {
			e.free[size] = append(e.free[size], at)
		}
	}
	if err != nil {
		return fmt.Errorf("layer %d expert %d: %w", layer, expert, err)
	}
	for _, n := range l.Parts() {
		e.payload += n
		e.uploaded += n
	}
	e.slots[slotKey{layer, expert}] = at
	return nil
}

func (e *Experts) clock(start time.Time) { e.nanos += time.Since(start).Nanoseconds() }

func (e *Experts) write(at uint64, l backends.HeldLayer, parts [3][]byte) error {
	for i, n := range e.sizes(l) {
		lent := slices.IndexFunc(e.lent, func(m []byte) bool { return offheap.Holds(m, parts[i]) })
		if err := e.d.Write(at, l.Types[i], parts[i], lent); err != nil {
			return err
		}
		if lent >= 0 {
			e.direct += int64(len(parts[i]))
		}
		at += uint64(n)
	}
	return e.d.Send()
}

// place finds room for an expert, in a new arena if need be.
func (e *Experts) place(size int64) (at uint64, err error) {
	if free := e.free[size]; len(free) > 0 {
		at, e.free[size] = free[len(free)-1], free[:len(free)-1]
		return at, nil
	}
	if size > e.left {
		n := int64(arenaBytes)
		if e.opt.Most > 0 {
			n = min(n, e.opt.Most)
		}
		n = max(n, size)
		if at, err = e.d.Alloc(n); err != nil {
			return 0, err
		}
		e.arena, e.left = at, n
	}
	at = e.arena
	e.arena, e.left = e.arena+uint64(size), e.left-size
	return at, nil
}

// Replace copies an expert in, over one that takes as much, of which no group may
// be under way. After an error neither is there.
func (e *Experts) Replace(oldLayer, old, layer, expert int, parts [3][]byte) error {
	if !e.Has(oldLayer, old) || e.ExpertBytes(oldLayer) != e.ExpertBytes(layer) || e.running {
		panic(fmt.Sprintf("%s: expert %d of layer %d cannot take the place of expert %d of layer %d", e.opt.Name, expert, layer, old, oldLayer))
	}
	if err := e.drain(); err != nil { // which may be under way with it
		return err
	}
	e.remove(oldLayer, old)
	return e.Upload(layer, expert, parts)
}

// remove forgets an expert, if it is there, and keeps its place.
func (e *Experts) remove(layer, expert int) {
	at, ok := e.slots[slotKey{layer, expert}]
	if !ok {
		return
	}
	delete(e.slots, slotKey{layer, expert})
	for _, n := range e.layers[layer].Parts() {
		e.payload -= n
	}
	size := e.ExpertBytes(layer)
	e.free[size] = append(e.free[size], at)
}

// Lend lends memory of the host, from which uploads then go without a copy through
// staging, until Lend is called again: without memory nothing is lent any more. An
// error says why the device does not take it; uploads go through staging then.
func (e *Experts) Lend(mem [][]byte) error {
	err := e.d.Return()
	e.lent = nil
	for _, m := range mem {
		if err != nil {
			break
		}
		if err = e.d.Lend(m); err != nil {
			if !errors.Is(err, errors.ErrUnsupported) {
				e.refused++
			}
			e.lent = nil
			return errors.Join(err, e.d.Return())
		}
		e.lent = append(e.lent, m)
	}
	return err
}

// Settle waits until all that was uploaded is in the device's memory.
func (e *Experts) Settle() error {
	defer e.clock(time.Now())
	return e.d.Wait()
}

// Has says whether an expert is in the device's memory.
func (e *Experts) Has(layer, expert int) bool { _, ok := e.slots[slotKey{layer, expert}]; return ok }

// Usage asks the driver too.
func (e *Experts) Usage() backends.HeldUsage {
	u := e.d.Memory()
	u.DirectBytes, u.Unpinned = e.direct, u.Unpinned+e.refused
	u.Experts, u.Payload, u.UploadBytes, u.UploadNanos = int64(len(e.slots)), e.payload, e.uploaded, e.nanos
	return u
}

// Close frees the experts' memory.
func (e *Experts) Close() error {
	e.running = false
	return e.d.Free()
}

// bias gives the layer's biases on the device, copied there when first asked for;
// zeros where there are none.
func (e *Experts) bias(layer int, bias *[3][]float32) (at [3]uint64, err error) {
	if bias == nil || bias[0] == nil {
		return at, nil
	}
	if at, ok := e.biases[layer]; ok {
		return at, nil
	}
	var size int64
	for _, part := range bias {
		size += aligned(4 * int64(len(part)))
	}
	to, err := e.d.Alloc(size)
	if err != nil {
		return at, err
	}
	for i, part := range bias {
		if err := e.d.Write(to, quant.F32, unsafe.Slice((*byte)(unsafe.Pointer(&part[0])), 4*len(part)), -1); err != nil {
			return at, err
		}
		at[i] = to
		to += uint64(aligned(4 * int64(len(part))))
	}
	if err := e.d.Send(); err != nil {
		return at, err
	}
	e.biases[layer] = at
	return at, nil
}
