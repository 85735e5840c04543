package engine

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sluice/backends"
	native "sluice/backends/gpu"
	"sluice/backends/gpu/fake"
)

// Experts that CUDA or HIP hold give the bits of the CPU, with none, some and all of
// them in the device's memory, and so do all other steps there. The drivers are a fake
// where there is no GPU; a process finds it only if it starts with it on its path.
func TestSameBitsByDriver(t *testing.T) {
	if os.Getenv("SLUICE_FAKE") == "" {
		for _, api := range []native.API{native.CUDA, native.HIP} {
			if d, err := native.Open(api); err == nil {
				d.Close()
				sameBitsBy(t, api.String())
			}
		}
		if _, err := exec.LookPath("gcc"); err != nil {
			t.Skip("needs gcc, which compiles the kernels for this machine")
		}
		dir := t.TempDir()
		if _, err := fake.Build(dir, native.Types()); err != nil {
			t.Fatal(err)
		}
		for _, apart := range []string{"", "FAKE_APART=1"} { // the devices reach each other, or do not
			c := exec.Command(os.Args[0], "-test.run", "^TestSameBitsByDriver$", "-test.v")
			c.Env = append(os.Environ(), "SLUICE_FAKE=1", "LD_LIBRARY_PATH="+dir, "XDG_CACHE_HOME="+dir, "FAKE_DEVICES=2", apart)
			out, err := c.CombinedOutput()
			if err != nil || !strings.Contains(string(out), "--- PASS") {
				t.Errorf("with a fake driver, %q: %v\n%s", apart, err, out)
			}
		}
		return
	}
	for _, maker := range []string{"cuda", "hip"} {
		if os.Getenv("FAKE_APART") == "" {
			sameBitsBy(t, maker)
		}
	}
	pair(t)
	// Auto takes a maker's own driver.
	e := open(t, Options{Path: demo, Cap: 4, Ctx: 64, Threads: 1, VRAM: Budget{Experts: 2}})
	if b := e.Settings.Map()["backend"].Value; b != "cuda" {
		t.Errorf("auto is %v", b)
	}
	for _, name := range []string{"driver", "kernels"} {
		if _, ok := e.Settings.Map()[name]; !ok {
			t.Errorf("the header has no %s", name)
		}
	}
}

func sameBitsBy(t *testing.T, maker string) {
	for _, path := range []string{light(demo), qwen} {
		e := open(t, Options{Path: path, Cap: 1, Backend: "cpu"})
		prompt := heldout(t, e, 6)
		plain := Options{Path: path, Cap: 4, Threads: 1, Ctx: 64, Chunk: 16, Backend: "cpu"}
		want := ask(t, plain, prompt, 3)
		for _, o := range []Options{{VRAM: Budget{Experts: 8}}, {VRAM: Budget{Experts: 8}, KeepHost: true}, {VRAM: Budget{Experts: 64}}, {},
			{GPUDense: DenseOn, NoVRAM: true}, {GPUDense: DenseOn, VRAM: Budget{Experts: 8}}, {GPUDense: DenseOn}} {
			o.Path, o.Cap, o.Threads, o.Ctx, o.Chunk, o.Devices = plain.Path, plain.Cap, plain.Threads, plain.Ctx, plain.Chunk, maker+":0"
			got := ask(t, o, prompt, 3)
			name := fmt.Sprintf("%s by %s with %v in VRAM, dense %v", path, maker, o.VRAM, o.GPUDense)
			same(t, name, got.logits, want.logits)
			if u := got.usage; !o.KeepHost && u.DirectBytes != u.UploadBytes || o.KeepHost && u.DirectBytes != 0 || u.Unpinned != 0 {
				t.Errorf("%s: %+v", name, u)
			}
			if got.witness != want.witness || !slices.Equal(got.text, want.text) {
				t.Errorf("%s: %v, want %v", name, got.text, want.text)
			}
		}
	}
}

// pair splits experts between two devices of different kinds, as --devices 0,1 does:
// each computes its own, and the bits stay. With all the rest on the first the second
// takes its input from there.
func pair(t *testing.T) {
	path := light(demo)
	e := open(t, Options{Path: path, Cap: 1, Backend: "cpu"})
	prompt := heldout(t, e, 6)
	plain := Options{Path: path, Cap: 4, Threads: 1, Ctx: 64, Chunk: 16, Backend: "cpu"}
	want := ask(t, plain, prompt, 3)
	for _, c := range []struct {
		backend, devices string
		vram             Budget
		dense            GPUDense
	}{
		{"cuda", "0,1", Budget{Experts: 24}, DenseOff}, {"", "cuda:1,cuda:0", Budget{}, DenseOff}, {"", "hip:0,hip:1", Budget{Experts: 9}, DenseOff},
		{"cuda", "0,1", Budget{Experts: 24}, DenseOn}, {"", "hip:1,hip:0", Budget{}, DenseOn},
	} {
		o := plain
		o.Backend, o.Devices, o.VRAM, o.GPUDense = c.backend, c.devices, c.vram, c.dense
		p, err := Prepare(o)
		if err != nil {
			t.Fatal(err)
		}
		two, err := p.Load(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		logits, _ := allLogits(t, two, prompt)
		same(t, c.devices, logits, want.logits)
		all := two.devices.all
		if len(all) != 2 || all[0].experts.Usage().Experts == 0 != (c.dense == DenseOn) || all[1].experts.Usage().Experts == 0 { // there is more room on the one that computes nothing else
			t.Errorf("%s: not both hold experts", c.devices)
		}
		u := two.Usage()
		if n := c.vram.Experts; n > 0 && u.Experts != int64(n) || u.Experts != int64(len(two.VRAM)) || u.Driver != u.Allocated || u.DirectBytes != u.UploadBytes {
			t.Errorf("%s: %+v, of %d experts", c.devices, u, len(two.VRAM))
		}
		said := strings.Join(two.Said(), "\n")
		for i, name := range []string{all[0].name, all[1].name} {
			if i == 0 && c.dense == DenseOn {
				continue
			}
			if !strings.Contains(said, "vram of "+name) {
				t.Errorf("%s: nothing is said of %s in %q", c.devices, name, said)
			}
		}
		st := two.Cache.Stats()
		if st.Hits.VRAM == 0 || st.Hits.VRAM+st.Hits.Pinned+st.Hits.LRU+st.Misses != st.RoutedExperts {
			t.Errorf("%s: %+v", c.devices, st)
		}
		if err := two.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := Prepare(Options{Path: path, Cap: 4, Ctx: 64, Devices: "cuda:0,vulkan:0"}); err == nil || !strings.Contains(err.Error(), "name those of cuda or those of vulkan") {
		t.Errorf("devices of two drivers: %v", err)
	}
}

// What names no device of this machine is refused in words; where nothing was asked
// for, the CPU computes.
func TestDriverWords(t *testing.T) {
	for _, c := range []struct {
		o    Options
		want string
	}{
		{Options{Devices: "metal:0"}, `"metal:0" is of no backend`},
		{Options{Devices: "cuda:0,vulkan:0"}, "name those of cuda or those of vulkan"},
		{Options{Devices: "cuda:0", Backend: "vulkan"}, "not of --backend vulkan"},
		{Options{Backend: "opencl"}, "use auto, cpu, vulkan, cuda or hip"},
	} {
		c.o.Path, c.o.Cap, c.o.Ctx = demo, 4, 64
		if _, err := Prepare(c.o); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v, want %q", c.o, err, c.want)
		}
	}
	if d, err := native.Open(native.CUDA); err == nil {
		d.Close()
		return
	}
	e := open(t, Options{Path: demo, Cap: 4, Ctx: 64, Backend: "cuda"})
	if s := strings.Join(e.Notices, "\n"); !strings.Contains(s, "libcuda.so.1") || !strings.Contains(s, "the CPU computes") {
		t.Errorf("without a driver: %s", s)
	}
	if _, err := Prepare(Options{Path: demo, Cap: 4, Ctx: 64, Backend: "cuda", VRAM: Budget{Experts: 1}}); err == nil || !strings.Contains(err.Error(), "libcuda.so.1") {
		t.Errorf("--vram without a driver: %v", err)
	}
}

// Every family has the bits of the CPU when the device computes all but experts in
// RAM: its attention, its norms, its states.
func TestFamiliesByDriver(t *testing.T) {
	if os.Getenv("SLUICE_FAKE") == "" {
		if _, err := exec.LookPath("gcc"); err != nil {
			t.Skip("needs gcc, which compiles the kernels for this machine")
		}
		dir := t.TempDir()
		if _, err := fake.Build(dir, native.Types()); err != nil {
			t.Fatal(err)
		}
		c := exec.Command(os.Args[0], "-test.run", "^TestFamiliesByDriver$", "-test.v")
		c.Env = append(os.Environ(), "SLUICE_FAKE=1", "LD_LIBRARY_PATH="+dir, "XDG_CACHE_HOME="+dir)
		out, err := c.CombinedOutput()
		if err != nil || !strings.Contains(string(out), "--- PASS") {
			t.Errorf("with a fake driver: %v\n%s", err, out)
		}
		return
	}
	familiesBy(t, "cuda:0", 300)
}

// The same by Vulkan, whose launches go to the device many at a time.
func TestFamiliesByVulkan(t *testing.T) {
	needsVulkan(t)
	familiesBy(t, "vulkan:0", 30)
}

// familiesBy runs every family with all on a device, which takes more than so many
// launches, and on the CPU.
func familiesBy(t *testing.T, device string, launches int64) {
	models, err := filepath.Glob("testdata/*.gguf")
	if err != nil || len(models) < 10 {
		t.Fatalf("%d models: %v", len(models), err)
	}
	for i, path := range models {
		o := Options{Path: path, Cap: 2, Threads: 1, Ctx: 48, Chunk: 7, NoText: true, Backend: "cpu", KV: backends.KVType(i % 2)}
		run := func(o Options) []float32 {
			p, err := Prepare(o)
			if err != nil {
				t.Fatalf("%s: %v", path, err)
			}
			e, err := p.Load(t.Context())
			if err != nil {
				t.Fatalf("%s: %v", path, err)
			}
			ids := make([]int32, 20)
			for j := range ids {
				ids[j] = int32((j*j*37 + 11) % e.Spec.Vocab)
			}
			logits, hidden := allLogits(t, e, ids)
			e.Model.Rewind(9) // and go on from there, one by one
			for _, id := range ids[9:12] {
				if err := e.Model.Forward(t.Context(), []int32{id}); err != nil {
					t.Fatal(err)
				}
				row := make([]float32, e.Model.Vocab)
				if err := e.Model.Logits(row, []int32{0}); err != nil {
					t.Fatal(err)
				}
				logits = append(logits, row...)
			}
			if n := e.Usage().Launches; n > launches != (o.GPUDense == DenseOn) {
				t.Errorf("%s: %d launches", path, n)
			}
			if err := e.Close(); err != nil {
				t.Error(err)
			}
			return append(logits, hidden...)
		}
		want := run(o)
		o.Backend, o.Devices, o.GPUDense, o.VRAM = "", device, DenseOn, Budget{Experts: 3}
		same(t, path, run(o), want)
	}
}
