package bench

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"sluice/storage"
)

// A CapBattery compares caps: hit rates, bytes read, speed and memory.
type CapBattery struct {
	Sluice Sluice
	Caps   []int    // the first is the control
	Runs   int      // blocks, in each of which every cap runs once
	Args   []string // of run: the model, prompt, number of tokens, further flags
	Model  string   // a file of the model
	Cold   bool     // drop the model from the page cache before each run; else each cap runs once before all, discarded
	Did    func(CapSample)
}

// A CapSample is one run.
type CapSample struct {
	Block     int     `json:"block"` // from 0; -1: a warm-up, which does not count
	Cap       int     `json:"cap"`   // as asked for
	Effective int     `json:"effective_cap"`
	Void      string  `json:"void,omitempty"` // why the run, and with it its block, does not count
	Start     string  `json:"start"`          // wall clock
	Load      float64 `json:"load_average"`   // of the last minute, at the start
	TokPerSec float64 `json:"tok_per_s"`
	PerToken  float64 `json:"bytes_per_token"`
	Run       *Run    `json:"run,omitempty"`
}

// A CapArm is a cap with its medians.
type CapArm struct {
	Cap       int                `json:"cap"`
	Effective int                `json:"effective_cap"`
	TokPerSec Summary            `json:"tok_per_s"`
	HitPct    map[string]float64 `json:"hit_pct"`
	MissPct   float64            `json:"miss_pct"`
	PerToken  float64            `json:"bytes_per_token"`
	WaitPct   float64            `json:"expert_wait_pct"` // of decode time
	Peak      float64            `json:"rss_peak_bytes"`
	Faults    float64            `json:"major_faults_per_token"`
}

// A CapResult is what a battery came to.
type CapResult struct {
	Settings    map[string]Setting `json:"settings"` // the control's
	Cache       string             `json:"cache"`
	Evicted     []string           `json:"evicted,omitempty"`
	Notes       []string           `json:"notes"`
	Arms        []CapArm           `json:"arms"`
	Samples     []CapSample        `json:"samples"` // all of them, in the order of the runs
	Comparisons []Comparison       `json:"comparisons"`
	Refused     string             `json:"refused,omitempty"` // why there is no verdict on speed
}

// Run resolves the arms, runs them and compares. *RefusedError: the arms cannot
// be compared; if a result comes with it, it holds what was measured, as it does
// if ctx ends the runs.
func (b CapBattery) Run(ctx context.Context) (*CapResult, error) {
	res := &CapResult{Cache: "warm", Notes: []string{}, Comparisons: []Comparison{}}
	effective, err := b.resolve(ctx, res)
	if err != nil {
		return nil, err
	}
	if b.Cold {
		res.Cache = "cold"
		if res.Evicted, err = b.files(res.Settings["slab"].Text()); err != nil {
			return nil, err
		}
	}
	if n := load(); n > busy {
		res.Notes = append(res.Notes, fmt.Sprintf("the machine is busy (load average %.2f): rates will scatter", n))
	}
	one := func(block, arm int) (void string, err error) {
		s := CapSample{Block: block, Cap: b.Caps[arm], Start: time.Now().UTC().Format(time.RFC3339), Load: load()}
		defer func() {
			if err == nil {
				res.Samples = append(res.Samples, s)
				if b.Did != nil {
					b.Did(s)
				}
			}
		}()
		if b.Cold {
			left, known, err := Evict(res.Evicted)
			switch {
			case err != nil:
				return "", err
			case !known && len(res.Samples) == 0:
				res.Notes = append(res.Notes, "this kernel does not tell what is in the page cache (Linux 6.5 does): that the model has left it is not verified")
			case left >= 0.01:
				return "", refusef("%.0f %% of the model stay in the page cache, perhaps mapped or being read by another process: end that, or use --cache warm", 100*left)
			}
		}
		r, err := b.Sluice.run(ctx, append(b.args(b.Caps[arm]), "--json")...)
		if ctx.Err() != nil {
			return "", ctx.Err()
		}
		if err == nil {
			s.Run, s.Effective = &r, r.Settings["cap"].Number()
			s.TokPerSec, err = r.speed()
		}
		switch {
		case err != nil:
			s.Void = err.Error()
		case s.Effective != effective[arm]:
			s.Void = fmt.Sprintf("the cap is %d, at first it was %d: the available memory has changed", s.Effective, effective[arm])
		default:
			s.PerToken = float64(r.Decode.LoadBytes) / float64(r.DecodeTokens)
		}
		return s.Void, nil
	}
	res.Refused, err = blocks(b.Runs, len(b.Caps), !b.Cold, one)
	if sumErr := res.summarize(b.Caps, effective); err == nil {
		err = sumErr
	}
	return res, err
}

// busy is the load average from which on a machine is not quiet: half of a core
// of the smallest machines.
const busy = 0.5

// args are run's arguments for a cap.
func (b CapBattery) args(cap int) []string {
	return append([]string{"run", "--cap", strconv.Itoa(cap), "--draft", "off"}, b.Args...) // unless they say otherwise
}

// resolve asks the program what each arm comes to, and refuses arms that are the
// same or that differ in more than the cap.
func (b CapBattery) resolve(ctx context.Context, res *CapResult) (effective []int, err error) {
	for i, cap := range b.Caps {
		r, err := b.Sluice.run(ctx, append(b.args(cap), "--print-config", "--json")...)
		if err != nil {
			return nil, fmt.Errorf("bench: cap %d: %w", cap, err)
		}
		got := r.Settings["cap"].Number()
		if slices.Contains(effective, got) {
			return nil, refusef("arms are the same: cap resolved to %d in both", got)
		}
		if effective = append(effective, got); got != cap {
			res.Notes = append(res.Notes, fmt.Sprintf("cap lowered %d -> %d", cap, got))
		}
		if i == 0 {
			res.Settings = r.Settings
			continue
		}
		for _, name := range slices.Sorted(maps.Keys(r.Settings)) {
			was, is := res.Settings[name], r.Settings[name]
			if name == "cap" || was.Text() == is.Text() {
				continue
			}
			if is.Origin == "auto" { // follows from the cap
				res.Notes = append(res.Notes, fmt.Sprintf("%s is %s at cap %d and %s at cap %d", name, was.Text(), b.Caps[0], is.Text(), cap))
				continue
			}
			return nil, refusef("arms differ outside the treatment: %s %s vs %s; refusing", name, was.Text(), is.Text())
		}
	}
	return effective, nil
}

// files are the files that a run reads: the model's and the slab in its place.
func (b CapBattery) files(slab string) (paths []string, err error) {
	m, err := storage.Open(b.Model)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	for _, f := range m.Files {
		paths = append(paths, f.Path)
	}
	if _, err := os.Stat(slab); err == nil && !slices.Contains(paths, slab) {
		paths = append(paths, slab)
	}
	return paths, nil
}

// summarize takes medians of the samples that count, and compares.
func (res *CapResult) summarize(caps, effective []int) error {
	bad := map[int]int{} // block: runs
	for _, s := range res.Samples {
		if bad[s.Block]++; s.Void != "" {
			bad[s.Block] = -len(res.Samples) - 1
		}
	}
	samples := make([][]float64, len(caps))
	var names []string
	witness := map[string]int{} // output: the first cap that gave it
	for i, cap := range caps {
		names = append(names, fmt.Sprintf("cap %d", cap))
		var hits [3][]float64
		var miss, per, wait, peak, faults []float64
		tiers := []string{"vram", "pinned", "lru"}
		for _, s := range res.Samples {
			if s.Cap != cap || s.Block < 0 || bad[s.Block] != len(caps) {
				continue
			}
			r := s.Run
			if _, known := witness[r.Witness]; !known {
				witness[r.Witness] = cap
			}
			samples[i] = append(samples[i], s.TokPerSec)
			share := func(n int64) float64 { return 100 * float64(n) / float64(max(1, r.Decode.Routed)) }
			for k, tier := range tiers {
				hits[k] = append(hits[k], share(r.Decode.Hits[tier]))
			}
			miss = append(miss, share(r.Decode.Misses))
			per = append(per, s.PerToken)
			wait = append(wait, 100*float64(r.WaitNanos)/float64(r.DecodeNanos))
			peak = append(peak, float64(r.Counters.Peak))
			faults = append(faults, float64(r.Decode.MajorFaults)/float64(r.DecodeTokens))
		}
		a := CapArm{Cap: cap, Effective: effective[i], TokPerSec: Summarize(samples[i]), HitPct: map[string]float64{}}
		for k, tier := range tiers {
			a.HitPct[tier] = Summarize(hits[k]).Median
		}
		a.MissPct, a.PerToken, a.WaitPct = Summarize(miss).Median, Summarize(per).Median, Summarize(wait).Median
		a.Peak, a.Faults = Summarize(peak).Median, Summarize(faults).Median
		res.Arms = append(res.Arms, a)
	}
	switch {
	case len(witness) > 1:
		var gave []string
		for _, w := range slices.SortedFunc(maps.Keys(witness), func(a, b string) int { return cmp.Or(cmp.Compare(witness[a], witness[b]), cmp.Compare(a, b)) }) {
			gave = append(gave, fmt.Sprintf("cap %d %s", witness[w], w))
		}
		res.Refused = "the outputs differ (logits: " + strings.Join(gave, ", ") + "), though no cap may change them: no verdict on speed; please report this"
		return refusef("%s", res.Refused)
	case res.Refused == "" && len(samples[0]) > 0:
		res.Comparisons = append(res.Comparisons, compare(names, samples)...)
	}
	return nil
}

// load is the machine's load average of the last minute, 0 if it is not told.
func load() (v float64) {
	b, err := os.ReadFile("/proc/loadavg")
	if err == nil {
		fmt.Sscan(string(b), &v)
	}
	return v
}
