package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sluice/backends/cpu"
)

// TestKernelsByEnvironment: SLUICE_CPU chooses the kernels, which is told, and
// a mistake in it is one of usage.
func TestKernelsByEnvironment(t *testing.T) {
	best, err := cpu.Choose(cpu.Auto)
	if err != nil {
		t.Fatal(err)
	}
	for value, want := range map[string]string{"": best.String() + " auto", "auto": best.String() + " auto", "go": "go environment"} {
		t.Setenv("SLUICE_CPU", value)
		r := mustRun(t, "run", tinyQwen3, "--print-config")
		if !strings.Contains(strings.Join(strings.Fields(r.out), " "), "cpu-kernels "+want) {
			t.Errorf("SLUICE_CPU=%q: no cpu-kernels %s in\n%s", value, want, r.out)
		}
	}
	t.Setenv("SLUICE_CPU", "fast")
	sluice("", "run", tinyQwen3, "-p", "a").wants(t, exitUsage, `SLUICE_CPU: unknown set of CPU kernels "fast": use auto, go, avx2, avx512`)
}

// TestKernelsAgree: logits of a prompt, in one pass and in several, are the same
// file from all kernels that this CPU has.
func TestKernelsAgree(t *testing.T) {
	dir := t.TempDir()
	var list []string
	for i := range 40 {
		list = append(list, fmt.Sprint(i*7%200))
	}
	ids := file(t, "ids", "["+strings.Join(list, ",")+"]")
	for _, model := range []string{tinyQwen3, tinyGLM4, demo} {
		var want []byte
		for l := cpu.Go; l <= cpu.AVX512; l++ {
			if _, err := cpu.Choose(l); err != nil {
				t.Log("skipped:", err)
				continue
			}
			for _, chunk := range []string{"40", "7"} {
				t.Setenv("SLUICE_CPU", l.String())
				out := filepath.Join(dir, "logits")
				mustRun(t, "logits", model, "--ids", ids, "-o", out, "--chunk", chunk)
				got, err := os.ReadFile(out)
				if err != nil {
					t.Fatal(err)
				}
				if want == nil {
					want = got
				}
				if !bytes.Equal(got, want) {
					t.Errorf("%s: logits of kernels %v by chunks of %s differ from plain Go's", filepath.Base(model), l, chunk)
				}
			}
		}
	}
}
