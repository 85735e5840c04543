// The keys and values of a cache, as dense.cu reads them.
const uint KV_F16 = 0, KV_F32 = 1, KV_Q8 = 2; // backends.KVType

layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer Pairs { uvec2 v[]; };

// A Plane is the keys or the values of a cache, from the first row of a layer on.
struct Plane {
	uint64_t code;
	uint64_t scale;
	uint width; // elements of a row
	uint type;
};

// one gives element at of a plane, its rows laid end to end. Where the type is known to
// the compiler nothing is between one load and the next.
float one(Plane p, uint type, uint64_t at) {
	if (type == KV_F32) {
		return Floats(p.code + 4 * at).v[0];
	}
	uint64_t byte = p.code + (type == KV_F16 ? 2 * at : at);
	uint word = Words(byte & ~uint64_t(3)).v[0] >> (8 * (uint(byte) & 3));
	if (type == KV_F16) {
		return fromF16(word & 0xffffu);
	}
	precise float f = float(bitfieldExtract(int(word), 0, 8)) * Floats(p.scale + 4 * (at / 32)).v[0];
	return f;
}

// eight gives elements at, at+1, ..., where at is a multiple of 8, of rows that are
// multiples of 16.
void eight(out float f[8], Plane p, uint type, uint64_t at) {
	if (type == KV_F16) {
		uvec4 q = Quads(p.code + 2 * at).v[0];
		[[unroll]] for (uint i = 0; i < 4; i++) {
			f[2 * i] = fromF16(q[i] & 0xffffu);
			f[2 * i + 1] = fromF16(q[i] >> 16);
		}
	} else if (type == KV_F32) {
		uvec4 a = Quads(p.code + 4 * at).v[0], b = Quads(p.code + 4 * at).v[1];
		[[unroll]] for (uint i = 0; i < 4; i++) {
			f[i] = uintBitsToFloat(a[i]);
			f[i + 4] = uintBitsToFloat(b[i]);
		}
	} else {
		uvec2 q = Pairs(p.code + at).v[0];
		float d = Floats(p.scale + 4 * (at / 32)).v[0];
		[[unroll]] for (uint i = 0; i < 8; i++) {
			precise float x = float(bitfieldExtract(int(q[i / 4]), int(8 * (i % 4)), 8)) * d;
			f[i] = x;
		}
	}
}

const uint QUERIES = 4; // of a workgroup, which share each key and value
const uint KEYS = 128;  // of a workgroup of scores, two invocations each
