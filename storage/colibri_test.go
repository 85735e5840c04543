package storage

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"sluice/internal/quant"
)

// The format of a matrix follows from the sizes of its codes and scales, in the
// order in which a container's own reader tries; a stamp must agree.
func TestColibriFormat(t *testing.T) {
	for _, tt := range []struct {
		rows, cols, codes, scales int64
		stamp                     string
		want                      string // the format and its group; else words of the error
	}{
		{2048, 6144, 2048 * 6144, 2048, "", "int8-row 6144"},
		{2048, 6144, 2048 * 6144, 16 * 48, "", "fp8-e4m3-b128 128"},
		{6144, 16384, 6144 * 16384, 6144, "", "int8-row 16384"}, // both fit
		{6144, 16384, 6144 * 16384, 6144, "fp8-e4m3-b128", "fp8-e4m3-b128 128"},
		{6144, 16384, 6144 * 16384, 6144, "int8-row", "int8-row 16384"},
		{2048, 6144, 2048 * 3072, 2048, "", "int4-row 6144"},
		{2048, 6144, 2048 * 3072, 2048 * 96, "", "int4-grouped 64"},
		{2048, 6144, 2048 * 3072, 2048 * 96, "int4-grouped", "int4-grouped 64"},
		{2048, 6144, 2048 * 3072, 2048 * 192, "", "int4-grouped 32"},
		{2048, 6144, 2048 * 3072, 2048 * 48, "", "int4-grouped 128"},
		{2048, 6144, 2048 * 3072, 2048 * 32, "", "int4-grouped 192"},
		{2048, 6144, 2048 * 3072, 2048 * 24, "", "int4-grouped 256"},
		{2048, 6144, 2048 * 1536, 2048, "", "int2-row 6144"},
		{2048, 6144, 2048 * 2304, 2048 * 96, "", "int3-g64 64"},
		{2048, 6144, 2048 * 2304, 2048 * 96, "int3-g64", "int3-g64 64"},
		{2048, 6144, 2048 * 24 * 98, 1, "", "E8 lattice"},
		{2048, 6144, 2048 * 24 * 98, 1, "e8-iq3-lattice", "E8 lattice"},
		{2048, 6144, 2048 * 3072, 2048 * 384, "", "each 16 columns"},
		{2048, 6144, 2048 * 3072, 2048 * 128, "", "each 48 columns"},
		{2048, 6100, 2048 * 6100, 2048, "", "multiples of 32"},
		{2048, 6144, 2048 * 3072, 2047, "", "6291456 bytes of codes and 8188 bytes of scales"},
		{2048, 6144, 2048*3072 - 1, 2048, "", "6291455 bytes of codes and 8192 bytes of scales"},
		{2048, 6144, 2048 * 6144, 2048, "int4-row", "which its stamp int4-row does not fit"},
		{2048, 6144, 2048 * 6144, 2048, "int5-row", "int5-row"},
	} {
		f, err := coliFormatOf(tt.rows, tt.cols, tt.codes, tt.scales, tt.stamp)
		got := fmt.Sprintf("%s %d", f.name, f.group)
		if err != nil {
			got = err.Error()
		}
		if err == nil && got != tt.want || !strings.Contains(got, tt.want) {
			t.Errorf("[%d, %d] of %d codes and %d scales, stamp %q: %s, want %s", tt.rows, tt.cols, tt.codes, tt.scales, tt.stamp, got, tt.want)
		}
	}
}

// What is woven of random codes and scales are the numbers that the container's
// description gives them.
func TestColibriRows(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	const rows = 3
	for _, tt := range []struct {
		w           weave
		cols, group int64
	}{{coli8, 256, 256}, {coli8, 96, 96}, {coli4, 256, 256}, {coli4, 192, 192}, {coli4, 96, 96}, {coli4, 96, 64}, {coli4, 256, 32}, {coli4, 512, 256}, {coli3, 192, 64}, {coli3, 96, 64}, {coli2, 128, 128}, {coli2, 96, 96}} {
		across := (tt.cols + tt.group - 1) / tt.group
		codes, scale := make([]byte, rows*tt.w.coliBytes(tt.cols)), make([]byte, 4*rows*across)
		for i := range codes {
			codes[i] = byte(rng.Uint32())
		}
		for i := range rows * across {
			binary.LittleEndian.PutUint32(scale[4*i:], math.Float32bits(float32(rng.NormFloat64())))
		}
		f := form{weave: tt.w, typ: coliType(tt.w, tt.group, tt.cols), rows: rows, cols: tt.cols, step: 1, all: rows,
			scale: scales{rows: rows, cols: across, high: 1, wide: tt.group, typ: quant.F32}}
		size := f.typ.RowBytes(int(tt.cols))
		made, got := make([]byte, rows*size), make([]float32, tt.cols)
		f.share(made, codes, scale)
		for r := range rows {
			quant.Dequantize(f.typ, got, made[r*size:(r+1)*size])
			row := codes[int64(r)*tt.w.coliBytes(tt.cols):]
			for k, g := range got {
				var q int
				switch tt.w {
				case coli8:
					q = int(int8(row[k]))
				case coli4:
					q = int(row[k/2]>>(4*(k%2))&15) - 8
				case coli3:
					b := row[k/64*24:]
					k := k % 64
					q = int(b[k/4]>>(2*(k%4))&3) + int(b[16+k/8]>>(k%8)&1)*4 - 4
				default:
					q = int(row[k/4]>>(2*(k%4))&3) - 2
				}
				s := math.Float32frombits(binary.LittleEndian.Uint32(scale[4*(int64(r)*across+int64(k)/tt.group):]))
				if want := float32(q) * s; g != want {
					t.Fatalf("%+v as %v: row %d, column %d is %v, want %v", tt, f.typ, r, k, g, want)
				}
			}
		}
	}
}

// Stamps are read from the metadata of a header.
func TestColibriStamps(t *testing.T) {
	const ok = `{"__metadata__":{"colibri.fmt":"{\"a.weight\":\"int8-row\"}","format":"pt"},"a.weight":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}`
	got, err := coliStamps([]byte(ok))
	if err != nil || string(got) != `{"a.weight":"int8-row"}` {
		t.Errorf("got %q, %v", got, err)
	}
	if got, err := coliStamps([]byte(`{"colibri.fmt":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}`)); got != nil || err != nil {
		t.Errorf("a tensor of that name is a stamp: %q, %v", got, err)
	}
	c := composer{m: &Model{Files: []File{{Path: "out.safetensors", stamps: []byte(`["a"]`)}}}, fmts: map[string]string{}}
	if err := c.stamps(); err == nil || !strings.Contains(err.Error(), "colibri.fmt") {
		t.Errorf("an array of stamps: %v", err)
	}
}

// Whatever config.json, sizes and stamps say, a pair is refused in words, or what
// is woven of it lies within its bytes and fills its rows.
func FuzzColibri(f *testing.F) {
	f.Add("model.layers.0.self_attn.q_proj.weight", int64(64), int64(2), int64(32), int64(64*64), int64(64), "")
	f.Add("model.layers.3.mlp.experts.7.down_proj.weight", int64(64), int64(2), int64(96), int64(64*48), int64(64*2), "int4-grouped")
	f.Add("lm_head.weight", int64(192), int64(1), int64(100), int64(100*72), int64(300), "int3-g64")
	f.Add("model.layers.9.eh_proj.weight", int64(128), int64(1), int64(1), int64(128*256), int64(2), "fp8-e4m3-b128")
	f.Fuzz(func(t *testing.T, name string, dim, heads, other, codes, scales int64, stamp string) {
		if codes < 1 || codes > 1<<20 || scales < 0 || scales > 1<<18 || name+".qs" == name {
			return
		}
		meta := newMeta("config.json")
		for _, key := range []string{"moe_intermediate_size", "intermediate_size", "vocab_size", "head_dim", "q_lora_rank", "n_shared_experts"} {
			meta.add(KV{configPrefix + key, other}, -1)
		}
		meta.add(KV{configPrefix + "hidden_size", dim}, -1)
		meta.add(KV{configPrefix + "num_attention_heads", heads}, -1)
		m := &Model{Format: "safetensors", Meta: meta, Files: []File{{Path: "x", Size: codes + 4*scales}}, byName: map[string]int{}}
		c := composer{m: m, fmts: map[string]string{name: stamp}}
		pair := [2]rawTensor{}
		pair[0].Name, pair[0].DType, pair[0].Shape, pair[0].Bytes = name, "U8", []int64{codes}, codes
		pair[1].Name, pair[1].DType, pair[1].Shape, pair[1].Bytes, pair[1].Off = name+".qs", "F32", []int64{scales}, 4*scales, codes
		if err := c.colibri(&pair[0], &pair[1]); err != nil {
			if !strings.Contains(err.Error(), "tensor ") {
				t.Fatal(err)
			}
			return
		}
		x := c.out[0]
		if x.form == nil {
			return
		}
		if x.Bytes > 1<<24 {
			t.Fatalf("%d bytes of codes become %d", codes, x.Bytes)
		}
		x.form.share(make([]byte, x.Bytes), make([]byte, codes), make([]byte, 4*scales))
	})
}
