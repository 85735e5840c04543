package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"sluice/moe"
	"sluice/tiers"
	"sluice/tiers/sim"
)

// ladder is the budgets of a replay that names none, in percent of the bytes of
// all experts.
var ladder = []int64{1, 2, 5, 10, 15, 20, 30, 50, 75, 100}

func replayCommand(ctx context.Context, s streams, args []string) error {
	f, asJSON := newFlags(s, "replay", "say what each policy would have kept, from a trace and without its model")
	budgets := f.Int64Slice("budget-mib", nil, "bytes of experts in memory, in MiB, one or several (default: shares of the model)")
	policies := f.StringSlice("policy", sim.Policies(), "policies to compare")
	drafts := f.IntSlice("draft", nil, "in place of hits: up to which share of I/O drafts of these depths would pay, such as 1,2,4")
	price := f.Float64("draft-price", 0.02, "what a proposal costs, in passes over one token, with --draft")
	if err := parse(f, args); err != nil {
		return err
	}
	for _, k := range *drafts {
		if k < 1 || k > moe.MostDrafts {
			return usagef("--draft %d: use depths of 1 to %d", k, moe.MostDrafts)
		}
	}
	if !(*price >= 0 && *price <= 10) {
		return usagef("--draft-price %v: use 0 to 10 passes", *price)
	}
	if f.NArg() != 1 {
		return usagef("want one trace, got %d arguments", f.NArg())
	}
	for _, b := range *budgets {
		if b < 1 || b > math.MaxInt64>>20 {
			return usagef("--budget-mib %d: want a number of MiB from 1 up", b)
		}
	}
	for _, p := range *policies {
		if !slices.Contains(sim.Policies(), p) {
			return usagef("--policy: there is no policy %q: use some of %s", p, strings.Join(sim.Policies(), ", "))
		}
	}
	t, err := readTrace(s, f.Arg(0))
	if err != nil {
		return err
	}
	if len(*budgets) == 0 {
		*budgets = defaultBudgets(t)
	}
	if len(*drafts) > 0 {
		if !f.Changed("policy") {
			*policies = []string{tiers.DefaultPolicy}
		}
		return replayDrafts(ctx, s, t, *budgets, *policies, *drafts, *price, *asJSON)
	}
	rows := make([]replayRow, 0, len(*budgets)*len(*policies))
	for _, mib := range *budgets {
		for _, name := range *policies {
			if err := ctx.Err(); err != nil {
				return err
			}
			p, err := sim.NewPolicy(name, t, mib<<20)
			if err != nil {
				return err
			}
			r := sim.Replay(t, p)
			rows = append(rows, replayRow{mib, name, round(r.HitPercent(), 3), round(r.DecodeHitPercent(), 3), round(r.ReadMiB(), 1)})
		}
	}
	if *asJSON {
		return printJSON(s.out, map[string]any{"rows": rows})
	}
	return printReplay(s.out, t, rows)
}

// replayRow is one replay, its numbers rounded as published curves are.
type replayRow struct {
	BudgetMiB     int64   `json:"budget_mib"`
	Policy        string  `json:"policy"`
	HitPct        float64 `json:"hit_pct_cum"`
	HitPctDecoded float64 `json:"hit_pct_decode"`
	ReadMiB       float64 `json:"read_mib"`
}

func round(x float64, digits int) float64 {
	shift := math.Pow10(digits)
	return math.Round(x*shift) / shift
}

func readTrace(s streams, path string) (*tiers.Trace, error) {
	var r io.Reader = s.in
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		r = f
	}
	t, err := tiers.ReadTrace(r)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return t, nil
}

// defaultBudgets is the ladder for a trace's model, in MiB.
func defaultBudgets(t *tiers.Trace) (mib []int64) {
	all := t.ModelBytes()
	for _, percent := range ladder {
		b := max((all/100*percent)>>20, 1)
		if len(mib) == 0 || b > mib[len(mib)-1] {
			mib = append(mib, b)
		}
	}
	return mib
}

func printReplay(w io.Writer, t *tiers.Trace, rows []replayRow) error {
	all := float64(t.ModelBytes()) / (1 << 20)
	fmt.Fprintf(w, "%s: %d layers, %d experts each, top-%d, %.0f MiB of experts\n", t.Model, len(t.Layers), t.Experts, t.TopK, all)
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(tw, "budget MiB\tof model\tpolicy\thits %\tdecode hits %\tread MiB\t\n")
	for _, r := range rows {
		fmt.Fprintf(tw, "%d\t%.1f %%\t%s\t%.3f\t%.3f\t%.1f\t\n", r.BudgetMiB, 100*float64(r.BudgetMiB)/all, r.Policy, r.HitPct, r.HitPctDecoded, r.ReadMiB)
	}
	return tw.Flush()
}

// draftRow is drafts of one depth and acceptance, replayed.
type draftRow struct {
	BudgetMiB int64   `json:"budget_mib"`
	Policy    string  `json:"policy"`
	Depth     int     `json:"depth"`
	Accept    float64 `json:"acceptance"` // of each draft, those before it being right
	Yield     float64 `json:"tokens_per_pass"`
	Union     float64 `json:"union"` // loads of a pass by those of a pass of one token
	BreakEven float64 `json:"break_even_io_share"`
}

// replayDrafts prints the surface on which drafting neither gains nor loses.
func replayDrafts(ctx context.Context, s streams, t *tiers.Trace, budgets []int64, policies []string, depths []int, price float64, asJSON bool) error {
	acceptances := []float64{0.2, 0.4, 0.6, 0.8, 0.9, 1}
	rows := []draftRow{}
	for _, mib := range budgets {
		for _, name := range policies {
			if name == "belady" {
				return usagef("--policy belady knows the tokens of the trace alone, not what drafts would use: name another with --draft")
			}
			for _, k := range depths {
				for _, a := range acceptances {
					if err := ctx.Err(); err != nil {
						return err
					}
					r, err := sim.ReplayDrafts(t, func() (tiers.Policy, error) { return sim.NewPolicy(name, t, mib<<20) }, k, a, 0)
					if err != nil {
						return err
					}
					rows = append(rows, draftRow{mib, name, k, a, round(r.Yield(), 3), round(r.Union, 3), round(r.BreakEven(k, price), 3)})
				}
			}
		}
	}
	if asJSON {
		return printJSON(s.out, map[string]any{"rows": rows, "draft_price": price})
	}
	fmt.Fprintf(s.out, "%s: drafts pay while I/O takes less of the time than this (union: loads of a pass by those of one token), a proposal costing %v passes\n", t.Model, price)
	tw := tabwriter.NewWriter(s.out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(tw, "budget MiB\tpolicy\tdepth\t")
	for _, a := range acceptances {
		fmt.Fprintf(tw, "a = %v (union)\t", a)
	}
	for i, r := range rows {
		if i%len(acceptances) == 0 {
			fmt.Fprintf(tw, "\n%d\t%s\t%d\t", r.BudgetMiB, r.Policy, r.Depth)
		}
		fmt.Fprintf(tw, "%.2f (%.2f)\t", r.BreakEven, r.Union)
	}
	fmt.Fprintln(tw)
	return tw.Flush()
}
