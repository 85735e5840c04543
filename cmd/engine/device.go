package engine

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"sluice/backends/vulkan"
	"sluice/internal/quant"
	"sluice/tiers"
)

// A device is a GPU that holds experts: the tiers' VRAM, and what computes there.
type device struct {
	in      *vulkan.Instance
	dev     *vulkan.Device
	experts *vulkan.Experts
	room    int64 // bytes for experts
}

// vramReserve stays free in a device's memory: the desktop, other programs, and
// what drivers take for themselves.
const vramReserve = 512 << 20

// ExpertBytes is tiers.Device's.
func (d *device) ExpertBytes(layer int, _ int64) int64 { return d.experts.ExpertBytes(layer) }

// Upload is tiers.Device's.
func (d *device) Upload(k tiers.Key, parts *tiers.Parts) error {
	return d.experts.Upload(int(k.Layer), int(k.Expert), [3][]byte{parts[0], parts[1], parts[2]})
}

func (d *device) Close() error {
	if d == nil {
		return nil
	}
	var errs []error
	if d.experts != nil {
		errs = append(errs, d.experts.Close())
	}
	if d.dev != nil {
		errs = append(errs, d.dev.Close())
	}
	if d.in != nil {
		d.in.Close()
	}
	return errors.Join(errs...)
}

// openDevice opens the GPU that the options name, or without a name the first
// discrete one; with --vram or --backend vulkan any that is no software. There
// may be none: then the words that say so are a notice, or a refusal where VRAM
// was asked for.
func (p *Plan) openDevice(o Options) error {
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
	d := &device{in: in}
	p.device = d
	index, words := pick(in.Devices(), o, wanted)
	if index < 0 {
		p.device = nil
		return errors.Join(d.Close(), none(words))
	}
	if d.dev, err = in.Open(index, vulkan.Options{Staging: o.Staging}); err != nil {
		if errors.Is(err, vulkan.ErrUnfit) && o.Devices == "" {
			p.device = nil
			return errors.Join(d.Close(), none(err.Error()))
		}
		return err
	}
	if w := d.dev.Warning(); w != "" {
		if o.RequireReBAR {
			return refused("%s (--require-rebar)", w)
		}
		p.Notices = append(p.Notices, w)
	}
	layers := make(map[int]vulkan.Layer)
	for i, r := range p.Spec.Roles {
		k := p.Spec.Kinds[i]
		layers[r.Layer] = vulkan.Layer{Types: [3]quant.Type{k[0].Type, k[1].Type, k[2].Type}, Dim: k[0].Cols, FF: k[0].Rows}
	}
	if d.experts, err = d.dev.NewExperts(layers, p.Spec.TopK, p.Config.Chunk); err != nil {
		return err
	}
	p.set("backend", "vulkan", o.Backend == "vulkan")
	p.set("devices", fmt.Sprintf("vulkan:%d", index), o.Devices != "")
	p.Notices = append(p.Notices, fmt.Sprintf("device vulkan:%d: %s, %s, %s of memory", index, d.dev.Name, d.dev.Driver, tiers.GB(int64(d.dev.Memory.VRAM()))))
	d.room = d.dev.Free() - d.experts.ScratchBytes() - vramReserve
	if d.dev.Software() {
		d.room += vramReserve // of RAM, which has its own ledger
	}
	d.room = max(d.room, 0)
	return nil
}

// pick chooses a device by the options; -1 with words if there is none.
func pick(all []vulkan.Info, o Options, wanted bool) (int, string) {
	if o.Devices != "" {
		name := strings.TrimPrefix(o.Devices, "vulkan:")
		n, err := strconv.Atoi(name)
		if err != nil || n < 0 || n >= len(all) {
			var have []string
			for i, d := range all {
				have = append(have, fmt.Sprintf("vulkan:%d %s", i, d.Name))
			}
			return -1, fmt.Sprintf("--devices %s: there is no such device: name one of %s", o.Devices, strings.Join(have, ", "))
		}
		return n, ""
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
		return best, ""
	}
	for i, d := range all {
		if d.Software() {
			return -1, fmt.Sprintf("no GPU: %s is software, which runs only when it is named (--devices vulkan:%d)", d.Name, i)
		}
	}
	return -1, "no discrete GPU (--vram or --devices take any)"
}
