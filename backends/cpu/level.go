package cpu

import (
	"fmt"
	"strings"
)

// A Level is a set of kernels, by the instructions that it needs. Levels
// differ in speed alone: each gives the bits of plain Go.
type Level uint8

const (
	Auto   Level = iota // the best that this CPU has
	Go                  // plain Go: everywhere, and the meaning of the others
	AVX2                // AVX2, F16C
	AVX512              // AVX-512 F, BW, VL, DQ, VNNI
)

var levelNames = [...]string{"auto", "go", "avx2", "avx512"}

func (l Level) String() string { return levelNames[l] }

// ParseLevel reads the name of a level, such as the environment gives; empty
// is Auto.
func ParseLevel(s string) (Level, error) {
	if s == "" {
		return Auto, nil
	}
	for l, name := range levelNames {
		if s == name {
			return Level(l), nil
		}
	}
	return 0, fmt.Errorf("unknown set of CPU kernels %q: use %s", s, strings.Join(levelNames[:], ", "))
}

// Choose gives the level that runs when l is asked for: l itself, or for Auto
// the best that this CPU has. It is an error if the CPU, or an operating
// system that does not save its registers, cannot run l.
func Choose(l Level) (Level, error) {
	best, lacks := best()
	switch {
	case l == Auto:
		return best, nil
	case l <= best:
		return l, nil
	case l <= AVX512:
		return 0, fmt.Errorf("backends/cpu: this machine cannot run the kernels %v: it lacks %s; use %v, or auto", l, lacks, best)
	default:
		return 0, fmt.Errorf("backends/cpu: level %d is none: use Auto, Go, AVX2 or AVX512", uint8(l))
	}
}

// A kernel is one way to compute an operation.
type kernel[F any] struct {
	level Level // the least that runs it
	run   F
}

// pick gives the best kernel of a table at level l. A table is in the order of
// levels; the first is plain Go, the meaning of the others.
func pick[F any](l Level, table []kernel[F]) F {
	for i := len(table) - 1; i > 0; i-- {
		if table[i].level <= l {
			return table[i].run
		}
	}
	return table[0].run
}
