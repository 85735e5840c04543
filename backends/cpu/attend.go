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
	how        backends.Attention
}

// attendRun bounds the queries of an item: each needs the scores of all keys.
const attendRun = 8

// keyBlock is the keys, or values, that are decoded together: with heads of 128
// they are 16 KiB, and stay in a core's first cache for all queries of a run.
const keyBlock = 32

// attendScratch is a worker's memory for a run.
type attendScratch struct {
	q     []float32 // [attendRun, keyDim] cleaned
	score []float32 // [attendRun, stride]
	rows  []float32 // [keyBlock, keyDim or valueDim]
	sum   []float32 // [attendRun, valueDim] of a chunk
	sums  []int32   // of codes, when a key or value is quantized
}

// Attend computes y [n, heads*valueDim] from queries q [n, heads*keyDim]: row i
// of q is at position pos+i and sees keys how.First(pos+i)..pos+i. Query head h
// reads key-value head h / (heads / kv heads). It sets the length of y.
func (b *Backend) Attend(y, q backends.Vec, kv backends.KV, layer, pos int, how *backends.Attention) {
	c, to, from := kv.(*cache), y.(*vec), q.(*vec)
	s := &c.shape
	heads := from.dim / s.KeyDim
	if from.dim%s.KeyDim != 0 || heads%s.Heads != 0 || to.dim != heads*s.ValueDim {
		panic(fmt.Sprintf("backends/cpu: Attend: queries of %d, results of %d with a cache of shape %+v", from.dim, to.dim, *s))
	}
	if layer < 0 || layer >= s.Layers || pos < 0 || pos+from.n > s.Positions {
		panic(fmt.Sprintf("backends/cpu: Attend: layer %d, positions %d to %d of a cache of shape %+v", layer, pos, pos+from.n, *s))
	}
	if set, ok := how.Keys.(*keys); ok && (set.n != from.n || how.Window != 0 || how.Chunk != 0 || how.Sinks != nil) {
		panic(fmt.Sprintf("backends/cpu: Attend: keys chosen for %d of %d positions, with a window of %d, chunks of %d, %d sinks", set.n, from.n, how.Window, how.Chunk, len(how.Sinks)))
	}
	if s.ValueDim == 0 || how.Window < 0 || how.Chunk < 0 || how.Sinks != nil && len(how.Sinks) != heads {
		panic(fmt.Sprintf("backends/cpu: Attend: values of %d, a window of %d, chunks of %d, %d sinks for %d heads", s.ValueDim, how.Window, how.Chunk, len(how.Sinks), heads))
	}
	to.SetLen(from.n)
	if from.n == 0 {
		return
	}
	a := &b.attend
	*a = attendStep{c: c, layer: layer, pos: pos, y: to.rows(), q: from.rows(), heads: heads, group: heads / s.Heads, how: *how}
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
	t.score = grown(t.score, attendRun*scoreStride(s))
	t.rows = grown(t.rows, keyBlock*max(s.KeyDim, s.ValueDim))
	t.sum = grown(t.sum, attendRun*s.ValueDim)
}

// scoreStride is the room of a query's scores, which come 16 at a time.
func scoreStride(s *backends.KVShape) int { return (s.Positions + 15) &^ 15 }

// AttendScratch is what the threads of a backend take for attention over a cache
// of this shape, when its last position is reached.
func AttendScratch(s backends.KVShape, threads int) int64 {
	perThread := attendRun*(s.KeyDim+scoreStride(&s)+s.ValueDim) + keyBlock*max(s.KeyDim, s.ValueDim)
	return int64(threads) * int64(perThread) * 4
}

func (a *attendStep) run(w *worker, lo, hi int) {
	k := w.k.cacheFor(&a.c.shape)
	for ; lo < hi; lo++ {
		first := lo % a.runs * a.perRun
		n := min(a.perRun, a.queries-first)
		if a.how.Keys != nil {
			a.chosen(w, k, lo/a.runs, first, n)
			continue
		}
		a.one(w, k, lo/a.runs, first, n)
	}
}

// one does n queries of key-value head h, from number first.
func (a *attendStep) one(w *worker, k *cacheKernels, h, first, n int) {
	t := &w.attend
	kd, vd, stride := a.c.shape.KeyDim, a.c.shape.ValueDim, scoreStride(&a.c.shape)
	for i := range n {
		at := a.head(h, first+i) * kd
		w.saw(w.k.cleanTo(t.q[i*kd:(i+1)*kd], a.q[at:at+kd], arith.TinyBits))
	}
	all := a.keys(first + n - 1)              // later queries see no fewer keys,
	least := a.start(first) &^ (keyBlock - 1) // and begin no earlier
	for b, from := least, 0; b < all; b += keyBlock {
		keys := a.c.k.get(k, a.c.row(a.layer, h, b), min(keyBlock, all-b), t.rows)
		for a.keys(first+from) <= b {
			from++
		}
		for i := from; i < n && a.start(first+i) < b+keyBlock; i++ {
			k.scores(t.score[i*stride+b:][:len(keys)/kd], t.q[i*kd:(i+1)*kd], keys, a.how.Scale)
		}
	}
	for i := range n {
		var sink []float32
		if head := a.head(h, first+i) % a.heads; a.how.Sinks != nil {
			sink = a.how.Sinks[head : head+1]
		}
		w.k.softmax(t.score[i*stride:i*stride+a.keys(first+i)], a.start(first+i), sink)
	}
	for c := least &^ (arith.Chunk - 1); c < all; c += arith.Chunk {
		from, end := 0, n // queries that see keys of the chunk
		for a.keys(first+from) <= c {
			from++
		}
		for a.start(first+end-1) >= c+arith.Chunk {
			end--
		}
		for i := from; i < end; i++ {
			clear(a.part(t, c, h, first, i))
		}
		for b := max(c, least); b < min(c+arith.Chunk, all); b += keyBlock {
			rows := min(keyBlock, all-b)
			values := a.c.values(k, a.c.row(a.layer, h, b), rows, t.rows)
			for i := from; i < end && a.start(first+i) < b+keyBlock; i++ {
				if seen := min(rows, a.keys(first+i)-b); seen > 0 {
					k.weigh(a.part(t, c, h, first, i), t.score[i*stride+b:][:seen], values)
				}
			}
		}
		for i := from; i < end; i++ {
			if c > a.start(first+i) {
				at := a.head(h, first+i) * vd
				w.k.add(a.y[at:at+vd], t.sum[i*vd:(i+1)*vd])
			}
		}
	}
}

// part is where the sum of a chunk is formed: the first of them in y, since a
// sum that starts at +0 is never -0.
func (a *attendStep) part(t *attendScratch, chunk, h, first, i int) []float32 {
	vd := a.c.shape.ValueDim
	if chunk > a.start(first+i) {
		return t.sum[i*vd : (i+1)*vd]
	}
	at := a.head(h, first+i) * vd
	return a.y[at : at+vd]
}

// head is the place of a query in q and y, counted in heads.
func (a *attendStep) head(h, query int) int {
	return query/a.group*a.heads + h*a.group + query%a.group
}

// keys is one more than the last key that a query sees, start the first.
func (a *attendStep) keys(query int) int  { return a.pos + query/a.group + 1 }
func (a *attendStep) start(query int) int { return a.how.First(a.pos + query/a.group) }
