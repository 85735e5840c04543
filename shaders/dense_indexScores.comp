#version 460
// The scores by which keys are chosen: backends/cpu indexStep.scores.
//
//	score_k = +0; for each head h ascending: score_k = score_k + clean(w_h)*r(q_h.k)    16 lanes, q cleaned
//	r(x) = x if x >= 2^-50, else +0
//
// A workgroup has KEYS keys (x) at one position (y).
#extension GL_GOOGLE_include_directive : require
#include "dense.glsl"
#include "index.glsl"
#include "scores.glsl"

layout(local_size_x = 256) in;

void main() {
	Index p = Index(params);
	uint t = gl_LocalInvocationIndex, i = gl_WorkGroupID.y, first = gl_WorkGroupID.x * KEYS, k = first + t / 2, all = p.pos + i + 1;
	if (first >= all) {
		return;
	}
	bool live = k < all;
	uint most = 0;
	precise float score = 0.0;
	for (uint h = 0; h < p.heads; h += QUERIES) {
		float sum[QUERIES][8];
		noLanes(sum);
		uint queries = min(QUERIES, p.heads - h);
		dots(sum, most, p.q + 4 * ((uint64_t(i) * p.heads + h) * p.k.width), queries, p.k.width, p.k, live ? k : 0, live);
		float tree[QUERIES / 2];
		ofPairs(tree, sum, queries);
		barrier();
		[[unroll]] for (uint n = 0; n < QUERIES / 2; n++) {
			half_[n][0][t] = tree[n];
		}
		barrier();
		[[unroll]] for (uint n = 0; n < QUERIES; n++) { // both invocations add all of them
			float d = half_[n % (QUERIES / 2)][0][t / 2 * 2 + n / (QUERIES / 2)];
			if (n < queries && d >= uintBitsToFloat(TINY)) {
				precise float product = clean(Floats(p.w).v[i * p.heads + h + n]) * d;
				score = score + product;
			}
		}
	}
	if (live) {
		look(most, score);
		if (t % 2 == 0) {
			Floats(p.score + 4 * (uint64_t(i) * p.stride + k)).v[0] = score;
		}
	}
	saw(p.fail, most);
}
