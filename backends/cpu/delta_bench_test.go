package cpu

import (
	"fmt"
	"testing"

	"sluice/backends"
)

// BenchmarkDeltaNet is one layer of Qwen3-Next-80B-A3B; the bytes are of its state.
func BenchmarkDeltaNet(b *testing.B) {
	s := backends.DeltaShape{Layers: 8, KeyHeads: 16, ValueHeads: 32, KeyDim: 128, ValueDim: 128, Taps: 4}
	for _, level := range []Level{Go, AVX2, AVX512} {
		if _, err := Choose(level); err != nil {
			continue
		}
		for _, n := range []int{1, 64} {
			b.Run(fmt.Sprintf("kernels=%v/n=%d", level, n), func(b *testing.B) {
				be, err := New(Options{Threads: 2, Level: level})
				if err != nil {
					b.Fatal(err)
				}
				defer be.Close()
				d := newDeltaBench(b, be, n, s)
				b.SetBytes(int64(s.ValueHeads*s.ValueDim*s.KeyDim) * 4)
				for i := 0; b.Loop(); i++ { // other layers each time, so that states come from memory
					d.step(be, i%s.Layers, i/s.Layers*n)
				}
			})
		}
	}
}
