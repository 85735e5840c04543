package moe

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"

	"sluice/backends"
	"sluice/internal/quant"
)

// mla is multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section
// 2.1) in its absorbed form: a position is cached as one latent vector that all
// heads share and a rotated part of the key, and what would make keys and values
// of the latent is applied to queries and results instead.
//
//	h = RMSNorm(x)                                            [dim]
//	q = qb of RMSNorm(qa of h), or qb of h                    [heads, nope+rope], the last rope elements rotated (pairs of neighbours)
//	c, r = RMSNorm(latent of h), rest of h                    [latent], [rope]; r rotated: the key is [c, r], the value c
//	q = [kb[head] of its first nope, its rope elements]       [heads, latent+rope]
//	y = attention of q                                        [heads, latent]
//	x = x + o of [vb[head] of y]                              [dim]
//
// With an indexer queries see the keys that it chooses.
type mla struct {
	norm       []float32       // [dim]
	qa         backends.Linear // [q rank, dim]; no rows: none
	qaNorm     []float32       // [q rank]
	qb         backends.Linear // [heads*(nope+rope), q rank or dim]
	latent     backends.Linear // [latent, dim], as rest rows of attn_kv_a_mqa
	rest       backends.Linear // [rope, dim]
	latentNorm []float32       // [latent]
	kb         []backends.Matrix
	vb         []backends.Matrix // of each head: [latent, nope] and [value, latent]
	o          backends.Linear   // [dim, heads*value]
	eps        float32
	how        backends.Attention
	qRope      *backends.Rope
	rRope      *backends.Rope
	index      *indexer // nil: queries see all keys
	reuse      bool     // or those that the layer before chose
	spec       mlaSpec
}

// latentEps is what the norms of the low-rank vectors add to a mean of squares,
// whatever the model's own epsilon is: 1e-6 stands in the reference's text and in
// no file. It shows in GLM-5, whose own is 1e-5.
const latentEps = 1e-6

// mlaSpec is what the layers of multi-head latent attention share.
type mlaSpec struct {
	nope, rope, latent, value int // elements
	qRank                     int // 0: queries are made of h at once
	scale                     float32
	qRope, rRope, iRope       *backends.Rope // of queries, of keys, of the indexer
	indexHeads, indexDim      int
	most                      int // keys that a query sees; 0: all

	qv, q, latents, c, r, y, v vecID // vectors of these, v of the heads' values
	iq, ik, iw                 vecID
}

// latentHeads reads the numbers of multi-head latent attention. sparse says that
// the family has indexers, pairs that these rotate neighbours like the rest.
func (s *Spec) latentHeads(l *loader, positions int, sparse, pairs bool) mlaSpec {
	var m mlaSpec
	s.Heads = l.need("attention.head_count", maxDim)
	m.rope = l.need("rope.dimension_count", maxDim)
	m.latent = l.need("attention.kv_lora_rank", maxDim)
	m.qRank = l.or("attention.q_lora_rank", 0, maxDim)
	if l.hf {
		m.nope, m.value = l.need("qk_nope_head_dim", maxDim), l.need("v_head_dim", maxDim)
	} else {
		// In files of the absorbed layout the plain keys are sizes of the cache.
		m.nope = l.or("attention.key_length_mla", l.or("attention.key_length", 0, maxDim), maxDim) - m.rope
		m.value = l.or("attention.value_length_mla", l.or("attention.value_length", 0, maxDim), maxDim)
	}
	if m.nope < 1 || m.value < 1 || m.rope%2 != 0 {
		l.fail("heads of %d elements, %d of them rotated, with values of %d: there must be some of each, and pairs to rotate", m.nope+m.rope, m.rope, m.value)
		return m
	}
	s.KVHeads, s.HeadDim, s.RopeDims = 1, m.nope+m.rope, m.rope
	s.cache = backends.KVShape{Layers: s.Layers, Heads: 1, KeyDim: m.latent + m.rope, ValueDim: m.latent, Latent: true}

	base := l.ropeBase()
	freq, magnitude, score := ropeFrequencies(m.rope, base), 1.0, 1.0
	if y := l.yarn(); y != nil {
		freq = y.frequencies(m.rope, base)
		score, magnitude = y.latentScaling(l)
	}
	table := ropeTable(positions, freq, magnitude)
	m.scale = float32(score * score / math.Sqrt(float64(s.HeadDim)))
	of := func(skip int, interleaved bool) *backends.Rope {
		r := *table
		r.Skip, r.Interleaved = skip, interleaved
		return &r
	}
	m.qRope, m.rRope = of(m.nope, true), of(0, true)

	m.q, m.latents = s.vector(s.Heads*s.HeadDim), s.vector(s.Heads*(m.latent+m.rope))
	m.c, m.r = s.vector(m.latent), s.vector(m.rope)
	m.y, m.v = s.vector(s.Heads*m.latent), s.vector(s.Heads*m.value)
	s.headInput = s.Heads * max(m.nope, m.latent)
	if m.qRank > 0 {
		m.qv = s.vector(m.qRank)
	}
	if !sparse {
		return m
	}
	m.indexHeads = l.need("attention.indexer.head_count", maxDim)
	m.indexDim = l.need("attention.indexer.key_length", maxDim)
	m.most = l.need("attention.indexer.top_k", maxCtx)
	if m.rope > m.indexDim || m.qRank == 0 {
		l.fail("an indexer with heads of %d elements, of which %d are rotated, and queries of rank %d: the rotation must fit, and the rank be given", m.indexDim, m.rope, m.qRank)
	}
	m.iRope = of(0, pairs)
	m.iq, m.ik, m.iw = s.vector(m.indexHeads*m.indexDim), s.vector(m.indexDim), s.vector(m.indexHeads)
	s.index = backends.KVShape{Heads: 1, KeyDim: m.indexDim}
	s.chosen = m.most
	return m
}

// latentScaling is how DeepSeek's models take YaRN's magnitude: in the scale of
// the scores, once for the queries and once for the keys, with the weight
// mscale_all_dim, and the rest that makes up mscale in the rotations.
//
// GGUF has only a tenth of mscale_all_dim (yarn_log_multiplier), since mscale
// equals it in every published model that has it.
func (y *yarn) latentScaling(l *loader) (score, rotations float64) {
	all, one := l.float("rope.scaling.mscale_all_dim", 0), l.float("rope.scaling.mscale", 1)
	if !l.hf {
		all = 10 * l.float("rope.scaling.yarn_log_multiplier", 0)
		if all != 0 {
			one = all
		}
	}
	if all < 0 || one < 0 || all > 100 || one > 100 {
		l.fail("RoPE scaling with mscale %v and mscale_all_dim %v: want 0 to 100", one, all)
	}
	return y.magnitude(all), y.magnitude(one) / y.magnitude(all)
}

// latentAttention loads layer blk.l. indexed says that it has an indexer, whose
// keys are row index of the indexers' cache; a layer without, in a family that
// has them, sees the keys that the layer before chose.
func (s *Spec) latentAttention(l *loader, layer int, eps float32, m mlaSpec, indexed bool, index int) mla {
	p := fmt.Sprintf("blk.%d.", layer)
	kv := l.linear(p+"attn_kv_a_mqa", m.latent+m.rope, s.Hidden)
	a := mla{
		norm:       l.vector(p+"attn_norm.weight", s.Hidden),
		latent:     rowsOf(kv, 0, m.latent),
		rest:       rowsOf(kv, m.latent, m.latent+m.rope),
		latentNorm: l.vector(p+"attn_kv_a_norm.weight", m.latent),
		o:          l.linear(p+"attn_output", s.Hidden, s.Heads*m.value),
		eps:        eps,
		how:        backends.Attention{Scale: m.scale},
		qRope:      m.qRope,
		rRope:      m.rRope,
		spec:       m,
	}
	if m.qRank > 0 {
		a.qa = l.linear(p+"attn_q_a", m.qRank, s.Hidden)
		a.qaNorm = l.vector(p+"attn_q_a_norm.weight", m.qRank)
		a.qb = l.linear(p+"attn_q_b", s.Heads*s.HeadDim, m.qRank)
	} else {
		a.qb = l.linear(p+"attn_q", s.Heads*s.HeadDim, s.Hidden)
	}
	if l.has(p + "attn_kv_b.weight") {
		a.kb, a.vb = s.splitHeads(l, p+"attn_kv_b.weight", m)
	} else {
		a.kb = l.heads(p+"attn_k_b.weight", s.Heads, m.latent, m.nope)
		a.vb = l.heads(p+"attn_v_b.weight", s.Heads, m.value, m.latent)
	}
	switch {
	case indexed:
		a.index = s.indexer(l, layer, m, index)
	case m.most > 0:
		a.reuse = true
	}
	return a
}

// heads is a resident stack of n matrices [rows, cols].
func (l *loader) heads(name string, n, rows, cols int) []backends.Matrix {
	t, data := l.tensor(name, cols, rows, n)
	w := make([]backends.Matrix, n)
	for h := range w {
		w[h] = backends.Matrix{Type: t.Type, Rows: rows, Cols: cols}
		if data != nil {
			bytes := rows * t.Type.RowBytes(cols)
			w[h].Data = data[h*bytes : (h+1)*bytes]
		}
	}
	return w
}

// rowsOf is rows lo..hi of w.
func rowsOf(w backends.Linear, lo, hi int) backends.Linear {
	if w.Data != nil {
		bytes := w.Type.RowBytes(w.Cols)
		w.Data = w.Data[lo*bytes : hi*bytes]
	}
	if w.Bias != nil {
		w.Bias = w.Bias[lo:hi]
	}
	w.Rows = hi - lo
	return w
}

// splitHeads makes kb and vb of one matrix that has, head by head, nope rows that
// make keys and value rows that make values. The latter are vb as they lie there.
// The former are kb transposed: of floats the same floats, of blocks, whose codes
// lie along the other dim, F32 of what they stand for.
func (s *Spec) splitHeads(l *loader, name string, m mlaSpec) (kb, vb []backends.Matrix) {
	w := l.matrix(name, s.Heads*(m.nope+m.value), m.latent)
	typ, size := w.Type, 4
	if typ == quant.F16 || typ == quant.BF16 {
		size = 2
	} else {
		typ = quant.F32
	}
	s.MadeBytes += int64(s.Heads) * int64(m.nope) * int64(m.latent) * int64(size)
	kb, vb = make([]backends.Matrix, s.Heads), make([]backends.Matrix, s.Heads)
	var all []byte
	var f []float32
	if w.Data != nil {
		all, f = make([]byte, s.Heads*m.nope*m.latent*size), make([]float32, m.latent)
	}
	for h := range kb {
		kb[h] = backends.Matrix{Type: typ, Rows: m.latent, Cols: m.nope}
		vb[h] = backends.Matrix{Type: w.Type, Rows: m.value, Cols: m.latent}
		if w.Data == nil {
			continue
		}
		bytes := w.Type.RowBytes(m.latent)
		first := h * (m.nope + m.value)
		vb[h].Data = w.Data[(first+m.nope)*bytes : (first+m.nope+m.value)*bytes]
		kb[h].Data = all[h*m.nope*m.latent*size : (h+1)*m.nope*m.latent*size]
		for i := range m.nope {
			row := w.Data[(first+i)*bytes : (first+i+1)*bytes]
			if size == 2 {
				for j := range m.latent {
					copy(kb[h].Data[2*(j*m.nope+i):], row[2*j:2*j+2])
				}
				continue
			}
			quant.Dequantize(w.Type, f, row)
			for j, v := range f {
				binary.LittleEndian.PutUint32(kb[h].Data[4*(j*m.nope+i):], math.Float32bits(v))
			}
		}
	}
	return kb, vb
}

// attend adds the attention of layer l to the residual stream s.x.
func (a *mla) attend(ctx context.Context, l int, s *state) error {
	be, m := s.be, &a.spec
	q, c, r := s.vec[m.q], s.vec[m.c], s.vec[m.r]
	be.RMSNorm(s.h, s.x, a.norm, a.eps)
	from := s.h
	if m.qRank > 0 {
		from = s.vec[m.qv]
		s.y3 = [3]backends.Vec{from, c, r}
		s.w3 = [3]backends.Linear{a.qa, a.latent, a.rest}
		s.matMuls(s.y3[:], s.w3[:], s.h)
		be.RMSNorm(from, from, a.qaNorm, latentEps)
		s.matMul(q, a.qb, from)
	} else {
		s.y3 = [3]backends.Vec{q, c, r}
		s.w3 = [3]backends.Linear{a.qb, a.latent, a.rest}
		s.matMuls(s.y3[:], s.w3[:], s.h)
	}
	be.RMSNorm(c, c, a.latentNorm, latentEps)
	be.RoPE(q, m.nope+m.rope, a.qRope, s.pos)
	be.RoPE(r, m.rope, a.rRope, s.pos)
	be.Store(s.kv, l+s.cacheShift, s.pos, r, c)
	s.how = a.how
	if a.index != nil {
		a.index.choose(from, s)
	}
	if m.most > 0 && s.pos+s.h.Len() > m.most { // else all are chosen
		s.how.Keys = s.keys
	}
	a.mix(l+s.cacheShift, s.pos, s)
	s.matMul(s.h, a.o, s.vec[m.v])
	be.Add(s.x, s.h)
	s.clock.lap(StageAttention)
	return ctx.Err()
}

// mix makes the heads' values of their queries, which see keys as s.how says.
func (a *mla) mix(row, pos int, s *state) {
	m := &a.spec
	s.be.MatMulHeads(s.vec[m.latents], a.kb, s.vec[m.q])
	s.be.Attend(s.vec[m.y], s.vec[m.latents], s.kv, row, pos, &s.how)
	s.be.MatMulHeads(s.vec[m.v], a.vb, s.vec[m.y])
}

// warm is the matrices of the heads for a whole batch, and one query at the last position.
func (a *mla) warm(s *state, last int) {
	m := &a.spec
	s.be.MatMulHeads(s.vec[m.latents], a.kb, s.vec[m.q])
	s.be.MatMulHeads(s.vec[m.v], a.vb, s.vec[m.y])
	s.how = a.how
	if a.index != nil {
		a.index.warm(s, last)
		if last+1 > m.most {
			s.how.Keys = s.keys
		}
	}
	s.vec[m.q].SetLen(1)
	a.mix(0, last, s)
}
