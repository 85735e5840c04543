package moe

import (
	"math"

	"sluice/internal/arith"
)

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
	choose(ids, weights, scores, bias)
	finish(weights, norm, scale)
}

// RouteSoftmaxBiased picks the best len(ids) experts for one token by a biased softmax.
//
//	ids      [k]        out: chosen experts by probability + bias, best first; a tie goes to the lower id
//	weights  [k]        out: their probabilities without the bias, divided by their sum, or by floor where that is larger
//	scores   [nExperts] in:  router logits, finite; out: probability + bias
//	bias     [nExperts] in:  the correction bias, nil for none; it only chooses
//	floor               in:  above 0
//
// As ERNIE 4.5 does (its technical report of 2025; floor is moe_norm_min).
func RouteSoftmaxBiased(ids []int32, weights, scores, bias []float32, floor float32) {
	arith.Softmax(scores)
	choose(ids, weights, scores, bias)
	sum := float32(0)
	for _, w := range weights {
		sum += w
	}
	r := arith.Rcp(max(sum, floor))
	for i := range weights {
		weights[i] *= r
	}
}

// Groups are equal runs of experts of which only some are chosen from. The zero
// value is one group of all.
type Groups struct {
	N    int // groups, which divide the experts; at most maxGroups
	Keep int // of them, chosen from; 1 to N
}

// maxGroups bounds the groups of a layer. Published models have 8 at most.
const maxGroups = 64

// RouteSigmoidGrouped is RouteSigmoid among the experts of the best groups:
// those whose two best sums of sigmoid and bias add up to the most; a tie goes to
// the lower group. scores of the other groups are -Inf afterwards. The groups
// kept have k experts at least.
//
// As DeepSeek-V3 (arXiv:2412.19437, section 2.1.2), whose nodes are the groups.
func RouteSigmoidGrouped(ids []int32, weights, scores, bias []float32, groups Groups, norm bool, scale float32) {
	for i, s := range scores {
		scores[i] = arith.Sigmoid(s)
	}
	groups.leave(scores, func(from, to int) float32 {
		first, second := float32(math.Inf(-1)), float32(math.Inf(-1))
		for i := from; i < to; i++ {
			s := scores[i]
			if bias != nil {
				s += bias[i]
			}
			if s > first {
				first, second = s, first
			} else {
				second = max(second, s)
			}
		}
		if to-from == 1 {
			return first
		}
		return first + second
	})
	choose(ids, weights, scores, bias)
	finish(weights, norm, scale)
}

// RouteSoftmaxGrouped picks the best len(ids) experts for one token among those
// of the groups with the largest probability; a tie goes to the lower group.
// The weights are the probabilities over all experts; if norm, divided by their
// sum; times scale. scores of the other groups are -Inf afterwards. The groups
// kept have k experts at least.
//
// As DeepSeek-V2 (arXiv:2405.04434, section 2.2.2).
func RouteSoftmaxGrouped(ids []int32, weights, scores []float32, groups Groups, norm bool, scale float32) {
	arith.Softmax(scores)
	groups.leave(scores, func(from, to int) float32 {
		best := scores[from]
		for _, s := range scores[from+1 : to] {
			best = max(best, s)
		}
		return best
	})
	choose(ids, weights, scores, nil)
	finish(weights, norm, scale)
}

// leave sets to -Inf the scores of all groups but the Keep best, where best
// gives the worth of the group of experts from..to-1.
func (g Groups) leave(scores []float32, best func(from, to int) float32) {
	if g.Keep >= g.N {
		return
	}
	var worth [maxGroups]float32
	var kept [maxGroups]int32
	size := len(scores) / g.N
	for i := range g.N {
		worth[i] = best(i*size, (i+1)*size)
	}
	topK(kept[:g.Keep], worth[:g.N])
	var keep [maxGroups]bool
	for _, i := range kept[:g.Keep] {
		keep[i] = true
	}
	for i := range scores {
		if !keep[i/size] {
			scores[i] = float32(math.Inf(-1))
		}
	}
}

// choose picks by score + bias, and by the score alone without a bias; weights
// gets the scores of the chosen.
func choose(ids []int32, weights, scores, bias []float32) {
	if bias != nil {
		// The weights need the score without its bias. Taking the bias off again
		// would round, so the chosen ones are looked up before it is added.
		topKBiased(ids, weights, scores, bias)
		return
	}
	topK(ids, scores)
	for i, id := range ids {
		weights[i] = scores[id]
	}
}

// finish divides the weights by their sum if norm, and multiplies them by scale.
func finish(weights []float32, norm bool, scale float32) {
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
