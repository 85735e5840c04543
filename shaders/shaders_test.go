package shaders

import (
	"strings"
	"testing"
)

// Every kernel says that floats are rounded to nearest even and keep their
// zeros, and none lets a compiler fuse, reorder or approximate: each add, subtract
// and multiply is NoContraction, and nothing else computes with floats.
func TestBinaries(t *testing.T) {
	moves := map[string]bool{"copy": true, "planes": true, "planes_count": true, "dense_runs": true, "dense_choose": true} // compute with no floats
	entries, err := files.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		name := strings.TrimSuffix(e.Name(), ".spv.gz")
		words, err := Binary(name)
		if err != nil {
			t.Fatal(err)
		}
		const magic = 0x07230203
		if len(words) < 5 || words[0] != magic {
			t.Errorf("%s is no SPIR-V", name)
			continue
		}
		const (
			opExtInst, opExecutionMode, opDecorate    = 12, 16, 71
			opFNegate, opFAdd, opFSub, opFMul, opFDiv = 127, 129, 131, 133, 136
			opFRem, opFMod, opDot                     = 140, 141, 148
			signedZeroInfNanPreserve, roundingModeRTE = 4461, 4462
			noContraction                             = 42
			opAtomicFAdd                              = 6035
			opVectorTimesScalar, opOuterProduct       = 142, 147
			opGroupNonUniformFAdd, opGroupNonUniFMul  = 350, 352
			opGroupNonUniformFMin, opGroupNonUniFMax  = 355, 358
		)
		kept, floats, modes := map[uint32]bool{}, map[uint32]uint32{}, map[uint32]bool{}
		for i := 5; i < len(words); {
			op, n := words[i]&0xffff, int(words[i]>>16)
			if n == 0 || i+n > len(words) {
				t.Fatalf("%s: broken at word %d", name, i)
			}
			w := words[i : i+n]
			switch op {
			case opExecutionMode:
				if n == 4 && w[3] == 32 {
					modes[w[2]] = true
				}
			case opDecorate:
				if w[2] == noContraction {
					kept[w[1]] = true
				}
			case opFAdd, opFSub, opFMul:
				floats[w[2]] = op
			case opFDiv, opFRem, opFMod, opDot, opAtomicFAdd, opGroupNonUniformFAdd, opGroupNonUniFMul, opGroupNonUniformFMin, opGroupNonUniFMax:
				t.Errorf("%s: instruction %d, which the arithmetic does not know", name, op)
			case opExtInst:
				// Of GLSL.std.450: integer minimum and maximum alone (UMin 38, SMin 39, UMax 41, SMax 42).
				if f := w[4]; f != 38 && f != 39 && f != 41 && f != 42 {
					t.Errorf("%s: function %d of GLSL.std.450: exp, sqrt, fma and their like have bits of their own on each device", name, f)
				}
			default:
				if op >= opVectorTimesScalar && op <= opOuterProduct {
					t.Errorf("%s: instruction %d on vectors of floats", name, op)
				}
			}
			i += n
		}
		if !modes[signedZeroInfNanPreserve] || !modes[roundingModeRTE] {
			t.Errorf("%s: has float modes %v, want RoundingModeRTE and SignedZeroInfNanPreserve for 32 bits", name, modes)
		}
		if len(floats) == 0 && !moves[name] {
			t.Errorf("%s computes with no floats: is it read right?", name)
		}
		for id, op := range floats {
			if !kept[id] {
				t.Errorf("%s: instruction %d, result %%%d, is not NoContraction", name, op, id)
			}
		}
	}
}
