// Package speculative decodes several tokens in one pass where that pays: a
// drafter proposes tokens, the model runs them as one batch behind the token that
// is certain, and those that the sampler would have chosen stand.
//
// It is a moe.Decoder, so the loop that samples cannot tell. Every token is
// sampled from the model's own logits, which no batch changes by a bit: text,
// greedy or sampled, is the same with drafting and without. A gate on measured
// shares says when to draft and how far (gate.go).
package speculative
