package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os/exec"
	"slices"
	"strings"
	"time"
)

// A Pair is one measurement of ours and one of fio of the same cell, one right
// after the other.
type Pair struct {
	Cell
	Ours Sample `json:"ours"`
	Fio  Sample `json:"fio"`
}

// FioArgs is the command line of fio for a cell: io_uring with registered files
// and buffers, O_DIRECT, each block once, one process. huge: its buffers are huge
// pages of the reserve (vm.nr_hugepages), as ours are transparent ones.
func FioArgs(path string, c Cell, time_ time.Duration, huge bool) []string {
	order := "--rw=randread"
	if c.Sequential {
		order = "--rw=read"
	}
	args := []string{
		"--name=cell", "--filename=" + path, "--readonly", order, fmt.Sprintf("--bs=%d", c.Size), fmt.Sprintf("--iodepth=%d", c.Depth),
		"--ioengine=io_uring", "--direct=1", "--fixedbufs=1", "--registerfiles=1", "--randrepeat=0", "--thread=0",
		fmt.Sprintf("--runtime=%dms", time_.Milliseconds()), "--output-format=json",
	}
	if huge {
		args = append(args, "--iomem=mmaphuge")
	}
	return args
}

// HugePagesFor is how many pages of 2 MiB fio reserves for a cell.
func HugePagesFor(c Cell) int64 { return (c.Size*int64(c.Depth)+(2<<20)-1)/(2<<20) + 4 }

// Fio measures a cell with fio, which must be installed.
func Fio(ctx context.Context, path string, c Cell, time_ time.Duration, huge bool) (Sample, error) {
	out, err := exec.CommandContext(ctx, "fio", FioArgs(path, c, time_, huge)...).Output()
	if err != nil {
		var exit *exec.ExitError
		switch {
		case errors.Is(err, exec.ErrNotFound):
			return Sample{}, errors.New("bench: fio is not installed (apt-get install fio)")
		case errors.As(err, &exit):
			return Sample{}, fmt.Errorf("bench: fio: %w: %s", err, strings.TrimSpace(string(exit.Stderr)))
		}
		return Sample{}, fmt.Errorf("bench: fio: %w", err)
	}
	return parseFio(out)
}

// parseFio reads fio's JSON, in front of which there may be notes.
func parseFio(out []byte) (Sample, error) {
	var report struct {
		Jobs []struct {
			Error int     `json:"error"`
			User  float64 `json:"usr_cpu"` // percent of the run time
			Sys   float64 `json:"sys_cpu"`
			Run   int64   `json:"job_runtime"` // ms
			Read  struct {
				Bytes   int64 `json:"io_bytes"`
				Runtime int64 `json:"runtime"` // ms
			} `json:"read"`
		} `json:"jobs"`
	}
	if i := strings.IndexByte(string(out), '{'); i >= 0 {
		out = out[i:]
	}
	if err := json.Unmarshal(out, &report); err != nil {
		return Sample{}, fmt.Errorf("bench: what fio printed: %w", err)
	}
	if len(report.Jobs) != 1 || report.Jobs[0].Error != 0 || report.Jobs[0].Read.Bytes <= 0 || report.Jobs[0].Read.Runtime <= 0 {
		return Sample{}, fmt.Errorf("bench: fio reports %d jobs, and no reads or an error: %.200s", len(report.Jobs), out)
	}
	j := report.Jobs[0]
	cpu := (j.User + j.Sys) / 100 * float64(j.Run) * 1e6
	return sample(j.Read.Bytes, j.Read.Runtime*1e6, int64(cpu)), nil
}

// Compare measures pairs of each cell, in turn over the cells, ours first in every
// other one. did, if not nil, is called after each.
func (d *Drive) Compare(ctx context.Context, cells []Cell, pairs int, time_ time.Duration, huge bool, did func(Pair)) (all []Pair, err error) {
	for round := range pairs {
		for i, c := range cells {
			p := Pair{Cell: c}
			ours := func() (err error) { p.Ours, _, err = d.Measure(ctx, c, time_); return err }
			fio := func() (err error) { p.Fio, err = Fio(ctx, d.Path, c, time_, huge); return err }
			order := []func() error{ours, fio}
			if (round+i)%2 == 1 {
				slices.Reverse(order)
			}
			for _, f := range order {
				if err := f(); err != nil {
					return all, err
				}
			}
			all = append(all, p)
			if did != nil {
				did(p)
			}
		}
	}
	return all, nil
}

// A Ratio is a geometric mean of ours/fio with the interval that holds it with a
// probability of 95 %.
type Ratio struct {
	Mean float64 `json:"mean"`
	Low  float64 `json:"low"`
	High float64 `json:"high"`
}

// Ratios is the ratio of the pairs' rates. The interval is a bootstrap of 10,000
// draws, of pairs within each cell, so that every cell weighs the same.
func Ratios(pairs []Pair) Ratio {
	cells := map[Cell][]float64{}
	var keys []Cell // in the order of the pairs, so that a result repeats
	for _, p := range pairs {
		if cells[p.Cell] == nil {
			keys = append(keys, p.Cell)
		}
		cells[p.Cell] = append(cells[p.Cell], math.Log(p.Ours.Rate/p.Fio.Rate))
	}
	mean := func(pick func(n int) int) float64 {
		sum := 0.0
		for _, k := range keys {
			logs := cells[k]
			cell := 0.0
			for i := range logs {
				if pick != nil {
					i = pick(len(logs))
				}
				cell += logs[i]
			}
			sum += cell / float64(len(logs))
		}
		return math.Exp(sum / float64(len(keys)))
	}
	if len(keys) == 0 {
		return Ratio{}
	}
	rng := rand.New(rand.NewPCG(1, 2))
	draws := make([]float64, 10000)
	for i := range draws {
		draws[i] = mean(rng.IntN)
	}
	slices.Sort(draws)
	return Ratio{mean(nil), draws[len(draws)/40], draws[len(draws)-1-len(draws)/40]}
}
