package moe

import (
	"fmt"
	"slices"

	"sluice/backends"
	"sluice/internal/offheap"
	"sluice/internal/quant"
	"sluice/tiers"
)

// warm runs each kind of step once over zeros, at the largest sizes that it will
// meet, so that what a backend allocates at first use is there before the first
// token and the announced resident set is true. The matrices are short in the
// dim that no scratch depends on, so it takes milliseconds. It reads no expert.
func (s *state) warm(layers layers, spec *Spec, resident Weights, cfg Config) error {
	n := min(cfg.Chunk, cfg.Ctx)
	zeros, err := offheap.Alloc(warmBytes(spec, cfg))
	if err != nil {
		return fmt.Errorf("moe: no memory to try the steps: %w", err)
	}
	defer offheap.Free(zeros)

	// Rows: a few of each resident matrix, by type and width of its input.
	type input struct {
		t    quant.Type
		cols int
	}
	done := make(map[input]bool)
	y, err := s.be.NewVec(n, warmRows)
	if err != nil {
		return err
	}
	s.h.SetLen(n)
	for _, v := range s.vec {
		v.SetLen(n)
	}
	inputs := append([]backends.Vec{s.h}, s.vec...)
	if cfg.Drafts > 0 {
		s.drafts.both.SetLen(n)
		inputs = append(inputs, s.drafts.both)
	}
	for _, t := range slices.Concat(spec.Dense, spec.nextnDense(cfg)) {
		in := input{t.Type, int(t.Dims[0])}
		if len(t.Dims) != 2 || t.Dims[1] < warmRows || done[in] {
			continue
		}
		done[in] = true
		for _, x := range inputs {
			if x.Dim() == in.cols {
				w := backends.Matrix{Type: in.t, Rows: warmRows, Cols: in.cols, Data: resident(t)[:warmRows*in.t.RowBytes(in.cols)]}
				s.matMul(y, backends.Linear{Matrix: w}, x)
				break
			}
		}
	}
	s.be.RMSNorm(s.h, s.h, make([]float32, spec.Hidden), 1)

	// Attention over the whole context.
	layers.warm(s, cfg.Ctx-1)

	// Feed-forwards: wide inputs with a narrow middle, then the other way round.
	narrow, err := s.be.NewVec(n, warmDim)
	if err != nil {
		return err
	}
	narrow.SetLen(n)
	out, err := s.be.NewVec(n*max(1, spec.TopK), 1)
	if err != nil {
		return err
	}
	rows := s.rows
	if spec.TopK == 0 {
		rows = s.everyRow
	}
	out.SetLen(len(rows))
	for i := range rows {
		rows[i] = int32(i)
	}
	try := func(types [3]quant.Type, k, rowCount, ff int) {
		matrix := func(t quant.Type, rows, cols int) backends.Matrix {
			return backends.Matrix{Type: t, Rows: rows, Cols: cols, Data: zeros[:rows*t.RowBytes(cols)]}
		}
		for _, c := range []struct {
			x          backends.Vec
			dim, width int
		}{{s.h, spec.Hidden, warmDim}, {narrow, warmDim, ff}} {
			s.job[0] = backends.Job{Rows: rows[:rowCount], Expert: backends.Expert{
				Gate: matrix(types[0], c.width, c.dim), Up: matrix(types[1], c.width, c.dim), Down: matrix(types[2], 1, c.width)}}
			s.be.ExpertGroup(out, k, s.job[:1], c.x)
		}
	}
	for _, f := range feedForwards(spec, cfg) {
		if f.routed {
			try(f.types, spec.TopK, min(s.groupOf(n)*n, n*spec.TopK), f.ff)
		} else {
			try(f.types, 1, n, f.ff)
		}
	}
	s.job[0] = backends.Job{}
	return s.be.Read(make([]float32, n*warmRows), y)
}

// warmRows and warmDim are the short dims of warm's matrices: rows enough for
// a kernel that takes several at once, columns of a whole block of every type.
const (
	warmRows = 16
	warmDim  = 256
)

// warmBytes is the size of the largest of warm's own matrices.
func warmBytes(spec *Spec, cfg Config) int64 {
	most := 0
	for _, f := range feedForwards(spec, cfg) {
		for _, t := range f.types {
			most = max(most, warmDim*t.RowBytes(spec.Hidden), f.ff*t.RowBytes(warmDim), t.RowBytes(f.ff))
		}
	}
	return int64(max(most, 1))
}

// A feedForward is a kind of feed-forward that a model has.
type feedForward struct {
	types  [3]quant.Type // gate, up, down
	ff     int
	routed bool
}

// nextnDense is what drafting layers have resident, if they are to be run.
func (s *Spec) nextnDense(cfg Config) []tiers.Tensor {
	if cfg.Drafts == 0 {
		return nil
	}
	return s.NextnDense
}

// feedForwards lists the kinds of a model, each once.
func feedForwards(spec *Spec, cfg Config) []feedForward {
	var kinds []feedForward
	seen := make(map[feedForward]bool)
	add := func(f feedForward) {
		if !seen[f] {
			seen[f] = true
			kinds = append(kinds, f)
		}
	}
	roles, layers := spec.Roles, spec.Layers
	if cfg.Drafts > 0 {
		roles, layers = slices.Concat(roles, spec.NextnRoles), layers+spec.Nextn
	}
	for _, r := range roles {
		var types [3]quant.Type
		for i := range types {
			t, _ := spec.file.Tensor(r.Parts[i])
			types[i] = t.Type
		}
		add(feedForward{types, spec.ExpertFF, true})
	}
	names := newLoader(spec, nil)
	typeOf := func(name string) quant.Type {
		t, _ := names.find(name)
		return t.Type
	}
	for l := range layers {
		for _, dense := range [...]struct {
			suffix string
			ff     int
		}{{"", spec.FF}, {"_shexp", spec.SharedFF}} {
			name := func(part string) string { return fmt.Sprintf("blk.%d.ffn_%s%s.weight", l, part, dense.suffix) }
			gate, up := name("gate"), name("up")
			if !names.has(gate) && names.has(up+"[0/2]") { // one matrix
				gate, up = up+"[0/2]", up+"[1/2]"
			}
			if names.has(gate) && dense.ff > 0 { // Describe has seen the other two
				add(feedForward{[3]quant.Type{typeOf(gate), typeOf(up), typeOf(name("down"))}, dense.ff, false})
			}
		}
	}
	return kinds
}
