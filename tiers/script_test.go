package tiers

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"sluice/storage"
)

var rewrite = flag.Bool("rewrite", false, "write what the scripts in testdata print as their expected text")

// Scripts are blocks of commands, a line ----, and what they print, ended by
// an empty line. Lines before a block that start with # are comments.
//
//	new cap=C topk=K [policy=P] [mode=mmap] [auto] [prefetch] layer=EXPERTS[,big]... [pin=L/E]... [vram=L/E]... [keephost]
//	                   a cache; auto: reads finish by themselves, in order
//	preload
//	begin LAYER EXPERT[*USES]...
//	next | try     the expert that is returned, its content checked
//	done EXPERT...
//	guess LAYER EXPERT...
//	look           what has been read ahead lands, the next goes
//	finish EXPERT...   reads of this step arrive; L/E of another layer
//	break EXPERT...    reads of this step will fail; L/E of another layer
//	shrink CAP
//	cancel         the context
//	end
//	order          resident experts of each class, in the order in which they would leave
//	stats
//
// Each command also tells the submissions it made (read) and who left (out).
func TestScripts(t *testing.T) {
	names, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(names) == 0 {
		t.Fatal("no scripts in testdata", err)
	}
	for _, name := range names {
		t.Run(strings.TrimSuffix(filepath.Base(name), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			got := runScript(t, string(text))
			if *rewrite {
				if err := os.WriteFile(name, []byte(got), 0o666); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got != string(text) {
				g, w := strings.Split(got, "\n"), strings.Split(string(text), "\n")
				for i := range w {
					if i >= len(g) || g[i] != w[i] {
						t.Fatalf("%s:%d: want %q; got\n%s", name, i+1, w[i], strings.Join(g[max(0, min(i-8, len(g))):min(len(g), i+3)], "\n"))
					}
				}
				t.Fatalf("%s: more is printed than expected", name)
			}
		})
	}
}

func runScript(t *testing.T, text string) string {
	var out strings.Builder
	s := &script{t: t}
	var cmds []string
	lines := strings.Split(text, "\n")
	for i := 0; i < len(lines); i++ {
		l := lines[i]
		switch {
		case l == "----":
			out.WriteString("----\n")
			for _, c := range cmds {
				out.WriteString(s.do(c))
			}
			cmds = nil
			for i+1 < len(lines) && lines[i+1] != "" {
				i++ // what was expected
			}
		case l == "" && i == len(lines)-1:
		default:
			out.WriteString(l + "\n")
			if l != "" && l[0] != '#' {
				cmds = append(cmds, l)
			}
		}
	}
	s.close()
	return out.String()
}

type script struct {
	t      *testing.T
	f      *fake
	c      *Cache
	dev    *fakeDevice
	step   *Step
	ctx    context.Context
	cancel context.CancelFunc
	clock  time.Time
}

// close lets what is in flight finish.
func (s *script) close() {
	if s.c == nil {
		return
	}
	s.f.mu.Lock()
	s.f.pick = func(int) int { return 0 }
	s.f.cond.Broadcast()
	s.f.mu.Unlock()
	if err := s.c.Close(); err != nil {
		s.t.Error(err)
	}
}

func (s *script) do(cmd string) string {
	var out strings.Builder
	w := strings.Fields(cmd)
	var before []Key
	if s.c != nil {
		before = s.resident()
	}
	switch w[0] {
	case "new":
		s.open(&out, w[1:])
		return out.String()
	case "begin":
		var experts, uses []int32
		for _, x := range w[2:] {
			e, u, ok := strings.Cut(x, "*")
			if !ok {
				u = "1"
			}
			experts = append(experts, int32(s.num(e)))
			uses = append(uses, int32(s.num(u)))
		}
		s.ctx, s.cancel = context.WithCancel(context.Background())
		s.t.Cleanup(s.cancel)
		step, err := s.c.Begin(s.ctx, s.num(w[1]), experts, uses)
		if err != nil {
			fmt.Fprintln(&out, err)
		}
		s.step = step
	case "next":
		i, parts, ok, err := s.step.Next(s.ctx)
		s.got(&out, i, parts, ok, err, 0)
	case "try":
		i, parts, ok, pending, err := s.step.TryNext()
		s.got(&out, i, parts, ok, err, pending)
	case "done":
		for _, x := range w[1:] {
			s.step.Done(slices.IndexFunc(s.step.items, func(it item) bool { return it.expert == int32(s.num(x)) }))
		}
	case "finish", "break":
		for _, x := range w[1:] {
			k := s.key(x)
			if w[0] == "break" {
				s.f.broken[k] = true
			} else {
				s.f.finish(k)
				s.f.settle(s.c)
			}
		}
	case "guess":
		var experts []int32
		for _, x := range w[2:] {
			experts = append(experts, int32(s.num(x)))
		}
		if !s.step.Guesses() {
			fmt.Fprintln(&out, "no guess is wanted")
		}
		s.step.Guess(s.num(w[1]), experts)
	case "look":
		s.c.Look()
	case "shrink":
		s.c.Shrink(s.num(w[1]))
		for i, cl := range s.c.classes {
			fmt.Fprintf(&out, "class %d: %d slots, %d stay\n", i, len(cl.slots), cl.size.Keep)
		}
	case "preload":
		if err := s.c.Preload(context.Background()); err != nil {
			fmt.Fprintln(&out, err)
		}
		if s.dev != nil {
			fmt.Fprintf(&out, "uploaded%s\n", list(s.dev.keys))
		}
	case "cancel":
		s.cancel()
	case "end":
		s.step.End()
	case "order":
		for i, cl := range s.c.classes {
			fmt.Fprintf(&out, "class %d:%s\n", i, list(cl.leaving()))
		}
	case "stats":
		st := s.c.Stats()
		fmt.Fprintf(&out, "routed %d distinct %d hits %d misses %d failed %d dropped %d out %d, loads %d\n",
			st.RoutedExperts, st.DistinctExperts, st.Hits.LRU, st.Misses, st.LoadsFailed, st.LoadsDropped, st.Evictions, st.Source.Loads)
		if st.PreloadLoads > 0 {
			fmt.Fprintf(&out, "hits vram %d pinned %d lru %d, avoided vram %d pinned %d lru %d, preload %d of %d bytes\n",
				st.Hits.VRAM, st.Hits.Pinned, st.Hits.LRU, st.Avoided.VRAM, st.Avoided.Pinned, st.Avoided.LRU, st.PreloadLoads, st.PreloadBytes)
		}
		if p := st.Prefetch; p.Guessed > 0 {
			fmt.Fprintf(&out, "guessed %d right %d missing %d, issued %d used %d late %d wasted %d, vram %d\n",
				p.Guessed, p.Right, p.Missing, p.Issued, p.Used, p.Late, p.Wasted, p.SkippedVRAM)
		}
	default:
		s.t.Fatalf("unknown command %q", cmd)
	}
	s.f.settle(s.c)
	for i, b := range s.f.batches {
		how := "read"
		if s.f.background[i] {
			how = "ahead"
		}
		fmt.Fprintf(&out, "%s%s\n", how, list(b))
	}
	s.f.batches, s.f.background = nil, nil
	after := s.resident()
	before = slices.DeleteFunc(before, func(k Key) bool { return slices.Contains(after, k) })
	if len(before) > 0 {
		fmt.Fprintf(&out, "out%s\n", list(before))
	}
	return out.String()
}

func (s *script) got(out *strings.Builder, i int, parts *[MaxParts][]byte, ok bool, err error, pending int) {
	switch {
	case err != nil:
		fmt.Fprintln(out, err)
	case ok:
		k := Key{Layer: s.step.layer, Expert: s.step.items[i].expert}
		if s.step.InVRAM(i) && parts[0] == nil {
			fmt.Fprintf(out, "%d vram, no copy\n", k.Expert)
			return
		}
		if err := s.f.verify(k, parts); err != nil {
			s.t.Error(err)
		}
		how := "read"
		if it := &s.step.items[i]; it.hit() {
			how = "hit"
		} else if it.from != missed {
			how = [...]string{inVRAM: "vram", inPinned: "pinned", inAhead: "ahead"}[it.from]
		}
		fmt.Fprintf(out, "%d %s\n", k.Expert, how)
	case pending > 0:
		fmt.Fprintf(out, "none ready, %d pending\n", pending)
	default:
		fmt.Fprintln(out, "all returned")
	}
}

func (s *script) open(out *strings.Builder, args []string) {
	s.close()
	opt := Options{Policy: "lru", Now: func() time.Time { return s.clock }}
	mode := storage.Slab
	layers := map[int]fakeLayer{}
	auto := false
	for _, a := range args {
		k, v, _ := strings.Cut(a, "=")
		switch k {
		case "cap":
			opt.Cap = s.num(v)
		case "topk":
			opt.TopK = s.num(v)
		case "mode":
			mode, _ = storage.ParseMode(v)
		case "policy":
			opt.Policy = v
		case "auto":
			auto = true
		case "prefetch":
			opt.Prefetch = PrefetchOn
		case "pin":
			opt.Pinned = append(opt.Pinned, s.key(v))
		case "vram":
			opt.VRAM = append(opt.VRAM, s.key(v))
		case "keephost":
			opt.KeepHost = true
		case "layer":
			n, big := strings.CutSuffix(v, ",big")
			l := len(layers)
			layers[l] = fakeLayer{3 * 512, 100}
			if big {
				layers[l] = fakeLayer{3 * 2048, 2000}
			}
			opt.Layers = append(opt.Layers, ExpertLayer{Layer: l, Experts: s.num(n)})
		default:
			s.t.Fatalf("unknown option %q", a)
		}
	}
	s.f = newFake(s.t, mode, layers)
	if auto {
		s.f.pick = func(int) int { return 0 }
	}
	s.dev = nil
	if opt.VRAM != nil {
		s.dev = &fakeDevice{f: s.f}
		opt.Device = s.dev
	}
	c, err := New(s.f, opt)
	if err != nil {
		s.t.Fatal(err)
	}
	s.c = c
	for i, cl := range c.classes {
		fmt.Fprintf(out, "class %d: %d slots of %d bytes, %d stay\n", i, len(cl.slots), cl.size.Bytes, cl.size.Keep)
		if len(cl.fixed) > 0 {
			fmt.Fprintf(out, "class %d: %d slots beside the pool\n", i, len(cl.fixed))
		}
	}
}

// resident lists the experts in memory, sorted.
func (s *script) resident() (keys []Key) {
	for _, cl := range s.c.classes {
		for k := range cl.kept.all() {
			keys = append(keys, k)
		}
	}
	if st := &s.c.step; !st.ended {
		for _, it := range st.items {
			if it.slot != nil && !it.hit() && !it.fixed() && it.state != loading && it.state != failed {
				keys = append(keys, it.slot.fetch.Key)
			}
		}
	}
	slices.SortFunc(keys, func(a, b Key) int {
		return int(a.Layer-b.Layer)<<20 + int(a.Expert-b.Expert)
	})
	return keys
}

// key reads LAYER/EXPERT, or the number of an expert of the step's layer.
func (s *script) key(x string) Key {
	if l, e, ok := strings.Cut(x, "/"); ok {
		return Key{Layer: int32(s.num(l)), Expert: int32(s.num(e))}
	}
	return Key{Layer: s.step.layer, Expert: int32(s.num(x))}
}

func (s *script) num(x string) int {
	n, err := strconv.Atoi(x)
	if err != nil {
		s.t.Fatal(err)
	}
	return n
}

func list(keys []Key) string {
	var b strings.Builder
	for _, k := range keys {
		fmt.Fprintf(&b, " %d/%d", k.Layer, k.Expert)
	}
	return b.String()
}
