package main

import (
	"fmt"
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
	force            *bool
}

func newDraftFlags(m *modelFlags) draftFlags {
	return draftFlags{m,
		m.set.String("draft", "auto", "who proposes tokens that are then verified in one pass: "+strings.Join(engine.Drafters(), ", ")+
			"; auto is the model's drafting layer, else the lookup, off until it is measured to pay; with reads from a drive only drafts that all come true cost no more of them"),
		m.set.String("draft-depth", "auto", fmt.Sprintf("tokens that are proposed at once, 1 to %d, or auto", moe.MostDrafts)),
		m.set.String("draft-model", "", "the model of --draft model: a small one with the same tokenizer"),
		m.set.Bool("draft-force", false, "let the named drafter draft always, whatever it costs"),
	}
}

// options settles the flags. A trace is of the text alone, so nothing is drafted
// while one is written.
func (f draftFlags) options(trace bool) (d engine.Drafting, err error) {
	d = engine.Drafting{By: *f.by, Force: *f.force, Model: *f.model}
	if *f.depth != "auto" {
		if d.Depth, err = strconv.Atoi(*f.depth); err != nil || d.Depth < 1 || d.Depth > moe.MostDrafts {
			return d, usagef("--draft-depth %q: use 1 to %d, or auto", *f.depth, moe.MostDrafts)
		}
	}
	if d.Model != "" && !f.m.set.Changed("draft") {
		d.By = "model"
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

// draftObject is the report for JSON.
func draftObject(r speculative.Report) map[string]any {
	return map[string]any{
		"drafter": r.Drafter, "depth": r.Depth, "reason": r.Reason, "forwards": r.Forwards, "tokens": r.Tokens, "positions": r.Run,
		"positions_per_token_predicted": r.Predicted(), "positions_per_token_counted": r.Counted(),
		"right_by_position": r.ByPosition, "share": r.Share, "union": r.Union, "price": r.Price,
	}
}
