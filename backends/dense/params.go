package dense

// The parameters of kernels, as the structs of shaders/dense.cu lay them out.

type normParams struct {
	y, x, weight, bias uint64
	fail               Failure
	n, runs            uint32
	inv, eps           float32
}

type ropeParams struct {
	x, cos, sin                         uint64
	rows, dim, headDim, half, skip, pos uint32
	pairs, _                            uint32
}

type storeParams struct {
	x, code, scale  uint64
	fail            Failure
	row             uint64
	n, heads, dim   uint32
	width, from     uint32
	positions, kind uint32
	_               uint32
}

// A plane is the keys or the values of a layer.
type plane struct {
	code, scale uint64
	width, kind uint32
}

type attendParams struct {
	q, y, score, part         uint64
	k, v                      plane
	keys, count, sinks        uint64
	fail                      Failure
	n, pos                    uint32
	heads, kvHeads, positions uint32
	dim                       uint32
	window, chunk, most       uint32
	stride, chunks, first     uint32
	factor                    float32
	_                         uint32
}

type indexParams struct {
	q, w, score, keys, count    uint64
	k                           plane
	fail                        Failure
	n, pos, heads, most, stride uint32
	_                           uint32
}

type combineParams struct {
	x, out, weights, shared uint64
	n, k, dim               uint32
	_                       uint32
}

type eachParams struct {
	y, x, f uint64
	fail    Failure
	n, dim  uint32
	by      float32
	how     uint32
}

// What eachParams.how says.
const (
	eachAdd     = iota // y = y + x
	eachScale          // y = x*f, with an f for each row of dim floats, or by
	eachSigmoid        // y = y*sigmoid(x), with an x for each run of dim floats
	eachSiLU           // y = SiLU(clean(x))*y
	eachZero           // y = +0
)

type runsParams struct {
	to, from                           uint64
	toRows, fromRows                   uint64
	n, groups, run                     uint32
	toRow, toGroup, fromRow, fromGroup uint32
	_                                  uint32
}

type deltaParams struct {
	qkv, a, b, past, conv, rate, bias                      uint64
	out, decay, beta, next, from, to, y                    uint64
	fail                                                   Failure
	n, keyHeads, valueHeads, keyDim, valueDim, taps, tiled uint32
	unit                                                   float32
}

// Sizes of the kernels' groups of threads.
const (
	groupFloats  = 256 // of kernels that make one float a thread
	shortNorm    = 512 // floats of a run of which a group makes sixteen
	scoreKeys    = 128 // keys of a group of scores
	scoreQueries = 4   // query heads that share a key there
	chunkKeys    = 256 // keys whose sums are formed apart from the others'
	deltaRows    = 16  // rows of a head's matrix that a group takes

	widestHead = 1024 // floats of a head of a delta net
	widestKey  = 256  // floats of a key of a delta net
)
