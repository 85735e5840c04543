package engine

import (
	"context"
	"math"
	"slices"
	"testing"

	"sluice/internal/invariants"
	"sluice/moe"
	"sluice/storage"
)

// What is counted is what happened, seen from both sides: by the router's
// arithmetic and by what the source was asked for.
func TestCounters(t *testing.T) {
	for _, tt := range []struct {
		path  string
		cap   int
		chunk int
		mode  storage.Mode
	}{
		{demo, 4, 16, storage.Slab},
		{demo, 32, 512, storage.Slab},
		{demo, 1, 3, storage.Pread},
		{qwen, 3, 7, storage.Slab},
		{glm, 2, 64, storage.MMap},
	} {
		tt.path = light(tt.path)
		e, source := openTapped(t, Options{Path: tt.path, Cap: tt.cap, Chunk: tt.chunk, Storage: tt.mode, Ctx: 128})
		if st := source.Stats(); st != (storage.SourceStats{}) || len(source.asked) > 0 {
			t.Errorf("%s: experts are read before the first token: %+v, %v", tt.path, st, source.asked)
		}
		prompt := heldout(t, e, 50)
		r := generate(t, e, prompt, 10)
		if len(r.IDs) != 10 {
			t.Fatalf("%d tokens, want 10", len(r.IDs))
		}
		st, run := e.Cache.Stats(), e.Model.Stats()

		if want := int64(len(prompt) + 9); run.Positions != want { // the last token is not run
			t.Errorf("%s: %d positions, want %d", tt.path, run.Positions, want)
		}
		if want := int64((len(prompt)+tt.chunk-1)/tt.chunk + 9); run.Forwards != want {
			t.Errorf("%s: %d forwards, want %d", tt.path, run.Forwards, want)
		}
		if want := run.Positions * int64(len(e.Spec.Roles)*e.Spec.TopK); st.RoutedExperts != want {
			t.Errorf("%s: %d routed experts, want %d", tt.path, st.RoutedExperts, want)
		}
		if sum := st.Hits.VRAM + st.Hits.Pinned + st.Hits.LRU + st.Misses; sum != st.RoutedExperts {
			t.Errorf("%s: hits and misses sum to %d, not %d: %+v", tt.path, sum, st.RoutedExperts, st)
		}
		if st.Hits.VRAM != 0 || st.Hits.Pinned != 0 || st.LoadsFailed != 0 || st.LoadsDropped != 0 {
			t.Errorf("%s: counted what there is not: %+v", tt.path, st)
		}
		if n := int64(len(source.asked)); st.Misses != n || st.Source.Loads != n {
			t.Errorf("%s: %d misses, %d loads, %d experts asked of the source", tt.path, st.Misses, st.Source.Loads, n)
		}
		var bytes int64
		for _, k := range source.asked {
			bytes += e.Source.ExpertBytes(int(k.Layer))
		}
		if st.Source.LoadBytes != bytes || st.Source.ReadBytes < bytes {
			t.Errorf("%s: %d bytes of experts, %d read, want %d and more", tt.path, st.Source.LoadBytes, st.Source.ReadBytes, bytes)
		}
		var kept int64
		for _, role := range e.Spec.Roles {
			kept += int64(min(tt.cap, role.Experts))
		}
		if st.DistinctExperts > st.RoutedExperts || st.DistinctExperts < st.Misses || st.Evictions > st.Misses || st.Evictions < st.Misses-kept {
			t.Errorf("%s: %d kept at most, and %+v", tt.path, kept, st)
		}
		if waited := run.Times[moe.StageExpertWait]; st.LoadWaitNanos > waited {
			t.Errorf("%s: waited %d ns in all for drives, but %d ns as a stage", tt.path, st.LoadWaitNanos, waited)
		}
		if tt.cap < e.Spec.Experts {
			continue
		}

		// With room for all experts each is read once, and a second pass reads none.
		asked := slices.Clone(source.asked)
		slices.SortFunc(asked, func(a, b storage.Key) int { return int(a.Layer-b.Layer)<<20 + int(a.Expert-b.Expert) })
		if n := len(slices.Compact(asked)); int64(n) != st.Misses {
			t.Errorf("%s: %d experts are read, %d distinct ones", tt.path, st.Misses, n)
		}
		generate(t, e, prompt, 10)
		again := e.Cache.Stats()
		if again.Misses != st.Misses || again.Evictions != 0 || again.RoutedExperts != 2*st.RoutedExperts {
			t.Errorf("%s: after a second pass %+v, after the first %+v", tt.path, again, st)
		}
	}
}

// The stages account for the time of decoding. What lies between them is
// structure (no more than a few calls a token), unless the machine takes the
// processor away there: so the best of some tries counts.
func TestStagesSumToDecodeTime(t *testing.T) {
	if raceEnabled || invariants.Enabled {
		t.Skip("the checks of this build add time between the stages")
	}
	e := open(t, Options{Path: demo, Cap: 8, Ctx: 128, Threads: 1})
	prompt := must(e.Tokens.EncodePrompt(psalm))
	best := math.Inf(1)
	for range 5 {
		r := generate(t, e, prompt, 60)
		if r.Decode.Tokens != 59 {
			t.Fatalf("%d tokens of decoding, want 59", r.Decode.Tokens)
		}
		for _, p := range []moe.Phase{r.Prefill, r.Decode} {
			if sum := p.Times.Sum(); sum > p.Nanos {
				t.Errorf("the stages sum to %d ns of %d", sum, p.Nanos)
			}
			for s, ns := range p.Times {
				if ns < 0 || ns == 0 && moe.Stage(s) != moe.StageSampling && moe.Stage(s) != moe.StageExpertWait {
					t.Errorf("%v took %d ns", moe.Stage(s), ns)
				}
			}
		}
		if best = min(best, 1-float64(r.Decode.Times.Sum())/float64(r.Decode.Nanos)); best < 0.02 {
			t.Logf("%.3f %% of decoding lie between the stages", 100*best)
			return
		}
	}
	t.Errorf("%.1f %% of decoding are in no stage, at best", 100*best)
}

// A perplexity runs what it scores and no more, whatever the chunks.
func TestPerplexityPositions(t *testing.T) {
	ctx := context.Background()
	var want moe.Perplexity
	for i, chunk := range []int{512, 7, 1} {
		e := open(t, Options{Path: qwen, Ctx: 40, Chunk: chunk})
		ids := heldout(t, e, 90)
		p, err := moe.MeasurePerplexity(ctx, e.Model, ids, 40, -1, nil)
		if err != nil {
			t.Fatal(err)
		}
		if p.Chunks != 2 || p.Tokens != 2*19 || e.Model.Stats().Positions != 80 {
			t.Errorf("chunks of %d: %+v, %d positions", chunk, p, e.Model.Stats().Positions)
		}
		if i == 0 {
			want = p
		}
		if p != want {
			t.Errorf("chunks of %d: %+v, want %+v", chunk, p, want)
		}

		// The same from the logits of each position.
		sum, n := 0.0, 0
		for at := 0; at+40 <= len(ids); at += 40 {
			logits, _ := allLogits(t, e, ids[at:at+40])
			for p := 20; p < 39; p++ {
				l, all := row(logits, p, e.Spec.Vocab), 0.0
				for _, x := range l {
					all += math.Exp(float64(x))
				}
				sum += math.Log(all) - float64(l[ids[at+p+1]])
				n++
			}
		}
		if naive := math.Exp(sum / float64(n)); math.Abs(naive/p.Value-1) > 1e-9 {
			t.Errorf("chunks of %d: perplexity %v, by the definition %v", chunk, p.Value, naive)
		}

		// A first token of each chunk changes what is said of it.
		other, err := moe.MeasurePerplexity(ctx, e.Model, ids, 40, 3, nil)
		if err != nil || other.Value == p.Value || ids[0] == 3 {
			t.Errorf("with a BOS token: %+v, %v", other, err)
		}
	}
}
