package engine

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"sluice/backends/vulkan"
	"sluice/internal/quant"
	"sluice/tiers"
)

// vramReserve stays free in a device's memory: the desktop, other programs, and
// what drivers take for themselves.
const vramReserve = 512 << 20

// openDevices opens the GPUs that the options name, or without a name the first
// discrete one; with --vram or --backend vulkan any that is no software. There
// may be none: then the words that say so are a notice, or a refusal where VRAM
// was asked for.
func (p *Plan) openDevices(o Options) error {
	wanted := o.VRAM != (Budget{}) || o.Devices != "" || o.Backend == "vulkan"
	p.set("backend", "cpu", o.Backend == "cpu")
	switch {
	case o.Backend != "" && o.Backend != "auto" && o.Backend != "cpu" && o.Backend != "vulkan":
		return fmt.Errorf("--backend %s: use auto, cpu or vulkan", o.Backend)
	case o.Backend == "cpu" && (o.VRAM != (Budget{}) || o.Devices != ""):
		return refused("--backend cpu uses no device: leave out --vram and --devices, or --backend")
	case o.Backend == "cpu" || o.PlanOnly && !wanted:
		return nil
	}
	none := func(words string) error {
		switch {
		case o.PlanOnly:
		case o.VRAM != (Budget{}):
			return refused("--vram %v: %s", o.VRAM, words)
		case o.Devices != "":
			return refused("%s", words)
		case wanted:
			p.Notices = append(p.Notices, words+"; the CPU computes")
		}
		return nil
	}
	in, err := vulkan.Open(false)
	if errors.Is(err, vulkan.ErrNoDriver) {
		return none(err.Error())
	}
	if err != nil {
		return err
	}
	d := &devices{in: in, layers: make(map[int]vulkan.Layer)}
	p.devices = d
	kinds := p.Spec.Kinds
	if p.Config.Drafts > 0 {
		kinds = slices.Concat(kinds, p.Spec.NextnKinds)
	}
	for i, r := range p.roles {
		k := kinds[i]
		d.layers[r.Layer] = vulkan.Layer{Types: [3]quant.Type{k[0].Type, k[1].Type, k[2].Type}, Dim: k[0].Cols, FF: k[0].Rows}
	}
	chosen, words := pick(in.Devices(), o, wanted)
	if words == "" {
		words = d.unknown()
	}
	if words != "" {
		p.devices = nil
		return errors.Join(d.Close(), none(words))
	}
	var names []string
	for _, index := range chosen {
		err := p.openGPU(o, index)
		if errors.Is(err, vulkan.ErrUnfit) && o.Devices == "" {
			p.devices = nil
			return errors.Join(d.Close(), none(err.Error()))
		}
		if err != nil {
			return err
		}
		names = append(names, fmt.Sprintf("vulkan:%d", index))
	}
	p.set("backend", "vulkan", o.Backend == "vulkan")
	p.set("devices", strings.Join(names, ","), o.Devices != "")
	return nil
}

// unknown says in words that the kernels lack a type of the experts.
func (d *devices) unknown() string {
	for i, l := range d.layers {
		for _, t := range l.Types {
			if !vulkan.Supports(t) {
				return fmt.Sprintf("the experts of layer %d are of %v, which the kernels of GPUs do not know (they know %v)", i, t, vulkan.Types())
			}
		}
	}
	return ""
}

// openGPU opens one device and looks at its memory.
func (p *Plan) openGPU(o Options, index int) error {
	d, g := p.devices, &gpu{index: index}
	d.all = append(d.all, g)
	var err error
	if g.dev, err = d.in.Open(index, vulkan.Options{Staging: o.Staging}); err != nil {
		return err
	}
	words, err := reBAR(g.dev.Warning(), o.RequireReBAR)
	if err != nil {
		return err
	}
	p.Notices = append(p.Notices, fmt.Sprintf("device vulkan:%d: %s, %s, %s of memory", index, g.dev.Name, g.dev.Driver, tiers.GB(int64(g.dev.Memory.VRAM()))))
	if words != "" {
		p.Notices = append(p.Notices, words)
	}
	if g.experts, err = g.dev.NewExperts(d.layers, p.Spec.TopK, p.Config.Chunk); err != nil {
		return err
	}
	g.room = g.dev.Free() - g.experts.ScratchBytes() - vramReserve
	if g.dev.Software() {
		g.room += vramReserve // of RAM, which has its own ledger
	}
	g.room = max(g.room, 0)
	return nil
}

// reBAR is the warning of a device's memory, or a refusal where it must not be.
func reBAR(warning string, require bool) (string, error) {
	if warning != "" && require {
		return "", refused("%s (--require-rebar)", warning)
	}
	return warning, nil
}

// pick chooses devices by the options; none, with words, if there is none.
func pick(all []vulkan.Info, o Options, wanted bool) ([]int, string) {
	if o.Devices != "" {
		var chosen []int
		for _, name := range strings.Split(o.Devices, ",") {
			n, err := strconv.Atoi(strings.TrimPrefix(strings.TrimSpace(name), "vulkan:"))
			if err != nil || n < 0 || n >= len(all) {
				var have []string
				for i, d := range all {
					have = append(have, fmt.Sprintf("vulkan:%d %s", i, d.Name))
				}
				return nil, fmt.Sprintf("--devices %s: there is no device %q: name some of %s", o.Devices, name, strings.Join(have, ", "))
			}
			if slices.Contains(chosen, n) {
				return nil, fmt.Sprintf("--devices %s: vulkan:%d is named twice", o.Devices, n)
			}
			chosen = append(chosen, n)
		}
		return chosen, ""
	}
	best := -1
	for i, d := range all {
		if d.Software() || !wanted && d.Kind != "discrete" || len(d.Missing) > 0 && !wanted {
			continue
		}
		if best < 0 || d.Kind == "discrete" && all[best].Kind != "discrete" {
			best = i
		}
	}
	if best >= 0 {
		return []int{best}, ""
	}
	for i, d := range all {
		if d.Software() {
			return nil, fmt.Sprintf("no GPU: %s is software, which runs only when it is named (--devices vulkan:%d)", d.Name, i)
		}
	}
	return nil, "no discrete GPU (--vram or --devices take any)"
}
