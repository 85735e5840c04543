package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A drive is measured by each mode, with every sample in the JSON.
func TestBenchStorage(t *testing.T) {
	args := []string{"bench", "storage", demo, "--size", "100kB,1MB", "--depths", "1,3", "--modes", "pread,mmap", "--seconds", "0.001", "--samples", "2"}
	r := mustRun(t, args...)
	if n := strings.Count(r.out, "\n"); n != 1+2*2*3 {
		t.Errorf("%d lines:\n%s", n, r.out)
	}
	var o struct {
		File  string
		Cells []struct {
			Mode, Order string
			Size        int64
			Depth       int
			Rate        float64 `json:"bytes_per_s"`
			Samples     []struct {
				Bytes int64
				NS    int64 `json:"ns"`
			}
		}
	}
	r = mustRun(t, append(args, "--json")...)
	if err := json.Unmarshal([]byte(r.out), &o); err != nil {
		t.Fatal(err)
	}
	if o.File != demo || len(o.Cells) != 12 {
		t.Fatalf("%+v", o)
	}
	for _, c := range o.Cells {
		if len(c.Samples) != 2 || c.Rate <= 0 || c.Size%4096 != 0 || c.Samples[1].Bytes < c.Size || c.Samples[1].NS <= 0 {
			t.Errorf("%+v", c)
		}
	}
	sluice("", "bench", "storage", filepath.Join(t.TempDir(), "none")).wants(t, exitError, "none")
}

// Two copies of a model give the text of one, and what is no copy is refused.
func TestCopies(t *testing.T) {
	data, err := os.ReadFile(tinyGLM4)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	same, longer := filepath.Join(dir, "same.gguf"), filepath.Join(dir, "longer.gguf")
	for path, b := range map[string][]byte{same: data, longer: append(data[:len(data):len(data)], 0)} {
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	run := []string{"run", "-p", "a", "-n", "5", "--cap", "1", "--temp", "0", "--json", "--model", tinyGLM4}
	var one, two struct {
		IDs     []int32 `json:"token_ids"`
		Witness string  `json:"logits_crc32c"`
		Drives  []struct {
			Path  string
			Bytes int64 `json:"read_bytes"`
		}
		Settings map[string]struct{ Value any }
	}
	for _, c := range []struct {
		args []string
		to   any
	}{{run, &one}, {append(run, "--model", same), &two}} {
		if err := json.Unmarshal([]byte(mustRun(t, c.args...).out), c.to); err != nil {
			t.Fatal(err)
		}
	}
	if one.Witness != two.Witness || len(one.Drives) != 1 || len(two.Drives) != 2 {
		t.Errorf("one drive %+v, two %+v", one, two)
	}
	for i, d := range two.Drives {
		if d.Bytes == 0 || d.Path != []string{tinyGLM4, same}[i] {
			t.Errorf("drive %d: %+v", i, d)
		}
	}
	if got := settings(t, append(run[:len(run):len(run)], "--model", same)...)["copies"]; !strings.Contains(got, same) || !strings.HasSuffix(got, "flag") {
		t.Errorf("copies is %s", got)
	}
	mustRun(t, append(run[:len(run):len(run)], "--model", same, "-n", "1")...).wants(t, exitDone, "copies: 2 with equal sizes and headers, and equal bytes at the start, the middle and the end of each of ")
	sluice("", append(run, "--model", longer)...).wants(t, exitError, "longer.gguf", "not copies of one model")
	sluice("", append(run, "--model", tinyGLM4)...).wants(t, exitError, "the same file")
}

// bench experts measures only what it is asked for, on a device that there is.
func TestBenchExpertsUsage(t *testing.T) {
	sluice("", "bench", "experts", "--shape", "7x").wants(t, exitUsage, `--shape "7x"`)
	sluice("", "bench", "experts", "--k", "17").wants(t, exitUsage, "--k 17: use 1 to 16")
	sluice("", "bench", "experts", "--types", "Q9").wants(t, exitUsage, "--types Q9: use some of")
	sluice("", "bench", "experts", "--types", "").wants(t, exitUsage, "--types names none: use some of F32")
	sluice("", "bench", "experts", "--types", "IQ4_NL").wants(t, exitUsage, "--types IQ4_NL: use some of F32") // which cannot be made up
	sluice("", "bench", "experts", "--shape", "64x64x64").wants(t, exitUsage, `--shape "64x64x64"`)
	sluice("", "bench", "experts", "--devices", "0,vulkan:0").wants(t, exitUsage, "vulkan:0 is named twice")
	sluice("", "bench", "experts", "--devices", "vulkan:99").wants(t, exitRefused, "ulkan") // no device, or no driver
	sluice("", "bench", "experts", "--samples", "0").wants(t, exitUsage, "--samples is 1 to 10000")
}
