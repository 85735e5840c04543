package tiers

import (
	"fmt"

	"sluice/internal/invariants"
	"sluice/internal/offheap"
	"sluice/storage"
)

// A slot is room for one expert of its class.
//
// States: free (in class.free), loading (the io goroutine has it), resident
// (its bytes are those of fetch.Key). A resident slot is in kept of its class,
// except the fresh loads of a step, which enter it at End. While it loads or
// is held it is never a victim.
type slot struct {
	fetch storage.Fetch // the io goroutine's from its batch until it arrives, else the step's
	next  Key           // what the io goroutine is to load
	item  int           // index in the step that loads it
	held  bool          // in use by the step
	used  bool          // some step has said Done of these bytes
	full  bool          // the io goroutine's: fetch.Parts hold an expert
}

// A class is the layers whose experts have the same size: equal slots, one
// policy. Any slot of a class takes any of its experts, so no byte is
// lost to fragmentation.
type class struct {
	slotBytes int64 // as the source says; 0: slots hold views
	payload   int64
	size      ClassSize
	arena     []byte // the memory of all slots; nil for views
	granted   bool   // the ledger has granted size
	slots     []slot
	free      []*slot
	kept      kept
}

// open maps the slots and makes them resident, so that no page fault stands
// in the way of a token.
func (cl *class) open() error {
	n := cl.size.Keep + cl.size.Staging
	cl.slots = make([]slot, n)
	cl.free = make([]*slot, 0, n)
	if cl.slotBytes > 0 {
		var err error
		if cl.arena, err = offheap.Alloc(int64(n) * cl.size.Bytes); err != nil {
			return fmt.Errorf("tiers: %d slots of %d bytes: %w; lower the cap", n, cl.size.Bytes, err)
		}
		offheap.Populate(cl.arena)
	}
	for i := n - 1; i >= 0; i-- { // the lowest is claimed first
		s := &cl.slots[i]
		if cl.arena != nil {
			at := int64(i) * cl.size.Bytes
			s.fetch.Slot = cl.arena[at : at+cl.slotBytes : at+cl.slotBytes]
		}
		cl.free = append(cl.free, s)
	}
	return nil
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
