package storage

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"sluice/internal/atomicfile"
	"sluice/internal/quant"
)

// A TensorSpec is a tensor to be written. Dims are innermost first.
type TensorSpec struct {
	Name string
	Type quant.Type
	Dims []int64
}

// Bytes is the size of the tensor's data; 0 if its type or shape has none.
func (s TensorSpec) Bytes() int64 {
	per, bytes := s.Type.Block()
	if per == 0 || len(s.Dims) == 0 {
		return 0
	}
	n := (s.Dims[0] + int64(per) - 1) / int64(per) * int64(bytes)
	for _, d := range s.Dims[1:] {
		n *= d
	}
	return n
}

// A GGUFWriter writes a GGUF file of version 3 in constant memory: the header
// at once, then the tensors' bytes in order through Write. The file appears
// under its name when Finish succeeds; before that, and after any error, there
// is none.
type GGUFWriter struct {
	f       *atomicfile.File
	path    string
	tensors []TensorSpec
	cur     int   // the tensor that the next byte belongs to; len(tensors): none
	left    int64 // bytes that it still needs
	align   int64
}

// CreateGGUF begins a file with this metadata and these tensors. Entries are
// written with the types of their values, which KV lists; general.alignment
// among them is heeded. It refuses what Open would refuse.
func CreateGGUF(path string, meta []KV, tensors []TensorSpec) (*GGUFWriter, error) {
	h, align, _, err := ggufHeader(path, meta, tensors)
	if err != nil {
		return nil, err
	}
	w := &GGUFWriter{path: path, tensors: tensors, align: align}
	if w.f, err = atomicfile.Create(path); err != nil {
		return nil, fmt.Errorf("storage: %w", err)
	}
	if err := w.write(h); err != nil {
		return nil, err
	}
	if len(tensors) > 0 {
		w.left = tensors[0].Bytes()
	}
	return w, nil
}

// GGUFSize is the size of the file that CreateGGUF would write, in bytes.
func GGUFSize(meta []KV, tensors []TensorSpec) (int64, error) {
	_, _, size, err := ggufHeader("a GGUF file", meta, tensors)
	return size, err
}

// ggufHeader makes and checks all that comes before the data, padded to where
// the data begins. size is that of the whole file.
func ggufHeader(path string, meta []KV, tensors []TensorSpec) (h []byte, align, size int64, err error) {
	m, err := NewMeta(path, meta)
	if err != nil {
		return nil, 0, 0, err
	}
	align = ggufAlignment
	if a, _ := m.Uint("general.alignment"); validAlignment(a) {
		align = int64(a) // else parseGGUF says what is wrong with it
	}
	h = []byte(ggufMagic)
	h = binary.LittleEndian.AppendUint32(h, 3)
	h = binary.LittleEndian.AppendUint64(h, uint64(len(tensors)))
	h = binary.LittleEndian.AppendUint64(h, uint64(len(meta)))
	for _, kv := range meta {
		h = appendValue(appendString(h, kv.Key), kv.Value)
	}
	var off int64 // of the next tensor's data
	for _, t := range tensors {
		h = appendString(h, t.Name)
		h = binary.LittleEndian.AppendUint32(h, uint32(len(t.Dims)))
		for _, d := range t.Dims {
			h = binary.LittleEndian.AppendUint64(h, uint64(d))
		}
		h = binary.LittleEndian.AppendUint32(h, uint32(t.Type))
		h = binary.LittleEndian.AppendUint64(h, uint64(off))
		off = roundUp(off+t.Bytes(), align)
		if off < 0 || off > 1<<62 {
			return nil, 0, 0, fmt.Errorf("storage: create %s: tensor %q makes the file larger than a file can be", path, t.Name)
		}
	}
	h = append(h, make([]byte, roundUp(int64(len(h)), align)-int64(len(h)))...)

	// The reader knows all the rules, so it checks what is about to be written.
	size = int64(len(h)) + off
	s, err := parseGGUF(bytes.NewReader(h), size, path)
	if err != nil {
		return nil, 0, 0, fmt.Errorf("storage: create: %w", err)
	}
	check := Model{Files: []File{{Path: path}}, byName: map[string]int{}}
	if err := check.addTensors(s.tensors); err != nil {
		return nil, 0, 0, fmt.Errorf("storage: create: %w", err)
	}
	return h, align, size, nil
}

// Write appends to the data of the tensors, which follow one another without a
// gap here; the padding between them is the writer's. More bytes than the
// tensors have are refused.
func (w *GGUFWriter) Write(b []byte) (int, error) {
	done := 0
	for done < len(b) {
		if w.cur == len(w.tensors) {
			return done, fmt.Errorf("storage: write %s: %d bytes more than its tensors have", w.path, len(b)-done)
		}
		part := b[done:]
		if int64(len(part)) > w.left {
			part = part[:w.left]
		}
		if err := w.write(part); err != nil {
			return done, err
		}
		done += len(part)
		if w.left -= int64(len(part)); w.left > 0 {
			continue
		}
		size := w.tensors[w.cur].Bytes()
		if err := w.write(make([]byte, roundUp(size, w.align)-size)); err != nil {
			return done, err
		}
		if w.cur++; w.cur < len(w.tensors) {
			w.left = w.tensors[w.cur].Bytes()
		}
	}
	return done, nil
}

// Finish checks that all bytes came, and puts the file in place. After an error
// nothing is left of it.
func (w *GGUFWriter) Finish() error {
	if w.cur < len(w.tensors) {
		w.f.Abort()
		return fmt.Errorf("storage: write %s: tensor %q lacks %d of its %d bytes, removed what was written",
			w.path, w.tensors[w.cur].Name, w.left, w.tensors[w.cur].Bytes())
	}
	if err := w.f.Commit(); err != nil {
		return fmt.Errorf("storage: %w", err)
	}
	return nil
}

// Abort gives up the file and leaves nothing behind. After Finish it does nothing.
func (w *GGUFWriter) Abort() { w.f.Abort() }

func (w *GGUFWriter) write(b []byte) error {
	if _, err := w.f.Write(b); err != nil {
		return fmt.Errorf("storage: %w", err)
	}
	return nil
}

func appendString(h []byte, s string) []byte {
	h = binary.LittleEndian.AppendUint64(h, uint64(len(s)))
	return append(h, s...)
}

// appendValue appends the type and the bytes of a value that KV lists.
func appendValue(h []byte, v any) []byte {
	k, _ := kindOf(v)
	h = binary.LittleEndian.AppendUint32(h, k.typ)
	if k.typ == kindArray {
		h = binary.LittleEndian.AppendUint32(h, k.elem)
		n, _ := lenOf(v)
		h = binary.LittleEndian.AppendUint64(h, uint64(n))
	}
	switch v := v.(type) {
	case string:
		return appendString(h, v)
	case []string:
		for _, s := range v {
			h = appendString(h, s)
		}
		return h
	}
	h, err := binary.Append(h, binary.LittleEndian, v)
	if err != nil {
		panic(err) // NewMeta has refused all that has no fixed size
	}
	return h
}
