package main

import (
	"bytes"
	"errors"
	"os/exec"
	"path/filepath"
	"testing"

	"sluice/backends/vulkan"
)

// onSoftware says whether the first Vulkan device is a software device, and skips a test
// where no Vulkan driver is.
func onSoftware(t *testing.T) bool {
	t.Helper()
	in, err := vulkan.Open(false)
	if errors.Is(err, vulkan.ErrNoDriver) {
		t.Skipf("needs a Vulkan driver: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	return in.Devices()[0].Software()
}

// Where the host sees a window of 256 MiB alone, --require-rebar refuses with exit 3,
// in words; without it they are a warning, experts go to the device's own memory
// through staging, and the text stays.
func TestReBAR(t *testing.T) {
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("needs gcc, which compiles a loader of Vulkan")
	}
	software := onSoftware(t)
	if !software {
		t.Skip("needs a software device as the first: the window is a fake, in front of memory of one type")
	}
	real, _ := filepath.Glob("/usr/lib/*/libvulkan.so.1")
	if len(real) == 0 {
		t.Skip("needs libvulkan.so.1 in /usr/lib")
	}
	dir := t.TempDir()
	if out, err := exec.Command("gcc", "-shared", "-fPIC", "-w", "-DREAL=\""+real[0]+"\"", "-o", filepath.Join(dir, "libvulkan.so.1"), "testdata/window.c", "-ldl").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	run := func(args ...string) result {
		var out, errw bytes.Buffer
		c := child(t, []string{"LD_LIBRARY_PATH=" + dir}, append([]string{"run", tinyQwen3, "2", "-p", "a b", "-n", "2", "--temp", "0", "--ctx", "32"}, args...)...)
		c.Stdout, c.Stderr = &out, &errw
		c.Run()
		return result{c.ProcessState.ExitCode(), out.String(), errw.String()}
	}
	const words = "warning: only 256 MiB of 16304 MiB VRAM is host-visible: Resizable BAR appears disabled. Enable Resizable BAR in firmware (BIOS/UEFI); the expert tier would land in system RAM and be slow."
	run("--devices", "vulkan:0", "--vram", "8", "--require-rebar").wants(t, exitRefused, words+" (--require-rebar)")
	r := run("--devices", "vulkan:0", "--vram", "8")
	r.wants(t, exitDone, words, "vram of vulkan:0: 8 experts")
	if plain := run("--backend", "cpu"); plain.out != r.out || plain.code != exitDone {
		t.Errorf("it wrote %q, want %q", r.out, plain.out)
	}
}
