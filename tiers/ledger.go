package tiers

import (
	"fmt"
	"strings"
)

// A Purpose is what bytes of memory are for: an entry of the ledger.
type Purpose uint8

const (
	Base     Purpose = iota // the process as it stands, before the model: measured, not asked for
	Dense                   // dense weights
	KV                      // key-value cache
	Scratch                 // activations and work space
	Staging                 // slots for experts in flight
	Pinned                  // experts that never leave, copies of what is in VRAM included
	LRU                     // slots for experts that stay while they are used
	ram                     // those before are of RAM, those behind of a device
	VRAM     = ram          // experts in a device's memory
	purposes = VRAM + 1
)

func (p Purpose) String() string {
	return [...]string{"base", "dense", "kv", "scratch", "staging", "pinned", "lru", "vram"}[p]
}

// A Ledger grants memory before it is allocated, in two columns, RAM and VRAM;
// what it has granted of RAM is the resident set that the process announces.
// One goroutine uses it.
type Ledger struct {
	limit, device int64
	granted       [purposes]int64
}

// NewLedger is a ledger of limit bytes of RAM in all; 0 is no limit. Of VRAM it
// has what Device says.
func NewLedger(limit int64) *Ledger { return &Ledger{limit: limit} }

// Device sets the limit of VRAM, in bytes. A ledger starts with none.
func (l *Ledger) Device(limit int64) { l.device = limit }

// Grant enters n more bytes for p, or returns a *NoRoomError and enters nothing.
func (l *Ledger) Grant(p Purpose, n int64) error {
	if n < 0 {
		panic(fmt.Sprintf("tiers: grant of %d bytes", n))
	}
	if p == VRAM {
		if n > l.device-l.granted[p] {
			return &NoRoomError{What: p.String(), Need: l.granted[p] + n, Available: l.device}
		}
	} else if total := l.Total(); l.limit > 0 && n > l.limit-total {
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

// Total is the announced resident set: all of RAM.
func (l *Ledger) Total() (n int64) {
	for _, g := range l.granted[:ram] {
		n += g
	}
	return n
}

// String lists the entries in GB, for one line of output.
func (l *Ledger) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s =", GB(l.Total()))
	for p := range ram {
		if p > 0 {
			b.WriteString(" +")
		}
		fmt.Fprintf(&b, " %v %s", p, GB(l.granted[p]))
	}
	if n := l.granted[VRAM]; n > 0 {
		fmt.Fprintf(&b, "; %v %s", VRAM, GB(n))
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
	Given           bool  // available is what was allowed (--ram), not what there is
}

func (e *NoRoomError) Error() string {
	have, do := "available", "stop other programs, raise the memory limit of the container"
	if e.Given {
		have, do = "allowed by --ram", "allow more"
	}
	return fmt.Sprintf("not enough memory for %s: %s (%d bytes) needed in all, %s (%d bytes) %s; %s, shorten --ctx, or use a smaller model",
		e.What, GB(e.Need), e.Need, GB(e.Available), e.Available, have, do)
}
