package quant

import "math"

// mxfp4Scale is 2^(e-128), the scale of the doubled E2M1 values; subnormal for e < 2.
func mxfp4Scale(e uint8) float32 {
	if e < 2 {
		return math.Float32frombits(0x00200000 << e)
	}
	return math.Float32frombits(uint32(e-1) << 23)
}
