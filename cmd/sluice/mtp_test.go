package main

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sluice/internal/safetensors"
)

// tinyMTP is the tiny GLM-4.5 with a drafting layer.
func tinyMTP(t *testing.T) string { t.Helper(); return shared(t, "oracles/gguf/glm4_moe_mtp.gguf") }

// TestMTPOracle: the drafting layer says what its reference says of the hidden
// states, and of its own in their place.
func TestMTPOracle(t *testing.T) {
	t.Run("glm4_moe", func(t *testing.T) { checkMTP(t, tinyMTP(t), shared(t, "oracles/hf/glm4_moe_mtp/oracle.safetensors")) })
	t.Run("deepseek_v3", func(t *testing.T) { // whose GGUF file has no drafting layer
		dir := shared(t, "oracles/hf/deepseek_v3_mtp")
		checkMTP(t, dir, dir+"/oracle.safetensors")
	})
}

func checkMTP(t *testing.T, model, expected string) {
	const tolerance = 1e-5 // of the largest logit; 1e-4 is asked for
	oracle := openTensors(t, expected)
	ids, err := oracle.Ints("input_ids")
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(ids)
	if err != nil {
		t.Fatal(err)
	}
	var want []byte
	for _, flags := range [][]string{nil, {"--chunk", "7"}, {"--chunk", "1", "--cap", "1"}, {"--threads", "3", "--storage", "pread"}} {
		out := filepath.Join(t.TempDir(), "out")
		mustRun(t, append([]string{"logits", model, "--ids", file(t, "ids", string(text)), "-o", out, "--mtp", "2", "--kv", "f32"}, flags...)...)
		got, err := os.ReadFile(out)
		if err != nil {
			t.Fatal(err)
		}
		if want == nil {
			want = got
		} else if string(got) != string(want) {
			t.Errorf("%q: other bytes", flags)
		}
		f := openTensors(t, out)
		for _, name := range []string{"logits", "hidden_last", "mtp1_logits", "mtp2_logits"} {
			a, b := floats(t, f, name), floats(t, oracle, name)
			if len(a) != len(b) {
				t.Fatalf("%s: %d floats, want %d", name, len(a), len(b))
			}
			most, worst := 0.0, 0.0
			for i := range a {
				most, worst = max(most, math.Abs(float64(b[i]))), max(worst, math.Abs(float64(a[i])-float64(b[i])))
			}
			t.Logf("%s: within %.2g of the largest", name, worst/most)
			if worst > tolerance*most {
				t.Errorf("%s: differs by up to %.3g of the largest, %.4g", name, worst/most, most)
			}
		}
	}
}

// TestMTPDemo: the demo's drafting layer foretells what that of its unquantized
// weights does.
func TestMTPDemo(t *testing.T) {
	oracle := openTensors(t, shared(t, "oracles/demo/demo-oracle.safetensors"))
	model := shared(t, "models/demo-q8_0.gguf")
	for _, prompt := range []string{"kjv", "chat", "unicode"} {
		ids, err := oracle.Ints(prompt + ".input_ids")
		if err != nil {
			t.Fatal(err)
		}
		text, _ := json.Marshal(ids)
		out := filepath.Join(t.TempDir(), "out")
		mustRun(t, "logits", model, "--ids", file(t, "ids", string(text)), "-o", out, "--mtp", "1", "--kv", "f32")
		got := floats(t, openTensors(t, out), "mtp1_logits")
		want := floats(t, oracle, prompt+".mtp1_logits")
		const vocab = 4096
		agree, sum := 0, 0.0
		for i := 0; i < len(got); i += vocab {
			a, b := got[i:i+vocab], want[i:i+vocab]
			var ab, aa, bb float64
			for j := range a {
				x, y := float64(a[j]), float64(b[j])
				ab, aa, bb = ab+x*y, aa+x*x, bb+y*y
			}
			sum += ab / math.Sqrt(aa*bb)
			if best(a) == best(b) {
				agree++
			}
		}
		n := len(got) / vocab
		t.Logf("%s: cosine %.6f in the mean, the likeliest token agrees at %d of %d positions", prompt, sum/float64(n), agree, n)
		if len(got) != len(want) || sum/float64(n) < 0.995 || float64(agree) < 0.9*float64(n) {
			t.Errorf("%s: %d floats of %d, cosine %.4f, %d of %d agree", prompt, len(got), len(want), sum/float64(n), agree, n)
		}
	}
}

// TestMTPFlag: what cannot be done is told.
func TestMTPFlag(t *testing.T) {
	ids, out := file(t, "ids", "[5,6]"), filepath.Join(t.TempDir(), "out")
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{tinyGLM4, "--mtp", "9"}, exitUsage, "--mtp 9: use 1 to 8 steps"},
		{[]string{tinyGLM4, "--mtp", "2"}, exitError, "--mtp 2 needs at least 3 token ids, it has 2"},
		{[]string{tinyQwen3, "--mtp", "1"}, exitError, "the model has no drafting (nextn) layer"},
	} {
		sluice("", append([]string{"logits", "--ids", ids, "-o", out}, c.args...)...).wants(t, c.code, c.want)
	}
}

// TestMTPHead: inspect shows of what type the drafting layer is, and what below 8
// bits costs.
func TestMTPHead(t *testing.T) {
	if r := mustRun(t, "inspect", demo); !regexp.MustCompile(`MTP head +Q4_K\n +warning: the head of the drafting \(MTP\) layer, eh_proj, is Q4_K, below 8 bits`).MatchString(r.out) {
		t.Errorf("it says\n%s", r.out)
	}
	if o := mustRun(t, "inspect", tinyMTP(t), "--json").object(t); o["nextn_head_type"] != "BF16" || o["nextn_least_type"] != "BF16" {
		t.Errorf("%v, %v", o["nextn_head_type"], o["nextn_least_type"])
	}
	if o := mustRun(t, "inspect", tinyGLM4, "--json").object(t); o["nextn_head_type"] != nil {
		t.Errorf("a head of %v in a model without", o["nextn_head_type"])
	}
}

// TestDraftReplay: what run --json wrote is replayed; another text gets no proposal,
// and what is no recording is told.
func TestDraftReplay(t *testing.T) {
	run := []string{"run", tinyMTP(t), "-p", "ab ab", "-n", "12", "--temp", "0"}
	said := mustRun(t, append(run, "--json", "--draft", "off")...)
	path := file(t, "said@.json", said.out)
	o := mustRun(t, append(run, "--json", "--draft-replay", path+"@0.5", "--draft-force", "--draft-depth", "2")...).object(t)
	if o["logits_crc32c"] != said.object(t)["logits_crc32c"] || number(t, o, "counters", "draft_proposed") == 0 || at(t, o, "draft", "drafter") != "replay" {
		t.Errorf("%v", o)
	}
	mustRun(t, append(run, "--draft-replay", file(t, "other", `{"prompt_ids":[7],"token_ids":[8,9]}`), "--draft-force")...).wants(t, 0, "draft off (replay found nothing to propose)")
	mustRun(t, append(run, "--draft", "lookup", "--draft-depth", "8", "--chunk", "3")...).wants(t, 0, "draft-depth lowered 8 -> 2 (a chunk, or context, of 3 positions)")
	mustRun(t, append(run, "--chunk", "1")...).wants(t, 0, "draft off (a chunk, or context, of 1 position has no room")
	for name, want := range map[string]string{
		file(t, "text", "once"):                                  "is not what run --json writes",
		file(t, "empty", "{}") + "@1":                            "has no prompt_ids and token_ids",
		file(t, "far", `{"prompt_ids":[99999],"token_ids":[1]}`): "its token 0 is 99999, and this model's vocabulary has 512",
		filepath.Join(t.TempDir(), "none") + "@0.5":              "no such file",
		t.TempDir(): "is a directory",
	} {
		sluice("", append(run, "--draft-replay", name)...).wants(t, exitError, want)
	}
	sluice("", append(run, "--draft-replay", path+"@1.5")...).wants(t, exitUsage, "an acceptance of 1.5: use 0 to 1")
}

func openTensors(t *testing.T, path string) *safetensors.File {
	t.Helper()
	f, err := safetensors.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func floats(t *testing.T, f *safetensors.File, name string) []float32 {
	t.Helper()
	v, err := f.Floats(name)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func best(x []float32) int {
	at := 0
	for i, v := range x {
		if v > x[at] {
			at = i
		}
	}
	return at
}

// TestMTPAcceptance: told the oracle's greedy texts, the demo's drafting layer is
// right as often as that of its unquantized weights, one token ahead and two.
func TestMTPAcceptance(t *testing.T) {
	text, err := os.ReadFile("../engine/testdata/demo-oracle.json")
	if err != nil {
		t.Fatal(err)
	}
	var texts map[string]struct {
		InputIDs  []int32 `json:"input_ids"`
		GreedyIDs []int32 `json:"greedy_ids"`
		MTP1      []int32 `json:"mtp1_ids"`
		MTP2      []int32 `json:"mtp2_ids"`
	}
	if err := json.Unmarshal(text, &texts); err != nil || len(texts) != 6 {
		t.Fatal(err, len(texts))
	}
	for _, tt := range []struct {
		name string
		path func(t *testing.T) string
		near float64
	}{
		{"Q8_0", func(t *testing.T) string { return shared(t, "models/demo-q8_0.gguf") }, 0.05},
		{"Q4_K_M", func(*testing.T) string { return demo }, 0.1}, // which loses some
	} {
		t.Run(tt.name, func(t *testing.T) {
			var got, want, n [2]float64
			for _, o := range texts {
				ids, _ := json.Marshal(o.GreedyIDs)
				out := filepath.Join(t.TempDir(), "out")
				mustRun(t, "logits", tt.path(t), "--ids", file(t, "ids", string(ids)), "-o", out, "--mtp", "2")
				f := openTensors(t, out)
				for k, oracle := range [][]int32{o.MTP1, o.MTP2} {
					logits := floats(t, f, mtpName(k))
					vocab := len(logits) / len(oracle)
					for i := len(o.InputIDs) - 1; i+2+k < len(o.GreedyIDs); i++ { // drafts of new text alone
						n[k]++
						if best(logits[i*vocab:(i+1)*vocab]) == int(o.GreedyIDs[i+2+k]) {
							got[k]++
						}
						if oracle[i] == o.GreedyIDs[i+2+k] {
							want[k]++
						}
					}
				}
			}
			for k := range n {
				a, b := got[k]/n[k], want[k]/n[k]
				t.Logf("depth %d: %.4f of %.0f are right, %.4f of the unquantized weights'", k+1, a, n[k], b)
				if math.Abs(a-b) > tt.near {
					t.Errorf("depth %d: acceptance %.4f, want %.4f within %.2f", k+1, a, b, tt.near)
				}
			}
		})
	}
}

// TestBenchDraft: each run a process of its own; a table with every sample.
func TestBenchDraft(t *testing.T) {
	t.Setenv("SLUICE_TEST_MAIN", "1") // the processes are this binary again
	args := []string{"bench", "draft", tinyMTP(t), "--caps", "2,32", "--depths", "0,2", "--drafters", "mtp,replay@0.7", "--gated", "--runs", "1", "-n", "8", "-p", "ab ab ab", "--temp", "0"}
	r := mustRun(t, args...)
	r.wants(t, 0)
	for _, want := range []string{"cap lowered 32 -> 16", "cap 2 mtp 2 against cap 2 off", "cap 32 mtp 2 against cap 32 off", "n = 1 per side", "cap 2 replay@0.7 2 against cap 2 off", "cap 32 replay@0.7 auto against cap 32 off", "block 0: cap 2 off "} {
		if !strings.Contains(r.out, want) {
			t.Errorf("no %q in\n%s", want, r.out)
		}
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--depths", "9"}, "--depths 9: use 0 to 8"},
		{[]string{"--drafters", "model"}, "--drafters model and --draft-model FILE, a small model with the same tokenizer, belong together"},
		{[]string{"--draft-model", "x"}, "--drafters model and --draft-model FILE, a small model with the same tokenizer, belong together"},
		{[]string{"--drafters", "magic"}, "--drafters magic: use mtp, lookup, model, or replay@ACCEPTANCE"},
		{[]string{"--drafters", "replay@2"}, "--drafters replay@2: use mtp, lookup, model, or replay@ACCEPTANCE with 0 to 1"},
		{[]string{"--memory", "much"}, "--memory"},
		{[]string{"--caps", "0"}, "cap 0"},
	} {
		sluice("", append(slices.Clone(args), c.args...)...).wants(t, exitUsage, c.want)
	}
}
