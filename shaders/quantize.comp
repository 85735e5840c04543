#version 460
// Vectors become what matrix rows multiply. backends/cpu quantize, on blocks of
// 32 or 256 floats (32-block: the last run may be short of 256):
//
//	a = largest |x|; if a < 2^-50 the scale is +0 and so are the codes
//	d = a * 0x1.020408p-7, code = x * (127 * rcp(a)), half to even
//	sum[g] = sum of codes 16g .. 16g+15
//
// and with BLOCK 0 clean(x) alone. With GATE 1 x = SiLU(g)*u; with 2 first
//
//	g = 1.702*min(g, 7), u = (max(-7, min(u, 7)) + 1)*(1/1.702)
//
// One workgroup makes 256 floats of the batch, which is one run of them, since
// vectors are whole blocks.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint BLOCK = 32; // 32, 256 or 0: clean
layout(constant_id = 1) const uint GATE = 0; // backends.Activation and 1; 0: none

struct Values {
	uint64_t x;     // floats [n]; with a gate: g
	uint64_t u;     // with a gate: floats [n]
	uint64_t code;  // int8 [n] in words; clean: floats [n]
	uint64_t scale; // floats [n/BLOCK]
	uint64_t sum;   // int32 [n/16]
	uint64_t top;   // one word: becomes step, if it is 0, where an |x| is above 2^50 or NaN
	uint n, step;
	uint64_t from, to; // of words that are copied by further workgroups, 256 by each
	uint words;
};
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer Params {
	uvec4 groups;
	Values values;
};
layout(push_constant, std430) uniform Push {
	uint64_t params; // where they are, in any case
	uint64_t here;   // 1: the values follow too, and need not be waited for
	Values values;
};

shared uint top[8];
shared int sums[16];

void main() {
	Values p;
	if (here == 1) {
		p = values;
	} else {
		p = Params(params).values;
	}
	uint t = gl_LocalInvocationIndex;
	uint at = gl_WorkGroupID.x * 256 + 4 * t;
	uint whole = (p.n + 255) & ~255u;
	if (at >= whole) {
		at -= whole;
		for (uint i = 0; i < 4; i++) {
			if (at + i < p.words) {
				Words(p.to).v[at + i] = Words(p.from).v[at + i];
			}
		}
		return;
	}
	if (t < 8) {
		top[t] = 0;
	}
	if (t < 16) {
		sums[t] = 0;
	}
	barrier();
	precise float x[4] = float[4](0, 0, 0, 0), u[4] = float[4](0, 0, 0, 0);
	uint most = 0;
	uint here = at >= p.n ? 0 : min(4u, p.n - at);
	if (here == 4 && ((uint(p.x) | uint(p.u)) & 15) == 0) {
		uvec4 all = Quads(p.x).v[at / 4];
		x = float[4](uintBitsToFloat(all.x), uintBitsToFloat(all.y), uintBitsToFloat(all.z), uintBitsToFloat(all.w));
		if (GATE != 0) {
			all = Quads(p.u).v[at / 4];
			u = float[4](uintBitsToFloat(all.x), uintBitsToFloat(all.y), uintBitsToFloat(all.z), uintBitsToFloat(all.w));
		}
	} else {
		[[unroll]] for (uint i = 0; i < 4; i++) {
			if (i < here) {
				x[i] = Floats(p.x).v[at + i];
				if (GATE != 0) {
					u[i] = Floats(p.u).v[at + i];
				}
			}
		}
	}
	[[unroll]] for (uint i = 0; i < 4; i++) { // what is not there is 0 and stays 0
		if (GATE == 2) {
			x[i] = uintBitsToFloat(0x3fd9db23u) * (x[i] > 7.0 ? 7.0 : x[i]);
			u[i] = u[i] > 7.0 ? 7.0 : u[i];
			u[i] = u[i] < -7.0 ? -7.0 : u[i];
			u[i] = (u[i] + 1.0) * uintBitsToFloat(0x3f16694au);
		}
		if (GATE != 0) {
			x[i] = silu(x[i]) * u[i];
		}
		most = max(most, floatBitsToUint(x[i]) & ~SIGN);
	}
	if (most > LARGEST) {
		atomicCompSwap(Words(p.top).v[0], 0, p.step);
	}
	if (BLOCK == 0) {
		for (uint i = 0; i < here; i++) {
			put(p.code + 4 * (at + i), floatBitsToUint(clean(x[i])));
		}
		return;
	}
	uint mine = BLOCK == 32 ? t / 8 : 0;
	atomicMax(top[mine], most);
	barrier();
	uint a = top[mine];
	bool none = a < TINY || a > LARGEST;
	uint word = 0;
	int sum = 0;
	if (!none) {
		precise float s = 127.0 * rcp(uintBitsToFloat(a));
		[[unroll]] for (uint i = 0; i < 4; i++) {
			precise float r = x[i] * s + 12582912.0;
			int c = int(floatBitsToUint(r) - 0x4b400000u);
			word |= (uint(c) & 0xffu) << (8 * i);
			sum += c;
		}
	}
	atomicAdd(sums[t / 4], sum);
	barrier();
	if (here == 0) {
		return;
	}
	const uint SIZE = BLOCK == 256 ? 256 : 32;
	uint b = at / SIZE, c = at % SIZE / 16;
	put(p.code + 16 * (((b >> 3) * (SIZE / 16) + c) * 8 + (b & 7)) + (at & 15), word);
	if (t % 4 == 0) {
		put(p.sum + 4 * (BLOCK == 32 ? at / 16 : (((b >> 3) * 4 + c / 4) * 8 + (b & 7)) * 4 + c % 4), uint(sums[t / 4]));
	}
	if ((at & (BLOCK - 1)) == 0) {
		precise float d = uintBitsToFloat(a) * uintBitsToFloat(0x3c010204u);
		put(p.scale + 4 * (BLOCK == 32 ? at / 32 : at / 256), floatBitsToUint(none ? 0.0 : d));
	}
}
