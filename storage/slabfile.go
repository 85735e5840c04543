package storage

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"iter"
	"os"
	"slices"
	"strings"

	"sluice/internal/quant"
)

// A slab is a model packed for reading: docs/slab.md has the format. Its records,
// little endian:
//
//	byte 0     header, of slabBlock bytes, the CRC-32C of itself at its end
//	byte 4096  front: sources, tensors, stacks, checksums, the model's GGUF header
//	then       data: tensors that lie together, then stacks of experts
const (
	slabMagic   = "SLUICESL"
	partMagic   = "SLUICEPT" // while it is being packed
	slabVersion = 1

	slabBlock  = 4096 // bytes of the header; experts begin at its multiples
	slabAlign  = 64   // of tensors, and of the parts of an expert: a cache line
	sourceSize = 48   // bytes of a record
	tensorSize = 16
	stackSize  = 32
	sumSize    = 4

	// Bounds of what a header may claim, far above any model.
	maxSources = 99999 // shards have five digits
	maxTensors = 1 << 20
	maxStacks  = 1 << 16
	maxSums    = 1 << 24
	maxFile    = 1 << 61 // bytes
)

// The positions of the header's fields.
const (
	atVersion  = 8  // u32
	atFlags    = 12 // u32: 0
	atSize     = 16 // u64, of the file
	atSources  = 24 // u32, how many
	atTensors  = 28 // u32
	atStacks   = 32 // u32
	atSums     = 36 // u32
	atHead     = 40 // u64, bytes of the GGUF header
	atFrontSum = 48 // u32, CRC-32C of the front
	atIdentity = 52 // SHA-256
	atEnd      = 84 // zeros to the CRC-32C
	atHeadSum  = slabBlock - 4
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// A slab is what such a file says beside its metadata, or will say.
type slab struct {
	size    int64 // of the file
	source  Identity
	tensors []Tensor
	from    []Tensor // of a slab to be written: the same in the model
	stacks  []*stack
	sums    []uint32 // of the items, in their order
	head    []byte   // the GGUF header that the model would have as one file
	meta    Meta     // what it holds
}

// A stack is a layer's experts in a slab: expert e has span bytes from
// off + e*stride on, its parts one behind the other.
type stack struct {
	layer, experts    int
	off, stride, span int64
	parts             []int    // tensors, by index, in the order of their bytes
	sums              []uint32 // CRC-32C of each expert's span
}

func (s *stack) at(e int64) int64 { return s.off + e*s.stride }

// An item is what one checksum is of: a tensor that lies together, or an expert.
type item struct {
	off, n int64
	tensor int    // -1: an expert
	stack  *stack // nil: a tensor
	expert int64
	sum    *uint32
}

// items are in the order of the file. Between them are zeros.
func (s *slab) items() iter.Seq2[int, item] {
	return func(yield func(int, item) bool) {
		i := 0
		for k := range s.tensors {
			t := &s.tensors[k]
			if t.stack != nil {
				continue
			}
			if !yield(i, item{off: t.Off, n: t.Bytes, tensor: k, sum: &s.sums[i]}) {
				return
			}
			i++
		}
		for _, st := range s.stacks {
			for e := range int64(st.experts) {
				if !yield(i, item{off: st.at(e), n: st.span, tensor: -1, stack: st, expert: e, sum: &s.sums[i]}) {
					return
				}
				i++
			}
		}
	}
}

// front is the size of what lies between the header and the data.
func (s *slab) front() int64 {
	return frontBytes(len(s.source.Files), len(s.tensors), len(s.stacks), len(s.sums), len(s.head))
}

func frontBytes(sources, tensors, stacks, sums, head int) int64 {
	return int64(sources)*sourceSize + int64(tensors)*tensorSize + int64(stacks)*stackSize + int64(sums)*sumSize + int64(head)
}

// sumsAt is where in the file the checksums begin.
func (s *slab) sumsAt() int64 {
	return slabBlock + frontBytes(len(s.source.Files), len(s.tensors), len(s.stacks), 0, 0)
}

// layOut plans the slab of a model whose experts are those of layers: first the
// tensors that are none, in the model's order, then the layers. types are those
// of tensors that are to be requantized.
func layOut(m *Model, layers []ExpertLayer, types map[string]quant.Type, out string) (*slab, error) {
	s := &slab{}
	var err error
	if s.from, err = m.packed(layers); err != nil {
		return nil, fmt.Errorf("storage: pack %s: %w", m.Files[0].Path, err)
	}
	s.tensors = slices.Clone(s.from)
	byName := make(map[string]int, len(s.tensors))
	for k := range s.tensors {
		byName[s.tensors[k].Name] = k
		s.tensors[k].form = nil // the slab has the bytes that it makes
	}
	if s.source, err = m.identityOf(types); err != nil {
		return nil, err
	}
	requantized, err := s.requantize(types)
	if err != nil {
		return nil, fmt.Errorf("storage: pack %s: %w", m.Files[0].Path, err)
	}
	plain := len(s.tensors)
	sums := 0
	for _, l := range layers {
		if l.Layer < 0 || l.Layer >= maxStacks || l.Experts < 1 || l.Experts > maxSums || len(l.Parts) < 1 || len(l.Parts) > MaxParts {
			return nil, fmt.Errorf("storage: pack %s: layer %d with %d experts of %d parts is out of range", m.Files[0].Path, l.Layer, l.Experts, len(l.Parts))
		}
		st := &stack{layer: l.Layer, experts: l.Experts}
		for _, name := range l.Parts {
			k, ok := byName[name]
			if !ok {
				return nil, fmt.Errorf("storage: pack %s: layer %d: the model has no tensor %q", m.Files[0].Path, l.Layer, name)
			}
			t := &s.tensors[k]
			if n := int64(l.Experts); t.stack != nil || t.Stride != 0 || t.Dims[len(t.Dims)-1] != n || t.Bytes%n != 0 {
				return nil, fmt.Errorf("storage: pack %s: layer %d: tensor %q with dims %v is no stack of %d experts, or is in two", m.Files[0].Path, l.Layer, name, t.Dims, n)
			}
			t.stack = st
			st.parts = append(st.parts, k)
		}
		slices.Sort(st.parts)
		s.stacks = append(s.stacks, st)
		plain -= len(l.Parts)
		sums += l.Experts
	}
	s.sums = make([]uint32, plain+sums)

	var kvs []KV
	for _, kv := range m.Meta.kvs {
		if !strings.HasPrefix(kv.Key, "split.") && kv.Key != requantizedKey { // it will be one file
			kvs = append(kvs, kv)
		}
	}
	if requantized != "" {
		kvs = append(kvs, KV{requantizedKey, requantized})
	}
	specs := make([]TensorSpec, len(s.tensors))
	for i, t := range s.tensors {
		specs[i] = TensorSpec{t.Name, t.Type, t.Dims}
	}
	if s.head, _, _, err = ggufHeader(out, kvs, specs); err != nil {
		return nil, err
	}
	if len(s.tensors) > maxTensors || len(s.stacks) > maxStacks || len(s.sums) > maxSums {
		return nil, fmt.Errorf("storage: pack %s: %d tensors, %d layers and %d experts are more than a slab holds", m.Files[0].Path, len(s.tensors), len(s.stacks), sums)
	}

	at := roundUp(slabBlock+s.front(), slabBlock)
	for k := range s.tensors {
		if t := &s.tensors[k]; t.stack == nil {
			t.File, t.Off = 0, roundUp(at, slabAlign)
			at = t.Off + t.Bytes
		}
	}
	for _, st := range s.stacks {
		for _, k := range st.parts {
			t := &s.tensors[k]
			t.File, t.Off = 0, roundUp(st.span, slabAlign)
			st.span = t.Off + t.Bytes/int64(st.experts)
		}
		st.off, st.stride = roundUp(at, slabBlock), roundUp(st.span, slabBlock)
		at = st.at(int64(st.experts))
		for _, k := range st.parts {
			s.tensors[k].Off += st.off
			s.tensors[k].Stride = st.stride
		}
	}
	s.size = at
	s.link()
	return s, nil
}

// packed lists the tensors of the model as a slab has them: a part that is made of
// several stands in their place.
func (m *Model) packed(layers []ExpertLayer) ([]Tensor, error) {
	gone := map[string]bool{}
	instead := map[string][]Tensor{}
	for _, l := range layers {
		for _, name := range l.Parts {
			names := m.made(name)
			if len(names) == 0 {
				continue
			}
			t, err := m.View(name)
			if err != nil {
				return nil, fmt.Errorf("layer %d: %w", l.Layer, err)
			}
			instead[names[0]] = append(instead[names[0]], t)
			for _, n := range names {
				gone[n] = true
			}
		}
	}
	ts := make([]Tensor, 0, len(m.Tensors))
	for _, t := range m.Tensors {
		ts = append(ts, instead[t.Name]...)
		if !gone[t.Name] {
			ts = append(ts, t)
		}
	}
	return ts, nil
}

// link gives tensors and stacks their checksums.
func (s *slab) link() {
	for i, it := range s.items() {
		switch {
		case it.stack == nil:
			s.tensors[it.tensor].sum = it.sum
		case it.expert == 0:
			it.stack.sums = s.sums[i : i+it.stack.experts]
		}
	}
}

// header is the first block of the file.
func (s *slab) header(magic string, frontSum uint32) []byte {
	b := make([]byte, slabBlock)
	le := binary.LittleEndian
	copy(b, magic)
	le.PutUint32(b[atVersion:], slabVersion)
	le.PutUint64(b[atSize:], uint64(s.size))
	le.PutUint32(b[atSources:], uint32(len(s.source.Files)))
	le.PutUint32(b[atTensors:], uint32(len(s.tensors)))
	le.PutUint32(b[atStacks:], uint32(len(s.stacks)))
	le.PutUint32(b[atSums:], uint32(len(s.sums)))
	le.PutUint64(b[atHead:], uint64(len(s.head)))
	le.PutUint32(b[atFrontSum:], frontSum)
	id := s.source.Hash()
	copy(b[atIdentity:], id[:])
	le.PutUint32(b[atHeadSum:], crc32.Checksum(b[:atHeadSum], castagnoli))
	return b
}

// frontData is what lies between the header and the data.
func (s *slab) frontData() []byte {
	b := make([]byte, 0, s.front())
	le := binary.LittleEndian
	b = s.source.append(b)
	for _, t := range s.tensors {
		off, no := t.Off, 0
		if t.stack != nil {
			no = 1 + slices.Index(s.stacks, t.stack)
			off -= t.stack.off
		}
		b = le.AppendUint64(b, uint64(off))
		b = le.AppendUint32(b, uint32(no))
		b = le.AppendUint32(b, 0)
	}
	for _, st := range s.stacks {
		b = le.AppendUint32(b, uint32(st.layer))
		b = le.AppendUint32(b, uint32(st.experts))
		b = le.AppendUint64(b, uint64(st.off))
		b = le.AppendUint64(b, uint64(st.stride))
		b = le.AppendUint64(b, uint64(st.span))
	}
	for _, sum := range s.sums {
		b = le.AppendUint32(b, sum)
	}
	return append(b, s.head...)
}

// isSlab says whether the file at path is a slab, or calls itself one.
func isSlab(path string) bool {
	if strings.HasSuffix(path, ".slab") {
		return true
	}
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	b := make([]byte, len(slabMagic))
	readFull(f, b, 0)
	return string(b) == slabMagic || string(b) == partMagic
}

// openSlab opens a slab as a model.
func openSlab(path string) (*Model, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("storage: open model: %w", err)
	}
	fi, err := f.Stat()
	var s *slab
	if err == nil {
		s, err = parseSlab(f, fi.Size(), path)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	m := &Model{Format: "slab", Meta: s.meta, byName: map[string]int{}, slab: s}
	m.Files = []File{{Path: path, Size: s.size, f: f, head: slabBlock + s.front()}}
	if err := m.addTensors(s.tensors); err != nil {
		f.Close()
		return nil, err
	}
	return m, nil
}

// parseSlab reads and checks all but the data of the slab of size bytes that r
// reads. name is for errors.
func parseSlab(r io.ReaderAt, size int64, name string) (*slab, error) {
	bad := func(off int64, format string, args ...any) error {
		return &FormatError{File: name, Off: off, Msg: fmt.Sprintf(format, args...)}
	}
	const again = "pack the model again, or fetch the file again"
	h := make([]byte, slabBlock)
	if n, err := readFull(r, h[:min(size, slabBlock)], 0); err != nil {
		return nil, fmt.Errorf("storage: read %s at byte %d: %w", name, n, err)
	}
	le := binary.LittleEndian
	switch magic := string(h[:atVersion]); {
	case size < slabBlock:
		return nil, bad(0, "a slab begins with %d bytes of header, and the file has %d: it is cut short; %s", slabBlock, size, again)
	case magic == partMagic:
		return nil, bad(0, "the slab is not whole: its packing was interrupted; the same sluice pack command goes on with it")
	case magic != slabMagic:
		return nil, bad(0, "not a slab: it begins with %s; %s", short(h[:atVersion]), again)
	case le.Uint32(h[atVersion:]) != slabVersion:
		return nil, bad(atVersion, "it is a slab of version %d, which is not known here (%d is): get a newer Sluice, or pack the model again", le.Uint32(h[atVersion:]), slabVersion)
	case le.Uint32(h[atHeadSum:]) != crc32.Checksum(h[:atHeadSum], castagnoli):
		return nil, bad(0, "the header's checksum does not fit: it is damaged; %s", again)
	case le.Uint32(h[atFlags:]) != 0 || !allZero(h[atEnd:atHeadSum]):
		return nil, bad(atFlags, "the header has flags that are not known here: get a newer Sluice")
	}
	nSources, nTensors := le.Uint32(h[atSources:]), le.Uint32(h[atTensors:])
	nStacks, nSums := le.Uint32(h[atStacks:]), le.Uint32(h[atSums:])
	head := le.Uint64(h[atHead:])
	switch says := le.Uint64(h[atSize:]); {
	case says > uint64(size):
		return nil, bad(size, "the slab has %d bytes, and the file ends here, %d short: it is cut short; %s", says, says-uint64(size), again)
	case says < uint64(size):
		return nil, bad(int64(says), "the slab has %d bytes, and the file has %d more; %s", says, uint64(size)-says, again)
	case size > maxFile || nSources < 1 || nSources > maxSources || nTensors < 1 || nTensors > maxTensors || nStacks > maxStacks || nSums > maxSums || head > maxHeader:
		return nil, bad(atSources, "%d sources, %d tensors, %d layers, %d checksums and a GGUF header of %d bytes are out of range: it is damaged; %s", nSources, nTensors, nStacks, nSums, head, again)
	}
	front := frontBytes(int(nSources), int(nTensors), int(nStacks), int(nSums), int(head))
	if front > size-slabBlock {
		return nil, bad(slabBlock, "an index of %d bytes does not fit into a file of %d: it is damaged; %s", front, size, again)
	}
	b := make([]byte, front)
	if n, err := readFull(r, b, slabBlock); err != nil {
		return nil, fmt.Errorf("storage: read %s at byte %d: %w", name, slabBlock+n, err)
	}
	if got, want := crc32.Checksum(b, castagnoli), le.Uint32(h[atFrontSum:]); got != want {
		return nil, bad(slabBlock, "the index of %d bytes has the CRC-32C %08x, not %08x: it is damaged; %s", front, got, want, again)
	}

	s := &slab{size: size, sums: make([]uint32, nSums)}
	take := func(n int64) (piece []byte) {
		piece, b = b[:n:n], b[n:]
		return piece
	}
	s.source = decodeIdentity(take(int64(nSources) * sourceSize))
	if id := s.source.Hash(); !bytes.Equal(id[:], h[atIdentity:atEnd]) {
		return nil, bad(atIdentity, "the identity of the source is not that of its files: it is damaged; %s", again)
	}
	records := take(int64(nTensors) * tensorSize)
	for i := range int64(nStacks) {
		x := take(stackSize)
		st := &stack{layer: int(le.Uint32(x)), experts: int(le.Uint32(x[4:])), off: int64(le.Uint64(x[8:])), stride: int64(le.Uint64(x[16:])), span: int64(le.Uint64(x[24:]))}
		at := slabBlock + frontBytes(int(nSources), int(nTensors), int(i), 0, 0)
		if st.layer >= maxStacks || st.experts < 1 || st.experts > maxSums ||
			st.off < 0 || st.off > size || st.off%slabBlock != 0 ||
			st.span < 1 || st.span > st.stride || st.stride%slabBlock != 0 || st.stride > (size-st.off)/int64(st.experts) {
			return nil, bad(at, "layer %d with %d experts of %d bytes, from byte %d on, %d bytes apart, does not lie in the file: it is damaged; %s", st.layer, st.experts, st.span, st.off, st.stride, again)
		}
		s.stacks = append(s.stacks, st)
	}
	for i := range s.sums {
		s.sums[i] = le.Uint32(take(sumSize))
	}
	s.head = b

	// Where tensors would lie as one GGUF file does not matter; what they are does.
	inner := name + ", the GGUF header in it"
	g, err := parseHeader(bytes.NewReader(s.head), int64(len(s.head)), maxFile, inner)
	if err != nil {
		return nil, err
	}
	if len(g.tensors) != int(nTensors) {
		return nil, bad(atTensors, "%d tensors, but the GGUF header in it has %d: it is damaged; %s", nTensors, len(g.tensors), again)
	}
	s.meta, s.tensors = g.meta, g.tensors
	if err := s.place(records, bad); err != nil {
		return nil, err
	}
	s.link()
	return s, nil
}

// place puts the tensors where their records say, and checks that every item
// lies in the data and apart from the others.
func (s *slab) place(records []byte, bad func(off int64, format string, args ...any) error) error {
	le := binary.LittleEndian
	plain, ends := 0, make([]int64, len(s.stacks)) // of the parts so far, in an expert
	for k := range s.tensors {
		t := &s.tensors[k]
		x := records[k*tensorSize:]
		off, no := le.Uint64(x), le.Uint32(x[8:])
		wrong := func(what string) error {
			return bad(slabBlock+int64(len(s.source.Files))*sourceSize+int64(k)*tensorSize,
				"tensor %s of %d bytes at byte %d of layer record %d: %s: it is damaged; pack the model again", short([]byte(t.Name)), t.Bytes, off, no, what)
		}
		if off > uint64(s.size) || t.Bytes > s.size || int(no) > len(s.stacks) || le.Uint32(x[12:]) != 0 {
			return wrong("it does not lie in the file")
		}
		t.Off = int64(off)
		if no == 0 {
			if t.Off%slabAlign != 0 || t.Bytes > s.size-t.Off {
				return wrong("it does not lie in the file, at a multiple of 64")
			}
			plain++
			continue
		}
		st, end := s.stacks[no-1], &ends[no-1]
		n := int64(st.experts)
		if len(st.parts) == MaxParts || len(t.Dims) < 2 || t.Dims[len(t.Dims)-1] != n || t.Bytes%n != 0 || t.Off != roundUp(*end, slabAlign) {
			return wrong("it is no part of its experts")
		}
		*end = t.Off + t.Bytes/n
		if *end > st.span {
			return wrong("it reaches over the end of its expert")
		}
		t.Off += st.off
		t.Stride, t.stack = st.stride, st
		st.parts = append(st.parts, k)
	}
	sums := int64(plain)
	for i, st := range s.stacks {
		if ends[i] != st.span {
			return bad(slabBlock, "layer %d: its experts have %d bytes, but their parts %d: it is damaged; pack the model again", st.layer, st.span, ends[i])
		}
		sums += int64(st.experts)
	}
	if sums != int64(len(s.sums)) {
		return bad(atSums, "%d checksums for %d tensors and experts: it is damaged; pack the model again", len(s.sums), sums)
	}
	at := slabBlock + s.front()
	for _, it := range s.items() {
		if it.off < at {
			return bad(it.off, "two of its tensors or experts overlap here, or lie in its index: it is damaged; pack the model again")
		}
		at = it.off + it.n
	}
	return nil
}

func allZero(b []byte) bool {
	for _, x := range b {
		if x != 0 {
			return false
		}
	}
	return true
}
