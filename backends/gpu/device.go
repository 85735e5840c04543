package gpu

import (
	"errors"
	"fmt"
	"runtime"
	"unsafe"

	"sluice/internal/offheap"
)

// ErrUnfit says that a device cannot compute the one arithmetic, or that there are
// no kernels for it.
var ErrUnfit = errors.New("unfit device")

// Options are what a device is opened with.
type Options struct {
	Embedded bool   // take the kernels of this binary where a compiler could make others
	Cache    string // folder of compiled kernels; "": that of the user
}

// A Device is an open device with two streams: kernels, and uploads beside them.
// All that is made of it must be closed first.
type Device struct {
	Info
	Compiler Library // of the kernels; no File: they came with this binary
	dr       *Driver
	opt      Options
	context  uintptr // CUDA's
	kernels  uintptr // streams
	copies   uintptr
	modules  map[string]uintptr
	funcs    map[string]function
	products map[product]function
	compiler *compiler
	buffers  map[*buffer]bool
	reached  []uintptr // devices whose memory this one writes
	lost     error     // of the device, once it is known
	before   int64     // bytes in use when it was opened
	recorded int64     // graphs
	launches int64     // of kernels and graphs
	waits    int64     // for all that was launched
	unpinned int64     // staging buffers that could not be pinned
}

type function struct {
	handle   uintptr
	resident int // blocks of a multiprocessor at once; 0: not known
}

// Open opens device i of Devices. ErrUnfit: it has no kernels, or computes wrongly.
func (dr *Driver) Open(i int, opt Options) (*Device, error) {
	if i < 0 || i >= len(dr.devices) {
		return nil, fmt.Errorf("%v: there is no device %d: there are %d, 0 to %d", dr.API, i, len(dr.devices), len(dr.devices)-1)
	}
	d := &Device{Info: dr.devices[i], dr: dr, opt: opt, modules: map[string]uintptr{}, funcs: map[string]function{}, products: map[product]function{}, buffers: map[*buffer]bool{}}
	if err := d.open(); err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

func (d *Device) open() error {
	w, f := d.dr.words, &d.dr.f
	if d.dr.API == CUDA {
		if err := d.check("context", f.retain.call(addr(&w.out[0]), d.handle)); err != nil {
			return err
		}
		d.context = uintptr(w.out[0])
	}
	defer d.enter()()
	for _, s := range []*uintptr{&d.kernels, &d.copies} {
		const nonBlocking = 1
		if err := d.check("stream", f.stream.call(addr(&w.out[0]), nonBlocking)); err != nil {
			return err
		}
		*s = uintptr(w.out[0])
	}
	free, err := d.Free()
	if err != nil {
		return err
	}
	d.before = d.Memory - free
	d.compiler = newCompiler(d)
	return d.known()
}

// enter makes the device that of the calling thread, which the goroutine keeps
// until it calls what this returns.
func (d *Device) enter() (leave func()) {
	runtime.LockOSThread()
	d.note(d.dr.check("current device", d.dr.f.current.call(d.self())))
	return runtime.UnlockOSThread
}

// self is how calls name the device: by its context or its number.
func (d *Device) self() uintptr {
	if d.dr.API == HIP {
		return uintptr(d.Index)
	}
	return d.context
}

// note remembers the loss of the device, after which nothing is asked of it.
func (d *Device) note(err error) error {
	if err == nil {
		return nil
	}
	var e *Error
	if errors.As(err, &e) && e.lost() && d.lost == nil {
		d.lost = err
	}
	return err
}

func (d *Device) check(call string, code int) error { return d.note(d.dr.check(call, code)) }

// Close waits for the device and lets it go.
func (d *Device) Close() error {
	f := &d.dr.f
	var err error
	leave := d.enter()
	if d.lost == nil {
		for _, s := range []uintptr{d.kernels, d.copies} {
			if s != 0 {
				err = errors.Join(err, d.check("stream synchronize", f.waitStream.call(s)))
			}
		}
	}
	for b := range d.buffers {
		d.drop(b)
	}
	for _, other := range d.reached {
		f.unreach.call(other)
	}
	for _, m := range d.modules {
		f.endModule.call(m)
	}
	for _, s := range []uintptr{d.kernels, d.copies} {
		if s != 0 {
			f.endStream.call(s)
		}
	}
	leave()
	if d.context != 0 {
		f.letGo.call(d.handle)
		d.context = 0
	}
	d.kernels, d.copies, d.compiler, d.modules, d.funcs, d.products, d.reached = 0, 0, nil, nil, nil, nil, nil
	return err
}

// Free is how much of the device's memory is free, by the driver's word.
func (d *Device) Free() (int64, error) {
	defer d.enter()()
	w := d.dr.words
	if err := d.check("memory info", d.dr.f.memory.call(addr(&w.out[0]), addr(&w.more[0]))); err != nil {
		return 0, err
	}
	return int64(w.out[0]), nil
}

// waitKernels waits for the stream of kernels.
func (d *Device) waitKernels() error {
	err := d.check("stream synchronize", d.dr.f.waitStream.call(d.kernels))
	if err == nil {
		d.waits++
	}
	return err
}

// A buffer is memory that the device addresses.
type buffer struct {
	at     uint64 // the device's address
	size   int64
	host   []byte // where the host sees it; nil: it does not
	pinned bool   // of the host's memory
}

func (d *Device) buffer(size int64) (*buffer, error) {
	if d.lost != nil {
		return nil, d.lost
	}
	defer d.enter()()
	w := d.dr.words
	if err := d.check("allocation", d.dr.f.allocate.call(addr(&w.out[0]), uintptr(size))); err != nil {
		return nil, fmt.Errorf("%w (%d bytes of device memory)", err, size)
	}
	b := &buffer{at: w.out[0], size: size}
	d.buffers[b] = true
	return b, nil
}

// hostBuffer is memory of the host, pinned and mapped into the device's addresses.
func (d *Device) hostBuffer(size int64) (*buffer, error) {
	if d.lost != nil {
		return nil, d.lost
	}
	defer d.enter()()
	w, f := d.dr.words, &d.dr.f
	const portable, mapped = 1, 2
	if err := d.check("host allocation", f.allocateHost.call(addr(&w.out[0]), uintptr(size), portable|mapped)); err != nil {
		return nil, fmt.Errorf("%w (%d bytes of pinned host memory: raise the limit of locked memory, ulimit -l, or free RAM)", err, size)
	}
	b := &buffer{size: size, pinned: true}
	b.host = unsafe.Slice(*(**byte)(unsafe.Pointer(&w.out[0])), size)
	d.buffers[b] = true
	if err := d.check("address of host memory", f.hostAddress.call(addr(&w.more[0]), uintptr(w.out[0]), 0)); err != nil {
		d.drop(b)
		return nil, err
	}
	b.at = w.more[0]
	return b, nil
}

// stagingBuffer is pinned host memory, or plain where that cannot be had: copies
// from there hold up whoever starts them.
func (d *Device) stagingBuffer(size int64) (*buffer, error) {
	b, err := d.hostBuffer(size)
	if err == nil || d.lost != nil {
		return b, err
	}
	d.unpinned++
	mem, err := offheap.Alloc(size)
	if err != nil {
		return nil, fmt.Errorf("%v: no memory to upload from: %w", d.dr.API, err)
	}
	b = &buffer{size: size, host: mem}
	d.buffers[b] = true
	return b, nil
}

// drop frees a buffer, of which nothing may be in use.
func (d *Device) drop(b *buffer) {
	if b == nil || !d.buffers[b] {
		return
	}
	delete(d.buffers, b)
	switch {
	case b.pinned:
		defer d.enter()()
		d.dr.f.freeHost.call(uintptr(unsafe.Pointer(&b.host[0])))
	case b.host != nil:
		offheap.Free(b.host)
	default:
		defer d.enter()()
		d.dr.f.free.call(uintptr(b.at))
	}
	b.host = nil
}

// launch starts a kernel on a stream with one parameter, a struct.
func launch[T any](d *Device, stream uintptr, f function, grid [3]int, threads int, params T) error {
	*(*T)(unsafe.Pointer(&d.dr.words.args)) = params
	return d.launchArgs(stream, f, grid, threads)
}

// launchArgs is launch with the parameters where calls read them.
func (d *Device) launchArgs(stream uintptr, f function, grid [3]int, threads int) error {
	w := d.dr.words
	w.params[0] = addr(&w.args)
	d.launches++
	return d.check("launch", d.dr.f.launch.call(f.handle, uintptr(grid[0]), uintptr(grid[1]), uintptr(grid[2]), uintptr(threads), 1, 1, 0, stream, addr(&w.params), 0))
}

// at is a value of type T in the host's view of a buffer.
func at[T any](b *buffer, offset int) *T {
	var v T
	_ = b.host[offset : offset+int(unsafe.Sizeof(v))]
	return (*T)(unsafe.Pointer(&b.host[offset]))
}

// slice is n values of type T there.
func slice[T any](b *buffer, offset, n int) []T {
	var v T
	_ = b.host[offset : offset+n*int(unsafe.Sizeof(v))]
	return unsafe.Slice((*T)(unsafe.Pointer(&b.host[offset])), n)
}
