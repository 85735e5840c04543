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
	if f.weave == transposed {
		f.transpose(dst, codes, int(rowBytes/f.cols))
		return
	}
	for i := range f.rows {
		row, at := dst[i*rowBytes:(i+1)*rowBytes], f.first+i*f.step
		switch f.weave {
		case unwoven, pick:
			copy(row, codes[at*rowBytes:])
		case float8:
			f.float8Row(row, codes[at*f.cols:(at+1)*f.cols], scale, at)
		case fp4:
			fp4Row(row, codes[at*f.cols/2:], scale[at*f.cols/32:])
		case int4:
			f.blocks(row, codes[at*f.cols/2:], scale, at, 2)
		case coli8, coli4, coli3, coli2:
			f.blocks(row, codes[at*f.weave.coliBytes(f.cols):], scale, at, 4)
		}
	}
}

// transpose fills dst with columns of a matrix in src, of elements of size bytes.
// It goes by squares, which the first cache holds: their lines lie far apart in
// src the one way and in dst the other.
func (f *form) transpose(dst, src []byte, size int) {
	const rows, line = 32, 64 // of a square; and the bytes of its lines
	var square [rows][line]byte
	all, step, first := int(f.all)*size, int(f.step)*size, int(f.first)*size
	width := int(f.cols) * size // of a row of the result
	for i := 0; i < int(f.rows); i += rows {
		n := min(rows, int(f.rows)-i)
		span := (n-1)*step + size
		for at := 0; at < width; at += line {
			bytes := min(line, width-at)
			from := func(k int) []byte { return src[(at+k)/size*all+first+i*step:][:span] }
			k := 0
			switch size { // eight bytes of a line at a time
			case 2:
				for ; k+8 <= bytes; k += 8 {
					a, b, c, d := from(k), from(k+2), from(k+4), from(k+6)
					b, c, d = b[:len(a)], c[:len(a)], d[:len(a)]
					for r, o := 0, 0; r < n && o < len(a)-1; r, o = r+1, o+step {
						x := uint64(binary.LittleEndian.Uint16(a[o:])) | uint64(binary.LittleEndian.Uint16(b[o:]))<<16 |
							uint64(binary.LittleEndian.Uint16(c[o:]))<<32 | uint64(binary.LittleEndian.Uint16(d[o:]))<<48
						binary.LittleEndian.PutUint64(square[r&(rows-1)][k&(line-8):], x)
					}
				}
			case 4:
				for ; k+8 <= bytes; k += 8 {
					a, b := from(k), from(k+4)
					b = b[:len(a)]
					for r, o := 0, 0; r < n && o < len(a)-3; r, o = r+1, o+step {
						x := uint64(binary.LittleEndian.Uint32(a[o:])) | uint64(binary.LittleEndian.Uint32(b[o:]))<<32
						binary.LittleEndian.PutUint64(square[r&(rows-1)][k&(line-8):], x)
					}
				}
			}
			for ; k < bytes; k += size {
				a := from(k)
				for r := range square[:n] {
					copy(square[r][k:k+size], a[r*step:])
				}
			}
			for r := range square[:n] {
				copy(dst[(i+r)*width+at:][:bytes], square[r][:])
			}
		}
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
		halves(dst[1:17], codes[16*i:])
		dst = dst[17:]
	}
}

// blocks makes blocks of integers of a row of codes, behind the scale, of so many
// bytes, of each. Scales keep their bits. Codes of three and of two bits become
// nibbles of the same numbers.
func (f *form) blocks(dst, codes, scale []byte, row, bytes int64) {
	elems, size := f.typ.Block()
	scale = scale[row/f.scale.high*f.scale.cols*bytes:]
	for col := 0; len(dst) > 0; scale = scale[bytes:] {
		for left := f.scale.wide; left > 0 && len(dst) > 0; left -= int64(elems) {
			if bytes == 2 {
				*(*[2]byte)(dst) = *(*[2]byte)(scale)
			} else {
				*(*[4]byte)(dst) = *(*[4]byte)(scale)
			}
			block := dst[bytes:size]
			switch f.weave {
			case coli8:
				copy(block, codes[col:])
			case coli3:
				for k := 0; k < elems; k += 32 {
					c := codes[(col+k)/64*24:][:24]
					half := (col + k) % 64 / 32
					three((*[16]byte)(block[k/2:]), (*[8]byte)(c[8*half:]), (*[4]byte)(c[16+4*half:]))
				}
			case coli2:
				for k := 0; k < elems; k += 32 {
					two((*[16]byte)(block[k/2:]), (*[8]byte)(codes[(col+k)/4:]))
				}
			default:
				halves(block, codes[col/2:])
			}
			col, dst = col+elems, dst[size:]
		}
	}
}

// halves puts the nibbles of each 32 elements from two neighbours in a byte, the
// first low, to j and j+16 in byte j.
func halves(dst, src []byte) {
	const high = 0x00f000f000f000f0 // nibble of every other byte
	src = src[:len(dst)]
	for k := 0; k <= len(dst)-16; k += 16 {
		d, s := (*[16]byte)(dst[k:k+16]), (*[16]byte)(src[k:k+16])
		// bytes 0 8 1 9 2 10 3 11, then the others: the high nibble of the first of two
		// and the low one of the second change places
		x := apart(binary.LittleEndian.Uint32(s[:])) | apart(binary.LittleEndian.Uint32(s[8:]))<<8
		y := apart(binary.LittleEndian.Uint32(s[4:])) | apart(binary.LittleEndian.Uint32(s[12:]))<<8
		t, u := (x^x>>4)&high, (y^y>>4)&high
		binary.LittleEndian.PutUint64(d[:], x^t^t<<4)
		binary.LittleEndian.PutUint64(d[8:], y^u^u<<4)
	}
}

// two puts 32 codes of two bits, with offset 2, to nibbles with offset 8, j and
// j+16 in byte j.
func two(dst *[16]byte, src *[8]byte) {
	for i := 0; i < 4; i++ {
		binary.LittleEndian.PutUint32(dst[4*i:], fours[src[i]]+fours[src[i+4]]<<4+0x66666666)
	}
}

// three puts 32 codes of three bits, with offset 4, whose third bits stand apart,
// to nibbles with offset 8, j and j+16 in byte j.
func three(dst *[16]byte, src *[8]byte, high *[4]byte) {
	for i := 0; i < 2; i++ {
		x := uint64(fours[src[2*i]]+fours[src[2*i+4]]<<4) + uint64(fours[src[2*i+1]]+fours[src[2*i+5]]<<4)<<32
		binary.LittleEndian.PutUint64(dst[8*i:], x+eights[high[i]]<<2+eights[high[i+2]]<<6+0x4444444444444444)
	}
}

// fours has the four pairs of bits of a byte in a byte each, eights its eight bits.
var fours, eights = func() (four [256]uint32, eight [256]uint64) {
	for x := range uint64(256) {
		for i := range uint64(4) {
			four[x] |= uint32(x >> (2 * i) & 3 << (8 * i))
		}
		for i := range uint64(8) {
			eight[x] |= x >> i & 1 << (8 * i)
		}
	}
	return four, eight
}()

// apart puts a zero byte behind each byte.
func apart(b uint32) uint64 {
	x := uint64(b)
	x = (x | x<<16) & 0x0000ffff0000ffff
	return (x | x<<8) & 0x00ff00ff00ff00ff
}
