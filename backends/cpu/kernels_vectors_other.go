//go:build !amd64

package cpu

var (
	cleanToKernels     = []kernel[func(dst, x []float32, tiny uint32) (top uint32)]{{Go, cleanTo}}
	rmsNormKernels     = []kernel[func(y, x, weight []float32, inv, eps float32) (top uint32)]{{Go, rmsNorm}}
	gateKernels        = []kernel[func(g, u []float32)]{{Go, gate}}
	sigmoidGateKernels = []kernel[func(x, g []float32)]{{Go, sigmoidGate}}
	largestKernels     = []kernel[func(x []float32) float32]{{Go, largest}}
	expSumKernels      = []kernel[func(x []float32, top float32) float32]{{Go, expSum}}
	scaleByKernels     = []kernel[func(x []float32, r float32)]{{Go, scaleBy}}
	addKernels         = []kernel[func(x, y []float32)]{{Go, add}}
	addProductsKernels = []kernel[func(y, w, x []float32)]{{Go, addProducts}}
	combineKernels     = []kernel[func(x, out []float32, stride int, weights, shared []float32)]{{Go, combine}}
	rotateKernels      = []kernel[func(x, cos, sin []float32, headDim int)]{{Go, rotate}}
	rotatePairsKernels = []kernel[func(x, cos, sin []float32, headDim int)]{{Go, rotatePairs}}
	quantize32Kernels  = []kernel[func(code []int8, sum []int32, scale, x []float32) (top uint32)]{{Go, quantize32}}
	quantize256Kernels = []kernel[func(code []int8, sum []int32, scale, x []float32) (top uint32)]{{Go, quantize256}}
	encodeF16Kernels   = []kernel[func(dst []uint16, x []float32) (top uint32)]{{Go, encodeF16}}
	decodeF16Kernels   = []kernel[func(dst []float32, src []uint16)]{{Go, decodeF16}}
	decodeQ8Kernels    = []kernel[func(dst []float32, code []int8, scale []float32)]{{Go, decodeQ8}}
	scoresKernels      = []kernel[func(dst, q, keys []float32, scale float32)]{{Go, scores}}
	weighKernels       = []kernel[func(y, p, values []float32)]{{Go, weigh}}
)
