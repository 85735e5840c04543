// The kernels of CUDA and HIP, in C: everything from typedefs on is here, so that
// nvrtc, hiprtc and clang (with neither CUDA nor ROCm installed) compile it.
//
// It is compiled once without TYPE, for `quantize`, `planes` and `fetch`, once for
// each type of weights, whose number TYPE is (internal/quant), for `rows_TYPE` and
// `rows1_TYPE`, with GROUP too and group.cu behind it for `group_TYPE`, and once with
// DENSE and dense.cu behind it, for the other steps.
// Exactly one of CUDA, HIP and HOST is defined; HOST is for tests, where each thread
// is a coroutine. Contraction must be off (--fmad=false, -ffp-contract=off): every
// float operation is one rounding (docs/arithmetic.md).

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;

#ifdef __cplusplus
#define C_NAME extern "C"
#else
#define C_NAME
#endif
#define JOIN2(a, b) a##_##b
#define JOIN(a, b) JOIN2(a, b)

// What differs: x of thread and block (and y, z of the block), a barrier, another
// thread's value, four signed products, bytes by index, a load that bypasses.
#if defined(CUDA)
#ifdef __clang__
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#endif
#define DEVICE static __device__ inline __attribute__((always_inline))
#define KERNEL(threads) C_NAME __global__ __attribute__((launch_bounds(threads))) void
#ifndef __clang__
#undef KERNEL
#define KERNEL(threads) C_NAME __global__ void __launch_bounds__(threads)
#endif
#define SHARED __shared__
#define UNROLL _Pragma("unroll")
#define REGISTER(name, special) \
	DEVICE u32 name(void) { \
		u32 r; \
		asm("mov.u32 %0, %%" special ";" : "=r"(r)); \
		return r; \
	}
REGISTER(thread, "tid.x")
REGISTER(blockX, "ctaid.x")
REGISTER(blockY, "ctaid.y")
REGISTER(blockZ, "ctaid.z")
REGISTER(blocksX, "nctaid.x")
DEVICE void barrier(void) { asm volatile("bar.sync 0;" ::: "memory"); }
DEVICE u32 across(u32 v, u32 mask) { // of the thread whose number differs by mask < 32
	u32 r;
	asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(r) : "r"(v), "r"(mask));
	return r;
}
DEVICE i32 dot4(u32 a, u32 b, i32 c) {
	i32 r;
	asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
	return r;
}
DEVICE i32 dot4Unsigned(u32 a, u32 b, i32 c) { // bytes of a are unsigned
	i32 r;
	asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
	return r;
}
DEVICE i32 dot2(i32 a0, i32 a1, u32 b) { // 16-bit a, the low two bytes of b
	u32 a;
	i32 r;
	asm("prmt.b32 %0, %1, %2, 0x5410;" : "=r"(a) : "r"(a0), "r"(a1));
	asm("dp2a.lo.s32.u32 %0, %1, %2, 0;" : "=r"(r) : "r"(a), "r"(b));
	return r;
}
DEVICE u32 permute(u32 lo, u32 hi, u32 nibbles) {
	u32 r;
	asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(lo), "r"(hi), "r"(nibbles));
	return r;
}
#elif defined(HIP)
#define DEVICE static __attribute__((device)) inline __attribute__((always_inline))
#define KERNEL(threads) C_NAME __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(1, threads))) void
#define SHARED __attribute__((shared))
#define UNROLL _Pragma("unroll")
DEVICE u32 thread(void) { return __builtin_amdgcn_workitem_id_x(); }
DEVICE u32 blockX(void) { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE u32 blockY(void) { return __builtin_amdgcn_workgroup_id_y(); }
DEVICE u32 blockZ(void) { return __builtin_amdgcn_workgroup_id_z(); }
DEVICE u32 blocksX(void) { return __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x(); }
DEVICE void barrier(void) {
	__builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
	__builtin_amdgcn_s_barrier();
	__builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
DEVICE u32 across(u32 v, u32 mask) {
	u32 lane = __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0));
	return (u32)__builtin_amdgcn_ds_bpermute((int)((lane ^ mask) * 4), (int)v);
}
DEVICE i32 dot4(u32 a, u32 b, i32 c) {
#if defined(__GFX11__) || defined(__GFX12__)
	return __builtin_amdgcn_sudot4(true, (int)a, true, (int)b, c, false);
#elif defined(__gfx906__) || defined(__gfx908__) || defined(__gfx90a__) || defined(__gfx940__) || defined(__gfx941__) || defined(__gfx942__) || defined(__gfx950__) || \
	defined(__gfx1011__) || defined(__gfx1012__) || defined(__gfx1030__) || defined(__gfx1031__) || defined(__gfx1032__) || defined(__gfx1033__) || \
	defined(__gfx1034__) || defined(__gfx1035__) || defined(__gfx1036__)
	return __builtin_amdgcn_sdot4((int)a, (int)b, c, false);
#else
	return c + (i8)a * (i8)b + (i8)(a >> 8) * (i8)(b >> 8) + (i8)(a >> 16) * (i8)(b >> 16) + (i8)(a >> 24) * (i8)(b >> 24);
#endif
}
#else // HOST: what the kernels need is declared by who includes this
#define DEVICE static inline
#define KERNEL(threads) void
#define SHARED static
#define UNROLL
DEVICE i32 dot4(u32 a, u32 b, i32 c) {
	return c + (i8)a * (i8)b + (i8)(a >> 8) * (i8)(b >> 8) + (i8)(a >> 16) * (i8)(b >> 16) + (i8)(a >> 24) * (i8)(b >> 24);
}
#endif

typedef struct __attribute__((aligned(16))) { u32 v[4]; } quad;

DEVICE u32 bits(float f) {
	union { float f; u32 u; } x;
	x.f = f;
	return x.u;
}
DEVICE float toFloat(u32 u) {
	union { u32 u; float f; } x;
	x.u = u;
	return x.f;
}
DEVICE float acrossFloat(float v, u32 mask) { return toFloat(across(bits(v), mask)); }

// Memory that nobody writes while the kernel runs.
DEVICE quad quadAt(const void *p) {
	quad q;
#if defined(CUDA)
	asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(q.v[0]), "=r"(q.v[1]), "=r"(q.v[2]), "=r"(q.v[3]) : "l"(p));
#else
	q = *(const quad *)p;
#endif
	return q;
}
DEVICE u32 wordAt(const void *p) { return *(const u32 *)p; }
DEVICE u32 halfAt(const void *p) { return *(const u16 *)p; }
DEVICE float floatAt(const void *p) { return *(const float *)p; }

#define SIGN 0x80000000u
#define TINY 0x26800000u    // bits of 2^-50
#define LARGEST 0x58800000u // bits of 2^50

// The functions of docs/arithmetic.md, sections 1 and 3: internal/arith.
DEVICE float clean(float x) { return (bits(x) & ~SIGN) < TINY ? 0.0f : x; }

DEVICE float rcp(float a) {
	float y = toFloat(0x7ef311c0u - bits(a)), t;
	t = 2.0f - a * y;
	y = y * t;
	t = 2.0f - a * y;
	y = y * t;
	t = 1.0f - a * y;
	return y + y * t;
}

DEVICE float expo(float x) {
	if (x < -40.0f) {
		return 0.0f;
	}
	float c = x > 40.0f ? 40.0f : x;
	float t = c * toFloat(0x3fb8aa3bu) + 12582912.0f;
	u32 n = bits(t) - 0x4b400000u;
	float f = t - 12582912.0f;
	float r = (c - f * 0.693359375f) - f * toFloat(0xb95e8083u);
	float p = toFloat(0x3ab5120du);
	p = p * r + toFloat(0x3c091cf9u);
	p = p * r + toFloat(0x3d2aac79u);
	p = p * r + toFloat(0x3e2aaa49u);
	p = p * r + toFloat(0x3efffffeu);
	return toFloat(bits(((r * r) * p + r) + 1.0f) + (n << 23));
}

DEVICE float silu(float x) {
	if (x < -40.0f) {
		return 0.0f;
	}
	return x * rcp(1.0f + expo(0.0f - x));
}

// fromF16 is the value of a finite binary16, exactly, subnormals too: by integers
// where a mode of the device could flush those.
DEVICE float fromF16(u32 h) {
#if defined(CUDA)
	float f;
	asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)h));
	return f;
#endif
	u32 a = h & 0x7fffu, sign = (h & 0x8000u) << 16;
	if (a < 0x400u) { // a whole number of 2^-24
		return toFloat(bits((float)(i32)a * toFloat(0x33800000u)) | sign);
	}
	return toFloat(sign | ((a << 13) + (112u << 23)));
}

// activation makes one of g and u: act is backends.Activation and 1.
DEVICE float activation(float g, float u, u32 act) {
	if (act == 2) {
		g = toFloat(0x3fd9db23u) * (g > 7.0f ? 7.0f : g);
		u = u > 7.0f ? 7.0f : u;
		u = u < -7.0f ? -7.0f : u;
		u = (u + 1.0f) * toFloat(0x3f16694au);
	}
	return silu(g) * u;
}

// Of a block whose largest float has the bits `most`: its floats' codes, where s is
// 127*rcp(most), and its scale.
DEVICE i32 codeOf(float x, float s) { return (i32)(bits(x * s + 12582912.0f) - 0x4b400000u); }
DEVICE float scaleOf(int none, u32 most) { return none ? 0.0f : toFloat(most) * toFloat(0x3c010204u); }

DEVICE void outOfRange(u32 most, u32 *top, u32 step) {
	if (most > LARGEST) {
		volatile u32 *first = top;
		if (*first == 0) {
			*first = step;
		}
	}
}

// A Job is a matrix times n vectors.
typedef struct {
	const u8 *w;       // planes of the matrix
	float *y;          // out
	const float *bias; // [rows]; 0: none
	u32 first;         // its vectors in the index, two words each: input row, output row
	u32 n;
	u32 stride; // floats from one output row to the next
	u32 step;   // without an index: input rows first, first+step, ... become output rows 0, 1, ...
} Job;

#if !defined(TYPE) && !defined(DENSE)

typedef struct {
	const float *x; // [n]; with a gate: g
	const float *u; // with a gate: [n]
	void *code;     // int8 [n]; block 0: floats [n]
	float *scale;   // [n/block]
	i32 *sum;       // [n/16]
	u32 *top;
	u32 n;
	u32 block; // 32 or 256; 0: clean alone
	u32 gate;  // backends.Activation and 1; 0: none
	u32 pair;  // of each 32 codes element i lies at 2i, element i+16 at 2i+1
	u32 step;  // what top becomes when an activation is NaN or above 2^50, if it is 0
	u32 pad;
} Quantize;

// Vectors become what matrix rows multiply. backends/cpu quantize, on blocks of
// 32 or 256 floats:
//
//	a = largest |x|; if a < 2^-50 the scale is +0 and so are the codes
//	d = a * 0x1.020408p-7, code = x * (127 * rcp(a)), half to even
//	sum[g] = sum of codes 16g .. 16g+15
//
// and with block 0 clean(x) alone. With gate 1 x = SiLU(g)*u; with 2 first
//
//	g = 1.702*min(g, 7), u = (max(-7, min(u, 7)) + 1)*(1/1.702)
//
// 64 threads make 256 floats.
KERNEL(64) quantize(Quantize p) {
	SHARED u32 tops[8];
	u32 t = thread(), at = blockX() * 256 + 4 * t;
	u32 here = at >= p.n ? 0 : p.n - at < 4 ? p.n - at : 4;
	float x[4];
	u32 most = 0;
	UNROLL
	for (u32 i = 0; i < 4; i++) {
		x[i] = 0.0f;
		if (i < here) {
			float g = p.gate ? activation(p.x[at + i], p.u[at + i], p.gate) : p.x[at + i];
			x[i] = g;
			u32 size = bits(g) & ~SIGN;
			most = size > most ? size : most;
		}
	}
	outOfRange(most, p.top, p.step);
	if (p.block == 0) {
		for (u32 i = 0; i < here; i++) {
			((float *)p.code)[at + i] = clean(x[i]);
		}
		return;
	}
	UNROLL
	for (u32 m = 1; m < 8; m *= 2) {
		u32 other = across(most, m);
		most = other > most ? other : most;
	}
	if (p.block == 256) {
		if (t % 8 == 0) {
			tops[t / 8] = most;
		}
		barrier();
		for (u32 i = 0; i < 8; i++) {
			most = tops[i] > most ? tops[i] : most;
		}
	}
	int none = most < TINY || most > LARGEST;
	u32 word = 0;
	i32 sum = 0;
	if (!none) {
		float s = 127.0f * rcp(toFloat(most));
		UNROLL
		for (u32 i = 0; i < 4; i++) {
			i32 c = codeOf(x[i], s);
			word |= ((u32)c & 0xffu) << (8 * i);
			sum += c;
		}
	}
	sum += (i32)across((u32)sum, 1);
	sum += (i32)across((u32)sum, 2);
	if (here == 0) {
		return;
	}
	if (p.pair) {
		u8 *to = (u8 *)p.code + (at & ~31u) + 2 * (at & 15u) + ((at >> 4) & 1u);
		for (u32 i = 0; i < 4; i++) {
			to[2 * i] = (u8)(word >> (8 * i));
		}
	} else {
		((u32 *)p.code)[at / 4] = word;
	}
	if (t % 4 == 0) {
		p.sum[at / 16] = sum;
	}
	if ((at & (p.block - 1)) == 0) {
		p.scale[at / p.block] = scaleOf(none, most);
	}
}

typedef struct {
	const u8 *from; // blocks of `block` bytes
	u8 *to;
	u64 bytes; // of the plane: blocks x size
	u32 block, offset, size;
	u32 pad;
} Planes;

// A matrix of blocks becomes planes, so that rows read codes by aligned words:
//
//	for i < bytes: to[i] = from[i/size*block + offset + i%size]
KERNEL(256) planes(Planes p) {
	u64 step = (u64)blocksX() * 256;
	for (u64 i = (u64)blockX() * 256 + thread(); i < p.bytes; i += step) {
		u64 b = i / p.size;
		p.to[i] = p.from[b * p.block + p.offset + (i - b * p.size)];
	}
}

typedef struct {
	const u32 *from[2]; // in the host's memory
	u32 *to[2];
	u32 words[2];
} Fetch;

// Two runs of words come from the host. A copy by the driver would wait behind those
// of uploads.
KERNEL(256) fetch(Fetch p) {
	u32 i = blockX() * 256 + thread();
	if (i < p.words[0]) {
		p.to[0][i] = p.from[0][i];
	} else if (i - p.words[0] < p.words[1]) {
		p.to[1][i - p.words[0]] = p.from[1][i - p.words[0]];
	}
}

#elif defined(TYPE)

#define F32 0
#define F16 1
#define Q4_0 2
#define Q4_1 3
#define Q5_0 6
#define Q5_1 7
#define Q8_0 8
#define Q4_K 12
#define Q5_K 13
#define Q6_K 14
#define IQ4_NL 20
#define BF16 30
#define MXFP4 39
#define F8_128 1000
#define INT4_32 1001
#define INT4_128 1002
#define INT4F_32 1003
#define INT4F_64 1004
#define INT4F_128 1005
#define INT8F_32 1006
#define INT8F_128 1007

typedef struct {
	const Job *jobs;    // 0: one alone
	const u32 *index;   // 0: none
	const u8 *code;     // int8 [n, cols]; float rows: floats [n, cols], cleaned
	const float *scale; // [n, cols/32 or cols/256]
	const i32 *sum;     // [n, cols/16]
	u32 rows, cols;
	Job one;
} Rows;

DEVICE u32 inputOf(const Rows *p, const Job *job, u32 i) { return p->index ? p->index[job->first + 2 * i] : job->first + i * job->step; }
DEVICE u32 outputOf(const Rows *p, const Job *job, u32 i) { return p->index ? p->index[job->first + 2 * i + 1] : i; }

#define THREADS 128
#define POSITIONS 8
#define EVEN(n) (((n) + 15) & ~(u64)15) // where a plane ends and the next begins

#if TYPE == F32 || TYPE == F16 || TYPE == BF16 || TYPE == F8_128

// fromE4M3 is the value of a code of FP8-E4M3 that is no NaN.
DEVICE float fromE4M3(u32 c) {
	u32 e = (c >> 3) & 15u, m = c & 7u;
	float f = e == 0 ? (float)(i32)m * toFloat(0x3b000000u) : toFloat(((e + 120u) << 23) | (m << 20));
	return toFloat(bits(f) | ((c & 0x80u) << 24));
}

DEVICE float weight(const u8 *w, u64 row, u32 cols, u32 i, u64 plane) {
#if TYPE == F32
	return clean(floatAt(w + (row * cols + i) * 4));
#elif TYPE == F16
	return fromF16(halfAt(w + (row * cols + i) * 2));
#elif TYPE == BF16
	return clean(toFloat(halfAt(w + (row * cols + i) * 2) << 16));
#else
	u64 block = row * ((cols + 127) / 128) + i / 128;
	float s = floatAt(w + plane + 4 * block);
	s = (bits(s) & ~SIGN) < 0x29000000u ? 0.0f : s; // below 2^-45
	return clean(fromE4M3(w[128 * block + i % 128]) * s);
#endif
}

// Rows of float matrices times cleaned vectors: backends/cpu floatRow.
//
//	lane[i mod 16] += clean(w_i)*x_i, i ascending; lanes j and j+8, j+4, j+2, j+1 are added; + bias
//
// Sixteen threads, a lane each, make one row for P vectors of a job.
#define ROWS_A_BLOCK (THREADS / 16)
DEVICE void rowsOf(const Rows *p, const u32 P) {
	Job job = p->jobs ? p->jobs[blockY()] : p->one;
	u32 first = blockZ() * P;
	if (first >= job.n) {
		return;
	}
	u32 n = job.n - first < P ? job.n - first : P;
	u32 lane = thread() % 16;
	u64 plane = EVEN((u64)p->rows * ((p->cols + 127) / 128) * 128);
	const float *x[POSITIONS];
	UNROLL
	for (u32 j = 0; j < P; j++) {
		x[j] = (const float *)p->code + (u64)inputOf(p, &job, first + (j < n ? j : 0)) * p->cols;
	}
	for (u32 row0 = blockX() * ROWS_A_BLOCK; row0 < p->rows; row0 += blocksX() * ROWS_A_BLOCK) {
		u32 r = row0 + thread() / 16;
		u64 row = r < p->rows ? r : 0;
		float sum[POSITIONS];
		UNROLL
		for (u32 j = 0; j < P; j++) {
			sum[j] = 0.0f;
		}
		for (u32 i = lane; i < p->cols; i += 16) {
			float w = weight(job.w, row, p->cols, i, plane);
			UNROLL
			for (u32 j = 0; j < P; j++) {
				if (j < n) {
					float product = w * x[j][i];
					sum[j] = sum[j] + product;
				}
			}
		}
		UNROLL
		for (u32 j = 0; j < P; j++) {
			if (j < n) {
				UNROLL
				for (u32 h = 8; h > 0; h /= 2) {
					sum[j] = sum[j] + acrossFloat(sum[j], h);
				}
				if (lane == 0 && r < p->rows) {
					job.y[(u64)outputOf(p, &job, first + j) * job.stride + r] = job.bias ? sum[j] + job.bias[r] : sum[j];
				}
			}
		}
	}
}

#else

#if TYPE == Q4_K || TYPE == Q5_K || TYPE == Q6_K
#define SUPER 1 // blocks of 256 with sub-scales
#define MINS (TYPE != Q6_K)
#else
#define SUPER 0
#define PLUS (TYPE == Q4_1 || TYPE == Q5_1)
#endif

#define NIBBLES 0x0f0f0f0fu

// Sixteen codes in the high nibbles of four words. As unsigned bytes they are 16
// times their value, and so is the sum of their products.
#if defined(CUDA)
DEVICE u32 highNibbles(u32 q) { return q & 0xf0f0f0f0u; }
DEVICE i32 dotHigh(u32 a, u32 b, i32 c) { return dot4Unsigned(a, b, c); }
DEVICE i32 endHigh(i32 c) { return c >> 4; }
#else
DEVICE u32 highNibbles(u32 q) { return (q >> 4) & NIBBLES; }
DEVICE i32 dotHigh(u32 a, u32 b, i32 c) { return dot4(a, b, c); }
DEVICE i32 endHigh(i32 c) { return c; }
DEVICE i32 dot2(i32 a0, i32 a1, u32 b) { return a0 * (i32)(b & 0xffu) + a1 * (i32)((b >> 8) & 0xffu); }
#endif

// spread puts bit i of the low four into bit 4 of byte i.
DEVICE u32 spread(u32 four) { return ((four * 0x00204081u) & 0x01010101u) << 4; }

// doubles turns four codes of E2M1, the nibbles of q's low half in their order, into
// the doubles of their values. In `other` all signs are the opposite.
DEVICE u32 doubles(u32 q, u32 other) {
#if defined(CUDA)
	// An index with its top bit set gives the sign of the byte, which is 0 here.
	u32 plus = permute(0x03020100u, 0x0c080604u, q), minus = permute(0x03020100u, 0x0c080604u, other);
	return plus | ((0x80808080u - minus) ^ 0x80808080u);
#else
	u32 r = 0;
	(void)other;
	UNROLL
	for (u32 i = 0; i < 4; i++) {
		u32 n = (q >> (4 * i)) & 15u;
		u32 v = (((n & 4u) ? 0x0c080604u : 0x03020100u) >> (8 * (n & 3u))) & 0xffu;
		r |= (((n & 8u) ? 0u - v : v) & 0xffu) << (8 * i);
	}
	return r;
#endif
}

// tableNL turns the eight codes of IQ4_NL in q into values of its table, in the order
// of their nibbles.
DEVICE void tableNL(u32 c[2], u32 q) {
#if defined(CUDA)
	UNROLL
	for (u32 i = 0; i < 2; i++) {
		u32 n = q >> (16 * i), below = permute(0xbfad9881u, 0xf6eaddcfu, n & 0x7777u), above = permute(0x26190d01u, 0x71594535u, n & 0x7777u);
		c[i] = permute(below, above, 0x3210u | ((n & 0x8888u) >> 1));
	}
#else
	UNROLL
	for (u32 i = 0; i < 2; i++) {
		c[i] = 0;
		UNROLL
		for (u32 j = 0; j < 4; j++) {
			u32 n = (q >> (16 * i + 4 * j)) & 15u, low = n & 4u ? 0xf6eaddcfu : 0xbfad9881u, high = n & 4u ? 0x71594535u : 0x26190d01u;
			c[i] |= (((n & 8u ? high : low) >> (8 * (n & 3u))) & 0xffu) << (8 * j);
		}
	}
#endif
}

// tinyScale is +0 below 2^-45.
DEVICE float tinyScale(float s) { return (bits(s) & ~SIGN) < 0x29000000u ? 0.0f : s; }

#if SUPER

#ifndef R
#define R 2 // rows of a warp: of 32 threads
#endif
#define ROWS_A_BLOCK (THREADS / 32 * R)
#define VALUES (MINS ? 2 * R : R)

#if TYPE == Q4_K
#define BYTES 144
#elif TYPE == Q5_K
#define BYTES 176
#endif

// Raw is what a thread reads of a block of each of its rows: eighth c of the codes,
// and what belongs to it.
typedef struct {
	quad q[R], head[R], high[R];
	u32 scales[R];
	u32 d; // scale of the block of the row whose sums end here
} Raw;

DEVICE void blockAt(Raw *raw, const u8 *w, u32 rows, u32 blocks, u32 row0, u32 mine, u32 b, u32 c) {
	b = b < blocks ? b : blocks - 1; // read, and not used
	UNROLL
	for (u32 r = 0; r < R; r++) {
		u32 at = (row0 + r < rows ? row0 + r : rows - 1) * blocks + b;
#if TYPE == Q6_K // planes of 128, 64, 16 and 2 bytes a block
		u64 all = (u64)rows * blocks;
		raw->q[r] = quadAt(w + 16 * c + (u64)at * 128);
		raw->high[r] = quadAt(w + 128 * all + 32 * (c / 4) + 16 * (c & 1) + (u64)at * 64);
		const u8 *s = w + 192 * all + 8 * (c / 4) + c % 4 + (u64)at * 16;
		raw->scales[r] = s[0] | (u32)s[4] << 8;
#else
		raw->head[r] = quadAt(w + (u64)at * BYTES);
		raw->q[r] = quadAt(w + (BYTES - 128) + 16 * c + (u64)at * BYTES);
#if TYPE == Q5_K
		raw->high[r] = quadAt(w + 16 + 16 * (c & 1) + (u64)at * BYTES);
#endif
#endif
	}
#if TYPE == Q6_K
	raw->d = halfAt(w + 208 * (u64)rows * blocks + 2 * (u64)((row0 + mine < rows ? row0 + mine : rows - 1) * blocks + b));
#else
	(void)mine;
#endif
}

// A Unit is 32 weights: two runs of 16 codes, with a sub-scale and sub-min each.
typedef struct {
	u32 low[4], high[4];
	u32 scales, mins; // two bytes each
} Unit;

DEVICE void unpack(Unit *u, const Raw *raw, u32 r, u32 c) {
	u32 early = c < 4, shift = 16 * ((c / 2) & 1);
#if TYPE != Q6_K
	// 6-bit scales and mins of 8 groups in words 1 to 3 of the head: the first four
	// as they are, the rest in nibbles with their top two bits above the first.
	u32 s = raw->head[r].v[1] >> shift, m = raw->head[r].v[2] >> shift, both = raw->head[r].v[3] >> shift;
	u32 low = early ? 0x3f3fu : 0x0f0fu, top = early ? 0 : 0x3030u;
	u->scales = ((early ? s : both) & low) | ((s >> 2) & top);
	u->mins = ((early ? m : both >> 4) & low) | ((m >> 2) & top);
#endif
	UNROLL
	for (u32 i = 0; i < 4; i++) {
		u32 q = raw->q[r].v[i];
#if TYPE == Q4_K
		u->low[i] = q & NIBBLES;
		u->high[i] = highNibbles(q);
#elif TYPE == Q5_K
		u32 h = raw->high[r].v[i] >> (c & 6u);
		u->low[i] = (q & NIBBLES) | ((h << 4) & 0x10101010u);
		u->high[i] = ((q >> 4) & NIBBLES) | ((h << 3) & 0x10101010u);
#else
		u32 h = raw->high[r].v[i] >> (c & 2u);
		u->low[i] = (q & NIBBLES) | ((h << 4) & 0x30303030u);
		u->high[i] = ((q >> 4) & NIBBLES) | (h & 0x30303030u);
#endif
	}
#if TYPE == Q6_K
	u->scales = raw->scales[r];
	u->mins = 0;
#endif
	(void)early, (void)shift;
}

// run is where the first run of eighth c begins in a block; the second is APART
// behind it.
#if TYPE == Q6_K
#define APART 64
DEVICE u32 run(u32 c) { return 128 * (c / 4) + 16 * (c % 4); }
#else
#define APART 32
DEVICE u32 run(u32 c) { return 64 * (c / 2) + 16 * (c % 2); }
#endif

// sums gives the exact sums of a unit: with the codes, and with the mins.
DEVICE i32 codeSum(const Unit *w, quad low, quad high, i32 x0, i32 x1) {
	i32 s0 = 0, s1 = 0;
#if TYPE == Q6_K
	s0 = -32 * x0;
	s1 = -32 * x1;
#endif
	UNROLL
	for (u32 i = 0; i < 4; i++) {
		s0 = dot4(w->low[i], low.v[i], s0);
#if TYPE == Q4_K
		s1 = dotHigh(w->high[i], high.v[i], s1);
#else
		s1 = dot4(w->high[i], high.v[i], s1);
#endif
	}
#if TYPE == Q4_K
	return dot2(s0, endHigh(s1), w->scales); // each at most 16*15*127
#elif TYPE == Q5_K
	return s0 * (i32)(w->scales & 0xffu) + s1 * (i32)(w->scales >> 8 & 0xffu);
#else
	return s0 * (i8)w->scales + s1 * (i8)(w->scales >> 8);
#endif
}

// Half of a team's values go to each half of the team, until a thread has one;
// with one, both halves add.
#define GATHER(have, m) \
	if ((have) > 1) { \
		UNROLL \
		for (u32 i = 0; i < (have) / 2; i++) { \
			i32 low = v[i], high = v[(have) / 2 + i]; \
			v[i] = (c & (m) ? high : low) + (i32)across((u32)(c & (m) ? low : high), m); \
		} \
	} else { \
		v[0] += (i32)across((u32)v[0], m); \
	}

// multiply adds the term of block b to lane k of its team's two, for each vector.
// A block that is not live is behind the last and counts as +0.
DEVICE void multiply(float lanes[POSITIONS][2], const Rows *p, const u32 P, u32 n, const u32 *x, const Raw *raw, u32 b, const u32 k, int live, u32 mine, u32 c) {
	u32 blocks = p->cols / 256;
	Unit w[R];
	UNROLL
	for (u32 r = 0; r < R; r++) {
		unpack(&w[r], raw, r, c);
	}
	u32 d2 = raw->d;
	if (MINS) {
		d2 = raw->head[0].v[0];
		UNROLL
		for (u32 r = 1; r < R; r++) {
			d2 = mine == r ? raw->head[r].v[0] : d2;
		}
	}
	b = live ? b : 0;
	float d = live ? fromF16(d2 & 0xffffu) : 0.0f, min = live && MINS ? fromF16(d2 >> 16) : 0.0f;
	UNROLL
	for (u32 j = 0; j < P; j++) {
		if (j < n) {
			u32 at = (x[j] * blocks + b) * 256 + run(c);
			quad low = quadAt(p->code + at), high = quadAt(p->code + at + APART);
			i32 x0 = p->sum[at / 16], x1 = p->sum[at / 16 + APART / 16];
			i32 v[8];
			UNROLL
			for (u32 r = 0; r < R; r++) {
				v[r] = codeSum(&w[r], low, high, x0, x1);
				if (MINS) {
					v[R + r] = dot2(x0, x1, w[r].mins);
				}
			}
			GATHER(VALUES, 4)
			GATHER(VALUES / 2, 2)
			GATHER(VALUES / 4, 1)
			float term = (float)v[0] * d;
			if (MINS) {
				float minus = (float)(i32)across((u32)v[0], 4) * min;
				term = term - minus;
			}
			term = term * p->scale[x[j] * blocks + b];
			lanes[j][k] = lanes[j][k] + term;
		}
	}
}

// Rows of matrices of superblocks times vectors: backends/cpu quantRow.
//
//	lane[b mod 8] += term(b), b ascending; ((l0+l4)+(l2+l6)) + ((l1+l5)+(l3+l7)); + bias
//
// 32 threads make R rows. Eight of them, a team, take a block, 32 weights each, and
// add their exact integer sums across the team so that each thread ends with one
// value of one row. Team t has blocks t, t+4, t+8, ...: lanes t and t+4, alone.
DEVICE void rowsOf(const Rows *p, const u32 P) {
	Job job = p->jobs ? p->jobs[blockY()] : p->one;
	u32 first = blockZ() * P;
	if (first >= job.n) {
		return;
	}
	u32 n = job.n - first < P ? job.n - first : P;
	u32 t = thread() % 32, team = t / 8, c = t % 8;
	u32 row0 = (blockX() * (THREADS / 32) + thread() / 32) * R;
	u32 mine = (MINS ? c & 3u : c) / ((MINS ? 4 : 8) / R); // the row whose sums end here
	u32 blocks = p->cols / 256;
	float lanes[POSITIONS][2];
	u32 x[POSITIONS];
	UNROLL
	for (u32 j = 0; j < P; j++) {
		lanes[j][0] = lanes[j][1] = 0.0f;
		x[j] = inputOf(p, &job, first + (j < n ? j : 0));
	}
	Raw raw[2];
	blockAt(&raw[0], job.w, p->rows, blocks, row0, mine, team, c);
	blockAt(&raw[1], job.w, p->rows, blocks, row0, mine, 4 + team, c);
	for (u32 base = 0; row0 < p->rows;) {
		// What comes next is read before this is used: blocks of these rows, or the
		// first of those that follow.
		u32 row = row0, from = base + 8;
		if (from >= blocks) {
			row += blocksX() * ROWS_A_BLOCK;
			from = 0;
		}
		Raw next[2];
		if (row < p->rows) {
			blockAt(&next[0], job.w, p->rows, blocks, row, mine, from + team, c);
			blockAt(&next[1], job.w, p->rows, blocks, row, mine, from + 4 + team, c);
		}
		UNROLL
		for (u32 k = 0; k < 2; k++) {
			if (k == 0 || base + 4 < blocks) {
				u32 b = base + 4 * k + team;
				multiply(lanes, p, P, n, x, &raw[k], b, k, b < blocks, mine, c);
			}
		}
		if (from == 0) {
			UNROLL
			for (u32 j = 0; j < P; j++) {
				if (j < n) {
					float y = lanes[j][0] + lanes[j][1];
					y = y + acrossFloat(y, 16);
					y = y + acrossFloat(y, 8);
					u32 r = row0 + mine;
					if (t == mine * ((MINS ? 4 : 8) / R) && r < p->rows) {
						job.y[(u64)outputOf(p, &job, first + j) * job.stride + r] = job.bias ? y + job.bias[r] : y;
					}
				}
				lanes[j][0] = lanes[j][1] = 0.0f;
			}
		}
		row0 = row;
		base = from;
		raw[0] = next[0];
		raw[1] = next[1];
	}
}

#else // blocks of 32, or of runs of 32 with one scale

#if TYPE == INT4_128 || TYPE == INT4F_128 || TYPE == INT8F_128
#define UNITS 4 // of a block
#elif TYPE == INT4F_64
#define UNITS 2
#else
#define UNITS 1
#endif

#if TYPE == Q8_0 || TYPE == INT8F_32 || TYPE == INT8F_128
#define CODES 32 // bytes of a unit
#else
#define CODES 16
#endif
#if TYPE == MXFP4
#define SCALE 1
#elif TYPE == Q4_0 || TYPE == Q5_0 || TYPE == Q8_0 || TYPE == IQ4_NL || TYPE == INT4_32 || TYPE == INT4_128
#define SCALE 2
#else
#define SCALE 4
#endif
#define FIFTH (TYPE == Q5_0 || TYPE == Q5_1)
// HIGH says that codes of the second run are high nibbles where they lie.
#define PAIR (TYPE == MXFP4 || TYPE == IQ4_NL)
#define HIGH (CODES == 16 && !PAIR && !FIFTH)
#if TYPE == Q5_0
#define OFFSET 16
#elif HIGH && TYPE != Q4_1
#define OFFSET 8
#else
#define OFFSET 0
#endif

#ifndef R
#define R 2 // rows of a team of 8 threads
#endif
#ifndef U
#define U 1 // units of a row that a thread reads together
#endif
#define ROWS_A_BLOCK (THREADS / 8 * R)

typedef struct {
	quad q[CODES / 16];
	u32 fifth, scale;
} Raw;

// unitsAt reads U units of each row, every eighth from u on: of planes of codes, of
// fifth bits if there are any, and of scales.
DEVICE void unitsAt(Raw raw[U][R], const u8 *w, u32 rows, u32 units, u32 row0, u32 u) {
	u64 all = (u64)rows * units;
	UNROLL
	for (u32 k = 0; k < U; k++) {
		UNROLL
		for (u32 r = 0; r < R; r++) {
			u32 at = (row0 + 4 * r < rows ? row0 + 4 * r : rows - 1) * units + (u + 8 * k < units ? u + 8 * k : units - 1); // the last: not used
			UNROLL
			for (u32 i = 0; i < CODES / 16; i++) {
				raw[k][r].q[i] = quadAt(w + 16 * i + (u64)at * CODES);
			}
			if (FIFTH) {
				raw[k][r].fifth = wordAt(w + CODES * all + (u64)at * 4);
			}
			const u8 *s = w + CODES * all + (FIFTH ? EVEN(4 * all) : 0) + (u64)(at / UNITS) * SCALE;
			raw[k][r].scale = SCALE == 1 ? *s : SCALE == 2 ? halfAt(s) : wordAt(s);
		}
	}
}

// A Unit is 32 weights: two runs of 16 codes, less OFFSET each. With PAIR they lie as
// the quantizer lays those of activations with `pair`.
typedef struct {
	u32 c[8];
	float w, min;
} Unit;

// scalesOf gives the scale of a block, and its min.
DEVICE void scalesOf(float *w, float *min, u32 raw) {
	*min = 0.0f;
#if TYPE == MXFP4
	*w = raw < 83 ? 0.0f : toFloat((raw - 1) << 23);
#elif TYPE == INT4_32 || TYPE == INT4_128
	*w = tinyScale(toFloat(raw << 16));
#elif TYPE >= INT4F_32
	*w = tinyScale(toFloat(raw));
#else
	*w = fromF16(raw & 0xffffu);
#endif
#if PLUS
	*min = fromF16(raw >> 16);
#endif
}

DEVICE void unpack(Unit *u, const Raw *raw) {
	UNROLL
	for (u32 i = 0; i < 4; i++) {
		u32 q = raw->q[0].v[i];
#if CODES == 32
		u->c[i] = q;
		u->c[i + 4] = raw->q[1].v[i];
#elif TYPE == MXFP4
		u32 other = q ^ 0x88888888u;
		u->c[2 * i] = doubles(q, other);
		u->c[2 * i + 1] = doubles(q >> 16, other >> 16);
#elif TYPE == IQ4_NL
		tableNL(&u->c[2 * i], q);
#elif FIFTH
		u->c[i] = (q & NIBBLES) | spread((raw->fifth >> (4 * i)) & 15u);
		u->c[i + 4] = ((q >> 4) & NIBBLES) | spread((raw->fifth >> (4 * i + 16)) & 15u);
#else
		u->c[i] = q & NIBBLES;
		u->c[i + 4] = highNibbles(q);
#endif
	}
	scalesOf(&u->w, &u->min, raw->scale);
}

// multiply adds the terms of unit u of each row, for each vector.
DEVICE void multiply(float sum[POSITIONS][R], const Rows *p, const u32 P, u32 n, const u32 *x, const Raw *raw, u32 u) {
	Unit w[R];
	UNROLL
	for (u32 r = 0; r < R; r++) {
		unpack(&w[r], &raw[r]);
	}
	UNROLL
	for (u32 j = 0; j < P; j++) {
		if (j < n) {
			u32 at = x[j] + u;
			quad low = quadAt(p->code + 32 * at), high = quadAt(p->code + 32 * at + 16);
			i32 all = 0;
			if (PLUS || OFFSET != 0) {
				all = p->sum[2 * at] + p->sum[2 * at + 1];
			}
			float d = p->scale[at];
			UNROLL
			for (u32 r = 0; r < R; r++) {
				i32 s = -OFFSET * all, h = 0;
				UNROLL
				for (u32 i = 0; i < 4; i++) {
					s = dot4(w[r].c[i], low.v[i], s);
					if (HIGH) {
						h = dotHigh(w[r].c[i + 4], high.v[i], h);
					} else {
						s = dot4(w[r].c[i + 4], high.v[i], s);
					}
				}
				if (HIGH) {
					s += endHigh(h);
				}
				float term = (float)s * w[r].w;
				if (PLUS) {
					float m = (float)all * w[r].min;
					term = term + m;
				}
				term = term * d;
				sum[j][r] = sum[j][r] + term;
			}
		}
	}
}

// Rows of matrices of blocks of 32 times vectors: backends/cpu quantRow.
//
//	lane[b mod 8] += term(b), b ascending; ((l0+l4)+(l2+l6)) + ((l1+l5)+(l3+l7)); + bias
//
// Eight threads, a lane each, make R rows.
DEVICE void rowsOf(const Rows *p, const u32 P) {
	Job job = p->jobs ? p->jobs[blockY()] : p->one;
	u32 first = blockZ() * P;
	if (first >= job.n) {
		return;
	}
	u32 n = job.n - first < P ? job.n - first : P;
	u32 lane = thread() % 8;
	u32 team = thread() % 32 / 8, row0 = (blockX() * (THREADS / 32) + thread() / 32) * (4 * R) + team;
	u32 units = p->cols / 32;
	float sum[POSITIONS][R];
	u32 x[POSITIONS];
	UNROLL
	for (u32 j = 0; j < P; j++) {
		x[j] = inputOf(p, &job, first + (j < n ? j : 0)) * units;
		UNROLL
		for (u32 r = 0; r < R; r++) {
			sum[j][r] = 0.0f;
		}
	}
	Raw raw[U][R];
	unitsAt(raw, job.w, p->rows, units, row0, lane);
	for (u32 u = lane; row0 - team < p->rows;) { // all of a warp go on together
		// What comes next is read before this is used: units of these rows, or the
		// first of those that follow.
		u32 row = row0, from = u + 8 * U;
		if (from - lane >= units) {
			row += blocksX() * ROWS_A_BLOCK;
			from = lane;
		}
		Raw next[U][R];
		if (row - team < p->rows) {
			unitsAt(next, job.w, p->rows, units, row, from);
		}
		UNROLL
		for (u32 k = 0; k < U; k++) {
			if (u + 8 * k < units) {
				multiply(sum, p, P, n, x, raw[k], u + 8 * k);
			}
		}
		if (from == lane) {
			UNROLL
			for (u32 j = 0; j < P; j++) {
				if (j < n) {
					UNROLL
					for (u32 r = 0; r < R; r++) {
						float y = sum[j][r];
						y = y + acrossFloat(y, 4);
						y = y + acrossFloat(y, 2);
						y = y + acrossFloat(y, 1);
						u32 to = row0 + 4 * r;
						if (lane == 0 && to < p->rows) {
							job.y[(u64)outputOf(p, &job, first + j) * job.stride + to] = job.bias ? y + job.bias[to] : y;
						}
						sum[j][r] = 0.0f;
					}
				}
			}
		}
		row0 = row;
		u = from;
		UNROLL
		for (u32 k = 0; k < U; k++) {
			UNROLL
			for (u32 r = 0; r < R; r++) {
				raw[k][r] = next[k][r];
			}
		}
	}
}

#endif
#endif

#if !defined(GROUP)
// One kernel for 1 to 8 vectors of a job, and for more in runs of 8; rows1 is the
// same with room for one, which leaves registers.
KERNEL(THREADS) JOIN(rows, TYPE)(Rows p) { rowsOf(&p, POSITIONS); }
KERNEL(THREADS) JOIN(rows1, TYPE)(Rows p) { rowsOf(&p, 1); }
#endif

#endif
