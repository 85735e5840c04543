package tiers

import "fmt"

// A LayerSize is what the arithmetic of the cap knows of a MoE layer.
type LayerSize struct {
	Experts     int
	SlotBytes   int64 // Source.SlotBytes; in mmap mode 0 promises nothing
	ExpertBytes int64 // Source.ExpertBytes
	Apart       int   // of the experts, those in other tiers than the pool: pinned or in VRAM
}

// A ClassSize is the slots of one class: Keep for experts that stay, Staging
// for those in flight, of Bytes each.
type ClassSize struct {
	Bytes         int64 // slot bytes, rounded up to whole pages
	Keep, Staging int
}

// page is the alignment of a slot: that of a page of memory, which is also
// enough for direct reads.
const page = 4096

// SlotSize is what an expert takes in memory: its slot, in whole pages.
func SlotSize(slotBytes int64) int64 { return (slotBytes + page - 1) / page * page }

// sizeClass counts the slots of a class whose layers have these experts beside
// those in other tiers. No class has more slots than experts.
func sizeClass(slotBytes int64, experts []int, staging, limit int) ClassSize {
	keep, all := 0, 0
	for _, n := range experts {
		keep += min(limit, n)
		all += n
	}
	if all == 0 {
		staging, all = 1, 1 // the way of what belongs to a device
	}
	return ClassSize{
		Bytes:   SlotSize(slotBytes),
		Keep:    keep,
		Staging: min(staging, all-keep),
	}
}

// PoolBytes is what New allocates for these layers: the slots that stay and
// the staging slots, top-k and what prefetch has ahead.
func PoolBytes(layers []LayerSize, inFlight, limit int) (lru, staging int64) {
	lru, staging, _ = poolSize(layers, inFlight, limit)
	return lru, staging
}

func poolSize(layers []LayerSize, inFlight, limit int) (lru, staging int64, slots int) {
	type size struct{ slot, payload int64 }
	classes := make(map[size][]int)
	for _, l := range layers {
		k := size{l.SlotBytes, l.ExpertBytes}
		classes[k] = append(classes[k], l.Experts-l.Apart)
	}
	for k, experts := range classes {
		cs := sizeClass(k.slot, experts, inFlight, limit)
		lru += int64(cs.Keep) * cs.Bytes
		staging += int64(cs.Staging) * cs.Bytes
		slots += cs.Keep + cs.Staging
	}
	return lru, staging, slots
}

// A Plan asks which cap fits into memory.
type Plan struct {
	Layers    []LayerSize // none, with TopK 0: the model is dense
	TopK      int
	Ahead     int   // staging slots of prefetch, beside the top-k
	Fixed     int64 // bytes of the process beside the pool: base, dense, kv, scratch, pinned
	Available int64 // bytes that the process may have in all, base included (see Memory.Budget)
	Given     bool  // available was asked for, and is not all that there is
	Cap       int   // requested; 0 is auto
}

// A CapPlan is the answer to a Plan.
type CapPlan struct {
	Cap          int
	Slots        int    // of the pool: those that stay and those in flight
	LRU, Staging int64  // bytes of the pool at that cap
	Peak         int64  // projected resident set at that cap
	Words        string // why it is not the cap that was requested; "" if it is
	Tight        string // that a requested cap leaves less than the reserve; "" if not
}

// reserve is what an automatic cap leaves of the available memory: a tenth,
// for the Go heap, stacks, page tables, the page cache of what else runs, and
// the error of the projection, but at least 256 MiB, since most of that does
// not shrink with the machine, and at most a quarter, so that small containers
// keep room for experts. A cap that was asked for may take it, in words.
func reserve(available int64) int64 {
	return min(max(available/10, 256<<20), available/4)
}

// Fit finds the cap: the requested one, lowered in words to what the model has
// and to what memory holds, or, if none was requested, the largest that leaves
// a reserve. *NoRoomError: not even cap 1 fits. Of a dense model the cap is 0.
func (p Plan) Fit() (CapPlan, error) {
	if len(p.Layers) == 0 && p.TopK == 0 && p.Cap == 0 {
		if p.Fixed > p.Available {
			return CapPlan{}, &NoRoomError{What: "the model, which has no experts that could stay on the drive", Need: p.Fixed, Available: p.Available, Given: p.Given}
		}
		return p.at(0), nil
	}
	if p.Cap < 0 || p.TopK < 1 || len(p.Layers) == 0 {
		return CapPlan{}, fmt.Errorf("tiers: cannot plan cap %d, top-k %d, %d layers: each must be at least 1 (cap 0: auto)", p.Cap, p.TopK, len(p.Layers))
	}
	most := 0
	for _, l := range p.Layers {
		most = max(most, l.Experts)
	}
	want := p.Cap
	if p.Cap == 0 || p.Cap > most {
		want = most
	}
	budget := p.Available
	if p.Cap == 0 {
		budget -= reserve(p.Available)
		if p.at(1).Peak > budget {
			want, budget = 1, p.Available // better a tight run than none
		}
	}
	// The largest cap in [1, want] that fits. A class has min(Keep + top-k, all
	// experts) slots, so the peak never falls as the cap grows.
	lo, hi := 0, want
	for lo < hi {
		mid := (lo + hi + 1) / 2
		if p.at(mid).Peak <= budget {
			lo = mid
		} else {
			hi = mid - 1
		}
	}
	if lo == 0 {
		return CapPlan{}, &NoRoomError{What: "one expert per layer (cap 1)", Need: p.at(1).Peak, Available: p.Available, Given: p.Given}
	}
	got := p.at(lo)
	switch {
	case p.Cap == 0 && lo == most:
		got.Words = fmt.Sprintf("cap %d chosen: all experts of a layer (projected peak %s, available %s)", lo, GB(got.Peak), GB(p.Available))
	case p.Cap == 0:
		got.Words = fmt.Sprintf("cap %d chosen of %d (projected peak %s, available %s, of which %s in reserve)", lo, most, GB(got.Peak), GB(p.Available), GB(p.Available-budget))
	case lo < want:
		got.Words = fmt.Sprintf("cap lowered %d -> %d (projected peak %s, available %s)", p.Cap, lo, GB(p.at(want).Peak), GB(p.Available))
	case lo < p.Cap:
		got.Words = fmt.Sprintf("cap lowered %d -> %d (the model has %d experts per layer)", p.Cap, lo, most)
	}
	if left := p.Available - got.Peak; p.Cap > 0 && left < reserve(p.Available) {
		got.Tight = fmt.Sprintf("cap %d leaves %s of the available %s, where one that is chosen leaves %s for the Go heap, page tables and the page cache: under a limit of memory the process may be killed; leave --cap out, or ask for less",
			lo, GB(left), GB(p.Available), GB(reserve(p.Available)))
	}
	return got, nil
}

// at is the plan at one cap.
func (p Plan) at(limit int) CapPlan {
	lru, staging, slots := poolSize(p.Layers, p.TopK+p.Ahead, limit)
	return CapPlan{Cap: limit, Slots: slots, LRU: lru, Staging: staging, Peak: p.Fixed + lru + staging}
}
