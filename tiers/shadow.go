package tiers

// This file counts what a tier was worth: the loads that the run would have
// needed more without it. Experts of VRAM or of the pinned set would otherwise
// have been in the pool, at times, and others would have had to leave for them. So
// what a tier served says less than a second pool does that has no such tier above it.

// A shadow is the pool of a class as it would be without one tier, VRAM or the
// pinned set, whose experts then compete for the pool like the others: its
// policy and what would be in it, but no slot and no byte. It takes its victims as
// the step does (evict.go), as if every read succeeded; so, for positions one by
// one, it misses what a cache without the tier misses.
type shadow struct {
	tier    bucket // that is not there
	policy  Policy
	hinted  Hinted   // policy, if it takes hints, else nil
	here    [][]bool // by layer and expert
	n       int
	experts []int // of each layer of the class, those of the other tier left out
	keep    int
	slots   int
	cold    cold
	order   []int32 // experts of the step, as they would be done
	lacking []int32 // those of them that would be misses
}

// openShadows makes a shadow of each tier that has experts of the class. Copies in RAM
// of what is in VRAM would serve in its place, so then VRAM has none.
func (k *kept) openShadows(c *Cache, cl *class) error {
	vram := c.opt.VRAM
	if c.opt.KeepHost {
		vram = nil
	}
	for _, t := range []struct {
		tier bucket
		keys []Key
	}{{inVRAM, vram}, {inPinned, c.opt.Pinned}} {
		more := make([]int, len(c.layers))
		some, widest, all := false, 0, 0
		for _, key := range t.keys {
			if c.layers[key.Layer].class == cl {
				more[key.Layer]++
				some = true
			}
		}
		if !some {
			continue
		}
		w := shadow{tier: t.tier, here: make([][]bool, len(c.layers))}
		conf := PolicyConfig{Layers: make([]PolicyLayer, len(c.layers)), History: c.opt.History}
		at := 0
		for _, l := range c.opt.Layers { // as open made cl.experts
			if c.layers[l.Layer].class != cl {
				continue
			}
			conf.Layers[l.Layer] = PolicyLayer{Experts: l.Experts, Bytes: 1}
			w.here[l.Layer] = make([]bool, l.Experts)
			w.experts = append(w.experts, cl.experts[at]+more[l.Layer])
			widest, all = max(widest, l.Experts), all+l.Experts
			at++
		}
		size := sizeClass(cl.slotBytes, w.experts, c.inFlight, c.opt.Cap)
		w.keep, w.slots = size.Keep, size.Keep+size.Staging
		conf.Budget = int64(w.keep)
		w.cold = newCold(all)
		w.order, w.lacking = make([]int32, 0, 2*widest), make([]int32, 0, widest)
		var err error
		if w.policy, err = NewPolicy(c.opt.Policy, conf); err != nil {
			return err
		}
		w.hinted, _ = w.policy.(Hinted)
		k.shadows = append(k.shadows, w)
	}
	return nil
}

// shade shows the shadows what a step uses, once the policy has seen it, and
// counts what they would have had to load more than the step.
func (s *Step) shade(r routed, positions int, experts []int32) {
	for i := range s.class.kept.shadows {
		w := &s.class.kept.shadows[i]
		more := w.meet(s, r, positions, experts)
		s.c.mu.Lock()
		if w.tier == inVRAM {
			s.c.stats.Marginal.VRAM += more
		} else {
			s.c.stats.Marginal.Pinned += more
		}
		s.c.mu.Unlock()
	}
}

// apart says whether the tier that is there has the expert.
func (w *shadow) apart(l *layer, e int32) bool {
	if w.tier == inVRAM {
		return l.fixed[e] != nil
	}
	return l.vram[e]
}

// meet is Begin, and says how many loads more than the step's it would begin.
func (w *shadow) meet(s *Step, r routed, positions int, experts []int32) (more int64) {
	l, here := &s.c.layers[s.layer], w.here[s.layer]
	w.policy.Begin(int(s.layer), positions)
	w.order, w.lacking = w.order[:0], w.lacking[:0]
	for i, e := range experts {
		if s.Missed(i) {
			more--
		}
		switch {
		case w.apart(l, e):
		case here[e]:
			w.cold.remove(Key{Layer: s.layer, Expert: e})
			w.order = append(w.order, e)
		default:
			w.lacking = append(w.lacking, e)
			more++
		}
	}
	if len(r.ids) == 0 {
		for _, e := range experts {
			if !w.apart(l, e) {
				w.policy.Use(Key{Layer: s.layer, Expert: e}, 0)
			}
		}
	}
	for i, e := range r.ids {
		if !w.apart(l, e) {
			w.policy.Use(Key{Layer: s.layer, Expert: e}, i/s.c.opt.TopK)
		}
	}
	if w.hinted != nil && r.scores != nil {
		w.hinted.Scores(r.scores)
	}
	spared := 0
	for _, e := range w.lacking {
		if w.n == w.slots && !w.removeVictim() { // then what was done first
			w.remove(Key{Layer: s.layer, Expert: w.order[spared]})
			spared++
		}
		here[e] = true
		w.n++
		w.order = append(w.order, e)
	}
	return more
}

func (w *shadow) remove(k Key) {
	w.here[k.Layer][k.Expert] = false
	w.n--
	w.cold.remove(k)
	w.policy.Remove(k)
}

// removeVictim says whether there was one.
func (w *shadow) removeVictim() bool {
	k, ok := w.cold.oldest()
	if !ok {
		k, ok = w.policy.Victim()
	}
	if ok {
		w.remove(k)
	}
	return ok
}

// end is the end of the step.
func (w *shadow) end() {
	w.policy.End()
	w.trim()
}

func (w *shadow) trim() {
	for (w.n > w.keep || w.policy.Over()) && w.removeVictim() {
	}
}

// shrink is of the cap.
func (w *shadow) shrink(slotBytes int64, inFlight, limit int) {
	size := sizeClass(slotBytes, w.experts, inFlight, limit)
	w.keep = size.Keep
	if slotBytes > 0 { // slots of views take no memory, and stay
		w.slots = size.Keep + size.Staging
	}
	w.policy.Resize(int64(w.keep))
	w.trim()
}

// rejected hears of experts that only rejected drafts used.
func (w *shadow) rejected(layer int32, experts []int32) {
	for _, e := range experts {
		if w.here[layer][e] {
			w.cold.add(Key{Layer: layer, Expert: e})
		}
	}
}

// swapped hears that an expert has gone to VRAM.
func (w *shadow) swapped(in Key) {
	if w.tier == inPinned && w.here[in.Layer][in.Expert] {
		w.remove(in)
	}
}

// predict passes a guess on.
func (k *kept) predict(layer int, experts []int32) {
	if k.hinted == nil {
		return
	}
	k.hinted.Predict(layer, experts)
	for i := range k.shadows {
		k.shadows[i].hinted.Predict(layer, experts)
	}
}
