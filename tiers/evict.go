package tiers

// This file says which slot a miss gets and who leaves after a layer.

// claim gives a slot to load into, or nil if every slot is in use: a free one,
// else that of the least recently used expert, else that of the expert of this
// step which was done first.
func (s *Step) claim() *slot {
	cl := s.class
	if n := len(cl.free); n > 0 {
		sl := cl.free[n-1]
		cl.free = cl.free[:n-1]
		return sl
	}
	if _, sl, ok := cl.order.GetOldest(); ok && !sl.held {
		cl.order.RemoveOldest()
		s.c.evicted(sl)
		return sl
	}
	if s.spared < len(s.spare) {
		it := &s.items[s.spare[s.spared]]
		s.spared++
		sl := it.slot
		it.slot = nil
		if it.hit {
			cl.order.Remove(sl.fetch.Key)
		}
		s.c.evicted(sl)
		return sl
	}
	return nil
}

// settle enters what the step used into the recency order, most recent last in
// the order that Begin was given, and lets go of what is above the cap.
func (s *Step) settle() {
	cl := s.class
	for i := range s.items {
		it := &s.items[i]
		sl := it.slot
		if sl == nil {
			continue
		}
		it.slot = nil
		sl.held = false
		switch {
		case it.hit:
			cl.order.Get(sl.fetch.Key)
		case it.state == failed:
			cl.free = append(cl.free, sl)
		default:
			cl.order.Add(sl.fetch.Key, sl)
		}
	}
	for cl.order.Len() > cl.size.Keep {
		_, sl, _ := cl.order.RemoveOldest()
		s.c.evicted(sl)
		cl.free = append(cl.free, sl)
		if cl.slotBytes == 0 {
			s.c.work <- work{drop: sl} // what is not loaded over is dropped now
		}
	}
}

// evicted counts an expert that leaves memory.
func (c *Cache) evicted(sl *slot) {
	sl.scrub()
	c.mu.Lock()
	c.stats.Evictions++
	c.mu.Unlock()
}
