package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"

	"github.com/spf13/pflag"

	"sluice/backends/cpu"
	"sluice/cmd/bench"
	"sluice/cmd/doctor"
	"sluice/cmd/engine"
	"sluice/moe"
	"sluice/storage"
)

// benchPrompt is continued where no other text is given.
const benchPrompt = "The keeper of the lighthouse climbed the stairs that evening, and"

func benchCap(ctx context.Context, s streams, args []string) error {
	m := newModelFlags(s, "bench cap", "compare caps: hit rates, bytes read, tokens a second and memory, each run a process of its own, interleaved; other flags go to run")
	newSamplingFlags(m)
	own := pflag.NewFlagSet("", pflag.ContinueOnError)
	caps := own.IntSlice("caps", nil, "the caps to compare, such as 4,8,16; the first is what the others are compared with")
	runs := own.Int("runs", 5, "runs of each cap")
	prompt := own.StringP("prompt", "p", benchPrompt, "the text to continue")
	n := own.IntP("tokens", "n", 64, "tokens to generate")
	cache := own.String("cache", "warm", "warm: each cap runs once before all, not counted; cold: the model is dropped from the page cache before each run")
	m.set.AddFlagSet(own)
	if err := m.parse(args); err != nil {
		return err
	}
	switch {
	case m.set.NArg() > 1:
		return usagef("unexpected argument %q", m.set.Arg(1))
	case m.set.Changed("cap"):
		return usagef("--cap: the caps to compare are given by --caps")
	case *m.printConfig || *m.explain:
		return usagef("--print-config and --explain-counters are for run")
	case m.set.Changed("usage"):
		return usagef("--usage learns while it is measured: use --usage-freeze")
	case len(*caps) == 0:
		return usagef("name the caps to compare: --caps 4,8,16")
	case *runs < 1 || *n < 2:
		return usagef("--runs is at least 1, -n at least 2: the first token is not decoded")
	case *cache != "warm" && *cache != "cold":
		return usagef("--cache %q: use warm or cold", *cache)
	}
	for _, c := range *caps {
		if c < 1 {
			return capError(c)
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
		return fmt.Errorf("bench cap: %w", err)
	}
	total := len(*caps) * *runs
	if *cache == "warm" {
		total += len(*caps)
	}
	done := 0
	b := bench.CapBattery{
		Sluice: bench.Program(exe), Caps: *caps, Runs: *runs, Model: path, Cold: *cache == "cold",
		Args: append(pass, "--prompt="+*prompt, fmt.Sprintf("--tokens=%d", *n)),
		Did: func(x bench.CapSample) {
			done++
			what := fmt.Sprintf("%.4g tok/s", x.TokPerSec)
			if x.Void != "" {
				what = "void: " + x.Void
			}
			progress(s, "run %d of %d, cap %d: %s", done, total, x.Cap, what)
		},
	}
	res, err := b.Run(ctx)
	if res == nil {
		return err
	}
	var perr error
	if *m.json {
		perr = printJSON(s.out, struct {
			*benchHead
			*bench.CapResult
			Prompt string `json:"prompt"`
			Tokens int    `json:"tokens"`
			Runs   int    `json:"runs"`
		}{head, res, *prompt, *n, *runs})
	} else {
		perr = printCaps(s.out, head, res)
	}
	if err != nil {
		return err
	}
	return perr
}

// errDenseBench refuses to measure what a cap does to a model that has none.
var errDenseBench = errors.New("the model is dense: all of it stays in memory and no token reads from the drive, so there is nothing that a cap or a limit of memory changes")

// passed gives the options that the flags make, and the arguments of run that say the same
// as those flags that are not in own.
func (m *modelFlags) passed(own *pflag.FlagSet) (o engine.Options, args []string, err error) {
	if o, err = m.options(m.set.Args()); err != nil {
		return o, nil, err
	}
	if len(*m.models) == 0 {
		args = append(args, "--model="+o.Path)
	}
	m.set.Visit(func(f *pflag.Flag) {
		if f.Name == "json" || own.Lookup(f.Name) != nil {
			return
		}
		if list, ok := f.Value.(pflag.SliceValue); ok {
			for _, v := range list.GetSlice() {
				args = append(args, "--"+f.Name+"="+v)
			}
			return
		}
		args = append(args, "--"+f.Name+"="+f.Value.String())
	})
	return o, args, nil
}

// A benchHead says what was measured, and on what.
type benchHead struct {
	Machine struct {
		Build  doctor.Build  `json:"build"`
		Kernel doctor.Kernel `json:"kernel"`
		CPU    doctor.CPU    `json:"cpu"`
		Memory doctor.Memory `json:"memory"`
	} `json:"machine"`
	Model struct {
		Path         string `json:"path"`
		Architecture string `json:"architecture"`
		Name         string `json:"name"`
		Bytes        int64  `json:"file_bytes"`
		Identity     string `json:"identity"`
		ExpertBytes  int64  `json:"bytes_per_expert"`
		TokenBytes   int64  `json:"bytes_per_token"`
	} `json:"model"`
	Binary string `json:"binary_sha256"`
}

func newBenchHead(path string, kernels cpu.Level) (*benchHead, error) {
	h := &benchHead{}
	r := doctor.Machine(doctor.Options{Kernels: kernels})
	h.Machine.Build, h.Machine.Kernel, h.Machine.CPU, h.Machine.Memory = r.Build, r.Kernel, r.CPU, r.Memory
	file, err := storage.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	spec, err := moe.Describe(file)
	if err != nil {
		return nil, err
	}
	d := describe(file, spec)
	h.Model.Path, h.Model.Architecture, h.Model.Name, h.Model.Bytes = path, spec.Arch, spec.Name, d.fileBytes
	h.Model.ExpertBytes, h.Model.TokenBytes = d.perExpert, d.perToken
	id, err := file.Identity()
	if err != nil {
		return nil, err
	}
	sum := id.Hash()
	h.Model.Identity = hex.EncodeToString(sum[:])
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	f, err := os.Open(exe)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	hash := sha256.New()
	if _, err := io.Copy(hash, f); err != nil {
		return nil, err
	}
	h.Binary = hex.EncodeToString(hash.Sum(nil))
	return h, nil
}

func (h *benchHead) print(w io.Writer) {
	m := h.Machine
	fmt.Fprintf(w, "machine: %s, %d cores, kernels %s; %s of memory, %s available; Linux %s\n",
		m.CPU.Name, m.CPU.Cores, m.CPU.Kernels, size(m.Memory.TotalBytes), size(m.Memory.AvailableBytes), m.Kernel.Release)
	fmt.Fprintf(w, "model: %s, %s (%s), %s, identity %.16s\n", printable(h.Model.Path), h.Model.Architecture, printable(h.Model.Name), size(h.Model.Bytes), h.Model.Identity)
	fmt.Fprintf(w, "binary: sha256 %.16s, %s\n", h.Binary, m.Build.Go)
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

// printRuns lists n runs block by block, each by its name and its tokens a second,
// or why it does not count; the warm-up has a block below 0. mark ends each.
func printRuns(w io.Writer, n int, run func(i int) (block int, name string, rate float64, void string), mark string) {
	fmt.Fprint(w, "\nall runs, in their order (tok/s):")
	last := -2
	for i := range n {
		block, name, rate, void := run(i)
		if block != last {
			last = block
			head := fmt.Sprintf("block %d", block)
			if block < 0 {
				head = "warm-up"
			}
			fmt.Fprintf(w, "\n  %s:", head)
		}
		what := fmt.Sprintf("%.6g", rate)
		if void != "" {
			what = "void (" + strings.ReplaceAll(void, "\n", " ") + ")"
		}
		fmt.Fprintf(w, " %s %s%s", name, what, mark)
	}
	fmt.Fprint(w, "\n\n")
}
