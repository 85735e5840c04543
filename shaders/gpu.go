package shaders

import "embed"

//go:embed gpu.cu
var products string

//go:embed dense.cu
var dense string

//go:embed group.cu
var group string

// GPU is the source of the kernels of CUDA and HIP.
var GPU = products + dense + group

// Groups are the types of weights, by number, that have a kernel for groups of experts
// in one launch.
var Groups = []uint32{8, 12, 39}

//go:embed ptx/*.gz
var ptx embed.FS

// PTX gives the kernels of GPU as clang made them for NVIDIA devices from sm_61
// on, in PTX, which drivers compile: those of a type of weights by its number,
// with "" those that all types share, with "dense" those of the other steps.
func PTX(name string) ([]byte, error) {
	if name == "" {
		name = "all"
	}
	return unpack(ptx, "ptx/"+name+".ptx.gz", "PTX of "+name)
}
