package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// doctor ends well on this machine, and with an error where a model is broken.
func TestDoctor(t *testing.T) {
	r := mustRun(t, "doctor", tinyGLM4, "--seconds", "0")
	for _, s := range []string{"build ", "kernel ", "io_uring ", "cpu ", "kernels ", "memory ", "swap ", "huge pages ", "limits ", "drive ", "gpu ", "libvulkan.so.1 ", "model ", "O_DIRECT "} {
		if !strings.Contains(r.out, s) {
			t.Errorf("the lines lack %q:\n%s", s, r.out)
		}
	}
	o := mustRun(t, "doctor", "--json", "--seconds", "0", "--model", tinyGLM4).object(t)
	if at(t, o, "model", "architecture") != "glm4moe" || number(t, o, "memory", "total_bytes") <= 0 || len(texts(t, o, "drives")) < 1 || len(texts(t, o, "gpu_libraries")) != 3 {
		t.Errorf("%v", o)
	}
	junk := filepath.Join(t.TempDir(), "junk.gguf")
	if err := os.WriteFile(junk, []byte("junk"), 0o666); err != nil {
		t.Fatal(err)
	}
	r = sluice("", "doctor", junk, "--seconds", "0")
	if r.code != exitError || !strings.Contains(r.out, "\n! broken: the model cannot be used: ") || !strings.Contains(r.err, "broken: 1") {
		t.Errorf("exit %d: %s%s", r.code, r.out, r.err)
	}
	sluice("", "doctor", "a", "b").wants(t, exitUsage, `unexpected argument "b"`)
	sluice("", "doctor", "--seconds", "-1").wants(t, exitUsage, "--seconds -1")
}
