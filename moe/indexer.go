package moe

import (
	"fmt"

	"sluice/backends"
)

// An indexer chooses the keys that queries see (DeepSeek-V3.2, arXiv:2512.02556,
// section 2.1). With h and the normalised low-rank query of the attention:
//
//	q = qb of the low-rank query                              [heads, dim], the first rope elements rotated
//	k = LayerNorm(kw of h)                                    [dim], rotated alike, cached
//	w = weights of h                                          [heads]
//	chosen: the most keys with the largest sum over heads of w*max(q.k, 0)
//
// The reference rotates q and k by a Hadamard matrix before it rounds them to 8
// bits, which changes no product of theirs, and scales the scores by positive
// constants, which change no choice. Neither is done here.
type indexer struct {
	q       backends.Linear // [heads*dim, q rank]
	k       backends.Linear // [dim, hidden]
	weights backends.Linear // [heads, hidden]
	norm    []float32       // [dim], as bias of the norm of k
	bias    []float32
	row     int // of the indexers' cache
	spec    mlaSpec
}

// indexEps is what LayerNorm adds to the variance. It stands in the reference's
// text and in no file.
const indexEps = 1e-6

func (s *Spec) indexer(l *loader, layer int, m mlaSpec, row int) *indexer {
	p := fmt.Sprintf("blk.%d.indexer.", layer)
	return &indexer{
		q:       backends.Linear{Matrix: l.matrix(p+"attn_q_b.weight", m.indexHeads*m.indexDim, m.qRank)},
		k:       backends.Linear{Matrix: l.matrix(p+"attn_k.weight", m.indexDim, s.Hidden)},
		weights: backends.Linear{Matrix: l.matrix(p+"proj.weight", m.indexHeads, s.Hidden)},
		norm:    l.vector(p+"k_norm.weight", m.indexDim),
		bias:    l.vector(p+"k_norm.bias", m.indexDim),
		row:     row,
		spec:    m,
	}
}

// choose caches the keys of s.h and leaves in s.keys those that its positions
// see, unless that is all. query is the normalised low-rank query.
func (x *indexer) choose(query backends.Vec, s *state) {
	m := &x.spec
	q, k, w := s.vec[m.iq], s.vec[m.ik], s.vec[m.iw]
	s.y3 = [3]backends.Vec{k, w}
	s.w3 = [3]backends.Linear{x.k, x.weights}
	s.matMuls(s.y3[:2], s.w3[:2], s.h)
	s.be.LayerNorm(k, k, x.norm, x.bias, indexEps)
	s.be.RoPE(k, m.indexDim, m.iRope, s.pos)
	row := x.row + s.cacheShift
	s.be.Store(s.index, row, s.pos, k, nil)
	if s.pos+s.h.Len() <= m.most {
		return
	}
	s.matMul(q, x.q, query)
	s.be.RoPE(q, m.indexDim, m.iRope, s.pos)
	s.be.ChooseKeys(s.keys, q, w, s.index, row, s.pos)
}

// warm is one choice at the last position.
func (x *indexer) warm(s *state, last int) {
	m := &x.spec
	s.vec[m.iq].SetLen(1)
	s.vec[m.iw].SetLen(1)
	s.be.ChooseKeys(s.keys, s.vec[m.iq], s.vec[m.iw], s.index, 0, last)
}
