package cpu

import (
	"fmt"
	"math"

	"sluice/backends"
	"sluice/internal/arith"
	"sluice/internal/offheap"
)

// keys are the positions that the queries of a batch see, ascending.
type keys struct {
	n, most int
	count   []int32 // [capacity]
	at      []int32 // [capacity, most]
}

func (k *keys) Len() int  { return k.n }
func (k *keys) Most() int { return k.most }

// row gives the keys of a position of the batch.
func (k *keys) row(i int) []int32 { return k.at[i*k.most:][:k.count[i]] }

// NewKeys has room for the keys of a batch, most of them for each position,
// freed by Close.
func (b *Backend) NewKeys(capacity, most int) (backends.Keys, error) {
	if capacity < 1 || most < 1 {
		return nil, fmt.Errorf("backends/cpu: %d keys for each of %d positions: both must be at least 1", most, capacity)
	}
	data, mem, err := offheap.Of[int32](capacity * (most + 1))
	if err != nil {
		return nil, fmt.Errorf("backends/cpu: no memory for %d keys of %d positions: %w", most, capacity, err)
	}
	offheap.Populate(mem)
	b.owned = append(b.owned, mem)
	return &keys{most: most, count: data[:capacity], at: data[capacity:]}, nil
}

// indexStep scores the keys of a layer for up to indexRows positions, an item
// being indexRun keys, and then chooses, an item being a position.
type indexStep struct {
	c            *cache
	keys         *keys
	layer, pos   int // of the first position
	first, n     int // rows of the batch
	q, w         []float32
	heads, width int
	score        []float32 // [indexRows, stride]
	stride       int
	choosing     bool
}

// indexRows are the positions that share each decoded key, indexRun the keys of
// an item: some 10^5 multiply-adds for one position and head.
const (
	indexRows = 8
	indexRun  = 256
)

// IndexScratch is what ChooseKeys takes for a cache of this shape.
func IndexScratch(s backends.KVShape, threads int) int64 {
	return 4 * (indexRows*int64(scoreStride(&s)) + int64(threads)*int64(keyBlock*s.KeyDim+s.KeyDim+keyBlock))
}

// ChooseKeys gives row i of q [n, heads*keyDim] and w [n, heads], at position
// pos+i, the keys that score best among 0..pos+i, all of them if they are not
// more than keys has room for. With products in 16 lanes, q and w cleaned, and
// r(x) = x if it is at least 2^-50, else +0:
//
//	score_k = +0; score_k = score_k + w[h]*r(q[h].k) for h ascending
//
// A score that is NaN or above 2^50 counts as an activation that is. The better score wins, of equal ones the lower key. It sets the length of keys.
func (b *Backend) ChooseKeys(to backends.Keys, q, w backends.Vec, kv backends.KV, layer, pos int) {
	set, c, qx, wx := to.(*keys), kv.(*cache), q.(*vec), w.(*vec)
	s := &c.shape
	if s.Heads != 1 || qx.n != wx.n || qx.dim != wx.dim*s.KeyDim || qx.n > len(set.count) {
		panic(fmt.Sprintf("backends/cpu: ChooseKeys: queries [%d, %d], weights [%d, %d], room for %d, with a cache of shape %+v", qx.n, qx.dim, wx.n, wx.dim, len(set.count), *s))
	}
	if layer < 0 || layer >= s.Layers || pos < 0 || pos+qx.n > s.Positions {
		panic(fmt.Sprintf("backends/cpu: ChooseKeys: layer %d, positions %d to %d of a cache of shape %+v", layer, pos, pos+qx.n, *s))
	}
	set.n = qx.n
	x := &b.index
	score := x.score
	if pos+qx.n > set.most {
		score = grown(score, indexRows*scoreStride(s))
		for _, w := range b.pool.workers {
			w.index.grow(s)
		}
	}
	*x = indexStep{c: c, keys: set, layer: layer, q: qx.rows(), w: wx.rows(), heads: wx.dim, width: s.KeyDim, score: score, stride: scoreStride(s)}
	for x.first = 0; x.first < qx.n; x.first += x.n {
		x.n, x.pos = min(indexRows, qx.n-x.first), pos+x.first
		if all := x.pos + x.n; all > set.most {
			x.choosing = false
			b.do("ChooseKeys", x, (all+indexRun-1)/indexRun, 1)
		}
		x.choosing = true
		b.do("ChooseKeys", x, x.n, 1)
	}
	*x = indexStep{score: score}
}

// indexScratch is a worker's memory for a run of keys.
type indexScratch struct {
	rows []float32 // [keyBlock, keyDim]
	q    []float32 // [keyDim] cleaned
	dot  []float32 // [keyBlock]
}

func (t *indexScratch) grow(s *backends.KVShape) {
	t.rows, t.q, t.dot = grown(t.rows, keyBlock*s.KeyDim), grown(t.q, s.KeyDim), grown(t.dot, keyBlock)
}

func (x *indexStep) run(w *worker, lo, hi int) {
	for ; lo < hi; lo++ {
		if x.choosing {
			x.choose(lo)
		} else {
			x.scores(w, lo*indexRun, min((lo+1)*indexRun, x.pos+x.n))
		}
	}
}

// scores makes the scores of keys lo..hi, as far as the positions see them.
func (x *indexStep) scores(w *worker, lo, hi int) {
	k := w.k.cacheFor(&x.c.shape)
	t := &w.index
	for b := lo; b < hi; b += keyBlock {
		rows := x.c.k.get(k, x.c.row(x.layer, 0, b), min(keyBlock, hi-b), t.rows)
		dot := t.dot[:len(rows)/x.width]
		for i := max(0, b-x.pos); i < x.n; i++ { // those that see key b
			seen := min(len(dot), x.pos+i+1-b)
			score := x.score[i*x.stride+b:][:seen]
			clear(score)
			for h := range x.heads {
				at := (x.first+i)*x.heads + h
				w.saw(w.k.cleanTo(t.q, x.q[at*x.width:(at+1)*x.width], arith.TinyBits))
				k.scores(dot, t.q, rows, 1)
				f := x.w[at]
				if math.Float32bits(f)&^arith.SignMask < arith.TinyBits {
					f = 0
				}
				for j, d := range dot[:seen] {
					if d >= arith.Tiny {
						score[j] += float32(f * d)
					}
				}
			}
			w.saw(largestOf(score))
		}
	}
}

// choose writes the keys of position i of the group.
func (x *indexStep) choose(i int) {
	row, all := x.first+i, x.pos+i+1
	at := x.keys.at[row*x.keys.most:][:min(all, x.keys.most)]
	x.keys.count[row] = int32(len(at))
	if all <= x.keys.most {
		for j := range at {
			at[j] = int32(j)
		}
		return
	}
	largestAt(at, x.score[i*x.stride:][:all])
}

// largestAt writes the places of the len(at) largest scores, ascending; of equal
// ones at the end the lower places. There are more scores than that.
func largestAt(at []int32, score []float32) {
	// The least score that is chosen, digit by digit of its rank.
	var least uint32
	left := len(at) // to be chosen among those that share its digits so far
	for shift := 24; shift >= 0; shift -= 8 {
		var count [256]int
		high := least >> shift >> 8
		for _, s := range score {
			if r := rank(s); r>>shift>>8 == high {
				count[r>>shift&255]++
			}
		}
		d := 255
		for ; count[d] < left; d-- {
			left -= count[d]
		}
		least |= uint32(d) << shift
	}
	n := 0
	for k, s := range score {
		r := rank(s)
		if r < least {
			continue
		}
		if r == least {
			if left == 0 {
				continue
			}
			left--
		}
		at[n] = int32(k)
		n++
	}
}

// rank is the order of floats as integers; -0 does not come up.
func rank(f float32) uint32 {
	b := math.Float32bits(f)
	return b ^ (uint32(int32(b)>>31) | 1<<31)
}

// chosen is one, for queries that see the keys of how.Keys. Neighbours of one
// position share what is decoded.
func (a *attendStep) chosen(w *worker, k *cacheKernels, h, first, n int) {
	t := &w.attend
	kd, vd, stride := a.c.shape.KeyDim, a.c.shape.ValueDim, scoreStride(&a.c.shape)
	set := a.how.Keys.(*keys)
	for from := 0; from < n; {
		at := (first + from) / a.group
		end := min(n, (at+1)*a.group-first)
		seen := set.row(at)
		for i := from; i < end; i++ {
			q := a.head(h, first+i) * kd
			w.saw(w.k.cleanTo(t.q[i*kd:(i+1)*kd], a.q[q:q+kd], arith.TinyBits))
		}
		for b := 0; b < len(seen); b += keyBlock {
			block := seen[b:min(b+keyBlock, len(seen))]
			for j, p := range block {
				a.c.k.take(k, a.c.row(a.layer, h, int(p)), t.rows[j*kd:(j+1)*kd])
			}
			all := (len(block) + 15) &^ 15 // what is behind the block is of no meaning
			for i := from; i < end; i++ {
				k.scores(t.score[i*stride+b:][:all], t.q[i*kd:(i+1)*kd], t.rows[:all*kd], a.how.Scale)
			}
		}
		for i := from; i < end; i++ {
			score := t.score[i*stride : i*stride+len(seen)]
			w.k.expSum(score, w.k.largest(score))
			w.k.scaleBy(score, arith.Rcp(sumAt(score, seen)))
		}
		for b := 0; b < len(seen); {
			chunk := int(seen[b]) / arith.Chunk
			begin := b
			for more := true; more; {
				last := b
				for last < len(seen) && last < b+keyBlock && int(seen[last])/arith.Chunk == chunk {
					a.c.value(k, a.c.row(a.layer, h, int(seen[last])), t.rows[(last-b)*vd:(last-b+1)*vd])
					last++
				}
				for i := from; i < end; i++ {
					part := t.sum[i*vd : (i+1)*vd]
					if begin == 0 { // a sum that starts at +0 is never -0
						y := a.head(h, first+i) * vd
						part = a.y[y : y+vd]
					}
					if b == begin {
						clear(part)
					}
					k.weigh(part, t.score[i*stride+b:][:last-b], t.rows[:(last-b)*vd])
				}
				b = last
				more = b < len(seen) && int(seen[b])/arith.Chunk == chunk
			}
			for i := from; i < end && begin > 0; i++ {
				y := a.head(h, first+i) * vd
				w.k.add(a.y[y:y+vd], t.sum[i*vd:(i+1)*vd])
			}
		}
		from = end
	}
}

// sumAt is the sum of e, which belong to the keys at, each in the lane and the
// chunk of its key.
func sumAt(e []float32, at []int32) float32 {
	var sum float32
	for b := 0; b < len(at); {
		var l [16]float32
		for chunk := at[b] / arith.Chunk; b < len(at) && at[b]/arith.Chunk == chunk; b++ {
			l[at[b]&15] += e[b]
		}
		sum += arith.Tree16(&l)
	}
	return sum
}
