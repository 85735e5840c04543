// The parameters of the choice of keys.
#include "cache.glsl"

layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer Index {
	uint64_t q;     // floats [n, heads, k.width]
	uint64_t w;     // floats [n, heads]
	uint64_t score; // floats [n, stride]
	uint64_t keys;  // out: int32 [n, most]
	uint64_t count; // out: int32 [n]
	Plane k;
	Failure fail;
	uint n, pos, heads, most, stride, pad;
};
