package speculative

import "context"

// Lookup proposes what followed the last tokens where they stood before in the
// text (prompt lookup): the longest match of up to lookupMost tokens, and of
// equally long ones the latest. It costs next to nothing, and finds names,
// quotations and code.
type Lookup struct{}

// A single token that came before says little; more than four hardly ever
// choose another place.
const (
	lookupMost  = 4
	lookupLeast = 2
)

// Name is "lookup".
func (Lookup) Name() string { return "lookup" }

// Follow does nothing: the text is all there is.
func (Lookup) Follow(context.Context, Text) error { return nil }

// Propose walks the text once, from its end.
func (Lookup) Propose(_ context.Context, t Text, n int, dst []int32) ([]int32, error) {
	ids := t.IDs
	best, at := lookupLeast-1, -1 // length of the match; where it ends
	for end := len(ids) - 1; end > best && best < lookupMost; end-- {
		m := 0
		for m < min(lookupMost, end) && ids[end-1-m] == ids[len(ids)-1-m] {
			m++
		}
		if m > best {
			best, at = m, end
		}
	}
	if at < 0 {
		return dst, nil
	}
	from := len(dst)
	for i := at; i < at+n; i++ {
		if i < len(ids) {
			dst = append(dst, ids[i])
		} else { // what repeats goes on repeating
			dst = append(dst, dst[from+i-len(ids)])
		}
	}
	return dst, nil
}
