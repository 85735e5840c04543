package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sluice/storage"
)

// copied is a copy of a model in a folder of its own.
func copied(t *testing.T, model string) string {
	t.Helper()
	b, err := os.ReadFile(model)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "m.gguf")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// pack, inspect, run and verify of one model, and of one that was damaged.
func TestPackCommand(t *testing.T) {
	model := copied(t, tinyQwen3)
	slab := strings.TrimSuffix(model, "gguf") + "slab"
	before := mustRun(t, "run", model, "--temp", "0", "-n", "8", "-p", "abc", "--json").object(t)
	if v := at(t, before, "settings", "slab", "value"); v != "none" {
		t.Errorf("the slab is %v before there is one", v)
	}
	r := mustRun(t, "pack", model, "--json").object(t)
	fi, err := os.Stat(slab)
	if err != nil {
		t.Fatal(err)
	}
	if number(t, r, "bytes") != fi.Size() || number(t, r, "experts") < 1 || number(t, r, "resumed_bytes") != 0 || at(t, r, "verified") != true || at(t, r, "seconds") == nil {
		t.Errorf("pack: %v", r)
	}
	after := mustRun(t, "run", model, "--temp", "0", "-n", "8", "-p", "abc", "--json").object(t)
	if at(t, after, "settings", "slab", "value") != slab || at(t, after, "settings", "slab", "origin") != "auto" {
		t.Errorf("the slab is %v", at(t, after, "settings", "slab"))
	}
	if at(t, before, "text") != at(t, after, "text") || at(t, before, "logits_crc32c") != at(t, after, "logits_crc32c") {
		t.Error("the slab gives another text or other logits")
	}
	if number(t, after, "counters", "host_checksum_retries") != 0 {
		t.Error("checksums were retried")
	}
	off := mustRun(t, "run", model, "--no-slab", "-p", "abc", "--json", "--print-config").object(t)
	if at(t, off, "settings", "slab", "value") != "off" || at(t, off, "settings", "slab", "origin") != "flag" {
		t.Errorf("--no-slab: %v", at(t, off, "settings", "slab"))
	}
	i := mustRun(t, "inspect", slab, "--json").object(t)
	if at(t, i, "format") != "slab" || len(at(t, i, "source", "identity").(string)) != 64 || len(at(t, i, "source", "files").([]any)) != 1 {
		t.Errorf("inspect: %v", i)
	}
	if out := mustRun(t, "inspect", slab).out; !strings.Contains(out, "packed from") {
		t.Error(out)
	}
	if at(t, mustRun(t, "inspect", model, "--json").object(t), "format") != "gguf" {
		t.Error("a GGUF file is of another format")
	}

	for _, path := range []string{model, slab} {
		v := mustRun(t, "verify", path, "--json").object(t)
		if len(at(t, v, "bad").([]any)) != 0 || at(t, v, "slab", "compared") != true {
			t.Errorf("verify %s: %v", path, v)
		}
	}
	damageLast(t, slab)
	for _, path := range []string{model, slab} {
		v := sluice("", "verify", path, "--json")
		if v.code != exitError {
			t.Errorf("verify %s: exit %d", path, v.code)
		}
		bad := at(t, v.object(t), "bad").([]any)
		if len(bad) != 1 || at(t, bad[0], "layer") == nil || at(t, bad[0], "expert") == nil || at(t, bad[0], "byte") == nil {
			t.Errorf("verify %s: %v", path, bad)
		}
		if v := sluice("", "verify", path); v.code != exitError || !strings.Contains(v.out, "expert") || !strings.Contains(v.out, "CRC-32C") {
			t.Errorf("verify %s: exit %d, %q", path, v.code, v.out)
		}
	}
	// A touched model is told so, and runs without the slab.
	if err := os.Chtimes(model, time.Time{}, time.Unix(1e9, 0)); err != nil {
		t.Fatal(err)
	}
	touched := mustRun(t, "run", model, "--temp", "0", "-n", "8", "-p", "abc", "--json")
	touched.wants(t, exitDone, "is not used", "another time")
	if at(t, touched.object(t), "text") != at(t, before, "text") {
		t.Error("without the slab, another text")
	}
	sluice("", "pack", slab, "-o", slab+"2").wants(t, exitError, "slab already")
	sluice("", "pack", model, "-o", model).wants(t, exitUsage, "which is read") // as synth and logits have it
	sluice("", "pack", model, "more").wants(t, exitUsage, "unexpected argument")
}

// damageLast flips a bit in the last expert of a slab.
func damageLast(t *testing.T, slab string) {
	t.Helper()
	m, err := storage.Open(slab)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	var off int64
	for _, x := range m.Tensors {
		if x.Stride != 0 {
			off = max(off, x.Off+(x.Dims[len(x.Dims)-1]-1)*x.Stride)
		}
	}
	b, err := os.ReadFile(slab)
	if err != nil {
		t.Fatal(err)
	}
	b[off] ^= 1
	if err := os.WriteFile(slab, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// An interrupted packing says that its part stays, and is told apart by its exit
// code; the next one resumes it.
func TestPackInterrupted(t *testing.T) {
	model := copied(t, tinyQwen3)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	var out, errw bytes.Buffer
	s := streams{strings.NewReader(""), &out, &errw}
	err := packCommand(ctx, s, []string{model})
	if !errors.Is(err, errInterrupted) || !strings.Contains(errw.String(), ".part stays") || !strings.Contains(errw.String(), "goes on") {
		t.Errorf("%v: %s", err, errw.String())
	}
	part := strings.TrimSuffix(model, "gguf") + "slab.part"
	if _, err := os.Stat(part); err != nil {
		t.Error(err)
	}
	sluice("", "run", part, "-p", "a").wants(t, exitError, "not whole")
	mustRun(t, "pack", model)
	if _, err := os.Stat(part); err == nil {
		t.Error("the .part is still there")
	}
}
