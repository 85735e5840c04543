package cpu

import "golang.org/x/sys/cpu"

// best gives the highest level that this CPU and its operating system run, and
// what they lack for the next.
func best() (l Level, lacks string) {
	x := &cpu.X86
	switch {
	case !x.HasAVX2 || !x.HasF16C:
		return Go, "AVX2 or F16C"
	case !x.HasAVX512F || !x.HasAVX512BW || !x.HasAVX512VL || !x.HasAVX512DQ || !x.HasAVX512VNNI:
		return AVX2, "one of AVX-512 F, BW, VL, DQ and VNNI"
	default:
		return AVX512, ""
	}
}
