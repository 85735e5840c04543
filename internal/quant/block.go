package quant

// A Block is the integers of one activation block of a weight row: 32 or 256
// codes, in groups of 16.
//
//	S = sum over groups g of Scale[g] * (sum over i in g of Code[i] * x[i])
//	M = sum over groups g of Min[g]   * (sum over i in g of x[i])
//
// with x the activation codes, -127..127. S and M are exact in int32
// (ARITHMETIC: at most 133.2e6). W and MinW are the floats of the term,
// given by the type's Kind. The integers hold whatever the format scales by
// inside a block; a power of two that makes them whole is multiplied into W.
//
// NVFP4 has one float scale for 16 codes: its 32-blocks carry W and W2, for the
// first and the second group, and give two terms to the same lane, in order.
type Block struct {
	Code  [256]int8
	Scale [16]int32
	Min   [16]int32 // Plus and Minus kinds only
	W     float32
	MinW  float32
	W2    float32 // NVFP4 only
}
