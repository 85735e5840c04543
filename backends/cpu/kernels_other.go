//go:build !amd64

package cpu

import "sluice/internal/quant"

var (
	dotLanesKernels = []kernel[func(l *[16]float32, w, x []float32)]{{Go, dotLanes}}
	packKernels     = []kernel[packKernel]{{level: Go}}
	scanKernels     = []kernel[func(p []byte) uint64]{{Go, scan}}
	sumRowsKernels  = []kernel[func(y, terms *float32, rows, blocks int)]{{Go, sumRows}}
)

func rowKernels(quant.Type) []kernel[rowKernel]     { return []kernel[rowKernel]{{level: Go}} }
func tileKernels(quant.Type) []kernel[tileKernel]   { return []kernel[tileKernel]{{level: Go}} }
func floatKernels(quant.Type) []kernel[floatKernel] { return []kernel[floatKernel]{{level: Go}} }
