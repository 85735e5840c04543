package backendtest

import (
	"fmt"
	"sort"

	"sluice/backends"
	"sluice/internal/quant"
)

func layerNorm(x, weight, bias []float32, eps float32) []float32 {
	var y []float32
	n := len(weight)
	inv := 1 / float32(n)
	for ; len(x) > 0; x = x[n:] {
		var l [16]float32
		for i := range n {
			l[i%16] = add(l[i%16], clean(x[i]))
		}
		mean := mul(tree16(l), inv)
		d := make([]float32, n)
		for i := range d {
			d[i] = clean(sub(clean(x[i]), mean))
		}
		r := rsqrt(add(mul(dotFloats(d, d), inv), eps))
		for i, w := range weight {
			y = append(y, add(mul(mul(d[i], r), w), bias[i]))
		}
	}
	return y
}

func testLayerNorm(b *bench) {
	for i, c := range []struct{ n, dim, run int }{{1, 128, 128}, {3, 100, 100}, {2, 96, 16}, {70, 128, 32}, {5, 7, 7}} {
		x, weight, bias := Vectors(b.rng, c.n, c.dim, i), Vectors(b.rng, 1, c.run, 0), Vectors(b.rng, 1, c.run, 0)
		want := layerNorm(cleaned(x), weight, bias, 1e-6)
		in, y := b.upload(x, c.dim), b.vec(c.n, c.dim)
		b.be.LayerNorm(y, in, weight, bias, 1e-6)
		b.wants(fmt.Sprintf("%+v into another", c), y, want)
		b.be.LayerNorm(in, in, weight, bias, 1e-6)
		b.wants(fmt.Sprintf("%+v in place", c), in, want)
	}
	same := b.upload([]float32{3, 3, 3, 3}, 4)
	b.be.LayerNorm(same, same, []float32{1, 1, 1, 1}, []float32{1, 2, 3, 4}, 1e-6)
	b.wants("equal floats", same, []float32{1, 2, 3, 4})
}

func testMatMulHeads(b *bench) {
	for i, t := range Types {
		elems, _ := t.Block()
		cols, rows := max(elems, 32), 5+b.rng.IntN(20)
		heads, n, rest := 1+b.rng.IntN(5), []int{1, 3, 40, 0}[i%4], []int{0, 7}[i%2]
		var w []backends.Matrix
		for range heads {
			w = append(w, b.matrix(t, rows, cols))
		}
		x := Vectors(b.rng, n, heads*(cols+rest), 0)
		y, in := b.vec(max(n, 1), heads*(rows+rest)), b.vec(1, heads*(cols+rest))
		if n > 0 {
			in = b.upload(x, heads*(cols+rest))
		}
		b.be.MatMulHeads(y, w, in)
		var want []float32
		for j := range n * heads {
			head := cleaned(x[j*(cols+rest):][:cols+rest])
			want = append(want, matMul(backends.Linear{Matrix: w[j%heads]}, head[:cols])...)
			want = append(want, head[cols:]...)
		}
		b.wants(fmt.Sprintf("%v, %d heads of %d x %d and %d, %d positions", t, heads, rows, cols, rest, n), y, want)
	}
	// Matrices of several types share the heads' columns.
	w := []backends.Matrix{b.matrix(quant.Q8_0, 8, 32), b.matrix(quant.BF16, 8, 32), b.matrix(quant.Q4_0, 8, 32)}
	x := Vectors(b.rng, 2, 3*32, 0)
	y := b.vec(2, 3*8)
	b.be.MatMulHeads(y, w, b.upload(x, 3*32))
	var want []float32
	for j := range 6 {
		want = append(want, matMul(backends.Linear{Matrix: w[j%3]}, cleaned(x[j*32:][:32]))...)
	}
	b.wants("several types", y, want)
}

// chooseKeys says which of the keys the most best are.
func chooseKeys(q, w []float32, keys [][]float32, most int) []bool {
	score, order := make([]float32, len(keys)), make([]int, len(keys))
	for i, k := range keys {
		order[i] = i
		for h := range w {
			if d := dotFloats(k, q[h*len(k):][:len(k)]); d >= 0x1p-50 {
				score[i] = add(score[i], mul(clean(w[h]), d))
			}
		}
	}
	sort.SliceStable(order, func(i, j int) bool { return score[order[i]] > score[order[j]] })
	chosen := make([]bool, len(keys))
	for _, i := range order[:min(most, len(order))] {
		chosen[i] = true
	}
	return chosen
}

// testLatent attends to a latent cache, whole and as keys are chosen by another
// cache of keys alone.
func testLatent(b *bench) {
	for i, c := range []struct {
		heads, keyDim, valueDim int
		indexHeads, indexDim    int
		most                    int
		batches                 []int // positions stored and attended together; those above 100 are stored alone
	}{
		{1, 64, 32, 1, 32, 3, []int{1, 1, 4}},
		{4, 96, 64, 2, 32, 16, []int{3, 1, 30, 1}},
		{10, 64, 32, 3, 64, 40, []int{254, 1, 1, 20, 1}},
		{2, 160, 128, 4, 32, 300, []int{290, 1, 13, 200, 1, 9}},
	} {
		for _, typ := range []backends.KVType{backends.KVF16, backends.KVF32, backends.KVQ8} {
			total := 0
			for _, n := range c.batches {
				total += n
			}
			shape := backends.KVShape{Layers: 2, Positions: total, Heads: 1, KeyDim: c.keyDim, ValueDim: c.valueDim, Latent: true, Type: typ}
			plain := shape
			plain.ValueDim, plain.Latent = 0, false
			if shape.Bytes() != plain.Bytes() {
				b.Fatalf("a latent cache takes %d bytes, its keys %d", shape.Bytes(), plain.Bytes())
			}
			kv, err := b.be.NewKV(shape)
			if err != nil {
				b.Fatal(err)
			}
			index, err := b.be.NewKV(backends.KVShape{Layers: 2, Positions: total, Heads: 1, KeyDim: c.indexDim, Type: typ})
			if err != nil {
				b.Fatal(err)
			}
			set, err := b.be.NewKeys(300, c.most)
			if err != nil {
				b.Fatal(err)
			}
			if set.Most() != c.most {
				b.Fatalf("room for %d keys says %d", c.most, set.Most())
			}
			const layer, scale = 1, 0.125
			rest := c.keyDim - c.valueDim
			var keys, indexKeys [][]float32
			pos := 0
			for _, n := range c.batches {
				k, v := Vectors(b.rng, n, rest, i%3), Vectors(b.rng, n, c.valueDim, i%2)
				ik := Vectors(b.rng, n, c.indexDim, 0)
				if i == 2 { // scores that are equal
					for j := range ik {
						ik[j] = float32(int(ik[j]))
					}
				}
				b.be.Store(kv, layer, pos, b.upload(k, rest), b.upload(v, c.valueDim))
				b.be.Store(index, layer, pos, b.upload(ik, c.indexDim), nil)
				for j := range n {
					key := append(cached(typ, cleaned(v[j*c.valueDim:][:c.valueDim])), cached(typ, cleaned(k[j*rest:][:rest]))...)
					keys, indexKeys = append(keys, key), append(indexKeys, cached(typ, cleaned(ik[j*c.indexDim:][:c.indexDim])))
				}
				if n > 100 {
					pos += n
					continue
				}
				q := Vectors(b.rng, n, c.heads*c.keyDim, i%3)
				iq, iw := Vectors(b.rng, n, c.indexHeads*c.indexDim, 0), Vectors(b.rng, n, c.indexHeads, 0)
				if i == 2 {
					for j := range iq {
						iq[j] = float32(int(iq[j]))
					}
				}
				up := b.upload(q, c.heads*c.keyDim)
				b.be.ChooseKeys(set, b.upload(iq, c.indexHeads*c.indexDim), b.upload(iw, c.indexHeads), index, layer, pos)
				if set.Len() != n {
					b.Fatalf("keys of %d positions, want %d", set.Len(), n)
				}
				y := b.vec(n, c.heads*c.valueDim)
				for _, how := range []backends.Attention{{Scale: scale}, {Scale: scale, Keys: set}, {Scale: scale, Window: 7}} {
					b.be.Attend(y, up, kv, layer, pos, &how)
					var want []float32
					for p := range n {
						seen := keys[:pos+p+1]
						values := make([][]float32, len(seen))
						for j, k := range seen {
							values[j] = k[:c.valueDim]
						}
						var chosen []bool
						if how.Keys != nil {
							chosen = chooseKeys(iq[p*c.indexHeads*c.indexDim:][:c.indexHeads*c.indexDim], iw[p*c.indexHeads:][:c.indexHeads], indexKeys[:pos+p+1], c.most)
						}
						for h := range c.heads {
							want = append(want, attend(q[(p*c.heads+h)*c.keyDim:][:c.keyDim], seen, values, h, &how, chosen)...)
						}
					}
					b.wants(fmt.Sprintf("%+v %v at %d, %+v", c, typ, pos, how), y, want)
				}
				pos += n
			}
		}
	}
}
