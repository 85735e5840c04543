// The parameters of attention, and which keys a query sees.
#include "cache.glsl"

layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer Attention {
	uint64_t q;     // floats [n, heads, k.width]
	uint64_t y;     // floats [n, heads, dim]
	uint64_t score; // floats [n, heads, stride]
	uint64_t part;  // floats [n, heads, chunks, dim]
	Plane k, v;     // of a latent cache the same
	uint64_t keys;  // int32 [n, most], the chosen ones of each position, ascending; 0: no choice
	uint64_t count; // int32 [n]
	uint64_t sinks; // floats [heads]; 0: none
	Failure fail;
	uint n, pos; // positions pos, pos+1, ...
	uint heads, kvHeads, positions;
	uint dim; // of a value
	uint window, chunk, most;
	uint stride; // at least the keys of the last position
	uint chunks; // of 256 keys that some query sees a part of
	uint first;  // the number of the first of them
	float factor;
	uint pad;
};

const uint CHUNK = 256; // keys whose sums are formed apart from the others'

// Seen are the keys of a query, by their numbers among those of its position: a key
// is its own number, or where keys are chosen its place in their list.
struct Seen {
	uint64_t keys;
	uint start, end;
};

// seenBy is backends.Attention.First, or the list.
Seen seenBy(Attention p, uint i) {
	uint pos = p.pos + i;
	if (p.keys != 0) {
		return Seen(p.keys + 4 * uint64_t(i) * p.most, 0, Words(p.count).v[i]);
	}
	uint start = 0;
	if (p.window > 0 && pos + 1 > p.window) {
		start = pos + 1 - p.window;
	}
	if (p.chunk > 0) {
		start = max(start, pos - pos % p.chunk);
	}
	return Seen(0, start, pos + 1);
}

uint keyOf(Seen s, uint j) {
	return s.keys != 0 ? Words(s.keys).v[j] : j;
}

// firstFrom is the least number whose key is at least k.
uint firstFrom(Seen s, uint k) {
	if (s.keys == 0) {
		return k < s.start ? s.start : k > s.end ? s.end : k;
	}
	uint low = s.start, high = s.end;
	while (low < high) {
		uint middle = (low + high) / 2;
		if (Words(s.keys).v[middle] < k) {
			low = middle + 1;
		} else {
			high = middle;
		}
	}
	return low;
}
