package cpu

import (
	"fmt"

	"sluice/backends"
	"sluice/internal/arith"
)

// gatedStep is gate = SiLU(gate)*up; an item is gatedRun floats.
type gatedStep struct{ gate, up []float32 }

const gatedRun = 256

func (s *gatedStep) run(_ *worker, lo, hi int) {
	lo, hi = lo*gatedRun, min(hi*gatedRun, len(s.gate))
	u := s.up[lo:hi]
	for i, g := range s.gate[lo:hi] {
		s.gate[lo+i] = float32(arith.SiLU(g) * u[i])
	}
}

// ExpertGroup computes out row r = down(SiLU(gate(x)) * up(x)), x being row r/k
// of x, for each job and each r in its rows; other rows of out stay. All
// experts of a call have one shape; their types may differ. out has its length
// already, and is not x.
//
// The rows of a job are one batch: each of its weight blocks is unpacked once
// for every tile of them.
func (b *Backend) ExpertGroup(out backends.Vec, k int, jobs []backends.Job, x backends.Vec) {
	to, from := out.(*vec), x.(*vec)
	if k < 1 || to == from {
		panic(fmt.Sprintf("backends/cpu: ExpertGroup: k is %d, out and x must be two vectors", k))
	}
	rows, ff := 0, 0
	for i := range jobs {
		e := &jobs[i].Expert
		if i == 0 {
			ff = e.Gate.Rows
		}
		checkMatrix("ExpertGroup", &e.Gate)
		checkMatrix("ExpertGroup", &e.Up)
		checkMatrix("ExpertGroup", &e.Down)
		if e.Gate.Cols != from.dim || e.Up.Cols != from.dim || e.Gate.Rows != ff || e.Up.Rows != ff || e.Down.Cols != ff || e.Down.Rows != to.dim {
			panic(fmt.Sprintf("backends/cpu: ExpertGroup: x of %d, gate %dx%d, up %dx%d, down %dx%d, out of %d, ff %d", from.dim,
				e.Gate.Rows, e.Gate.Cols, e.Up.Rows, e.Up.Cols, e.Down.Rows, e.Down.Cols, to.dim, ff))
		}
		for _, r := range jobs[i].Rows {
			if r < 0 || int(r) >= to.n || int(r)/k >= from.n {
				panic(fmt.Sprintf("backends/cpu: ExpertGroup: row %d with k %d, out has %d rows, x %d", r, k, to.n, from.n))
			}
		}
		rows += len(jobs[i].Rows)
	}
	if rows == 0 {
		return
	}
	b.in.reset(from.n, from.dim)
	b.hidden.reset(rows, ff)
	b.gate, b.up = grown(b.gate, rows*ff), grown(b.up, rows*ff)

	// gate and up, one after the other's rows in b.gate and b.up.
	b.products.reset()
	base := 0
	for i := range jobs {
		j := &jobs[i]
		if len(j.Rows) == 0 {
			continue
		}
		b.prepare(&b.in, formOf(j.Expert.Gate.Type.ActBlock()), from.rows())
		b.prepare(&b.in, formOf(j.Expert.Up.Type.ActBlock()), from.rows())
		p := product{m: j.Expert.Gate, in: &b.in, n: len(j.Rows), inRow: j.Rows, inDiv: int32(k), y: b.gate[base*ff:], stride: ff}
		b.products.add(&b.pool.kernels, p)
		p.m, p.y = j.Expert.Up, b.up[base*ff:]
		b.products.add(&b.pool.kernels, p)
		base += len(j.Rows)
	}
	b.do("ExpertGroup", &b.products, b.products.items, 1)

	b.gated = gatedStep{b.gate, b.up}
	b.do("ExpertGroup", &b.gated, (rows*ff+gatedRun-1)/gatedRun, 2)

	b.products.reset()
	base = 0
	for i := range jobs {
		j := &jobs[i]
		if len(j.Rows) == 0 {
			continue
		}
		b.prepare(&b.hidden, formOf(j.Expert.Down.Type.ActBlock()), b.gate)
		b.products.add(&b.pool.kernels, product{m: j.Expert.Down, in: &b.hidden, n: len(j.Rows), inBase: base, y: to.data, yRow: j.Rows, stride: to.dim})
		base += len(j.Rows)
	}
	b.do("ExpertGroup", &b.products, b.products.items, 1)
	b.products.drop()
}
