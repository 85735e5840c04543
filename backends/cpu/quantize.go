package cpu

import (
	"math"

	"sluice/internal/arith"
)

// A quantized is a batch of vectors as integer rows meet them: blocks of 32 or
// 256 int8 codes under one scale. The batch is one run of blocks, since each
// vector is a whole number of them.
type quantized struct {
	block int       // 32 or 256
	code  []int8    // [n, cols]
	scale []float32 // [n, cols/block]
	sum   []int32   // [n, cols/16], of the codes
}

func (q *quantized) grow(floats int) {
	q.code = grown(q.code, floats)
	q.scale = grown(q.scale, floats/q.block)
	q.sum = grown(q.sum, floats/16)
}

// grown gives s the length n, in new memory if it has not the capacity.
func grown[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n)
	}
	return s[:n]
}

// quantize turns block x into codes -127..127 and returns its scale:
//
//	a = largest |x|; if a < 2^-50 the scale is +0 and so are the codes
//	d = a * 0x1.020408p-7 (about 1/127), code = x * (127 * rcp(a)), half to even
//
// code is as long as x, sum[g] the sum of codes 16g .. 16g+15. top is the bits
// of a; if an x is NaN or above 2^50 the block counts as zeros.
func quantize(code []int8, sum []int32, x []float32) (d float32, top uint32) {
	a := largestOf(x)
	if a < arith.TinyBits || a > arith.LargestBits {
		clear(code)
		clear(sum)
		return 0, a
	}
	s := float32(127 * arith.Rcp(math.Float32frombits(a)))
	for g := range sum {
		x, code := (*[16]float32)(x[16*g:]), (*[16]int8)(code[16*g:])
		var n int32
		for i, v := range x {
			c := int32(math.Float32bits(float32(v*s)+arith.Rounder) - arith.RounderBits)
			code[i] = int8(c)
			n += c
		}
		sum[g] = n
	}
	return float32(math.Float32frombits(a) * 0x1.020408p-7), a
}

// largestOf gives the bits of the largest |x|, above LargestBits with a NaN.
func largestOf(x []float32) (bits uint32) {
	for _, v := range x {
		bits = max(bits, math.Float32bits(v)&^arith.SignMask)
	}
	return bits
}

// quantizeBlocks quantizes len(scale) blocks of n and gives the bits of the
// largest |x|.
func quantizeBlocks(code []int8, sum []int32, scale, x []float32, n int) (top uint32) {
	for i := range scale {
		d, a := quantize(code[i*n:(i+1)*n], sum[i*n/16:(i+1)*n/16], x[i*n:(i+1)*n])
		scale[i] = d
		top = max(top, a)
	}
	return top
}

func quantize32(code []int8, sum []int32, scale, x []float32) (top uint32) {
	return quantizeBlocks(code, sum, scale, x, 32)
}

func quantize256(code []int8, sum []int32, scale, x []float32) (top uint32) {
	return quantizeBlocks(code, sum, scale, x, 256)
}

// A form is what a vector becomes before rows multiply it.
type form uint8

const (
	by32    form = iota // quantized, for formats of 32
	by256               // quantized, for K and IQ formats
	cleaned             // floats, for float rows
	forms
)

// formOf is the form for a type's activation block.
func formOf(actBlock int) form {
	switch actBlock {
	case 32:
		return by32
	case 256:
		return by256
	default:
		return cleaned
	}
}

// inputs are the n vectors of one step in the forms that its weights need.
type inputs struct {
	n, cols int
	serial  uint64 // of the step
	have    [forms]bool
	q       [2]quantized // by32, by256
	f       []float32    // cleaned [n, cols]
}

// A preparation is the step that fills one form of inputs from x.
type preparation struct {
	in   *inputs
	form form
	x    []float32 // [n, cols]
}

// prepareRun is the item of a preparation: whole blocks of either size.
const prepareRun = 256

// prepareGrain keeps a share at 4096 floats or more: about as long as a fork takes.
const prepareGrain = 4096

// prepare fills the form from x unless it is there.
func (b *Backend) prepare(in *inputs, f form, x []float32) {
	if in.have[f] {
		return
	}
	in.have[f] = true
	in.make(f, len(x))
	s := &b.preparation
	*s = preparation{in, f, x}
	b.pool.do(s, (len(x)+prepareRun-1)/prepareRun, prepareGrain/prepareRun)
}

// make has room for a form of so many floats.
func (in *inputs) make(f form, floats int) {
	switch f {
	case cleaned:
		in.f = grown(in.f, floats)
	case by32:
		in.q[f].block = 32
		in.q[f].grow(floats)
	default:
		in.q[f].block = 256
		in.q[f].grow(floats)
	}
}

// fill makes floats lo..hi of a form, whole blocks, from x, which are these
// alone. It gives the bits of the largest |x|.
func (in *inputs) fill(k *kernels, f form, x []float32, lo, hi int) (top uint32) {
	if f == cleaned {
		return k.cleanTo(in.f[lo:hi], x, arith.TinyBits)
	}
	q := &in.q[f]
	quantize := k.quantize32
	if f == by256 {
		quantize = k.quantize256
	}
	return quantize(q.code[lo:hi], q.sum[lo/16:hi/16], q.scale[lo/q.block:hi/q.block], x)
}

// reset makes in the n vectors of a new step, in no form yet.
func (in *inputs) reset(n, cols int) {
	in.n, in.cols, in.have = n, cols, [forms]bool{}
	in.serial++
}

func (s *preparation) run(w *worker, lo, hi int) {
	lo, hi = lo*prepareRun, min(hi*prepareRun, len(s.x))
	w.saw(s.in.fill(w.k, s.form, s.x[lo:hi], lo, hi))
}
