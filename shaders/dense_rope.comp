#version 460
// Heads of rows are turned, in place: backends/cpu rotate and rotatePairs.
//
//	x[i], x[k] = (x[i]*c) - (x[k]*s), (x[k]*c) + (x[i]*s)
//
// where behind `skip` floats of a head k is i+half, or with pairs i is even and k is i+1.
#extension GL_GOOGLE_include_directive : require
#include "dense.glsl"

layout(local_size_x = 256) in;

layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer Rope {
	uint64_t x;
	uint64_t cosines, sines; // floats [positions, each]
	uint rows, dim, headDim, each, skip, pos;
	uint pairs; // neighbours turn, not halves
	uint pad;
};

void main() {
	Rope p = Rope(params);
	uint heads = p.dim / p.headDim, at = workgroup() * 256 + gl_LocalInvocationIndex;
	if (at >= p.rows * heads * p.each) {
		return;
	}
	uint j = at % p.each, h = at / p.each % heads, row = at / p.each / heads;
	Floats x = Floats(p.x + 4 * (uint64_t(row) * p.dim + h * p.headDim + p.skip));
	uint64_t angle = 4 * (uint64_t(p.pos + row) * p.each + j);
	uint i = j, k = j + p.each;
	if (p.pairs != 0) {
		i = 2 * j;
		k = 2 * j + 1;
	}
	float c = Floats(p.cosines + angle).v[0], s = Floats(p.sines + angle).v[0], a = x.v[i], b = x.v[k];
	precise float turned = a * c - b * s;
	x.v[i] = turned;
	turned = b * c + a * s;
	x.v[k] = turned;
}
