// A Vulkan loader in front of the machine's own, REAL, whose devices seem to have
// 16304 MiB of memory of which the host sees a window of 256 MiB: Resizable BAR is off.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

typedef void *(*proc)(void *, const char *);
struct properties {
	uint64_t header[2];
	uint32_t types;
	struct { uint32_t flags, heap; } type[32];
	uint32_t heaps;
	struct { uint64_t size; uint32_t flags; } heap[16];
};
struct allocation { uint64_t header[2], size; uint32_t type; };

static proc instanceProc, deviceProc;
static int (*allocate)(void *, struct allocation *, void *, void *);
static void (*requirements)(void *, uint64_t, uint64_t *);

static void memory(void *device, struct properties *p) {
	(void)device;
	enum { LOCAL = 1, VISIBLE = 2, COHERENT = 4, CACHED = 8 };
	p->types = 4;
	p->type[0].flags = LOCAL, p->type[0].heap = 0;
	p->type[1].flags = VISIBLE | COHERENT, p->type[1].heap = 1;
	p->type[2].flags = LOCAL | VISIBLE | COHERENT, p->type[2].heap = 2;
	p->type[3].flags = VISIBLE | COHERENT | CACHED, p->type[3].heap = 1;
	p->heaps = 3;
	p->heap[0].size = 16304ull << 20, p->heap[0].flags = 1;
	p->heap[1].size = 8ull << 30, p->heap[1].flags = 0;
	p->heap[2].size = 256ull << 20, p->heap[2].flags = 1;
}

// Below there is one type.
static int allocateAny(void *device, struct allocation *a, void *host, void *out) {
	a->type = 0;
	return allocate(device, a, host, out);
}
static void anyType(void *device, uint64_t buffer, uint64_t *r) {
	requirements(device, buffer, r);
	r[2] = 15;
}
static void *ofDevice(void *device, const char *name) {
	void *f = deviceProc(device, name);
	if (strcmp(name, "vkAllocateMemory") == 0) {
		*(void **)&allocate = f;
		return allocateAny;
	}
	if (strcmp(name, "vkGetBufferMemoryRequirements") == 0) {
		*(void **)&requirements = f;
		return anyType;
	}
	return f;
}

void *vkGetInstanceProcAddr(void *instance, const char *name) {
	if (!instanceProc) {
		*(void **)&instanceProc = dlsym(dlopen(REAL, RTLD_NOW | RTLD_LOCAL), "vkGetInstanceProcAddr");
	}
	void *f = instanceProc(instance, name);
	if (strcmp(name, "vkGetPhysicalDeviceMemoryProperties2") == 0) {
		return memory;
	}
	if (strcmp(name, "vkGetDeviceProcAddr") == 0) {
		*(void **)&deviceProc = f;
		return ofDevice;
	}
	return f;
}
