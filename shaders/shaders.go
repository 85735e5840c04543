// Package shaders has the text of the GPU kernels and their compiled form. Each
// is headed by the Go loop that it equals, bit for bit.
//
// The .spv.gz files are made of the .comp files by `make shaders` (glslc) and
// committed, so that a build needs no compiler of shaders; `make check` holds
// them against their sources.
package shaders

import (
	"bytes"
	"compress/gzip"
	"embed"
	"encoding/binary"
	"fmt"
	"io"
)

//go:embed *.spv.gz
var files embed.FS

// Binary gives a shader's SPIR-V in words, by its name without .spv.
func Binary(name string) ([]uint32, error) {
	b, err := unpack(files, name+".spv.gz", "SPIR-V of "+name)
	if err != nil {
		return nil, err
	}
	words := make([]uint32, len(b)/4)
	for i := range words {
		words[i] = binary.LittleEndian.Uint32(b[4*i:])
	}
	return words, nil
}

// unpack reads a file that is packed by gzip; what says in errors what it is.
func unpack(in embed.FS, name, what string) ([]byte, error) {
	packed, err := in.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("shaders: there is no %s", what)
	}
	z, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		return nil, fmt.Errorf("shaders: %s: %w", what, err)
	}
	b, err := io.ReadAll(z)
	if err != nil {
		return nil, fmt.Errorf("shaders: %s: %w", what, err)
	}
	return b, nil
}
