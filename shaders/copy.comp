#version 460
// A copy, to measure what a device's memory gives: v[i] = x[i], 16 bytes each.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

const uint EACH = 4; // of an invocation
layout(local_size_x = 256) in;

layout(buffer_reference, std430, buffer_reference_align = 16) buffer Target { uvec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer Params {
	uvec4 groups; // of EACH*256*16 bytes
	uint64_t from, to;
};
layout(push_constant) uniform Push { uint64_t params; };

void main() {
	Params p = Params(params);
	uint at = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * EACH * 256 + gl_LocalInvocationIndex;
	uvec4 v[EACH];
	[[unroll]] for (uint i = 0; i < EACH; i++) {
		v[i] = Quads(p.from).v[at + 256 * i];
	}
	[[unroll]] for (uint i = 0; i < EACH; i++) {
		Target(p.to).v[at + 256 * i] = v[i];
	}
}
