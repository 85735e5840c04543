package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"sluice/backends"
	"sluice/backends/cpu"
	"sluice/cmd/engine"
	"sluice/storage"
	"sluice/tiers"
)

// newFlags is the flag set of a command, with the flag that each has.
func newFlags(s streams, name, about string) (*pflag.FlagSet, *bool) {
	f := pflag.NewFlagSet(name, pflag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.SortFlags = false
	f.Usage = func() { fmt.Fprintf(s.out, "sluice %s: %s\n\n%s", name, about, f.FlagUsages()) }
	return f, f.Bool("json", false, "print one JSON object")
}

// parse reads the arguments of a command that runs a model.
func (m *modelFlags) parse(args []string) error {
	if err := parse(m.set, args); err != nil {
		return err
	}
	if len(*m.models) > 0 {
		*m.model = (*m.models)[0]
	}
	return nil
}

// parse reads the arguments; a mistake in them is a usage error.
func parse(f *pflag.FlagSet, args []string) error {
	err := f.Parse(joined(f, args))
	if err == nil || errors.Is(err, pflag.ErrHelp) {
		return err
	}
	var unknown *pflag.NotExistError
	if errors.As(err, &unknown) && f.Lookup("cap") != nil {
		if n, err := strconv.Atoi("-" + unknown.GetSpecifiedShortnames()); err == nil { // a CAP below 0, not a flag
			return capError(n)
		}
	}
	return usagef("%v", err)
}

// joined gives a flag that may do without a value the one that stands behind it, if it
// is one.
func joined(f *pflag.FlagSet, args []string) []string {
	if f.Lookup(gpuDense) == nil {
		return args
	}
	for i := 0; i+1 < len(args) && args[i] != "--"; i++ {
		if _, err := engine.ParseGPUDense(args[i+1]); args[i] == "--"+gpuDense && err == nil {
			return slices.Concat(args[:i], []string{args[i] + "=" + args[i+1]}, joined(f, args[i+2:]))
		}
	}
	return args
}

const gpuDense = "gpu-dense"

// backendNames are the values of --backend.
var backendNames = []string{"auto", "cpu", "vulkan", "cuda", "hip"}

// modelFlags are the flags of the commands that run a model.
type modelFlags struct {
	set         *pflag.FlagSet
	json        *bool
	model       *string   // the first of models, or the argument MODEL
	models      *[]string // --model, once for each copy
	cap, depth  *int
	policy      *string
	storage, kv *string
	noSlab      *bool
	threads     *int
	chunk, ctx  *int
	ram         *string
	vram, pin   *string
	gpuDense    *string
	backend     *string
	devices     *string
	rebar       *bool
	releaseHost *bool
	usage       *string
	usageFreeze *string
	prefetch    *string
	printConfig *bool
	explain     *bool
	capArgument bool // the cap came as a positional argument
}

func newModelFlags(s streams, name, about string) *modelFlags {
	f, json := newFlags(s, name, about)
	m := &modelFlags{
		set:         f,
		json:        json,
		model:       new(string),
		models:      f.StringArray("model", nil, "the model file, in place of the argument MODEL; once more for each copy on another drive, and reads are shared among them"),
		depth:       f.Int("io-depth", 0, "reads at a drive at once (default: found while loading)"),
		cap:         f.Int("cap", 0, "experts per layer that stay in RAM (default: as many as fit)"),
		policy:      f.String("policy", "", "which experts leave RAM: "+strings.Join(tiers.Policies(), ", ")+" (default "+tiers.DefaultPolicy+")"),
		storage:     f.String("storage", "slab", "how experts are read: slab (direct I/O by io_uring), pread or mmap"),
		noSlab:      f.Bool("no-slab", false, "do not use the slab beside the model"),
		threads:     f.Int("threads", 0, "threads that compute (default: the physical cores that this process may use)"),
		chunk:       f.Int("chunk", 0, "most positions of one forward pass (default 512)"),
		ctx:         f.Int("ctx", 0, "positions of the context (default: the model's, at most 4096)"),
		kv:          f.String("kv", "f16", "numbers of the key-value cache: f16, f32 or q8"),
		ram:         f.String("ram", "", "most memory that the process takes, such as 48GiB (default: what is available)"),
		vram:        f.String("vram", "", "experts in a device's memory: how many, or bytes such as 16GiB"),
		gpuDense:    f.String(gpuDense, engine.DenseOff.String(), "let the first GPU compute attention, norms, routers and dense weights too: off, auto (if all of it fits beside the experts that --vram asks for) or on"),
		backend:     f.String("backend", "auto", "what computes experts beside the CPU: auto (a discrete GPU, if there is one: by cuda or hip where its maker's driver is there, else by vulkan), cpu (nothing), vulkan, cuda or hip"),
		devices:     f.String("devices", "", "the device, such as cuda:0 or vulkan:0, several with commas; software devices run only when named"),
		rebar:       f.Bool("require-rebar", false, "refuse a device of whose memory the host sees only a part"),
		pin:         f.String("pin", "", "experts that never leave RAM, the most used first: how many, or bytes such as 4GiB"),
		releaseHost: f.Bool("release-host", true, "keep no copy in RAM of the experts in a device's memory"),
		usage:       f.String("usage", "", "file of the usage history: read, and written at the end"),
		usageFreeze: f.String("usage-freeze", "", "file of the usage history: read, and left as it is"),
		prefetch:    f.String("prefetch", "auto", "read experts before their layer asks: off, auto (while it makes tokens faster) or on"),
		printConfig: f.Bool("print-config", false, "print every setting with its value and origin, and stop"),
		explain:     f.Bool("explain-counters", false, "print what each counter counts, and stop"),
	}
	f.Lookup(gpuDense).NoOptDefVal = engine.DenseOn.String()
	return m
}

var errEmptyModel = usagef("MODEL is empty: name a file, or leave it out for the demo")

func modelFlag(f *pflag.FlagSet) *string {
	return f.String("model", "", "the model file, in place of the argument MODEL")
}

// options turns the flags and what is left of the arguments, [MODEL] [CAP],
// into the engine's options.
func (m *modelFlags) options(rest []string) (o engine.Options, err error) {
	if m.set.Changed("model") && slices.Contains(*m.models, "") || len(rest) > 0 && rest[0] == "" {
		return o, errEmptyModel
	}
	if *m.model == "" && len(rest) > 0 && !(len(rest) == 1 && isCap(rest[0])) {
		*m.model, rest = rest[0], rest[1:]
	}
	if len(rest) > 0 { // behind MODEL it is no file, whatever the files are called
		if n, err := strconv.Atoi(rest[0]); err == nil {
			if m.set.Changed("cap") {
				return o, usagef("--cap %d and the argument %s both give the cap: use one", *m.cap, rest[0])
			}
			*m.cap, m.capArgument, rest = n, true, rest[1:]
		}
	}
	if len(rest) > 0 {
		if _, err := os.Stat(rest[0]); err == nil && m.set.Changed("model") {
			return o, usagef("--model and the argument %q both give the model: name each copy by --model, or none", rest[0])
		}
		hint := ""
		if m.set.Lookup("prompt") != nil {
			hint = "; a text goes behind -p"
		}
		return o, usagef("unexpected argument %q: the arguments are MODEL and CAP, in this order%s", rest[0], hint)
	}
	if *m.cap < 1 && (m.capArgument || m.set.Changed("cap")) {
		return o, capError(*m.cap)
	}
	for _, n := range []struct {
		name    string
		v, most int // far above all that a machine has
	}{{"threads", *m.threads, 1024}, {"chunk", *m.chunk, 1 << 20}, {"ctx", *m.ctx, 1 << 27}, {"io-depth", *m.depth, 4096}} {
		if m.set.Changed(n.name) && (n.v < 1 || n.v > n.most) {
			return o, usagef("--%s %d: use 1 to %d", n.name, n.v, n.most)
		}
	}
	o = engine.Options{Cap: *m.cap, Depth: *m.depth, NoSlab: *m.noSlab, Threads: *m.threads, Chunk: *m.chunk, Ctx: *m.ctx}
	if o.Storage, err = storage.ParseMode(*m.storage); err != nil {
		return o, usagef("--storage: %v", err)
	}
	o.Policy = *m.policy
	if err = tiers.CheckPolicy(o.Policy); err != nil {
		return o, usagef("--policy: %v", err)
	}
	if o.KV, err = backends.ParseKV(*m.kv); err != nil {
		return o, usagef("--kv: %v", err)
	}
	if len(*m.models) > 1 {
		o.Copies = (*m.models)[1:]
	}
	if o.Kernels, err = cpu.ParseLevel(os.Getenv("SLUICE_CPU")); err != nil {
		return o, usagef("SLUICE_CPU: %v", err)
	}
	if err := m.memory(&o); err != nil {
		return o, err
	}
	o.Path, err = modelPath(*m.model)
	return o, err
}

// memory reads the flags that say what lies where.
func (m *modelFlags) memory(o *engine.Options) (err error) {
	if m.set.Changed("ram") {
		if o.RAM, err = parseSize(*m.ram); err != nil {
			return usagef("--ram: %v", err)
		}
	}
	if o.VRAM, err = parseBudget(*m.vram); err != nil {
		return usagef("--vram: %v", err)
	}
	if o.Backend, o.Devices, o.RequireReBAR = *m.backend, *m.devices, *m.rebar; !slices.Contains(backendNames, o.Backend) {
		return usagef("--backend %q: use one of %s", o.Backend, strings.Join(backendNames, ", "))
	}
	if o.GPUDense, err = engine.ParseGPUDense(*m.gpuDense); err != nil {
		return usagef("--gpu-dense: %v", err)
	}
	o.NoVRAM = m.set.Changed("vram") && o.VRAM == engine.Budget{}
	if o.Pin, err = parseBudget(*m.pin); err != nil {
		return usagef("--pin: %v", err)
	}
	if o.Prefetch, err = tiers.ParsePrefetch(*m.prefetch); err != nil {
		return usagef("--prefetch: %v", err)
	}
	if *m.usage != "" && *m.usageFreeze != "" {
		return usagef("--usage %s and --usage-freeze %s: a history is either live or frozen, use one", *m.usage, *m.usageFreeze)
	}
	o.Usage, o.UsageFreeze, o.KeepHost = *m.usage, *m.usageFreeze, !*m.releaseHost
	return nil
}

// parseBudget reads a number of experts, or of bytes if it has a unit. An empty
// text, and 0, want nothing.
func parseBudget(text string) (b engine.Budget, err error) {
	if text == "" {
		return b, nil
	}
	if n, err := strconv.Atoi(text); err == nil && n >= 0 && n <= 1<<30 {
		return engine.Budget{Experts: n}, nil
	}
	if b.Bytes, err = parseSize(text); err != nil || strings.Trim(text, "0123456789.") == "" {
		return engine.Budget{}, fmt.Errorf("%q is neither a number of experts, such as 64, nor of bytes, such as 4GiB or 500MB", text)
	}
	return b, nil
}

func capError(n int) error {
	return usagef("cap %d: it is the number of experts per layer that stay in RAM, at least 1", n)
}

// isCap says whether a lone argument is a cap: an integer, and no such file.
func isCap(arg string) bool {
	if _, err := strconv.Atoi(arg); err != nil {
		return false
	}
	_, err := os.Stat(arg)
	return err != nil
}

// demoModel is the model that every command uses when none is named.
const demoModel = "models/demo-q4_k_m.gguf"

// modelPath is the named model, or the demo: beside the executable's folder,
// then in the working folder or one above it.
func modelPath(name string) (string, error) {
	if name != "" {
		return name, nil
	}
	var places []string
	if exe, err := os.Executable(); err == nil {
		if exe, err = filepath.EvalSymlinks(exe); err == nil {
			places = append(places, filepath.Join(filepath.Dir(exe), "..", demoModel))
		}
	}
	for dir, err := os.Getwd(); err == nil; dir = filepath.Dir(dir) {
		if p := filepath.Join(dir, demoModel); !slices.Contains(places, p) {
			places = append(places, p)
		}
		if dir == filepath.Dir(dir) {
			break
		}
	}
	for _, p := range places {
		if _, err := os.Stat(p); err == nil {
			return p, nil
		}
	}
	return "", usagef("no model named, and the demo model was not found; tried %s", strings.Join(places, ", "))
}

// settle corrects the origins that only the command line knows.
func (m *modelFlags) settle(p *engine.Plan, path string) {
	all := engine.Settings{{Name: "model", Value: path, Origin: engine.FromDefault}}
	if *m.model != "" {
		all[0].Origin = engine.FromArgument
		if m.set.Changed("model") {
			all[0].Origin = engine.FromFlag
		}
	}
	for _, s := range p.Settings {
		switch {
		case s.Name == "cap" && m.capArgument:
			s.Origin = engine.FromArgument
		case m.set.Changed(s.Name), s.Name == "copies", s.Name == "slab" && m.set.Changed("no-slab"):
			s.Origin = engine.FromFlag
		case s.Origin == engine.FromFlag: // an option of the command's own
			s.Origin, s.Requested = engine.FromDefault, nil
		}
		all = append(all, s)
	}
	p.Settings = all
}
