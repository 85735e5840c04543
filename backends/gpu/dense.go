package gpu

// This file is how the host speaks to the kernels of shaders/dense.cu: parameters as
// its structs lay them out.

// A failure is where a step leaves its number when it meets an activation that is
// out of range, unless a step before it has left one.
type failure struct {
	at   uint64
	step uint32
	_    uint32
}

type normParams struct {
	y, x, weight, bias uint64
	fail               failure
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
	fail            failure
	row             uint64
	n, heads, dim   uint32
	width, from     uint32
	positions, kind uint32
	_               uint32
}

// A planeParams is the keys or the values of a layer.
type planeParams struct {
	code, scale uint64
	width, kind uint32
}

type attendParams struct {
	q, y, score, part         uint64
	k, v                      planeParams
	keys, count, sinks        uint64
	fail                      failure
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
	k                           planeParams
	fail                        failure
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
	fail                                                   failure
	n, keyHeads, valueHeads, keyDim, valueDim, taps, tiled uint32
	unit                                                   float32
}

// Sizes of the kernels' blocks.
const (
	shortNorm    = 512 // floats of a run of which a block makes sixteen
	scoreKeys    = 128 // keys of a block of scores
	scoreQueries = 4   // query heads that share a key there
)

// step starts a kernel of dense.cu.
func step[T any](d *Device, name string, grid [3]int, threads int, params T) error {
	k, err := d.kernel("dense", name)
	if err != nil {
		return err
	}
	return launch(d, d.kernels, k, grid, threads, params)
}
