package cpu

import (
	"hash/crc32"
	"math/rand/v2"
	"testing"
)

// The checksum of all threads is crc32's, for every length about a piece's.
func TestChecksum(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	data := make([]byte, 5*checksumPiece+77)
	for i := range data {
		data[i] = byte(rng.Uint32())
	}
	table := crc32.MakeTable(crc32.Castagnoli)
	for _, threads := range []int{1, 2, 3} {
		b, err := New(Options{Threads: threads})
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range []int{0, 1, 7, checksumPiece - 1, checksumPiece, checksumPiece + 1, 2 * checksumPiece, 3*checksumPiece + 4096, len(data)} {
			if got, want := b.Checksum(data[:n]), crc32.Checksum(data[:n], table); got != want {
				t.Errorf("%d threads, %d bytes: %08x, want %08x", threads, n, got, want)
			}
		}
		if n := testing.AllocsPerRun(10, func() { b.Checksum(data) }); n != 0 {
			t.Errorf("it allocates %v times", n)
		}
		b.Close()
	}
}
