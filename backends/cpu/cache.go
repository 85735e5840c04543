package cpu

import (
	"sluice/backends"
	"sluice/internal/arith"
	"sluice/internal/quant"
)

// cacheKernels work on rows of a key-value cache. Those of levels above Go need
// rows of whole 16 floats, which nearly every model has.
type cacheKernels struct {
	encodeF16 func(dst []uint16, x []float32) (top uint32)
	decodeF16 func(dst []float32, src []uint16)
	decodeQ8  func(dst []float32, code []int8, scale []float32)
	scores    func(dst, q, keys []float32, scale float32)
	weigh     func(y, p, values []float32)
}

func cacheKernelsFor(l Level) cacheKernels {
	return cacheKernels{
		encodeF16: pick(l, encodeF16Kernels),
		decodeF16: pick(l, decodeF16Kernels),
		decodeQ8:  pick(l, decodeQ8Kernels),
		scores:    pick(l, scoresKernels),
		weigh:     pick(l, weighKernels),
	}
}

// cacheFor gives the kernels for caches of a shape.
func (k *kernels) cacheFor(s *backends.KVShape) *cacheKernels {
	if s.KeyDim%16 != 0 || s.ValueDim%16 != 0 {
		return &k.anyCache
	}
	return &k.cache
}

// encodeF16 rounds x to nearest even, beyond the range to +-65504. What it
// makes of NaN and infinities, which top tells, is of no meaning.
func encodeF16(dst []uint16, x []float32) (top uint32) {
	dst = dst[:len(x)]
	for i, f := range x {
		dst[i] = quant.ToF16Saturate(f)
	}
	return largestOf(x)
}

// decodeF16 is dst = src.
func decodeF16(dst []float32, src []uint16) {
	dst = dst[:len(src)]
	for i, h := range src {
		dst[i] = fromF16(h)
	}
}

// decodeQ8 is dst = code*scale, 32 codes to a scale.
func decodeQ8(dst []float32, code []int8, scale []float32) {
	for i, d := range scale {
		code, dst := (*[32]int8)(code[32*i:]), (*[32]float32)(dst[32*i:])
		for j, c := range code {
			dst[j] = float32(float32(c) * d)
		}
	}
}

// scores is dst[i] = (q.k)*scale for key i of keys, len(q) floats each, in 16
// lanes. len(dst) is a multiple of 16.
func scores(dst, q, keys []float32, scale float32) {
	for i := range dst {
		var l [16]float32
		dotLanes(&l, keys[i*len(q):(i+1)*len(q)], q)
		dst[i] = float32(arith.Tree16(&l) * scale)
	}
}

// weigh is y = y + p[i]*value for value i of values, len(y) floats each, i ascending.
func weigh(y, p, values []float32) {
	for i, w := range p {
		addScaled(y, w, values[i*len(y):(i+1)*len(y)])
	}
}

// addScaled is y = y + p*v.
func addScaled(y []float32, p float32, v []float32) {
	n := len(y) &^ 7
	v = v[:len(y)]
	for i := 0; i < n; i += 8 {
		y, v := (*[8]float32)(y[i:]), (*[8]float32)(v[i:])
		y[0] += float32(p * v[0])
		y[1] += float32(p * v[1])
		y[2] += float32(p * v[2])
		y[3] += float32(p * v[3])
		y[4] += float32(p * v[4])
		y[5] += float32(p * v[5])
		y[6] += float32(p * v[6])
		y[7] += float32(p * v[7])
	}
	for i := n; i < len(y); i++ {
		y[i] += float32(p * v[i])
	}
}
