package cpu

import (
	"fmt"

	"sluice/backends"
)

// splitStep copies runs of rows to other vectors; an item is one row.
type splitStep struct {
	y    []backends.Vec
	runs []int
	x    []float32
	dim  int
	sum  int
}

// Split cuts each row of x into groups of as many floats as the runs have
// together, and copies run i of each group to y[i], group after group. Runs for
// one vector lie in it one behind the other, each with all its groups. It sets
// the lengths of y.
func (b *Backend) Split(y []backends.Vec, runs []int, x backends.Vec) {
	v := x.(*vec)
	s := &b.split
	*s = splitStep{y: y, runs: runs, x: v.rows(), dim: v.dim}
	for _, r := range runs {
		s.sum += r
	}
	if len(y) != len(runs) || s.sum < 1 || v.dim%s.sum != 0 {
		panic(fmt.Sprintf("backends/cpu: Split: runs %v of x of %d for %d vectors", runs, v.dim, len(y)))
	}
	for i := range y {
		to := y[i].(*vec)
		if s.before(i, len(y))*(v.dim/s.sum) != to.dim || to == v {
			panic(fmt.Sprintf("backends/cpu: Split: runs %v of x of %d do not fill y[%d] of %d", runs, v.dim, i, to.dim))
		}
		to.SetLen(v.n)
	}
	b.do("Split", s, v.n, prepareGrain/v.dim)
	*s = splitStep{}
}

// before is the floats of a group in the vector of y[i] that come from runs
// before the end-th.
func (s *splitStep) before(i, end int) (n int) {
	for j, r := range s.runs[:end] {
		if s.y[j] == s.y[i] {
			n += r
		}
	}
	return n
}

func (s *splitStep) run(w *worker, lo, hi int) {
	groups := s.dim / s.sum
	for ; lo < hi; lo++ {
		x := s.x[lo*s.dim:][:s.dim]
		for i, r := range s.runs {
			to := s.y[i].(*vec)
			at := to.data[lo*to.dim+groups*s.before(i, i):]
			for g := range groups {
				copy(at[g*r:(g+1)*r], x[g*s.sum:])
			}
			x = x[min(r, len(x)):]
		}
	}
}
