package quant

import (
	"encoding/binary"
	"encoding/json"
	"math"
	"os"
	"testing"
)

// An oracle is 6 rows of 512 elements, encoded by ggml's quantizer, and what
// its C library decodes them to.
type oracle struct {
	Name   string  `json:"-"`
	Number Type    `json:"ggml_type"`
	Elems  int     `json:"block"`
	Bytes  int     `json:"block_bytes"`
	RMSE   float64 `json:"rmse"` // of the quantizer, against the values encoded
	enc    []byte
	dec    []float32
}

func oracles(t testing.TB) []oracle {
	t.Helper()
	text, err := os.ReadFile("testdata/index.json")
	if err != nil {
		t.Fatal(err)
	}
	var index map[string]oracle
	if err := json.Unmarshal(text, &index); err != nil {
		t.Fatal(err)
	}
	var all []oracle
	for name, o := range index {
		o.Name = name
		if o.enc, err = os.ReadFile("testdata/" + name + ".bin"); err != nil {
			t.Fatal(err)
		}
		dec, err := os.ReadFile("testdata/" + name + ".f32")
		if err != nil {
			t.Fatal(err)
		}
		o.dec = make([]float32, len(dec)/4)
		Dequantize(F32, o.dec, dec)
		all = append(all, o)
	}
	if len(all) != 25 {
		t.Fatalf("testdata has %d types, want 25", len(all))
	}
	return all
}

func TestDequantizeEqualsGGML(t *testing.T) {
	for _, o := range oracles(t) {
		t.Run(o.Name, func(t *testing.T) {
			if o.Number.String() != o.Name {
				t.Fatalf("type %d is named %v", o.Number, o.Number)
			}
			if e, b := o.Number.Block(); e != o.Elems || b != o.Bytes {
				t.Fatalf("block of %d elements in %d bytes, want %d in %d", e, b, o.Elems, o.Bytes)
			}
			got := make([]float32, len(o.dec))
			Dequantize(o.Number, got, o.enc)
			for i := range got {
				if math.Float32bits(got[i]) != math.Float32bits(o.dec[i]) {
					t.Fatalf("element %d is %v (%#08x), want %v (%#08x)", i,
						got[i], math.Float32bits(got[i]), o.dec[i], math.Float32bits(o.dec[i]))
				}
			}
		})
	}
}

func TestDequantizeF32KeepsBits(t *testing.T) {
	src := make([]byte, 4*4096)
	fill(src, 1)
	dst := make([]float32, 4096)
	Dequantize(F32, dst, src)
	for i, x := range dst {
		if want := binary.LittleEndian.Uint32(src[4*i:]); math.Float32bits(x) != want {
			t.Fatalf("element %d is %#08x, want %#08x", i, math.Float32bits(x), want)
		}
	}
}
