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

// tileKernels is the table of a type.
func tileKernels(t quant.Type) []kernel[tileKernel] {
	table := []kernel[tileKernel]{{level: Go}}
	k := tileKernel{bias: 128, unpack: unpackTile}
	switch t {
	case quant.NVFP4:
		return table
	case quant.Q4_K, quant.Q5_K:
		k.bias, k.group = 0, 32
		k.run = [2]func(*tileArgs){tile256By32Minusx16AVX512, tile256By32Minusx32AVX512}
	case quant.Q2_K:
		k.bias, k.group = 0, 16
		k.run = [2]func(*tileArgs){tile256By16Minusx16AVX512, tile256By16Minusx32AVX512}
	case quant.Q4_1, quant.Q5_1:
		k.bias = 0
		k.run = [2]func(*tileArgs){tile32Plusx16AVX512, tile32Plusx32AVX512}
	default:
		switch t.ActBlock() {
		case 32:
			k.run = [2]func(*tileArgs){tile32x16AVX512, tile32x32AVX512}
		case 256:
			k.group = 16
			k.run = [2]func(*tileArgs){tile256By16x16AVX512, tile256By16x32AVX512}
		default:
			return table
		}
	}
	return append(table, kernel[tileKernel]{AVX512, k})
}
