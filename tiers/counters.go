package tiers

// A Counter is the name of a count and what it counts, in one line.
type Counter struct{ Name, Definition string }

// Counters defines every counter that a run prints, in the order of printing.
// A label in braces is one key of an object in JSON.
func Counters() []Counter {
	return []Counter{
		{"positions_total", "positions that went through the layers: prompt and generated tokens, and drafts that were verified"},
		{"forwards_total", "passes through all layers, whatever the number of positions in the batch"},
		{"emitted_tokens_total", "tokens that a run gave out"},
		{"routed_experts_total", "experts chosen by the router, once for each position and layer; no tier changes it"},
		{"distinct_experts_total", "the same, but once for each batch and layer, however many positions share the expert"},
		{"tier_hits{vram}", "routed experts served from device memory"},
		{"tier_hits{pinned}", "routed experts served from the pinned set in RAM"},
		{"tier_hits{lru}", "routed experts served from the LRU pool in RAM, the second and later positions that share one load included"},
		{"tier_misses", "routed experts that were in no tier, each the cause of one load, those that a prefetch had read ahead included; with all tier_hits they sum to routed_experts_total"},
		{"loads_avoided{vram}", "distinct experts of a batch and layer that were in device memory: each would have been a load"},
		{"loads_avoided{pinned}", "the same, in the pinned set in RAM"},
		{"loads_avoided{lru}", "the same, in the LRU pool"},
		{"host_loads_total{slab}", "experts read from a drive into our own memory by direct I/O and io_uring, those that prefetch_wasted counts left out"},
		{"host_loads_total{pread}", "the same by a pool of readers"},
		{"host_loads_total{mmap}", "experts taken as views of the page cache, whether or not the drive was asked"},
		{"host_load_bytes", "bytes of the experts that host_loads_total counts, their payload alone"},
		{"host_read_bytes", "bytes asked of the drives in all, rounding to sectors, retries and what was read ahead for nothing included"},
		{"host_read_retries", "reads done again after an error, an unexpected end or a bad checksum"},
		{"host_checksum_retries", "of them, experts of a slab whose checksum did not fit the first time"},
		{"host_load_wait_ns", "nanoseconds in which the decode loop had nothing to compute and waited for a load"},
		{"host_loads_failed", "loads that failed after the retry; each failed a request, or the start, or was a read ahead that is done again when asked for"},
		{"host_loads_dropped", "misses that were never read, because the request had failed or was cancelled; misses + preload_loads = loads + failed + dropped, but for reads ahead that failed"},
		{"preload_loads", "experts read before the first token, for the pinned set and for device memory"},
		{"preload_bytes", "their payload, part of host_load_bytes"},
		{"prefetch_guessed", "experts that the next layer's router named when it was shown the state before this layer's experts"},
		{"prefetch_guessed_right", "of the guessed, those that the layer then chose"},
		{"prefetch_issued", "reads made for a guess, before the layer asked"},
		{"prefetch_used", "of the issued, those whose expert the layer asked for: a miss that was read early"},
		{"prefetch_late", "of the used, those that were not yet in memory when the layer asked, so that it may have waited"},
		{"prefetch_wasted", "of the issued, those that the layer did not ask for, or that failed before it did"},
		{"prefetch_wasted_bytes", "payload of the wasted that were read whole: part of host_read_bytes, and of no other count of loads"},
		{"prefetch_skipped_vram", "guessed experts that were in device memory, and not read"},
		{"draft_proposed", "tokens that a drafter proposed and a batch then verified"},
		{"draft_accepted", "of them, those that the sampler chose too; emitted tokens = passes of decoding + accepted, the prompt's among the passes"},
		{"draft_shadows", "tokens that a drafter proposed while drafting was off, compared with the text and never run"},
		{"draft_state_changes", "how often drafting began or ended"},
		{"draft_wasted_loads", "experts that a batch loaded for drafts alone which were then rejected"},
		{"draft_wasted_bytes", "their payload, part of host_load_bytes"},
		{"draft_evictions", "experts that left the LRU pool for those loads, part of evictions{lru}"},
		{"evictions{lru}", "experts that left the LRU pool: their slot was needed, or they were above the cap after a layer"},
		{"cap_changes", "how often the cap was lowered while the model ran, because memory had become scarce"},
		{"rss_bytes", "resident set of the process at the end of the run"},
		{"rss_peak_bytes", "largest resident set of the process since its start"},
		{"major_faults", "page faults of the process that had to read from a drive"},
		{"minor_faults", "page faults of the process that were served from memory"},
		{"device_read_bytes", "bytes that the kernel read from drives for the process, loading and page faults included; 0 where it does not count"},
	}
}
