// The steps of a model that are no products with matrices, for CUDA and HIP. It is
// compiled with DENSE defined, behind gpu.cu, which has the types, the own functions
// and what differs between compilers.
#ifdef DENSE

#define KVTINY 0x33800000u // bits of 2^-24

DEVICE float inverseRoot(float a) {
	float h = 0.5f * a, y = toFloat(0x5f376380u - (bits(a) >> 1)), t;
	t = 1.5f - (h * y) * y;
	y = y * t;
	t = 1.5f - (h * y) * y;
	y = y * t;
	t = 0.5f - (h * y) * y;
	return y + y * t;
}

DEVICE float sigmoid(float x) { return rcp(1.0f + expo(0.0f - x)); }

DEVICE float softplus(float x) {
	float e = expo(0.0f - toFloat(bits(x) & ~SIGN));
	float s = e * rcp(2.0f + e), q = s * s;
	float p = toFloat(0x3d9d89d9u);
	p = p * q + toFloat(0x3dba2e8cu);
	p = p * q + toFloat(0x3de38e39u);
	p = p * q + toFloat(0x3e124925u);
	p = p * q + toFloat(0x3e4ccccdu);
	p = p * q + toFloat(0x3eaaaaabu);
	float t = s + s;
	return (x > 0.0f ? x : 0.0f) + (t + t * (q * p));
}

// toF16 rounds to nearest even, beyond the range to +-65504.
DEVICE u32 toF16(float x) {
	u32 a = bits(x) & ~SIGN, sign = (bits(x) >> 16) & 0x8000u;
	if (a >= 0x477fe000u) {
		return sign | 0x7bffu;
	}
	if (a < 0x38800000u) { // a whole number of 2^-24
		return sign | (bits(toFloat(a) + 0.5f) - 0x3f000000u);
	}
	return sign | ((a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13);
}

// Failure is where a step leaves its number, if none has left one before it.
typedef struct {
	u32 *at;
	u32 step;
	u32 pad;
} Failure;

// saw is told the bits of some |x| that a step has read.
DEVICE void saw(Failure f, u32 most) {
	if (most > LARGEST) {
		volatile u32 *at = f.at;
		if (*at == 0) {
			*at = f.step;
		}
	}
}

DEVICE void look(u32 *most, float x) {
	u32 a = bits(x) & ~SIGN;
	*most = a > *most ? a : *most;
}

// tree16 adds the lanes of sixteen threads: j with j+8, then j+4, j+2, j+1. All get
// the sum.
DEVICE float tree16(float lane) {
	UNROLL
	for (u32 h = 8; h > 0; h /= 2) {
		lane = lane + acrossFloat(lane, h);
	}
	return lane;
}

typedef struct {
	float *y;
	const float *x;
	const float *weight; // [n]
	const float *bias;   // [n]; 0: none, and the mean stays
	Failure fail;
	u32 n, runs;
	float inv, eps; // inv is 1/n
} Norm;

#define TILE 2048
#define SHORT 512

// takeMean is what is left of x: clean(clean(x) - m). With m of 0 it is clean(x).
DEVICE float takeMean(float x, float m) { return clean(clean(x) - m); }

// Runs of n floats are normalised: backends/cpu rmsNorm and layerNormStep; y may be x.
//
//	m = 0, or with a bias (sum of clean(x), 16 lanes)*inv
//	d = clean(clean(x) - m); q = sum of d^2, 16 lanes; r = rsqrt(q*inv + eps)
//	y = (d*r)*weight, + bias
//
// Sixteen threads make a short run, a block makes a long one: all its threads read,
// sixteen add. A thread writes what it has read, so that y may be x.
KERNEL(256) normalize(Norm p) {
	SHARED float tile[TILE];
	SHARED float total;
	u32 t = thread(), most = 0;
	u32 step = p.n <= SHORT ? 16 : 256, first = t % step;
	u32 run = p.n <= SHORT ? blockX() * 16 + t / 16 : blockX();
	u32 n = run < p.runs ? p.n : 0;
	const float *x = p.x + (u64)run * p.n;
	float *y = p.y + (u64)run * p.n;
	float m = 0.0f, q = 0.0f;
	for (u32 pass = p.bias ? 0 : 1; pass < 2; pass++) {
		float lane = 0.0f;
		if (step == 16) {
			for (u32 i = first; i < n; i += 16) {
				float v = x[i];
				look(&most, v);
				v = takeMean(v, m);
				lane = lane + (pass == 0 ? v : v * v);
			}
			lane = tree16(lane);
		} else {
			for (u32 base = 0; base < n; base += TILE) {
				for (u32 i = t; i < TILE && base + i < n; i += 256) {
					float v = x[base + i];
					look(&most, v);
					v = takeMean(v, m);
					tile[i] = pass == 0 ? v : v * v;
				}
				barrier();
				if (t < 16) {
					u32 end = n - base < TILE ? n - base : TILE;
					for (u32 i = t; i < end; i += 16) {
						lane = lane + tile[i];
					}
				}
				barrier();
			}
			lane = tree16(lane);
			if (t == 0) {
				total = lane;
			}
			barrier();
			lane = total;
			barrier();
		}
		if (pass == 0) {
			m = lane * p.inv;
		} else {
			q = lane;
		}
	}
	float r = inverseRoot(q * p.inv + p.eps);
	for (u32 i = first; i < n; i += step) {
		float v = (takeMean(x[i], m) * r) * p.weight[i];
		y[i] = p.bias ? v + p.bias[i] : v;
	}
	saw(p.fail, most);
}

typedef struct {
	float *x;
	const float *cos, *sin; // [positions, half]
	u32 rows, dim, headDim, half, skip, pos;
	u32 pairs; // neighbours turn, not halves
	u32 pad;
} Rope;

// Heads of rows are turned, in place: backends/cpu rotate and rotatePairs.
//
//	x[i], x[k] = (x[i]*c) - (x[k]*s), (x[k]*c) + (x[i]*s)
//
// where behind `skip` floats of a head k is i+half, or with pairs i is even and k is i+1.
KERNEL(256) rope(Rope p) {
	u32 heads = p.dim / p.headDim, at = blockX() * 256 + thread();
	if (at >= p.rows * heads * p.half) {
		return;
	}
	u32 j = at % p.half, h = at / p.half % heads, row = at / p.half / heads;
	float *x = p.x + (u64)row * p.dim + h * p.headDim + p.skip;
	u64 angle = (u64)(p.pos + row) * p.half + j;
	u32 i = p.pairs ? 2 * j : j, k = p.pairs ? 2 * j + 1 : j + p.half;
	float c = p.cos[angle], s = p.sin[angle], a = x[i], b = x[k];
	x[i] = a * c - b * s;
	x[k] = b * c + a * s;
}

// The formats of a cache: backends.KVType.
#define KV_F16 0
#define KV_F32 1
#define KV_Q8 2

typedef struct {
	const float *x; // [n, heads, dim]
	u8 *code;       // rows of `width` elements
	float *scale;   // of q8: [rows, width/32]
	Failure fail;
	u64 row;   // of head 0 at the first position
	u32 n, heads, dim;
	u32 width, from; // x becomes elements from, from+1, ... of a row
	u32 positions;   // rows from one head to the next
	u32 type, pad;
} Store;

// Keys or values become rows of a cache: backends/cpu plane.put. A q8 block of 32 is
// a warp's, or half of a wave's.
KERNEL(256) store(Store p) {
	u32 i = blockX() * 256 + thread(), all = p.n * p.heads * p.dim;
	int live = i < all;
	u32 c = i % p.dim, h = i / p.dim % p.heads, n = i / p.dim / p.heads;
	u64 at = (p.row + (u64)h * p.positions + n) * p.width + p.from + c;
	float x = live ? p.x[i] : 0.0f;
	u32 a = bits(x) & ~SIGN, most = a;
	if (p.type == KV_F16) {
		if (live) {
			((u16 *)p.code)[at] = (u16)toF16(x);
		}
	} else if (p.type == KV_F32) {
		if (live) {
			((float *)p.code)[at] = a < KVTINY ? 0.0f : x;
		}
	} else {
		UNROLL
		for (u32 m = 1; m < 32; m *= 2) {
			u32 other = across(most, m);
			most = other > most ? other : most;
		}
		float d = 0.0f;
		i32 code = 0;
		if (most >= TINY && most <= LARGEST) {
			d = toFloat(most) * toFloat(0x3c010204u);
			code = (i32)(bits(x * (127.0f * rcp(toFloat(most))) + 12582912.0f) - 0x4b400000u);
		}
		if (bits(d) < KVTINY) {
			d = 0.0f;
			code = 0;
		}
		if (live) {
			((i8 *)p.code)[at] = (i8)code;
			if (c % 32 == 0) {
				p.scale[at / 32] = d;
			}
		}
	}
	saw(p.fail, most);
}

// A Plane is the keys or the values of a cache, from the first row of a layer on.
typedef struct {
	const u8 *code;
	const float *scale;
	u32 width; // elements of a row
	u32 type;
} Plane;

// one gives element at of a plane, its rows laid end to end. Where the type is known
// to the compiler nothing is between one load and the next.
DEVICE float one(const Plane *p, const u32 type, u64 at) {
	if (type == KV_F16) {
		return fromF16(halfAt(p->code + 2 * at));
	}
	if (type == KV_F32) {
		return floatAt(p->code + 4 * at);
	}
	return (float)(i32)(i8)p->code[at] * p->scale[at / 32];
}

// eight gives elements at, at+1, ..., where at is a multiple of 8.
DEVICE void eight(float f[8], const Plane *p, const u32 type, u64 at) {
	if (type == KV_F16) {
		quad q = quadAt(p->code + 2 * at);
		UNROLL
		for (u32 i = 0; i < 4; i++) {
			f[2 * i] = fromF16(q.v[i] & 0xffffu);
			f[2 * i + 1] = fromF16(q.v[i] >> 16);
		}
	} else if (type == KV_F32) {
		quad a = quadAt(p->code + 4 * at), b = quadAt(p->code + 4 * at + 16);
		UNROLL
		for (u32 i = 0; i < 4; i++) {
			f[i] = toFloat(a.v[i]);
			f[i + 4] = toFloat(b.v[i]);
		}
	} else {
		u32 q[2] = {wordAt(p->code + at), wordAt(p->code + at + 4)};
		float d = p->scale[at / 32];
		UNROLL
		for (u32 i = 0; i < 8; i++) {
			f[i] = (float)(i32)(i8)(q[i / 4] >> (8 * (i % 4))) * d;
		}
	}
}

typedef struct {
	const float *q;   // [n, heads, k.width]
	float *y;         // [n, heads, dim]
	float *score;     // [n, heads, stride]
	float *part;      // [n, heads, chunks, dim]
	Plane k, v;       // of a latent cache the same
	const i32 *keys;  // [n, most] the chosen ones of each position, ascending; 0: no choice
	const i32 *count; // [n]
	const float *sinks; // [heads]; 0: none
	Failure fail;
	u32 n, pos; // positions pos, pos+1, ...
	u32 heads, kvHeads, positions;
	u32 dim; // of a value
	u32 window, chunk, most;
	u32 stride; // at least the keys of the last position
	u32 chunks; // of 256 keys that some query sees a part of
	u32 first;  // the number of the first of them
	float factor;
	u32 pad;
} Attention;

#define CHUNK 256   // keys whose sums are formed apart from the others'
#define QUERIES 4   // of a block, which share each key and value
#define KEYS 128    // of a block of scores, two threads each
#define DIMS 256    // of queries that are in shared memory at once

// Seen are the keys of a query, by their numbers among those of its position: a key
// is its own number, or where keys are chosen its place in their list.
typedef struct {
	const i32 *keys;
	u32 start, end;
} Seen;

// seenBy is backends.Attention.First, or the list.
DEVICE Seen seenBy(const Attention *p, u32 i) {
	Seen s;
	u32 pos = p->pos + i;
	s.keys = 0;
	s.start = 0;
	s.end = pos + 1;
	if (p->keys) {
		s.keys = p->keys + (u64)i * p->most;
		s.end = (u32)p->count[i];
		return s;
	}
	if (p->window > 0 && pos + 1 > p->window) {
		s.start = pos + 1 - p->window;
	}
	if (p->chunk > 0) {
		u32 from = pos - pos % p->chunk;
		s.start = from > s.start ? from : s.start;
	}
	return s;
}

DEVICE u32 keyOf(const Seen *s, u32 j) { return s->keys ? (u32)s->keys[j] : j; }

// firstFrom is the least number whose key is at least k.
DEVICE u32 firstFrom(const Seen *s, u32 k) {
	if (!s->keys) {
		return k < s->start ? s->start : k > s->end ? s->end : k;
	}
	u32 low = s->start, high = s->end;
	while (low < high) {
		u32 middle = (low + high) / 2;
		if ((u32)s->keys[middle] < k) {
			low = middle + 1;
		} else {
			high = middle;
		}
	}
	return low;
}

// products adds to sum[i], the lanes 8*half, 8*half+1, ... of a thread, the products of
// n floats of a key with those of query i in the tile, which is 0 behind them: there
// the last of the key are read again.
DEVICE void products(float sum[QUERIES][8], float tile[QUERIES][DIMS], const Plane *k, const u32 type, u64 at, u32 n) {
	for (u32 c = 8 * (thread() % 2); c < n; c += 64) {
		float f[4][8]; // all are read before one is used
		UNROLL
		for (u32 m = 0; m < 4; m++) {
			eight(f[m], k, type, at + (c + 16 * m < n ? c + 16 * m : c));
		}
		UNROLL
		for (u32 m = 0; m < 4; m++) {
			UNROLL
			for (u32 i = 0; i < QUERIES; i++) {
				UNROLL
				for (u32 j = 0; j < 8; j++) {
					float product = f[m][j] * tile[i][c + 16 * m + j];
					sum[i][j] = sum[i][j] + product;
				}
			}
		}
	}
}

// dots adds the products of a key's row with query i of at most QUERIES, `apart` floats
// from one to the next. All threads of the block call it; those that are not live have
// no key.
DEVICE void dots(float sum[QUERIES][8], float tile[QUERIES][DIMS], u32 *most, const float *q, u32 queries, u32 apart, const Plane *k, u64 row, int live) {
	u32 t = thread();
	for (u32 d = 0; d < k->width; d += DIMS) {
		u32 n = k->width - d < DIMS ? k->width - d : DIMS;
		u64 at = row * k->width + d;
		barrier();
		for (u32 i = t; i < QUERIES * DIMS; i += 256) {
			float x = 0.0f;
			if (i / DIMS < queries && i % DIMS < n) {
				x = q[(u64)(i / DIMS) * apart + d + i % DIMS];
				look(most, x);
			}
			tile[i / DIMS][i % DIMS] = clean(x);
		}
		barrier();
		if (!live) {
			continue;
		}
		if (k->width % 16 != 0) { // one by one; what is behind the row counts as +0
			for (u32 c = 8 * (t % 2); c < n; c += 16) {
				UNROLL
				for (u32 j = 0; j < 8; j++) {
					float f = c + j < n ? one(k, k->type, at + c + j) : 0.0f;
					UNROLL
					for (u32 i = 0; i < QUERIES; i++) {
						float product = f * tile[i][c + j];
						sum[i][j] = sum[i][j] + product;
					}
				}
			}
		} else if (k->type == KV_F16) {
			products(sum, tile, k, KV_F16, at, n);
		} else {
			products(sum, tile, k, k->type, at, n);
		}
	}
}

// ofPairs gives the trees of the sixteen lanes that two threads have of each query:
// the even thread those of queries 0 and 1, the odd one those of 2 and 3.
DEVICE void ofPairs(float tree[QUERIES / 2], float lane[QUERIES][8], u32 queries) {
	u32 odd = thread() % 2;
	UNROLL
	for (u32 i = 0; i < QUERIES / 2; i++) {
		tree[i] = 0.0f;
		if (i < queries) { // the block agrees
			float l[8];
			UNROLL
			for (u32 j = 0; j < 8; j++) {
				float low = lane[i][j], high = lane[i + QUERIES / 2][j];
				l[j] = (odd ? high : low) + acrossFloat(odd ? low : high, 1);
			}
			tree[i] = ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
		}
	}
}

DEVICE void noLanes(float sum[QUERIES][8]) {
	UNROLL
	for (u32 i = 0; i < QUERIES; i++) {
		UNROLL
		for (u32 j = 0; j < 8; j++) {
			sum[i][j] = 0.0f;
		}
	}
}

// The scores of the keys that queries see: backends/cpu scores.
//
//	score = (clean(q).k, 16 lanes)*factor
//
// A block has KEYS keys, numbers KEYS*(blockX + 2*first) on, and QUERIES query heads
// of one key-value head at one position.
KERNEL(256) attendScores(Attention p) {
	SHARED float tile[QUERIES][DIMS];
	u32 group = p.heads / p.kvHeads, runs = (group + QUERIES - 1) / QUERIES, i = blockZ();
	u32 g = blockY() / runs, in = blockY() % runs * QUERIES;
	u32 queries = group - in < QUERIES ? group - in : QUERIES;
	Seen seen = seenBy(&p, i);
	u32 base = (p.keys ? 0 : 2 * p.first * KEYS) + blockX() * KEYS, j = base + thread() / 2;
	if (base >= seen.end || base + KEYS <= seen.start) {
		return;
	}
	int live = j >= seen.start && j < seen.end;
	u64 query = (u64)i * p.heads + g * group + in;
	float sum[QUERIES][8];
	noLanes(sum);
	u32 most = 0;
	dots(sum, tile, &most, p.q + query * p.k.width, queries, p.k.width, &p.k, (u64)g * p.positions + (live ? keyOf(&seen, j) : 0), live);
	saw(p.fail, most);
	float tree[QUERIES / 2];
	ofPairs(tree, sum, queries);
	UNROLL
	for (u32 n = 0; n < QUERIES / 2; n++) {
		u32 mine = n + thread() % 2 * (QUERIES / 2);
		if (live && mine < queries) {
			p.score[(query + mine) * p.stride + j] = tree[n] * p.factor;
		}
	}
}

// Scores become probabilities: backends/cpu softmax, sumAt.
//
//	largest = the largest score, or the sink; e = exp(score - largest)
//	sum = +0; for each chunk ascending: sum = sum + (its e in 16 lanes by key, and the tree)
//	a sink: sum = sum + exp(sink - largest); score = e*rcp(sum)
//
// A block has one query. Sixteen threads have a chunk.
KERNEL(256) attendSoftmax(Attention p) {
	SHARED float tops[8], sums[16];
	u32 t = thread(), head = blockX(), i = blockY();
	Seen seen = seenBy(&p, i);
	float *score = p.score + ((u64)i * p.heads + head) * p.stride;
	float largest = toFloat(0xff800000u); // -infinity
	for (u32 j = seen.start + t; j < seen.end; j += 256) {
		float s = score[j];
		largest = s > largest ? s : largest;
	}
	UNROLL
	for (u32 m = 1; m < 32; m *= 2) {
		float other = acrossFloat(largest, m);
		largest = other > largest ? other : largest;
	}
	if (t % 32 == 0) {
		tops[t / 32] = largest;
	}
	barrier();
	for (u32 n = 0; n < 8; n++) {
		largest = tops[n] > largest ? tops[n] : largest;
	}
	if (p.sinks) {
		largest = p.sinks[head] > largest ? p.sinks[head] : largest;
	}
	float sum = 0.0f;
	u32 lane = t % 16;
	for (u32 c = p.first; c < p.first + p.chunks; c += 16) {
		u32 mine = c + t / 16;
		float e = 0.0f;
		if (p.keys) {
			u32 end = firstFrom(&seen, (mine + 1) * CHUNK);
			for (u32 j = firstFrom(&seen, mine * CHUNK); j < end; j++) {
				if (keyOf(&seen, j) % 16 == lane) {
					float x = expo(score[j] - largest);
					score[j] = x;
					e = e + x;
				}
			}
		} else {
			float x[CHUNK / 16]; // all are read before one is used
			u32 j = mine * CHUNK + lane;
			UNROLL
			for (u32 n = 0; n < CHUNK / 16; n++) {
				u32 at = j + 16 * n < seen.start ? seen.start : j + 16 * n < seen.end ? j + 16 * n : seen.end - 1;
				x[n] = score[at];
			}
			UNROLL
			for (u32 n = 0; n < CHUNK / 16; n++) {
				if (j + 16 * n >= seen.start && j + 16 * n < seen.end) {
					x[n] = expo(x[n] - largest);
					score[j + 16 * n] = x[n];
					e = e + x[n];
				}
			}
		}
		e = tree16(e);
		if (lane == 0) {
			sums[t / 16] = e;
		}
		barrier();
		for (u32 n = 0; n < 16; n++) { // of chunks that nobody sees +0
			sum = sum + sums[n];
		}
		barrier();
	}
	if (p.sinks) {
		sum = sum + expo(p.sinks[head] - largest);
	}
	float r = rcp(sum);
	for (u32 j = seen.start + t; j < seen.end; j += 256) {
		score[j] = score[j] * r;
	}
}

#define AHEAD 16 // values of a thread that are read before one is used

// weigh adds the values of keys from..end to sum[n], each times its w[n]; w is 0 behind
// the end, where the last value is read again.
DEVICE void weigh(float sum[QUERIES], float w[QUERIES][CHUNK], const Plane *v, const u32 type, const Seen *seen, u64 row, u32 from, u32 end, u32 d) {
	for (u32 j = from; j < end; j += AHEAD) {
		float x[AHEAD];
		UNROLL
		for (u32 m = 0; m < AHEAD; m++) {
			u32 at = j + m < end ? j + m : end - 1;
			x[m] = one(v, type, (row + keyOf(seen, at)) * v->width + d);
		}
		UNROLL
		for (u32 m = 0; m < AHEAD; m++) {
			UNROLL
			for (u32 n = 0; n < QUERIES; n++) {
				float product = w[n][j + m - from] * x[m];
				sum[n] = sum[n] + product;
			}
		}
	}
}

// The values of a chunk: backends/cpu weigh.
//
//	part = +0; part = part + p_k*v_k for the keys of the chunk ascending
//
// A block has chunk first + blockX and QUERIES query heads of one key-value head at
// one position. With one chunk its part is the result: a sum from +0 is never -0.
KERNEL(128) attendWeigh(Attention p) {
	SHARED float w[QUERIES][CHUNK];
	u32 group = p.heads / p.kvHeads, runs = (group + QUERIES - 1) / QUERIES, i = blockZ();
	u32 g = blockY() / runs, in = blockY() % runs * QUERIES;
	u32 queries = group - in < QUERIES ? group - in : QUERIES;
	Seen seen = seenBy(&p, i), all = seen;
	all.keys = 0;
	u32 from = firstFrom(&seen, (p.first + blockX()) * CHUNK), end = firstFrom(&seen, (p.first + blockX() + 1) * CHUNK);
	u64 query = (u64)i * p.heads + g * group + in, row = (u64)g * p.positions;
	for (u32 j = thread(); j < QUERIES * CHUNK; j += 128) {
		u32 n = j / CHUNK, key = from + j % CHUNK;
		w[n][j % CHUNK] = n < queries && key < end ? p.score[(query + n) * p.stride + key] : 0.0f;
	}
	barrier();
	for (u32 d = thread(); d < p.dim; d += 128) {
		float sum[QUERIES];
		UNROLL
		for (u32 n = 0; n < QUERIES; n++) {
			sum[n] = 0.0f;
		}
		if (p.keys) {
			weigh(sum, w, &p.v, p.v.type, &seen, row, from, end, d);
		} else if (p.v.type == KV_F16) {
			weigh(sum, w, &p.v, KV_F16, &all, row, from, end, d);
		} else if (p.v.type == KV_Q8) {
			weigh(sum, w, &p.v, KV_Q8, &all, row, from, end, d);
		} else {
			weigh(sum, w, &p.v, KV_F32, &all, row, from, end, d);
		}
		UNROLL
		for (u32 n = 0; n < QUERIES; n++) {
			if (n < queries) {
				if (p.chunks == 1) {
					p.y[(query + n) * p.dim + d] = sum[n];
				} else {
					p.part[((query + n) * p.chunks + blockX()) * p.dim + d] = sum[n];
				}
			}
		}
	}
}

// The parts of the chunks are added: y = +0; y = y + part for the chunks ascending.
KERNEL(256) attendSum(Attention p) {
	u32 i = blockX() * 256 + thread();
	if (i >= p.n * p.heads * p.dim) {
		return;
	}
	const float *part = p.part + (u64)(i / p.dim) * p.chunks * p.dim + i % p.dim;
	float y = 0.0f;
	for (u32 c = 0; c < p.chunks; c++) {
		y = y + part[(u64)c * p.dim];
	}
	p.y[i] = y;
}

typedef struct {
	const float *q; // [n, heads, k.width]
	const float *w; // [n, heads]
	float *score;   // [n, stride]
	i32 *keys;      // out: [n, most]
	i32 *count;     // out: [n]
	Plane k;
	Failure fail;
	u32 n, pos, heads, most, stride, pad;
} Index;

// The scores by which keys are chosen: backends/cpu indexStep.scores.
//
//	score_k = +0; for each head h ascending: score_k = score_k + clean(w_h)*r(q_h.k)    16 lanes, q cleaned
//	r(x) = x if x >= 2^-50, else +0
//
// A block has KEYS keys at one position.
KERNEL(256) indexScores(Index p) {
	SHARED float tile[QUERIES][DIMS];
	u32 i = blockY(), k = blockX() * KEYS + thread() / 2, all = p.pos + i + 1;
	if (blockX() * KEYS >= all) {
		return;
	}
	int live = k < all;
	u32 most = 0;
	float score = 0.0f;
	for (u32 h = 0; h < p.heads; h += QUERIES) {
		float sum[QUERIES][8];
		noLanes(sum);
		u32 queries = p.heads - h < QUERIES ? p.heads - h : QUERIES;
		dots(sum, tile, &most, p.q + ((u64)i * p.heads + h) * p.k.width, queries, p.k.width, &p.k, live ? k : 0, live);
		float tree[QUERIES / 2];
		ofPairs(tree, sum, queries);
		UNROLL
		for (u32 n = 0; n < QUERIES; n++) { // both threads add all of them
			float other = acrossFloat(tree[n % (QUERIES / 2)], 1);
			float d = n / (QUERIES / 2) == thread() % 2 ? tree[n % (QUERIES / 2)] : other;
			if (n < queries && d >= toFloat(TINY)) {
				float product = clean(p.w[(u64)i * p.heads + h + n]) * d;
				score = score + product;
			}
		}
	}
	if (live) {
		look(&most, score);
		if (thread() % 2 == 0) {
			p.score[(u64)i * p.stride + k] = score;
		}
	}
	saw(p.fail, most);
}

// rank is the order of floats as integers; -0 does not come up.
DEVICE u32 rank(float f) { return bits(f) ^ ((u32)((i32)bits(f) >> 31) | SIGN); }

// sumOf adds an integer of each of 256 threads, and gives what those before have.
DEVICE u32 sumOf(u32 v, u32 sums[256], u32 *before) {
	u32 t = thread(), low = 0, all = 0;
	sums[t] = v;
	barrier();
	for (u32 i = 0; i < 256; i++) {
		u32 s = sums[i];
		low += i < t ? s : 0;
		all += s;
	}
	barrier();
	*before = low;
	return all;
}

// The keys with the `most` largest scores, ascending; of equal ones at the end the
// lower: backends/cpu largestAt. A block has one position; a thread has a run of keys.
KERNEL(256) choose(Index p) {
	SHARED u32 sums[256];
	u32 i = blockX(), t = thread(), all = p.pos + i + 1, before;
	i32 *keys = p.keys + (u64)i * p.most;
	if (t == 0) {
		p.count[i] = (i32)(all < p.most ? all : p.most);
	}
	if (all <= p.most) {
		for (u32 k = t; k < all; k += 256) {
			keys[k] = (i32)k;
		}
		return;
	}
	const float *score = p.score + (u64)i * p.stride;
	// The least score that is chosen, bit by bit of its rank.
	u32 least = 0;
	for (u32 bit = SIGN; bit > 0; bit /= 2) {
		u32 n = 0;
		for (u32 k = t; k < all; k += 256) {
			n += rank(score[k]) >= (least | bit);
		}
		if (sumOf(n, sums, &before) >= p.most) {
			least |= bit;
		}
	}
	u32 run = (all + 255) / 256, from = t * run < all ? t * run : all, end = from + run < all ? from + run : all;
	u32 above = 0, equal = 0, equals;
	for (u32 k = from; k < end; k++) {
		u32 r = rank(score[k]);
		above += r > least;
		equal += r == least;
	}
	u32 left = p.most - sumOf(above, sums, &before); // of the equal ones that are chosen
	sumOf(equal, sums, &equals);
	u32 at = before + (equals < left ? equals : left);
	for (u32 k = from; k < end; k++) {
		u32 r = rank(score[k]);
		if (r < least || (r == least && equals++ >= left)) {
			continue;
		}
		keys[at++] = (i32)k;
	}
}

typedef struct {
	float *x;             // [n, dim]
	const float *out;     // [n*k, dim]
	const float *weights; // [n, k]
	const float *shared;  // [n, dim]; 0: none
	u32 n, k, dim, pad;
} Combine;

// Experts' outputs are added in the router's order: backends/cpu combine.
//
//	y = +0; y = y + w[j]*out[j] for j ascending; y = y + shared; x = x + y
KERNEL(256) combine(Combine p) {
	u32 i = blockX() * 256 + thread();
	if (i >= p.n * p.dim) {
		return;
	}
	u32 row = i / p.dim, c = i % p.dim;
	float y = 0.0f;
	for (u32 j = 0; j < p.k; j++) {
		float product = p.weights[row * p.k + j] * p.out[(u64)(row * p.k + j) * p.dim + c];
		y = y + product;
	}
	if (p.shared) {
		y = y + p.shared[i];
	}
	p.x[i] = p.x[i] + y;
}

typedef struct {
	float *y;
	const float *x;
	const float *f; // [n]
	Failure fail;
	u32 n, dim;
	float by; // where there is no f
	u32 how;
} Each;

// How floats become others, one by one; y may be x.
#define EACH_ADD 0     // y = y + x
#define EACH_SCALE 1   // y = x*f, with an f for each row of dim floats, or by
#define EACH_SIGMOID 2 // y = y*sigmoid(x), with an x for each run of dim floats
#define EACH_SILU 3    // y = SiLU(clean(x))*y
#define EACH_ZERO 4    // y = +0

// backends/cpu add, scaleBy, sigmoidGate, and the gate of a delta net's outputs.
KERNEL(256) each(Each p) {
	u32 i = blockX() * 256 + thread();
	if (i >= p.n) {
		return;
	}
	if (p.how == EACH_ADD) {
		p.y[i] = p.y[i] + p.x[i];
	} else if (p.how == EACH_SCALE) {
		p.y[i] = p.x[i] * (p.f ? p.f[i / p.dim] : p.by);
	} else if (p.how == EACH_SIGMOID) {
		p.y[i] = p.y[i] * sigmoid(p.x[i / p.dim]);
	} else if (p.how == EACH_SILU) {
		saw(p.fail, bits(p.x[i]) & ~SIGN);
		p.y[i] = silu(clean(p.x[i])) * p.y[i];
	} else {
		p.y[i] = 0.0f;
	}
}

typedef struct {
	float *to;
	const float *from;
	const i32 *toRows, *fromRows; // [n] numbers of rows; 0: 0, 1, ...
	u32 n, groups, run;
	u32 toRow, toGroup, fromRow, fromGroup; // floats from one to the next
	u32 pad;
} Runs;

// Runs of rows are copied: for i < n, g < groups, c < run
//
//	to[toRows[i]*toRow + g*toGroup + c] = from[fromRows[i]*fromRow + g*fromGroup + c]
KERNEL(256) runs(Runs p) {
	u32 at = blockX() * 256 + thread();
	if (at >= p.n * p.groups * p.run) {
		return;
	}
	u32 c = at % p.run, g = at / p.run % p.groups, i = at / p.run / p.groups;
	u64 to = p.toRows ? (u64)(u32)p.toRows[i] : i, from = p.fromRows ? (u64)(u32)p.fromRows[i] : i;
	p.to[to * p.toRow + g * p.toGroup + c] = p.from[from * p.fromRow + g * p.fromGroup + c];
}

typedef struct {
	const float *qkv;          // [n, channels]
	const float *a, *b;        // [n, valueHeads]
	const float *past;         // [taps-1, channels], oldest first
	const float *conv;         // [taps, channels]
	const float *rate, *bias;  // [valueHeads]
	float *out;                // [n, channels] queries, keys, values
	float *decay, *beta;       // [n, valueHeads]
	float *next;               // [taps-1, channels] what past is for the next step
	const float *from;         // [valueHeads, valueDim, keyDim]
	float *to;                 // the same after the step
	float *y;                  // [n, valueHeads, valueDim]; 0: none is wanted
	Failure fail;
	u32 n, keyHeads, valueHeads, keyDim, valueDim, taps;
	u32 tiled;
	float unit; // 1/sqrt(keyDim)
} Delta;

#define WIDEST 1024 // head of a delta net

// before is the cleaned input of the convolution at a position, which may lie before
// the step.
DEVICE float before(const Delta *p, i32 pos, u32 c, u32 channels) {
	if (pos >= 0) {
		return clean(p->qkv[(u64)(u32)pos * channels + c]);
	}
	return p->past[(u64)(u32)(pos + (i32)p->taps - 1) * channels + c];
}

// Queries, keys and values of a delta net, decays and write strengths: backends/cpu
// deltaInputs.
//
//	u = +0; u = u + w_tap*clean(qkv) for the taps ascending; u = clean(SiLU(u))
//	queries and keys: r = rsqrt((sum of u^2, 16 lanes) + 1e-6); u = (u*r)*unit, +0 below 2^-24
//	decay = exp(rate*softplus(a + bias)), +0 below 2^-24; beta = sigmoid(b)
//
// A block has one head at one position.
KERNEL(128) deltaInputs(Delta p) {
	SHARED float u[WIDEST];
	SHARED float total;
	u32 t = thread(), head = blockX(), pos = blockY(), most = 0;
	u32 channels = 2 * p.keyHeads * p.keyDim + p.valueHeads * p.valueDim;
	int value = head >= 2 * p.keyHeads;
	u32 width = value ? p.valueDim : p.keyDim;
	u32 first = value ? 2 * p.keyHeads * p.keyDim + (head - 2 * p.keyHeads) * p.valueDim : head * p.keyDim;
	for (u32 c = t; c < width; c += 128) {
		look(&most, p.qkv[(u64)pos * channels + first + c]);
		float sum = 0.0f;
		for (u32 tap = 0; tap < p.taps; tap++) {
			float product = p.conv[tap * channels + first + c] * before(&p, (i32)pos + 1 - (i32)p.taps + (i32)tap, first + c, channels);
			sum = sum + product;
		}
		float x = silu(sum);
		look(&most, x);
		u[c] = clean(x);
		// What the next step finds before it.
		if (pos + p.taps > p.n) {
			p.next[(u64)(pos + p.taps - 1 - p.n) * channels + first + c] = before(&p, (i32)pos, first + c, channels);
		}
		for (u32 r = 0; pos == 0 && r + p.n + 1 < p.taps; r++) {
			p.next[(u64)r * channels + first + c] = p.past[(u64)(r + p.n) * channels + first + c];
		}
	}
	barrier();
	float lane = 0.0f;
	if (!value && t < 16) {
		for (u32 c = t; c < width; c += 16) {
			float square = u[c] * u[c];
			lane = lane + square;
		}
	}
	lane = tree16(lane);
	if (t == 0) {
		total = lane;
	}
	barrier();
	float r = inverseRoot(total * 1.0f + toFloat(0x358637bdu)), unit = head < p.keyHeads ? p.unit : 1.0f; // 1e-6
	for (u32 c = t; c < width; c += 128) {
		float x = u[c];
		if (!value) {
			x = (x * r) * unit;
			look(&most, x);
			x = (bits(x) & ~SIGN) < KVTINY ? 0.0f : x;
		}
		p.out[(u64)pos * channels + first + c] = x;
	}
	if (value && t == 0) {
		u32 h = head - 2 * p.keyHeads;
		float a = p.a[pos * p.valueHeads + h], b = p.b[pos * p.valueHeads + h];
		look(&most, a);
		look(&most, b);
		float d = expo(p.rate[h] * softplus(a + p.bias[h]));
		p.decay[pos * p.valueHeads + h] = bits(d) < KVTINY ? 0.0f : d;
		p.beta[pos * p.valueHeads + h] = sigmoid(b);
	}
	saw(p.fail, most);
}

#define DELTA_LANE 16 // floats of a row that a thread has: keys of at most 256

// The matrix of a head goes through all positions: backends/cpu deltaRecurrence.
//
//	S_ji = S_ji*decay; d = clean((v_j - (S_j.k, 16 lanes))*beta)
//	S_ji = clean(S_ji + d*k_i); y_j = S_j.q, 16 lanes
//
// Sixteen threads, a lane each, keep one row of the matrix.
KERNEL(256) deltaSteps(Delta p) {
	u32 t = thread(), lane = t % 16, row = blockX() * 16 + t / 16; // valueDim is a multiple of 16
	u32 channels = 2 * p.keyHeads * p.keyDim + p.valueHeads * p.valueDim;
	u32 h = row / p.valueDim, key = p.tiled ? h % p.keyHeads : h / (p.valueHeads / p.keyHeads);
	float s[DELTA_LANE];
	UNROLL
	for (u32 m = 0; m < DELTA_LANE; m++) {
		s[m] = 16 * m < p.keyDim ? p.from[(u64)row * p.keyDim + 16 * m + lane] : 0.0f;
	}
	for (u32 pos = 0; pos < p.n; pos++) {
		const float *x = p.out + (u64)pos * channels;
		const float *q = x + key * p.keyDim + lane, *k = x + (p.keyHeads + key) * p.keyDim + lane;
		float decay = p.decay[pos * p.valueHeads + h], beta = p.beta[pos * p.valueHeads + h], sum = 0.0f;
		UNROLL
		for (u32 m = 0; m < DELTA_LANE; m++) {
			if (16 * m < p.keyDim) {
				s[m] = s[m] * decay;
				float product = s[m] * k[16 * m];
				sum = sum + product;
			}
		}
		float d = clean((x[2 * p.keyHeads * p.keyDim + row] - tree16(sum)) * beta);
		sum = 0.0f;
		UNROLL
		for (u32 m = 0; m < DELTA_LANE; m++) {
			if (16 * m < p.keyDim) {
				float product = d * k[16 * m];
				s[m] = clean(s[m] + product);
				product = s[m] * q[16 * m];
				sum = sum + product;
			}
		}
		sum = tree16(sum);
		if (p.y && lane == 0) {
			p.y[(u64)pos * p.valueHeads * p.valueDim + row] = sum;
		}
	}
	UNROLL
	for (u32 m = 0; m < DELTA_LANE; m++) {
		if (16 * m < p.keyDim) {
			p.to[(u64)row * p.keyDim + 16 * m + lane] = s[m];
		}
	}
}

#endif
