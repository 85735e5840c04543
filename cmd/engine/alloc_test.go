package engine

import (
	"context"
	"fmt"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"testing"

	"sluice/internal/invariants"
	"sluice/storage"
)

// Decoding allocates nothing on the Go heap while its experts are in memory,
// and under a cap no more than golang-lru's one entry for each expert that comes
// in, if the policy uses it.
func TestDecodeAllocates(t *testing.T) {
	if raceEnabled || invariants.Enabled {
		t.Skip("the checks of this build allocate")
	}
	ctx := context.Background()
	tiny, err := filepath.Glob("testdata/*.gguf")
	if err != nil || len(tiny) < 2 {
		t.Fatalf("tiny models %v, %v", tiny, err)
	}
	for _, path := range append(tiny, demo, synthetic(t, demo)) {
		for _, threads := range []int{1, 2} {
			e := open(t, Options{Path: path, Ctx: 128, Threads: threads})
			generate(t, e, heldout(t, e, 40), 20)
			at, one := e.Model.Pos()-1, []int32{7}
			step := func() {
				e.Model.Rewind(at)
				if _, err := e.Model.Extend(ctx, one); err != nil {
					t.Fatal(err)
				}
			}
			step() // brings the last experts
			misses := e.Cache.Stats().Misses
			if n := testing.AllocsPerRun(50, step); n != 0 {
				t.Errorf("%s, %d threads: a token allocates %v times", path, threads, n)
			}
			if n := e.Cache.Stats().Misses - misses; n != 0 {
				t.Errorf("%s: %d misses in a token that was run before", path, n)
			}
			// Nor does the loop around it: a longer text costs no more.
			prompt := heldout(t, e, 10)
			short := testing.AllocsPerRun(3, func() { generate(t, e, prompt, 2) })
			if long := testing.AllocsPerRun(3, func() { generate(t, e, prompt, 12) }); long > short {
				t.Errorf("%s, %d threads: 2 tokens allocate %v times, 12 tokens %v times", path, threads, short, long)
			}
		}
	}

	// A collection empties the runtime's store of records of goroutines that
	// wait, which is none of ours: so there is none, and one thread waits less.
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	for _, o := range []struct {
		mode    storage.Mode
		policy  string
		entries int64 // for each expert that comes in
	}{
		{storage.Slab, "lru", 1}, {storage.Pread, "lru", 1}, {storage.MMap, "lru", 1}, {storage.Slab, "", 0},
	} {
		e := open(t, Options{Path: demo, Ctx: 128, Cap: 1, Threads: 1, Storage: o.mode, Policy: o.policy})
		ids := heldout(t, e, 100)
		generate(t, e, ids[:30], 10) // scratch grows to its size
		what := fmt.Sprintf("%v, cap 1, policy %q", o.mode, o.policy)
		from := e.Model.Pos()
		for try := 0; ; try++ { // until the runtime has all the records of waiting that it needs
			e.Model.Rewind(from)
			before, at := e.Cache.Stats(), mallocs()
			for p := from; p < len(ids); p++ {
				if _, err := e.Model.Extend(ctx, ids[p:p+1]); err != nil {
					t.Fatal(err)
				}
			}
			made, loads := mallocs()-at, e.Cache.Stats().Misses-before.Misses
			if loads < 60*6*4/2 { // lru: all of them
				t.Fatalf("%s: only %d experts came in: this tests nothing", what, loads)
			}
			if made <= o.entries*loads+10 { // far less than one for each token
				t.Logf("%s: %d allocations, %d experts came in", what, made, loads)
				break
			}
			if try == 10 {
				t.Fatalf("%s: %d allocations for %d experts that came in", what, made, loads)
			}
		}
	}
}

// mallocs is the number of objects that the Go heap has been asked for.
func mallocs() int64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.Mallocs)
}
