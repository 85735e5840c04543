package tiers

import (
	"fmt"

	"sluice/internal/invariants"
	"sluice/internal/offheap"
	"sluice/storage"
)

// A slot is room for one expert of its class.
//
// States: free (in class.free), loading (the source has it), resident
// (its bytes are those of fetch.Key). A resident slot is in kept of its class,
// except the fresh loads of a step, which enter it at End, and what was read
// ahead, which enters it with the step that uses it. While it loads or is held
// it is never a victim.
//
// The slots of the pinned set are outside of this: once loaded they stay.
type slot struct {
	fetch    storage.Fetch // the source's from its submission until it arrives
	next     Key           // what is to be loaded
	class    *class
	item     int    // index in the step that loads it
	held     bool   // in use by the step
	used     bool   // some step has said Done of these bytes
	ahead    flight // not onGround: prefetch has it
	unwanted bool   // it flies for nothing
	preload  bool   // Preload has it
	full     bool   // fetch.Parts hold an expert, of which the source is yet to hear that it left
}

// A class is the layers whose experts have the same size: equal slots, one
// policy. Any slot of a class takes any of its experts, so no byte is
// lost to fragmentation.
type class struct {
	slotBytes int64 // as the source says; 0: slots hold views
	payload   int64
	experts   []int // of each layer, those of other tiers left out
	size      ClassSize
	arena     []byte // the memory of all slots; nil for views
	granted   [purposes]int64
	slots     []slot
	free      []*slot
	kept      kept

	fixedKeys  []Key  // what they hold
	fixed      []slot // the pinned set, and copies of what is in VRAM
	fixedArena []byte
	vramBytes  int64 // of the class's experts in VRAM, as allocated
}

// open maps the slots and makes them resident, so that no page fault stands
// in the way of a token.
func (cl *class) open() error {
	n := cl.size.Keep + cl.size.Staging
	var err error
	cl.slots = make([]slot, n)
	if cl.arena, err = cl.lay(cl.slots); err != nil {
		return fmt.Errorf("%w; lower the cap", err)
	}
	if cl.fixedArena, err = cl.lay(cl.fixed); err != nil {
		return fmt.Errorf("%w; pin fewer", err)
	}
	cl.free = make([]*slot, 0, n)
	for i := n - 1; i >= 0; i-- { // the lowest is claimed first
		cl.free = append(cl.free, &cl.slots[i])
	}
	return nil
}

// lay maps memory for slots, side by side, and makes it resident. Slots of
// views take none.
func (cl *class) lay(slots []slot) (arena []byte, err error) {
	for i := range slots {
		slots[i].class = cl
	}
	if cl.slotBytes == 0 || len(slots) == 0 {
		return nil, nil
	}
	if arena, err = offheap.Alloc(int64(len(slots)) * cl.size.Bytes); err != nil {
		return nil, fmt.Errorf("tiers: %d slots of %d bytes: %w", len(slots), cl.size.Bytes, err)
	}
	offheap.Populate(arena)
	for i := range slots {
		at := int64(i) * cl.size.Bytes
		slots[i].fetch.Slot = arena[at : at+cl.slotBytes : at+cl.slotBytes]
	}
	return arena, nil
}

// poison is what a slot that was let go reads as in builds with -tags
// invariants. As f16 and as float32 it is a large negative number.
const poison = 0xfb

// scrub makes a use after release show.
func (s *slot) scrub() {
	if invariants.Enabled {
		for i := range s.fetch.Slot {
			s.fetch.Slot[i] = poison
		}
	}
}
