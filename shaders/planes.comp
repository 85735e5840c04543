#version 460
// Blocks of a matrix become planes, as planes.glsl says. An invocation makes a quad:
// to[i] = from[block of i + its place there + i mod its size], for 16 bytes i of a plane.
//
// Nibbles of MXFP4 get codes that rows.comp turns into values with few operations,
// and its exponents become those of a float: 0 where a scale counts as +0.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "planes.glsl"

layout(local_size_x = 64) in;

layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer Params {
	uvec4 groups;
	uint64_t from;    // blocks, a multiple of 4
	uint64_t to;      // of the whole matrix
	uint first, n;    // units that are there; first is a multiple of 64
	uint units;       // of the matrix
};
layout(push_constant) uniform Push { uint64_t params; };

// Where in a block its codes, its fifth bits and its scale are, and its bytes.
const uint CODES = TYPE == MXFP4 ? 1 : UNIT == 256 ? 0 : TYPE == Q5_0 ? 6 : TYPE == Q5_1 ? 8 : SCALE;
const uint FIFTHS_AT = CODES - 4;
const uint SCALE_AT = TYPE == Q6_K ? 208 : 0;
const uint BYTES = CODES + PER * QUADS * 16 + (TYPE == Q6_K ? 2 : 0);

uint wordAt(uint64_t at) {
	uint shift = 8 * (uint(at) & 3);
	Words w = Words(at & ~uint64_t(3));
	return shift == 0 ? w.v[0] : (w.v[0] >> shift) | (w.v[1] << (32 - shift));
}
uint byteAt(uint64_t at) { return (Words(at & ~uint64_t(3)).v[0] >> (8 * (uint(at) & 3))) & 0xffu; }

// recoded turns codes 0 1 2 3 4 6 8 12 of E2M1 into 0 5 1 7 2 3 4 6, eight nibbles.
uint recoded(uint word) {
	uint r = word & 0x88888888u;
	[[unroll]] for (uint i = 0; i < 32; i += 4) {
		r |= ((0x64327150u >> (4 * ((word >> i) & 7u))) & 7u) << i;
	}
	return r;
}

void main() {
	Params p = Params(params);
	Places places = placesOf(p.units);
	uint quad = gl_GlobalInvocationID.x;
	uint codes = ((p.n + 7) & ~7u) * QUADS, fifths = FIFTHS ? (p.n + 3) / 4 : 0, scales = (p.n / PER * SCALE + 15) / 16;
	uvec4 v = uvec4(0);
	uint64_t to;
	if (quad < codes) {
		uint unit = quad / (8 * QUADS) * 8 + quad % 8;
		if (unit >= p.n) {
			return;
		}
		uint64_t from = p.from + uint64_t(unit / PER) * BYTES + CODES + (unit % PER * QUADS + quad / 8 % QUADS) * 16;
		v = uvec4(wordAt(from), wordAt(from + 4), wordAt(from + 8), wordAt(from + 12));
		if (TYPE == MXFP4) {
			v = uvec4(recoded(v.x), recoded(v.y), recoded(v.z), recoded(v.w));
		}
		to = p.to + 16 * (uint64_t(p.first) * QUADS + quad);
	} else if (quad - codes < fifths) {
		quad -= codes;
		for (uint i = 0; i < 4; i++) {
			if (4 * quad + i < p.n) {
				v[i] = wordAt(p.from + uint64_t(4 * quad + i) * BYTES + FIFTHS_AT);
			}
		}
		to = p.to + places.fifths + 4 * uint64_t(p.first) + 16 * quad;
	} else {
		quad -= codes + fifths;
		if (quad >= scales) {
			return;
		}
		const uint SIZE = SCALE == 0 ? 1 : SCALE;
		for (uint i = 0; i < 16; i++) {
			uint block = (16 * quad + i) / SIZE;
			if (block < p.n / PER) {
				uint b = byteAt(p.from + uint64_t(block) * BYTES + SCALE_AT + i % SIZE);
				if (TYPE == MXFP4) {
					b = b < 83 ? 0 : b - 1;
				}
				v[i / 4] |= b << (8 * (i % 4));
			}
		}
		to = p.to + places.scales + p.first / PER * SCALE + 16 * quad;
	}
	for (uint i = 0; i < 4; i++) {
		put(to + 4 * i, v[i]);
	}
}
