package backendtest

import (
	"encoding/binary"
	"math"

	"sluice/backends"
	"sluice/internal/quant"
)

// The reference: every step as plain loops, one position and one row at a time.
// An operation of two float32 in float64, rounded once to float32, is that
// operation in float32, so no compiler can change these bits by fusing.

func mul(a, b float32) float32 { return float32(float64(a) * float64(b)) }
func add(a, b float32) float32 { return float32(float64(a) + float64(b)) }
func sub(a, b float32) float32 { return float32(float64(a) - float64(b)) }

func clean(x float32) float32 {
	if math.Abs(float64(x)) < 0x1p-50 {
		return 0
	}
	return x
}

func rcp(a float32) float32 {
	y := math.Float32frombits(0x7ef311c0 - math.Float32bits(a))
	for range 2 {
		y = mul(y, sub(2, mul(a, y)))
	}
	return add(y, mul(y, sub(1, mul(a, y))))
}

func rsqrt(a float32) float32 {
	h := mul(0.5, a)
	y := math.Float32frombits(0x5f376380 - math.Float32bits(a)>>1)
	for range 2 {
		y = mul(y, sub(1.5, mul(mul(h, y), y)))
	}
	return add(y, mul(y, sub(0.5, mul(mul(h, y), y))))
}

func exp(x float32) float32 {
	if x < -40 {
		return 0
	}
	x = min(x, 40)
	t := add(mul(x, 0x1.715476p+0), 12582912)
	n := int32(math.Float32bits(t)) - 0x4b400000
	f := sub(t, 12582912)
	r := sub(sub(x, mul(f, 0.693359375)), mul(f, -0x1.bd0106p-13))
	p := float32(0x1.6a241ap-10)
	for _, c := range []float32{0x1.1239f2p-7, 0x1.5558f2p-5, 0x1.555492p-3, 0x1.fffffcp-2} {
		p = add(mul(p, r), c)
	}
	p = add(add(mul(mul(r, r), p), r), 1)
	return math.Float32frombits(uint32(int32(math.Float32bits(p)) + n<<23))
}

func sigmoid(x float32) float32 { return rcp(add(1, exp(sub(0, x)))) }

func silu(x float32) float32 {
	if x < -40 {
		return 0
	}
	return mul(x, sigmoid(x))
}

// tree16 adds lanes j and j+8, then j+4, j+2, j+1.
func tree16(l [16]float32) float32 {
	for h := 8; h > 0; h /= 2 {
		for j := range h {
			l[j] = add(l[j], l[j+h])
		}
	}
	return l[0]
}

// dotFloats is clean(w) times clean(x) in 16 lanes.
func dotFloats(w, x []float32) float32 {
	var l [16]float32
	for i := range w {
		l[i%16] = add(l[i%16], mul(clean(w[i]), clean(x[i])))
	}
	return tree16(l)
}

// A coded block of activations.
type coded struct {
	code []int64
	d    float32
}

// quantizeAll cuts x into blocks of n.
func quantizeAll(x []float32, n int) (c []coded) {
	for ; n > 0 && len(x) > 0; x = x[n:] {
		code, d := quantizeBlock(x[:n])
		c = append(c, coded{code, d})
	}
	return c
}

// quantizeBlock gives the codes and the scale of one block of activations.
func quantizeBlock(x []float32) (code []int64, d float32) {
	var a float32
	for _, v := range x {
		a = max(a, float32(math.Abs(float64(v))))
	}
	code = make([]int64, len(x))
	if a < 0x1p-50 {
		return code, 0
	}
	s := mul(127, rcp(a))
	for i, v := range x {
		code[i] = int64(math.RoundToEven(float64(mul(v, s))))
	}
	return code, mul(a, 0x1.020408p-7)
}

// dotRow is a row of any type times x, whose blocks are xs.
func dotRow(t quant.Type, row []byte, x []float32, xs []coded) float32 {
	if t.Kind() == quant.Float {
		w := make([]float32, len(x))
		quant.Dequantize(t, w, row)
		return dotFloats(w, x)
	}
	var lane [8]float32
	var b quant.Block
	n, unpack := t.ActBlock(), quant.UnpackerFor(t)
	for i, c := range xs {
		unpack(&b, row, i)
		code, d := c.code, c.d
		if t == quant.NVFP4 {
			for g, w := range []float32{b.W, b.W2} {
				var s int64
				for j := 16 * g; j < 16*g+16; j++ {
					s += int64(b.Code[j]) * code[j]
				}
				lane[i%8] = add(lane[i%8], mul(mul(float32(s), w), d))
			}
			continue
		}
		var s, m int64
		for j, c := range code {
			scale, low := int64(1), int64(1)
			if n == 256 {
				scale, low = int64(b.Scale[j/16]), int64(b.Min[j/16])
			}
			s += scale * int64(b.Code[j]) * c
			m += low * c
		}
		term := mul(float32(s), b.W)
		switch t.Kind() {
		case quant.Plus:
			term = add(term, mul(float32(m), b.MinW))
		case quant.Minus:
			term = sub(term, mul(float32(m), b.MinW))
		}
		lane[i%8] = add(lane[i%8], mul(term, d))
	}
	l := lane
	return add(add(add(l[0], l[4]), add(l[2], l[6])), add(add(l[1], l[5]), add(l[3], l[7])))
}

// matMul is y [n, rows] of x [n, cols].
func matMul(w backends.Linear, x []float32) []float32 {
	var y []float32
	bytes := len(w.Data) / max(w.Rows, 1)
	for ; len(x) > 0; x = x[w.Cols:] {
		xs := quantizeAll(x[:w.Cols], w.Type.ActBlock())
		for r := range w.Rows {
			v := dotRow(w.Type, w.Data[r*bytes:(r+1)*bytes], x[:w.Cols], xs)
			if w.Bias != nil {
				v = add(v, w.Bias[r])
			}
			y = append(y, v)
		}
	}
	return y
}

func rmsNorm(x, weight []float32, eps float32) []float32 {
	var y []float32
	n := len(weight)
	inv := 1 / float32(n)
	for ; len(x) > 0; x = x[n:] {
		r := rsqrt(add(mul(dotFloats(x[:n], x[:n]), inv), eps))
		for i, w := range weight {
			y = append(y, mul(mul(clean(x[i]), r), w))
		}
	}
	return y
}

func rope(x []float32, dim, headDim int, rope *backends.Rope, pos int) []float32 {
	y := append([]float32(nil), x...)
	for at := 0; at < len(x); at += headDim {
		for j := range rope.Half {
			t := (pos+at/dim)*rope.Half + j
			i, k := at+rope.Skip+j, at+rope.Skip+j+rope.Half
			if rope.Interleaved {
				i, k = at+rope.Skip+2*j, at+rope.Skip+2*j+1
			}
			a, b, c, s := x[i], x[k], rope.Cos[t], rope.Sin[t]
			y[i] = sub(mul(a, c), mul(b, s))
			y[k] = add(mul(b, c), mul(a, s))
		}
	}
	return y
}

// cached is what a cache of this type gives back for x.
func cached(t backends.KVType, x []float32) []float32 {
	y := make([]float32, len(x))
	switch t {
	case backends.KVF16:
		for i, v := range x {
			y[i] = quant.FromF16(quant.ToF16Saturate(v))
		}
	case backends.KVF32:
		for i, v := range x {
			if math.Abs(float64(v)) >= 0x1p-24 {
				y[i] = v
			}
		}
	case backends.KVQ8:
		for i := 0; i < len(x); i += 32 {
			code, d := quantizeBlock(x[i : i+32])
			for j, c := range code {
				if d >= 0x1p-24 {
					y[i+j] = mul(float32(c), d)
				}
			}
		}
	}
	return y
}

// attend is one query of one head over keys and values, one slice a position up
// to its own, as far as it sees them; chosen are those of how.Keys, nil: all.
func attend(q []float32, k, v [][]float32, head int, how *backends.Attention, chosen []bool) []float32 {
	n := len(k)
	seen := func(i int) bool {
		return (chosen == nil || chosen[i]) && (how.Window == 0 || i > n-1-how.Window) && (how.Chunk == 0 || i/how.Chunk == (n-1)/how.Chunk)
	}
	score := make([]float32, n)
	top := float32(math.Inf(-1))
	for i := range score {
		if seen(i) {
			score[i] = mul(dotFloats(k[i], q), how.Scale)
			top = max(top, score[i])
		}
	}
	if how.Sinks != nil {
		top = max(top, how.Sinks[head])
	}
	var sum float32
	for c := 0; c < n; c += 256 {
		var l [16]float32
		for i := c; i < min(c+256, n); i++ {
			if seen(i) {
				score[i] = exp(sub(score[i], top))
				l[i%16] = add(l[i%16], score[i])
			}
		}
		sum = add(sum, tree16(l))
	}
	if how.Sinks != nil {
		sum = add(sum, exp(sub(how.Sinks[head], top)))
	}
	r := rcp(sum)
	y := make([]float32, len(v[0]))
	for c := 0; c < n; c += 256 {
		part := make([]float32, len(y))
		for i := c; i < min(c+256, n); i++ {
			if p := mul(score[i], r); seen(i) {
				for j := range part {
					part[j] = add(part[j], mul(p, v[i][j]))
				}
			}
		}
		for j := range y {
			y[j] = add(y[j], part[j])
		}
	}
	return y
}

// expert is down(activation(gate(x), up(x))) of one position.
func expert(e backends.Expert, x []float32) []float32 {
	g, u := matMul(backends.Linear{Matrix: e.Gate, Bias: e.GateBias}, x), matMul(backends.Linear{Matrix: e.Up, Bias: e.UpBias}, x)
	for i := range g {
		if e.Act == backends.ClampedSwiGLU {
			g[i] = mul(1.702, min(g[i], 7))
			u[i] = mul(add(max(min(u[i], 7), -7), 1), 1/1.702)
		}
		g[i] = mul(silu(g[i]), u[i])
	}
	return matMul(backends.Linear{Matrix: e.Down, Bias: e.DownBias}, g)
}

// Bytes is x as an F32 matrix.
func Bytes(x []float32) []byte {
	b := make([]byte, 4*len(x))
	for i, v := range x {
		binary.LittleEndian.PutUint32(b[4*i:], math.Float32bits(v))
	}
	return b
}
