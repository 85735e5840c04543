package tiers

import (
	"fmt"
	"iter"
)

// This file says which slot a miss gets and who leaves after a layer. It is
// the only one that asks the policy.

// kept is the experts of a class that stay in memory: where they are, and the
// policy that says who leaves. During a step the policy also counts those that
// the step loads, which get their place in slots at its end.
//
// The experts of a class are of one size, so budgets are counted in experts.
type kept struct {
	policy  Policy
	hinted  Hinted    // policy, if it takes hints, else nil
	slots   [][]*slot // by layer and expert; nil: not here
	n       int
	cold    cold
	shadows []shadow
}

func (k *kept) open(c *Cache, cl *class) error {
	conf := PolicyConfig{Layers: make([]PolicyLayer, len(c.layers)), Budget: int64(cl.size.Keep), History: c.opt.History}
	k.slots = make([][]*slot, len(c.layers))
	all := 0
	for l, layer := range c.layers {
		if layer.class == cl {
			conf.Layers[l] = PolicyLayer{Experts: layer.experts, Bytes: 1}
			k.slots[l] = make([]*slot, layer.experts)
			all += layer.experts
		}
	}
	k.cold = newCold(all)
	var err error
	k.policy, err = NewPolicy(c.opt.Policy, conf)
	k.hinted, _ = k.policy.(Hinted)
	if err != nil {
		return err
	}
	return k.openShadows(c, cl)
}

// peek finds an expert.
func (k *kept) peek(key Key) (*slot, bool) {
	s := k.slots[key.Layer][key.Expert]
	return s, s != nil
}

// put enters an expert that the policy counts already.
func (k *kept) put(s *slot) {
	k.slots[s.fetch.Key.Layer][s.fetch.Key.Expert] = s
	k.n++
}

// remove takes an expert out, of the policy too. It need not be here yet.
func (k *kept) remove(key Key) {
	if at := &k.slots[key.Layer][key.Expert]; *at != nil {
		*at = nil
		k.n--
		k.cold.remove(key)
	}
	k.policy.Remove(key)
}

// removeVictim takes out who is to leave, nil if the step uses all: before those
// that the policy names, what only rejected drafts used.
func (k *kept) removeVictim() *slot {
	key, ok := k.cold.oldest()
	if !ok {
		key, ok = k.policy.Victim()
	}
	if !ok {
		return nil
	}
	s, ok := k.peek(key)
	if !ok || s.held {
		panic(fmt.Sprintf("tiers: the policy gives up %v, which is in use or not here", key))
	}
	k.remove(key)
	return s
}

// all gives the experts with their slots, by key.
func (k *kept) all() iter.Seq2[Key, *slot] {
	return func(yield func(Key, *slot) bool) {
		for l, slots := range k.slots {
			for e, s := range slots {
				if s != nil && !yield(Key{Layer: int32(l), Expert: int32(e)}, s) {
					return
				}
			}
		}
	}
}

// routed is what Routed was told, for the Begin after it.
type routed struct {
	ids    []int32
	scores []float32
}

// Routed tells the policy more of the batch that the next Begin is for. Without
// it the policy learns which experts are used, but not by which position.
//
//	ids     [positions, top-k]  the router's choices, position by position
//	scores  [experts]           what it chose by, for a single position; else nil
//
// Both are read during that Begin. A hint decides who stays in memory, and
// nothing else.
func (c *Cache) Routed(ids []int32, scores []float32) { c.routed = routed{ids, scores} }

// enter tells the policy what the step uses: before the first slot is claimed,
// so that no miss takes the slot of what the step needs.
func (s *Step) enter(experts, uses []int32) {
	k, r := &s.class.kept, s.c.routed
	s.c.routed = routed{}
	if len(r.ids) == 0 { // each use once, and no word of positions
		positions := int32(1)
		if len(experts) > s.c.opt.TopK {
			positions = 2
		}
		for _, u := range uses {
			positions = max(positions, u)
		}
		k.policy.Begin(int(s.layer), int(positions))
		for i, e := range experts {
			if !s.items[i].fixed() { // what is in another tier is none of the policy's
				k.policy.Use(Key{Layer: s.layer, Expert: e}, 0)
			}
		}
		s.shade(r, int(positions), experts)
		return
	}
	for _, e := range experts {
		s.seen[e] = true
	}
	k.policy.Begin(int(s.layer), len(r.ids)/s.c.opt.TopK)
	for i, e := range r.ids {
		if e < 0 || int(e) >= len(s.seen) || !s.seen[e] {
			panic(fmt.Sprintf("tiers: layer %d: Routed names expert %d, Begin does not", s.layer, e))
		}
		if l := &s.c.layers[s.layer]; l.fixed[e] == nil && !l.vram[e] {
			k.policy.Use(Key{Layer: s.layer, Expert: e}, i/s.c.opt.TopK)
		}
	}
	for _, e := range experts {
		s.seen[e] = false
	}
	if k.hinted != nil && r.scores != nil {
		k.hinted.Scores(r.scores)
	}
	s.shade(r, len(r.ids)/s.c.opt.TopK, experts)
}

// claim gives a slot to load into, or nil if every slot is in use: a free one,
// else that of the expert which the policy wants least, else that of the expert
// of this step which was done first.
func (s *Step) claim() *slot {
	cl := s.class
	if n := len(cl.free); n > 0 {
		sl := cl.free[n-1]
		cl.free = cl.free[:n-1]
		return sl
	}
	if sl := cl.kept.removeVictim(); sl != nil {
		s.c.evicted(sl)
		return sl
	}
	if s.spared < len(s.spare) {
		it := &s.items[s.spare[s.spared]]
		s.spared++
		sl := it.slot
		it.slot = nil
		cl.kept.remove(sl.fetch.Key)
		s.c.evicted(sl)
		return sl
	}
	return nil
}

// settle gives what the step has loaded its place, and lets go of what is above
// the cap, which may be what the step has just used.
func (s *Step) settle() {
	cl := s.class
	for i := range s.items {
		it := &s.items[i]
		sl := it.slot
		if it.fixed() {
			it.slot = nil
			continue
		}
		if sl == nil {
			if it.state == waiting { // it never got a slot
				cl.kept.policy.Remove(Key{Layer: s.layer, Expert: it.expert})
			}
			continue
		}
		it.slot = nil
		sl.held = false
		switch {
		case it.hit():
		case it.state == failed:
			cl.kept.policy.Remove(sl.fetch.Key)
			cl.free = append(cl.free, sl)
		default:
			cl.kept.put(sl)
		}
	}
	cl.kept.policy.End()
	s.c.trim(cl, cl.size.Keep)
	for i := range cl.kept.shadows {
		cl.kept.shadows[i].end()
	}
}

// trim lets go of what is above keep experts, between two batches.
func (c *Cache) trim(cl *class, keep int) {
	for cl.kept.n > keep || cl.kept.policy.Over() {
		sl := cl.kept.removeVictim()
		c.evicted(sl)
		c.release(sl)
	}
}

// evicted counts an expert that leaves memory.
func (c *Cache) evicted(sl *slot) {
	sl.scrub()
	if !c.step.ended {
		c.layers[c.step.layer].evicted++
	}
	c.mu.Lock()
	c.stats.Evictions++
	c.mu.Unlock()
}
