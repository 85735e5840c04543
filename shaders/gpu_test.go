package shaders

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// modules are what the kernels are compiled as: what all types share, the dense steps,
// and rows of each type of weights, by number.
var modules = []string{"", "dense", "0", "1", "2", "3", "6", "7", "8", "12", "13", "14", "20", "30", "39", "1000", "1001", "1002", "1003", "1004", "1005", "1006", "1007"}

// kernels are those of a module.
func kernels(module string) []string {
	switch module {
	case "":
		return []string{"quantize", "planes", "fetch"}
	case "dense":
		var all []string
		for _, m := range regexp.MustCompile(`(?m)^KERNEL\(\d+\) (\w+)\(`).FindAllStringSubmatch(dense, -1) {
			all = append(all, m[1])
		}
		return all
	}
	return []string{"rows_" + module, "rows1_" + module}
}

// Every float operation of the PTX is one rounding to nearest, and nothing is fused,
// approximated or flushed.
func TestPTX(t *testing.T) {
	float := regexp.MustCompile(`^\s+(@!?%p\d+ )?([a-z0-9]+)(\.[a-z0-9.:]*)?\s`)
	for _, name := range modules {
		text, err := PTX(name)
		if err != nil {
			t.Fatal(err)
		}
		ops := 0
		for line := range strings.Lines(string(text)) {
			m := float.FindStringSubmatch(line)
			if m == nil {
				continue
			}
			op, rest := m[2], m[3]
			switch {
			case op == "fma" || op == "ex2" || op == "sqrt" || op == "rsqrt" || op == "rcp" || op == "sin" || op == "cos" || op == "lg2" || op == "div" && strings.Contains(rest, ".f"):
				t.Errorf("PTX of %q: %s", name, strings.TrimSpace(line))
			case strings.Contains(rest, ".ftz") || strings.Contains(rest, ".approx"):
				t.Errorf("PTX of %q: %s", name, strings.TrimSpace(line))
			case (op == "add" || op == "sub" || op == "mul") && strings.HasSuffix(rest, ".f32"):
				if ops++; rest != ".rn.f32" {
					t.Errorf("PTX of %q: %s", name, strings.TrimSpace(line))
				}
			}
		}
		if ops == 0 {
			t.Errorf("PTX of %q computes with no floats: is it read right?", name)
		}
		for _, k := range kernels(name) {
			if !strings.Contains(string(text), ".entry "+k+"(") {
				t.Errorf("PTX of %q has no kernel %s", name, k)
			}
		}
	}
}

// All kernels compile for AMD's architectures without ROCm, and what should be one
// instruction is one: the products of four bytes. Nothing is fused.
func TestAMD(t *testing.T) {
	clang, err := exec.LookPath("clang-19")
	if err != nil {
		t.Skip("needs clang-19 and lld-19")
	}
	if _, err := exec.LookPath("ld.lld-19"); err != nil {
		t.Skip("needs clang-19 and lld-19")
	}
	dir := t.TempDir()
	for arch, dot := range map[string]string{"gfx906": "v_dot4", "gfx942": "v_dot4", "gfx1030": "v_dot4", "gfx1100": "v_dot4", "gfx1201": "v_dot4"} {
		for i, name := range modules {
			if testing.Short() && i%5 != 0 {
				continue
			}
			args := []string{"-x", "hip", "--offload-arch=" + arch, "--cuda-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib", "-O3", "-ffp-contract=off", "-mcode-object-version=4", "-DHIP", "-Wall", "-Wno-unused-function"}
			switch name {
			case "":
			case "dense":
				args = append(args, "-DDENSE")
			default:
				args = append(args, "-DTYPE="+name)
			}
			object := filepath.Join(dir, "k.co")
			compile := func(more ...string) *exec.Cmd {
				c := exec.Command(clang, append(args, append(more, "-")...)...)
				c.Stdin = strings.NewReader(GPU)
				return c
			}
			if name == "39" || name == "12" || name == "dense" { // and look at the code
				text, err := compile("-S", "-o", "-").CombinedOutput()
				if err != nil {
					t.Fatalf("%s, %q: %v\n%s", arch, name, err, text)
				}
				if name != "dense" && !bytes.Contains(text, []byte(dot)) {
					t.Errorf("%s, %q: no %s", arch, name, dot)
				}
				if fused := regexp.MustCompile(`(?m)^\s+v_(pk_)?(fma|mad|fmac|mac|fmaak|fmamk)_(legacy_)?f32.*`).Find(text); fused != nil {
					t.Errorf("%s, %q: %s", arch, name, fused)
				}
			}
			out, err := compile("-o", object).CombinedOutput()
			if err != nil || len(out) > 0 {
				t.Fatalf("%s, %q: %v\n%s", arch, name, err, out)
			}
			b, err := os.ReadFile(object)
			if err != nil || !bytes.HasPrefix(b, []byte("\x7fELF")) {
				t.Fatalf("%s, %q: no code object: %v", arch, name, err)
			}
			for _, k := range kernels(name) {
				if !bytes.Contains(b, []byte(k)) {
					t.Errorf("%s, %q: no kernel %s", arch, name, k)
				}
			}
		}
	}
}
