package cpu

import (
	"math"

	"sluice/internal/arith"
)

// vectorKernels work on activations. Slices of one call are equally long, or
// longer than the one that counts; lengths are any, and memory may be at any
// address. What they return as top is the bits of the largest |x| that they met.
type vectorKernels struct {
	cleanTo     func(dst, x []float32, tiny uint32) (top uint32)
	rmsNorm     func(y, x, weight []float32, inv, eps float32) (top uint32)
	gate        func(g, u []float32)
	sigmoidGate func(x, g []float32)
	largest     func(x []float32) float32
	expSum      func(x []float32, top float32) float32
	scaleBy     func(x []float32, r float32)
	add         func(x, y []float32)
	addProducts func(y, w, x []float32)
	combine     func(x, out []float32, stride int, weights, shared []float32)
	rotate      func(x, cos, sin []float32, headDim int)
	rotatePairs func(x, cos, sin []float32, headDim int)
	quantize32  func(code []int8, sum []int32, scale, x []float32) (top uint32)
	quantize256 func(code []int8, sum []int32, scale, x []float32) (top uint32)
}

func vectorKernelsFor(l Level) vectorKernels {
	return vectorKernels{
		cleanTo:     pick(l, cleanToKernels),
		rmsNorm:     pick(l, rmsNormKernels),
		gate:        pick(l, gateKernels),
		sigmoidGate: pick(l, sigmoidGateKernels),
		largest:     pick(l, largestKernels),
		expSum:      pick(l, expSumKernels),
		scaleBy:     pick(l, scaleByKernels),
		add:         pick(l, addKernels),
		addProducts: pick(l, addProductsKernels),
		combine:     pick(l, combineKernels),
		rotate:      pick(l, rotateKernels),
		rotatePairs: pick(l, rotatePairsKernels),
		quantize32:  pick(l, quantize32Kernels),
		quantize256: pick(l, quantize256Kernels),
	}
}

// cleanTo is dst = x, and +0 where the bits of |x| are below tiny; dst may be x.
func cleanTo(dst, x []float32, tiny uint32) (top uint32) {
	dst = dst[:len(x)]
	for i, v := range x {
		b := math.Float32bits(v)
		a := b &^ arith.SignMask
		if a < tiny {
			b = 0
		}
		top = max(top, a)
		dst[i] = math.Float32frombits(b)
	}
	return top
}

// rmsNorm is y = (clean(x)*r)*weight, with r = rsqrt(q*inv + eps) and q the sum
// of clean(x)^2 in 16 lanes. y may be x.
func rmsNorm(y, x, weight []float32, inv, eps float32) (top uint32) {
	x, y = x[:len(weight)], y[:len(weight)]
	top = cleanTo(y, x, arith.TinyBits)
	var l [16]float32
	dotLanes(&l, y, y)
	r := arith.Rsqrt(float32(arith.Tree16(&l)*inv) + eps)
	for i, v := range y {
		y[i] = float32(float32(v*r) * weight[i])
	}
	return top
}

// gate is g = SiLU(g)*u.
func gate(g, u []float32) {
	u = u[:len(g)]
	for i, v := range g {
		g[i] = float32(arith.SiLU(v) * u[i])
	}
}

// sigmoidGate is x = x*sigmoid(g).
func sigmoidGate(x, g []float32) {
	x = x[:len(g)]
	for i, v := range g {
		x[i] = float32(x[i] * arith.Sigmoid(v))
	}
}

// largest is the largest of x, which has one at least; x is finite.
func largest(x []float32) float32 {
	m := x[0]
	for _, v := range x {
		if v > m {
			m = v
		}
	}
	return m
}

// expSum is x = exp(x - top), and the sum of them in 16 lanes.
func expSum(x []float32, top float32) float32 {
	var l [16]float32
	for i, v := range x {
		e := arith.Exp(v - top)
		x[i] = e
		l[i&15] += e
	}
	return arith.Tree16(&l)
}

// addProducts is y = y + w*x.
func addProducts(y, w, x []float32) {
	w, x = w[:len(y)], x[:len(y)]
	for i := range y {
		y[i] += float32(w[i] * x[i])
	}
}

// scaleBy is x = x*r.
func scaleBy(x []float32, r float32) {
	for i, v := range x {
		x[i] = float32(v * r)
	}
}

// softmax turns the scores x of keys 0, 1, ... into the probabilities of those
// from first on; sink is empty or one score more that has no key. Keys before
// first in its block of keys get +0, which adds nothing anywhere; what is before
// that block stays. With first 0 and no sink it is arith.Softmax.
func (k *vectorKernels) softmax(x []float32, first int, sink []float32) {
	from := first &^ (keyBlock - 1)
	for i := from; i < first; i++ {
		x[i] = unseen
	}
	top := k.largest(x[first:])
	for _, s := range sink {
		top = max(top, s)
	}
	var sum float32
	for c := from &^ (arith.Chunk - 1); c < len(x); c += arith.Chunk {
		sum += k.expSum(x[max(c, from):min(c+arith.Chunk, len(x))], top)
	}
	for _, s := range sink {
		sum += arith.Exp(s - top)
	}
	k.scaleBy(x[from:], arith.Rcp(sum))
}

// unseen is a score whose exponential is +0, whatever the largest is.
const unseen = -0x1p126

// add is x = x + y.
func add(x, y []float32) {
	y = y[:len(x)]
	for i, v := range y {
		x[i] += v
	}
}

// combine adds to x the rows of out, stride floats apart, one for each weight,
// and shared if it has a length:
//
//	y = +0; y = y + weights[j]*out[j*stride+i] for j ascending; y = y + shared[i]; x[i] = x[i] + y
func combine(x, out []float32, stride int, weights, shared []float32) {
	for i := range x {
		var y float32
		for j, f := range weights {
			y += float32(f * out[j*stride+i])
		}
		if len(shared) > 0 {
			y += shared[i]
		}
		x[i] += y
	}
}

// rotate turns every head of x, headDim floats each. With half = len(cos), at
// most headDim/2, and i < half:
//
//	x[i], x[i+half] = (x[i]*cos[i]) - (x[i+half]*sin[i]), (x[i+half]*cos[i]) + (x[i]*sin[i])
func rotate(x, cos, sin []float32, headDim int) {
	half := len(cos)
	for ; len(x) >= headDim; x = x[headDim:] {
		a, b := x[:half], x[half:2*half]
		for j, c := range cos {
			n, x, y := sin[j], a[j], b[j]
			a[j] = float32(x*c) - float32(y*n)
			b[j] = float32(y*c) + float32(x*n)
		}
	}
}

// rotatePairs is rotate of neighbours:
//
//	x[2*i], x[2*i+1] = (x[2*i]*cos[i]) - (x[2*i+1]*sin[i]), (x[2*i+1]*cos[i]) + (x[2*i]*sin[i])
func rotatePairs(x, cos, sin []float32, headDim int) {
	for ; len(x) >= headDim; x = x[headDim:] {
		p := x[:2*len(cos)]
		for j, c := range cos {
			n, x, y := sin[j], p[2*j], p[2*j+1]
			p[2*j] = float32(x*c) - float32(y*n)
			p[2*j+1] = float32(y*c) + float32(x*n)
		}
	}
}
