package main

import (
	"encoding/json"
	"regexp"
	"strings"
	"testing"
)

// --gpu-dense by Vulkan: what it takes is in the plan, the text is that of the CPU, and
// auto leaves a software device alone, in words.
func TestGPUDense(t *testing.T) {
	software := onSoftware(t)

	model := []string{tinyQwen3, "--ctx", "64", "--devices", "vulkan:0", "--vram", "8"}
	plan := func(args ...string) (vram map[string]int64, r result) {
		t.Helper()
		r = mustRun(t, append(append([]string{"plan", "--json", "--drive-rate", "2"}, model...), args...)...)
		var got struct {
			VRAM map[string]int64 `json:"vram_bytes"`
		}
		if err := json.Unmarshal([]byte(r.out), &got); err != nil {
			t.Fatal(err)
		}
		return got.VRAM, r
	}
	off, _ := plan()
	if off["dense"] != 0 || off["kv"] != 0 || off["scratch"] != 0 || off["experts"] == 0 || off["total"] != off["experts"] {
		t.Errorf("without: %v", off)
	}
	for _, args := range [][]string{{"--gpu-dense"}, {"--gpu-dense", "on"}, {"--gpu-dense=on", "--prefetch", "off"}} {
		on, r := plan(args...)
		if on["dense"] <= 0 || on["kv"] <= 0 || on["scratch"] <= 0 || on["experts"] != off["experts"] || on["total"] != on["dense"]+on["kv"]+on["scratch"]+on["experts"] {
			t.Errorf("%q: %v", args, on)
		}
		r = mustRun(t, append(append([]string{"plan", "--drive-rate", "2"}, model...), args...)...)
		if !strings.Contains(r.err, "gpu-dense: vulkan:0 computes attention, norms and dense weights") {
			t.Errorf("%q: %s", args, r.err)
		}
		for _, line := range strings.Split(r.out, "\n") {
			if f := strings.Fields(line); len(f) > 0 && (f[0] == "dense" || f[0] == "kv") && f[len(f)-1] == "-" {
				t.Errorf("%q: no VRAM in %q", args, line)
			}
		}
	}
	if auto, r := plan("--gpu-dense", "auto"); software && (auto["total"] != off["total"] || !strings.Contains(r.out, "gpu-dense auto: off, since vulkan:0 is software")) {
		t.Errorf("auto: %v\n%s", auto, r.out)
	}
	text := []string{"run", "-p", "a b", "-n", "4", "--temp", "0"}
	want := mustRun(t, append(text, tinyQwen3, "--ctx", "64", "--backend", "cpu")...).out
	r := mustRun(t, append(append(text, model...), "--gpu-dense")...)
	if r.out != want {
		t.Errorf("it wrote %q, want %q", r.out, want)
	}
	if !regexp.MustCompile(`decode experts: \d+ routed = \d+ from VRAM \(\d.*%\) \+ \d+ from RAM \(\d.*%\) \+ \d+ from the drive`).MatchString(r.err) {
		t.Errorf("it does not tell VRAM from RAM:\n%s", r.err)
	}
	// Nobody needs to choose among experts that all have room.
	text = append(text, tinyQwen3, "--ctx", "64", "--devices", "vulkan:0")
	if r := mustRun(t, text...); r.out != want || strings.Contains(r.err, "no usage history") || !strings.Contains(r.err, " + 0 from RAM (0.0%) + 0 from the drive") {
		t.Errorf("all experts in VRAM: it wrote %q, want %q:\n%s", r.out, want, r.err)
	}
	// Words that are no value of it are what they were.
	if r := sluice("", "plan", demo, "--gpu-dense=maybe"); r.code != exitUsage || !strings.Contains(r.err, `--gpu-dense: "maybe": use off, auto or on`) {
		t.Errorf("exit %d: %s", r.code, r.err)
	}
	if r := sluice("", "plan", demo, "--gpu-dense", "maybe"); r.code != exitUsage || !strings.Contains(r.err, `unexpected argument "maybe"`) {
		t.Errorf("exit %d: %s", r.code, r.err)
	}
}

// A plan needs no GPU: --gpu-dense on one that has room takes the dense weights, the
// caches, which leave RAM, and the vectors between steps.
func TestGPUDensePlan(t *testing.T) {
	plan := func(args ...string) (ram, vram map[string]int64) {
		t.Helper()
		var got struct {
			RAM  map[string]int64 `json:"ram_bytes"`
			VRAM map[string]int64 `json:"vram_bytes"`
		}
		r := mustRun(t, append([]string{"plan", demo, "--json", "--drive-rate", "2", "--vram", "8", "--devices", "vulkan:99"}, args...)...)
		if err := json.Unmarshal([]byte(r.out), &got); err != nil {
			t.Fatal(err)
		}
		return got.RAM, got.VRAM
	}
	ram, vram := plan()
	denseRAM, on := plan("--gpu-dense")
	if on["dense"] != ram["dense"] || on["kv"] != ram["kv"] || denseRAM["kv"] != 0 || on["scratch"] <= 0 || on["experts"] != vram["experts"] || vram["total"] != vram["experts"] {
		t.Errorf("without: RAM %v, VRAM %v; with: RAM %v, VRAM %v", ram, vram, denseRAM, on)
	}
	if auto, none := plan("--gpu-dense=auto"); none["total"] != vram["total"] || auto["kv"] != ram["kv"] {
		t.Errorf("auto: RAM %v, VRAM %v", auto, none)
	}
}
