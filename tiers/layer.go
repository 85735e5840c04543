package tiers

// sliced gives each MoE layer an equal slice of the budget and an order of its
// own. Only the layer of the batch has to keep to its slice, which a batch
// larger than it exceeds until that layer's next batch.
type sliced struct {
	*books
	orders []order // by layer; nil: no experts
	moe    int64   // MoE layers
}

func newSliced(b *books, newOrder func() order) *sliced {
	p := &sliced{books: b, orders: make([]order, len(b.layers))}
	for l, layer := range b.layers {
		if layer.Experts > 0 {
			p.orders[l] = newOrder()
			p.moe++
		}
	}
	return p
}

func (p *sliced) slice() int64 { return p.budget / p.moe }

func (p *sliced) Begin(layer, _ int) {
	p.End()
	p.begin(layer)
}

func (p *sliced) End() {
	if p.open {
		p.open = false
		p.orders[p.layer].end()
	}
}

func (p *sliced) Use(k Key, _ int) {
	i := p.number(k)
	p.orders[k.Layer].use(i, p.use(i))
}

func (p *sliced) Remove(k Key) {
	i := p.number(k)
	p.orders[k.Layer].remove(i)
	p.leave(i)
}

func (p *sliced) Over() bool {
	if p.batch == 0 || p.inLayer[p.layer] <= p.slice() {
		return false
	}
	_, ok := p.orders[p.layer].victim()
	return ok // else the batch is larger than the slice
}

// Victim is one of the batch's layer. Where that has none, but room is needed
// all the same, it is one of the layer that exceeds its slice the most.
func (p *sliced) Victim() (Key, bool) {
	if i, ok := p.orders[p.layer].victim(); ok {
		return p.keys[i], true
	}
	best, most := int32(-1), int64(0)
	for l, o := range p.orders {
		if o == nil || best >= 0 && p.inLayer[l] <= most {
			continue
		}
		if i, ok := o.victim(); ok {
			best, most = i, p.inLayer[l]
		}
	}
	if best < 0 {
		return Key{}, false
	}
	return p.keys[best], true
}

func (p *sliced) Resize(budget int64) { p.budget = budget }
