// Package fake makes a library that is a driver of CUDA and HIP without a GPU, for
// tests: testdata/fake.c, with the kernels of package shaders compiled for the host.
package fake

import (
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	"sluice/internal/quant"
	"sluice/shaders"
)

//go:embed testdata/fake.c
var driver []byte

//go:embed testdata/host.h
var host []byte

// Build compiles the library with gcc into a folder, with kernels of rows and groups of
// types, under the names that both drivers and their
// compilers are asked for.
func Build(dir string, types []quant.Type) (library string, err error) {
	for name, text := range map[string][]byte{"fake.c": driver, "host.h": host, "gpu.cu": []byte(shaders.GPU)} {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o644); err != nil {
			return "", err
		}
	}
	gcc := func(args ...string) error {
		c := exec.Command("gcc", args...)
		c.Dir = dir
		if out, err := c.CombinedOutput(); err != nil {
			return fmt.Errorf("fake: gcc: %w: %s", err, out)
		}
		return nil
	}
	link := []string{"-shared", "-o", "libcuda.so.1", "fake.o", "all.o", "dense.o"}
	compile := []string{"-x", "c", "-std=gnu11", "-O1", "-fPIC", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-fcf-protection=none", "-w", "-c"} // coroutines are no frames that a check of longjmp knows
	if err := gcc(append(compile, "fake.c", "-o", "fake.o")...); err != nil {
		return "", err
	}
	compile = append(compile, "-DHOST", "-include", "host.h", "gpu.cu", "-o")
	if err := gcc(append(compile, "all.o")...); err != nil {
		return "", err
	}
	if err := gcc(append(compile, "dense.o", "-DDENSE")...); err != nil {
		return "", err
	}
	for _, t := range types {
		object := fmt.Sprintf("%d.o", uint32(t))
		if err := gcc(append(compile, object, fmt.Sprintf("-DTYPE=%d", uint32(t)))...); err != nil {
			return "", err
		}
		link = append(link, object)
		if slices.Contains(shaders.Groups, uint32(t)) {
			object := fmt.Sprintf("group%d.o", uint32(t))
			if err := gcc(append(compile, object, "-DGROUP", fmt.Sprintf("-DTYPE=%d", uint32(t)))...); err != nil {
				return "", err
			}
			link = append(link, object)
		}
	}
	if err := gcc(link...); err != nil {
		return "", err
	}
	for _, name := range []string{"libnvrtc.so.13", "libamdhip64.so.7", "libhiprtc.so.7"} {
		if err := os.Symlink("libcuda.so.1", filepath.Join(dir, name)); err != nil {
			return "", err
		}
	}
	return filepath.Join(dir, "libcuda.so.1"), nil
}
