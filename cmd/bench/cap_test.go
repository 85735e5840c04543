package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// A fake is a program whose speed, in ns a token, and output depend on the cap.
type fake struct {
	most    int // experts of the model: a larger cap is lowered
	calls   []string
	counts  map[int]int
	output  func(cap int) string
	setting func(cap int) string // a setting beside the cap, with its origin
	fail    func(cap, run int) error
	drift   func(cap, run int) int // of the cap in effect
}

func (f *fake) run(_ context.Context, args ...string) ([]byte, error) {
	if f.counts == nil {
		f.counts = map[int]int{}
	}
	if args[0] != "run" || args[1] != "--cap" || !slices.Contains(args, "--json") {
		return nil, fmt.Errorf("called with %q", args)
	}
	cap, _ := strconv.Atoi(args[2])
	effective := min(cap, f.most)
	extra := ""
	if f.setting != nil {
		extra = "," + f.setting(cap)
	}
	if slices.Contains(args, "--print-config") {
		return fmt.Appendf(nil, `{"settings":{"cap":{"value":%d,"origin":"flag"},"slab":{"value":"none","origin":"auto"}%s}}`, effective, extra), nil
	}
	n := f.counts[cap]
	f.counts[cap]++
	f.calls = append(f.calls, fmt.Sprint(cap))
	if f.fail != nil {
		if err := f.fail(cap, n); err != nil {
			return nil, err
		}
	}
	if f.drift != nil {
		effective += f.drift(cap, n)
	}
	out := "aa"
	if f.output != nil {
		out = f.output(cap)
	}
	// 10 tokens; a cap twice as large is twice as fast, with a little scatter.
	return fmt.Appendf(nil, `{"settings":{"cap":{"value":%d,"origin":"flag"}},"decode_tokens":10,"decode_ns":%d,"expert_wait_ns":1000,"logits_crc32c":%q,
		"counters":{"rss_peak_bytes":%d,"major_faults":3},
		"decode_counters":{"routed_experts_total":200,"tier_hits":{"vram":0,"pinned":50,"lru":100},"tier_misses":50,"host_load_bytes":5000,"major_faults":20}}`,
		effective, 1000000/cap+n*10, out, 1000*cap), nil
}

func (f *fake) battery(runs int, caps ...int) CapBattery {
	return CapBattery{Sluice: f.run, Caps: caps, Runs: runs, Args: []string{"--model=m"}, Model: "m"}
}

// The order of arms turns from block to block, after a round that does not count,
// and medians are of the counts of decoding alone.
func TestCapBattery(t *testing.T) {
	f := &fake{most: 100}
	res, err := f.battery(6, 4, 8, 16).Run(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if got, want := strings.Join(f.calls, " "), "4 8 16"+strings.Repeat(" 4 8 16 8 16 4 16 4 8", 2); got != want {
		t.Errorf("order %s, want %s", got, want)
	}
	if len(res.Samples) != 21 || len(res.Arms) != 3 || len(res.Comparisons) != 2 || res.Refused != "" {
		t.Fatalf("%+v", res)
	}
	a := res.Arms[1]
	if a.Cap != 8 || a.TokPerSec.N != 6 || a.HitPct["pinned"] != 25 || a.HitPct["lru"] != 50 || a.MissPct != 25 || a.PerToken != 500 || a.Peak != 8000 || a.Faults != 2 {
		t.Errorf("%+v", a)
	}
	if want := 10 / (125000 + 35.0) * 1e9; !near(a.TokPerSec.Median, want, 1e-3*want) {
		t.Errorf("median %v, want about %v", a.TokPerSec.Median, want)
	}
	if c := res.Comparisons[0]; c.Wins != 6 || !near(c.Paired, 2, 0.01) {
		t.Errorf("%+v", c)
	}
}

func TestCapRefusals(t *testing.T) {
	refused := func(name string, f *fake, want string, caps ...int) *CapResult {
		t.Helper()
		res, err := f.battery(2, caps...).Run(context.Background())
		var r *RefusedError
		if !errors.As(err, &r) || err.Error() != want {
			t.Errorf("%s: got %v, want %s", name, err, want)
		}
		return res
	}
	f := &fake{most: 10}
	refused("lowered to the same", f, "bench: arms are the same: cap resolved to 10 in both", 4, 64, 320)
	if len(f.calls) > 0 {
		t.Errorf("ran %v", f.calls)
	}
	refused("given twice", &fake{most: 10}, "bench: arms are the same: cap resolved to 4 in both", 4, 4)
	refused("another setting", &fake{most: 100, setting: func(cap int) string {
		return fmt.Sprintf(`"draft":{"value":%d,"origin":"default"}`, 3*(cap/8))
	}}, "bench: arms differ outside the treatment: draft 0 vs 3; refusing", 4, 8)
	res := refused("another output", &fake{most: 100, output: func(cap int) string { return fmt.Sprintf("%02d", cap) }},
		"bench: the outputs differ (logits: cap 4 04, cap 8 08), though no cap may change them: no verdict on speed; please report this", 4, 8)
	if res == nil || len(res.Comparisons) != 0 || len(res.Samples) != 6 || res.Arms[0].TokPerSec.N != 2 {
		t.Errorf("the samples are not kept: %+v", res)
	}
	// What follows from the cap may differ, and is told.
	res, err := (&fake{most: 100, setting: func(cap int) string { return fmt.Sprintf(`"pin":{"value":%d,"origin":"auto"}`, cap) }}).battery(2, 4, 8).Run(context.Background())
	if err != nil || len(res.Notes) == 0 || !slices.Contains(res.Notes, "pin is 4 at cap 4 and 8 at cap 8") {
		t.Errorf("%v, %+v", err, res)
	}
}

// A void run voids its block, which is run once more at the end.
func TestCapVoid(t *testing.T) {
	boom := errors.New("boom")
	f := &fake{most: 100, fail: func(cap, run int) error {
		if cap == 8 && run == 2 { // its second block
			return boom
		}
		return nil
	}}
	res, err := f.battery(6, 4, 8).Run(context.Background())
	if err != nil || len(res.Samples) != 2+7*2 || res.Arms[0].TokPerSec.N != 6 || res.Arms[1].TokPerSec.N != 6 || res.Refused != "" {
		t.Fatalf("%v, %+v", err, res)
	}
	f = &fake{most: 100, drift: func(cap, run int) int { return -cap / 8 * (run / 2) }} // less and less memory
	res, err = f.battery(4, 4, 8).Run(context.Background())
	if err != nil || !strings.Contains(res.Refused, "inconclusive: 7 of 7 blocks are void, the last since the cap is") && !strings.Contains(res.Refused, "blocks are void") || len(res.Comparisons) != 0 {
		t.Errorf("%v, %+v", err, res)
	}
	f = &fake{most: 100, fail: func(int, int) error { return boom }}
	if _, err := f.battery(4, 4, 8).Run(context.Background()); err == nil || !strings.Contains(err.Error(), "the first run failed: boom") {
		t.Errorf("%v", err)
	}
	// Ctrl-C ends the runs; what was measured is there.
	ctx, cancel := context.WithCancel(context.Background())
	f = &fake{most: 100, fail: func(cap, run int) error {
		if run == 2 {
			cancel()
		}
		return nil
	}}
	if res, err := f.battery(4, 4, 8).Run(ctx); err != context.Canceled || res == nil || len(res.Samples) != 4 || res.Arms[0].TokPerSec.N != 1 {
		t.Errorf("%v, %+v", err, res)
	}
}

// What is evicted is gone from the page cache.
func TestEvict(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, make([]byte, 1<<20), 0o666); err != nil {
		t.Fatal(err)
	}
	before, size, known, err := Cached([]string{path})
	if err != nil || known && (before <= 0 || size != 1<<20) {
		t.Fatalf("%d of %d bytes, %v", before, size, err)
	}
	left, known, err := Evict([]string{path})
	if err != nil {
		t.Fatal(err)
	}
	if !known {
		t.Skip("this kernel does not tell what is in the page cache")
	}
	if left > 0 && os.Getenv("CI") == "" { // a file system in memory keeps it
		t.Logf("%.0f %% stay", 100*left)
	}
	if _, _, err := Evict([]string{filepath.Join(t.TempDir(), "none")}); err == nil {
		t.Error("a file that is not there was evicted")
	}
}

// The bound is the larger of compute and I/O; in mmap mode compute is that of the
// other modes, and I/O what the drive was asked.
func TestLimitSettle(t *testing.T) {
	slab := LimitSample{Mode: "slab", Before: 1e9, After: 3e9, Run: Run{DecodeNanos: 2e9, DecodeTokens: 4, WaitNanos: 5e8, Decode: Counts{LoadBytes: 4e9, MajorFaults: 8, DeviceReads: 5e9}}}
	slower, mapped := slab, slab
	slower.Run.DecodeNanos = 3e9
	mapped.Mode, mapped.Run.WaitNanos, mapped.Run.DecodeNanos, mapped.Run.Decode.DeviceReads = "mmap", 0, 10e9, 8e9
	all := []LimitSample{slab, slower, mapped}
	settle(all)
	if s := all[0]; s.Missed != 1e9 || s.Read != 1.25e9 || s.Rate != 2e9 || s.ComputeNanos != 15e8 || s.IONanos != 2e9 || s.Ratio != 1 || s.WaitPct != 25 || s.Faults != 2 {
		t.Errorf("%+v", s)
	}
	if s := all[1]; s.ComputeNanos != 15e8 || s.Ratio != 1.5 {
		t.Errorf("%+v", s)
	}
	if s := all[2]; s.ComputeNanos != 15e8 || s.IONanos != 4e9 || s.Ratio != 2.5 {
		t.Errorf("%+v", s)
	}
	ahead := slab // a fifth of the loads was for nothing
	ahead.Run.Decode.Loads, ahead.Run.Decode.Misses = 10, 8
	all = []LimitSample{ahead}
	if settle(all); all[0].Missed != 0.8e9 || all[0].IONanos != 16e8 {
		t.Errorf("%+v", all[0])
	}
	slab.Run.Decode.LoadBytes = 1e9
	all = []LimitSample{slab}
	if settle(all); !near(all[0].Ratio, 2/1.5, 1e-12) {
		t.Errorf("%+v", all[0])
	}
	all = []LimitSample{mapped} // nothing else to compare with
	if settle(all); all[0].ComputeNanos != 10e9 || all[0].Ratio != 1 {
		t.Errorf("%+v", all[0])
	}
}
