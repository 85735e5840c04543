package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// A DraftArm is a way to draft under a cap.
type DraftArm struct {
	Cap     int    `json:"cap"`
	Drafter string `json:"drafter"` // "off" for the control; "replay@0.8" replays the control's text, so often right
	Depth   int    `json:"depth"`   // 0: the control, or Gated
	Gated   bool   `json:"gated"`   // the gate decides whether, and how deep
}

func (a DraftArm) String() string {
	switch {
	case a.Gated:
		return fmt.Sprintf("cap %d %s auto", a.Cap, a.Drafter)
	case a.Depth == 0:
		return fmt.Sprintf("cap %d off", a.Cap)
	}
	return fmt.Sprintf("cap %d %s %d", a.Cap, a.Drafter, a.Depth)
}

// control says whether nobody drafts.
func (a DraftArm) control() bool { return a.Depth == 0 && !a.Gated }

// ReplayOf is the acceptance of a drafter "replay@ACCEPTANCE".
func ReplayOf(drafter string) (acceptance float64, ok bool) {
	text, ok := strings.CutPrefix(drafter, "replay@")
	if !ok {
		return 0, false
	}
	acceptance, err := strconv.ParseFloat(text, 64)
	return acceptance, err == nil && acceptance >= 0 && acceptance <= 1
}

// DraftArms are all arms of caps, drafters and depths, cap by cap. Each cap begins
// with its control, without drafts, once, whether or not depth 0 is named. gated
// adds an arm for each drafter on which the gate decides.
func DraftArms(caps []int, drafters []string, depths []int, gated bool) (arms []DraftArm) {
	for _, c := range caps {
		arms = append(arms, DraftArm{Cap: c, Drafter: "off"})
		for _, by := range drafters {
			for _, k := range depths {
				if k > 0 {
					arms = append(arms, DraftArm{Cap: c, Drafter: by, Depth: k})
				}
			}
			if gated {
				arms = append(arms, DraftArm{Cap: c, Drafter: by, Gated: true})
			}
		}
	}
	return arms
}

// A DraftBattery compares drafters and depths under caps. Drafts of a depth are
// forced: what is asked is what they do, not what the gate makes of it.
type DraftBattery struct {
	Sluice Sluice
	Arms   []DraftArm // the first is a control
	Runs   int        // blocks, in each of which every arm runs once
	Model  string     // the draft model, of arms whose drafter is "model"
	Args   []string   // of run: the model, prompt, number of tokens, further flags
	Did    func(DraftSample)
}

// A DraftSample is one run.
type DraftSample struct {
	Block     int     `json:"block"` // from 0; -1: a warm-up, which does not count
	Arm       int     `json:"arm"`
	Name      string  `json:"name"`
	Void      string  `json:"void,omitempty"` // why the run, and with it its block, does not count
	Start     string  `json:"start"`
	Load      float64 `json:"load_average"` // of the last minute, at the start
	TokPerSec float64 `json:"tok_per_s"`
	Run       *Run    `json:"run,omitempty"`
}

// A DraftRow is an arm with its medians. Of an arm that is not gated all runs have
// the same counts, but for loads.
type DraftRow struct {
	DraftArm
	TokPerSec   Summary `json:"tok_per_s"`
	Proposed    float64 `json:"draft_proposed"`
	Accepted    float64 `json:"draft_accepted"`
	Forwards    float64 `json:"forwards"`
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
	Refused     string        `json:"refused,omitempty"` // why there is no verdict on speed
}

// args are run's arguments for an arm; recording is the file that is replayed.
func (b DraftBattery) args(a DraftArm, recording string) []string {
	args := []string{"run", "--cap", strconv.Itoa(a.Cap), "--json"}
	if a.control() {
		return append(append(args, "--draft", "off"), b.Args...)
	}
	if acceptance, ok := ReplayOf(a.Drafter); ok {
		args = append(args, "--draft", "replay", "--draft-replay", fmt.Sprintf("%s@%v", recording, acceptance))
	} else {
		args = append(args, "--draft", a.Drafter)
		if a.Drafter == "model" {
			args = append(args, "--draft-model", b.Model)
		}
	}
	if !a.Gated {
		args = append(args, "--draft-depth", strconv.Itoa(a.Depth), "--draft-force")
	}
	return append(args, b.Args...)
}

// Run runs every arm once uncounted, then the blocks, each in the order of the
// one before turned by one, and compares the arms of a cap with its control. A run
// that fails voids its block, which is run once more at the end. *RefusedError:
// arms that cannot be compared, since their outputs or caps differ, an arm drafted
// nothing or not the same in each run. What was measured by then is in the result,
// as it is if ctx ends the runs.
func (b DraftBattery) Run(ctx context.Context) (res *DraftResult, err error) {
	res = &DraftResult{Notes: []string{}, Comparisons: []Comparison{}}
	if n := load(); n > busy {
		res.Notes = append(res.Notes, fmt.Sprintf("the machine is busy (load average %.2f): rates will scatter", n))
	}
	f, err := os.CreateTemp("", "sluice-recording-*.json")
	if err != nil {
		return nil, fmt.Errorf("bench: a file for the text that is replayed: %w", err)
	}
	recording := f.Name()
	defer os.Remove(recording)
	if err := f.Close(); err != nil {
		return nil, err
	}

	witness := ""
	was := make([]*Run, len(b.Arms)) // the first run of each
	one := func(block, arm int) (void string, err error) {
		a := b.Arms[arm]
		s := DraftSample{Block: block, Arm: arm, Name: a.String(), Start: time.Now().UTC().Format(time.RFC3339), Load: load()}
		out, err := b.Sluice(ctx, b.args(a, recording)...)
		if ctx.Err() != nil {
			return "", ctx.Err()
		}
		var r Run
		if err == nil {
			err = json.Unmarshal(out, &r)
		}
		if err == nil {
			s.Run = &r
			s.TokPerSec, err = r.speed()
		}
		first := was[arm] == nil
		switch {
		case err != nil:
			s.Void = err.Error()
		case first:
			was[arm] = &r
			if witness == "" {
				witness = r.Witness
				if err := os.WriteFile(recording, out, 0o600); err != nil {
					return "", err
				}
			}
		case r.Settings["cap"].Number() != was[arm].Settings["cap"].Number():
			s.Void = fmt.Sprintf("the cap is %d, at first it was %d: the available memory has changed", r.Settings["cap"].Number(), was[arm].Settings["cap"].Number())
		}
		if s.Void == "" {
			if err := b.comparable(a, &r, was[arm], witness); err != nil {
				return "", err
			}
			if first {
				if err := b.caps(res, was, arm); err != nil {
					return "", err
				}
			}
		}
		res.Samples = append(res.Samples, s)
		if b.Did != nil {
			b.Did(s)
		}
		return s.Void, nil
	}
	res.Refused, err = blocks(b.Runs, len(b.Arms), true, one)
	res.summarize(b.Arms)
	return res, err
}

// comparable refuses a run that is not what its arm stands for.
func (b DraftBattery) comparable(a DraftArm, r, first *Run, witness string) error {
	count := &r.Counters
	switch {
	case r.Witness != witness:
		return refusef("the outputs differ (logits: %s %s, others %s), though no draft and no cap may change them; please report this", a, r.Witness, witness)
	case a.control() && count.Proposed > 0:
		return refusef("arm %q has drafts (draft_proposed=%d)", a, count.Proposed)
	case a.Depth > 0 && count.Proposed == 0:
		return refusef("arm %q did not exercise the treatment (draft_proposed=0)", a)
	case !a.Gated && (count.Proposed != first.Counters.Proposed || count.Accepted != first.Counters.Accepted):
		return refusef("arm %q is not the same in each run: %d of %d drafts accepted, at first %d of %d", a, count.Accepted, count.Proposed, first.Counters.Accepted, first.Counters.Proposed)
	}
	return nil
}

// caps notes where a cap came to be another than was asked for, and refuses two
// that came to the same. runs are those of the warm-up so far, the last is arm's.
func (b DraftBattery) caps(res *DraftResult, runs []*Run, arm int) error {
	asked, got := b.Arms[arm].Cap, runs[arm].Settings["cap"].Number()
	for i, r := range runs[:arm] {
		switch is := r.Settings["cap"].Number(); {
		case b.Arms[i].Cap == asked && is != got:
			return refusef("cap %d resolved to %d for %q and to %d for %q: name a cap that fits beside a drafter's memory", asked, is, b.Arms[i], got, b.Arms[arm])
		case b.Arms[i].Cap != asked && is == got:
			return refusef("arms are the same: cap resolved to %d for %d and %d", got, b.Arms[i].Cap, asked)
		}
	}
	if b.Arms[arm].control() && got != asked {
		res.Notes = append(res.Notes, fmt.Sprintf("cap lowered %d -> %d", asked, got))
	}
	return nil
}

// summarize takes medians of the samples that count, and compares.
func (res *DraftResult) summarize(arms []DraftArm) {
	good := map[int]int{} // runs of a block
	for _, s := range res.Samples {
		if good[s.Block]++; s.Void != "" {
			good[s.Block] = -len(res.Samples) - 1
		}
	}
	speeds := make([][]float64, len(arms))
	for i, a := range arms {
		var proposed, accepted, forwards, predicted, counted, per, wasted, wait []float64
		for _, s := range res.Samples {
			if s.Arm != i || s.Block < 0 || good[s.Block] != len(arms) {
				continue
			}
			r, d := s.Run, s.Run.Draft
			if d == nil {
				d = &Drafted{r.DecodeTokens, 1, 1}
			}
			speeds[i] = append(speeds[i], s.TokPerSec)
			proposed, accepted = append(proposed, float64(r.Counters.Proposed)), append(accepted, float64(r.Counters.Accepted))
			forwards, predicted, counted = append(forwards, float64(d.Forwards)), append(predicted, d.Predicted), append(counted, d.Counted)
			per = append(per, float64(r.Decode.LoadBytes)/float64(r.DecodeTokens))
			wasted = append(wasted, float64(r.Counters.WastedLoads))
			wait = append(wait, 100*float64(r.WaitNanos)/float64(r.DecodeNanos))
		}
		median := func(x []float64) float64 { return Summarize(x).Median }
		res.Arms = append(res.Arms, DraftRow{
			DraftArm: a, TokPerSec: Summarize(speeds[i]), Proposed: median(proposed), Accepted: median(accepted), Forwards: median(forwards),
			Predicted: median(predicted), Counted: median(counted), PerToken: median(per), WastedLoads: median(wasted), WaitPct: median(wait),
		})
	}
	if res.Refused != "" || len(speeds[0]) == 0 {
		return
	}
	for from := 0; from < len(arms); {
		to := from + 1
		names := []string{arms[from].String()}
		for to < len(arms) && !arms[to].control() {
			names = append(names, arms[to].String())
			to++
		}
		if to > from+1 {
			res.Comparisons = append(res.Comparisons, compare(names, speeds[from:to])...)
		}
		from = to
	}
}
