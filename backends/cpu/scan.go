package cpu

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"
)

// scanItem is the bytes of an item of Scan.
const scanItem = 1 << 18

// scanStep reads p; an item is scanItem bytes.
type scanStep struct {
	p   []byte
	sum atomic.Uint64
}

// Scan reads p, whole 256 bytes, with all threads and does nothing else: what is
// measured of it is the most that rows of weights can be read with. It returns
// the sum of the 64-bit words.
func (b *Backend) Scan(p []byte) uint64 {
	if len(p)%256 != 0 {
		panic(fmt.Sprintf("backends/cpu: Scan of %d bytes, which are no whole 256", len(p)))
	}
	b.scan.p = p
	b.scan.sum.Store(0)
	b.do("Scan", &b.scan, (len(p)+scanItem-1)/scanItem, 1)
	b.scan.p = nil
	return b.scan.sum.Load()
}

func (s *scanStep) run(w *worker, lo, hi int) {
	s.sum.Add(w.k.scan(s.p[lo*scanItem : min(hi*scanItem, len(s.p))]))
}

// scan is the sum of the 64-bit words of p.
func scan(p []byte) uint64 {
	var a, b, c, d uint64
	for ; len(p) >= 32; p = p[32:] {
		a += binary.LittleEndian.Uint64(p)
		b += binary.LittleEndian.Uint64(p[8:])
		c += binary.LittleEndian.Uint64(p[16:])
		d += binary.LittleEndian.Uint64(p[24:])
	}
	return a + b + c + d
}
