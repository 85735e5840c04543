package doctor

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"sluice/backends/cpu"
	"sluice/internal/pci"
)

const demo = "../../models/demo-q4_k_m.gguf"

// root writes files and links under a new folder. A text that begins with -> is
// a link.
func root(t testing.TB, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		name = filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o777); err != nil {
			t.Fatal(err)
		}
		var err error
		if to, ok := strings.CutPrefix(text, "->"); ok {
			err = os.Symlink(to, name)
		} else {
			err = os.WriteFile(name, []byte(text), 0o666)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// merge is all the files of several trees.
func merge(trees ...map[string]string) map[string]string {
	all := map[string]string{}
	for _, tree := range trees {
		for name, text := range tree {
			all[name] = text
		}
	}
	return all
}

// healthy is a machine without problems.
var healthy = map[string]string{
	"/proc/sys/kernel/osrelease":                           "6.12.1\n",
	"/proc/sys/kernel/io_uring_disabled":                   "0\n",
	"/proc/pressure/memory":                                "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
	"/proc/cpuinfo":                                        "processor\t: 0\nmodel name\t: Some CPU 9000\nflags\t\t: fpu sse avx2 f16c avx512f bmi2\n",
	"/proc/meminfo":                                        "MemTotal:       65000000 kB\nMemFree: 1 kB\nMemAvailable:   48000000 kB\nSwapTotal: 1000000 kB\nSwapFree: 1000000 kB\nHugePages_Total: 4\nHugePages_Free: 3\nHugepagesize: 2048 kB\n",
	"/proc/self/status":                                    "CapEff:\t0000000000000000\nCpus_allowed_list:\t0-2,6\n",
	"/proc/self/limits":                                    "Limit                     Soft Limit           Hard Limit           Units     \nMax locked memory         unlimited            unlimited            bytes     \nMax open files            1024                 4096                 files     \n",
	"/sys/kernel/mm/transparent_hugepage/enabled":          "always [madvise] never\n",
	"/sys/devices/system/cpu/cpu0/topology/core_cpus_list": "0,2\n",
	"/sys/devices/system/cpu/cpu2/topology/core_cpus_list": "0,2\n",
	"/sys/devices/system/cpu/cpu1/topology/core_cpus_list": "1\n",
	"/usr/lib/x86_64-linux-gnu/libvulkan.so.1":             "",
	"/etc/ld.so.conf":                                      "include /etc/ld.so.conf.d/*.conf # all of them\n",
	"/etc/ld.so.conf.d/10.conf":                            "/opt/driver\n",
	"/opt/driver/libcuda.so.1":                             "",
}

// examine looks at a tree and gives the problems' texts, without those that
// depend on where the test runs.
func examine(t *testing.T, o Options) (*Report, []string) {
	t.Helper()
	r, err := Examine(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	var texts []string
	for _, p := range r.Problems {
		if s := p.String(); !strings.Contains(s, "io_uring is not in this build") && !strings.Contains(s, "io_uring does not work here") && !strings.Contains(s, "lacks AVX2") {
			texts = append(texts, s)
		}
	}
	return r, texts
}

func TestHealthy(t *testing.T) {
	r, problems := examine(t, Options{Root: root(t, healthy)})
	if len(problems) > 0 {
		t.Errorf("problems: %q", problems)
	}
	c, m := r.CPU, r.Memory
	if c.Name != "Some CPU 9000" || c.Cores != 3 || c.CPUs != 4 || !slices.Equal(c.Features, []string{"avx2", "f16c", "avx512f"}) || c.Kernels == "" {
		t.Errorf("%+v", c)
	}
	if m.TotalBytes != 65000000<<10 || m.AvailableBytes != 48000000<<10 || m.AvailableFrom != "MemAvailable" || m.LockBytes != -1 || m.OpenFiles != 1024 ||
		m.Transparent != "madvise" || m.HugePages != 4 || m.HugeFree != 3 || m.SwapUsedBytes != 0 || m.SwapBytes != 1000000<<10 {
		t.Errorf("%+v", m)
	}
	if r.Kernel.Release != "6.12.1" || !r.Kernel.Pressure || r.Build.Go == "" {
		t.Errorf("%+v %+v", r.Kernel, r.Build)
	}
	for i, want := range []string{"/usr/lib/x86_64-linux-gnu/libvulkan.so.1", "", "/opt/driver/libcuda.so.1"} {
		if got := r.Libraries[i]; got.Path != want {
			t.Errorf("%s is at %q, want %q", got.Name, got.Path, want)
		}
	}
	var b bytes.Buffer
	if err := r.Print(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"Some CPU 9000: 3 cores", "66.6 GB, 49.2 GB available (MemAvailable)", "locked memory unlimited, open files 1024", "no device: the CPU computes", "kernel"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("the lines lack %q:\n%s", want, b.String())
		}
	}
	if r.Broken() != 0 || len(r.Problems) == 0 && !strings.HasSuffix(b.String(), "nothing stands in the way\n") {
		t.Errorf("%d broken:\n%s", r.Broken(), b.String())
	}
}

// Each problem is told in words, with what mends it.
func TestProblems(t *testing.T) {
	cgroup := map[string]string{
		"/proc/self/cgroup":                  "0::/\n",
		"/proc/self/mountinfo":               "30 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
		"/sys/fs/cgroup/memory.max":          "3221225472\n",
		"/sys/fs/cgroup/memory.high":         "max\n",
		"/sys/fs/cgroup/memory.current":      "221225472\n",
		"/sys/fs/cgroup/memory.stat":         "inactive_file 0\n",
		"/proc/sys/kernel/io_uring_disabled": "0\n",
	}
	for _, c := range []struct {
		name, file, text string
		with             map[string]string
		wants            []string
	}{
		{name: "no pressure information", file: "/proc/pressure/memory", wants: []string{"! the kernel does not tell of memory pressure", "psi=1"}},
		{"transparent huge pages", "/sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n", nil, []string{"! transparent huge pages are off", "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"}},
		{"locked memory", "/proc/self/limits", "Max locked memory         8388608    8388608   bytes\nMax open files 1024 4096 files\n", nil, []string{"RLIMIT_MEMLOCK, is 8192 KiB", "ulimit -l unlimited"}},
		{"open files", "/proc/self/limits", "Max locked memory         unlimited    unlimited   bytes\nMax open files 20 4096 files\n", nil, []string{"! broken: this process may open 20 files, and needs up to 64: ulimit -n 64"}},
		{"swap", "/proc/meminfo", "MemTotal: 65000000 kB\nMemAvailable: 48000000 kB\nSwapTotal: 2000000 kB\nSwapFree: 1000000 kB\n", nil, []string{"! 1.0 GB of swap are in use", "swapoff -a"}},
		{"cgroup", "/proc/self/cgroup", "0::/\n", cgroup, []string{"! the cgroup /sys/fs/cgroup leaves 3.0 GB of the 49.2 GB", "docker run --memory"}},
		{"no memory information", "/proc/meminfo", "MemTotal: 5 kB\n", nil, []string{"! broken: available memory cannot be found out", "/proc/meminfo has no line MemAvailable"}},
		{"library aside", "/opt/rocm/lib/libamdhip64.so.6", "", nil, []string{"! libamdhip64.so lies where the loader does not look (/opt/rocm/lib/libamdhip64.so.6): echo /opt/rocm/lib > /etc/ld.so.conf.d/hip.conf && ldconfig"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			files := merge(healthy, c.with)
			if files[c.file] = c.text; c.text == "" && c.name == "no pressure information" {
				delete(files, c.file)
			}
			r, problems := examine(t, Options{Root: root(t, files)})
			if len(problems) != 1 {
				t.Fatalf("problems: %q", problems)
			}
			for _, want := range c.wants {
				if !strings.Contains(problems[0], want) {
					t.Errorf("%q lacks %q", problems[0], want)
				}
			}
			if got := strings.HasPrefix(problems[0], "! broken: "); got != (r.Broken() == 1) {
				t.Errorf("%q, and %d are broken", problems[0], r.Broken())
			}
		})
	}
	// What binds is shown with its limit.
	r, _ := examine(t, Options{Root: root(t, merge(healthy, cgroup))})
	if m := r.Memory; m.AvailableBytes != 3e9 || m.AvailableFrom != "/sys/fs/cgroup" || len(m.Limits) != 1 || m.Limits[0].Bytes != 3<<30 {
		t.Errorf("%+v", m)
	}
	// A process that may lock what it likes is not bound by the limit.
	_, problems := examine(t, Options{Root: root(t, merge(healthy, map[string]string{
		"/proc/self/limits": "Max locked memory         8388608    8388608   bytes\nMax open files unlimited unlimited files\n",
		"/proc/self/status": "CapEff:\t0000000000004000\n",
	}))})
	if len(problems) > 0 {
		t.Errorf("problems: %q", problems)
	}
}

// Kernels that were asked for and are not the best are told, as are those that
// this CPU cannot run.
func TestKernels(t *testing.T) {
	o := Options{Root: root(t, healthy), Kernels: cpu.Go}
	r, problems := examine(t, o)
	best, err := cpu.Choose(cpu.Auto)
	if err != nil {
		t.Fatal(err)
	}
	if r.CPU.Kernels != "go" || (len(problems) > 0) != (best > cpu.Go) || best > cpu.Go && !strings.HasPrefix(problems[0], "! the environment variable SLUICE_CPU chooses the kernels go, this CPU runs "+best.String()) {
		t.Errorf("%q, %q", r.CPU.Kernels, problems)
	}
	o.Kernels = cpu.AVX512 + 1
	if r, problems = examine(t, o); r.CPU.Kernels != "" || r.Broken() != 1 || !strings.HasPrefix(problems[0], "! broken: SLUICE_CPU: ") {
		t.Errorf("%q, %q", r.CPU.Kernels, problems)
	}
}

// io_uring that does not work is told with the reason that applies.
func TestIOUring(t *testing.T) {
	drive := func(direct bool, mode string) []Drive {
		return []Drive{{Places: []Place{{"working folder", "/"}}, Direct: direct, Mode: mode, Notices: []string{"storage: words"}}}
	}
	for _, c := range []struct {
		name   string
		r      Report
		want   string
		why    string
		unwell bool
	}{
		{"works", Report{Build: Build{Giouring: true}, Drives: drive(true, ioUringMode)}, "", "", false},
		{"not built", Report{Drives: drive(true, "pread")}, "! io_uring is not in this build, reads are made by a pool of threads instead: build it with make", "storage: words", true},
		{"disabled", Report{Build: Build{Giouring: true}, Kernel: Kernel{IOUring: IOUring{Disabled: "2"}}, Drives: drive(true, "pread")}, "(kernel.io_uring_disabled=2): sysctl -w kernel.io_uring_disabled=0", "storage: words", true},
		{"forbidden", Report{Build: Build{Giouring: true}, Drives: drive(true, "pread")}, "(storage: words): take Linux 5.6 or later, and in a container allow", "storage: words", true},
		{"not tried", Report{Build: Build{Giouring: true}, Drives: drive(false, "pread")}, "", "not tried: no folder that was looked at takes direct reads", false},
	} {
		c.r.ioUring()
		var got string
		if len(c.r.Problems) > 0 {
			got = c.r.Problems[0].String()
		}
		if !strings.Contains(got, c.want) || (got != "") != c.unwell || c.r.Kernel.IOUring.Why != c.why {
			t.Errorf("%s: %q, %+v", c.name, got, c.r.Kernel.IOUring)
		}
	}
}

// A card is a PCI device of a tree: its files, and its lines of BARs.
func card(address, vendor, device, class string, more map[string]string) map[string]string {
	dir := "/sys/devices/pci0000:00/0000:00:01.0/" + address
	files := map[string]string{
		"/sys/bus/pci/devices/" + address: "->../../../devices/pci0000:00/0000:00:01.0/" + address,
		dir + "/vendor":                   vendor + "\n",
		dir + "/device":                   device + "\n",
		dir + "/class":                    class + "\n",
	}
	for name, text := range more {
		files[dir+"/"+name] = text
	}
	return files
}

func bars(mib ...uint64) string {
	var b strings.Builder
	at := uint64(0x7000000000)
	for _, n := range mib {
		fmt.Fprintf(&b, "0x%016x 0x%016x 0x%016x\n", at, at+n<<20-1, 0x14220c)
		at += n << 20
	}
	for range 7 - len(mib) {
		b.WriteString("0x0000000000000000 0x0000000000000000 0x0000000000000000\n")
	}
	return b.String()
}

func TestGPUs(t *testing.T) {
	vram := func(mib int64) string { return fmt.Sprint(mib<<20) + "\n" }
	link := map[string]string{
		"current_link_speed": "2.5 GT/s PCIe\n", "max_link_speed": "16.0 GT/s PCIe\n", "current_link_width": "16\n", "max_link_width": "16\n",
	}
	for _, c := range []struct {
		name  string
		files map[string]string
		want  GPU
		words []string
	}{
		{
			"Resizable BAR is off", card("0000:03:00.0", "0x1002", "0x73bf", "0x030000", merge(link, map[string]string{"resource": bars(256, 2, 1), "mem_info_vram_total": vram(16304)})),
			GPU{Address: "0000:03:00.0", ID: "1002:73bf", Name: "AMD", BAR: 256 << 20, VRAM: 16304 << 20, Link: &pci.Link{Width: 16, MaxWidth: 16, Speed: 2.5, MaxSpeed: 16}},
			[]string{"! warning: only 256 MiB of 16304 MiB VRAM is host-visible: Resizable BAR appears disabled. Enable Resizable BAR in firmware (BIOS/UEFI); the expert tier would land in system RAM and be slow."},
		},
		{
			"Resizable BAR is on, and the ids are known",
			merge(card("0000:03:00.0", "0x1002", "0x73bf", "0x030000", map[string]string{"resource": bars(16384, 2), "mem_info_vram_total": vram(16304), "drm/card0/uevent": ""}),
				map[string]string{
					"/usr/share/misc/pci.ids":   "# ids\n1001  Other\n\t73bf  Wrong\n1002  Some Maker\n\t0001  No\n\t73bf  Navi 21\n\t\t1002 73bf  Sub\n10de  Last\n",
					"/sys/class/drm/card0":      "->../../devices/pci0000:00/0000:00:01.0/0000:03:00.0/drm/card0",
					"/sys/class/drm/card0-DP-1": "",
					"/sys/devices/pci0000:00/0000:00:01.0/0000:03:00.0/drm/card0/device": "->../..",
				}),
			GPU{Card: "card0", Address: "0000:03:00.0", ID: "1002:73bf", Name: "Some Maker Navi 21", BAR: 16384 << 20, VRAM: 16304 << 20}, nil,
		},
		{
			"a small card", card("0000:03:00.0", "0x1002", "0x1", "0x038000", map[string]string{"resource": bars(256), "mem_info_vram_total": vram(256)}),
			GPU{Address: "0000:03:00.0", ID: "1002:1", Name: "AMD", BAR: 256 << 20, VRAM: 256 << 20}, nil,
		},
		{
			"an accelerator whose memory is not told, on four lanes of sixteen above it",
			merge(card("0000:3d:00.0", "0x10de", "0x2335", "0x120000", merge(link, map[string]string{"resource": bars(16, 131072, 32)})), map[string]string{
				"/proc/driver/nvidia/gpus/0000:3d:00.0/information":       "Model: \t\t NVIDIA H200\nIRQ: 5\n",
				"/sys/devices/pci0000:00/0000:00:01.0/current_link_speed": "2.5 GT/s PCIe\n", "/sys/devices/pci0000:00/0000:00:01.0/max_link_speed": "16.0 GT/s PCIe\n",
				"/sys/devices/pci0000:00/0000:00:01.0/current_link_width": "4\n", "/sys/devices/pci0000:00/0000:00:01.0/max_link_width": "16\n",
			}),
			GPU{Address: "0000:3d:00.0", ID: "10de:2335", Name: "NVIDIA H200", BAR: 131072 << 20, Link: &pci.Link{Width: 4, MaxWidth: 16, Speed: 2.5, MaxSpeed: 16}},
			[]string{"! GPU 0000:3d:00.0 runs on 4 of 16 lanes at 2.5 of 16 GT/s: put the card into a slot that has all of its lanes"},
		},
		{
			"a virtual display", card("0000:00:02.0", "0x1af4", "0x1050", "0x030000", map[string]string{"resource": "nonsense\n", "current_link_speed": "Unknown\n", "current_link_width": "0\n"}),
			GPU{Address: "0000:00:02.0", ID: "1af4:1050", Virtual: true}, nil,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, problems := examine(t, Options{Root: root(t, merge(healthy, c.files, card("0000:05:00.0", "0x8086", "0x1572", "0x020000", nil)))})
			if !slices.Equal(problems, c.words) {
				t.Errorf("problems %q, want %q", problems, c.words)
			}
			if len(r.GPUs) != 1 {
				t.Fatalf("%+v", r.GPUs)
			}
			got, _ := json.Marshal(r.GPUs[0])
			want, _ := json.Marshal(c.want)
			if !bytes.Equal(got, want) {
				t.Errorf("got %s, want %s", got, want)
			}
			var b bytes.Buffer
			if err := r.Print(&b); err != nil || !strings.Contains(b.String(), c.want.ID) {
				t.Errorf("%v:\n%s", err, b.String())
			}
		})
	}
}

// disk is the block device of the tree that a folder of this machine lies on.
func disk(t *testing.T, dir, rotational string) map[string]string {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		t.Fatal(err)
	}
	const at = "/sys/devices/pci0000:00/0000:00:06.0/0000:01:00.0/nvme/nvme0/nvme0n1"
	return map[string]string{
		fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev)): "->../../devices/pci0000:00/0000:00:06.0/0000:01:00.0/nvme/nvme0/nvme0n1/nvme0n1p2",
		at + "/nvme0n1p2/partition":      "2\n",
		at + "/queue/rotational":         rotational,
		at + "/queue/logical_block_size": "4096\n",
		at + "/device/model":             "Fast Drive 2TB   \n",
		"/sys/devices/pci0000:00/0000:00:06.0/0000:01:00.0/current_link_speed": "8.0 GT/s PCIe\n",
		"/sys/devices/pci0000:00/0000:00:06.0/0000:01:00.0/max_link_speed":     "16.0 GT/s PCIe\n",
		"/sys/devices/pci0000:00/0000:00:06.0/0000:01:00.0/current_link_width": "2\n",
		"/sys/devices/pci0000:00/0000:00:06.0/0000:01:00.0/max_link_width":     "4\n",
		"/proc/self/mountinfo": "27 1 254:0 / / rw - ext4 /dev/root rw\n28 27 0:5 / " + strings.ReplaceAll(filepath.Dir(dir), " ", `\040`) + " rw - xfs /dev/nvme0n1p2 rw\n",
	}
}

// A model is planned, and its drive described and measured; nothing is left behind.
func TestModel(t *testing.T) {
	data, err := os.ReadFile(demo)
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	t.Chdir(dir)
	if err != nil {
		t.Fatal(err)
	}
	model := filepath.Join(dir, "model.gguf")
	if err := os.WriteFile(model, data, 0o666); err != nil {
		t.Fatal(err)
	}
	o := Options{Root: root(t, merge(healthy, disk(t, dir, "0\n"))), Model: model, Seconds: 0.01, Scratch: 64 << 20}
	r, problems := examine(t, o)
	d := r.Drives[0]
	if len(r.Drives) != 1 || len(d.Places) != 3 || d.FileSystem != "xfs" || d.Source != "/dev/nvme0n1p2" || d.Device != "nvme0n1p2" || d.Name != "Fast Drive 2TB" ||
		d.Rotational || d.BlockBytes != 4096 || d.FreeBytes <= 0 || !d.Opened || d.Rate <= 0 || d.Of != "a scratch file in "+dir {
		t.Errorf("%+v", r.Drives)
	}
	m := r.Model
	if m.Architecture != "glm4moe" || m.Cap != 32 || m.Experts != 32 || m.FileBytes != int64(len(data)) || m.TokenBytes <= 0 || m.Ceiling <= 0 {
		t.Errorf("%+v", m)
	}
	if want := "! drive nvme0n1p2 runs on 2 of 4 lanes at 8 of 16 GT/s: put the drive into a slot"; !slices.ContainsFunc(problems, func(p string) bool { return strings.HasPrefix(p, want) }) {
		t.Errorf("%q lack %q", problems, want)
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Errorf("left behind: %v", left)
	}

	// Not measured: nothing is known of the rate, and rotation counts.
	o.Seconds, o.Root = 0, root(t, merge(healthy, disk(t, dir, "1\n")))
	r, problems = examine(t, o)
	if d := r.Drives[0]; d.Rate != 0 || !d.Opened || r.Model.Ceiling != 0 {
		t.Errorf("%+v", d)
	}
	if want := "! the model lies on a rotational drive (nvme0n1p2)"; !strings.HasPrefix(problems[0], want) {
		t.Errorf("%q lack %q", problems, want)
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Errorf("left behind: %v", left)
	}

	// A large model is measured by itself.
	if err := os.Truncate(model, leastFile); err != nil {
		t.Fatal(err)
	}
	o.Seconds = 0.01
	if r, _ = examine(t, o); r.Drives[0].Of != model || r.Drives[0].Rate <= 0 {
		t.Errorf("%+v", r.Drives[0])
	}
}

func TestBrokenModels(t *testing.T) {
	junk := filepath.Join(t.TempDir(), "junk.gguf")
	if err := os.WriteFile(junk, []byte("GGUFnot"), 0o666); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		filepath.Join(t.TempDir(), "none"): "no such file",
		t.TempDir():                        "is a directory",
		junk:                               junk,
	} {
		r, problems := examine(t, Options{Root: root(t, healthy), Model: path})
		if r.Broken() != 1 || len(problems) != 1 || !strings.HasPrefix(problems[0], "! broken: the model cannot be used: ") || !strings.Contains(problems[0], want) {
			t.Errorf("%s: %q", path, problems)
		}
		var b bytes.Buffer
		if err := r.Print(&b); err != nil || !strings.Contains(b.String(), "\n"+problems[0]+"\n") {
			t.Errorf("%v:\n%s", err, b.String())
		}
	}
}

// Ctrl-C ends an examination, and the scratch file goes with it.
func TestInterrupted(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	t.Chdir(dir)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if r, err := Examine(ctx, Options{Root: root(t, healthy), Seconds: 1, Scratch: 8 << 20}); err != context.Canceled {
		t.Errorf("%+v, %v", r, err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

// An empty tree, and this machine itself, are examined without a panic.
func TestAnyMachine(t *testing.T) {
	for _, dir := range []string{t.TempDir(), ""} {
		r, err := Examine(context.Background(), Options{Root: dir})
		if err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		if err := r.Print(&b); err != nil {
			t.Fatal(err)
		}
		if _, err := json.Marshal(r); err != nil {
			t.Fatal(err)
		}
		if dir == "" {
			t.Logf("\n%s", b.String())
		}
	}
}

// Whatever the files hold, the parsers answer.
func FuzzFiles(f *testing.F) {
	f.Add("0-2,6", bars(256, 2), "27 1 254:0 / / rw - ext4 /dev/root rw\n", "include x\n", "8.0 GT/s")
	f.Add("9-1,-", "0x 0x 0x\n", " - \n", "include /etc/ld.so.conf\n", "-1")
	f.Fuzz(func(t *testing.T, cpus, resource, mounts, conf, link string) {
		for _, n := range cpuList(cpus) {
			if n < 0 {
				t.Errorf("CPU %d", n)
			}
		}
		if n := largestBAR(resource); n < 0 {
			t.Errorf("a BAR of %d bytes", n)
		}
		tr := tree(root(t, map[string]string{"/sys/bus/pci/devices/0/current_link_speed": link, "/sys/bus/pci/devices/0/current_link_width": cpus,
			"/proc/self/mountinfo": mounts, "/etc/ld.so.conf": conf, "/proc/self/limits": cpus}))
		if l := pci.Of(string(tr), "0"); l != nil && (l.Speed <= 0 || l.Width <= 0) {
			t.Errorf("a link of %v", l)
		}
		mountOf(tr, "/some/where")
		loaderDirs(tr)
		limitOf(tr, "Max")
	})
}
