package doctor

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"sluice/tiers"
)

// Print writes the report for people, its problems last.
func (r *Report) Print(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name, format string, args ...any) { fmt.Fprintf(t, "%s\t%s\n", name, fmt.Sprintf(format, args...)) }

	b := r.Build
	commit := cmp.Or(b.Commit, "not recorded")
	if b.Modified {
		commit += ", modified"
	}
	row("build", "%s, %s, commit %s, tags %s, io_uring %s", b.Go, b.Platform, commit, cmp.Or(b.Tags, "none"), yes(b.Giouring, "in it (giouring)", "not in it"))
	k := r.Kernel
	row("kernel", "%s, memory pressure %s", cmp.Or(k.Release, "unknown"), yes(k.Pressure, "is told", "is not told"))
	row("io_uring", "%s", yes(k.IOUring.Works, "works", "no: "+cmp.Or(k.IOUring.Why, "not in this build")))
	c := r.CPU
	row("cpu", "%s: %d cores, %d hardware threads, %d used", cmp.Or(c.Name, "unknown"), c.Cores, c.CPUs, c.Threads)
	row("", "%s", cmp.Or(strings.Join(c.Features, " "), "no vector instructions that kernels could use"))
	row("kernels", "%s", cmp.Or(c.Kernels, "none that this CPU can run"))
	m := r.Memory
	row("memory", "%s, %s available (%s)", tiers.GB(m.TotalBytes), tiers.GB(m.AvailableBytes), m.AvailableFrom)
	for _, l := range m.Limits {
		row("", "cgroup %s allows %s", l.Dir, tiers.GB(l.Bytes))
	}
	swap := "none"
	if m.SwapBytes > 0 {
		swap = fmt.Sprintf("%s of %s in use", tiers.GB(m.SwapUsedBytes), tiers.GB(m.SwapBytes))
	}
	row("swap", "%s", swap)
	row("huge pages", "transparent: %s; reserve: %d, %d free, of %d KiB", cmp.Or(m.Transparent, "none"), m.HugePages, m.HugeFree, m.HugeBytes>>10)
	lock := "unlimited"
	if m.LockBytes >= 0 {
		lock = fmt.Sprintf("%d KiB%s", m.LockBytes>>10, yes(m.LockFree, ", which does not bind this process", ""))
	}
	files := "unlimited"
	if m.OpenFiles >= 0 {
		files = fmt.Sprint(m.OpenFiles)
	}
	row("limits", "locked memory %s, open files %s", lock, files)
	for _, d := range r.Drives {
		for i, line := range d.lines() {
			row(yes(i == 0, "drive", ""), "%s", line)
		}
	}
	for _, g := range r.GPUs {
		for i, line := range g.lines() {
			row(yes(i == 0, "gpu", ""), "%s", line)
		}
	}
	if len(r.GPUs) == 0 {
		row("gpu", "none")
	}
	for _, l := range r.Libraries {
		row(l.Name, "%s", cmp.Or(l.Path, l.Aside, "not found")+" (for "+l.For+")")
	}
	for i, v := range r.Vulkan {
		row(yes(i == 0, "vulkan", ""), "%s", v.line())
	}
	if len(r.Vulkan) == 0 {
		row("vulkan", "no device: the CPU computes")
	}
	if m := r.Model; m != nil && m.Format != "" {
		row("model", "%s: %s, %s (%s), %d files, %s", m.Path, m.Format, m.Architecture, m.Name, m.Files, gb(m.FileBytes))
		if m.Experts == 0 {
			row("", "dense: all of it stays in memory, %s", gb(m.PeakBytes))
		} else {
			row("", "cap %d of %d experts per layer, %s in memory", m.Cap, m.Experts, gb(m.PeakBytes))
			ceiling := ""
			if m.Ceiling > 0 {
				ceiling = fmt.Sprintf(", which the drive allows %.3g times a second (sluice plan: with others in memory)", m.Ceiling)
			}
			row("", "%s are read for a token when no expert is in memory%s", gb(m.TokenBytes), ceiling)
		}
		for _, n := range m.Notices {
			row("", "%s", n)
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, p := range r.Problems {
		if _, err := fmt.Fprintln(w, p); err != nil {
			return err
		}
	}
	if len(r.Problems) == 0 {
		_, err := fmt.Fprintln(w, "nothing stands in the way")
		return err
	}
	return nil
}

func (d Drive) lines() []string {
	var places []string
	for _, p := range d.Places {
		places = append(places, p.What+" "+p.Path)
	}
	on := cmp.Or(d.Device, "no block device")
	if d.Name != "" {
		on += " (" + d.Name + ")"
	}
	if d.Device != "" {
		on += fmt.Sprintf(", %s, blocks of %d bytes", yes(d.Rotational, "rotational", "not rotational"), d.BlockBytes)
	}
	if d.Link != nil {
		on += ", " + d.Link.String()
	}
	lines := []string{
		strings.Join(places, ", "),
		fmt.Sprintf("%s of %s on %s, %s free", cmp.Or(d.FileSystem, "unknown file system"), cmp.Or(d.Source, "unknown source"), on, gb(d.FreeBytes)),
	}
	switch {
	case d.Rate > 0:
		lines = append(lines, fmt.Sprintf("O_DIRECT %s, %.3f GB/s by %s: random reads of %.2g MB, %d at once, of %s",
			yes(d.Direct, "yes", "no"), d.Rate/1e9, d.Mode, float64(readBytes)/1e6, readDepth, d.Of))
	case d.Opened:
		lines = append(lines, fmt.Sprintf("O_DIRECT %s, reads by %s, rate not measured", yes(d.Direct, "yes", "no"), d.Mode))
	}
	if d.Unproven != "" {
		lines = append(lines, "not measured: "+d.Unproven)
	}
	return append(lines, d.Notices...)
}

func (g GPU) lines() []string {
	name := cmp.Or(g.Name, "unknown device")
	if g.external {
		return []string{fmt.Sprintf("%s: %s, driver %s, no PCI device", g.Card, name, cmp.Or(g.Driver, "none"))}
	}
	vram := "VRAM not told by /sys"
	if g.VRAM > 0 {
		vram = fmt.Sprintf("VRAM %d MiB", g.VRAM>>20)
	}
	if g.Virtual {
		vram = "a virtual display, which computes nothing"
	}
	lines := []string{fmt.Sprintf("%s: %s [%s]%s, driver %s", g.Address, name, g.ID, yes(g.Card != "", ", "+g.Card, ""), cmp.Or(g.Driver, "none"))}
	second := fmt.Sprintf("%s, largest BAR %d MiB", vram, g.BAR>>20)
	if g.Link != nil {
		second += fmt.Sprintf(", %v, %.3g GB/s", *g.Link, g.Link.Rate()/1e9)
	}
	return append(lines, second)
}

// gb writes bytes with four digits.
func gb(n int64) string { return fmt.Sprintf("%.4g GB", float64(n)/1e9) }

// yes is a if ok, else b.
func yes(ok bool, a, b string) string {
	if ok {
		return a
	}
	return b
}
