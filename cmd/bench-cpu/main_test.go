package main

import (
	"strings"
	"testing"
)

// TestRun prints a line of finite numbers for each format, and refuses what cannot be.
func TestRun(t *testing.T) {
	var out strings.Builder
	if err := run([]string{"-rows", "512", "-cols", "256", "-pool", "64", "-samples", "1", "-types", "Q4_K,BF16"}, &out); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"Q4_K", "BF16"} {
		if !strings.Contains(out.String(), " "+name+" ") {
			t.Errorf("no line of %s in\n%s", name, out.String())
		}
	}
	for _, bad := range []string{"NaN", "Inf"} {
		if strings.Contains(out.String(), bad) {
			t.Errorf("%s in\n%s", bad, out.String())
		}
	}
	for _, args := range [][]string{{"-cols", "100"}, {"-kernels", "fast"}, {"-pool", "64", "-rows", "1000000"}, {"-x"}} {
		if run(args, &out) == nil {
			t.Errorf("%q gives no error", args)
		}
	}
}
