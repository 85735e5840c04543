package storage

import (
	"errors"
	"fmt"
	"hash/crc32"
	"os"

	"golang.org/x/sys/unix"
)

// A ChecksumError is an expert, or a tensor, of a slab whose bytes are not those
// that were packed, however often they are read.
type ChecksumError struct {
	File      string
	Tensor    string // "": Key names an expert
	Key       Key
	Off       int64 // where its bytes begin
	Want, Got uint32
}

func (e *ChecksumError) Error() string {
	what := e.Key.String()
	if e.Tensor != "" {
		what = "tensor " + short([]byte(e.Tensor))
	}
	return fmt.Sprintf("storage: %s: %s, from byte %d on: its CRC-32C is %08x, not %08x: the file is damaged, or the drive fails; sluice verify finds all such places, sluice pack makes the file anew, --no-slab does without it",
		e.File, what, e.Off, e.Got, e.Want)
}

var errChecksum = errors.New("the checksum does not fit")

func sumAlone(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

// checksum is that of the bytes of a fetch whose reads are over, while other experts
// are read: by the goroutine that reaps, or by all that compute (SumBy). Only slabs
// have checksums; a fetch without one, or one that has failed, gives 0.
func (s *Reader) checksum(f *Fetch, sum func([]byte) uint32) uint32 {
	st, stk := &f.src, s.layers[f.Key.Layer].stack
	if stk == nil || st.failed() {
		return 0
	}
	r := &st.reads[0]
	o, off := s.file(r), stk.at(int64(f.Key.Expert))
	if s.mode == MMap {
		return sum(o.mem[off : off+stk.span])
	}
	// Parts stand so close that their rounded ends touch: one read has all.
	return sum(r.buf[off-r.off:][:stk.span])
}

// failed says that a read failed for good.
func (st *fetchState) failed() bool {
	for i := range st.reads[:st.n] {
		if st.reads[i].err != nil {
			return true
		}
	}
	return false
}

// verify says whether a fetch whose reads are over is to be delivered. Where its
// checksum does not fit the first time it has all of it read once more, from
// another drive, or from this one and not the cache; the second time the fetch
// gets a *ChecksumError.
func (s *Reader) verify(f *Fetch, got uint32) bool {
	st, stk := &f.src, s.layers[f.Key.Layer].stack
	if stk == nil || st.failed() {
		return true
	}
	want := stk.sums[f.Key.Expert]
	if got == want {
		return true
	}
	r := &st.reads[0]
	o, off := s.file(r), stk.at(int64(f.Key.Expert))
	s.blame(r, errChecksum)
	if st.again {
		f.Err = &ChecksumError{File: o.Path, Key: f.Key, Off: off, Want: want, Got: got}
		return true
	}
	st.again, st.left = true, st.n
	s.stats.Checksums++
	other := s.other(r.drive)
	if other < 0 {
		if s.mode == MMap {
			unix.Madvise(pages(o.mem, off, stk.span), unix.MADV_DONTNEED)
		}
		o.forget(off, stk.span)
	}
	for i := range st.reads[:st.n] {
		r := &st.reads[i]
		r.done, r.first = 0, nil
		r.retries++ // so an error now is final
		if other >= 0 {
			s.put(r, other)
		} else {
			r.buffered = !r.view
			s.put(r, r.drive)
		}
	}
	return false
}

// checkLoaded compares what Load has read of a tensor with its checksum, if it has
// one, and reads it once more where it does not fit: of the last drive, not from
// the cache.
func (s *Reader) checkLoaded(data []byte, t Tensor) error {
	if t.sum == nil || crc32.Checksum(data, castagnoli) == *t.sum {
		return nil
	}
	s.stats.Retries++
	o := &s.drives[len(s.drives)-1].files[t.File]
	o.forget(t.Off, t.Bytes)
	if n, err := readFull(o.f, data, t.Off); err != nil {
		return &ReadError{File: o.Path, Off: t.Off, Len: t.Bytes, Got: int64(n), Err: plainError(err)}
	}
	if got := crc32.Checksum(data, castagnoli); got != *t.sum {
		return &ChecksumError{File: o.Path, Tensor: t.Name, Off: t.Off, Want: *t.sum, Got: got}
	}
	return nil
}

// forget drops the pages of n bytes of a file from the page cache, so that the
// next read asks the drive.
func (f *File) forget(off, n int64) { forget(f.f, off, n) }

func forget(f *os.File, off, n int64) {
	start := off &^ (slabBlock - 1)
	unix.Fadvise(int(f.Fd()), start, roundUp(off+n, slabBlock)-start, unix.FADV_DONTNEED) // advice: where it is not heard, the cache answers again
}

// readExpert fills b with the bytes of an expert of a slab and verifies them, with
// a second try.
func (m *Model) readExpert(b []byte, st *stack, e int64) error {
	file := &m.Files[0]
	err := m.checkExpert(b, st, e)
	if _, bad := err.(*ChecksumError); bad {
		file.forget(st.at(e), st.span)
		err = m.checkExpert(b, st, e)
	}
	return err
}

// checkExpert is one try of readExpert.
func (m *Model) checkExpert(b []byte, st *stack, e int64) error {
	if err := m.read(b, m.Tensors[st.parts[0]], st.at(e)); err != nil {
		return err
	}
	if got := crc32.Checksum(b, castagnoli); got != st.sums[e] {
		return &ChecksumError{File: m.Files[0].Path, Key: Key{int32(st.layer), int32(e)}, Off: st.at(e), Want: st.sums[e], Got: got}
	}
	return nil
}
