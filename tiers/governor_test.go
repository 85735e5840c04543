package tiers

import (
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Scripts of a governor, in testdata/governor: blocks of commands, a line ----,
// and what they print, ended by an empty line.
//
//	new [on|off]         a governor, auto unless named
//	world KEY=N...       what tokens bring from here on: with, without (ms a token),
//	                     missing, issued, used (each token with prefetch); spike=N: every
//	                     N-th token takes 100 times as long
//	tokens N             run; prints its words with the token, and on and off
//	batch                something else than a single token comes between
func TestGovernor(t *testing.T) {
	const name = "testdata/governor"
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	got := runGovernor(t, string(text))
	if flag.Lookup("rewrite").Value.String() == "true" {
		if err := os.WriteFile(name, []byte(got), 0o666); err != nil {
			t.Fatal(err)
		}
		return
	}
	if got != string(text) {
		t.Errorf("got\n%s\nwant\n%s", got, text)
	}
}

func runGovernor(t *testing.T, text string) string {
	var out, printed strings.Builder
	var g governor
	var st PrefetchStats
	world := map[string]int64{}
	clock, token := time.Unix(0, 0), 0
	run := func(n int) {
		on := 0
		for range n {
			token++
			if words := g.token(&st, clock); words != "" {
				fmt.Fprintf(&printed, "%d: %s\n", token, words)
			}
			ms := world["without"]
			if g.on {
				on++
				ms = world["with"]
				st.Missing += world["missing"]
				st.Issued += world["issued"]
				st.Used += world["used"]
			}
			if s := world["spike"]; s > 0 && int64(token)%s == 0 {
				ms *= 100
			}
			clock = clock.Add(time.Duration(ms) * time.Millisecond)
		}
		fmt.Fprintf(&printed, "%d: on for %d of %d tokens\n", token, on, n)
	}
	skip := false
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		switch w := strings.Fields(line); {
		case line == "----":
			out.WriteString("----\n" + printed.String())
			printed.Reset()
			skip = true
			continue
		case line == "":
			skip = false
		case skip:
			continue
		case line[0] == '#':
		case w[0] == "new":
			mode := PrefetchAuto
			if len(w) > 1 {
				mode, _ = ParsePrefetch(w[1])
			}
			g, st, token = newGovernor(mode), PrefetchStats{}, 0
		case w[0] == "world":
			clear(world)
			for _, kv := range w[1:] {
				k, v, _ := strings.Cut(kv, "=")
				n, err := strconv.ParseInt(v, 10, 64)
				if err != nil {
					t.Fatal(err)
				}
				world[k] = n
			}
		case w[0] == "tokens":
			n, err := strconv.Atoi(w[1])
			if err != nil {
				t.Fatal(err)
			}
			run(n)
		case w[0] == "batch":
			g.restart()
		default:
			t.Fatalf("unknown command %q", line)
		}
		out.WriteString(line + "\n")
	}
	return out.String()
}

// Only auto is governed.
func TestGovernorModes(t *testing.T) {
	for p, on := range map[Prefetch]bool{PrefetchOff: false, PrefetchOn: true} {
		if g := newGovernor(p); !g.fixed || g.on != on {
			t.Errorf("%v: fixed %v, on %v", p, g.fixed, g.on)
		}
	}
}
