package storage

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A part is a tensor that holds one matrix of every expert of a layer, in equal
// shares: expert e has the bytes [off+e*share, off+(e+1)*share) of its file.
// That is arithmetic, so there is no table of experts.
type part struct {
	file       int
	off, share int64
}

// A layer is the plan of one MoE layer.
type layer struct {
	experts int32
	parts   []part // in the order of the roles
	order   []int  // the same by file and offset, so that neighbours meet
	payload int64  // bytes of one expert
	slot    int64  // bytes of memory that any of its experts needs
}

// A read is one contiguous piece of a file on its way into memory.
type read struct {
	file  int
	off   int64  // where in the file; a multiple of the alignment
	size  int64  // how much is asked for; a multiple of it too
	need  int64  // of that, what must be there: behind it the file may end
	at    int64  // where in the slot
	buf   []byte // the memory, of size bytes
	fetch *Fetch
	next  *read // in a readList

	done    int64 // bytes that arrived, up to an aligned position
	asked   int64 // bytes asked of the device so far
	retries int64
	err     error // why it failed, for good
}

// fetchState is what a source knows of a fetch. A fetch in flight holds its own
// reads and list links, so that handing it around allocates nothing.
type fetchState struct {
	reads [MaxParts]read
	n     int             // reads in use
	view  [MaxParts]int64 // where each part begins in the slot
	left  int             // reads that are not finished
	busy  bool            // between Submit and Reap
	next  *Fetch          // in a fetchList
}

// layout plans the reads of expert e: each part rounded out to the alignment,
// one behind the other in the slot; parts whose rounded ends touch are one read.
// It returns the size of the whole. With alignment 1 nothing is rounded.
func (l *layer) layout(st *fetchState, e int32, align int64) (size int64) {
	st.n = 0
	for _, p := range l.order {
		x := l.parts[p]
		off := x.off + int64(e)*x.share
		start, end := off&^(align-1), (off+x.share+align-1)&^(align-1)
		var r *read
		if st.n > 0 {
			r = &st.reads[st.n-1]
		}
		if r == nil || r.file != x.file || start < r.off || start > r.off+r.size { // start < r.off: tensors that overlap
			r = &st.reads[st.n]
			st.n++
			*r = read{file: x.file, off: start, at: size}
		}
		r.size = max(r.size, end-r.off)
		r.need = max(r.need, off+x.share-r.off)
		st.view[p] = r.at + off - r.off
		size = r.at + r.size
	}
	return size
}

// experts is what the sources share: the plans, the files, the counters.
type experts struct {
	mode   Mode
	align  int64 // of offsets and sizes in files; 1 in mmap mode
	layers map[int32]*layer
	files  []openFile // by index into Model.Files
	dev    device
	busy   int // fetches in flight
	closed bool
	stats  SourceStats
}

// An openFile is a file as a source reads it. Only files with experts are open.
type openFile struct {
	*File
	fd  int    // what first tries read: direct, or the buffered one of File
	own bool   // fd is ours to close
	mem []byte // the mapping, in mmap mode
}

func (s *experts) Mode() Mode         { return s.mode }
func (s *experts) Stats() SourceStats { return s.stats }

func (s *experts) SlotBytes(layer int) int64   { return s.layer(int32(layer)).slot }
func (s *experts) ExpertBytes(layer int) int64 { return s.layer(int32(layer)).payload }

func (s *experts) layer(i int32) *layer {
	l := s.layers[i]
	if l == nil {
		panic(fmt.Sprintf("storage: layer %d is not a layer of this source", i))
	}
	return l
}

// start plans f's reads and lays them over its memory. A wrong key, a slot that
// is too small or unaligned, or a fetch in flight are bugs of the caller.
func (s *experts) start(f *Fetch) {
	l, st := s.layer(f.Key.Layer), &f.src
	switch {
	case s.closed:
		panic("storage: Submit to a closed source")
	case st.busy:
		panic(fmt.Sprintf("storage: %v: the fetch is in flight", f.Key))
	case f.Key.Expert < 0 || f.Key.Expert >= l.experts:
		panic(fmt.Sprintf("storage: %v: the layer has %d experts", f.Key, l.experts))
	case int64(len(f.Slot)) < l.slot:
		panic(fmt.Sprintf("storage: %v: the slot has %d bytes and needs %d", f.Key, len(f.Slot), l.slot))
	case l.slot > 0 && uintptr(unsafe.Pointer(unsafe.SliceData(f.Slot)))%slotAlign != 0:
		panic(fmt.Sprintf("storage: %v: the slot does not start at a multiple of %d", f.Key, slotAlign))
	}
	l.layout(st, f.Key.Expert, s.align)
	f.Err, f.Parts = nil, [MaxParts][]byte{}
	for p, x := range l.parts {
		mem, at := f.Slot, st.view[p]
		if s.mode == MMap {
			mem, at = s.files[x.file].mem, x.off+int64(f.Key.Expert)*x.share
		}
		f.Parts[p] = mem[at : at+x.share : at+x.share]
	}
	for i := range st.reads[:st.n] {
		r := &st.reads[i]
		r.fetch = f
		if s.mode == MMap {
			r.buf = s.files[r.file].mem[r.off : r.off+r.size]
		} else {
			r.buf = f.Slot[r.at : r.at+r.size]
		}
	}
	st.left, st.busy = st.n, true
	s.busy++
}

// deliver gives a finished fetch back to the caller and counts it.
func (s *experts) deliver(f *Fetch) *Fetch {
	st := &f.src
	for i := range st.reads[:st.n] {
		r := &st.reads[i]
		s.stats.ReadBytes += r.asked
		s.stats.Retries += r.retries
		if f.Err == nil {
			f.Err = r.err
		}
		*r = read{} // hold no memory of others
	}
	if f.Err == nil {
		s.stats.Loads++
		s.stats.LoadBytes += s.layers[f.Key.Layer].payload
	} else {
		f.Parts = [MaxParts][]byte{}
	}
	st.busy = false
	s.busy--
	return f
}

func (s *experts) mustBeBusy() {
	if s.busy == 0 {
		panic("storage: Reap with nothing in flight")
	}
}

// close gives back what the source opened.
func (s *experts) close() error {
	s.closed = true
	var first error
	for i := range s.files {
		o := &s.files[i]
		var err error
		if o.own {
			err = unix.Close(o.fd)
		}
		if o.mem != nil {
			err = unix.Munmap(o.mem)
		}
		if err != nil && first == nil {
			first = fmt.Errorf("storage: close %s: %w", o.Path, err)
		}
		o.own, o.mem = false, nil
	}
	return first
}

// A readList is a queue of reads, linked through them.
type readList struct{ head, tail *read }

func (l *readList) push(r *read) {
	r.next = nil
	if l.head == nil {
		l.head = r
	} else {
		l.tail.next = r
	}
	l.tail = r
}

// pop takes the oldest read, or nil.
func (l *readList) pop() *read {
	r := l.head
	if r != nil {
		l.head, r.next = r.next, nil
	}
	return r
}

// A fetchList is a queue of finished fetches, linked through them.
type fetchList struct{ head, tail *Fetch }

// finish notes that a read of a fetch is over and queues the fetch if it was the last.
func (l *fetchList) finish(r *read) bool {
	f := r.fetch
	f.src.left--
	if f.src.left > 0 {
		return false
	}
	f.src.next = nil
	if l.head == nil {
		l.head = f
	} else {
		l.tail.src.next = f
	}
	l.tail = f
	return true
}

// pop takes the oldest fetch, or nil.
func (l *fetchList) pop() *Fetch {
	f := l.head
	if f != nil {
		l.head, f.src.next = f.src.next, nil
	}
	return f
}
