package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/spf13/pflag"

	"sluice/cmd/bench"
	"sluice/storage"
)

func benchLimit(ctx context.Context, s streams, args []string) error {
	m := newModelFlags(s, "bench limit", "run a model from a cold start under a limit of memory, in a cgroup, and hold its decode time against what the drive and the arithmetic allow (--temp 0 for a greedy text, --temp 1 --seed N for a sampled one, whose experts repeat less); other flags go to run. Needs root")
	newSamplingFlags(m)
	own := pflag.NewFlagSet("", pflag.ContinueOnError)
	limit := own.String("memory", "3GiB", "the limit")
	modes := own.StringSlice("modes", []string{"slab", "mmap"}, "storage modes, one run of each")
	runs := own.Int("runs", 1, "runs of each mode")
	prompt := own.StringP("prompt", "p", benchPrompt, "the text to continue")
	n := own.IntP("tokens", "n", 32, "tokens to generate")
	m.set.AddFlagSet(own)
	if err := m.parse(args); err != nil {
		return err
	}
	switch {
	case m.set.NArg() > 1:
		return usagef("unexpected argument %q", m.set.Arg(1))
	case m.set.Changed("storage"):
		return usagef("--storage: the modes to run are given by --modes")
	case *m.printConfig || *m.explain:
		return usagef("--print-config and --explain-counters are for run")
	case *runs < 1 || *n < 2 || len(*modes) == 0:
		return usagef("--runs is at least 1, -n at least 2 (the first token is not decoded), and --modes names one or more")
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
	o, pass, err := m.passed(own)
	if err != nil {
		return err
	}
	path := o.Path
	head, err := newBenchHead(path, o.Kernels)
	if err != nil {
		return err
	}
	if head.Model.TokenBytes == 0 {
		return errDenseBench
	}
	exe, err := os.Executable()
	if err != nil {
		return fmt.Errorf("bench limit: %w", err)
	}
	if !*m.json {
		head.print(s.out)
		fmt.Fprintf(s.out, "limit: %s; cold: the model is dropped from the page cache before each run\n", size(memory))
	}
	samples, err := bench.LimitTrial{
		Program: exe, Model: path, Modes: *modes, Runs: *runs, Memory: memory, ReadSize: head.Model.ExpertBytes, Seconds: 1,
		Args: append(pass, "--prompt="+*prompt, fmt.Sprintf("--tokens=%d", *n)),
		Did: func(x bench.LimitSample) {
			progress(s, "%s: %.4g tok/s", x.Mode, x.TokPerSec)
		},
	}.Run(ctx)
	if !*m.json {
		for _, x := range samples {
			printLimit(s.out, x)
		}
	} else {
		perr := printJSON(s.out, struct {
			*benchHead
			Limit   int64               `json:"limit_bytes"`
			Prompt  string              `json:"prompt"`
			Tokens  int                 `json:"tokens"`
			Samples []bench.LimitSample `json:"samples"`
		}{head, memory, *prompt, *n, slices.Concat([]bench.LimitSample{}, samples)})
		if err == nil {
			err = perr
		}
	}
	return err
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
