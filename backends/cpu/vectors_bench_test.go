package cpu

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"sluice/backends"
)

// BenchmarkVectors is one thread on 2048 floats in the first cache; MB/s are of
// the floats read, keys and values as they are decoded.
func BenchmarkVectors(b *testing.B) {
	const n, keys, dim = 2048, 32, 128
	rng := rand.New(rand.NewPCG(1, 2))
	x, y, z, w := kinds(rng, n, 0), kinds(rng, n, 0), make([]float32, n), kinds(rng, n, 0)
	code, sum, scale := make([]int8, n), make([]int32, n/16), make([]float32, n/32)
	out, weights := kinds(rng, 8*n, 0), kinds(rng, 8, 0)
	half := make([]uint16, n)
	score, rows := make([]float32, keys), kinds(rng, keys*dim, 0)
	for l := Go; l <= AVX512; l++ {
		if _, err := Choose(l); err != nil {
			continue
		}
		k := kernelsFor(l)
		for _, c := range []struct {
			name   string
			floats int
			run    func()
		}{
			{"cleanTo", n, func() { k.cleanTo(z, x, 0) }},
			{"rmsNorm", n, func() { k.rmsNorm(z, x, y, 1./n, 1e-6) }},
			{"gate", n, func() { copy(z, x); k.gate(z, y) }},
			{"sigmoidGate", n, func() { copy(z, x); k.sigmoidGate(z, y) }},
			{"softmax", n, func() { copy(z, x); k.softmax(z, 0, nil) }},
			{"add", n, func() { k.add(z, x) }},
			{"addProducts", n, func() { k.addProducts(z, x, y) }},
			{"combine8", 8 * n, func() { k.combine(w, out, n, weights, nil) }},
			{"rotate", n, func() { k.rotate(w, x[:dim/2], y[:dim/2], dim) }},
			{"rotatePairs", n, func() { k.rotatePairs(w, x[:dim/2], y[:dim/2], dim) }},
			{"quantize32", n, func() { k.quantize32(code, sum, scale, x) }},
			{"quantize256", n, func() { k.quantize256(code, sum, scale[:n/256], x) }},
			{"encodeF16", n, func() { k.cache.encodeF16(half, x) }},
			{"decodeF16", n, func() { k.cache.decodeF16(z, half) }},
			{"decodeQ8", n, func() { k.cache.decodeQ8(z, code, scale) }},
			{"scores", keys * dim, func() { k.cache.scores(score, x[:dim], rows, 0.1) }},
			{"weigh", keys * dim, func() { k.cache.weigh(z[:dim], score, rows) }},
		} {
			b.Run(fmt.Sprintf("op=%s/kernels=%v", c.name, l), func(b *testing.B) {
				b.SetBytes(int64(4 * c.floats))
				for b.Loop() {
					c.run()
				}
			})
		}
	}
}

// BenchmarkAttend is 32 heads over 8 key-value heads of 128, one thread; MB/s
// are of the cache, as often as it is read.
func BenchmarkAttend(b *testing.B) {
	for _, l := range []Level{Go, AVX2, AVX512} {
		if _, err := Choose(l); err != nil {
			continue
		}
		for _, typ := range []backends.KVType{backends.KVF16, backends.KVF32, backends.KVQ8} {
			for _, n := range []int{1, 64} {
				b.Run(fmt.Sprintf("kv=%v/keys=2048/n=%d/kernels=%v", typ, n, l), func(b *testing.B) {
					be := openLevel(b, 1, l)
					s := backends.KVShape{Layers: 1, Positions: 2048, Heads: 8, KeyDim: 128, ValueDim: 128, Type: typ}
					kv, err := be.NewKV(s)
					if err != nil {
						b.Fatal(err)
					}
					q, _ := be.NewVec(n, 32*128)
					y, _ := be.NewVec(n, 32*128)
					q.SetLen(n)
					b.SetBytes(s.Bytes() * int64(n))
					how := &backends.Attention{Scale: 0.1}
					for b.Loop() {
						be.Attend(y, q, kv, 0, 2048-n, how)
					}
				})
			}
		}
	}
}
