package moe

import (
	"context"
	"fmt"
	"math"

	"sluice/backends"
	"sluice/internal/arith"
	"sluice/internal/quant"
)

// deltaNet is the linear attention of a layer: a gated delta net
// (arXiv:2412.06464), which keeps a matrix for each head instead of keys and
// values. backends.DeltaNet has what is between the projections.
type deltaNet struct {
	norm  []float32 // [dim], before the projections
	eps   float32
	in    []backends.Linear // to the vectors of to
	to    []vecID
	split []deltaSplit // of what one projection makes of several things
	out   backends.Linear
	net   backends.DeltaNet
	at    deltaVectors
}

// deltaVectors are where it works: the convolution's inputs [n, channels], the
// gates and results [n, heads*valueDim], time steps and write strengths [n, heads].
type deltaVectors struct {
	qkv, z, a, b, y vecID
	all             vecID // [n, channels + heads*valueDim] qkv and z, if one projection makes them
	rates           vecID // [n, 2*heads] b and a, if one projection makes them
}

// deltaSplit hands out runs of floats of a vector: see backends.Backend.Split.
type deltaSplit struct {
	from vecID
	runs []int
	to   []vecID
}

// attend adds the linear attention of layer l of the state to the residual
// stream s.x.
func (d *deltaNet) attend(ctx context.Context, l int, s *state) error {
	be, at := s.be, &d.at
	be.RMSNorm(s.h, s.x, d.norm, d.eps)
	s.matMuls(s.vectors(d.to), d.in, s.h)
	for i := range d.split {
		p := &d.split[i]
		be.Split(s.vectors(p.to), p.runs, s.vec[p.from])
	}
	d.mix(l, s.pos, s)
	s.matMul(s.h, d.out, s.vec[at.y])
	be.Add(s.x, s.h)
	s.clock.lap(StageAttention)
	return ctx.Err()
}

func (d *deltaNet) mix(l, pos int, s *state) {
	at := &d.at
	s.be.DeltaNet(s.vec[at.y], s.vec[at.qkv], s.vec[at.z], s.vec[at.a], s.vec[at.b], s.delta, l, pos, &d.net)
}

// warm is one position, which the first step of a sequence begins before.
func (d *deltaNet) warm(s *state) {
	for _, v := range [...]vecID{d.at.qkv, d.at.z, d.at.a, d.at.b} {
		s.vec[v].SetLen(1)
	}
	d.mix(0, 0, s)
}

// vectors are those of ids, at most four, until the next call.
func (s *state) vectors(ids []vecID) []backends.Vec {
	list := s.y4[:0]
	for _, id := range ids {
		list = append(list, s.vec[id])
	}
	return list
}

// deltaSizes reads the numbers of gated delta nets, of so many layers.
func (s *Spec) deltaSizes(l *loader, layers int) {
	d := backends.DeltaShape{
		Layers:     layers,
		KeyHeads:   l.need("ssm.group_count", maxDeltaHeads),
		ValueHeads: l.need("ssm.time_step_rank", maxDeltaHeads),
		KeyDim:     l.need("ssm.state_size", maxDeltaDim),
		Taps:       l.need("ssm.conv_kernel", maxDeltaTaps),
	}
	inner := l.need("ssm.inner_size", maxDeltaHeads*maxDeltaDim)
	d.ValueDim = inner / d.ValueHeads
	if d.ValueHeads%d.KeyHeads != 0 || inner%d.ValueHeads != 0 || d.KeyDim%16 != 0 || d.ValueDim%16 != 0 || d.ValueDim > maxDeltaDim || d.Taps < 2 {
		l.fail("gated delta net of %d key heads of %d and %d value heads of %d in all, %d taps: the heads must divide, their sizes be multiples of 16 up to %d, and the taps at least 2",
			d.KeyHeads, d.KeyDim, d.ValueHeads, inner, d.Taps, maxDeltaDim)
		return
	}
	s.delta = d
	s.deltaAt = deltaVectors{qkv: s.vector(d.Channels()), z: s.vector(inner), a: s.vector(d.ValueHeads), b: s.vector(d.ValueHeads), y: s.vector(inner)}
	if s.deltaOne = l.has("blk.0.ssm_in.weight"); s.deltaOne {
		s.deltaAt.all = s.vector(d.Channels() + inner)
	}
	if s.deltaOneRate = l.has("blk.0.ssm_ba.weight"); s.deltaOneRate {
		s.deltaAt.rates = s.vector(2 * d.ValueHeads)
	}
}

// Limits of what a header may claim of a gated delta net.
const (
	maxDeltaHeads = 1 << 12
	maxDeltaDim   = 1 << 11
	maxDeltaTaps  = 1 << 6
)

// deltaNet loads the linear attention of layer blk.l. Value head h reads key
// head h mod key heads if tiled.
func (s *Spec) deltaNet(l *loader, layer int, eps float32, tiled bool) deltaNet {
	p, d, at := fmt.Sprintf("blk.%d.", layer), &s.delta, s.deltaAt
	inner, each := d.ValueHeads*d.ValueDim, d.ValueHeads/d.KeyHeads
	w := deltaNet{
		norm: l.vector(p+"attn_norm.weight", s.Hidden),
		eps:  eps,
		at:   at,
		out:  l.linear(p+"ssm_out", s.Hidden, inner),
	}
	project := func(prefix string, rows int, to vecID) {
		w.in, w.to = append(w.in, l.linear(p+prefix, rows, s.Hidden)), append(w.to, to)
	}
	if s.deltaOne { // of each key head its query, key, values and gates
		project("ssm_in", d.Channels()+inner, at.all)
		w.split = append(w.split, deltaSplit{at.all, []int{d.KeyDim, d.KeyDim, each * d.ValueDim, each * d.ValueDim}, []vecID{at.qkv, at.qkv, at.qkv, at.z}})
	} else {
		project("attn_qkv", d.Channels(), at.qkv)
		project("attn_gate", inner, at.z)
	}
	if s.deltaOneRate { // of each key head its write strengths and time steps
		project("ssm_ba", 2*d.ValueHeads, at.rates)
		w.split = append(w.split, deltaSplit{at.rates, []int{each, each}, []vecID{at.b, at.a}})
	} else {
		project("ssm_beta", d.ValueHeads, at.b)
		project("ssm_alpha", d.ValueHeads, at.a)
	}
	w.net = backends.DeltaNet{
		Conv:  s.taps(l, p+"ssm_conv1d.weight"),
		A:     s.decayRates(l, p+"ssm_a"),
		Bias:  l.vector(p+"ssm_dt.bias", d.ValueHeads),
		Norm:  l.vector(p+"ssm_norm.weight", d.ValueDim),
		Eps:   eps,
		Tiled: tiled,
	}
	return w
}

// taps reads the convolution's weights [channels, taps], or [channels, 1, taps],
// and gives them as [taps, channels].
func (s *Spec) taps(l *loader, name string) []float32 {
	n, channels := s.delta.Taps, s.delta.Channels()
	dims := []int{n, channels}
	if t, ok := l.find(name); ok && len(t.Dims) == 3 && t.Dims[1] == 1 {
		dims = []int{n, 1, channels}
	}
	t, data := l.tensor(name, dims...)
	l.floatBytes += 4 * int64(n*channels)
	if data == nil {
		return nil
	}
	w, taps := make([]float32, n*channels), make([]float32, n*channels)
	quant.Dequantize(t.Type, w, data)
	for c := range channels {
		for i := range n {
			taps[i*channels+c] = arith.Clean(w[c*n+i])
		}
	}
	return taps
}

// decayRates reads -exp(A_log), or A_log itself from a Hugging Face model.
func (s *Spec) decayRates(l *loader, name string) []float32 {
	rates := l.vector(name, s.delta.ValueHeads)
	for i, a := range rates {
		if l.hf {
			rates[i] = float32(-math.Exp(float64(a)))
		}
		if !(rates[i] <= 0 && rates[i] >= -0x1p50) {
			l.fail("tensor %s: the decay rate of head %d is %v, want a negative number", name, i, rates[i])
		}
	}
	return rates
}
