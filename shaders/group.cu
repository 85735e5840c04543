#if defined(GROUP)

// All of a group of experts for one position in one launch, with the products of the
// tensor cores for bytes: exact integers, so that the bits are those of rows1.
//
// Work lies in a queue. A warp takes a number from it, and what is waited for has a
// smaller number, so that somebody is at it whatever else the device runs: first runs
// of 256 floats of x become what rows multiply; then come some rows of gate or of up,
// by turns, expert by expert; then some rows of down. Whoever brings the last of
// 512 rows of gate and up makes of them 256 floats of what down multiplies.

#if defined(CUDA)
#define KERNEL_OF(threads, blocks) C_NAME __global__ void __launch_bounds__(threads, blocks)
#define CONSTANT const __grid_constant__

// Products of a matrix of 16 x 32 bytes, of which a thread has 4 of row g, 4 of row g+8,
// and 4 more of each, with one of 32 x 8, of which it has 8 of column g, are added
// to c: of rows g and g+8 columns 2t and 2t+1.
DEVICE void tile(i32 c[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
	asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
		: "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void tileUnsigned(i32 c[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { // bytes of a are unsigned
	asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
		: "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two numbers of 16 bits in a word; two of them times the low or the high two bytes.
DEVICE u32 pack2(i32 a, i32 b) { return permute((u32)a, (u32)b, 0x5410u); }
DEVICE i32 pairLow(u32 a, u32 b, i32 c) {
	i32 r;
	asm("dp2a.lo.s32.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
	return r;
}
DEVICE i32 pairHigh(u32 a, u32 b, i32 c) {
	i32 r;
	asm("dp2a.hi.s32.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
	return r;
}

// weightsAt is quadAt where it stands.
DEVICE quad weightsAt(const void *p) {
	quad q;
	asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(q.v[0]), "=r"(q.v[1]), "=r"(q.v[2]), "=r"(q.v[3]) : "l"(p));
	return q;
}

// Memory that other warps have written since the kernel began.
DEVICE quad freshAt(const void *p) {
	quad q;
	asm volatile("ld.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(q.v[0]), "=r"(q.v[1]), "=r"(q.v[2]), "=r"(q.v[3]) : "l"(p));
	return q;
}
DEVICE float freshFloat(const float *p) {
	float f;
	asm volatile("ld.f32 %0, [%1];" : "=f"(f) : "l"(p));
	return f;
}

// take gives the first thread of a warp the next number of a count; ofFirst is what
// the first has.
DEVICE u32 take(u32 *count) {
	u32 r = 0;
	if (thread() % 32 == 0) {
		asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(r) : "l"(count) : "memory");
	}
	return r;
}
DEVICE u32 ofFirst(u32 v) {
	u32 r;
	asm volatile("shfl.sync.idx.b32 %0, %1, 0, 0x1f, 0xffffffff;" : "=r"(r) : "r"(v));
	return r;
}

// arrive adds 1 to a count behind all that the warp has written, and tells how many
// had before; behind seen what they wrote can be read. await waits until n have, and sees.
DEVICE u32 arrive(u32 *count) {
	u32 r = 0;
	asm volatile("bar.warp.sync 0xffffffff;" ::: "memory");
	if (thread() % 32 == 0) {
		asm volatile("atom.release.gpu.global.add.u32 %0, [%1], 1;" : "=r"(r) : "l"(count) : "memory");
	}
	return ofFirst(r);
}
DEVICE void seen(void) { asm volatile("fence.acq_rel.gpu; bar.warp.sync 0xffffffff;" ::: "memory"); }
DEVICE void await(const u32 *count, u32 n) {
	u32 r;
	do {
		asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(count) : "memory");
	} while (r < n);
	seen();
}

// wholeWarp lets a warp read what its threads have written.
DEVICE void wholeWarp(void) { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }

// ofE2M1 turns four codes of E2M1, the nibbles of q's low half, into the doubles of
// their values where those are positive, and into 0 elsewhere.
DEVICE u32 ofE2M1(u32 q) { return permute(0x03020100u, 0x0c080604u, q); } // an index with its top bit set gives the sign of the byte, which is 0 here
#else // HOST
#define KERNEL_OF(threads, blocks) KERNEL(threads)
#define CONSTANT
DEVICE void tile(i32 c[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { tileOf(c, (u32[]){a0, a1, a2, a3, b0, b1}, 1); }
DEVICE void tileUnsigned(i32 c[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { tileOf(c, (u32[]){a0, a1, a2, a3, b0, b1}, 0); }
DEVICE u32 pack2(i32 a, i32 b) { return ((u32)a & 0xffffu) | (u32)b << 16; }
DEVICE i32 pairLow(u32 a, u32 b, i32 c) { return c + (short)a * (i32)(b & 0xffu) + (short)(a >> 16) * (i32)((b >> 8) & 0xffu); }
DEVICE i32 pairHigh(u32 a, u32 b, i32 c) { return pairLow(a, b >> 16, c); }
DEVICE quad weightsAt(const void *p) { return quadAt(p); }
DEVICE quad freshAt(const void *p) { return quadAt(p); }
DEVICE float freshFloat(const float *p) { return *p; }
DEVICE u32 take(u32 *count) { return thread() % 32 == 0 ? (*count)++ : 0; }
DEVICE u32 ofFirst(u32 v) {
	UNROLL
	for (u32 m = 1; m < 32; m *= 2) {
		u32 other = across(v, m);
		v = thread() & m ? other : v;
	}
	return v;
}
DEVICE u32 arrive(u32 *count) {
	across(0, 1);
	return ofFirst(take(count));
}
DEVICE void seen(void) {}
DEVICE void await(const u32 *count, u32 n) {
	while (*(volatile const u32 *)count < n) {
		others();
	}
}
DEVICE void wholeWarp(void) { across(0, 1); }
DEVICE u32 ofE2M1(u32 q) {
	u32 r = 0;
	for (u32 i = 0; i < 4; i++) {
		u32 n = (q >> (4 * i)) & 15u;
		r |= n & 8u ? 0 : (((n & 4u ? 0x0c080604u : 0x03020100u) >> (8 * (n & 3u))) & 0xffu) << (8 * i);
	}
	return r;
}
#endif

#define MOST_EXPERTS 16

typedef struct {
	const float *x; // [dim], where the host wrote it or on the device
	u8 *xCode;      // what gate and up multiply
	float *xScale;
	i32 *xSum;
	float *gate, *up; // [experts, ff]
	u8 *code;         // what down multiplies, [experts, ff]
	float *scale;
	i32 *sum;
	float *y;       // [experts, dim]
	u32 *top;       // becomes step when an activation is out of range, if it is 0
	u32 *counts;    // TICKET and what follows: 0 before, and behind
	u32 step, act;  // backends.Activation and 1
	u32 dim, ff, experts;
	u32 steps;      // 1: x, gate and up; 2: down; 3: all
	u32 block, pair; // of the form that down multiplies
	const u8 *w[3][MOST_EXPERTS];
	const float *bias[3][MOST_EXPERTS]; // [ff], [ff], [dim]; 0: none
} Group;

// Places of the counts.
#define TICKET 0
#define READY 32 // runs of x
#define GONE 64  // warps
#define DONE 96  // [experts] runs of 256 of what down multiplies
#define CAME 128 // [experts, (ff+255)/256] of parts of such a run

// run256 makes codes of a thread's eight of 256 floats at `at`: quantize says how. All
// of a warp come here; here says that the thread has floats.
DEVICE void run256(const float x[8], u32 at, int here, u32 block, u32 pair, u8 *code, float *scale, i32 *sums, u32 *top, u32 step) {
	u32 most = 0, lane = thread() % 32;
	UNROLL
	for (u32 i = 0; i < 8; i++) {
		u32 size = bits(x[i]) & ~SIGN;
		most = size > most ? size : most;
	}
	outOfRange(most, top, step);
	UNROLL
	for (u32 m = 1; m < 32; m *= 2) {
		u32 other = across(most, m);
		most = (m < 4 || block == 256) && other > most ? other : most;
	}
	int none = most < TINY || most > LARGEST;
	u32 word[2] = {0, 0};
	i32 sum = 0;
	if (!none) {
		float s = 127.0f * rcp(toFloat(most));
		UNROLL
		for (u32 i = 0; i < 8; i++) {
			i32 c = codeOf(x[i], s);
			word[i / 4] |= ((u32)c & 0xffu) << (8 * (i & 3u));
			sum += c;
		}
	}
	sum += (i32)across((u32)sum, 1);
	if (here) {
		if (pair) {
			u8 *to = code + (at & ~31u) + 2 * (at & 15u) + ((at >> 4) & 1u);
			for (u32 i = 0; i < 8; i++) {
				to[2 * i] = (u8)(word[i / 4] >> (8 * (i & 3u)));
			}
		} else {
			((u32 *)(code + at))[0] = word[0];
			((u32 *)(code + at))[1] = word[1];
		}
		if (lane % 2 == 0) {
			sums[at / 16] = sum;
		}
		if ((at & (block - 1)) == 0) {
			scale[at / block] = scaleOf(none, most);
		}
	}
}

#if SUPER
#define PAIR 0
#define ROWS 16 // of an item
#define ACT_BLOCK 256
#define STEP 4 // blocks of a row that are read together
#define BLOCKS 2 // of threads on a multiprocessor, of which registers follow
#else
#define ROWS 8
#define ACT_BLOCK 32
#define PAIRS 2 // of eight units
#define STEP (16 * PAIRS)
#define BLOCKS 3
#endif

// An Item is ROWS rows of a matrix.
typedef struct {
	const u8 *w;
	const float *bias;
	const u8 *code;
	const float *scale;
	const i32 *sum;
	float *y;
	u32 rows, cols, row0, expert;
	u32 part; // 0: gate, 1: up, 2: down
} Item;

DEVICE Item itemOf(const Group *p, u32 n) {
	Item a;
	u32 ofGate = p->ff / ROWS, ofDown = p->dim / ROWS, first = p->steps & 1 ? 2 * p->experts * ofGate : 0;
	if (n < first) {
		a.expert = n / (2 * ofGate);
		n -= a.expert * 2 * ofGate;
		a.part = n & 1u;
		a.row0 = n / 2 * ROWS;
		a.rows = p->ff;
		a.cols = p->dim;
		a.code = p->xCode;
		a.scale = p->xScale;
		a.sum = p->xSum;
		a.y = (a.part ? p->up : p->gate) + (u64)a.expert * p->ff;
	} else {
		n -= first;
		a.expert = n / ofDown;
		a.part = 2;
		a.row0 = (n - a.expert * ofDown) * ROWS;
		a.rows = p->dim;
		a.cols = p->ff;
		u64 at = (u64)a.expert * p->ff;
		a.code = p->code + at;
		a.scale = p->scale + at / ACT_BLOCK;
		a.sum = p->sum + at / 16;
		a.y = p->y + (u64)a.expert * p->dim;
	}
	a.w = p->w[a.part][a.expert];
	a.bias = p->bias[a.part][a.expert];
	return a;
}

// A thread g*4+t of a warp has rows g and g+8 of 16. What it reads of them in a step is
// its part of matrices of 16 x 32 bytes, of which the tensor core has 8 columns of
// activations to multiply: most of them zeros, so that each column is another block's sum.
#if SUPER

// A Step is what a thread has read of 4 blocks of its rows.
typedef struct {
	quad q[2][4][2];
	quad head[2];
} Step;

// A Source is what is read next: of rows g and g+8 blocks from `at` on.
typedef struct {
	const u8 *row[2];
	u32 at, all;
} Source;

DEVICE void sourceOf(Source *s, const Item *a, u32 g) {
	s->all = a->cols / 256;
	s->at = 0;
	UNROLL
	for (u32 r = 0; r < 2; r++) {
		s->row[r] = a->w + (u64)(a->row0 + g + 8 * r) * s->all * BYTES;
	}
}

DEVICE void stepOf(Step *s, const Source *from, u32 t) {
	UNROLL
	for (u32 r = 0; r < 2; r++) {
		UNROLL
		for (u32 b = 0; b < 4; b++) {
			u32 at = from->at + b < from->all ? from->at + b : from->all - 1;
			UNROLL
			for (u32 h = 0; h < 2; h++) {
				s->q[r][b][h] = weightsAt(from->row[r] + at * BYTES + (BYTES - 128) + 64 * h + 16 * t);
			}
		}
		u32 at = from->at + t < from->all ? from->at + t : from->all - 1;
		s->head[r] = weightsAt(from->row[r] + at * BYTES);
	}
}

// Blocks b0 to b0+3 of 16 rows. Column 2b+i of the products is of block b, with t/2 = i:
// its groups of 32 are 4h+2i with low nibbles, and 4h+2i+1 with high ones, 16 times
// themselves. Thread t ends with block t, for lane t of the row, or 4+t of odd steps:
// the two change places behind each step.
DEVICE void multiplyStep(float lanes[2][2], const Step *s, const Item *a, u32 b0, u32 g, u32 t, const u8 *zero) {
	u32 blocks = a->cols / 256, mine = b0 + g / 2 < blocks ? b0 + g / 2 : blocks - 1;
	const u8 *x = a->code + mine * 256 + 64 * (t / 2) + 16 * (t & 1u);
	i32 c[2][2][4];
	UNROLL
	for (u32 i = 0; i < 16; i++) {
		c[i / 8][i / 4 % 2][i % 4] = 0;
	}
	UNROLL
	for (u32 b = 0; b < 4; b++) {
		const u8 *from = g / 2 == b && t / 2 == (g & 1u) ? x : zero;
		UNROLL
		for (u32 h = 0; h < 2; h++) {
			const quad *q0 = &s->q[0][b][h], *q1 = &s->q[1][b][h];
			quad low = freshAt(from + 128 * h), high = freshAt(from + 128 * h + 32);
			UNROLL
			for (u32 i = 0; i < 4; i += 2) {
				tileUnsigned(c[h][0], q0->v[i] & NIBBLES, q1->v[i] & NIBBLES, q0->v[i + 1] & NIBBLES, q1->v[i + 1] & NIBBLES, low.v[i], low.v[i + 1]);
				tileUnsigned(c[h][1], q0->v[i] & ~NIBBLES, q1->v[i] & ~NIBBLES, q0->v[i + 1] & ~NIBBLES, q1->v[i + 1] & ~NIBBLES, high.v[i], high.v[i + 1]);
			}
		}
	}
	int live = b0 + t < blocks;
	u32 at = live ? b0 + t : blocks - 1;
	float dx = freshFloat(a->scale + at);
	u32 sums[4]; // two of 32 codes each
	UNROLL
	for (u32 i = 0; i < 4; i++) {
		quad four = freshAt(a->sum + 16 * at + 4 * i);
		sums[i] = pack2((i32)(four.v[0] + four.v[1]), (i32)(four.v[2] + four.v[3]));
	}
	UNROLL
	for (u32 r = 0; r < 2; r++) {
		const u32 *v = s->head[r].v;
		u32 scales[2] = {v[1] & 0x3f3f3f3fu, (v[3] & NIBBLES) | ((v[1] >> 2) & 0x30303030u)};
		u32 mins[2] = {v[2] & 0x3f3f3f3fu, ((v[3] >> 4) & NIBBLES) | ((v[2] >> 2) & 0x30303030u)};
		i32 low = 0, high = 0, minus = 0;
		UNROLL
		for (u32 h = 0; h < 2; h++) {
			UNROLL
			for (u32 i = 0; i < 2; i++) {
				low += (i32)((scales[h] >> (16 * i)) & 0xffu) * c[h][0][2 * r + i];
				high += (i32)((scales[h] >> (16 * i + 8)) & 0xffu) * c[h][1][2 * r + i];
			}
			minus = pairLow(sums[2 * h], mins[h], minus);
			minus = pairHigh(sums[2 * h + 1], mins[h], minus);
		}
		float d = live ? fromF16(v[0] & 0xffffu) : 0.0f, min = live ? fromF16(v[0] >> 16) : 0.0f;
		float term = (float)(low + (high >> 4)) * d;
		float m = (float)minus * min;
		term = term - m;
		term = term * dx;
		term = lanes[r][0] + term;
		lanes[r][0] = lanes[r][1];
		lanes[r][1] = term;
	}
}

DEVICE float rowSum(const float l[2]) {
	float y = l[0] + l[1];
	y = y + acrossFloat(y, 2);
	return y + acrossFloat(y, 1);
}

#else

// A Step is what a thread has read of its row, 16 units in a Pair: of eight and of eight.
typedef struct {
	quad q[2][2][CODES / 16];
	u32 scale[2]; // of two units each
} Pair;
typedef struct { Pair p[PAIRS]; } Step;

// A Source is what is read next: of row g units from `at` on.
typedef struct {
	const u8 *row, *scale;
	u32 at, all;
} Source;

DEVICE void sourceOf(Source *s, const Item *a, u32 g) {
	s->all = a->cols / 32;
	s->at = 0;
	u64 first = (u64)(a->row0 + g) * s->all;
	s->row = a->w + first * CODES;
	s->scale = a->w + (u64)a->rows * s->all * CODES + first * SCALE;
}

DEVICE void pairOf(Pair *s, const Source *from, u32 i, u32 t) {
	UNROLL
	for (u32 r = 0; r < 2; r++) {
		UNROLL
		for (u32 h = 0; h < 2; h++) {
			u32 u = from->at + 16 * i + 8 * r + 4 * h + t;
			u = u < from->all ? u : from->all - 1; // the last: not used
			UNROLL
			for (u32 k = 0; k < CODES / 16; k++) {
				s->q[r][h][k] = weightsAt(from->row + u * CODES + 16 * k);
			}
		}
	}
	UNROLL
	for (u32 h = 0; h < 2; h++) {
		u32 u = from->at + 16 * i + 8 * (t / 2) + 4 * h + 2 * (t & 1u);
		u = u < from->all ? u : from->all - 2;
		s->scale[h] = SCALE == 1 ? halfAt(from->scale + u) : wordAt(from->scale + 2 * u);
	}
}

DEVICE void stepOf(Step *s, const Source *from, u32 t) {
	UNROLL
	for (u32 i = 0; i < PAIRS; i++) {
		pairOf(&s->p[i], from, i, t);
	}
}

// Units u0 to u0+15 of 8 rows, as 16 rows of the tensor core: of the first eight units
// and of the second. Thread t has read units 4h+t of both; column g of activations is of
// unit 4h+g of the first, or of 4h+g-4 of the second, where t = g mod 4. So threads t < 2
// end with units 4h+2t and 4h+2t+1 of the first, the others with 4h+2t-4 and 4h+2t-3 of
// the second; then each has the same two lanes of both.
DEVICE void multiplyPair(float lanes[2], const Pair *s, const Item *a, u32 u0, u32 g, u32 t, const u8 *zero) {
	u32 units = a->cols / 32, first = t / 2 - 1; // bits of the first eight
	float term[2][2];
	UNROLL
	for (u32 h = 0; h < 2; h++) {
		u32 mine = u0 + 8 * (g / 4) + 4 * h + (g & 3u);
		const u8 *from = t == (g & 3u) ? a->code + (mine < units ? mine : units - 1) * 32 : zero;
		quad x[2] = {freshAt(from), freshAt(from + 16)};
		i32 c[4] = {0, 0, 0, 0};
#if TYPE == MXFP4
		i32 more[4] = {0, 0, 0, 0};
		UNROLL
		for (u32 i = 0; i < 4; i++) {
			u32 w0 = s->q[0][h][0].v[i], w1 = s->q[1][h][0].v[i], o0 = w0 ^ 0x88888888u, o1 = w1 ^ 0x88888888u;
			const u32 *y = &x[i / 2].v[2 * (i & 1u)];
			tile(c, ofE2M1(w0), ofE2M1(w1), ofE2M1(w0 >> 16), ofE2M1(w1 >> 16), y[0], y[1]);
			tile(more, ofE2M1(o0), ofE2M1(o1), ofE2M1(o0 >> 16), ofE2M1(o1 >> 16), y[0], y[1]);
		}
		UNROLL
		for (u32 i = 0; i < 4; i++) {
			c[i] -= more[i];
		}
#else
		UNROLL
		for (u32 i = 0; i < 8; i += 2) {
			const u32 *w0 = &s->q[0][h][i / 4].v[i & 3u], *w1 = &s->q[1][h][i / 4].v[i & 3u], *y = &x[i / 4].v[i & 3u];
			tile(c, w0[0], w1[0], w0[1], w1[1], y[0], y[1]);
		}
#endif
		u32 at = u0 + 8 * (t / 2) + 4 * h + 2 * (t & 1u);
		int live = at < units;
		at = live ? at : units - 2;
		UNROLL
		for (u32 i = 0; i < 2; i++) {
			float w, min;
			scalesOf(&w, &min, i ? s->scale[h] >> (8 * SCALE) : s->scale[h] & ((1u << (8 * SCALE)) - 1));
			i32 sum = (i32)(((u32)c[i] & first) | ((u32)c[2 + i] & ~first));
			float product = (float)sum * (live ? w : 0.0f);
			term[h][i] = product * freshFloat(a->scale + at + i);
		}
	}
	UNROLL
	for (u32 i = 0; i < 2; i++) {
		u32 t0 = bits(term[0][i]), t1 = bits(term[1][i]), other = across((t1 & first) | (t0 & ~first), 2);
		lanes[i] = lanes[i] + toFloat((t0 & first) | (other & ~first));
		lanes[i] = lanes[i] + toFloat((other & first) | (t1 & ~first));
	}
}

// multiplyStep reads of the next step where it has multiplied.
DEVICE void multiplyStep(float lanes[2][2], Step *s, const Source *next, const Item *a, u32 u0, u32 g, u32 t, const u8 *zero) {
	UNROLL
	for (u32 i = 0; i < PAIRS; i++) {
		multiplyPair(lanes[0], &s->p[i], a, u0 + 16 * i, g, t, zero);
		pairOf(&s->p[i], next, i, t);
	}
}

DEVICE float rowSum(const float l[2]) {
	float y[2];
	UNROLL
	for (u32 i = 0; i < 2; i++) {
		y[i] = l[i] + acrossFloat(l[i], 2);
		y[i] = y[i] + acrossFloat(y[i], 1);
	}
	return y[0] + y[1];
}

#endif

// Where forms fit they are multiplied from shared memory: codes, sums, scales.
#define FORM_BYTES(n) ((n) + 4 * ((n) / 16) + (4 * ((n) / ACT_BLOCK) + 15) / 16 * 16)
#define FORM_X 12288 // bytes of x
#define FORM_H 3072  // bytes of what a warp's item of down multiplies

// copy brings bytes to shared memory, by `all` threads, of which this is one.
DEVICE void copy(u8 *to, const void *from, u32 bytes, u32 one, u32 all) {
	u32 n = bytes / 16;
	for (u32 i = one; i < n; i += 4 * all) {
		quad q[4];
		UNROLL
		for (u32 k = 0; k < 4; k++) {
			if (i + k * all < n) {
				q[k] = freshAt((const u8 *)from + 16 * (i + k * all));
			}
		}
		UNROLL
		for (u32 k = 0; k < 4; k++) {
			if (i + k * all < n) {
				*(quad *)(to + 16 * (i + k * all)) = q[k];
			}
		}
	}
}

// hold brings a form of n floats to shared memory, by `all` threads.
DEVICE void hold(u8 *to, const u8 *code, const i32 *sum, const float *scale, u32 n, u32 one, u32 all) {
	copy(to, code, n, one, all);
	if (SUPER) {
		copy(to + n, sum, n / 4, one, all);
	}
	float *scales = (float *)(to + n + n / 4);
	for (u32 i = one; i < n / ACT_BLOCK; i += all) {
		scales[i] = freshFloat(scale + i);
	}
}

KERNEL_OF(THREADS, BLOCKS) JOIN(group, TYPE)(CONSTANT Group p) {
	SHARED __attribute__((aligned(16))) u8 xForm[FORM_X], forms[THREADS / 32][FORM_H], zero[256];
	u32 lane = thread() % 32, g = lane / 4, t = lane % 4;
	u8 *form = forms[thread() / 32]; // of the warp's item of down
	if (thread() < 64) {
		((u32 *)zero)[thread()] = 0;
	}
	barrier();
	u32 runs = (p.ff + 255) / 256, early = p.steps & 1 ? (p.dim + 255) / 256 : 0;
	u32 items = (p.steps & 1 ? 2 * p.experts * (p.ff / ROWS) : 0) + (p.steps & 2 ? p.experts * (p.dim / ROWS) : 0);
	u32 n = ofFirst(take(p.counts + TICKET));
	for (; n < early; n = ofFirst(take(p.counts + TICKET))) {
		u32 at = 256 * n + 8 * lane;
		float x[8];
		int here = at < p.dim;
		UNROLL
		for (u32 i = 0; i < 8; i += 4) {
			quad four = quadAt(p.x + (here ? at + i : 0));
			UNROLL
			for (u32 j = 0; j < 4; j++) {
				x[i + j] = here ? toFloat(four.v[j]) : 0.0f;
			}
		}
		run256(x, at, here, ACT_BLOCK, PAIR, p.xCode, p.xScale, p.xSum, p.top, p.step);
		arrive(p.counts + READY);
	}
	n -= early;
	u32 known = p.steps & 1 ? 0 : ~0u; // experts whose floats for down are there; bit 16: x is
	u32 held = p.steps & 1 && FORM_BYTES(p.dim) <= FORM_X, heldDown = FORM_BYTES(p.ff) <= FORM_H;
	Item a, b; // b is what is read, a or the next
	Source from;
	Step s;
	if (n < items) {
		a = b = itemOf(&p, n);
		sourceOf(&from, &a, g);
		stepOf(&s, &from, t);
	}
	if (held) {
		await(p.counts + READY, early);
		hold(xForm, p.xCode, p.xSum, p.xScale, p.dim, thread(), THREADS);
		barrier();
		known = 1u << MOST_EXPERTS;
	}
	if (n < items) {
		u32 coming = take(p.counts + TICKET), at = 0, all = a.cols / ACT_BLOCK;
		int ahead = 0, more = 1; // b is behind a; b is read
		float lanes[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
		for (;;) {
			from.at += STEP;
			if (from.at >= from.all && more) {
				n = ofFirst(coming) - early;
				if (n < items) {
					ahead = 1;
					b = itemOf(&p, n);
					sourceOf(&from, &b, g);
					coming = take(p.counts + TICKET);
				} else {
					more = 0;
					from.at = 0; // may be read, and is not used
				}
			}
			u32 bit = a.part == 2 ? 1u << a.expert : 1u << MOST_EXPERTS;
			if (!(known & bit)) {
				await(a.part == 2 ? p.counts + DONE + a.expert : p.counts + READY, a.part == 2 ? runs : early);
				known |= bit;
			}
			if (at == 0) {
				if (a.part < 2 && held) {
					a.code = xForm, a.sum = (const i32 *)(xForm + p.dim), a.scale = (const float *)(xForm + p.dim + p.dim / 4);
				} else if (a.part == 2 && heldDown) {
					wholeWarp();
					hold(form, a.code, a.sum, a.scale, p.ff, lane, 32);
					wholeWarp();
					a.code = form, a.sum = (const i32 *)(form + p.ff), a.scale = (const float *)(form + p.ff + p.ff / 4);
				}
			}
#if SUPER
			multiplyStep(lanes, &s, &a, at, g, t, zero);
			if (more) {
				stepOf(&s, &from, t);
			}
#else
			multiplyStep(lanes, &s, &from, &a, at, g, t, zero);
#endif
			at += STEP;
			if (at >= all) {
				float y0 = rowSum(lanes[0]), y1 = ROWS == 16 ? rowSum(lanes[1]) : y0;
				if (t < ROWS / 8) {
					u32 row = a.row0 + g + 8 * t;
					float y = t ? y1 : y0;
					a.y[row] = a.bias ? y + a.bias[row] : y;
				}
				if (a.part < 2) {
					u32 run = a.row0 / 256, floats = p.ff - 256 * run < 256 ? p.ff - 256 * run : 256;
					if (arrive(p.counts + CAME + a.expert * runs + run) == 2 * floats / ROWS - 1) {
						seen();
						u32 at = 256 * run + 8 * lane, here = 8 * lane < floats;
						u64 from = (u64)a.expert * p.ff;
						float x[8];
						UNROLL
						for (u32 i = 0; i < 8; i += 4) {
							quad gate = freshAt(p.gate + from + (here ? at + i : 0)), up = freshAt(p.up + from + (here ? at + i : 0));
							UNROLL
							for (u32 j = 0; j < 4; j++) {
								x[i + j] = here ? activation(toFloat(gate.v[j]), toFloat(up.v[j]), p.act) : 0.0f;
							}
						}
						run256(x, at, here, p.block, p.pair, p.code + from, p.scale + from / p.block, p.sum + from / 16, p.top, p.step);
						arrive(p.counts + DONE + a.expert);
					}
				}
				if (!ahead) {
					break;
				}
				a = b;
				ahead = 0;
				at = 0;
				all = a.cols / ACT_BLOCK;
				lanes[0][0] = lanes[0][1] = lanes[1][0] = lanes[1][1] = 0.0f;
			}
		}
	}
	// The last leaves the counts as it found them.
	if (ofFirst(take(p.counts + GONE)) == blocksX() * (THREADS / 32) - 1) {
		for (u32 i = TICKET + lane; i < CAME + p.experts * runs; i += 32) {
			p.counts[i] = 0;
		}
	}
}

#endif
