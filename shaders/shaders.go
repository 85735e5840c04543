// Package shaders has the text of the GPU kernels and their compiled form. Each
// is headed by the Go loop that it equals, bit for bit.
//
// The .spv files are made of the .comp files by `make shaders` (glslc) and
// committed, so that a build needs no compiler of shaders; `make check` holds
// them against their sources.
package shaders

import (
	"embed"
	"encoding/binary"
	"fmt"
)

//go:embed *.spv
var files embed.FS

// Binary gives a shader's SPIR-V in words, by its name without .spv.
func Binary(name string) ([]uint32, error) {
	b, err := files.ReadFile(name + ".spv")
	if err != nil {
		return nil, fmt.Errorf("shaders: there is no %s", name)
	}
	words := make([]uint32, len(b)/4)
	for i := range words {
		words[i] = binary.LittleEndian.Uint32(b[4*i:])
	}
	return words, nil
}
