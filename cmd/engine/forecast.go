package engine

import (
	"errors"
	"fmt"
	"time"

	"sluice/internal/offheap"
	"sluice/storage"
	"sluice/tiers"
)

// BytesPerToken is what a token reads when no expert is in memory: top-k
// experts of each layer that has a router.
func (p *Plan) BytesPerToken() (n int64) {
	for _, r := range p.Spec.Roles {
		n += int64(p.Spec.TopK) * p.Source.ExpertBytes(r.Layer)
	}
	return n
}

// Held is the share of the model's experts that are in memory at the plan's
// cap, in VRAM, pinned or in the pool; 1 if it has none.
func (p *Plan) Held() float64 {
	all, held := 0, len(p.VRAM)+len(p.Pinned)
	apart := make(map[int32]int)
	for _, set := range [][]tiers.Key{p.VRAM, p.Pinned} {
		for _, k := range set {
			apart[k.Layer]++
		}
	}
	for _, r := range p.Spec.Roles {
		all += r.Experts
		held += min(p.Cap.Cap, r.Experts-apart[int32(r.Layer)])
	}
	if all == 0 {
		return 1
	}
	return float64(held) / float64(all)
}

// A Row is what a rate of hits means: bytes that a token reads, and how many
// tokens a second the drive allows.
type Row struct {
	HitPercent    int     `json:"hit_pct"`
	BytesPerToken int64   `json:"bytes_per_token"`
	TokensPerSec  float64 `json:"tok_per_s_ceiling"`
}

// Forecast is the table of what hits mean with a drive of a rate in bytes by
// second. The ceiling is that of the drive alone: nothing is computed in it. A
// dense model reads nothing: there are no rows.
func (p *Plan) Forecast(rate float64) []Row {
	rows := []Row{}
	if p.Dense() {
		return rows
	}
	cold := p.BytesPerToken()
	for _, hit := range []int{0, 25, 50, 75, 90, 95, 99} {
		n := cold * int64(100-hit) / 100
		rows = append(rows, Row{hit, n, rate / float64(max(n, 1))})
	}
	return rows
}

// How DriveRate measures: as decoding reads, whole experts with a few in flight.
// 64 MiB tell the rate of a fast drive, a third of a second that of a slow one.
const (
	rateInFlight = 4
	rateBytes    = 64 << 20
	rateTime     = 300 * time.Millisecond
)

// DriveRate reads experts from all over the model through the plan's source,
// and returns the bytes by second that arrived. Their bytes are not kept. Of a
// dense model, from whose drive no token reads, the rate is 0.
func (p *Plan) DriveRate() (rate float64, err error) {
	if p.Dense() {
		return 0, nil
	}
	slot := int64(0)
	for _, r := range p.Spec.Roles {
		slot = max(slot, tiers.SlotSize(p.Source.SlotBytes(r.Layer)))
	}
	var arena []byte
	if slot > 0 {
		if arena, err = offheap.Alloc(rateInFlight * slot); err != nil {
			return 0, fmt.Errorf("measure the drive: %w", err)
		}
		defer offheap.Free(arena)
		offheap.Populate(arena)
	}
	all := 0
	for _, r := range p.Spec.Roles {
		all += r.Experts
	}
	var fetches [rateInFlight]storage.Fetch
	var one [1]*storage.Fetch
	next, flying, bytes := 0, 0, int64(0)
	start := time.Now()
	submit := func(f *storage.Fetch) {
		if next == all || bytes >= rateBytes || time.Since(start) >= rateTime {
			return
		}
		// Layers in turn, and in each layer another expert at every turn: no two
		// reads are neighbours.
		r := p.Spec.Roles[next%len(p.Spec.Roles)]
		turn := next / len(p.Spec.Roles)
		f.Key = storage.Key{Layer: int32(r.Layer), Expert: int32((turn*7919 + 1) % r.Experts)}
		f.Err = nil
		one[0] = f
		p.Source.Submit(one[:])
		next++
		flying++
	}
	for i := range fetches {
		if arena != nil {
			at := int64(i) * slot
			fetches[i].Slot = arena[at : at+slot : at+slot]
		}
		submit(&fetches[i])
	}
	var failed error
	for flying > 0 {
		f := p.Source.Reap()
		flying--
		if f.Err != nil {
			failed = errors.Join(failed, f.Err)
			continue
		}
		bytes += p.Source.ExpertBytes(int(f.Key.Layer))
		p.Source.Evict(f)
		if failed == nil {
			submit(f)
		}
	}
	if failed != nil {
		return 0, fmt.Errorf("measure the drive: %w", failed)
	}
	return float64(bytes) / max(time.Since(start).Seconds(), 1e-9), nil
}
