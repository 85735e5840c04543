package cpu

import (
	"fmt"
	"sync/atomic"

	"sluice/backends"
)

// expertStep is a group of experts, from x to their outputs, as one step. Its
// items come in three runs, each in the order of the jobs: rows of gate and up,
// stretches of hidden = activation of gate and up in the form that down needs, rows of down. An
// item waits for those of its own job in the run before. They are claimed in
// order, so they are done or being done, and a worker has something else
// to do unless the step is at its end.
type expertStep struct {
	first, last products // gate and up of each job; down of each job
	jobs        []expertJob
	stretches   int // of all jobs
	gate, up    []float32
	hidden      inputs
	refused     refusal
}

// An expertJob is the part of one job that has rows, and what is left to do of it.
type expertJob struct {
	lo, hi int          // its floats of gate, up and hidden
	first  int          // its first stretch among those of all
	rows   atomic.Int32 // items of gate and up
	hidden atomic.Int32 // stretches
	form   form
	act    backends.Activation
}

// stretch is the floats of an item between gate and down: whole blocks, some
// microseconds.
const stretch = 4096

func (s *expertStep) run(w *worker, lo, hi int) {
	for ; lo < hi; lo++ {
		switch i := lo - s.first.items; {
		case i < 0:
			p := s.first.find(lo)
			s.first.one(w, p, lo)
			s.jobs[p/2].rows.Add(-1)
		case i < s.stretches:
			n := len(s.jobs) - 1
			for s.jobs[n].first > i {
				n--
			}
			j := &s.jobs[n]
			if !w.wait(&j.rows) {
				return
			}
			at := j.lo + (i-j.first)*stretch
			s.fill(w, j, at, min(at+stretch, j.hi))
			j.hidden.Add(-1)
		default:
			i -= s.stretches
			p := s.last.find(i)
			if !w.wait(&s.jobs[p].hidden) {
				return
			}
			s.last.one(w, p, i)
		}
	}
}

// fill makes floats lo..hi of hidden, in the form of their job, from gate and
// up, which it spoils.
func (s *expertStep) fill(w *worker, j *expertJob, lo, hi int) {
	g, u := s.gate[lo:hi], s.up[lo:hi]
	if j.act == backends.ClampedSwiGLU {
		clampGate(g, u)
	}
	w.k.gate(g, u)
	w.saw(s.hidden.fill(w.k, j.form, g, lo, hi))
}

// clampGate makes SiLU(g)*u the clamped SwiGLU of what g and u were:
//
//	g = 1.702*min(g, 7); u = (max(-7, min(u, 7)) + 1)*(1/1.702)
func clampGate(g, u []float32) {
	const alpha, limit, inverse = float32(1.702), 7, float32(1 / 1.702)
	u = u[:len(g)]
	for i, v := range g {
		g[i] = float32(alpha * min(v, limit))
		u[i] = float32((max(-limit, min(u[i], limit)) + 1) * inverse)
	}
}

// reset forgets the last group.
func (s *expertStep) reset(rows, ff int) {
	s.first.reset()
	s.last.reset()
	s.jobs, s.stretches = s.jobs[:0], 0
	s.hidden.reset(rows, ff)
	s.refused.reset()
	s.gate, s.up = grown(s.gate, rows*ff), grown(s.up, rows*ff)
}

// add appends job i, whose rows of gate, up and hidden start at row base.
func (s *expertStep) add(k *kernels, i int, j *backends.Job, in *inputs, perRow int32, base int, out *vec) {
	e, n, ff := &j.Expert, len(j.Rows), j.Expert.Gate.Rows
	f := formOf(e.Down.Type.ActBlock())
	s.hidden.make(f, len(s.gate))
	before := s.first.items
	p := product{m: e.Gate, bias: e.GateBias, in: in, n: n, inRow: j.Rows, inDiv: perRow, y: s.gate[base*ff:], stride: ff, job: i}
	if j.Fresh {
		p.refuse = &s.refused
	}
	s.first.add(k, p)
	p.m, p.bias, p.y = e.Up, e.UpBias, s.up[base*ff:]
	s.first.add(k, p)
	s.last.add(k, product{m: e.Down, bias: e.DownBias, in: &s.hidden, n: n, inBase: base, y: out.data, yRow: j.Rows, stride: out.dim, job: i, refuse: p.refuse})

	if len(s.jobs) == cap(s.jobs) {
		s.jobs = append(s.jobs, expertJob{})
	} else {
		s.jobs = s.jobs[:len(s.jobs)+1]
	}
	job := &s.jobs[len(s.jobs)-1]
	job.lo, job.hi, job.first, job.form, job.act = base*ff, (base+n)*ff, s.stretches, f, e.Act
	count := (n*ff + stretch - 1) / stretch
	s.stretches += count
	job.rows.Store(int32(s.first.items - before))
	job.hidden.Store(int32(count))
}

// ExpertGroup computes out row r = down(activation(gate(x), up(x))), x being row r/k
// of x, for each job and each r in its rows; other rows of out stay. It returns
// the first fresh job whose weights are refused, or -1. All
// experts of a call have one shape; their types may differ. out has its length
// already, and is not x.
//
// The rows of a job are one batch: each of its weight blocks is unpacked once
// for every tile of them.
func (b *Backend) ExpertGroup(out backends.Vec, k int, jobs []backends.Job, x backends.Vec) (bad int) {
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
		if !fits(e.GateBias, ff) || !fits(e.UpBias, ff) || !fits(e.DownBias, to.dim) || e.Act > backends.ClampedSwiGLU {
			panic(fmt.Sprintf("backends/cpu: ExpertGroup: biases of %d, %d and %d for %d x %d, activation %d", len(e.GateBias), len(e.UpBias), len(e.DownBias), ff, to.dim, e.Act))
		}
		for _, r := range jobs[i].Rows {
			if r < 0 || int(r) >= to.n || int(r)/k >= from.n {
				panic(fmt.Sprintf("backends/cpu: ExpertGroup: row %d with k %d, out has %d rows, x %d", r, k, to.n, from.n))
			}
		}
		rows += len(jobs[i].Rows)
	}
	if rows == 0 {
		return -1
	}
	b.in.reset(from.n, from.dim)
	s := &b.experts
	s.reset(rows, ff)
	base := 0
	for i := range jobs {
		j := &jobs[i]
		if len(j.Rows) == 0 {
			continue
		}
		b.prepare(&b.in, formOf(j.Expert.Gate.Type.ActBlock()), from.rows())
		b.prepare(&b.in, formOf(j.Expert.Up.Type.ActBlock()), from.rows())
		s.add(&b.pool.kernels, i, j, &b.in, int32(k), base, to)
		base += len(j.Rows)
	}
	b.do("ExpertGroup", s, s.first.items+s.stretches+s.last.items, 1)
	s.first.drop()
	s.last.drop()
	return s.refused.first()
}

// fits says whether a bias is none, or one of n.
func fits(bias []float32, n int) bool { return bias == nil || len(bias) == n }
