package tiers

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"strconv"
	"strings"
)

// A Trace is what a router chose, batch by batch, without a model. The format,
// route_trace v1, is text:
//
//	# route_trace v1
//	# model=NAME arch=ARCH n_layer=N n_expert=N n_expert_used=N
//	# layer=0 expert_bytes=N dense_bytes=N        for each layer; expert_bytes 0: no experts
//	turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
//	0,0,0,0,0,79,0.425021,0,4336640
//
// A row is one choice: phase 0 is a prompt, 1 is decoding; slot is its rank in
// the router's order. A batch is the rows of one layer: of a turn's whole prompt,
// position by position, or of one decoded step. Rows are in the order in which
// batches run: turn, phase, (step if decoded,) layer, then step, slot. Residency
// and expert_bytes of a row are what the recording engine saw and read; a
// reader takes no notice of them.
type Trace struct {
	Model, Arch string
	Experts     int          // of each MoE layer
	TopK        int          // most experts of a position and layer
	Layers      []TraceLayer // by number

	batches []traceBatch
	choices []int32 // experts; the first of a position is ^expert
}

// A TraceLayer is the bytes of a layer's parts.
type TraceLayer struct {
	ExpertBytes int64 // one expert; 0: no experts
	DenseBytes  int64 // what is resident
}

type traceBatch struct {
	layer  int32
	decode bool
	end    int // in choices
}

// A TraceBatch is one layer's call.
type TraceBatch struct {
	Layer     int
	Decode    bool
	Positions int
	choices   []int32
}

// Choices gives the experts of the batch with their positions, 0 and up, in
// the router's order for each position.
func (b TraceBatch) Choices() iter.Seq2[int, Key] {
	return func(yield func(int, Key) bool) {
		pos := -1
		for _, c := range b.choices {
			if c < 0 {
				pos++
				c = ^c
			}
			if !yield(pos, Key{Layer: int32(b.Layer), Expert: c}) {
				return
			}
		}
	}
}

// Batches gives the batches in order, numbered from 0.
func (t *Trace) Batches() iter.Seq2[int, TraceBatch] {
	return func(yield func(int, TraceBatch) bool) {
		at := 0
		for i, b := range t.batches {
			x := TraceBatch{Layer: int(b.layer), Decode: b.decode, choices: t.choices[at:b.end]}
			for _, c := range x.choices {
				if c < 0 {
					x.Positions++
				}
			}
			at = b.end
			if !yield(i, x) {
				return
			}
		}
	}
}

// Future gives every use with the number of its batch, for NewBelady.
func (t *Trace) Future() iter.Seq2[int, Key] {
	return func(yield func(int, Key) bool) {
		for i, b := range t.Batches() {
			for _, k := range b.Choices() {
				if !yield(i, k) {
					return
				}
			}
		}
	}
}

// Policy is the config of a policy for this trace's model.
func (t *Trace) Policy(budget int64) PolicyConfig {
	c := PolicyConfig{Budget: budget, Layers: make([]PolicyLayer, len(t.Layers))}
	for l, layer := range t.Layers {
		if layer.ExpertBytes > 0 {
			c.Layers[l] = PolicyLayer{Experts: t.Experts, Bytes: layer.ExpertBytes}
		}
	}
	return c
}

// ModelBytes is what all experts take.
func (t *Trace) ModelBytes() (n int64) {
	for _, l := range t.Layers {
		n += l.ExpertBytes * int64(t.Experts)
	}
	return n
}

// Bounds of a trace, so that no file makes a reader take much more memory than
// a third of its size: a row takes at least 18 bytes of the file and 4 here.
const (
	maxTraceLine   = 4096
	maxTraceLayers = 1 << 12
	maxTraceRows   = 1 << 28
	maxTraceBytes  = 1 << 40 // of one expert, and of one layer's dense part
)

const (
	traceVersion = "# route_trace v1"
	traceColumns = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
)

// ReadTrace reads a trace to its end. Every error of its content names the line.
func ReadTrace(r io.Reader) (*Trace, error) {
	p := &traceReader{t: &Trace{}, known: nil}
	in := bufio.NewReaderSize(r, maxTraceLine)
	for {
		line, err := in.ReadSlice('\n')
		if err != nil && err != io.EOF && !errors.Is(err, bufio.ErrBufferFull) {
			return nil, fmt.Errorf("trace, after line %d: %w", p.line, err)
		}
		if err == io.EOF && len(line) == 0 {
			break
		}
		p.line++
		if errors.Is(err, bufio.ErrBufferFull) {
			return nil, p.errorf("it is longer than %d bytes", maxTraceLine)
		}
		line = bytes.TrimSuffix(bytes.TrimSuffix(line, []byte("\n")), []byte("\r"))
		if err := p.read(line); err != nil {
			return nil, err
		}
		if err == io.EOF {
			break
		}
	}
	p.line++
	if !p.rows {
		return nil, p.errorf("the file ends before the line %q", traceColumns)
	}
	p.flush()
	return p.t, nil
}

// traceReader reads line by line.
type traceReader struct {
	t     *Trace
	line  int
	rows  bool   // the column line has been read
	known []bool // layers whose sizes were given
	any   bool   // a row has been read
	at    row    // the last row
}

// row is the columns that say where a choice stands.
type row struct{ turn, phase, step, layer, slot, expert int64 }

func (p *traceReader) errorf(format string, args ...any) error {
	return fmt.Errorf("trace, line %d: %w", p.line, fmt.Errorf(format, args...))
}

func (p *traceReader) read(line []byte) error {
	switch {
	case p.rows:
		return p.row(line)
	case string(line) == traceColumns:
		if p.known == nil {
			return p.errorf("the columns come before the line \"# model=...\"")
		}
		p.rows = true
		return nil
	case len(line) == 0 || line[0] != '#':
		return p.errorf("want a line that begins with # or the columns %q", traceColumns)
	}
	words := strings.Fields(string(line[1:]))
	switch {
	case len(words) == 0:
	case words[0] == "route_trace":
		if string(line) != traceVersion {
			return p.errorf("it is %q: only %q is understood", line, traceVersion)
		}
	case strings.HasPrefix(words[0], "model="):
		return p.model(words)
	case strings.HasPrefix(words[0], "layer="):
		return p.layer(words)
	}
	return nil // a remark
}

// model reads NAME arch=ARCH n_layer=N n_expert=N n_expert_used=N; a name may
// hold spaces.
func (p *traceReader) model(words []string) error {
	if p.known != nil {
		return p.errorf("the model is given twice")
	}
	name := []string{strings.TrimPrefix(words[0], "model=")}
	var layers, experts, used int64
	for _, w := range words[1:] {
		k, v, _ := strings.Cut(w, "=")
		var err error
		switch k {
		case "arch":
			p.t.Arch = v
		case "n_layer":
			layers, err = p.header(w, layers, 1, maxTraceLayers)
		case "n_expert":
			experts, err = p.header(w, experts, 1, maxPolicyExperts)
		case "n_expert_used":
			used, err = p.header(w, used, 1, maxPolicyExperts)
		default:
			name = append(name, w)
		}
		if err != nil {
			return err
		}
	}
	switch {
	case layers == 0 || experts == 0 || used == 0:
		return p.errorf("the model line must give n_layer, n_expert and n_expert_used")
	case used > experts:
		return p.errorf("n_expert_used=%d is more than n_expert=%d", used, experts)
	case layers*experts > maxPolicyExperts:
		return p.errorf("%d layers of %d experts are more than %d experts", layers, experts, maxPolicyExperts)
	}
	p.t.Model = strings.Join(name, " ")
	p.t.Experts, p.t.TopK = int(experts), int(used)
	p.t.Layers, p.known = make([]TraceLayer, layers), make([]bool, layers)
	return nil
}

// header reads KEY=N of a header line; was is not 0 if the key came before.
func (p *traceReader) header(word string, was, low, high int64) (int64, error) {
	k, v, _ := strings.Cut(word, "=")
	n, ok := digits([]byte(v))
	switch {
	case was != 0:
		return 0, p.errorf("%s is given twice", k)
	case !ok || n < low || n > high:
		return 0, p.errorf("%q: want %s to be a number from %d to %d", word, k, low, high)
	}
	return n, nil
}

func (p *traceReader) layer(words []string) error {
	if p.known == nil {
		return p.errorf("a layer comes before the line \"# model=...\"")
	}
	l, err := p.header(words[0], 0, 0, int64(len(p.known))-1)
	if err != nil {
		return err
	}
	if p.known[l] {
		return p.errorf("layer %d is given twice", l)
	}
	var sizes TraceLayer
	sized := false
	for _, w := range words[1:] {
		k, _, _ := strings.Cut(w, "=")
		var err error
		switch k {
		case "expert_bytes":
			sizes.ExpertBytes, err = p.header(w, sizes.ExpertBytes, 0, maxTraceBytes)
			sized = true
		case "dense_bytes":
			sizes.DenseBytes, err = p.header(w, sizes.DenseBytes, 0, maxTraceBytes)
		default:
			return p.errorf("%q: want expert_bytes=N or dense_bytes=N", w)
		}
		if err != nil {
			return err
		}
	}
	if !sized {
		return p.errorf("layer %d has no expert_bytes", l)
	}
	p.t.Layers[l], p.known[l] = sizes, true
	return nil
}

// row reads one choice and starts a batch or a position where one begins.
func (p *traceReader) row(line []byte) error {
	var f [9][]byte
	rest := line
	for i := range f {
		comma := bytes.IndexByte(rest, ',')
		switch {
		case i == len(f)-1 && comma >= 0:
			return p.errorf("more than %d columns", len(f))
		case i == len(f)-1:
			f[i] = rest
		case comma < 0:
			return p.errorf("%d columns, want %d: %s", i+1, len(f), traceColumns)
		default:
			f[i], rest = rest[:comma], rest[comma+1:]
		}
	}
	var r row
	t := p.t
	for i, c := range [...]struct {
		name string
		to   *int64
		high int64
	}{
		{"turn", &r.turn, math.MaxInt32}, {"phase", &r.phase, 1}, {"step", &r.step, math.MaxInt32},
		{"layer", &r.layer, int64(len(t.Layers)) - 1}, {"slot", &r.slot, int64(t.TopK) - 1}, {"expert", &r.expert, int64(t.Experts) - 1},
	} {
		n, ok := digits(f[i])
		if !ok || n > c.high {
			return p.errorf("%s %q: want a number from 0 to %d", c.name, f[i], c.high)
		}
		*c.to = n
	}
	if w, err := strconv.ParseFloat(string(f[6]), 64); err != nil || math.IsNaN(w) || math.IsInf(w, 0) {
		return p.errorf("weight %q: want a finite number", f[6])
	}
	for i, name := range [...]string{"residency", "expert_bytes"} {
		if _, ok := digits(f[7+i]); !ok {
			return p.errorf("%s %q: want a number of 0 or more", name, f[7+i])
		}
	}
	if t.Layers[r.layer].ExpertBytes == 0 {
		return p.errorf("layer %d: no line \"# layer=%d expert_bytes=N\" gives it experts", r.layer, r.layer)
	}
	if len(t.choices) == maxTraceRows {
		return p.errorf("more than %d rows", maxTraceRows)
	}
	newBatch, newPosition, err := p.follows(r)
	if err != nil {
		return err
	}
	if newBatch {
		p.flush()
		t.batches = append(t.batches, traceBatch{layer: int32(r.layer), decode: r.phase == 1})
	}
	p.any, p.at = true, r
	expert := int32(r.expert)
	if newPosition {
		expert = ^expert
	}
	t.choices = append(t.choices, expert)
	return nil
}

// follows says what begins with row r, or that it does not follow the last.
func (p *traceReader) follows(r row) (batch, position bool, err error) {
	was := p.at
	order := 0 // r against the last row, in the order in which batches run
	if p.any {
		from, to := [...]int64{was.turn, was.phase, was.layer, was.step}, [...]int64{r.turn, r.phase, r.layer, r.step}
		if r.phase == 1 && was.phase == 1 {
			from[2], from[3], to[2], to[3] = from[3], from[2], to[3], to[2]
		}
		for i := range from {
			if from[i] != to[i] {
				order = 1
				if to[i] < from[i] {
					return false, false, p.errorf("turn %d, phase %d, step %d, layer %d comes after turn %d, phase %d, step %d, layer %d: rows must be in the order of turn, phase, layer, step (decoded: turn, phase, step, layer)",
						r.turn, r.phase, r.step, r.layer, was.turn, was.phase, was.step, was.layer)
				}
				break
			}
		}
	}
	position = !p.any || order > 0
	want := int64(0)
	if !position {
		want = was.slot + 1
	}
	if r.slot != want {
		return false, false, p.errorf("slot %d, want %d: the slots of a position count up from 0", r.slot, want)
	}
	batch = !p.any || r.turn != was.turn || r.phase != was.phase || r.layer != was.layer || r.phase == 1 && r.step != was.step
	return batch, position, nil
}

// flush ends the batch that is being read.
func (p *traceReader) flush() {
	if n := len(p.t.batches); n > 0 {
		p.t.batches[n-1].end = len(p.t.choices)
	}
}

// digits reads decimal digits, and nothing else.
func digits(b []byte) (n int64, ok bool) {
	if len(b) == 0 || len(b) > 18 {
		return 0, false
	}
	for _, c := range b {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = 10*n + int64(c-'0')
	}
	return n, true
}
