package cpu

import (
	"encoding/binary"
	"unsafe"

	"sluice/internal/quant"
)

// A rowKernel multiplies the blocks of a type by the codes of a few positions. A
// block here is that of the activations; the type's own may be two or four of 32.
// The zero one stands for the plain Go of row.go.
type rowKernel struct {
	form     codeForm
	run      func(*rowArgs)
	unpacked bool // it takes blocks of 256 that quant has unpacked
	halves   bool // it is Q8_0's, and takes NVFP4 as halves makes it
}

// mostPositions is what a row kernel takes at once.
const mostPositions = 8

// A codeForm is how a row kernel wants a position's codes and their sums.
type codeForm struct {
	order codeOrder
	sums  sumForm
}

// A codeOrder is an order of codes.
type codeOrder uint8

const (
	natural  codeOrder = iota
	split32            // the first halves of all blocks of 32, then the second halves
	split128           // the same within 128 codes
	pairs32            // of 128 codes, in groups of 32: 0 2 1 3
)

// A sumForm says which sums of a block's codes a kernel meets.
type sumForm uint8

const (
	sumOf32  sumForm = iota // int32, one for a block of 32
	sumsOf32                // int16, eight for a block of 256
	sumsOf16                // int16, sixteen for a block of 256
)

// rowArgs are the arguments of a row kernel. It takes the blocks of a run of
// rows as one stream, eight at a time, and writes their terms in this order.
// Behind the last block of a position's codes, scales and sums, its first eight
// come again (and again, if it has fewer), so that a group may begin at any block.
//
// Assembly reads the fields: asm/rows.go has their order.
type rowArgs struct {
	w                                  *byte    // the first block
	groups                             int      // of eight blocks, at least 1; the kernel counts it down
	codes                              *int8    // of the first position
	scale                              *float32 // one a block
	sum                                *byte    // in the kernel's sumForm
	codeStride, scaleStride, sumStride int      // bytes from one position to the next
	blocks                             int      // of a row
	start                              int      // block of the row that the first one is
	step                               int      // 8 modulo blocks
	n                                  int      // positions, 1..mostPositions
	terms                              *float32 // [n, 8*groups] out
	termStride                         int      // bytes from one position to the next
	part                               *byte    // partBytes of the kernel's own, at a multiple of 64
	half                               int      // bytes from the first halves to the second in split32
}

const (
	partBytes = mostPositions*8*64 + 1024
	mostTerms = 1 << 14 // of one call, for all positions: they stay in the cache
	mostTail  = 8 * 210 // bytes of eight blocks, of any type with a kernel of its own
)

// A rowScratch is a worker's memory for row kernels.
type rowScratch struct {
	args     rowArgs
	codes    []int8
	scale    []float32
	sum      []byte
	terms    []float32
	tail     [mostTail]byte
	blocks   [8]quant.Block
	halves   []byte
	part     []byte
	packedOf rowPacking
}

// A rowPacking names what is packed.
type rowPacking struct {
	packing
	code   codeForm
	halves bool
}

// fastRows computes rows lo..hi for positions t..t+n of the product, whose
// numbers in the inputs are in s.row.
func (p *product) fastRows(s *scratch, t, n, lo, hi int) {
	f := &s.fast
	p.packRows(s, t, n)
	blocks := p.m.Cols / p.act
	groupBytes := 8 * p.rowLen / blocks
	if p.kernel.halves {
		blocks, groupBytes = 2*blocks, 8*halfBytes
	}
	step := max(1, mostTerms/(blocks*n))
	if step >= 8 {
		step &^= 7 // whole groups
	}
	stride := step*blocks + 8
	f.terms = grown(f.terms, n*stride)
	a := &f.args
	a.blocks, a.step, a.n, a.termStride = blocks, 8%blocks, n, 4*stride
	a.codes, a.scale, a.sum, a.part = &f.codes[0], &f.scale[0], &f.sum[0], &f.part[0]
	for r := lo; r < hi; r += step {
		rows := min(step, hi-r)
		data := p.m.Data[r*p.rowLen : (r+rows)*p.rowLen]
		if p.kernel.halves {
			data = p.halves(f, data)
		}
		all := rows * blocks
		switch whole := all / 8; {
		case p.kernel.unpacked:
			a.w = (*byte)(unsafe.Pointer(&f.blocks[0]))
			for i := 0; i < all; i += 8 {
				for j := range min(8, all-i) {
					p.unpack(&f.blocks[j], data, i+j)
				}
				a.groups, a.start, a.terms = 1, i%blocks, &f.terms[i]
				p.kernel.run(a)
			}
		case whole > 0:
			a.w, a.groups, a.start, a.terms = &data[0], whole, 0, &f.terms[0]
			p.kernel.run(a)
			fallthrough
		default:
			if done := all &^ 7; done < all {
				copy(f.tail[:], data[done/8*groupBytes:])
				a.w, a.groups, a.start, a.terms = &f.tail[0], 1, done%blocks, &f.terms[done]
				p.kernel.run(a)
			}
		}
		for j := range n {
			y := p.y[p.place(t+j)+r:][:rows]
			if p.kernel.halves {
				sumHalves(y, f.terms[j*stride:], blocks)
			} else {
				s.k.sumRows(&y[0], &f.terms[j*stride], rows, blocks)
			}
			if p.bias != nil {
				for i, b := range p.bias[r : r+rows] {
					y[i] += b
				}
			}
		}
	}
}

// sumRows is y[r] = the eight lanes and the tree over the blocks terms of row r.
func sumRows(y, terms *float32, rows, blocks int) {
	to, from := unsafe.Slice(y, rows), unsafe.Slice(terms, rows*blocks)
	for r := range to {
		var l [8]float32
		for b, t := range from[r*blocks : (r+1)*blocks] {
			l[b&7] += t
		}
		to[r] = ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]))
	}
}

// halfBytes is a block that halves makes: one of Q8_0.
const halfBytes = 34

// halves makes two blocks of Q8_0 of each 32 elements of NVFP4, which have two
// scales: the first half of the codes, then zeros; and zeros, then the second
// half. Half a scale of NVFP4 is a binary16 exactly.
func (p *product) halves(f *rowScratch, data []byte) []byte {
	n := len(data) / 18
	f.halves = grown(f.halves, 2*n*halfBytes)
	b := &f.blocks[0]
	for i := range n {
		p.unpack(b, data, i)
		two := f.halves[2*i*halfBytes:][:2*halfBytes]
		clear(two)
		binary.LittleEndian.PutUint16(two, quant.ToF16(b.W))
		binary.LittleEndian.PutUint16(two[halfBytes:], quant.ToF16(b.W2))
		c := codes(b)
		copy(two[2:18], c[:16])
		copy(two[halfBytes+18:], c[16:32])
	}
	return f.halves
}

// sumHalves is sumRows of rows whose terms go to a lane in pairs.
func sumHalves(y, terms []float32, blocks int) {
	for r := range y {
		var l [8]float32
		for b, t := range terms[r*blocks : (r+1)*blocks] {
			l[b/2&7] += t
		}
		y[r] = ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]))
	}
}

// packRows fills the scratch with positions t..t+n in the form of p's kernel.
func (p *product) packRows(s *scratch, t, n int) {
	f := &s.fast
	is := rowPacking{p.packing(s.row[0], t, n), p.kernel.form, p.kernel.halves}
	if f.packedOf == is {
		return
	}
	f.packedOf = is
	q := &p.in.q[p.form]
	blocks := p.m.Cols / p.act
	if p.kernel.halves {
		blocks *= 2
	}
	more := blocks + 8
	sumBytes := [...]int{sumOf32: 4, sumsOf32: 16, sumsOf16: 32}[is.code.sums]
	a := &f.args
	a.half = more * 16
	a.codeStride, a.scaleStride, a.sumStride = more*p.act, (more*4+63)&^63, (more*sumBytes+63)&^63
	f.codes = aligned(f.codes, n*a.codeStride)
	f.scale = aligned(f.scale, n*a.scaleStride/4)
	f.sum = aligned(f.sum, n*a.sumStride)
	f.part = aligned(f.part, partBytes)
	for j := range n {
		x := s.row[j]
		codes := q.code[x*p.m.Cols : (x+1)*p.m.Cols]
		scale := q.scale[x*p.m.Cols/p.act : (x+1)*p.m.Cols/p.act]
		sums := q.sum[x*p.m.Cols/16 : (x+1)*p.m.Cols/16]
		toCodes, toScale, toSums := f.codes[j*a.codeStride:(j+1)*a.codeStride], f.scale[j*a.scaleStride/4:][:more], f.sum[j*a.sumStride:][:more*sumBytes]
		if p.kernel.halves { // each block twice
			for b := range scale {
				repeat(toCodes[64*b:64*b+64], codes[32*b:32*b+32])
				toScale[2*b], toScale[2*b+1] = scale[b], scale[b]
				binary.NativeEndian.PutUint32(toSums[8*b:], uint32(sums[2*b]+sums[2*b+1]))
				repeat(toSums[8*b:8*b+8], toSums[8*b:8*b+4])
			}
			repeat(toCodes, toCodes[:32*blocks])
			repeat(toScale, toScale[:blocks])
			repeat(toSums, toSums[:4*blocks])
			continue
		}
		orderCodes(toCodes, codes, is.code.order)
		repeat(toScale, scale)
		sumCodes(toSums, sums, is.code.sums)
	}
}

// repeat fills dst, which is longer, with src again and again.
func repeat[T any](dst, src []T) {
	for n := copy(dst, src); n < len(dst); n *= 2 {
		copy(dst[n:], dst[:n])
	}
}

// orderCodes fills dst with the blocks of src in this order, the first eight
// blocks again behind them.
func orderCodes(dst, src []int8, order codeOrder) {
	switch order {
	case split32:
		half := len(dst) / 2
		lo, hi := dst[:half], dst[half:]
		n := len(src) / 2
		for i := 0; i < n; i += 16 {
			copy(lo[i:i+16], src[2*i:2*i+16])
			copy(hi[i:i+16], src[2*i+16:2*i+32])
		}
		repeat(lo, lo[:n])
		repeat(hi, hi[:n])
		return
	case split128:
		for i := 0; i < len(src); i += 128 {
			d, s := (*[2][4][16]int8)(unsafe.Pointer(&dst[i])), (*[4][2][16]int8)(unsafe.Pointer(&src[i]))
			for g := range s {
				d[0][g], d[1][g] = s[g][0], s[g][1]
			}
		}
		repeat(dst, dst[:len(src)])
	case pairs32:
		for i := 0; i < len(src); i += 128 {
			d, s := (*[4][32]int8)(unsafe.Pointer(&dst[i])), (*[4][32]int8)(unsafe.Pointer(&src[i]))
			d[0], d[1], d[2], d[3] = s[0], s[2], s[1], s[3]
		}
		repeat(dst, dst[:len(src)])
	default:
		repeat(dst, src)
	}
}

// sumCodes fills dst from the sums of 16 codes each, the first eight blocks
// again behind them.
func sumCodes(dst []byte, sum []int32, form sumForm) {
	switch form {
	case sumOf32:
		to := unsafe.Slice((*int32)(unsafe.Pointer(&dst[0])), len(dst)/4)
		for i := range len(sum) / 2 {
			to[i] = sum[2*i] + sum[2*i+1]
		}
		repeat(to, to[:len(sum)/2])
	case sumsOf32:
		to := unsafe.Slice((*int16)(unsafe.Pointer(&dst[0])), len(dst)/2)
		for i := range len(sum) / 2 {
			to[i] = int16(sum[2*i] + sum[2*i+1])
		}
		repeat(to, to[:len(sum)/2])
	default:
		to := unsafe.Slice((*int16)(unsafe.Pointer(&dst[0])), len(dst)/2)
		for i, v := range sum {
			to[i] = int16(v)
		}
		repeat(to, to[:len(sum)])
	}
}

// aligned is grown, in memory that begins at a multiple of 64.
func aligned[T any](s []T, n int) []T {
	if cap(s) < n {
		var zero T
		size := int(unsafe.Sizeof(zero))
		s = make([]T, n+64/size)
		s = s[(64-int(uintptr(unsafe.Pointer(&s[0]))&63))/size:]
	}
	return s[:n]
}
