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
		{"tier_misses", "routed experts that were in no tier, each the cause of one load; with all tier_hits they sum to routed_experts_total"},
		{"host_loads_total{slab}", "experts read from a drive into our own memory by direct I/O and io_uring"},
		{"host_loads_total{pread}", "experts read from a drive into our own memory by a pool of readers"},
		{"host_loads_total{mmap}", "experts taken as views of the page cache, whether or not the drive was asked"},
		{"host_load_bytes", "bytes of the experts loaded, their payload alone"},
		{"host_read_bytes", "bytes asked of the drives for them, rounding to sectors and retries included"},
		{"host_read_retries", "reads done again after an error, an unexpected end or a bad checksum"},
		{"host_checksum_retries", "of them, experts of a slab whose checksum did not fit the first time"},
		{"host_load_wait_ns", "nanoseconds in which the decode loop had nothing to compute and waited for a load"},
		{"host_loads_failed", "loads that failed after the retry; each failed a request"},
		{"host_loads_dropped", "misses that were never read, because the request had failed or was cancelled; misses = loads + failed + dropped"},
		{"evictions{lru}", "experts that left the LRU pool: their slot was needed, or they were above the cap after a layer"},
		{"rss_bytes", "resident set of the process at the end of the run"},
		{"rss_peak_bytes", "largest resident set of the process since its start"},
		{"major_faults", "page faults of the process that had to read from a drive"},
		{"minor_faults", "page faults of the process that were served from memory"},
	}
}
