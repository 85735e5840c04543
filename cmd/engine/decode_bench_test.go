package engine

import (
	"cmp"
	"context"
	"os"
	"testing"

	"sluice/storage"
)

// BenchmarkDecode decodes token after token with all experts in memory, and
// BenchmarkPrefill runs 512 tokens at once. SLUICE_BENCH names the model, else it is
// the demo; -cpuprofile shows where the time goes.
func BenchmarkDecode(b *testing.B)  { benchmark(b, 1) }
func BenchmarkPrefill(b *testing.B) { benchmark(b, 512) }

func benchmark(b *testing.B, chunk int) {
	p, err := Prepare(Options{Path: cmp.Or(os.Getenv("SLUICE_BENCH"), "../../models/demo-q4_k_m.gguf"), Storage: storage.Pread})
	if err != nil {
		b.Fatal(err)
	}
	ctx := context.Background()
	e, err := p.Load(ctx)
	if err != nil {
		b.Fatal(err)
	}
	defer e.Close()
	// Tokens of all kinds first, so that every expert that is wanted is there.
	ids := make([]int32, chunk)
	next := func(at int) {
		for i := range ids {
			ids[i] = int32((at+i)*7919) % int32(e.Spec.Vocab)
		}
		if e.Model.Pos()+chunk > e.Config.Ctx {
			e.Model.Rewind(0)
		}
		if _, err := e.Model.Extend(ctx, ids); err != nil {
			b.Fatal(err)
		}
	}
	for at := 0; at < 512; at += chunk {
		next(at)
	}
	e.Model.Rewind(0)
	at := 0
	for b.Loop() {
		next(at)
		at += chunk
		if at == 512 {
			at = 0
			e.Model.Rewind(0)
		}
	}
	b.ReportMetric(float64(b.N*chunk)/b.Elapsed().Seconds(), "tok/s")
}
