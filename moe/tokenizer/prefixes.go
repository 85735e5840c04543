package tokenizer

import "sort"

// prefixes finds which of many texts another text begins with.
type prefixes struct {
	texts []string // ascending
	ids   []int32  // of each text
	first [257]int // texts that begin with byte b are first[b] to first[b+1]-1
}

// newPrefixes sorts the texts, none of which is empty and no two equal.
func newPrefixes(texts map[string]int32) *prefixes {
	p := &prefixes{texts: make([]string, 0, len(texts)), ids: make([]int32, len(texts))}
	for s := range texts {
		p.texts = append(p.texts, s)
	}
	sort.Strings(p.texts)
	for i, s := range p.texts {
		p.ids[i] = texts[s]
		p.first[int(s[0])+1] = i + 1
	}
	for b := 1; b < len(p.first); b++ {
		p.first[b] = max(p.first[b], p.first[b-1])
	}
	return p
}

// each calls found for every text that s begins with, the shortest first. Time
// is at most that of a search among the texts for each byte that fits one.
func (p *prefixes) each(s string, found func(id int32, length int)) {
	if s == "" {
		return
	}
	lo, hi := p.first[s[0]], p.first[int(s[0])+1]
	for n := 1; lo < hi; n++ { // texts[lo:hi] begin with s[:n]
		if len(p.texts[lo]) == n {
			found(p.ids[lo], n)
			lo++
		}
		if n == len(s) || lo == hi {
			return
		}
		b := s[n]
		texts := p.texts[lo:hi]
		from := sort.Search(len(texts), func(i int) bool { return texts[i][n] >= b })
		hi = lo + from + sort.Search(len(texts)-from, func(i int) bool { return texts[from+i][n] > b })
		lo += from
	}
}
