// Package engine wires the rooms into a running model: it opens the file,
// plans the memory, loads what is resident and hands out the decoder with its
// tokenizer and its counters. Flags, printing and exit codes are the commands'.
package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"runtime/debug"
	"time"

	"sluice/backends"
	"sluice/backends/cpu"
	"sluice/backends/dense"
	"sluice/internal/cores"
	"sluice/internal/offheap"
	"sluice/moe"
	"sluice/moe/tokenizer"
	"sluice/speculative"
	"sluice/storage"
	"sluice/tiers"
)

// Options choose how a model is run. Zero values are the defaults.
type Options struct {
	Path    string
	Copies  []string // further paths of the same model, on other drives
	Cap     int      // experts per layer that stay in RAM; 0: as many as fit
	Policy  string   // who leaves the pool: see tiers.Policies; "" is the default
	Storage storage.Mode
	Depth   int       // reads at a drive at once; 0: found while loading
	NoSlab  bool      // do not look for a slab beside the model
	Threads int       // 0: the physical cores that this process may use
	Kernels cpu.Level // of the CPU backend; 0: the best that this CPU has
	Chunk   int       // most positions of one forward pass; 0: 512
	Ctx     int       // positions of the context; 0: what the model was trained for, at most 4096
	KV      backends.KVType
	Drafts  int // caches for drafting layers, beside what Draft needs; 0: the layers are not loaded
	Draft   Drafting

	RAM          int64    // bytes of the resident set at most; 0: what is available
	VRAM         Budget   // of a device; the zero value is all that it has room for
	NoVRAM       bool     // no expert goes to a device
	GPUDense     GPUDense // whether the first device computes attention, norms and dense weights too
	Pin          Budget   // of RAM, for experts that never leave
	KeepHost     bool     // keep in RAM what is in VRAM
	Usage        string   // file of the usage history, read and written; "": none
	UsageFreeze  string   // the same, read alone
	Prefetch     tiers.Prefetch
	Backend      string       // auto, cpu, vulkan, cuda or hip; "" is auto
	Devices      string       // cuda:N or N, several with commas; "": see openDevices
	Staging      bool         // copy to a device through a staging buffer even where the host could write its memory
	RequireReBAR bool         // refuse a device whose memory the host sees only in part
	Memory       tiers.Memory // of the machine
	NoText       bool         // token ids alone come and go: the tokenizer is not read
	PlanOnly     bool         // nothing will be loaded: what this machine lacks is told, not refused

	noNextn bool // Draft is not to choose the drafting layer by itself
}

const (
	defaultChunk = 512
	// A longer context is only reserved when asked for: 4096 positions of a
	// large model's KV cache are 1.5 GB already.
	defaultCtx = 4096
)

// A Plan is a model whose headers have been read and whose memory has been
// planned, with nothing loaded yet.
type Plan struct {
	File     *storage.Model
	Tokens   *tokenizer.Tokenizer // nil with NoText
	Spec     *moe.Spec
	Reader   *storage.Reader // of the model's drives
	Source   storage.Source  // of the experts: the same
	Config   moe.Config
	Threads  int
	Kernels  cpu.Level
	Cap      tiers.CapPlan
	Ledger   *tiers.Ledger
	Policy   string
	Prefetch tiers.Prefetch
	History  *tiers.History // empty if no file was named
	VRAM     []tiers.Key    // experts for the device
	Pinned   []tiers.Key    // experts that will never leave RAM
	Settings Settings       // effective values; origins are "flag" where an option was given
	Notices  []string       // what was lowered, replaced or left out, in words

	VRAMBytes, PinnedBytes int64
	DeviceDense            DeviceDense

	draft     Drafting // as settled: no "auto", and "" for "off"
	small     *Plan    // of the model that drafts; nil: none does
	path      string
	stamps    []storage.FileStamp // when the model was opened
	resident  []tiers.Tensor      // those of the model that stay in memory
	roles     []tiers.ExpertLayer // those whose experts are streamed
	dense     int64               // bytes of the arena of resident tensors
	copies    int64               // bytes of RAM for what is in VRAM
	floor     int64               // bytes that are to stay available
	usagePath string
	keepHost  bool
	devices   *devices // nil: there is none
	denseRoom int64    // bytes of the first device's memory for dense weights
	onDevice  bool     // it computes all but experts in RAM
	fixVRAM   bool
	machine   tiers.Memory
}

// Prepare opens a model and plans its memory. The caller closes the plan, or
// the engine that Load makes of it.
func Prepare(o Options) (*Plan, error) {
	p := &Plan{}
	err := p.prepare(o)
	if err == nil {
		return p, nil
	}
	p.Close()
	var none *tiers.NoRoomError
	if o.Draft.By == "auto" && p.Config.Drafts > o.Drafts && errors.As(err, &none) {
		o.noNextn = true
		if p, err = Prepare(o); err == nil {
			p.Notices = append(p.Notices, "draft: there is no memory for the drafting layer; the lookup drafts in its place")
		}
		return p, err
	}
	return nil, err
}

func (p *Plan) prepare(o Options) (err error) {
	for _, n := range []struct {
		name string
		v    int
	}{{"cap", o.Cap}, {"threads", o.Threads}, {"chunk", o.Chunk}, {"ctx", o.Ctx}, {"drafts", o.Drafts}} {
		if n.v < 0 {
			return fmt.Errorf("engine: %s %d: use 1 or more, or 0 for the default", n.name, n.v)
		}
	}
	if p.File, err = storage.OpenCopies(append([]string{o.Path}, o.Copies...)...); err != nil {
		return err
	}
	p.path = o.Path
	p.sidecar(o)
	if p.stamps, err = p.File.Stamps(); err != nil {
		return err
	}
	if p.Spec, err = moe.Describe(p.File); err != nil {
		return err
	}
	if !o.NoText {
		if p.Tokens, err = Tokenizer(p.File); err != nil {
			return err
		}
	}
	p.context(o)
	if kv := p.Spec.KV(p.Config); o.KV == backends.KVQ8 && (kv.KeyDim%32 != 0 || kv.ValueDim%32 != 0) {
		return fmt.Errorf("--kv q8 needs heads of a multiple of 32 elements, this model's keys have %d and its values %d: use f16 or f32", kv.KeyDim, kv.ValueDim)
	}
	p.Config.KV = o.KV
	if err := p.drafting(o); err != nil {
		return err
	}
	if p.Dense() {
		o = p.withoutExperts(o)
	}
	p.set("kv", o.KV.String(), o.KV != backends.KVF16)
	p.Config.Chunk = min(cmp.Or(o.Chunk, defaultChunk), p.Config.Ctx)
	chunk := Setting{Name: "chunk", Value: p.Config.Chunk, Origin: origin(o.Chunk != 0)}
	if o.Chunk > p.Config.Chunk {
		chunk.Requested = o.Chunk
	}
	p.Settings.Set(chunk)
	threads := Setting{Name: "threads", Value: o.Threads, Origin: FromFlag}
	if o.Threads == 0 {
		threads.Value, threads.Origin = cores.Physical(), FromAuto
	}
	p.Threads = threads.Value.(int)
	p.Settings.Set(threads)
	if p.Kernels, err = cpu.Choose(o.Kernels); err != nil {
		return err
	}
	kernels := Setting{Name: "cpu-kernels", Value: p.Kernels.String(), Origin: FromAuto}
	if o.Kernels != cpu.Auto {
		kernels.Origin = FromEnvironment
	}
	p.Settings.Set(kernels)

	if p.Reader, err = p.File.Source(p.roles, storage.SourceOptions{Mode: o.Storage, Depth: o.Depth}); err != nil {
		return err
	}
	p.Source = p.Reader
	p.Notices = append(p.Notices, p.Reader.Notices()...)
	if words := p.File.Compared(); words != "" {
		p.Notices = append(p.Notices, words)
	}
	storageSetting := Setting{Name: "storage", Value: p.Source.Mode().String(), Origin: origin(o.Storage != storage.Slab)}
	if p.Source.Mode() != o.Storage {
		storageSetting.Requested = o.Storage.String()
	}
	p.Settings.Set(storageSetting)
	p.set("io-depth", p.Reader.Depth(), o.Depth != 0)
	if len(o.Copies) > 0 {
		p.set("copies", o.Copies, true)
	}
	p.Prefetch, p.keepHost, p.fixVRAM, p.machine = o.Prefetch, o.KeepHost, o.UsageFreeze != "", o.Memory
	if err := p.openDevices(o); err != nil {
		return err
	}
	if len(p.Spec.Roles) < 2 {
		p.Prefetch = tiers.PrefetchOff // there is no next layer
	}
	if err := p.memory(o); err != nil {
		return err
	}
	s := Setting{Name: "prefetch", Value: p.Prefetch.String(), Origin: origin(o.Prefetch != tiers.PrefetchAuto)}
	if p.Prefetch != o.Prefetch {
		s.Requested = o.Prefetch.String()
	}
	p.Settings.Set(s)
	p.draftSettings(o)
	return nil
}

// sidecar takes the slab beside the model in its place, if it is of the same
// model: it has the same metadata and tensors.
func (p *Plan) sidecar(o Options) {
	s := Setting{Name: "slab", Value: "none", Origin: FromAuto}
	switch {
	case p.File.Format == "slab":
		s.Value, s.Origin = p.File.Files[0].Path, FromFile
	case o.NoSlab:
		s.Value, s.Origin = "off", FromFlag
	default:
		side, words := p.File.Sidecar()
		if side != nil && len(o.Copies) > 0 {
			side.Close()
			side, words = nil, fmt.Sprintf("slab %s is not used, since the model has copies: name a slab of each with --model", p.File.SlabPath())
		}
		if words != "" {
			p.Notices = append(p.Notices, words)
		}
		if side != nil {
			p.File.Close()
			p.File = side
			s.Value = side.Files[0].Path
		}
	}
	p.Settings.Set(s)
}

// context fits the positions to what the model was trained for.
func (p *Plan) context(o Options) {
	trained := p.Spec.Ctx
	s := Setting{Name: "ctx", Value: min(trained, defaultCtx), Origin: FromDefault}
	if o.Ctx != 0 {
		s.Value, s.Origin = o.Ctx, FromFlag
		if o.Ctx > trained {
			s.Value, s.Requested = trained, o.Ctx
			p.Notices = append(p.Notices, fmt.Sprintf("ctx lowered %d -> %d (the model was trained for %d positions)", o.Ctx, trained, trained))
		}
	}
	p.Config.Ctx = s.Value.(int)
	p.Settings.Set(s)
}

func (p *Plan) set(name string, value any, given bool) {
	p.Settings.Set(Setting{Name: name, Value: value, Origin: origin(given)})
}

func origin(given bool) string {
	if given {
		return FromFlag
	}
	return FromDefault
}

// Paths are the files that a run reads: the model's, its copies', its slab's.
func (p *Plan) Paths() []string { return append(p.File.Paths(), p.path) }

// Close closes the model's files. A plan that was loaded is closed by its engine.
func (p *Plan) Close() error {
	errs := []error{p.devices.Close()}
	p.devices = nil
	if p.small != nil {
		errs = append(errs, p.small.Close())
		p.small = nil
	}
	if p.Source != nil {
		errs = append(errs, p.Source.Close())
	}
	if p.File != nil {
		errs = append(errs, p.File.Close())
	}
	return errors.Join(errs...)
}

// An Engine is a model ready to decode.
type Engine struct {
	*Plan
	Model     *moe.Model
	Cache     *tiers.Cache
	Drafts    *speculative.Decoder // nil: nobody drafts
	Announced int64                // bytes: the resident set when all was loaded
	LoadNanos int64
	Drive     storage.LoadReport // what was learned of the drives while loading
	said      []string           // while loading

	backend backends.Backend
	arena   []byte
	watch   *tiers.Watch
	small   *Engine // the model that drafts; nil: none does
}

// Load reads the resident tensors, makes the slots and reads the experts of
// VRAM and of the pinned set, if there are any; no other expert is read. The
// engine closes the plan, also if Load fails.
func (p *Plan) Load(ctx context.Context) (*Engine, error) {
	e := &Engine{Plan: p}
	if err := e.load(ctx); err != nil {
		e.Close()
		return nil, err
	}
	return e, nil
}

func (e *Engine) load(ctx context.Context) (err error) {
	start := time.Now()
	if e.arena, err = offheap.Alloc(e.dense); err != nil {
		return err
	}
	data, report, err := e.Reader.Load(ctx, e.arena, e.resident)
	if err != nil {
		return err
	}
	e.Drive = report
	if report.Found {
		e.Settings.Set(Setting{Name: "io-depth", Value: report.Depth, Origin: FromAuto})
	}
	resident := make(map[string][]byte, len(data))
	for i, t := range e.resident {
		resident[t.Name] = data[i]
	}
	if err := e.openBackend(); err != nil {
		return err
	}
	if e.Source.Mode() != storage.MMap && !e.Dense() { // which have no memory to give back
		if e.watch, err = tiers.NewWatch(e.machine, e.floor); err != nil {
			return err
		}
	}
	var vram tiers.Device
	if e.devices != nil {
		vram = e.devices
		if e.Config.Held, err = e.devices.holder(e.Spec.TopK, e.Config.Chunk); err != nil {
			return err
		}
	}
	e.Cache, err = tiers.New(e.Source, tiers.Options{
		Cap: e.Cap.Cap, TopK: e.Spec.TopK, Layers: e.roles, Policy: e.Policy, History: e.frequency(), Ledger: e.Ledger,
		Pinned: e.Pinned, VRAM: e.VRAM, Device: vram, KeepHost: e.keepHost, FixVRAM: e.fixVRAM, Prefetch: e.Prefetch, Watch: e.watch, Nextn: e.Spec.Layers,
	})
	if err != nil {
		return err
	}
	if err := e.Cache.Preload(ctx); err != nil {
		return err
	}
	if e.devices != nil {
		said, err := e.devices.settle()
		e.said = append(e.said, said...)
		if err != nil {
			return err
		}
	}
	weights := func(t tiers.Tensor) []byte { return resident[t.Name] }
	if e.Model, err = moe.New(e.Spec, weights, e.backend, e.Cache, e.Config); err != nil {
		return err
	}
	if err := e.startDrafting(ctx); err != nil {
		return err
	}
	debug.FreeOSMemory() // what the headers' parser left
	e.LoadNanos = int64(time.Since(start))
	usage, err := tiers.Memory{}.Usage()
	e.Announced = usage.RSS
	return err
}

// openBackend starts what computes all but the experts that devices hold.
func (e *Engine) openBackend() error {
	host, err := cpu.New(cpu.Options{Threads: e.Threads, Level: e.Kernels})
	if err != nil {
		return err
	}
	e.backend = host
	e.Reader.SumBy(host.Checksum) // whoever polls also computes
	if !e.onDevice {
		return nil
	}
	b, err := e.devices.dense(host, dense.Options{Room: e.denseRoom, Resident: func(m *backends.Matrix) bool { return offheap.Holds(e.arena, m.Data) }})
	if err != nil {
		e.backend = nil // it is closed
		return err
	}
	e.backend = b
	return nil
}

// Said is what loading gave occasion to say.
func (e *Engine) Said() []string { return e.said }

// Usage is what experts take of devices' memory, the zero value without devices.
func (e *Engine) Usage() backends.HeldUsage { return e.devices.usage() }

// TraceHeader describes the model of a name for a trace of its routing.
func (p *Plan) TraceHeader(name string) *tiers.Trace {
	t := &tiers.Trace{Model: name, Arch: p.Spec.Arch, Experts: p.Spec.Experts, TopK: p.Spec.TopK, Layers: make([]tiers.TraceLayer, p.Spec.Layers)}
	for _, r := range p.Spec.Roles {
		t.Layers[r.Layer].ExpertBytes = p.Source.ExpertBytes(r.Layer)
	}
	for _, d := range p.Spec.Dense {
		var l int
		if _, err := fmt.Sscanf(d.Name, "blk.%d.", &l); err == nil && l >= 0 && l < len(t.Layers) {
			t.Layers[l].DenseBytes += d.Bytes
		}
	}
	return t
}

// Finish is called when a command has run its model: it puts what changed
// meanwhile into the settings, writes the usage history, and says in words what
// happened. A model file that was written to meanwhile is an error. The engine
// goes on all the same.
func (e *Engine) Finish() (notices []string, err error) {
	e.Cache.Land()
	notices = e.Cache.Notices()
	if n := e.Usage().Unequal; n > 0 {
		notices = append(notices, fmt.Sprintf("warning: %d of the device's kernels gave other bits than the slower ones that they stand for, which compute in their place: no output is wrong; please report it with the device and its driver", n))
	}
	if e.Drafts != nil {
		notices = append(notices, e.Drafts.Notices()...)
	}
	now, err := e.File.Stamps()
	if err != nil {
		return notices, err
	}
	for i, was := range e.stamps {
		if now[i] != was {
			return notices, fmt.Errorf("%s was written to while it was read: what was computed may be of neither the old nor the new model; run it again", was.Path)
		}
	}
	if now := e.Cache.Stats().Cap; now != e.Cap.Cap {
		for _, s := range e.Settings {
			if s.Name == "cap" {
				s.Value, s.Requested = now, cmp.Or(s.Requested, any(s.Value))
				e.Settings.Set(s)
			}
		}
	}
	if e.usagePath == "" {
		return notices, nil
	}
	// Another run may have written meanwhile: what it counted stays.
	id := tiers.Identify(e.Spec.Arch, e.Spec.Name, e.File, e.Spec.Roles)
	h, _, err := tiers.ReadHistory(e.usagePath, id, e.Spec.Roles)
	if errors.Is(err, fs.ErrNotExist) {
		h, err = tiers.NewHistory(id, e.Spec.Roles), nil
	}
	if err != nil {
		return notices, err
	}
	e.Cache.TakeUses(h)
	hash, err := h.Write(e.usagePath)
	if err != nil {
		return notices, err
	}
	return append(notices, fmt.Sprintf("usage: %s now has %d choices, sha256 %s", e.usagePath, h.Total(), hash)), nil
}

// Close ends the goroutines, frees the memory and closes the files. A second
// Close does nothing.
func (e *Engine) Close() error {
	var errs []error
	if e.small != nil {
		errs = append(errs, e.small.Close())
		e.small = nil
	}
	if e.Cache != nil {
		errs = append(errs, e.Cache.Close())
	}
	if e.watch != nil {
		e.watch.Close()
		e.watch = nil
	}
	if e.backend != nil {
		errs = append(errs, e.backend.Close())
	}
	errs = append(errs, e.Plan.Close(), offheap.Free(e.arena))
	e.arena = nil
	return errors.Join(errs...)
}

// Tokenizer makes the tokenizer that a model file describes, or the
// tokenizer.json or tiktoken.model beside it.
func Tokenizer(f *storage.Model) (*tokenizer.Tokenizer, error) {
	h, ok, err := tokenizer.ReadHF(f.Meta)
	if err != nil {
		return nil, err
	}
	if ok {
		return tokenizer.NewHF(h)
	}
	if f.Meta.Has("hf.config.json") {
		return nil, errors.New("engine: there is neither a tokenizer.json nor a tiktoken.model beside the model's config.json: download it too, or give token ids to sluice logits --ids")
	}
	v, err := tokenizer.ReadVocab(f.Meta)
	if err != nil {
		return nil, err
	}
	return tokenizer.New(v)
}
