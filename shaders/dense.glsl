// What the kernels of a model's other steps share (dense_*.comp): they are those of
// dense.cu, which says of each what it computes. A kernel finds its struct of
// parameters, laid out as in dense.cu, at the address that it is given.
#include "common.glsl"

layout(push_constant) uniform Push { uint64_t params; };

const uint KVTINY = 0x33800000u; // bits of 2^-24

// Failure is where a step leaves its number, if none has left one before it.
struct Failure {
	uint64_t at;
	uint step;
	uint pad;
};

// saw is told the bits of some |x| that a step has read.
void saw(Failure f, uint most) {
	if (most > LARGEST) {
		atomicCompSwap(Words(f.at).v[0], 0, f.step);
	}
}

void look(inout uint most, float x) {
	most = max(most, floatBitsToUint(x) & ~SIGN);
}

// workgroup is the number of a workgroup of those whose x and y count as one number:
// of x alone a device may allow no more than 65535.
uint workgroup() {
	return gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
}
