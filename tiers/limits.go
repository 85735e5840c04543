package tiers

import (
	"errors"
	"io/fs"
	"math"
	"path"
)

// A Limit is the bound of a cgroup, above this process or its own, on memory.
type Limit struct {
	Dir   string `json:"dir"` // the cgroup's folder
	Bytes int64  `json:"bytes"`
}

// Limits lists the cgroups that bound this process's memory, its own first.
func (m Memory) Limits() (limits []Limit, err error) {
	groups, err := m.groups()
	if err != nil {
		return nil, err
	}
	for _, g := range groups {
		names := []string{"memory.limit_in_bytes"}
		if g.v2 {
			names = []string{"memory.max", "memory.high"}
		}
		least := int64(math.MaxInt64)
		for _, name := range names {
			n, err := m.value(path.Join(g.dir, name))
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return nil, err
			}
			least = min(least, n)
		}
		if least < math.MaxInt64>>1 { // version 1 writes "no limit" as the largest whole number of pages
			limits = append(limits, Limit{g.dir, least})
		}
	}
	return limits, nil
}
