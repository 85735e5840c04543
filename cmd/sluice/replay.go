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
	if err := parse(f, args); err != nil {
		return err
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
