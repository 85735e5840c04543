package storage

import (
	"fmt"
	"unsafe"
)

// A part is a tensor that holds one matrix of every expert of a layer, in equal
// shares: expert e has share bytes of its file from off+e*stride on. That is
// arithmetic, so there is no table of experts.
type part struct {
	file       int
	off, share int64
	stride     int64 // share, or in a slab the distance of whole experts
}

// at is where the share of expert e begins.
func (p *part) at(e int32) int64 { return p.off + int64(e)*p.stride }

// A layer is the plan of one MoE layer.
type layer struct {
	experts int32
	parts   []part // in the order of the roles
	order   []int  // the same by file and offset, so that neighbours meet
	payload int64  // bytes of one expert
	slot    int64  // bytes of memory that any of its experts needs
	stack   *stack // in a slab: the checksums; else nil
}

// A read is one contiguous piece of a file on its way into memory.
type read struct {
	file  int
	drive int    // which copy of the file
	off   int64  // where in the file; a multiple of the alignment
	size  int64  // how much is asked for; a multiple of it too
	need  int64  // of that, what must be there: behind it the file may end
	at    int64  // where in the slot
	buf   []byte // the memory, of size bytes
	fetch *Fetch // that it is for; nil: for Load
	next  *read  // in a readList

	background bool // behind all that are not
	buffered   bool // through the page cache, of any alignment
	view       bool // buf is a mapping: make its pages resident

	done    int64 // bytes that arrived, up to an aligned position
	asked   int64 // bytes asked of the device so far
	retries int64
	n       int   // out of the last try: bytes that arrived
	fault   error // out of the last try: or why none did
	first   error // what the first try said, if it asked another drive
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
	again bool            // read once more, after a bad checksum
	next  *Fetch          // in a fetchList
}

// layout plans the reads of expert e: each part rounded out to the alignment,
// one behind the other in the slot; parts whose rounded ends touch are one read.
// It returns the size of the whole. With alignment 1 nothing is rounded.
func (l *layer) layout(st *fetchState, e int32, align int64) (size int64) {
	st.n = 0
	for _, p := range l.order {
		x := l.parts[p]
		off := x.at(e)
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

// begin plans f's reads and lays them over its memory. A wrong key, a slot that
// is too small or unaligned, or a fetch in flight are bugs of the caller.
func (s *Reader) begin(f *Fetch) {
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
			mem, at = s.drives[0].files[x.file].mem, x.at(f.Key.Expert)
		}
		f.Parts[p] = mem[at : at+x.share : at+x.share]
	}
	for i := range st.reads[:st.n] {
		r := &st.reads[i]
		r.fetch, r.background = f, f.Background
		if s.mode == MMap {
			r.view, r.buf = true, s.drives[0].files[r.file].mem[r.off:r.off+r.size]
		} else {
			r.buf = f.Slot[r.at : r.at+r.size]
		}
	}
	st.left, st.busy, st.again = st.n, true, false
	s.busy++
}

// deliver gives a finished fetch back to the caller and counts it.
func (s *Reader) deliver(f *Fetch) *Fetch {
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

// take unlinks the oldest read that is f's, or gives nil.
func (l *readList) take(f *Fetch) *read {
	var before *read
	for r := l.head; r != nil; before, r = r, r.next {
		if r.fetch != f {
			continue
		}
		if before == nil {
			l.head = r.next
		} else {
			before.next = r.next
		}
		if l.tail == r {
			l.tail = before
		}
		r.next = nil
		return r
	}
	return nil
}

// A fetchList is a queue of finished fetches, linked through them.
type fetchList struct{ head, tail *Fetch }

// push queues a fetch.
func (l *fetchList) push(f *Fetch) {
	f.src.next = nil
	if l.head == nil {
		l.head = f
	} else {
		l.tail.src.next = f
	}
	l.tail = f
}

// pop takes the oldest fetch, or nil.
func (l *fetchList) pop() *Fetch {
	f := l.head
	if f != nil {
		l.head, f.src.next = f.src.next, nil
	}
	return f
}
