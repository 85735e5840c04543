package storage

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"golang.org/x/sys/unix"

	"sluice/internal/offheap"
	"sluice/internal/quant"
)

// weaves are forms of every kind, of matrices [rows, cols], with the bytes of
// their codes and scales.
func weaves(rows, cols int64) (forms []form, codes, scale []int64) {
	add := func(w weave, typ quant.Type, c, s int64, x scales) {
		f := form{weave: w, typ: typ, rows: rows, cols: cols, all: rows, step: 1, scale: x}
		if w == pick {
			f.all, f.step, f.first = 2*rows, 2, 1
		}
		forms, codes, scale = append(forms, f), append(codes, c), append(scale, s)
	}
	by := func(group int64, typ quant.Type) scales {
		return scales{rows: rows, cols: (cols + group - 1) / group, high: 1, wide: group, typ: typ}
	}
	n := rows * cols
	add(pick, quant.BF16, 4*n, 0, scales{})
	add(transposed, quant.BF16, 2*n, 0, scales{})
	add(transposed, quant.F32, 4*n, 0, scales{})
	add(float8, quant.F8_128, n, 4*((rows+127)/128)*((cols+127)/128), scales{rows: (rows + 127) / 128, cols: (cols + 127) / 128, high: 128, wide: 128, typ: quant.F32})
	add(float8, quant.F8_128, n, 2*rows, scales{rows: rows, cols: 1, high: 1, wide: cols, typ: quant.BF16})
	if cols%128 != 0 {
		return forms, codes, scale
	}
	add(fp4, quant.MXFP4, n/2, n/32, scales{})
	add(int4, quant.INT4_32, n/2, n/32*2, by(32, quant.BF16))
	add(int4, quant.Q4_0, n/2, n/64*2, by(64, quant.F16))
	add(int4, quant.INT4_128, n/2, n/128*2, by(128, quant.BF16))
	for _, group := range []int64{32, 64, 128, cols} {
		if cols%group == 0 {
			add(coli8, coliType(coli8, group, cols), n, n/group*4, by(group, quant.F32))
			add(coli4, coliType(coli4, group, cols), n/2, n/group*4, by(group, quant.F32))
		}
	}
	add(coli3, coliType(coli3, 64, cols), n/64*24, n/64*4, by(64, quant.F32))
	add(coli2, coliType(coli2, cols, cols), n/4, rows*4, by(cols, quant.F32))
	return forms, codes, scale
}

// naive is what share makes, element by element.
func (f *form) naive(dst, codes, scale []byte) {
	elems, size := f.typ.Block()
	rowBytes := f.typ.RowBytes(int(f.cols))
	for i := range f.rows {
		row, at := dst[int(i)*rowBytes:][:rowBytes], f.first+i*f.step
		for c := range f.cols {
			block, k := row[int(c)/elems*size:], int(c)%elems
			n := at*f.cols + c // of the element among all
			var code byte
			switch f.weave {
			case pick:
				copy(block, codes[n*int64(size):][:size])
				continue
			case transposed:
				copy(block, codes[(c*f.all+at)*int64(size):][:size])
				continue
			case float8, coli8:
				code = codes[n]
			case coli3:
				g := codes[at*f.weave.coliBytes(f.cols)+c/64*24:]
				code = g[c%64/4]>>(c%4*2)&3 + g[16+c%64/8]>>(c%8)&1*4 + 4
			case coli2:
				code = codes[at*f.weave.coliBytes(f.cols)+c/4]>>(c%4*2)&3 + 6
			default:
				code = codes[n/2] >> (n % 2 * 4) & 15
			}
			head := 4
			switch f.weave {
			case fp4:
				head = 1
				block[0] = scale[n/32]
			case int4:
				head = 2
				copy(block, scale[(at*f.scale.cols+c/f.scale.wide)*2:][:2])
			default:
				binary.LittleEndian.PutUint32(block, math.Float32bits(f.scale.at(scale, at, c)))
			}
			if f.weave == float8 || f.weave == coli8 {
				block[head+k] = code
			} else {
				block[head+k/32*16+k%16] |= code << (k % 32 / 16 * 4)
			}
		}
	}
}

// What is made is what each element says, whatever the sizes, and whichever rows
// are taken.
func TestWeave(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 12))
	for _, shape := range [][2]int64{{2, 128}, {34, 384}, {64, 256}, {70, 640}, {1, 1}, {33, 31}, {32, 32}, {65, 100}, {129, 130}} {
		forms, codes, scale := weaves(shape[0], shape[1])
		for i, f := range forms {
			c, s := make([]byte, codes[i]), make([]byte, scale[i])
			for k := range c {
				c[k] = byte(rng.Uint32())
			}
			for k := range s {
				s[k] = byte(rng.Uint32()) & 0x3f // no NaN
			}
			for _, rows := range [][3]int64{{f.rows, f.first, f.step}, {f.rows / 2, 1, 2}, {f.rows - f.rows/3, f.rows / 3, 1}} {
				f := f
				f.rows, f.first, f.step = rows[0], rows[1], rows[2]
				n := int(f.rows) * f.typ.RowBytes(int(f.cols))
				got, want := bytes.Repeat([]byte{0x5a}, n), make([]byte, n)
				f.share(got, c, s)
				f.naive(want, c, s)
				if !bytes.Equal(got, want) {
					t.Fatalf("%+v of %v: other bytes", f, shape)
				}
			}
		}
	}
}

// Whatever goes wrong with one read of a dense tensor that is made of others, its
// bytes are those of a model that is read without faults, or Load says why not.
func TestLoadMadeFaults(t *testing.T) {
	const large = 1 << 30
	rng := rand.New(rand.NewPCG(7, 9))
	all := wovens(rng, 1, "")
	var ts []st
	for _, w := range all {
		ts = append(ts, w.files...)
	}
	ts = append(ts, bf16s(rng, "plain", 9, 33))
	m := directory(t, `{}`, ts...)
	for _, mode := range []Mode{Slab, Pread, MMap} {
		x := &faults{}
		r, err := m.Source([]ExpertLayer{{Layer: 0, Experts: 9, Parts: []string{"plain"}}}, SourceOptions{Mode: mode, dev: device{result: x.spoil}})
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		for _, w := range all {
			tensor, ok := m.Tensor(w.name)
			if !ok {
				t.Fatalf("no %s", w.name)
			}
			want := tensorBytes(t, m, w.name)
			arena, err := offheap.Alloc(r.ResidentBytes([]Tensor{tensor}))
			if err != nil {
				t.Fatal(err)
			}
			for _, source := range tensor.form.from {
				if source.n == 0 {
					continue
				}
				at := source.of(0)
				for _, c := range []struct {
					script []fault
					fails  bool
				}{
					{[]fault{{err: unix.EIO}}, false},
					{[]fault{{n: 1}}, false},
					{[]fault{{n: 0}, {n: large}}, false},
					{[]fault{{err: unix.EINTR}, {n: large}}, false},
					{[]fault{{err: unix.EIO}, {err: unix.EIO}}, true},
					{nil, false}, // as good as ever
				} {
					*x = faults{file: m.Files[at.file].Path, to: 1 << 40, script: c.script}
					data, _, err := r.Load(context.Background(), arena, []Tensor{tensor})
					var bad *ReadError
					switch {
					case len(x.script) > 0 && mode != MMap:
						t.Fatalf("%v: %s: no read met %v", mode, w.name, c.script)
					case c.fails && len(x.script) == 0:
						if !errors.As(err, &bad) || !errors.Is(err, unix.EIO) {
							t.Errorf("%v: %s: %v: %v", mode, w.name, c.script, err)
						}
					case err != nil:
						t.Errorf("%v: %s: %v: %v", mode, w.name, c.script, err)
					case !bytes.Equal(data[0], want):
						t.Errorf("%v: %s: %v: other bytes", mode, w.name, c.script)
					}
				}
			}
			offheap.Free(arena)
		}
	}
}

// BenchmarkWeave makes experts; MB/s are of what is made.
func BenchmarkWeave(b *testing.B) {
	const rows, cols = 1024, 2048
	forms, codes, scale := weaves(rows, cols)
	for i, f := range forms {
		b.Run(fmt.Sprintf("weave=%d/type=%v/scales=%d", f.weave, f.typ, f.scale.cols), func(b *testing.B) {
			c, s, dst := make([]byte, codes[i]), make([]byte, scale[i]), make([]byte, rows*f.typ.RowBytes(cols))
			b.SetBytes(int64(len(dst)))
			for b.Loop() {
				f.share(dst, c, s)
			}
		})
	}
}
