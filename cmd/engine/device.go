package engine

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"sluice/backends"
	native "sluice/backends/gpu"
	"sluice/backends/vulkan"
	"sluice/internal/pci"
	"sluice/internal/quant"
	"sluice/tiers"
)

// vramReserve stays free in a device's memory: the desktop, other programs, and
// what drivers take for themselves.
const vramReserve = 512 << 20

// makers are the backends of GPUs, in the order in which auto asks for them: a
// maker's own driver before Vulkan.
var makers = []string{"cuda", "hip", "vulkan"}

// openDevices opens the GPUs that the options name, or without a name the first
// discrete one; with --vram or a GPU's --backend any that is no software. There
// may be none: then the words that say so are a notice, or a refusal where VRAM
// was asked for.
func (p *Plan) openDevices(o Options) error {
	wanted := o.VRAM != (Budget{}) || o.Devices != "" || o.GPUDense == DenseOn || slices.Contains(makers, o.Backend)
	p.set("backend", "cpu", o.Backend == "cpu")
	switch {
	case o.Backend != "" && o.Backend != "auto" && o.Backend != "cpu" && !slices.Contains(makers, o.Backend):
		return fmt.Errorf("--backend %s: use auto, cpu, vulkan, cuda or hip", o.Backend)
	case o.Backend == "cpu" && (o.VRAM != (Budget{}) || o.Devices != "" || o.GPUDense == DenseOn):
		return refused("--backend cpu uses no device: leave out --vram, --devices and --gpu-dense, or --backend")
	case o.Backend == "cpu" || !wanted && (o.PlanOnly || !hasGPU()):
		return nil
	}
	ask, err := asked(o)
	if err != nil {
		return err
	}
	layers := make(map[int]backends.HeldLayer)
	kinds := p.Spec.Kinds
	if p.Config.Drafts > 0 {
		kinds = slices.Concat(kinds, p.Spec.NextnKinds)
	}
	for i, r := range p.roles {
		k := kinds[i]
		layers[r.Layer] = backends.HeldLayer{Types: [3]quant.Type{k[0].Type, k[1].Type, k[2].Type}, Dim: k[0].Cols, FF: k[0].Rows}
	}
	var words []string
	broken := false
	for _, maker := range ask {
		p.devices = &devices{layers: layers}
		err := p.openMaker(o, maker, wanted)
		if err == nil {
			p.set("backend", maker, o.Backend == maker)
			var names []string
			for _, g := range p.devices.all {
				names = append(names, g.name)
			}
			p.set("devices", strings.Join(names, ","), o.Devices != "")
			if broken {
				p.Notices = append(p.Notices, fmt.Sprintf("%s; %s takes its place", strings.Join(words, "; "), strings.Join(names, ",")))
			}
			return nil
		}
		var none *noDeviceError
		if !errors.As(err, &none) {
			return err
		}
		if err := p.devices.Close(); err != nil && !none.broken {
			return err
		}
		p.devices = nil
		broken = broken || none.broken
		if !none.absent || len(ask) == 1 || maker == "vulkan" && len(words) == 0 { // of drivers that nobody has installed nobody needs to hear
			words = append(words, none.words)
		}
	}
	all := strings.Join(words, "; ")
	switch {
	case o.PlanOnly && o.GPUDense == DenseOn:
		p.Notices = append(p.Notices, fmt.Sprintf("--gpu-dense: %s; planned for a GPU with room for all dense weights", all))
	case o.PlanOnly && o.Devices != "":
		p.Notices = append(p.Notices, all)
	case o.PlanOnly:
	case o.VRAM != (Budget{}):
		return refused("--vram %v: %s", o.VRAM, all)
	case o.Devices != "":
		return refused("%s", all)
	case o.GPUDense == DenseOn:
		return refused("--gpu-dense: %s; without a GPU leave it out", all)
	case wanted || broken:
		p.Notices = append(p.Notices, all+"; the CPU computes")
	}
	return nil
}

// hasGPU says whether the kernel shows a device that a driver may serve. Without
// one there is nothing to find, and the drivers' libraries, 60 MB of them, stay out
// of the process.
func hasGPU() bool {
	for _, nodes := range [...]string{"/dev/dri/renderD*", "/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg"} {
		if found, _ := filepath.Glob(nodes); len(found) > 0 {
			return true
		}
	}
	return false
}

// asked are the makers that the options leave: of the names of devices, of the
// backend, or all.
func asked(o Options) ([]string, error) {
	var named string
	for name := range strings.SplitSeq(o.Devices, ",") {
		maker, _, ok := strings.Cut(strings.TrimSpace(name), ":")
		switch {
		case !ok:
		case !slices.Contains(makers, maker):
			return nil, refused("--devices %s: %q is of no backend: use vulkan:0, cuda:0, hip:0 or a bare number", o.Devices, name)
		case named != "" && named != maker:
			return nil, refused("--devices %s: a run uses the devices of one backend: name those of %s or those of %s", o.Devices, named, maker)
		default:
			named = maker
		}
	}
	switch own := slices.Contains(makers, o.Backend); {
	case named != "" && own && named != o.Backend:
		return nil, refused("--devices %s is not of --backend %s: leave out one of them", o.Devices, o.Backend)
	case named != "":
		return []string{named}, nil
	case own:
		return []string{o.Backend}, nil
	}
	return makers, nil
}

// A noDeviceError says in words why a maker has no device for this run. It is absent
// where there is no driver at all, broken where there is a device that fails.
type noDeviceError struct {
	words          string
	absent, broken bool
}

func (e *noDeviceError) Error() string { return e.words }

// noDevice turns an error that leaves the work to others into one that says so: of a
// device that cannot compute, and where nobody has asked for one of any that fails.
func noDevice(err error, wanted bool) error {
	var byVulkan *vulkan.Error
	var byMaker *native.Error
	switch {
	case errors.Is(err, vulkan.ErrNoDriver), errors.Is(err, native.ErrNoDriver):
		return &noDeviceError{words: err.Error(), absent: true}
	case errors.Is(err, vulkan.ErrUnfit), errors.Is(err, native.ErrUnfit), !wanted && (errors.As(err, &byVulkan) || errors.As(err, &byMaker)):
		return &noDeviceError{words: err.Error(), broken: true}
	}
	return err
}

// openMaker opens a maker's devices that the options name or leave.
func (p *Plan) openMaker(o Options, maker string, wanted bool) error {
	if maker == "vulkan" {
		return noDevice(p.openVulkan(o, wanted), wanted)
	}
	return noDevice(p.openNative(o, map[string]native.API{"cuda": native.CUDA, "hip": native.HIP}[maker], wanted), wanted)
}

func (p *Plan) openVulkan(o Options, wanted bool) error {
	in, err := vulkan.Open(false)
	if err != nil {
		return err
	}
	d := p.devices
	d.close = in.Close
	var all []candidate
	for _, v := range in.Devices() {
		all = append(all, candidate{name: v.Name, software: v.Software(), discrete: v.Kind == "discrete", lacking: len(v.Missing) > 0})
	}
	chosen, words := pick("vulkan", all, o, wanted)
	if words == "" {
		words = d.unknown(vulkan.Types())
	}
	if words != "" {
		return &noDeviceError{words: words}
	}
	for _, index := range chosen {
		if err := p.openGPU(o, in, index); err != nil {
			return err
		}
	}
	return nil
}

// openGPU opens one device by Vulkan and looks at its memory.
func (p *Plan) openGPU(o Options, in *vulkan.Instance, index int) error {
	d := p.devices
	info := in.Devices()[index]
	_, warning := info.Memory.ReBAR()
	words, err := reBAR(warning, o.RequireReBAR)
	if err != nil {
		return err
	}
	dev, err := in.Open(index, vulkan.Options{Staging: o.Staging})
	if err != nil {
		return err
	}
	g := &gpu{name: fmt.Sprintf("vulkan:%d", index), index: index, link: pci.Of(o.Memory.Root, dev.Address), dev: dev, software: dev.Software(), knows: vulkan.Supports}
	d.all = append(d.all, g)
	p.Notices = append(p.Notices, fmt.Sprintf("device %s: %s, %s, %s of memory", g.name, dev.Name, dev.Driver, tiers.GB(int64(dev.Memory.VRAM()))))
	if words != "" {
		p.Notices = append(p.Notices, words)
	}
	experts, err := dev.NewExperts(d.layers, p.Spec.TopK, p.Config.Chunk)
	if err != nil {
		return err
	}
	g.experts = experts
	g.room = dev.Free() - experts.Usage().Allocated - vramReserve
	if dev.Software() {
		g.room += vramReserve // of RAM, which has its own ledger
	}
	g.room = max(g.room, 0)
	return nil
}

// openNative opens devices by their maker's own driver.
func (p *Plan) openNative(o Options, api native.API, wanted bool) error {
	driver, err := native.Open(api)
	if err != nil {
		return err
	}
	d, maker := p.devices, api.String()
	d.close = driver.Close
	var all []candidate
	for _, v := range driver.Devices() {
		all = append(all, candidate{name: v.Name, discrete: !v.Integrated})
	}
	chosen, words := pick(maker, all, o, wanted)
	if words == "" {
		words = d.unknown(native.Types())
	}
	if words != "" {
		return &noDeviceError{words: words}
	}
	for _, index := range chosen {
		dev, err := driver.Open(index, native.Options{})
		if err != nil {
			return err
		}
		g := &gpu{name: fmt.Sprintf("%s:%d", maker, index), index: index, link: pci.Of(o.Memory.Root, dev.Address), dev: dev, knows: native.Supports}
		d.all = append(d.all, g)
		p.set("driver", driver.Library, false)
		p.set("kernels", dev.Compiler, false)
		p.Notices = append(p.Notices, fmt.Sprintf("device %s: %s, %s, %s of memory; %v; kernels by %v", g.name, dev.Name, dev.Arch, tiers.GB(dev.Memory), driver.Library, dev.Compiler))
		experts, err := dev.NewExperts(d.layers, p.Spec.TopK, p.Config.Chunk)
		if err != nil {
			return err
		}
		g.experts = experts
		if failed := experts.Usage().Unpinned; failed > 0 {
			p.Notices = append(p.Notices, fmt.Sprintf("warning: %d of the buffers for uploads to %s could not be pinned: uploads will be slow; raise the limit of locked memory (ulimit -l) or free RAM", failed, g.name))
		}
		free, err := dev.Free()
		if err != nil {
			return err
		}
		g.room = max(0, free-vramReserve) // what is not for experts has been taken
	}
	return nil
}

// unknown says in words that the kernels lack a type of the experts.
func (d *devices) unknown(types []quant.Type) string {
	for i, l := range d.layers {
		for _, t := range l.Types {
			if !slices.Contains(types, t) {
				return fmt.Sprintf("the experts of layer %d are of %v, which the kernels of GPUs do not know (they know %v)", i, t, types)
			}
		}
	}
	return ""
}

// reBAR is the warning of a device's memory, or a refusal where it must not be.
func reBAR(warning string, require bool) (string, error) {
	if warning != "" && require {
		return "", refused("%s (--require-rebar)", warning)
	}
	return warning, nil
}

// A candidate is a device that may be chosen.
type candidate struct {
	name                        string
	software, discrete, lacking bool
}

// pick chooses devices of a maker by the options; none, with words, if there is none.
func pick(maker string, all []candidate, o Options, wanted bool) ([]int, string) {
	if o.Devices != "" {
		var chosen []int
		for _, name := range strings.Split(o.Devices, ",") {
			n, err := strconv.Atoi(strings.TrimPrefix(strings.TrimSpace(name), maker+":"))
			if err != nil || n < 0 || n >= len(all) {
				var have []string
				for i, d := range all {
					have = append(have, fmt.Sprintf("%s:%d %s", maker, i, d.name))
				}
				return nil, fmt.Sprintf("--devices %s: there is no device %q: name some of %s", o.Devices, name, strings.Join(have, ", "))
			}
			if slices.Contains(chosen, n) {
				return nil, fmt.Sprintf("--devices %s: %s:%d is named twice", o.Devices, maker, n)
			}
			chosen = append(chosen, n)
		}
		return chosen, ""
	}
	best := -1
	for i, d := range all {
		if d.software || !wanted && (!d.discrete || d.lacking) {
			continue
		}
		if best < 0 || d.discrete && !all[best].discrete {
			best = i
		}
	}
	if best >= 0 {
		return []int{best}, ""
	}
	for i, d := range all {
		if d.software {
			return nil, fmt.Sprintf("no GPU: %s is software, which runs only when it is named (--devices %s:%d)", d.name, maker, i)
		}
	}
	return nil, "no discrete GPU (--vram or --devices take any)"
}
