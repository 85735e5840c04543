#version 460
// The scores of the keys that queries see: backends/cpu scores.
//
//	score = (clean(q).k, 16 lanes)*factor
//
// A workgroup has KEYS keys, numbers KEYS*(x + 2*first) on, and QUERIES query heads of
// one key-value head (y) at one position (z).
#extension GL_GOOGLE_include_directive : require
#include "dense.glsl"
#include "attend.glsl"
#include "scores.glsl"

layout(local_size_x = 256) in;

void main() {
	Attention p = Attention(params);
	uint t = gl_LocalInvocationIndex, i = gl_WorkGroupID.z;
	uint group = p.heads / p.kvHeads, runs = (group + QUERIES - 1) / QUERIES;
	uint g = gl_WorkGroupID.y / runs, in_ = gl_WorkGroupID.y % runs * QUERIES;
	uint queries = min(QUERIES, group - in_);
	Seen seen = seenBy(p, i);
	uint base = (p.keys != 0 ? 0 : 2 * p.first * KEYS) + gl_WorkGroupID.x * KEYS, j = base + t / 2;
	if (base >= seen.end || base + KEYS <= seen.start) {
		return;
	}
	bool live = j >= seen.start && j < seen.end;
	uint key = 0;
	if (live) {
		key = keyOf(seen, j);
	}
	uint64_t query = uint64_t(i) * p.heads + g * group + in_;
	float sum[QUERIES][8];
	noLanes(sum);
	uint most = 0;
	dots(sum, most, p.q + 4 * query * p.k.width, queries, p.k.width, p.k, uint64_t(g) * p.positions + key, live);
	saw(p.fail, most);
	float tree[QUERIES / 2];
	ofPairs(tree, sum, queries);
	[[unroll]] for (uint n = 0; n < QUERIES / 2; n++) {
		uint mine = n + t % 2 * (QUERIES / 2);
		if (live && mine < queries) {
			precise float score = tree[n] * p.factor;
			Floats(p.score + 4 * ((query + mine) * p.stride + j)).v[0] = score;
		}
	}
}
