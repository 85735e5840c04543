#version 460
// Scores become probabilities: backends/cpu softmax, sumAt.
//
//	largest = the largest score, or the sink; e = exp(score - largest)
//	sum = +0; for each chunk ascending: sum = sum + (its e in 16 lanes by key, and the tree)
//	a sink: sum = sum + exp(sink - largest); score = e*rcp(sum)
//
// A workgroup has one query: head x, position y. Sixteen invocations have a chunk.
#extension GL_GOOGLE_include_directive : require
#include "dense.glsl"
#include "attend.glsl"

const uint THREADS = 256;
const uint AHEAD = 8; // scores of an invocation that are read before one is used
layout(local_size_x = 256) in;
#include "tree.glsl"

shared float tops[THREADS];
shared float sums[16];

void main() {
	Attention p = Attention(params);
	uint t = gl_LocalInvocationIndex, head = gl_WorkGroupID.x, i = gl_WorkGroupID.y;
	Seen seen = seenBy(p, i);
	Floats score = Floats(p.score + 4 * ((uint64_t(i) * p.heads + head) * p.stride));
	float largest = uintBitsToFloat(0xff800000u); // -infinity
	for (uint j = seen.start + t; j < seen.end; j += 256 * AHEAD) {
		float s[AHEAD];
		[[unroll]] for (uint n = 0; n < AHEAD; n++) {
			s[n] = score.v[min(j + 256 * n, seen.end - 1)];
		}
		[[unroll]] for (uint n = 0; n < AHEAD; n++) {
			largest = s[n] > largest ? s[n] : largest;
		}
	}
	tops[t] = largest;
	barrier();
	[[unroll]] for (uint h = 128; h > 0; h /= 2) {
		if (t < h) {
			float other = tops[t + h];
			largest = other > largest ? other : largest;
			tops[t] = largest;
		}
		barrier();
	}
	largest = tops[0];
	float sink = 0.0;
	if (p.sinks != 0) {
		sink = Floats(p.sinks).v[head];
		largest = sink > largest ? sink : largest;
	}
	precise float sum = 0.0;
	uint lane = t % 16, end = p.first + p.chunks;
	for (uint c = p.first; c < end; c += 16) {
		uint mine = c + t / 16;
		precise float e = 0.0;
		if (p.keys != 0) {
			uint last = firstFrom(seen, (mine + 1) * CHUNK);
			for (uint j = firstFrom(seen, mine * CHUNK); j < last; j++) {
				if (keyOf(seen, j) % 16 == lane) {
					precise float d = score.v[j] - largest;
					precise float x = expo(d);
					score.v[j] = x;
					e = e + x;
				}
			}
		} else {
			float x[CHUNK / 16]; // all are read before one is used
			uint j = mine * CHUNK + lane;
			[[unroll]] for (uint n = 0; n < CHUNK / 16; n++) {
				x[n] = score.v[min(max(j + 16 * n, seen.start), seen.end - 1)];
			}
			[[unroll]] for (uint n = 0; n < CHUNK / 16; n++) {
				if (j + 16 * n >= seen.start && j + 16 * n < seen.end) {
					precise float d = x[n] - largest;
					precise float y = expo(d);
					score.v[j + 16 * n] = y;
					e = e + y;
				}
			}
		}
		e = tree16(e);
		if (lane == 0) {
			sums[t / 16] = e;
		}
		barrier();
		for (uint n = 0; n < 16; n++) { // of chunks that nobody sees +0
			sum = sum + sums[n];
		}
		barrier();
	}
	if (p.sinks != 0) {
		precise float d = sink - largest;
		sum = sum + expo(d);
	}
	precise float r = rcp(sum);
	// Who has made an e divides it: what another writes it may not see.
	for (uint c = p.first; c < end; c += 16) {
		uint mine = c + t / 16;
		if (p.keys != 0) {
			uint last = firstFrom(seen, (mine + 1) * CHUNK);
			for (uint j = firstFrom(seen, mine * CHUNK); j < last; j++) {
				if (keyOf(seen, j) % 16 == lane) {
					precise float y = score.v[j] * r;
					score.v[j] = y;
				}
			}
		} else {
			float x[CHUNK / 16];
			uint j = mine * CHUNK + lane;
			[[unroll]] for (uint n = 0; n < CHUNK / 16; n++) {
				x[n] = score.v[min(max(j + 16 * n, seen.start), seen.end - 1)];
			}
			[[unroll]] for (uint n = 0; n < CHUNK / 16; n++) {
				if (j + 16 * n >= seen.start && j + 16 * n < seen.end) {
					precise float y = x[n] * r;
					score.v[j + 16 * n] = y;
				}
			}
		}
	}
}
