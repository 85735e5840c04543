package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// ownDemo is a copy of the demo model that no other test reads or maps, so that
// it can leave the page cache, on the drive that the demo lies on.
func ownDemo(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp(".", "own-*.tmp")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	data, err := os.ReadFile(demo)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "demo.gguf")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); err != nil { // pages that are not on the drive yet stay
		t.Fatal(err)
	}
	return path
}

// Caps are compared by fresh processes, whose JSON is kept.
func TestBenchCap(t *testing.T) {
	demo := ownDemo(t)
	t.Setenv("SLUICE_TEST_MAIN", "1") // the processes are this binary again
	args := []string{"bench", "cap", demo, "--caps", "2,8", "--runs", "2", "-n", "4", "-p", "And it", "--threads", "1", "--seed", "3"}
	o := mustRun(t, append(args, "--json", "--cache", "cold")...).object(t)
	if len(texts(t, o, "samples")) != 4 || len(texts(t, o, "arms")) != 2 || len(texts(t, o, "comparisons")) != 1 || at(t, o, "cache") != "cold" || len(texts(t, o, "evicted")) != 1 {
		t.Errorf("%v", o)
	}
	if number(t, o, "settings", "seed", "value") != 3 || number(t, o, "settings", "threads", "value") != 1 || number(t, o, "settings", "tokens", "value") != 4 {
		t.Errorf("%v", at(t, o, "settings"))
	}
	if len(at(t, o, "binary_sha256").(string)) != 64 || len(at(t, o, "model", "identity").(string)) != 64 || at(t, o, "machine", "build", "go") == "" {
		t.Errorf("%v", o)
	}
	arms := at(t, o, "arms").([]any)
	per := func(i int) float64 {
		v, err := at(t, arms[i], "bytes_per_token").(interface{ Float64() (float64, error) }).Float64()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	if small, large := per(0), per(1); !(small > large && large >= 0) {
		t.Errorf("cap 2 reads %v bytes a token, cap 8 %v", small, large)
	}
	// What is counted while decoding sums up.
	for _, s := range at(t, o, "samples").([]any) {
		c := at(t, s, "run", "decode_counters")
		hits := number(t, c, "tier_hits", "lru") + number(t, c, "tier_hits", "pinned") + number(t, c, "tier_hits", "vram")
		if n := number(t, c, "routed_experts_total"); n == 0 || n != hits+number(t, c, "tier_misses") || n != number(t, s, "run", "decode_tokens")*6*4 {
			t.Errorf("%v", c)
		}
	}

	r := mustRun(t, args...)
	for _, want := range []string{"machine: ", "model: ", "binary: sha256 ", "cache: warm", "warm-up: cap 2 ", "block 1: cap 8 ", "cap 8 against cap 2: ", "n = 2 per side gives no p-value", "what this does not show"} {
		if !strings.Contains(r.out, want) {
			t.Errorf("the lines lack %q:\n%s", want, r.out)
		}
	}

	sluice("", "bench", "cap", demo, "--caps", "40,100").wants(t, exitArms, "bench: arms are the same: cap resolved to 32 in both\n")
	for want, args := range map[string][]string{
		"--caps 4,8,16":          {},
		"cap 0":                  {"--caps", "0,4"},
		"--caps":                 {"--caps", "4", "--cap", "8"},
		"-n at least 2":          {"--caps", "4", "-n", "1"},
		"--runs is at least 1":   {"--caps", "4", "--runs", "0"},
		"--cache":                {"--caps", "4", "--cache", "tepid"},
		"unexpected argument":    {"--caps", "4", "8"},
		"--print-config":         {"--caps", "4", "--print-config"},
		"unknown storage mode":   {"--caps", "4", "--storage", "tape"},
		"invalid argument \"x\"": {"--caps", "x"},
		"--threads 0":            {"--caps", "4", "--threads", "0"},
	} {
		sluice("", append([]string{"bench", "cap", demo}, args...)...).wants(t, exitUsage, want)
	}
	sluice("", "bench", "cap", filepath.Join(t.TempDir(), "none"), "--caps", "4").wants(t, exitError, "none")
}

// A model runs under a limit of memory in each mode, with equal logits.
func TestBenchLimit(t *testing.T) {
	demo := ownDemo(t)
	t.Setenv("SLUICE_TEST_MAIN", "1")
	r := sluice("", "bench", "limit", demo, "--memory", "300MiB", "-n", "3", "--json")
	if r.code != exitDone && strings.Contains(r.err, "no cgroup with a limit of memory can be made") {
		t.Skip(r.err)
	}
	if r.code != exitDone {
		t.Fatalf("exit %d: %s", r.code, r.err)
	}
	o := r.object(t)
	samples := at(t, o, "samples").([]any)
	if len(samples) != 2 || number(t, o, "limit_bytes") != 300<<20 {
		t.Fatalf("%v", o)
	}
	for i, mode := range []string{"slab", "mmap"} {
		s := samples[i]
		if at(t, s, "mode") != mode || number(t, s, "cgroup_peak_bytes") > 300<<20 || at(t, s, "run", "logits_crc32c") != at(t, samples[0], "run", "logits_crc32c") {
			t.Errorf("%v", s)
		}
	}
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/memory"} { // those of other processes are theirs
		if left, _ := filepath.Glob(fmt.Sprintf("%s/sluice-bench-%d-*", root, os.Getpid())); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	}
	for want, args := range map[string][]string{"--memory": {"--memory", "much"}, "--modes": {"--modes", "tape"}, "--storage": {"--storage", "slab"}, "-n at least 2": {"-n", "1"}} {
		sluice("", append([]string{"bench", "limit", demo}, args...)...).wants(t, exitUsage, want)
	}
	sluice("", "bench", "limits").wants(t, exitUsage, `unknown measurement "limits": use one of storage, cap, draft, experts, limit`)
	if _, err := os.Stat("bench-big.sh"); err != nil {
		t.Error(err)
	}
}
