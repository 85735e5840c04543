package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// A run writes the trace of its routing, which replays; a table and JSON say
// the same.
func TestTraceAndReplay(t *testing.T) {
	trace := filepath.Join(t.TempDir(), "trace.csv")
	plain := mustRun(t, "run", tinyQwen3, "2", "-p", verse, "-n", "12", "--temp", "0", "--json").object(t)
	with := mustRun(t, "run", tinyQwen3, "2", "-p", verse, "-n", "12", "--temp", "0", "--json", "--trace", trace).object(t)
	for _, name := range []string{"logits_crc32c", "text"} {
		if with[name] != plain[name] {
			t.Errorf("%s is %v with a trace and %v without", name, with[name], plain[name])
		}
	}
	text, err := os.ReadFile(trace)
	if err != nil {
		t.Fatal(err)
	}
	prompt := len(with["prompt_ids"].([]any))
	if want := 1 + 1 + 3 + 1 + (prompt+11)*3*4; strings.Count(string(text), "\n") != want { // the last token is not run
		t.Errorf("%d lines, want %d for a prompt of %d", strings.Count(string(text), "\n"), want, prompt)
	}
	if _, err := os.Stat(trace + ".part"); err == nil {
		t.Error("the temporary file is left")
	}

	o := mustRun(t, "replay", trace, "--json").object(t)
	rows := o["rows"].([]any)
	var seen []string
	last := int64(0)
	for _, r := range rows {
		r := r.(map[string]any)
		if len(r) != 5 {
			t.Fatalf("row %v", r)
		}
		mib, all := number(t, r, "budget_mib"), fraction(t, r, "hit_pct_cum")
		if mib < last || all < 0 || all > 100 || fraction(t, r, "hit_pct_decode") > 100 || fraction(t, r, "read_mib") < 0 {
			t.Errorf("row %v", r)
		}
		last = mib
		if !slices.Contains(seen, r["policy"].(string)) {
			seen = append(seen, r["policy"].(string))
		}
	}
	if want := []string{"lru", "lfu", "layer", "layerlfu", "layer-aware", "belady"}; !slices.Equal(seen, want) {
		t.Errorf("policies %q, want %q", seen, want)
	}

	some := mustRun(t, "replay", trace, "--budget-mib", "2,1", "--policy", "belady,lru")
	lines := strings.Split(strings.TrimSpace(some.out), "\n")
	if len(lines) != 6 || !strings.HasPrefix(lines[0], "qwen3_moe.gguf: 3 layers, 16 experts each, top-4, 1 MiB") {
		t.Errorf("got\n%s", some.out)
	}
	for i, want := range []string{"2", "2", "1", "1"} { // as asked for
		if f := strings.Fields(lines[2+i]); f[0] != want {
			t.Errorf("line %q, want a budget of %s", lines[2+i], want)
		}
	}
	if in := sluice(string(text), "replay", "-", "--budget-mib", "1", "--policy", "lru"); in.code != exitDone || !strings.Contains(in.out, "lru") {
		t.Errorf("from standard input: exit %d, %s%s", in.code, in.out, in.err)
	}
}

// fraction reads a number of an object.
func fraction(t *testing.T, v any, key string) float64 {
	t.Helper()
	f, err := at(t, v, key).(json.Number).Float64()
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// The published curves come out of the command as they are printed.
func TestReplayPublished(t *testing.T) {
	root := os.Getenv("SLUICE_SHARED")
	if root == "" {
		root = filepath.Join("..", "..", "..", "shared")
	}
	trace := filepath.Join(root, "traces", "gpt-oss-120b.route.csv")
	if _, err := os.Stat(trace); err != nil {
		t.Skip("needs the shared oracles: set SLUICE_SHARED")
	}
	o := mustRun(t, "replay", trace, "--budget-mib", "1000,4000", "--policy", "lru,belady", "--json").object(t)
	want := "[1000 lru 12.769 17.665 70106.5] [1000 belady 31.435 43.49 55104.4] [4000 lru 37.38 51.714 50326.4] [4000 belady 52.769 73.003 37959.1]"
	var got []string
	for _, r := range o["rows"].([]any) {
		r := r.(map[string]any)
		got = append(got, fmt.Sprint([]any{r["budget_mib"], r["policy"], r["hit_pct_cum"], r["hit_pct_decode"], r["read_mib"]}))
	}
	if strings.Join(got, " ") != want {
		t.Errorf("got %s, want %s", strings.Join(got, " "), want)
	}
}

// Mistakes are told, with their place.
func TestReplayMistakes(t *testing.T) {
	dir := t.TempDir()
	bad := filepath.Join(dir, "bad.csv")
	if err := os.WriteFile(bad, []byte("# route_trace v1\nnonsense\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"replay"}, exitUsage, "want one trace, got 0 arguments"},
		{[]string{"replay", bad, bad}, exitUsage, "want one trace, got 2 arguments"},
		{[]string{"replay", bad, "--budget-mib", "0"}, exitUsage, "--budget-mib 0"},
		{[]string{"replay", bad, "--budget-mib", "99999999999999"}, exitUsage, "--budget-mib 99999999999999"},
		{[]string{"replay", bad, "--policy", "mru"}, exitUsage, `there is no policy "mru"`},
		{[]string{"replay", bad}, exitError, "bad.csv: trace, line 2"},
		{[]string{"replay", filepath.Join(dir, "none.csv")}, exitError, "none.csv"},
		{[]string{"run", tinyGLM4, "-p", "x", "--policy", "belady"}, exitUsage, "policy belady knows the future"},
		{[]string{"run", tinyGLM4, "-p", "x", "--policy", "mru"}, exitUsage, `there is no policy "mru": use one of lru, lfu`},
		{[]string{"run", tinyGLM4, "-p", "x", "--trace", filepath.Join(dir, "no", "trace.csv")}, exitError, "--trace: create"},
	} {
		if r := sluice("", tt.args...); r.code != tt.code || !strings.Contains(r.err, tt.want) {
			t.Errorf("%q: exit %d, %s; want %d, %q", tt.args, r.code, r.err, tt.code, tt.want)
		}
	}
}

// The surface on which drafts neither gain nor lose, from a trace alone.
func TestReplayDrafts(t *testing.T) {
	trace := filepath.Join(t.TempDir(), "t.csv")
	mustRun(t, "run", tinyGLM4, "2", "-p", verse, "-n", "30", "--temp", "0", "--trace", trace)
	o := mustRun(t, "replay", trace, "--draft", "1,4", "--budget-mib", "1", "--json").object(t)
	if n := len(texts(t, o, "rows")); n != 12 {
		t.Errorf("%d rows", n)
	}
	r := mustRun(t, "replay", trace, "--draft", "2", "--budget-mib", "1")
	if !strings.Contains(r.out, "drafts pay while I/O takes less of the time than this") || !strings.Contains(r.out, "a = 0.9 (union)") {
		t.Errorf("%s", r.out)
	}
	sluice("", "replay", trace, "--draft", "9").wants(t, exitUsage, "--draft 9: use depths of 1 to 8")
	sluice("", "replay", trace, "--draft", "1", "--policy", "belady").wants(t, exitUsage, "belady")
}
