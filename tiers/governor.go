package tiers

import (
	"fmt"
	"slices"
	"time"
)

// A governor says when prefetch reads: always, never, or while it gives more
// than it costs. That is measured by the time of tokens, in short windows without
// it, with it, with it and without it, so that a trend is not taken for an
// effect. Medians are compared, so that a token that something else has held up
// counts as any other.
type governor struct {
	on     bool
	fixed  bool
	phase  phase
	left   int       // tokens to the end of the phase
	last   time.Time // when the token under way began; zero: something else was
	rounds int       // of the trial under way
	usual  float64   // ns of a token with prefetch, as the last trial found it
	slow   int       // tokens since then that took far longer, less those that did not
	pause  int       // tokens of the next pause
	paused bool      // that is what the last trial came to
	from   PrefetchStats
	side   [2]sample // of tokens without prefetch, and with it
}

// A sample is the times of tokens, of this trial.
type sample struct {
	nanos [2 * windowTokens * mostRounds]int64
	n     int
}

type phase uint8

const (
	settled  phase = iota // on or off, not measured
	withoutA              // off
	withB                 // on
	withC                 // on
	withoutD              // off; the verdict comes after it
)

// Tokens of the phases. A trial that finds a clear difference takes 16 tokens, of
// which the 8 on the wrong side are some 2 % of the 512 that follow. One that finds
// none goes on, four times at most. What makes tokens a quarter slower is stopped
// after 4, and looked at again once as many were much slower than in the last trial.
// A pause starts short, so that another prompt gets its chance, and doubles
// as long as nothing changes.
const (
	firstTokens  = 2 // the caches of the processor and the drive are cold
	windowTokens = 4
	slowTokens   = 4
	mostRounds   = 4
	steadyTokens = 512
	leastPause   = 256
	mostPause    = 4096

	clearly = 0.05 // of a token's time: a difference that is no chance
	badly   = 0.25 // and one that is not looked at twice
)

// leastUsed is the share of its reads that must be asked for. Below it most of
// what the drive does for prefetch is for nothing, whatever the times say.
const leastUsed = 0.25

func newGovernor(p Prefetch) governor {
	return governor{on: p == PrefetchOn, fixed: p != PrefetchAuto, left: firstTokens, pause: leastPause}
}

// restart begins the trial under way anew, since something else than single
// tokens came between.
func (g *governor) restart() {
	g.last = time.Time{}
	if g.phase != settled {
		g.settle(g.on, 1)
	}
}

// settle stays on or off for so many tokens, then comes a trial.
func (g *governor) settle(on bool, tokens int) {
	g.phase, g.on, g.left = settled, on, tokens
	g.usual, g.slow = g.side[1].median(), 0
}

// enter begins a window of a trial.
func (g *governor) enter(p phase) {
	g.phase, g.on, g.left = p, p == withB || p == withC, windowTokens
}

// token is told that a token begins, and what prefetch has counted since New. It
// returns words if prefetch pauses or goes on again.
func (g *governor) token(p *PrefetchStats, now time.Time) (words string) {
	begun := g.last
	g.last = now
	if begun.IsZero() {
		return ""
	}
	if g.phase == settled {
		g.watch(now.Sub(begun))
	} else {
		s := &g.side[0]
		if g.on {
			s = &g.side[1]
		}
		s.nanos[s.n] = int64(now.Sub(begun))
		s.n++
	}
	if g.left--; g.left > 0 {
		return ""
	}
	switch g.phase {
	case settled:
		g.side[0].n, g.side[1].n = 0, 0
		g.rounds, g.from = 0, *p
		g.enter(withoutA)
	case withoutA:
		g.enter(withB)
	case withB:
		if g.rounds == 0 && g.ratio() > 1+badly {
			return g.end(g.times())
		}
		g.enter(withC)
	case withC:
		g.enter(withoutD)
	case withoutD:
		g.rounds++
		why, r := g.verdict(p), g.ratio()
		if why == "" && r > 1-clearly && r < 1+clearly && g.rounds < mostRounds {
			g.enter(withoutA)
			return ""
		}
		if why == "" && r >= 1 {
			why = g.times()
		}
		return g.end(why)
	}
	return ""
}

// watch begins a trial at once if prefetch is on and several tokens took much
// longer than those of the last trial.
func (g *governor) watch(took time.Duration) {
	if float64(took) <= (1+badly)*g.usual {
		g.slow = max(0, g.slow-1)
	} else if g.slow++; g.slow >= slowTokens && g.on && g.usual > 0 {
		g.left = 1
	}
}

// end settles on what a trial came to: why prefetch is to pause, or "".
func (g *governor) end(why string) (words string) {
	if why == "" {
		if g.paused {
			words = "prefetch again: " + g.times()
		}
		g.paused, g.pause = false, leastPause
		g.settle(true, steadyTokens)
		return words
	}
	if !g.paused {
		words = fmt.Sprintf("prefetch paused: %s; it is tried again in %d tokens", why, g.pause)
	}
	g.paused = true
	g.settle(false, g.pause)
	g.pause = min(2*g.pause, mostPause)
	return words
}

// verdict says why prefetch is to pause whatever the times are, or "".
func (g *governor) verdict(p *PrefetchStats) string {
	missing, issued, used := p.Missing-g.from.Missing, p.Issued-g.from.Issued, p.Used-g.from.Used
	switch {
	case missing == 0:
		return "every expert that it would read is in memory"
	case float64(used) < leastUsed*float64(issued):
		return fmt.Sprintf("%d of %d experts read ahead were used", used, issued)
	}
	return ""
}

// ratio is the time of a token with prefetch by that without.
func (g *governor) ratio() float64 {
	return g.side[1].median() / max(1, g.side[0].median())
}

func (g *governor) times() string {
	return fmt.Sprintf("a token takes %.3g ms with it and %.3g ms without", g.side[1].median()/1e6, g.side[0].median()/1e6)
}

func (s *sample) median() float64 {
	nanos := s.nanos // a copy
	all := nanos[:s.n]
	if s.n == 0 {
		return 0
	}
	slices.Sort(all)
	return float64(all[(s.n-1)/2]+all[s.n/2]) / 2
}
