package cpu

import (
	"fmt"
	"unsafe"

	"sluice/backends"
	"sluice/internal/arith"
	"sluice/internal/offheap"
)

// A cache keeps keys and values apart, each as [layer, head, position, dim], so
// that the keys which one head walks lie side by side. The values of a latent
// one are in its keys.
type cache struct {
	shape backends.KVShape
	k, v  plane
}

// A plane is the keys or the values of all layers, in one of three formats.
type plane struct {
	dim   int
	f16   []uint16
	f32   []float32
	q8    []int8    // codes, with
	scale []float32 // one scale for 32 of them
}

// NewKV makes an empty cache, its memory resident, freed by Close.
func (b *Backend) NewKV(s backends.KVShape) (backends.KV, error) {
	if s.Layers < 1 || s.Positions < 1 || s.Heads < 1 || s.KeyDim < 1 || s.ValueDim < 0 || s.Latent && s.ValueDim >= s.KeyDim || s.Type > backends.KVQ8 {
		return nil, fmt.Errorf("backends/cpu: a key-value cache of shape %+v: all sizes must be at least 1, a latent value shorter than its key", s)
	}
	if s.Type == backends.KVQ8 && (s.KeyDim%32 != 0 || s.ValueDim%32 != 0) {
		return nil, fmt.Errorf("backends/cpu: --kv q8 keeps blocks of 32, but this model has keys of %d and values of %d: use f16 or f32", s.KeyDim, s.ValueDim)
	}
	rows := s.Layers * s.Positions * s.Heads
	mem, err := offheap.Alloc(s.Bytes())
	if err != nil {
		return nil, fmt.Errorf("backends/cpu: no memory for a key-value cache of %d bytes (a smaller --ctx or --kv q8 takes less): %w", s.Bytes(), err)
	}
	offheap.Populate(mem)
	b.owned = append(b.owned, mem)
	c := &cache{shape: s}
	rest := mem
	for _, p := range []*plane{&c.k, &c.v} {
		p.dim = s.KeyDim
		if p == &c.v {
			if p.dim = s.ValueDim; s.Latent || p.dim == 0 {
				break
			}
		}
		n := rows * p.dim
		switch s.Type {
		case backends.KVF16:
			p.f16, rest = cut[uint16](rest, n)
		case backends.KVF32:
			p.f32, rest = cut[float32](rest, n)
		default:
			p.scale, rest = cut[float32](rest, n/32)
			p.q8, rest = cut[int8](rest, n) // a multiple of 32 bytes: what follows stays aligned
		}
	}
	return c, nil
}

// cut takes n values of T off the front of b, which is aligned for them.
func cut[T any](b []byte, n int) ([]T, []byte) {
	var t T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), n), b[n*int(unsafe.Sizeof(t)):]
}

// Shape is what the cache was made for.
func (c *cache) Shape() backends.KVShape { return c.shape }

// row is the number of a key or value in its plane.
func (c *cache) row(layer, head, pos int) int {
	return (layer*c.shape.Heads+head)*c.shape.Positions + pos
}

// put stores x in row r, from element from on, and gives the bits of the largest |x|.
func (p *plane) put(w *worker, k *cacheKernels, r, from int, x []float32) (top uint32) {
	at := r*p.dim + from
	switch {
	case p.f16 != nil:
		return k.encodeF16(p.f16[at:at+len(x)], x)
	case p.f32 != nil:
		return w.k.cleanTo(p.f32[at:at+len(x)], x, kvTinyBits)
	default:
		return p.putQ8(w, at, x)
	}
}

const kvTinyBits = (127 - 24) << 23 // kvTiny

// putQ8 quantizes like an activation, except that a block whose scale is below
// 2^-24 (its largest value below 7.6e-6) is kept as zeros, so that what get
// returns is 0 or at least 2^-24, as in the other formats.
func (p *plane) putQ8(w *worker, at int, x []float32) (top uint32) {
	code, scale := p.q8[at:at+len(x)], p.scale[at/32:(at+len(x))/32]
	top = w.k.quantize32(code, w.attend.sums[:len(x)/16], scale, x)
	for i, d := range scale {
		if d < arith.KVTiny {
			scale[i] = 0
			clear(code[32*i : 32*(i+1)])
		}
	}
	return top
}

// get gives n rows from row r on as floats, then what else is in the last 16
// of them. dst is memory to use for them, 16 rows at a time.
func (p *plane) get(k *cacheKernels, r, n int, dst []float32) []float32 {
	at, all := r*p.dim, (n+15)&^15*p.dim
	n *= p.dim
	if p.f32 != nil && n == all {
		return p.f32[at : at+n]
	}
	dst = dst[:all]
	switch {
	case p.f32 != nil:
		copy(dst, p.f32[at:at+n])
	case p.f16 != nil:
		k.decodeF16(dst[:n], p.f16[at:at+n])
	default:
		k.decodeQ8(dst[:n], p.q8[at:at+n], p.scale[at/32:(at+n)/32])
	}
	return dst
}

// take gives the first len(dst) elements of row r as floats.
func (p *plane) take(k *cacheKernels, r int, dst []float32) {
	at, n := r*p.dim, len(dst)
	switch {
	case p.f32 != nil:
		copy(dst, p.f32[at:at+n])
	case p.f16 != nil:
		k.decodeF16(dst, p.f16[at:at+n])
	default:
		k.decodeQ8(dst, p.q8[at:at+n], p.scale[at/32:(at+n)/32])
	}
}

// values gives n values from row r on, as plane.get gives keys.
func (c *cache) values(k *cacheKernels, r, n int, dst []float32) []float32 {
	if !c.shape.Latent {
		return c.v.get(k, r, n, dst)
	}
	dim := c.shape.ValueDim
	for i := range n {
		c.k.take(k, r+i, dst[i*dim:(i+1)*dim])
	}
	return dst[:n*dim]
}

// value gives one value.
func (c *cache) value(k *cacheKernels, r int, dst []float32) {
	if c.shape.Latent {
		c.k.take(k, r, dst)
	} else {
		c.v.take(k, r, dst)
	}
}

// storeStep puts keys and values into a layer of a cache; an item is one position.
type storeStep struct {
	c          *cache
	layer, pos int
	k, v       []float32
}

// Store makes the rows of k [n, heads*keyDim] and v [n, heads*valueDim] the
// positions pos, pos+1, ... of the layer. A latent cache makes a key of the row
// of v and, behind it, that of k [n, heads*(keyDim-valueDim)]; one without values
// takes a nil v.
func (b *Backend) Store(kv backends.KV, layer, pos int, k, v backends.Vec) {
	c, kx := kv.(*cache), k.(*vec)
	s := &c.shape
	var values []float32
	vn, vd := kx.n, 0
	if v != nil {
		vx := v.(*vec)
		values, vn, vd = vx.rows(), vx.n, vx.dim
	}
	kd := s.KeyDim
	if s.Latent {
		kd -= s.ValueDim
	}
	if kx.dim != s.Heads*kd || vd != s.Heads*s.ValueDim || kx.n != vn {
		panic(fmt.Sprintf("backends/cpu: Store: keys [%d, %d], values [%d, %d] into a cache of shape %+v", kx.n, kx.dim, vn, vd, *s))
	}
	if layer < 0 || layer >= s.Layers || pos < 0 || pos+kx.n > s.Positions {
		panic(fmt.Sprintf("backends/cpu: Store: layer %d, positions %d to %d of a cache of shape %+v", layer, pos, pos+kx.n, *s))
	}
	for _, w := range b.pool.workers {
		w.attend.sums = grown(w.attend.sums, max(s.KeyDim, s.ValueDim)/16)
	}
	b.store = storeStep{c, layer, pos, kx.rows(), values}
	b.do("Store", &b.store, kx.n, prepareGrain/(kx.dim+vd))
	b.store = storeStep{}
}

func (s *storeStep) run(w *worker, lo, hi int) {
	c := s.c
	k := w.k.cacheFor(&c.shape)
	var top uint32
	heads, kd, vd := c.shape.Heads, c.shape.KeyDim, c.shape.ValueDim
	values, behind := &c.v, 0
	if c.shape.Latent {
		values, behind = &c.k, vd
		kd -= vd
	}
	for ; lo < hi; lo++ {
		for h := range heads {
			r, i := c.row(s.layer, h, s.pos+lo), lo*heads+h
			top = max(top, c.k.put(w, k, r, behind, s.k[i*kd:(i+1)*kd]))
			if vd > 0 {
				top = max(top, values.put(w, k, r, 0, s.v[i*vd:(i+1)*vd]))
			}
		}
	}
	w.saw(top)
}
