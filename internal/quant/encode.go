package quant

import "fmt"

// Encode quantizes src into whole blocks of t.
func Encode(t Type, dst []byte, src []float32) error {
	return fmt.Errorf("quant: no encoder for %v", t)
}
