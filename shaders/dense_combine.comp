#version 460
// Experts' outputs are added in the router's order: backends/cpu combine.
//
//	y = +0; y = y + w[j]*out[j] for j ascending; y = y + shared; x = x + y
#extension GL_GOOGLE_include_directive : require
#include "dense.glsl"

layout(local_size_x = 256) in;

layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer Combine {
	uint64_t x;       // floats [n, dim]
	uint64_t outputs; // floats [n*k, dim]
	uint64_t weights; // floats [n, k]
	uint64_t also;    // the shared expert's, floats [n, dim]; 0: none
	uint n, k, dim, pad;
};

void main() {
	Combine p = Combine(params);
	uint i = workgroup() * 256 + gl_LocalInvocationIndex, dim = p.dim, k = p.k;
	if (i >= p.n * dim) {
		return;
	}
	uint row = i / dim, c = i % dim;
	precise float y = 0.0;
	for (uint j = 0; j < k; j++) {
		precise float product = Floats(p.weights).v[row * k + j] * Floats(p.outputs + 4 * (uint64_t(row * k + j) * dim + c)).v[0];
		y = y + product;
	}
	if (p.also != 0) {
		y = y + Floats(p.also).v[i];
	}
	precise float x = Floats(p.x).v[i] + y;
	Floats(p.x).v[i] = x;
}
