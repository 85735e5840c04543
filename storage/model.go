package storage

import (
	"os"

	"sluice/internal/quant"
)

// A File is one file of a model, open for reading.
type File struct {
	Path string
	Size int64
	f    *os.File
}

// A Model is an open model: its metadata and where its tensors lie. Reading
// headers is all that Open does; no tensor byte is touched.
type Model struct {
	Format  string // "gguf"
	Files   []File
	Meta    Meta
	Tensors []Tensor // in file order
	byName  map[string]int
}

// Tensor finds a tensor by its name.
func (m *Model) Tensor(name string) (Tensor, bool) {
	i, ok := m.byName[name]
	if !ok {
		return Tensor{}, false
	}
	return m.Tensors[i], true
}

var _ = quant.F32
