package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"sluice/backends/gpu"
	"sluice/backends/gpu/fake"
	"sluice/backends/vulkan"
)

// Whatever a GPU's driver does, a command ends with words that say what to do, and
// with the exit code of its kind: 3 where it refuses to begin, 1 where what it was
// doing fails. Where nobody asked for a GPU the CPU computes.
func TestDeviceFaults(t *testing.T) {
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("needs gcc, which compiles the kernels for this machine")
	}
	dir := t.TempDir()
	if _, err := fake.Build(dir, gpu.Types()); err != nil {
		t.Fatal(err)
	}
	old := t.TempDir() // a library that is no driver
	libc, err := filepath.Glob("/lib*/*/libc.so.6")
	if err != nil || len(libc) == 0 {
		t.Fatalf("no libc.so.6: %v", err)
	}
	if err := os.Symlink(libc[0], filepath.Join(old, "libcuda.so.1")); err != nil {
		t.Fatal(err)
	}
	sluice := func(path string, env []string, args ...string) result {
		var out, errw bytes.Buffer
		c := child(t, append(env, "LD_LIBRARY_PATH="+path, "XDG_CACHE_HOME="+t.TempDir()), append([]string{"run", tinyQwen3, "2", "-p", "a b", "-n", "2", "--temp", "0", "--ctx", "32"}, args...)...)
		c.Stdout, c.Stderr = &out, &errw
		c.Run()
		r := result{c.ProcessState.ExitCode(), out.String(), errw.String()}
		if strings.Contains(r.err, "goroutine ") || strings.Contains(r.err, "panic") || r.code < 0 {
			t.Errorf("%v %v: a dump:\n%s", env, args, r.err)
		}
		return r
	}
	cuda := []string{"--devices", "cuda:0"}
	vram := []string{"--devices", "cuda:0", "--vram", "8"}
	all := append(vram, "--gpu-dense")
	plain := sluice("", nil, "--backend", "cpu")
	plain.wants(t, exitDone)
	for _, c := range []struct {
		name string
		env  []string
		args []string
		code int
		want []string
	}{
		{"sound", nil, vram, exitDone, []string{"device cuda:0: Fake 0", "vram of cuda:0: 8 experts"}},
		{"no device", []string{"FAKE_FAIL=init 0 100"}, cuda, exitRefused, []string{"found no device"}},
		{"another version", []string{"FAKE_FAIL=init 0 803"}, cuda, exitRefused, []string{"another version", "restart the machine"}},
		{"no memory for a context", []string{"FAKE_FAIL=context 0 2"}, cuda, exitError, []string{"found no memory", "lower --vram"}},
		{"no memory for buffers", []string{"FAKE_FAIL=allocate 1 2"}, cuda, exitError, []string{"found no memory", "lower --vram"}},
		{"no memory for experts", []string{"FAKE_FAIL=allocate 3 2"}, vram, exitError, []string{"found no memory", "lower --vram"}},
		{"a small device", []string{"FAKE_TOTAL=600000000"}, []string{"--devices", "cuda:0", "--vram", "1GiB"}, exitDone, []string{"device cuda:0"}},
		{"compiler fails: embedded", []string{"FAKE_FAIL=compile 0 6"}, vram, exitDone, []string{"vram of cuda:0: 8 experts"}},
		{"kernels refused", []string{"FAKE_FAIL=module -2 218"}, cuda, exitRefused, []string{"refused the kernels", "update the GPU's driver"}},
		{"wrong numbers", []string{"FAKE_FLAW=1"}, cuda, exitRefused, []string{"unfit device", "IEEE 754", "--backend cpu"}},
		{"lost at its start", []string{"FAKE_FAIL=synchronize 0 719"}, cuda, exitError, []string{"lost the device", "--backend cpu"}},
		{"lost while experts are uploaded", []string{"FAKE_FAIL=copy 3 719"}, vram, exitError, []string{"lost the device"}},
		{"lost in the prompt", []string{"FAKE_FAIL=launch 12 700"}, vram, exitError, []string{"lost the device", "--backend cpu"}},
		{"lost while a group is waited for", []string{"FAKE_FAIL=synchronize 4 719"}, vram, exitError, []string{"lost the device"}},
		{"dense", nil, all, exitDone, []string{"gpu-dense: cuda:0 computes attention"}},
		{"dense: no GPU", []string{"FAKE_FAIL=init -1 100"}, []string{"--gpu-dense"}, exitRefused, []string{"--gpu-dense: ", "without a GPU leave it out"}},
		{"dense: a small device", []string{"FAKE_TOTAL=700000000"}, all, exitRefused, []string{"caches and vectors take", "lower --ctx"}},
		{"dense auto", nil, append(vram, "--gpu-dense=auto"), exitDone, []string{"gpu-dense: cuda:0 computes attention"}},
		{"dense auto: no GPU", []string{"FAKE_FAIL=init -1 100"}, []string{"--gpu-dense", "auto"}, exitDone, []string{"gpu-dense auto: off, since there is no GPU"}},
		{"dense auto: a small device", []string{"FAKE_TOTAL=700000000"}, append(vram, "--gpu-dense", "auto"), exitDone, []string{"gpu-dense auto: off, since dense weights, caches and vectors take", "are free (lower --ctx or --vram)"}},
		{"dense: no memory", []string{"FAKE_FAIL=allocate 20 2"}, all, exitError, []string{"found no memory", "lower --vram"}},
		{"dense: nothing can be pinned", []string{"FAKE_FAIL=pin 6 2"}, all, exitError, []string{"pinned host memory", "ulimit -l"}},
		{"dense: compiler fails", []string{"FAKE_FAIL=compile 2 6"}, all, exitDone, []string{"gpu-dense"}},
		{"dense: lost while the model is tried", []string{"FAKE_FAIL=launch 60 719"}, all, exitError, []string{"lost the device", "--backend cpu"}},
		{"dense: lost in the prompt", []string{"FAKE_FAIL=launch 230 700"}, all, exitError, []string{"lost the device", "--backend cpu"}},
		{"dense: lost while it is waited for", []string{"FAKE_FAIL=synchronize 60 719"}, all, exitError, []string{"lost the device"}},
		{"no graphs", []string{"FAKE_FAIL=capture 0 900"}, vram, exitError, []string{"error 900"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := sluice(dir, c.env, c.args...)
			if c.code == exitDone && r.out != plain.out {
				t.Errorf("it wrote %q, want %q", r.out, plain.out)
			}
			if c.code == exitError && strings.HasPrefix(plain.out, strings.TrimRight(r.out, "\n")) {
				r.out = "" // what it had written by then
			}
			r.wants(t, c.code, c.want...)
		})
	}
	sluice(old, nil, cuda...).wants(t, exitRefused, "lacks cuInit", "update the GPU's driver")
	// Nobody named a device.
	for _, fault := range []string{"FAKE_FLAW=1", "FAKE_FAIL=module -2 218", "FAKE_FAIL=init 0 803"} {
		r := sluice(dir, []string{fault}, "--backend", "cuda")
		r.wants(t, exitDone, "the CPU computes")
		if r.out != plain.out {
			t.Errorf("%s: it wrote %q, want %q", fault, r.out, plain.out)
		}
	}
	// Tensor cores that compute wrong numbers: whatever uses them is told of and not used.
	model := filepath.Join(dir, "moe.gguf")
	mustRun(t, "synth", "-o", model, "--arch", "qwen3moe", "--layers", "2", "--hidden", "256", "--ff", "256", "--experts", "8", "--top-k", "2")
	whole := func(env []string, args ...string) result {
		var out, errw bytes.Buffer
		c := child(t, append(env, "LD_LIBRARY_PATH="+dir, "XDG_CACHE_HOME="+dir), append([]string{"run", model, "8", "-p", "a b", "-n", "4", "--temp", "0", "--ctx", "32"}, args...)...)
		c.Stdout, c.Stderr = &out, &errw
		c.Run()
		return result{c.ProcessState.ExitCode(), out.String(), errw.String()}
	}
	want := whole(nil, "--backend", "cpu")
	for _, args := range [][]string{vram, all} {
		r, wrong := whole(nil, args...), whole([]string{"FAKE_FLAW_TILES=1"}, args...)
		r.wants(t, exitDone, "vram of cuda:0: 8 experts")
		wrong.wants(t, exitDone, "1 of the device's kernels gave other bits")
		if strings.Contains(r.err, "other bits") || r.out != want.out || wrong.out != want.out {
			t.Errorf("%v: it wrote %q, with wrong kernels %q, want %q\n%s", args, r.out, wrong.out, want.out, r.err)
		}
	}
}

// A dense model is computed on a GPU as a whole, with the bits of the CPU.
func TestDenseModelOnDevice(t *testing.T) {
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("needs gcc, which compiles the kernels for this machine")
	}
	dir := t.TempDir()
	if _, err := fake.Build(dir, gpu.Types()); err != nil {
		t.Fatal(err)
	}
	model, ids := filepath.Join(dir, "m.gguf"), filepath.Join(dir, "ids.json")
	mustRun(t, "synth", "-o", model, "--arch", "qwen3", "--layers", "2", "--hidden", "256", "--ff", "512")
	if err := os.WriteFile(ids, []byte("[1, 20, 300, 4, 5, 60, 7, 8, 9]"), 0o644); err != nil {
		t.Fatal(err)
	}
	logits := func(args ...string) []byte {
		out := filepath.Join(dir, "o.safetensors")
		c := child(t, []string{"LD_LIBRARY_PATH=" + dir, "XDG_CACHE_HOME=" + dir}, append([]string{"logits", model, "--ids", ids, "--ctx", "32", "--force", "-o", out}, args...)...)
		said, err := c.CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %v\n%s", args, err, said)
		}
		b, err := os.ReadFile(out)
		if err != nil {
			t.Fatal(err)
		}
		if on := strings.Contains(string(said), "computes attention"); on != (len(args) > 1 && args[1] == "--gpu-dense") {
			t.Errorf("%v: %s", args, said)
		}
		return b
	}
	for _, kv := range []string{"--kv=f16", "--kv=f32", "--kv=q8"} {
		want := logits(kv)
		devices := [][]string{{"--devices", "cuda:0"}, {"--backend", "hip", "--chunk", "4"}}
		if in, err := vulkan.Open(false); err == nil {
			in.Close()
			devices = append(devices, []string{"--devices", "vulkan:0"})
		}
		for _, args := range devices {
			if !bytes.Equal(logits(append([]string{kv, "--gpu-dense"}, args...)...), want) {
				t.Errorf("%s, %v: not the bits of the CPU", kv, args)
			}
		}
	}
}
