//lint:file-ignore U1000 The structs are those of C, with all of their fields.

package vulkan

// This file is the part of Vulkan's C interface that is used here: constants and
// structs as vulkan_core.h lays them out on 64-bit machines. Handles that can be
// dispatched and addresses are uintptr, other handles and device addresses uint64.
// The module abitest holds them against the header.

type result int32

const (
	success            result = 0
	timeout            result = 2
	incomplete         result = 5
	errOutOfHost       result = -1
	errOutOfDevice     result = -2
	errInitFailed      result = -3
	errDeviceLost      result = -4
	errMemoryMapFailed result = -5
	errLayerMissing    result = -6
	errExtMissing      result = -7
	errFeatureMissing  result = -8
	errIncompatible    result = -9
	errTooManyObjects  result = -10
)

const apiVersion12 = 1<<22 | 2<<12

// Structure types (VkStructureType).
const (
	stApplicationInfo       = 0
	stInstanceCreateInfo    = 1
	stDeviceQueueCreateInfo = 2
	stDeviceCreateInfo      = 3
	stSubmitInfo            = 4
	stMemoryAllocateInfo    = 5
	stSemaphoreCreateInfo   = 9
	stQueryPoolCreateInfo   = 11
	stBufferCreateInfo      = 12
	stShaderModuleCreate    = 16
	stPipelineStageCreate   = 18
	stComputePipeline       = 29
	stPipelineLayoutCreate  = 30
	stCommandPoolCreate     = 39
	stCommandBufferAllocate = 40
	stCommandBufferBegin    = 42
	stMemoryBarrier         = 46
	stVulkan11Features      = 49
	stVulkan11Properties    = 50
	stVulkan12Features      = 51
	stVulkan12Properties    = 52
	stVulkan13Features      = 53
	stVulkan13Properties    = 54
	stFeatures2             = 1000059000
	stProperties2           = 1000059001
	stMemoryProperties2     = 1000059006
	stMemoryAllocateFlags   = 1000060000
	stDebugMessengerCreate  = 1000128004
	stImportHostPointer     = 1000178000
	stHostPointerProperties = 1000178001
	stHostProperties        = 1000178002
	stExternalMemoryBuffer  = 1000072000
	stSemaphoreTypeCreate   = 1000207002
	stPCIBusInfo            = 1000212000
	stTimelineSubmit        = 1000207003
	stSemaphoreWait         = 1000207004
	stMemoryBudget          = 1000237000
	stBufferDeviceAddress   = 1000244001
)

// Flag bits and enumerators.
const (
	memoryDeviceLocal  = 1
	memoryHostVisible  = 2
	memoryHostCoherent = 4
	memoryHostCached   = 8
	heapDeviceLocal    = 1

	queueGraphics = 1
	queueCompute  = 2
	queueTransfer = 4

	deviceTypeIntegrated = 1
	deviceTypeDiscrete   = 2
	deviceTypeVirtual    = 3
	deviceTypeCPU        = 4

	sharingConcurrent = 1

	bufferTransferSrc = 1
	bufferTransferDst = 2
	bufferStorage     = 32
	bufferIndirect    = 256
	bufferAddress     = 0x20000

	allocateDeviceAddress = 2
	hostPointerHandle     = 0x80 // VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT

	stageIndirect = 2
	stageCompute  = 0x800
	stageTransfer = 0x1000
	stageBottom   = 0x2000
	stageHost     = 0x4000

	accessIndirectRead  = 1
	accessShaderRead    = 0x20
	accessShaderWrite   = 0x40
	accessTransferRead  = 0x800
	accessTransferWrite = 0x1000
	accessHostRead      = 0x2000
	accessHostWrite     = 0x4000

	shaderStageCompute  = 0x20
	bindCompute         = 1
	semaphoreTimeline   = 1
	queryTimestamp      = 2
	poolResetCommand    = 2
	commandSimultaneous = 4
)

// Positions of features in the lists of their structs.
const (
	featureInt64           = 160 / 4        // of VkPhysicalDeviceFeatures
	feature12Timeline      = (164 - 16) / 4 // behind the header
	feature12BufferAddress = (168 - 16) / 4
	feature13DotProduct    = (68 - 16) / 4
)

// A header starts every extensible struct.
type header struct {
	sType uint32
	_     uint32
	next  uintptr
}

type applicationInfo struct {
	header
	name          uintptr
	version       uint32
	_             uint32
	engine        uintptr
	engineVersion uint32
	api           uint32
}

type instanceCreateInfo struct {
	header
	flags          uint32
	_              uint32
	app            uintptr
	layerCount     uint32
	_              uint32
	layers         uintptr
	extensionCount uint32
	_              uint32
	extensions     uintptr
}

type extensionProperties struct {
	name    [256]byte
	version uint32
}

type properties2 struct {
	header
	api, driver, vendor, device, kind uint32
	name                              [256]byte
	cacheUUID                         [16]byte
	_                                 uint32
	limits                            limits
	_                                 [24]byte // sparse properties
}

type limits struct {
	_                [28]byte
	storageRange     uint32
	pushConstants    uint32
	allocations      uint32
	_                [176]byte
	sharedMemory     uint32
	groupCount       [3]uint32
	groupInvocations uint32
	groupSize        [3]uint32
	_                [172]byte
	timestamps       uint32
	timestampPeriod  float32
	_                [68]byte
	nonCoherentAtom  uint64
}

type vulkan11Properties struct {
	header
	deviceUUID, driverUUID [16]byte
	_                      [16]byte
	subgroupSize           uint32
	_                      [36]byte
	maxAllocation          uint64
}

type vulkan12Properties struct {
	header
	driverID   uint32
	driverName [256]byte
	driverInfo [256]byte
	_          [16]byte
	preserve32 uint32 // shaderSignedZeroInfNanPreserveFloat32
	_          [32]byte
	rte32      uint32 // shaderRoundingModeRTEFloat32
	_          [148]byte
}

type vulkan13Properties struct {
	header
	_              [56]byte
	dotAccelerated uint32 // integerDotProduct4x8BitPackedSignedAccelerated
	_              [132]byte
	maxBuffer      uint64
}

type features2 struct {
	header
	list [55]uint32
	_    uint32
}

type vulkan11Features struct {
	header
	list [12]uint32
}

type vulkan12Features struct {
	header
	list [47]uint32
	_    uint32
}

type vulkan13Features struct {
	header
	list [15]uint32
	_    uint32
}

type memoryType struct{ flags, heap uint32 }

type memoryHeap struct {
	size  uint64
	flags uint32
	_     uint32
}

type memoryProperties2 struct {
	header
	typeCount uint32
	types     [32]memoryType
	heapCount uint32
	heaps     [16]memoryHeap
}

type memoryBudget struct {
	header
	budget, usage [16]uint64
}

type queueFamily struct {
	flags, count, timestampBits uint32
	_                           [3]uint32
}

type deviceQueueCreateInfo struct {
	header
	flags, family, count uint32
	_                    uint32
	priorities           uintptr
}

type deviceCreateInfo struct {
	header
	flags          uint32
	queueCount     uint32
	queues         uintptr
	layerCount     uint32
	_              uint32
	layers         uintptr
	extensionCount uint32
	_              uint32
	extensions     uintptr
	features       uintptr
}

type bufferCreateInfo struct {
	header
	flags       uint32
	_           uint32
	size        uint64
	usage       uint32
	sharing     uint32
	familyCount uint32
	_           uint32
	families    uintptr
}

type externalMemoryBuffer struct {
	header
	handles uint32
	_       uint32
}

type memoryRequirements struct {
	size, alignment uint64
	types           uint32
	_               uint32
}

type memoryAllocateInfo struct {
	header
	size uint64
	kind uint32
	_    uint32
}

type memoryAllocateFlags struct {
	header
	flags, mask uint32
}

type importHostPointer struct {
	header
	handle uint32
	_      uint32
	at     uintptr
}

type hostPointerProperties struct {
	header
	types uint32
	_     uint32
}

type hostProperties struct {
	header
	alignment uint64
}

type pciBusInfo struct {
	header
	domain, bus, device, function uint32
}

type bufferDeviceAddressInfo struct {
	header
	buffer uint64
}

type shaderModuleCreateInfo struct {
	header
	flags uint32
	_     uint32
	size  uint64
	code  uintptr
}

type pushConstantRange struct{ stages, offset, size uint32 }

type pipelineLayoutCreateInfo struct {
	header
	flags      uint32
	setCount   uint32
	sets       uintptr
	rangeCount uint32
	_          uint32
	ranges     uintptr
}

type specializationEntry struct {
	id, offset uint32
	size       uint64
}

type specializationInfo struct {
	count   uint32
	_       uint32
	entries uintptr
	size    uint64
	data    uintptr
}

type pipelineStageCreateInfo struct {
	header
	flags, stage   uint32
	module         uint64
	name           uintptr
	specialization uintptr
}

type computePipelineCreateInfo struct {
	header
	flags     uint32
	_         uint32
	stage     pipelineStageCreateInfo
	layout    uint64
	base      uint64
	baseIndex int32
	_         uint32
}

type commandPoolCreateInfo struct {
	header
	flags, family uint32
}

type commandBufferAllocateInfo struct {
	header
	pool         uint64
	level, count uint32
}

type commandBufferBeginInfo struct {
	header
	_ uint32 // flags
	_ uint32
	_ uintptr // inheritance
}

type memoryBarrier struct {
	header
	source, target uint32
}

type bufferCopy struct{ source, target, size uint64 }

type submitInfo struct {
	header
	waitCount    uint32
	_            uint32
	waits        uintptr
	waitStages   uintptr
	commandCount uint32
	_            uint32
	commands     uintptr
	signalCount  uint32
	_            uint32
	signals      uintptr
}

type timelineSubmitInfo struct {
	header
	waitCount   uint32
	_           uint32
	waits       uintptr
	signalCount uint32
	_           uint32
	signals     uintptr
}

type semaphoreTypeCreateInfo struct {
	header
	kind uint32
	_    uint32
	_    uint64 // initial value
}

type semaphoreCreateInfo struct {
	header
	_ uint32 // flags
	_ uint32
}

type semaphoreWaitInfo struct {
	header
	_, count   uint32 // flags
	semaphores uintptr
	values     uintptr
}

type queryPoolCreateInfo struct {
	header
	_, kind, count, _ uint32 // flags, statistics
}

type debugMessengerCreateInfo struct {
	header
	_, severities, types uint32 // flags
	_                    uint32
	callback, _          uintptr // user data
}
