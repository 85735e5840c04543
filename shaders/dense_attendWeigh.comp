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

// weigh adds the values of keys from..end to sum[n], each times its w[n]; w is 0 behind
// the end, where the last value is read again.
void weigh(inout float sum[QUERIES], Plane v, uint type, Seen seen, uint64_t row, uint from, uint end, uint d) {
	for (uint j = from; j < end; j += AHEAD) {
		float x[AHEAD];
		[[unroll]] for (uint m = 0; m < AHEAD; m++) {
			x[m] = one(v, type, (row + keyOf(seen, min(j + m, end - 1))) * v.width + d);
		}
		[[unroll]] for (uint m = 0; m < AHEAD; m++) {
			[[unroll]] for (uint n = 0; n < QUERIES; n++) {
				precise float product = w[n][j + m - from] * x[m];
				precise float s = sum[n] + product;
				sum[n] = s;
			}
		}
	}
}

void main() {
	Attention p = Attention(params);
	uint t = gl_LocalInvocationIndex, i = gl_WorkGroupID.z;
	uint group = p.heads / p.kvHeads, runs = (group + QUERIES - 1) / QUERIES;
	uint g = gl_WorkGroupID.y / runs, in_ = gl_WorkGroupID.y % runs * QUERIES;
	uint queries = min(QUERIES, group - in_);
	Seen seen = seenBy(p, i), all = Seen(0, seen.start, seen.end);
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
		float sum[QUERIES];
		[[unroll]] for (uint n = 0; n < QUERIES; n++) {
			sum[n] = 0.0;
		}
		if (p.keys != 0) {
			weigh(sum, v, v.type, seen, row, from, end, d);
		} else if (v.type == KV_F16) {
			weigh(sum, v, KV_F16, all, row, from, end, d);
		} else if (v.type == KV_Q8) {
			weigh(sum, v, KV_Q8, all, row, from, end, d);
		} else {
			weigh(sum, v, KV_F32, all, row, from, end, d);
		}
		[[unroll]] for (uint n = 0; n < QUERIES; n++) {
			if (n < queries) {
				uint64_t to = p.chunks == 1 ? p.y + 4 * ((query + n) * dim + d) : p.part + 4 * (((query + n) * p.chunks + gl_WorkGroupID.x) * dim + d);
				Floats(to).v[0] = sum[n];
			}
		}
	}
}
