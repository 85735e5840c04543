package tiers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"sluice/storage"
)

const smallTrace = `# route_trace v1
# model=a b.gguf arch=x n_layer=3 n_expert=4 n_expert_used=2
# a remark
# layer=0 expert_bytes=0 dense_bytes=7
# layer=1 expert_bytes=10 dense_bytes=7
# layer=2 expert_bytes=20
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,1,0,3,0.5,0,10
0,0,0,1,1,0,0.5,0,10
0,0,1,1,0,3,-1e-3,0,0
0,0,0,2,0,1,1,0,20
0,1,2,1,0,2,1,1,0
0,1,2,2,0,1,1,1,0
0,1,3,1,0,2,1,1,0
1,0,0,1,0,2,1,1,0
`

func TestReadTrace(t *testing.T) {
	for _, text := range []string{smallTrace, strings.TrimSuffix(smallTrace, "\n"), strings.ReplaceAll(smallTrace, "\n", "\r\n")} {
		tr, err := ReadTrace(strings.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		if tr.Model != "a b.gguf" || tr.Arch != "x" || tr.Experts != 4 || tr.TopK != 2 ||
			!slices.Equal(tr.Layers, []TraceLayer{{0, 7}, {10, 7}, {20, 0}}) || tr.ModelBytes() != 120 {
			t.Errorf("header: %+v", tr)
		}
		var got strings.Builder
		for i, b := range tr.Batches() {
			fmt.Fprintf(&got, "%d: layer %d decode %v positions %d:", i, b.Layer, b.Decode, b.Positions)
			for pos, k := range b.Choices() {
				fmt.Fprintf(&got, " %d@%d", k.Expert, pos)
			}
			got.WriteString("\n")
		}
		want := `0: layer 1 decode false positions 2: 3@0 0@0 3@1
1: layer 2 decode false positions 1: 1@0
2: layer 1 decode true positions 1: 2@0
3: layer 2 decode true positions 1: 1@0
4: layer 1 decode true positions 1: 2@0
5: layer 1 decode false positions 1: 2@0
`
		if got.String() != want {
			t.Errorf("got\n%swant\n%s", got.String(), want)
		}
		if c := tr.Policy(9); c.Budget != 9 || !slices.Equal(c.Layers, []PolicyLayer{{}, {4, 10}, {4, 20}}) {
			t.Errorf("policy config: %+v", c)
		}
	}
}

// badTraces are small changes of smallTrace and what is said of them.
var badTraces = []struct{ old, new, want string }{
	{"route_trace v1", "route_trace v2", `line 1: it is "# route_trace v2"`},
	{"# model=a", "# modell=a", `line 4: a layer comes before the line "# model=..."`},
	{"n_layer=3", "n_layer=0", `line 2: "n_layer=0": want n_layer to be a number from 1 to 4096`},
	{"n_layer=3", "n_layer=3 n_layer=3", "line 2: n_layer is given twice"},
	{" n_expert=4", "", "line 2: the model line must give n_layer, n_expert and n_expert_used"},
	{"n_expert_used=2", "n_expert_used=5", "line 2: n_expert_used=5 is more than n_expert=4"},
	{"n_layer=3 n_expert=4", "n_layer=4096 n_expert=4096", "line 2: 4096 layers of 4096 experts"},
	{"# a remark", "# model=b n_layer=1 n_expert=1 n_expert_used=1", "line 3: the model is given twice"},
	{"layer=2 expert", "layer=1 expert", "line 6: layer 1 is given twice"},
	{"layer=2 expert", "layer=3 expert", `line 6: "layer=3": want layer to be a number from 0 to 2`},
	{"expert_bytes=20", "dense_bytes=20", "line 6: layer 2 has no expert_bytes"},
	{"expert_bytes=20", "expert_bytes=-20", `line 6: "expert_bytes=-20": want expert_bytes to be a number`},
	{"expert_bytes=20", "expert_byte=20", `line 6: "expert_byte=20": want expert_bytes=N or dense_bytes=N`},
	{"turn,phase", "turn,fase", "line 7: want a line that begins with # or the columns"},
	{"0,0,1,1,0,3", "", "line 10: 4 columns, want 9"},
	{"0,0,1,1,0,3,-1e-3,0,0\n", "\n", "line 10: 1 columns, want 9"},
	{"-1e-3,0,0", "-1e-3,0", "line 10: 8 columns, want 9"},
	{"-1e-3,0,0", "-1e-3,0,0,0", "line 10: more than 9 columns"},
	{"-1e-3", "NaN", `line 10: weight "NaN": want a finite number`},
	{"-1e-3", "x", `line 10: weight "x"`},
	{"-1e-3,0,0", "-1e-3,,0", `line 10: residency ""`},
	{"-1e-3,0,0", "-1e-3,0,-1", `line 10: expert_bytes "-1"`},
	{"0,0,1,1,0,3", "0,2,1,1,0,3", `line 10: phase "2": want a number from 0 to 1`},
	{"0,0,1,1,0,3", "0,0,1,3,0,3", `line 10: layer "3"`},
	{"0,0,1,1,0,3", "0,0,1,1,0,4", `line 10: expert "4": want a number from 0 to 3`},
	{"0,0,1,1,0,3", "0,0,1,1,0,+3", `line 10: expert "+3"`},
	{"0,0,1,1,0,3", "0,0,1,1,0,99999999999999999999", `line 10: expert "99999999999999999999"`},
	{"0,0,1,1,0,3", "0,0,1,1,2,3", `line 10: slot "2": want a number from 0 to 1`},
	{"0,0,1,1,0,3", "0,0,1,1,1,3", "line 10: slot 1, want 0"},
	{"0,0,0,1,1,0", "0,0,0,1,0,0", "line 9: slot 0, want 1"},
	{"0,0,0,2,0,1", "0,0,0,0,0,1", `line 11: layer 0: no line "# layer=0 expert_bytes=N" gives it experts`},
	{"0,1,3,1,0,2", "0,1,1,1,0,2", "line 14: turn 0, phase 1, step 1, layer 1 comes after turn 0, phase 1, step 2, layer 2"},
	{"1,0,0,1,0,2", "0,0,0,1,0,2", "line 15: turn 0, phase 0, step 0, layer 1 comes after turn 0, phase 1"},
	{"# a remark", "# " + strings.Repeat("x", 5000), "line 3: it is longer than 4096 bytes"},
}

// Every error names its line.
func TestBadTraces(t *testing.T) {
	for _, tt := range badTraces {
		if !strings.Contains(smallTrace, tt.old) {
			t.Fatalf("%q is not in the trace", tt.old)
		}
		_, err := ReadTrace(strings.NewReader(strings.Replace(smallTrace, tt.old, tt.new, 1)))
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q in place of %q: %v, want %q", tt.new, tt.old, err, tt.want)
		}
	}
	if _, err := ReadTrace(strings.NewReader("")); err == nil || !strings.Contains(err.Error(), "line 1: the file ends before") {
		t.Errorf("an empty file: %v", err)
	}
	if _, err := ReadTrace(strings.NewReader(traceColumns)); err == nil || !strings.Contains(err.Error(), "line 1: the columns come before") {
		t.Errorf("columns alone: %v", err)
	}
	broken := errors.New("cable pulled")
	if _, err := ReadTrace(failing{strings.NewReader(smallTrace), broken}); !errors.Is(err, broken) || !strings.Contains(err.Error(), "after line 15") {
		t.Errorf("a read that fails: %v", err)
	}
}

// failing is a reader that ends in an error.
type failing struct {
	r   *strings.Reader
	err error
}

func (f failing) Read(b []byte) (int, error) {
	if n, err := f.r.Read(b); err == nil {
		return n, nil
	}
	return 0, f.err
}

// Any bytes are a trace or an error that names a line; a trace keeps to its own
// bounds, and is small beside its text.
func FuzzReadTrace(f *testing.F) {
	f.Add([]byte(smallTrace))
	for _, tt := range badTraces[:len(badTraces)-1] {
		f.Add([]byte(strings.Replace(smallTrace, tt.old, tt.new, 1)))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		tr, err := ReadTrace(bytes.NewReader(text))
		if err != nil {
			if !strings.Contains(err.Error(), "line ") {
				t.Fatalf("no line: %v", err)
			}
			return
		}
		if n := 4*cap(tr.choices) + 16*cap(tr.batches); n > 4096+4*len(text) {
			t.Errorf("%d bytes for a text of %d", n, len(text))
		}
		n := 0
		for _, b := range tr.Batches() {
			if tr.Layers[b.Layer].ExpertBytes == 0 || b.Positions < 1 || b.Decode && b.Positions != 1 {
				t.Fatalf("batch %+v", b)
			}
			for pos, k := range b.Choices() {
				n++
				if int(k.Layer) != b.Layer || k.Expert < 0 || int(k.Expert) >= tr.Experts || pos < 0 || pos >= b.Positions {
					t.Fatalf("%v at position %d of %d", k, pos, b.Positions)
				}
			}
		}
		if n != len(tr.choices) {
			t.Errorf("%d of %d choices are in batches", n, len(tr.choices))
		}
	})
}

// What a cache and a writer make of steps is a trace of them: each chunk of a
// prompt a turn, each token a step, with what was read.
func TestTraceWriter(t *testing.T) {
	el := []ExpertLayer{{Layer: 1, Experts: 4}, {Layer: 2, Experts: 4}}
	fl := map[int]fakeLayer{1: {3 * 512, 100}, 2: {3 * 512, 100}}
	f := newFake(t, storage.Slab, fl)
	f.pick = func(int) int { return 0 }
	c := open(t, f, Options{Cap: 4, TopK: 2, Layers: el})
	var out bytes.Buffer
	w := NewTraceWriter(&out, &Trace{Model: "a b=c", Arch: "x", Experts: 4, TopK: 2, Layers: []TraceLayer{{0, 7}, {300, 7}, {300, 7}}})
	pass := func(ids []int32) {
		for l := 1; l <= 2; l++ {
			distinct := slices.Clone(ids)
			slices.Sort(distinct)
			distinct = slices.Compact(distinct)
			uses := make([]int32, len(distinct))
			weights := make([]float32, len(ids))
			for i := range ids {
				weights[i] = .25
				uses[slices.Index(distinct, ids[i])]++
			}
			s, err := c.Begin(context.Background(), l, distinct, uses)
			if err != nil {
				t.Fatal(err)
			}
			w.Batch(s, ids, weights)
			s.End()
		}
	}
	pass([]int32{3, 1, 1, 0})
	pass([]int32{2, 1}) // the prompt's last chunk, of one position
	w.Decodes()
	pass([]int32{0, 1})
	pass([]int32{1, 0, 2, 3}) // verification of a draft
	pass([]int32{0, 1})
	if err := w.Err(); err != nil {
		t.Fatal(err)
	}
	const want = `# route_trace v1
# model=a_b_c arch=x n_layer=3 n_expert=4 n_expert_used=2
# layer=0 expert_bytes=0 dense_bytes=7
# layer=1 expert_bytes=300 dense_bytes=7
# layer=2 expert_bytes=300 dense_bytes=7
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,1,0,3,0.25,0,300
0,0,0,1,1,1,0.25,0,300
0,0,1,1,0,1,0.25,1,0
0,0,1,1,1,0,0.25,0,300
0,0,0,2,0,3,0.25,0,300
0,0,0,2,1,1,0.25,0,300
0,0,1,2,0,1,0.25,1,0
0,0,1,2,1,0,0.25,0,300
1,0,2,1,0,2,0.25,0,300
1,0,2,1,1,1,0.25,1,0
1,0,2,2,0,2,0.25,0,300
1,0,2,2,1,1,0.25,1,0
1,1,3,1,0,0,0.25,1,0
1,1,3,1,1,1,0.25,1,0
1,1,3,2,0,0,0.25,1,0
1,1,3,2,1,1,0.25,1,0
2,0,4,1,0,1,0.25,1,0
2,0,4,1,1,0,0.25,1,0
2,0,5,1,0,2,0.25,1,0
2,0,5,1,1,3,0.25,1,0
2,0,4,2,0,1,0.25,1,0
2,0,4,2,1,0,0.25,1,0
2,0,5,2,0,2,0.25,1,0
2,0,5,2,1,3,0.25,1,0
2,1,6,1,0,0,0.25,1,0
2,1,6,1,1,1,0.25,1,0
2,1,6,2,0,0,0.25,1,0
2,1,6,2,1,1,0.25,1,0
`
	if out.String() != want {
		t.Errorf("got\n%s", out.String())
	}
	if _, err := ReadTrace(&out); err != nil {
		t.Error(err)
	}
}

// The first error of the file stays, and the model is not disturbed.
func TestTraceWriterFails(t *testing.T) {
	full := errors.New("no space left")
	w := NewTraceWriter(writer(func([]byte) (int, error) { return 0, full }), &Trace{Experts: 1, TopK: 1})
	w.Batch(nil, []int32{0}, []float32{1})
	if !errors.Is(w.Err(), full) {
		t.Errorf("%v", w.Err())
	}
}

type writer func([]byte) (int, error)

func (w writer) Write(b []byte) (int, error) { return w(b) }

func BenchmarkReadTrace(b *testing.B) {
	var text strings.Builder
	text.WriteString(smallTrace)
	for i := range 100000 {
		fmt.Fprintf(&text, "2,1,%d,1,0,%d,0.125,0,0\n", i, i%4)
	}
	b.SetBytes(int64(text.Len()))
	for b.Loop() {
		if _, err := ReadTrace(strings.NewReader(text.String())); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkPolicy is a token of a large model: 94 layers, 8 of 128 experts, a
// quarter of them in memory.
func BenchmarkPolicy(b *testing.B) {
	for _, name := range Policies() {
		b.Run("policy="+name, func(b *testing.B) {
			p, err := NewPolicy(name, alike(94, 128, 94*32))
			if err != nil {
				b.Fatal(err)
			}
			var e [8]int32
			n := uint32(1)
			use := func(_, _ int) []int32 {
				for i := range e {
					n = n*1664525 + 1013904223
					e[i] = int32(n >> 25 & (n >> 18)) // the lower the more often
				}
				return e[:]
			}
			tokens(p, 94, 20, use, nil)
			for b.Loop() {
				tokens(p, 94, 1, use, nil)
			}
		})
	}
}
