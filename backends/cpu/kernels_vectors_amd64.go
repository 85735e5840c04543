package cpu

var (
	cleanToKernels     = []kernel[func(dst, x []float32, tiny uint32) (top uint32)]{{Go, cleanTo}, {AVX2, cleanToAVX2}, {AVX512, cleanToAVX512}}
	rmsNormKernels     = []kernel[func(y, x, weight []float32, inv, eps float32) (top uint32)]{{Go, rmsNorm}, {AVX2, rmsNormAVX2}, {AVX512, rmsNormAVX512}}
	gateKernels        = []kernel[func(g, u []float32)]{{Go, gate}, {AVX2, gateAVX2}, {AVX512, gateAVX512}}
	sigmoidGateKernels = []kernel[func(x, g []float32)]{{Go, sigmoidGate}, {AVX2, sigmoidGateAVX2}, {AVX512, sigmoidGateAVX512}}
	largestKernels     = []kernel[func(x []float32) float32]{{Go, largest}, {AVX2, largestAVX2}, {AVX512, largestAVX512}}
	expSumKernels      = []kernel[func(x []float32, top float32) float32]{{Go, expSum}, {AVX2, expSumAVX2}, {AVX512, expSumAVX512}}
	scaleByKernels     = []kernel[func(x []float32, r float32)]{{Go, scaleBy}, {AVX2, scaleByAVX2}, {AVX512, scaleByAVX512}}
	addKernels         = []kernel[func(x, y []float32)]{{Go, add}, {AVX2, addAVX2}, {AVX512, addAVX512}}
	addProductsKernels = []kernel[func(y, w, x []float32)]{{Go, addProducts}, {AVX2, addProductsAVX2}, {AVX512, addProductsAVX512}}
	combineKernels     = []kernel[func(x, out []float32, stride int, weights, shared []float32)]{{Go, combine}, {AVX2, combineAVX2}, {AVX512, combineAVX512}}
	rotateKernels      = []kernel[func(x, cos, sin []float32, headDim int)]{{Go, rotate}, {AVX2, rotateAVX2}, {AVX512, rotateAVX512}}
	rotatePairsKernels = []kernel[func(x, cos, sin []float32, headDim int)]{{Go, rotatePairs}, {AVX2, rotatePairsAVX2}}
	quantize32Kernels  = []kernel[func(code []int8, sum []int32, scale, x []float32) (top uint32)]{{Go, quantize32}, {AVX2, quantize32AVX2}, {AVX512, quantize32AVX512}}
	quantize256Kernels = []kernel[func(code []int8, sum []int32, scale, x []float32) (top uint32)]{{Go, quantize256}, {AVX2, quantize256AVX2}, {AVX512, quantize256AVX512}}
	encodeF16Kernels   = []kernel[func(dst []uint16, x []float32) (top uint32)]{{Go, encodeF16}, {AVX2, encodeF16AVX2}, {AVX512, encodeF16AVX512}}
	decodeF16Kernels   = []kernel[func(dst []float32, src []uint16)]{{Go, decodeF16}, {AVX2, decodeF16AVX2}, {AVX512, decodeF16AVX512}}
	decodeQ8Kernels    = []kernel[func(dst []float32, code []int8, scale []float32)]{{Go, decodeQ8}, {AVX2, decodeQ8AVX2}, {AVX512, decodeQ8AVX512}}
	scoresKernels      = []kernel[func(dst, q, keys []float32, scale float32)]{{Go, scores}, {AVX2, scoresAVX2}, {AVX512, scoresAVX512}}
	weighKernels       = []kernel[func(y, p, values []float32)]{{Go, weigh}, {AVX2, weighAVX2}, {AVX512, weighAVX512}}
)
