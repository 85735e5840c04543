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
	const n = arith.KnownLen
	b, err := d.hostBuffer(64 << 10)
	if err != nil {
		return err
	}
	defer d.drop(b)
	const gAt, uAt, wAt, yAt, jobAt, indexAt, first, second = 256, 256 + 4*n, 256 + 8*n, 256 + 12*n, 256 + 13*n, 512 + 13*n, 1024 + 13*n, 1024 + 19*n
	for i := range b.host[yAt:] {
		b.host[yAt+i] = 0xff // memory may come with the right answers of another device in it
	}
	known, w := arith.NewKnown(), slice[float32](b, wAt, n)
	copy(slice[float32](b, gAt, n), known.G)
	copy(slice[float32](b, uAt, n), known.U)
	for i := range w {
		w[i] = float32(i%13) - 5.7
	}
	floats, codes := formAt(b.at+first, n), formAt(b.at+second, n)
	*at[rowsJob](b, jobAt) = rowsJob{W: b.at + wAt, Y: b.at + yAt, N: 1, Stride: 1}
	clear(slice[uint32](b, indexAt, 2))
	leave := d.enter()
	err = d.quantize(quant.F32, floats, b.at+gAt, b.at+uAt, b.at, n, 1, 1)
	if err == nil {
		err = d.quantize(quant.Q4_K, codes, b.at+gAt, b.at+uAt, b.at, n, 1, 1)
	}
	if err == nil {
		err = d.multiply(quant.F32, rowsParams{jobs: b.at + jobAt, index: b.at + indexAt, code: floats.Code, rows: 1, cols: n}, 1, 1)
	}
	if err == nil {
		err = d.check("stream synchronize", d.dr.f.waitStream.call(d.kernels))
	}
	leave()
	if err != nil {
		return err
	}
	wrong := known.Differs(slice[float32](b, int(floats.Code-b.at), n), slice[float32](b, int(codes.Scale-b.at), n/256), slice[int8](b, int(codes.Code-b.at), n))
	var lanes [16]float32
	for i, v := range known.Want {
		lanes[i%16] += float32(w[i] * v)
	}
	if got, want := *at[float32](b, yAt), arith.Tree16(&lanes); wrong == "" && math.Float32bits(got) != math.Float32bits(want) {
		wrong = arith.Wrong("row", 0, math.Float32bits(got), math.Float32bits(want))
	}
	if wrong != "" {
		return fmt.Errorf("%v: %w: %s computes %s: it does not round as IEEE 754 says; update its driver, or run with --backend cpu", d.dr.API, ErrUnfit, d.Name, wrong)
	}
	return nil
}
