package arith

import "sluice/backends/cpu"

func Exp(x float32) float32     { return cpu.Exp(x) }
func Rcp(x float32) float32     { return cpu.Rcp(x) }
func Sigmoid(x float32) float32 { return cpu.Sigmoid(x) }
