package engine

import (
	"context"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/backends"
	"sluice/internal/quant"
	"sluice/moe"
	"sluice/speculative"
	"sluice/storage"
	"sluice/tiers"
)

// sampled is text by a decoder that may draft.
func sampled(t testing.TB, e *Engine, s moe.Sampling, prompt []int32, n int) moe.Result {
	t.Helper()
	r, err := moe.Generate(context.Background(), e.Decoder(), moe.NewSampler(s, e.Spec.Vocab), generation(e, prompt, n))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// Drafting changes no bit: whoever drafts, how deep, under which cap, policy,
// storage, chunk, number of threads, KV cache and sampling; the text is the same
// and so are the logits that it was chosen by.
func TestDraftSameBits(t *testing.T) {
	const tokens = 24
	combinations := 200
	if raceEnabled {
		combinations = 12
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	pick := func(n int) int { return rng.IntN(n) }
	samplings := []moe.Sampling{
		{TopP: 1, RepeatPenalty: 1}, {TopP: 1, RepeatPenalty: 1},
		{Temp: 0.8, TopK: 20, TopP: 0.95, MinP: 0.05, RepeatPenalty: 1, Seed: 5},
		{Temp: 1, TopP: 1, RepeatPenalty: 1.2, RepeatLast: 16, Seed: 6},
	}
	prompt := heldout(t, open(t, Options{Path: mtp(t), Cap: 1}), 30)
	prompt = append(prompt, prompt[:20]...) // something for the lookup
	dense := synthetic(t, mtp(t))
	type key struct {
		kv       backends.KVType
		sampling int
	}
	want := map[key]moe.Result{}
	proposed, accepted := map[string]int64{}, map[string]int64{}
	for i := range combinations {
		k := key{backends.KVType(pick(3)), pick(len(samplings))}
		if _, ok := want[k]; !ok {
			e := open(t, Options{Path: mtp(t), KV: k.kv, Ctx: 100})
			want[k] = sampled(t, e, samplings[k.sampling], prompt, tokens)
		}
		o := Options{
			Path: mtp(t), KV: k.kv, Ctx: 100, Cap: []int{1, 2, 3, 8, 16}[pick(5)], Policy: tiers.Policies()[pick(5)], Threads: 1 + pick(3),
			Storage: []storage.Mode{storage.Slab, storage.Pread, storage.MMap}[pick(3)], Chunk: []int{2, 7, 16, 64}[pick(4)], Prefetch: tiers.Prefetch(pick(3)),
			Draft: Drafting{By: []string{"mtp", "lookup", "model", "replay", "auto"}[pick(5)], Depth: pick(9)},
		}
		if o.Draft.By == "replay" {
			o.Draft.Replay = Recording{"said", slices.Concat(prompt, want[k].IDs), float64(pick(11)) / 10}
		}
		if o.Draft.By == "model" {
			o.Draft.Model = []string{mtp(t), dense}[pick(2)]
		}
		o.Draft.Force = o.Draft.By != "auto" && pick(4) > 0
		e := open(t, o)
		r := sampled(t, e, samplings[k.sampling], prompt, tokens)
		if w := want[k]; r.Witness != w.Witness || !slices.Equal(r.IDs, w.IDs) {
			t.Fatalf("seed %d, combination %d, %s, drafts %+v, sampling %+v: %v (logits %08x), want %v (%08x)",
				seed, i, options(o), o.Draft, samplings[k.sampling], r.IDs, r.Witness, w.IDs, w.Witness)
		}
		d := e.Drafts.Report()
		proposed[d.Drafter] += d.Proposed
		accepted[d.Drafter] += d.Accepted
		if d.Tokens != d.Forwards+d.Accepted {
			t.Errorf("%s: %d tokens, %d forwards, %d accepted", d.Drafter, d.Tokens, d.Forwards, d.Accepted)
		}
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("proposed %v, accepted %v", proposed, accepted)
	for _, by := range []string{"mtp", "lookup", "model", "replay"} {
		if raceEnabled { // too few combinations for each to be drawn
			continue
		}
		if proposed[by] == 0 || by != "lookup" && accepted[by] == 0 {
			t.Errorf("%s: %d proposed, %d accepted: was it used?", by, proposed[by], accepted[by])
		}
	}
}

// The same with experts in a device's memory, some and all of them.
func TestDraftSameBitsOnDevice(t *testing.T) {
	needsVulkan(t)
	const tokens = 20
	prompt := heldout(t, open(t, Options{Path: mtp(t), Cap: 1}), 24)
	prompt = append(prompt, prompt[:16]...)
	greedy := moe.Sampling{TopP: 1, RepeatPenalty: 1}
	want := sampled(t, open(t, Options{Path: mtp(t), Ctx: 80, Backend: "cpu"}), greedy, prompt, tokens)
	for i, vram := range []Budget{{Experts: 6}, {}} {
		for _, by := range []string{"mtp", "lookup", "model", "replay"} {
			for _, depth := range []int{1, 8} {
				o := Options{Path: mtp(t), Ctx: 80, Cap: 3, Threads: 1, Devices: "vulkan:0", VRAM: vram, Draft: Drafting{By: by, Depth: depth, Force: true}}
				switch by {
				case "model":
					o.Draft.Model = mtp(t)
				case "replay":
					o.Draft.Replay = Recording{"said", slices.Concat(prompt, want.IDs), 0.7}
				}
				e := open(t, o)
				r := sampled(t, e, greedy, prompt, tokens)
				if r.Witness != want.Witness || !slices.Equal(r.IDs, want.IDs) {
					t.Errorf("%s at depth %d, %v in VRAM: %v (logits %08x), want %v (%08x)", by, depth, vram, r.IDs, r.Witness, want.IDs, want.Witness)
				}
				if d, hits := e.Drafts.Report(), e.Cache.Stats().Hits; d.Proposed == 0 || hits.VRAM == 0 || by != "mtp" && (hits.LRU > 0) != (i == 0) { // the drafting layer's experts stay in RAM
					t.Errorf("%s at depth %d, %v in VRAM: %d proposed, hits %+v", by, depth, vram, d.Proposed, hits)
				}
				if err := e.Close(); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

// The demo greedily, every depth of its drafting layer, from caps of 1 to all.
func TestDraftDemo(t *testing.T) {
	if raceEnabled {
		t.Skip("minutes under the race detector")
	}
	var want moe.Result
	for depth := 0; depth <= moe.MostDrafts; depth++ {
		o := Options{Path: demo, Ctx: 128, Cap: []int{32, 1, 4, 8}[depth%4]}
		if depth > 0 {
			o.Draft = Drafting{By: "mtp", Depth: depth, Force: true}
		}
		e := open(t, o)
		prompt, err := e.Tokens.EncodePrompt(psalm)
		if err != nil {
			t.Fatal(err)
		}
		r := sampled(t, e, moe.Sampling{TopP: 1, RepeatPenalty: 1}, prompt, 60)
		if depth == 0 {
			want = r
			continue
		}
		if r.Witness != want.Witness || !slices.Equal(r.IDs, want.IDs) {
			t.Errorf("depth %d: another text", depth)
		}
		d, c := e.Drafts.Report(), e.Cache.Stats()
		t.Logf("depth %d: %s", depth, d.Lines()[0])
		if float64(d.Accepted) < 0.3*float64(d.Proposed) {
			t.Errorf("depth %d: %d of %d accepted", depth, d.Accepted, d.Proposed)
		}
		if rejected := d.Proposed > d.Accepted; o.Cap < 32 && rejected != (c.Drafts.WastedLoads > 0) || (c.Drafts.WastedBytes > 0) != (c.Drafts.WastedLoads > 0) ||
			c.Drafts.Evictions > min(c.Drafts.WastedLoads, c.Evictions) {
			t.Errorf("depth %d: %+v, %d proposed, %d accepted", depth, c.Drafts, d.Proposed, d.Accepted)
		}
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// The demo's drafting layer, told the oracle's greedy text, foretells as much of it as
// that of the unquantized weights does, one token ahead and two: as a drafter
// uses it, with one cache and its own proposal.
func TestDraftAcceptance(t *testing.T) {
	if raceEnabled {
		t.Skip("minutes under the race detector")
	}
	var texts map[string]struct {
		InputIDs  []int32 `json:"input_ids"`
		GreedyIDs []int32 `json:"greedy_ids"`
		MTP1      []int32 `json:"mtp1_ids"`
		MTP2      []int32 `json:"mtp2_ids"`
	}
	readJSON(t, "testdata/demo-oracle.json", &texts)
	for _, tt := range []struct {
		name string
		path func(t testing.TB) string
		near float64
	}{
		{"Q8_0", func(t testing.TB) string { return shared(t, "models/demo-q8_0.gguf") }, 0.05},
		{"Q4_K_M", func(testing.TB) string { return demo }, 0.15}, // reported
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := open(t, Options{Path: tt.path(t), Ctx: 128, Drafts: 1})
			var got, want [2]float64
			n := [2]float64{}
			ctx := context.Background()
			for _, o := range texts {
				if len(o.MTP1) != len(o.GreedyIDs)-1 || len(o.MTP2) != len(o.GreedyIDs)-2 {
					t.Fatalf("%d and %d ids of %d", len(o.MTP1), len(o.MTP2), len(o.GreedyIDs))
				}
				if err := e.Model.Rewind(0); err != nil {
					t.Fatal(err)
				}
				d := speculative.NewMTP(e.Model, e.Spec.Vocab, 128)
				from := 0
				for at := 0; at < len(o.GreedyIDs)-1; {
					size := 1
					if at == 0 {
						size = len(o.InputIDs)
					}
					from = at
					if err := e.Model.Forward(ctx, o.GreedyIDs[at:at+size]); err != nil {
						t.Fatal(err)
					}
					if at += size; at+1 >= len(o.GreedyIDs) {
						break
					}
					// Token at is certain, from the main model; at+1 and at+2 are foretold.
					ids, err := d.Propose(ctx, speculative.Text{IDs: o.GreedyIDs[:at+1], From: from, To: at}, 2, nil)
					if err != nil {
						t.Fatal(err)
					}
					for k, oracle := range [][]int32{o.MTP1, o.MTP2} {
						if to := at + 1 + k; to < len(o.GreedyIDs) {
							n[k]++
							if k == 1 && ids[0] != o.GreedyIDs[at+1] {
								// A second draft counts behind a first that is right; the oracle was told the text.
								n[k]--
								continue
							}
							if ids[k] == o.GreedyIDs[to] {
								got[k]++
							}
							if oracle[at-1] == o.GreedyIDs[to] {
								want[k]++
							}
						}
					}
				}
			}
			for k := range n {
				a, b := got[k]/n[k], want[k]/n[k]
				t.Logf("depth %d: acceptance %.4f, of the unquantized weights %.4f, over %.0f positions", k+1, a, b, n[k])
				if a < b-tt.near || a > b+tt.near {
					t.Errorf("depth %d: acceptance %.4f, want %.4f within %.2f", k+1, a, b, tt.near)
				}
			}
		})
	}
}

// Who drafts is settled by the model, in the settings, and what cannot be is told.
func TestDraftingSettled(t *testing.T) {
	tokens, _ := openModel(t, glm).Meta.Strings("tokenizer.ggml.tokens")
	tokens = slices.Clone(tokens)
	tokens[300], tokens[301] = tokens[301], tokens[300]
	others := rewrite(t, glm, change{meta: map[string]any{"tokenizer.ggml.tokens": tokens}})
	for _, tt := range []struct {
		o    Options
		by   string
		want string // words of the error
	}{
		{Options{Path: mtp(t), Draft: Drafting{By: "auto"}}, "mtp", ""},
		{Options{Path: qwen, Draft: Drafting{By: "auto"}}, "lookup", ""},
		{Options{Path: qwen, Draft: Drafting{By: "off"}}, "off", ""},
		{Options{Path: glm, Draft: Drafting{By: "mtp"}}, "", "has no drafting (nextn) layer"},
		{Options{Path: glm, Draft: Drafting{By: "magic"}}, "", `no drafter "magic"`},
		{Options{Path: glm, Draft: Drafting{By: "model"}}, "", "needs --draft-model FILE"},
		{Options{Path: glm, Draft: Drafting{By: "auto", Force: true}}, "", "use it with --draft mtp, lookup, model or replay"},
		{Options{Path: glm, Draft: Drafting{By: "replay"}}, "", "needs --draft-replay FILE@ACCEPTANCE"},
		{Options{Path: glm, Draft: Drafting{By: "lookup", Replay: Recording{Name: "r"}}}, "", "--draft-replay r is for --draft replay"},
		{Options{Path: glm, Draft: Drafting{By: "replay", Replay: Recording{Name: "r", Acceptance: 1.5}}}, "", "an acceptance of 1.5: use 0 to 1"},
		{Options{Path: glm, Draft: Drafting{By: "replay", Replay: Recording{Name: "r", IDs: []int32{1, 1 << 20}}}}, "", "its token 1 is 1048576, and this model's vocabulary has"},
		{Options{Path: glm, Draft: Drafting{By: "lookup", Depth: 9}}, "", "draft depth of 9"},
		{Options{Path: glm, Draft: Drafting{By: "lookup", Model: "x"}}, "", "--draft-model x is for --draft model"},
		{Options{Path: glm, Draft: Drafting{By: "off", Depth: 2}}, "", "--draft-depth 2 is for a drafter, and --draft is off"},
		{Options{Path: glm, Chunk: 1, Draft: Drafting{By: "lookup"}}, "off", ""},
		{Options{Path: glm, Ctx: 1, Draft: Drafting{By: "lookup", Force: true, Depth: 3}}, "off", ""},
		{Options{Path: glm, Chunk: 3, Draft: Drafting{By: "lookup", Depth: 8}}, "lookup", ""},
		{Options{Path: glm, Draft: Drafting{By: "model", Model: t.TempDir()}}, "", "draft model: storage: "},
		{Options{Path: glm, Draft: Drafting{By: "model", Model: "none"}}, "", "draft model: storage: no such model"},
		{Options{Path: glm, Draft: Drafting{By: "model", Model: demo}}, "", "must have the same tokenizer"},
		{Options{Path: glm, Draft: Drafting{By: "model", Model: others}}, "", others + ": its tokens are not those of " + glm + " (token 300 is "},
		{Options{Path: glm, NoText: true, Draft: Drafting{By: "model", Model: others}}, "", "must have the same tokenizer"},
		{Options{Path: glm, Draft: Drafting{By: "model", Model: synthetic(t, glm)}}, "model", ""},
		{Options{Path: glm, Draft: Drafting{By: "auto", Model: synthetic(t, glm)}}, "model", ""},
		{Options{Path: synthetic(t, glm), Draft: Drafting{By: "auto"}}, "lookup", ""},
		{Options{Path: synthetic(t, glm), Draft: Drafting{By: "mtp"}}, "", "has no drafting (nextn) layer"},
	} {
		tt.o.PlanOnly = true
		p, err := Prepare(tt.o)
		if tt.want != "" {
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%+v: %v, want %q", tt.o.Draft, err, tt.want)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		for _, s := range p.Settings {
			if s.Name == "drafter" {
				got = fmt.Sprint(s.Value)
			}
		}
		if got != tt.by {
			t.Errorf("%s, %+v: %s drafts, want %s", tt.o.Path, tt.o.Draft, got, tt.by)
		}
		p.Close()
	}
}

// A drafting layer below 8 bits is warned of where it may draft, and only there.
func TestDraftHeadWarned(t *testing.T) {
	notices := func(path string, d Drafting) string {
		p, err := Prepare(Options{Path: path, Draft: d, PlanOnly: true})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		return strings.Join(p.Notices, "\n")
	}
	const head = "warning: the head of the drafting (MTP) layer, eh_proj, is Q4_K, below 8 bits: of other models' drafts 39-59 % were accepted with 8 bits, 0-4 % with 4 bits"
	for by, want := range map[string]bool{"auto": true, "mtp": true, "lookup": false, "off": false, "": false} {
		if got := notices(demo, Drafting{By: by}); strings.Contains(got, head) != want {
			t.Errorf("--draft %s says %q", by, got)
		}
	}
	if got := notices(mtp(t), Drafting{By: "mtp"}); strings.Contains(got, "warning") {
		t.Errorf("of BF16: %q", got)
	}

	// With a head of 8 bits the rest of the layer is told.
	path := shared(t, "models/demo-q8_0.gguf")
	if got := notices(path, Drafting{By: "mtp"}); strings.Contains(got, "warning") {
		t.Errorf("of Q8_0: %q", got)
	}
	m, err := storage.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	made := map[string]recoded{"blk.7.ffn_up_exps.weight": encoded(t, m, "blk.7.ffn_up_exps.weight", quant.Q4_K)}
	if got := notices(recode(t, path, made), Drafting{By: "mtp"}); !strings.Contains(got, "warning: the drafting (MTP) layer has weights of Q4_K, below 8 bits, behind a head of Q8_0") {
		t.Errorf("of Q4_K behind Q8_0: %q", got)
	}
}

// Every kind of attention rolls back: each family of the repository, with drafts
// that are mostly wrong and some that are right.
func TestDraftFamilies(t *testing.T) {
	paths, err := filepath.Glob("testdata/*.gguf")
	if err != nil || len(paths) == 0 {
		t.Fatal(paths, err)
	}
	if raceEnabled {
		paths = paths[:1]
	}
	for _, path := range paths {
		plain := open(t, Options{Path: path, Ctx: 100})
		prompt := make([]int32, 40)
		for i := range prompt {
			prompt[i] = int32(i*i*7%20) + 100
		}
		s := moe.Sampling{Temp: 1, TopK: 2, TopP: 1, RepeatPenalty: 1}
		want := sampled(t, plain, s, prompt, 25)
		total, rejected := int64(0), int64(0)
		for _, by := range []string{"lookup", "model", "mtp"} {
			if by == "mtp" && (plain.Spec.Nextn == 0 || plain.Spec.NextnErr != nil) {
				continue
			}
			for _, depth := range []int{2, 8} {
				o := Options{Path: path, Ctx: 100, Cap: 2, Draft: Drafting{By: by, Depth: depth, Force: true}}
				if by == "model" {
					o.Draft.Model = path
				}
				e := open(t, o)
				r := sampled(t, e, s, prompt, 25)
				if r.Witness != want.Witness || !slices.Equal(r.IDs, want.IDs) {
					t.Errorf("%s, %s at depth %d: %v (logits %08x), want %v (%08x)", path, by, depth, r.IDs, r.Witness, want.IDs, want.Witness)
				}
				d := e.Drafts.Report()
				total += d.Accepted
				rejected += d.Proposed - d.Accepted
				if err := e.Close(); err != nil {
					t.Fatal(err)
				}
			}
		}
		if total == 0 || rejected == 0 {
			t.Errorf("%s: %d drafts accepted, %d rejected", path, total, rejected)
		}
	}
}
