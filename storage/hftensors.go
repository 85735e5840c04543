package storage

import (
	"fmt"
	"slices"
	"strings"

	"sluice/internal/quant"
	"sluice/internal/safetensors"
)

// A composer makes the tensors of a model of those in its safetensors files: one
// of codes and scales that stand apart.
type composer struct {
	m    *Model
	raw  map[string]*rawTensor
	fmts map[string]string // the formats that a colibri container's stamps say
	out  []Tensor
	of   []*rawTensor // the codes of out

	// Of the suffixes that names may have beside the common ones, those that any has:
	// a name that cannot be there need not be made to look it up.
	odd map[string]bool
}

// oddSuffixes are those of names that few models have.
var oddSuffixes = [...]string{".qs", "_shape", "_zero_point", "_g_idx"}

type rawTensor struct {
	safetensors.Tensor
	file int
	used bool // a scale or a shape, which is no tensor of its own
}

// compose gives the tensors in the order of the files.
func (m *Model) compose(shards [][]safetensors.Tensor) ([]Tensor, error) {
	n := 0
	for _, ts := range shards {
		n += len(ts)
	}
	c := composer{m: m, fmts: map[string]string{}, raw: make(map[string]*rawTensor, n), odd: map[string]bool{}, out: make([]Tensor, 0, n), of: make([]*rawTensor, 0, n)}
	all := make([]rawTensor, 0, n)
	for i, ts := range shards {
		for _, t := range ts {
			if old, dup := c.raw[t.Name]; dup {
				return nil, &FormatError{File: m.Files[i].Path, Off: t.Off, Msg: fmt.Sprintf("tensor %.60q appears twice: it is also in %s", t.Name, m.Files[old.file].Path)}
			}
			all = append(all, rawTensor{Tensor: t, file: i})
			c.raw[t.Name] = &all[len(all)-1]
			for _, s := range oddSuffixes {
				if strings.HasSuffix(t.Name, s) {
					c.odd[s] = true
				}
			}
		}
	}
	if err := c.stamps(); err != nil {
		return nil, err
	}
	for i := range all {
		if all[i].Bytes == 0 {
			continue // an empty one is no weight
		}
		if err := c.add(&all[i]); err != nil {
			return nil, err
		}
	}
	n = 0
	for i, t := range c.out {
		if !c.of[i].used {
			c.out[n] = t
			n++
		}
	}
	return c.out[:n], nil
}

// find finds the tensor of a name with one of oddSuffixes.
func (c *composer) find(name, suffix string) (*rawTensor, bool) {
	if !c.odd[suffix] {
		return nil, false
	}
	t, ok := c.raw[name+suffix]
	return t, ok
}

// put adds a tensor whose codes, or all bytes, are those of t.
func (c *composer) put(x Tensor, t *rawTensor) { c.out, c.of = append(c.out, x), append(c.of, t) }

// dtypes are the types of tensors that stand alone. What has no type of its own
// here is bytes of data.
var dtypes = map[safetensors.DType]quant.Type{
	"F64": quant.F64, "I64": quant.I64, "U64": quant.I64, "F32": quant.F32, "I32": quant.I32, "U32": quant.I32,
	"F16": quant.F16, "BF16": quant.BF16, "I16": quant.I16, "U16": quant.I16,
}

// add makes the tensor whose codes, or all bytes, t has.
func (c *composer) add(t *rawTensor) error {
	if scale, ok := c.find(t.Name, ".qs"); ok {
		return c.colibri(t, scale)
	}
	if stem, ok := strings.CutSuffix(t.Name, "_blocks"); ok && t.DType == "U8" && len(t.Shape) > 2 && t.Shape[len(t.Shape)-1] == 16 {
		if scale, ok := c.raw[stem+"_scales"]; ok {
			shape := slices.Clone(t.Shape[:len(t.Shape)-1])
			shape[len(shape)-1] *= 32
			return c.fp4(stem, shape, t, scale)
		}
	}
	if stem, ok := strings.CutSuffix(t.Name, "_packed"); ok && len(t.Shape) > 1 {
		if scale, ok := c.raw[stem+"_scale"]; ok {
			if shape, ok := c.find(stem, "_shape"); ok {
				shape.used = true
			}
			shape := slices.Clone(t.Shape)
			switch {
			case t.DType == "I32":
				shape[len(shape)-1] *= 8
				return c.int4(stem, shape, t, scale)
			case t.DType == "U8" && (scale.DType == "U8" || scale.DType == "F8_E8M0"):
				shape[len(shape)-1] *= 2
				return c.fp4(stem, shape, t, scale)
			}
		}
	}
	if t.DType == "F8_E4M3" && len(t.Shape) > 1 {
		return c.float8(t)
	}
	typ, known := dtypes[t.DType]
	if !known {
		typ = quant.I8
	}
	c.put(Tensor{Name: t.Name, Type: typ, Dims: dimsOf(t.Shape), File: t.file, Off: t.Off, Bytes: t.Bytes}, t)
	return nil
}

// made adds the tensor of that name, type and shape that a form makes of codes
// and scales. A shape of three dims is a stack, each share made by itself.
func (c *composer) made(name string, typ quant.Type, shape []int64, f form, codes, scale *rawTensor) error {
	if len(shape) > 3 || len(shape) < 2 {
		return c.bad(codes, "has the shape %v, want that of a matrix or a stack of them", codes.Shape)
	}
	t := Tensor{Name: name, Type: typ, Dims: dimsOf(shape), File: codes.file, Off: codes.Off}
	n := t.shares()
	f.typ, f.cols, f.rows, f.all, f.step = typ, t.Dims[0], t.Dims[1], t.Dims[1], 1
	for i, raw := range [...]*rawTensor{codes, scale} {
		if raw != nil && raw.Bytes > 0 {
			f.from[i] = source{n: raw.Bytes / n, stride: raw.Bytes / n, at: place{raw.file, raw.Off}}
		}
	}
	perRow := int64(typ.RowBytes(int(f.cols)))
	if f.cols > maxColumns || perRow > maxFile/f.rows/n { // of codes that are there, so in truth far less
		return c.bad(codes, "has the shape %v, which makes no size that memory can have", codes.Shape)
	}
	t.Bytes = n * f.rows * perRow
	t.form = &f
	c.put(t, codes)
	if scale != nil {
		scale.used = true
	}
	return nil
}

const maxColumns = 1 << 30

// bad is an error about a tensor.
func (c *composer) bad(t *rawTensor, format string, args ...any) error {
	return &FormatError{File: c.m.Files[t.file].Path, Off: t.Off, Msg: fmt.Sprintf("tensor %.60q ", t.Name) + fmt.Sprintf(format, args...)}
}

// fp4 is MXFP4 of that shape: E2M1 codes, an E8M0 exponent for each 32.
func (c *composer) fp4(name string, shape []int64, codes, scale *rawTensor) error {
	n := int64(1)
	for _, d := range shape {
		n *= d // of half as many bytes as there are
	}
	if cols := shape[len(shape)-1]; cols%32 != 0 || codes.Bytes != n/2 || scale.Bytes != n/32 {
		return c.bad(codes, "of shape %v has %d bytes of codes and %s, of shape %v, %d scales: want one for each 32 of a row", codes.Shape, codes.Bytes, scale.Name, scale.Shape, scale.Bytes)
	}
	return c.made(name, quant.MXFP4, shape, form{weave: fp4}, codes, scale)
}

// int4 is compressed-tensors' pack-quantized, symmetric, in groups of a row.
func (c *composer) int4(name string, shape []int64, codes, scale *rawTensor) error {
	for _, other := range [...]string{"_zero_point", "_g_idx"} {
		if x, ok := c.find(name, other); ok {
			return c.bad(x, "is there, but of packed integers only symmetric ones in groups of neighbours are supported")
		}
	}
	last := len(shape) - 1
	if len(scale.Shape) != len(shape) || !slices.Equal(shape[:last], scale.Shape[:last]) || scale.Shape[last] < 1 || shape[last]%scale.Shape[last] != 0 {
		return c.bad(scale, "has the shape %v, which does not fit codes of shape %v", scale.Shape, shape)
	}
	group := shape[last] / scale.Shape[last]
	typ := quant.INT4_32
	switch {
	case group%32 != 0:
		return c.bad(scale, "has a scale for each %d codes: supported are groups of a multiple of 32", group)
	case scale.DType == "F16":
		typ = quant.Q4_0 // the same numbers
	case scale.DType != "BF16":
		return c.bad(scale, "has the type %s: supported are BF16 and F16", scale.DType)
	case group%128 == 0:
		typ = quant.INT4_128
	}
	f := form{weave: int4, scale: scales{rows: shape[last-1], cols: scale.Shape[last], high: 1, wide: group, typ: dtypes[scale.DType]}}
	return c.made(name, typ, shape, f, codes, scale)
}

// float8 is FP8-E4M3 with a scale for each block of 128x128, each row, or the whole.
func (c *composer) float8(codes *rawTensor) error {
	var scale *rawTensor
	for _, suffix := range [...]string{"_scale_inv", "_scale"} {
		if s, ok := c.raw[codes.Name+suffix]; ok {
			scale = s
			break
		}
	}
	f := form{weave: float8}
	if scale != nil {
		last := len(codes.Shape) - 1
		rows, cols, n := codes.Shape[last-1], codes.Shape[last], int64(1)
		for _, d := range codes.Shape[:last-1] {
			n *= d
		}
		x := scales{rows: 1, cols: 1, high: rows, wide: cols}
		of := int64(1) // all scales
		for _, d := range scale.Shape {
			of *= d
		}
		if len(scale.Shape) >= len(codes.Shape) || len(scale.Shape) == 2 {
			x.rows, x.cols = scale.Shape[len(scale.Shape)-2], scale.Shape[len(scale.Shape)-1]
		} else if of == n*rows {
			x.rows = rows
		}
		var known bool
		if x.typ, known = dtypes[scale.DType]; scale.DType == "F8_E8M0" {
			x.typ, known = quant.I8, true
		}
		switch {
		case !known || x.typ != quant.F32 && x.typ != quant.BF16 && x.typ != quant.F16 && x.typ != quant.I8:
			return c.bad(scale, "has the type %s, which is none of a scale", scale.DType)
		case x.rows == rows:
			x.high = 1
		case x.rows == (rows+127)/128:
			x.high = 128
		case x.rows != 1:
			x.cols = 0 // fits nothing
		}
		switch {
		case x.cols == (cols+127)/128:
			x.wide = 128
		case x.cols != 1:
			x.cols = 0
		}
		if x.cols == 0 || of != n*x.rows*x.cols {
			return c.bad(scale, "has the shape %v, which does not fit codes of shape %v: want a scale for each block of 128x128, each row, or the whole", scale.Shape, codes.Shape)
		}
		f.scale = x
	}
	return c.made(codes.Name, quant.F8_128, codes.Shape, f, codes, scale)
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
