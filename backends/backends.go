// Package backends is the contract that every compute device meets: a method
// is a whole step of a model, and each step returns the bits of the plain Go
// kernels in backends/cpu, whatever the device, the threads or the batch.
//
// All floats are float32, rounded to nearest even after each operation, in the
// written order; the orders and the own functions (rcp, rsqrt, exp) are
// defined in backends/cpu and told in docs/arithmetic.md.
package backends

import (
	"fmt"

	"sluice/internal/quant"
)

// A Matrix is a weight of Rows rows of Cols elements in host memory; Cols is a
// whole number of blocks of its Type, Data exactly Rows rows.
type Matrix struct {
	Type       quant.Type
	Rows, Cols int
	Data       []byte
}

// A Linear is a matrix with an optional bias [Rows], added after the row.
type Linear struct {
	Matrix
	Bias []float32
}

// An Expert is a gated feed-forward: down of what the activation makes of
// gate(x) and up(x). Gate and Up are [ff, dim], Down is [dim, ff].
type Expert struct {
	Gate, Up, Down             Matrix
	GateBias, UpBias, DownBias []float32 // [ff], [ff], [dim], each added after the row; nil: none
	Act                        Activation
}

// An Activation is what an expert does between gate and up, g and u, and down.
type Activation uint8

const (
	SwiGLU        Activation = iota // SiLU(g)*u
	ClampedSwiGLU                   // g*sigmoid(1.702*g) * (u+1), with g at most 7 and u in -7..7 before; gpt-oss
)

// A Job gives one expert its rows of a batch: each r in Rows is an output row;
// the input row is r divided by the k of the call.
type Job struct {
	Expert Expert
	Rows   []int32
	Fresh  bool // nobody has looked at its weights yet: see ExpertGroup
}

// A HeldJob is a Job of an expert that a device holds: the same rows.
type HeldJob struct {
	Expert int32
	Rows   []int32
}

// A Holder computes experts that it holds in memory of its own, beside the
// backend that does the rest: one group at a time, Start to Finish, of which
// each job's outputs have the bits that ExpertGroup would give.
type Holder interface {
	// Input is where the n vectors [n, dim] of the next group belong.
	Input(n, dim int) []float32
	// Start begins a group of experts of one layer and returns: for each job and
	// each r of its rows the expert of input vector r/k. bias is that of all experts
	// of the layer, [experts, rows] each of gate, up and down, nil for none; it is
	// the same at every Start of a layer.
	Start(layer int, jobs []HeldJob, k, n int, act Activation, bias *[3][]float32) error
	// Finish waits for the group and gives its outputs [rows of all jobs, dim], job
	// by job, good until the next Start; nothing if no group was started. An
	// activation out of range is an *ActivationError.
	Finish() ([]float32, error)
}

// A Taker is a Holder that may take the input of groups from where a backend keeps it.
type Taker interface {
	// Take makes the rows of x what the next groups have for input, in place of what
	// Input gives; x stays as it is until the last of them was started. It says no if x
	// does not lie where the holder reaches it.
	Take(x Vec) (bool, error)
	// Give puts the outputs of the group under way, of all jobs one behind the other,
	// into rows of out, and ends the group as Finish does; it may do so later, but
	// before the backend's next step. It says no if it cannot; then Finish has to be used.
	Give(out Vec, rows []int32) (bool, error)
}

// A Vec is a batch of activation vectors, kept where its backend keeps it.
type Vec interface {
	Len() int     // positions now in the batch
	Dim() int     // floats of one position
	SetLen(n int) // 0 <= n <= the capacity it was made with; what was there stays
}

// An Attention says how the queries of a layer see its keys: one at position p
// sees those of positions 0..p that no window and no chunk keeps from it.
type Attention struct {
	Scale  float32   // of q.k
	Window int       // sees keys p-Window+1..p alone; 0: no window
	Chunk  int       // sees keys from the last multiple of Chunk up to p; 0: no chunks
	Sinks  []float32 // [query heads] a score without a value, in the softmax of its head; nil: none
	Keys   Keys      // sees those of its row alone; nil: all. Without window, chunks and sinks
}

// Keys are, for each position of a batch, the keys that its query sees, kept
// where its backend keeps them.
type Keys interface {
	Len() int  // positions now in the batch
	Most() int // keys of one position
}

// First is the first key that a query at position p sees.
func (a *Attention) First(p int) int {
	first := 0
	if a.Window > 0 {
		first = max(first, p-a.Window+1)
	}
	if a.Chunk > 0 {
		first = max(first, p-p%a.Chunk)
	}
	return first
}

// A Rope is the host's table of rotations: pairs [Positions, Half] of cosine
// and sine. The part that turns begins at element Skip of a head and has 2*Half
// elements; the others stay as they are. In it element i < Half turns with
// element i+Half (NeoX halves), or if Interleaved element 2i with 2i+1.
type Rope struct {
	Half        int
	Skip        int
	Interleaved bool
	Cos, Sin    []float32
}

// KVType is the number format of a key-value cache.
type KVType uint8

const (
	KVF16 KVType = iota // nearest even, overflow to +-65504
	KVF32               // cleaned: below 2^-24 counts as +0
	KVQ8                // int8 codes in blocks of 32 with a float32 scale, quantized like activations
)

func (t KVType) String() string { return [...]string{"f16", "f32", "q8"}[t] }

// ParseKV reads the value of --kv.
func ParseKV(s string) (KVType, error) {
	for t := KVF16; t <= KVQ8; t++ {
		if t.String() == s {
			return t, nil
		}
	}
	return 0, fmt.Errorf("unknown KV cache type %q: use f16, f32 or q8", s)
}

// KVShape is the size of a key-value cache: for each layer and position, Heads
// keys of KeyDim floats and Heads values of ValueDim floats. A ValueDim of 0 is a
// cache of keys alone, for ChooseKeys.
type KVShape struct {
	Layers, Positions, Heads, KeyDim, ValueDim int
	Latent                                     bool // a value is the first ValueDim floats of its key, which are kept once
	Type                                       KVType
}

// Bytes is what a cache of this shape takes. KVQ8 needs dims in whole blocks of 32.
func (s KVShape) Bytes() int64 {
	row := func(dim int) int64 {
		switch s.Type {
		case KVF16:
			return int64(dim) * 2
		case KVF32:
			return int64(dim) * 4
		default:
			return int64(dim) / 32 * 36
		}
	}
	each := row(s.KeyDim)
	if !s.Latent {
		each += row(s.ValueDim)
	}
	return int64(s.Layers) * int64(s.Positions) * int64(s.Heads) * each
}

// A KV is a key-value cache of one sequence, kept by its backend.
type KV interface {
	Shape() KVShape
}

// A DeltaShape is the size of what gated delta net layers keep of one sequence,
// for each layer: the last Taps-1 inputs of the convolution, and for each value
// head a matrix [ValueDim, KeyDim] of floats. ValueHeads is a multiple of
// KeyHeads; both dims are multiples of 16; Taps is at least 2.
type DeltaShape struct {
	Layers, KeyHeads, ValueHeads, KeyDim, ValueDim, Taps int
}

// Channels is the floats of a position that the convolution runs over: KeyHeads
// queries, KeyHeads keys, ValueHeads values.
func (s DeltaShape) Channels() int { return 2*s.KeyHeads*s.KeyDim + s.ValueHeads*s.ValueDim }

// DeltaReach is how many positions a step may have so that a later step can
// begin inside it.
const DeltaReach = 16

// Bytes is what a state of this shape takes: the state before and after the last
// step of each layer, and the inputs of the positions between, once more for
// the layer that computes them again.
func (s DeltaShape) Bytes() int64 {
	state := int64(s.ValueHeads)*int64(s.ValueDim)*int64(s.KeyDim) + int64(s.Taps-1)*int64(s.Channels())
	inputs := DeltaReach * int64(s.Channels()+2*s.ValueHeads)
	return 4 * (int64(s.Layers)*(2*state+inputs) + min(int64(s.Layers), 1)*inputs)
}

// A Delta is what the gated delta net layers of one sequence keep. It begins as
// zeros, at position 0. A layer's step at pos goes on where its last step ended,
// or goes back: to position 0, to where its last step began, or into that step
// if it had at most DeltaReach positions. Any other pos is misuse.
type Delta interface {
	Shape() DeltaShape
}

// A DeltaNet is the weights of a gated delta net layer (arXiv:2412.06464) between
// its projections: docs/arithmetic.md has the steps from the inputs of the
// convolution (qkv: all queries, all keys, all values), the time steps a, the
// write strengths b and the output's gates z.
type DeltaNet struct {
	Conv  []float32 // [Taps, Channels], the tap of the oldest position first
	A     []float32 // [ValueHeads], negative or zero: -exp(A_log)
	Bias  []float32 // [ValueHeads], of the time step
	Norm  []float32 // [ValueDim], of each head's output
	Eps   float32
	Tiled bool // value head h reads key head h mod KeyHeads, else h / (ValueHeads / KeyHeads)
}

// A Backend runs the steps of a model. Calls come from one goroutine, in
// order; a backend may do the work later, but Read waits for it. A step that
// meets an activation that is NaN or above 2^50 remembers that, and the next
// Read returns it as an *ActivationError and forgets it.
//
// A step sets the length of the vector that it writes whole (Embed, RMSNorm,
// MatMul, Attend, Gather, Concat); out of ExpertGroup has its length already. Where y
// may be x it says so. Vectors and caches live until Close.
//
// Misuse (dims that do not fit) panics: it is the caller's bug.
type Backend interface {
	Name() string

	NewVec(capacity, dim int) (Vec, error)
	NewKV(KVShape) (KV, error)
	NewDelta(DeltaShape) (Delta, error)
	NewKeys(capacity, most int) (Keys, error)

	Embed(x Vec, table Matrix, ids []int32)                  // x [len(ids), dim] = rows of the table, dequantized
	RMSNorm(y, x Vec, weight []float32, eps float32)         // y = x normalised in runs of len(weight), which divides dim; y may be x
	MatMul(y []Vec, w []Linear, x Vec)                       // y[i] [n, rows] = x [n, cols] times w[i] [rows, cols] transposed, + bias
	LayerNorm(y, x Vec, weight, bias []float32, eps float32) // y = x without its mean, normalised, in runs as RMSNorm, + bias; y may be x
	MatMulHeads(y Vec, w []Matrix, x Vec)                    // head h of x [n, heads*(cols+rest)]: its first cols times w[h], then its rest, is head h of y [n, heads*(rows+rest)]
	RoPE(x Vec, headDim int, rope *Rope, pos int)            // row i of x, in place, at position pos+i, head by head
	Store(kv KV, layer, pos int, k, v Vec)                   // rows of k and v become positions pos, pos+1, ... of the cache; of a latent one k is what follows v in a key; v is nil without values
	ChooseKeys(keys Keys, q, w Vec, kv KV, layer, pos int)   // of row i, the Most best keys 0..pos+i by the sum over heads h of w[h]*max(q[h].k, 0); a tie goes to the lower
	Attend(y, q Vec, kv KV, layer, pos int, a *Attention)    // y [n, heads*valueDim]; row i of q, at pos+i, sees keys a.First(pos+i)..pos+i
	// ExpertGroup computes, for each job, each of its rows r of out: the expert of row
	// r/k of x. Other rows stay. Weights of a job that is Fresh and has rows are looked at as
	// they are read: bad is the first such job that quant.Check refuses, or -1; if
	// there is one, the rows of all jobs mean nothing.
	ExpertGroup(out Vec, k int, jobs []Job, x Vec) (bad int)
	Combine(x, out Vec, k int, weights []float32, shared Vec) // x = x + (((+0 + w0*out0) + w1*out1 ...) + shared); shared may be nil
	Add(x, y Vec)                                             // x = x + y
	ScaleRows(y, x Vec, f []float32)                          // y [n, dim]: row i = row i of x times f[i]; y may be x
	Scale(x Vec, f float32)                                   // x = x*f
	SigmoidGate(x, g Vec)                                     // x [n, dim] = x*sigmoid(g [n, m]), each g for dim/m floats of x in a row
	Gather(y, x Vec, rows []int32)                            // y [len(rows), dim] = rows of x
	Put(y Vec, rows []int32, data []float32)                  // row rows[i] of y, which has its length, = data [len(rows), dim] row i
	Concat(y, a, b Vec)                                       // y [n, a's dim + b's dim]: each row of a, and behind it that of b; y is neither
	Read(dst []float32, v Vec) error                          // dst [n*dim] = v; waits for all steps before it

	DeltaNet(y, qkv, z, a, b Vec, d Delta, layer, pos int, w *DeltaNet) // y [n, valueHeads*valueDim]; uses up qkv [n, channels], a and b [n, valueHeads]; z [n, valueHeads*valueDim] stays
	Split(y []Vec, runs []int, x Vec)                                   // rows of x are groups of runs: run i of each group goes to y[i]; several for one vector lie in it one behind the other

	Close() error
}

// An ActivationError says that a vector left the range in which the arithmetic
// is exact: NaN, or larger than 2^50.
type ActivationError struct{ Step string }

func (e *ActivationError) Error() string {
	return fmt.Sprintf("backends: %s: an activation is NaN or above 2^50: the weights or the prompt drive this model out of range; the request is stopped", e.Step)
}
