package cpu

import (
	"encoding/binary"
	"math"
	"sync/atomic"

	"sluice/backends"
	"sluice/internal/arith"
	"sluice/internal/quant"
)

// tile is the number of positions that share one unpacking of a weight block:
// their eight lanes take 1.5 KiB and their packed codes of 2048 columns
// 256 KiB, so both stay in a core's caches.
const tile = 48

// A product is one matrix times some positions of a step's inputs.
type product struct {
	m      backends.Matrix
	bias   []float32
	in     *inputs
	n      int     // positions
	inRow  []int32 // position j is row inRow[j]/inDiv of in; nil: row inBase+j
	inDiv  int32
	inBase int
	y      []float32 // position j goes to row yRow[j] of y; nil: row j
	yRow   []int32
	stride int      // floats from one row of y to the next
	refuse *refusal // of weights that are to be looked at; nil: they have been
	job    int      // whose they are

	// Derived by prepare.
	form    form
	kind    quant.Kind
	act     int // elements of an activation block; 0 for float rows
	rowLen  int // bytes
	unpack  quant.Unpacker
	kernel  rowKernel
	tiles   tileKernel
	floats  floatKernel
	tile    int // positions of an item
	spans   int // items by rows
	first   int // number of its first item among those of all products
	perItem int // rows of an item
}

// products is the step of several matrices, their rows claimed in chunks.
type products struct {
	list  []product
	items int
}

// add appends one product. Its items are about itemWork multiply-adds; with
// several positions at least 32 rows, so that packing their codes, which each
// item does for itself, is a small part of it.
func (s *products) add(k *kernels, p product) {
	t := p.m.Type
	if i := slot(t); i < slots { // the others are run in plain Go
		p.kernel, p.tiles = k.rows[i], k.tiles[i]
		if p.m.Cols%16 == 0 {
			p.floats = k.floats[i]
		}
	}
	p.kind, p.act = t.Kind(), t.ActBlock()
	p.form, p.rowLen = formOf(p.act), t.RowBytes(p.m.Cols)
	if p.kind != quant.Float {
		p.unpack = quant.UnpackerFor(t)
	}
	work := itemWork
	if p.kernel.run != nil || p.floats.tile > 0 {
		work = fastItemWork
	}
	p.tile = p.n
	if p.wide(p.n) {
		// Tiles of one size, their records within a share of the second-level cache.
		most := min(max(tileBytes/p.m.Cols&^31, 32), 128)
		tiles := (p.n + most - 1) / most
		p.tile = ((p.n+tiles-1)/tiles + 15) &^ 15
		work = wideItemWork
	}
	p.perItem = max(4, work/(p.m.Cols*p.tile+1))
	if p.n > 1 {
		p.perItem = max(32, p.perItem)
	}
	if work != itemWork {
		p.perItem = (p.perItem + 7) &^ 7
	}
	p.spans = (p.m.Rows + p.perItem - 1) / p.perItem
	p.first = s.items
	s.items += p.spans * ((p.n + p.tile - 1) / p.tile)
	s.list = append(s.list, p)
}

// wide says whether the tile kernels take n positions of the product.
func (p *product) wide(n int) bool { return p.tiles.least > 0 && n >= p.tiles.least }

// itemWork is the multiply-adds of an item in plain Go: some 50 us, against
// about one that claiming it may cost. The others are for faster kernels.
const (
	itemWork     = 1 << 16
	fastItemWork = 1 << 19
	wideItemWork = 1 << 22
	tileBytes    = 1 << 18
)

func (s *products) reset() { s.list, s.items = s.list[:0], 0 }

// drop lets go of the caller's memory.
func (s *products) drop() { clear(s.list[:cap(s.list)]) }

// product rows of items lo..hi.
func (s *products) run(w *worker, lo, hi int) {
	for ; lo < hi; lo++ {
		s.one(w, s.find(lo), lo)
	}
}

// find gives the number of the product that an item is of: the last one whose
// first item is not behind it.
func (s *products) find(item int) int {
	i, j := 0, len(s.list)
	for j-i > 1 {
		if h := (i + j) / 2; s.list[h].first <= item {
			i = h
		} else {
			j = h
		}
	}
	return i
}

// one does an item of product i.
func (s *products) one(w *worker, i, item int) {
	p := &s.list[i]
	item -= p.first
	r, t := item%p.spans*p.perItem, item/p.spans*p.tile
	hi := min(r+p.perItem, p.m.Rows)
	if p.refuse != nil && t == 0 {
		if quant.Check(p.m.Type, p.m.Data[r*p.rowLen:hi*p.rowLen]) != nil {
			p.refuse.note(p.job)
		}
	}
	p.rows(&w.scratch, t, min(p.tile, p.n-t), r, hi)
}

// A refusal is the first of several jobs whose weights the arithmetic does not take.
type refusal struct{ job atomic.Int64 }

// none is what reset leaves.
const none = math.MaxInt64

func (r *refusal) reset() { r.job.Store(none) }

func (r *refusal) note(job int) {
	for {
		was := r.job.Load()
		if int64(job) >= was || r.job.CompareAndSwap(was, int64(job)) {
			return
		}
	}
}

// first is that job, or -1.
func (r *refusal) first() int {
	if j := r.job.Load(); j < none {
		return int(j)
	}
	return -1
}

// A scratch is the memory of one worker.
type scratch struct {
	k        *kernels
	block    quant.Block
	lane     [8][tile]float32
	lane16   [tile][16]float32
	weight   [256]float32
	row      []int    // of the inputs, for each position of the tile
	packed   []int64  // [tile/3, cols]: codes of three positions of the tile
	pairs    []uint64 // [cols/2]: codes of its only position
	packedOf packing  // what is in them
	fast     rowScratch
	tile     tileScratch
	floats   floatScratch
	attend   attendScratch
	delta    deltaScratch
	index    indexScratch
}

// A packing names the positions whose codes a worker holds packed, so that
// items of one product, or of several with one input, do not pack them again.
type packing struct {
	in     *inputs
	serial uint64
	form   form
	rows   *int32 // where their numbers start; nil: they are base, base+1, ...
	base   int
	n      int
}

// rows computes rows lo..hi of the product for positions first..first+count.
func (p *product) rows(s *scratch, first, count, lo, hi int) {
	for t, end := first, first+count; t < end; {
		n := end - t
		wide := p.wide(n)
		switch rest := n % 16; {
		case wide && n > 16 && rest <= fewPositions && p.tiles.unpack != nil:
			n -= rest
		case wide:
		case p.kernel.run != nil:
			n = min(n, mostPositions)
		default:
			n = min(n, tile)
		}
		s.row = grown(s.row, n)
		for j := range n {
			s.row[j] = p.inBase + t + j
			if p.inRow != nil {
				s.row[j] = int(p.inRow[t+j] / p.inDiv)
			}
		}
		switch {
		case wide:
			p.tileRun(s, s.row, t, n, lo, hi)
		case p.kernel.run != nil:
			p.fastRows(s, t, n, lo, hi)
		case p.floats.tile > 0:
			p.floatRows(s, t, n, lo, hi)
		default:
			p.plainRows(s, t, n, lo, hi)
		}
		t += n
	}
}

// fewPositions left over by tiles of 16 are cheaper by the row kernel.
const fewPositions = 4

// plainRows is rows in plain Go, for at most tile positions.
func (p *product) plainRows(s *scratch, t, n, lo, hi int) {
	if p.act != 0 {
		p.pack(s, t, n)
	}
	for r := lo; r < hi; r++ {
		row := p.m.Data[r*p.rowLen : (r+1)*p.rowLen]
		switch {
		case p.act == 0:
			p.floatRow(s, row, n)
			for j := range n {
				p.put(t+j, r, arith.Tree16(&s.lane16[j]))
			}
		case n == 1:
			p.put(t, r, p.quantRow1(s, row))
		default:
			p.quantRow(s, row, n)
			l := &s.lane
			for j := range n {
				p.put(t+j, r, ((l[0][j]+l[4][j])+(l[2][j]+l[6][j]))+((l[1][j]+l[5][j])+(l[3][j]+l[7][j])))
			}
		}
	}
}

// put writes element r of position j's result.
func (p *product) put(j, r int, v float32) {
	if p.bias != nil {
		v += p.bias[r]
	}
	p.y[p.place(j)+r] = v
}

// packing names n positions of the product from t on, the first being base of
// the inputs.
func (p *product) packing(base, t, n int) packing {
	is := packing{p.in, p.in.serial, p.form, nil, base, n}
	if n > 1 && p.inRow != nil {
		is.rows, is.base = &p.inRow[t], 0
	}
	return is
}

// pack fills s.pairs with the codes of the tile's only position, or s.packed
// with those of its n positions, the tile being t, t+1, ... of the product.
func (p *product) pack(s *scratch, t, n int) {
	is := p.packing(s.row[0], t, n)
	if s.packedOf == is {
		return
	}
	s.packedOf = is
	cols := p.m.Cols
	q := &p.in.q[p.form]
	if n == 1 {
		s.pairs = grown(s.pairs, cols/2)
		packPairs(s.pairs, q.code[s.row[0]*cols:(s.row[0]+1)*cols])
		return
	}
	s.packed = grown(s.packed, tile/3*cols)
	codes := func(j int) []int8 {
		if j >= n {
			return nil
		}
		return q.code[s.row[j]*cols : (s.row[j]+1)*cols]
	}
	for j := 0; j < n; j += 3 {
		pack3(s.packed[j/3*cols:(j/3+1)*cols], codes(j), codes(j+1), codes(j+2))
	}
}

// term is a block's term from its exact sums: S of codes times activation
// codes, M of mins times sums of activation codes, d the activations' scale.
func term(kind quant.Kind, b *quant.Block, s, m int32, d float32) float32 {
	t := float32(float32(s) * b.W)
	switch kind {
	case quant.Plus:
		t += float32(float32(m) * b.MinW)
	case quant.Minus:
		t -= float32(float32(m) * b.MinW)
	}
	return float32(t * d)
}

// quantRow1 is a row times the one position of the tile: block b goes to lane
// b mod 8, then the tree.
func (p *product) quantRow1(s *scratch, row []byte) float32 {
	cols, q, x := p.m.Cols, &p.in.q[p.form], s.row[0]
	scale := q.scale[x*cols/q.block : (x+1)*cols/q.block]
	sum := q.sum[x*cols/16 : (x+1)*cols/16]
	pairs := s.pairs[:cols/2]
	var l [8]float32
	b := &s.block
	w := codes(b)
	for i, d := range scale {
		p.unpack(b, row, i)
		switch {
		case p.act == 256:
			sum := (*[16]int32)(sum[16*i:])
			var m int32
			if p.kind == quant.Minus {
				m = mins256(&b.Min, sum)
			}
			l[i&7] += term(p.kind, b, dot256(b, (*[128]uint64)(pairs[128*i:]), sum), m, d)
		case p.m.Type == quant.NVFP4:
			lo := dot16((*[16]byte)(w[:]), (*[8]uint64)(pairs[16*i:]), sum[2*i])
			hi := dot16((*[16]byte)(w[16:]), (*[8]uint64)(pairs[16*i+8:]), sum[2*i+1])
			l[i&7] += float32(float32(float32(lo)*b.W) * d)
			l[i&7] += float32(float32(float32(hi)*b.W2) * d)
		default:
			x := sum[2*i] + sum[2*i+1]
			l[i&7] += term(p.kind, b, dot32((*[32]byte)(w[:]), (*[16]uint64)(pairs[16*i:]), x), x, d)
		}
	}
	return ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]))
}

// quantRow fills s.lane[:][:n] with the lanes of a row times the n positions
// of the tile, each block unpacked once.
func (p *product) quantRow(s *scratch, row []byte, n int) {
	cols, q := p.m.Cols, &p.in.q[p.form]
	blocks, sums := cols/q.block, cols/16
	for i := range s.lane {
		clear(s.lane[i][:n])
	}
	b := &s.block
	for i := range blocks {
		p.unpack(b, row, i)
		lane := s.lane[i&7][:n]
		for j := 0; j < n; j += 3 {
			x := s.packed[j/3*cols+i*q.block:]
			end := min(j+3, n)
			var t, t2 [3]int32
			switch {
			case p.act == 256:
				t[0], t[1], t[2] = dot256x3(b, (*[256]int64)(x))
				for k := j; k < end; k++ {
					var m int32
					if p.kind == quant.Minus {
						m = mins256(&b.Min, (*[16]int32)(q.sum[s.row[k]*sums+16*i:]))
					}
					lane[k] += term(p.kind, b, t[k-j], m, q.scale[s.row[k]*blocks+i])
				}
			case p.m.Type == quant.NVFP4:
				t[0], t[1], t[2] = split(dot16x3((*[16]int8)(b.Code[:]), (*[16]int64)(x)))
				t2[0], t2[1], t2[2] = split(dot16x3((*[16]int8)(b.Code[16:]), (*[16]int64)(x[16:])))
				for k := j; k < end; k++ {
					d := q.scale[s.row[k]*blocks+i]
					lane[k] += float32(float32(float32(t[k-j])*b.W) * d)
					lane[k] += float32(float32(float32(t2[k-j])*b.W2) * d)
				}
			default:
				t[0], t[1], t[2] = dot32x3((*[32]int8)(b.Code[:]), (*[32]int64)(x))
				for k := j; k < end; k++ {
					at := s.row[k]*sums + 2*i
					lane[k] += term(p.kind, b, t[k-j], q.sum[at]+q.sum[at+1], q.scale[s.row[k]*blocks+i])
				}
			}
		}
	}
}

// floatRow fills s.lane16[:n] with the lanes of a float row times the n
// positions of the tile, each run of weights decoded once.
func (p *product) floatRow(s *scratch, row []byte, n int) {
	cols := p.m.Cols
	clear(s.lane16[:n])
	for c := 0; c < cols; c += len(s.weight) {
		w := s.weight[:min(len(s.weight), cols-c)]
		decodeFloats(p.m.Type, w, row[p.m.Type.RowBytes(c):])
		for j := range n {
			at := s.row[j]*cols + c
			s.k.dotLanes(&s.lane16[j], w, p.in.f[at:at+len(w)])
		}
	}
}

// decodeFloats is dst = clean of the first weights of src (but for the sign of 0).
func decodeFloats(t quant.Type, dst []float32, src []byte) {
	switch t {
	case quant.F32:
		src = src[:4*len(dst)]
		for i := range dst {
			b := binary.LittleEndian.Uint32(src[4*i : 4*i+4])
			if b&^arith.SignMask < arith.TinyBits {
				b = 0
			}
			dst[i] = math.Float32frombits(b)
		}
	case quant.BF16:
		src = src[:2*len(dst)]
		for i := range dst {
			b := uint32(binary.LittleEndian.Uint16(src[2*i:2*i+2])) << 16
			if b&^arith.SignMask < arith.TinyBits {
				b = 0
			}
			dst[i] = math.Float32frombits(b)
		}
	case quant.F8_128:
		quant.F8Weights(dst, src)
		for i, v := range dst {
			if math.Float32bits(v)&^arith.SignMask < arith.TinyBits {
				dst[i] = 0
			}
		}
	default:
		src = src[:2*len(dst)]
		for i := range dst {
			dst[i] = fromF16(binary.LittleEndian.Uint16(src[2*i : 2*i+2]))
		}
	}
}

// fromF16 is quant.FromF16 without a branch: subnormals come as often as not
// among small weights. No number but 0 is below 2^-24, so there is nothing to
// clean, and the sign of a 0 never reaches a sum.
func fromF16(h uint16) float32 {
	a := uint32(h) & 0x7fff
	b := a<<13 + 112<<23
	low := math.Float32bits(math.Float32frombits(a<<13+113<<23) - 0x1p-14) // of a < 0x400: exact, and of no subnormal
	b ^= (b ^ low) & uint32(int32(a-0x400)>>31)                            // low if a < 0x400
	b += 112 << 23 & uint32(int32(0x7bff-a)>>31)                           // no number: refused at load, but what it is
	return math.Float32frombits(b | uint32(h&0x8000)<<16)
}
