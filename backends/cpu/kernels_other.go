//go:build !amd64

package cpu

var dotLanesKernels = []kernel[func(l *[16]float32, w, x []float32)]{{Go, dotLanes}}
