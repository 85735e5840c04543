package synth

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"

	"sluice/internal/quant"
)

// chunkBytes is how much of a tensor is made at once: enough that a write costs
// little, few enough to stay in a cache.
const chunkBytes = 256 << 10

// newRand gives the random numbers that belong to a seed and a name.
func newRand(seed uint64, name string) *rand.Rand { return rand.New(newSource(seed, name)) }

func newSource(seed uint64, name string) *rand.ChaCha8 {
	return rand.NewChaCha8(sha256.Sum256(fmt.Appendf(nil, "%d %s", seed, name)))
}

// A generator makes the bytes of a tensor from first to last.
type generator struct {
	t        tensor
	src      *rand.ChaCha8
	elems    int   // of a block
	size     int   // bytes of a block
	rowLen   int64 // blocks of a row
	rows     int64 // of a matrix; a stack has the same rows again for each expert
	at, last int64 // the next block, and how many there are

	scale, min uint16   // f16 of a Q4_K or Q8_0 block
	hold       uint16   // f16 of a Q8_0 block whose codes are all 127
	subs       []uint64 // Q4_K: packed sub-scales to choose from, the first 8 of 12 bytes
	subs4      []uint32 // the other 4
}

func newGenerator(seed uint64, t tensor) *generator {
	g := &generator{t: t, src: newSource(seed, t.Name), rows: 1}
	g.elems, g.size = t.Type.Block()
	g.rowLen = t.Dims[0] / int64(g.elems)
	if len(t.Dims) > 1 {
		g.rows = t.Dims[1]
	}
	g.last = t.Bytes() / int64(g.size)
	if g.t.dev == 0 && t.popular == nil {
		g.t.dev = 1 / math.Sqrt(float64(t.Dims[0]))
	}
	switch t.Type {
	case quant.Q8_0:
		const dev = 73.9 // of codes that are any int8
		g.scale = quant.ToF16(float32(g.t.dev / dev))
		g.hold = quant.ToF16(float32(t.anchor / 127))
	case quant.Q4_K:
		g.scales()
	}
	return g
}

// scales chooses the scales of Q4_K: an element is d*sc*q - dmin*m with q any of
// 0..15. Its mean is 0 if m is sc and dmin is 7.5*d.
func (g *generator) scales() {
	const patterns = 256 // a byte chooses
	square, n := 0.0, 0
	for range patterns {
		var sc [8]byte // of 6 bits, at least half of the largest
		for j := range sc {
			sc[j] = 32 + byte(g.src.Uint64()&31)
			square += float64(sc[j]) * float64(sc[j])
			n++
		}
		var b [12]byte // 4 scales, 4 mins, and their 4 others' low halves; the high bits of those are above the first
		for j := range 4 {
			b[j] = sc[j] | sc[j+4]>>4<<6
			b[j+4] = sc[j] | sc[j+4]>>4<<6
			b[j+8] = sc[j+4]&15 | sc[j+4]<<4
		}
		g.subs = append(g.subs, binary.LittleEndian.Uint64(b[:]))
		g.subs4 = append(g.subs4, binary.LittleEndian.Uint32(b[8:]))
	}
	const dev = 4.61 // of 0..15
	d := g.t.dev / (dev * math.Sqrt(square/float64(n)))
	g.scale = quant.ToF16(float32(d))
	g.min = quant.ToF16(float32(7.5 * d))
}

// next makes some more bytes, in buf; none when the tensor is complete.
func (g *generator) next(buf []byte) []byte {
	n := min(int64(len(buf)/g.size), g.last-g.at)
	b := buf[:n*int64(g.size)]
	if g.t.Type == quant.F32 {
		for i := range n {
			binary.LittleEndian.PutUint32(b[4*i:], math.Float32bits(float32(g.float(g.at+i))))
		}
		g.at += n
		return b
	}
	g.src.Read(b)
	row, col := g.at/g.rowLen%g.rows, g.at%g.rowLen
	for i := range n {
		block := b[i*int64(g.size) : (i+1)*int64(g.size)]
		scale, low := g.scale, g.min
		if g.t.quiet == skips && row < anchorDims || g.t.quiet == ignores && col == 0 {
			scale, low = 0, 0
		}
		if g.t.quiet == holds && col == 0 {
			scale = g.hold
			for j := range block[2:] {
				block[2+j] = 127
			}
		}
		if g.t.Type == quant.Q4_K {
			pick := block[4]
			binary.LittleEndian.PutUint16(block[2:], low)
			binary.LittleEndian.PutUint64(block[4:], g.subs[pick])
			binary.LittleEndian.PutUint32(block[12:], g.subs4[pick])
		}
		binary.LittleEndian.PutUint16(block, scale)
		if col++; col == g.rowLen {
			col = 0
			if row++; row == g.rows {
				row = 0
			}
		}
	}
	g.at += n
	return b
}

// float draws element i of a float tensor.
func (g *generator) float(i int64) float64 {
	t := &g.t
	if t.popular == nil {
		return t.mean + float64(t.dev*g.normal()) // rounded apart, so that no machine fuses it
	}
	if len(t.Dims) == 1 { // a bias
		return t.popular[i]
	}
	// A router: the anchor carries the popularity, the rest spreads by 1.
	cols := t.Dims[0]
	if i%cols < anchorDims {
		return t.popular[i/cols] / (t.anchor * anchorDims)
	}
	return g.normal() / math.Sqrt(float64(cols))
}

// normal draws a nearly normal number of mean 0 and deviation 1, exactly the
// same on every machine: a sum of four that are uniform.
func (g *generator) normal() float64 {
	u := g.src.Uint64()
	sum := float64(u&0xffff) + float64(u>>16&0xffff) + float64(u>>32&0xffff) + float64(u>>48)
	return (sum/65536 - 2) * 1.7320508075688772
}
