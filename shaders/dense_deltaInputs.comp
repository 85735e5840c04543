#version 460
// Queries, keys and values of a delta net, decays and write strengths: backends/cpu
// deltaInputs.
//
//	u = +0; u = u + w_tap*clean(qkv) for the taps ascending; u = clean(SiLU(u))
//	queries and keys: r = rsqrt((sum of u^2, 16 lanes) + 1e-6); u = (u*r)*unit, +0 below 2^-24
//	decay = exp(rate*softplus(a + bias)), +0 below 2^-24; beta = sigmoid(b)
//
// A workgroup has one head (x) at one position (y).
#extension GL_GOOGLE_include_directive : require
#include "dense.glsl"
#include "delta.glsl"

const uint THREADS = 128;
layout(local_size_x = 128) in;
#include "tree.glsl"

const uint WIDEST = 1024; // head of a delta net

shared float u[WIDEST];
shared float total;

float softplus(float x) {
	precise float e = expo(uintBitsToFloat(floatBitsToUint(x) | SIGN));
	precise float d = 2.0 + e;
	precise float s = e * rcp(d), q = s * s;
	precise float p = uintBitsToFloat(0x3d9d89d9u);
	p = p * q + uintBitsToFloat(0x3dba2e8cu);
	p = p * q + uintBitsToFloat(0x3de38e39u);
	p = p * q + uintBitsToFloat(0x3e124925u);
	p = p * q + uintBitsToFloat(0x3e4ccccdu);
	p = p * q + uintBitsToFloat(0x3eaaaaabu);
	precise float t = s + s;
	precise float y = (x > 0.0 ? x : 0.0) + (t + t * (q * p));
	return y;
}

// before is the cleaned input of the convolution at a position, which may lie before
// the step.
float before(Delta p, int pos, uint c, uint channels) {
	if (pos >= 0) {
		return clean(Floats(p.qkv + 4 * (uint64_t(uint(pos)) * channels + c)).v[0]);
	}
	return Floats(p.past).v[uint(pos + int(p.taps) - 1) * channels + c];
}

void main() {
	Delta p = Delta(params);
	uint t = gl_LocalInvocationIndex, head = gl_WorkGroupID.x, pos = gl_WorkGroupID.y, n = p.n, taps = p.taps, most = 0;
	uint channels = 2 * p.keyHeads * p.keyDim + p.valueHeads * p.valueDim;
	bool value = head >= 2 * p.keyHeads;
	uint width = p.keyDim, first = head * width;
	if (value) {
		width = p.valueDim;
		first = 2 * p.keyHeads * p.keyDim + (head - 2 * p.keyHeads) * width;
	}
	uint64_t row = 4 * (uint64_t(pos) * channels + first);
	Floats qkv = Floats(p.qkv + row), inputs = Floats(p.inputs + row);
	for (uint c = t; c < width; c += 128) {
		look(most, qkv.v[c]);
		precise float sum = 0.0;
		for (uint tap = 0; tap < taps; tap++) {
			precise float product = Floats(p.conv).v[tap * channels + first + c] * before(p, int(pos + 1 + tap) - int(taps), first + c, channels);
			sum = sum + product;
		}
		float x = silu(sum);
		look(most, x);
		u[c] = clean(x);
		// What the next step finds before it.
		if (pos + taps > n) {
			Floats(p.next).v[(pos + taps - 1 - n) * channels + first + c] = clean(qkv.v[c]);
		}
		if (pos == 0) {
			for (uint r = 0; r + n + 1 < taps; r++) {
				Floats(p.next).v[r * channels + first + c] = Floats(p.past).v[(r + n) * channels + first + c];
			}
		}
	}
	barrier();
	precise float lane = 0.0;
	if (!value && t < 16) {
		for (uint c = t; c < width; c += 16) {
			precise float square = u[c] * u[c];
			lane = lane + square;
		}
	}
	lane = tree16(lane);
	if (t == 0) {
		total = lane;
	}
	barrier();
	precise float a = total + uintBitsToFloat(0x358637bdu); // 1e-6
	float r = rsqrt(a), unit = 1.0;
	if (head < p.keyHeads) {
		unit = p.unit;
	}
	for (uint c = t; c < width; c += 128) {
		precise float x = u[c];
		if (!value) {
			x = (x * r) * unit;
			look(most, x);
			if ((floatBitsToUint(x) & ~SIGN) < KVTINY) {
				x = 0.0;
			}
		}
		inputs.v[c] = x;
	}
	if (value && t == 0) {
		uint h = pos * p.valueHeads + head - 2 * p.keyHeads;
		precise float step = Floats(p.a).v[h];
		float strength = Floats(p.b).v[h];
		look(most, step);
		look(most, strength);
		step = step + Floats(p.bias).v[head - 2 * p.keyHeads];
		precise float d = Floats(p.rate).v[head - 2 * p.keyHeads] * softplus(step);
		d = expo(d);
		Floats(p.decay).v[h] = floatBitsToUint(d) < KVTINY ? 0.0 : d;
		Floats(p.beta).v[h] = sigmoid(strength);
	}
	saw(p.fail, most);
}
