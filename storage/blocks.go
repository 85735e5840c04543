package storage

import (
	"fmt"
	"os"

	"sluice/internal/quant"
)

// OpenBlocks opens a file of any kind as a model of one layer, 0, whose experts
// are the file's blocks of size bytes, one behind the other, what is left at the
// end aside. So a drive is measured on the way that experts take. Errors: a file
// without two blocks, or with more than 2^20.
func OpenBlocks(path string, size int64) (*Model, []ExpertLayer, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, nil, fmt.Errorf("storage: open blocks: %w", err)
	}
	fi, err := f.Stat()
	if err == nil && !fi.Mode().IsRegular() {
		err = fmt.Errorf("storage: %s is not a regular file", path)
	}
	n := int64(0)
	if err == nil {
		if n = fi.Size() / max(1, size); size < 1 || n < 2 || n > 1<<20 {
			err = fmt.Errorf("storage: %s: %d bytes are %d blocks of %d: there must be 2 to 2^20", path, fi.Size(), n, size)
		}
	}
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	const name = "blocks"
	m := &Model{
		Format:  "blocks",
		Files:   []File{{Path: path, Size: fi.Size(), f: f}},
		Tensors: []Tensor{{Name: name, Type: quant.I8, Dims: []int64{size, n}, Bytes: n * size}},
		byName:  map[string]int{name: 0},
	}
	return m, []ExpertLayer{{Experts: int(n), Parts: []string{name}}}, nil
}
