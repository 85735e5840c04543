package gpu

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/ebitengine/purego"

	"sluice/backends"
	"sluice/backends/backendtest"
	"sluice/backends/cpu"
	fakes "sluice/backends/gpu/fake"
	"sluice/internal/quant"
)

// A fake is the library of package fake.
type fake struct {
	path string
	lib  uintptr
}

var buildFake = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "sluice-fake")
	if err != nil {
		return "", err
	}
	_, err = fakes.Build(dir, types)
	return dir, err
})

func TestMain(m *testing.M) {
	code := m.Run()
	if dir, err := buildFake(); err == nil || dir != "" {
		os.RemoveAll(dir)
	}
	os.Exit(code)
}

func fakeDriver(t *testing.T) *fake {
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("needs gcc, which compiles the kernels for this machine")
	}
	dir, err := buildFake()
	if err != nil {
		t.Fatal(err)
	}
	f := &fake{path: filepath.Join(dir, "libcuda.so.1")}
	if f.lib, err = purego.Dlopen(f.path, purego.RTLD_NOW|purego.RTLD_LOCAL); err != nil {
		t.Fatal(err)
	}
	f.device(13000, "gfx1030", 1)
	return f
}

func (f *fake) call(name string, args ...uintptr) int {
	p, err := purego.Dlsym(f.lib, name)
	if err != nil {
		panic(err)
	}
	return fn(p).call(args...)
}

func (f *fake) device(version int, arch string, count int) {
	var p pins
	defer p.Unpin()
	f.call("fakeDevice", uintptr(version), p.text(arch), uintptr(count))
}

// fail makes a call of a name fail, after so many that do not.
func (f *fake) fail(call string, after, code int) {
	var p pins
	defer p.Unpin()
	f.call("fakeFail", p.text(call), uintptr(after), uintptr(code))
}

func (f *fake) live() int     { return f.call("fakeLive") }
func (f *fake) compiled() int { return f.call("fakeCompiled") }

func (f *fake) open(t *testing.T, a API) *Driver {
	t.Helper()
	dr, err := open(a, []string{f.path}, []string{f.path})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(dr.Close)
	return dr
}

// onFake opens a fake device with experts of one layer, 5, and the plain kernels.
func onFake(t *testing.T, a API, l backends.HeldLayer, k, most int) (*fake, *Device, *experts, *cpu.Backend) {
	t.Helper()
	f := fakeDriver(t)
	d, err := f.open(t, a).Open(0, Options{Cache: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	e, err := d.newExperts(map[int]backends.HeldLayer{5: l}, k, most)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	ref, err := cpu.New(cpu.Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ref.Close() })
	return f, d, e, ref
}

var small = backends.HeldLayer{Types: [3]quant.Type{quant.Q5_0, quant.Q5_0, quant.Q4_K}, Dim: 256, FF: 256}

// atOnce is a layer whose groups of one position are a launch or two.
var atOnce = backends.HeldLayer{Types: [3]quant.Type{quant.Q8_0, quant.Q8_0, quant.Q4_K}, Dim: 256, FF: 256}

// Every failure of the driver is an error that says what to do, and leaves nothing
// behind.
func TestFailures(t *testing.T) {
	f := fakeDriver(t)
	type failure struct {
		call  string
		after int
		code  int
		want  string
		lost  bool
	}
	fails := func(l backends.HeldLayer, c failure) {
		name := fmt.Sprintf("%v: %s %d after %d", l.Types, c.call, c.code, c.after)
		f.fail(c.call, c.after, c.code)
		err := work(t, f, l)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
		var e *Error
		if errors.As(err, &e) && e.lost() != c.lost {
			t.Errorf("%s: lost is %v, want %v", name, e.lost(), c.lost)
		}
		f.fail("", 0, 0)
		if n := f.live(); n != 0 {
			t.Errorf("%s: %d things are left", name, n)
		}
	}
	for _, c := range []failure{
		{"init", 0, 100, "found no device", false},
		{"init", 0, 803, "another version", false},
		{"context", 0, 2, "lower --vram", false},
		{"allocate", 1, 2, "lower --vram", false},
		{"pin", 1, 2, "pinned host memory", false},
		{"copy", 0, 719, "lost the device", true},
		{"launch", 1, 2, "found no memory", false},
		{"launch", 3, 719, "lost the device", true},
		{"launch", 17, 719, "lost the device", true}, // while a graph is recorded
		{"launch", 20, 700, "lost the device", true}, // of the graph
		{"synchronize", 1, 702, "lost the device", true},
		{"synchronize", 2, 719, "lost the device", true},
		{"capture", 0, 900, "error 900", false},
	} {
		fails(small, c)
	}
	for _, c := range []failure{
		{"launch", 11, 719, "lost the device", true}, // gate and up
		{"launch", 12, 700, "lost the device", true}, // down
		{"launch", 14, 2, "found no memory", false},
		{"synchronize", 2, 719, "lost the device", true},
	} {
		fails(atOnce, c)
	}
	if err := errors.Join(work(t, f, small), work(t, f, atOnce)); err != nil {
		t.Errorf("after all failures: %v", err)
	}
}

// work does all that an engine does with a device.
func work(t *testing.T, f *fake, l backends.HeldLayer) (err error) {
	dr, err := open(CUDA, []string{f.path}, []string{f.path})
	if err != nil {
		return err
	}
	defer dr.Close()
	d, err := dr.Open(0, Options{Cache: t.TempDir()})
	if err != nil {
		return err
	}
	defer d.Close()
	e, err := d.newExperts(map[int]backends.HeldLayer{5: l}, 2, 4)
	if err != nil {
		return err
	}
	defer e.Close()
	g := backendtest.NewHeldGroup(rand.New(rand.NewPCG(1, 2)), l, 1, 2, 2)
	for i, x := range g.All {
		if err := e.Upload(5, i, [3][]byte{x.Gate.Data, x.Up.Data, x.Down.Data}); err != nil {
			return err
		}
	}
	if err := e.Settle(); err != nil {
		return err
	}
	for range 2 {
		copy(e.Input(1, l.Dim), g.X)
		if err := e.Start(5, []backends.HeldJob{{Expert: 0, Rows: []int32{0}}, {Expert: 1, Rows: []int32{1}}}, 2, 1, g.Act, g.Bias); err != nil {
			return err
		}
		if _, err := e.Finish(); err != nil {
			return err
		}
	}
	return nil
}

// What cannot be pinned is counted, and is uploaded from plain memory.
func TestPinning(t *testing.T) {
	f := fakeDriver(t)
	d, err := f.open(t, CUDA).Open(0, Options{Cache: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	for _, limit := range []int{stagingSize + 1<<20, 1 << 20, 1 << 30} {
		f.call("fakePinned", uintptr(limit))
		before := d.unpinned
		e, err := d.newExperts(map[int]backends.HeldLayer{5: small}, 2, 4)
		if err != nil {
			t.Fatal(err)
		}
		u := e.Memory()
		pinned, asked, failures := u.Pinned, u.PinAsked, u.Unpinned
		if want := int64(2 - limit>>20/32); limit < 1<<30 && failures-before != want || limit == 1<<30 && failures != before {
			t.Errorf("limit %d: %d failures", limit, failures-before)
		}
		if failures == before && float64(pinned) > 1.02*float64(asked) || pinned > asked {
			t.Errorf("limit %d: %d bytes are pinned of %d", limit, pinned, asked)
		}
		ref, err := cpu.New(cpu.Options{Threads: 1})
		if err != nil {
			t.Fatal(err)
		}
		g := backendtest.NewHeldGroup(rand.New(rand.NewPCG(3, 4)), small, 3, 2, 2)
		g.Upload(t, e)
		g.Run(t, ref, e, fmt.Sprint("limit ", limit))
		ref.Close()
		e.Close()
	}
}

// Experts take the place of others while what they were is still under way.
func TestReplace(t *testing.T) {
	_, _, e, ref := onFake(t, HIP, small, 2, 4)
	rng := rand.New(rand.NewPCG(5, 6))
	g := backendtest.NewHeldGroup(rng, small, 3, 2, 2)
	g.Upload(t, e)
	g.Run(t, ref, e, "before")
	used := e.Experts.Usage()
	g.Reweigh(rng)
	for i, x := range g.All {
		if err := e.Replace(5, i, 5, i, [3][]byte{x.Gate.Data, x.Up.Data, x.Down.Data}); err != nil {
			t.Fatal(err)
		}
	}
	if u := e.Experts.Usage(); u.Payload != used.Payload || u.Allocated != used.Allocated || u.Experts != 2 || u.Driver != u.Allocated {
		t.Errorf("after: %+v, before: %+v", u, used)
	}
	g.Run(t, ref, e, "after")
}

// Kernels are compiled once for an architecture, and again when what is kept of
// them is damaged. Without a compiler CUDA takes those of the binary.
func TestCache(t *testing.T) {
	f := fakeDriver(t)
	cache := t.TempDir()
	use := func(a API, opt Options, compilers ...string) (compiled int, err error) {
		opt.Cache = cache
		before := f.compiled()
		dr, err := open(a, []string{f.path}, compilers)
		if err != nil {
			t.Fatal(err)
		}
		defer dr.Close()
		d, err := dr.Open(0, opt)
		if err != nil {
			return f.compiled() - before, err
		}
		return f.compiled() - before, d.Close()
	}
	want := func(what string, got int, err error, want int, words string) {
		t.Helper()
		if got != want || words == "" && err != nil || words != "" && (err == nil || !strings.Contains(err.Error(), words)) {
			t.Errorf("%s: %d compiled, %v; want %d, %q", what, got, err, want, words)
		}
	}
	n, err := use(CUDA, Options{}, f.path)
	want("first", n, err, 2, "")
	n, err = use(CUDA, Options{}, f.path)
	want("second", n, err, 0, "")
	files, _ := filepath.Glob(filepath.Join(cache, "*"))
	if len(files) != 2 {
		t.Fatalf("the cache holds %v", files)
	}
	os.WriteFile(files[0], []byte("damaged, and longer than the hash that stands before the code"), 0o644)
	n, err = use(CUDA, Options{}, f.path)
	want("damaged", n, err, 1, "")
	n, err = use(CUDA, Options{Embedded: true}, f.path)
	want("embedded", n, err, 0, "")
	n, err = use(CUDA, Options{}, "libnone.so")
	want("no compiler", n, err, 0, "")
	n, err = use(HIP, Options{}, "libnone.so")
	want("HIP without a compiler", n, err, 0, "hiprtc")
	f.fail("compile", 0, 6)
	cache = t.TempDir()
	n, err = use(CUDA, Options{}, f.path)
	want("cannot compile: embedded, then compiled", n, err, 1, "")
	f.fail("compile", 0, 6)
	n, err = use(HIP, Options{}, f.path)
	want("HIP cannot compile", n, err, 0, "error: as asked")
	f.device(50221153, "gfx1100", 1)
	n, err = use(HIP, Options{}, f.path)
	want("an architecture that the compiler of HIP 5 would abort at", n, err, 0, "does not know gfx1100")
	f.device(60000000, "gfx90a:sramecc+:xnack-", 1)
	n, err = use(HIP, Options{}, f.path)
	want("HIP 6", n, err, 2, "")
}

// A library that is no driver, or too old, is refused by the names that it lacks;
// one without devices says so. Newer ones have other names for a function.
func TestLibraries(t *testing.T) {
	for _, c := range []struct{ lib, want string }{{"libnone.so", "libnone.so"}, {"libc.so.6", "lacks cuInit"}} {
		if _, err := open(CUDA, []string{c.lib}, nil); !errors.Is(err, ErrNoDriver) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.lib, err, c.want)
		}
	}
	f := fakeDriver(t)
	f.device(13000, "", 0)
	if _, err := open(CUDA, []string{f.path}, nil); !errors.Is(err, ErrNoDriver) || !strings.Contains(err.Error(), "no device") {
		t.Errorf("without devices: %v", err)
	}
	f.device(13000, "", 1)
	dr := f.open(t, CUDA)
	info, err := os.Stat(f.path)
	if err != nil {
		t.Fatal(err)
	}
	if l := dr.Library; l.Name != f.path || l.File != f.path || l.Size != info.Size() || len(l.Hash) != 64 {
		t.Errorf("the library is %v", l)
	}
	if p := dr.Devices()[0]; p.Arch != "sm_90" || p.Name != "Fake 0" || p.Memory != 1<<30 || p.Address != "0000:3d:00.0" {
		t.Errorf("the device is %+v", p)
	}
}

// Debian's HIP runtime has every function of the table, and without a device it is
// refused politely.
func TestHIPRuntime(t *testing.T) {
	_, lib, err := load(HIP.libraries())
	if err != nil {
		t.Skip("needs libamdhip64 (package libamdhip64-5)")
	}
	var f functions
	if missing := f.fill(HIP, lib); len(missing) > 0 {
		t.Errorf("it lacks %v", missing)
	}
	d, err := Open(HIP)
	if err == nil {
		d.Close()
		return
	}
	if !errors.Is(err, ErrNoDriver) || !strings.Contains(err.Error(), "found no device") {
		t.Errorf("without a device: %v", err)
	}
}

// storm has the collector run all the time until the test ends, and other bytes take the
// place of what it frees.
func storm(t *testing.T) {
	stop, ended := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() {
		close(stop)
		<-ended
	})
	go func() {
		defer close(ended)
		var kept [64][]byte
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			kept[i%64] = bytes.Repeat([]byte{'x'}, 8+i%200)
			if i%64 == 0 {
				runtime.GC()
			}
		}
	}()
}

// Debian's hiprtc compiles the kernels for what it knows, without a GPU.
func TestHIPCompiler(t *testing.T) {
	if _, _, err := load([]string{"libamdhip64.so.5"}); err != nil {
		t.Skip("needs libamdhip64.so.5 (package libamdhip64-5)")
	}
	storm(t)
	f := fakeDriver(t)
	f.device(50221153, "gfx1030", 1)
	dr, err := open(HIP, []string{f.path}, []string{"libamdhip64.so.5"})
	if err != nil {
		t.Fatal(err)
	}
	defer dr.Close()
	d, err := dr.Open(0, Options{Cache: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	for name := range groupThreads {
		if _, err := d.kernel("dense", name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, typ := range []quant.Type{quant.Q4_K, quant.MXFP4, quant.F8_128} {
		if _, _, _, err := d.rows(typ, 1); err != nil {
			t.Errorf("%v: %v", typ, err)
		}
	}
}
