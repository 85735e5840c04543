package engine

import (
	"fmt"
	"slices"
	"strings"

	"sluice/tiers"
)

// Dense says whether nothing of the model is routed: all of it is resident then, and
// there are no tiers.
func (p *Plan) Dense() bool { return len(p.roles) == 0 }

// withoutExperts takes back the options that say something of experts, which this
// model has none of, and says so in words. A GPU is for --gpu-dense alone.
func (p *Plan) withoutExperts(o Options) Options {
	var idle []string
	for _, x := range []struct {
		flag  string
		given bool
	}{
		{"cap", o.Cap > 0}, {"policy", o.Policy != ""}, {"prefetch", o.Prefetch == tiers.PrefetchOn}, {"pin", o.Pin != Budget{}}, {"usage", o.Usage != ""}, {"usage-freeze", o.UsageFreeze != ""},
		{"vram", o.VRAM != Budget{}}, {"devices", o.Devices != "" && o.GPUDense == DenseOff}, {"backend", slices.Contains(makers, o.Backend) && o.GPUDense == DenseOff}, {"require-rebar", o.RequireReBAR && o.GPUDense == DenseOff}, {"release-host", o.KeepHost},
	} {
		if x.given {
			idle = append(idle, "--"+x.flag)
		}
	}
	if len(idle) > 0 {
		p.Notices = append(p.Notices, fmt.Sprintf("%s: without effect, since the model is dense: it has no routed experts, and all of it stays in RAM", strings.Join(idle, ", ")))
	}
	o.Cap, o.Policy, o.Prefetch, o.Pin, o.Usage, o.UsageFreeze = 0, "", tiers.PrefetchOff, Budget{}, "", ""
	o.VRAM, o.NoVRAM, o.KeepHost = Budget{}, true, false
	if o.GPUDense != DenseOff {
		return o
	}
	o.Devices, o.RequireReBAR = "", false
	if o.Backend == "" || o.Backend == "auto" || slices.Contains(makers, o.Backend) {
		o.Backend = "cpu"
	}
	return o
}
