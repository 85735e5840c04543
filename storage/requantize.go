package storage

import (
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"maps"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"

	"sluice/internal/quant"
)

// A requantized slab has some tensors in another type than its model. Its
// identity ends with a record that no file has, so that it never passes for the
// model, and its metadata says which types became which.
const (
	requantizedKey  = "sluice.requantized"
	requantizedTime = math.MinInt64 // of the record
)

// Requantized says of a slab which types of its model became which, "" if none
// did: then it is lossless.
func (m *Model) Requantized() string {
	if m.slab == nil || !m.slab.source.requantized() {
		return ""
	}
	words, _ := m.Meta.Value(requantizedKey).(string)
	return cmp.Or(words, "to types that its header does not name")
}

func (id Identity) requantized() bool {
	n := len(id.Files)
	return n > 0 && id.Files[n-1].Time == requantizedTime
}

// identityOf is the identity of the model's slab with tensors of those types.
func (m *Model) identityOf(types map[string]quant.Type) (Identity, error) {
	id, err := m.Identity()
	if err != nil || len(types) == 0 {
		return id, err
	}
	h := sha256.New()
	for _, name := range slices.Sorted(maps.Keys(types)) {
		fmt.Fprintf(h, "%q %v\n", name, types[name])
	}
	x := FileIdentity{Size: int64(len(types)), Time: requantizedTime}
	h.Sum(x.Header[:0])
	id.Files = append(id.Files, x)
	return id, nil
}

// requantize gives the tensors of a slab that is laid out the types they are to
// have, and says in words which became which.
func (s *slab) requantize(types map[string]quant.Type) (words string, err error) {
	type change struct{ from, to quant.Type }
	n := map[change]int{}
	found := 0
	for k := range s.tensors {
		t := &s.tensors[k]
		to, ok := types[t.Name]
		if !ok {
			continue
		}
		found++
		cols := t.Dims[0]
		switch {
		case t.Type.Kind() != quant.Float || t.Type == to:
			return "", fmt.Errorf("tensor %.60q is of %v: only weights of F32, F16, BF16 and F8_128 are requantized", t.Name, t.Type)
		case len(t.Dims) < 2:
			return "", fmt.Errorf("tensor %.60q has dims %v: only matrices are requantized", t.Name, t.Dims)
		case !quant.CanEncode(to):
			return "", fmt.Errorf("tensor %.60q: there is no encoder for %v", t.Name, to)
		case cols > math.MaxInt32 || !to.Fits(int(cols)):
			block, _ := to.Block()
			return "", fmt.Errorf("tensor %.60q has %d columns, which are no multiple of the %d of a block of %v", t.Name, cols, block, to)
		}
		n[change{t.Type, to}]++
		t.Bytes = t.Bytes / int64(t.Type.RowBytes(int(cols))) * int64(to.RowBytes(int(cols)))
		t.Type = to
	}
	if found != len(types) {
		return "", fmt.Errorf("%d tensors that are to be requantized are not in the model, or are views", len(types)-found)
	}
	var each []string
	for c, n := range n {
		each = append(each, fmt.Sprintf("%d tensors of %v to %v", n, c.from, c.to))
	}
	slices.Sort(each)
	return strings.Join(each, ", "), nil
}

// An encoder makes rows of one type of rows of another, several at once on all
// cores.
type encoder struct {
	raw, out []byte
	floats   [][]float32 // a row for each core
	failed   []error
}

// requantizeBytes bounds the rows that are encoded at once, as they are in the
// model.
const requantizeBytes = 8 << 20

// requantize writes the share of expert e of n of a tensor of the model as type
// to. Some rows are in memory at once; a share that is made of others is made whole
// first.
func (p *packer) requantize(ctx context.Context, t Tensor, to quant.Type, e, n int64, write func([]byte) error) error {
	cols := int(t.Dims[0])
	perRow, perOut := int64(t.Type.RowBytes(cols)), int64(to.RowBytes(cols))
	rows := t.Bytes / n / perRow
	read := func(first, k int64) ([]byte, error) {
		off, _ := t.at(e, n)
		x := t
		if t.form != nil { // whole rows one behind the other
			at := t.form.from[0].of(e)
			off, x = at.off, Tensor{Name: t.Name, File: at.file}
		}
		b := room(&p.enc.raw, k*perRow)
		return b, p.m.read(b, x, off+first*perRow)
	}
	if t.form != nil && t.form.weave != unwoven {
		made := room(&p.made, t.Bytes/n)
		if err := p.m.readShare(made, t, e); err != nil {
			return err
		}
		read = func(first, k int64) ([]byte, error) { return made[first*perRow:][:k*perRow], nil }
	}
	atOnce := max(1, requantizeBytes/perRow)
	for first := int64(0); first < rows; first += atOnce {
		if err := ctx.Err(); err != nil {
			return err
		}
		k := min(atOnce, rows-first)
		raw, err := read(first, k)
		if err != nil {
			return err
		}
		out := room(&p.enc.out, k*perOut)
		if row, err := p.enc.encode(out, to, raw, t.Type, k, cols); err != nil {
			who := ""
			if n > 1 {
				who = fmt.Sprintf(" expert %d", e)
			}
			return fmt.Errorf("requantize tensor %.60q%s, row %d: %w", t.Name, who, first+row, err)
		}
		if err := write(out); err != nil {
			return err
		}
	}
	return nil
}

// encode makes out of raw, rows of cols each; row is where it failed.
func (x *encoder) encode(out []byte, to quant.Type, raw []byte, from quant.Type, rows int64, cols int) (row int64, err error) {
	cores := min(int64(runtime.GOMAXPROCS(0)), rows)
	for int64(len(x.floats)) < cores {
		x.floats, x.failed = append(x.floats, nil), append(x.failed, nil)
	}
	at := make([]int64, cores)
	perRaw, perOut := int64(from.RowBytes(cols)), int64(to.RowBytes(cols))
	var all sync.WaitGroup
	for c := range cores {
		if cap(x.floats[c]) < cols {
			x.floats[c] = make([]float32, cols)
		}
		all.Go(func() {
			f := x.floats[c][:cols]
			x.failed[c] = nil
			for at[c] = c * rows / cores; at[c] < (c+1)*rows/cores; at[c]++ {
				quant.Dequantize(from, f, raw[at[c]*perRaw:][:perRaw])
				if x.failed[c] = quant.Encode(to, out[at[c]*perOut:][:perOut], f); x.failed[c] != nil {
					return
				}
			}
		})
	}
	all.Wait()
	for c, err := range x.failed[:cores] {
		if err != nil {
			return at[c], err
		}
	}
	return 0, nil
}
