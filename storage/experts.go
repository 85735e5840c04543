package storage

import (
	"fmt"
	"unsafe"
)

// A part is a tensor that holds one matrix of every expert of a layer, in equal
// shares.
type part struct {
	from  [2]source // where an expert's bytes lie
	share int64     // bytes of one in memory
	form  *form     // what makes them; nil: nothing, they are those of from[0]
}

// A piece is bytes of one expert that lie together in a file.
type piece struct {
	place
	n    int64
	part int
	of   int // codes or scales, as in from
}

// A layer is the plan of one MoE layer.
type layer struct {
	experts int32
	parts   []part // in the order of the roles
	woven   bool   // some have a form, so that all are put elsewhere in the slot
	payload int64  // bytes of one expert in memory
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
	reads [2 * MaxParts]read
	n     int                // reads in use
	view  [MaxParts][2]int64 // where the bytes of each part begin in the slot
	left  int                // reads that are not finished
	busy  bool               // between Submit and Reap
	again bool               // read once more, after a bad checksum
	next  *Fetch             // in a fetchList
}

// layout plans the reads of expert e: each part rounded out to the alignment,
// one behind the other in the slot; parts whose rounded ends touch are one read.
// It returns the size of the whole. With alignment 1 nothing is rounded.
func (l *layer) layout(st *fetchState, e int32, align int64) (size int64) {
	var pieces [2 * MaxParts]piece
	n := 0
	for p := range l.parts {
		for i := range l.parts[p].from {
			src := &l.parts[p].from[i]
			if src.n == 0 {
				continue
			}
			x := piece{src.of(int64(e)), src.n, p, i}
			k := n // by file and offset, so that neighbours meet
			for ; k > 0 && x.before(&pieces[k-1]); k-- {
				pieces[k] = pieces[k-1]
			}
			pieces[k] = x
			n++
		}
	}
	st.n = 0
	for i := range pieces[:n] {
		x := &pieces[i]
		start, end := x.off&^(align-1), (x.off+x.n+align-1)&^(align-1)
		var r *read
		if st.n > 0 {
			r = &st.reads[st.n-1]
		}
		if r == nil || r.file != x.file || start > r.off+r.size {
			r = &st.reads[st.n]
			st.n++
			*r = read{file: x.file, off: start, at: size}
		}
		r.size = max(r.size, end-r.off)
		r.need = max(r.need, x.off+x.n-r.off)
		st.view[x.part][x.of] = r.at + x.off - r.off
		size = r.at + r.size
	}
	return size
}

func (x *piece) before(y *piece) bool {
	return x.file < y.file || x.file == y.file && x.off < y.off
}

// wovenAlign is where parts begin that were made in the slot: a cache line.
const wovenAlign = 64

// wovenBytes is the room that the parts of an expert take when they are made.
func (l *layer) wovenBytes() (n int64) {
	if l.woven {
		for i := range l.parts {
			n = roundUp(n, wovenAlign) + l.parts[i].share
		}
	}
	return n
}

// weave makes the parts of a fetch of the bytes in its slot, and puts them there.
func (s *Reader) weave(f *Fetch) {
	l, st := s.layer(f.Key.Layer), &f.src
	if !l.woven {
		return
	}
	at := int64(0)
	for p := range l.parts {
		x := &l.parts[p]
		at = roundUp(at, wovenAlign)
		made := s.scratch[at : at+x.share]
		codes := f.Slot[st.view[p][0]:][:x.from[0].n]
		if x.form == nil {
			copy(made, codes)
		} else {
			x.form.share(made, codes, f.Slot[st.view[p][1]:][:x.from[1].n])
		}
		f.Parts[p] = f.Slot[at : at+x.share : at+x.share]
		at += x.share
	}
	copy(f.Slot, s.scratch[:at])
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
		if l.woven {
			break // when the bytes are there
		}
		mem, at := f.Slot, st.view[p][0]
		if s.mode == MMap {
			here := x.from[0].of(int64(f.Key.Expert))
			mem, at = s.drives[0].files[here.file].mem, here.off
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
	if !st.failed() && f.Err == nil {
		s.beside(func() { s.weave(f) })
	}
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
