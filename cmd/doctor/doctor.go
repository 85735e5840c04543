// Package doctor looks at a machine, and at a model on it, for what will make
// Sluice slow or stop it: the processor, memory and its limits, the kernel, the
// drives, graphics cards, and the build itself. For each problem it has the words
// that mend it.
package doctor

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"sluice/backends/cpu"
)

// Options say where to look. The zero value looks at this machine, without a
// model, and measures no drive.
type Options struct {
	// Root is the folder under which /proc, /sys, /etc and /usr are read; "" is
	// the machine itself. Files are opened, and drives measured, on the machine
	// itself in any case.
	Root    string
	Model   string    // path of a model; "": none
	Kernels cpu.Level // that are asked for; 0: the best that this CPU has
	// Seconds is the time in which each drive is measured; 0: only opened.
	Seconds float64
	// Scratch is the size of the file that is written, read and removed to measure
	// a drive that holds no large model, at least two blocks; 0: 512 MiB.
	Scratch int64
}

// A Report is what was found.
type Report struct {
	Build     Build          `json:"build"`
	Kernel    Kernel         `json:"kernel"`
	CPU       CPU            `json:"cpu"`
	Memory    Memory         `json:"memory"`
	Drives    []Drive        `json:"drives"`
	GPUs      []GPU          `json:"gpus"`
	Libraries []Library      `json:"gpu_libraries"`
	Vulkan    []VulkanDevice `json:"vulkan_devices"`
	Model     *Model         `json:"model,omitempty"`
	Problems  []Problem      `json:"problems"`
}

// A Problem is something to mend. A broken thing keeps Sluice from working; the
// others make it slower than the machine could be.
type Problem struct {
	What   string `json:"what"`
	Fix    string `json:"fix,omitempty"` // what to do; empty where What says it
	Broken bool   `json:"broken"`
}

// String is the problem in a line.
func (p Problem) String() string {
	s := "! " + p.What
	if p.Broken {
		s = "! broken: " + p.What
	}
	if p.Fix != "" {
		s += ": " + p.Fix
	}
	return s
}

// Examine looks at everything. What cannot be read is left out or is a problem;
// an error is ctx's alone.
func Examine(ctx context.Context, o Options) (*Report, error) {
	r, t := Machine(o), tree(o.Root)
	m := r.model(o)
	if err := r.drives(ctx, t, o, m); err != nil {
		return nil, err
	}
	r.ioUring()
	r.openFiles(m)
	r.ceiling()
	r.gpus(t)
	r.libraries(t)
	if t == "" { // this machine, and not files that describe one
		r.vulkan()
	}
	return r, nil
}

// Machine looks at the build, the kernel, the processor and memory alone.
func Machine(o Options) *Report {
	r, t := &Report{Problems: []Problem{}}, tree(o.Root)
	r.build()
	r.kernel(t)
	r.cpu(t, o.Kernels)
	r.memory(t)
	return r
}

// Broken counts the problems that keep Sluice from working.
func (r *Report) Broken() (n int) {
	for _, p := range r.Problems {
		if p.Broken {
			n++
		}
	}
	return n
}

func (r *Report) slow(fix, format string, args ...any) {
	r.Problems = append(r.Problems, Problem{What: fmt.Sprintf(format, args...), Fix: fix})
}

func (r *Report) broken(fix, format string, args ...any) {
	r.Problems = append(r.Problems, Problem{What: fmt.Sprintf(format, args...), Fix: fix, Broken: true})
}

// places are the folders and files whose drives matter, the model's first.
func places(m *modelFile) (all []Place) {
	if m != nil && m.path != "" {
		all = append(all, Place{"model", m.path})
	}
	if dir, err := os.Getwd(); err == nil {
		all = append(all, Place{"working folder", dir})
	}
	if dir, err := filepath.Abs(os.TempDir()); err == nil {
		all = append(all, Place{"temporary folder", dir})
	}
	return all
}

func (o Options) time() time.Duration { return time.Duration(o.Seconds * 1e9) }
