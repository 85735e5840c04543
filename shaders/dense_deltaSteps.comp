#version 460
// The matrix of a head goes through all positions: backends/cpu deltaRecurrence.
//
//	S_ji = S_ji*decay; d = clean((v_j - (S_j.k, 16 lanes))*beta)
//	S_ji = clean(S_ji + d*k_i); y_j = S_j.q, 16 lanes
//
// Sixteen invocations, a lane each, keep one row of the matrix.
#extension GL_GOOGLE_include_directive : require
#include "dense.glsl"
#include "delta.glsl"

const uint THREADS = 256;
layout(local_size_x = 256) in;
#include "tree.glsl"

const uint LANE = 16; // floats of a row that an invocation has: keys of at most 256

void main() {
	Delta p = Delta(params);
	uint t = gl_LocalInvocationIndex, lane = t % 16, row = gl_WorkGroupID.x * 16 + t / 16; // valueDim is a multiple of 16
	uint n = p.n, keyHeads = p.keyHeads, keyDim = p.keyDim, heads = p.valueHeads, dim = p.valueDim;
	uint channels = 2 * keyHeads * keyDim + heads * dim;
	uint h = row / dim, key = h / (heads / keyHeads);
	if (p.tiled != 0) {
		key = h % keyHeads;
	}
	uint64_t matrix = 4 * (uint64_t(row) * keyDim + lane);
	precise float s[LANE];
	[[unroll]] for (uint m = 0; m < LANE; m++) {
		s[m] = 0.0;
		if (16 * m < keyDim) {
			s[m] = Floats(p.from + matrix).v[16 * m];
		}
	}
	for (uint pos = 0; pos < n; pos++) {
		uint64_t x = p.inputs + 4 * uint64_t(pos) * channels;
		Floats q = Floats(x + 4 * (key * keyDim + lane)), k = Floats(x + 4 * ((keyHeads + key) * keyDim + lane));
		float decay = Floats(p.decay).v[pos * heads + h], beta = Floats(p.beta).v[pos * heads + h];
		precise float sum = 0.0;
		[[unroll]] for (uint m = 0; m < LANE; m++) {
			if (16 * m < keyDim) {
				s[m] = s[m] * decay;
				precise float product = s[m] * k.v[16 * m];
				sum = sum + product;
			}
		}
		precise float d = (Floats(x).v[2 * keyHeads * keyDim + row] - tree16(sum)) * beta;
		d = clean(d);
		sum = 0.0;
		[[unroll]] for (uint m = 0; m < LANE; m++) {
			if (16 * m < keyDim) {
				precise float product = d * k.v[16 * m];
				precise float next = s[m] + product;
				s[m] = clean(next);
				product = s[m] * q.v[16 * m];
				sum = sum + product;
			}
		}
		sum = tree16(sum);
		if (p.y != 0 && lane == 0) {
			Floats(p.y + 4 * (uint64_t(pos) * heads * dim + row)).v[0] = sum;
		}
	}
	[[unroll]] for (uint m = 0; m < LANE; m++) {
		if (16 * m < keyDim) {
			Floats(p.to + matrix).v[16 * m] = s[m];
		}
	}
}
