// Package safetensors reads and writes safetensors files: a length u64, a JSON
// object of that length that maps each name to a type, a shape and the bytes
// that it has in the rest of the file, which the tensors cover without a gap or
// an overlap. All numbers are little endian; shapes are outermost first.
//
// Files are untrusted: a header is checked against the file's size before use.
package safetensors

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/bits"
	"os"
	"slices"

	"sluice/internal/quant"
)

// A DType is the type of a tensor's elements, as the header spells it.
type DType string

// The types that Floats and Ints convert.
const (
	F32  DType = "F32"
	F16  DType = "F16"
	BF16 DType = "BF16"
	I32  DType = "I32"
	I64  DType = "I64"
)

// sizes gives the bytes of an element of each type that a file may hold.
var sizes = map[DType]int64{
	"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
	"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}

// A Spec is a tensor's name, type and shape, outermost dimension first; no
// dimensions make one element.
type Spec struct {
	Name  string
	DType DType
	Shape []int64
}

// Bytes is the size of the tensor's data, or an error if it has none that a file could hold.
func (s Spec) Bytes() (int64, error) {
	size, ok := sizes[s.DType]
	if !ok {
		return 0, fmt.Errorf("tensor %.60q has the type %.20q, which is not known here", s.Name, s.DType)
	}
	n := uint64(size)
	for _, d := range s.Shape {
		hi, lo := bits.Mul64(n, uint64(d))
		if d < 0 || hi != 0 || lo > math.MaxInt64 {
			return 0, fmt.Errorf("tensor %.60q has a dimension of %d, which makes no size that a file can have", s.Name, d)
		}
		n = lo
	}
	return int64(n), nil
}

// A Tensor is a tensor in a file.
type Tensor struct {
	Spec
	Off   int64 // absolute
	Bytes int64
}

// A File is open for reading; several goroutines may read at once.
type File struct {
	path    string
	f       *os.File
	tensors []Tensor // in the order of their data
	byName  map[string]int
}

// Open opens a file and checks its header. No tensor's bytes are read.
func Open(path string) (*File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("safetensors: %w", err)
	}
	fi, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("safetensors: %w", err)
	}
	tensors, err := parse(f, fi.Size())
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("safetensors: %s: %w", path, err)
	}
	file := &File{path: path, f: f, tensors: tensors, byName: make(map[string]int, len(tensors))}
	for i, t := range tensors {
		file.byName[t.Name] = i
	}
	return file, nil
}

// Close closes the file.
func (f *File) Close() error { return f.f.Close() }

// Tensors lists the tensors in the order of their data.
func (f *File) Tensors() []Tensor { return f.tensors }

// Tensor finds a tensor by its name.
func (f *File) Tensor(name string) (Tensor, bool) {
	i, ok := f.byName[name]
	if !ok {
		return Tensor{}, false
	}
	return f.tensors[i], true
}

// Floats reads a tensor of type F32, F16 or BF16.
func (f *File) Floats(name string) ([]float32, error) {
	t, b, err := f.read(name, F32, F16, BF16)
	if err != nil {
		return nil, err
	}
	out := make([]float32, len(b)/int(sizes[t.DType]))
	for i := range out {
		switch t.DType {
		case F32:
			out[i] = math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:]))
		case F16:
			out[i] = quant.FromF16(binary.LittleEndian.Uint16(b[2*i:]))
		case BF16:
			out[i] = quant.FromBF16(binary.LittleEndian.Uint16(b[2*i:]))
		}
	}
	return out, nil
}

// Ints reads a tensor of type I32, or I64 if its values fit.
func (f *File) Ints(name string) ([]int32, error) {
	t, b, err := f.read(name, I32, I64)
	if err != nil {
		return nil, err
	}
	out := make([]int32, len(b)/int(sizes[t.DType]))
	for i := range out {
		if t.DType == I32 {
			out[i] = int32(binary.LittleEndian.Uint32(b[4*i:]))
			continue
		}
		v := int64(binary.LittleEndian.Uint64(b[8*i:]))
		if v != int64(int32(v)) {
			return nil, fmt.Errorf("safetensors: %s: tensor %q holds %d, which is over 32 bits", f.path, name, v)
		}
		out[i] = int32(v)
	}
	return out, nil
}

// read reads the bytes of a tensor that has one of these types.
func (f *File) read(name string, types ...DType) (Tensor, []byte, error) {
	t, ok := f.Tensor(name)
	if !ok {
		return t, nil, fmt.Errorf("safetensors: %s: it has no tensor %q", f.path, name)
	}
	if !slices.Contains(types, t.DType) {
		return t, nil, fmt.Errorf("safetensors: %s: tensor %q has the type %s, want one of %v", f.path, name, t.DType, types)
	}
	b := make([]byte, t.Bytes)
	if n, err := f.f.ReadAt(b, t.Off); n < len(b) {
		if errors.Is(err, io.EOF) {
			err = errors.New("the file ends here: it was cut short after it was opened")
		}
		return t, nil, fmt.Errorf("safetensors: %s: tensor %q, byte %d: %w", f.path, name, t.Off+int64(n), err)
	}
	return t, b, nil
}

// MaxHeader is the format's own bound on the bytes of a header.
const MaxHeader = 100_000_000

// parse reads the header of a file of size bytes and checks all that it says.
func parse(r io.ReaderAt, size int64) ([]Tensor, error) {
	var head [8]byte
	if size < 8 {
		return nil, fmt.Errorf("a safetensors file begins with 8 bytes of length, but this one has %d: it is cut short or something else", size)
	}
	if _, err := r.ReadAt(head[:], 0); err != nil {
		return nil, fmt.Errorf("read its length: %w", err)
	}
	n := binary.LittleEndian.Uint64(head[:])
	if n > MaxHeader || n > uint64(size-8) {
		return nil, fmt.Errorf("its header says that it has %d bytes, but the file has %d, and %d is the limit: it is cut short or no safetensors file", n, size, MaxHeader)
	}
	b := make([]byte, n)
	if _, err := r.ReadAt(b, 8); err != nil && n > 0 {
		return nil, fmt.Errorf("read its header: %w", err)
	}
	tensors, err := ParseHeader(b, size-8-int64(n))
	if err != nil {
		return nil, err
	}
	for i := range tensors {
		tensors[i].Off += 8 + int64(n)
	}
	return tensors, nil
}

// ParseHeader reads the JSON of a header, which stands behind its length, and
// checks all that it says. It gives the tensors in the order of their data;
// offsets are relative to the data, which has data bytes.
func ParseHeader(b []byte, data int64) ([]Tensor, error) {
	entries, ok := scanHeader(b)
	if !ok {
		var err error
		if entries, err = decodeHeader(b); err != nil {
			return nil, err
		}
	}
	tensors := make([]Tensor, len(entries))
	seen := make(map[string]bool, len(entries))
	for i, e := range entries {
		if seen[e.name] {
			return nil, fmt.Errorf("its header: %.60q appears twice", e.name)
		}
		seen[e.name] = true
		t := &tensors[i]
		t.Spec, t.Off = Spec{Name: e.name, DType: e.dtype, Shape: e.shape}, e.offsets[0]
		var err error
		if t.Bytes, err = t.Spec.Bytes(); err != nil {
			return nil, err
		}
		if t.Off < 0 || e.offsets[1] < t.Off || e.offsets[1] > data {
			return nil, fmt.Errorf("tensor %.60q has bytes %d of the data, which has %d: it is cut short or damaged", e.name, e.offsets, data)
		}
		if e.offsets[1]-t.Off != t.Bytes {
			return nil, fmt.Errorf("tensor %.60q has %d bytes, but its shape %v of %s needs %d", e.name, e.offsets[1]-t.Off, t.Shape, t.DType, t.Bytes)
		}
	}
	slices.SortStableFunc(tensors, func(a, b Tensor) int {
		switch {
		case a.Off < b.Off || a.Off == b.Off && a.Bytes < b.Bytes: // an empty one goes before what begins there
			return -1
		case a.Off > b.Off || a.Bytes > b.Bytes:
			return 1
		}
		return 0
	})
	end := int64(0)
	for _, t := range tensors {
		if t.Off != end {
			return nil, fmt.Errorf("tensor %.60q begins at byte %d of the data, but the one before ends at %d: there must be no gap and no overlap", t.Name, t.Off, end)
		}
		end += t.Bytes
	}
	if end != data {
		return nil, fmt.Errorf("its tensors have %d bytes, but its data has %d: it is damaged", end, data)
	}
	return tensors, nil
}

// decodeHeader is the entries of any header.
func decodeHeader(b []byte) ([]entry, error) {
	d := json.NewDecoder(bytes.NewReader(b))
	if tok, err := d.Token(); err != nil || tok != json.Delim('{') {
		return nil, errors.New("its header is no JSON object: it is damaged or no safetensors file")
	}
	var entries []entry
	meta := false
	for d.More() {
		tok, err := d.Token()
		if err != nil {
			return nil, fmt.Errorf("its header, byte %d: %w", 8+d.InputOffset(), err)
		}
		name := tok.(string) // in an object, a token before a value is its key
		if name == "__metadata__" {
			if meta {
				return nil, fmt.Errorf("its header, byte %d: %q appears twice", 8+d.InputOffset(), name)
			}
			meta = true
			var skipped map[string]string
			if err := d.Decode(&skipped); err != nil {
				return nil, fmt.Errorf("its header, byte %d: __metadata__: %w", 8+d.InputOffset(), err)
			}
			continue
		}
		var e struct {
			DType   DType   `json:"dtype"`
			Shape   []int64 `json:"shape"`
			Offsets []int64 `json:"data_offsets"`
		}
		if err := d.Decode(&e); err != nil {
			return nil, fmt.Errorf("its header, byte %d: tensor %.60q: %w", 8+d.InputOffset(), name, err)
		}
		if len(e.Offsets) != 2 {
			return nil, fmt.Errorf("tensor %.60q has bytes %.6v of the data: want a first and a last", name, e.Offsets)
		}
		entries = append(entries, entry{name, e.DType, e.Shape, [2]int64(e.Offsets)})
	}
	if _, err := d.Token(); err != nil {
		return nil, fmt.Errorf("its header, byte %d: %w", 8+d.InputOffset(), err)
	}
	if rest := bytes.TrimRight(b[d.InputOffset():], " \n\r\t\x00"); len(rest) > 0 {
		return nil, fmt.Errorf("its header, byte %d: text after the object", 8+d.InputOffset())
	}
	return entries, nil
}
