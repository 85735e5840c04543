package storage

import (
	"fmt"
	"slices"

	"sluice/internal/quant"
	"sluice/internal/safetensors"
)

// A composer makes the tensors of a model of those in its safetensors files: one
// of codes and scales that stand apart.
type composer struct {
	m    *Model
	raw  map[string]rawTensor
	used map[string]bool // scales and shapes, which are no tensors of their own
	out  []Tensor
}

type rawTensor struct {
	safetensors.Tensor
	file int
}

// compose gives the tensors in the order of the files.
func (m *Model) compose(shards [][]safetensors.Tensor) ([]Tensor, error) {
	n := 0
	for _, ts := range shards {
		n += len(ts)
	}
	c := composer{m: m, raw: make(map[string]rawTensor, n), used: map[string]bool{}, out: make([]Tensor, 0, n)}
	for i, ts := range shards {
		for _, t := range ts {
			if old, dup := c.raw[t.Name]; dup {
				return nil, &FormatError{File: m.Files[i].Path, Off: t.Off, Msg: fmt.Sprintf("tensor %.60q appears twice: it is also in %s", t.Name, m.Files[old.file].Path)}
			}
			c.raw[t.Name] = rawTensor{t, i}
		}
	}
	for i, ts := range shards {
		for _, t := range ts {
			if t.Bytes == 0 {
				continue // an empty one is no weight
			}
			if err := c.add(rawTensor{t, i}); err != nil {
				return nil, err
			}
		}
	}
	return slices.DeleteFunc(c.out, func(t Tensor) bool { return c.used[t.Name] }), nil
}

// dtypes are the types of tensors that stand alone. What has no type of its own
// here is bytes of data.
var dtypes = map[safetensors.DType]quant.Type{
	"F64": quant.F64, "I64": quant.I64, "U64": quant.I64, "F32": quant.F32, "I32": quant.I32, "U32": quant.I32,
	"F16": quant.F16, "BF16": quant.BF16, "I16": quant.I16, "U16": quant.I16,
}

// add makes the tensor whose codes, or all bytes, t has.
func (c *composer) add(t rawTensor) error {
	typ, known := dtypes[t.DType]
	if !known {
		typ = quant.I8
	}
	c.out = append(c.out, Tensor{Name: t.Name, Type: typ, Dims: dimsOf(t.Shape), File: t.file, Off: t.Off, Bytes: t.Bytes})
	return nil
}

// dimsOf is a shape innermost first, at most four dims.
func dimsOf(shape []int64) []int64 {
	dims := slices.Clone(shape)
	slices.Reverse(dims)
	if len(dims) == 0 {
		dims = []int64{1}
	}
	for len(dims) > 4 {
		last := len(dims) - 1
		dims[last-1] *= dims[last]
		dims = dims[:last]
	}
	return dims
}
