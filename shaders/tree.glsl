// tree16 adds the lanes of sixteen invocations: j with j+8, then j+4, j+2, j+1. All
// get the sum. The whole workgroup of THREADS calls it. Of two buffers one is read
// while the other is written, so a barrier a step is enough.
shared float lanes[2][THREADS];

float tree16(float lane) {
	uint t = gl_LocalInvocationIndex, side = 0;
	precise float sum = lane;
	[[unroll]] for (uint h = 8; h > 0; h /= 2) {
		lanes[side][t] = sum;
		barrier();
		sum = sum + lanes[side][t ^ h];
		side ^= 1;
	}
	return sum;
}
