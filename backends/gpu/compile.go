package gpu

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/ebitengine/purego"

	"sluice/shaders"
)

// A compiler makes the kernels of a device: from the source by the driver's
// maker's compiler, where that is installed, kept in the user's cache; or, on
// CUDA, from the PTX in this binary.
type compiler struct {
	d       *Device
	lib     uintptr // 0: none
	prefix  string  // nvrtc or hiprtc
	version string
	folder  string // of the cache; "": there is none
	f       struct{ version, create, compile, size, get, logSize, log, destroy fn }
}

func newCompiler(d *Device) *compiler {
	c := &compiler{d: d, prefix: [...]string{"nvrtc", "hiprtc"}[d.dr.API]}
	if d.opt.Embedded {
		return c
	}
	name, lib, err := load(d.dr.compilers)
	if err != nil || !c.fill(lib) {
		return c
	}
	l, err := prove(name, uintptr(c.f.create))
	if err != nil {
		return c
	}
	d.Compiler, c.lib, c.version = l, lib, l.Hash
	if c.folder = d.opt.Cache; c.folder == "" {
		if dir, err := os.UserCacheDir(); err == nil {
			c.folder = filepath.Join(dir, "sluice", "kernels")
		}
	}
	return c
}

func (c *compiler) fill(lib uintptr) bool {
	code := [...]string{"CUBIN", "Code"}[c.d.dr.API]
	for _, s := range []struct {
		at   *fn
		name string
	}{
		{&c.f.version, "Version"}, {&c.f.create, "CreateProgram"}, {&c.f.compile, "CompileProgram"}, {&c.f.size, "Get" + code + "Size"}, {&c.f.get, "Get" + code},
		{&c.f.logSize, "GetProgramLogSize"}, {&c.f.log, "GetProgramLog"}, {&c.f.destroy, "DestroyProgram"},
	} {
		p, err := purego.Dlsym(lib, c.prefix+s.name)
		if err != nil {
			return false
		}
		*s.at = fn(p)
	}
	return true
}

// known5 are the architectures that the compiler of HIP 5 has what it needs for.
// Of others it does not say so: it ends the process.
var known5 = []string{"gfx803", "gfx900", "gfx906", "gfx908", "gfx90a", "gfx1010", "gfx1011", "gfx1012", "gfx1030", "gfx1031", "gfx1032", "gfx1034"}

// options are those of the compiler; name is "" for what all types share, "dense"
// for the steps that are no products with matrices, else a type's number, for groups in
// one launch with "group" before it.
func (c *compiler) options(name string) []string {
	var o []string
	if c.d.dr.API == CUDA {
		o = []string{"--gpu-architecture=" + c.d.Arch, "--fmad=false", "-DCUDA"}
	} else {
		o = []string{"--offload-arch=" + c.d.Arch, "-O3", "-ffp-contract=off", "-DHIP"}
	}
	return append(o, define(name)...)
}

// define is what the kernels of a module are compiled with.
func define(module string) []string {
	switch module {
	case "":
		return nil
	case "dense":
		return []string{"-DDENSE"}
	}
	if t, ok := strings.CutPrefix(module, "group"); ok {
		return []string{"-DGROUP", "-DTYPE=" + t}
	}
	return []string{"-DTYPE=" + module}
}

// module gives a device's module of kernels, compiled once.
func (d *Device) module(name string) (uintptr, error) {
	if m, ok := d.modules[name]; ok {
		return m, nil
	}
	c := d.compiler
	if d.dr.API == HIP && d.dr.Version/10000000 <= 5 && !slices.Contains(known5, d.Arch) {
		return 0, fmt.Errorf("hip: %w: the compiler of HIP %d.%d does not know %s (%s): install ROCm 6 or later, or run with --backend vulkan",
			ErrUnfit, d.dr.Version/10000000, d.dr.Version/100000%100, d.Arch, d.Name)
	}
	var first error
	if c.lib != 0 {
		code, err := c.code(name)
		if err == nil {
			var m uintptr
			if m, err = d.loadModule(name, code); err == nil {
				return m, nil
			}
		}
		if d.lost != nil {
			return 0, err
		}
		first = err
	}
	if d.dr.API == HIP {
		if first == nil {
			first = errors.New("no libhiprtc was found, which compiles kernels")
		}
		return 0, fmt.Errorf("hip: %w: no kernels for %s: %w: install ROCm's hiprtc, or run with --backend vulkan", ErrUnfit, d.Arch, first)
	}
	ptx, err := shaders.PTX(name)
	if err != nil {
		return 0, fmt.Errorf("cuda: %w", err)
	}
	m, err := d.loadModule(name, append(ptx, 0))
	var e *Error
	if errors.As(err, &e) && e.refusesKernels() {
		err = fmt.Errorf("cuda: %w: %s takes no kernels: %w", ErrUnfit, d.Name, errors.Join(err, first))
	}
	return m, err
}

func (d *Device) loadModule(name string, code []byte) (uintptr, error) {
	w := d.dr.words
	var p pins
	defer p.Unpin()
	if err := d.check("load of kernels", d.dr.f.module.call(addr(&w.out[0]), p.of(code))); err != nil {
		return 0, err
	}
	m := uintptr(w.out[0])
	d.modules[name] = m
	return m, nil
}

// code compiles, or takes from the cache what was compiled before.
func (c *compiler) code(name string) ([]byte, error) {
	options := c.options(name)
	h := sha256.Sum256([]byte(strings.Join(append(options, c.version, shaders.GPU), "\n")))
	path := filepath.Join(c.folder, fmt.Sprintf("%x.%s", h[:16], c.d.Arch))
	if c.folder != "" {
		if b, err := os.ReadFile(path); err == nil && len(b) > sha256.Size {
			sum := sha256.Sum256(b[sha256.Size:])
			if bytes.Equal(sum[:], b[:sha256.Size]) {
				return b[sha256.Size:], nil
			}
		}
	}
	code, err := c.compile(options)
	if err != nil || c.folder == "" {
		return code, err
	}
	sum := sha256.Sum256(code)
	c.keep(path, append(sum[:], code...))
	return code, nil
}

// keep writes to the cache, whole or not at all. Whatever fails, the next run
// compiles again.
func (c *compiler) keep(path string, b []byte) {
	if os.MkdirAll(c.folder, 0o755) != nil {
		return
	}
	f, err := os.CreateTemp(c.folder, ".new-*")
	if err != nil {
		return
	}
	_, err = f.Write(b)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
	}
}

// compile runs the compiler over the source.
func (c *compiler) compile(options []string) ([]byte, error) {
	w := c.d.dr.words
	failed := func(call string, code int) error {
		if code == 0 {
			return nil
		}
		return fmt.Errorf("%s of %s: error %d", call, c.d.Compiler.File, code)
	}
	var p pins
	defer p.Unpin()
	if err := failed("program", c.f.create.call(addr(&w.out[0]), p.text(shaders.GPU), p.text("gpu.cu"), 0, 0, 0)); err != nil {
		return nil, err
	}
	program := uintptr(w.out[0])
	defer func() {
		w.more[0] = uint64(program)
		c.f.destroy.call(addr(&w.more[0]))
	}()
	list := make([]uintptr, len(options))
	for i, o := range options {
		list[i] = p.text(o)
	}
	p.Pin(&list[0])
	if code := c.f.compile.call(program, uintptr(len(list)), addr(&list[0])); code != 0 {
		return nil, fmt.Errorf("%s cannot compile the kernels for %s (error %d): %s", c.d.Compiler.File, c.d.Arch, code, c.read(program))
	}
	if err := failed("size of code", c.f.size.call(program, addr(&w.out[0]))); err != nil {
		return nil, err
	}
	code := make([]byte, w.out[0])
	if len(code) == 0 {
		return nil, fmt.Errorf("%s made no code for %s", c.d.Compiler.File, c.d.Arch)
	}
	err := failed("code", c.f.get.call(program, p.of(code)))
	return code, err
}

// read is the first line of the log that speaks of an error.
func (c *compiler) read(program uintptr) string {
	w := c.d.dr.words
	if c.f.logSize.call(program, addr(&w.out[0])) != 0 || w.out[0] == 0 {
		return "no log"
	}
	var p pins
	defer p.Unpin()
	log := make([]byte, w.out[0])
	c.f.log.call(program, p.of(log))
	for line := range strings.Lines(string(log)) {
		if strings.Contains(line, "error") {
			return strings.TrimSpace(line)
		}
	}
	return "no error in its log"
}

// pins are what lies on the Go heap and foreign code reads or writes: from the time
// that its address is taken to unpin it stays, and stays where it is. Without that the
// collector may take it during a call, and a stack that grows may move it before.
type pins struct{ runtime.Pinner }

func (p *pins) of(b []byte) uintptr {
	p.Pin(&b[0])
	return addr(&b[0])
}

// text is the address of s as C takes it.
func (p *pins) text(s string) uintptr { return p.of(append([]byte(s), 0)) }

// kernel gives a kernel of a module.
func (d *Device) kernel(module, name string) (function, error) {
	if f, ok := d.funcs[name]; ok {
		return f, nil
	}
	defer d.enter()()
	m, err := d.module(module)
	if err != nil {
		return function{}, err
	}
	w := d.dr.words
	var p pins
	defer p.Unpin()
	if err := d.check("kernel "+name, d.dr.f.function.call(addr(&w.out[0]), m, p.text(name))); err != nil {
		return function{}, err
	}
	f := function{handle: uintptr(w.out[0])}
	if d.units > 0 {
		if err := d.check("occupancy", d.dr.f.occupancy.call(addr(&w.number), f.handle, threads, 0)); err != nil {
			return function{}, err
		}
		f.resident = int(w.number)
	}
	d.funcs[name] = f
	return f, nil
}
