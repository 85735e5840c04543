#version 460
// Floats become others, one by one, y may be x: backends/cpu add, scaleBy, sigmoidGate,
// and the gate of a delta net's outputs.
#extension GL_GOOGLE_include_directive : require
#include "dense.glsl"

layout(local_size_x = 256) in;

layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer Each {
	uint64_t y;
	uint64_t x;
	uint64_t f; // floats [n]
	Failure fail;
	uint n, dim;
	float by; // where there is no f
	uint how;
};

const uint ADD = 0;     // y = y + x
const uint SCALE = 1;   // y = x*f, with an f for each row of dim floats, or by
const uint SIGMOID = 2; // y = y*sigmoid(x), with an x for each run of dim floats
const uint SILU = 3;    // y = SiLU(clean(x))*y
                        // else y = +0

void main() {
	Each p = Each(params);
	uint i = workgroup() * 256 + gl_LocalInvocationIndex;
	if (i >= p.n) {
		return;
	}
	precise float y = 0.0;
	if (p.how == ADD) {
		y = Floats(p.y).v[i] + Floats(p.x).v[i];
	} else if (p.how == SCALE) {
		float f = p.by;
		if (p.f != 0) {
			f = Floats(p.f).v[i / p.dim];
		}
		y = Floats(p.x).v[i] * f;
	} else if (p.how == SIGMOID) {
		y = Floats(p.y).v[i] * sigmoid(Floats(p.x).v[i / p.dim]);
	} else if (p.how == SILU) {
		float x = Floats(p.x).v[i];
		saw(p.fail, floatBitsToUint(x) & ~SIGN);
		y = silu(clean(x)) * Floats(p.y).v[i];
	}
	Floats(p.y).v[i] = y;
}
