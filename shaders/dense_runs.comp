#version 460
// Runs of rows are copied: for i < n, g < groups, c < run
//
//	to[toRows[i]*toRow + g*toGroup + c] = from[fromRows[i]*fromRow + g*fromGroup + c]
#extension GL_GOOGLE_include_directive : require
#include "dense.glsl"

layout(local_size_x = 256) in;

layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer Runs {
	uint64_t to;
	uint64_t from;
	uint64_t toRows, fromRows; // int32 [n] numbers of rows; 0: 0, 1, ...
	uint n, groups, run;
	uint toRow, toGroup, fromRow, fromGroup; // floats from one to the next
	uint pad;
};

void main() {
	Runs p = Runs(params);
	uint at = workgroup() * 256 + gl_LocalInvocationIndex;
	if (at >= p.n * p.groups * p.run) {
		return;
	}
	uint c = at % p.run, g = at / p.run % p.groups, i = at / p.run / p.groups;
	uint to = i, from = i;
	if (p.toRows != 0) {
		to = Words(p.toRows).v[i];
	}
	if (p.fromRows != 0) {
		from = Words(p.fromRows).v[i];
	}
	Words(p.to + 4 * (uint64_t(to) * p.toRow + g * p.toGroup + c)).v[0] = Words(p.from + 4 * (uint64_t(from) * p.fromRow + g * p.fromGroup + c)).v[0];
}
