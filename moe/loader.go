package moe

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"unsafe"

	"sluice/backends"
	"sluice/internal/arith"
	"sluice/internal/quant"
	"sluice/tiers"
)

// A loader hands a family page its numbers and tensors, each checked against
// what the page expects. With no weights it only notes which tensors the page
// wants: so one page says both what a model is and what must be resident.
//
// The first thing wrong is kept in err; what the getters return after it means
// nothing. A page reads all it needs and the caller asks for err once.
type loader struct {
	file    *tiers.Model
	arch    string
	fam     family
	hf      bool           // the names and values are those of Hugging Face, not of a converter to GGUF
	shared  naming         // of hf
	prefix  string         // of hf: what most names begin with
	weights Weights        // nil: describe only
	dense   []tiers.Tensor // asked for so far
	asked   []asked        // of dense: how
	err     error

	floatBytes int64 // that floats makes of tensors of other types
}

// Weights gives the bytes of a tensor that is resident; they stay where they
// are for as long as the model is used.
type Weights func(t tiers.Tensor) []byte

func newLoader(spec *Spec, weights Weights) *loader {
	l := &loader{file: spec.file, arch: spec.Arch, fam: spec.fam, weights: weights}
	if _, l.hf = modelType(l.file.Meta); l.hf {
		l.shared = hfNaming()
		l.findPrefix()
	}
	return l
}

func (l *loader) fail(format string, args ...any) {
	if l.err == nil {
		l.err = fmt.Errorf("moe: %s: %w", l.arch, fmt.Errorf(format, args...))
	}
}

// uint reads a count from the metadata of the architecture, at most limit. A
// count for each layer is taken if all are the same.
func (l *loader) uint(key string, limit int) (int, bool) {
	if _, array := l.file.Meta.Len(l.key(key)); array {
		return l.same(key, limit)
	}
	v, ok := l.file.Meta.Uint(l.key(key))
	if !ok && l.hf {
		v, ok = l.derived(key)
	}
	if err := l.file.Meta.Err(); err != nil && l.err == nil {
		l.err = err
	}
	if ok && v > uint64(limit) {
		l.fail("%s is %d, more than the %d that this version takes", l.key(key), v, limit)
		return 0, false
	}
	return int(v), ok
}

// same reads a count that is written once for each layer.
func (l *loader) same(key string, limit int) (int, bool) {
	list, _ := l.file.Meta.Ints(l.key(key))
	if err := l.file.Meta.Err(); err != nil && l.err == nil {
		l.err = err
	}
	for _, v := range list {
		if v != list[0] {
			l.fail("%s differs among the layers, as in an array of %d and %d: this family has one for all", l.key(key), list[0], v)
			return 0, false
		}
	}
	if len(list) > 0 && (list[0] < 0 || list[0] > int64(limit)) {
		l.fail("%s is an array of %d, want 0 to %d", l.key(key), list[0], limit)
		return 0, false
	}
	if len(list) == 0 {
		return 0, false
	}
	return int(list[0]), true
}

// need is uint for a key that the family always has, at least 1.
func (l *loader) need(key string, limit int) int {
	v, ok := l.uint(key, limit)
	if !ok || v < 1 {
		l.fail("the file's metadata lacks %s, or it is 0: the file is incomplete", l.key(key))
		return 1
	}
	return v
}

// or is uint with the value that an absent key stands for.
func (l *loader) or(key string, absent, limit int) int {
	if v, ok := l.uint(key, limit); ok {
		return v
	}
	return absent
}

// float reads a number of the architecture, which must be finite.
func (l *loader) float(key string, absent float64) float64 {
	v, ok := l.file.Meta.Float(l.key(key))
	if err := l.file.Meta.Err(); err != nil && l.err == nil {
		l.err = err
	}
	if !ok {
		return absent
	}
	if math.IsNaN(v) || math.IsInf(v, 0) {
		l.fail("%s is %v", l.key(key), v)
	}
	return v
}

// positive is float for a number that must be above 0, at most limit.
func (l *loader) positive(key string, absent, limit float64) float64 {
	v := l.float(key, absent)
	if !(v > 0 && v <= limit) {
		l.fail("%s is %v, want above 0 and at most %v", l.key(key), v, limit)
		return 1
	}
	return v
}

// epsilon is what RMSNorm adds to a mean of squares. Every family has its own,
// so there is no default.
func (l *loader) epsilon() float32 {
	v := l.float("attention.layer_norm_rms_epsilon", 0)
	if !(v >= 0x1p-100 && v < 1) { // the range of rsqrt
		l.fail("%s is %v or missing, want above 0 and below 1", l.key("attention.layer_norm_rms_epsilon"), v)
	}
	return float32(v)
}

// ropeBase is the base of the rotations' angles.
func (l *loader) ropeBase() float64 { return l.positive("rope.freq_base", 10000, 1e15) }

// bool reads a switch of the architecture.
func (l *loader) bool(key string, absent bool) bool {
	v, ok := l.file.Meta.Bool(l.key(key))
	if err := l.file.Meta.Err(); err != nil && l.err == nil {
		l.err = err
	}
	if !ok {
		return absent
	}
	return v
}

// text reads a word of the architecture.
func (l *loader) text(key string) (string, bool) {
	v, ok := l.file.Meta.String(l.key(key))
	if l.hf && key == "rope.scaling.type" && v == "default" {
		v = "none"
	}
	if err := l.file.Meta.Err(); err != nil && l.err == nil {
		l.err = err
	}
	return v, ok
}

func (l *loader) has(name string) bool { _, ok := l.find(name); return ok }

// hasPlain says whether the file itself has a tensor of that name.
func (l *loader) hasPlain(name string) bool {
	base, _, _ := strings.Cut(name, "[")
	_, ok := l.file.Tensor(base)
	return ok
}

// find finds a tensor by the name that GGUF has for it.
func (l *loader) find(name string) (tiers.Tensor, bool) {
	for _, c := range l.candidates(name) {
		if t, ok := l.file.Tensor(c); ok {
			return t, true
		}
	}
	return tiers.Tensor{}, false
}

// tensor finds a tensor of the given dims, innermost first, and takes it into
// the dense set.
func (l *loader) tensor(name string, dims ...int) (tiers.Tensor, []byte) {
	t, ok := l.shaped(name, dims...)
	if !ok {
		return t, nil
	}
	l.dense, l.asked = append(l.dense, t), append(l.asked, asked{name: name})
	if l.weights == nil {
		return t, nil
	}
	data := l.weights(t)
	if err := quant.Check(t.Type, data); err != nil {
		l.fail("tensor %s: %w", name, err)
	}
	return t, data
}

// shaped finds a tensor of weights and checks its dims.
func (l *loader) shaped(name string, dims ...int) (tiers.Tensor, bool) {
	t, ok := l.find(name)
	if !ok {
		for _, c := range l.candidates(name) { // of a stack, the others may be there
			second, first := strings.Replace(c, "*", "1", 1), strings.Replace(c, "*", "0", 1)
			if first != c && l.hasPlain(first) { // all are there, or the first: what is wrong with them?
				if _, err := l.file.View(c); err != nil {
					l.fail("%w", err)
					return t, false
				}
			}
			if first != c && l.hasPlain(second) {
				l.fail("expert 0 of %d is missing: the file has no tensor %s; download the model again", dims[len(dims)-1], first)
				return t, false
			}
		}
		l.missing(name)
		return t, false
	}
	name = t.Name
	same := len(t.Dims) >= len(dims)
	for i, d := range t.Dims {
		want := 1 // a vector may be written with dims of 1 behind it
		if i < len(dims) {
			want = dims[i]
		}
		same = same && d == int64(want)
	}
	if !same {
		if lost := missingExpert(t, dims[len(dims)-1]); lost != "" {
			l.fail("expert %d of %d is missing: the file has no tensor %s; download the model again", t.Dims[len(t.Dims)-1], dims[len(dims)-1], lost)
			return t, false
		}
		if last := len(dims) - 1; last == 2 && len(t.Dims) == 3 && t.Dims[last] < int64(dims[last]) && strings.Contains(name, "_exps") {
			l.fail("tensor %s has dims %v, want %v: experts %d to %d are missing; download the model again", name, t.Dims, dims, t.Dims[last], dims[last]-1)
			return t, false
		}
		l.fail("tensor %s has dims %v, want %v: its metadata are of another model, or it is; download the model again", name, t.Dims, dims)
		return t, false
	}
	if t.Type.Kind() == quant.Data {
		l.fail("tensor %s is of %s, which is no type of weights", name, t.Type)
		return t, false
	}
	return t, true
}

// missing fails for a tensor that the file does not have.
func (l *loader) missing(name string) {
	l.fail("the file has no tensor %s: it is incomplete or another variant of the architecture", strings.Join(l.candidates(name), ", or "))
}

// matrix is a resident weight [rows, cols].
func (l *loader) matrix(name string, rows, cols int) backends.Matrix {
	t, data := l.tensor(name, cols, rows)
	if t.Name != "" && l.err == nil {
		l.asked[len(l.asked)-1].matrix = true
	}
	return backends.Matrix{Type: t.Type, Rows: rows, Cols: cols, Data: data}
}

// linear is prefix.weight [rows, cols], with prefix.bias [rows] if there is one.
func (l *loader) linear(prefix string, rows, cols int) backends.Linear {
	w := backends.Linear{Matrix: l.matrix(prefix+".weight", rows, cols)}
	if l.has(prefix + ".bias") {
		w.Bias = l.vector(prefix+".bias", rows)
	}
	return w
}

// vector is a resident vector [n], as floats; those below 2^-50 are +0.
func (l *loader) vector(name string, n int) []float32 {
	t, data := l.tensor(name, n)
	if data == nil {
		return nil
	}
	v := make([]float32, n)
	quant.Dequantize(t.Type, v, data)
	if l.lacksOne(name) {
		for i := range v {
			v[i]++
		}
	}
	for i, x := range v {
		if math.Abs(float64(x)) < 0x1p-50 {
			v[i] = 0
		}
	}
	return v
}

// floats is a resident tensor of floats, innermost dim first; those below 2^-50
// are +0. If it is so already they are the resident bytes themselves.
func (l *loader) floats(name string, dims ...int) []float32 {
	t, data := l.tensor(name, dims...)
	n := 1
	for _, d := range dims {
		n *= d
	}
	if t.Type != quant.F32 {
		l.floatBytes += 4 * int64(n)
	}
	if data == nil {
		return nil
	}
	if at := unsafe.Pointer(unsafe.SliceData(data)); t.Type == quant.F32 && uintptr(at)%4 == 0 {
		v := unsafe.Slice((*float32)(at), n)
		if !slices.ContainsFunc(v, func(x float32) bool { return x != arith.Clean(x) }) {
			return v
		}
	}
	v := make([]float32, n)
	quant.Dequantize(t.Type, v, data)
	for i, x := range v {
		v[i] = arith.Clean(x)
	}
	return v
}

// experts is the role table of a layer of n experts, gate and up [ff, dim] and
// down [dim, ff] each, and their kinds: matrices without data.
func (l *loader) experts(layer, n, dim, ff int) (tiers.ExpertLayer, [3]backends.Matrix) {
	role := tiers.ExpertLayer{Layer: layer, Experts: n}
	var kinds [3]backends.Matrix
	for i, part := range [...]struct {
		name       string
		rows, cols int
	}{{"ffn_gate_exps", ff, dim}, {"ffn_up_exps", ff, dim}, {"ffn_down_exps", dim, ff}} {
		t, _ := l.shaped(fmt.Sprintf("blk.%d.%s.weight", layer, part.name), part.cols, part.rows, n)
		kinds[i] = backends.Matrix{Type: t.Type, Rows: part.rows, Cols: part.cols}
		role.Parts = append(role.Parts, t.Name)
	}
	return role, kinds
}
