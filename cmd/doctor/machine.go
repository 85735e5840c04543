package doctor

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"

	"sluice/backends/cpu"
	"sluice/internal/cores"
	"sluice/tiers"
)

// A Build says how this program was built.
type Build struct {
	Go       string `json:"go"`
	Platform string `json:"platform"`
	Commit   string `json:"commit,omitempty"`
	Modified bool   `json:"modified"` // the working tree differed from the commit
	Tags     string `json:"tags"`
	Giouring bool   `json:"giouring"` // io_uring is in it
}

func (r *Report) build() {
	r.Build = Build{Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			r.Build.Commit = s.Value
		case "vcs.modified":
			r.Build.Modified = s.Value == "true"
		case "-tags":
			r.Build.Tags = s.Value
		}
	}
	r.Build.Giouring = runtime.GOOS == "linux" && slices.Contains(strings.Split(r.Build.Tags, ","), "giouring")
}

// A Kernel is the operating system.
type Kernel struct {
	Release  string  `json:"release"`
	Pressure bool    `json:"pressure"` // pressure-stall information of memory is there
	IOUring  IOUring `json:"io_uring"`
}

// IOUring says whether experts can be read by io_uring.
type IOUring struct {
	Works    bool   `json:"works"`              // a read by it came back
	Tried    bool   `json:"tried"`              // some drive takes direct reads, so that it was tried
	Disabled string `json:"disabled,omitempty"` // kernel.io_uring_disabled, where that is not 0
	Why      string `json:"why,omitempty"`      // why it does not work
}

func (r *Report) kernel(t tree) {
	r.Kernel.Release = t.text("/proc/sys/kernel/osrelease")
	r.Kernel.Pressure = t.has("/proc/pressure/memory")
	if !r.Kernel.Pressure {
		r.slow("boot with psi=1, or take a kernel with CONFIG_PSI",
			"the kernel does not tell of memory pressure (/proc/pressure/memory): the cap cannot shrink before memory runs out")
	}
	if d := t.text("/proc/sys/kernel/io_uring_disabled"); d != "0" {
		r.Kernel.IOUring.Disabled = d
	}
}

// ioUring settles, after the drives, whether io_uring works.
func (r *Report) ioUring() {
	u := &r.Kernel.IOUring
	for _, d := range r.Drives {
		if d.Direct {
			u.Tried = true
			u.Works = u.Works || d.Mode == ioUringMode
			if d.Mode != ioUringMode && u.Why == "" {
				u.Why = strings.Join(d.Notices, "; ")
			}
		}
	}
	switch {
	case u.Works:
		u.Why = ""
	case !r.Build.Giouring:
		r.slow("build it with make, or with -tags giouring -ldflags=-checklinkname=0", "io_uring is not in this build, reads are made by a pool of threads instead")
	case u.Disabled != "":
		r.slow("sysctl -w kernel.io_uring_disabled=0", "io_uring is switched off (kernel.io_uring_disabled=%s)", u.Disabled)
	case !u.Tried:
		u.Why = "not tried: no folder that was looked at takes direct reads"
	default:
		r.slow("take Linux 5.6 or later, and in a container allow the io_uring calls in its seccomp profile (docker run --security-opt seccomp=FILE)",
			"io_uring does not work here (%s)", u.Why)
	}
}

// A CPU is the processor.
type CPU struct {
	Name     string   `json:"name"`
	Cores    int      `json:"cores"`    // physical cores that this process may use
	CPUs     int      `json:"cpus"`     // hardware threads that this process may use
	Threads  int      `json:"threads"`  // that compute, where nobody says otherwise: a container's quota is heeded
	Features []string `json:"features"` // those that kernels can use
	Kernels  string   `json:"kernels"`  // the set that will compute; "": none can
}

// cpuFeatures are what kernels of matrix products can use, as Linux names them.
var cpuFeatures = strings.Fields("avx2 f16c fma avx_vnni avx512f avx512dq avx512bw avx512vl avx512vbmi avx512_vnni avx512_bf16 amx_int8 asimd asimddp i8mm sve sve2 bf16")

func (r *Report) cpu(t tree, asked cpu.Level) {
	const info = "/proc/cpuinfo"
	c := CPU{Name: t.field(info, "model name"), Threads: cores.Physical()}
	if part := t.field(info, "CPU part"); c.Name == "" && part != "" { // arm64 has no names
		c.Name = fmt.Sprintf("implementer %s, part %s", t.field(info, "CPU implementer"), part)
	}
	flags := strings.Fields(t.field(info, "flags") + " " + t.field(info, "Features"))
	c.Features = []string{}
	for _, f := range cpuFeatures {
		if slices.Contains(flags, f) {
			c.Features = append(c.Features, f)
		}
	}
	cpus := cpuList(t.field("/proc/self/status", "Cpus_allowed_list"))
	seen := map[string]bool{}
	for _, n := range cpus {
		dir := fmt.Sprintf("/sys/devices/system/cpu/cpu%d/topology/", n)
		core := t.text(dir + "core_cpus_list")
		if core == "" {
			core = t.text(dir + "thread_siblings_list") // its name before Linux 5.3
		}
		if core == "" {
			core = strconv.Itoa(n)
		}
		seen[core] = true
	}
	c.CPUs, c.Cores = len(cpus), len(seen)
	if level, err := cpu.Choose(asked); err != nil {
		r.broken("", "SLUICE_CPU: %v", err)
	} else {
		c.Kernels = level.String()
		best, err := cpu.Choose(cpu.Auto)
		switch {
		case err == nil && level < best:
			r.slow("unset SLUICE_CPU", "the environment variable SLUICE_CPU chooses the kernels %v, this CPU runs %v", level, best)
		case level == cpu.Go && runtime.GOARCH == "amd64":
			r.slow("take a CPU that has them; in a virtual machine, pass the host's CPU through", "this CPU lacks AVX2 or F16C: plain Go computes, many times slower")
		}
	}
	r.CPU = c
}

// cpuList reads a list such as 0-3,8: nil if it is none.
func cpuList(text string) (cpus []int) {
	for part := range strings.SplitSeq(text, ",") {
		from, to, isRange := strings.Cut(part, "-")
		a, err := strconv.Atoi(from)
		b := a
		if isRange && err == nil {
			b, err = strconv.Atoi(to)
		}
		if err != nil || a < 0 || b < a || b > 1<<16 {
			return nil
		}
		for n := a; n <= b; n++ {
			cpus = append(cpus, n)
		}
	}
	return cpus
}

// Memory is what there is of it, and what limits it.
type Memory struct {
	TotalBytes     int64         `json:"total_bytes"`
	AvailableBytes int64         `json:"available_bytes"`
	AvailableFrom  string        `json:"available_from"` // MemAvailable, or the cgroup whose limit binds
	Limits         []tiers.Limit `json:"cgroup_limits"`
	SwapBytes      int64         `json:"swap_bytes"`
	SwapUsedBytes  int64         `json:"swap_used_bytes"`
	// Transparent is the setting of transparent huge pages: always, madvise or never.
	Transparent string `json:"transparent_huge_pages"`
	HugePages   int64  `json:"huge_pages"` // of the reserve, vm.nr_hugepages
	HugeFree    int64  `json:"huge_pages_free"`
	HugeBytes   int64  `json:"huge_page_bytes"` // of one
	// LockBytes is RLIMIT_MEMLOCK; -1: no limit. It does not bind a process that
	// may lock what it likes (CAP_IPC_LOCK).
	LockBytes int64 `json:"memlock_bytes"`
	LockFree  bool  `json:"memlock_privileged"`
	OpenFiles int64 `json:"open_files"` // RLIMIT_NOFILE; -1: no limit
}

// swapInUse is the swap that a machine may have in use without being short of memory.
const swapInUse = 256 << 20

// capIPCLock is the number of the capability to lock memory (capability.h).
const capIPCLock = 14

func (r *Report) memory(t tree) {
	m := &r.Memory
	kib := func(key string) int64 {
		n, _ := strconv.ParseInt(strings.TrimSuffix(t.field("/proc/meminfo", key), " kB"), 10, 54)
		return max(0, n)
	}
	m.TotalBytes = kib("MemTotal") << 10
	m.SwapBytes = kib("SwapTotal") << 10
	m.SwapUsedBytes = max(0, m.SwapBytes-kib("SwapFree")<<10)
	m.HugePages, m.HugeFree, m.HugeBytes = kib("HugePages_Total"), kib("HugePages_Free"), kib("Hugepagesize")<<10

	memory := tiers.Memory{Root: string(t)}
	room, err := memory.Available()
	if err != nil {
		r.broken("", "available memory cannot be found out: %v", err)
	}
	m.AvailableBytes, m.AvailableFrom = room.Bytes, room.From
	m.Limits, _ = memory.Limits() // an error is that of Available, too
	if free := kib("MemAvailable") << 10; err == nil && room.Bytes < free/2 {
		r.slow("raise its limit if the container or service is to use more (docker run --memory, systemd MemoryMax=)",
			"the cgroup %s leaves %s of the %s of memory that the machine has available", room.From, tiers.GB(room.Bytes), tiers.GB(free))
	}
	if m.SwapUsedBytes > swapInUse {
		r.slow("stop other programs; then swapoff -a brings it back",
			"%s of swap are in use: reads from it compete with those of experts", tiers.GB(m.SwapUsedBytes))
	}

	const setting = "/sys/kernel/mm/transparent_hugepage/enabled"
	if _, after, ok := strings.Cut(t.text(setting), "["); ok {
		m.Transparent, _, _ = strings.Cut(after, "]")
	}
	if m.Transparent == "never" {
		r.slow("echo madvise > "+setting, "transparent huge pages are off: reads into small pages take more CPU time")
	}

	m.LockBytes, m.OpenFiles = limitOf(t, "Max locked memory"), limitOf(t, "Max open files")
	capabilities, _ := strconv.ParseUint(t.field("/proc/self/status", "CapEff"), 16, 64)
	m.LockFree = capabilities>>capIPCLock&1 == 1
	if m.LockBytes >= 0 && m.LockBytes < m.AvailableBytes && !m.LockFree {
		r.slow("ulimit -l unlimited, a memlock line in /etc/security/limits.conf, LimitMEMLOCK=infinity in a systemd unit, or --ulimit memlock=-1 for a container",
			"the limit on locked memory, RLIMIT_MEMLOCK, is %d KiB: slots cannot be registered with io_uring, and reads take up to twice the CPU time", m.LockBytes>>10)
	}
}

// openFiles wants enough descriptors for the model: three for each file of it.
func (r *Report) openFiles(m *modelFile) {
	need := int64(64)
	if m != nil {
		need += 3 * int64(m.files)
	}
	if n := r.Memory.OpenFiles; n >= 0 && n < need {
		r.broken(fmt.Sprintf("ulimit -n %d", need), "this process may open %d files, and needs up to %d", n, need)
	}
}

// limitOf reads the soft limit of a resource; -1: there is none, or it is not told.
func limitOf(t tree, name string) int64 {
	for line := range strings.Lines(t.text("/proc/self/limits")) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			if f := strings.Fields(rest); len(f) > 0 {
				if n, err := strconv.ParseInt(f[0], 10, 64); err == nil {
					return n
				}
			}
		}
	}
	return -1
}
