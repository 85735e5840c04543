package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"sluice/backends/bench"
	"sluice/backends/gpu"
	"sluice/backends/vulkan"
	"sluice/internal/quant"
)

// benchExperts measures groups of experts on a GPU.
func benchExperts(ctx context.Context, s streams, args []string) error {
	f, asJSON := newFlags(s, "bench experts", "measure groups of experts on a GPU against copies in its own memory, taken in turns")
	k := f.Int("k", 8, "experts of a group")
	names := f.StringSlice("types", []string{"Q4_K", "MXFP4"}, "formats of the weights")
	shape := f.String("shape", "7168x2048", "width of the model x width of an expert")
	devices := f.String("devices", "", "the devices, such as cuda:0,vulkan:0 (default: the first that is no software, by each driver that there is)")
	samples := f.Int("samples", 21, "samples of each measurement")
	sets := f.Int("sets", 4, "groups in the device's memory, used in turns so that no cache serves them")
	if err := parse(f, args); err != nil {
		return err
	}
	var dim, ff int
	if n, err := fmt.Sscanf(*shape, "%dx%d", &dim, &ff); n != 2 || err != nil || *shape != fmt.Sprintf("%dx%d", dim, ff) || dim < 32 || ff < 32 || dim > 1<<16 || ff > 1<<16 {
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
	if len(*names) == 0 {
		return usagef("--types names none: use some of %s", strings.Join(gpuTypes(), ", "))
	}
	var types []quant.Type
	for _, name := range *names {
		t, err := gpuType(name)
		if err != nil {
			return err
		}
		types = append(types, t)
	}
	all, err := benchDevices(*devices)
	defer func() {
		for _, d := range slices.Backward(all) { // a driver's first device closes it
			d.close()
		}
	}()
	if err != nil {
		return err
	}
	for i := range all {
		d := &all[i]
		for _, t := range types {
			if err := ctx.Err(); err != nil {
				return err
			}
			progress(s, "measuring %v on %s", t, d.name)
			m, err := d.bench(bench.Shape{Type: t, Dim: dim, FF: ff, K: *k, Sets: *sets, Samples: *samples, CopyBytes: 256 << 20})
			if err != nil {
				return err
			}
			d.found = append(d.found, m)
		}
		if d.warning != "" {
			s.notice("%s", d.warning)
		}
	}
	if *asJSON {
		var list []map[string]any
		for _, d := range all {
			about := d.about
			about["device"] = d.name
			var types []map[string]any
			for _, m := range d.found {
				types = append(types, map[string]any{"samples": m, "gb_per_s": m.Rate(), "wall_gb_per_s": m.WallRate(), "copy_gb_per_s": m.Copied(),
					"share": m.Rate() / m.Copied(), "upload_overlap": m.Overlap(), "upload_gb_per_s": float64(m.UploadSize) / m.Upload})
			}
			about["types"] = types
			list = append(list, about)
		}
		return printJSON(s.out, map[string]any{"k": *k, "dim": dim, "ff": ff, "sets": *sets, "devices": list})
	}
	for _, d := range all {
		fmt.Fprintf(s.out, "%s: %s\n", d.name, d.words)
	}
	fmt.Fprintf(s.out, "groups of %d experts %dx%d, one position; medians of %d, groups and copies in turns; a copy counts what it reads and what it writes\n", *k, dim, ff, *samples)
	t := tabwriter.NewWriter(s.out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "\t\tweights\tdevice\twall clock\tcopy\tof it\tupload\toverlap\t\n\t\tMB\tGB/s\tGB/s\tGB/s\t%\tGB/s\t\t\n")
	for _, d := range all {
		for _, m := range d.found {
			fmt.Fprintf(t, "%s\t%s\t%.1f\t%.4g\t%.4g\t%.4g\t%.0f\t%.3g\t%.2f\t\n", d.name, m.Type, float64(m.GroupBytes)/1e6, m.Rate(), m.WallRate(), m.Copied(), 100*m.Rate()/m.Copied(),
				float64(m.UploadSize)/m.Upload, m.Overlap())
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, d := range all {
		for _, m := range d.found {
			if len(m.Steps) == 0 {
				continue
			}
			var b strings.Builder
			for _, step := range vulkan.Steps {
				fmt.Fprintf(&b, " %s %.3g", step, m.Steps[step]/1e3)
			}
			fmt.Fprintf(s.out, "%s, %s, microseconds:%s\n", d.name, m.Type, b.String())
		}
	}
	return nil
}

// A benchDevice is a device to measure, whoever's driver it has.
type benchDevice struct {
	name, words, warning string
	about                map[string]any
	bench                func(bench.Shape) (*bench.Measurement, error)
	close                func()
	found                []*bench.Measurement
}

// benchDevices opens the devices of those names; without one the first that is no
// software, by each driver that there is: one GPU by CUDA and by Vulkan, say.
func benchDevices(names string) (all []benchDevice, err error) {
	var missing []error
	for _, maker := range []string{"cuda", "hip", "vulkan"} {
		var wanted []int
		for name := range strings.SplitSeq(names, ",") {
			of, number, ok := strings.Cut(strings.TrimSpace(name), ":")
			if !ok {
				of, number = "vulkan", of
			}
			if n, err := strconv.Atoi(number); of == maker && err == nil && n >= 0 {
				if slices.Contains(wanted, n) {
					return all, usagef("--devices %s: %s:%d is named twice", names, maker, n)
				}
				wanted = append(wanted, n)
			} else if names != "" && (err != nil || n < 0 || !slices.Contains([]string{"cuda", "hip", "vulkan"}, of)) {
				return all, usagef("--devices %s: %q names no device: use vulkan:0, cuda:0 or hip:0", names, name)
			}
		}
		if names != "" && len(wanted) == 0 {
			continue
		}
		var found []benchDevice
		if maker == "vulkan" {
			found, err = benchVulkan(wanted)
		} else {
			found, err = benchNative(map[string]gpu.API{"cuda": gpu.CUDA, "hip": gpu.HIP}[maker], wanted)
		}
		all = append(all, found...)
		switch {
		case err == nil:
		case names != "":
			return all, &refusedError{err}
		default:
			missing = append(missing, err)
		}
	}
	if len(all) == 0 {
		var words []string
		for _, err := range missing {
			words = append(words, err.Error())
		}
		return nil, errors.New(strings.Join(words, "; "))
	}
	return all, nil
}

func benchVulkan(wanted []int) (all []benchDevice, err error) {
	in, err := vulkan.Open(false)
	if err != nil {
		return nil, err
	}
	infos := in.Devices()
	if len(wanted) == 0 {
		i := slices.IndexFunc(infos, func(d vulkan.Info) bool { return !d.Software() })
		if i < 0 {
			in.Close()
			return nil, errors.New("no GPU: a software device is measured only when it is named (--devices vulkan:0)")
		}
		wanted = []int{i}
	}
	for n, i := range wanted {
		if i >= len(infos) {
			if n == 0 {
				in.Close()
			}
			var have []string
			for i, d := range infos {
				have = append(have, fmt.Sprintf("vulkan:%d %s", i, d.Name))
			}
			return all, fmt.Errorf("there is no device vulkan:%d: name some of %s", i, strings.Join(have, ", "))
		}
		d, err := in.Open(i, vulkan.Options{})
		if err != nil {
			if n == 0 {
				in.Close()
			}
			return all, err
		}
		words := fmt.Sprintf("%s, driver %s, %s, int8 dot products %s", d.Name, d.Driver,
			map[bool]string{true: "copies on a queue of their own", false: "one queue for kernels and copies"}[d.CopyQueue], map[bool]string{true: "in one instruction", false: "not accelerated"}[d.DotProduct])
		first := n == 0
		all = append(all, benchDevice{name: fmt.Sprintf("vulkan:%d", i), words: words, warning: d.Warning(), bench: d.Bench,
			about: map[string]any{"name": d.Name, "driver": d.Driver, "copy_queue": d.CopyQueue, "rebar": d.ReBAR(), "dot_product": d.DotProduct},
			close: func() {
				d.Close()
				if first {
					in.Close()
				}
			}})
	}
	return all, nil
}

func benchNative(api gpu.API, wanted []int) (all []benchDevice, err error) {
	driver, err := gpu.Open(api)
	if err != nil {
		return nil, err
	}
	if len(wanted) == 0 {
		wanted = []int{0}
	}
	for n, i := range wanted {
		d, err := driver.Open(i, gpu.Options{})
		if err != nil {
			if n == 0 {
				driver.Close()
			}
			return all, err
		}
		first := n == 0
		all = append(all, benchDevice{name: fmt.Sprintf("%v:%d", api, i), words: fmt.Sprintf("%s, %s; %v; kernels by %v", d.Name, d.Arch, driver.Library, d.Compiler), bench: d.Bench,
			about: map[string]any{"name": d.Name, "arch": d.Arch, "driver": driver.Library, "kernels": d.Compiler},
			close: func() {
				d.Close()
				if first {
					driver.Close()
				}
			}})
	}
	return all, nil
}

// gpuType is a format of weights that kernels know and that can be made up here.
func gpuType(name string) (quant.Type, error) {
	for _, t := range vulkan.Types() {
		if quant.CanEncode(t) && strings.EqualFold(t.String(), name) {
			return t, nil
		}
	}
	return 0, usagef("--types %s: use some of %s", name, strings.Join(gpuTypes(), ", "))
}

func gpuTypes() (names []string) {
	for _, t := range vulkan.Types() {
		if quant.CanEncode(t) {
			names = append(names, t.String())
		}
	}
	return names
}
