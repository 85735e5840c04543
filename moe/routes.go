package moe

// MostDrafts bounds the positions behind the first of a batch that is verified.
const MostDrafts = 8

// recentPositions is how many positions routes remembers: a whole batch of
// drafts and more, in a power of two.
const recentPositions = 16

// routes is what the routers of the decoding layers chose for the last
// positions of the sequence, and which of it was in no tier.
type routes struct {
	topK    int
	layers  []layerRoutes // of experts, ascending
	of      []int32       // by layer: its place in layers, -1: it has no router
	from    int           // positions from..to-1 are known
	to      int
	only    []int32 // scratch: experts of one layer
	counted []bool  // by expert
}

// layerRoutes is [recentPositions, topK], position p in row p%recentPositions.
type layerRoutes struct {
	layer  int
	ids    []int32
	missed []bool
}

func (r *routes) init(spec *Spec) {
	r.topK = spec.TopK
	r.of = make([]int32, spec.Layers)
	for l := range r.of {
		r.of[l] = -1
	}
	for _, role := range spec.Roles {
		r.of[role.Layer] = int32(len(r.layers))
		r.layers = append(r.layers, layerRoutes{role.Layer, make([]int32, recentPositions*r.topK), make([]bool, recentPositions*r.topK)})
	}
	r.only, r.counted = make([]int32, 0, spec.Experts), make([]bool, spec.Experts)
}

// note keeps what layer l chose for positions pos, pos+1, ...: ids
// [positions, topK]; missed gives, by expert, what was in no tier.
func (r *routes) note(l, pos int, ids []int32, missed []bool) {
	if l >= len(r.of) { // a drafting layer
		return
	}
	n := len(ids) / r.topK
	w := &r.layers[r.of[l]]
	for p := max(0, n-recentPositions); p < n; p++ {
		at := (pos + p) % recentPositions * r.topK
		for i, id := range ids[p*r.topK : (p+1)*r.topK] {
			w.ids[at+i], w.missed[at+i] = id, missed[id]
		}
	}
}

// ran says that positions pos to pos+n-1 have been noted by all layers.
func (r *routes) ran(pos, n int) {
	if pos != r.to {
		r.from = pos
	}
	r.to = pos + n
	r.from = max(r.from, r.to-recentPositions)
}

// rewind forgets positions from pos on.
func (r *routes) rewind(pos int) { r.to, r.from = min(r.to, pos), min(r.from, pos) }

func (w *layerRoutes) row(p, k int) ([]int32, []bool) {
	at := p % recentPositions * k
	return w.ids[at : at+k], w.missed[at : at+k]
}

// Unions says how the experts of consecutive positions overlap, as the last n
// of the sequence show it: distinct experts of all n by those of one, and of
// those that were in no tier alike (n where none was missed: then they cost
// nothing). ok is false if so many positions are not remembered; n is 1 to 1+MostDrafts.
// A model without experts uses for n positions what it uses for one.
func (m *Model) Unions(n int) (experts, missed float64, ok bool) {
	r := &m.s.routes
	if n < 1 || n > r.to-r.from {
		return 0, 0, false
	}
	if len(r.layers) == 0 {
		return 1, 1, true
	}
	var distinct, distinctMissed, misses int
	for i := range r.layers {
		w := &r.layers[i]
		r.only = r.only[:0]
		for p := r.to - n; p < r.to; p++ {
			ids, gone := w.row(p, r.topK)
			for j, id := range ids {
				if gone[j] {
					misses++
				}
				if !r.counted[id] {
					r.counted[id] = true
					r.only = append(r.only, id)
				}
			}
		}
		distinct += len(r.only)
		for _, id := range r.only {
			r.counted[id] = false
		}
		for p := r.to - n; p < r.to; p++ {
			ids, gone := w.row(p, r.topK)
			for j, id := range ids {
				if gone[j] && !r.counted[id] {
					r.counted[id] = true
					distinctMissed++
				}
			}
		}
		for _, id := range r.only {
			r.counted[id] = false
		}
	}
	experts, missed = float64(distinct)/float64(len(r.layers)*r.topK), float64(n)
	if misses > 0 {
		missed = float64(distinctMissed) / float64(misses) * float64(n)
	}
	return experts, missed, true
}

// Keep says that of the positions of the last Forward, at most 1+MostDrafts, the
// first n stand, 1 at least: the others are rewound, and the tiers hear which
// experts only those used.
func (m *Model) Keep(n int) error {
	s, r := &m.s, &m.s.routes
	from, to := s.pos-s.x.Len()+n, s.pos
	if n < 1 || from > to || to-from > MostDrafts {
		panic("moe: Keep of more positions than were run, or of none")
	}
	if from == to {
		return nil
	}
	for i := range r.layers {
		w := &r.layers[i]
		for p := from - n; p < from; p++ {
			ids, _ := w.row(p, r.topK)
			for _, id := range ids {
				r.counted[id] = true
			}
		}
		r.only = r.only[:0]
		for p := from; p < to; p++ {
			ids, _ := w.row(p, r.topK)
			for _, id := range ids {
				if !r.counted[id] {
					r.counted[id] = true
					r.only = append(r.only, id)
				}
			}
		}
		for p := from - n; p < to; p++ {
			ids, _ := w.row(p, r.topK)
			for _, id := range ids {
				r.counted[id] = false
			}
		}
		if len(r.only) > 0 {
			s.cache.Rejected(w.layer, r.only)
		}
	}
	return m.Rewind(from)
}
