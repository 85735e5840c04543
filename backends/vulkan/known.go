package vulkan

import (
	"fmt"
	"math"

	"sluice/internal/arith"
)

// known computes a vector of which every bit is known, on the device, through
// all functions of the arithmetic: SiLU (so exp and rcp), products that an FMA
// would round otherwise, the quantizer's rounding. A device that gives other bits
// is refused.
func (d *Device) known() error {
	const n = 1024
	b, err := d.buffer(up, 64<<10)
	if err != nil {
		return err
	}
	defer d.drop(b)
	c, err := d.kernels.commands()
	if err != nil {
		return err
	}
	defer c.free()
	const gAt, uAt, formOff = 4096, 4096 + 4*n, 16384
	f := formAt(b.at+formOff, n)
	g, u := slice[float32](b, gAt, n), slice[float32](b, uAt, n)
	for i := range g {
		g[i] = float32(float32(i-n/2)*0.0803) + 0.3*float32(i%7)
		u[i] = float32(1.7*float32(i%31)) - 25.3
	}
	want := make([]float32, n)
	for i := range want {
		want[i] = float32(arith.SiLU(g[i]) * u[i])
	}
	*at[quantizeParams](b, 128) = f.quantize(b.at+gAt, b.at+uAt, b.at, n)
	*at[quantizeParams](b, 256) = formAt(b.at+formOff+8*n, n).quantize(b.at+gAt, b.at+uAt, b.at, n)
	c.begin()
	c.run(kernel{"quantize", 0, 1}, b, 128)
	c.run(kernel{"quantize", 256, 1}, b, 256)
	if err := c.end(); err != nil {
		return err
	}
	value, err := c.submit()
	if err != nil {
		return err
	}
	if err := d.waitFor(value); err != nil {
		return err
	}
	wrong := func(what string, i int, got, want uint32) error {
		return fmt.Errorf("vulkan: %w: %s (driver %s) computes %s %d of a known vector as %08x, not %08x: it does not round as IEEE 754 says; update its driver, or run with --backend cpu",
			ErrUnfit, d.Name, d.Driver, what, i, got, want)
	}
	for i, w := range want {
		if got := slice[float32](b, formOff, n)[i]; math.Float32bits(got) != math.Float32bits(arith.Clean(w)) {
			return wrong("value", i, math.Float32bits(got), math.Float32bits(w))
		}
	}
	q := formAt(formOff+8*n, n)
	codes, scales := slice[int8](b, q.code, n), slice[float32](b, q.scale, n/256)
	for blk := 0; blk < n; blk += 256 {
		var top uint32
		for _, w := range want[blk : blk+256] {
			top = max(top, math.Float32bits(w)&^arith.SignMask)
		}
		a := math.Float32frombits(top)
		s := float32(127 * arith.Rcp(a))
		if got, w := scales[blk/256], float32(a*0x1.020408p-7); got != w {
			return wrong("scale", blk/256, math.Float32bits(got), math.Float32bits(w))
		}
		for i, w := range want[blk : blk+256] {
			code := int8(int32(math.Float32bits(float32(w*s)+arith.Rounder) - arith.RounderBits))
			if codes[blk+i] != code {
				return wrong("code", blk+i, uint32(codes[blk+i]), uint32(code))
			}
		}
	}
	return nil
}
