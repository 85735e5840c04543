package quant

import "testing"

// BenchmarkUnpack is the plain kernels' share of integers: bytes of weights.
func BenchmarkUnpack(b *testing.B) {
	for _, typ := range blockTypes() {
		b.Run("type="+typ.String(), func(b *testing.B) {
			row := randomBlocks(typ, 4096, 1)
			unpack, n := UnpackerFor(typ), 4096/typ.ActBlock()
			out := new(Block)
			b.SetBytes(int64(len(row)))
			for b.Loop() {
				for i := 0; i < n; i++ {
					unpack(out, row, i)
				}
			}
		})
	}
}
