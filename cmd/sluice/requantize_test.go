package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// pack --quant of a model of floats: the slab is named for its type, told apart by
// inspect and verify, never taken for the model, and used where it is named.
func TestPackQuant(t *testing.T) {
	model := copied(t, tinyQwen3)
	slab := strings.TrimSuffix(model, "gguf") + "q4_0.slab"
	plain := mustRun(t, "run", model, "--temp", "0", "-n", "4", "-p", "abc", "--json").object(t)
	r := mustRun(t, "pack", model, "--quant", "Q4_0", "--json")
	r.wants(t, exitDone, "48 columns", "stay as they are")
	o := r.object(t)
	fi, err := os.Stat(slab)
	if err != nil {
		t.Fatal(err)
	}
	if at(t, o, "output") != slab || number(t, o, "bytes") != fi.Size() || number(t, o, "requantized") != 6 || at(t, o, "verified") != true {
		t.Errorf("pack: %v", o)
	}
	i := mustRun(t, "inspect", slab, "--json").object(t)
	if at(t, i, "format") != "slab" || at(t, i, "source", "requantized") != "6 tensors of BF16 to Q4_0" || len(at(t, i, "source", "files").([]any)) != 1 {
		t.Errorf("inspect: %v", at(t, i, "source"))
	}
	if out := mustRun(t, "inspect", slab).out; !strings.Contains(out, "requantized") {
		t.Error(out)
	}
	v := mustRun(t, "verify", slab, "--json")
	v.wants(t, exitDone, "requantized", "checksums")
	if len(at(t, v.object(t), "bad").([]any)) != 0 || at(t, v.object(t), "slab", "compared") != false {
		t.Errorf("verify: %v", v.object(t))
	}
	named := mustRun(t, "run", slab, "--temp", "0", "-n", "4", "-p", "abc", "--json").object(t)
	if at(t, named, "logits_crc32c") == at(t, plain, "logits_crc32c") {
		t.Error("4 bits give the logits of the model")
	}
	// Under the name of a lossless one.
	if err := os.Rename(slab, strings.TrimSuffix(model, "gguf")+"slab"); err != nil {
		t.Fatal(err)
	}
	beside := mustRun(t, "run", model, "--temp", "0", "-n", "4", "-p", "abc", "--json")
	beside.wants(t, exitDone, "is not used", "requantized", "name it as MODEL")
	if at(t, beside.object(t), "logits_crc32c") != at(t, plain, "logits_crc32c") {
		t.Error("a requantized slab was used for the model")
	}
	mustRun(t, "verify", model).wants(t, exitDone, "is not used")

	sluice("", "pack", model, "--quant", "q4_0", "-o", filepath.Join(filepath.Dir(model), "m.slab")).wants(t, exitUsage, "loses nothing")
	sluice("", "pack", model, "--quant", "q3_k").wants(t, exitUsage, "--quant", "q4_k, q8_0, q4_0 or mxfp4")
	sluice("", "pack", model, "--quant-dense", "").wants(t, exitUsage, "--quant-dense")
	sluice("", "pack", demo, "--quant", "q4_k", "-o", slab).wants(t, exitError, "nothing to requantize", "quantized already")
	if _, err := os.Stat(slab + ".part"); err == nil {
		t.Error("what is refused has left something")
	}
}
