package cpu

import "sluice/internal/quant"

var dotLanesKernels = []kernel[func(l *[16]float32, w, x []float32)]{
	{Go, dotLanes},
	{AVX2, dotLanesAVX2},
	{AVX512, dotLanesAVX512},
}

var sumRowsKernels = []kernel[func(y, terms *float32, rows, blocks int)]{
	{Go, sumRows},
	{AVX512, sumRowsAVX512},
}

// rowKernels is the table of a type.
func rowKernels(t quant.Type) []kernel[rowKernel] {
	table := []kernel[rowKernel]{{level: Go}}
	switch t {
	case quant.Q8_0:
		return append(table, kernel[rowKernel]{AVX512, rowKernel{codeForm{natural, sumOf32}, rowsQ8_0AVX512}})
	case quant.Q4_K:
		return append(table, kernel[rowKernel]{AVX512, rowKernel{codeForm{pairs32, sumsOf32}, rowsQ4_KAVX512}})
	}
	return table
}
