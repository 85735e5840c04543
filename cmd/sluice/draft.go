package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"sluice/cmd/engine"
	"sluice/moe"
	"sluice/speculative"
)

// draftFlags say who proposes tokens, and when.
type draftFlags struct {
	m                *modelFlags
	by, depth, model *string
	replay           *string
	force            *bool
}

func newDraftFlags(m *modelFlags) draftFlags {
	return draftFlags{m,
		m.set.String("draft", "auto", "who proposes tokens that are then verified in one pass: "+strings.Join(engine.Drafters(), ", ")+
			"; auto is the model of --draft-model if there is one, or the model's drafting layer, else the lookup, off until it is measured to pay; with reads from a drive only drafts that all come true cost no more of them"),
		m.set.String("draft-depth", "auto", fmt.Sprintf("tokens that are proposed at once, 1 to %d, or auto", moe.MostDrafts)),
		m.set.String("draft-model", "", "the model of --draft model: a small one with the same tokenizer, dense or of experts, held in memory beside this one"),
		m.set.String("draft-replay", "", "the recording of --draft replay, which is for experiments: FILE@ACCEPTANCE, such as run.json@0.8, a FILE that run --json wrote for the same prompt, and the share of its tokens that are proposed right (default 1)"),
		m.set.Bool("draft-force", false, "let the named drafter draft always, whatever it costs"),
	}
}

// options settles the flags. A trace is of the text alone, so nothing is drafted
// while one is written.
func (f draftFlags) options(ctx context.Context, s streams, trace bool) (d engine.Drafting, err error) {
	d = engine.Drafting{By: *f.by, Force: *f.force, Model: *f.model}
	if *f.depth != "auto" {
		if d.Depth, err = strconv.Atoi(*f.depth); err != nil || d.Depth < 1 || d.Depth > moe.MostDrafts {
			return d, usagef("--draft-depth %q: use 1 to %d, or auto", *f.depth, moe.MostDrafts)
		}
	}
	for _, name := range []string{"draft", "draft-model", "draft-replay"} {
		if v, _ := f.m.set.GetString(name); v == "" && f.m.set.Changed(name) {
			return d, usagef("--%s is empty: leave it out, or say what", name)
		}
	}
	if d.Model != "" && !f.m.set.Changed("draft") {
		d.By = "model"
	}
	if d.Replay.Name = *f.replay; d.Replay.Name != "" {
		if !f.m.set.Changed("draft") {
			d.By = "replay"
		}
		if d.Replay, err = readRecording(ctx, s, *f.replay); err != nil {
			return d, err
		}
	}
	if err := d.Check(); err != nil {
		return d, usagef("%v", err)
	}
	if trace && d.By != "off" {
		if d.By != "auto" {
			return d, usagef("--trace writes what the routers choose for the text alone: leave out --draft %s", d.By)
		}
		d.By = "off"
	}
	return d, nil
}

// readRecording reads the text that run --json wrote, FILE@ACCEPTANCE.
func readRecording(ctx context.Context, s streams, name string) (r engine.Recording, err error) {
	r = engine.Recording{Name: name, Acceptance: 1}
	path := name
	if at := strings.LastIndexByte(name, '@'); at >= 0 {
		if a, err := strconv.ParseFloat(name[at+1:], 64); err == nil {
			path, r.Acceptance = name[:at], a
		}
	}
	b, err := readFile(ctx, s, path)
	if err != nil {
		return r, fmt.Errorf("--draft-replay: %w", err)
	}
	var run struct {
		Prompt []int32 `json:"prompt_ids"`
		Text   []int32 `json:"token_ids"`
	}
	if err := json.Unmarshal(b, &run); err != nil {
		return r, fmt.Errorf("--draft-replay: %s is not what run --json writes: %w", printable(path), err)
	}
	if len(run.Prompt) == 0 || len(run.Text) == 0 {
		return r, fmt.Errorf("--draft-replay: %s has no prompt_ids and token_ids, as run --json writes them", printable(path))
	}
	r.IDs = slices.Concat(run.Prompt, run.Text)
	return r, nil
}

// draftObject is the report for JSON.
func draftObject(r speculative.Report) map[string]any {
	return map[string]any{
		"drafter": r.Drafter, "depth": r.Depth, "reason": r.Reason, "forwards": r.Forwards, "tokens": r.Tokens, "positions": r.Run,
		"positions_per_token_predicted": r.Predicted(), "positions_per_token_counted": r.Counted(),
		"right_by_position": r.ByPosition, "share": r.Share, "union": r.Union, "price": r.Price,
	}
}
