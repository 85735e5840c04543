package storage

import (
	"encoding/binary"
	"math"

	"sluice/internal/quant"
)

// share makes the share of one expert: dst, of rows*RowBytes(cols) bytes, from
// what lies in the sources, codes and scales.
func (f *form) share(dst, codes, scale []byte) {
	rowBytes := int64(f.typ.RowBytes(int(f.cols)))
	for i := range f.rows {
		row, at := dst[i*rowBytes:(i+1)*rowBytes], f.first+i*f.step
		switch f.weave {
		case unwoven, pick:
			copy(row, codes[at*rowBytes:])
		case transposed:
			column(row, codes, at, f.all, int(rowBytes/f.cols))
		case float8:
			f.float8Row(row, codes[at*f.cols:(at+1)*f.cols], scale, at)
		case fp4:
			fp4Row(row, codes[at*f.cols/2:], scale[at*f.cols/32:])
		case int4:
			f.int4Row(row, codes[at*f.cols/2:], scale, at)
		case coli8, coli4, coli3, coli2:
			f.coliRow(row, codes[at*f.weave.coliBytes(f.cols):], scale, at)
		}
	}
}

// column gathers column c of a matrix of so many columns, of size bytes each.
func column(dst, src []byte, c, cols int64, size int) {
	step, at := int(cols)*size, int(c)*size
	if size == 2 {
		for i := 0; i < len(dst); i, at = i+2, at+step {
			dst[i], dst[i+1] = src[at], src[at+1]
		}
		return
	}
	for i := 0; i < len(dst); i, at = i+size, at+step {
		copy(dst[i:i+size], src[at:at+size])
	}
}

// at is the scale of a code, in its matrix of scales.
func (s *scales) at(b []byte, row, col int64) float32 {
	if s.rows == 0 {
		return 1
	}
	i := row/s.high*s.cols + col/s.wide
	switch s.typ {
	case quant.F32:
		return math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:]))
	case quant.BF16:
		return quant.FromBF16(binary.LittleEndian.Uint16(b[2*i:]))
	case quant.I8: // E8M0, an exponent; 255 is no number
		return math.Float32frombits(uint32(b[i]) << 23)
	default:
		return quant.FromF16(binary.LittleEndian.Uint16(b[2*i:]))
	}
}

// float8Row makes blocks of F8_128 of a row of codes.
func (f *form) float8Row(dst, codes, scale []byte, row int64) {
	for col := int64(0); len(codes) > 0; col += 128 {
		binary.LittleEndian.PutUint32(dst, math.Float32bits(f.scale.at(scale, row, col)))
		n := min(len(codes), 128)
		copy(dst[4:], codes[:n])
		clear(dst[4+n : 132])
		codes, dst = codes[n:], dst[132:]
	}
}

// fp4Row makes blocks of MXFP4 of a row whose byte j of 16 has the elements 2j,
// low, and 2j+1: in ours it has j and j+16.
func fp4Row(dst, codes, scale []byte) {
	for i := 0; len(dst) > 0; i++ {
		dst[0] = scale[i]
		halves(dst[1:17], codes[16*i:16*i+16])
		dst = dst[17:]
	}
}

// int4Row makes blocks of Q4_0, INT4_32 or INT4_128 of a row with neighbours in a
// byte. Scales keep their bits: f16 is what Q4_0 has, bf16 the others.
func (f *form) int4Row(dst, codes, scale []byte, row int64) {
	elems, size := f.typ.Block()
	for col := int64(0); len(dst) > 0; col += int64(elems) {
		i := row/f.scale.high*f.scale.cols + col/f.scale.wide
		dst[0], dst[1] = scale[2*i], scale[2*i+1]
		for k := 0; k < elems/2; k += 16 {
			halves(dst[2+k:18+k], codes[k:k+16])
		}
		codes, dst = codes[elems/2:], dst[size:]
	}
}

// halves puts the nibbles of 32 elements from two neighbours in a byte, the first
// low, to j and j+16 in byte j.
func halves(dst, src []byte) {
	const low = 0x0f0f0f0f0f0f0f0f
	a, b := binary.LittleEndian.Uint64(src), binary.LittleEndian.Uint64(src[8:]) // nibble j: element j, and j+16
	even, odd := a&low|b&low<<4, a>>4&low|b&(low<<4)
	binary.LittleEndian.PutUint64(dst, apart(even)|apart(odd)<<8)
	binary.LittleEndian.PutUint64(dst[8:], apart(even>>32)|apart(odd>>32)<<8)
}

// apart puts a zero byte behind each of the low four bytes.
func apart(x uint64) uint64 {
	x &= 0xffffffff
	x = (x | x<<16) & 0x0000ffff0000ffff
	return (x | x<<8) & 0x00ff00ff00ff00ff
}
