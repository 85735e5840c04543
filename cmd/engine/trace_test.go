package engine

import (
	"bytes"
	"context"
	"fmt"
	"testing"

	"sluice/moe"
	"sluice/tiers"
	"sluice/tiers/sim"
)

// A trace of a run is its routing: replayed under lru, with the bytes that the
// engine kept, it gives the engine's own counters. The rules coincide for a
// model of experts of one size, when no batch exceeds the pool.
func TestTraceReplays(t *testing.T) {
	for _, limit := range []int{3, 5, 7} {
		t.Run(fmt.Sprintf("cap=%d", limit), func(t *testing.T) {
			e := open(t, Options{Path: qwen, Cap: limit, Policy: "lru", Ctx: 128})
			var out bytes.Buffer
			w := tiers.NewTraceWriter(&out, e.TraceHeader("tiny"))
			e.Model.Trace(w)
			prompt := heldout(t, e, 3)
			g := generation(e, prompt, 40)
			var before tiers.Stats
			g.Decodes = func() {
				before = e.Cache.Stats()
				w.Decodes()
			}
			if _, err := moe.Generate(context.Background(), e.Model, greedy(e), g); err != nil {
				t.Fatal(err)
			}
			if err := w.Err(); err != nil {
				t.Fatal(err)
			}
			tr, err := tiers.ReadTrace(&out)
			if err != nil {
				t.Fatal(err)
			}
			size := int64(0)
			kept := int64(0)
			for _, r := range e.Spec.Roles {
				b := e.Source.ExpertBytes(r.Layer)
				if size != 0 && b != size {
					t.Fatal("experts of two sizes")
				}
				size = b
				kept += int64(limit) * b
				if got := tr.Layers[r.Layer]; got.ExpertBytes != b || got.DenseBytes == 0 {
					t.Errorf("layer %d: %+v, experts have %d bytes", r.Layer, got, b)
				}
			}
			p, err := sim.NewPolicy("lru", tr, kept)
			if err != nil {
				t.Fatal(err)
			}
			r, st := sim.Replay(tr, p), e.Cache.Stats()
			if r.Lookups != st.DistinctExperts || r.Lookups-r.Hits != st.Misses || r.ReadBytes != st.Source.LoadBytes {
				t.Errorf("replay %+v, engine %+v", r, st)
			}
			if n := st.DistinctExperts - before.DistinctExperts; r.DecodeLookups != n || r.DecodeLookups-r.DecodeHits != st.Misses-before.Misses {
				t.Errorf("decoding: replay %+v, engine %+v less %+v", r, st, before)
			}
			if r.Hits == 0 || r.Hits == r.Lookups {
				t.Errorf("it compares nothing: %+v", r)
			}
		})
	}
}
