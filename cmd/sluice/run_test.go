package main

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sluice/storage"
)

const verse = "And it came to pass in those days, that"

// flatten lists the names of all counters, labels in braces.
func flatten(v map[string]any) (names []string) {
	for name, c := range v {
		if labels, ok := c.(map[string]any); ok {
			for l := range labels {
				names = append(names, name+"{"+l+"}")
			}
			continue
		}
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// TestRunJSON: one object with everything in it, and sums that are right.
func TestRunJSON(t *testing.T) {
	const cap, tokens = 3, 20
	r := mustRun(t, "run", tinyGLM4, fmt.Sprint(cap), "-p", verse, "-n", fmt.Sprint(tokens), "--temp", "0", "--json")
	o := r.object(t)
	if r.err != "" && !strings.HasPrefix(r.err, "prefetch paused: ") { // which depends on the machine
		t.Errorf("standard error: %s", r.err)
	}
	for _, name := range []string{
		"settings", "counters", "text", "token_ids", "prompt_ids", "why", "load_ns", "prefill_ns", "prefill_tokens", "decode_ns", "decode_tokens",
		"tok_per_s", "prefill_tok_per_s", "logits_crc32c", "resident_announced_bytes", "expert_wait_ns", "attention_ns", "experts_ns", "dense_ns",
		"router_ns", "sampling_ns", "reduction_ns",
	} {
		if o[name] == nil {
			t.Errorf("the object has no %s", name)
		}
	}
	for _, name := range []string{
		"model", "cap", "policy", "storage", "threads", "chunk", "ctx", "kv", "temp", "top-k", "top-p", "min-p", "repeat-penalty", "seed", "tokens", "chat",
	} {
		s := at(t, o, "settings", name)
		if origin := at(t, s, "origin"); !slices.Contains([]any{"flag", "argument", "file", "default", "auto"}, origin) {
			t.Errorf("%s comes from %v", name, origin)
		}
		at(t, s, "value")
	}
	if s := at(t, o, "settings", "cap"); number(t, s, "value") != cap || at(t, s, "origin") != "argument" {
		t.Errorf("cap: %v", s)
	}
	counters, _ := at(t, o, "counters").(map[string]any)
	want := []string{
		"cap_changes", "command_buffer_rerecords", "device_read_bytes", "distinct_experts_total", "draft_accepted", "draft_evictions", "draft_proposed", "draft_shadows", "draft_state_changes",
		"draft_wasted_bytes", "draft_wasted_loads", "emitted_tokens_total", "evictions{lru}", "evictions{vram}", "forwards_total", "gpu_launches_total", "host_checksum_retries", "host_load_bytes", "host_load_wait_ns",
		"host_loads_dropped", "host_loads_failed", "host_loads_total{mmap}", "host_loads_total{pread}", "host_loads_total{slab}",
		"host_read_bytes", "host_read_retries", "loads_avoided{lru}", "loads_avoided{pinned}", "loads_avoided{vram}", "major_faults", "marginal_hits{lru}", "marginal_hits{pinned}", "marginal_hits{vram}", "minor_faults",
		"pin_failures", "pinned_bytes", "positions_total", "prefetch_guessed", "prefetch_guessed_right", "prefetch_issued", "prefetch_late", "prefetch_skipped_vram", "prefetch_used",
		"prefetch_wasted", "prefetch_wasted_bytes", "preload_bytes", "preload_loads", "routed_experts_total", "rss_bytes",
		"rss_peak_bytes", "tier_hits{lru}", "tier_hits{pinned}", "tier_hits{vram}", "tier_misses", "tier_upload_bytes", "tier_upload_direct_bytes", "tier_upload_gbps", "tier_upload_ns", "tier_upload_s", "vram_allocated_bytes", "vram_driver_bytes", "vram_payload_bytes", "vram_swaps",
	}
	if got := flatten(counters); !slices.Equal(got, want) {
		t.Errorf("counters %q\nwant %q", got, want)
	}

	count := func(keys ...string) int64 { return number(t, o, append([]string{"counters"}, keys...)...) }
	prompt, ids := len(texts(t, o, "prompt_ids")), len(texts(t, o, "token_ids"))
	if o["why"] != "length" || ids != tokens {
		t.Fatalf("%d tokens, ended by %v", ids, o["why"])
	}
	inspect := mustRun(t, "inspect", tinyGLM4, "--json").object(t)
	layers, topK := number(t, inspect, "moe_layers"), number(t, inspect, "top_k")
	hits := count("tier_hits", "vram") + count("tier_hits", "pinned") + count("tier_hits", "lru")
	loads := count("host_loads_total", "slab") + count("host_loads_total", "pread") + count("host_loads_total", "mmap")
	misses := count("tier_misses")
	ahead := count("prefetch_issued") - count("prefetch_used") // read for nothing
	for _, eq := range []struct {
		what      string
		got, want int64
	}{
		{"emitted tokens", count("emitted_tokens_total"), tokens},
		{"positions: the last token is not run", count("positions_total"), int64(prompt) + tokens - 1},
		{"forwards: one for the prompt, one for each token after the first", count("forwards_total"), tokens},
		{"routed experts: top-k for each position and layer", count("routed_experts_total"), count("positions_total") * layers * topK},
		{"hits and misses", hits + misses, count("routed_experts_total")},
		{"loads", loads, misses},
		{"reads ahead for nothing", count("prefetch_wasted"), ahead},
		{"loaded bytes", count("host_load_bytes"), misses * number(t, inspect, "bytes_per_expert")},
		{"bytes read ahead for nothing", count("prefetch_wasted_bytes"), ahead * number(t, inspect, "bytes_per_expert")},
		{"experts that stayed", misses - count("evictions", "lru"), cap * layers},
		{"failed loads", count("host_loads_failed"), 0},
		{"dropped loads", count("host_loads_dropped"), 0},
		{"prompt", number(t, o, "prefill_tokens"), int64(prompt)},
		{"decoded tokens", number(t, o, "decode_tokens"), tokens - 1},
	} {
		if eq.got != eq.want {
			t.Errorf("%s: %d, want %d", eq.what, eq.got, eq.want)
		}
	}
	if count("distinct_experts_total") > count("routed_experts_total") || count("distinct_experts_total") < misses {
		t.Errorf("%d distinct experts of %d routed, %d misses", count("distinct_experts_total"), count("routed_experts_total"), misses)
	}
	if count("host_read_bytes") < count("host_load_bytes") || count("rss_bytes") > count("rss_peak_bytes") || count("rss_bytes") <= 0 {
		t.Errorf("read %d for %d bytes; resident %d, at most %d", count("host_read_bytes"), count("host_load_bytes"), count("rss_bytes"), count("rss_peak_bytes"))
	}
}

// TestStageTimes: the stages sum to the time of decoding. A busy machine may
// take the processor away between two of them, so the best of some runs counts.
func TestStageTimes(t *testing.T) {
	best := 1.0
	for range 8 {
		o := mustRun(t, "run", tinyGLM4, "4", "-p", verse, "-n", "60", "--temp", "0", "--json").object(t)
		sum := int64(0)
		for _, s := range []string{"expert_wait", "attention", "experts", "dense", "router", "sampling", "reduction"} {
			n := number(t, o, s+"_ns")
			if n < 0 {
				t.Errorf("%s took %d ns", s, n)
			}
			sum += n
		}
		decode := number(t, o, "decode_ns")
		if sum > decode {
			t.Errorf("the stages sum to %d ns, decoding took %d", sum, decode)
		}
		if best = min(best, float64(decode-sum)/float64(decode)); best <= 0.02 || raceEnabled { // what the race detector adds lies between the stages too
			return
		}
	}
	t.Errorf("%.1f %% of the time of decoding belong to no stage, want at most 2 %%", 100*best)
}

// TestExplainCounters: a definition for each counter that is printed, no other.
func TestExplainCounters(t *testing.T) {
	counters, _ := at(t, mustRun(t, "run", tinyGLM4, "-p", "a", "-n", "1", "--json").object(t), "counters").(map[string]any)
	for _, command := range []string{"run", "perplexity", "logits"} {
		r := mustRun(t, command, "no-such-model", "--explain-counters") // nothing is opened
		var names []string
		for line := range strings.Lines(r.out) {
			name, definition, _ := strings.Cut(line, " ")
			if len(strings.Fields(definition)) < 4 {
				t.Errorf("%s is not explained: %q", name, definition)
			}
			names = append(names, name)
		}
		slices.Sort(names)
		if got := flatten(counters); !slices.Equal(names, got) {
			t.Errorf("%s explains %q\nprinted are %q", command, names, got)
		}
	}
}

// TestRunText: standard output is the text and a line feed, and the same bits
// come of every way to hold the experts.
func TestRunText(t *testing.T) {
	for _, model := range []string{tinyGLM4, tinyQwen3} {
		args := []string{"run", model, "-p", verse, "-n", "12", "--temp", "0"}
		want := mustRun(t, append(args, "--json")...).object(t)
		plain := mustRun(t, args...)
		if plain.out != want["text"].(string)+"\n" {
			t.Errorf("standard output is %q, the text %q", plain.out, want["text"])
		}
		for _, s := range []string{"12 tok, ", "ended by length, logits " + want["logits_crc32c"].(string), "time: expert_wait ", "prompt experts: ", "decode experts: ", "memory: "} {
			if !strings.Contains(plain.err, s) {
				t.Errorf("the summary lacks %q:\n%s", s, plain.err)
			}
		}
		for _, other := range []string{
			"--cap 1", "--cap 2", "--cap 5", "--cap 16", "--storage pread", "--storage mmap --cap 2", "--threads 1", "--threads 2", "--threads 5",
			"--chunk 1", "--chunk 7", "--chunk 64 --cap 1 --threads 3",
		} {
			got := mustRun(t, slices.Concat(args, strings.Fields(other), []string{"--json"})...).object(t)
			for _, key := range []string{"text", "logits_crc32c"} {
				if got[key] != want[key] {
					t.Errorf("%s with %s: %s is %q, want %q", model, other, key, got[key], want[key])
				}
			}
			if g, w := texts(t, got, "token_ids"), texts(t, want, "token_ids"); !slices.Equal(g, w) {
				t.Errorf("%s with %s: %v, want %v", model, other, g, w)
			}
		}
	}
}

// TestSeed: a seed is a text, and another is another.
func TestSeed(t *testing.T) {
	text := func(seed string) string {
		return mustRun(t, "run", tinyGLM4, "-p", verse, "-n", "20", "--seed", seed).out
	}
	if one := text("1"); one != text("1") || one == text("2") {
		t.Error("seeds do not choose the text")
	}
}

// TestPromptSources: -p, -f and standard input are one text.
func TestPromptSources(t *testing.T) {
	args := []string{"run", tinyGLM4, "-n", "5", "--temp", "0"}
	want := mustRun(t, append(args, "-p", verse)...).out
	if got := mustRun(t, append(args, "-f", file(t, "text", verse))...).out; got != want {
		t.Errorf("-f FILE: %q, want %q", got, want)
	}
	if got := sluice(verse, append(args, "-f", "-")...); got.out != want {
		t.Errorf("-f -: %q, want %q\n%s", got.out, want, got.err)
	}
	sluice("", append(args, "-f", "-")...).wants(t, exitUsage, "the text is empty")
	sluice("", append(args, "-f", "no-such-file")...).wants(t, exitError, "read the text: open no-such-file: no such file or directory")
	sluice("", append(args, "-f", t.TempDir())...).wants(t, exitError, "read the text: ", "is a directory")
}

// TestEnds: how many tokens there are and why no more.
func TestEnds(t *testing.T) {
	run := func(args ...string) map[string]any {
		return mustRun(t, append([]string{"run", tinyGLM4, "-p", "a", "--temp", "0", "--json"}, args...)...).object(t)
	}
	if o := run("-n", "0"); o["why"] != "length" || len(texts(t, o, "token_ids")) != 0 || o["text"] != "" || number(t, o, "counters", "positions_total") != 1 {
		t.Errorf("-n 0: %v, ended by %v", o["token_ids"], o["why"])
	}
	if o := run("-n", "-1", "--ctx", "10"); o["why"] != "context" || len(texts(t, o, "token_ids")) != 10 {
		t.Errorf("-n -1: %d tokens, ended by %v", len(texts(t, o, "token_ids")), o["why"])
	}
	if o := run("-n", "500", "--ctx", "10"); o["why"] != "context" || len(texts(t, o, "token_ids")) != 10 {
		t.Errorf("-n 500: %d tokens, ended by %v", len(texts(t, o, "token_ids")), o["why"])
	}
	// The third token as an end token: two come before it.
	ids := texts(t, run("-n", "3"), "token_ids")
	var third uint32
	fmt.Sscan(ids[2], &third)
	if slices.Contains(ids[:2], ids[2]) {
		t.Fatalf("the tokens %v do not differ", ids)
	}
	m := copyModel(t, tinyGLM4, with(storage.KV{Key: "tokenizer.ggml.eos_token_id", Value: third}))
	o := mustRun(t, "run", m, "-p", "a", "--temp", "0", "--json").object(t)
	if got := texts(t, o, "token_ids"); o["why"] != "stop" || !slices.Equal(got, ids[:2]) || number(t, o, "stop_id") != int64(third) {
		t.Errorf("%v, ended by %v (%v), want %v and the end token %d", got, o["why"], o["stop_id"], ids[:2], third)
	}
}

// TestChat: the text goes through the file's template or not at all.
func TestChat(t *testing.T) {
	template := func(text string) string {
		return copyModel(t, tinyGLM4, with(storage.KV{Key: "tokenizer.chat_template", Value: text}))
	}
	args := []string{"-p", "hello", "-n", "1", "--chat"}
	m := template("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}")
	got := texts(t, mustRun(t, append([]string{"run", m, "--json"}, args...)...).object(t), "prompt_ids")
	want := texts(t, mustRun(t, "run", m, "-p", "<user>hello<answer>", "-n", "1", "--json").object(t), "prompt_ids")
	if !slices.Equal(got, want) {
		t.Errorf("the prompt is %v, want %v", got, want)
	}
	// A whole conversation, and tools.
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
		return path
	}
	talk := file("talk.json", `[{"role": "user", "content": "hello"}, {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f"}}]}, {"role": "tool", "content": "4"}]`)
	offered := file("tools.json", `[{"type": "function", "function": {"name": "f"}}]`)
	m = template("{% for t in tools or [] %}({{ t.function.name }}){% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content or m.tool_calls[0].function.name }}{% endfor %}")
	for _, c := range []struct {
		flags []string
		want  string
	}{
		{[]string{"--messages", talk}, "<user>hello<assistant>f<tool>4"},
		{[]string{"--messages", talk, "--tools", offered, "--chat"}, "(f)<user>hello<assistant>f<tool>4"},
		{[]string{"-p", "hi", "--chat", "--tools", offered}, "(f)<user>hi"},
	} {
		got := texts(t, mustRun(t, append([]string{"run", m, "-n", "1", "--json"}, c.flags...)...).object(t), "prompt_ids")
		want := texts(t, mustRun(t, "run", m, "-p", c.want, "-n", "1", "--json").object(t), "prompt_ids")
		if !slices.Equal(got, want) {
			t.Errorf("%v: the prompt is %v, want %v", c.flags, got, want)
		}
	}
	for _, c := range []struct {
		flags []string
		exit  int
		want  string
	}{
		{[]string{"--messages", talk, "-p", "a"}, exitUsage, "leave out -p and -f"},
		{[]string{"-p", "a", "--tools", offered}, exitUsage, "--tools is for a chat"},
		{[]string{"--messages", "-", "--tools", "-"}, exitUsage, "cannot both be standard input"},
		{[]string{"--messages", file("none.json", "[]")}, exitUsage, "the list is empty"},
		{[]string{"--messages", filepath.Join(dir, "missing")}, exitError, "--messages: "},
		{[]string{"--messages", file("bad.json", "{}")}, exitError, "--messages: chat: the messages are no JSON list"},
		{[]string{"--messages", talk, "--tools", file("bad2.json", "[1]")}, exitError, "--tools: chat: tool 0 is no JSON object"},
	} {
		sluice("", append([]string{"run", m}, c.flags...)...).wants(t, c.exit, "sluice run: ", c.want)
	}
	for _, c := range []struct{ name, model, want string }{
		{"none", tinyGLM4, "--chat: the model has no chat template (tokenizer.chat_template of a GGUF file"},
		{"cannot be parsed", template("hello\n{% for m in messages %}{{ m.content }}"), "chat: the template cannot be parsed: "},
		{"unknown tag", template("{% frobnicate %}"), "chat: the template cannot be parsed: "},
		{"refuses", template("{{ raise_exception('only in Latin') }}"), "chat: the template refuses these messages: only in Latin"},
		{"fails", template("{{ messages[0].content | no_such_filter }}"), "chat: the template"},
		{"not text", copyModel(t, tinyGLM4, with(storage.KV{Key: "tokenizer.chat_template", Value: uint32(1)})), `metadata "tokenizer.chat_template" is the uint32 1, want a string`},
	} {
		t.Run(c.name, func(t *testing.T) {
			sluice("", append([]string{"run", c.model}, args...)...).wants(t, exitError, "sluice run: ", c.want)
		})
	}
	sluice("", append([]string{"run", template("")}, args...)...).wants(t, exitUsage, "the text is empty")
	sluice("", append([]string{"run", template(strings.Repeat("many words ", 100))}, args...)...).wants(t, exitUsage, "do not fit into a context of 128")
	if r := mustRun(t, "run", template("{% for"), "-p", "a", "-n", "1"); r.out == "" { // not used, not read
		t.Error("no text")
	}
}

// TestSamplingOfFile: general.sampling.* set the defaults, and what they choose
// is what the flags would.
func TestSamplingOfFile(t *testing.T) {
	greedy := copyModel(t, tinyGLM4, with(storage.KV{Key: "general.sampling.temp", Value: float32(0)}))
	text := func(args ...string) string {
		return mustRun(t, append([]string{"run", "-p", verse, "-n", "20"}, args...)...).out
	}
	if got, want := text(greedy), text(tinyGLM4, "--temp", "0"); got != want {
		t.Errorf("by the file: %q, by the flag: %q", got, want)
	}
	if got, want := text(greedy, "--temp", "0.8"), text(tinyGLM4); got != want {
		t.Errorf("the flag over the file: %q, want %q", got, want)
	}
	for _, c := range []struct {
		key   string
		value any
		want  string
	}{
		{"temp", float32(-1), "general.sampling.* are out of range: temperature -1"},
		{"temp", "hot", `metadata "general.sampling.temp" is the string "hot", want a finite number`},
		{"top_p", float32(0), "general.sampling.* are out of range: top-p 0"},
		{"min_p", float32(2), "general.sampling.* are out of range: min-p 2"},
		{"penalty_repeat", float32(0), "general.sampling.* are out of range: repeat penalty 0"},
		{"top_k", float32(3), `metadata "general.sampling.top_k" is the float32 3, want an integer`},
	} {
		m := copyModel(t, tinyGLM4, with(storage.KV{Key: "general.sampling." + c.key, Value: c.value}))
		sluice("", "run", m, "-p", "a").wants(t, exitError, c.want)
	}
	m := copyModel(t, tinyGLM4, with(storage.KV{Key: "general.sampling.temp", Value: float32(-1)}))
	mustRun(t, "run", m, "-p", "a", "-n", "1", "--temp", "1")
}

// TestOutputFails: a text that cannot be written is an error, not a success.
func TestOutputFails(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if errors.Is(err, os.ErrNotExist) {
		t.Skip("this system has no /dev/full")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	ids := file(t, "ids", "[1]")
	for _, args := range [][]string{
		{"run", tinyGLM4, "-p", "a", "-n", "2"},
		{"run", tinyGLM4, "-p", "a", "-n", "2", "--json"},
		{"run", tinyGLM4, "--print-config"},
		{"run", tinyGLM4, "--print-config", "--json"},
		{"run", "--explain-counters"},
		{"perplexity", tinyGLM4, file(t, "text", "some text of a few tokens"), "--ctx", "4"},
		{"logits", tinyGLM4, "--ids", ids, "-o", ids + ".out", "--json"},
		{"tokenize", tinyGLM4},
		{"tokenize", tinyGLM4, "--json"},
		{"inspect", tinyGLM4},
		{"inspect", tinyGLM4, "--json"},
	} {
		var errw strings.Builder
		code := run(args, strings.NewReader("some text"), full, &errw)
		if code != exitError || !strings.Contains(errw.String(), "no space left on device") {
			t.Errorf("%q: exit %d, %q", args, code, errw.String())
		}
	}
}

// TestUsageOfFailedRun: what was routed was routed, though the output was lost.
func TestUsageOfFailedRun(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skip(err)
	}
	defer full.Close()
	path := filepath.Join(t.TempDir(), "usage")
	var errw strings.Builder
	code := run([]string{"run", tinyGLM4, "-p", verse, "-n", "4", "--usage", path}, strings.NewReader(""), full, &errw)
	if code != exitError || !strings.Contains(errw.String(), "no space left on device") || !strings.Contains(errw.String(), "choices, sha256") {
		t.Errorf("exit %d, %s", code, errw.String())
	}
	mustRun(t, "run", tinyGLM4, "-p", verse, "-n", "1", "--usage-freeze", path) // it is there and whole
}

// TestRepeatable: what is counted is the same in every run. What prefetch gets
// to read depends on the drive, and when it pauses on the clock, but not what is a
// hit or a load.
func TestRepeatable(t *testing.T) {
	always := []string{"routed_experts_total", "distinct_experts_total", "tier_hits", "tier_misses", "evictions", "positions_total", "forwards_total"}
	counts := func(prefetch string, names ...string) map[string]string {
		o := mustRun(t, "run", demo, "4", "-p", verse, "-n", "10", "--temp", "0", "--json", "--prefetch", prefetch, "--draft", "off").object(t) // drafting goes by measured time
		got := map[string]string{}
		for _, name := range append(names, always...) {
			got[name] = fmt.Sprint(at(t, o, "counters", name))
		}
		return got
	}
	loads := []string{"host_loads_total", "host_load_bytes"}
	first, firstAhead, firstAuto := counts("off", loads...), counts("on", loads...), counts("auto", loads...)
	for range 2 {
		if again := counts("off", loads...); !maps.Equal(first, again) {
			t.Errorf("%v, then %v", first, again)
		}
		if again := counts("auto", loads...); !maps.Equal(firstAuto, again) {
			t.Errorf("with automatic prefetch: %v, then %v", firstAuto, again)
		}
		if again := counts("on", loads...); !maps.Equal(firstAhead, again) {
			t.Errorf("with prefetch: %v, then %v", firstAhead, again)
		}
	}
}
