package safetensors

import (
	"encoding/binary"
	"encoding/json"
	"fmt"

	"sluice/internal/atomicfile"
)

// A Writer writes a file in constant memory: the header at once, then the
// tensors' bytes in the order of the specs. The file appears under its name
// when Finish succeeds; before that, and after any error, there is none. The
// same specs and values give the same bytes.
type Writer struct {
	f     *atomicfile.File
	path  string
	specs []Spec
	total int64 // bytes of data
	left  int64 // of them, still to come
	buf   []byte
}

// Create begins a file. The data begins at a multiple of 8 bytes.
func Create(path string, specs []Spec) (*Writer, error) {
	w := &Writer{path: path, specs: specs}
	h := []byte("{")
	for i, s := range specs {
		size, err := s.Bytes()
		if err != nil {
			return nil, fmt.Errorf("safetensors: create %s: %w", path, err)
		}
		if i > 0 {
			h = append(h, ',')
		}
		name, err := json.Marshal(s.Name)
		if err != nil {
			return nil, fmt.Errorf("safetensors: create %s: %w", path, err)
		}
		shape, err := json.Marshal(append([]int64{}, s.Shape...)) // [] rather than null
		if err != nil {
			return nil, fmt.Errorf("safetensors: create %s: %w", path, err)
		}
		h = fmt.Appendf(h, `%s:{"dtype":%q,"shape":%s,"data_offsets":[%d,%d]}`, name, s.DType, shape, w.total, w.total+size)
		w.total += size
		if w.total < 0 {
			return nil, fmt.Errorf("safetensors: create %s: tensor %q makes the file larger than a file can be", path, s.Name)
		}
	}
	h = append(h, '}')
	for len(h)%8 != 0 {
		h = append(h, ' ')
	}
	if _, err := ParseHeader(h, w.total); err != nil { // names twice, for one
		return nil, fmt.Errorf("safetensors: create %s: %w", path, err)
	}
	w.left = w.total
	f, err := atomicfile.Create(path)
	if err != nil {
		return nil, fmt.Errorf("safetensors: %w", err)
	}
	w.f = f
	if err := w.write(append(binary.LittleEndian.AppendUint64(nil, uint64(len(h))), h...)); err != nil {
		return nil, err
	}
	return w, nil
}

// Write appends to the data. More bytes than the specs have are refused.
func (w *Writer) Write(b []byte) (int, error) {
	if int64(len(b)) > w.left {
		return 0, fmt.Errorf("safetensors: write %s: %d bytes more than its tensors have", w.path, int64(len(b))-w.left)
	}
	if err := w.write(b); err != nil {
		return 0, err
	}
	w.left -= int64(len(b))
	return len(b), nil
}

// Floats appends values of a tensor of type F32.
func (w *Writer) Floats(v []float32) error { return writeAll(w, v) }

// Ints appends values of a tensor of type I32.
func (w *Writer) Ints(v []int32) error { return writeAll(w, v) }

func writeAll[T int32 | float32](w *Writer, v []T) error {
	var err error
	if w.buf, err = binary.Append(w.buf[:0], binary.LittleEndian, v); err != nil {
		panic(err) // its type has a size
	}
	_, err = w.Write(w.buf)
	return err
}

// Finish checks that all bytes came, and puts the file in place. After an error
// nothing is left of it.
func (w *Writer) Finish() error {
	if w.left > 0 {
		w.f.Abort()
		return fmt.Errorf("safetensors: write %s: %d of %d bytes are missing, removed what was written", w.path, w.left, w.total)
	}
	if err := w.f.Commit(); err != nil {
		return fmt.Errorf("safetensors: %w", err)
	}
	return nil
}

// Abort gives up the file and leaves nothing behind. After Finish it does nothing.
func (w *Writer) Abort() { w.f.Abort() }

func (w *Writer) write(b []byte) error {
	if _, err := w.f.Write(b); err != nil {
		return fmt.Errorf("safetensors: %w", err)
	}
	return nil
}
