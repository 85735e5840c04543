package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"text/tabwriter"

	"sluice/backends/vulkan"
	"sluice/internal/quant"
)

// benchExperts measures groups of experts on a GPU.
func benchExperts(ctx context.Context, s streams, args []string) error {
	f, asJSON := newFlags(s, "bench experts", "measure groups of experts on a GPU against copies in its own memory, taken in turns")
	k := f.Int("k", 8, "experts of a group")
	names := f.StringSlice("types", []string{"Q4_K", "MXFP4"}, "formats of the weights")
	shape := f.String("shape", "7168x2048", "width of the model x width of an expert")
	device := f.String("devices", "", "the device, such as vulkan:0 (default: the first that is no software)")
	samples := f.Int("samples", 21, "samples of each measurement")
	sets := f.Int("sets", 4, "groups in the device's memory, used in turns so that no cache serves them")
	if err := parse(f, args); err != nil {
		return err
	}
	var dim, ff int
	if n, err := fmt.Sscanf(*shape, "%dx%d", &dim, &ff); n != 2 || err != nil || dim < 32 || ff < 32 || dim > 1<<16 || ff > 1<<16 {
		return usagef("--shape %q: use WIDTHxFF, such as 7168x2048, each 32 to 65536", *shape)
	}
	switch {
	case f.NArg() > 0:
		return usagef("unexpected argument %q", f.Arg(0))
	case *k < 1 || *k > 16:
		return usagef("--k %d: use 1 to 16", *k)
	case *samples < 1 || *samples > 10000 || *sets < 1 || *sets > 64:
		return usagef("--samples is 1 to 10000, --sets 1 to 64")
	}
	var types []quant.Type
	for _, name := range *names {
		t, err := gpuType(name)
		if err != nil {
			return err
		}
		types = append(types, t)
	}
	in, err := vulkan.Open(false)
	if err != nil {
		return err
	}
	defer in.Close()
	index, err := benchDevice(in.Devices(), *device)
	if err != nil {
		return err
	}
	d, err := in.Open(index, vulkan.Options{})
	if err != nil {
		return err
	}
	defer d.Close()
	var all []*vulkan.Measurement
	for _, t := range types {
		if err := ctx.Err(); err != nil {
			return err
		}
		progress(s, "measuring %v", t)
		m, err := d.Bench(vulkan.BenchShape{Type: t, Dim: dim, FF: ff, K: *k, Sets: *sets, Samples: *samples, CopyBytes: 256 << 20})
		if err != nil {
			return err
		}
		all = append(all, m)
	}
	if w := d.Warning(); w != "" {
		s.notice("%s", w)
	}
	if *asJSON {
		object := map[string]any{"device": d.Name, "driver": d.Driver, "copy_queue": d.CopyQueue, "rebar": d.ReBAR(), "dot_product": d.DotProduct,
			"k": *k, "dim": dim, "ff": ff, "sets": *sets}
		var list []map[string]any
		for _, m := range all {
			list = append(list, map[string]any{"samples": m, "gb_per_s": m.Rate(), "wall_gb_per_s": m.WallRate(), "copy_gb_per_s": m.Copied(),
				"share": m.Rate() / m.Copied(), "upload_overlap": m.Overlap(), "upload_gb_per_s": float64(m.UploadSize) / m.Upload})
		}
		object["types"] = list
		return printJSON(s.out, object)
	}
	fmt.Fprintf(s.out, "%s, driver %s, %s, int8 dot products %s\n", d.Name, d.Driver,
		map[bool]string{true: "copies on a queue of their own", false: "one queue for kernels and copies"}[d.CopyQueue], map[bool]string{true: "in one instruction", false: "not accelerated"}[d.DotProduct])
	fmt.Fprintf(s.out, "groups of %d experts %dx%d, one position; medians of %d, groups and copies in turns; a copy counts what it reads and what it writes\n", *k, dim, ff, *samples)
	t := tabwriter.NewWriter(s.out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "\tweights\tdevice\twall clock\tcopy\tof it\tupload\toverlap\t\n\tMB\tGB/s\tGB/s\tGB/s\t%\tGB/s\t\t\n")
	for _, m := range all {
		fmt.Fprintf(t, "%s\t%.1f\t%.4g\t%.4g\t%.4g\t%.0f\t%.3g\t%.2f\t\n", m.Type, float64(m.GroupBytes)/1e6, m.Rate(), m.WallRate(), m.Copied(), 100*m.Rate()/m.Copied(),
			float64(m.UploadSize)/m.Upload, m.Overlap())
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, m := range all {
		var b strings.Builder
		for _, step := range vulkan.Steps {
			fmt.Fprintf(&b, " %s %.3g", step, m.Steps[step]/1e3)
		}
		fmt.Fprintf(s.out, "%s, microseconds:%s\n", m.Type, b.String())
	}
	return nil
}

func gpuType(name string) (quant.Type, error) {
	var names []string
	for _, t := range vulkan.Types() {
		if strings.EqualFold(t.String(), name) {
			return t, nil
		}
		if quant.CanEncode(t) {
			names = append(names, t.String())
		}
	}
	return 0, usagef("--types %s: use some of %s", name, strings.Join(names, ", "))
}

// benchDevice is the device of that name, or the first that is no software.
func benchDevice(all []vulkan.Info, name string) (int, error) {
	for i, d := range all {
		if n, err := strconv.Atoi(strings.TrimPrefix(name, "vulkan:")); name == "" && !d.Software() || err == nil && n == i {
			return i, nil
		}
	}
	if name != "" {
		return 0, usagef("--devices %s: there are %d devices, vulkan:0 to vulkan:%d", name, len(all), len(all)-1)
	}
	return 0, errors.New("no GPU: a software device is measured only when it is named (--devices vulkan:0)")
}
