package tiers

import (
	"errors"
	"io/fs"
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
		least := int64(unlimited)
		for _, name := range g.files().limits {
			n, err := m.value(path.Join(g.dir, name))
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return nil, err
			}
			least = min(least, n)
		}
		if least < unlimited {
			limits = append(limits, Limit{g.dir, least})
		}
	}
	return limits, nil
}
