package engine

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"

	"sluice/backends/cpu"
	"sluice/internal/quant"
	"sluice/storage"
	"sluice/tiers"
)

// A RefusedError says that something was asked for which this machine or this
// build cannot give.
type RefusedError struct{ msg string }

func (e *RefusedError) Error() string { return e.msg }

func refused(format string, args ...any) error { return &RefusedError{fmt.Sprintf(format, args...)} }

// A Budget is what is wanted of a tier: a number of experts or of bytes, not
// both. The zero value wants nothing.
type Budget struct {
	Experts int
	Bytes   int64
}

func (b Budget) String() string {
	if b.Bytes > 0 {
		return tiers.GB(b.Bytes)
	}
	return fmt.Sprint(b.Experts)
}

// take splits keys into those that the budget has room for, from the front, and
// the rest. size is what one takes; bytes what all that were taken do.
func (b Budget) take(keys []tiers.Key, size func(tiers.Key) int64) (taken, rest []tiers.Key, bytes int64) {
	n := 0
	for n < len(keys) && (n < b.Experts || b.Bytes > 0 && bytes+size(keys[n]) <= b.Bytes) {
		bytes += size(keys[n])
		n++
	}
	return keys[:n:n], keys[n:], bytes
}

// memory plans the resident set: what the ledger has for each purpose, the sets
// that are chosen at the start, and the cap.
func (p *Plan) memory(o Options) error {
	p.dense = p.Reader.ResidentBytes(p.resident)
	room, err := o.Memory.Available()
	if err != nil {
		return err
	}
	usage, err := tiers.Memory{}.Usage()
	if err != nil {
		return err
	}
	base := usage.RSS
	budget := room.Budget(base)
	ram := Setting{Name: "ram", Value: cmp.Or(o.RAM, budget), Origin: FromAuto}
	if o.RAM != 0 {
		ram.Origin = FromFlag
	}
	p.Settings.Set(ram)
	if o.RAM > budget {
		words := fmt.Sprintf("--ram %s is more than the %s that this process may have (%s): give at most that, or leave --ram out to take what fits",
			tiers.GB(o.RAM), tiers.GB(budget), room.From)
		if !o.PlanOnly {
			return refused("%s", words)
		}
		p.Notices = append(p.Notices, words)
	}
	if o.RAM > 0 {
		budget = o.RAM
	}
	if err := p.history(o); err != nil {
		return err
	}
	kv, index := p.Spec.KV(p.Config), p.Spec.IndexKV(p.Config)
	cache := kv.Bytes() + index.Bytes() + p.Spec.StateBytes()
	if err := p.denseOnDevice(o, cache); err != nil {
		return err
	}
	if p.onDevice {
		cache = 0
	}
	if err := p.choose(o); err != nil {
		return err
	}

	// The tokenizer and the tables of the Go heap come on top of what is resident
	// now; they are measured when all is loaded.
	scratch := p.Spec.ScratchBytes(p.Config) + cpu.AttendScratch(kv, p.Threads)
	if index.Layers > 0 {
		scratch += cpu.IndexScratch(index, p.Threads)
	}
	made := p.Spec.Made(p.Config)
	dense := p.dense + made + p.smallBytes(tiers.Dense)
	cache += p.smallBytes(tiers.KV)
	scratch += p.smallBytes(tiers.Scratch)
	if made > 0 {
		p.Notices = append(p.Notices, fmt.Sprintf("the file keeps attn_kv_b in one matrix a layer: its half that makes keys takes %s more, as it is needed here (GGUF files of newer converters have attn_k_b and attn_v_b instead)", tiers.GB(made)))
	}
	plan := tiers.Plan{TopK: p.Spec.TopK, Fixed: base + dense + cache + scratch, Available: budget, Given: o.RAM > 0, Cap: o.Cap}
	if p.Prefetch != tiers.PrefetchOff {
		plan.Ahead = p.Spec.TopK
	}
	if err := p.fit(o, plan); err != nil {
		return err
	}
	s := Setting{Name: "cap", Value: p.Cap.Cap, Origin: FromAuto}
	if o.Cap != 0 {
		s.Origin = FromFlag
		if p.Cap.Cap != o.Cap {
			s.Requested = o.Cap
		}
	}
	p.Settings.Set(s)
	if p.Cap.Words != "" && (o.Cap != 0 || p.Cap.Cap < p.Spec.Experts) { // an automatic cap of all experts needs no words
		p.Notices = append(p.Notices, p.Cap.Words)
	}
	if p.Cap.Tight != "" && o.RAM == 0 && p.Source.Mode() != storage.MMap { // a budget of one's own may be used up
		p.Notices = append(p.Notices, p.Cap.Tight)
	}
	if err := tiers.CheckPolicy(o.Policy); err != nil {
		return fmt.Errorf("--policy: %w", err)
	}
	p.Policy = cmp.Or(o.Policy, tiers.DefaultPolicy)
	p.set("policy", p.Policy, o.Policy != "")
	p.floor = tiers.Floor(budget)
	p.Ledger = tiers.NewLedger(budget)
	p.Ledger.Device(p.VRAMBytes)
	for _, g := range []struct {
		purpose tiers.Purpose
		bytes   int64
	}{{tiers.Base, base}, {tiers.Dense, dense}, {tiers.KV, cache}, {tiers.Scratch, scratch}} {
		if err := p.Ledger.Grant(g.purpose, g.bytes); err != nil {
			return err
		}
	}
	return nil
}

// denseScratch is what the first device takes beside caches and weights, when it
// computes all: forms of vectors, scores, and vectors.
const denseScratch = 192 << 20

// A GPUDense says whether the first device computes what is no expert.
type GPUDense uint8

const (
	DenseOff  GPUDense = iota
	DenseAuto          // where there is a GPU with room for all of it beside the experts that were asked for
	DenseOn
)

func (g GPUDense) String() string { return [...]string{"off", "auto", "on"}[g] }

// ParseGPUDense reads the value of --gpu-dense.
func ParseGPUDense(s string) (GPUDense, error) {
	for g := DenseOff; g <= DenseOn; g++ {
		if g.String() == s {
			return g, nil
		}
	}
	return 0, fmt.Errorf("%q: use off, auto or on", s)
}

// DeviceDense is what a device that computes all takes beside experts, in bytes: for
// the dense weights that have room there, key-value caches, and vectors between steps.
type DeviceDense struct{ Weights, Cache, Scratch int64 }

// denseOnDevice takes room on the first device for the caches and for as much of the
// dense weights as fits, before experts get theirs.
func (p *Plan) denseOnDevice(o Options, cache int64) error {
	switch o.GPUDense {
	case DenseOff:
		p.set("gpu-dense", DenseOff.String(), false)
		return nil
	case DenseAuto:
		if why := p.leaves(o, cache); why != "" {
			p.set("gpu-dense", DenseOff.String(), false)
			p.Notices = append(p.Notices, "gpu-dense auto: off, since "+why)
			return nil
		}
	}
	scratch := denseScratch + p.Spec.ScratchBytes(p.Config)
	if p.devices == nil { // and this is but a plan: for a GPU with room for all
		p.onDevice, p.DeviceDense = true, DeviceDense{Weights: p.dense, Cache: cache, Scratch: scratch}
		p.set("gpu-dense", DenseOn.String(), true)
		return nil
	}
	g := p.devices.all[0]
	fixed := cache + scratch
	if fixed > g.room {
		return refused("--gpu-dense: caches and vectors take %s of the memory of %s, and %s are free: lower --ctx or --chunk, or leave --gpu-dense out", tiers.GB(fixed), g.name, tiers.GB(g.room))
	}
	p.onDevice, p.denseRoom = true, min(withGaps(p.dense), g.room-fixed)
	p.DeviceDense = DeviceDense{Weights: min(p.dense, p.denseRoom), Cache: cache, Scratch: scratch}
	g.room -= fixed + p.denseRoom
	p.set("gpu-dense", g.name, o.GPUDense == DenseOn)
	words := fmt.Sprintf("gpu-dense: %s computes attention, norms and dense weights, with %s for caches and vectors", g.name, tiers.GB(fixed))
	if p.denseRoom < p.dense {
		words += fmt.Sprintf("; only %s of %s of dense weights fit there, the CPU multiplies by the others", tiers.GB(p.denseRoom), tiers.GB(p.dense))
	}
	p.Notices = append(p.Notices, words)
	return nil
}

// withGaps is what dense weights of so many bytes take at most on a device, where
// matrices and their planes begin at whole 256 bytes.
func withGaps(bytes int64) int64 { return bytes + bytes/16 }

// leaves says in words why the first device is not to compute what is no expert, ""
// if it may: it must be a GPU, know all types, and have room for all of it beside the
// experts that were asked for.
func (p *Plan) leaves(o Options, cache int64) string {
	if p.devices == nil {
		return "there is no GPU"
	}
	g := p.devices.all[0]
	if g.software {
		return g.name + " is software"
	}
	for _, t := range p.resident {
		if t.Type.Kind() != quant.Data && !g.knows(t.Type) {
			return fmt.Sprintf("%s does not multiply by %v (%s)", g.name, t.Type, t.Name)
		}
	}
	all := cache + denseScratch + p.Spec.ScratchBytes(p.Config) + withGaps(p.dense)
	_, _, experts := o.VRAM.take(p.History.Ranked(), func(k tiers.Key) int64 { return p.devices.ExpertBytes(int(k.Layer), 0) })
	if all > g.room || all+experts > p.devices.room() {
		return fmt.Sprintf("dense weights, caches and vectors take %s beside %s of experts, and %s of the memory of %s are free (lower --ctx or --vram)", tiers.GB(all), tiers.GB(experts), tiers.GB(g.room), g.name)
	}
	return ""
}

// history opens the usage history, if one is named.
func (p *Plan) history(o Options) error {
	id := tiers.Identify(p.Spec.Arch, p.Spec.Name, p.File, p.Spec.Roles)
	p.usagePath, p.History = o.Usage, tiers.NewHistory(id, p.Spec.Roles)
	path, name := o.Usage, "usage"
	if o.UsageFreeze != "" {
		path, name = o.UsageFreeze, "usage-freeze"
	}
	if path == "" {
		return nil
	}
	p.set(name, path, true)
	h, hash, err := tiers.ReadHistory(path, id, p.Spec.Roles)
	switch {
	case name == "usage" && errors.Is(err, fs.ErrNotExist):
		p.Notices = append(p.Notices, fmt.Sprintf("usage: %s begins with this run", path))
		return nil
	case err != nil:
		return err
	}
	p.History = h
	how := "live"
	if name == "usage-freeze" {
		how = "frozen"
	}
	p.set("usage-hash", hash, true)
	p.Notices = append(p.Notices, fmt.Sprintf("usage: %s, %s, %d choices, sha256 %s", path, how, h.Total(), hash))
	return nil
}

// frequency is the history as a policy reads it: uses of an expert by position;
// nil if there is none.
func (p *Plan) frequency() func(tiers.Key) float64 {
	if p.History.Total() == 0 {
		return nil
	}
	return p.History.Frequency(p.Spec.TopK)
}

// choose picks the experts of VRAM and of the pinned set, the most used first.
func (p *Plan) choose(o Options) error {
	ranked := p.History.Ranked()
	if p.devices != nil && p.Config.Drafts > 0 { // drafting layers, of which no history knows, come last
		for _, r := range p.Spec.NextnRoles {
			for e := range r.Experts {
				ranked = append(ranked, tiers.Key{Layer: int32(r.Layer), Expert: int32(e)})
			}
		}
	}
	all := len(ranked)
	size := func(k tiers.Key) int64 {
		payload := p.Source.ExpertBytes(int(k.Layer))
		if p.devices == nil {
			return payload
		}
		return p.devices.ExpertBytes(int(k.Layer), payload)
	}
	vram := o.VRAM
	if p.devices != nil && vram == (Budget{}) && !o.NoVRAM {
		vram.Bytes = p.devices.room()
	}
	p.VRAM, _, p.VRAMBytes = vram.take(ranked, size)
	if p.devices != nil {
		if fits, bytes := p.devices.give(p.VRAM); fits < len(p.VRAM) {
			if o.VRAM != (Budget{}) {
				p.Notices = append(p.Notices, fmt.Sprintf("vram lowered %d -> %d experts (%s of the devices' memory are free for them)", len(p.VRAM), fits, tiers.GB(p.devices.room())))
			}
			p.VRAM, p.VRAMBytes = p.VRAM[:fits:fits], bytes
		}
	}
	ranked = ranked[len(p.VRAM):]
	p.tierSetting("vram", o.VRAM, len(p.VRAM), p.VRAMBytes, all)
	p.Pinned, _, p.PinnedBytes = o.Pin.take(ranked, p.hostBytes)
	p.tierSetting("pin", o.Pin, len(p.Pinned), p.PinnedBytes, len(ranked))
	p.set("release-host", !o.KeepHost, o.KeepHost)
	if n := len(p.VRAM) + len(p.Pinned); n > 0 && n < all && p.History.Total() == 0 { // of all that there are none is the wrong one
		p.Notices = append(p.Notices, fmt.Sprintf("no usage history (--usage FILE) says which experts are used most: the %d held apart are the first of each layer, as good as any", n))
	}
	if o.KeepHost {
		for _, k := range p.VRAM {
			p.copies += p.hostBytes(k)
		}
	}
	return nil
}

// hostBytes is what an expert takes of RAM; of the page cache, which nobody
// promises, in mmap mode.
func (p *Plan) hostBytes(k tiers.Key) int64 {
	if n := tiers.SlotSize(p.Source.SlotBytes(int(k.Layer))); n > 0 {
		return n
	}
	return p.Source.ExpertBytes(int(k.Layer))
}

// tierSetting notes a budget with the experts that it came to.
func (p *Plan) tierSetting(name string, b Budget, n int, bytes int64, all int) {
	s := Setting{Name: name, Value: n, Origin: origin(b != Budget{})}
	if b != (Budget{}) {
		if b.Experts > all || b.Bytes > 0 && n == all {
			s.Requested = b.String()
			p.Notices = append(p.Notices, fmt.Sprintf("%s lowered %v -> %d (that is all %d experts, %s)", name, b, n, all, tiers.GB(bytes)))
		} else {
			p.Notices = append(p.Notices, fmt.Sprintf("%s: %d experts, %s", name, n, tiers.GB(bytes)))
		}
	}
	p.Settings.Set(s)
}

// fit finds the cap beside the sets that were chosen; pinned experts for which
// there is no room beside cap 1, the least used first, are left out in words,
// and before them the slots of prefetch.
func (p *Plan) fit(o Options, plan tiers.Plan) (err error) {
	promised := p.Source.Mode() != storage.MMap
	fixed := plan.Fixed
	try := func() error {
		apart := make(map[int]int)
		for _, set := range [][]tiers.Key{p.VRAM, p.Pinned} {
			for _, k := range set {
				apart[int(k.Layer)]++
			}
		}
		plan.Layers = plan.Layers[:0]
		for _, r := range p.roles {
			plan.Layers = append(plan.Layers, tiers.LayerSize{
				Experts:     r.Experts,
				SlotBytes:   p.Source.SlotBytes(r.Layer),
				ExpertBytes: p.Source.ExpertBytes(r.Layer),
				Apart:       apart[r.Layer],
			})
		}
		plan.Fixed = fixed
		if promised {
			plan.Fixed += p.PinnedBytes + p.copies
		}
		p.Cap, err = plan.Fit()
		return err
	}
	var none *tiers.NoRoomError
	if err := try(); err == nil || !errors.As(err, &none) {
		return err
	}
	if plan.Ahead > 0 {
		plan.Ahead, p.Prefetch = 0, tiers.PrefetchOff
		p.Notices = append(p.Notices, "prefetch off: there is no memory for its slots")
		if err := try(); err == nil || !errors.As(err, &none) {
			return err
		}
	}
	for want := len(p.Pinned); len(p.Pinned) > 0; {
		over := none.Need - none.Available // and at least one
		for over > 0 && len(p.Pinned) > 0 {
			last := len(p.Pinned) - 1
			n := p.hostBytes(p.Pinned[last])
			p.Pinned, p.PinnedBytes, over = p.Pinned[:last], p.PinnedBytes-n, over-n
		}
		if err := try(); err == nil || !errors.As(err, &none) {
			if err == nil {
				p.Settings.Set(Setting{Name: "pin", Value: len(p.Pinned), Origin: FromFlag, Requested: o.Pin.String()})
				p.Notices = append(p.Notices, fmt.Sprintf("pin lowered %d -> %d (there is no memory for more beside cap 1)", want, len(p.Pinned)))
			}
			return err
		}
	}
	return err
}
