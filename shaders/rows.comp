#version 460
// Rows of quantized matrices times vectors: backends/cpu quantRow.
//
//	lane[b mod 8] += term(b), b ascending; ((l0+l4)+(l2+l6)) + ((l1+l5)+(l3+l7)); + bias
//
// A workgroup makes ROWS rows of one job for up to 8 of its positions. An
// invocation takes a unit of 32 weights of one row, decodes it once, and leaves
// its exact integer sums for each position; those of a block become its term, and
// one invocation for each lane adds the terms in their order. Units come in
// segments of 64 a row, a whole number of turns through the lanes.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

const uint ROWS = 4;
const uint UNITS = 64;
const uint POSITIONS = 8;
layout(local_size_x = 256) in; // ROWS * UNITS, and POSITIONS * ROWS * 8

layout(constant_id = 0) const uint TYPE = 2; // of GGML

const uint Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, MXFP4 = 39;
const bool K = TYPE == Q4_K || TYPE == Q5_K || TYPE == Q6_K; // blocks of 256, with sub-scales
const bool MINS = TYPE == Q4_K || TYPE == Q5_K;

layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer Params {
	uvec4 groups; // rows/ROWS, jobs, positions/8
	uint64_t jobs;
	uint64_t index; // uint32: input and output rows of the jobs' positions
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
	uint pad;
};
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer Jobs { Job v[]; };
layout(push_constant) uniform Push { uint64_t params; };

shared int S[POSITIONS][ROWS][UNITS]; // exact sums; of formats of 32 the bits of terms
shared int M[MINS ? POSITIONS : 1][ROWS][UNITS];
shared float lanes[POSITIONS][ROWS][8];

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

// Bytes at any address, by aligned words. What lies behind a matrix is padding
// that may be read.
uint byteAt(uint64_t at) {
	return (Words(at & ~uint64_t(3)).v[0] >> (8 * (uint(at) & 3))) & 0xffu;
}
uint halfAt(uint64_t at) { // at an even address
	return (Words(at & ~uint64_t(3)).v[0] >> (8 * (uint(at) & 2))) & 0xffffu;
}
void wordsAt(out uint w[8], uint64_t at, uint n) {
	Words p = Words(at & ~uint64_t(3));
	uint shift = 8 * (uint(at) & 3);
	uint low = p.v[0];
	[[unroll]] for (uint i = 0; i < 8; i++) {
		if (i < n) {
			uint high = shift == 0 && i + 1 == n ? 0 : p.v[i + 1];
			w[i] = shift == 0 ? low : (low >> shift) | (high << (32 - shift));
			low = high;
		}
	}
}

// spread puts bit i of the low four into bit 4 of byte i.
uint spread(uint bits) {
	return ((bits * 0x00204081u) & 0x01010101u) << 4;
}

// fp4 turns eight nibbles' worth of one half of a word into the doubled values of E2M1.
uint fp4(uint nibbles) { // one in the low half of each byte
	const uint lo = 0x03020100u, hi = 0x0c080604u;
	uint r = 0;
	[[unroll]] for (uint i = 0; i < 4; i++) {
		uint n = (nibbles >> (8 * i)) & 15u;
		int v = int(((n & 4u) == 0 ? lo : hi) >> (8 * (n & 3u)) & 0xffu);
		r |= (uint((n & 8u) == 0 ? v : -v) & 0xffu) << (8 * i);
	}
	return r;
}

// sixes gives the 6-bit scale and min of group j of 8.
uvec2 sixes(uint64_t at, uint j) {
	if (j < 4) {
		return uvec2(byteAt(at + j) & 63u, byteAt(at + j + 4) & 63u);
	}
	uint both = byteAt(at + j + 4);
	return uvec2((both & 15u) | ((byteAt(at + j - 4) >> 6) << 4), (both >> 4) | ((byteAt(at + j) >> 6) << 4));
}

// A unit of 32 weights: their codes, less `off` each, in the order of the
// activations', and what multiplies their sums.
struct Unit {
	uint c[8];
	int off;
	int s0, s1, m; // of codes 0-15, 16-31; of the activations' sum
	float w, min;  // formats of 32
};

Unit unit(uint64_t row, uint u) {
	Unit r;
	r.off = 0;
	r.s0 = r.s1 = 1;
	r.m = 0;
	r.w = r.min = 0;
	uint q[8];
	if (TYPE == Q4_0 || TYPE == Q4_1) {
		uint head = TYPE == Q4_0 ? 2 : 4;
		uint64_t at = row + u * (16 + head);
		r.w = fromF16(halfAt(at));
		if (TYPE == Q4_1) {
			r.min = fromF16(halfAt(at + 2));
		} else {
			r.off = 8;
		}
		wordsAt(q, at + head, 4);
		[[unroll]] for (uint i = 0; i < 4; i++) {
			r.c[i] = q[i] & 0x0f0f0f0fu;
			r.c[i + 4] = (q[i] >> 4) & 0x0f0f0f0fu;
		}
	} else if (TYPE == Q5_0 || TYPE == Q5_1) {
		uint head = TYPE == Q5_0 ? 2 : 4;
		uint64_t at = row + u * (20 + head);
		r.w = fromF16(halfAt(at));
		if (TYPE == Q5_1) {
			r.min = fromF16(halfAt(at + 2));
		} else {
			r.off = 16;
		}
		wordsAt(q, at + head, 5);
		[[unroll]] for (uint i = 0; i < 4; i++) {
			r.c[i] = (q[i + 1] & 0x0f0f0f0fu) | spread((q[0] >> (4 * i)) & 15u);
			r.c[i + 4] = ((q[i + 1] >> 4) & 0x0f0f0f0fu) | spread((q[0] >> (4 * i + 16)) & 15u);
		}
	} else if (TYPE == Q8_0) {
		uint64_t at = row + u * 34;
		r.w = fromF16(halfAt(at));
		wordsAt(r.c, at + 2, 8);
	} else if (TYPE == MXFP4) {
		uint64_t at = row + u * 17;
		uint e = byteAt(at);
		r.w = e < 83 ? 0.0 : uintBitsToFloat((e - 1) << 23);
		wordsAt(q, at + 1, 4);
		[[unroll]] for (uint i = 0; i < 4; i++) {
			r.c[i] = fp4(q[i] & 0x0f0f0f0fu);
			r.c[i + 4] = fp4((q[i] >> 4) & 0x0f0f0f0fu);
		}
	} else if (TYPE == Q4_K || TYPE == Q5_K) {
		uint j = u % 8;
		uint64_t at = row + (u / 8) * (TYPE == Q4_K ? 144 : 176);
		uvec2 both = sixes(at + 4, j);
		r.s0 = r.s1 = int(both.x);
		r.m = int(both.y);
		wordsAt(q, at + (TYPE == Q4_K ? 16 : 48) + 32 * (j / 2), 8);
		uint high[8];
		if (TYPE == Q5_K) {
			wordsAt(high, at + 16, 8);
		}
		[[unroll]] for (uint i = 0; i < 8; i++) {
			r.c[i] = (q[i] >> (4 * (j & 1))) & 0x0f0f0f0fu;
			if (TYPE == Q5_K) {
				r.c[i] |= ((high[i] >> j) & 0x01010101u) << 4;
			}
		}
	} else { // Q6_K
		uint j = u % 4, part = (u / 4) % 2;
		uint64_t at = row + (u / 8) * 210;
		r.off = 32;
		uint both = halfAt(at + 192 + 2 * (u % 8));
		r.s0 = bitfieldExtract(int(both), 0, 8);
		r.s1 = bitfieldExtract(int(both), 8, 8);
		wordsAt(q, at + 64 * part + 32 * (j & 1), 8);
		uint high[8];
		wordsAt(high, at + 128 + 32 * part, 8);
		[[unroll]] for (uint i = 0; i < 8; i++) {
			r.c[i] = ((q[i] >> (4 * (j >> 1))) & 0x0f0f0f0fu) | (((high[i] >> (2 * j)) & 0x03030303u) << 4);
		}
	}
	return r;
}

void main() {
	Params p = Params(params);
	Job job = Jobs(p.jobs).v[gl_WorkGroupID.y];
	uint first = gl_WorkGroupID.z * POSITIONS;
	if (first >= job.n) {
		return;
	}
	uint n = min(POSITIONS, job.n - first);
	uint t = gl_LocalInvocationIndex;
	uint units = p.cols / 32, blocks = K ? units / 8 : units;
	uint row0 = gl_WorkGroupID.x * ROWS;

	// This invocation's unit in a segment, and its lane.
	uint ur = t / UNITS, uu = t % UNITS;
	bool live = row0 + ur < p.rows;
	uint64_t bytes = job.w + uint64_t(row0 + ur) * p.rowBytes;
	uint lp = t / (ROWS * 8), lr = t / 8 % ROWS, ll = t % 8;
	bool adds = lp < n && row0 + lr < p.rows;
	uint lrow = adds ? Words(p.index).v[job.first + 2 * (first + lp)] : 0;
	precise float lane = 0.0;

	for (uint seg = 0; seg < units; seg += UNITS) {
		uint u = seg + uu;
		if (live && u < units) {
			Unit w = unit(bytes, u);
			uint64_t block = bytes + (u / 8) * (TYPE == Q4_K ? 144 : TYPE == Q5_K ? 176 : 210);
			for (uint i = 0; i < n; i++) {
				uint row = Words(p.index).v[job.first + 2 * (first + i)];
				Quads c = Quads(p.code + uint64_t(row) * p.cols + 32 * u);
				uvec4 a = c.v[0], b = c.v[1];
				Words x = Words(p.sum + (uint64_t(row) * (p.cols / 16) + 2 * u) * 4);
				int x0 = int(x.v[0]), x1 = int(x.v[1]);
				int lo = dot4(w.c[0], a.x) + dot4(w.c[1], a.y) + dot4(w.c[2], a.z) + dot4(w.c[3], a.w) - w.off * x0;
				int hi = dot4(w.c[4], b.x) + dot4(w.c[5], b.y) + dot4(w.c[6], b.z) + dot4(w.c[7], b.w) - w.off * x1;
				if (K) {
					S[i][ur][uu] = w.s0 * lo + w.s1 * hi;
					if (MINS) {
						M[i][ur][uu] = w.m * (x0 + x1);
					}
				} else {
					float d = Floats(p.scale).v[row * blocks + u];
					precise float term = float(lo + hi) * w.w;
					if (TYPE == Q4_1 || TYPE == Q5_1) {
						precise float plus = float(x0 + x1) * w.min;
						term = term + plus;
					}
					term = term * d;
					S[i][ur][uu] = floatBitsToInt(term);
				}
			}
		}
		barrier();
		if (adds) {
			if (K) {
				uint b = seg / 8 + ll;
				if (b < blocks) {
					int s = 0, m = 0;
					[[unroll]] for (uint i = 0; i < 8; i++) {
						s += S[lp][lr][8 * ll + i];
						if (MINS) {
							m += M[lp][lr][8 * ll + i];
						}
					}
					uint64_t at = job.w + uint64_t(row0 + lr) * p.rowBytes + b * (TYPE == Q4_K ? 144 : TYPE == Q5_K ? 176 : 210);
					precise float term = float(s) * fromF16(halfAt(at + (TYPE == Q6_K ? 208 : 0)));
					if (MINS) {
						precise float minus = float(m) * fromF16(halfAt(at + 2));
						term = term - minus;
					}
					term = term * Floats(p.scale).v[lrow * blocks + b];
					lane = lane + term;
				}
			} else {
				for (uint i = ll; i < UNITS && seg + i < units; i += 8) {
					precise float term = intBitsToFloat(S[lp][lr][i]);
					lane = lane + term;
				}
			}
		}
		barrier();
	}

	if (adds) {
		lanes[lp][lr][ll] = lane;
	}
	barrier();
	if (adds && ll == 0) {
		precise float even = (lanes[lp][lr][0] + lanes[lp][lr][4]) + (lanes[lp][lr][2] + lanes[lp][lr][6]);
		precise float odd = (lanes[lp][lr][1] + lanes[lp][lr][5]) + (lanes[lp][lr][3] + lanes[lp][lr][7]);
		precise float y = even + odd;
		uint r = row0 + lr;
		if (job.bias != 0) {
			y = y + Floats(job.bias).v[r];
		}
		uint to = Words(p.index).v[job.first + 2 * (first + lp) + 1];
		Floats(job.y + (uint64_t(to) * job.stride + r) * 4).v[0] = y;
	}
}
