package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"sluice/cmd/engine"
	"sluice/moe"
	"sluice/speculative"
	"sluice/tiers"
)

// printJSON writes one object on standard output.
func printJSON(w io.Writer, object any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(object)
}

// counters reads every counter by its name; labels nest.
func counters(e *engine.Engine, emitted int) (map[string]any, error) {
	usage, err := tiers.Memory{}.Usage()
	if err != nil {
		return nil, err
	}
	c, m := e.Cache.Stats(), e.Model.Stats()
	loads := map[string]int64{"slab": 0, "pread": 0, "mmap": 0}
	wanted, bytes := c.Wanted()
	loads[e.Source.Mode().String()] = wanted - c.PreloadLoads
	gpu := e.Usage()
	driver := any(gpu.Driver)
	if gpu.Driver < 0 {
		driver = nil
	}
	var draft speculative.Report
	if e.Drafts != nil {
		draft = e.Drafts.Report()
	}
	return map[string]any{
		"draft_proposed":           draft.Proposed,
		"draft_accepted":           draft.Accepted,
		"draft_shadows":            draft.Shadows,
		"draft_state_changes":      draft.Changes,
		"positions_total":          m.Positions,
		"forwards_total":           m.Forwards,
		"emitted_tokens_total":     emitted,
		"routed_experts_total":     c.RoutedExperts,
		"distinct_experts_total":   c.DistinctExperts,
		"tier_hits":                byTier(c.Hits, tiers.Hits{}),
		"loads_avoided":            byTier(c.Avoided, tiers.Hits{}),
		"marginal_hits":            byTier(c.Marginal, tiers.Hits{}),
		"tier_misses":              c.Misses,
		"host_loads_total":         loads,
		"host_load_bytes":          bytes - c.PreloadBytes,
		"host_read_bytes":          c.Source.ReadBytes,
		"host_read_retries":        c.Source.Retries,
		"host_checksum_retries":    c.Source.Checksums,
		"host_load_wait_ns":        c.LoadWaitNanos,
		"host_loads_failed":        c.LoadsFailed,
		"host_loads_dropped":       c.LoadsDropped,
		"preload_loads":            c.PreloadLoads,
		"preload_bytes":            c.PreloadBytes,
		"prefetch_guessed":         c.Prefetch.Guessed,
		"prefetch_guessed_right":   c.Prefetch.Right,
		"prefetch_issued":          c.Prefetch.Issued,
		"prefetch_used":            c.Prefetch.Used,
		"prefetch_late":            c.Prefetch.Late,
		"prefetch_wasted":          c.Prefetch.Wasted,
		"prefetch_wasted_bytes":    c.Prefetch.WastedBytes,
		"prefetch_skipped_vram":    c.Prefetch.SkippedVRAM,
		"draft_wasted_loads":       c.Drafts.WastedLoads,
		"draft_wasted_bytes":       c.Drafts.WastedBytes,
		"draft_evictions":          c.Drafts.Evictions,
		"evictions":                map[string]int64{"vram": c.VRAMEvictions, "lru": c.Evictions},
		"vram_swaps":               c.VRAMSwaps,
		"vram_payload_bytes":       gpu.Payload,
		"vram_allocated_bytes":     gpu.Allocated,
		"vram_driver_bytes":        driver,
		"tier_upload_ns":           gpu.UploadNanos,
		"tier_upload_bytes":        gpu.UploadBytes,
		"tier_upload_direct_bytes": gpu.DirectBytes,
		"pinned_bytes":             gpu.Pinned,
		"pin_failures":             gpu.Unpinned,
		"tier_upload_s":            float64(gpu.UploadNanos) / 1e9,
		"tier_upload_gbps":         float64(gpu.UploadBytes) / float64(max(gpu.UploadNanos, 1)),
		"command_buffer_rerecords": gpu.Recorded,
		"gpu_launches_total":       gpu.Launches,
		"cap_changes":              c.CapChanges,
		"rss_bytes":                usage.RSS,
		"rss_peak_bytes":           usage.PeakRSS,
		"major_faults":             usage.MajorFaults,
		"minor_faults":             usage.MinorFaults,
		"device_read_bytes":        usage.DeviceReads,
	}, nil
}

// byTier is a count of each tier since before.
func byTier(now, before tiers.Hits) map[string]int64 {
	return map[string]int64{"vram": now.VRAM - before.VRAM, "pinned": now.Pinned - before.Pinned, "lru": now.LRU - before.LRU}
}

// decodeCounters are those counters that tell of decoding, counted from its
// start: before are the readings made then.
func decodeCounters(e *engine.Engine, before tiers.Stats, usage tiers.Usage) (map[string]any, error) {
	now, err := tiers.Memory{}.Usage()
	if err != nil {
		return nil, err
	}
	c := e.Cache.Stats()
	loads, bytes := c.Wanted()
	loadsBefore, bytesBefore := before.Wanted()
	return map[string]any{
		"routed_experts_total": c.RoutedExperts - before.RoutedExperts,
		"tier_hits":            byTier(c.Hits, before.Hits),
		"loads_avoided":        byTier(c.Avoided, before.Avoided),
		"marginal_hits":        byTier(c.Marginal, before.Marginal),
		"tier_misses":          c.Misses - before.Misses,
		"host_loads":           loads - loadsBefore,
		"host_load_bytes":      bytes - bytesBefore,
		"host_read_bytes":      c.Source.ReadBytes - before.Source.ReadBytes,
		"host_load_wait_ns":    c.LoadWaitNanos - before.LoadWaitNanos,
		"major_faults":         now.MajorFaults - usage.MajorFaults,
		"minor_faults":         now.MinorFaults - usage.MinorFaults,
		"device_read_bytes":    now.DeviceReads - usage.DeviceReads,
	}, nil
}

// driveObjects tells of each drive, for JSON.
func driveObjects(e *engine.Engine) []map[string]any {
	var all []map[string]any
	for _, d := range e.Reader.Drives() {
		all = append(all, map[string]any{"path": d.Path, "read_bytes": d.ReadBytes, "bytes_per_s": d.Rate, "errors": d.Errors, "dropped": d.Dropped})
	}
	return all
}

// stages puts the times of a phase under their names, stage_ns.
func stages(object map[string]any, t moe.Times) {
	for s := range moe.NumStages {
		object[s.String()+"_ns"] = t[s]
	}
}

// explainCounters prints each counter with its definition.
func explainCounters(w io.Writer) error {
	for _, c := range tiers.Counters() {
		if _, err := fmt.Fprintf(w, "%-24s %s\n", c.Name, c.Definition); err != nil {
			return err
		}
	}
	return nil
}

// printConfig prints the settings, as lines or as JSON.
func printConfig(w io.Writer, s engine.Settings, asJSON bool) error {
	if asJSON {
		return printJSON(w, map[string]any{"settings": s.Map()})
	}
	return s.Print(w)
}

// experts says where the experts between two readings of the counters came from.
func experts(c, before tiers.Stats, e *engine.Engine) string {
	routed, misses := c.RoutedExperts-before.RoutedExperts, c.Misses-before.Misses
	if routed == 0 {
		return "experts: none routed"
	}
	share := func(n int64) float64 { return 100 * float64(n) / float64(routed) }
	_, bytes := c.Wanted()
	_, bytesBefore := before.Wanted()
	loaded := bytes - bytesBefore - (c.PreloadBytes - before.PreloadBytes)
	wait := c.LoadWaitNanos - before.LoadWaitNanos
	var b strings.Builder
	fmt.Fprintf(&b, "experts: %d routed = ", routed)
	held := c.Hits.VRAM - before.Hits.VRAM
	if held > 0 {
		fmt.Fprintf(&b, "%d from VRAM (%.1f%%) + ", held, share(held))
	}
	ram := routed - misses - held
	fmt.Fprintf(&b, "%d from RAM (%.1f%%", ram, share(ram))
	if n := c.Hits.Pinned - before.Hits.Pinned; n > 0 {
		fmt.Fprintf(&b, ", %d of them pinned", n)
	}
	fmt.Fprintf(&b, ") + %d from the drive (%.1f%%, %s by %s", misses, share(misses), size(loaded), e.Source.Mode())
	if n := c.Prefetch.Used - before.Prefetch.Used; n > 0 {
		fmt.Fprintf(&b, ", %d of them ahead", n)
	}
	if wait > 0 {
		fmt.Fprintf(&b, ", waited %.3g s", float64(wait)/1e9)
	}
	fmt.Fprintf(&b, "); cap %d of %d per layer", c.Cap, e.Spec.Experts)
	return b.String()
}

// marginal says what the tiers above the pool were worth, "" if there is none.
func marginal(c tiers.Stats) string {
	var of []string
	for _, t := range []struct {
		name             string
		served, marginal int64
	}{{"VRAM", c.Avoided.VRAM, c.Marginal.VRAM}, {"the pinned set", c.Avoided.Pinned, c.Marginal.Pinned}} {
		if t.served > 0 {
			of = append(of, fmt.Sprintf("%d without %s, which served %d", t.marginal, t.name, t.served))
		}
	}
	if of == nil {
		return ""
	}
	return "loads that there would have been more, at the same cap: " + strings.Join(of, "; ")
}

// prefetched says what reading ahead came to, "" if nothing was guessed.
func prefetched(p tiers.PrefetchStats) string {
	if p.Guessed == 0 {
		return ""
	}
	return fmt.Sprintf("prefetch: %.1f%% of the guessed experts were chosen; %d read ahead, %d of them used (%d came late), %d for nothing",
		100*float64(p.Right)/float64(p.Guessed), p.Issued, p.Used, p.Late, p.Wasted)
}

// size writes bytes for people: GB is 10^9.
func size(n int64) string {
	switch {
	case n >= 1e9:
		return fmt.Sprintf("%.4g GB", float64(n)/1e9)
	case n >= 1e6:
		return fmt.Sprintf("%.4g MB", float64(n)/1e6)
	case n >= 1e3:
		return fmt.Sprintf("%.4g kB", float64(n)/1e3)
	}
	return fmt.Sprintf("%d B", n)
}
