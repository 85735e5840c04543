package tiers

import (
	"fmt"
	"strings"
)

// A Purpose is what bytes of memory are for: an entry of the ledger.
type Purpose uint8

const (
	Base    Purpose = iota // the process as it stands, before the model: measured, not asked for
	Dense                  // dense weights
	KV                     // key-value cache
	Scratch                // activations and work space
	Staging                // slots for experts in flight
	LRU                    // slots for experts that stay
	purposes
)

func (p Purpose) String() string {
	return [...]string{"base", "dense", "kv", "scratch", "staging", "lru"}[p]
}

// A Ledger grants memory before it is allocated; what it has granted is the
// resident set that the process announces. One goroutine uses it.
type Ledger struct {
	limit   int64
	granted [purposes]int64
}

// NewLedger is a ledger of limit bytes in all. 0 is no limit.
func NewLedger(limit int64) *Ledger { return &Ledger{limit: limit} }

// Grant enters n more bytes for p, or returns a *NoRoomError and enters nothing.
func (l *Ledger) Grant(p Purpose, n int64) error {
	if n < 0 {
		panic(fmt.Sprintf("tiers: grant of %d bytes", n))
	}
	if total := l.Total(); l.limit > 0 && n > l.limit-total {
		return &NoRoomError{What: p.String(), Need: total + n, Available: l.limit}
	}
	l.granted[p] += n
	return nil
}

// Return takes back n bytes that were granted for p and have been freed.
func (l *Ledger) Return(p Purpose, n int64) {
	if n < 0 || n > l.granted[p] {
		panic(fmt.Sprintf("tiers: return of %d bytes of %s, granted %d", n, p, l.granted[p]))
	}
	l.granted[p] -= n
}

// Of is what is granted for p.
func (l *Ledger) Of(p Purpose) int64 { return l.granted[p] }

// Total is the announced resident set.
func (l *Ledger) Total() (n int64) {
	for _, g := range l.granted {
		n += g
	}
	return n
}

// String lists the entries in GB, for one line of output.
func (l *Ledger) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s =", GB(l.Total()))
	for p := range purposes {
		if p > 0 {
			b.WriteString(" +")
		}
		fmt.Fprintf(&b, " %v %s", p, GB(l.granted[p]))
	}
	return b.String()
}

// GB writes bytes as people read them: 50.7 GB, with GB = 10^9.
func GB(n int64) string { return fmt.Sprintf("%.1f GB", float64(n)/1e9) }

// A NoRoomError refuses what does not fit into memory: what, how much would be
// needed in all, how much there is.
type NoRoomError struct {
	What            string
	Need, Available int64 // bytes of the whole process
}

func (e *NoRoomError) Error() string {
	return fmt.Sprintf("not enough memory for %s: %s (%d bytes) needed in all, %s (%d bytes) available; stop other programs, raise the memory limit of the container, shorten --ctx, or use a smaller model",
		e.What, GB(e.Need), e.Need, GB(e.Available), e.Available)
}
