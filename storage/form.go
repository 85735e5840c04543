package storage

import (
	"fmt"
	"strconv"
	"strings"

	"sluice/internal/quant"
)

// A form says how the bytes of a tensor in memory are made of bytes in files,
// where they are not the same. It makes the shares of the experts one by one,
// each from bytes of its own; a tensor of two dims is one share.
type form struct {
	weave weave
	from  [2]source // the codes, or all there is; the scales, if they stand apart

	typ        quant.Type // of the result
	rows, cols int64      // of a share of the result

	// Row i of the result is row first + i*step of the source, which has all rows.
	first, step, all int64

	scale scales
}

// scales says which scale belongs to a code.
type scales struct {
	rows, cols int64 // of the matrix of scales; 0: there are none, all are 1
	high, wide int64 // rows and columns of codes that have one in common
	typ        quant.Type
}

// A weave is a way to make rows.
type weave uint8

const (
	unwoven    weave = iota // the bytes of the file
	pick                    // whole rows, not all of them
	transposed              // columns of the file
	float8                  // FP8-E4M3 codes and a scale for each run of columns
	fp4                     // nibbles of E2M1, two neighbours in a byte, and E8M0 exponents
	int4                    // nibbles with offset 8, two neighbours in a byte, and float scales
	coli8                   // of a colibri container: int8, and f32 scales
	coli4                   // the same with nibbles as in int4
	coli3                   // the same with three bits with offset 4, in two planes for each 64
	coli2                   // the same with two bits with offset 2, four neighbours in a byte
)

// A source is a share of bytes for each expert.
type source struct {
	n      int64   // of one expert; 0: there is no such source
	at     place   // of expert 0, where places is nil
	stride int64   // from one expert to the next there
	places []place // of each expert, where they are tensors of their own
}

// A place is a position in a file.
type place struct {
	file int
	off  int64
}

// of is where the bytes of expert e begin.
func (s *source) of(e int64) place {
	if s.places != nil {
		return s.places[e]
	}
	return place{s.at.file, s.at.off + e*s.stride}
}

// sources are where the shares of a tensor's n experts lie, n being 1 for a
// tensor that is taken whole.
func (t *Tensor) sources(n int64) [2]source {
	if t.form != nil {
		return t.form.from
	}
	off, share := t.at(0, n)
	stride := t.Stride
	if stride == 0 {
		stride = share
	}
	return [2]source{{n: share, at: place{t.File, off}, stride: stride}}
}

// shares is the number of shares that a tensor's form makes.
func (t *Tensor) shares() int64 {
	if len(t.Dims) > 2 {
		return t.Dims[len(t.Dims)-1]
	}
	return 1
}

// View finds a tensor by its name, like Tensor, or one that is made of others,
// which the name says how:
//
//	a.*.b     a stack of one matrix for each expert: a.0.b, a.1.b, and on
//	a[1/2]    of a matrix or a stack of them, the second of two halves of the rows
//	a[1%2]    every second row, from row 1 on
//	a[T]      transposed: for a stack of [experts, columns, rows] in a file
//	a[T1%2]   first transposed, then every second row
//
// A tensor that has such a name itself, as in a slab, comes first. The error says
// what is missing. No byte is read.
func (m *Model) View(name string) (Tensor, error) {
	if i, ok := m.byName[name]; ok {
		return m.Tensors[i], nil
	}
	if v, ok := m.views.Load(name); ok {
		return v.(Tensor), nil
	}
	t, err := m.view(name)
	if err == nil {
		m.views.Store(name, t)
	}
	return t, err
}

func (m *Model) view(name string) (Tensor, error) {
	base, sel, selected := strings.Cut(name, "[")
	none := func(format string, args ...any) (Tensor, error) {
		return Tensor{}, &FormatError{File: m.Files[0].Path, Off: -1, Msg: fmt.Sprintf("tensor %q: ", name) + fmt.Sprintf(format, args...)}
	}
	t, ok := m.plain(base)
	if before, after, each := strings.Cut(base, "*"); each && !ok {
		var err error
		if t, err = m.stackOf(before, after); err != nil {
			return none("%v", err)
		}
	} else if !ok {
		return none("the model has none of that name")
	}
	t.Name = name
	if !selected {
		return t, nil
	}
	sel, closed := strings.CutSuffix(sel, "]")
	if !closed {
		return none("no such selection")
	}
	sel, turned := strings.CutPrefix(sel, "T")
	k, n, step := int64(0), int64(1), int64(1)
	if sel != "" {
		at := strings.IndexAny(sel, "/%")
		if at < 0 {
			return none("no such selection")
		}
		var err1, err2 error
		k, err1 = strconv.ParseInt(sel[:at], 10, 16)
		n, err2 = strconv.ParseInt(sel[at+1:], 10, 16)
		if err1 != nil || err2 != nil || k < 0 || n < 1 || k >= n {
			return none("no such selection")
		}
		if sel[at] == '%' {
			step = n
		}
	}
	if len(t.Dims) != 2 && len(t.Dims) != 3 {
		return none("has dims %v; only of a matrix, or a stack of them, are there views", t.Dims)
	}
	if t.stack != nil {
		return none("lies among the experts of layer %d; of the whole there are no views", t.stack.layer)
	}
	t.sum = nil // is of all of it
	f := form{typ: t.Type, from: t.sources(t.shares())}
	if t.form != nil {
		f = *t.form
	} else {
		f.step, f.cols, f.rows, f.all = 1, t.Dims[0], t.Dims[1], t.Dims[1]
	}
	dims := append([]int64(nil), t.Dims...)
	if turned {
		if per, _ := t.Type.Block(); f.weave != unwoven || per != 1 {
			return none("is of %s and cannot be transposed", t.Type)
		}
		f.weave, f.cols, f.rows, f.all = transposed, f.rows, f.cols, f.cols
	}
	if f.rows%n != 0 {
		return none("has %d rows, which are not %d equal shares", f.rows, n)
	}
	f.rows /= n
	rowBytes := int64(f.typ.RowBytes(int(f.cols)))
	f.step, f.first = step, k
	if step == 1 {
		f.first = k * f.rows
	}
	switch {
	case f.weave == unwoven && step == 1: // a contiguous part of each share
		for i := range f.from[0].places {
			if i == 0 {
				f.from[0].places = append([]place(nil), f.from[0].places...)
			}
			f.from[0].places[i].off += f.first * rowBytes
		}
		f.from[0].at.off += f.first * rowBytes
		f.from[0].n, f.all, f.first = f.rows*rowBytes, f.rows, 0
	case f.weave == unwoven:
		f.weave = pick
	}
	dims[0], dims[1] = f.cols, f.rows
	t.Dims, t.form, t.Stride = dims, &f, 0
	t.Bytes = t.shares() * f.rows * rowBytes
	at := f.from[0].of(0)
	t.File, t.Off = at.file, at.off
	if f.weave == unwoven && len(dims) == 2 {
		t.form = nil // its bytes lie together
	}
	return t, nil
}

// plain is a tensor that the model itself has.
func (m *Model) plain(name string) (Tensor, bool) {
	i, ok := m.byName[name]
	if !ok {
		return Tensor{}, false
	}
	return m.Tensors[i], true
}

// stackOf is the stack of the matrices before+"0"+after, before+"1"+after, ...
func (m *Model) stackOf(before, after string) (Tensor, error) {
	name := func(e int) string { return before + strconv.Itoa(e) + after }
	first, ok := m.plain(name(0))
	if !ok {
		return Tensor{}, fmt.Errorf("the model has no %s", name(0))
	}
	if len(first.Dims) != 2 {
		return Tensor{}, fmt.Errorf("%s has dims %v, want a matrix", first.Name, first.Dims)
	}
	f := form{typ: first.Type, step: 1, cols: first.Dims[0], rows: first.Dims[1], all: first.Dims[1], from: first.sources(1)}
	if first.form != nil {
		f = *first.form
	}
	from := f.from
	n := 0
	for ; ; n++ {
		t, ok := m.plain(name(n))
		if !ok {
			break
		}
		if t.Type != first.Type || len(t.Dims) != 2 || t.Dims[0] != first.Dims[0] || t.Dims[1] != first.Dims[1] ||
			(t.form == nil) != (first.form == nil) || t.form != nil && (t.form.weave != f.weave || t.form.scale != f.scale) {
			return Tensor{}, fmt.Errorf("%s of %s has dims %v, but %s of %s %v: the experts of a layer must be alike", t.Name, t.Type, t.Dims, first.Name, first.Type, first.Dims)
		}
		for i, s := range t.sources(1) {
			if s.n > 0 {
				from[i].places = append(from[i].places, s.of(0))
			}
		}
	}
	f.from = from
	first.Dims = append(first.Dims[:2:2], int64(n))
	first.Bytes *= int64(n)
	first.form, first.Stride = &f, 0
	return first, nil
}

// made gives the names of the model's own tensors that a view of that name is
// made of; nil if the name is that of a tensor.
func (m *Model) made(name string) (names []string) {
	if _, ok := m.byName[name]; ok {
		return nil
	}
	base, _, _ := strings.Cut(name, "[")
	if _, ok := m.byName[base]; ok {
		return []string{base}
	}
	before, after, _ := strings.Cut(base, "*")
	for e := 0; ; e++ {
		one := before + strconv.Itoa(e) + after
		if _, ok := m.byName[one]; !ok {
			return names
		}
		names = append(names, one)
	}
}
