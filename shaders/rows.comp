#version 460
// Rows of quantized matrices times vectors: backends/cpu quantRow.
//
//	lane[b mod 8] += term(b), b ascending; ((l0+l4)+(l2+l6)) + ((l1+l5)+(l3+l7)); + bias
//
// A workgroup makes ROWS rows of one job for up to 8 of its positions, in segments
// of 2048 columns, which is a whole number of turns through the lanes. It brings
// a segment of its rows into shared memory by loads of 16 bytes side by side, and
// that of each position's activations. An invocation is a lane of a row: it makes
// the terms of its blocks and adds them in their order, so nothing passes between
// invocations before the end.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

const uint ROWS = 8;
const uint UNITS = 64; // of 32 weights, in a segment
const uint POSITIONS = 8;
layout(local_size_x = 64) in; // ROWS * 8 lanes, and ROWS * POSITIONS

layout(constant_id = 0) const uint TYPE = 2; // of package quant

const uint Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ4_NL = 20, MXFP4 = 39;
const uint INT4_32 = 1001, INT4_128 = 1002, INT4F_32 = 1003, INT4F_64 = 1004, INT4F_128 = 1005, INT8F_32 = 1006, INT8F_128 = 1007;
const bool K = TYPE == Q4_K || TYPE == Q5_K || TYPE == Q6_K; // blocks of 256, with sub-scales
const bool MINS = TYPE == Q4_K || TYPE == Q5_K;
const bool INT4 = TYPE >= INT4_32 && TYPE <= INT4F_128, INT8 = TYPE == INT8F_32 || TYPE == INT8F_128;

// Bytes of a block, and its units.
const uint BYTES = TYPE == Q4_0 || TYPE == IQ4_NL || TYPE == INT4_32 ? 18 : TYPE == Q4_1 || TYPE == INT4F_32 ? 20 : TYPE == Q5_0 ? 22 : TYPE == Q5_1 ? 24 :
	TYPE == Q8_0 ? 34 : TYPE == MXFP4 ? 17 : TYPE == Q4_K ? 144 : TYPE == Q5_K ? 176 : TYPE == Q6_K ? 210 :
	TYPE == INT4_128 ? 66 : TYPE == INT4F_64 || TYPE == INT8F_32 ? 36 : TYPE == INT4F_128 ? 68 : 132;
const uint PER = K ? 8 : TYPE == INT4_128 || TYPE == INT4F_128 || TYPE == INT8F_128 ? 4 : TYPE == INT4F_64 ? 2 : 1;
const uint SEGMENT = UNITS / PER * BYTES; // of a row; a multiple of 16
const uint STRIDE = SEGMENT / 16 + 1; // of rows in shared memory, where they may begin anywhere in 16 bytes

const uint LOADS = (ROWS * STRIDE + ROWS * 8 - 1) / (ROWS * 8); // of an invocation

layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer Params {
	uvec4 groups; // rows/ROWS, jobs, positions/8
	uint64_t jobs;
	uint64_t index; // uint32: input and output rows of the jobs' positions; 0: by Job.step
	uint64_t code;  // int8 [n, cols]
	uint64_t scale; // floats [n, cols/32 or cols/256]
	uint64_t sum;   // int32 [n, cols/16]
	uint rows, cols, rowBytes;
};
struct Job {
	uint64_t w;    // bytes of the matrix
	uint64_t y;    // floats
	uint64_t bias; // floats [rows], 0: none
	uint first;    // of its positions in index: first, first+2, ...: input row, output row
	uint n;        // positions
	uint stride;   // floats from one output row to the next
	uint step;     // without an index: from an input row to the next, the first being `first`; output rows are 0, 1, ...
};
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer Jobs { Job v[]; };
layout(push_constant) uniform Push { uint64_t params; };

uint inputRow(Params p, Job job, uint i) { return p.index == 0 ? job.first + i * job.step : Words(p.index).v[job.first + 2 * i]; }
uint outputRow(Params p, Job job, uint i) { return p.index == 0 ? i : Words(p.index).v[job.first + 2 * i + 1]; }

shared uvec4 W[ROWS * STRIDE];   // bytes of the rows
shared uvec4 X[8 * 17];          // codes: 256 and 16 bytes between, so that lanes meet no bank twice
shared float D[UNITS];           // scales of the activations
shared int sums[2 * UNITS];      // of the codes, by 16
shared float lanes[POSITIONS][ROWS * 8];

#ifdef DOT
// OpSDotKHR on four packed signed bytes each.
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4450)
int sdot4x8(int a, int b, spirv_literal int format);
int dot4(uint a, uint b) {
	return sdot4x8(int(a), int(b), 0);
}
#else
int dot4(uint a, uint b) {
	int x = int(a), y = int(b);
	return bitfieldExtract(x, 0, 8) * bitfieldExtract(y, 0, 8) + bitfieldExtract(x, 8, 8) * bitfieldExtract(y, 8, 8) +
		bitfieldExtract(x, 16, 8) * bitfieldExtract(y, 16, 8) + (x >> 24) * (y >> 24);
}
#endif
int dot16(uvec4 a, uvec4 b) {
	return dot4(a.x, b.x) + dot4(a.y, b.y) + dot4(a.z, b.z) + dot4(a.w, b.w);
}

// Bytes of W.
uint wordAt(uint at) { return W[at >> 4][(at >> 2) & 3]; } // at a multiple of 4
uint byteAt(uint at) { return (wordAt(at) >> (8 * (at & 3))) & 0xffu; }
uint halfAt(uint at) { // at an even address
	return (wordAt(at) >> (8 * (at & 2))) & 0xffffu;
}
// Four words at any address.
uvec4 quadAt(uint at) {
	uint shift = 8 * (at & 3), a = at & ~3u;
	uvec4 r = uvec4(wordAt(a), wordAt(a + 4), wordAt(a + 8), wordAt(a + 12));
	if (shift != 0) {
		uvec4 next = uvec4(r.yzw, wordAt(a + 16));
		r = (r >> shift) | (next << (32 - shift));
	}
	return r;
}
uint fourAt(uint at) {
	uint shift = 8 * (at & 3), a = at & ~3u;
	return shift == 0 ? wordAt(a) : (wordAt(a) >> shift) | (wordAt(a + 4) << (32 - shift));
}

// spread puts bit i of the low four into bit 4 of byte i.
uint spread(uint bits) { return ((bits * 0x00204081u) & 0x01010101u) << 4; }

// mapped turns four nibbles, one in the low half of each byte, into the bytes of a
// table of 16.
uint mapped(uint nibbles, uint t0, uint t1, uint t2, uint t3) {
	uint r = 0;
	[[unroll]] for (uint i = 0; i < 32; i += 8) {
		uint n = (nibbles >> i) & 15u;
		uint t = (n & 8u) == 0 ? ((n & 4u) == 0 ? t0 : t1) : ((n & 4u) == 0 ? t2 : t3);
		r |= ((t >> (8 * (n & 3u))) & 0xffu) << i;
	}
	return r;
}
// The doubled values 0 1 2 3 4 6 8 12 of E2M1 and their negatives, of four nibbles,
// each in the low half of a byte: m, and above 3 m + x + (2 if x is 3), x = m-4.
uvec4 mappedFP4(uvec4 q) {
	const uvec4 one = uvec4(0x01010101u), seven = uvec4(0x07070707u);
	uvec4 m = q & seven;
	uvec4 x = q & (((q >> 2) & one) * 3);
	uvec4 v = m + x + ((x & (x >> 1) & one) << 1);
	uvec4 s = ((q & (m + seven)) >> 3) & one; // of what is not zero
	return (v ^ (s * 255)) + s;
}
// The values of IQ4_NL.
uvec4 mappedNL(uvec4 q) {
	return uvec4(mapped(q.x, 0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u), mapped(q.y, 0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u),
		mapped(q.z, 0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u), mapped(q.w, 0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u));
}

// tiny is +0 for a scale below what the arithmetic knows, 2^-45.
float tiny(uint bits) { return (bits & ~SIGN) < 0x29000000u ? 0.0 : uintBitsToFloat(bits); }

// small is the term of unit u of a segment, of formats with units of 32. at is
// where its row begins in W.
float small(uint at, uint u) {
	uvec4 xa = X[(u / 8) * 17 + 2 * (u % 8)], xb = X[(u / 8) * 17 + 2 * (u % 8) + 1];
	at += u / PER * BYTES;
	const uvec4 low = uvec4(0x0f0f0f0fu);
	uvec4 a, b;
	int off = 0;
	float w, least = 0.0;
	if (TYPE == Q4_0 || TYPE == Q4_1 || TYPE == IQ4_NL) {
		w = fromF16(halfAt(at));
		uvec4 q = quadAt(at + (TYPE == Q4_1 ? 4 : 2));
		a = q & low;
		b = (q >> 4) & low;
		if (TYPE == Q4_1) {
			least = fromF16(halfAt(at + 2));
		} else if (TYPE == Q4_0) {
			off = 8;
		} else {
			a = mappedNL(a);
			b = mappedNL(b);
		}
	} else if (TYPE == Q5_0 || TYPE == Q5_1) {
		uint head = TYPE == Q5_0 ? 2 : 4;
		w = fromF16(halfAt(at));
		if (TYPE == Q5_1) {
			least = fromF16(halfAt(at + 2));
		} else {
			off = 16;
		}
		uint high = fourAt(at + head);
		uvec4 q = quadAt(at + head + 4);
		[[unroll]] for (uint i = 0; i < 4; i++) {
			a[i] = (q[i] & 0x0f0f0f0fu) | spread((high >> (4 * i)) & 15u);
			b[i] = ((q[i] >> 4) & 0x0f0f0f0fu) | spread((high >> (4 * i + 16)) & 15u);
		}
	} else if (TYPE == Q8_0) {
		w = fromF16(halfAt(at));
		a = quadAt(at + 2);
		b = quadAt(at + 18);
	} else if (TYPE == MXFP4) {
		uint e = byteAt(at);
		w = e < 83 ? 0.0 : uintBitsToFloat((e - 1) << 23);
		uvec4 q = quadAt(at + 1);
		a = mappedFP4(q & low);
		b = mappedFP4((q >> 4) & low);
	} else if (INT4) {
		uint head = TYPE == INT4_32 || TYPE == INT4_128 ? 2 : 4;
		w = tiny(head == 2 ? halfAt(at) << 16 : wordAt(at));
		uvec4 q = quadAt(at + head + u % PER * 16);
		a = q & low;
		b = (q >> 4) & low;
		off = 8;
	} else { // INT8
		w = tiny(wordAt(at));
		a = quadAt(at + 4 + u % PER * 32);
		b = quadAt(at + 20 + u % PER * 32);
	}
	int s = dot16(a, xa) + dot16(b, xb), x = 0;
	if (off != 0 || TYPE == Q4_1 || TYPE == Q5_1) {
		x = sums[2 * u] + sums[2 * u + 1];
		s -= off * x;
	}
	precise float term = float(s) * w;
	if (TYPE == Q4_1 || TYPE == Q5_1) {
		precise float plus = float(x) * least;
		term = term + plus;
	}
	term = term * D[u];
	return term;
}

// large is the term of block l of a segment, of formats with blocks of 256.
float large(uint at, uint l) {
	at += l * BYTES;
	int s = 0, m = 0;
	if (TYPE == Q6_K) {
		for (uint half_ = 0; half_ < 2; half_++) {
			for (uint j = 0; j < 4; j++) {
				uint u = 4 * half_ + j;
				uint both = halfAt(at + 192 + 2 * u);
				[[unroll]] for (uint i = 0; i < 2; i++) {
					uvec4 q = quadAt(at + 64 * half_ + 32 * (j & 1) + 16 * i), high = quadAt(at + 128 + 32 * half_ + 16 * i);
					uvec4 c = ((q >> (4 * (j >> 1))) & uvec4(0x0f0f0f0fu)) | (((high >> (2 * j)) & uvec4(0x03030303u)) << 4);
					int d = dot16(c, X[l * 17 + 2 * u + i]) - 32 * sums[16 * l + 2 * u + i];
					s += bitfieldExtract(int(both), int(8 * i), 8) * d;
				}
			}
		}
	} else {
		// Scales and mins of 6 bits, two runs of four bytes each.
		uvec4 head = W[at >> 4];
		uint lowS = head.y & 0x3f3f3f3fu, lowM = head.z & 0x3f3f3f3fu;
		uint highS = (head.w & 0x0f0f0f0fu) | ((head.y >> 2) & 0x30303030u), highM = ((head.w >> 4) & 0x0f0f0f0fu) | ((head.z >> 2) & 0x30303030u);
		uvec4 h0, h1;
		if (TYPE == Q5_K) {
			h0 = W[(at >> 4) + 1];
			h1 = W[(at >> 4) + 2];
		}
		const uint codes = TYPE == Q4_K ? 1 : 3;
		[[unroll]] for (uint j = 0; j < 4; j++) {
			uvec4 q0 = W[(at >> 4) + codes + 2 * j], q1 = W[(at >> 4) + codes + 2 * j + 1];
			[[unroll]] for (uint i = 0; i < 2; i++) {
				uint u = 2 * j + i;
				uvec4 a = (q0 >> (4 * i)) & uvec4(0x0f0f0f0fu), b = (q1 >> (4 * i)) & uvec4(0x0f0f0f0fu);
				if (TYPE == Q5_K) {
					a |= ((h0 >> u) & uvec4(0x01010101u)) << 4;
					b |= ((h1 >> u) & uvec4(0x01010101u)) << 4;
				}
				int d = dot16(a, X[l * 17 + 2 * u]) + dot16(b, X[l * 17 + 2 * u + 1]);
				uint by = 8 * (u & 3);
				s += int(((u < 4 ? lowS : highS) >> by) & 63u) * d;
				m += int(((u < 4 ? lowM : highM) >> by) & 63u) * (sums[16 * l + 2 * u] + sums[16 * l + 2 * u + 1]);
			}
		}
	}
	precise float term = float(s) * fromF16(halfAt(at + (TYPE == Q6_K ? 208 : 0)));
	if (MINS) {
		precise float minus = float(m) * fromF16(halfAt(at + 2));
		term = term - minus;
	}
	term = term * D[l];
	return term;
}

void main() {
	Params p = Params(params);
	Job job = Jobs(p.jobs).v[gl_WorkGroupID.y];
	uint first = gl_WorkGroupID.z * POSITIONS;
	if (first >= job.n) {
		return;
	}
	uint n = min(POSITIONS, job.n - first);
	uint t = gl_LocalInvocationIndex, r = t / 8, l = t % 8;
	uint units = p.cols / 32, scales = K ? units / 8 : units;
	uint row0 = gl_WorkGroupID.x * ROWS;
	uint live = min(ROWS, p.rows - row0); // rows
	uint64_t begin = job.w + uint64_t(row0) * p.rowBytes;
	uint offset = r * 16 * STRIDE + (uint(begin + r * p.rowBytes) & 15); // of this lane's row in W; segments are multiples of 16
	uint row1 = inputRow(p, job, first);
	for (uint i = 0; i < n; i++) {
		lanes[i][t] = 0.0;
	}
	for (uint base = 0; base < units; base += UNITS) {
		uint here = min(UNITS, units - base);
		uint bytes = here / PER * BYTES;
		// All loads go out before the first is waited for.
		uvec4 w[LOADS], x[2];
		int q[2];
		float d;
		[[unroll]] for (uint i = 0; i < LOADS; i++) {
			uint at = i * ROWS * 8 + t, row = at / STRIDE;
			at -= row * STRIDE;
			uint64_t from = begin + row * p.rowBytes + base / PER * BYTES;
			if (row < live && 16 * at < (uint(from) & 15) + bytes) {
				w[i] = Quads(from & ~uint64_t(15)).v[at];
			}
		}
		for (uint i = 0; i < n; i++) {
			uint row = i == 0 ? row1 : inputRow(p, job, first + i);
			Quads codes = Quads(p.code + uint64_t(row) * p.cols + 32 * base);
			Words s = Words(p.sum + (uint64_t(row) * (p.cols / 16) + 2 * base) * 4);
			[[unroll]] for (uint j = 0; j < 2; j++) {
				if (j * ROWS * 8 + t < 2 * here) {
					x[j] = codes.v[j * ROWS * 8 + t];
					q[j] = int(s.v[j * ROWS * 8 + t]);
				}
			}
			if (t < (K ? here / 8 : here)) {
				d = Floats(p.scale + (uint64_t(row) * scales + (K ? base / 8 : base)) * 4).v[t];
			}
			barrier(); // nobody needs what was there
			if (i == 0) {
				[[unroll]] for (uint j = 0; j < LOADS; j++) {
					if (j * ROWS * 8 + t < ROWS * STRIDE) {
						W[j * ROWS * 8 + t] = w[j];
					}
				}
			}
			[[unroll]] for (uint j = 0; j < 2; j++) {
				uint at = j * ROWS * 8 + t;
				X[at / 16 * 17 + at % 16] = x[j];
				sums[at] = q[j];
			}
			D[t] = d;
			barrier();
			if (r < live) {
				precise float lane = lanes[i][t];
				if (K) {
					if (8 * l < here) {
						lane = lane + large(offset, l);
					}
				} else {
					for (uint u = l; u < here; u += 8) {
						lane = lane + small(offset, u);
					}
				}
				lanes[i][t] = lane;
			}
		}
	}
	barrier();
	uint i = t / ROWS;
	r = t % ROWS;
	if (i < n && r < live) {
		uint b = 8 * r;
		precise float even = (lanes[i][b] + lanes[i][b + 4]) + (lanes[i][b + 2] + lanes[i][b + 6]);
		precise float odd = (lanes[i][b + 1] + lanes[i][b + 5]) + (lanes[i][b + 3] + lanes[i][b + 7]);
		precise float y = even + odd;
		if (job.bias != 0) {
			y = y + Floats(job.bias).v[row0 + r];
		}
		uint to = outputRow(p, job, first + i);
		put(job.y + (uint64_t(to) * job.stride + row0 + r) * 4, floatBitsToUint(y));
	}
}
