package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"

	"sluice/cmd/bench"
	"sluice/storage"
)

func benchLimit(ctx context.Context, s streams, args []string) error {
	b := newBenchRuns(s, "bench limit", "run a model from a cold start under a limit of memory, in a cgroup, and hold its decode time against what the drive and the arithmetic allow (--temp 0 for a greedy text, --temp 1 --seed N for a sampled one, whose experts repeat less); other flags go to run. Needs root", 1, 32)
	limit := b.own.String("memory", "3GiB", "the limit")
	modes := b.own.StringSlice("modes", []string{"slab", "mmap"}, "storage modes, one run of each")
	if err := b.parse(args, "storage", "modes"); err != nil {
		return err
	}
	if len(*modes) == 0 {
		return usagef("name the storage modes to run: --modes slab,mmap")
	}
	memory, err := parseSize(*limit)
	if err != nil {
		return usagef("--memory: %v", err)
	}
	for _, mode := range *modes {
		if _, err := storage.ParseMode(mode); err != nil {
			return usagef("--modes: %v", err)
		}
	}
	if err := b.open(); err != nil {
		return err
	}
	if b.head.Model.TokenBytes == 0 {
		return errDenseBench
	}
	if !*b.json {
		b.head.print(s.out)
		fmt.Fprintf(s.out, "limit: %s; cold: the model is dropped from the page cache before each run\n", size(memory))
	}
	samples, err := bench.LimitTrial{
		Program: b.exe, Model: b.path, Modes: *modes, Runs: *b.runs, Memory: memory, ReadSize: b.head.Model.ExpertBytes, Seconds: 1, Args: b.args,
		Did: func(x bench.LimitSample) {
			progress(s, "%s: %s", x.Mode, outcome(x.TokPerSec, ""))
		},
	}.Run(ctx)
	if !*b.json {
		for _, x := range samples {
			printLimit(s.out, x)
		}
		return err
	}
	return cmp.Or(err, printJSON(s.out, struct {
		*benchHead
		Limit int64 `json:"limit_bytes"`
		benchAsked
		Samples []bench.LimitSample `json:"samples"`
	}{b.head, memory, b.asked(), slices.Concat([]bench.LimitSample{}, samples)}))
}

func printLimit(w io.Writer, x bench.LimitSample) {
	r := x.Run
	tokens := float64(r.DecodeTokens)
	mode := r.Settings["storage"].Text()
	if mode != x.Mode {
		mode += " in place of " + x.Mode
	}
	perToken := func(ns int64) float64 { return float64(ns) / 1e9 / tokens }
	fmt.Fprintf(w, "\n%s, cap %s: %.4g tok/s (%.4g s a token, %d tokens), logits %s\n", mode, r.Settings["cap"].Text(), x.TokPerSec, perToken(r.DecodeNanos), r.DecodeTokens, r.Witness)
	which := "missed"
	if x.Mode == storage.MMap.String() {
		which = "read"
	}
	missed := 100 * float64(r.Decode.Misses) / float64(max(1, r.Decode.Routed))
	fmt.Fprintf(w, "  hits: %.1f %% of the routed experts; temp %s, seed %s, prefetch %s\n", 100-missed, r.Settings["temp"].Text(), r.Settings["seed"].Text(), r.Settings["prefetch"].Text())
	fmt.Fprintf(w, "  missed: %s a token, %.1f %% of the routed experts; read from the drive: %s a token\n", size(int64(x.Missed)), missed, size(int64(x.Read)))
	fmt.Fprintf(w, "  drive, by reads of whole experts: %s/s before, %s/s after: %.4g s a token for what was %s\n", size(int64(x.Before)), size(int64(x.After)), perToken(x.IONanos), which)
	fmt.Fprintf(w, "  compute: %.4g s a token (of the least run that reads into its own memory)\n", perToken(x.ComputeNanos))
	fmt.Fprintf(w, "  decode time: %.3f x max(compute, %s bytes / rate); expert wait %.1f %% of it\n", x.Ratio, which, x.WaitPct)
	fmt.Fprintf(w, "  page cache: %s in the cgroup after the run, %s of it inactive; none before\n", size(x.Cache), size(x.InactiveFile))
	if x.CachedBefore >= 0 {
		fmt.Fprintf(w, "  of the model: %s before, %s after\n", size(x.CachedBefore), size(x.CachedAfter))
	}
	fmt.Fprintf(w, "  memory: peak %s of the process, %s of the cgroup\n", size(r.Counters.Peak), size(x.Peak))
	fmt.Fprintf(w, "  major faults: %.1f a token while decoding, %d in all\n", x.Faults, r.Counters.Faults)
}
