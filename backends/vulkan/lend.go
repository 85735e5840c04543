package vulkan

import (
	"errors"
	"fmt"
	"math/bits"
	"unsafe"
)

// imported makes a buffer of the host's memory, from which the device copies without
// the host's help (VK_EXT_external_memory_host). The memory must begin and end on
// multiples of what the device wants.
func (d *Device) imported(mem []byte) (*buffer, error) {
	if d.lost != nil {
		return nil, d.lost
	}
	at, size := uintptr(unsafe.Pointer(&mem[0])), uint64(len(mem))
	switch {
	case d.f.hostPointer == 0 || d.pointerAlign == 0:
		return nil, fmt.Errorf("vulkan: %s takes no memory of the host (VK_EXT_external_memory_host): %w", d.Name, errors.ErrUnsupported)
	case uint64(at)%d.pointerAlign != 0 || size%d.pointerAlign != 0:
		return nil, fmt.Errorf("vulkan: %s takes memory of the host in multiples of %d bytes, and %d at %#x are none", d.Name, d.pointerAlign, size, at)
	}
	a := d.a
	mark := a.mark()
	defer a.release(mark)
	b := &buffer{size: size, use: lent}
	d.buffers[b] = true
	fail := func(err error) (*buffer, error) {
		d.drop(b)
		return nil, fmt.Errorf("%w (%d bytes of the host's memory)", err, size)
	}
	out := put(a, uint64(0))
	external := put(a, externalMemoryBuffer{header: header{sType: stExternalMemoryBuffer}, handles: hostPointerHandle})
	info := put(a, bufferCreateInfo{header: header{sType: stBufferCreateInfo, next: addr(external)}, size: size, usage: bufferTransferSrc})
	if len(d.families) > 1 {
		info.sharing, info.familyCount, info.families = sharingConcurrent, uint32(len(d.families)), list(a, d.families)
	}
	if err := check("vkCreateBuffer", d.f.createBuffer.call(d.handle, addr(info), 0, addr(out))); err != nil {
		return fail(err)
	}
	b.handle = *out
	need := put(a, memoryRequirements{})
	d.f.requirements.call(d.handle, uintptr(b.handle), addr(need))
	may := put(a, hostPointerProperties{header: header{sType: stHostPointerProperties}})
	if err := check("vkGetMemoryHostPointerPropertiesEXT", d.f.hostPointer.call(d.handle, hostPointerHandle, at, addr(may))); err != nil {
		return fail(err)
	}
	kinds := need.types & may.types
	if kinds == 0 || need.size > size {
		return fail(fmt.Errorf("vulkan: %s has no type for memory of the host: %w", d.Name, errors.ErrUnsupported))
	}
	pointer := put(a, importHostPointer{header: header{sType: stImportHostPointer}, handle: hostPointerHandle, at: at})
	alloc := put(a, memoryAllocateInfo{header: header{sType: stMemoryAllocateInfo, next: addr(pointer)}, size: size, kind: uint32(bits.TrailingZeros32(kinds))})
	if err := check("vkAllocateMemory", d.f.allocate.call(d.handle, addr(alloc), 0, addr(out))); err != nil {
		return fail(err)
	}
	b.memory = *out
	if err := check("vkBindBufferMemory", d.f.bind.call(d.handle, uintptr(b.handle), uintptr(b.memory), 0)); err != nil {
		return fail(err)
	}
	b.host = mem
	return b, nil
}

func (e *experts) Lend(mem []byte) error {
	if e.d.place.direct {
		return fmt.Errorf("vulkan: the host writes the memory of %s itself: %w", e.d.Name, errors.ErrUnsupported)
	}
	b, err := e.d.imported(mem)
	if err == nil {
		e.lent = append(e.lent, b)
	}
	return err
}

func (e *experts) Return() (err error) {
	if len(e.lent) > 0 { // after a failed upload a copy may be under way, or wait to be
		err = e.d.waitFor(e.copied)
		st := &e.staging[e.turn]
		st.copies, st.blocks, st.filled, e.borrowed = st.copies[:0], st.blocks[:0], 0, false
	}
	for _, b := range e.lent {
		e.d.drop(b)
	}
	e.lent = nil
	return err
}
