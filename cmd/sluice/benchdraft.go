package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"text/tabwriter"

	"sluice/cmd/bench"
	"sluice/moe"
)

func benchDraft(ctx context.Context, s streams, args []string) (failed error) {
	b := newBenchRuns(s, "bench draft", "compare drafters, depths and caps: tokens a second, acceptance and reads, each run a process of its own, interleaved; other flags go to run", 10, 64)
	caps := b.own.IntSlice("caps", nil, "caps, such as 4,16,64; each has a control without drafts")
	depths := b.own.IntSlice("depths", []int{0, 1, 2, 4}, fmt.Sprintf("tokens that are proposed at once, up to %d; 0, the control, is always among them", moe.MostDrafts))
	drafters := b.own.StringSlice("drafters", []string{"lookup"}, "drafters: mtp, lookup, model (of --draft-model), or replay@0.8, which replays the control's text, right at that share of the places")
	small := b.own.String("draft-model", "", "the model of the drafter model: a small one with the same tokenizer, dense or of experts")
	gated := b.own.Bool("gated", false, "beside the depths, an arm for each drafter with which the gate decides whether and how deep, as run does")
	limit := b.own.String("memory", "", "run all in a cgroup with this limit of memory, such as 3GiB; needs root")
	if err := b.parse(args, "cap", "caps"); err != nil {
		return err
	}
	if err := checkCaps(*caps); err != nil {
		return err
	}
	for _, k := range *depths {
		if k < 0 || k > moe.MostDrafts {
			return usagef("--depths %d: use 0 to %d", k, moe.MostDrafts)
		}
	}
	for _, by := range *drafters {
		if _, ok := bench.ReplayOf(by); !ok && by != "mtp" && by != "lookup" && by != "model" {
			return usagef("--drafters %s: use mtp, lookup, model, or replay@ACCEPTANCE with 0 to 1", by)
		}
	}
	if slices.Contains(*drafters, "model") != (*small != "") {
		return usagef("--drafters model and --draft-model FILE, a small model with the same tokenizer, belong together: give both or none")
	}
	memory := int64(0)
	if *limit != "" {
		var err error
		if memory, err = parseSize(*limit); err != nil {
			return usagef("--memory: %v", err)
		}
	}
	if err := b.open(); err != nil {
		return err
	}
	program := bench.Program(b.exe)
	if memory > 0 {
		confined, release, err := bench.Confine(b.exe, memory)
		if err != nil {
			return err
		}
		program = confined
		defer func() { failed = errors.Join(failed, release()) }()
	}
	arms, done := bench.DraftArms(*caps, *drafters, *depths, *gated), 0
	res, err := bench.DraftBattery{
		Sluice: program, Arms: arms, Runs: *b.runs, Model: *small, Args: b.args,
		Did: func(x bench.DraftSample) {
			done++
			progress(s, "run %d of %d, %s: %s", done, len(arms)*(*b.runs+1), x.Name, outcome(x.TokPerSec, x.Void))
		},
	}.Run(ctx)
	if res == nil {
		return err
	}
	var perr error
	if *b.json {
		perr = printJSON(s.out, struct {
			*benchHead
			*bench.DraftResult
			Memory int64 `json:"memory_limit_bytes,omitempty"`
			benchAsked
		}{b.head, res, memory, b.asked()})
	} else {
		perr = printDrafts(s.out, b.head, res, memory)
	}
	return cmp.Or(err, perr)
}

func printDrafts(w io.Writer, head *benchHead, res *bench.DraftResult, memory int64) error {
	head.print(w)
	if memory > 0 {
		fmt.Fprintf(w, "limit of memory: %s\n", size(memory))
	}
	for _, n := range res.Notes {
		fmt.Fprintln(w, n)
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "cap\tdrafter\tdepth\truns\ttok/s\tleast\tmost\tproposed\taccepted %\tforwards\tpos/token\tpredicted\tread/token\twasted loads\twait %\t")
	for _, a := range res.Arms {
		x, accepted := a.TokPerSec, "-" // of nothing there is no share
		if a.Proposed > 0 {
			accepted = fmt.Sprintf("%.1f", 100*a.Accepted/a.Proposed)
		}
		depth := strconv.Itoa(a.Depth)
		if a.Gated {
			depth = "auto"
		}
		fmt.Fprintf(t, "%d\t%s\t%s\t%d\t%.4g\t%.4g\t%.4g\t%.0f\t%s\t%.0f\t%.2f\t%.2f\t%s\t%.0f\t%.1f\t\n", a.Cap, a.Drafter, depth, x.N, x.Median, x.Min, x.Max,
			a.Proposed, accepted, a.Forwards, a.Counted, a.Predicted, size(int64(a.PerToken)), a.WastedLoads, a.WaitPct)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	printRuns(w, len(res.Samples), func(i int) (int, string, float64, string) {
		x := &res.Samples[i]
		return x.Block, x.Name, x.TokPerSec, x.Void
	}, ";")
	for _, c := range res.Comparisons {
		fmt.Fprintf(w, "%v\n  %s\n", c, c.Overlap)
	}
	if res.Refused != "" {
		fmt.Fprintln(w, res.Refused)
	}
	_, err := fmt.Fprintln(w, "what this does not show: another machine, model, prompt or cache state")
	return err
}
