package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"sluice/moe"
	"sluice/moe/tokenizer"
	"sluice/speculative"
	"sluice/tiers"
)

// Drafting says who proposes tokens, and when. The zero value is nobody.
type Drafting struct {
	By    string // one of Drafters; "" is off
	Depth int    // tokens at once, 1 to moe.MostDrafts; 0: by expected gain
	Force bool   // always, whatever the gate makes of it; needs a named drafter
	Model string // the file of "model", for which "auto" then stands

	Replay Recording // the text of "replay"
}

// A Recording is what an earlier run of the same prompt said, for the drafter that
// replays it: a test of what drafts of a known acceptance do.
type Recording struct {
	Name       string  // as it was asked for; "": there is none
	IDs        []int32 // the prompt and what followed
	Acceptance float64 // share of proposals that are right, 0 to 1
}

// Drafters are the values of --draft. auto is the draft model if one is named, or
// the model's drafting layer where it has one, else the lookup.
func Drafters() []string { return []string{"off", "auto", "mtp", "lookup", "model", "replay"} }

// Check names the first value that makes no sense.
func (d Drafting) Check() error {
	switch {
	case !slices.Contains(Drafters(), cmp.Or(d.By, "off")):
		return fmt.Errorf("there is no drafter %q: use one of %s", d.By, strings.Join(Drafters(), ", "))
	case d.Depth < 0 || d.Depth > moe.MostDrafts:
		return fmt.Errorf("a draft depth of %d: use 1 to %d, or auto", d.Depth, moe.MostDrafts)
	case d.Depth > 0 && (d.By == "" || d.By == "off"):
		return fmt.Errorf("--draft-depth %d is for a drafter, and --draft is off: leave one of them out", d.Depth)
	case d.By == "model" && d.Model == "":
		return errors.New("--draft model needs --draft-model FILE, a small model with the same tokenizer")
	case d.Model != "" && d.By != "model" && d.By != "auto":
		return fmt.Errorf("--draft-model %s is for --draft model, not for --draft %s", d.Model, cmp.Or(d.By, "off"))
	case d.By == "replay" && d.Replay.Name == "":
		return errors.New("--draft replay needs --draft-replay FILE@ACCEPTANCE, what run --json printed for the same prompt")
	case d.Replay.Name != "" && d.By != "replay":
		return fmt.Errorf("--draft-replay %s is for --draft replay, not for --draft %s", d.Replay.Name, cmp.Or(d.By, "off"))
	case !(d.Replay.Acceptance >= 0 && d.Replay.Acceptance <= 1):
		return fmt.Errorf("--draft-replay %s: an acceptance of %v: use 0 to 1", d.Replay.Name, d.Replay.Acceptance)
	case d.Force && (d.By == "" || d.By == "off" || d.By == "auto"):
		return fmt.Errorf("--draft-force makes a named drafter draft always: use it with --draft mtp, lookup, model or replay, not %s", cmp.Or(d.By, "off"))
	}
	return nil
}

// drafting settles who drafts, and what it adds to the model.
func (p *Plan) drafting(o Options) error {
	if err := o.Draft.Check(); err != nil {
		return err
	}
	p.draft = o.Draft
	switch p.draft.By {
	case "auto":
		p.draft.By = "lookup"
		switch {
		case p.draft.Model != "":
			p.draft.By = "model"
		case p.Spec.Nextn > 0 && p.Spec.NextnErr == nil && !o.noNextn:
			p.draft.By = "mtp"
		}
	case "off":
		p.draft.By = ""
	}
	for i, id := range p.draft.Replay.IDs {
		if id < 0 || int(id) >= p.Spec.Vocab {
			return fmt.Errorf("--draft-replay %s: its token %d is %d, and this model's vocabulary has %d: it is of another model", p.draft.Replay.Name, i, id, p.Spec.Vocab)
		}
	}
	p.Config.Drafts = o.Drafts
	if p.draft.By == "mtp" {
		p.Config.Drafts = max(1, o.Drafts)
	}
	p.resident, p.roles = p.Spec.Dense, p.Spec.Roles
	if p.Config.Drafts > 0 {
		if p.Spec.Nextn == 0 {
			return errors.New("the model has no drafting (nextn) layer")
		}
		if p.Spec.NextnErr != nil {
			return fmt.Errorf("the model's drafting (nextn) layer cannot be run: %w", p.Spec.NextnErr)
		}
		p.resident, p.roles = slices.Concat(p.resident, p.Spec.NextnDense), slices.Concat(p.roles, p.Spec.NextnRoles)
	}
	if p.draft.By == "model" {
		return p.smallModel(o)
	}
	return nil
}

// draftSettings tells what drafting settled.
func (p *Plan) draftSettings(o Options) {
	if o.Draft.By == "" {
		return
	}
	depth := Setting{Name: "draft-depth", Value: "auto", Origin: FromDefault}
	if o.Draft.Depth > 0 {
		depth.Value, depth.Origin = o.Draft.Depth, FromFlag
	}
	switch room := p.Config.Chunk - 1; { // for drafts, behind the token that is certain
	case p.draft.By == "":
	case room == 0:
		p.Notices = append(p.Notices, "draft off (a chunk, or context, of 1 position has no room for drafts behind a token: use 2 or more)")
		p.draft = Drafting{}
	case o.Draft.Depth > room:
		p.Notices = append(p.Notices, fmt.Sprintf("draft-depth lowered %d -> %d (a chunk, or context, of %d positions)", o.Draft.Depth, room, room+1))
		depth.Value, depth.Requested, p.draft.Depth = room, o.Draft.Depth, room
	}
	if words := p.Spec.NextnWarning(); p.draft.By == "mtp" && words != "" {
		p.Notices = append(p.Notices, words)
	}
	p.set("draft", o.Draft.By, true)
	by := Setting{Name: "drafter", Value: cmp.Or(p.draft.By, "off"), Origin: FromAuto}
	if o.Draft.By != "auto" {
		by.Origin = FromFlag
	}
	p.Settings.Set(by)
	p.Settings.Set(depth)
	p.set("draft-force", o.Draft.Force, o.Draft.Force)
	if p.draft.By == "model" {
		p.set("draft-model", p.draft.Model, true)
	}
	if p.draft.By == "replay" {
		p.set("draft-replay", p.draft.Replay.Name, true)
	}
}

// smallModel plans the model that drafts for this one: whole in memory, if that
// takes no more than half of what there is. It may be dense, or have experts.
func (p *Plan) smallModel(o Options) error {
	room, err := o.Memory.Available()
	if err != nil {
		return err
	}
	usage, err := tiers.Memory{}.Usage()
	if err != nil {
		return err
	}
	budget := cmp.Or(o.RAM, room.Budget(usage.RSS))
	p.small, err = Prepare(Options{
		Path: p.draft.Model, Storage: o.Storage, Threads: o.Threads, Kernels: o.Kernels, Chunk: o.Chunk, Ctx: p.Config.Ctx, KV: o.KV, NoVRAM: true, Backend: "cpu",
		RAM: usage.RSS + (budget-usage.RSS)/2, Memory: o.Memory, PlanOnly: o.PlanOnly,
	})
	if err != nil {
		return fmt.Errorf("draft model: %w", err)
	}
	mine := p.Tokens
	if mine == nil {
		if mine, err = Tokenizer(p.File); err != nil {
			return err
		}
	}
	if words := differ(mine, p.small.Tokens, p.Spec.Vocab, p.small.Spec.Vocab); words != "" {
		return fmt.Errorf("draft model %s: its tokens are not those of %s (%s): a draft model must have the same tokenizer", p.draft.Model, p.path, words)
	}
	l := p.small.Ledger
	gb := func(n int64) float64 { return float64(n) / 1e9 }
	p.Notices = append(p.Notices, fmt.Sprintf("draft model %s: %.3g GB beside this model: weights %.3g GB, KV cache %.3g GB, work space %.3g GB",
		p.draft.Model, gb(p.small.Cap.Peak-l.Of(tiers.Base)), gb(l.Of(tiers.Dense)+p.small.pool()), gb(l.Of(tiers.KV)), gb(l.Of(tiers.Scratch))))
	for _, n := range p.small.Notices {
		p.Notices = append(p.Notices, "draft model: "+n)
	}
	return nil
}

// differ says in words how the tokens of two models differ, "" if they do not.
func differ(a, b *tokenizer.Tokenizer, rowsA, rowsB int) string {
	if rowsA != rowsB {
		return fmt.Sprintf("it has %d, not %d", rowsB, rowsA)
	}
	if id := tokenizer.Differ(a, b); id >= 0 {
		return fmt.Sprintf("token %d is %q, not %q", id, b.Text(id), a.Text(id))
	}
	return ""
}

// smallBytes is what the draft model takes of the ledger beside this one, by
// purpose: its experts, all or a part, are weights that stay. None: 0.
func (p *Plan) smallBytes(purpose tiers.Purpose) int64 {
	switch {
	case p.small == nil:
		return 0
	case purpose == tiers.Dense:
		return p.small.Ledger.Of(purpose) + p.small.pool()
	}
	return p.small.Ledger.Of(purpose)
}

// pool is what the slots of experts take.
func (p *Plan) pool() int64 { return p.Cap.LRU + p.Cap.Staging }

// startDrafting makes the decoder that drafts, if somebody is to.
func (e *Engine) startDrafting(ctx context.Context) error {
	var by speculative.Drafter
	switch e.draft.By {
	case "mtp":
		by = speculative.NewMTP(e.Model, e.Spec.Vocab, e.Config.Ctx)
	case "lookup":
		by = speculative.Lookup{}
	case "model":
		plan := e.Plan.small
		e.Plan.small = nil // the engine closes it
		small, err := plan.Load(ctx)
		if err != nil {
			return fmt.Errorf("draft model: %w", err)
		}
		e.small = small
		by = speculative.NewModel(small.Model, small.Config.Ctx)
	case "replay":
		by = speculative.NewReplay(e.draft.Replay.IDs, e.Spec.Vocab, e.draft.Replay.Acceptance)
	default:
		return nil
	}
	var err error
	e.Drafts, err = speculative.New(e.Model, speculative.Options{
		Drafter: by, Vocab: e.Spec.Vocab, Ctx: e.Config.Ctx, Depth: e.draft.Depth, Force: e.draft.Force,
	})
	return err
}

// Decoder is the model, or what drafts for it.
func (e *Engine) Decoder() moe.Decoder {
	if e.Drafts != nil {
		return e.Drafts
	}
	return e.Model
}
