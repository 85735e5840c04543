package vulkan

import (
	"fmt"

	"sluice/backends/dense"
	"sluice/internal/arith"
)

// known computes a vector of which every bit is known, on the device, through
// all functions of the arithmetic: SiLU (so exp and rcp), products that an FMA
// would round otherwise, the quantizer's rounding. A device that gives other bits
// is refused.
func (d *Device) known() error {
	const n = arith.KnownLen
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
	for i := range b.host[formOff:] {
		b.host[formOff+i] = 0xff // memory may come with the right answers of another device in it
	}
	fail := dense.Failure{At: b.at, Step: 1}
	known := arith.NewKnown()
	copy(slice[float32](b, gAt, n), known.G)
	copy(slice[float32](b, uAt, n), known.U)
	*at[quantizeParams](b, 128) = f.quantize(b.at+gAt, b.at+uAt, fail, n)
	*at[quantizeParams](b, 256) = formAt(b.at+formOff+8*n, n).quantize(b.at+gAt, b.at+uAt, fail, n)
	c.begin()
	c.run(kernel{shader: "quantize", c1: 1}, b, 128)
	c.run(kernel{shader: "quantize", c0: 256, c1: 1}, b, 256)
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
	q := formAt(formOff+8*n, n)
	var codes [n]int8
	for i := range codes { // quads of 16, of eight blocks side by side
		quad := (i/2048*16+i%256/16)*8 + i/256%8
		codes[i] = *at[int8](b, q.Code+uint64(16*quad+i%16))
	}
	if wrong := known.Differs(slice[float32](b, formOff, n), slice[float32](b, q.Scale, n/256), codes[:]); wrong != "" {
		return fmt.Errorf("vulkan: %w: %s (driver %s) computes %s: it does not round as IEEE 754 says; update its driver, or run with --backend cpu",
			ErrUnfit, d.Name, d.Driver, wrong)
	}
	return nil
}
