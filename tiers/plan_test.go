package tiers

import (
	"errors"
	"testing"
)

const mib = 1 << 20

// even is a model of equal layers.
func even(layers, experts int, bytes int64) []LayerSize {
	ls := make([]LayerSize, layers)
	for i := range ls {
		ls[i] = LayerSize{Experts: experts, SlotBytes: bytes, ExpertBytes: bytes}
	}
	return ls
}

func TestFit(t *testing.T) {
	tests := []struct {
		name    string
		plan    Plan
		cap     int
		peak    int64
		words   string
		refused bool
	}{
		{
			name: "as requested",
			plan: Plan{Layers: even(2, 32, 4096), TopK: 2, Fixed: 1000, Available: 1e9, Cap: 8},
			cap:  8, peak: 1000 + (2*8+2)*4096,
		},
		{
			name: "all experts need no staging",
			plan: Plan{Layers: even(2, 32, 4096), TopK: 2, Available: 1e9, Cap: 32},
			cap:  32, peak: 2 * 32 * 4096,
		},
		{
			name: "above the model's experts",
			plan: Plan{Layers: even(2, 32, 4096), TopK: 2, Available: 1e9, Cap: 320},
			cap:  32, peak: 2 * 32 * 4096,
			words: "cap lowered 320 -> 32 (the model has 32 experts per layer)",
		},
		{
			// 4 layers of 320 experts of 8,192,000 bytes: 10.5 GB, and 40.2 GB beside.
			name: "above memory",
			plan: Plan{Layers: even(4, 320, 8192000), TopK: 8, Fixed: 40_200_000_000, Available: 40_600_000_000, Cap: 320},
			cap:  10, peak: 40_200_000_000 + 48*8192000,
			words: "cap lowered 320 -> 10 (projected peak 50.7 GB, available 40.6 GB)",
		},
		{
			name: "above both: the peak is that of all experts",
			plan: Plan{Layers: even(1, 32, 100*mib), TopK: 1, Available: 500 * mib, Cap: 320},
			cap:  4, peak: 500 * mib,
			words: "cap lowered 320 -> 4 (projected peak 3.4 GB, available 0.5 GB)",
		},
		{
			name: "to the byte",
			plan: Plan{Layers: even(3, 32, 4096), TopK: 2, Fixed: 5, Available: 5 + (3*7+2)*4096, Cap: 7},
			cap:  7, peak: 5 + (3*7+2)*4096,
		},
		{
			name: "a byte short",
			plan: Plan{Layers: even(3, 32, 4096), TopK: 2, Fixed: 5, Available: 4 + (3*7+2)*4096, Cap: 7},
			cap:  6, peak: 5 + (3*6+2)*4096,
			words: "cap lowered 7 -> 6 (projected peak 0.0 GB, available 0.0 GB)",
		},
		{
			name:    "not even one",
			plan:    Plan{Layers: even(4, 32, mib), TopK: 2, Fixed: 100 * mib, Available: 100 * mib, Cap: 7},
			refused: true,
		},
		{
			name:    "not even one, automatically",
			plan:    Plan{Layers: even(4, 32, mib), TopK: 2, Fixed: 100 * mib, Available: 100 * mib},
			refused: true,
		},
		{
			name: "auto, all experts",
			plan: Plan{Layers: even(4, 32, mib), TopK: 2, Fixed: 100 * mib, Available: 2048 * mib},
			cap:  32, peak: 228 * mib,
			words: "cap 32 chosen: all experts of a layer (projected peak 0.2 GB, available 2.1 GB)",
		},
		{
			name: "auto, a container of 2 GiB keeps 256 MiB in reserve",
			plan: Plan{Layers: even(10, 64, 10*mib), TopK: 4, Fixed: 100 * mib, Available: 2048 * mib},
			cap:  16, peak: (100 + 1640) * mib, // cap 17 would take 1840 MiB of 1792
			words: "cap 16 chosen of 64 (projected peak 1.8 GB, available 2.1 GB, of which 0.3 GB in reserve)",
		},
		{
			name: "auto, a large machine keeps a tenth",
			plan: Plan{Layers: even(10, 256, 100*mib), TopK: 4, Available: 100_000 * mib},
			cap:  89, peak: (890 + 4) * 100 * mib,
			words: "cap 89 chosen of 256 (projected peak 93.7 GB, available 104.9 GB, of which 10.5 GB in reserve)",
		},
		{
			name: "auto, the reserve gives way to cap 1",
			plan: Plan{Layers: even(10, 64, 10*mib), TopK: 4, Fixed: 1800 * mib, Available: 2048 * mib},
			cap:  1, peak: (1800 + 140) * mib,
			words: "cap 1 chosen of 64 (projected peak 2.0 GB, available 2.1 GB, of which 0.0 GB in reserve)",
		},
		{
			name: "layers of two sizes; slots are whole pages",
			plan: Plan{Layers: []LayerSize{{Experts: 8, SlotBytes: 5000, ExpertBytes: 4000}, {Experts: 4, SlotBytes: 4096, ExpertBytes: 4000}, {Experts: 8, SlotBytes: 5000, ExpertBytes: 4000}}, TopK: 2, Available: 1e9, Cap: 6},
			cap:  6, peak: (12+2)*8192 + 4*4096,
		},
		{
			name: "a dense model has no cap",
			plan: Plan{Fixed: 8, Available: 8},
			cap:  0, peak: 8,
		},
		{
			name:    "a dense model that is a byte too large",
			plan:    Plan{Fixed: 9, Available: 8},
			refused: true,
		},
		{
			name: "views promise nothing",
			plan: Plan{Layers: []LayerSize{{Experts: 8, ExpertBytes: 4000}}, TopK: 2, Fixed: 7, Available: 8, Cap: 6},
			cap:  6, peak: 7,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := tt.plan.Fit()
			if tt.refused {
				var no *NoRoomError
				if !errors.As(err, &no) {
					t.Fatalf("got %+v, %v, want a refusal", got, err)
				}
				if want := tt.plan.at(1).Peak; no.Need != want || no.Available != tt.plan.Available {
					t.Errorf("got %+v, want %d needed", no, want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got.Cap != tt.cap || got.Peak != tt.peak || got.Words != tt.words {
				t.Errorf("got  cap %d, peak %d, %q\nwant cap %d, peak %d, %q", got.Cap, got.Peak, got.Words, tt.cap, tt.peak, tt.words)
			}
			if left := tt.plan.Available - got.Peak; (got.Tight != "") != (tt.plan.Cap > 0 && left < reserve(tt.plan.Available)) {
				t.Errorf("with %d of %d left: %q", left, tt.plan.Available, got.Tight)
			}
			if got.Peak != tt.plan.Fixed+got.LRU+got.Staging {
				t.Errorf("%+v does not sum to its peak", got)
			}
		})
	}
	if _, err := (Plan{Layers: even(1, 1, 1), TopK: 0, Available: 1}).Fit(); err == nil {
		t.Error("top-k 0 is accepted")
	}
}

// A requested cap that takes what an automatic one would leave says so.
func TestTightWords(t *testing.T) {
	p := Plan{Layers: even(10, 32, 100e6), TopK: 2, Fixed: 1e9, Available: 4e9, Cap: 2}
	got, err := p.Fit()
	want := ""
	if err != nil || got.Cap != 2 || got.Tight != want {
		t.Errorf("%+v, %v", got, err)
	}
	p.Available = 3.3e9
	got, err = p.Fit()
	want = "cap 2 leaves 0.1 GB of the available 3.3 GB, where one that is chosen leaves 0.3 GB for the Go heap, page tables and the page cache: " +
		"under a limit of memory the process may be killed; leave --cap out, or ask for less"
	if err != nil || got.Cap != 2 || got.Tight != want {
		t.Errorf("got  %+v, %v\nwant %s", got, err, want)
	}
}

func TestNoRoomWords(t *testing.T) {
	err := &NoRoomError{What: "one expert per layer (cap 1)", Need: 5_230_000_000, Available: 3_100_000_000}
	want := "not enough memory for one expert per layer (cap 1): 5.2 GB (5230000000 bytes) needed in all, 3.1 GB (3100000000 bytes) available; " +
		"stop other programs, raise the memory limit of the container, shorten --ctx, or use a smaller model"
	if err.Error() != want {
		t.Errorf("got  %s\nwant %s", err, want)
	}
	_, given := Plan{Layers: even(10, 32, 100e6), TopK: 2, Fixed: 1e9, Available: 1e9, Given: true}.Fit()
	want = "not enough memory for one expert per layer (cap 1): 2.2 GB (2200046080 bytes) needed in all, 1.0 GB (1000000000 bytes) allowed by --ram; allow more, shorten --ctx, or use a smaller model"
	if given == nil || given.Error() != want {
		t.Errorf("got  %v\nwant %s", given, want)
	}
}

func TestLedger(t *testing.T) {
	l := NewLedger(10_000_000_000)
	for _, g := range []struct {
		p  Purpose
		n  int64
		ok bool
	}{
		{Base, 1_000_000_000, true},
		{Dense, 5_000_000_000, true},
		{KV, 5_000_000_000, false},
		{KV, 3_000_000_000, true},
		{LRU, 1_000_000_001, false},
		{LRU, 900_000_000, true},
		{Staging, 100_000_000, true},
		{Scratch, 0, true},
		{Scratch, 1, false},
		{Scratch, 1<<63 - 1, false},
	} {
		before := l.Total()
		err := l.Grant(g.p, g.n)
		if (err == nil) != g.ok {
			t.Fatalf("%v %d: %v", g.p, g.n, err)
		}
		if g.ok {
			before += g.n
		}
		if l.Total() != before {
			t.Fatalf("%v %d: total %d, want %d", g.p, g.n, l.Total(), before)
		}
	}
	want := "10.0 GB = base 1.0 GB + dense 5.0 GB + kv 3.0 GB + scratch 0.0 GB + staging 0.1 GB + pinned 0.0 GB + lru 0.9 GB"
	if l.String() != want {
		t.Errorf("got  %s\nwant %s", l, want)
	}
	l.Return(KV, 3_000_000_000)
	if l.Of(KV) != 0 || l.Total() != 7_000_000_000 {
		t.Errorf("after the return: %s", l)
	}
	if err := NewLedger(0).Grant(LRU, 1<<50); err != nil {
		t.Errorf("a ledger without a limit refuses: %v", err)
	}
}
