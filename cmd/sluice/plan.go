package main

import (
	"context"
	"fmt"
	"text/tabwriter"

	"sluice/cmd/engine"
	"sluice/storage"
	"sluice/tiers"
)

func planCommand(ctx context.Context, s streams, args []string) error {
	m := newModelFlags(s, "plan", "show from the headers what would lie where in memory, and how many tokens a second the drive allows; the flags are those of run")
	draft := newDraftFlags(m)
	rate := m.set.Float64("drive-rate", 0, "GB/s (10^9 bytes) of the drive (default: a short measurement of the model's file)")
	if err := parse(m.set, args); err != nil {
		return err
	}
	if *m.explain {
		return explainCounters(s.out)
	}
	if m.set.Changed("drive-rate") && !(*rate > 0 && *rate < 1e6) {
		return usagef("--drive-rate %v: it must be above 0, in GB/s", *rate)
	}
	o, err := m.options(m.set.Args())
	if err != nil {
		return err
	}
	if o.Draft, err = draft.options(ctx, s, false); err != nil {
		return err
	}
	o.PlanOnly = true
	o.NoText = true
	p, err := engine.Prepare(o)
	if err != nil {
		return err
	}
	defer p.Close()
	m.settle(p, o.Path)
	if *m.printConfig {
		return printConfig(s.out, p.Settings, *m.json)
	}
	for _, n := range p.Notices {
		s.notice("%s", n)
	}
	v := planView{Plan: p, rate: *rate * 1e9, measured: *rate == 0}
	if v.measured {
		if v.rate, err = p.DriveRate(); err != nil {
			return err
		}
	}
	if *m.json {
		return printJSON(s.out, v.object())
	}
	return v.print(s)
}

// planView is a plan as it is printed.
type planView struct {
	*engine.Plan
	rate     float64 // bytes by second
	measured bool
}

// ram lists the ledger's entries in the order in which they are granted, the
// pool's as planned.
func (v planView) ram() (rows []struct {
	Name  string
	Bytes int64
}) {
	pinned := v.Cap.Peak - v.Ledger.Total() - v.Cap.Staging - v.Cap.LRU
	for _, r := range []struct {
		p     tiers.Purpose
		bytes int64
	}{
		{tiers.Dense, v.Ledger.Of(tiers.Dense)}, {tiers.KV, v.Ledger.Of(tiers.KV)}, {tiers.Scratch, v.Ledger.Of(tiers.Scratch)},
		{tiers.Staging, v.Cap.Staging}, {tiers.Pinned, pinned}, {tiers.LRU, v.Cap.LRU}, {tiers.Base, v.Ledger.Of(tiers.Base)},
	} {
		rows = append(rows, struct {
			Name  string
			Bytes int64
		}{r.p.String(), r.bytes})
	}
	return rows
}

// vram is what all takes of the devices' memory.
func (v planView) vram() int64 {
	d := &v.DeviceDense
	return v.VRAMBytes + d.Weights + d.Cache + d.Scratch
}

func (v planView) object() map[string]any {
	ram := map[string]int64{"total": v.Cap.Peak}
	for _, r := range v.ram() {
		ram[r.Name] = r.Bytes
	}
	return map[string]any{
		"settings": v.Settings.Map(), "notices": v.Notices,
		"ram_bytes": ram, "vram_bytes": map[string]int64{"experts": v.VRAMBytes, "dense": v.DeviceDense.Weights, "kv": v.DeviceDense.Cache, "scratch": v.DeviceDense.Scratch, "total": v.vram()},
		"cap": v.Cap.Cap, "experts_per_layer": v.Spec.Experts, "slots": v.Cap.Slots,
		"pinned_experts": len(v.Pinned), "vram_experts": len(v.VRAM), "held_pct": 100 * v.Held(),
		"bytes_per_token": v.BytesPerToken(), "drive_bytes_per_s": v.rate, "drive_measured": v.measured,
		"rows": v.Forecast(v.rate),
	}
}

func (v planView) print(s streams) error {
	t := tabwriter.NewWriter(s.out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "\tRAM\tVRAM")
	for _, r := range v.ram() {
		vram := "-"
		if n := map[string]int64{tiers.Pinned.String(): v.VRAMBytes, tiers.Dense.String(): v.DeviceDense.Weights, tiers.KV.String(): v.DeviceDense.Cache, tiers.Scratch.String(): v.DeviceDense.Scratch}[r.Name]; n > 0 {
			vram = size(n)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\n", r.Name, size(r.Bytes), vram)
	}
	fmt.Fprintf(t, "total\t%s\t%s\n\n", size(v.Cap.Peak), size(v.vram()))
	if v.Dense() {
		fmt.Fprintln(t, "experts\tnone: the model is dense, all of it stays in memory, and a token reads nothing from the drive")
		return t.Flush()
	}
	fmt.Fprintf(t, "cap\t%d of %d experts per layer, %d slots, top-%d\n", v.Cap.Cap, v.Spec.Experts, v.Cap.Slots, v.Spec.TopK)
	fmt.Fprintf(t, "apart\t%d pinned, %d in VRAM\n", len(v.Pinned), len(v.VRAM))
	fmt.Fprintf(t, "in memory\t%.1f%% of all routed experts\n", 100*v.Held())
	if v.Source.Mode() == storage.MMap {
		fmt.Fprintln(t, "\tmmap: the pool is page cache, whose size the kernel decides; none of it is in the total")
	}
	how := "as given"
	if v.measured {
		how = fmt.Sprintf("measured now, by %v", v.Source.Mode())
	}
	fmt.Fprintf(t, "drive\t%s/s, %s\n\n", size(int64(v.rate)), how)
	fmt.Fprintln(t, "hits\tread per token\ttok/s at most, by the drive alone")
	for _, r := range v.Forecast(v.rate) {
		fmt.Fprintf(t, "%d%%\t%s\t%.4g\n", r.HitPercent, size(r.BytesPerToken), r.TokensPerSec)
	}
	return t.Flush()
}
