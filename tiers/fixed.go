package tiers

import (
	"context"
	"fmt"
)

// This file is the tiers whose experts are chosen at the start: VRAM and the
// pinned set in RAM.

// A Device holds experts in memory of its own, where its backend computes them.
// One goroutine calls it.
type Device interface {
	// ExpertBytes is what an expert takes as allocated: the payload with what the
	// device adds to it.
	ExpertBytes(layer int, payload int64) int64
	// Upload copies an expert in. The parts are valid until it returns.
	Upload(k Key, parts *Parts) error
	// Lend tells of the memory in which the parts of Upload will lie, until it is called
	// again; without any none is lent any more. It stays as it is meanwhile, so the
	// device may copy from there itself.
	Lend(mem [][]byte)
	// Replace copies an expert in, over one that is there and takes as much. After an
	// error neither is there. The parts are valid until it returns.
	Replace(old, k Key, parts *Parts) error
}

// setApart notes which experts are in VRAM or pinned, and counts them by layer.
func (c *Cache) setApart() (apart []int, err error) {
	apart = make([]int, len(c.layers))
	at := func(k Key) (*layer, error) {
		if k.Layer < 0 || int(k.Layer) >= len(c.layers) || k.Expert < 0 || int(k.Expert) >= c.layers[k.Layer].experts {
			return nil, fmt.Errorf("tiers: %v is to be held apart, the model has none of that number", k)
		}
		return &c.layers[k.Layer], nil
	}
	if len(c.opt.VRAM) > 0 && c.opt.Device == nil {
		return nil, fmt.Errorf("tiers: %d experts for VRAM, and no device", len(c.opt.VRAM))
	}
	for _, k := range c.opt.VRAM {
		l, err := at(k)
		if err != nil {
			return nil, err
		}
		if l.vram[k.Expert] {
			return nil, fmt.Errorf("tiers: %v is given twice for VRAM", k)
		}
		l.vram[k.Expert] = true
		l.class.vramBytes += c.opt.Device.ExpertBytes(int(k.Layer), l.class.payload)
		if c.opt.KeepHost {
			l.class.fixedKeys = append(l.class.fixedKeys, k)
		}
		apart[k.Layer]++
	}
	pinned := make(map[Key]bool, len(c.opt.Pinned))
	for _, k := range c.opt.Pinned {
		l, err := at(k)
		if err != nil {
			return nil, err
		}
		if l.vram[k.Expert] || pinned[k] {
			return nil, fmt.Errorf("tiers: %v is to be pinned and is already in a tier", k)
		}
		pinned[k] = true
		l.class.fixedKeys = append(l.class.fixedKeys, k)
		apart[k.Layer]++
	}
	for _, cl := range c.classes {
		cl.fixed = make([]slot, len(cl.fixedKeys))
	}
	return apart, nil
}

// placeFixed gives each expert outside the pool its slot.
func (c *Cache) placeFixed() {
	for _, cl := range c.classes {
		for i, k := range cl.fixedKeys {
			s := &cl.fixed[i]
			s.next, s.preload = k, true
			c.layers[k.Layer].fixed[k.Expert] = s
		}
	}
}

// find says which tier has an expert, in the order in which the tiers are
// asked, and its slot. It is the one place that knows the order, and the one
// predicate of all who would read: what is not missed is not read.
func (c *Cache) find(k Key) (bucket, *slot) {
	l := &c.layers[k.Layer]
	fixed := l.fixed[k.Expert]
	switch {
	case l.vram[k.Expert]:
		return inVRAM, fixed
	case fixed != nil:
		return inPinned, fixed
	}
	if sl, ok := l.class.kept.peek(k); ok {
		return inLRU, sl
	}
	if sl := c.ahead.of(k); sl != nil {
		return inAhead, sl
	}
	return missed, nil
}

// preloadAtOnce is how many experts Preload has in flight: enough for a drive's
// full rate, few enough that a cancellation is heard.
const preloadAtOnce = 16

// Preload reads the pinned set and the experts of VRAM. It is called once,
// before the first step; without such experts it reads nothing. After an error
// the cache must be closed.
func (c *Cache) Preload(ctx context.Context) error {
	var batch []*slot
	var err error
	for _, cl := range c.classes {
		for i := range cl.fixed {
			batch = append(batch, &cl.fixed[i])
			if len(batch) == preloadAtOnce {
				err, batch = c.preload(ctx, batch), batch[:0]
			}
			if err != nil {
				return err
			}
		}
	}
	if err := c.preload(ctx, batch); err != nil {
		return err
	}
	if c.opt.KeepHost || len(c.opt.VRAM) == 0 {
		return nil // they were among the slots outside the pool
	}
	c.opt.Device.Lend(c.way())
	defer c.opt.Device.Lend(nil)
	for _, k := range c.opt.VRAM {
		cl := c.layers[k.Layer].class
		sl := cl.free[len(cl.free)-1]
		cl.free = cl.free[:len(cl.free)-1]
		sl.next, sl.preload = k, true
		err := c.preload(ctx, append(batch[:0], sl))
		sl.preload = false
		c.release(sl)
		if err != nil {
			return err
		}
	}
	return nil
}

// way is the memory of the slots by which Preload brings experts to the device.
func (c *Cache) way() (mem [][]byte) {
	for _, cl := range c.classes {
		if cl.vramBytes == 0 || cl.slotBytes == 0 {
			continue
		}
		for i := range cl.slots {
			if at := int64(i) * cl.size.Bytes; &cl.slots[i] == cl.free[len(cl.free)-1] {
				mem = append(mem, cl.arena[at:at+cl.size.Bytes]) // whole pages
			}
		}
	}
	return mem
}

// preload reads a few experts, and copies to the device what belongs there.
func (c *Cache) preload(ctx context.Context, batch []*slot) error {
	if err := ctx.Err(); err != nil || len(batch) == 0 {
		return err
	}
	c.load(batch, false)
	var failed error
	for range batch {
		sl, _ := c.await(context.Background())
		c.land(sl)
		err := sl.fetch.Err
		if err == nil && c.layers[sl.fetch.Key.Layer].vram[sl.fetch.Key.Expert] {
			err = c.opt.Device.Upload(sl.fetch.Key, &sl.fetch.Parts)
		}
		if err != nil && failed == nil {
			failed = fmt.Errorf("tiers: preload %v: %w", sl.fetch.Key, err)
		}
	}
	return failed
}

// landFixed counts a load of Preload.
func (c *Cache) landFixed(sl *slot) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stats.PreloadLoads++
	if sl.fetch.Err != nil {
		c.stats.LoadsFailed++
		return
	}
	c.stats.PreloadBytes += sl.class.payload
}

// release gives a slot of the pool back whose expert is not wanted.
func (c *Cache) release(sl *slot) {
	sl.scrub()
	sl.held = false
	sl.class.free = append(sl.class.free, sl)
	if sl.class.slotBytes == 0 {
		c.drop(sl) // what is not loaded over is dropped now
	}
}
