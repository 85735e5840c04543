package doctor

import (
	"errors"
	"fmt"
	"strings"

	"sluice/backends/vulkan"
	"sluice/tiers"
)

// A VulkanDevice is what the Vulkan loader says of a device.
type VulkanDevice struct {
	Device   string   `json:"device"` // as --devices takes it
	Name     string   `json:"name"`
	Kind     string   `json:"kind"`
	Driver   string   `json:"driver"`
	Vulkan   string   `json:"vulkan"`
	VRAM     int64    `json:"vram_bytes"`
	ReBAR    bool     `json:"rebar"`         // the host sees all of its memory
	Budget   bool     `json:"memory_budget"` // it tells how much is in use
	Dot      bool     `json:"int8_dot"`      // int8 dot products in one instruction
	Copies   bool     `json:"copy_queue"`    // copies beside kernels
	Missing  []string `json:"missing"`       // what the kernels need and it lacks
	Software bool     `json:"software"`      // the CPU: used only when named
	Warning  string   `json:"warning,omitempty"`
}

// vulkan asks the loader of this machine.
func (r *Report) vulkan() {
	r.Vulkan = []VulkanDevice{}
	in, err := vulkan.Open(false)
	if err != nil {
		if !errors.Is(err, vulkan.ErrNoDriver) || len(r.GPUs) > 0 {
			r.slow("", "%s", strings.TrimPrefix(err.Error(), "vulkan: "))
		}
		return
	}
	defer in.Close()
	for _, d := range in.Devices() {
		v := VulkanDevice{Device: fmt.Sprintf("vulkan:%d", d.Index), Name: d.Name, Kind: d.Kind, Driver: d.Driver, Vulkan: d.API, VRAM: int64(d.Memory.VRAM()), Budget: d.Budget,
			Dot: d.DotProduct, Copies: d.CopyQueue, Missing: append([]string{}, d.Missing...), Software: d.Software()}
		v.ReBAR, v.Warning = d.Memory.ReBAR()
		r.Vulkan = append(r.Vulkan, v)
		if len(d.Missing) > 0 {
			r.slow("update its driver", "%s (%s) cannot be used: it lacks %s", v.Device, d.Name, strings.Join(d.Missing, ", "))
		}
		if v.Warning != "" {
			r.slow("", "%s: %s", v.Device, v.Warning)
		}
	}
}

func (v VulkanDevice) line() string {
	s := fmt.Sprintf("%s %s, %s, driver %s, Vulkan %s, %s of memory", v.Device, v.Name, v.Kind, v.Driver, v.Vulkan, tiers.GB(v.VRAM))
	for _, f := range []struct {
		has     bool
		yes, no string
	}{{v.ReBAR, "all seen by the host", "seen by the host in part"}, {v.Budget, "", "tells nothing of its use"}, {v.Dot, "int8 dot products", ""}, {v.Copies, "a queue for copies", ""},
		{v.Software, "software: used only when named", ""}, {len(v.Missing) > 0, "lacks " + strings.Join(v.Missing, ", "), ""}} {
		if words := yes(f.has, f.yes, f.no); words != "" {
			s += ", " + words
		}
	}
	return s
}
