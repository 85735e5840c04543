package bench

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"time"
)

// A DraftArm is a way to draft under a cap.
type DraftArm struct {
	Cap     int    `json:"cap"`
	Drafter string `json:"drafter"` // "off" with depth 0
	Depth   int    `json:"depth"`
}

func (a DraftArm) String() string {
	if a.Depth == 0 {
		return fmt.Sprintf("cap %d off", a.Cap)
	}
	return fmt.Sprintf("cap %d %s %d", a.Cap, a.Drafter, a.Depth)
}

// DraftArms are all arms of caps, drafters and depths, cap by cap. Each cap begins
// with its control, without drafts, once, whether or not depth 0 is named.
func DraftArms(caps []int, drafters []string, depths []int) (arms []DraftArm) {
	for _, c := range caps {
		arms = append(arms, DraftArm{Cap: c, Drafter: "off"})
		for _, by := range drafters {
			for _, k := range depths {
				if k > 0 {
					arms = append(arms, DraftArm{c, by, k})
				}
			}
		}
	}
	return arms
}

// A DraftBattery compares drafters and depths under caps. Drafts are forced: what
// is asked is what they do, not what the gate makes of it.
type DraftBattery struct {
	Sluice Sluice
	Arms   []DraftArm
	Runs   int      // blocks, in each of which every arm runs once
	Args   []string // of run: the model, prompt, number of tokens, further flags
	Did    func(DraftSample)
}

// A DraftSample is one run.
type DraftSample struct {
	Block     int     `json:"block"` // from 0; -1: a warm-up, which does not count
	Arm       int     `json:"arm"`
	Name      string  `json:"name"`
	Start     string  `json:"start"`
	TokPerSec float64 `json:"tok_per_s"`
	Run       *Run    `json:"run"`
}

// A DraftRow is an arm with its medians, and the counts of one run: those are the
// same in all, but for loads.
type DraftRow struct {
	DraftArm
	TokPerSec   Summary `json:"tok_per_s"`
	Proposed    int64   `json:"draft_proposed"`
	Accepted    int64   `json:"draft_accepted"`
	Forwards    int64   `json:"forwards"`
	Predicted   float64 `json:"positions_per_token_predicted"`
	Counted     float64 `json:"positions_per_token_counted"`
	PerToken    float64 `json:"bytes_per_token"`
	WastedLoads float64 `json:"draft_wasted_loads"`
	WaitPct     float64 `json:"expert_wait_pct"`
}

// A DraftResult is what a battery came to.
type DraftResult struct {
	Arms        []DraftRow    `json:"arms"`
	Samples     []DraftSample `json:"samples"` // all of them, in the order of the runs
	Comparisons []Comparison  `json:"comparisons"`
	Notes       []string      `json:"notes"`
}

// args are run's arguments for an arm.
func (b DraftBattery) args(a DraftArm) []string {
	args := []string{"run", "--cap", strconv.Itoa(a.Cap), "--json"}
	if a.Depth == 0 {
		args = append(args, "--draft", "off")
	} else {
		args = append(args, "--draft", a.Drafter, "--draft-depth", strconv.Itoa(a.Depth), "--draft-force")
	}
	return append(args, b.Args...)
}

// Run runs every arm once uncounted, then the blocks, each in the order of the
// one before turned by one, and compares the arms of a cap with its control. A run
// that fails ends the battery; *RefusedError: arms that cannot be compared, since
// their outputs or caps differ or an arm drafted nothing.
func (b DraftBattery) Run(ctx context.Context) (*DraftResult, error) {
	res := &DraftResult{Notes: []string{}, Comparisons: []Comparison{}}
	if n := load(); n > busy {
		res.Notes = append(res.Notes, fmt.Sprintf("the machine is busy (load average %.2f): rates will scatter", n))
	}
	samples := make([][]float64, len(b.Arms))
	rows := make([][]*Run, len(b.Arms))
	witness, effective := "", map[int]int{} // a cap as it came to be: as it was asked for
	for block := -1; block < b.Runs; block++ {
		for i := range b.Arms {
			arm := (i + max(block, 0)) % len(b.Arms)
			a := b.Arms[arm]
			s := DraftSample{Block: block, Arm: arm, Name: a.String(), Start: time.Now().UTC().Format(time.RFC3339)}
			r, err := b.Sluice.run(ctx, b.args(a)...)
			if err == nil {
				s.Run = &r
				s.TokPerSec, err = r.speed()
			}
			if err != nil {
				return res, fmt.Errorf("bench: %v: %w", a, err)
			}
			witness = cmp.Or(witness, r.Witness)
			switch got := r.Settings["cap"].Number(); {
			case r.Witness != witness:
				return res, refusef("the outputs differ (logits: %s %s, others %s), though no draft and no cap may change them; please report this", a, r.Witness, witness)
			case effective[got] != 0 && effective[got] != a.Cap:
				return res, refusef("arms are the same: cap resolved to %d for %d and %d", got, effective[got], a.Cap)
			case a.Depth == 0 && r.Counters.Proposed > 0:
				return res, refusef("arm %q has drafts (draft_proposed=%d)", a, r.Counters.Proposed)
			case a.Depth > 0 && r.Counters.Proposed == 0:
				return res, refusef("arm %q did not exercise the treatment (draft_proposed=0)", a)
			}
			if got := r.Settings["cap"].Number(); effective[got] == 0 {
				if effective[got] = a.Cap; got != a.Cap {
					res.Notes = append(res.Notes, fmt.Sprintf("cap lowered %d -> %d", a.Cap, got))
				}
			}
			res.Samples = append(res.Samples, s)
			if b.Did != nil {
				b.Did(s)
			}
			if block >= 0 {
				samples[arm], rows[arm] = append(samples[arm], s.TokPerSec), append(rows[arm], s.Run)
			}
		}
	}
	for i, a := range b.Arms {
		row := DraftRow{DraftArm: a, TokPerSec: Summarize(samples[i])}
		var per, wasted, wait []float64
		for _, r := range rows[i] {
			per = append(per, float64(r.Decode.LoadBytes)/float64(r.DecodeTokens))
			wasted = append(wasted, float64(r.Counters.WastedLoads))
			wait = append(wait, 100*float64(r.WaitNanos)/float64(r.DecodeNanos))
		}
		r := rows[i][0]
		row.PerToken, row.WastedLoads, row.WaitPct = Summarize(per).Median, Summarize(wasted).Median, Summarize(wait).Median
		row.Proposed, row.Accepted = r.Counters.Proposed, r.Counters.Accepted
		row.Forwards, row.Predicted, row.Counted = r.DecodeTokens, 1, 1
		if r.Draft != nil {
			row.Forwards, row.Predicted, row.Counted = r.Draft.Forwards, r.Draft.Predicted, r.Draft.Counted
		}
		res.Arms = append(res.Arms, row)
	}
	for from := 0; from < len(b.Arms); {
		to := from + 1
		names := []string{b.Arms[from].String()}
		for to < len(b.Arms) && b.Arms[to].Depth > 0 {
			names = append(names, b.Arms[to].String())
			to++
		}
		if to > from+1 {
			res.Comparisons = append(res.Comparisons, compare(names, samples[from:to])...)
		}
		from = to
	}
	return res, nil
}
