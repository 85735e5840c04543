// A driver of CUDA and HIP, and their run-time compilers, for tests on machines
// without a GPU: the functions that backends/gpu asks for, by both makers' names.
//
// Kernels are those of shaders/gpu.cu, compiled for the host; a thread is a
// coroutine. Streams are lazy: what is put into one runs when somebody waits for it,
// so that memory which is used again too early shows itself.
#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define BOTH(cu, hip, params) \
	int cu params __attribute__((alias(#hip))); \
	int hip params

// What tests set and ask for.
static char failing[64], arch[64] = "gfx1030:xnack-";
static int failSkip, failCode, version = 13000, devices = 1, capability = 90;
static long long live, compiled, total = 1 << 30, pinnedLimit = 1 << 30, pinned;

void fakeFail(const char *call, int skip, int code) {
	snprintf(failing, sizeof failing, "%s", call);
	failSkip = skip;
	failCode = code;
}
void fakeDevice(int v, const char *a, int count) {
	version = v;
	snprintf(arch, sizeof arch, "%s", a);
	devices = count;
}
void fakePinned(long long bytes) { pinnedLimit = bytes; }
long long fakeLive(void) { return live; }
long long fakeCompiled(void) { return compiled; }

static int flaw, flawTiles, apart;
void fakeFlawTiles(int on) { flawTiles = on; }

// A process that does not call these is told by its environment: FAKE_FAIL is
// "CALL SKIP CODE", a negative SKIP for every call; FAKE_FLAW makes threads give each other wrong numbers, FAKE_FLAW_TILES tensor cores compute some, FAKE_TOTAL
// is a device's memory in bytes, FAKE_DEVICES how many there are, FAKE_APART that they
// do not reach each other.
__attribute__((constructor)) static void told(void) {
	const char *e = getenv("FAKE_FAIL");
	if (e) {
		sscanf(e, "%63s %d %d", failing, &failSkip, &failCode);
	}
	flaw = getenv("FAKE_FLAW") != 0;
	flawTiles = getenv("FAKE_FLAW_TILES") != 0;
	apart = getenv("FAKE_APART") != 0;
	if ((e = getenv("FAKE_TOTAL"))) {
		total = atoll(e);
	}
	if ((e = getenv("FAKE_DEVICES"))) {
		devices = atoi(e);
	}
}

static int fails(const char *call) {
	if (strcmp(call, failing) != 0) {
		return 0;
	}
	if (failSkip < 0) { // always
		return failCode;
	}
	if (failSkip-- > 0) {
		return 0;
	}
	failing[0] = 0;
	return failCode;
}
#define FAIL(call) \
	do { \
		int code = fails(call); \
		if (code) { \
			return code; \
		} \
	} while (0)

// Threads of a block.
enum { MOST = 256, STACK = (64 << 10) + 832 }; // stacks that do not all lie in the same lines of the caches
static struct thread {
	jmp_buf at;
	ucontext_t start;
	int begun, done, crossed;
} threads[MOST];
static unsigned slots[2][MOST];
static char *stacks;
static int now, threadCount;
static unsigned place[3], grid[3];
static jmp_buf scheduler;
struct params { char b[1024]; };
static void (*entry)(struct params);
static struct params given;

unsigned thread(void) { return now; }
unsigned blockX(void) { return place[0]; }
unsigned blockY(void) { return place[1]; }
unsigned blockZ(void) { return place[2]; }
unsigned blocksX(void) { return grid[0]; }

// yield goes on with the next thread that is not done; those that have not begun are
// begun by the scheduler.
static void yield(void) {
	if (_setjmp(threads[now].at)) {
		return;
	}
	for (int i = now + 1; i < threadCount; i++) {
		if (!threads[i].done) {
			if (!threads[i].begun) {
				break;
			}
			now = i;
			_longjmp(threads[i].at, 1);
		}
	}
	_longjmp(scheduler, 1);
}

// A meeting is a barrier of some threads: a warp's or the block's.
static struct meeting { int all, here, gone, times; } warps[MOST / 32], whole;

static void pass(struct meeting *m) { // once all are here that are not gone
	if (m->here > 0 && m->here + m->gone == m->all) {
		m->here = 0;
		m->times++;
	}
}
static void meet(struct meeting *m) {
	int times = m->times;
	m->here++;
	pass(m);
	while (times == m->times) {
		yield();
	}
}
unsigned across(unsigned v, unsigned mask) {
	unsigned *slot = slots[threads[now].crossed++ & 1];
	slot[now] = v;
	meet(&warps[now / 32]);
	return slot[now ^ mask] ^ flaw;
}
void barrier(void) { meet(&whole); }
void others(void) { yield(); }

// A product of tensor cores: shaders/group.cu says of what.
static signed char tiles[2][MOST][24];
void tileOf(int *c, unsigned *ab, int isSigned) {
	signed char(*tile)[24] = tiles[threads[now].crossed++ & 1];
	memcpy(tile[now], ab, 24);
	meet(&warps[now / 32]);
	int warp = now & ~31, g = now % 32 / 4, t = now % 4;
	for (int i = 0; i < 4; i++) { // rows g and g+8, columns 2t and 2t+1
		for (int k = 0; k < 32; k++) {
			int a = tile[warp + 4 * g + k % 16 / 4][8 * (k / 16) + 4 * (i / 2) + k % 4];
			c[i] += (isSigned ? a : a & 255) * (tile[warp + 4 * (2 * t + i % 2) + k % 16 / 4][16 + 4 * (k / 16) + k % 4] ^ flaw ^ flawTiles);
		}
	}
}
static void body(void) {
	for (;;) { // once for each block
		entry(given);
		threads[now].done = 1;
		struct meeting *both[] = {&warps[now / 32], &whole};
		for (int i = 0; i < 2; i++) {
			both[i]->gone++;
			pass(both[i]);
		}
		yield();
	}
}
static void block(void) {
	for (int i = 0; i < threadCount; i++) {
		threads[i].done = threads[i].crossed = 0;
	}
	whole = (struct meeting){threadCount};
	for (int i = 0; i < threadCount; i += 32) {
		warps[i / 32] = (struct meeting){threadCount - i < 32 ? threadCount - i : 32};
	}
	_setjmp(scheduler);
	for (int i = 0; i < threadCount; i++) {
		if (!threads[i].begun) { // for good: a body begins again with each block
			now = i;
			threads[i].begun = 1;
			getcontext(&threads[i].start);
			threads[i].start.uc_stack.ss_sp = stacks + (size_t)i * STACK;
			threads[i].start.uc_stack.ss_size = STACK;
			threads[i].start.uc_link = 0;
			makecontext(&threads[i].start, body, 0);
			setcontext(&threads[i].start);
		}
	}
	for (int i = 0; i < threadCount; i++) {
		if (!threads[i].done) {
			now = i;
			_longjmp(threads[i].at, 1);
		}
	}
}

// Streams.
struct event { int pending; };
struct op {
	enum { COPY, KERNEL, RECORD, WAIT } kind;
	void *to, *from;
	size_t size;
	void (*f)(struct params);
	unsigned grid[3], threads;
	char args[1024];
	struct event *event;
	struct op *next;
};
struct list { struct op *first, **last; };
struct stream {
	struct list ops;
	struct list *graph; // being recorded
	struct stream *next;
} *streams;

static void put(struct list *l, struct op *o) {
	struct op *copy = malloc(sizeof *copy);
	*copy = *o;
	copy->next = 0;
	if (!l->first) {
		l->last = &l->first;
	}
	*l->last = copy;
	l->last = &copy->next;
	if (copy->kind == RECORD) {
		copy->event->pending++;
	}
}
static int run(struct stream *s, struct event *until) {
	while (s->ops.first && !(until && !until->pending)) {
		struct op *o = s->ops.first;
		switch (o->kind) {
		case COPY:
			memcpy(o->to, o->from, o->size);
			break;
		case KERNEL:
			if (!stacks) {
				stacks = malloc((size_t)MOST * STACK);
			}
			entry = o->f;
			memcpy(&given, o->args, sizeof given);
			threadCount = o->threads;
			memcpy(grid, o->grid, sizeof grid);
			for (place[2] = 0; place[2] < grid[2]; place[2]++)
				for (place[1] = 0; place[1] < grid[1]; place[1]++)
					for (place[0] = 0; place[0] < grid[0]; place[0]++)
						block();
			break;
		case RECORD:
			o->event->pending--;
			break;
		case WAIT:
			for (struct stream *other = streams; other; other = other->next) {
				if (other != s) {
					run(other, o->event);
				}
			}
			break;
		}
		s->ops.first = o->next;
		free(o);
	}
	return 0;
}
static int add(struct stream *s, struct op *o) {
	put(s->graph ? s->graph : &s->ops, o);
	return 0;
}

BOTH(cuInit, hipInit, (unsigned flags)) {
	(void)flags;
	FAIL("init");
	return 0;
}
BOTH(cuDriverGetVersion, hipRuntimeGetVersion, (int *v)) {
	*v = version;
	return 0;
}
BOTH(cuDeviceGetCount, hipGetDeviceCount, (int *n)) {
	*n = devices;
	return devices ? 0 : 100;
}
BOTH(cuDeviceGet, hipDeviceGet, (int *d, int i)) {
	*d = i;
	return 0;
}
BOTH(cuDeviceGetName, hipDeviceGetName, (char *name, int size, int d)) {
	snprintf(name, size, "Fake %d", d);
	return 0;
}
BOTH(cuDeviceGetPCIBusId, hipDeviceGetPCIBusId, (char *id, int size, int d)) {
	snprintf(id, size, "0000:%02X:00.0", 0x3d + d);
	return 0;
}
int hipGetDevicePropertiesR0600(char *p, int d) {
	(void)d;
	snprintf(p + 1160, 256, "%s", arch);
	return 0;
}
int cuDeviceGetAttribute(int *v, int attribute, int d) {
	int of = d == 0 ? capability : capability - 10; // others are of another kind
	*v = attribute == 75 ? of / 10 : attribute == 76 ? of % 10 : attribute == 16 ? 2 : 0;
	return 0;
}
BOTH(cuDeviceTotalMem_v2, hipDeviceTotalMem, (size_t *n, int d)) {
	(void)d;
	*n = total;
	return 0;
}
enum { DEVICES = 8 };
static char contexts[DEVICES];
static long long used[DEVICES];
static int currentDevice, reaching[DEVICES][DEVICES];
int cuDevicePrimaryCtxRetain(void **c, int d) {
	FAIL("context");
	*c = &contexts[d];
	return 0;
}
int cuDevicePrimaryCtxRelease_v2(int d) {
	(void)d;
	return 0;
}
int hipSetDevice(int d) {
	if (d < 0 || d >= devices) {
		return 101;
	}
	currentDevice = d;
	return 0;
}
int cuCtxSetCurrent(char *c) { return hipSetDevice(c - contexts) ? 201 : 0; }

// Devices reach each other unless fakeApart was told that they do not.
void fakeApart(int yes) { apart = yes; }
BOTH(cuDeviceCanAccessPeer, hipDeviceCanAccessPeer, (int *can, int d, int other)) {
	FAIL("reaches");
	*can = d != other && !apart;
	return 0;
}
static int reach(int other, int yes) {
	if (other < 0 || other >= devices || apart) {
		return 217;
	}
	if (reaching[currentDevice][other] == yes) {
		return yes ? 704 : 705;
	}
	reaching[currentDevice][other] = yes;
	live += yes ? 1 : -1;
	return 0;
}
int hipDeviceEnablePeerAccess(int other, unsigned flags) {
	FAIL("reach");
	return reach(other, 1);
}
int cuCtxEnablePeerAccess(char *c, unsigned flags) { return hipDeviceEnablePeerAccess(c - contexts, flags); }
int hipDeviceDisablePeerAccess(int other) { return reach(other, 0); }
int cuCtxDisablePeerAccess(char *c) { return reach(c - contexts, 0); }

struct block { size_t size; int host, device; };
static int take(void **p, size_t n, int host) {
	long long *sum = host ? &pinned : &used[currentDevice];
	if (*sum + (long long)n > (host ? pinnedLimit : total)) {
		return 2;
	}
	char *b;
	if (posix_memalign((void **)&b, 256, n + 512)) {
		return 2;
	}
	memset(b + 256 + n, 0xa5, 256);
	*(struct block *)b = (struct block){n, host, currentDevice};
	*sum += n;
	live++;
	*p = b + 256;
	return 0;
}
static int give(void *p) {
	struct block *b = (struct block *)((char *)p - 256);
	*(b->host ? &pinned : &used[b->device]) -= b->size;
	live--;
	for (int i = 0; i < 256; i++) { // nobody wrote behind it
		if (((unsigned char *)p)[b->size + i] != 0xa5) {
			fprintf(stderr, "fake: written behind %zu bytes\n", b->size);
			abort();
		}
	}
	free(b);
	return 0;
}
BOTH(cuMemAlloc_v2, hipMalloc, (void **p, size_t n)) {
	FAIL("allocate");
	return take(p, n, 0);
}
BOTH(cuMemFree_v2, hipFree, (void *p)) { return give(p); }
BOTH(cuMemGetInfo_v2, hipMemGetInfo, (size_t *free, size_t *all)) {
	*free = total - used[currentDevice];
	*all = total;
	return 0;
}
BOTH(cuMemHostAlloc, hipHostMalloc, (void **p, size_t n, unsigned flags)) {
	FAIL("pin");
	return flags == 3 ? take(p, n, 1) : 1;
}
BOTH(cuMemFreeHost, hipHostFree, (void *p)) { return give(p); }
// Memory that is pinned where it lies is of one owner.
static struct pin { char *at; size_t size; struct pin *next; } *pins;
BOTH(cuMemHostRegister_v2, hipHostRegister, (char *p, size_t n, unsigned flags)) {
	FAIL("register");
	for (struct pin *i = pins; i; i = i->next) {
		if (p < i->at + i->size && i->at < p + n) {
			return 712;
		}
	}
	if (flags != 1 || (size_t)p % 4096 || pinned + (long long)n > pinnedLimit) {
		return flags != 1 || (size_t)p % 4096 ? 1 : 2;
	}
	struct pin *i = malloc(sizeof *i);
	*i = (struct pin){p, n, pins};
	pins = i;
	pinned += n;
	live++;
	return 0;
}
BOTH(cuMemHostUnregister, hipHostUnregister, (char *p)) {
	for (struct pin **i = &pins; *i; i = &(*i)->next) {
		if ((*i)->at == p) {
			struct pin *gone = *i;
			*i = gone->next;
			pinned -= gone->size;
			live--;
			free(gone);
			return 0;
		}
	}
	return 713;
}
BOTH(cuMemHostGetDevicePointer_v2, hipHostGetDevicePointer, (void **d, void *p, unsigned flags)) {
	(void)flags;
	*d = p;
	return 0;
}
BOTH(cuMemcpyHtoDAsync_v2, hipMemcpyHtoDAsync, (void *to, void *from, size_t n, struct stream *s)) {
	FAIL("copy");
	return add(s, &(struct op){.kind = COPY, .to = to, .from = from, .size = n});
}
BOTH(cuMemcpyDtoHAsync_v2, hipMemcpyDtoHAsync, (void *to, void *from, size_t n, struct stream *s)) {
	return add(s, &(struct op){.kind = COPY, .to = to, .from = from, .size = n});
}
BOTH(cuMemcpyDtoDAsync_v2, hipMemcpyDtoDAsync, (void *to, void *from, size_t n, struct stream *s)) {
	return add(s, &(struct op){.kind = COPY, .to = to, .from = from, .size = n});
}
int hipMemcpyPeerAsync(void *to, int toDevice, void *from, int fromDevice, size_t n, struct stream *s) {
	FAIL("copy");
	if (!reaching[fromDevice][toDevice]) {
		return 217;
	}
	return add(s, &(struct op){.kind = COPY, .to = to, .from = from, .size = n});
}
int cuMemcpyPeerAsync(void *to, char *toContext, void *from, char *fromContext, size_t n, struct stream *s) {
	return hipMemcpyPeerAsync(to, toContext - contexts, from, fromContext - contexts, n, s);
}

// A handle of memory is its address, behind a word that says so.
struct handle { char b[64]; };
BOTH(cuIpcGetMemHandle, hipIpcGetMemHandle, (struct handle *h, void *p)) {
	FAIL("share");
	memcpy(h->b, "memory: ", 8);
	memcpy(h->b + 56, &p, sizeof p);
	return 0;
}
BOTH(cuIpcOpenMemHandle_v2, hipIpcOpenMemHandle, (void **p, struct handle h, unsigned flags)) {
	if (memcmp(h.b, "memory: ", 8) != 0 || flags != 1) {
		return 1;
	}
	memcpy(p, h.b + 56, sizeof *p);
	live++;
	return 0;
}
BOTH(cuIpcCloseMemHandle, hipIpcCloseMemHandle, (void *p)) {
	(void)p;
	live--;
	return 0;
}
BOTH(cuStreamCreate, hipStreamCreateWithFlags, (struct stream **s, unsigned flags)) {
	(void)flags;
	*s = calloc(1, sizeof **s);
	(*s)->next = streams;
	streams = *s;
	live++;
	return 0;
}
BOTH(cuStreamDestroy_v2, hipStreamDestroy, (struct stream *s)) {
	while (s->ops.first) { // whoever wants it done has waited for it
		struct op *o = s->ops.first;
		s->ops.first = o->next;
		free(o);
	}
	for (struct stream **at = &streams; *at; at = &(*at)->next) {
		if (*at == s) {
			*at = s->next;
			break;
		}
	}
	free(s);
	live--;
	return 0;
}
BOTH(cuStreamSynchronize, hipStreamSynchronize, (struct stream *s)) {
	FAIL("synchronize");
	return run(s, 0);
}
BOTH(cuStreamWaitEvent, hipStreamWaitEvent, (struct stream *s, struct event *e, unsigned flags)) {
	(void)flags;
	return add(s, &(struct op){.kind = WAIT, .event = e});
}
BOTH(cuEventCreate, hipEventCreateWithFlags, (struct event **e, unsigned flags)) {
	(void)flags;
	*e = calloc(1, sizeof **e);
	live++;
	return 0;
}
BOTH(cuEventDestroy_v2, hipEventDestroy, (struct event *e)) {
	free(e);
	live--;
	return 0;
}
BOTH(cuEventRecord, hipEventRecord, (struct event *e, struct stream *s)) { return add(s, &(struct op){.kind = RECORD, .event = e}); }
BOTH(cuEventSynchronize, hipEventSynchronize, (struct event *e)) {
	for (struct stream *s = streams; s; s = s->next) {
		run(s, e);
	}
	return 0;
}
BOTH(cuEventElapsedTime, hipEventElapsedTime, (float *ms, struct event *a, struct event *b)) {
	(void)a, (void)b;
	*ms = 1;
	return 0;
}
BOTH(cuModuleLoadData, hipModuleLoadData, (void **m, const char *image)) {
	FAIL("module");
	if (memcmp(image, "code", 4) != 0 && memcmp(image, "\177ELF", 4) != 0 && !strstr(image, ".version")) { // an ELF is what the machine's own hiprtc has made
		return 209;
	}
	*m = (void *)1;
	return 0;
}
BOTH(cuModuleUnload, hipModuleUnload, (void *m)) {
	(void)m;
	return 0;
}

#define OTHERS(X) X(quantize) X(planes) X(fetch) X(normalize) X(rope) X(store) X(attendScores) X(attendSoftmax) X(attendWeigh) X(attendSum) X(indexScores) X(choose) X(combine) X(each) X(runs) X(deltaInputs) X(deltaSteps)
#define DECLARED(name) void name(struct params);
OTHERS(DECLARED)
#define TYPES(X) X(0) X(1) X(2) X(3) X(6) X(7) X(8) X(12) X(13) X(14) X(20) X(30) X(39) X(1000) X(1001) X(1002) X(1003) X(1004) X(1005) X(1006) X(1007)
#define DECLARE(t) \
	void rows_##t(struct params); \
	void rows1_##t(struct params);
TYPES(DECLARE)
#define GROUPS(X) X(group_8) X(group_12) X(group_39)
GROUPS(DECLARED)
#define CALLED(name) {#name, name},
#define NAMED(t) {"rows_" #t, rows_##t}, {"rows1_" #t, rows1_##t},
static struct { const char *name; void (*f)(struct params); } kernels[] = {OTHERS(CALLED) TYPES(NAMED) GROUPS(CALLED)};

BOTH(cuModuleGetFunction, hipModuleGetFunction, (void **f, void *m, const char *name)) {
	(void)m;
	for (unsigned i = 0; i < sizeof kernels / sizeof *kernels; i++) {
		if (strcmp(kernels[i].name, name) == 0) {
			*f = (void *)kernels[i].f;
			return 0;
		}
	}
	return 500;
}
BOTH(cuLaunchKernel, hipModuleLaunchKernel, (void *f, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz, unsigned shared, struct stream *s, void **args, void **extra)) {
	FAIL("launch");
	if (ty != 1 || tz != 1 || shared || extra || !x || !y || !z || tx > MOST) {
		return 1;
	}
	struct op o = {.kind = KERNEL, .f = (void (*)(struct params))f, .grid = {x, y, z}, .threads = tx};
	memcpy(o.args, args[0], sizeof o.args);
	return add(s, &o);
}
BOTH(cuOccupancyMaxActiveBlocksPerMultiprocessor, hipModuleOccupancyMaxActiveBlocksPerMultiprocessor, (int *n, void *f, int threads, size_t shared)) {
	(void)f, (void)threads, (void)shared;
	*n = 3;
	return 0;
}
BOTH(cuStreamBeginCapture_v2, hipStreamBeginCapture, (struct stream *s, int mode)) {
	FAIL("capture");
	(void)mode;
	s->graph = calloc(1, sizeof *s->graph);
	live++;
	return 0;
}
BOTH(cuStreamEndCapture, hipStreamEndCapture, (struct stream *s, struct list **g)) {
	*g = s->graph;
	s->graph = 0;
	return 0;
}
BOTH(cuGraphInstantiateWithFlags, hipGraphInstantiate, (struct list **e, struct list *g, void *node, char *log, size_t size)) {
	(void)node, (void)log, (void)size;
	*e = g;
	return 0;
}
BOTH(cuGraphLaunch, hipGraphLaunch, (struct list *g, struct stream *s)) {
	FAIL("launch");
	for (struct op *o = g->first; o; o = o->next) {
		put(&s->ops, o);
	}
	return 0;
}
BOTH(cuGraphDestroy, hipGraphDestroy, (struct list *g)) {
	while (g->first) {
		struct op *o = g->first;
		g->first = o->next;
		free(o);
	}
	free(g);
	live--;
	return 0;
}
BOTH(cuGraphExecDestroy, hipGraphExecDestroy, (struct list *g)) {
	(void)g;
	return 0;
}

// The compilers.
BOTH(nvrtcVersion, hiprtcVersion, (int *major, int *minor)) {
	*major = 1, *minor = 0;
	return 0;
}
BOTH(nvrtcCreateProgram, hiprtcCreateProgram, (void **p, const char *source, const char *name, int n, const char **headers, const char **names)) {
	(void)name, (void)headers, (void)names;
	*p = (void *)1;
	return n || !strstr(source, "KERNEL");
}
BOTH(nvrtcCompileProgram, hiprtcCompileProgram, (void *p, int n, const char **options)) {
	(void)p;
	FAIL("compile");
	int contraction = 0;
	for (int i = 0; i < n; i++) {
		contraction |= !strcmp(options[i], "--fmad=false") || !strcmp(options[i], "-ffp-contract=off");
	}
	compiled++;
	return !contraction;
}
BOTH(nvrtcGetCUBINSize, hiprtcGetCodeSize, (void *p, size_t *n)) {
	(void)p;
	*n = 5;
	return 0;
}
BOTH(nvrtcGetCUBIN, hiprtcGetCode, (void *p, char *to)) {
	(void)p;
	memcpy(to, "code", 5);
	return 0;
}
BOTH(nvrtcGetProgramLogSize, hiprtcGetProgramLogSize, (void *p, size_t *n)) {
	(void)p;
	*n = 32;
	return 0;
}
BOTH(nvrtcGetProgramLog, hiprtcGetProgramLog, (void *p, char *to)) {
	(void)p;
	memset(to, 0, 32);
	strcpy(to, "gpu.cu(1): error: as asked\n");
	return 0;
}
BOTH(nvrtcDestroyProgram, hiprtcDestroyProgram, (void **p)) {
	*p = 0;
	return 0;
}
