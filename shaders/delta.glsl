// The parameters of a delta net.
layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer Delta {
	uint64_t qkv;          // floats [n, channels]
	uint64_t a, b;         // floats [n, valueHeads]
	uint64_t past;         // floats [taps-1, channels], oldest first
	uint64_t conv;         // floats [taps, channels]
	uint64_t rate, bias;   // floats [valueHeads]
	uint64_t inputs;       // floats [n, channels] queries, keys, values: made, then read
	uint64_t decay, beta;  // floats [n, valueHeads]
	uint64_t next;         // floats [taps-1, channels] what past is for the next step
	uint64_t from;         // floats [valueHeads, valueDim, keyDim]
	uint64_t to;           // the same after the step
	uint64_t y;            // floats [n, valueHeads, valueDim]; 0: none is wanted
	Failure fail;
	uint n, keyHeads, valueHeads, keyDim, valueDim, taps;
	uint tiled;
	float unit; // 1/sqrt(keyDim)
};
