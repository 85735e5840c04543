package tiers

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// tree writes files under a new root.
func tree(t testing.TB, files map[string]string) Memory {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		name = filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	return Memory{root}
}

const (
	meminfo  = "MemTotal:       65000000 kB\nMemFree:         1000000 kB\nMemAvailable:   48000000 kB\n"
	mountsV1 = "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n" +
		"32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n" +
		"35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:7 - cgroup cgroup rw,memory\n" +
		"41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
	mountsV2 = "30 23 0:28 / /sys/fs/cgroup rw,nosuid shared:4 master:1 - cgroup2 cgroup2 rw,nsdelegate\n"
	noLimit  = "9223372036854771712\n"
)

func TestAvailable(t *testing.T) {
	const mem = 48000000 << 10
	v1 := func(dir, limit, usage, cache string) map[string]string {
		return map[string]string{
			dir + "/memory.limit_in_bytes": limit,
			dir + "/memory.usage_in_bytes": usage,
			dir + "/memory.stat":           "cache 999\ninactive_file 5\ntotal_cache 999\ntotal_inactive_file " + cache + "\n",
		}
	}
	v2 := func(dir, most, high, usage, cache string) map[string]string {
		return map[string]string{
			dir + "/memory.max":     most,
			dir + "/memory.high":    high,
			dir + "/memory.current": usage,
			dir + "/memory.stat":    "anon 7\nfile 9\ninactive_file " + cache + "\nactive_file 3\n",
		}
	}
	tests := []struct {
		name   string
		cgroup string
		mounts string
		files  []map[string]string
		want   int64
		from   string
	}{
		{"no cgroups", "", "", nil, mem, "MemAvailable"},
		{
			"v1, no limit", "4:memory:/a/b\n0::/\n", mountsV1,
			[]map[string]string{v1("/sys/fs/cgroup/memory/a/b", noLimit, "500\n", "0"), v1("/sys/fs/cgroup/memory", noLimit, "900\n", "0")},
			mem, "MemAvailable",
		},
		{
			"v1, own limit; clean cache is available", "9:cpu,memory:/a/b\n0::/\n", mountsV1,
			[]map[string]string{v1("/sys/fs/cgroup/memory/a/b", "2147483648\n", "1000000000\n", "300000000")},
			2147483648 - 700000000, "/sys/fs/cgroup/memory/a/b",
		},
		{
			"v1, the parent has less left", "4:memory:/a/b\n", mountsV1,
			[]map[string]string{
				v1("/sys/fs/cgroup/memory/a/b", "2000\n", "500\n", "0"),
				v1("/sys/fs/cgroup/memory/a", "3000\n", "2900\n", "50"),
				v1("/sys/fs/cgroup/memory", noLimit, "2900\n", "50"),
			},
			150, "/sys/fs/cgroup/memory/a",
		},
		{
			"v1, usage above the limit", "4:memory:/\n", mountsV1,
			[]map[string]string{v1("/sys/fs/cgroup/memory", "2000\n", "2500\n", "0")},
			0, "/sys/fs/cgroup/memory",
		},
		{
			"v2, namespace root is the container", "0::/\n", mountsV2,
			[]map[string]string{v2("/sys/fs/cgroup", "4000\n", "max\n", "1500\n", "500")},
			3000, "/sys/fs/cgroup",
		},
		{
			"v2, high is below max", "0::/user.slice/x.scope\n", mountsV2,
			[]map[string]string{v2("/sys/fs/cgroup/user.slice/x.scope", "4000\n", "2000\n", "1500\n", "500")},
			1000, "/sys/fs/cgroup/user.slice/x.scope",
		},
		{
			"v2, the parent binds", "0::/p/q\n", mountsV2,
			[]map[string]string{v2("/sys/fs/cgroup/p/q", "max\n", "max\n", "10\n", "0"), v2("/sys/fs/cgroup/p", "100\n", "max\n", "30\n", "0")},
			70, "/sys/fs/cgroup/p",
		},
		{
			"v2, the mount shows a part of the hierarchy", "0::/docker/c1/sub\n",
			"30 23 0:28 /docker/c1 /sys/fs/cgroup ro - cgroup2 cgroup rw\n",
			[]map[string]string{v2("/sys/fs/cgroup/sub", "100\n", "max\n", "40\n", "0")},
			60, "/sys/fs/cgroup/sub",
		},
		{
			"v2, a name that only begins like the root of the mount", "0::/docker/c10\n",
			"30 23 0:28 /docker/c1 /sys/fs/cgroup ro - cgroup2 cgroup rw\n",
			[]map[string]string{v2("/sys/fs/cgroup", "100\n", "max\n", "40\n", "0")},
			60, "/sys/fs/cgroup",
		},
		{
			"v2, a space in the mount point", "0::/\n", `30 23 0:28 / /my\040groups rw - cgroup2 cgroup rw` + "\n",
			[]map[string]string{v2("/my groups", "100\n", "max\n", "40\n", "0")},
			60, "/my groups",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			files := map[string]string{"/proc/meminfo": meminfo}
			if tt.cgroup != "" {
				files["/proc/self/cgroup"] = tt.cgroup
				files["/proc/self/mountinfo"] = tt.mounts
			}
			for _, m := range tt.files {
				for k, v := range m {
					files[k] = v
				}
			}
			got, err := tree(t, files).Available()
			if err != nil {
				t.Fatal(err)
			}
			if want := (Room{tt.want, tt.from}); got != want {
				t.Errorf("got %+v, want %+v", got, want)
			}
		})
	}
}

func TestAvailableRefusesNonsense(t *testing.T) {
	tests := []struct {
		name string
		file string
		text string
		want string
	}{
		{"no meminfo line", "/proc/meminfo", "MemFree: 5 kB\n", "/proc/meminfo has no line MemAvailable"},
		{"no number", "/proc/meminfo", "MemAvailable: many kB\n", `/proc/meminfo: "many" is not a number`},
		{"negative limit", "/sys/fs/cgroup/memory.max", "-1\n", `/sys/fs/cgroup/memory.max: "-1" is not a number`},
		{"empty limit", "/sys/fs/cgroup/memory.max", "", `/sys/fs/cgroup/memory.max: "" is not a number`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			files := map[string]string{
				"/proc/meminfo": meminfo, "/proc/self/cgroup": "0::/\n", "/proc/self/mountinfo": mountsV2,
			}
			files[tt.file] = tt.text
			if _, err := tree(t, files).Available(); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

func TestUsage(t *testing.T) {
	m := tree(t, map[string]string{
		"/proc/self/status": "Name:\tx\nVmPeak:\t 9 kB\nVmHWM:\t  700 kB\nVmRSS:\t  600 kB\n",
		"/proc/self/stat":   "77 (a) b (c) R 1 2 3 4 5 6 1234 8 56 10 11 12\n",
	})
	got, err := m.Usage()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(m.Root, "/proc/self/io"), []byte("rchar: 1\nread_bytes: 4096\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	if u, err := m.Usage(); err != nil || u.DeviceReads != 4096 {
		t.Errorf("got %+v, %v", u, err)
	}
	if want := (Usage{RSS: 600 << 10, PeakRSS: 700 << 10, MajorFaults: 56, MinorFaults: 1234}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	m = tree(t, map[string]string{"/proc/self/status": "VmHWM: 7 kB\nVmRSS: 6 kB\n", "/proc/self/stat": "77 (a"})
	if _, err := m.Usage(); err == nil {
		t.Error("a cut stat line is accepted")
	}
}

// This machine's own files parse, and their numbers make sense.
func TestThisMachine(t *testing.T) {
	var m Memory
	room, err := m.Available()
	if err != nil {
		t.Fatal(err)
	}
	u, err := m.Usage()
	if err != nil {
		t.Fatal(err)
	}
	if room.Bytes <= 0 || u.RSS <= 0 || u.PeakRSS < u.RSS/2 || u.MinorFaults <= 0 {
		t.Errorf("available %+v, usage %+v", room, u)
	}
	t.Logf("available %s (%s), resident %s", GB(room.Bytes), room.From, GB(u.RSS))
}

// Whatever the kernel writes, the parsers answer or refuse.
func FuzzMemory(f *testing.F) {
	f.Add(meminfo, "4:memory:/a/b\n0::/\n", mountsV1, "77 (x) R 1 2 3 4 5 6 1 8 2\n")
	f.Add(meminfo, "0::/../x\n", mountsV2, ")")
	f.Add("MemAvailable:\n", ":::\n", " - cgroup2 a b\n", "")
	f.Fuzz(func(t *testing.T, info, cgroup, mounts, stat string) {
		m := tree(t, map[string]string{
			"/proc/meminfo": info, "/proc/self/cgroup": cgroup, "/proc/self/mountinfo": mounts,
			"/proc/self/stat": stat, "/proc/self/status": "VmHWM: 7 kB\nVmRSS: 6 kB\n",
		})
		if r, err := m.Available(); err == nil && r.Bytes < 0 {
			t.Errorf("available %d bytes", r.Bytes)
		}
		m.Usage()
	})
}

// Limits lists each cgroup that bounds memory, the process's own first.
func TestLimits(t *testing.T) {
	m := tree(t, map[string]string{
		"/proc/self/cgroup":                               "4:memory:/a/b\n0::/p/q\n",
		"/proc/self/mountinfo":                            mountsV1,
		"/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "2000\n",
		"/sys/fs/cgroup/memory/a/memory.limit_in_bytes":   noLimit,
		"/sys/fs/cgroup/memory/memory.limit_in_bytes":     "9000\n",
		"/sys/fs/cgroup/unified/p/q/memory.max":           "max\n",
		"/sys/fs/cgroup/unified/p/q/memory.high":          "700\n",
	})
	got, err := m.Limits()
	want := []Limit{{"/sys/fs/cgroup/memory/a/b", 2000}, {"/sys/fs/cgroup/memory", 9000}, {"/sys/fs/cgroup/unified/p/q", 700}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got %v, %v, want %v", got, err, want)
	}
	m = tree(t, map[string]string{"/proc/self/cgroup": "0::/\n", "/proc/self/mountinfo": mountsV2, "/sys/fs/cgroup/memory.max": "many\n"})
	if got, err := m.Limits(); err == nil {
		t.Errorf("nonsense gives %v", got)
	}
}
