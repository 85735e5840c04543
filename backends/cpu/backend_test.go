package cpu

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"sluice/backends"
	"sluice/backends/backendtest"
	"sluice/internal/quant"
)

func open(t testing.TB, threads int) *Backend { return openLevel(t, threads, Auto) }

func openLevel(t testing.TB, threads int, l Level) *Backend {
	t.Helper()
	b, err := New(Options{Threads: threads, Level: l})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	return b
}

// TestSteps wants the same bits, those of plain loops, from any thread count
// and any kernels.
func TestSteps(t *testing.T) {
	levels(t, func(t *testing.T, l Level) {
		counts := []int{1, 2, 3, 5}
		if l != Go {
			counts = []int{1, 3} // sharing is the same
		}
		for _, threads := range counts {
			t.Run(fmt.Sprintf("threads=%d", threads), func(t *testing.T) {
				backendtest.Run(t, func() backends.Backend { return openLevel(t, threads, l) })
			})
		}
	})
}

// levels runs a test at each level, and skips, in words, those that this CPU
// has not.
func levels(t *testing.T, test func(t *testing.T, l Level)) {
	for l := Go; l <= AVX512; l++ {
		t.Run(fmt.Sprintf("kernels=%v", l), func(t *testing.T) {
			if _, err := Choose(l); err != nil {
				t.Skip(err)
			}
			test(t, l)
		})
	}
}

// steps is one of each step, to be run again and again, on n positions.
func steps(t testing.TB, b *Backend, n int) map[string]func() {
	const dim, heads, headDim, ff, k = 512, 8, 64, 256, 2
	rng := rand.New(rand.NewPCG(3, 4))
	vec := func(n, dim int) backends.Vec {
		v, err := b.NewVec(n, dim)
		if err != nil {
			t.Fatal(err)
		}
		v.SetLen(n)
		return v
	}
	matrix := func(typ quant.Type, rows, cols int) backends.Matrix {
		return backends.Matrix{Type: typ, Rows: rows, Cols: cols, Data: backendtest.Weights(rng, typ, rows*cols)}
	}
	kv, err := b.NewKV(backends.KVShape{Layers: 1, Positions: 2*n + 600, Heads: 2, KeyDim: headDim, ValueDim: headDim, Type: backends.KVF16})
	if err != nil {
		t.Fatal(err)
	}
	table := matrix(quant.Q6_K, n, dim)
	var ids, rows []int32
	for i := range n {
		ids = append(ids, int32(i))
	}
	for i := range n * k {
		rows = append(rows, int32(i))
	}
	x, h, kvRow, out, q := vec(n, dim), vec(n, dim), vec(n, 2*headDim), vec(n*k, dim), vec(n, dim)
	b.Embed(x, table, ids)
	weight, weights := backendtest.Vectors(rng, 1, dim, 3), make([]float32, n*k)
	w := []backends.Linear{{Matrix: matrix(quant.Q4_K, dim, dim)}, {Matrix: matrix(quant.Q8_0, 2*headDim, dim)}, {Matrix: matrix(quant.F32, 2*headDim, dim)}}
	y := []backends.Vec{q, kvRow, vec(n, 2*headDim)}
	rope := &backends.Rope{Half: headDim / 2, Cos: make([]float32, n*headDim), Sin: make([]float32, n*headDim)}
	jobs := make([]backends.Job, 2)
	for i := range jobs {
		jobs[i] = backends.Job{Expert: backends.Expert{Gate: matrix(quant.Q4_K, ff, dim), Up: matrix(quant.Q8_0, ff, dim), Down: matrix(quant.Q6_K, dim, ff)}, Rows: rows[i*n : (i+1)*n]}
	}
	dst, both := make([]float32, n*dim), vec(n, 2*dim)
	h.SetLen(n)
	return map[string]func(){
		"Embed":       func() { b.Embed(x, table, ids) },
		"RMSNorm":     func() { b.RMSNorm(h, x, weight, 1e-6) },
		"MatMul":      func() { b.MatMul(y, w, x) },
		"RoPE":        func() { b.RoPE(q, headDim, rope, 0) },
		"Store":       func() { b.Store(kv, 0, 600, kvRow, kvRow) },
		"Attend":      func() { b.Attend(h, q, kv, 0, 600, &backends.Attention{Scale: 0.1}) },
		"ExpertGroup": func() { b.ExpertGroup(out, k, jobs, x) },
		"Combine":     func() { b.Combine(x, out, k, weights, h) },
		"Add":         func() { b.Add(h, x) },
		"ScaleRows":   func() { b.ScaleRows(h, x, weights[:n]) },
		"Scale":       func() { b.Scale(h, 0.5) },
		"SigmoidGate": func() { b.SigmoidGate(h, x) },
		"Gather":      func() { b.Gather(h, x, ids) },
		"Concat":      func() { b.Concat(both, x, h) },
		"Read": func() {
			if err := b.Read(dst, x); err != nil {
				t.Fatal(err)
			}
		},
	}
}

func TestStepsDoNotAllocate(t *testing.T) {
	for _, threads := range []int{1, 3} {
		for _, n := range []int{1, 7} {
			for name, step := range steps(t, open(t, threads), n) {
				if a := testing.AllocsPerRun(5, step); a != 0 {
					t.Errorf("%s of %d positions by %d threads: %g allocations", name, n, threads, a)
				}
			}
		}
	}
}

// TestMappedFileCutShort multiplies by a matrix whose file ends early.
func TestMappedFileCutShort(t *testing.T) {
	const rows, cols = 512, 1024
	f, err := os.Create(filepath.Join(t.TempDir(), "weights"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	rng := rand.New(rand.NewPCG(5, 6))
	data := backendtest.Weights(rng, quant.Q8_0, rows*cols)
	if _, err := f.Write(data); err != nil {
		t.Fatal(err)
	}
	mapped, err := unix.Mmap(int(f.Fd()), 0, len(data), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mapped)
	if err := f.Truncate(3 * 4096); err != nil {
		t.Fatal(err)
	}
	for _, threads := range []int{1, 2, 5} {
		b := open(t, threads)
		x, _ := b.NewVec(3, cols)
		y, _ := b.NewVec(3, rows)
		x.SetLen(3)
		got, want := make([]float32, 3*rows), make([]float32, 3*rows)
		mul := func(data []byte) {
			b.MatMul([]backends.Vec{y}, []backends.Linear{{Matrix: backends.Matrix{Type: quant.Q8_0, Rows: rows, Cols: cols, Data: data}}}, x)
		}
		mul(mapped)
		b.Add(y, y) // a step between does not hide it
		if err := b.Read(got, y); err == nil || !strings.Contains(err.Error(), "mapped model file could not be read") {
			t.Fatalf("threads=%d: Read says %v", threads, err)
		}
		mul(data)
		if err := b.Read(want, y); err != nil {
			t.Fatalf("threads=%d: after the fault, whole weights give %v", threads, err)
		}
		// Shares that wait for another's, which will never be done.
		for whole := range 3 {
			m := [3]backends.Matrix{}
			for i := range m {
				m[i] = backends.Matrix{Type: quant.Q8_0, Rows: rows, Cols: rows, Data: mapped[:len(mapped)/2]}
				if i == whole {
					m[i].Data = data[:len(data)/2]
				}
			}
			job := backends.Job{Expert: backends.Expert{Gate: m[0], Up: m[1], Down: m[2]}, Rows: []int32{0, 2, 5}}
			out, _ := b.NewVec(6, rows)
			out.SetLen(6)
			b.ExpertGroup(out, 2, []backends.Job{job, job}, y)
			if err := b.Read(make([]float32, 6*rows), out); err == nil || !strings.Contains(err.Error(), "mapped model file could not be read") {
				t.Fatalf("threads=%d: after an expert that was cut short Read says %v", threads, err)
			}
		}
		b.Embed(x, backends.Matrix{Type: quant.Q8_0, Rows: rows, Cols: cols, Data: mapped}, []int32{511})
		if err := b.Read(make([]float32, cols), x); err == nil {
			t.Errorf("threads=%d: Embed of a row beyond the end gives no error", threads)
		}
	}
}

// TestMisusePanics in the caller, whose backend works on.
func TestMisusePanics(t *testing.T) {
	b := open(t, 3)
	x, _ := b.NewVec(2, 64)
	y, _ := b.NewVec(1, 64)
	x.SetLen(2)
	kv, _ := b.NewKV(backends.KVShape{Layers: 1, Positions: 2, Heads: 1, KeyDim: 64, ValueDim: 64})
	m := backends.Matrix{Type: quant.F32, Rows: 64, Cols: 64, Data: make([]byte, 4*64*64)}
	short := m
	short.Data = m.Data[1:]
	for name, misuse := range map[string]func(){
		"SetLen":     func() { x.SetLen(3) },
		"Embed":      func() { b.Embed(x, m, []int32{64}) },
		"RMSNorm":    func() { b.RMSNorm(x, x, make([]float32, 48), 0) },
		"MatMul":     func() { b.MatMul([]backends.Vec{x}, []backends.Linear{{Matrix: m}}, x) },
		"short rows": func() { b.MatMul([]backends.Vec{x}, []backends.Linear{{Matrix: short}}, y) },
		"capacity":   func() { b.MatMul([]backends.Vec{y}, []backends.Linear{{Matrix: m}}, x) },
		"RoPE":       func() { b.RoPE(x, 64, &backends.Rope{Half: 32, Cos: make([]float32, 32), Sin: make([]float32, 32)}, 0) },
		"RoPE skip": func() {
			b.RoPE(x, 64, &backends.Rope{Half: 32, Skip: 2, Cos: make([]float32, 64), Sin: make([]float32, 64)}, 0)
		},
		"Store":  func() { b.Store(kv, 0, 1, x, x) },
		"Attend": func() { b.Attend(x, x, kv, 1, 0, &backends.Attention{Scale: 1}) },
		"ExpertGroup": func() {
			b.ExpertGroup(y, 1, []backends.Job{{Expert: backends.Expert{Gate: m, Up: m, Down: m}, Rows: []int32{2}}}, x)
		},
		"Combine":     func() { b.Combine(x, y, 1, nil, nil) },
		"Add":         func() { b.Add(x, y) },
		"SigmoidGate": func() { b.SigmoidGate(x, y) },
		"StoreKeys":   func() { b.Store(kv, 0, 0, x, nil) },
		"LayerNorm":   func() { b.LayerNorm(x, x, make([]float32, 64), nil, 1) },
		"MatMulHeads": func() { b.MatMulHeads(y, []backends.Matrix{m}, y) },
		"Gather":      func() { b.Gather(x, y, []int32{5}) },
		"Concat":      func() { b.Concat(x, x, y) },
		"Read":        func() { b.Read(nil, x) },
		"in a worker": func() { b.pool.do(broken{}, 100, 1) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			misuse()
		}()
	}
	if err := b.Read(make([]float32, 128), x); err != nil {
		t.Errorf("after misuse: %v", err)
	}
}

// broken panics in some shares.
type broken struct{}

func (broken) run(_ *worker, lo, _ int) {
	if lo%3 == 1 {
		panic("broken")
	}
}

func TestRefusals(t *testing.T) {
	for _, n := range []int{-1, 0, 5000} {
		if _, err := New(Options{Threads: n}); err == nil {
			t.Errorf("New of %d threads gives no error", n)
		}
	}
	if _, err := New(Options{Threads: 1, Level: AVX512 + 1}); err == nil {
		t.Error("an unknown level gives no error")
	}
	if _, err := ParseLevel("sse9"); err == nil {
		t.Error("an unknown level's name gives no error")
	}
	b := open(t, 1)
	if _, err := b.NewVec(0, 5); err == nil {
		t.Error("a vector of no capacity gives no error")
	}
	for _, s := range []backends.KVShape{
		{Layers: 1, Positions: 1, Heads: 1, KeyDim: 33, ValueDim: 32, Type: backends.KVQ8},
		{Layers: 1, Positions: 0, Heads: 1, KeyDim: 32, ValueDim: 32},
		{Layers: 1 << 20, Positions: 1 << 20, Heads: 8, KeyDim: 128, ValueDim: 128},
	} {
		if _, err := b.NewKV(s); err == nil {
			t.Errorf("a cache of shape %+v gives no error", s)
		}
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
}
