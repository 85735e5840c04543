package cpu

import (
	"fmt"

	"sluice/backends"
	"sluice/internal/arith"
)

// attendStep is attention over one layer of a cache. The queries of one
// key-value head, position by position and head by head, are cut into runs; an
// item is a run of one head, whose queries share each decoded key and value.
type attendStep struct {
	c          *cache
	layer, pos int
	y, q       []float32 // [n, heads*valueDim], [n, heads*keyDim]
	heads      int       // query heads
	group      int       // query heads of one key-value head
	queries    int       // of one key-value head: n*group
	perRun     int       // queries in a run
	runs       int       // of one key-value head
	scale      float32
}

// attendRun bounds the queries of an item: each needs the scores of all keys.
const attendRun = 8

// attendScratch is a worker's memory for a run.
type attendScratch struct {
	q       []float32          // [attendRun, keyDim] cleaned
	score   []float32          // [attendRun, positions]
	key     []float32          // [keyDim] or [valueDim]
	sum     []float32          // [attendRun, valueDim] of a chunk
	inverse [attendRun]float32 // of each sum of e
}

// Attend computes y [n, heads*valueDim] from queries q [n, heads*keyDim]: row i
// of q is at position pos+i and sees keys 0..pos+i. Query head h reads
// key-value head h / (heads / kv heads). It sets the length of y.
func (b *Backend) Attend(y, q backends.Vec, kv backends.KV, layer, pos int, scale float32) {
	c, to, from := kv.(*cache), y.(*vec), q.(*vec)
	s := &c.shape
	heads := from.dim / s.KeyDim
	if from.dim%s.KeyDim != 0 || heads%s.Heads != 0 || to.dim != heads*s.ValueDim {
		panic(fmt.Sprintf("backends/cpu: Attend: queries of %d, results of %d with a cache of shape %+v", from.dim, to.dim, *s))
	}
	if layer < 0 || layer >= s.Layers || pos < 0 || pos+from.n > s.Positions {
		panic(fmt.Sprintf("backends/cpu: Attend: layer %d, positions %d to %d of a cache of shape %+v", layer, pos, pos+from.n, *s))
	}
	to.SetLen(from.n)
	if from.n == 0 {
		return
	}
	a := &b.attend
	*a = attendStep{c: c, layer: layer, pos: pos, y: to.rows(), q: from.rows(), heads: heads, group: heads / s.Heads, scale: scale}
	a.queries = from.n * a.group
	// Long runs decode less, short ones feed all threads: two items a thread.
	a.perRun = min(attendRun, max(1, a.queries*s.Heads/(2*len(b.pool.workers))))
	a.runs = (a.queries + a.perRun - 1) / a.perRun
	for _, w := range b.pool.workers {
		w.attend.grow(s)
	}
	b.do("Attend", a, a.runs*s.Heads, 1)
	*a = attendStep{}
}

func (t *attendScratch) grow(s *backends.KVShape) {
	t.q = grown(t.q, attendRun*s.KeyDim)
	t.score = grown(t.score, attendRun*s.Positions)
	t.key = grown(t.key, max(s.KeyDim, s.ValueDim))
	t.sum = grown(t.sum, attendRun*s.ValueDim)
}

func (a *attendStep) run(w *worker, lo, hi int) {
	for ; lo < hi; lo++ {
		first := lo % a.runs * a.perRun
		if !a.one(&w.attend, lo/a.runs, first, min(a.perRun, a.queries-first)) {
			w.p.outOfRange.Store(true)
		}
	}
}

// one does n queries of key-value head h, from number first. It says false if a
// query is NaN or above 2^50.
func (a *attendStep) one(t *attendScratch, h, first, n int) (good bool) {
	kd, vd, stride := a.c.shape.KeyDim, a.c.shape.ValueDim, a.c.shape.Positions
	good = true
	for i := range n {
		at := a.head(h, first+i) * kd
		good = cleanTo(t.q[i*kd:(i+1)*kd], a.q[at:at+kd]) && good
	}
	// Scores of all keys, then e and 1/sum of e. Later queries see no fewer keys.
	all := a.keys(first + n - 1)
	for k, from := 0, 0; k < all; k++ {
		for a.keys(first+from) <= k {
			from++
		}
		key := a.c.k.get(a.c.row(a.layer, h, k), t.key)
		for i := from; i < n; i++ {
			var l [16]float32
			dotLanes(&l, key, t.q[i*kd:(i+1)*kd])
			t.score[i*stride+k] = float32(arith.Tree16(&l) * a.scale)
		}
	}
	for i := range n {
		t.inverse[i] = arith.ExpSum(t.score[i*stride : i*stride+a.keys(first+i)])
	}
	for c := 0; c < all; c += arith.Chunk {
		clear(t.sum[:n*vd])
		from := 0
		for k := c; k < min(c+arith.Chunk, all); k++ {
			for a.keys(first+from) <= k {
				from++
			}
			v := a.c.v.get(a.c.row(a.layer, h, k), t.key)
			for i := from; i < n; i++ {
				addScaled(t.sum[i*vd:(i+1)*vd], float32(t.score[i*stride+k]*t.inverse[i]), v)
			}
		}
		for i := range n {
			if a.keys(first+i) <= c {
				continue
			}
			at := a.head(h, first+i) * vd
			y, sum := a.y[at:at+vd], t.sum[i*vd:(i+1)*vd]
			if c == 0 {
				copy(y, sum)
				continue
			}
			for j, s := range sum {
				y[j] += s
			}
		}
	}
	return good
}

// head is the place of a query in q and y, counted in heads.
func (a *attendStep) head(h, query int) int {
	return query/a.group*a.heads + h*a.group + query%a.group
}

// keys is the number of keys that a query sees.
func (a *attendStep) keys(query int) int { return a.pos + query/a.group + 1 }

// addScaled is y = y + p*v.
func addScaled(y []float32, p float32, v []float32) {
	n := len(y) &^ 7
	v = v[:len(y)]
	for i := 0; i < n; i += 8 {
		y, v := (*[8]float32)(y[i:]), (*[8]float32)(v[i:])
		y[0] += float32(p * v[0])
		y[1] += float32(p * v[1])
		y[2] += float32(p * v[2])
		y[3] += float32(p * v[3])
		y[4] += float32(p * v[4])
		y[5] += float32(p * v[5])
		y[6] += float32(p * v[6])
		y[7] += float32(p * v[7])
	}
	for i := n; i < len(y); i++ {
		y[i] += float32(p * v[i])
	}
}
