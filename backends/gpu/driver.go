package gpu

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"unsafe"

	"sluice/internal/offheap"
)

// A Driver is an open CUDA or HIP with its devices.
type Driver struct {
	API       API
	Version   int     // as the driver numbers it: CUDA 13000 is 13.0, HIP 50221153 is 5.2
	Library   Library // the driver
	f         functions
	devices   []Info
	words     *words
	compilers []string // names of the library that compiles kernels
	mem       []byte
}

// An Info describes a device.
type Info struct {
	Index  int
	Name   string
	Arch   string // sm_90, gfx1100
	Memory int64  // bytes
	// Address is that on the PCI bus, such as 0000:3d:00.0.
	Address string
	// Integrated says that its memory is the host's.
	Integrated bool
	units      int // multiprocessors; 0: not told
	capability int // CUDA's: 90 is 9.0
	handle     uintptr
}

// words are places outside the Go heap where calls read and write.
type words struct {
	out, more  [4]uint64
	number     int32
	float      float32
	name       [256]byte
	properties [8192]byte
	params     [2]uintptr
	args       [1024]byte
}

// Open opens the driver of an API and lists its devices. ErrNoDriver: there is
// none, or it has no device.
func Open(a API) (*Driver, error) { return open(a, a.libraries(), a.compilers()) }

func open(a API, libraries, compilers []string) (*Driver, error) {
	name, lib, err := load(libraries)
	if err != nil {
		return nil, fmt.Errorf("%v: %w: %v", a, ErrNoDriver, err)
	}
	d := &Driver{API: a, compilers: compilers}
	if missing := d.f.fill(a, lib); len(missing) > 0 {
		return nil, fmt.Errorf("%v: %w: %s lacks %s: it is too old or broken; update the GPU's driver", a, ErrNoDriver, name, strings.Join(missing, ", "))
	}
	if d.mem, err = offheap.Alloc(int64(unsafe.Sizeof(words{}))); err != nil {
		return nil, fmt.Errorf("%v: no memory for calls: %w", a, err)
	}
	d.words = (*words)(unsafe.Pointer(&d.mem[0]))
	if err := d.list(); err != nil {
		d.Close()
		return nil, err
	}
	if d.Library, err = prove(name, uintptr(d.f.start)); err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

// Close forgets the driver; its library stays loaded.
func (d *Driver) Close() {
	if d.mem != nil {
		offheap.Free(d.mem)
		d.mem, d.words = nil, nil
	}
}

// Devices are those of the driver, in its order.
func (d *Driver) Devices() []Info { return d.devices }

func (d *Driver) check(call string, code int) error {
	if code == 0 {
		return nil
	}
	return &Error{d.API, call, code}
}

func addr[T any](p *T) uintptr { return uintptr(unsafe.Pointer(p)) }

func (d *Driver) list() error {
	w := d.words
	none := func(err error) error { return fmt.Errorf("%w: %w", ErrNoDriver, err) }
	if err := d.check("init", d.f.start.call(0)); err != nil {
		return none(err)
	}
	if err := d.check("version", d.f.version.call(addr(&w.number))); err != nil {
		return none(err)
	}
	d.Version = int(w.number)
	w.number = 0
	if err := d.check("device count", d.f.count.call(addr(&w.number))); err != nil {
		return none(err)
	}
	if w.number == 0 {
		return none(&Error{d.API, "device count", noDevice})
	}
	for i := range int(w.number) {
		info := Info{Index: i}
		if err := d.check("device", d.f.device.call(addr(&w.number), uintptr(i))); err != nil {
			return err
		}
		info.handle = uintptr(w.number)
		if err := d.check("device name", d.f.name.call(addr(&w.name), uintptr(len(w.name)), info.handle)); err != nil {
			return err
		}
		name, _, _ := bytes.Cut(w.name[:], []byte{0})
		info.Name = string(name)
		if err := d.check("device memory", d.f.total.call(addr(&w.out[0]), info.handle)); err != nil {
			return err
		}
		info.Memory = int64(w.out[0])
		if err := d.check("device address", d.f.busID.call(addr(&w.name), uintptr(len(w.name)), info.handle)); err != nil {
			return err
		}
		address, _, _ := bytes.Cut(w.name[:], []byte{0})
		info.Address = strings.ToLower(string(address))
		if err := d.arch(&info); err != nil {
			return err
		}
		d.devices = append(d.devices, info)
	}
	return nil
}

// integrated are AMD's graphics that share the host's memory.
var integrated = []string{"gfx902", "gfx909", "gfx90c", "gfx1013", "gfx1033", "gfx1035", "gfx1036", "gfx1037", "gfx1103", "gfx1150", "gfx1151", "gfx1152"}

// arch finds what kernels are compiled for. The struct of HIP's properties has
// another layout in each version; the name of the architecture is the one text in
// it that begins with gfx.
func (d *Driver) arch(info *Info) error {
	w := d.words
	if d.API == HIP {
		clear(w.properties[:])
		if err := d.check("device properties", d.f.properties.call(addr(&w.properties), uintptr(info.Index))); err != nil {
			return err
		}
		from := bytes.Index(w.properties[:], []byte("\x00gfx"))
		if from < 0 {
			return fmt.Errorf("hip: the driver does not tell the architecture of %s: update it", info.Name)
		}
		name, _, _ := bytes.Cut(w.properties[from+1:], []byte{0})
		info.Arch, _, _ = strings.Cut(string(name), ":") // gfx90a:sramecc+:xnack-
		info.Integrated = slices.Contains(integrated, info.Arch)
		return nil
	}
	var value [4]int
	for i, attribute := range []uintptr{75, 76, 16, 18} { // of the capability major and minor, multiprocessors, integrated
		if err := d.check("device attribute", d.f.attribute.call(addr(&w.number), attribute, info.handle)); err != nil {
			return err
		}
		value[i] = int(w.number)
	}
	info.capability, info.units, info.Integrated = 10*value[0]+value[1], value[2], value[3] != 0
	info.Arch = fmt.Sprintf("sm_%d", info.capability)
	return nil
}
