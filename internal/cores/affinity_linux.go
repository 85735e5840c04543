package cores

import "golang.org/x/sys/unix"

// allowed gives the CPUs of this process's affinity; none if they are not told.
func allowed() (cpus []int) {
	var set unix.CPUSet
	if unix.SchedGetaffinity(0, &set) != nil {
		return nil
	}
	for c := range 64 * len(set) {
		if set.IsSet(c) {
			cpus = append(cpus, c)
		}
	}
	return cpus
}
