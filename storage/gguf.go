package storage

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/bits"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"unicode"
	"unicode/utf8"

	"sluice/internal/quant"
)

// A GGUF file, little endian throughout (the format's public specification,
// versions 2 and 3, which differ only in that 3 may be big endian):
//
//	"GGUF"  version u32  tensors u64  entries u64
//	entries times: key string, value type u32, value
//	tensors times: name string, dims u32, dims times u64, type u32, offset u64
//	padding to general.alignment, then the data that offsets count from
//
// A string is a length u64 and its bytes; an array is an element type u32, a
// count u64 and the elements.
const (
	ggufMagic     = "GGUF"
	ggufAlignment = 32      // where general.alignment is absent
	maxAlignment  = 1 << 20 // far above any drive's; keeps sums of positions small

	maxHeader = 256 << 20 // bytes up to the data; the largest vocabularies need about 20 MB
	maxName   = 64 << 10  // bytes of a key or a tensor's name; the specification's bound for keys
	maxDims   = 4

	minEntry  = 8 + 1 + 4 + 1         // bytes of the smallest metadata entry
	minTensor = 8 + 1 + 4 + 8 + 4 + 8 // bytes of the smallest tensor description
	minString = 8
)

// The value types of GGUF metadata, by the number in the file.
const (
	kindUint8 uint32 = iota
	kindInt8
	kindUint16
	kindInt16
	kindUint32
	kindInt32
	kindFloat32
	kindBool
	kindString
	kindArray
	kindUint64
	kindInt64
	kindFloat64
)

// kinds gives each type's name and size; 0: as long as it says itself.
var kinds = [...]struct {
	name string
	size int64
}{
	kindUint8: {"uint8", 1}, kindInt8: {"int8", 1}, kindUint16: {"uint16", 2}, kindInt16: {"int16", 2},
	kindUint32: {"uint32", 4}, kindInt32: {"int32", 4}, kindFloat32: {"float32", 4}, kindBool: {"bool", 1},
	kindString: {"string", 0}, kindArray: {"array", 0},
	kindUint64: {"uint64", 8}, kindInt64: {"int64", 8}, kindFloat64: {"float64", 8},
}

// A kind is the type of a value; elem is the type of an array's elements.
type kind struct{ typ, elem uint32 }

// kindOf is the type that a Go value is stored as; false if GGUF has none.
func kindOf(v any) (kind, bool) {
	switch v.(type) {
	case uint8:
		return kind{typ: kindUint8}, true
	case int8:
		return kind{typ: kindInt8}, true
	case uint16:
		return kind{typ: kindUint16}, true
	case int16:
		return kind{typ: kindInt16}, true
	case uint32:
		return kind{typ: kindUint32}, true
	case int32:
		return kind{typ: kindInt32}, true
	case float32:
		return kind{typ: kindFloat32}, true
	case bool:
		return kind{typ: kindBool}, true
	case string:
		return kind{typ: kindString}, true
	case uint64:
		return kind{typ: kindUint64}, true
	case int64:
		return kind{typ: kindInt64}, true
	case float64:
		return kind{typ: kindFloat64}, true
	case []uint8:
		return kind{kindArray, kindUint8}, true
	case []int8:
		return kind{kindArray, kindInt8}, true
	case []uint16:
		return kind{kindArray, kindUint16}, true
	case []int16:
		return kind{kindArray, kindInt16}, true
	case []uint32:
		return kind{kindArray, kindUint32}, true
	case []int32:
		return kind{kindArray, kindInt32}, true
	case []float32:
		return kind{kindArray, kindFloat32}, true
	case []bool:
		return kind{kindArray, kindBool}, true
	case []string:
		return kind{kindArray, kindString}, true
	case []uint64:
		return kind{kindArray, kindUint64}, true
	case []int64:
		return kind{kindArray, kindInt64}, true
	case []float64:
		return kind{kindArray, kindFloat64}, true
	}
	return kind{}, false
}

// A shard is the header of one GGUF file. Its tensors' positions are absolute;
// their File is 0.
type shard struct {
	meta    Meta
	tensors []Tensor
	head    int64 // bytes of the header, without the padding behind it
}

// openGGUF opens a GGUF file and, if it is a shard, all of its siblings.
func openGGUF(path string) (_ *Model, err error) {
	m := &Model{Format: "gguf", byName: map[string]int{}}
	defer func() {
		if err != nil {
			m.Close()
		}
	}()
	named, err := m.openShard(path)
	if err != nil {
		return nil, err
	}
	count, _ := named.meta.Uint("split.count")
	if err := named.meta.Err(); err != nil {
		return nil, err
	}
	if count <= 1 { // absent, or one file, or 0: merged from shards
		m.Meta = named.meta
		if err := m.addTensors(named.tensors); err != nil {
			return nil, err
		}
		return m, nil
	}

	paths, err := siblings(path, count)
	if err != nil {
		return nil, err
	}
	m.Close()
	m.Files = nil
	for i, p := range paths {
		s, err := m.openShard(p)
		if errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("storage: %s is one of %d shards, and shard %s is missing: put it beside the others: %w", path, count, filepath.Base(p), err)
		}
		if err != nil {
			return nil, err
		}
		if i == 0 {
			m.Meta = s.meta
		}
		if err := checkSplit(s.meta, p, uint64(i), count); err != nil {
			return nil, err
		}
		for j := range s.tensors {
			s.tensors[j].File = i
		}
		if err := m.addTensors(s.tensors); err != nil {
			return nil, err
		}
	}
	if want, ok := m.Meta.Uint("split.tensors.count"); ok && want != uint64(len(m.Tensors)) {
		return nil, &FormatError{File: paths[0], Off: -1, Msg: fmt.Sprintf(
			"split.tensors.count is %d, but its %d shards hold %d tensors: they are not of one set; download all of them again", want, count, len(m.Tensors))}
	}
	if err := m.Meta.Err(); err != nil {
		return nil, err
	}
	return m, nil
}

// openShard opens one file, reads its header, and adds it to the model's files.
func (m *Model) openShard(path string) (shard, error) {
	f, err := openUnwaiting(path)
	if err != nil {
		return shard{}, fmt.Errorf("storage: open model: %w", err)
	}
	fi, err := f.Stat()
	if err != nil {
		f.Close()
		return shard{}, fmt.Errorf("storage: open model: %w", err)
	}
	if !fi.Mode().IsRegular() {
		f.Close()
		return shard{}, &FormatError{File: path, Off: -1, Msg: "it is no regular file: a model is read at many positions, so it must lie on a drive"}
	}
	m.Files = append(m.Files, File{Path: path, Size: fi.Size(), f: f})
	s, err := parseGGUF(f, fi.Size(), path)
	m.Files[len(m.Files)-1].head = s.head
	return s, err
}

// addTensors appends a shard's tensors, whose names must be new.
func (m *Model) addTensors(ts []Tensor) error {
	if len(m.byName) == 0 {
		m.byName, m.Tensors = make(map[string]int, len(ts)), make([]Tensor, 0, len(ts))
	}
	for _, t := range ts {
		if old, dup := m.byName[t.Name]; dup {
			where := ""
			if f := m.Tensors[old].File; f != t.File {
				where = " (the other is in " + filepath.Base(m.Files[f].Path) + ")"
			}
			return &FormatError{File: m.Files[t.File].Path, Off: -1, Msg: fmt.Sprintf("tensor %q appears twice%s", t.Name, where)}
		}
		m.byName[t.Name] = len(m.Tensors)
		m.Tensors = append(m.Tensors, t)
	}
	return nil
}

// shardName is how shards are named: a stem, the number from 1, the count.
var shardName = regexp.MustCompile(`^(.*)-(\d{5})-of-(\d{5})\.gguf$`)

// siblings gives the paths of all shards of the set that path is one of.
func siblings(path string, count uint64) ([]string, error) {
	dir, base := filepath.Split(path)
	parts := shardName.FindStringSubmatch(base)
	if parts == nil {
		return nil, fmt.Errorf("storage: %s is one of %d shards, but its name is not like NAME-00001-of-%05d.gguf, so the others cannot be found: rename it back", path, count, count)
	}
	if n, _ := strconv.ParseUint(parts[3], 10, 64); n != count {
		return nil, &FormatError{File: path, Off: -1, Msg: fmt.Sprintf("split.count is %d, but the name says %d: rename the file back, or download it again", count, n)}
	}
	paths := make([]string, count)
	for i := range paths {
		paths[i] = filepath.Join(dir, fmt.Sprintf("%s-%05d-of-%05d.gguf", parts[1], i+1, count))
	}
	return paths, nil
}

// checkSplit checks that a shard is the one that its name says.
func checkSplit(meta Meta, path string, no, count uint64) error {
	gotNo, okNo := meta.Uint("split.no")
	gotCount, okCount := meta.Uint("split.count")
	if err := meta.Err(); err != nil {
		return err
	}
	if !okNo || !okCount {
		return &FormatError{File: path, Off: -1, Msg: "it lies where a shard is sought, but has no split.no or split.count: it is not of this set; download it again"}
	}
	if gotNo != no || gotCount != count {
		return &FormatError{File: path, Off: -1, Msg: fmt.Sprintf(
			"it holds shard %d of %d (split.no counts from 0), but shard %d of %d is sought here: rename it back, or download it again", gotNo, gotCount, no, count)}
	}
	return nil
}

// parseGGUF reads the header of the file of size bytes that r reads, and checks
// all that it says against that size. name is for errors. Metadata that is
// parsed may still be of kinds that its readers do not expect.
func parseGGUF(r io.ReaderAt, size int64, name string) (shard, error) {
	return parseHeader(r, min(size, maxHeader), size, name)
}

// parseHeader is parseGGUF of a header that must end before byte end.
func parseHeader(r io.ReaderAt, end, size int64, name string) (shard, error) {
	if err := checkMagic(r, end, name); err != nil {
		return shard{}, err
	}
	p := &parser{file: name, size: size, end: end}
	p.r = bufio.NewReaderSize(io.NewSectionReader(r, 0, end), 256<<10)
	p.skip(4)
	switch version := p.u32("the version"); {
	case p.err != nil:
	case version == 2 || version == 3:
	case version == 1:
		p.fail(4, "it is GGUF version 1, which is no longer in use: convert the model again with a current converter")
	case version&0xffff == 0:
		p.fail(4, "it is a big-endian GGUF; only little-endian ones are read: download the little-endian file")
	default:
		p.fail(4, "it is GGUF version %d, which is not known here (2 and 3 are): get a newer Sluice, or convert the model again", version)
	}
	nTensors := p.count("tensors", minTensor)
	nEntries := p.count("metadata entries", minEntry)
	meta := p.metadata(nEntries)
	align := p.alignment(meta)
	tensors := p.tensors(nTensors)
	if p.err != nil {
		return shard{}, p.err
	}
	if err := p.place(tensors, align); err != nil {
		return shard{}, err
	}
	return shard{meta: meta, tensors: tensors, head: p.pos}, nil
}

// checkMagic says whether the file begins as a GGUF does, and if not, what it
// looks like.
func checkMagic(r io.ReaderAt, size int64, name string) error {
	head := make([]byte, min(size, 64))
	if n, err := readFull(r, head, 0); err != nil {
		return fmt.Errorf("storage: read %s at byte %d: %w", name, n, err)
	}
	if bytes.HasPrefix(head, []byte(ggufMagic)) {
		return nil
	}
	has := func(s string) bool { return bytes.HasPrefix(bytes.ToLower(head), []byte(s)) }
	looks := "it begins with " + strconv.QuoteToASCII(string(head[:min(len(head), 4)]))
	switch {
	case size == 0:
		looks = "it is empty"
	case size < 4 && ggufMagic[:size] == string(head):
		looks = "it is cut short"
	case has("tjgg"), has("lmgg"), has("fmgg"), has("algg"):
		looks = "it is an older ggml format: convert the model again with a current converter"
	case has("fugg"):
		looks = "it is a big-endian GGUF: download the little-endian file"
	case has("pk\x03\x04"):
		looks = "it is a zip archive, perhaps a PyTorch checkpoint: convert the model to GGUF first"
	case has("version https://git-lfs"):
		looks = "it is a git-lfs pointer, not the model: fetch the file itself with git lfs pull"
	case filepath.Ext(name) == ".json" && hfModel(filepath.Dir(name), true):
		looks = "it is a file beside a Hugging Face model: name the directory"
	case has("<"):
		looks = "it looks like a web page: the download went wrong"
	case len(head) > 8 && head[8] == '{' && binary.LittleEndian.Uint64(head) <= uint64(size-8):
		looks = "it looks like safetensors: convert the model to GGUF first"
	}
	return &FormatError{File: name, Off: 0, Msg: fmt.Sprintf("not a GGUF file of %d bytes: %s", size, looks)}
}

// A parser reads a header from its beginning. After the first error it reads
// zeros and keeps that error, so that callers check once for several values.
type parser struct {
	r    *bufio.Reader
	file string
	size int64 // of the file
	end  int64 // where a header must end: the file's size, or maxHeader
	pos  int64 // INVARIANT: pos <= end
	err  error
	word [8]byte // for u32 and u64, so that they allocate nothing
}

// fail keeps bad data at byte off as the error, if it is the first.
func (p *parser) fail(off int64, format string, args ...any) {
	if p.err == nil {
		p.err = &FormatError{File: p.file, Off: off, Msg: fmt.Sprintf(format, args...)}
	}
}

// need says whether n more bytes are there for what.
func (p *parser) need(n uint64, what string) bool {
	if p.err != nil {
		return false
	}
	if n <= uint64(p.end-p.pos) {
		return true
	}
	if p.end < p.size {
		p.fail(p.pos, "%s of %d bytes reaches over byte %d, where a header must have ended: the file is damaged; download it again", what, n, p.end)
	} else {
		p.fail(p.pos, "%s needs %d bytes, but the file ends at byte %d, %d bytes from here: it is cut short or damaged; download it again", what, n, p.size, p.size-p.pos)
	}
	return false
}

// Read fills all of b, for which need has been asked.
func (p *parser) Read(b []byte) (int, error) {
	if p.err != nil {
		return 0, p.err
	}
	n, err := io.ReadFull(p.r, b)
	p.pos += int64(n)
	switch {
	case err == io.EOF || err == io.ErrUnexpectedEOF:
		p.fail(p.pos, "the file had %d bytes, but now ends here: it is being changed; open it when it is whole", p.size)
	case err != nil:
		p.err = fmt.Errorf("storage: read %s at byte %d: %w", p.file, p.pos, err)
	}
	return n, p.err
}

func (p *parser) skip(n int) {
	k, _ := p.r.Discard(n)
	p.pos += int64(k)
}

func (p *parser) u32(what string) uint32 {
	if !p.need(4, what) {
		return 0
	}
	if _, err := p.Read(p.word[:4]); err != nil {
		return 0
	}
	return binary.LittleEndian.Uint32(p.word[:])
}

func (p *parser) u64(what string) uint64 {
	if !p.need(8, what) {
		return 0
	}
	if _, err := p.Read(p.word[:]); err != nil {
		return 0
	}
	return binary.LittleEndian.Uint64(p.word[:])
}

// count reads how many items follow, of at least least bytes each, and refuses
// more than the file has room for.
func (p *parser) count(what string, least int64) int {
	at := p.pos
	n := p.u64("the number of " + what)
	if room := uint64((p.end - p.pos) / least); p.err == nil && n > room {
		p.fail(at, "it announces %d %s, but from here the file of %d bytes has room for at most %d: it is cut short or damaged; download it again", n, what, p.size, room)
		return 0
	}
	return int(n)
}

// name reads a key or a tensor's name.
func (p *parser) name(what string) string {
	at := p.pos
	n := p.u64("the length of " + what)
	if p.err == nil && (n == 0 || n > maxName) {
		p.fail(at, "%s has a length of %d, want 1 to %d: the file is damaged; download it again", what, n, maxName)
	}
	if !p.need(n, what) {
		return ""
	}
	b := make([]byte, n)
	p.Read(b)
	bad := func(r rune) bool { return unicode.IsControl(r) }
	if !utf8.Valid(b) || bytes.ContainsFunc(b, bad) {
		p.fail(at, "%s %s is not plain text: the file is damaged; download it again", what, short(b))
	}
	return string(b)
}

// short quotes text that may be long and may be anything.
func short(b []byte) string {
	if len(b) > 60 {
		return strconv.QuoteToASCII(string(b[:60])) + "..."
	}
	return strconv.QuoteToASCII(string(b))
}

// metadata reads n entries.
func (p *parser) metadata(n int) Meta {
	meta := newMeta(p.file)
	for i := 0; i < n && p.err == nil; i++ {
		at := p.pos
		key := p.name("a metadata key")
		value := p.value(key, p.u32("a value type"))
		if p.err == nil && !meta.add(KV{key, value}, at) {
			p.fail(at, "metadata key %s appears twice", short([]byte(key)))
		}
	}
	return meta
}

// value reads a value of a type.
func (p *parser) value(key string, typ uint32) any {
	at := p.pos
	if p.err != nil {
		return nil
	}
	if int64(typ) >= int64(len(kinds)) {
		p.fail(at-4, "metadata %s has the value type %d, which GGUF does not have: the file is damaged; download it again", short([]byte(key)), typ)
		return nil
	}
	what := "metadata " + short([]byte(key))
	switch typ {
	case kindString:
		n := p.u64(what)
		if !p.need(n, what) {
			return nil
		}
		b := make([]byte, n)
		p.Read(b)
		return string(b)
	case kindArray:
		return p.array(what)
	}
	if !p.need(uint64(kinds[typ].size), what) {
		return nil
	}
	switch typ {
	case kindUint8:
		return number[uint8](p)
	case kindInt8:
		return number[int8](p)
	case kindUint16:
		return number[uint16](p)
	case kindInt16:
		return number[int16](p)
	case kindUint32:
		return number[uint32](p)
	case kindInt32:
		return number[int32](p)
	case kindFloat32:
		return number[float32](p)
	case kindBool:
		return p.bools(1, what)[0]
	case kindUint64:
		return number[uint64](p)
	case kindInt64:
		return number[int64](p)
	default: // kindFloat64
		return number[float64](p)
	}
}

// array reads an array's element type, its count and its elements. Arrays of
// arrays are refused: no model has them.
func (p *parser) array(what string) any {
	at := p.pos
	elem := p.u32("the element type of " + what)
	if p.err != nil {
		return nil
	}
	if int64(elem) >= int64(len(kinds)) {
		p.fail(at, "%s has the element type %d, which GGUF does not have: the file is damaged; download it again", what, elem)
		return nil
	}
	if elem == kindArray {
		p.fail(at, "%s is an array of arrays, which no known model has: convert the model again with a current converter", what)
		return nil
	}
	least := kinds[elem].size
	if elem == kindString {
		least = minString
	}
	n := p.count("elements of "+what, least)
	if p.err != nil {
		return nil
	}
	switch elem {
	case kindUint8:
		return numbers[uint8](p, n)
	case kindInt8:
		return numbers[int8](p, n)
	case kindUint16:
		return numbers[uint16](p, n)
	case kindInt16:
		return numbers[int16](p, n)
	case kindUint32:
		return numbers[uint32](p, n)
	case kindInt32:
		return numbers[int32](p, n)
	case kindFloat32:
		return numbers[float32](p, n)
	case kindBool:
		return p.bools(n, what)
	case kindString:
		return p.strings(n, what)
	case kindUint64:
		return numbers[uint64](p, n)
	case kindInt64:
		return numbers[int64](p, n)
	default: // kindFloat64
		return numbers[float64](p, n)
	}
}

// numbers reads n numbers, for which there is room.
func numbers[T any](p *parser, n int) []T {
	v := make([]T, n)
	binary.Read(p, binary.LittleEndian, v) // its error is p.err
	return v
}

func number[T any](p *parser) T { return numbers[T](p, 1)[0] }

// bools reads n truth values, for which there is room.
func (p *parser) bools(n int, what string) []bool {
	at := p.pos
	b := make([]byte, n)
	p.Read(b)
	v := make([]bool, n)
	for i, x := range b {
		if x > 1 {
			p.fail(at+int64(i), "%s has the truth value %d, want 0 or 1: the file is damaged; download it again", what, x)
			break
		}
		v[i] = x == 1
	}
	return v
}

// strings reads n strings, all into one allocation: vocabularies have hundreds
// of thousands.
func (p *parser) strings(n int, what string) []string {
	ends := make([]int, n)
	var text []byte
	for i := range ends {
		size := p.u64(what)
		if !p.need(size, what) {
			return nil
		}
		old := len(text)
		text = slices.Grow(text, int(size))[:old+int(size)]
		p.Read(text[old:])
		ends[i] = len(text)
	}
	all := string(text)
	v := make([]string, n)
	from := 0
	for i, to := range ends {
		v[i] = all[from:to]
		from = to
	}
	return v
}

// alignment is what the data and each tensor's offset are multiples of.
func (p *parser) alignment(meta Meta) int64 {
	if p.err != nil {
		return ggufAlignment
	}
	a, ok := meta.Uint("general.alignment")
	if err := meta.Err(); err != nil {
		p.err = err
	}
	if !ok {
		return ggufAlignment
	}
	if !validAlignment(a) {
		p.fail(meta.off("general.alignment"), "general.alignment is %d, want a power of two from 8 to %d: convert the model again with a current converter", a, maxAlignment)
	}
	return int64(a)
}

func validAlignment(a uint64) bool {
	return a >= 8 && a <= maxAlignment && bits.OnesCount64(a) == 1
}

// roundUp rounds n up to a multiple of align, a power of two.
func roundUp(n, align int64) int64 { return (n + align - 1) &^ (align - 1) }

// tensors reads n descriptions. Off is still relative to the data.
func (p *parser) tensors(n int) []Tensor {
	if p.err != nil {
		return nil
	}
	var ts []Tensor
	for i := 0; i < n && p.err == nil; i++ {
		ts = append(ts, p.tensor())
	}
	return ts
}

// tensor reads one description and works out its size.
func (p *parser) tensor() Tensor {
	at := p.pos
	t := Tensor{Name: p.name("a tensor name")}
	what := "tensor " + short([]byte(t.Name))
	dims := p.u32("the shape of " + what)
	if p.err == nil && (dims < 1 || dims > maxDims) {
		p.fail(at, "%s has %d dimensions, want 1 to %d", what, dims, maxDims)
	}
	elems := uint64(1)
	for i := uint32(0); i < dims && p.err == nil; i++ {
		d := p.u64("the shape of " + what)
		hi, lo := bits.Mul64(elems, d)
		if p.err == nil && (d == 0 || hi != 0 || lo > math.MaxInt64) {
			p.fail(at, "%s has a dimension of %d (dimension %d), which makes no size that a file can have", what, d, i)
		}
		elems = lo
		t.Dims = append(t.Dims, int64(d))
	}
	t.Type = quant.Type(p.u32("the type of " + what))
	off := p.u64("the offset of " + what)
	if p.err != nil {
		return t
	}
	if !t.Type.Known() {
		p.fail(at, "%s has the type number %d, which is not known here: get a newer Sluice, or the model in another quantization", what, uint32(t.Type))
		return t
	}
	per, bytes := t.Type.Block()
	if !t.Type.Fits(int(t.Dims[0])) {
		p.fail(at, "%s has rows of %d elements, but %v has blocks of %d: the file is damaged, or its converter wrong", what, t.Dims[0], t.Type, per)
		return t
	}
	if hi, lo := bits.Mul64(elems/uint64(t.Dims[0])*((uint64(t.Dims[0])+uint64(per)-1)/uint64(per)), uint64(bytes)); hi != 0 || lo > uint64(p.size) {
		p.fail(at, "%s has the shape %v in %v, which is more than the file's %d bytes: it is cut short or damaged; download it again", what, t.Dims, t.Type, p.size)
		return t
	} else {
		t.Bytes = int64(lo)
	}
	if off > uint64(p.size) {
		p.fail(at, "%s lies at byte %d of the data, but the file has %d bytes: it is cut short or damaged; download it again", what, off, p.size)
		return t
	}
	t.Off = int64(off)
	return t
}

// place makes the tensors' offsets absolute, and checks that each begins where
// it may, lies in the file and has its bytes to itself.
func (p *parser) place(ts []Tensor, align int64) error {
	start := roundUp(p.pos, align)
	order := make([]int, len(ts))
	for i := range ts {
		t := &ts[i]
		if t.Off%align != 0 {
			p.fail(-1, "tensor %s lies at byte %d of the data, which is not a multiple of the alignment %d: the file is damaged, or its converter wrong", short([]byte(t.Name)), t.Off, align)
			return p.err
		}
		t.Off += start
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int {
		switch {
		case ts[a].Off < ts[b].Off:
			return -1
		case ts[a].Off > ts[b].Off:
			return 1
		}
		return a - b
	})
	for i, k := range order {
		t := ts[k]
		if i > 0 {
			if last := ts[order[i-1]]; last.Off+last.Bytes > t.Off {
				p.fail(t.Off, "tensors %s (to byte %d) and %s (from here) overlap: the file is damaged, or its converter wrong", short([]byte(last.Name)), last.Off+last.Bytes, short([]byte(t.Name)))
				return p.err
			}
		}
	}
	if len(order) > 0 {
		if last := ts[order[len(order)-1]]; last.Off+last.Bytes > p.size {
			p.fail(p.size, "the file ends here, but needs %d bytes, %d more, for tensor %s: it is cut short; download it again",
				last.Off+last.Bytes, last.Off+last.Bytes-p.size, short([]byte(last.Name)))
			return p.err
		}
	}
	return nil
}
