// Package cores counts the processor cores that this process may use.
package cores

import (
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strings"
)

// Physical is the number of physical cores that this process may use, at least
// 1: threads of one core count once, since they share what computes. It respects
// the process's affinity, and GOMAXPROCS, which the Go runtime sets by the
// limits of the control group.
func Physical() int {
	n := runtime.GOMAXPROCS(0)
	if cpus := allowed(); len(cpus) > 0 {
		n = min(n, count(os.DirFS("/sys/devices/system/cpu"), cpus))
	}
	return max(n, 1)
}

// count is the number of distinct cores of some CPUs, which sys describes as
// Linux does in /sys/devices/system/cpu. A CPU that it says nothing of is a
// core of its own.
func count(sys fs.FS, cpus []int) int {
	seen := make(map[string]bool)
	for _, c := range cpus {
		key := fmt.Sprint("cpu ", c)
		for _, name := range []string{"core_cpus_list", "thread_siblings_list"} { // the second before Linux 5.3
			if list, err := fs.ReadFile(sys, fmt.Sprintf("cpu%d/topology/%s", c, name)); err == nil {
				key = strings.TrimSpace(string(list))
				break
			}
		}
		seen[key] = true
	}
	return len(seen)
}
