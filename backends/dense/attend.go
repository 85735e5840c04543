package dense

import (
	"fmt"

	"sluice/backends"
)

// A cache lies as that of backends/cpu: keys and values apart, each as [layer, head,
// position, dim].
type cache struct {
	shape backends.KVShape
	parts [2]plane // of layer 0: keys, values
}

// NewKV makes an empty cache, freed by Close.
func (b *Backend) NewKV(s backends.KVShape) (backends.KV, error) {
	if s.Layers < 1 || s.Positions < 1 || s.Heads < 1 || s.KeyDim < 1 || s.ValueDim < 0 || s.Latent && s.ValueDim >= s.KeyDim || s.Type > backends.KVQ8 {
		return nil, fmt.Errorf("backends/dense: a key-value cache of shape %+v: all sizes must be at least 1, a latent value shorter than its key", s)
	}
	if s.Type == backends.KVQ8 && (s.KeyDim%32 != 0 || s.ValueDim%32 != 0) {
		return nil, fmt.Errorf("backends/dense: --kv q8 keeps blocks of 32, but this model has keys of %d and values of %d: use f16 or f32", s.KeyDim, s.ValueDim)
	}
	c := &cache{shape: s}
	for i := range c.parts {
		p := &c.parts[i]
		p.kind, p.width = uint32(s.Type), uint32(s.KeyDim)
		if i == 1 {
			if p.width = uint32(s.ValueDim); s.Latent || s.ValueDim == 0 {
				*p = c.parts[0]
				continue
			}
		}
		n := int64(s.Layers) * int64(s.Positions) * int64(s.Heads) * int64(p.width)
		var err error
		if p.code, err = b.zeros(n * int64(elementBytes[s.Type])); err == nil && s.Type == backends.KVQ8 {
			p.scale, err = b.zeros(n / 32 * 4)
		}
		if err != nil {
			return nil, fmt.Errorf("a key-value cache of %d bytes (a smaller --ctx or --kv q8 takes less): %w", s.Bytes(), err)
		}
	}
	return c, nil
}

// elementBytes are those of an element, without scales.
var elementBytes = [...]uint64{backends.KVF16: 2, backends.KVF32: 4, backends.KVQ8: 1}

// Shape is what the cache was made for.
func (c *cache) Shape() backends.KVShape { return c.shape }

// layer is the keys (0) or the values (1) of a layer.
func (c *cache) layer(part, layer int) plane {
	p := c.parts[part]
	n := uint64(layer) * uint64(c.shape.Heads) * uint64(c.shape.Positions) * uint64(p.width)
	p.code += n * elementBytes[c.shape.Type]
	if p.scale != 0 {
		p.scale += n / 32 * 4
	}
	return p
}

// Store is backends.Backend's.
func (b *Backend) Store(kv backends.KV, layer, pos int, k, v backends.Vec) {
	c, kx := kv.(*cache), k.(*vec)
	s := &c.shape
	vx := &vec{n: kx.n}
	if v != nil {
		vx = v.(*vec)
	}
	kd := s.KeyDim
	if s.Latent {
		kd -= s.ValueDim
	}
	if kx.dim != s.Heads*kd || vx.dim != s.Heads*s.ValueDim || kx.n != vx.n {
		misuse("Store", "keys [%d, %d], values [%d, %d] into a cache of shape %+v", kx.n, kx.dim, vx.n, vx.dim, *s)
	}
	if layer < 0 || layer >= s.Layers || pos < 0 || pos+kx.n > s.Positions {
		misuse("Store", "layer %d, positions %d to %d of a cache of shape %+v", layer, pos, pos+kx.n, *s)
	}
	store := func(x *vec, part, from, dim int) {
		p := c.layer(part, layer)
		launch(b, "store", per(x.n*x.dim, groupFloats), 1, 1, storeParams{x: x.at, code: p.code, scale: p.scale, fail: b.failure(stepStore), row: uint64(pos),
			n: uint32(x.n), heads: uint32(s.Heads), dim: uint32(dim), width: p.width, from: uint32(from), positions: uint32(s.Positions), kind: p.kind})
	}
	behind, values := 0, 1
	if s.Latent {
		behind, values = s.ValueDim, 0
	}
	store(kx, 0, behind, kd)
	if s.ValueDim > 0 {
		store(vx, values, 0, s.ValueDim)
	}
}

// keys are the positions that the queries of a batch see, ascending.
type keys struct {
	n, capacity, most int
	at, count         uint64 // [capacity, most], [capacity]
}

func (k *keys) Len() int  { return k.n }
func (k *keys) Most() int { return k.most }

// NewKeys has room for the keys of a batch, freed by Close.
func (b *Backend) NewKeys(capacity, most int) (backends.Keys, error) {
	if capacity < 1 || most < 1 {
		return nil, fmt.Errorf("backends/dense: %d keys for each of %d positions: both must be at least 1", most, capacity)
	}
	k := &keys{capacity: capacity, most: most}
	var err error
	if k.at, err = b.zeros(4 * int64(capacity) * int64(most)); err == nil {
		k.count, err = b.zeros(4 * int64(capacity))
	}
	return k, err
}

// ChooseKeys is backends.Backend's.
func (b *Backend) ChooseKeys(to backends.Keys, q, w backends.Vec, kv backends.KV, layer, pos int) {
	set, c, qx, wx := to.(*keys), kv.(*cache), q.(*vec), w.(*vec)
	s := &c.shape
	if s.Heads != 1 || qx.n != wx.n || qx.dim != wx.dim*s.KeyDim || qx.n > set.capacity {
		misuse("ChooseKeys", "queries [%d, %d], weights [%d, %d], room for %d, with a cache of shape %+v", qx.n, qx.dim, wx.n, wx.dim, set.capacity, *s)
	}
	if layer < 0 || layer >= s.Layers || pos < 0 || pos+qx.n > s.Positions {
		misuse("ChooseKeys", "layer %d, positions %d to %d of a cache of shape %+v", layer, pos, pos+qx.n, *s)
	}
	set.n = qx.n
	each := max(1, attendFloats/s.Positions)
	for i := 0; i < qx.n; i += each {
		n := min(each, qx.n-i)
		all := pos + i + n
		p := indexParams{q: qx.row(i), w: wx.row(i), keys: set.at + 4*uint64(i*set.most), count: set.count + 4*uint64(i), k: c.layer(0, layer), fail: b.failure(stepChooseKeys),
			n: uint32(n), pos: uint32(pos + i), heads: uint32(wx.dim), most: uint32(set.most), stride: uint32(all)}
		if all > set.most {
			p.score = b.need(&b.score, 4*int64(min(each, set.capacity))*int64(s.Positions))
			launch(b, "indexScores", per(all, scoreKeys), n, 1, p)
		}
		launch(b, "choose", n, 1, 1, p)
	}
}

// Attend is backends.Backend's.
func (b *Backend) Attend(y, q backends.Vec, kv backends.KV, layer, pos int, how *backends.Attention) {
	c, to, from := kv.(*cache), y.(*vec), q.(*vec)
	s := &c.shape
	heads := from.dim / s.KeyDim
	if from.dim%s.KeyDim != 0 || heads%s.Heads != 0 || to.dim != heads*s.ValueDim {
		misuse("Attend", "queries of %d, results of %d with a cache of shape %+v", from.dim, to.dim, *s)
	}
	if layer < 0 || layer >= s.Layers || pos < 0 || pos+from.n > s.Positions {
		misuse("Attend", "layer %d, positions %d to %d of a cache of shape %+v", layer, pos, pos+from.n, *s)
	}
	set, chosen := how.Keys.(*keys)
	if chosen && (set.n != from.n || how.Window != 0 || how.Chunk != 0 || how.Sinks != nil) {
		misuse("Attend", "keys chosen for %d of %d positions, with a window of %d, chunks of %d, %d sinks", set.n, from.n, how.Window, how.Chunk, len(how.Sinks))
	}
	if s.ValueDim == 0 || how.Window < 0 || how.Chunk < 0 || how.Sinks != nil && len(how.Sinks) != heads {
		misuse("Attend", "values of %d, a window of %d, chunks of %d, %d sinks for %d heads", s.ValueDim, how.Window, how.Chunk, len(how.Sinks), heads)
	}
	to.SetLen(from.n)
	// Positions of a launch: their scores, and the parts of their results, are kept.
	floats := heads * max(s.Positions, per(s.Positions, chunkKeys)*s.ValueDim)
	each := max(1, attendFloats/floats)
	for i := 0; i < from.n; i += each {
		n := min(each, from.n-i)
		end := pos + i + n
		first := how.First(pos+i) / chunkKeys
		slots, stride := end-first*chunkKeys, s.Positions
		p := attendParams{q: from.row(i), y: to.row(i), k: c.layer(0, layer), v: c.layer(1, layer), sinks: b.constant(how.Sinks), fail: b.failure(stepAttend),
			n: uint32(n), pos: uint32(pos + i), heads: uint32(heads), kvHeads: uint32(s.Heads), positions: uint32(s.Positions), dim: uint32(s.ValueDim),
			window: uint32(how.Window), chunk: uint32(how.Chunk), first: uint32(first), chunks: uint32(per(end, chunkKeys) - first), factor: how.Scale}
		if chosen {
			p.keys, p.count, p.most = set.at+4*uint64(i*set.most), set.count+4*uint64(i), uint32(set.most)
			stride = min(set.most, s.Positions)
			slots = min(slots, set.most)
		}
		p.stride = uint32(stride)
		p.score = b.need(&b.score, 4*int64(min(each, to.capacity))*int64(heads)*int64(s.Positions))
		if p.chunks > 1 {
			p.part = b.need(&b.part, 4*int64(min(each, to.capacity))*int64(heads)*int64(per(s.Positions, chunkKeys)*s.ValueDim))
		}
		runs := s.Heads * per(heads/s.Heads, scoreQueries)
		launch(b, "attendScores", per(slots, scoreKeys), runs, n, p)
		launch(b, "attendSoftmax", heads, n, 1, p)
		launch(b, "attendWeigh", int(p.chunks), runs, n, p)
		if p.chunks > 1 {
			launch(b, "attendSum", per(n*heads*s.ValueDim, groupFloats), 1, 1, p)
		}
	}
}
