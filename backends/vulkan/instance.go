// Package vulkan computes on any GPU that a Vulkan driver serves: entry points
// from libvulkan.so.1 without cgo, kernels from package shaders, the bits of
// backends/cpu.
//
// One goroutine uses a Device and what is made of it.
package vulkan

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"unsafe"

	"github.com/ebitengine/purego"

	"sluice/internal/foreign"
)

// library is the loader's name in every distribution; libvulkan.so alone comes
// with the headers.
const library = "libvulkan.so.1"

// A fn is the address of a C function.
type fn uintptr

func (f fn) call(args ...uintptr) result { return result(int32(foreign.Call(uintptr(f), args...))) }

// ErrNoDriver says that there is no Vulkan loader, or no driver behind it.
var ErrNoDriver = errors.New("no Vulkan driver")

// An Error is a call of Vulkan that failed.
type Error struct {
	Call   string
	Result result
}

func (e *Error) Error() string {
	what, fix := "failed", "see the driver's log (dmesg)"
	switch e.Result {
	case errOutOfHost:
		what, fix = "found no host memory", "stop other programs"
	case errOutOfDevice:
		what, fix = "found no device memory", "lower --vram, or stop other programs on this GPU"
	case errDeviceLost:
		what, fix = "lost the device: it was reset or fell off the bus", "start again; if it comes back, run with --backend cpu and update the GPU's driver"
	case errInitFailed, errIncompatible:
		what, fix = "could not start the driver", "reinstall the GPU's Vulkan driver; vulkaninfo should run without errors"
	case errLayerMissing, errExtMissing, errFeatureMissing:
		what, fix = "lacks something that was asked for", "update the GPU's driver"
	case errTooManyObjects:
		what, fix = "has too many objects", "stop other programs on this GPU"
	}
	return fmt.Sprintf("vulkan: %s %s (VkResult %d): %s", e.Call, what, e.Result, fix)
}

// check is nil for a success.
func check(call string, r result) error {
	if r == success || r == incomplete {
		return nil
	}
	return &Error{call, r}
}

// An Instance is an open Vulkan loader with its devices.
type Instance struct {
	lib     uintptr
	handle  uintptr
	a       *arena
	getProc fn
	devices []physical

	destroy, getFeatures, getProperties, getMemory, getFamilies, createDevice, getDeviceProc, deviceExtensions fn

	messages messages
}

type physical struct {
	handle   uintptr
	info     Info
	family   uint32
	transfer lane // of copies; the compute queue itself where there is no other
}

// A lane is a queue: its family, and its number there.
type lane struct{ family, index uint32 }

// Open loads Vulkan and looks at its devices. It fails with ErrNoDriver where
// there is none, in words that a user can act on. validate asks for the
// validation layers, whose messages Validation then returns.
func Open(validate bool) (*Instance, error) { return openLibrary(library, validate) }

func openLibrary(library string, validate bool) (*Instance, error) {
	runtime.LockOSThread() // Dlopen asks for the reason in a second call, and each thread has its own
	lib, err := purego.Dlopen(library, purego.RTLD_NOW|purego.RTLD_LOCAL)
	runtime.UnlockOSThread()
	if err != nil {
		return nil, fmt.Errorf("vulkan: %w: %s cannot be loaded (%v): install the GPU's Vulkan driver (packages mesa-vulkan-drivers and libvulkan1, or the vendor's), or run with --backend cpu", ErrNoDriver, library, err)
	}
	at, err := purego.Dlsym(lib, "vkGetInstanceProcAddr")
	if err != nil {
		return nil, fmt.Errorf("vulkan: %w: %s is no Vulkan loader: %v", ErrNoDriver, library, err)
	}
	in := &Instance{lib: lib, getProc: fn(at)}
	if in.a, err = newArena(1 << 20); err != nil {
		return nil, err
	}
	if err := in.open(validate); err != nil {
		in.Close()
		return nil, err
	}
	return in, nil
}

func (in *Instance) open(validate bool) error {
	a := in.a
	var version uint32
	if f := in.proc("vkEnumerateInstanceVersion"); f != 0 {
		v := put(a, uint32(0))
		f.call(addr(v))
		version = *v
	}
	if version < apiVersion12 {
		return fmt.Errorf("vulkan: %w: the loader knows Vulkan %s, and 1.2 is needed: update it", ErrNoDriver, versionText(version))
	}
	var layers, extensions []string
	if validate {
		layers = []string{"VK_LAYER_KHRONOS_validation"}
		extensions = []string{"VK_EXT_debug_utils"}
	}
	app := put(a, applicationInfo{header: header{sType: stApplicationInfo}, name: text(a, "sluice"), api: 1<<22 | 3<<12})
	info := put(a, instanceCreateInfo{header: header{sType: stInstanceCreateInfo}, app: addr(app),
		layerCount: uint32(len(layers)), layers: texts(a, layers), extensionCount: uint32(len(extensions)), extensions: texts(a, extensions)})
	if validate {
		info.next = in.messages.chain(a)
	}
	handle := put(a, uintptr(0))
	if err := check("vkCreateInstance", in.proc("vkCreateInstance").call(addr(info), 0, addr(handle))); err != nil {
		return fmt.Errorf("%w: %w", ErrNoDriver, err)
	}
	in.handle = *handle
	for name, f := range map[string]*fn{
		"vkDestroyInstance": &in.destroy, "vkGetPhysicalDeviceFeatures2": &in.getFeatures, "vkGetPhysicalDeviceProperties2": &in.getProperties,
		"vkGetPhysicalDeviceMemoryProperties2": &in.getMemory, "vkGetPhysicalDeviceQueueFamilyProperties": &in.getFamilies,
		"vkCreateDevice": &in.createDevice, "vkGetDeviceProcAddr": &in.getDeviceProc, "vkEnumerateDeviceExtensionProperties": &in.deviceExtensions,
	} {
		if *f = in.proc(name); *f == 0 {
			return fmt.Errorf("vulkan: %w: the loader has no %s: update it", ErrNoDriver, name)
		}
	}
	if validate {
		if err := in.messages.listen(in); err != nil {
			return err
		}
	}
	return in.enumerate()
}

// proc finds a function of the instance, 0 if it has none.
func (in *Instance) proc(name string) fn {
	at := in.a.mark()
	defer in.a.release(at)
	r, _, _ := purego.SyscallN(uintptr(in.getProc), in.handle, text(in.a, name))
	return fn(r)
}

func (in *Instance) enumerate() error {
	a := in.a
	count := put(a, uint32(0))
	list := in.proc("vkEnumeratePhysicalDevices")
	if err := check("vkEnumeratePhysicalDevices", list.call(in.handle, addr(count), 0)); err != nil {
		return fmt.Errorf("%w: %w", ErrNoDriver, err)
	}
	n := int(*count)
	if n == 0 {
		return fmt.Errorf("vulkan: %w: the loader finds no device: install the GPU's Vulkan driver, or run with --backend cpu", ErrNoDriver)
	}
	handles := unsafe.Slice((*uintptr)(a.take(8*n)), n)
	if err := check("vkEnumeratePhysicalDevices", list.call(in.handle, addr(count), addr(&handles[0]))); err != nil {
		return err
	}
	for i, h := range handles[:*count] {
		p := physical{handle: h}
		if err := in.describe(&p); err != nil {
			return err
		}
		p.info.Index = i
		in.devices = append(in.devices, p)
	}
	return nil
}

// Close lets go of the loader. Devices must have been closed.
func (in *Instance) Close() {
	if in.handle != 0 {
		in.messages.close(in)
		if in.destroy != 0 { // a loader may lack it
			in.destroy.call(in.handle, 0)
		}
		in.handle = 0
	}
	in.a.free()
	// The library stays: drivers do not take kindly to being unloaded.
}

// Devices are the devices of the machine, in the loader's order.
func (in *Instance) Devices() []Info {
	all := make([]Info, len(in.devices))
	for i := range in.devices {
		all[i] = in.devices[i].info
	}
	return all
}

// An Info is what a device says of itself.
type Info struct {
	Index        int
	Name         string
	Kind         string // discrete, integrated, virtual, software or other
	Driver       string // name and version
	API          string
	UUID         string
	Address      string // on the PCI bus, such as 0000:3d:00.0; "": it does not tell
	Memory       Memory
	Budget       bool // it tells how much of its memory is in use
	Subgroup     int
	DotProduct   bool // four int8 products in one instruction, by the driver's word
	HostPointers bool // memory of the host can be lent to it
	CopyQueue    bool // copies have a queue of their own, beside that of the kernels
	Missing      []string

	software      bool
	maxAllocation uint64
	maxBuffer     uint64
	sharedMemory  uint32
	groupCount    uint32
	timestamp     float32 // ns a tick, 0: none
	pointerAlign  uint64
	dot13         bool // the feature is there, fast or not
}

// Software says that the device is the CPU: slow, and good for tests.
func (i *Info) Software() bool { return i.software }

func versionText(v uint32) string {
	return fmt.Sprintf("%d.%d.%d", v>>22&0x7f, v>>12&0x3ff, v&0xfff)
}

func (in *Instance) describe(p *physical) error {
	a := in.a
	mark := a.mark()
	defer a.release(mark)

	// What it has.
	count := put(a, uint32(0))
	if err := check("vkEnumerateDeviceExtensionProperties", in.deviceExtensions.call(p.handle, 0, addr(count), 0)); err != nil {
		return err
	}
	have := make(map[string]bool)
	if n := int(*count); n > 0 {
		all := unsafe.Slice((*extensionProperties)(a.take(n*int(unsafe.Sizeof(extensionProperties{})))), n)
		if err := check("vkEnumerateDeviceExtensionProperties", in.deviceExtensions.call(p.handle, 0, addr(count), addr(&all[0]))); err != nil {
			return err
		}
		for i := range all[:*count] {
			have[cString(all[i].name[:])] = true
		}
	}

	p12 := put(a, vulkan12Properties{header: header{sType: stVulkan12Properties}})
	p11 := put(a, vulkan11Properties{header: header{sType: stVulkan11Properties, next: addr(p12)}})
	host := put(a, hostProperties{header: header{sType: stHostProperties}})
	two := put(a, properties2{header: header{sType: stProperties2, next: addr(p11)}})
	in.getProperties.call(p.handle, addr(two))
	i := &p.info
	*i = Info{Name: cString(two.name[:]), API: versionText(two.api), UUID: fmt.Sprintf("%x", p11.deviceUUID), Subgroup: int(p11.subgroupSize),
		Kind:          [...]string{"other", "integrated", "discrete", "virtual", "software"}[min(two.kind, 4)],
		Driver:        strings.TrimSpace(cString(p12.driverName[:]) + " " + cString(p12.driverInfo[:])),
		maxAllocation: p11.maxAllocation, maxBuffer: 1 << 32, sharedMemory: two.limits.sharedMemory, groupCount: two.limits.groupCount[0],
		software: two.kind == deviceTypeCPU,
	}
	if two.limits.timestamps != 0 {
		i.timestamp = two.limits.timestampPeriod
	}
	i.Budget = have["VK_EXT_memory_budget"]
	i.HostPointers = have["VK_EXT_external_memory_host"]
	if two.api < apiVersion12 {
		i.Missing = append(i.Missing, "Vulkan 1.2")
		return in.memory(p)
	}
	// Again, with what 1.3 and the extensions add.
	p13 := put(a, vulkan13Properties{header: header{sType: stVulkan13Properties}})
	f13 := put(a, vulkan13Features{header: header{sType: stVulkan13Features}})
	f12 := put(a, vulkan12Features{header: header{sType: stVulkan12Features}})
	f := put(a, features2{header: header{sType: stFeatures2, next: addr(f12)}})
	if two.api >= 1<<22|3<<12 {
		f12.next = addr(f13)
		p12.next = addr(p13)
	}
	if i.HostPointers {
		host.next, p11.next = p11.next, addr(host)
	}
	bus := put(a, pciBusInfo{header: header{sType: stPCIBusInfo}})
	if have["VK_EXT_pci_bus_info"] {
		bus.next, p11.next = p11.next, addr(bus)
	}
	in.getProperties.call(p.handle, addr(two))
	in.getFeatures.call(p.handle, addr(f))
	i.pointerAlign = host.alignment
	if have["VK_EXT_pci_bus_info"] {
		i.Address = fmt.Sprintf("%04x:%02x:%02x.%x", bus.domain, bus.bus, bus.device, bus.function)
	}
	if p13.maxBuffer > 0 {
		i.maxBuffer = p13.maxBuffer
	}
	i.dot13 = f13.list[feature13DotProduct] != 0
	i.DotProduct = i.dot13 && p13.dotAccelerated != 0
	for _, need := range []struct {
		there bool
		name  string
	}{
		{f.list[featureInt64] != 0, "shaderInt64"},
		{f12.list[feature12BufferAddress] != 0, "bufferDeviceAddress"},
		{f12.list[feature12Timeline] != 0, "timelineSemaphore"},
		{p12.rte32 != 0, "shaderRoundingModeRTEFloat32"},
		{p12.preserve32 != 0, "shaderSignedZeroInfNanPreserveFloat32"},
		{two.limits.groupInvocations >= 256 && two.limits.groupSize[0] >= 256, "workgroups of 256"},
		{two.limits.sharedMemory >= 32<<10, "32 KiB of shared memory"},
		{two.limits.pushConstants >= 8, "push constants"},
	} {
		if !need.there {
			i.Missing = append(i.Missing, need.name)
		}
	}
	families := in.families(p.handle)
	family := computeFamily(families)
	if family < 0 {
		i.Missing = append(i.Missing, "a queue for compute")
		return in.memory(p)
	}
	p.family = uint32(family)
	p.transfer = transferLane(families, p.family)
	i.CopyQueue = p.transfer != lane{p.family, 0}
	return in.memory(p)
}

func (in *Instance) families(device uintptr) []queueFamily {
	a := in.a
	count := put(a, uint32(0))
	in.getFamilies.call(device, addr(count), 0)
	n := int(*count)
	if n == 0 {
		return nil
	}
	all := unsafe.Slice((*queueFamily)(a.take(n*int(unsafe.Sizeof(queueFamily{})))), n)
	in.getFamilies.call(device, addr(count), addr(&all[0]))
	return all[:*count]
}

// computeFamily is the queue family to compute on: one without graphics if
// there is one, -1 for none.
func computeFamily(all []queueFamily) int {
	found := -1
	for i, f := range all {
		if f.flags&queueCompute != 0 && f.count > 0 && (found < 0 || f.flags&queueGraphics == 0 && all[found].flags&queueGraphics != 0) {
			found = i
		}
	}
	return found
}

// transferLane is the queue for copies: of a family that does nothing else, which
// is a copy engine; else a second queue beside the kernels'; else theirs.
func transferLane(all []queueFamily, compute uint32) lane {
	for i, f := range all {
		if f.flags&queueTransfer != 0 && f.flags&(queueCompute|queueGraphics) == 0 && f.count > 0 {
			return lane{uint32(i), 0}
		}
	}
	if all[compute].count > 1 {
		return lane{compute, 1}
	}
	return lane{compute, 0}
}

func (in *Instance) memory(p *physical) error {
	a := in.a
	m := put(a, memoryProperties2{header: header{sType: stMemoryProperties2}})
	b := put(a, memoryBudget{header: header{sType: stMemoryBudget}})
	if p.info.Budget {
		m.next = addr(b)
	}
	in.getMemory.call(p.handle, addr(m))
	p.info.Memory = Memory{}
	for i := range min(int(m.heapCount), len(m.heaps)) {
		h := Heap{Size: m.heaps[i].size, Local: m.heaps[i].flags&heapDeviceLocal != 0}
		if p.info.Budget {
			h.Budget, h.Used = b.budget[i], b.usage[i]
		}
		p.info.Memory.Heaps = append(p.info.Memory.Heaps, h)
	}
	for _, t := range m.types[:min(int(m.typeCount), len(m.types))] {
		if int(t.heap) >= len(p.info.Memory.Heaps) {
			return fmt.Errorf("vulkan: %s: memory type of heap %d of %d: the driver is broken; update it", p.info.Name, t.heap, len(p.info.Memory.Heaps))
		}
		p.info.Memory.Types = append(p.info.Memory.Types, Type{Heap: int(t.heap), Local: t.flags&memoryDeviceLocal != 0,
			Visible: t.flags&memoryHostVisible != 0, Coherent: t.flags&memoryHostCoherent != 0, Cached: t.flags&memoryHostCached != 0})
	}
	return nil
}
