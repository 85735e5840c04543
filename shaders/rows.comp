#version 460
// Rows of quantized matrices times vectors: backends/cpu quantRow.
//
//	lane[b mod 8] += term(b), b ascending; ((l0+l4)+(l2+l6)) + ((l1+l5)+(l3+l7)); + bias
//
// An invocation is a lane of R rows, so terms meet nobody else before the end. A unit
// is what it takes at a time: 32 weights, of formats with sub-scales a block of 256.
// Matrices lie as planes.comp lays them, in quads of 16 bytes: of eight units first
// each one's first quad, then each one's second, so that lanes read side by side.
// Vectors lie so too.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "planes.glsl"

const uint R = 2;
layout(local_size_x_id = 2) in;

layout(constant_id = 1) const uint POSITIONS = 8; // of a job at most, in one workgroup
layout(constant_id = 2) const uint THREADS = 64;
const uint TEAMS = THREADS / 8;

const bool PLUS = TYPE == Q4_1 || TYPE == Q5_1;                              // a least value beside the scale
const int OFFSET = TYPE == Q5_0 ? 16 : TYPE == Q4_0 || INT4 ? 8 : 0;         // of codes
const bool HALF = SCALE == 2 && TYPE != INT4_32 && TYPE != INT4_128 || PLUS; // the scale is a binary16

struct Values {
	uint64_t jobs;
	uint64_t index; // uint32: input and output rows of the jobs' positions; 0: by Job.step
	uint64_t code;  // int8 [n, cols], as the quantizer lays them
	uint64_t scale; // floats [n, cols/32 or cols/256]
	uint64_t sum;   // int32 [n, cols/16], as the quantizer lays them
	uint rows, cols;
};
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer Params {
	uvec4 groups; // of rows, jobs, of positions
	Values values;
};
struct Job {
	uint64_t w;    // planes of the matrix
	uint64_t y;    // floats
	uint64_t bias; // floats [rows], 0: none
	uint first;    // of its positions in index: first, first+2, ...: input row, output row
	uint n;        // positions
	uint stride;   // floats from one output row to the next
	uint step;     // without an index: from an input row to the next, the first being `first`; output rows are 0, 1, ...
};
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer Jobs { Job v[]; };
layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer Pairs { uvec2 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) readonly buffer Singles { uint v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) readonly buffer Scales { float v[]; };
layout(push_constant, std430) uniform Push {
	uint64_t params; // where they are, in any case
	uint64_t here;   // 1: the values follow too, and need not be waited for
	Values values;
};

uint inputRow(Values p, Job job, uint i) { return p.index == 0 ? job.first + i * job.step : Singles(p.index).v[job.first + 2 * i]; }
uint outputRow(Values p, Job job, uint i) { return p.index == 0 ? i : Singles(p.index).v[job.first + 2 * i + 1]; }

shared float lanes[POSITIONS][R * THREADS];

// dot4 multiplies signed bytes, and dotHigh unsigned ones of a, whose low nibbles are 0.
#ifdef DOT
// OpSDotKHR and OpSUDotKHR on four packed bytes each.
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4450)
int sdot4x8(int a, int b, spirv_literal int format);
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4452)
int sudot4x8(int a, int b, spirv_literal int format);
int dot4(uint a, uint b) { return sdot4x8(int(a), int(b), 0); }
int dotHigh(uint a, uint b) { return sudot4x8(int(b), int(a), 0); }
#else
int dot4(uint a, uint b) {
	int x = int(a), y = int(b);
	return bitfieldExtract(x, 0, 8) * bitfieldExtract(y, 0, 8) + bitfieldExtract(x, 8, 8) * bitfieldExtract(y, 8, 8) +
		bitfieldExtract(x, 16, 8) * bitfieldExtract(y, 16, 8) + (x >> 24) * (y >> 24);
}
int dotHigh(uint a, uint b) { return dot4(a >> 4, b) << 4; }
#endif
int dot16(uvec4 a, uvec4 b) { return dot4(a.x, b.x) + dot4(a.y, b.y) + dot4(a.z, b.z) + dot4(a.w, b.w); }
int dot16High(uvec4 a, uvec4 b) { return dotHigh(a.x, b.x) + dotHigh(a.y, b.y) + dotHigh(a.z, b.z) + dotHigh(a.w, b.w); }

const uvec4 LOW = uvec4(0x0f0f0f0fu), HIGH = uvec4(0xf0f0f0f0u), ONES = uvec4(0x11111111u);

// spread puts bit i of the low four into bit 4 of byte i.
uvec4 spread(uvec4 bits) { return ((bits * 0x00204081u) & uvec4(0x01010101u)) << 4; }

// The values of IQ4_NL, of four nibbles, each in the low half of a byte.
uvec4 mappedNL(uvec4 q) {
	uvec4 r = uvec4(0);
	[[unroll]] for (uint i = 0; i < 32; i += 8) {
		uvec4 n = (q >> i) & 15u;
		uvec4 low = mix(uvec4(0xbfad9881u), uvec4(0xf6eaddcfu), notEqual(n & 4u, uvec4(0)));
		uvec4 high = mix(uvec4(0x26190d01u), uvec4(0x71594535u), notEqual(n & 4u, uvec4(0)));
		r |= ((mix(low, high, notEqual(n & 8u, uvec4(0))) >> (8 * (n & 3u))) & 0xffu) << i;
	}
	return r;
}

// sumFP4 is the sum of products with codes as planes.comp writes them: nibbles of
// which bit 3 is the sign and the others, c, are a value 2 c, but 5 is 1 and 7 is 3.
// All eight of a word become values at once.
int sumFP4(uvec4 q, uvec4 xa, uvec4 xb) {
	uvec4 odd = q & (q >> 2) & ONES;
	uvec4 v = ((q * 2) & (ONES * 14) & ~(odd * 15)) + ((odd * 3) & (q | (ONES * 13)));
	uvec4 minus = ((q >> 3) & ONES) * 15;
	int low = dot16(v & ~minus & LOW, xa) - dot16(v & minus & LOW, xa);
	int high = dot16High(v & ~minus & HIGH, xb) - dot16High(v & minus & HIGH, xb);
	return low + (high >> 4);
}

// tiny is +0 for a scale below what the arithmetic knows, 2^-45.
float tiny(uint bits) { return (bits & ~SIGN) < 0x29000000u ? 0.0 : uintBitsToFloat(bits); }

// A Raw is a unit as it is read.
struct Raw {
	uvec4 q[13]; // QUADS of them
	uint fifths, scale;
};

// rawAt reads the unit of a turn. The next turn's is a fixed number of words behind it.
Raw rawAt(Quads quads, uint quad, Singles fifths, uint at, Singles scales, uint scale, uint turn) {
	Raw raw;
	[[unroll]] for (uint i = 0; i < QUADS; i++) {
		raw.q[i] = quads.v[quad + turn * 8 * QUADS + 8 * i];
	}
	if (FIFTHS) {
		raw.fifths = fifths.v[at + 8 * turn];
	}
	if (SCALE != 0) {
		raw.scale = scales.v[scale + turn * (2 * SCALE / PER)];
	}
	return raw;
}

// A Unit is 32 weights unpacked.
struct Unit {
	uvec4 a, b;
	float w, least;
};

Unit unpack(Raw raw) {
	Unit u;
	u.a = raw.q[0];
	u.b = raw.q[QUADS == 2 ? 1 : 0];
	u.least = 0.0;
	if (TYPE == MXFP4) {
		u.w = uintBitsToFloat((raw.scale & 0xffu) << 23);
		return u;
	}
	u.w = HALF ? fromF16(raw.scale & 0xffffu) : tiny(SCALE == 2 ? raw.scale << 16 : raw.scale);
	if (PLUS) {
		u.least = fromF16(raw.scale >> 16);
	}
	if (QUADS == 2) {
		return u;
	}
	u.a &= LOW;
	u.b &= HIGH;
	if (FIFTHS) {
		uvec4 f = uvec4(raw.fifths) >> uvec4(0, 4, 8, 12);
		u.a |= spread(f & 15u);
		u.b = (u.b >> 4) | spread((f >> 16) & 15u);
	} else if (TYPE == IQ4_NL) {
		u.a = mappedNL(u.a);
		u.b = mappedNL(u.b >> 4);
	}
	return u;
}

// small is the term of a unit of 32 with codes of a position, their sum and scale.
float small(Unit u, uvec4 xa, uvec4 xb, int x, float d) {
	int s;
	if (TYPE == MXFP4) {
		s = sumFP4(u.a, xa, xb);
	} else if (QUADS == 2 || FIFTHS || TYPE == IQ4_NL) {
		s = dot16(u.a, xa) + dot16(u.b, xb);
	} else {
		s = dot16(u.a, xa) + (dot16High(u.b, xb) >> 4);
	}
	s -= OFFSET * x;
	precise float term = float(s) * u.w;
	if (PLUS) {
		precise float plus = float(x) * u.least;
		term = term + plus;
	}
	term = term * d;
	return term;
}

// large is the term of a block of 256. Quads of codes begin at x, of sums of 16 at
// sums, with others' between them.
float large(Raw raw, Quads codes, uint x, Quads sumQuads, uint sums, float d) {
	int s = 0, m = 0;
	precise float term;
	if (TYPE == Q6_K) {
		// Quads 0 to 7 are the low nibbles, 8 to 11 two bits more, 12 the sub-scales.
		[[unroll]] for (uint h = 0; h < 2; h++) {
			[[unroll]] for (uint k = 0; k < 2; k++) {
				ivec4 sum = 32 * ivec4(sumQuads.v[sums + 8 * (2 * h + k)]);
				int by = int(h == 0 ? k == 0 ? raw.q[12].x : raw.q[12].y : k == 0 ? raw.q[12].z : raw.q[12].w);
				uvec4 q0 = (raw.q[4 * h] >> (4 * k)) & LOW, q1 = (raw.q[4 * h + 1] >> (4 * k)) & LOW;
				uvec4 q2 = (raw.q[4 * h + 2] >> (4 * k)) & LOW, q3 = (raw.q[4 * h + 3] >> (4 * k)) & LOW;
				uvec4 h0 = raw.q[8 + 2 * h] >> (4 * k), h1 = raw.q[9 + 2 * h] >> (4 * k);
				q0 |= (h0 << 4) & (ONES * 3) & HIGH;
				q1 |= (h1 << 4) & (ONES * 3) & HIGH;
				q2 |= (h0 << 2) & (ONES * 3) & HIGH;
				q3 |= (h1 << 2) & (ONES * 3) & HIGH;
				uint at = x + 8 * (8 * h + 4 * k);
				s += bitfieldExtract(by, 0, 8) * (dot16(q0, codes.v[at]) - sum.x);
				s += bitfieldExtract(by, 8, 8) * (dot16(q1, codes.v[at + 8]) - sum.y);
				s += bitfieldExtract(by, 16, 8) * (dot16(q2, codes.v[at + 16]) - sum.z);
				s += (by >> 24) * (dot16(q3, codes.v[at + 24]) - sum.w);
			}
		}
		term = float(s) * fromF16(raw.scale & 0xffffu);
	} else {
		// Quad 0 is the head, of Q5_K 1 and 2 are the fifth bits. Scales and mins of 6 bits
		// are two runs of four bytes each.
		uvec4 head = raw.q[0];
		uint lowS = head.y & 0x3f3f3f3fu, lowM = head.z & 0x3f3f3f3fu;
		uint highS = (head.w & 0x0f0f0f0fu) | ((head.y >> 2) & 0x30303030u), highM = ((head.w >> 4) & 0x0f0f0f0fu) | ((head.z >> 2) & 0x30303030u);
		[[unroll]] for (uint j = 0; j < 4; j++) { // two units of 32 each
			uvec4 q0 = raw.q[QUADS - 8 + 2 * j], q1 = raw.q[QUADS - 7 + 2 * j];
			uint scales = (j < 2 ? lowS : highS) >> (16 * (j & 1)), mins = (j < 2 ? lowM : highM) >> (16 * (j & 1));
			uint at = x + 32 * j;
			int low, high;
			if (TYPE == Q4_K) {
				low = dot16(q0 & LOW, codes.v[at]) + dot16(q1 & LOW, codes.v[at + 8]);
				high = (dot16High(q0 & HIGH, codes.v[at + 16]) + dot16High(q1 & HIGH, codes.v[at + 24])) >> 4;
			} else {
				uvec4 f0 = raw.q[1] >> (2 * j), f1 = raw.q[2] >> (2 * j);
				low = dot16((q0 & LOW) | ((f0 << 4) & ONES & HIGH), codes.v[at]) + dot16((q1 & LOW) | ((f1 << 4) & ONES & HIGH), codes.v[at + 8]);
				high = dot16(((q0 >> 4) & LOW) | ((f0 << 3) & ONES & HIGH), codes.v[at + 16]) + dot16(((q1 >> 4) & LOW) | ((f1 << 3) & ONES & HIGH), codes.v[at + 24]);
			}
			s += int(scales & 63u) * low + int((scales >> 8) & 63u) * high;
			ivec4 sum = ivec4(sumQuads.v[sums + 8 * j]);
			m += int(mins & 63u) * (sum.x + sum.y) + int((mins >> 8) & 63u) * (sum.z + sum.w);
		}
		term = float(s) * fromF16(head.x & 0xffffu);
		precise float minus = float(m) * fromF16(head.x >> 16);
		term = term - minus;
	}
	term = term * d;
	return term;
}

void main() {
	Values p;
	if (here == 1) {
		p = values;
	} else {
		p = Params(params).values;
	}
	Job job = Jobs(p.jobs).v[gl_WorkGroupID.y];
	uint first = gl_WorkGroupID.z * POSITIONS;
	if (first >= job.n) {
		return;
	}
	uint n = min(POSITIONS, job.n - first);
	uint t = gl_LocalInvocationIndex, lane = t % 8, row0 = gl_WorkGroupID.x * TEAMS * R;
	uint units = p.cols / UNIT, turns = (units + 7) / 8;
	Places places = placesOf(uint64_t(p.rows) * units);
	Quads quads = Quads(job.w);
	Singles fifths = Singles(job.w + places.fifths), scales = Singles(job.w + places.scales);
	Quads codes = Quads(p.code), sumQuads = Quads(p.sum);
	// Where the first unit of this lane is.
	uint at[R], quad[R], scale[R], shift[R];
	[[unroll]] for (uint r = 0; r < R; r++) {
		at[r] = min(row0 + TEAMS * r + t / 8, p.rows - 1) * units + lane;
		quad[r] = (at[r] >> 3) * 8 * QUADS + (at[r] & 7u);
		scale[r] = at[r] / PER * SCALE;
		shift[r] = 8 * (scale[r] & 3u);
		scale[r] /= 4;
	}
	uint x[POSITIONS];
	precise float sum[POSITIONS][R];
	[[unroll]] for (uint i = 0; i < POSITIONS; i++) {
		x[i] = inputRow(p, job, first + (i < n ? i : 0)) * units + lane;
		[[unroll]] for (uint r = 0; r < R; r++) {
			sum[i][r] = 0.0;
		}
	}
	for (uint turn = 0; turn < turns; turn++) {
		Raw raw[R];
		[[unroll]] for (uint r = 0; r < R; r++) { // all loads go out before the first is waited for
			raw[r] = rawAt(quads, quad[r], fifths, at[r], scales, scale[r], turn);
		}
		uint b = 8 * turn;
		if (lane + b < units) {
			Unit unit[R];
			[[unroll]] for (uint r = 0; r < R; r++) {
				raw[r].scale >>= SCALE == 4 ? 0 : shift[r];
				if (UNIT == 32) {
					unit[r] = unpack(raw[r]);
				}
			}
			[[unroll]] for (uint i = 0; i < POSITIONS; i++) {
				if (i < n) {
					float d = Scales(p.scale).v[x[i] + b];
					uint code = (x[i] >> 3) * (UNIT / 2) + (x[i] & 7u) + b * (UNIT / 16);
					if (UNIT == 32) {
						uvec4 xa = codes.v[code], xb = codes.v[code + 8];
						int all = 0;
						if (OFFSET != 0 || PLUS) {
							ivec2 both = ivec2(Pairs(p.sum).v[x[i] + b]);
							all = both.x + both.y;
						}
						[[unroll]] for (uint r = 0; r < R; r++) {
							sum[i][r] = sum[i][r] + small(unit[r], xa, xb, all, d);
						}
					} else {
						uint sums = (x[i] >> 3) * 32 + (x[i] & 7u) + b * 4;
						[[unroll]] for (uint r = 0; r < R; r++) {
							sum[i][r] = sum[i][r] + large(raw[r], codes, code, sumQuads, sums, d);
						}
					}
				}
			}
		}
	}
	[[unroll]] for (uint i = 0; i < POSITIONS; i++) {
		[[unroll]] for (uint r = 0; r < R; r++) {
			lanes[i][r * THREADS + t] = sum[i][r];
		}
	}
	barrier();
	for (uint j = t; j < n * TEAMS * R; j += THREADS) {
		uint i = j / (TEAMS * R), r = j % (TEAMS * R), b = 8 * r, row = row0 + r;
		if (row < p.rows) {
			precise float even = (lanes[i][b] + lanes[i][b + 4]) + (lanes[i][b + 2] + lanes[i][b + 6]);
			precise float odd = (lanes[i][b + 1] + lanes[i][b + 5]) + (lanes[i][b + 3] + lanes[i][b + 7]);
			precise float y = even + odd;
			if (job.bias != 0) {
				y = y + Floats(job.bias).v[row];
			}
			put(job.y + (uint64_t(outputRow(p, job, first + i)) * job.stride + row) * 4, floatBitsToUint(y));
		}
	}
}
