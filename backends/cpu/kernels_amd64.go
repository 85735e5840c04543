package cpu

import "sluice/internal/quant"

var dotLanesKernels = []kernel[func(l *[16]float32, w, x []float32)]{
	{Go, dotLanes},
	{AVX2, dotLanesAVX2},
	{AVX512, dotLanesAVX512},
}

var packKernels = []kernel[packKernel]{
	{level: Go},
	{AVX2, packKernel{pack32AVX2, pack256By16AVX2, pack256By32AVX2, packFloatsAVX2}},
}

var scanKernels = []kernel[func(p []byte) uint64]{
	{Go, scan},
	{AVX2, scanAVX2},
	{AVX512, scanAVX512},
}

var sumRowsKernels = []kernel[func(y, terms *float32, rows, blocks int)]{
	{Go, sumRows},
	{AVX2, sumRowsAVX2},
	{AVX512, sumRowsAVX512},
}

// rowKernels is the table of a type.
func rowKernels(t quant.Type) []kernel[rowKernel] {
	table := []kernel[rowKernel]{{level: Go}}
	add := func(sums sumForm, avx2 func(*rowArgs), order codeOrder, avx512 func(*rowArgs)) {
		table = append(table,
			kernel[rowKernel]{AVX2, rowKernel{codeForm{natural, sums}, avx2, false, false}},
			kernel[rowKernel]{AVX512, rowKernel{codeForm{order, sums}, avx512, false, false}})
	}
	switch t {
	case quant.Q8_0:
		add(sumOf32, rowsQ8_0AVX2, natural, rowsQ8_0AVX512)
	case quant.NVFP4:
		add(sumOf32, rowsQ8_0AVX2, natural, rowsQ8_0AVX512)
		table[1].run.halves, table[2].run.halves = true, true
	case quant.Q4_0:
		add(sumOf32, rowsQ4_0AVX2, split32, rowsQ4_0AVX512)
	case quant.Q4_1:
		add(sumOf32, rowsQ4_1AVX2, split32, rowsQ4_1AVX512)
	case quant.Q5_0:
		add(sumOf32, rowsQ5_0AVX2, split32, rowsQ5_0AVX512)
	case quant.Q5_1:
		add(sumOf32, rowsQ5_1AVX2, split32, rowsQ5_1AVX512)
	case quant.IQ4_NL:
		add(sumOf32, rowsIQ4_NLAVX2, split32, rowsIQ4_NLAVX512)
	case quant.MXFP4:
		add(sumOf32, rowsMXFP4AVX2, split32, rowsMXFP4AVX512)
	case quant.Q4_K:
		add(sumsOf32, rowsQ4_KAVX2, pairs32, rowsQ4_KAVX512)
	case quant.Q5_K:
		add(sumsOf32, rowsQ5_KAVX2, pairs32, rowsQ5_KAVX512)
	case quant.Q6_K:
		add(sumsOf16, rowsQ6_KAVX2, natural, rowsQ6_KAVX512)
	case quant.Q3_K:
		add(sumsOf16, rowsQ3_KAVX2, natural, rowsQ3_KAVX512)
	case quant.Q2_K:
		add(sumsOf16, rowsQ2_KAVX2, natural, rowsQ2_KAVX512)
	case quant.IQ4_XS:
		add(sumsOf16, rowsIQ4_XSAVX2, split128, rowsIQ4_XSAVX512)
	case quant.INT4_32:
		add(sumOf32, rowsINT4_32AVX2, split32, rowsINT4_32AVX512)
	case quant.INT4_128:
		add(sumOf32, rowsINT4_128AVX2, split32, rowsINT4_128AVX512)
	case quant.INT4F_32:
		add(sumOf32, rowsINT4F_32AVX2, split32, rowsINT4F_32AVX512)
	case quant.INT4F_64:
		add(sumOf32, rowsINT4F_64AVX2, split32, rowsINT4F_64AVX512)
	case quant.INT4F_128:
		add(sumOf32, rowsINT4F_128AVX2, split32, rowsINT4F_128AVX512)
	case quant.INT8F_32:
		add(sumOf32, rowsINT8F_32AVX2, natural, rowsINT8F_32AVX512)
	case quant.INT8F_128:
		add(sumOf32, rowsINT8F_128AVX2, natural, rowsINT8F_128AVX512)
	default:
		if t.ActBlock() == 256 {
			add(sumsOf16, rowsBlockAVX2, natural, rowsBlockAVX512)
			table[1].run.unpacked, table[2].run.unpacked = true, true
		}
	}
	return table
}

// tileKernels is the table of a type.
func tileKernels(t quant.Type) []kernel[tileKernel] {
	table := []kernel[tileKernel]{{level: Go}}
	add := func(least2, group int, bias int32, unpack2 func(*unpackArgs), run2 func(*tileArgs), bias512 int32, unpack512 func(*unpackArgs), run512 [2]func(*tileArgs)) {
		table = append(table,
			kernel[tileKernel]{AVX2, tileKernel{least2, group, bias, unpack2, [2]func(*tileArgs){run2}, true}},
			kernel[tileKernel]{AVX512, tileKernel{mostPositions + 1, group, bias512, unpack512, run512, false}})
	}
	var (
		plain32 = [2]func(*tileArgs){tile32x16AVX512, tile32x32AVX512}
		plus32  = [2]func(*tileArgs){tile32Plusx16AVX512, tile32Plusx32AVX512}
		by16    = [2]func(*tileArgs){tile256By16x16AVX512, tile256By16x32AVX512}
		minus16 = [2]func(*tileArgs){tile256By16Minusx16AVX512, tile256By16Minusx32AVX512}
		minus32 = [2]func(*tileArgs){tile256By32Minusx16AVX512, tile256By32Minusx32AVX512}
	)
	switch t {
	case quant.Q8_0:
		add(8, 0, 0, unpackQ8_0AVX2, tile32SignedAVX2, 128, unpackQ8_0AVX512, plain32)
	case quant.Q4_0:
		add(5, 0, 8, unpackQ4_0AVX2, tile32Depth8AVX2, 8, unpackQ4_0AVX512, plain32)
	case quant.Q4_1:
		add(5, 0, 0, unpackQ4_1AVX2, tile32Depth8PlusAVX2, 0, unpackQ4_1AVX512, plus32)
	case quant.Q5_0:
		add(6, 0, 16, unpackQ5_0AVX2, tile32Depth4AVX2, 16, unpackQ5_0AVX512, plain32)
	case quant.Q5_1:
		add(6, 0, 0, unpackQ5_1AVX2, tile32Depth4PlusAVX2, 0, unpackQ5_1AVX512, plus32)
	case quant.IQ4_NL:
		add(8, 0, 0, unpackIQ4_NLAVX2, tile32SignedAVX2, 128, unpackIQ4_NLAVX512, plain32)
	case quant.MXFP4:
		add(5, 0, 16, unpackMXFP4AVX2, tile32Depth4AVX2, 16, unpackMXFP4AVX512, plain32)
	case quant.Q4_K:
		add(7, 32, 0, unpackQ4_KAVX2, tile256By32MinusDepth8AVX2, 0, unpackQ4_KAVX512, minus32)
	case quant.Q5_K:
		add(7, 32, 0, unpackQ5_KAVX2, tile256By32MinusDepth4AVX2, 0, unpackQ5_KAVX512, minus32)
	case quant.Q6_K:
		add(8, 16, 32, unpackQ6_KAVX2, tile256By16Depth2AVX2, 32, unpackQ6_KAVX512, by16)
	case quant.Q3_K:
		add(8, 16, 4, unpackQ3_KAVX2, tile256By16Depth4AVX2, 4, unpackQ3_KAVX512, by16)
	case quant.Q2_K:
		add(7, 16, 0, unpackQ2_KAVX2, tile256By16MinusDepth4AVX2, 0, unpackQ2_KAVX512, minus16)
	case quant.IQ4_XS:
		add(9, 16, 0, unpackIQ4_XSAVX2, tile256By16SignedAVX2, 128, unpackIQ4_XSAVX512, by16)
	case quant.INT4_32:
		add(5, 0, 8, unpackINT4_32AVX2, tile32Depth8AVX2, 8, unpackINT4_32AVX512, plain32)
	case quant.INT4_128:
		add(5, 0, 8, unpackINT4_128AVX2, tile32Depth8AVX2, 8, unpackINT4_128AVX512, plain32)
	case quant.INT4F_32:
		add(5, 0, 8, unpackINT4F_32AVX2, tile32Depth8AVX2, 8, unpackINT4F_32AVX512, plain32)
	case quant.INT4F_64:
		add(5, 0, 8, unpackINT4F_64AVX2, tile32Depth8AVX2, 8, unpackINT4F_64AVX512, plain32)
	case quant.INT4F_128:
		add(5, 0, 8, unpackINT4F_128AVX2, tile32Depth8AVX2, 8, unpackINT4F_128AVX512, plain32)
	case quant.INT8F_32:
		add(8, 0, 0, unpackINT8F_32AVX2, tile32SignedAVX2, 128, unpackINT8F_32AVX512, plain32)
	case quant.INT8F_128:
		add(8, 0, 0, unpackINT8F_128AVX2, tile32SignedAVX2, 128, unpackINT8F_128AVX512, plain32)
	default:
		if t.ActBlock() == 256 {
			add(9, 16, 0, nil, tile256By16SignedAVX2, 128, nil, by16)
		}
	}
	return table
}

// floatKernels is the table of a type.
func floatKernels(t quant.Type) []kernel[floatKernel] {
	table := []kernel[floatKernel]{{level: Go}}
	add := func(one, wide, tall, both, one512, wide512, tall512, both512 func(*floatArgs)) {
		table = append(table,
			kernel[floatKernel]{AVX2, floatKernel{2, [2][2]func(*floatArgs){{one, wide}, {tall, both}}, t == quant.F8_128}},
			kernel[floatKernel]{AVX512, floatKernel{4, [2][2]func(*floatArgs){{one512, wide512}, {tall512, both512}}, t == quant.F8_128}})
	}
	switch t {
	case quant.F32:
		add(floatsF32_1x1AVX2, floatsF32_1x2AVX2, floatsF32_2x1AVX2, floatsF32_2x2AVX2,
			floatsF32_1x1AVX512, floatsF32_1x4AVX512, floatsF32_4x1AVX512, floatsF32_4x4AVX512)
	case quant.F16:
		add(floatsF16_1x1AVX2, floatsF16_1x2AVX2, floatsF16_2x1AVX2, floatsF16_2x2AVX2,
			floatsF16_1x1AVX512, floatsF16_1x4AVX512, floatsF16_4x1AVX512, floatsF16_4x4AVX512)
	case quant.BF16:
		add(floatsBF16_1x1AVX2, floatsBF16_1x2AVX2, floatsBF16_2x1AVX2, floatsBF16_2x2AVX2,
			floatsBF16_1x1AVX512, floatsBF16_1x4AVX512, floatsBF16_4x1AVX512, floatsBF16_4x4AVX512)
	case quant.F8_128:
		add(floatsF8_128_1x1AVX2, floatsF8_128_1x2AVX2, floatsF8_128_2x1AVX2, floatsF8_128_2x2AVX2,
			floatsF8_128_1x1AVX512, floatsF8_128_1x4AVX512, floatsF8_128_4x1AVX512, floatsF8_128_4x4AVX512)
	}
	return table
}
