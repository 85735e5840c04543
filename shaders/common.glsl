// What every kernel here starts with: the extensions, the float modes, and the
// functions of the one arithmetic (docs/arithmetic.md, sections 1 and 3).
//
// Every float operation is one rounding. `precise` on what receives a result is
// what keeps a compiler from fusing it; a test reads the binaries and finds
// NoContraction on each.
#extension GL_EXT_buffer_reference : require
#extension GL_EXT_shader_explicit_arithmetic_types : require
#extension GL_EXT_spirv_intrinsics : require
#extension GL_EXT_control_flow_attributes : require

// RoundingModeRTE 32 and SignedZeroInfNanPreserve 32 (SPV_KHR_float_controls).
spirv_execution_mode(extensions = ["SPV_KHR_float_controls"], capabilities = [4467], 4462, 32);
spirv_execution_mode(extensions = ["SPV_KHR_float_controls"], capabilities = [4466], 4461, 32);

layout(buffer_reference, std430, buffer_reference_align = 4) buffer Floats { float v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) buffer Words { uint v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer Quads { uvec4 v[]; };

// put is how a kernel writes a word of its result. The variants for counting add
// to it instead: a test finds that each word has one writer.
void put(uint64_t at, uint bits) {
#ifdef COUNT
	atomicAdd(Words(at).v[0], 1);
#else
	Words(at).v[0] = bits;
#endif
}

const uint SIGN = 0x80000000u;
const uint TINY = 0x26800000u;    // bits of 2^-50
const uint LARGEST = 0x58800000u; // bits of 2^50

float clean(float x) {
	return (floatBitsToUint(x) & ~SIGN) < TINY ? 0.0 : x;
}

float rcp(float a) {
	precise float y = uintBitsToFloat(0x7ef311c0u - floatBitsToUint(a));
	precise float t = 2.0 - a * y;
	y = y * t;
	t = 2.0 - a * y;
	y = y * t;
	t = 1.0 - a * y;
	y = y + y * t;
	return y;
}

float rsqrt(float a) {
	precise float h = 0.5 * a;
	precise float y = uintBitsToFloat(0x5f376380u - (floatBitsToUint(a) >> 1));
	precise float t = 1.5 - (h * y) * y;
	y = y * t;
	t = 1.5 - (h * y) * y;
	y = y * t;
	t = 0.5 - (h * y) * y;
	y = y + y * t;
	return y;
}

float expo(float x) {
	if (x < -40.0) {
		return 0.0;
	}
	precise float c = x > 40.0 ? 40.0 : x;
	precise float t = c * uintBitsToFloat(0x3fb8aa3bu) + 12582912.0;
	uint n = floatBitsToUint(t) - 0x4b400000u;
	precise float f = t - 12582912.0;
	precise float r = (c - f * 0.693359375) - f * uintBitsToFloat(0xb95e8083u);
	precise float p = uintBitsToFloat(0x3ab5120du);
	p = p * r + uintBitsToFloat(0x3c091cf9u);
	p = p * r + uintBitsToFloat(0x3d2aac79u);
	p = p * r + uintBitsToFloat(0x3e2aaa49u);
	p = p * r + uintBitsToFloat(0x3efffffeu);
	precise float q = ((r * r) * p + r) + 1.0;
	return uintBitsToFloat(floatBitsToUint(q) + (n << 23));
}

float sigmoid(float x) {
	precise float minus = 0.0 - x;
	precise float d = 1.0 + expo(minus);
	return rcp(d);
}

float silu(float x) {
	if (x < -40.0) {
		return 0.0;
	}
	precise float y = x * sigmoid(x);
	return y;
}

// fromF16 is the value of a binary16, exactly, by integers; subnormals too. There
// are no infinities and NaNs: they are refused at load. Both kinds are made and one is
// chosen, so that no branch stands between one load and the next.
float fromF16(uint h) {
	uint a = h & 0x7fffu, normal = (a << 13) + (112u << 23);
	precise float small = uintBitsToFloat(normal + (1u << 23)) - uintBitsToFloat(0x38800000u); // a*2^-24
	uint f = mix(normal, floatBitsToUint(small), a < 0x400u);
	return uintBitsToFloat(f | (h & 0x8000u) << 16);
}
