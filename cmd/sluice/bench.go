package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"sluice/storage"
	"sluice/storage/bench"
	"sluice/tiers"
)

// benchCommand hands over to what is measured: its first argument.
func benchCommand(ctx context.Context, s streams, args []string) error {
	measurements := []struct {
		name string
		run  func(ctx context.Context, s streams, args []string) error
	}{{"storage", benchStorage}, {"cap", benchCap}, {"draft", benchDraft}, {"experts", benchExperts}, {"limit", benchLimit}}
	var names []string
	for _, m := range measurements {
		if len(args) > 0 && args[0] == m.name {
			return m.run(ctx, s, args[1:])
		}
		names = append(names, m.name)
	}
	all := strings.Join(names, ", ")
	f, _ := newFlags(s, "bench", "measure: "+all+", each with flags of its own (bench storage --help)")
	if err := parse(f, args); err != nil {
		return err
	}
	if f.NArg() > 0 {
		return usagef("unknown measurement %q: use one of %s", f.Arg(0), all)
	}
	return usagef("name what to measure: %s", all)
}

// sequentialSize is the size of sequential reads.
const sequentialSize = 8 << 20

func benchStorage(ctx context.Context, s streams, args []string) error {
	f, asJSON := newFlags(s, "bench storage", "measure direct reads of a drive, sequential and of the size of experts in random order, by the way that experts take")
	sizes := f.StringSlice("size", []string{"2.6MB", "6MB", "19MB"}, "sizes of the random reads, rounded up to 4 KiB")
	depths := f.IntSlice("depths", []int{1, 2, 4, 8, 16, 32, 64}, "reads at work at once")
	modes := f.StringSlice("modes", []string{"io_uring", "pread", "mmap"}, "ways to read: io_uring, pread, mmap")
	seconds := f.Float64("seconds", 0.5, "time of one sample")
	samples := f.Int("samples", 3, "samples of each cell, taken in turn over the cells")
	seed := f.Uint64("seed", 0, "seed of the random order")
	fio := f.Bool("fio", false, "in place of the table: pairs of ours and fio, random reads by io_uring, at depths 4 and 16 if --depths says nothing else")
	pairs := f.Int("pairs", 7, "pairs of each cell, with --fio")
	huge := f.Bool("fio-huge", true, "let fio use huge pages of the reserve (vm.nr_hugepages), as our buffers ask for transparent ones; false: small pages for fio")
	if err := parse(f, args); err != nil {
		return err
	}
	if f.NArg() > 1 {
		return usagef("unexpected argument %q", f.Arg(1))
	}
	if !(*seconds > 0) || *seconds > 3600 || *samples < 1 || *pairs < 1 {
		return usagef("--seconds is above 0 and at most 3600, --samples and --pairs are at least 1")
	}
	path, err := modelPath(f.Arg(0))
	if err != nil {
		return err
	}
	d, each := bench.NewDrive(path, *seed), time.Duration(*seconds*1e9)
	if *fio {
		*modes = []string{"io_uring"}
		if !f.Changed("depths") {
			*depths = []int{4, 16}
		}
	}
	cells, err := storageCells(*sizes, *depths, *modes)
	if err != nil {
		return err
	}
	if *fio {
		cells = slices.DeleteFunc(cells, func(c bench.Cell) bool { return c.Sequential })
		return benchFio(ctx, s, d, cells, *pairs, each, *huge, *asJSON)
	}
	return benchTable(ctx, s, d, cells, *samples, each, *asJSON)
}

// storageCells are the cells of all flags' values, those that are compared side by side.
func storageCells(sizes []string, depths []int, modes []string) (cells []bench.Cell, err error) {
	for _, name := range modes {
		mode, err := storage.ParseMode(strings.Replace(name, "io_uring", "slab", 1))
		if err != nil {
			return nil, usagef("--modes %q: use io_uring, pread or mmap", name)
		}
		for _, depth := range depths {
			if depth < 1 || depth > 1024 {
				return nil, usagef("--depths %d: use 1 to 1024", depth)
			}
			cells = append(cells, bench.Cell{Mode: mode, Size: sequentialSize, Depth: depth, Sequential: true})
			for _, text := range sizes {
				n, err := parseSize(text)
				if err != nil || n > 1<<30 {
					return nil, usagef("--size %q: use a number of bytes up to 1GiB, such as 2.6MB", text)
				}
				cells = append(cells, bench.Cell{Mode: mode, Size: bench.RoundSize(n), Depth: depth})
			}
		}
	}
	return cells, nil
}

// cellResult is a cell with its samples.
type cellResult struct {
	bench.Cell
	Mode    string         `json:"mode"`
	Order   string         `json:"order"`
	Rate    float64        `json:"bytes_per_s"` // medians
	CPU     float64        `json:"cpu_s_per_gb"`
	Samples []bench.Sample `json:"samples"`
}

func benchTable(ctx context.Context, s streams, d *bench.Drive, cells []bench.Cell, samples int, each time.Duration, asJSON bool) error {
	results := make([]cellResult, len(cells))
	told := map[string]bool{}
	refused := map[storage.Mode]bool{}
	for round := range samples {
		for i, c := range cells {
			r := &results[i]
			if round == 0 {
				*r = cellResult{Cell: c, Mode: modeName(c.Mode), Order: c.Order()}
			}
			if room, err := (tiers.Memory{}).Available(); err == nil && c.Mode != storage.MMap && c.Size*int64(c.Depth) > room.Bytes/2 {
				tellOnce(s, told, fmt.Sprintf("left out: %d reads of %s at once would take more than half of the available memory", c.Depth, size(c.Size)))
				continue
			}
			if fi, err := os.Stat(d.Path); err == nil && fi.Size()/c.Size < 2 {
				tellOnce(s, told, fmt.Sprintf("left out: reads of %s: %s has %s and must hold two of them; name a larger file, or a smaller --size", size(c.Size), d.Path, size(fi.Size())))
				continue
			}
			if refused[c.Mode] {
				continue
			}
			progress(s, "round %d of %d, cell %d of %d", round+1, samples, i+1, len(cells))
			sample, notices, err := d.Measure(ctx, c, each)
			for _, n := range notices {
				tellOnce(s, told, n)
			}
			if err != nil && ctx.Err() == nil && round == 0 && c.Mode == storage.Slab && len(r.Samples) == 0 {
				tellOnce(s, told, fmt.Sprintf("left out: %v", err))
				refused[c.Mode] = true
				continue
			}
			if err != nil {
				return err
			}
			r.Samples = append(r.Samples, sample)
		}
	}
	for i := range results {
		results[i].settle()
	}
	if asJSON {
		return printJSON(s.out, map[string]any{"file": d.Path, "seconds": each.Seconds(), "cells": results})
	}
	t := tabwriter.NewWriter(s.out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "mode\torder\tsize\tdepth\tGB/s\tleast\tmost\tCPU s/GB\t")
	for _, r := range results {
		if len(r.Samples) == 0 {
			continue
		}
		byRate := func(a, b bench.Sample) int { return cmp.Compare(a.Rate, b.Rate) }
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%.3f\t%.3f\t%.3f\t%.3f\t\n", r.Mode, r.Order, size(r.Size), r.Depth, r.Rate/1e9,
			slices.MinFunc(r.Samples, byRate).Rate/1e9, slices.MaxFunc(r.Samples, byRate).Rate/1e9, r.CPU)
	}
	return t.Flush()
}

// settle takes the medians of the samples.
func (r *cellResult) settle() {
	var rates, cpus []float64
	for _, x := range r.Samples {
		rates, cpus = append(rates, x.Rate), append(cpus, x.CPUPerGB)
	}
	if len(rates) > 0 {
		slices.Sort(rates)
		slices.Sort(cpus)
		r.Rate, r.CPU = rates[len(rates)/2], cpus[len(cpus)/2]
	}
}

func modeName(m storage.Mode) string {
	if m == storage.Slab {
		return "io_uring"
	}
	return m.String()
}

func tellOnce(s streams, told map[string]bool, text string) {
	if !told[text] {
		s.notice("%s", text)
	}
	told[text] = true
}

func benchFio(ctx context.Context, s streams, d *bench.Drive, cells []bench.Cell, pairs int, each time.Duration, huge, asJSON bool) error {
	if _, err := exec.LookPath("fio"); err != nil {
		return fmt.Errorf("bench storage --fio: fio is not installed (apt-get install fio)")
	}
	if huge {
		if err := reserveCheck(cells); err != nil {
			return err
		}
	}
	done := 0
	all, err := d.Compare(ctx, cells, pairs, each, huge, func(p bench.Pair) {
		done++
		progress(s, "pair %d of %d: %s depth %d: ours %.3f GB/s, fio %.3f", done, pairs*len(cells), size(p.Size), p.Depth, p.Ours.Rate/1e9, p.Fio.Rate/1e9)
	})
	if err != nil {
		return err
	}
	total := bench.Ratios(all)
	if asJSON {
		return printJSON(s.out, map[string]any{"file": d.Path, "seconds": each.Seconds(), "fio_huge_pages": huge, "pairs": all, "ratio": total})
	}
	t := tabwriter.NewWriter(s.out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "size\tdepth\tours GB/s\tfio GB/s\tours/fio\t95 % interval\tCPU s/GB ours\tfio\t")
	row := func(name, depth string, of []bench.Pair) {
		r := bench.Ratios(of)
		var ours, theirs, cpu, theirCPU float64
		n := float64(len(of))
		for _, p := range of {
			ours, theirs = ours+p.Ours.Rate/n, theirs+p.Fio.Rate/n
			cpu, theirCPU = cpu+p.Ours.CPUPerGB/n, theirCPU+p.Fio.CPUPerGB/n
		}
		fmt.Fprintf(t, "%s\t%s\t%.3f\t%.3f\t%.3f\t%.3f..%.3f\t%.4f\t%.4f\t\n", name, depth, ours/1e9, theirs/1e9, r.Mean, r.Low, r.High, cpu, theirCPU)
	}
	for _, c := range cells {
		var of []bench.Pair
		for _, p := range all {
			if p.Cell == c {
				of = append(of, p)
			}
		}
		row(size(c.Size), strconv.Itoa(c.Depth), of)
	}
	row("all", "", all)
	if err := t.Flush(); err != nil {
		return err
	}
	buffers := "small pages"
	if huge {
		buffers = "hugetlb pages (--iomem=mmaphuge)"
	}
	var memory, onHuge int64
	for _, p := range all {
		memory, onHuge = memory+p.Ours.Buffers, onHuge+p.Ours.Huge
	}
	_, err = fmt.Fprintf(s.out, "%d pairs a cell of %.3g s each, alternating; both io_uring, O_DIRECT, registered files and buffers; our buffers %.0f %% on transparent huge pages, fio's in %s\n"+
		"ours/fio: geometric mean %.3f, 95 %% interval %.3f to %.3f\n", pairs, each.Seconds(), 100*float64(onHuge)/float64(max(1, memory)), buffers, total.Mean, total.Low, total.High)
	return err
}

// reserveCheck refuses to measure fio with huge pages that are not there.
func reserveCheck(cells []bench.Cell) error {
	need := int64(0)
	for _, c := range cells {
		need = max(need, bench.HugePagesFor(c))
	}
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return err
	}
	free := int64(0)
	for line := range strings.Lines(string(text)) {
		if n, ok := strings.CutPrefix(line, "HugePages_Free:"); ok {
			free, _ = strconv.ParseInt(strings.TrimSpace(n), 10, 64)
		}
	}
	if free < need {
		return fmt.Errorf("fio needs %d free huge pages and there are %d: sysctl vm.nr_hugepages=%d (and 0 afterwards), or --fio-huge=false", need, free, need)
	}
	return nil
}
