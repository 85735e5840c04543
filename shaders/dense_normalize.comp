#version 460
// Runs of n floats are normalised: backends/cpu rmsNorm and layerNormStep; y may be x.
//
//	m = 0, or with a bias (sum of clean(x), 16 lanes)*inv
//	d = clean(clean(x) - m); q = sum of d^2, 16 lanes; r = rsqrt(q*inv + eps)
//	y = (d*r)*weight, + bias
//
// Sixteen invocations make a short run, a workgroup makes a long one: all of it read,
// sixteen add. An invocation writes what it has read, so that y may be x.
#extension GL_GOOGLE_include_directive : require
#include "dense.glsl"

const uint THREADS = 256;
layout(local_size_x = 256) in;
#include "tree.glsl"

const uint TILE = 2048;
const uint SHORT = 512;

layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer Norm {
	uint64_t y;
	uint64_t x;
	uint64_t weight; // floats [n]
	uint64_t bias;   // floats [n]; 0: none, and the mean stays
	Failure fail;
	uint n, runs;
	float inv, eps; // inv is 1/n
};

shared float tile[TILE];
shared float total;

// takeMean is what is left of x: clean(clean(x) - m). With m of 0 it is clean(x).
float takeMean(float x, float m) {
	precise float d = clean(x) - m;
	return clean(d);
}

void main() {
	Norm p = Norm(params);
	uint t = gl_LocalInvocationIndex, most = 0, step = 256, first = t, run = workgroup(), n = p.n;
	if (n <= SHORT) {
		step = 16;
		first = t % 16;
		run = run * 16 + t / 16;
	}
	Floats x = Floats(p.x + 4 * (uint64_t(run) * n)), y = Floats(p.y + 4 * (uint64_t(run) * n));
	if (run >= p.runs) {
		n = 0;
	}
	bool mean = p.bias != 0;
	precise float m = 0.0, q = 0.0;
	for (uint pass = mean ? 0 : 1; pass < 2; pass++) {
		precise float lane = 0.0;
		if (step == 16) {
			for (uint i = first; i < n; i += 16) {
				float v = x.v[i];
				look(most, v);
				v = takeMean(v, m);
				precise float term = v;
				if (pass == 1) {
					term = v * v;
				}
				lane = lane + term;
			}
			lane = tree16(lane);
		} else {
			for (uint base = 0; base < n; base += TILE) {
				uint end = min(TILE, n - base);
				for (uint i = t; i < end; i += 256) {
					float v = x.v[base + i];
					look(most, v);
					v = takeMean(v, m);
					precise float term = v;
					if (pass == 1) {
						term = v * v;
					}
					tile[i] = term;
				}
				barrier();
				if (t < 16) {
					for (uint i = t; i < end; i += 16) {
						lane = lane + tile[i];
					}
				}
				barrier();
			}
			lane = tree16(lane);
			if (t == 0) {
				total = lane;
			}
			barrier();
			lane = total;
			barrier();
		}
		if (pass == 0) {
			m = lane * p.inv;
		} else {
			q = lane;
		}
	}
	precise float a = q * p.inv + p.eps;
	float r = rsqrt(a);
	for (uint i = first; i < n; i += step) {
		precise float v = (takeMean(x.v[i], m) * r) * Floats(p.weight).v[i];
		if (mean) {
			v = v + Floats(p.bias).v[i];
		}
		y.v[i] = v;
	}
	saw(p.fail, most);
}
