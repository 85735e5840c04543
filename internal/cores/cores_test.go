package cores

import (
	"fmt"
	"runtime"
	"testing"
	"testing/fstest"
)

func TestCount(t *testing.T) {
	list := func(name string, lists ...string) fstest.MapFS {
		m := fstest.MapFS{}
		for c, l := range lists {
			m[fmt.Sprintf("cpu%d/topology/%s", c, name)] = &fstest.MapFile{Data: []byte(l + "\n")}
		}
		return m
	}
	neighbours := list("core_cpus_list", "0-1", "0-1", "2-3", "2-3")
	apart := list("thread_siblings_list", "0,2", "1,3", "0,2", "1,3")
	for _, c := range []struct {
		name string
		sys  fstest.MapFS
		cpus []int
		want int
	}{
		{"no threads", list("core_cpus_list", "0", "1", "2", "3"), []int{0, 1, 2, 3}, 4},
		{"two threads a core, side by side", neighbours, []int{0, 1, 2, 3}, 2},
		{"two threads a core, apart", apart, []int{0, 1, 2, 3}, 2},
		{"some of them allowed", neighbours, []int{1, 2, 3}, 2},
		{"one core allowed", apart, []int{1, 3}, 1},
		{"nothing told", fstest.MapFS{}, []int{0, 1, 5}, 3},
		{"one told", list("core_cpus_list", "0-1"), []int{0, 1, 2}, 3},
		{"none", neighbours, nil, 0},
	} {
		if got := count(c.sys, c.cpus); got != c.want {
			t.Errorf("%s: %d cores, want %d", c.name, got, c.want)
		}
	}
}

func TestPhysical(t *testing.T) {
	if n := Physical(); n < 1 || n > runtime.NumCPU() {
		t.Errorf("%d cores of %d CPUs", n, runtime.NumCPU())
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	if n := Physical(); n != 1 {
		t.Errorf("%d cores with GOMAXPROCS 1", n)
	}
}
