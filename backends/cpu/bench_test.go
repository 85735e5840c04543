package cpu

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"sluice/backends"
	"sluice/backends/backendtest"
)

// BenchmarkMatMul is one thread on a matrix that fits the caches; MB/s are of
// weight bytes, for n positions together.
func BenchmarkMatMul(b *testing.B) {
	const rows, cols = 256, 2048
	for _, typ := range backendtest.Types {
		for _, n := range []int{1, 2, 3, 32} {
			b.Run(fmt.Sprintf("type=%v/n=%d", typ, n), func(b *testing.B) {
				be := open(b, 1)
				rng := rand.New(rand.NewPCG(1, 2))
				w := []backends.Linear{{Matrix: backends.Matrix{Type: typ, Rows: rows, Cols: cols, Data: backendtest.Weights(rng, typ, rows*cols)}}}
				x, _ := be.NewVec(n, cols)
				y, _ := be.NewVec(n, rows)
				x.SetLen(n)
				copy(x.(*vec).data, backendtest.Vectors(rng, n, cols, 0))
				b.SetBytes(int64(len(w[0].Data)))
				out := []backends.Vec{y}
				for b.Loop() {
					be.MatMul(out, w, x)
				}
				b.ReportMetric(float64(rows*cols*n)*float64(b.N)/float64(b.Elapsed().Nanoseconds()), "GMAC/s")
			})
		}
	}
}
