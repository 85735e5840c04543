package vulkan

import (
	"time"
	"unsafe"
)

// A commands is a command buffer: recorded once, submitted as often as wanted.
type commands struct {
	d      *Device
	q      *queue
	handle uintptr
	err    error   // of recording: the first
	wrote  uintptr // stages that have written since the last barrier
}

func (q *queue) commands() (*commands, error) {
	d, a := q.d, q.d.a
	mark := a.mark()
	defer a.release(mark)
	out := put(a, uintptr(0))
	info := put(a, commandBufferAllocateInfo{header: header{sType: stCommandBufferAllocate}, pool: q.pool, count: 1})
	if err := check("vkAllocateCommandBuffers", d.f.allocateCommands.call(d.handle, addr(info), addr(out))); err != nil {
		return nil, err
	}
	return &commands{d: d, q: q, handle: *out}, nil
}

// begin starts a recording, which replaces what was there.
func (c *commands) begin() {
	d := c.d
	mark := d.a.mark()
	defer d.a.release(mark)
	info := put(d.a, commandBufferBeginInfo{header: header{sType: stCommandBufferBegin}})
	c.err = check("vkBeginCommandBuffer", d.f.begin.call(c.handle, addr(info)))
	c.wrote = 0
}

// run records a kernel whose parameters lie at an offset of a buffer, its group
// counts in their first three words, to be read there when it runs; or with counts
// known now. It waits for what was recorded before.
func (c *commands) run(k kernel, b *buffer, offset uint64, known ...uint32) {
	if len(known) == 3 {
		c.with(k, b.at+offset, nil, [3]uint32(known))
		return
	}
	if c.err != nil {
		return
	}
	p, err := c.d.pipeline(k)
	if err != nil {
		c.err = err
		return
	}
	c.before(stageCompute|stageIndirect, accessShaderRead|accessShaderWrite|accessIndirectRead)
	c.bind(p, b.at+offset, nil)
	c.d.f.dispatchIndirect.call(c.handle, uintptr(b.handle), uintptr(offset))
	c.wrote |= stageCompute
}

// with is run with counts known now, which takes the narrowest barrier: that costs
// microseconds less. The parameters lie at an address; those from the group counts on
// may be known too (not nil), so that the kernel need not wait for them.
func (c *commands) with(k kernel, params uint64, values []byte, groups [3]uint32) {
	if c.err != nil {
		return
	}
	p, err := c.d.pipeline(k)
	if err != nil {
		c.err = err
		return
	}
	c.before(stageCompute, accessShaderRead|accessShaderWrite)
	c.dispatch(p, params, values, groups)
}

// dispatch records a pipeline, as with does a kernel, but beside what was recorded
// since the last barrier.
func (c *commands) dispatch(pipeline, params uint64, values []byte, groups [3]uint32) {
	c.bind(pipeline, params, values)
	c.d.f.dispatch.call(c.handle, uintptr(groups[0]), uintptr(groups[1]), uintptr(groups[2]))
	c.wrote |= stageCompute
}

// pushBytes are what every device takes as push constants: an address of parameters
// and, if they are known, 1 and their values. (Mesa's llvmpipe reads through an address
// in the branch that is not taken.)
const pushBytes = 128

func (c *commands) bind(pipeline, params uint64, values []byte) {
	d := c.d
	mark := d.a.mark()
	defer d.a.release(mark)
	d.f.bindPipeline.call(c.handle, bindCompute, uintptr(pipeline))
	push := put(d.a, [pushBytes]byte{})
	*(*uint64)(unsafe.Pointer(push)) = params
	if values != nil {
		push[8] = 1
		copy(push[16:], values)
	}
	d.f.pushConstants.call(c.handle, uintptr(d.layout), shaderStageCompute, 0, pushBytes, addr(push))
}

// copy records a copy of size bytes.
func (c *commands) copy(to *buffer, toAt uint64, from *buffer, fromAt, size uint64) {
	if c.err != nil || size == 0 {
		return
	}
	d := c.d
	mark := d.a.mark()
	defer d.a.release(mark)
	r := put(d.a, bufferCopy{fromAt, toAt, size})
	d.f.copyBuffer.call(c.handle, uintptr(from.handle), uintptr(to.handle), 1, addr(r))
	c.wrote |= stageTransfer
}

// barrier records that what follows sees what came before.
func (c *commands) barrier() {
	if c.q != c.d.kernels { // a queue of copies may know no stage of kernels
		c.before(stageTransfer, accessTransferRead|accessTransferWrite)
	} else {
		c.before(stageCompute|stageTransfer|stageIndirect, accessShaderRead|accessShaderWrite|accessTransferRead|accessTransferWrite|accessIndirectRead)
	}
}

// before records that some stages, by some accesses, see what came before.
func (c *commands) before(to, accesses uintptr) {
	if c.wrote == 0 || c.err != nil {
		return
	}
	c.dependency(c.wrote, c.writes(), to, accesses)
	c.wrote = 0
}

// writes are the accesses by which the stages in wrote have written.
func (c *commands) writes() (accesses uintptr) {
	if c.wrote&stageCompute != 0 {
		accesses |= accessShaderWrite
	}
	if c.wrote&stageTransfer != 0 {
		accesses |= accessTransferWrite
	}
	return accesses
}

func (c *commands) dependency(from, wrote, to, reads uintptr) {
	d := c.d
	mark := d.a.mark()
	defer d.a.release(mark)
	m := put(d.a, memoryBarrier{header: header{sType: stMemoryBarrier}, source: uint32(wrote), target: uint32(reads)})
	d.f.barrier.call(c.handle, from, to, 0, 1, addr(m), 0, 0, 0, 0)
}

// end ends a recording; the host will see what it wrote.
func (c *commands) end() error {
	if c.err != nil {
		return c.err
	}
	c.before(stageHost, accessHostRead)
	c.err = check("vkEndCommandBuffer", c.d.f.end.call(c.handle))
	return c.err
}

// submit hands a recording to its queue and gives what to wait for. It runs after
// the values that it is given of another queue.
func (c *commands) submit(after ...point) (point, error) {
	d, q := c.d, c.q
	if d.lost != nil {
		return point{}, d.lost
	}
	if c.err != nil {
		return point{}, c.err
	}
	a := d.a
	mark := a.mark()
	defer a.release(mark)
	value := q.submitted + 1
	timeline := put(a, timelineSubmitInfo{header: header{sType: stTimelineSubmit}, signalCount: 1, signals: addr(put(a, value))})
	info := put(a, submitInfo{header: header{sType: stSubmitInfo, next: addr(timeline)}, commandCount: 1, commands: addr(put(a, c.handle)),
		signalCount: 1, signals: addr(put(a, q.timeline))})
	var semaphores, values [2]uint64
	var stages [2]uint32
	n := 0
	for _, p := range after {
		if p.q != nil && p.q != q && p.value > 0 {
			semaphores[n], values[n], stages[n] = p.q.timeline, p.value, stageCompute|stageTransfer|stageIndirect
			n++
		}
	}
	if n > 0 {
		info.waitCount, info.waits, info.waitStages = uint32(n), list(a, semaphores[:n]), list(a, stages[:n])
		timeline.waitCount, timeline.waits = uint32(n), list(a, values[:n])
	}
	if err := d.failed("vkQueueSubmit", d.f.submit.call(q.handle, 1, addr(info), 0)); err != nil {
		return point{}, err
	}
	q.submitted = value
	d.launches++
	return point{q, value}, nil
}

// A point is a place in a queue's work; the zero value is its beginning.
type point struct {
	q     *queue
	value uint64
}

func (c *commands) free() {
	if c != nil && c.handle != 0 {
		mark := c.d.a.mark()
		defer c.d.a.release(mark)
		c.d.f.freeCommands.call(c.d.handle, uintptr(c.q.pool), 1, addr(put(c.d.a, c.handle)))
		c.handle = 0
	}
}

// patience is how long a wait looks before it sleeps: to be woken costs tens of
// microseconds, and a layer's steps take about a hundred.
const patience = 200 * time.Microsecond

// waitFor waits until a queue has come to a point.
func (d *Device) waitFor(p point) error {
	if d.lost != nil {
		return d.lost
	}
	if p.q == nil || p.value == 0 {
		return nil
	}
	a := d.a
	mark := a.mark()
	defer a.release(mark)
	if d.patience > 0 {
		reached := put(a, uint64(0))
		for start := time.Now(); time.Since(start) < d.patience; {
			if err := d.failed("vkGetSemaphoreCounterValue", d.f.reached.call(d.handle, uintptr(p.q.timeline), addr(reached))); err != nil {
				return err
			}
			if *reached >= p.value {
				break
			}
		}
	}
	info := put(a, semaphoreWaitInfo{header: header{sType: stSemaphoreWait}, count: 1, semaphores: addr(put(a, p.q.timeline)), values: addr(put(a, p.value))})
	return d.failed("vkWaitSemaphores", d.f.wait.call(d.handle, addr(info), ^uintptr(0)))
}

// at is a value of type T in the host's view of a buffer.
func at[T any](b *buffer, offset uint64) *T {
	var v T
	_ = b.host[offset : offset+uint64(unsafe.Sizeof(v))]
	return (*T)(unsafe.Pointer(&b.host[offset]))
}

// slice is n values of type T there.
func slice[T any](b *buffer, offset uint64, n int) []T {
	var v T
	_ = b.host[offset : offset+uint64(n)*uint64(unsafe.Sizeof(v))]
	return unsafe.Slice((*T)(unsafe.Pointer(&b.host[offset])), n)
}
