package main

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/pflag"

	"sluice/backends/cpu"
	"sluice/cmd/doctor"
	"sluice/cmd/engine"
	"sluice/moe"
	"sluice/storage"
)

// This file is what the benches have in common that compare runs of a model, each
// a process of its own.

// benchPrompt is continued where no other text is given.
const benchPrompt = "The keeper of the lighthouse climbed the stairs that evening, and"

// benchRuns are the flags of such a bench: those of run, which go to each run, and
// its own. Once opened it knows what the runs are made of.
type benchRuns struct {
	*modelFlags
	own    *pflag.FlagSet // not passed on
	runs   *int
	prompt *string
	tokens *int

	path string // of the model
	head *benchHead
	exe  string   // this program
	args []string // of run
}

// newBenchRuns has the flags that each of them has; the caller adds to own.
func newBenchRuns(s streams, name, about string, runs, tokens int) *benchRuns {
	b := &benchRuns{modelFlags: newModelFlags(s, name, about), own: pflag.NewFlagSet("", pflag.ContinueOnError)}
	newSamplingFlags(b.modelFlags)
	b.runs = b.own.Int("runs", runs, "runs of each")
	b.prompt = b.own.StringP("prompt", "p", benchPrompt, "the text to continue")
	b.tokens = b.own.IntP("tokens", "n", tokens, "tokens to generate")
	return b
}

// parse reads the arguments, and refuses what none of the benches takes. Values of
// the flag compared are what is compared: the flag list gives them.
func (b *benchRuns) parse(args []string, compared, list string) error {
	b.set.AddFlagSet(b.own)
	if err := b.modelFlags.parse(args); err != nil {
		return err
	}
	switch {
	case b.set.NArg() > 1:
		return usagef("unexpected argument %q", b.set.Arg(1))
	case b.set.Changed(compared):
		return usagef("--%s: the %s to compare are given by --%s", compared, list, list)
	case *b.printConfig || *b.explain:
		return usagef("--print-config and --explain-counters are for run")
	case b.set.Changed("usage"):
		return usagef("--usage learns while it is measured: use --usage-freeze")
	case *b.runs < 1 || *b.tokens < 2:
		return usagef("--runs is at least 1, -n at least 2: the first token is not decoded")
	}
	return nil
}

// checkCaps refuses values of --caps.
func checkCaps(caps []int) error {
	if len(caps) == 0 {
		return usagef("name the caps to compare: --caps 4,8,16")
	}
	for _, c := range caps {
		if c < 1 {
			return capError(c)
		}
	}
	return nil
}

// open finds the model and this program, and describes them.
func (b *benchRuns) open() error {
	o, pass, err := b.passed(b.own)
	if err != nil {
		return err
	}
	if b.head, err = newBenchHead(o.Path, o.Kernels); err != nil {
		return err
	}
	if b.exe, err = os.Executable(); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	b.path, b.args = o.Path, append(pass, "--prompt="+*b.prompt, fmt.Sprintf("--tokens=%d", *b.tokens))
	return nil
}

// benchAsked is what was asked of each run, for JSON.
type benchAsked struct {
	Prompt string `json:"prompt"`
	Tokens int    `json:"tokens"`
	Runs   int    `json:"runs"`
}

func (b *benchRuns) asked() benchAsked { return benchAsked{*b.prompt, *b.tokens, *b.runs} }

// outcome is a run in words.
func outcome(rate float64, void string) string {
	if void != "" {
		return "void: " + void
	}
	return fmt.Sprintf("%.4g tok/s", rate)
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
