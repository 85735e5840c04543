package bench

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// A Summary describes the samples of an arm.
type Summary struct {
	N      int     `json:"n"`
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
	Q1     float64 `json:"q1"`
	Q3     float64 `json:"q3"`
}

// Summarize describes x. The summary of nothing is zero.
func Summarize(x []float64) Summary {
	if len(x) == 0 {
		return Summary{}
	}
	return Summary{len(x), Quantile(x, 0.5), slices.Min(x), slices.Max(x), Quantile(x, 0.25), Quantile(x, 0.75)}
}

// Quantile is the p-quantile of x, 0 <= p <= 1, by linear interpolation between
// the samples on both sides: type 7 of Hyndman and Fan (1996). x is not empty.
func Quantile(x []float64, p float64) float64 {
	s := slices.Sorted(slices.Values(x))
	at := p * float64(len(s)-1)
	low := int(at)
	if low+1 >= len(s) {
		return s[len(s)-1]
	}
	return s[low] + (at-float64(low))*(s[low+1]-s[low])
}

// SignTest is the exact two-sided probability that fair coin tosses are at least
// as one-sided as these. No toss proves nothing: 1.
func SignTest(wins, losses int) float64 {
	n, most := wins+losses, max(wins, losses)
	return min(1, 2*tail(n, most))
}

// tail is the probability of k heads or more in n tosses of a fair coin.
func tail(n, k int) (p float64) {
	for i := k; i <= n; i++ {
		p += math.Exp(logChoose(n, i) - float64(n)*math.Ln2)
	}
	return p
}

func logChoose(n, k int) float64 {
	a, _ := math.Lgamma(float64(n) + 1)
	b, _ := math.Lgamma(float64(k) + 1)
	c, _ := math.Lgamma(float64(n-k) + 1)
	return a - b - c
}

// alpha is the probability of error that a verdict may have.
const alpha = 0.05

// Interval holds the median that x was drawn around with a probability of
// coverage, at least 95 %: the sign test inverted. ok is false where x is too
// short for that (below 6).
func Interval(x []float64) (low, high, coverage float64, ok bool) {
	s := slices.Sorted(slices.Values(x))
	n := len(s)
	for k := n / 2; k >= 1; k-- { // from the k-th smallest to the k-th largest
		if out := 2 * tail(n, n-k+1); out <= alpha {
			return s[k-1], s[n-k], 1 - out, true
		}
	}
	return 0, 0, 0, false
}

// Holm adjusts the p-values of several comparisons with one control: step-down.
func Holm(p []float64) []float64 {
	order := make([]int, len(p))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(p[a], p[b]) })
	out, least := make([]float64, len(p)), 0.0
	for rank, i := range order {
		least = max(least, min(1, p[i]*float64(len(p)-rank)))
		out[i] = least
	}
	return out
}

// Overlap says whether the ranges of two arms overlap, and what a separation is
// worth. Numbers are printed with four digits.
func Overlap(treatment, control string, t, c []float64) string {
	if len(t) == 0 || len(c) == 0 {
		return ""
	}
	tl, th, cl, ch := slices.Min(t), slices.Max(t), slices.Min(c), slices.Max(c)
	words := ""
	switch {
	case tl > ch:
		words = fmt.Sprintf("no overlap: every %s run is above every %s run (lowest %.4g, highest %.4g)", treatment, control, tl, ch)
	case th < cl:
		words = fmt.Sprintf("no overlap: every %s run is below every %s run (highest %.4g, lowest %.4g)", treatment, control, th, cl)
	default:
		return fmt.Sprintf("ranges overlap: %s %.4g..%.4g, %s %.4g..%.4g; the claim rests on pairing", treatment, tl, th, control, cl, ch)
	}
	n, m := len(t), len(c)
	return fmt.Sprintf("%s; by chance alone p = %.2g", words, min(1, 2*math.Exp(-logChoose(n+m, n))))
}

// A Comparison sets an arm beside the control: ratios are treatment over control.
type Comparison struct {
	Treatment string  `json:"treatment"`
	Control   string  `json:"control"`
	Blocks    int     `json:"blocks"`
	Paired    float64 `json:"median_of_paired_ratios"`
	Medians   float64 `json:"ratio_of_medians"`
	Wins      int     `json:"wins"`
	Losses    int     `json:"losses"`
	Ties      int     `json:"ties"`
	P         float64 `json:"p"`
	Adjusted  float64 `json:"p_adjusted"` // Holm, over all comparisons with the control
	Low       float64 `json:"interval_low,omitempty"`
	High      float64 `json:"interval_high,omitempty"`
	Coverage  float64 `json:"interval_coverage,omitempty"` // 0: too few blocks for an interval
	Overlap   string  `json:"overlap"`
	Verdict   string  `json:"verdict"` // faster, slower, no practical difference, inconclusive
}

// leastEffect is the difference in speed below which nobody cares.
const leastEffect = 0.02

// compare sets arms beside the first: samples[arm][block], each arm with the
// same blocks, at least one.
func compare(names []string, samples [][]float64) (all []Comparison) {
	var ps []float64
	control := samples[0]
	for i := 1; i < len(names); i++ {
		t := samples[i]
		c := Comparison{Treatment: names[i], Control: names[0], Blocks: len(t), Overlap: Overlap(names[i], names[0], t, control)}
		ratios := make([]float64, len(t))
		for b := range t {
			ratios[b] = t[b] / control[b]
			switch {
			case math.Abs(ratios[b]-1) < 1e-6: // equal in six digits
				c.Ties++
			case ratios[b] > 1:
				c.Wins++
			default:
				c.Losses++
			}
		}
		c.Paired, c.Medians = Quantile(ratios, 0.5), Quantile(t, 0.5)/Quantile(control, 0.5)
		c.P = SignTest(c.Wins, c.Losses)
		c.Low, c.High, c.Coverage, _ = Interval(ratios)
		ps = append(ps, c.P)
		all = append(all, c)
	}
	for i, p := range Holm(ps) {
		all[i].Adjusted = p
		all[i].Verdict = all[i].verdict()
	}
	return all
}

func (c Comparison) verdict() string {
	known := c.Coverage > 0
	switch {
	case known && c.Adjusted <= alpha && c.Low > 1 && c.Paired >= 1+leastEffect:
		return "faster"
	case known && c.Adjusted <= alpha && c.High < 1 && c.Paired <= 1-leastEffect:
		return "slower"
	case known && c.Low >= 1-leastEffect && c.High <= 1+leastEffect:
		return "no practical difference"
	}
	return "inconclusive"
}

// String is the comparison in a line.
func (c Comparison) String() string {
	s := fmt.Sprintf("%s against %s: %s: %.4g times as fast (median of the paired ratios; ratio of the medians %.4g), ahead in %d of %d blocks",
		c.Treatment, c.Control, c.Verdict, c.Paired, c.Medians, c.Wins, c.Blocks)
	if c.Ties > 0 {
		s += fmt.Sprintf(" with %d ties", c.Ties)
	}
	if c.Blocks < 3 {
		return s + fmt.Sprintf("; n = %d per side gives no p-value", c.Blocks)
	}
	s += fmt.Sprintf("; sign test p = %.2g, adjusted %.2g", c.P, c.Adjusted)
	if c.Coverage > 0 {
		return s + fmt.Sprintf("; interval %.4g..%.4g (%.1f %%)", c.Low, c.High, 100*c.Coverage)
	}
	return s + fmt.Sprintf(" (n = %d: no result reaches %.2f)", c.Blocks, alpha)
}
