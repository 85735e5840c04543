package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

func TestDraftArms(t *testing.T) {
	got := DraftArms([]int{4, 8}, []string{"mtp", "lookup"}, []int{0, 2}, true)
	var want []DraftArm
	for _, c := range []int{4, 8} {
		want = append(want, DraftArm{c, "off", 0, false}, DraftArm{c, "mtp", 2, false}, DraftArm{c, "mtp", 0, true}, DraftArm{c, "lookup", 2, false}, DraftArm{c, "lookup", 0, true})
	}
	if !slices.Equal(got, want) {
		t.Errorf("%v", got)
	}
}

// fakeDrafts answers like run --json: every draft doubles the speed.
func fakeDrafts(asked *[]string, change func(args []string, object string) string) Sluice {
	return func(_ context.Context, args ...string) ([]byte, error) {
		*asked = append(*asked, strings.Join(args, " "))
		ns, proposed, draft := 4e9, 0, ""
		if !slices.Contains(args, "off") {
			ns, proposed = 2e9, 30
			draft = `"draft": {"forwards": 50, "positions_per_token_predicted": 1.2, "positions_per_token_counted": 1.21},`
		}
		ns += float64(len(*asked)) * 1e6
		object := fmt.Sprintf(`{"settings": {"cap": {"value": %s}}, %s "decode_ns": %.0f, "decode_tokens": 100, "expert_wait_ns": %.0f, "logits_crc32c": "a",
			"decode_counters": {"host_load_bytes": 5000}, "counters": {"draft_proposed": %d, "draft_accepted": 20, "draft_wasted_loads": 3}}`, args[2], draft, ns, ns/2, proposed)
		if change != nil {
			object = change(args, object)
		}
		return []byte(object), nil
	}
}

// A drafter that is a model is told which.
func TestDraftModelArgs(t *testing.T) {
	b := DraftBattery{Model: "small.gguf", Args: []string{"--prompt=a"}}
	for _, tt := range []struct {
		arm  DraftArm
		want string
	}{
		{DraftArm{4, "model", 3, false}, "run --cap 4 --json --draft model --draft-model small.gguf --draft-depth 3 --draft-force --prompt=a"},
		{DraftArm{4, "model", 0, true}, "run --cap 4 --json --draft model --draft-model small.gguf --prompt=a"},
		{DraftArm{4, "off", 0, false}, "run --cap 4 --json --draft off --prompt=a"},
	} {
		if got := strings.Join(b.args(tt.arm, ""), " "); got != tt.want {
			t.Errorf("%v: %s, want %s", tt.arm, got, tt.want)
		}
	}
}

// Every arm runs once a block, in turning order, and is set beside the control of
// its cap.
func TestDraftBattery(t *testing.T) {
	var asked []string
	b := DraftBattery{Sluice: fakeDrafts(&asked, nil), Arms: DraftArms([]int{4, 8}, []string{"mtp"}, []int{0, 2}, false), Runs: 8, Args: []string{"--prompt=a"}}
	res, err := b.Run(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if len(asked) != 9*4 || asked[1] != "run --cap 4 --json --draft mtp --draft-depth 2 --draft-force --prompt=a" || asked[8] != asked[1] {
		t.Errorf("%d runs: %q", len(asked), asked)
	}
	if len(res.Comparisons) != 2 || res.Comparisons[1].Control != "cap 8 off" || res.Comparisons[1].Treatment != "cap 8 mtp 2" || res.Comparisons[0].Verdict != "faster" {
		t.Errorf("%+v", res.Comparisons)
	}
	for i, a := range res.Arms {
		forwards, counted := 100.0, 1.0
		if i%2 == 1 {
			forwards, counted = 50, 1.21
		}
		if a.TokPerSec.N != 8 || a.Forwards != forwards || a.Counted != counted || a.PerToken != 50 || a.WaitPct != 50 {
			t.Errorf("%+v", a)
		}
	}
}

// What makes arms unlike is refused.
func TestDraftBatteryRefuses(t *testing.T) {
	for want, change := range map[string]func(args []string, object string) string{
		"the outputs differ": func(args []string, o string) string {
			if slices.Contains(args, "mtp") {
				return strings.Replace(o, `"a"`, `"b"`, 1)
			}
			return o
		},
		`did not exercise the treatment (draft_proposed=0)`: func(_ []string, o string) string {
			return strings.Replace(o, `"draft_proposed": 30`, `"draft_proposed": 0`, 1)
		},
		"has drafts": func(_ []string, o string) string {
			return strings.Replace(o, `"draft_proposed": 0`, `"draft_proposed": 1`, 1)
		},
		"arms are the same: cap resolved to 2 for 4 and 8": func(_ []string, o string) string {
			return strings.NewReplacer(`"value": 4`, `"value": 2`, `"value": 8`, `"value": 2`).Replace(o)
		},
	} {
		var asked []string
		b := DraftBattery{Sluice: fakeDrafts(&asked, change), Arms: DraftArms([]int{4, 8}, []string{"mtp"}, []int{1}, false), Runs: 1}
		_, err := b.Run(context.Background())
		var refused *RefusedError
		if !errors.As(err, &refused) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// A failed run and one of another cap void their block, which is run once more; too
// many end in no verdict, and a first that fails in an error.
func TestDraftBatteryVoid(t *testing.T) {
	battery := func(fail func(run int) bool, change func(run int, object string) string) DraftBattery {
		n := 0
		var asked []string
		inner := fakeDrafts(&asked, nil)
		return DraftBattery{Arms: DraftArms([]int{4}, []string{"mtp"}, []int{1}, false), Runs: 6, Sluice: func(ctx context.Context, args ...string) ([]byte, error) {
			n++
			if fail(n) {
				return nil, errors.New("boom")
			}
			out, err := inner(ctx, args...)
			return []byte(change(n, string(out))), err
		}}
	}
	whole := func(_ int, o string) string { return o }
	res, err := battery(func(run int) bool { return run == 5 }, whole).Run(context.Background())
	if err != nil || len(res.Samples) != 2*(1+6+1) || res.Arms[0].TokPerSec.N != 6 || res.Samples[4].Void != "boom" || len(res.Comparisons) != 1 || res.Refused != "" {
		t.Errorf("%v, %+v", err, res)
	}
	res, err = battery(func(int) bool { return false }, func(run int, o string) string {
		if run > 6 {
			o = strings.Replace(o, `"value": 4`, `"value": 3`, 1)
		}
		return o
	}).Run(context.Background())
	if err != nil || !strings.Contains(res.Refused, "the last since the cap is 3, at first it was 4") || len(res.Comparisons) > 0 {
		t.Errorf("%v, %+v", err, res)
	}
	if _, err := battery(func(int) bool { return true }, whole).Run(context.Background()); err == nil || !strings.Contains(err.Error(), "the first run failed: boom") {
		t.Error(err)
	}
	_, err = battery(func(int) bool { return false }, func(run int, o string) string {
		return strings.Replace(o, `"draft_accepted": 20`, fmt.Sprintf(`"draft_accepted": %d`, run), 1)
	}).Run(context.Background())
	var refused *RefusedError
	if !errors.As(err, &refused) || !strings.Contains(err.Error(), "is not the same in each run") {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	res, err = battery(func(run int) bool {
		if run == 8 {
			cancel()
		}
		return false
	}, whole).Run(ctx)
	if err != context.Canceled || res.Arms[1].TokPerSec.N != 2 {
		t.Errorf("%v, %+v", err, res)
	}
}

// The text of the first control is replayed, and gated arms are not forced.
func TestDraftBatteryReplay(t *testing.T) {
	var asked []string
	inner, text := fakeDrafts(&asked, nil), ""
	b := DraftBattery{Arms: DraftArms([]int{4}, []string{"replay@0.25"}, []int{3}, true), Runs: 1, Sluice: func(ctx context.Context, args ...string) ([]byte, error) {
		if i := slices.Index(args, "--draft-replay"); i > 0 {
			path, acceptance, _ := strings.Cut(args[i+1], "@")
			b, err := os.ReadFile(path)
			if text = string(b); err != nil || acceptance != "0.25" {
				t.Error(err, args)
			}
		}
		return inner(ctx, args...)
	}}
	res, err := b.Run(context.Background())
	if err != nil || !strings.Contains(text, `"decode_ns": 4001000000`) {
		t.Fatalf("%v, replayed %q", err, text)
	}
	if forced := strings.Contains(asked[2], "--draft-force") || strings.Contains(asked[2], "--draft-depth"); forced || !strings.Contains(asked[1], "--draft replay --draft-replay") || !strings.Contains(asked[1], "--draft-depth 3 --draft-force") {
		t.Errorf("%q", asked)
	}
	if res.Samples[2].Name != "cap 4 replay@0.25 auto" || len(res.Comparisons) != 2 {
		t.Errorf("%+v", res)
	}
	for text, want := range map[string]bool{"replay@1": true, "replay@0": true, "replay@1.1": false, "replay@-1": false, "replay@NaN": false, "replay": false, "lookup": false} {
		if _, ok := ReplayOf(text); ok != want {
			t.Errorf("%s: %v", text, ok)
		}
	}
}
