package cpu

import (
	"encoding/binary"
	"unsafe"

	"sluice/internal/quant"
)

// A tileKernel multiplies eight rows, unpacked into codes, by many positions:
// 16 or 32 of them at once. The zero one stands for the plain Go of row.go.
type tileKernel struct {
	least  int // positions from which on it is faster than the row kernel
	group  int // codes under one sub-scale, 16 or 32; 0: blocks of 32 without
	bias   int32
	unpack func(*unpackArgs)  // nil: by quant's Unpacker; then the bias is 128 or 0
	run    [2]func(*tileArgs) // for 16 and 32 positions; nil: there is none for 32
	pairs  bool               // a sub-scale is a pair of equal int16
}

// unpackArgs are the arguments of the kernel that unpacks the blocks of a row into
// tileArgs' memory: eight blocks of 32 at a time, or one of 256.
//
// Assembly reads the fields: asm/formats512.go has their order.
type unpackArgs struct {
	w          *byte
	groups     int // of eight blocks of 32; blocks of 256
	codes      *byte
	scale, min *float32
	sub        *int32
	pair       *int16
}

// tileArgs are the arguments of a tile kernel.
//
// Assembly reads the fields: asm/tiles512.go has their order, and those of the
// records of positions, and says how the memory is laid out.
type tileArgs struct {
	w           *byte    // [runs, 8 rows, 32] codes, plus the bias
	scale       *float32 // [8 rows, scaleStride/4]
	min         *float32 // the same
	scaleStride int      // bytes
	sub         *int32   // [blocks, 8 rows, 256/group] sub-scales
	pair        *int16   // [blocks, 8 rows, 256/group] sub-mins
	x           [2]*byte // records of 16 positions each
	blocks      int      // the kernel may count it down
	bias        int64    // negative; the kernel reads 32 bits of it
	lanes       *float32 // [8 lanes, 8 rows, 16 or 32] of the kernel's own, at a multiple of its size
	out         *[32]*float32
}

const (
	tileRows = 8

	// What 16 positions hold for 32 codes: see asm/tiles512.go.
	runHalf        = 512
	runSum         = 512 + 2*64
	runBytes       = 512 + 3*64
	record32Scale  = runBytes
	record256Scale = 8 * runBytes
	record256Pair  = record256Scale + 64
)

// recordBytes is the size of a record of 16 positions for one block.
func recordBytes(group int) int {
	if group == 0 {
		return record32Scale + 64
	}
	return record256Pair + 256/group/2*64
}

// A tileScratch is a worker's memory for tile kernels.
type tileScratch struct {
	args     tileArgs
	unpack   unpackArgs
	pack     packArgs
	tail     [mostTail]byte
	out      [32]*float32
	records  []byte // [positions/16, blocks] of the tile
	packedOf tilePacking
	w        []byte
	scale    []float32
	min      []float32
	sub      []int32
	pair     []int16
	lanes    []float32
	rest     [32 * tileRows]float32 // where results go that have no place of their own
}

// A tilePacking names what the records hold.
type tilePacking struct {
	packing
	group int
}

// tileRun computes rows lo..hi for positions t..t+n of the product, whose
// numbers in the inputs are in row.
func (p *product) tileRun(s *scratch, row []int, t, n, lo, hi int) {
	f := &s.tile
	k := &p.tiles
	blocks := p.m.Cols / p.act
	p.packTile(s, row, t, n)
	f.grow(p, blocks)
	a := &f.args
	a.w, a.scale, a.min, a.scaleStride = &f.w[0], &f.scale[0], &f.min[0], 4*scaleStride(blocks)
	a.sub, a.pair, a.bias = &f.sub[0], &f.pair[0], -int64(k.bias)
	a.lanes, a.out = &f.lanes[0], &f.out
	record := blocks * recordBytes(k.group)
	for r := lo; r < hi; r += tileRows {
		rows := min(tileRows, hi-r)
		for i := range rows {
			p.unpackRow(f, p.m.Data[(r+i)*p.rowLen:(r+i+1)*p.rowLen], i)
		}
		step := 32
		if k.run[1] == nil {
			step = 16
		}
		for j := 0; j < n; j += step {
			wide := min(step, n-j)
			for i := range step {
				f.out[i] = &f.rest[i*tileRows]
				if i < wide && rows == tileRows {
					f.out[i] = &p.y[p.place(t+j+i)+r]
				}
			}
			a.x[0] = &f.records[j/16*record]
			z := 0
			if wide > 16 {
				a.x[1], z = &f.records[(j/16+1)*record], 1
			}
			a.blocks = blocks
			k.run[z](a)
			for i := range wide {
				y := p.y[p.place(t+j+i)+r:][:rows]
				if rows < tileRows {
					copy(y, f.rest[i*tileRows:])
				}
				if p.bias != nil {
					for o, b := range p.bias[r : r+rows] {
						y[o] += b
					}
				}
			}
		}
	}
}

// place is where position j's results begin in y.
func (p *product) place(j int) int {
	if p.yRow != nil {
		j = int(p.yRow[j])
	}
	return j * p.stride
}

// scaleStride is the floats from one row's scales to the next's: room for a
// group of eight blocks more than there are.
func scaleStride(blocks int) int { return (blocks + 15) &^ 7 }

func (f *tileScratch) grow(p *product, blocks int) {
	runs := p.m.Cols / 32
	f.w = aligned(f.w, (runs+8)*tileRows*32)
	f.scale = aligned(f.scale, tileRows*scaleStride(blocks))
	f.min = aligned(f.min, tileRows*scaleStride(blocks))
	f.sub = aligned(f.sub, blocks*tileRows*16)
	f.pair = aligned(f.pair, blocks*tileRows*16)
	if f.lanes == nil { // 16 KiB at a multiple of 16 KiB
		const n = 8 * tileRows * 32
		all := aligned(f.lanes, 2*n)
		f.lanes = all[(4*n-int(uintptr(unsafe.Pointer(&all[0]))&(4*n-1)))/4%n:][:n]
	}
}

// unpackRow unpacks row r of the eight.
func (p *product) unpackRow(f *tileScratch, row []byte, r int) {
	k, a := &p.tiles, &f.unpack
	if k.unpack == nil {
		p.unpackPlain(f, row, r)
		return
	}
	blocks := p.m.Cols / p.act
	groups := 256 / max(k.group, 16)
	a.codes = &f.w[r*32]
	a.scale, a.min = &f.scale[r*scaleStride(blocks)], &f.min[r*scaleStride(blocks)]
	a.sub, a.pair = &f.sub[r*groups], &f.pair[r*groups]
	a.w, a.groups = &row[0], blocks
	if p.act == 256 {
		k.unpack(a)
		return
	}
	done := blocks &^ 7
	if a.groups = blocks / 8; a.groups > 0 {
		k.unpack(a)
	}
	if done < blocks {
		copy(f.tail[:], row[done*len(row)/blocks:])
		a.w, a.groups = &f.tail[0], 1
		a.codes = &f.w[(done*tileRows+r)*32]
		a.scale, a.min = &f.scale[r*scaleStride(blocks)+done], &f.min[r*scaleStride(blocks)+done]
		k.unpack(a)
	}
}

// unpackPlain is unpackRow by quant's Unpacker.
func (p *product) unpackPlain(f *tileScratch, row []byte, r int) {
	k := &p.tiles
	blocks, runs := p.m.Cols/p.act, p.act/32
	var b quant.Block
	var flipped uint64
	if k.bias != 0 {
		flipped = flip
	}
	for i := range blocks {
		p.unpack(&b, row, i)
		c := codes(&b)
		for j := range runs {
			to := (*[4]uint64)(unsafe.Pointer(&f.w[((i*runs+j)*tileRows+r)*32]))
			for n := range to {
				to[n] = binary.NativeEndian.Uint64(c[32*j+8*n:]) ^ flipped
			}
		}
		f.scale[r*scaleStride(blocks)+i], f.min[r*scaleStride(blocks)+i] = b.W, b.MinW
		if p.act == 256 {
			groups := 256 / k.group
			for g := range groups {
				s := b.Scale[g*16/groups]
				if k.pairs {
					s = s<<16 | s&0xffff
				}
				f.sub[(i*tileRows+r)*groups+g] = s
				f.pair[(i*tileRows+r)*groups+g] = int16(b.Min[g*16/groups])
			}
		}
	}
}

// A packKernel lays out eight positions of a record. The zero one stands for
// plain Go.
type packKernel struct {
	codes32, codes256By16, codes256By32, floats func(*packArgs)
}

// packArgs are the arguments of a packKernel's functions: codes packs blocks of
// codes, with their sums; floats packs eight scales at a time.
//
// Assembly reads the fields: asm/pack.go has their order.
type packArgs struct {
	to     *byte
	blocks int // of codes; of eight floats
	stride int // bytes from one float to the next
	from   [8]*byte
}

// packTile fills the records with positions t..t+n.
func (p *product) packTile(s *scratch, row []int, t, n int) {
	f := &s.tile
	is := tilePacking{p.packing(row[0], t, n), p.tiles.group}
	if f.packedOf == is {
		return
	}
	f.packedOf = is
	q := &p.in.q[p.form]
	cols := p.m.Cols
	blocks, bytes := cols/p.act, recordBytes(p.tiles.group)
	f.records = aligned(f.records, (n+15)/16*blocks*bytes)
	scale := record32Scale
	if p.act == 256 {
		scale = record256Scale
	}
	if s.k.pack.floats == nil {
		for j := range n {
			p.packOne(f.records[j/16*blocks*bytes:], row[j], j%16, scale)
		}
		return
	}
	codes := s.k.pack.codes32
	switch p.tiles.group {
	case 16:
		codes = s.k.pack.codes256By16
	case 32:
		codes = s.k.pack.codes256By32
	}
	a := &f.pack
	for j := 0; j < n; j += 8 {
		rec := f.records[j/16*blocks*bytes+j%16*4:]
		for i := range a.from { // lanes without a position repeat the last one
			a.from[i] = (*byte)(unsafe.Pointer(&q.code[row[min(j+i, n-1)]*cols]))
		}
		a.to, a.blocks = &rec[0], blocks
		codes(a)
		for i := range a.from {
			a.from[i] = (*byte)(unsafe.Pointer(&q.scale[row[min(j+i, n-1)]*blocks]))
		}
		a.to, a.blocks, a.stride = &rec[scale], blocks/8, bytes
		if a.blocks > 0 {
			s.k.pack.floats(a)
		}
		for b := blocks &^ 7; b < blocks; b++ {
			to := unsafe.Slice((*float32)(unsafe.Pointer(&rec[b*bytes+scale])), 8)
			for i := range to {
				to[i] = q.scale[row[min(j+i, n-1)]*blocks+b]
			}
		}
	}
}

// packOne is position x of the inputs as number i of the records that begin at rec.
func (p *product) packOne(rec []byte, x, i, scale int) {
	q := &p.in.q[p.form]
	cols := p.m.Cols
	blocks, bytes := cols/p.act, recordBytes(p.tiles.group)
	codes := q.code[x*cols : (x+1)*cols]
	sums := q.sum[x*cols/16 : (x+1)*cols/16]
	for b := range blocks {
		ints := unsafe.Slice((*int32)(unsafe.Pointer(&rec[b*bytes])), bytes/4)[i:]
		for r := range p.act / 32 {
			at := r * runBytes / 4
			c := (*[8]int32)(unsafe.Pointer(&codes[b*p.act+32*r]))
			for k, v := range c {
				ints[at+16*k] = v
			}
			lo, hi := sums[(b*p.act+32*r)/16], sums[(b*p.act+32*r)/16+1]
			ints[at+runHalf/4], ints[at+runHalf/4+16], ints[at+runSum/4] = lo, hi, lo+hi
		}
		if p.act == 256 {
			sum := (*[16]int32)(sums[16*b:])
			for r := range 256 / p.tiles.group / 2 {
				lo, hi := sum[2*r], sum[2*r+1]
				if p.tiles.group == 32 {
					lo, hi = sum[4*r]+sum[4*r+1], sum[4*r+2]+sum[4*r+3]
				}
				ints[record256Pair/4+16*r] = int32(uint32(uint16(lo)) | uint32(hi)<<16)
			}
		}
		*(*float32)(unsafe.Pointer(&ints[scale/4])) = q.scale[x*blocks+b]
	}
}
