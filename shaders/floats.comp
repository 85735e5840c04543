#version 460
// Rows of float matrices times cleaned vectors: backends/cpu floatRow.
//
//	lane[i mod 16] += clean(w_i)*x_i, i ascending; lanes j and j+8, j+4, j+2, j+1 are added; + bias
//
// Sixteen invocations, a lane each, make one row for up to 8 positions of a job.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

const uint ROWS = 16;
const uint POSITIONS = 8;
layout(local_size_x = 256) in; // ROWS * 16

layout(constant_id = 0) const uint TYPE = 0; // of GGML
const uint F32 = 0, F16 = 1, BF16 = 30;

layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer Params {
	uvec4 groups; // rows/ROWS, jobs, positions/8
	uint64_t jobs;
	uint64_t index;
	uint64_t x; // floats [n, cols], cleaned
	uint64_t unused0, unused1;
	uint rows, cols, rowBytes;
};
struct Job {
	uint64_t w, y, bias;
	uint first, n, stride, step;
};
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer Jobs { Job v[]; };
layout(push_constant) uniform Push { uint64_t params; };

uint inputRow(Params p, Job job, uint i) { return p.index == 0 ? job.first + i * job.step : Words(p.index).v[job.first + 2 * i]; }
uint outputRow(Params p, Job job, uint i) { return p.index == 0 ? i : Words(p.index).v[job.first + 2 * i + 1]; }

shared float lanes[ROWS][16];

float weight(uint64_t row, uint i) {
	if (TYPE == F32) {
		return clean(Floats(row).v[i]);
	}
	uint64_t at = row + 2 * i;
	uint h = (Words(at & ~uint64_t(3)).v[0] >> (8 * (uint(at) & 2))) & 0xffffu;
	return TYPE == F16 ? fromF16(h) : clean(uintBitsToFloat(h << 16));
}

void main() {
	Params p = Params(params);
	Job job = Jobs(p.jobs).v[gl_WorkGroupID.y];
	uint first = gl_WorkGroupID.z * POSITIONS;
	if (first >= job.n) {
		return;
	}
	uint n = min(POSITIONS, job.n - first);
	uint t = gl_LocalInvocationIndex, lane = t % 16, r = gl_WorkGroupID.x * ROWS + t / 16;
	bool live = r < p.rows;
	precise float sum[POSITIONS];
	uint64_t x[POSITIONS];
	[[unroll]] for (uint j = 0; j < POSITIONS; j++) {
		sum[j] = 0.0;
		x[j] = p.x;
		if (j < n) {
			x[j] += uint64_t(inputRow(p, job, first + j)) * p.cols * 4;
		}
	}
	if (live) {
		uint64_t row = job.w + uint64_t(r) * p.rowBytes;
		for (uint i = lane; i < p.cols; i += 16) {
			float w = weight(row, i);
			[[unroll]] for (uint j = 0; j < POSITIONS; j++) {
				if (j < n) {
					precise float product = w * Floats(x[j]).v[i];
					sum[j] = sum[j] + product;
				}
			}
		}
	}
	for (uint j = 0; j < n; j++) {
		lanes[t / 16][lane] = sum[j];
		barrier();
		[[unroll]] for (uint h = 8; h > 0; h /= 2) {
			precise float s = 0.0;
			if (lane < h) {
				s = lanes[t / 16][lane] + lanes[t / 16][lane + h];
			}
			barrier();
			if (lane < h) {
				lanes[t / 16][lane] = s;
			}
			barrier();
		}
		if (live && lane == 0) {
			precise float y = lanes[t / 16][0];
			if (job.bias != 0) {
				y = y + Floats(job.bias).v[r];
			}
			uint to = outputRow(p, job, first + j);
			put(job.y + (uint64_t(to) * job.stride + r) * 4, floatBitsToUint(y));
		}
		barrier();
	}
}
