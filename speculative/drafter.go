package speculative

import (
	"context"

	"sluice/moe"
)

// A Drafter proposes tokens that may come next. Its proposals are deterministic:
// to the sampler they are points, not distributions.
type Drafter interface {
	// Name is the value of --draft that chooses it.
	Name() string

	// Propose appends to dst up to n tokens that may follow the text, none if it
	// has no idea. Whatever it keeps beside the model rolls back by itself when a
	// later text is another one.
	Propose(ctx context.Context, t Text, n int, dst []int32) ([]int32, error)

	// Follow tells of text that is about to be run without a proposal.
	Follow(ctx context.Context, t Text) error
}

// An own is a drafter with a model of its own, which has to run the text too.
type own interface {
	// Catch runs the text that was not followed while drafting paused. A shadow pays
	// for it, but it is no part of the price of a proposal: while drafting is on the
	// drafter is never far behind.
	Catch(ctx context.Context, t Text) error

	// Times are those of the drafter's model so far.
	Times() moe.Times
}

// A Text is what is certain, as a drafter sees it.
type Text struct {
	IDs  []int32 // all tokens; those from To on are not run yet, one at least
	From int     // positions From to To-1 are what stands of the model's last Forward
	To   int
}
