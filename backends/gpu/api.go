// Package gpu computes on NVIDIA and AMD GPUs by their own drivers, CUDA and HIP:
// two tables of the same functions, from libcuda or libamdhip64 without cgo,
// kernels of one source from package shaders, the bits of backends/cpu.
//
// One goroutine at a time uses a Device and what is made of it.
package gpu

import (
	"errors"
	"fmt"
	"strings"

	"github.com/ebitengine/purego"

	"sluice/internal/foreign"
)

// A fn is the address of a C function.
type fn uintptr

func (f fn) call(args ...uintptr) int { return int(int32(foreign.Call(uintptr(f), args...))) }

// An API is a maker's driver interface.
type API uint8

const (
	CUDA API = iota
	HIP
)

func (a API) String() string { return [...]string{"cuda", "hip"}[a] }

// libraries are the names under which a driver is asked for, the newest first.
func (a API) libraries() []string {
	if a == CUDA {
		return []string{"libcuda.so.1"}
	}
	return []string{"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "/opt/rocm/lib/libamdhip64.so"}
}

// compilers are the names of the library that compiles kernels at run time.
func (a API) compilers() []string {
	if a == CUDA {
		return []string{"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so", "/usr/local/cuda/lib64/libnvrtc.so"}
	}
	return []string{"libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5", "libhiprtc.so", "/opt/rocm/lib/libhiprtc.so", "libamdhip64.so.5"}
}

// functions are what both drivers have under other names, with the same arguments.
type functions struct {
	start, version, count, device, name, properties, attribute, total fn
	busID, register, unregister                                       fn
	retain, letGo, current                                            fn
	allocate, free, memory, allocateHost, freeHost, hostAddress       fn
	copyIn, copyOut, copyWithin                                       fn
	stream, endStream, waitStream, streamWaits                        fn
	event, endEvent, record, waitEvent, elapsed                       fn
	module, endModule, function, launch, occupancy                    fn
	beginCapture, endCapture, instantiate, launchGraph                fn
	endGraph, endProgram                                              fn
	reaches, reach, unreach, copyAcross                               fn // between devices
	share, open, unshare                                              fn // memory between processes
}

// A symbol is a function by its names in CUDA and in HIP; several names are of
// several versions, the newest first, and "" is what one of them does without.
type symbol struct {
	at        *fn
	cuda, hip string
}

func (f *functions) symbols() []symbol {
	return []symbol{
		{&f.start, "cuInit", "hipInit"},
		{&f.version, "cuDriverGetVersion", "hipRuntimeGetVersion"},
		{&f.count, "cuDeviceGetCount", "hipGetDeviceCount"},
		{&f.device, "cuDeviceGet", "hipDeviceGet"},
		{&f.name, "cuDeviceGetName", "hipDeviceGetName"},
		{&f.properties, "", "hipGetDevicePropertiesR0600 hipGetDeviceProperties"},
		{&f.attribute, "cuDeviceGetAttribute", ""},
		{&f.total, "cuDeviceTotalMem_v2", "hipDeviceTotalMem"},
		{&f.busID, "cuDeviceGetPCIBusId", "hipDeviceGetPCIBusId"},
		{&f.retain, "cuDevicePrimaryCtxRetain", ""},
		{&f.letGo, "cuDevicePrimaryCtxRelease_v2", ""},
		{&f.current, "cuCtxSetCurrent", "hipSetDevice"},
		{&f.allocate, "cuMemAlloc_v2", "hipMalloc"},
		{&f.free, "cuMemFree_v2", "hipFree"},
		{&f.memory, "cuMemGetInfo_v2", "hipMemGetInfo"},
		{&f.allocateHost, "cuMemHostAlloc", "hipHostMalloc"},
		{&f.freeHost, "cuMemFreeHost", "hipHostFree"},
		{&f.register, "cuMemHostRegister_v2", "hipHostRegister"},
		{&f.unregister, "cuMemHostUnregister", "hipHostUnregister"},
		{&f.hostAddress, "cuMemHostGetDevicePointer_v2", "hipHostGetDevicePointer"},
		{&f.copyIn, "cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync"},
		{&f.copyOut, "cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync"},
		{&f.copyWithin, "cuMemcpyDtoDAsync_v2", "hipMemcpyDtoDAsync"},
		{&f.stream, "cuStreamCreate", "hipStreamCreateWithFlags"},
		{&f.endStream, "cuStreamDestroy_v2", "hipStreamDestroy"},
		{&f.waitStream, "cuStreamSynchronize", "hipStreamSynchronize"},
		{&f.streamWaits, "cuStreamWaitEvent", "hipStreamWaitEvent"},
		{&f.event, "cuEventCreate", "hipEventCreateWithFlags"},
		{&f.endEvent, "cuEventDestroy_v2", "hipEventDestroy"},
		{&f.record, "cuEventRecord", "hipEventRecord"},
		{&f.waitEvent, "cuEventSynchronize", "hipEventSynchronize"},
		{&f.elapsed, "cuEventElapsedTime", "hipEventElapsedTime"},
		{&f.module, "cuModuleLoadData", "hipModuleLoadData"},
		{&f.endModule, "cuModuleUnload", "hipModuleUnload"},
		{&f.function, "cuModuleGetFunction", "hipModuleGetFunction"},
		{&f.launch, "cuLaunchKernel", "hipModuleLaunchKernel"},
		{&f.occupancy, "cuOccupancyMaxActiveBlocksPerMultiprocessor", "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor"},
		{&f.beginCapture, "cuStreamBeginCapture_v2", "hipStreamBeginCapture"},
		{&f.endCapture, "cuStreamEndCapture", "hipStreamEndCapture"},
		{&f.instantiate, "cuGraphInstantiateWithFlags", "hipGraphInstantiate"},
		{&f.launchGraph, "cuGraphLaunch", "hipGraphLaunch"},
		{&f.endGraph, "cuGraphDestroy", "hipGraphDestroy"},
		{&f.endProgram, "cuGraphExecDestroy", "hipGraphExecDestroy"},
		{&f.reaches, "cuDeviceCanAccessPeer", "hipDeviceCanAccessPeer"},
		{&f.reach, "cuCtxEnablePeerAccess", "hipDeviceEnablePeerAccess"},
		{&f.unreach, "cuCtxDisablePeerAccess", "hipDeviceDisablePeerAccess"},
		{&f.copyAcross, "cuMemcpyPeerAsync", "hipMemcpyPeerAsync"},
		{&f.share, "cuIpcGetMemHandle", "hipIpcGetMemHandle"},
		{&f.open, "cuIpcOpenMemHandle_v2 cuIpcOpenMemHandle", "hipIpcOpenMemHandle"},
		{&f.unshare, "cuIpcCloseMemHandle", "hipIpcCloseMemHandle"},
	}
}

// fill finds the functions in a library, and names those that it lacks.
func (f *functions) fill(a API, lib uintptr) (missing []string) {
	for _, s := range f.symbols() {
		names := s.cuda
		if a == HIP {
			names = s.hip
		}
		if names == "" {
			continue
		}
		*s.at = 0
		for _, name := range strings.Fields(names) {
			if p, err := purego.Dlsym(lib, name); err == nil {
				*s.at = fn(p)
				break
			}
		}
		if *s.at == 0 {
			missing = append(missing, names)
		}
	}
	return missing
}

// ErrNoDriver says that there is no driver of that maker, or no device behind it.
var ErrNoDriver = errors.New("no driver")

// An Error is a call of a driver that failed, with its code, which CUDA and HIP
// share for what matters here.
type Error struct {
	API  API
	Call string
	Code int
}

// The codes that are told apart.
const (
	outOfMemory     = 2
	registered      = 712 // memory of the host, already
	noDevice        = 100
	invalidDevice   = 101
	noBinary        = 209
	uncorrectable   = 214
	invalidKernel   = 218
	unsupportedPTX  = 222
	illegalAddress  = 700
	launchTimeout   = 702
	launchFailed    = 719
	notSupported    = 801
	driverMismatch  = 803
	compatNotOnThis = 804
	unknownError    = 999
)

func (e *Error) Error() string {
	what, fix := "failed", "see the kernel's log (dmesg)"
	switch {
	case e.Code == outOfMemory:
		what, fix = "found no memory", "lower --vram, or stop other programs on this GPU"
	case e.Code == noDevice, e.Code == invalidDevice:
		what, fix = "found no device", "check that the GPU's kernel module is loaded and that this user may open its device files"
	case e.refusesKernels():
		what, fix = "refused the kernels", "update the GPU's driver, or run with --backend vulkan"
	case e.Code == driverMismatch, e.Code == compatNotOnThis:
		what, fix = "found a library of another version than the kernel's module", "restart the machine after an update of the driver, or remove the compatibility library from the loader's path"
	case e.lost():
		what, fix = "lost the device: a kernel failed, or it was reset or fell off the bus", "start again; if it comes back, run with --backend cpu and update the GPU's driver"
	}
	return fmt.Sprintf("%v: %s %s (error %d): %s", e.API, e.Call, what, e.Code, fix)
}

// refusesKernels says that the driver cannot run what it was given.
func (e *Error) refusesKernels() bool {
	return e.Code == noBinary || e.Code == invalidKernel || e.Code == unsupportedPTX
}

// lost says that nothing works on this device any more in this process.
func (e *Error) lost() bool {
	switch e.Code {
	case uncorrectable, illegalAddress, launchTimeout, launchFailed, unknownError, 709, 714, 715, 716, 717, 718, 721:
		return true
	}
	return false
}
