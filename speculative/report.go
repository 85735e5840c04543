package speculative

import (
	"fmt"
	"math"
	"strings"

	"sluice/moe"
)

// A Report is what drafting came to. Counts are of decoding, prompts apart, and
// of batches that have ended.
type Report struct {
	Drafter  string
	Depth    int   // now; 0: drafting is off
	Proposed int64 // drafts that were verified
	Accepted int64 // of them, those that came true
	Forwards int64 // passes that decoding needed
	Tokens   int64 // that they gave: forwards + accepted
	Run      int64 // positions that those passes ran
	Shadows  int64 // drafts that were compared with the text and never run
	Changes  int64 // how often drafting began or ended

	// ByPosition is the share of drafts that were right where all before them
	// were, shadows included, of the last ones; as far as there were any.
	ByPosition []float64

	Share, Union, Price float64 // f, u at the best depth, and d: see the gate
	Reason              string  // why drafting is off now, "" if it is on
}

// Report reads the counters. What the last batch has not yet come to is left out.
func (d *Decoder) Report() Report {
	g, c := &d.gate, &d.count
	f, _ := g.shares()
	k, _ := g.best()
	r := Report{
		Drafter: d.o.Drafter.Name(), Depth: g.depth, Proposed: c.proposed, Accepted: c.accepted, Forwards: c.forwards, Tokens: c.tokens, Run: c.positions,
		Shadows: c.shadows, Changes: g.changes, Share: f, Union: g.union(max(k, 1)), Price: g.d(),
	}
	if n := int64(len(d.batch)); n > 0 { // its first token is out, the rest is open
		r.Tokens -= int64(d.at)
		r.Run -= n
	}
	for _, m := range g.right {
		if m.n == 0 {
			break
		}
		r.ByPosition = append(r.ByPosition, m.v)
	}
	if g.depth == 0 {
		r.Reason = g.reason()
	}
	if g.pool.n == 0 && c.empty > 0 && len(d.batch) == 0 { // forced or not
		r.Reason = fmt.Sprintf("draft off (%s found nothing to propose)", r.Drafter)
	}
	return r
}

// Notices give what happened since they were last asked for, in words.
func (d *Decoder) Notices() []string {
	n := d.gate.notices
	d.gate.notices = nil
	return n
}

// Predicted is the positions that a token should take, by depth and acceptance:
// (1+k)/(1+k*a) over all passes, those without drafts among them.
func (r Report) Predicted() float64 {
	return float64(r.Forwards+r.Proposed) / float64(max(r.Forwards+r.Accepted, 1))
}

// Counted is the positions that a token took.
func (r Report) Counted() float64 { return float64(r.Run) / float64(max(r.Tokens, 1)) }

// Lines say what drafting came to: counts, or why there are none.
func (r Report) Lines() []string {
	if r.Proposed == 0 {
		reason := r.Reason
		if reason == "" {
			reason = "draft off (no batch has ended yet)"
		}
		return []string{reason}
	}
	var by strings.Builder
	for _, a := range r.ByPosition[:min(len(r.ByPosition), moe.MostDrafts)] {
		fmt.Fprintf(&by, " %.0f%%", 100*a)
	}
	line := fmt.Sprintf("draft: %s, %.2f tok/forward: %d proposed, %d accepted (%.0f%%), %d forwards, %d tokens; positions per token %.2f predicted, %.2f counted; right by position%s",
		r.Drafter, float64(r.Tokens)/float64(max(r.Forwards, 1)), r.Proposed, r.Accepted, 100*float64(r.Accepted)/float64(r.Proposed), r.Forwards, r.Tokens,
		r.Predicted(), r.Counted(), by.String())
	lines := []string{line}
	if math.Abs(r.Predicted()/r.Counted()-1) > 0.05 {
		lines = append(lines, fmt.Sprintf("warning: draft: %.2f positions per token were counted and %.2f predicted: the counters disagree", r.Counted(), r.Predicted()))
	}
	if r.Reason != "" {
		lines = append(lines, r.Reason)
	}
	return lines
}
