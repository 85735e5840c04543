package vulkan

import (
	"errors"
	"fmt"
	"strings"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"

	"sluice/shaders"
)

// Options are what a device is opened with.
type Options struct {
	// Staging forces uploads through a staging buffer where the host could write
	// the device's memory directly.
	Staging bool
	// Emulate takes the exact emulation of the integer dot product where the device
	// has the instruction.
	Emulate bool
}

// ErrUnfit says that a device cannot compute the one arithmetic.
var ErrUnfit = errors.New("unfit device")

// A Device is an open device: a queue for kernels, and one for copies, which may
// be the same. All that is made of it must be closed first.
type Device struct {
	Info
	in     *Instance
	opt    Options
	a      *arena
	handle uintptr
	place  placement
	f      functions

	families  []uint32 // of the queues
	queues    []*queue
	layout    uint64            // of all pipelines: one address as push constant
	modules   map[string]uint64 // by shader
	pipelines map[kernel]uint64
	kernels   *queue
	copies    *queue // may be kernels
	dot       bool   // kernels use the instruction

	buffers  map[*buffer]bool
	before   uint64        // bytes in use when it was opened, by the driver's count
	lost     error         // of the device, once it is known
	patience time.Duration // how long a wait looks by itself before it sleeps
	recorded int64         // command buffers recorded again
	launches int64         // of them submitted
}

// A queue takes command buffers in order; its timeline says how far it has come.
type queue struct {
	d         *Device
	handle    uintptr
	pool      uint64
	timeline  uint64 // semaphore
	submitted uint64 // its last value that was handed to the queue
}

type functions struct {
	destroyDevice, getQueue, waitIdle                                                          fn
	createBuffer, destroyBuffer, requirements, allocate, freeMemory, bind, address, mapMemory  fn
	createModule, destroyModule, createLayout, destroyLayout, createPipelines, destroyPipeline fn
	createPool, destroyPool, allocateCommands, freeCommands, begin, end                        fn
	bindPipeline, pushConstants, dispatch, dispatchIndirect, barrier, copyBuffer               fn
	submit, createSemaphore, destroySemaphore, wait, reached                                   fn
	createQueries, destroyQueries, resetQueries, writeTimestamp, queryResults                  fn
	hostPointer                                                                                fn // 0: memory of the host cannot be imported
}

func (d *Device) names() map[string]*fn {
	f := &d.f
	return map[string]*fn{
		"vkDestroyDevice": &f.destroyDevice, "vkGetDeviceQueue": &f.getQueue, "vkDeviceWaitIdle": &f.waitIdle,
		"vkCreateBuffer": &f.createBuffer, "vkDestroyBuffer": &f.destroyBuffer, "vkGetBufferMemoryRequirements": &f.requirements,
		"vkAllocateMemory": &f.allocate, "vkFreeMemory": &f.freeMemory, "vkBindBufferMemory": &f.bind,
		"vkGetBufferDeviceAddress": &f.address, "vkMapMemory": &f.mapMemory,
		"vkCreateShaderModule": &f.createModule, "vkDestroyShaderModule": &f.destroyModule,
		"vkCreatePipelineLayout": &f.createLayout, "vkDestroyPipelineLayout": &f.destroyLayout,
		"vkCreateComputePipelines": &f.createPipelines, "vkDestroyPipeline": &f.destroyPipeline,
		"vkCreateCommandPool": &f.createPool, "vkDestroyCommandPool": &f.destroyPool,
		"vkAllocateCommandBuffers": &f.allocateCommands, "vkFreeCommandBuffers": &f.freeCommands, "vkBeginCommandBuffer": &f.begin, "vkEndCommandBuffer": &f.end,
		"vkCmdBindPipeline": &f.bindPipeline, "vkCmdPushConstants": &f.pushConstants, "vkCmdDispatch": &f.dispatch, "vkCmdDispatchIndirect": &f.dispatchIndirect,
		"vkCmdPipelineBarrier": &f.barrier, "vkCmdCopyBuffer": &f.copyBuffer,
		"vkQueueSubmit": &f.submit, "vkCreateSemaphore": &f.createSemaphore, "vkDestroySemaphore": &f.destroySemaphore,
		"vkWaitSemaphores": &f.wait, "vkGetSemaphoreCounterValue": &f.reached,
		"vkCreateQueryPool": &f.createQueries, "vkDestroyQueryPool": &f.destroyQueries, "vkCmdResetQueryPool": &f.resetQueries,
		"vkCmdWriteTimestamp": &f.writeTimestamp, "vkGetQueryPoolResults": &f.queryResults,
	}
}

// Open opens device i of Devices. ErrUnfit: it lacks what the arithmetic needs,
// or computes it wrongly.
func (in *Instance) Open(i int, opt Options) (*Device, error) {
	if i < 0 || i >= len(in.devices) {
		return nil, fmt.Errorf("vulkan: there is no device %d: there are %d, 0 to %d", i, len(in.devices), len(in.devices)-1)
	}
	p := &in.devices[i]
	if len(p.info.Missing) > 0 {
		return nil, fmt.Errorf("vulkan: %w: %s (driver %s) lacks %s: update its driver, or run with --backend cpu", ErrUnfit, p.info.Name, p.info.Driver, strings.Join(p.info.Missing, ", "))
	}
	place, err := p.info.Memory.place()
	if err != nil {
		return nil, err
	}
	if opt.Staging {
		place.direct, place.near = false, -1
	}
	d := &Device{Info: p.info, in: in, opt: opt, place: place, modules: map[string]uint64{}, pipelines: map[kernel]uint64{}, buffers: map[*buffer]bool{}}
	d.dot = p.info.dot13 && !opt.Emulate
	if !d.Software() { // which needs the processor that would look
		d.patience = patience
	}
	if d.a, err = newArena(1 << 20); err != nil {
		return nil, err
	}
	if err := d.open(p); err != nil {
		d.Close()
		return nil, err
	}
	d.before, _ = d.Usage()
	if err := d.known(); err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

func (d *Device) open(p *physical) error {
	a := d.a
	mark := a.mark()
	defer a.release(mark)
	var extensions []string
	if d.HostPointers {
		extensions = append(extensions, "VK_EXT_external_memory_host")
	}
	if d.Budget {
		extensions = append(extensions, "VK_EXT_memory_budget")
	}
	f12 := put(a, vulkan12Features{header: header{sType: stVulkan12Features}})
	f12.list[feature12Timeline], f12.list[feature12BufferAddress] = 1, 1
	f := put(a, features2{header: header{sType: stFeatures2, next: addr(f12)}})
	f.list[featureInt64] = 1
	if d.dot {
		f13 := put(a, vulkan13Features{header: header{sType: stVulkan13Features}})
		f13.list[feature13DotProduct] = 1
		f12.next = addr(f13)
	}
	priorities := list(a, []float32{1, 1})
	queues := []deviceQueueCreateInfo{{header: header{sType: stDeviceQueueCreateInfo}, family: p.family, count: 1, priorities: priorities}}
	if p.transfer.family == p.family {
		queues[0].count += p.transfer.index
	} else {
		queues = append(queues, deviceQueueCreateInfo{header: header{sType: stDeviceQueueCreateInfo}, family: p.transfer.family, count: 1, priorities: priorities})
	}
	info := put(a, deviceCreateInfo{header: header{sType: stDeviceCreateInfo, next: addr(f)}, queueCount: uint32(len(queues)), queues: list(a, queues),
		extensionCount: uint32(len(extensions)), extensions: texts(a, extensions)})
	handle := put(a, uintptr(0))
	if err := check("vkCreateDevice", d.in.createDevice.call(p.handle, addr(info), 0, addr(handle))); err != nil {
		return err
	}
	d.handle = *handle
	for name, f := range d.names() {
		r, _, _ := purego.SyscallN(uintptr(d.in.getDeviceProc), d.handle, text(a, name))
		if *f = fn(r); r == 0 {
			return fmt.Errorf("vulkan: %w: the driver of %s has no %s: update it", ErrUnfit, d.Name, name)
		}
	}
	if d.HostPointers {
		r, _, _ := purego.SyscallN(uintptr(d.in.getDeviceProc), d.handle, text(a, "vkGetMemoryHostPointerPropertiesEXT"))
		d.f.hostPointer = fn(r)
	}
	d.families = []uint32{p.family}
	if p.transfer.family != p.family {
		d.families = append(d.families, p.transfer.family)
	}
	out := put(a, uint64(0))
	ranges := put(a, pushConstantRange{stages: shaderStageCompute, size: pushBytes})
	layout := put(a, pipelineLayoutCreateInfo{header: header{sType: stPipelineLayoutCreate}, rangeCount: 1, ranges: addr(ranges)})
	if err := check("vkCreatePipelineLayout", d.f.createLayout.call(d.handle, addr(layout), 0, addr(out))); err != nil {
		return err
	}
	d.layout = *out
	var err error
	if d.kernels, err = d.openQueue(lane{p.family, 0}); err != nil {
		return err
	}
	d.copies = d.kernels
	if d.CopyQueue {
		d.copies, err = d.openQueue(p.transfer)
	}
	return err
}

func (d *Device) openQueue(l lane) (*queue, error) {
	a := d.a
	mark := a.mark()
	defer a.release(mark)
	q := &queue{d: d}
	d.queues = append(d.queues, q)
	handle := put(a, uintptr(0))
	d.f.getQueue.call(d.handle, uintptr(l.family), uintptr(l.index), addr(handle))
	q.handle = *handle
	out := put(a, uint64(0))
	pool := put(a, commandPoolCreateInfo{header: header{sType: stCommandPoolCreate}, flags: poolResetCommand, family: l.family})
	if err := check("vkCreateCommandPool", d.f.createPool.call(d.handle, addr(pool), 0, addr(out))); err != nil {
		return nil, err
	}
	q.pool = *out
	kind := put(a, semaphoreTypeCreateInfo{header: header{sType: stSemaphoreTypeCreate}, kind: semaphoreTimeline})
	sem := put(a, semaphoreCreateInfo{header: header{sType: stSemaphoreCreateInfo, next: addr(kind)}})
	if err := check("vkCreateSemaphore", d.f.createSemaphore.call(d.handle, addr(sem), 0, addr(out))); err != nil {
		return nil, err
	}
	q.timeline = *out
	return q, nil
}

// Close waits for the device and lets it go.
func (d *Device) Close() error {
	var err error
	if d.handle != 0 {
		err = check("vkDeviceWaitIdle", d.f.waitIdle.call(d.handle))
		for b := range d.buffers {
			d.drop(b)
		}
		for _, p := range d.pipelines {
			d.f.destroyPipeline.call(d.handle, uintptr(p), 0)
		}
		for _, m := range d.modules {
			d.f.destroyModule.call(d.handle, uintptr(m), 0)
		}
		for _, q := range d.queues {
			if q.timeline != 0 {
				d.f.destroySemaphore.call(d.handle, uintptr(q.timeline), 0)
			}
			if q.pool != 0 {
				d.f.destroyPool.call(d.handle, uintptr(q.pool), 0)
			}
		}
		if d.layout != 0 {
			d.f.destroyLayout.call(d.handle, uintptr(d.layout), 0)
		}
		if d.f.destroyDevice != 0 {
			d.f.destroyDevice.call(d.handle, 0)
		}
		d.handle = 0
	}
	if d.a != nil {
		d.a.free()
		d.a = nil
	}
	return err
}

// Warning is what the user should know about this device's memory, or "".
func (d *Device) Warning() string { return d.place.warning }

// ReBAR says that the host sees all of the device's memory.
func (d *Device) ReBAR() bool { return d.place.rebar }

// failed notes the loss of the device, after which nothing is asked of it.
func (d *Device) failed(call string, r result) error {
	err := check(call, r)
	if r == errDeviceLost {
		d.lost = err
	}
	return err
}

// A kernel names a pipeline: a shader and its constants.
type kernel struct {
	shader     string
	c0, c1, c2 uint32
}

// pipeline makes a kernel's pipeline, once.
func (d *Device) pipeline(k kernel) (uint64, error) {
	if p, ok := d.pipelines[k]; ok {
		return p, nil
	}
	a := d.a
	mark := a.mark()
	defer a.release(mark)
	module, ok := d.modules[k.shader]
	out := put(a, uint64(0))
	if !ok {
		code, err := shaders.Binary(k.shader)
		if err != nil {
			return 0, fmt.Errorf("vulkan: %w", err)
		}
		info := put(a, shaderModuleCreateInfo{header: header{sType: stShaderModuleCreate}, size: 4 * uint64(len(code)), code: list(a, code)})
		if err := check("vkCreateShaderModule", d.f.createModule.call(d.handle, addr(info), 0, addr(out))); err != nil {
			return 0, err
		}
		module = *out
		d.modules[k.shader] = module
	}
	spec := put(a, specializationInfo{count: 3, entries: list(a, []specializationEntry{{0, 0, 4}, {1, 4, 4}, {2, 8, 4}}), size: 12, data: list(a, []uint32{k.c0, k.c1, k.c2})})
	info := put(a, computePipelineCreateInfo{header: header{sType: stComputePipeline}, layout: d.layout, baseIndex: -1,
		stage: pipelineStageCreateInfo{header: header{sType: stPipelineStageCreate}, stage: shaderStageCompute, module: module, name: text(a, "main"), specialization: addr(spec)}})
	if err := check("vkCreateComputePipelines", d.f.createPipelines.call(d.handle, 0, 1, addr(info), 0, addr(out))); err != nil {
		return 0, fmt.Errorf("%w (kernel %s)", err, k.shader)
	}
	d.pipelines[k] = *out
	return *out, nil
}

// A buffer is memory that the device addresses.
type buffer struct {
	handle, memory uint64
	at             uint64 // the device's address
	size           uint64
	use            where
	host           []byte // where the host sees it, nil: it does not
}

// where is a use of memory.
type where uint8

const (
	weights where = iota // of the device's own
	up
	down
	near // written by the host; the device's own if there is such
	lent // the host's, imported
)

// buffer allocates memory, which the host sees but for weights that need staging. The
// host's own is taken where there is no more near it.
func (d *Device) buffer(w where, size int64) (*buffer, error) {
	b, err := d.take(w, size)
	if err != nil && w == near && d.place.near >= 0 && d.lost == nil {
		return d.take(up, size)
	}
	return b, err
}

func (d *Device) take(w where, size int64) (*buffer, error) {
	if d.lost != nil {
		return nil, d.lost
	}
	kind := d.place.of(w)
	a := d.a
	mark := a.mark()
	defer a.release(mark)
	b := &buffer{size: uint64(size), use: w}
	d.buffers[b] = true
	fail := func(err error) (*buffer, error) {
		d.drop(b)
		return nil, fmt.Errorf("%w (%d bytes of %s)", err, size, [...]string{"device memory", "memory that the host writes", "memory that the host reads", "memory that the host writes"}[w])
	}
	out := put(a, uint64(0))
	info := put(a, bufferCreateInfo{header: header{sType: stBufferCreateInfo}, size: uint64(size),
		usage: bufferTransferSrc | bufferTransferDst | bufferStorage | bufferIndirect | bufferAddress})
	if len(d.families) > 1 { // both queues see it, in turns that their timelines keep
		info.sharing, info.familyCount, info.families = sharingConcurrent, uint32(len(d.families)), list(a, d.families)
	}
	if err := check("vkCreateBuffer", d.f.createBuffer.call(d.handle, addr(info), 0, addr(out))); err != nil {
		return fail(err)
	}
	b.handle = *out
	need := put(a, memoryRequirements{})
	d.f.requirements.call(d.handle, uintptr(b.handle), addr(need))
	if need.types>>kind&1 == 0 {
		return fail(fmt.Errorf("vulkan: %s takes no buffers in memory type %d: its driver is broken; update it", d.Name, kind))
	}
	flags := put(a, memoryAllocateFlags{header: header{sType: stMemoryAllocateFlags}, flags: allocateDeviceAddress})
	alloc := put(a, memoryAllocateInfo{header: header{sType: stMemoryAllocateInfo, next: addr(flags)}, size: need.size, kind: uint32(kind)})
	if err := check("vkAllocateMemory", d.f.allocate.call(d.handle, addr(alloc), 0, addr(out))); err != nil {
		return fail(err)
	}
	b.memory = *out
	if err := check("vkBindBufferMemory", d.f.bind.call(d.handle, uintptr(b.handle), uintptr(b.memory), 0)); err != nil {
		return fail(err)
	}
	of := put(a, bufferDeviceAddressInfo{header: header{sType: stBufferDeviceAddress}, buffer: b.handle})
	r, _, _ := purego.SyscallN(uintptr(d.f.address), d.handle, addr(of))
	b.at = uint64(r)
	if w != weights || d.place.direct {
		p := put(a, unsafe.Pointer(nil))
		if err := check("vkMapMemory", d.f.mapMemory.call(d.handle, uintptr(b.memory), 0, ^uintptr(0), 0, addr(p))); err != nil {
			return fail(err)
		}
		b.host = unsafe.Slice((*byte)(*p), size)
	}
	return b, nil
}

// drop frees a buffer, of which nothing may be in use.
func (d *Device) drop(b *buffer) {
	if b == nil || !d.buffers[b] {
		return
	}
	delete(d.buffers, b)
	if b.handle != 0 {
		d.f.destroyBuffer.call(d.handle, uintptr(b.handle), 0)
	}
	if b.memory != 0 {
		d.f.freeMemory.call(d.handle, uintptr(b.memory), 0)
	}
	b.host = nil
}

// Free is how much of the device's memory this process may take: by the driver's
// word where it gives one, else all of it.
func (d *Device) Free() int64 {
	h := d.Memory.Heaps[d.Memory.vramHeap()]
	if d.Budget && h.Budget > h.Used {
		return int64(h.Budget - h.Used)
	}
	return int64(h.Size)
}

// Usage asks the driver how much of the device's memory this process uses; ok
// is false where it does not tell.
func (d *Device) Usage() (used uint64, ok bool) {
	if !d.Budget {
		return 0, false
	}
	p := d.in.devices[d.Index]
	if d.in.memory(&p) != nil {
		return 0, false
	}
	return p.info.Memory.Heaps[p.info.Memory.vramHeap()].Used, true
}
