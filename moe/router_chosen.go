package moe

import "sluice/internal/arith"

// RouteChosenSoftmax picks the best len(ids) experts for one token, top-k first.
//
//	ids      [k]        out: chosen experts, best first; a tie goes to the lower id
//	weights  [k]        out: softmax over the chosen scores alone, so they sum to 1
//	scores   [nExperts] in:  router logits, finite
//
// As gpt-oss does (arXiv:2508.10925, section 2.2).
func RouteChosenSoftmax(ids []int32, weights, scores []float32) {
	topK(ids, scores)
	for i, id := range ids {
		weights[i] = scores[id]
	}
	arith.Softmax(weights)
}

// RouteChosenSigmoid is RouteChosenSoftmax with weights that are the sigmoids of
// the chosen scores, each by itself.
//
// As Llama 4 does, with a k of 1.
func RouteChosenSigmoid(ids []int32, weights, scores []float32) {
	topK(ids, scores)
	for i, id := range ids {
		weights[i] = arith.Sigmoid(scores[id])
	}
}
