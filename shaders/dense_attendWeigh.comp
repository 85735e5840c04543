#version 460
// The values of a chunk: backends/cpu weigh.
//
//	part = +0; part = part + p_k*v_k for the keys of the chunk ascending
//
// A workgroup has chunk first + x and QUERIES query heads of one key-value head (y) at
// one position (z). With one chunk its part is the result: a sum from +0 is never -0.
#extension GL_GOOGLE_include_directive : require
#include "dense.glsl"
#include "attend.glsl"

layout(local_size_x = 128) in;

const uint AHEAD = 16; // values of an invocation that are read before one is used

shared float w[QUERIES][CHUNK]; // probabilities; 0 behind the last key

void main() {
	Attention p = Attention(params);
	uint t = gl_LocalInvocationIndex, i = gl_WorkGroupID.z;
	uint group = p.heads / p.kvHeads, runs = (group + QUERIES - 1) / QUERIES;
	uint g = gl_WorkGroupID.y / runs, in_ = gl_WorkGroupID.y % runs * QUERIES;
	uint queries = min(QUERIES, group - in_);
	Seen seen = seenBy(p, i);
	Plane v = p.v;
	uint dim = p.dim;
	uint from = firstFrom(seen, (p.first + gl_WorkGroupID.x) * CHUNK), end = firstFrom(seen, (p.first + gl_WorkGroupID.x + 1) * CHUNK);
	uint64_t query = uint64_t(i) * p.heads + g * group + in_, row = uint64_t(g) * p.positions;
	for (uint j = t; j < QUERIES * CHUNK; j += 128) {
		uint n = j / CHUNK, key = from + j % CHUNK;
		float x = 0.0;
		if (n < queries && key < end) {
			x = Floats(p.score + 4 * ((query + n) * p.stride + key)).v[0];
		}
		w[n][j % CHUNK] = x;
	}
	barrier();
	for (uint d = t; d < dim; d += 128) {
		precise float sum[QUERIES];
		[[unroll]] for (uint n = 0; n < QUERIES; n++) {
			sum[n] = 0.0;
		}
		for (uint j = from; j < end; j += AHEAD) {
			float x[AHEAD];
			[[unroll]] for (uint m = 0; m < AHEAD; m++) { // behind the end the last again, times 0
				x[m] = one(v, (row + keyOf(seen, min(j + m, end - 1))) * v.width + d);
			}
			[[unroll]] for (uint m = 0; m < AHEAD; m++) {
				[[unroll]] for (uint n = 0; n < QUERIES; n++) {
					precise float product = w[n][j + m - from] * x[m];
					sum[n] = sum[n] + product;
				}
			}
		}
		[[unroll]] for (uint n = 0; n < QUERIES; n++) {
			if (n < queries) {
				uint64_t to = p.chunks == 1 ? p.y + 4 * ((query + n) * dim + d) : p.part + 4 * (((query + n) * p.chunks + gl_WorkGroupID.x) * dim + d);
				Floats(to).v[0] = sum[n];
			}
		}
	}
}
