//go:build !amd64

package cpu

// best is plain Go: there are no others for this architecture.
func best() (l Level, lacks string) { return Go, "an x86-64 processor" }
