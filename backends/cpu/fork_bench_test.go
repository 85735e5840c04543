package cpu

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// empty is a step that does nothing, an item for each worker.
type empty struct{}

func (empty) run(*worker, int, int) {}

// BenchmarkForkJoin is an empty step, one after another, and each after a pause
// in which only the caller works.
func BenchmarkForkJoin(b *testing.B) {
	for _, threads := range []int{2, 4, 8} {
		for _, pause := range []time.Duration{0, 5 * time.Microsecond, 30 * time.Microsecond, 300 * time.Microsecond, 3 * time.Millisecond} {
			b.Run(fmt.Sprintf("threads=%d/pause=%v", threads, pause), func(b *testing.B) {
				p := newPool(threads, kernelsFor(Auto))
				defer p.close()
				times := make([]time.Duration, 0, b.N)
				for range b.N {
					for at := time.Now(); time.Since(at) < pause; {
					}
					at := time.Now()
					p.do(empty{}, threads, 1)
					times = append(times, time.Since(at))
				}
				slices.Sort(times)
				b.ReportMetric(float64(times[len(times)/2]), "p50-ns")
				b.ReportMetric(float64(times[len(times)*99/100]), "p99-ns")
				b.ReportMetric(float64(times[len(times)*999/1000]), "p99.9-ns")
			})
		}
	}
}
