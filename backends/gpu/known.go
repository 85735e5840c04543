package gpu

import (
	"fmt"
	"math"

	"sluice/internal/arith"
	"sluice/internal/quant"
)

// known computes a vector of which every bit is known, on the device, through
// SiLU (so exp and rcp), products that an FMA would round otherwise, the quantizer's
// rounding, and a row of them. A device that gives other bits is refused.
func (d *Device) known() error {
	const n = 1024
	b, err := d.hostBuffer(64 << 10)
	if err != nil {
		return err
	}
	defer d.drop(b)
	const gAt, uAt, wAt, yAt, jobAt, indexAt, first, second = 256, 256 + 4*n, 256 + 8*n, 256 + 12*n, 256 + 13*n, 512 + 13*n, 1024 + 13*n, 1024 + 19*n
	g, u, w := slice[float32](b, gAt, n), slice[float32](b, uAt, n), slice[float32](b, wAt, n)
	for i := range g {
		g[i] = float32(float32(i-n/2)*0.0803) + 0.3*float32(i%7)
		u[i] = float32(1.7*float32(i%31)) - 25.3
		w[i] = float32(i%13) - 5.7
	}
	want := make([]float32, n)
	for i := range want {
		want[i] = arith.Clean(float32(arith.SiLU(g[i]) * u[i]))
	}
	floats, codes := formAt(b.at+first, n), formAt(b.at+second, n)
	*at[rowsJob](b, jobAt) = rowsJob{w: b.at + wAt, y: b.at + yAt, n: 1, stride: 1}
	clear(slice[uint32](b, indexAt, 2))
	leave := d.enter()
	err = d.quantize(quant.F32, floats, b.at+gAt, b.at+uAt, b.at, n, 1)
	if err == nil {
		err = d.quantize(quant.Q4_K, codes, b.at+gAt, b.at+uAt, b.at, n, 1)
	}
	if err == nil {
		err = d.multiply(quant.F32, rowsParams{jobs: b.at + jobAt, index: b.at + indexAt, code: floats.code, rows: 1, cols: n}, 1, 1)
	}
	if err == nil {
		err = d.check("stream synchronize", d.dr.f.waitStream.call(d.kernels))
	}
	leave()
	if err != nil {
		return err
	}
	wrong := func(what string, i int, got, want uint32) error {
		return fmt.Errorf("%v: %w: %s computes %s %d of a known vector as %08x, not %08x: it does not round as IEEE 754 says; update its driver, or run with --backend cpu",
			d.dr.API, ErrUnfit, d.Name, what, i, got, want)
	}
	var lanes [16]float32
	for i, v := range want {
		if got := slice[float32](b, int(floats.code-b.at), n)[i]; math.Float32bits(got) != math.Float32bits(v) {
			return wrong("value", i, math.Float32bits(got), math.Float32bits(v))
		}
		lanes[i%16] += float32(w[i] * v)
	}
	if got, v := *at[float32](b, yAt), arith.Tree16(&lanes); math.Float32bits(got) != math.Float32bits(v) {
		return wrong("row", 0, math.Float32bits(got), math.Float32bits(v))
	}
	for blk := 0; blk < n; blk += 256 {
		var top uint32
		for _, v := range want[blk : blk+256] {
			top = max(top, math.Float32bits(v)&^arith.SignMask)
		}
		a := math.Float32frombits(top)
		s := float32(127 * arith.Rcp(a))
		if got, v := slice[float32](b, int(codes.scale-b.at), n/256)[blk/256], float32(a*0x1.020408p-7); got != v {
			return wrong("scale", blk/256, math.Float32bits(got), math.Float32bits(v))
		}
		for i, v := range want[blk : blk+256] {
			code := int8(int32(math.Float32bits(float32(v*s)+arith.Rounder) - arith.RounderBits))
			if got := slice[int8](b, int(codes.code-b.at), n)[blk+i]; got != code {
				return wrong("code", blk+i, uint32(got), uint32(code))
			}
		}
	}
	return nil
}
