// Package abitest holds the constants and structs of backends/vulkan, which
// writes them down for itself, against two other sources: the C header, by a
// program that is compiled here, and the cgo binding of Vulkan 1.1. It is a
// module of its own because the binding needs cgo and must drive nothing.
package abitest

import (
	"fmt"
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"go/types"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"

	vk "github.com/vulkan-go/vulkan"
)

// A pair is a name of ours and one of C's.
type pair struct{ ours, c string }

func pairs(text string) (all []pair) {
	for _, f := range strings.Fields(text) {
		ours, c, _ := strings.Cut(f, ":")
		all = append(all, pair{ours, c})
	}
	return all
}

// structs are ours, each field with C's name. A field that is C's whole struct, or
// a part of a run of ours, has the offset of C's field.
var structs = []struct {
	pair
	fields []pair
	any    any // of the binding; nil: it has no such struct
}{
	{pair{"header", "VkBaseInStructure"}, pairs("sType:sType next:pNext"), nil},
	{pair{"applicationInfo", "VkApplicationInfo"}, pairs("name:pApplicationName version:applicationVersion engine:pEngineName engineVersion:engineVersion api:apiVersion"), &vk.ApplicationInfo{}},
	{pair{"instanceCreateInfo", "VkInstanceCreateInfo"}, pairs("flags:flags app:pApplicationInfo layerCount:enabledLayerCount layers:ppEnabledLayerNames extensionCount:enabledExtensionCount extensions:ppEnabledExtensionNames"), &vk.InstanceCreateInfo{}},
	{pair{"extensionProperties", "VkExtensionProperties"}, pairs("name:extensionName version:specVersion"), &vk.ExtensionProperties{}},
	{pair{"properties2", "VkPhysicalDeviceProperties2"}, pairs("api:properties.apiVersion driver:properties.driverVersion vendor:properties.vendorID device:properties.deviceID kind:properties.deviceType name:properties.deviceName cacheUUID:properties.pipelineCacheUUID limits:properties.limits"), nil},
	{pair{"limits", "VkPhysicalDeviceLimits"}, pairs("storageRange:maxStorageBufferRange pushConstants:maxPushConstantsSize allocations:maxMemoryAllocationCount sharedMemory:maxComputeSharedMemorySize groupCount:maxComputeWorkGroupCount groupInvocations:maxComputeWorkGroupInvocations groupSize:maxComputeWorkGroupSize timestamps:timestampComputeAndGraphics timestampPeriod:timestampPeriod nonCoherentAtom:nonCoherentAtomSize"), &vk.PhysicalDeviceLimits{}},
	{pair{"vulkan11Properties", "VkPhysicalDeviceVulkan11Properties"}, pairs("deviceUUID:deviceUUID driverUUID:driverUUID subgroupSize:subgroupSize maxAllocation:maxMemoryAllocationSize"), nil},
	{pair{"vulkan12Properties", "VkPhysicalDeviceVulkan12Properties"}, pairs("driverID:driverID driverName:driverName driverInfo:driverInfo preserve32:shaderSignedZeroInfNanPreserveFloat32 rte32:shaderRoundingModeRTEFloat32"), nil},
	{pair{"vulkan13Properties", "VkPhysicalDeviceVulkan13Properties"}, pairs("dotAccelerated:integerDotProduct4x8BitPackedSignedAccelerated maxBuffer:maxBufferSize"), nil},
	{pair{"features2", "VkPhysicalDeviceFeatures2"}, pairs("list:features"), nil},
	{pair{"vulkan11Features", "VkPhysicalDeviceVulkan11Features"}, pairs("list:storageBuffer16BitAccess"), nil},
	{pair{"vulkan12Features", "VkPhysicalDeviceVulkan12Features"}, pairs("list:samplerMirrorClampToEdge"), nil},
	{pair{"vulkan13Features", "VkPhysicalDeviceVulkan13Features"}, pairs("list:robustImageAccess"), nil},
	{pair{"memoryType", "VkMemoryType"}, pairs("flags:propertyFlags heap:heapIndex"), &vk.MemoryType{}},
	{pair{"memoryHeap", "VkMemoryHeap"}, pairs("size:size flags:flags"), &vk.MemoryHeap{}},
	{pair{"memoryProperties2", "VkPhysicalDeviceMemoryProperties2"}, pairs("typeCount:memoryProperties.memoryTypeCount types:memoryProperties.memoryTypes heapCount:memoryProperties.memoryHeapCount heaps:memoryProperties.memoryHeaps"), nil},
	{pair{"memoryBudget", "VkPhysicalDeviceMemoryBudgetPropertiesEXT"}, pairs("budget:heapBudget usage:heapUsage"), nil},
	{pair{"queueFamily", "VkQueueFamilyProperties"}, pairs("flags:queueFlags count:queueCount timestampBits:timestampValidBits"), &vk.QueueFamilyProperties{}},
	{pair{"deviceQueueCreateInfo", "VkDeviceQueueCreateInfo"}, pairs("flags:flags family:queueFamilyIndex count:queueCount priorities:pQueuePriorities"), &vk.DeviceQueueCreateInfo{}},
	{pair{"deviceCreateInfo", "VkDeviceCreateInfo"}, pairs("flags:flags queueCount:queueCreateInfoCount queues:pQueueCreateInfos layerCount:enabledLayerCount layers:ppEnabledLayerNames extensionCount:enabledExtensionCount extensions:ppEnabledExtensionNames features:pEnabledFeatures"), &vk.DeviceCreateInfo{}},
	{pair{"bufferCreateInfo", "VkBufferCreateInfo"}, pairs("flags:flags size:size usage:usage sharing:sharingMode familyCount:queueFamilyIndexCount families:pQueueFamilyIndices"), &vk.BufferCreateInfo{}},
	{pair{"externalMemoryBuffer", "VkExternalMemoryBufferCreateInfo"}, pairs("handles:handleTypes"), &vk.ExternalMemoryBufferCreateInfo{}},
	{pair{"memoryRequirements", "VkMemoryRequirements"}, pairs("size:size alignment:alignment types:memoryTypeBits"), &vk.MemoryRequirements{}},
	{pair{"memoryAllocateInfo", "VkMemoryAllocateInfo"}, pairs("size:allocationSize kind:memoryTypeIndex"), &vk.MemoryAllocateInfo{}},
	{pair{"memoryAllocateFlags", "VkMemoryAllocateFlagsInfo"}, pairs("flags:flags mask:deviceMask"), &vk.MemoryAllocateFlagsInfo{}},
	{pair{"importHostPointer", "VkImportMemoryHostPointerInfoEXT"}, pairs("handle:handleType at:pHostPointer"), &vk.ImportMemoryHostPointerInfo{}},
	{pair{"hostPointerProperties", "VkMemoryHostPointerPropertiesEXT"}, pairs("types:memoryTypeBits"), &vk.MemoryHostPointerProperties{}},
	{pair{"hostProperties", "VkPhysicalDeviceExternalMemoryHostPropertiesEXT"}, pairs("alignment:minImportedHostPointerAlignment"), &vk.PhysicalDeviceExternalMemoryHostProperties{}},
	{pair{"pciBusInfo", "VkPhysicalDevicePCIBusInfoPropertiesEXT"}, pairs("domain:pciDomain bus:pciBus device:pciDevice function:pciFunction"), nil},
	{pair{"bufferDeviceAddressInfo", "VkBufferDeviceAddressInfo"}, pairs("buffer:buffer"), nil},
	{pair{"shaderModuleCreateInfo", "VkShaderModuleCreateInfo"}, pairs("flags:flags size:codeSize code:pCode"), &vk.ShaderModuleCreateInfo{}},
	{pair{"pushConstantRange", "VkPushConstantRange"}, pairs("stages:stageFlags offset:offset size:size"), &vk.PushConstantRange{}},
	{pair{"pipelineLayoutCreateInfo", "VkPipelineLayoutCreateInfo"}, pairs("flags:flags setCount:setLayoutCount sets:pSetLayouts rangeCount:pushConstantRangeCount ranges:pPushConstantRanges"), &vk.PipelineLayoutCreateInfo{}},
	{pair{"specializationEntry", "VkSpecializationMapEntry"}, pairs("id:constantID offset:offset size:size"), &vk.SpecializationMapEntry{}},
	{pair{"specializationInfo", "VkSpecializationInfo"}, pairs("count:mapEntryCount entries:pMapEntries size:dataSize data:pData"), &vk.SpecializationInfo{}},
	{pair{"pipelineStageCreateInfo", "VkPipelineShaderStageCreateInfo"}, pairs("flags:flags stage:stage module:module name:pName specialization:pSpecializationInfo"), &vk.PipelineShaderStageCreateInfo{}},
	{pair{"computePipelineCreateInfo", "VkComputePipelineCreateInfo"}, pairs("flags:flags stage:stage layout:layout base:basePipelineHandle baseIndex:basePipelineIndex"), &vk.ComputePipelineCreateInfo{}},
	{pair{"commandPoolCreateInfo", "VkCommandPoolCreateInfo"}, pairs("flags:flags family:queueFamilyIndex"), &vk.CommandPoolCreateInfo{}},
	{pair{"commandBufferAllocateInfo", "VkCommandBufferAllocateInfo"}, pairs("pool:commandPool level:level count:commandBufferCount"), &vk.CommandBufferAllocateInfo{}},
	{pair{"commandBufferBeginInfo", "VkCommandBufferBeginInfo"}, nil, &vk.CommandBufferBeginInfo{}},
	{pair{"memoryBarrier", "VkMemoryBarrier"}, pairs("source:srcAccessMask target:dstAccessMask"), &vk.MemoryBarrier{}},
	{pair{"bufferCopy", "VkBufferCopy"}, pairs("source:srcOffset target:dstOffset size:size"), &vk.BufferCopy{}},
	{pair{"submitInfo", "VkSubmitInfo"}, pairs("waitCount:waitSemaphoreCount waits:pWaitSemaphores waitStages:pWaitDstStageMask commandCount:commandBufferCount commands:pCommandBuffers signalCount:signalSemaphoreCount signals:pSignalSemaphores"), &vk.SubmitInfo{}},
	{pair{"timelineSubmitInfo", "VkTimelineSemaphoreSubmitInfo"}, pairs("waitCount:waitSemaphoreValueCount waits:pWaitSemaphoreValues signalCount:signalSemaphoreValueCount signals:pSignalSemaphoreValues"), nil},
	{pair{"semaphoreTypeCreateInfo", "VkSemaphoreTypeCreateInfo"}, pairs("kind:semaphoreType"), nil},
	{pair{"semaphoreCreateInfo", "VkSemaphoreCreateInfo"}, nil, &vk.SemaphoreCreateInfo{}},
	{pair{"semaphoreWaitInfo", "VkSemaphoreWaitInfo"}, pairs("count:semaphoreCount semaphores:pSemaphores values:pValues"), nil},
	{pair{"queryPoolCreateInfo", "VkQueryPoolCreateInfo"}, pairs("kind:queryType count:queryCount"), &vk.QueryPoolCreateInfo{}},
	{pair{"debugMessengerCreateInfo", "VkDebugUtilsMessengerCreateInfoEXT"}, pairs("severities:messageSeverity types:messageType callback:pfnUserCallback"), nil},
}

// constants are ours, with C's names; b is the binding's value, where it has one.
var constants = []struct {
	pair
	b any
}{
	{pair{"success", "VK_SUCCESS"}, vk.Success},
	{pair{"timeout", "VK_TIMEOUT"}, vk.Timeout},
	{pair{"incomplete", "VK_INCOMPLETE"}, vk.Incomplete},
	{pair{"errOutOfHost", "VK_ERROR_OUT_OF_HOST_MEMORY"}, vk.ErrorOutOfHostMemory},
	{pair{"errOutOfDevice", "VK_ERROR_OUT_OF_DEVICE_MEMORY"}, vk.ErrorOutOfDeviceMemory},
	{pair{"errInitFailed", "VK_ERROR_INITIALIZATION_FAILED"}, vk.ErrorInitializationFailed},
	{pair{"errDeviceLost", "VK_ERROR_DEVICE_LOST"}, vk.ErrorDeviceLost},
	{pair{"errMemoryMapFailed", "VK_ERROR_MEMORY_MAP_FAILED"}, vk.ErrorMemoryMapFailed},
	{pair{"errLayerMissing", "VK_ERROR_LAYER_NOT_PRESENT"}, vk.ErrorLayerNotPresent},
	{pair{"errExtMissing", "VK_ERROR_EXTENSION_NOT_PRESENT"}, vk.ErrorExtensionNotPresent},
	{pair{"errFeatureMissing", "VK_ERROR_FEATURE_NOT_PRESENT"}, vk.ErrorFeatureNotPresent},
	{pair{"errIncompatible", "VK_ERROR_INCOMPATIBLE_DRIVER"}, vk.ErrorIncompatibleDriver},
	{pair{"errTooManyObjects", "VK_ERROR_TOO_MANY_OBJECTS"}, vk.ErrorTooManyObjects},
	{pair{"apiVersion12", "VK_API_VERSION_1_2"}, nil},
	{pair{"stApplicationInfo", "VK_STRUCTURE_TYPE_APPLICATION_INFO"}, vk.StructureTypeApplicationInfo},
	{pair{"stInstanceCreateInfo", "VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO"}, vk.StructureTypeInstanceCreateInfo},
	{pair{"stDeviceQueueCreateInfo", "VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO"}, vk.StructureTypeDeviceQueueCreateInfo},
	{pair{"stDeviceCreateInfo", "VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO"}, vk.StructureTypeDeviceCreateInfo},
	{pair{"stSubmitInfo", "VK_STRUCTURE_TYPE_SUBMIT_INFO"}, vk.StructureTypeSubmitInfo},
	{pair{"stMemoryAllocateInfo", "VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO"}, vk.StructureTypeMemoryAllocateInfo},
	{pair{"stSemaphoreCreateInfo", "VK_STRUCTURE_TYPE_SEMAPHORE_CREATE_INFO"}, vk.StructureTypeSemaphoreCreateInfo},
	{pair{"stQueryPoolCreateInfo", "VK_STRUCTURE_TYPE_QUERY_POOL_CREATE_INFO"}, vk.StructureTypeQueryPoolCreateInfo},
	{pair{"stBufferCreateInfo", "VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO"}, vk.StructureTypeBufferCreateInfo},
	{pair{"stShaderModuleCreate", "VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO"}, vk.StructureTypeShaderModuleCreateInfo},
	{pair{"stPipelineStageCreate", "VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO"}, vk.StructureTypePipelineShaderStageCreateInfo},
	{pair{"stComputePipeline", "VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO"}, vk.StructureTypeComputePipelineCreateInfo},
	{pair{"stPipelineLayoutCreate", "VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO"}, vk.StructureTypePipelineLayoutCreateInfo},
	{pair{"stCommandPoolCreate", "VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO"}, vk.StructureTypeCommandPoolCreateInfo},
	{pair{"stCommandBufferAllocate", "VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO"}, vk.StructureTypeCommandBufferAllocateInfo},
	{pair{"stCommandBufferBegin", "VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO"}, vk.StructureTypeCommandBufferBeginInfo},
	{pair{"stMemoryBarrier", "VK_STRUCTURE_TYPE_MEMORY_BARRIER"}, vk.StructureTypeMemoryBarrier},
	{pair{"stVulkan11Features", "VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES"}, nil},
	{pair{"stVulkan11Properties", "VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_PROPERTIES"}, nil},
	{pair{"stVulkan12Features", "VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES"}, nil},
	{pair{"stVulkan12Properties", "VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_PROPERTIES"}, nil},
	{pair{"stVulkan13Features", "VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_3_FEATURES"}, nil},
	{pair{"stVulkan13Properties", "VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_3_PROPERTIES"}, nil},
	{pair{"stFeatures2", "VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2"}, vk.StructureTypePhysicalDeviceFeatures2},
	{pair{"stProperties2", "VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2"}, vk.StructureTypePhysicalDeviceProperties2},
	{pair{"stMemoryProperties2", "VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_PROPERTIES_2"}, vk.StructureTypePhysicalDeviceMemoryProperties2},
	{pair{"stMemoryAllocateFlags", "VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_FLAGS_INFO"}, vk.StructureTypeMemoryAllocateFlagsInfo},
	{pair{"stDebugMessengerCreate", "VK_STRUCTURE_TYPE_DEBUG_UTILS_MESSENGER_CREATE_INFO_EXT"}, nil},
	{pair{"stImportHostPointer", "VK_STRUCTURE_TYPE_IMPORT_MEMORY_HOST_POINTER_INFO_EXT"}, vk.StructureTypeImportMemoryHostPointerInfo},
	{pair{"stHostPointerProperties", "VK_STRUCTURE_TYPE_MEMORY_HOST_POINTER_PROPERTIES_EXT"}, vk.StructureTypeMemoryHostPointerProperties},
	{pair{"stHostProperties", "VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_EXTERNAL_MEMORY_HOST_PROPERTIES_EXT"}, vk.StructureTypePhysicalDeviceExternalMemoryHostProperties},
	{pair{"stExternalMemoryBuffer", "VK_STRUCTURE_TYPE_EXTERNAL_MEMORY_BUFFER_CREATE_INFO"}, vk.StructureTypeExternalMemoryBufferCreateInfo},
	{pair{"stSemaphoreTypeCreate", "VK_STRUCTURE_TYPE_SEMAPHORE_TYPE_CREATE_INFO"}, nil},
	{pair{"stPCIBusInfo", "VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PCI_BUS_INFO_PROPERTIES_EXT"}, nil},
	{pair{"stTimelineSubmit", "VK_STRUCTURE_TYPE_TIMELINE_SEMAPHORE_SUBMIT_INFO"}, nil},
	{pair{"stSemaphoreWait", "VK_STRUCTURE_TYPE_SEMAPHORE_WAIT_INFO"}, nil},
	{pair{"stMemoryBudget", "VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_BUDGET_PROPERTIES_EXT"}, nil},
	{pair{"stBufferDeviceAddress", "VK_STRUCTURE_TYPE_BUFFER_DEVICE_ADDRESS_INFO"}, nil},
	{pair{"memoryDeviceLocal", "VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT"}, vk.MemoryPropertyDeviceLocalBit},
	{pair{"memoryHostVisible", "VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT"}, vk.MemoryPropertyHostVisibleBit},
	{pair{"memoryHostCoherent", "VK_MEMORY_PROPERTY_HOST_COHERENT_BIT"}, vk.MemoryPropertyHostCoherentBit},
	{pair{"memoryHostCached", "VK_MEMORY_PROPERTY_HOST_CACHED_BIT"}, vk.MemoryPropertyHostCachedBit},
	{pair{"heapDeviceLocal", "VK_MEMORY_HEAP_DEVICE_LOCAL_BIT"}, vk.MemoryHeapDeviceLocalBit},
	{pair{"queueGraphics", "VK_QUEUE_GRAPHICS_BIT"}, vk.QueueGraphicsBit},
	{pair{"sharingConcurrent", "VK_SHARING_MODE_CONCURRENT"}, vk.SharingModeConcurrent},
	{pair{"queueCompute", "VK_QUEUE_COMPUTE_BIT"}, vk.QueueComputeBit},
	{pair{"queueTransfer", "VK_QUEUE_TRANSFER_BIT"}, vk.QueueTransferBit},
	{pair{"deviceTypeIntegrated", "VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU"}, vk.PhysicalDeviceTypeIntegratedGpu},
	{pair{"deviceTypeDiscrete", "VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU"}, vk.PhysicalDeviceTypeDiscreteGpu},
	{pair{"deviceTypeVirtual", "VK_PHYSICAL_DEVICE_TYPE_VIRTUAL_GPU"}, vk.PhysicalDeviceTypeVirtualGpu},
	{pair{"deviceTypeCPU", "VK_PHYSICAL_DEVICE_TYPE_CPU"}, vk.PhysicalDeviceTypeCpu},
	{pair{"bufferTransferSrc", "VK_BUFFER_USAGE_TRANSFER_SRC_BIT"}, vk.BufferUsageTransferSrcBit},
	{pair{"bufferTransferDst", "VK_BUFFER_USAGE_TRANSFER_DST_BIT"}, vk.BufferUsageTransferDstBit},
	{pair{"bufferStorage", "VK_BUFFER_USAGE_STORAGE_BUFFER_BIT"}, vk.BufferUsageStorageBufferBit},
	{pair{"bufferIndirect", "VK_BUFFER_USAGE_INDIRECT_BUFFER_BIT"}, vk.BufferUsageIndirectBufferBit},
	{pair{"bufferAddress", "VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT"}, nil},
	{pair{"allocateDeviceAddress", "VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_BIT"}, nil},
	{pair{"hostPointerHandle", "VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT"}, vk.ExternalMemoryHandleTypeHostAllocationBit},
	{pair{"stageIndirect", "VK_PIPELINE_STAGE_DRAW_INDIRECT_BIT"}, vk.PipelineStageDrawIndirectBit},
	{pair{"stageCompute", "VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT"}, vk.PipelineStageComputeShaderBit},
	{pair{"stageTransfer", "VK_PIPELINE_STAGE_TRANSFER_BIT"}, vk.PipelineStageTransferBit},
	{pair{"stageBottom", "VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT"}, vk.PipelineStageBottomOfPipeBit},
	{pair{"stageHost", "VK_PIPELINE_STAGE_HOST_BIT"}, vk.PipelineStageHostBit},
	{pair{"accessIndirectRead", "VK_ACCESS_INDIRECT_COMMAND_READ_BIT"}, vk.AccessIndirectCommandReadBit},
	{pair{"accessShaderRead", "VK_ACCESS_SHADER_READ_BIT"}, vk.AccessShaderReadBit},
	{pair{"accessShaderWrite", "VK_ACCESS_SHADER_WRITE_BIT"}, vk.AccessShaderWriteBit},
	{pair{"accessTransferRead", "VK_ACCESS_TRANSFER_READ_BIT"}, vk.AccessTransferReadBit},
	{pair{"accessTransferWrite", "VK_ACCESS_TRANSFER_WRITE_BIT"}, vk.AccessTransferWriteBit},
	{pair{"accessHostRead", "VK_ACCESS_HOST_READ_BIT"}, vk.AccessHostReadBit},
	{pair{"accessHostWrite", "VK_ACCESS_HOST_WRITE_BIT"}, vk.AccessHostWriteBit},
	{pair{"shaderStageCompute", "VK_SHADER_STAGE_COMPUTE_BIT"}, vk.ShaderStageComputeBit},
	{pair{"bindCompute", "VK_PIPELINE_BIND_POINT_COMPUTE"}, vk.PipelineBindPointCompute},
	{pair{"semaphoreTimeline", "VK_SEMAPHORE_TYPE_TIMELINE"}, nil},
	{pair{"queryTimestamp", "VK_QUERY_TYPE_TIMESTAMP"}, vk.QueryTypeTimestamp},
	{pair{"poolResetCommand", "VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT"}, vk.CommandPoolCreateResetCommandBufferBit},
	{pair{"commandSimultaneous", "VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT"}, vk.CommandBufferUsageSimultaneousUseBit},
	{pair{"featureInt64", "offsetof(VkPhysicalDeviceFeatures, shaderInt64) / 4"}, nil},
	{pair{"feature12Timeline", "(offsetof(VkPhysicalDeviceVulkan12Features, timelineSemaphore) - 16) / 4"}, nil},
	{pair{"feature12BufferAddress", "(offsetof(VkPhysicalDeviceVulkan12Features, bufferDeviceAddress) - 16) / 4"}, nil},
	{pair{"feature13DotProduct", "(offsetof(VkPhysicalDeviceVulkan13Features, shaderIntegerDotProduct) - 16) / 4"}, nil},
}

// ours type-checks abi.go, which imports nothing.
func ours(t *testing.T) *types.Package {
	t.Helper()
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, "../abi.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	p, err := new(types.Config).Check("vulkan", fset, []*ast.File{f}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// header asks the C compiler for the values of expressions.
func header(t *testing.T, expressions []string) map[string]int64 {
	t.Helper()
	var b strings.Builder
	b.WriteString("#include <stddef.h>\n#include <stdio.h>\n#include <vulkan/vulkan_core.h>\nint main(void) {\n")
	for _, e := range expressions {
		fmt.Fprintf(&b, "\tprintf(\"%%lld\\n\", (long long)(%s));\n", e)
	}
	b.WriteString("\treturn 0;\n}\n")
	dir := t.TempDir()
	source, program := filepath.Join(dir, "abi.c"), filepath.Join(dir, "abi")
	if err := os.WriteFile(source, []byte(b.String()), 0o666); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("gcc", "-o", program, source).CombinedOutput(); err != nil {
		t.Fatalf("needs gcc and libvulkan-dev: %v\n%s", err, out)
	}
	out, err := exec.Command(program).Output()
	if err != nil {
		t.Fatal(err)
	}
	values := make(map[string]int64)
	lines := strings.Fields(string(out))
	for i, e := range expressions {
		v, err := strconv.ParseInt(lines[i], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		values[e] = v
	}
	return values
}

// Sizes and offsets of our structs are those of the header and of the binding,
// and every struct and every named field of ours is looked at.
func TestStructs(t *testing.T) {
	p, sizes := ours(t), types.SizesFor("gc", "amd64")
	var ask []string
	for _, s := range structs {
		ask = append(ask, "sizeof("+s.c+")")
		for _, f := range s.fields {
			ask = append(ask, "offsetof("+s.c+", "+f.c+")")
		}
	}
	c := header(t, ask)
	known := make(map[string]bool)
	bound := 0
	for _, s := range structs {
		known[s.ours] = true
		obj := p.Scope().Lookup(s.ours)
		if obj == nil {
			t.Errorf("there is no %s", s.ours)
			continue
		}
		st := obj.Type().Underlying().(*types.Struct)
		if got, want := sizes.Sizeof(obj.Type()), c["sizeof("+s.c+")"]; got != want {
			t.Errorf("%s has %d bytes, %s has %d", s.ours, got, s.c, want)
		}
		var fields []*types.Var
		for i := range st.NumFields() {
			fields = append(fields, st.Field(i))
		}
		offsets := sizes.Offsetsof(fields)
		at := make(map[string]int64)
		for i, f := range fields {
			if f.Name() != "_" && !f.Embedded() {
				at[f.Name()] = offsets[i]
			}
		}
		var of reflect.Type
		if s.any != nil {
			m, ok := reflect.TypeOf(s.any).MethodByName("PassRef")
			if !ok {
				t.Fatalf("the binding has no PassRef for %s", s.c)
			}
			of = m.Type.Out(0).Elem()
			bound++
			if int64(of.Size()) != sizes.Sizeof(obj.Type()) {
				t.Errorf("%s has %d bytes, the binding's %d", s.ours, sizes.Sizeof(obj.Type()), of.Size())
			}
		}
		for _, f := range s.fields {
			got, ok := at[f.ours]
			if want := c["offsetof("+s.c+", "+f.c+")"]; !ok || got != want {
				t.Errorf("%s.%s lies at %d, %s.%s at %d", s.ours, f.ours, got, s.c, f.c, want)
			}
			delete(at, f.ours)
			if of == nil {
				continue
			}
			if b, ok := of.FieldByName(f.c); !ok || int64(b.Offset) != got {
				t.Errorf("%s.%s lies at %d, the binding's %s at %d (found: %v)", s.ours, f.ours, got, f.c, b.Offset, ok)
			}
		}
		for name := range at {
			t.Errorf("%s.%s is not looked at", s.ours, name)
		}
	}
	for _, name := range p.Scope().Names() {
		if obj, ok := p.Scope().Lookup(name).(*types.TypeName); ok && !known[name] {
			if _, isStruct := obj.Type().Underlying().(*types.Struct); isStruct {
				t.Errorf("%s is not looked at", name)
			}
		}
	}
	t.Logf("%d structs, %d of them in the binding", len(structs), bound)
}

// So are the values of our constants.
func TestConstants(t *testing.T) {
	p := ours(t)
	var ask []string
	for _, k := range constants {
		ask = append(ask, k.c)
	}
	c := header(t, ask)
	known := make(map[string]bool)
	for _, k := range constants {
		known[k.ours] = true
		obj, ok := p.Scope().Lookup(k.ours).(*types.Const)
		if !ok {
			t.Errorf("there is no constant %s", k.ours)
			continue
		}
		got, _ := constant.Int64Val(obj.Val())
		if got != c[k.c] {
			t.Errorf("%s is %d, %s is %d", k.ours, got, k.c, c[k.c])
		}
		if k.b != nil && reflect.ValueOf(k.b).Int() != got {
			t.Errorf("%s is %d, the binding's %d", k.ours, got, reflect.ValueOf(k.b).Int())
		}
	}
	for _, name := range p.Scope().Names() {
		if _, ok := p.Scope().Lookup(name).(*types.Const); ok && !known[name] {
			t.Errorf("%s is not looked at", name)
		}
	}
}
