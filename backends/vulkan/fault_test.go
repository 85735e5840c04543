package vulkan

import (
	"errors"
	"strings"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"

	"sluice/backends"
	"sluice/internal/quant"
)

// fails is a function of Vulkan that does nothing and gives a result.
func fails(r result) fn {
	return fn(purego.NewCallback(func(a, b, c, d uintptr) uintptr { return uintptr(uint32(r)) }))
}

// wants looks for words in an error that must be one of Vulkan's.
func wants(t *testing.T, err error, words ...string) {
	t.Helper()
	var call *Error
	if !errors.As(err, &call) {
		t.Fatalf("%v is no error of a call", err)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%q lacks %q", err, w)
		}
	}
}

// What a driver may answer comes back as an error that says what to do, and
// whatever follows says it again.
func TestFaults(t *testing.T) {
	devices(t, func(t *testing.T, d *Device) {
		l := backends.HeldLayer{Types: [3]quant.Type{quant.Q8_0, quant.Q8_0, quant.Q8_0}, Dim: 256, FF: 256}
		part := make([]byte, 256*quant.Q8_0.RowBytes(256))
		parts := [3][]byte{part, part, part}
		real := d.f
		defer func() { d.f, d.lost = real, nil }()

		// No memory: at the start, and for an arena.
		d.f.allocate = fails(errOutOfDevice)
		_, err := d.newExperts(map[int]backends.HeldLayer{0: l}, 2, 2)
		wants(t, err, "vkAllocateMemory found no device memory", "VkResult -2", "lower --vram", "bytes of")
		d.f.allocate = real.allocate
		e, err := d.newExperts(map[int]backends.HeldLayer{0: l}, 2, 2)
		if err != nil {
			t.Fatal(err)
		}
		d.f.allocate = fails(errOutOfDevice)
		wants(t, e.Upload(0, 0, parts), "found no device memory", "lower --vram")
		d.f.allocate = fails(errOutOfHost)
		wants(t, e.Upload(0, 0, parts), "found no host memory")
		d.f.allocate = real.allocate
		if e.Has(0, 0) {
			t.Error("an expert that was not uploaded is there")
		}
		if err := e.Upload(0, 0, parts); err != nil {
			t.Fatal(err)
		}
		if err := e.Settle(); err != nil {
			t.Fatal(err)
		}
		d.f.mapMemory = fails(errMemoryMapFailed)
		_, err = d.buffer(up, 4096)
		wants(t, err, "vkMapMemory")
		d.f.mapMemory = real.mapMemory

		// A pipeline that the driver refuses.
		d.f.createPipelines = fails(errInitFailed)
		_, err = d.pipeline(kernel{"rows", 77, 77, 77})
		wants(t, err, "vkCreateComputePipelines", "could not start the driver", "kernel rows")
		d.f.createPipelines = real.createPipelines

		// The device is lost, at the submission and while it is waited for.
		jobs := heldJobs(2)
		d.f.submit = fails(errDeviceLost)
		wants(t, e.Start(0, jobs[:1], 2, 1, 0, nil), "vkQueueSubmit lost the device", "--backend cpu")
		d.f.submit = real.submit
		wants(t, e.Start(0, jobs[:1], 2, 1, 0, nil), "lost the device") // it stays lost
		_, err = d.buffer(up, 4096)
		wants(t, err, "lost the device")
		d.lost = nil
		if err := e.Start(0, jobs[:1], 2, 1, 0, nil); err != nil {
			t.Fatal(err)
		}
		d.f.wait = fails(errDeviceLost)
		_, err = e.Finish()
		wants(t, err, "vkWaitSemaphores lost the device", "start again")
		d.f.wait, d.lost = real.wait, nil
		if err := check("vkDeviceWaitIdle", d.f.waitIdle.call(d.handle)); err != nil { // the group was real
			t.Fatal(err)
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
}

// A machine without the loader, without a driver, or with an old one: words that
// say what to install.
func TestNoDriver(t *testing.T) {
	_, err := openLibrary("libno-such-vulkan.so.1", false)
	if !errors.Is(err, ErrNoDriver) || !strings.Contains(err.Error(), "mesa-vulkan-drivers") || !strings.Contains(err.Error(), "--backend cpu") {
		t.Errorf("%v", err)
	}
	_, err = openLibrary("libc.so.6", false)
	if !errors.Is(err, ErrNoDriver) || !strings.Contains(err.Error(), "no Vulkan loader") {
		t.Errorf("%v", err)
	}
	// A loader of our own, which has what the map says.
	loader := func(version uint32, devices uint32, has map[string]fn) error {
		all := map[string]fn{
			"vkEnumerateInstanceVersion": fn(purego.NewCallback(func(at *uint32) uintptr { *at = version; return 0 })),
			"vkCreateInstance":           fn(purego.NewCallback(func(info, host uintptr, at *uintptr) uintptr { *at = 1; return 0 })),
			"vkEnumeratePhysicalDevices": fn(purego.NewCallback(func(in uintptr, n *uint32, at uintptr) uintptr { *n = devices; return 0 })),
		}
		for _, name := range []string{"vkDestroyInstance", "vkGetPhysicalDeviceFeatures2", "vkGetPhysicalDeviceProperties2", "vkGetPhysicalDeviceMemoryProperties2",
			"vkGetPhysicalDeviceQueueFamilyProperties", "vkCreateDevice", "vkGetDeviceProcAddr", "vkEnumerateDeviceExtensionProperties"} {
			all[name] = fails(success)
		}
		for name, f := range has {
			all[name] = f
		}
		in := &Instance{getProc: fn(purego.NewCallback(func(instance uintptr, name *byte) uintptr {
			return uintptr(all[cString(unsafe.Slice(name, 100))])
		}))}
		var err error
		if in.a, err = newArena(1 << 20); err != nil {
			t.Fatal(err)
		}
		defer in.Close()
		return in.open(false)
	}
	for _, c := range []struct {
		name    string
		version uint32
		devices uint32
		has     map[string]fn
		words   []string
	}{
		{"an old loader", 1<<22 | 1<<12, 0, nil, []string{"the loader knows Vulkan 1.1.0, and 1.2 is needed"}},
		{"no device", apiVersion12, 0, nil, []string{"the loader finds no device", "--backend cpu"}},
		{"no driver", apiVersion12, 0, map[string]fn{"vkCreateInstance": fails(errIncompatible)}, []string{"vkCreateInstance could not start the driver", "VkResult -9", "reinstall"}},
		{"a function is missing", apiVersion12, 0, map[string]fn{"vkGetPhysicalDeviceFeatures2": 0}, []string{"the loader has no vkGetPhysicalDeviceFeatures2: update it"}},
		{"devices that cannot be counted", apiVersion12, 1, map[string]fn{"vkEnumeratePhysicalDevices": fails(errInitFailed)}, []string{"vkEnumeratePhysicalDevices could not start the driver"}},
	} {
		err := loader(c.version, c.devices, c.has)
		if !errors.Is(err, ErrNoDriver) {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		for _, w := range c.words {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %q lacks %q", c.name, err, w)
			}
		}
	}
}

// A device without a feature is refused by the feature's name, one that computes
// other numbers by what is wrong with them.
func TestMissingFeature(t *testing.T) {
	devices(t, func(t *testing.T, d *Device) {
		in, whole := d.in, d.in.devices[d.Index]
		features, properties, proc := in.getFeatures, in.getProperties, in.getDeviceProc
		restore := func() {
			in.getFeatures, in.getProperties, in.getDeviceProc, in.devices[d.Index] = features, properties, proc, whole
		}
		defer restore()
		refused := func(want string) {
			t.Helper()
			if err := in.describe(&in.devices[d.Index]); err != nil {
				t.Fatal(err)
			}
			if _, err := in.Open(d.Index, Options{}); !errors.Is(err, ErrUnfit) || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "run with --backend cpu") {
				t.Errorf("%v, want %q", err, want)
			}
			restore()
		}
		in.getFeatures = fn(purego.NewCallback(func(device uintptr, f *features2) uintptr {
			features.call(device, addr(f))
			f.list[featureInt64] = 0
			return 0
		}))
		refused("lacks shaderInt64")
		in.getProperties = fn(purego.NewCallback(func(device uintptr, p *properties2) uintptr {
			properties.call(device, addr(p))
			for h := &p.header; h.next != 0; {
				h = *(**header)(unsafe.Pointer(&h.next))
				if h.sType == stVulkan12Properties {
					(*vulkan12Properties)(unsafe.Pointer(h)).rte32 = 0
				}
			}
			return 0
		}))
		refused("lacks shaderRoundingModeRTEFloat32")
		nothing := purego.NewCallback(func(commands, buffer, offset uintptr) uintptr { return 0 })
		in.getDeviceProc = fn(purego.NewCallback(func(device uintptr, name *byte) uintptr {
			if cString(unsafe.Slice(name, 100)) == "vkCmdDispatchIndirect" {
				return nothing
			}
			r, _, _ := purego.SyscallN(uintptr(proc), device, uintptr(unsafe.Pointer(name)))
			return r
		}))
		refused("it does not round as IEEE 754 says")
		if _, err := in.Open(len(in.devices), Options{}); err == nil || !strings.Contains(err.Error(), "there is no device") {
			t.Errorf("%v", err)
		}
	})
}

// Which queue copies: an engine of its own, else a second queue, else the kernels'.
func TestLanes(t *testing.T) {
	const all = queueGraphics | queueCompute | queueTransfer
	for _, c := range []struct {
		families []queueFamily
		compute  int
		copies   lane
	}{
		{[]queueFamily{{flags: all, count: 1}}, 0, lane{0, 0}},
		{[]queueFamily{{flags: all, count: 16}}, 0, lane{0, 1}},
		{[]queueFamily{{flags: all, count: 16}, {flags: queueTransfer, count: 2}, {flags: queueCompute | queueTransfer, count: 8}}, 2, lane{1, 0}},
		{[]queueFamily{{flags: all, count: 1}, {flags: queueCompute | queueTransfer, count: 4}}, 1, lane{1, 1}},
		{[]queueFamily{{flags: queueTransfer, count: 1}, {flags: all, count: 1}}, 1, lane{0, 0}},
	} {
		if f := computeFamily(c.families); f != c.compute {
			t.Errorf("%v: kernels in family %d, want %d", c.families, f, c.compute)
		} else if l := transferLane(c.families, uint32(f)); l != c.copies {
			t.Errorf("%v: copies in %v, want %v", c.families, l, c.copies)
		}
	}
	if f := computeFamily([]queueFamily{{flags: queueTransfer, count: 1}}); f != -1 {
		t.Errorf("family %d computes nothing", f)
	}
}
