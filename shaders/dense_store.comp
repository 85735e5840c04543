#version 460
// Keys or values become rows of a cache: backends/cpu plane.put.
//
//	f16: half to even, beyond the range +-65504; f32: below 2^-24 +0
//	q8, of 32: d = a*0x1.020408p-7, code = x*(127*rcp(a)), half to even; both +0 where d is below 2^-24
#extension GL_GOOGLE_include_directive : require
#include "dense.glsl"
#include "cache.glsl"

layout(local_size_x = 256) in;

layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer Store {
	uint64_t x;     // floats [n, heads, dim]
	uint64_t code;  // rows of `width` elements
	uint64_t scale; // of q8: floats [rows, width/32]
	Failure fail;
	uint64_t row; // of head 0 at the first position
	uint n, heads, dim;
	uint width, from; // x becomes elements from, from+1, ... of a row
	uint positions;   // rows from one head to the next
	uint type, pad;
};

shared uint top[8];

// toF16 rounds to nearest even, beyond the range to +-65504.
uint toF16(float x) {
	uint a = floatBitsToUint(x) & ~SIGN, sign = (floatBitsToUint(x) >> 16) & 0x8000u;
	if (a >= 0x477fe000u) {
		return sign | 0x7bffu;
	}
	if (a < 0x38800000u) { // a whole number of 2^-24
		precise float f = uintBitsToFloat(a) + 0.5;
		return sign | (floatBitsToUint(f) - 0x3f000000u);
	}
	return sign | ((a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13);
}

// part writes some bytes of a word, whose others other invocations may be writing.
void part(uint64_t at, uint mask, uint v) {
	Words word = Words(at & ~uint64_t(3));
	uint shift = 8 * (uint(at) & 3);
	atomicAnd(word.v[0], ~(mask << shift));
	atomicOr(word.v[0], (v & mask) << shift);
}

void main() {
	Store p = Store(params);
	uint t = gl_LocalInvocationIndex, i = workgroup() * 256 + t, dim = p.dim;
	bool live = i < p.n * p.heads * dim;
	uint c = i % dim, h = i / dim % p.heads, n = i / dim / p.heads;
	uint64_t at = (p.row + uint64_t(h) * p.positions + n) * p.width + p.from + c;
	float x = 0.0;
	if (live) {
		x = Floats(p.x).v[i];
	}
	uint a = floatBitsToUint(x) & ~SIGN, type = p.type;
	if (t < 8) {
		top[t] = 0;
	}
	barrier();
	atomicMax(top[t / 32], a);
	barrier();
	if (!live) {
		return;
	}
	saw(p.fail, a);
	if (type == KV_F16) {
		part(p.code + 2 * at, 0xffffu, toF16(x));
	} else if (type == KV_F32) {
		Floats(p.code + 4 * at).v[0] = a < KVTINY ? 0.0 : x;
	} else {
		uint most = top[t / 32], code = 0;
		precise float d = 0.0;
		if (most >= TINY && most <= LARGEST) {
			d = uintBitsToFloat(most) * uintBitsToFloat(0x3c010204u);
			precise float s = 127.0 * rcp(uintBitsToFloat(most));
			precise float r = x * s + 12582912.0;
			code = floatBitsToUint(r) - 0x4b400000u;
		}
		if (floatBitsToUint(d) < KVTINY) {
			d = 0.0;
			code = 0;
		}
		part(p.code + at, 0xffu, code);
		if (c % 32 == 0) {
			Floats(p.scale + 4 * (at / 32)).v[0] = d;
		}
	}
}
