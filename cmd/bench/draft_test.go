package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
)

func TestDraftArms(t *testing.T) {
	got := DraftArms([]int{4, 8}, []string{"mtp", "lookup"}, []int{0, 2})
	want := []DraftArm{{4, "off", 0}, {4, "mtp", 2}, {4, "lookup", 2}, {8, "off", 0}, {8, "mtp", 2}, {8, "lookup", 2}}
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

// Every arm runs once a block, in turning order, and is set beside the control of
// its cap.
func TestDraftBattery(t *testing.T) {
	var asked []string
	b := DraftBattery{Sluice: fakeDrafts(&asked, nil), Arms: DraftArms([]int{4, 8}, []string{"mtp"}, []int{0, 2}), Runs: 8, Args: []string{"--prompt=a"}}
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
		forwards, counted := int64(100), 1.0
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
		b := DraftBattery{Sluice: fakeDrafts(&asked, change), Arms: DraftArms([]int{4, 8}, []string{"mtp"}, []int{1}), Runs: 1}
		_, err := b.Run(context.Background())
		var refused *RefusedError
		if !errors.As(err, &refused) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
