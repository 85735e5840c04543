#version 460
// The parts of the chunks are added: y = +0; y = y + part for the chunks ascending.
#extension GL_GOOGLE_include_directive : require
#include "dense.glsl"
#include "attend.glsl"

layout(local_size_x = 256) in;

const uint AHEAD = 8; // parts that are read before one is used

void main() {
	Attention p = Attention(params);
	uint i = workgroup() * 256 + gl_LocalInvocationIndex, dim = p.dim, chunks = p.chunks;
	if (i >= p.n * p.heads * dim) {
		return;
	}
	uint64_t part = p.part + 4 * (uint64_t(i / dim) * chunks * dim + i % dim);
	precise float y = 0.0;
	for (uint c = 0; c < chunks; c += AHEAD) {
		float x[AHEAD];
		[[unroll]] for (uint m = 0; m < AHEAD; m++) {
			x[m] = Floats(part + 4 * uint64_t(min(c + m, chunks - 1)) * dim).v[0];
		}
		[[unroll]] for (uint m = 0; m < AHEAD; m++) {
			if (c + m < chunks) {
				y = y + x[m];
			}
		}
	}
	Floats(p.y).v[i] = y;
}
