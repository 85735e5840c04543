package tiers

// This file lets VRAM follow what is used: an expert of the LRU pool takes the
// place of one in VRAM that is used less. It costs an upload and no read, and the
// other must be read again when it is next wanted, so it is done seldom and only
// where the difference is plain. Which expert lies where never changes a bit.

const (
	// swapEvery is the passes from one look to the next: enough for an expert that a
	// router likes to be seen a few times.
	swapEvery = 64
	// swapMost bounds the uploads after one pass, which the next waits for.
	swapMost = 4
	// An expert takes the place of another if it is used half as much again, and
	// swapOver times more at that.
	swapOver = 4
)

// swaps is how often experts have been used of late: the uses since the last
// look, and half of what was there before.
type swaps struct {
	last   int32 // the last layer with experts; its end ends a pass
	passes int
	heat   [][]int64 // by layer and expert; nil: VRAM stays as it is
	seen   [][]int64 // uses at the last look
}

func (w *swaps) open(c *Cache) {
	if c.opt.Device == nil || len(c.opt.VRAM) == 0 || c.opt.KeepHost || c.opt.FixVRAM {
		return
	}
	w.heat, w.seen = make([][]int64, len(c.layers)), make([][]int64, len(c.layers))
	for i, l := range c.layers {
		if l.experts > 0 && (c.opt.Nextn == 0 || i < c.opt.Nextn) {
			w.last = int32(i)
		}
		if l.experts > 0 {
			w.heat[i], w.seen[i] = make([]int64, l.experts), make([]int64, l.experts)
		}
	}
}

// passed is told of each layer's end, between two steps.
func (w *swaps) passed(c *Cache, layer int32) {
	if w.heat == nil || layer != w.last {
		return
	}
	if w.passes++; w.passes%swapEvery != 0 {
		return
	}
	for i := range c.layers {
		for e, n := range c.layers[i].uses {
			w.heat[i][e] = w.heat[i][e]/2 + n - w.seen[i][e]
			w.seen[i][e] = n
		}
	}
	for range swapMost {
		if !w.swap(c) {
			return
		}
	}
}

// swap exchanges the one pair that gains most, false if none gains enough.
func (w *swaps) swap(c *Cache) bool {
	var out, in Key
	var chosen *slot
	best := int64(-1)
	for _, cl := range c.classes {
		if cl.slotBytes == 0 {
			continue // views of a file, which may be gone
		}
		cold, hot := Key{Expert: -1}, Key{}
		var found *slot
		for i := range c.layers {
			if c.layers[i].class != cl {
				continue
			}
			for e, there := range c.layers[i].vram {
				if there && (cold.Expert < 0 || w.heat[i][e] < w.heat[cold.Layer][cold.Expert]) {
					cold = Key{Layer: int32(i), Expert: int32(e)}
				}
			}
			for e, sl := range cl.kept.slots[i] {
				if sl != nil && (found == nil || w.heat[i][e] > w.heat[hot.Layer][hot.Expert]) {
					hot, found = Key{Layer: int32(i), Expert: int32(e)}, sl
				}
			}
		}
		if cold.Expert < 0 || found == nil {
			continue
		}
		h, o := w.heat[hot.Layer][hot.Expert], w.heat[cold.Layer][cold.Expert]
		d := c.opt.Device
		if h < o+o/2+swapOver || h-o <= best || d.ExpertBytes(int(hot.Layer), cl.payload) != d.ExpertBytes(int(cold.Layer), cl.payload) {
			continue
		}
		out, in, chosen, best = cold, hot, found, h-o
	}
	if chosen == nil {
		return false
	}
	c.layers[out.Layer].vram[out.Expert] = false
	c.mu.Lock()
	c.stats.VRAMEvictions++
	c.mu.Unlock()
	if err := c.opt.Device.Replace(out, in, &chosen.fetch.Parts); err != nil {
		w.heat = nil
		c.notices = append(c.notices, "what is in VRAM stays there from now on: "+err.Error())
		return false
	}
	chosen.class.kept.remove(in)
	c.layers[in.Layer].vram[in.Expert] = true
	for i := range chosen.class.kept.shadows {
		chosen.class.kept.shadows[i].swapped(in)
	}
	c.release(chosen)
	c.mu.Lock()
	c.stats.VRAMSwaps++
	c.mu.Unlock()
	return true
}
