// Products of queries with keys, of workgroups of 256: two invocations have a key,
// eight of its sixteen lanes each.
const uint DIMS = 256; // floats of queries that are in shared memory at once

shared vec4 tile[QUERIES][DIMS / 4];
shared float half_[QUERIES / 2][8][256]; // lanes that an invocation gives to its neighbour

// products adds to sum[i], the lanes 8*half, 8*half+1, ... of an invocation, the products
// of n floats of a key with those of query i in the tile, which is 0 behind them: there
// the last of the key are read again.
void products(inout float sum[QUERIES][8], Plane k, uint type, uint64_t at, uint n) {
	for (uint c = 8 * (gl_LocalInvocationIndex % 2); c < n; c += 64) {
		float f[4][8]; // all are read before one is used
		[[unroll]] for (uint m = 0; m < 4; m++) {
			eight(f[m], k, type, at + (c + 16 * m < n ? c + 16 * m : c));
		}
		[[unroll]] for (uint m = 0; m < 4; m++) {
			[[unroll]] for (uint i = 0; i < QUERIES; i++) {
				vec4 q[2] = vec4[2](tile[i][c / 4 + 4 * m], tile[i][c / 4 + 4 * m + 1]);
				[[unroll]] for (uint j = 0; j < 8; j++) {
					precise float product = f[m][j] * q[j / 4][j % 4];
					precise float s = sum[i][j] + product;
					sum[i][j] = s;
				}
			}
		}
	}
}

// dots adds the products of a key's row with query i of at most QUERIES, `apart` floats
// from one to the next. The whole workgroup calls it; those that are not live have no
// key. most is told of the queries.
void dots(inout float sum[QUERIES][8], inout uint most, uint64_t q, uint queries, uint apart, Plane k, uint64_t row, bool live) {
	uint t = gl_LocalInvocationIndex;
	for (uint d = 0; d < k.width; d += DIMS) {
		uint n = min(DIMS, k.width - d);
		uint64_t at = row * k.width + d;
		barrier(); // nobody needs what was there
		float x[QUERIES]; // all are read before one is used
		[[unroll]] for (uint i = 0; i < QUERIES; i++) {
			x[i] = 0.0;
			if (i < queries && t < n) {
				x[i] = Floats(q + 4 * (uint64_t(i) * apart + d + t)).v[0];
			}
		}
		[[unroll]] for (uint i = 0; i < QUERIES; i++) {
			look(most, x[i]);
			tile[i][t / 4][t % 4] = clean(x[i]);
		}
		barrier();
		if (!live) {
			continue;
		}
		if (k.width % 16 != 0) { // one by one; what is behind the row counts as +0
			for (uint c = 8 * (t % 2); c < n; c += 16) {
				[[unroll]] for (uint j = 0; j < 8; j++) {
					float f = 0.0;
					if (c + j < n) {
						f = one(k, k.type, at + c + j);
					}
					[[unroll]] for (uint i = 0; i < QUERIES; i++) {
						precise float product = f * tile[i][c / 4 + j / 4][j % 4];
						precise float s = sum[i][j] + product;
						sum[i][j] = s;
					}
				}
			}
		} else if (k.type == KV_F16) {
			products(sum, k, KV_F16, at, n);
		} else {
			products(sum, k, k.type, at, n);
		}
	}
}

// ofPairs gives the trees of the sixteen lanes that two invocations have of each query:
// the even one gets those of queries 0 and 1, the odd one those of 2 and 3. The whole
// workgroup calls it.
void ofPairs(out float tree[QUERIES / 2], float lane[QUERIES][8], uint queries) {
	uint t = gl_LocalInvocationIndex;
	bool odd = t % 2 != 0;
	barrier();
	[[unroll]] for (uint i = 0; i < QUERIES / 2; i++) {
		if (i < queries) { // the workgroup agrees
			[[unroll]] for (uint j = 0; j < 8; j++) {
				half_[i][j][t] = odd ? lane[i][j] : lane[i + QUERIES / 2][j];
			}
		}
	}
	barrier();
	[[unroll]] for (uint i = 0; i < QUERIES / 2; i++) {
		tree[i] = 0.0;
		if (i < queries) {
			precise float l[8];
			[[unroll]] for (uint j = 0; j < 8; j++) {
				l[j] = (odd ? lane[i + QUERIES / 2][j] : lane[i][j]) + half_[i][j][t ^ 1];
			}
			precise float sum = ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
			tree[i] = sum;
		}
	}
}

void noLanes(out float sum[QUERIES][8]) {
	[[unroll]] for (uint i = 0; i < QUERIES; i++) {
		[[unroll]] for (uint j = 0; j < 8; j++) {
			sum[i][j] = 0.0;
		}
	}
}
