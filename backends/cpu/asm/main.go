// Command asm writes the assembly of backends/cpu. It is a module of its own,
// so that those who build Sluice need none of what it needs.
//
//	go run . -out ../floats_amd64.s -stubs ../floats_amd64.go -pkg cpu floats
//
// writes one group of kernels; make generate writes all of them, and make check
// compares them with what is committed.
//
// Rules of the house: names end in their level, AVX2 or AVX512. VEX and EVEX
// encodings only (VMOVD, never MOVQ, to a vector register), VZEROUPPER before
// RET. No saturating instruction where it could saturate, no FMA where its
// product is not exact. Nothing is written beyond the ends of a slice, and
// nothing read, since a mapped file may end there.
package main

import (
	"flag"
	"fmt"
	"go/token"
	"go/types"
	"os"

	. "github.com/mmcloughlin/avo/build"
)

func main() {
	groups := map[string]func(){
		"floats":    floats,
		"rows256":   rows256,
		"rows512":   rows512,
		"tiles256":  tiles256,
		"tiles512":  tiles512,
		"vectors":   vectors,
		"attention": attention,
	}
	// Signatures may name these types of backends/cpu; avo looks no further than
	// the universe.
	for _, name := range []string{"rowArgs", "tileArgs", "unpackArgs", "floatArgs", "packArgs"} {
		t := types.NewTypeName(token.NoPos, nil, name, nil)
		types.NewNamed(t, types.NewStruct(nil, nil), nil)
		types.Universe.Insert(t)
	}
	flag.Parse()
	name := flag.Arg(0)
	group := groups[name]
	if group == nil {
		fmt.Fprintf(os.Stderr, "asm: no group of kernels %q\n", name)
		os.Exit(2)
	}
	group()
	os.Args = []string{os.Args[0], name} // what the file's first line tells: no paths of this machine
	Generate()
}
