package moe

import "sluice/internal/arith"

// RouteSoftmax picks the best len(ids) experts for one token, softmax first.
//
//	ids      [k]        out: chosen experts, best first; a tie goes to the lower id
//	weights  [k]        out: their probabilities; if norm, divided by their sum
//	scores   [nExperts] in: router logits, finite; out: all probabilities
//
// Softmax over all experts and top-k after, as Qwen3-MoE does (norm is its
// norm_topk_prob, true in every published file).
func RouteSoftmax(ids []int32, weights, scores []float32, norm bool) {
	arith.Softmax(scores)
	topK(ids, scores)
	for i, id := range ids {
		weights[i] = scores[id]
	}
	if norm {
		normalize(weights)
	}
}

// RouteSigmoid picks the best len(ids) experts for one token by biased sigmoid.
//
//	ids      [k]        out: chosen experts by sigmoid + bias, best first; a tie goes to the lower id
//	weights  [k]        out: their sigmoids without the bias; if norm, divided by their sum + 1e-20; times scale
//	scores   [nExperts] in: router logits, finite; out: sigmoid + bias
//	bias     [nExperts] in: the correction bias, nil for none; it only chooses
//
// As DeepSeek-V3 (arXiv:2412.19437, section 2.1.2) with a single group, which
// is how GLM-4.5 uses it.
func RouteSigmoid(ids []int32, weights, scores, bias []float32, norm bool, scale float32) {
	for i, s := range scores {
		scores[i] = arith.Sigmoid(s)
	}
	if bias == nil {
		topK(ids, scores)
		for i, id := range ids {
			weights[i] = scores[id]
		}
	} else {
		// The weights need the sigmoid without its bias. Taking the bias off again
		// would round, so the chosen ones are looked up before it is added.
		topKBiased(ids, weights, scores, bias)
	}
	if norm {
		normalize(weights)
	}
	for i := range weights {
		weights[i] *= scale
	}
}

// topK writes the indices of the len(ids) largest scores, largest first, the
// lower index first among equals.
func topK(ids []int32, scores []float32) {
	n := 0
	for i, s := range scores {
		if n == len(ids) && !(s > scores[ids[n-1]]) {
			continue
		}
		if n < len(ids) {
			n++
		}
		j := n - 1
		for j > 0 && s > scores[ids[j-1]] {
			ids[j] = ids[j-1]
			j--
		}
		ids[j] = int32(i)
	}
}

// topKBiased is topK by score + bias; weights gets the scores alone, and scores
// the sums.
func topKBiased(ids []int32, weights, scores, bias []float32) {
	n := 0
	for i, s := range scores {
		sum := s + bias[i]
		scores[i] = sum
		if n == len(ids) && !(sum > scores[ids[n-1]]) {
			continue
		}
		if n < len(ids) {
			n++
		}
		j := n - 1
		for j > 0 && sum > scores[ids[j-1]] {
			ids[j], weights[j] = ids[j-1], weights[j-1]
			j--
		}
		ids[j], weights[j] = int32(i), s
	}
}

// normalize divides the weights by their sum + 1e-20, added in order.
func normalize(weights []float32) {
	sum := float32(0)
	for _, w := range weights {
		sum += w
	}
	r := arith.Rcp(sum + 1e-20)
	for i := range weights {
		weights[i] *= r
	}
}
