package cpu

import "hash/crc32"

// checksumStep takes the CRC-32C of data by pieces; an item is one of them.
type checksumStep struct {
	data []byte
	sums []uint32
}

const checksumPiece = 64 << 10

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Checksum is the CRC-32C of data, by all threads; a step as any other, on the
// goroutine that makes the steps. What it has read is in the caches for a step that
// computes with it.
func (b *Backend) Checksum(data []byte) uint32 {
	s, pieces := &b.crc, (len(data)+checksumPiece-1)/checksumPiece
	s.data = data
	if cap(s.sums) < pieces {
		s.sums = make([]uint32, pieces)
	}
	s.sums = s.sums[:pieces]
	b.do("Checksum", s, pieces, 1)
	s.data = nil
	sum := uint32(0)
	for i, of := range s.sums {
		n := min(checksumPiece, len(data)-i*checksumPiece)
		by := b.pieceShift
		if n < checksumPiece {
			by = shiftOf(n)
		}
		sum = times(by, sum) ^ of
	}
	return sum
}

func (s *checksumStep) run(_ *worker, lo, hi int) {
	for i := lo; i < hi; i++ {
		s.sums[i] = crc32.Checksum(s.data[i*checksumPiece:min((i+1)*checksumPiece, len(s.data))], castagnoli)
	}
}

// The checksum of A and B behind it is that of A, as a polynomial over the field of
// two elements, times x^(8*len(B)) modulo the checksum's own, plus that of B. Bit 31
// is the coefficient of x^0, as in crc32.

// times is a*b modulo the Castagnoli polynomial.
func times(a, b uint32) (p uint32) {
	for ; a != 0; a <<= 1 {
		if a>>31 != 0 {
			p ^= b
		}
		carry := b & 1
		b = b>>1 ^ -carry&crc32.Castagnoli
	}
	return p
}

// shiftOf is x^(8*n).
func shiftOf(n int) uint32 {
	p, square := uint32(1<<31), uint32(1<<23) // 1, x^8
	for ; n > 0; n >>= 1 {
		if n&1 != 0 {
			p = times(p, square)
		}
		square = times(square, square)
	}
	return p
}
