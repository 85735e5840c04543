package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"text/tabwriter"

	"sluice/cmd/bench"
)

func benchCap(ctx context.Context, s streams, args []string) error {
	b := newBenchRuns(s, "bench cap", "compare caps: hit rates, bytes read, tokens a second and memory, each run a process of its own, interleaved; other flags go to run", 5, 64)
	caps := b.own.IntSlice("caps", nil, "the caps to compare, such as 4,8,16; the first is what the others are compared with")
	cache := b.own.String("cache", "warm", "warm: each cap runs once before all, not counted; cold: the model is dropped from the page cache before each run")
	if err := b.parse(args, "cap", "caps"); err != nil {
		return err
	}
	if err := checkCaps(*caps); err != nil {
		return err
	}
	if *cache != "warm" && *cache != "cold" {
		return usagef("--cache %q: use warm or cold", *cache)
	}
	if err := b.open(); err != nil {
		return err
	}
	if b.head.Model.TokenBytes == 0 {
		return errDenseBench
	}
	total := len(*caps) * *b.runs
	if *cache == "warm" {
		total += len(*caps)
	}
	done := 0
	res, err := bench.CapBattery{
		Sluice: bench.Program(b.exe), Caps: *caps, Runs: *b.runs, Model: b.path, Cold: *cache == "cold", Args: b.args,
		Did: func(x bench.CapSample) {
			done++
			progress(s, "run %d of %d, cap %d: %s", done, total, x.Cap, outcome(x.TokPerSec, x.Void))
		},
	}.Run(ctx)
	if res == nil {
		return err
	}
	var perr error
	if *b.json {
		perr = printJSON(s.out, struct {
			*benchHead
			*bench.CapResult
			benchAsked
		}{b.head, res, b.asked()})
	} else {
		perr = printCaps(s.out, b.head, res)
	}
	return cmp.Or(err, perr)
}

func printCaps(w io.Writer, head *benchHead, res *bench.CapResult) error {
	head.print(w)
	fmt.Fprintf(w, "cache: %s; storage %s\n", res.Cache, res.Settings["storage"].Text())
	for _, n := range res.Notes {
		fmt.Fprintln(w, n)
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "cap\truns\ttok/s\tleast\tq1\tq3\tmost\tvram %\tpinned %\tlru %\tmissed %\tread/token\twait %\tpeak\tfaults/token\t")
	for _, a := range res.Arms {
		x := a.TokPerSec
		fmt.Fprintf(t, "%d\t%d\t%.4g\t%.4g\t%.4g\t%.4g\t%.4g\t%.1f\t%.1f\t%.1f\t%.1f\t%s\t%.1f\t%s\t%.1f\t\n", a.Effective, x.N, x.Median, x.Min, x.Q1, x.Q3, x.Max,
			a.HitPct["vram"], a.HitPct["pinned"], a.HitPct["lru"], a.MissPct, size(int64(a.PerToken)), a.WaitPct, size(int64(a.Peak)), a.Faults)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	printRuns(w, len(res.Samples), func(i int) (int, string, float64, string) {
		x := &res.Samples[i]
		return x.Block, fmt.Sprintf("cap %d", x.Cap), x.TokPerSec, x.Void
	}, "")
	for _, c := range res.Comparisons {
		fmt.Fprintf(w, "%v\n  %s\n", c, c.Overlap)
	}
	if res.Refused != "" {
		fmt.Fprintln(w, res.Refused)
	}
	_, err := fmt.Fprintln(w, "what this does not show: another machine, model, prompt or cache state")
	return err
}
