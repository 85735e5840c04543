package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// TestLargerThanMemory decodes a model of 8 GiB inside a memory limit of 2 GiB:
// what was announced is what the process took, and every byte read is an expert
// that was missing.
func TestLargerThanMemory(t *testing.T) {
	const limit = 2 << 30
	switch {
	case testing.Short():
		t.Skip("writes 8 GiB: not in short mode")
	case os.Getenv("CI") == "" && os.Getenv("SLUICE_BIG") == "":
		t.Skip("writes 8 GiB and takes about a minute: set SLUICE_BIG=1")
	}
	dir := t.TempDir()
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		t.Fatal(err)
	}
	if free := int64(fs.Bavail) * fs.Bsize; free < 12e9 {
		t.Skipf("needs 12 GB free in %s, which has %s: set TMPDIR to a folder on a larger drive", os.TempDir(), size(free))
	}
	model := filepath.Join(dir, "large.gguf")
	mustRun(t, "synth", "-o", model, "--size", "8GiB", "--arch", "qwen3moe", "--vocab", demo)
	inspect := mustRun(t, "inspect", model, "--json").object(t)
	const expert = 3 * 2048 * 768 / 256 * 144 // gate, up and down in blocks of Q4_K
	if got := number(t, inspect, "bytes_per_expert"); got != expert {
		t.Fatalf("an expert has %d bytes, want %d", got, expert)
	}
	if got := number(t, inspect, "file_bytes"); got < 8e9 {
		t.Fatalf("the model has %d bytes", got)
	}

	group, noGroup := newMemoryGroup(t, limit)
	var env []string
	args := []string{"run", model, "-p", "And", "-n", "3", "--temp", "0", "--json"}
	if noGroup == nil {
		env = []string{"SLUICE_TEST_CGROUP=" + filepath.Join(group.dir, "cgroup.procs")}
	} else {
		args = append(args, "--cap", "16") // what fits into 2 GiB
	}
	cmd := child(t, env, args...)
	var out, errw bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errw
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s", err, errw.String())
	}

	o := result{out: out.String()}.object(t)
	count := func(keys ...string) int64 { return number(t, o, append([]string{"counters"}, keys...)...) }
	announced, peak := number(t, o, "resident_announced_bytes"), count("rss_peak_bytes")
	// The kernel's own word on what the process took at most, in KiB.
	seen := cmd.ProcessState.SysUsage().(*syscall.Rusage).Maxrss << 10
	t.Logf("%s", errw.String())
	t.Logf("announced %d, peak %d by its own count and %d by the kernel's; cap %v, %d misses of %d routed", announced, peak, seen,
		at(t, o, "settings", "cap", "value"), count("tier_misses"), count("routed_experts_total"))
	if announced >= limit {
		t.Errorf("%d bytes were announced, the limit is %d", announced, limit)
	}
	for _, got := range []int64{peak, seen} {
		if got < announced*95/100 || got > announced*105/100 {
			t.Errorf("the process took %d bytes, %d were announced", got, announced)
		}
	}
	misses := count("tier_misses")
	if got := count("host_load_bytes"); got != misses*expert || misses == 0 {
		t.Errorf("%d bytes were loaded for %d misses of %d bytes", got, misses, expert)
	}
	if n := len(texts(t, o, "token_ids")); n != 3 {
		t.Errorf("%d tokens, want 3", n)
	}
	if noGroup != nil {
		t.Skipf("could not make a memory cgroup, so only the resident set was checked: %v", noGroup)
	}

	// The limit, in GB with one digit, is what was available.
	words := regexp.MustCompile(`(?m)^cap (\d+) chosen of 128 \(projected peak 1\.\d GB, available 2\.[12] GB, of which 0\.\d GB in reserve\)$`)
	m := words.FindStringSubmatch(errw.String())
	if m == nil || m[1] != fmt.Sprint(at(t, o, "settings", "cap", "value")) || at(t, o, "settings", "cap", "origin") != "auto" {
		t.Errorf("the cap %v was chosen in the words %q", at(t, o, "settings", "cap"), errw.String())
	}
	if kills := group.kills(t); kills != 0 {
		t.Errorf("the kernel killed %d processes for want of memory", kills)
	}
}

// A memoryGroup is a cgroup with a limit of memory.
type memoryGroup struct {
	dir    string
	events string // the file that counts kills
}

// newMemoryGroup makes a cgroup of either version, which ends with the test.
// The error says why there is none.
func newMemoryGroup(t *testing.T, limit int64) (memoryGroup, error) {
	t.Helper()
	var errs []string
	for _, v := range []struct {
		root, events string
		limits       []string // the first is needed, the others keep the process out of swap
	}{
		{"/sys/fs/cgroup/memory", "memory.oom_control", []string{"memory.limit_in_bytes", "memory.memsw.limit_in_bytes"}},
		{"/sys/fs/cgroup", "memory.events", []string{"memory.max", "memory.swap.max"}},
	} {
		if _, err := os.Stat(filepath.Join(v.root, "cgroup.procs")); err != nil {
			errs = append(errs, err.Error())
			continue
		}
		g := memoryGroup{filepath.Join(v.root, fmt.Sprintf("sluice-test-%d", os.Getpid())), filepath.Join(v.root, fmt.Sprintf("sluice-test-%d", os.Getpid()), v.events)}
		if err := os.Mkdir(g.dir, 0o755); err != nil {
			errs = append(errs, err.Error())
			continue
		}
		value := fmt.Sprint(limit)
		if err := os.WriteFile(filepath.Join(g.dir, v.limits[0]), []byte(value), 0o644); err != nil {
			unix.Rmdir(g.dir)
			errs = append(errs, err.Error())
			continue
		}
		t.Cleanup(func() { unix.Rmdir(g.dir) })
		if v.limits[1] == "memory.swap.max" {
			value = "0"
		}
		os.WriteFile(filepath.Join(g.dir, v.limits[1]), []byte(value), 0o644) // absent where swap is not counted
		return g, nil
	}
	return memoryGroup{}, fmt.Errorf("%s", strings.Join(errs, "; "))
}

// kills is how often the kernel ended a process of the group.
func (g memoryGroup) kills(t *testing.T) (n int) {
	t.Helper()
	b, err := os.ReadFile(g.events)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "oom_kill "); ok {
			fmt.Sscan(rest, &n)
			return n
		}
	}
	t.Logf("%s does not count kills", g.events)
	return 0
}
