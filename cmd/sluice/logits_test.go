package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sluice/internal/safetensors"
)

// TestLogits: the same bytes come of every run, cap, storage mode, number of
// threads and chunk, and the file is what it says.
func TestLogits(t *testing.T) {
	const n = 40
	var list []string
	for i := range n {
		list = append(list, fmt.Sprint(i*37%512))
	}
	ids := file(t, "ids.json", "["+strings.Join(list, ", ")+"]\n")
	dir := t.TempDir()
	for _, model := range []string{tinyGLM4, tinyQwen3} {
		var want []byte
		for i, flags := range []string{
			"", "", "1", "2", "4", "16", "--storage pread", "--storage mmap", "--storage mmap 1", "--threads 1", "--threads 2", "--threads 5",
			"--chunk 1", "--chunk 7", "--chunk 64", "1 --chunk 3 --threads 3 --storage pread",
		} {
			out := filepath.Join(dir, fmt.Sprint(i))
			r := mustRun(t, slices.Concat([]string{"logits", "--model", model, "--ids", ids, "-o", out}, strings.Fields(flags))...)
			if r.out != "" || !strings.Contains(r.err, fmt.Sprintf("wrote %s: logits [%d, 512], hidden_last [%d, 64]", out, n, n)) {
				t.Errorf("it wrote %q and told %q", r.out, r.err)
			}
			got, err := os.ReadFile(out)
			if err != nil {
				t.Fatal(err)
			}
			if want == nil {
				want = got
			} else if !bytes.Equal(got, want) {
				t.Errorf("%s with %q: other bytes", model, flags)
			}
		}
		if i := bytes.IndexByte(want, '}'); i < 0 || bytes.Contains(want[:i], []byte("metadata")) {
			t.Error("the header holds more than the tensors")
		}
	}

	f, err := safetensors.Open(filepath.Join(dir, "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var names []string
	for _, s := range f.Tensors() {
		names = append(names, fmt.Sprint(s.Name, s.DType, s.Shape))
	}
	if want := []string{"logitsF32[40 512]", "hidden_lastF32[40 64]"}; !slices.Equal(names, want) {
		t.Errorf("tensors %q, want %q", names, want)
	}
}

// TestLogitsJSON: the object and the counters.
func TestLogitsJSON(t *testing.T) {
	ids, out := file(t, "ids", "[5,6,7]"), filepath.Join(t.TempDir(), "out")
	o := mustRun(t, "logits", tinyGLM4, "2", "--ids", ids, "-o", out, "--json").object(t)
	if at(t, o, "output") != out || number(t, o, "counters", "positions_total") != 3 || number(t, o, "settings", "cap", "value") != 2 ||
		number(t, o, "load_ns") <= 0 || number(t, o, "resident_announced_bytes") <= 0 {
		t.Errorf("%v", o)
	}
}

// TestLogitsIDs: what is wrong with the ids is told, with the file, and no
// output is begun or touched.
func TestLogitsIDs(t *testing.T) {
	dir := t.TempDir()
	out := filepath.Join(dir, "out")
	if err := os.WriteFile(out, []byte("before"), 0o666); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		ids  string
		code int
		want string
	}{
		{"", exitError, "want a JSON array of token ids, such as [12, 7, 512]: unexpected end of JSON input"},
		{"[1,", exitError, "want a JSON array of token ids"},
		{"[1] [2]", exitError, "want a JSON array of token ids"},
		{"{}", exitError, "want a JSON array of token ids"},
		{`["a"]`, exitError, "want a JSON array of token ids"},
		{"[1.5]", exitError, "want a JSON array of token ids"},
		{"[4294967296]", exitError, "want a JSON array of token ids"},
		{"[]", exitError, "the array of token ids is empty"},
		{"null", exitError, "the array of token ids is empty"},
		{"[0,512]", exitError, "element 1 is token id 512, but the model's vocabulary has ids 0 to 511"},
		{"[-1]", exitError, "element 0 is token id -1, but the model's vocabulary has ids 0 to 511"},
		{"[1" + strings.Repeat(",1", 128) + "]", exitUsage, "129 tokens do not fit into a context of 128"},
	} {
		ids := file(t, "ids", c.ids)
		r := sluice("", "logits", tinyGLM4, "--ids", ids, "-o", out)
		r.wants(t, c.code, c.want)
		if c.code == exitError {
			r.wants(t, c.code, ids)
		}
	}
	sluice("", "logits", tinyGLM4, "--ids", filepath.Join(dir, "absent"), "-o", out).wants(t, exitError, "read the ids: open ", "absent: no such file or directory")
	sluice("", "logits", tinyGLM4, "--ids", dir, "-o", out).wants(t, exitError, "read the ids: ", "is a directory")
	untouched(t, out)
}

// untouched checks that the file holds "before" and is alone in its folder.
func untouched(t *testing.T, path string) {
	t.Helper()
	if b, err := os.ReadFile(path); err != nil || string(b) != "before" {
		t.Errorf("%s was changed: %q, %v", path, b, err)
	}
	list, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(list) != 1 {
		t.Errorf("%v beside it, %v", list, err)
	}
}

// TestLogitsOracle: ids as the reference implementation had them are taken.
func TestLogitsOracle(t *testing.T) {
	text, err := os.ReadFile("../engine/testdata/glm4_moe.oracle.json")
	if err != nil {
		t.Fatal(err)
	}
	var oracle struct {
		IDs []int32 `json:"input_ids"`
	}
	if err := json.Unmarshal(text, &oracle); err != nil {
		t.Fatal(err)
	}
	list, err := json.MarshalIndent(oracle.IDs, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(t.TempDir(), "out")
	r := mustRun(t, "logits", tinyGLM4, "--ids", file(t, "ids", string(list)), "-o", out, "--hidden", "--kv", "f32", "--chunk", "5")
	if want := fmt.Sprintf("hidden [4, %d, 64]", len(oracle.IDs)); !strings.Contains(r.err, want) {
		t.Errorf("it told %q, want %q", r.err, want)
	}
	got, want := openTensors(t, out), openTensors(t, "../engine/testdata/glm4_moe.oracle.safetensors")
	for _, name := range []string{"logits", "hidden"} {
		a, b := floats(t, got, name), floats(t, want, name)
		if len(a) != len(b) {
			t.Fatalf("%s: %d floats, the oracle has %d", name, len(a), len(b))
		}
		most, off := 0.0, 0.0
		for i := range b {
			most, off = max(most, math.Abs(float64(b[i]))), max(off, math.Abs(float64(a[i])-float64(b[i])))
		}
		if off > 1e-5*most {
			t.Errorf("%s differ by up to %.3g of %.3g", name, off, most)
		}
	}
}
