#version 460
// The keys with the `most` largest scores, ascending; of equal ones at the end the
// lower: backends/cpu largestAt. A workgroup has one position; an invocation has a run
// of keys.
#extension GL_GOOGLE_include_directive : require
#include "dense.glsl"
#include "index.glsl"

layout(local_size_x = 256) in;

shared uint counts[32];
shared uint sums[256];

// rank is the order of floats as integers; -0 does not come up.
uint rank(uint bits) {
	return bits ^ (uint(int(bits) >> 31) | SIGN);
}

// sumOf adds an integer of each of 256 invocations, and gives what those before have.
uint sumOf(uint v, out uint before) {
	uint t = gl_LocalInvocationIndex, all = 0;
	before = 0;
	barrier();
	sums[t] = v;
	barrier();
	for (uint i = 0; i < 256; i++) {
		if (i == t) {
			before = all;
		}
		all += sums[i];
	}
	return all;
}

void main() {
	Index p = Index(params);
	uint i = workgroup(), t = gl_LocalInvocationIndex, all = p.pos + i + 1, most = p.most;
	if (i >= p.n) {
		return;
	}
	Words keys = Words(p.keys + 4 * uint64_t(i) * most), score = Words(p.score + 4 * uint64_t(i) * p.stride);
	if (t == 0) {
		Words(p.count).v[i] = min(all, most);
	}
	if (all <= most) {
		for (uint k = t; k < all; k += 256) {
			keys.v[k] = k;
		}
		return;
	}
	if (t < 32) {
		counts[t] = 0;
	}
	barrier();
	// The least score that is chosen, bit by bit of its rank.
	uint least = 0;
	for (uint bit = 32; bit-- > 0;) {
		uint n = 0, tried = least | (1u << bit);
		for (uint k = t; k < all; k += 256) {
			n += uint(rank(score.v[k]) >= tried);
		}
		atomicAdd(counts[bit], n);
		barrier();
		if (counts[bit] >= most) {
			least = tried;
		}
	}
	uint run = (all + 255) / 256, from = min(t * run, all), end = min(from + run, all);
	uint above = 0, equal = 0, before, equals;
	for (uint k = from; k < end; k++) {
		uint r = rank(score.v[k]);
		above += uint(r > least);
		equal += uint(r == least);
	}
	uint left = most - sumOf(above, before); // of the equal ones that are chosen
	sumOf(equal, equals);
	uint at = before + min(equals, left);
	for (uint k = from; k < end; k++) {
		uint r = rank(score.v[k]);
		if (r > least || r == least && equals < left) {
			keys.v[at] = k;
			at++;
		}
		equals += uint(r == least);
	}
}
