package cpu

var dotLanesKernels = []kernel[func(l *[16]float32, w, x []float32)]{
	{Go, dotLanes},
	{AVX2, dotLanesAVX2},
	{AVX512, dotLanesAVX512},
}
