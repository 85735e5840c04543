package quant

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"math"
	"testing"
)

// blockTypes are the types with blocks to unpack.
func blockTypes() []Type {
	var all []Type
	for t := Type(0); t < firstOwn+Type(len(ownLayouts)); t++ {
		if t.ActBlock() > 0 {
			all = append(all, t)
		}
	}
	return all
}

// fill makes bytes of a seed, by xorshift64*.
func fill(p []byte, seed uint64) {
	x := seed*0x9e3779b97f4a7c15 | 1
	for i := range p {
		x ^= x >> 12
		x ^= x << 25
		x ^= x >> 27
		p[i] = byte(x * 0x2545f4914f6cdd1d >> 56)
	}
}

// randomBlocks makes n elements of a type, n in whole blocks, of random bytes
// but for the scales, which are numbers: f16 below 2 in size, of both signs,
// subnormals among them; any exponent of MXFP4; any UE4M3 that is not NaN.
func randomBlocks(t Type, n int, seed uint64) []byte {
	_, size := t.Block()
	p := make([]byte, t.RowBytes(n))
	fill(p, seed)
	for i := 0; i < len(p); i += size {
		tame(t, p[i:i+size])
	}
	return p
}

func tame(t Type, b []byte) {
	switch t {
	case MXFP4:
	case INT4F_32, INT4F_64, INT4F_128, INT8F_32, INT8F_128:
		b[3] &^= 0x40 // below 2
	case NVFP4:
		for k := range b[:4] {
			if b[k] &= 0x7f; b[k] == 0x7f {
				b[k] = 0x7e
			}
		}
	case IQ1_M:
		b[55] &^= 0x40
	default:
		d, m := scalesAt(t)
		b[d+1] &^= 0x40
		b[m+1] &^= 0x40
	}
}

// What ggml's C library (ggml-org/ggml at d99724f2, contraction and vectoriser
// off) decodes of randomBlocks(t, 1<<19, t): the first eight bytes of the
// SHA-256 of the floats. Every entry of every grid is met.
var ggmlHash = map[Type]string{
	IQ1_M:   "e6e1035b6d7ed9af",
	IQ1_S:   "bfbe50e2220710c1",
	IQ2_S:   "b72133c4706d9f3a",
	IQ2_XS:  "2de2ce44833af956",
	IQ2_XXS: "14f970a538b30e6b",
	IQ3_S:   "3aedb0eb0addf921",
	IQ3_XXS: "7b63f0732c50654f",
	IQ4_NL:  "3eaf49565a59254b",
	IQ4_XS:  "249187e5f5cd9317",
	MXFP4:   "80164ece2b4e0163",
	NVFP4:   "a5e4643afee5907d",
	Q2_K:    "c6740040ec4af678",
	Q3_K:    "e7756855e0a1fd96",
	Q4_0:    "b739353f6eedf0f9",
	Q4_1:    "1c1d053c2bb17500",
	Q4_K:    "eb3b2f1c38327d44",
	Q5_0:    "bdaa4a81db7a0cdd",
	Q5_1:    "39d51f79c40b639e",
	Q5_K:    "e2e4f48ba5a0d880",
	Q6_K:    "4281f3495d6cd039",
	Q8_0:    "f57afee6ad3c2c82",
	TQ1_0:   "a55f81dcf3aa15d2",
	TQ2_0:   "ea770a3dee6ee3ac",
}

func TestDequantizeRandomBlocksEqualsGGML(t *testing.T) {
	dst := make([]float32, 1<<19)
	out := make([]byte, 4*len(dst))
	for _, typ := range blockTypes() {
		if typ >= firstOwn {
			continue // which it does not have
		}
		Dequantize(typ, dst, randomBlocks(typ, len(dst), uint64(typ)))
		for i, x := range dst {
			binary.LittleEndian.PutUint32(out[4*i:], math.Float32bits(x))
		}
		sum := sha256.Sum256(out)
		if got := hex.EncodeToString(sum[:8]); got != ggmlHash[typ] {
			t.Errorf("%v: hash %s, want %s", typ, got, ggmlHash[typ])
		}
	}
}

// checkUnpack wants the integers of each block of src, put together as the
// comment of Block says, to be the values that Dequantize gives.
func checkUnpack(t *testing.T, typ Type, src []byte) {
	t.Helper()
	elems, size := typ.Block()
	want := make([]float32, len(src)/size*elems)
	Dequantize(typ, want, src)
	unpack := UnpackerFor(typ)
	act := typ.ActBlock()
	for i := 0; i < len(want)/act; i++ {
		b := new(Block)
		for g := range b.Scale { // so that what must not be filled is seen
			b.Scale[g], b.Min[g] = 1, 1
		}
		unpack(b, src, i)
		for j := 0; j < act; j++ {
			g := j / 16
			if act == 32 && (b.Scale[g] != 1 || b.Min[g] != 1) {
				t.Fatalf("%v block %d: Scale or Min is filled", typ, i)
			}
			w := float64(b.W)
			if typ == NVFP4 && g == 1 {
				w = float64(b.W2)
			}
			scaled := w * float64(b.Scale[g]) * float64(b.Code[j])
			min := 0.0
			switch typ.Kind() {
			case Plus:
				min = float64(b.MinW) * float64(b.Min[g])
			case Minus:
				min = -float64(b.MinW) * float64(b.Min[g])
			}
			x := float64(want[i*act+j])
			if typ == MXFP4 && src[17*i] > 168 {
				continue // refused by Check; the values overflow
			}
			if typ == MXFP4 && src[17*i] < 83 {
				if b.W != 0 || math.Signbit(w) {
					t.Fatalf("MXFP4 exponent %d has scale %v, want +0", src[17*i], b.W)
				}
				continue
			}
			// Each of the three roundings of Dequantize is half an ulp of what
			// it rounds; 2^-22 of the parts is four halves.
			if err := math.Abs(scaled + min - x); err > (math.Abs(scaled)+math.Abs(min))*0x1p-22 {
				t.Fatalf("%v block %d element %d: the integers give %v, Dequantize %v", typ, i, j, scaled+min, x)
			}
		}
	}
}

func TestUnpackIsDequantize(t *testing.T) {
	for _, o := range oracles(t) {
		if o.Number.ActBlock() > 0 {
			checkUnpack(t, o.Number, o.enc)
		}
	}
	for _, typ := range blockTypes() {
		checkUnpack(t, typ, randomBlocks(typ, 64*256, 77))
	}
	for _, typ := range []Type{F32, F16, BF16, I8, F64, 5} {
		if UnpackerFor(typ) != nil {
			t.Errorf("%v has an Unpacker", typ)
		}
	}
}

// The integer ranges are what keeps S and M within int32 and float32's exact
// integers (ARITHMETIC: |S| at most 133.2e6 for 256 elements).
func TestUnpackKeepsSumsInRange(t *testing.T) {
	for _, typ := range blockTypes() {
		src := randomBlocks(typ, 64*256, 5)
		unpack, act := UnpackerFor(typ), typ.ActBlock()
		var b Block
		for i := 0; i < 64*256/act; i++ {
			unpack(&b, src, i)
			var s, m int64
			for j := 0; j < act; j++ {
				scale, min := int64(1), int64(0)
				if act == 256 {
					scale, min = int64(b.Scale[j/16]), int64(b.Min[j/16])
				}
				s += max(scale, -scale) * max(int64(b.Code[j]), -int64(b.Code[j])) * 127
				m += min * 127
			}
			if s > 133.2e6 || m > 133.2e6 {
				t.Fatalf("%v: S may reach %d, M %d", typ, s, m)
			}
		}
	}
}

func TestUnpackAllocatesNothing(t *testing.T) {
	dst := make([]float32, 512)
	b := new(Block)
	for _, typ := range blockTypes() {
		src := randomBlocks(typ, 512, 3)
		unpack := UnpackerFor(typ)
		if n := testing.AllocsPerRun(10, func() {
			unpack(b, src, 1)
			Dequantize(typ, dst, src)
			if Check(typ, src[:0]) != nil {
				t.Error("an empty row is refused")
			}
		}); n != 0 {
			t.Errorf("%v: %v allocations", typ, n)
		}
	}
}

// FuzzBlocks wants no panic on any whole blocks, Check to be right about what
// Dequantize gives, and the integers to give the same.
func FuzzBlocks(f *testing.F) {
	for typ := Type(0); typ < 64; typ++ {
		if _, size := typ.Block(); size > 0 {
			p := make([]byte, 4*size)
			fill(p, uint64(typ))
			f.Add(uint32(typ), p)
			for i := range p {
				p[i] = 0xff
			}
			f.Add(uint32(typ), p)
		}
	}
	f.Fuzz(func(t *testing.T, number uint32, data []byte) {
		typ := Type(number)
		elems, size := typ.Block()
		if size == 0 {
			if Check(typ, data) == nil {
				t.Fatalf("%v is unknown, and Check is content", typ)
			}
			return
		}
		if len(data)%size != 0 {
			if Check(typ, data) == nil {
				t.Fatalf("%d bytes are whole blocks of %v to Check", len(data), typ)
			}
			data = data[:len(data)/size*size]
		}
		err := Check(typ, data)
		if typ.Kind() == Data {
			return
		}
		dst := make([]float32, len(data)/size*elems)
		Dequantize(typ, dst, data)
		unpack := UnpackerFor(typ)
		var b Block
		for i := 0; unpack != nil && i < len(dst)/typ.ActBlock(); i++ {
			unpack(&b, data, i)
		}
		if err != nil {
			return
		}
		for i, x := range dst {
			if !(math.Abs(float64(x)) <= 0x1p60) {
				t.Fatalf("Check is content, and element %d of %v is %v", i, typ, x)
			}
		}
		if unpack != nil {
			checkUnpack(t, typ, data)
		}
	})
}
