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

const uint AHEAD = 32; // values of an invocation that are read before one is used
const uint THREADS = 128;

shared vec4 w[CHUNK]; // probabilities of QUERIES queries; 0 behind the last key

// weigh adds the values of keys from..end to sum[n], each times its w[n]; w is 0 behind
// the end, where the last value is read again. The values of key 0 begin at `first`.
void weigh(inout float sum[QUERIES], Plane v, uint type, Seen seen, uint64_t first, uint from, uint end) {
	for (uint j = from; j < end; j += AHEAD) {
		float x[AHEAD];
		[[unroll]] for (uint m = 0; m < AHEAD; m++) {
			x[m] = one(v, type, first + uint64_t(keyOf(seen, min(j + m, end - 1))) * v.width);
		}
		[[unroll]] for (uint m = 0; m < AHEAD; m++) {
			vec4 p = w[j + m - from];
			[[unroll]] for (uint n = 0; n < QUERIES; n++) {
				precise float product = p[n] * x[m];
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
	uint dim = p.dim, chunks = p.chunks;
	uint from = firstFrom(seen, (p.first + gl_WorkGroupID.x) * CHUNK), end = firstFrom(seen, (p.first + gl_WorkGroupID.x + 1) * CHUNK);
	uint64_t query = uint64_t(i) * p.heads + g * group + in_, row = uint64_t(g) * p.positions;
	Floats score = Floats(p.score + 4 * (query * p.stride + from));
	float x[CHUNK / THREADS][QUERIES];
	[[unroll]] for (uint j = 0; j < CHUNK / THREADS; j++) {
		[[unroll]] for (uint n = 0; n < QUERIES; n++) {
			x[j][n] = 0.0;
			if (n < queries && from + t + THREADS * j < end) {
				x[j][n] = score.v[n * p.stride + t + THREADS * j];
			}
		}
	}
	[[unroll]] for (uint j = 0; j < CHUNK / THREADS; j++) {
		w[t + THREADS * j] = vec4(x[j][0], x[j][1], x[j][2], x[j][3]);
	}
	barrier();
	uint64_t to = p.part + 4 * (query * chunks + gl_WorkGroupID.x) * dim;
	if (chunks == 1) {
		to = p.y + 4 * query * dim;
	}
	for (uint d = t; d < dim; d += THREADS) {
		float sum[QUERIES];
		[[unroll]] for (uint n = 0; n < QUERIES; n++) {
			sum[n] = 0.0;
		}
		uint64_t first = row * v.width + d;
		if (p.keys != 0) {
			weigh(sum, v, v.type, seen, first, from, end);
		} else if (v.type == KV_F16) {
			weigh(sum, v, KV_F16, all, first, from, end);
		} else if (v.type == KV_Q8) {
			weigh(sum, v, KV_Q8, all, first, from, end);
		} else {
			weigh(sum, v, KV_F32, all, first, from, end);
		}
		[[unroll]] for (uint n = 0; n < QUERIES; n++) {
			if (n < queries) {
				Floats(to + 4 * (uint64_t(n) * chunks * dim + d)).v[0] = sum[n];
			}
		}
	}
}
