package doctor

import (
	"bufio"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"sluice/internal/pci"
)

// A GPU is a graphics card or accelerator.
type GPU struct {
	Card     string    `json:"card,omitempty"` // in /sys/class/drm
	Address  string    `json:"pci_address,omitempty"`
	ID       string    `json:"pci_id,omitempty"` // vendor:device
	Name     string    `json:"name,omitempty"`
	Driver   string    `json:"driver,omitempty"`
	Link     *pci.Link `json:"link,omitempty"`
	BAR      int64     `json:"largest_bar_bytes"`
	VRAM     int64     `json:"vram_bytes"` // 0: not told by /sys
	Virtual  bool      `json:"virtual"`    // made by software, such as a virtual machine's display
	external bool      // no PCI device
}

const (
	pciDevices = "/sys/bus/pci/devices"
	classDRM   = "/sys/class/drm"
	// windowBytes is the size of the window into VRAM without Resizable BAR.
	windowBytes = 256 << 20
)

func (r *Report) gpus(t tree) {
	r.GPUs = []GPU{}
	for _, address := range t.list(pciDevices) {
		dir := pciDevices + "/" + address
		class, _ := t.number(dir + "/class")
		// Base class 3 is a display, 0x12 a processing accelerator.
		if base := class >> 16; base == 3 || base == 0x12 {
			r.GPUs = append(r.GPUs, pciGPU(t, address))
		}
	}
	for _, card := range t.list(classDRM) {
		if n, ok := strings.CutPrefix(card, "card"); !ok || !isNumber(n) { // card0-HDMI-A-1 is a connector
			continue
		}
		device := t.real(classDRM + "/" + card + "/device")
		if i := slices.IndexFunc(r.GPUs, func(g GPU) bool { return device != "" && g.Address == path.Base(device) }); i >= 0 {
			r.GPUs[i].Card = card
			continue
		}
		r.GPUs = append(r.GPUs, GPU{Card: card, Name: path.Base(device), Driver: path.Base(t.real(device + "/driver")), external: true})
	}
	for _, g := range r.GPUs {
		if g.VRAM > g.BAR && g.BAR > 0 && g.BAR <= windowBytes {
			r.slow("", "%s", reBARWords(g.BAR, g.VRAM))
		}
		if g.Link != nil && g.Link.Narrow() {
			r.slow("put the card into a slot that has all of its lanes", "GPU %s runs on %v", g.Address, *g.Link)
		}
	}
}

// reBARWords say that most of a card's memory cannot be written to by the
// processor. Sizes are bytes.
func reBARWords(visible, vram int64) string {
	return fmt.Sprintf("warning: only %d MiB of %d MiB VRAM is host-visible: Resizable BAR appears disabled. "+
		"Enable Resizable BAR in firmware (BIOS/UEFI); the expert tier would land in system RAM and be slow.", visible>>20, vram>>20)
}

func pciGPU(t tree, address string) GPU {
	dir := pciDevices + "/" + address
	vendor, device := t.text(dir+"/vendor"), t.text(dir+"/device")
	g := GPU{Address: address, ID: strings.TrimPrefix(vendor, "0x") + ":" + strings.TrimPrefix(device, "0x"), BAR: largestBAR(t.text(dir + "/resource"))}
	if driver := t.real(dir + "/driver"); driver != "" {
		g.Driver = path.Base(driver)
	}
	g.VRAM, _ = t.number(dir + "/mem_info_vram_total") // amdgpu
	if real := t.real(dir); real != "" {
		g.Link = pci.Slowest(t.path(real))
	}
	// Paravirtual displays (Red Hat, QEMU, VMware, Hyper-V) compute nothing.
	g.Virtual = slices.Contains([]string{"0x1af4", "0x1b36", "0x1234", "0x15ad", "0x1414"}, vendor)
	g.Name = t.field("/proc/driver/nvidia/gpus/"+address+"/information", "Model")
	if g.Name == "" {
		g.Name = pciName(t, strings.TrimPrefix(vendor, "0x"), strings.TrimPrefix(device, "0x"))
	}
	return g
}

// largestBAR is the size of the largest of a device's memory windows, of the
// lines of its file resource: first address, last address, flags, in hexadecimal.
func largestBAR(resource string) (largest int64) {
	const bars = 6       // what follows are a ROM and windows for others
	const memory = 0x200 // the flag of a window in memory space
	n := 0
	for line := range strings.Lines(resource) {
		if n++; n > bars {
			break
		}
		var from, to, flags uint64
		if _, err := fmt.Sscanf(line, "0x%x 0x%x 0x%x", &from, &to, &flags); err != nil || flags&memory == 0 || to <= from || to-from >= 1<<60 {
			continue
		}
		largest = max(largest, int64(to-from+1))
	}
	return largest
}

// pciName looks a device up in the list of PCI ids that distributions install;
// without one, the vendors that make GPUs are known.
func pciName(t tree, vendor, device string) string {
	maker := map[string]string{"1002": "AMD", "10de": "NVIDIA", "8086": "Intel"}[vendor]
	for _, name := range []string{"/usr/share/hwdata/pci.ids", "/usr/share/misc/pci.ids"} {
		f, err := os.Open(t.path(name))
		if err != nil {
			continue
		}
		defer f.Close()
		inside := false
		for sc := bufio.NewScanner(f); sc.Scan(); {
			line := sc.Text()
			switch {
			case strings.HasPrefix(line, vendor+"  "):
				inside, maker = true, strings.TrimSpace(line[len(vendor):])
			case inside && strings.HasPrefix(line, "\t"+device+"  "):
				return maker + " " + strings.TrimSpace(line[1+len(device):])
			case inside && line != "" && line[0] != '\t' && line[0] != '#':
				return maker
			}
		}
	}
	return maker
}

func isNumber(s string) bool { _, err := strconv.ParseUint(s, 10, 32); return err == nil }

// A Library is one that a GPU backend opens.
type Library struct {
	Name  string `json:"name"`
	For   string `json:"for"`
	Path  string `json:"path,omitempty"`  // where the loader finds it; "": nowhere
	Aside string `json:"aside,omitempty"` // where it lies and the loader does not look
}

func (r *Report) libraries(t tree) {
	dirs := loaderDirs(t)
	aside := []string{"/opt/rocm/lib", "/opt/rocm/lib64", "/usr/local/cuda/compat"}
	for _, l := range []Library{
		{Name: "libvulkan.so.1", For: "vulkan"},
		{Name: "libamdhip64.so", For: "hip"},
		{Name: "libcuda.so.1", For: "cuda"},
	} {
		if l.Path = findLibrary(t, dirs, l.Name); l.Path == "" {
			if l.Aside = findLibrary(t, aside, l.Name); l.Aside != "" {
				r.slow(fmt.Sprintf("echo %s > /etc/ld.so.conf.d/%s.conf && ldconfig", path.Dir(l.Aside), l.For),
					"%s lies where the loader does not look (%s)", l.Name, l.Aside)
			}
		}
		r.Libraries = append(r.Libraries, l)
	}
}

// loaderDirs are the folders that the dynamic loader searches.
func loaderDirs(t tree) (dirs []string) {
	if t == "" {
		dirs = filepath.SplitList(os.Getenv("LD_LIBRARY_PATH"))
	}
	dirs = append(dirs, confDirs(t, "/etc/ld.so.conf", map[string]bool{})...)
	dirs = append(dirs, "/lib64", "/usr/lib64", "/lib", "/usr/lib", "/run/opengl-driver/lib")
	for _, triple := range []string{"x86_64-linux-gnu", "aarch64-linux-gnu"} {
		dirs = append(dirs, "/lib/"+triple, "/usr/lib/"+triple)
	}
	return dirs
}

// confDirs reads a file of the loader's folders, with what it includes, each file
// once.
func confDirs(t tree, name string, read map[string]bool) (dirs []string) {
	if read[name] {
		return nil
	}
	read[name] = true
	for line := range strings.Lines(t.text(name)) {
		line, _, _ = strings.Cut(line, "#")
		f := strings.Fields(line)
		switch {
		case len(f) == 0 || f[0] == "hwcap":
		case f[0] == "include":
			for _, pattern := range f[1:] {
				if !path.IsAbs(pattern) {
					pattern = path.Join(path.Dir(name), pattern)
				}
				more, _ := filepath.Glob(t.path(pattern))
				for _, m := range more {
					if rel, err := filepath.Rel(t.path("/"), m); err == nil {
						dirs = append(dirs, confDirs(t, "/"+rel, read)...)
					}
				}
			}
		default:
			dirs = append(dirs, f[0])
		}
	}
	return dirs
}

// findLibrary is the first file of that name, or of that name and a version.
func findLibrary(t tree, dirs []string, name string) string {
	for _, dir := range dirs {
		if t.has(dir + "/" + name) {
			return dir + "/" + name
		}
		if more, _ := filepath.Glob(t.path(dir + "/" + name + ".*")); len(more) > 0 {
			return dir + "/" + filepath.Base(more[0])
		}
	}
	return ""
}
