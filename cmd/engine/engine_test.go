package engine

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"sluice/backends"
	"sluice/internal/cores"
	"sluice/moe"
	"sluice/storage"
	"sluice/tiers"
)

// Every setting has its effective value, where it came from, and what was
// asked for if that could not be honoured; what was changed is told in words.
func TestSettings(t *testing.T) {
	type setting struct {
		value     any
		origin    string
		requested any
	}
	for _, tt := range []struct {
		name    string
		o       Options
		want    map[string]setting
		notices []string // words in each
	}{
		{"defaults", Options{Path: demo}, map[string]setting{
			"kv":      {"f16", FromDefault, nil},
			"chunk":   {512, FromDefault, nil},
			"ctx":     {4096, FromDefault, nil},
			"threads": {cores.Physical(), FromAuto, nil},
			"cap":     {32, FromAuto, nil},
		}, nil},
		{"defaults of a model that knows a short context", Options{Path: glm}, map[string]setting{"ctx": {128, FromDefault, nil}, "cap": {16, FromAuto, nil}}, nil},
		{"flags", Options{Path: demo, KV: backends.KVQ8, Chunk: 64, Ctx: 100, Threads: 3, Cap: 5, Storage: storage.Pread}, map[string]setting{
			"kv":      {"q8", FromFlag, nil},
			"chunk":   {64, FromFlag, nil},
			"ctx":     {100, FromFlag, nil},
			"threads": {3, FromFlag, nil},
			"cap":     {5, FromFlag, nil},
			"storage": {"pread", FromFlag, nil},
		}, nil},
		{"more than there is", Options{Path: glm, Ctx: 1000, Cap: 320}, map[string]setting{
			"ctx": {128, FromFlag, 1000},
			"cap": {16, FromFlag, 320},
		}, []string{"ctx lowered 1000 -> 128", "cap lowered 320 -> 16 (the model has 16 experts per layer)"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := prepare(t, tt.o)
			defer p.Close()
			all := p.Settings.Map()
			for name, want := range tt.want {
				got := all[name]
				if got.Value != want.value || got.Origin != want.origin || got.Requested != want.requested {
					t.Errorf("%s: %+v, want %+v", name, got, want)
				}
			}
			for _, name := range []string{"kv", "chunk", "ctx", "threads", "cap", "storage"} {
				if _, ok := all[name]; !ok {
					t.Errorf("there is no setting %s", name)
				}
			}
			var notices []string
			for _, n := range p.Notices {
				if !strings.HasPrefix(n, "storage: ") { // those depend on the machine
					notices = append(notices, n)
				}
			}
			if len(notices) != len(tt.notices) {
				t.Fatalf("notices %q, want %q", notices, tt.notices)
			}
			for i, n := range notices {
				if !strings.Contains(n, tt.notices[i]) {
					t.Errorf("notice %q lacks %q", n, tt.notices[i])
				}
			}
			if p.Config != (moe.Config{Ctx: all["ctx"].Value.(int), Chunk: all["chunk"].Value.(int), KV: tt.o.KV}) || p.Threads != all["threads"].Value || p.Cap.Cap != all["cap"].Value {
				t.Errorf("%+v, %d threads and cap %d are not what the settings say: %v", p.Config, p.Threads, p.Cap.Cap, all)
			}
		})
	}
}

func TestSettingsPrint(t *testing.T) {
	var s Settings
	s.Set(Setting{Name: "cap", Value: 4, Origin: FromAuto})
	s.Set(Setting{Name: "kv", Value: "f16", Origin: FromDefault})
	s.Set(Setting{Name: "cap", Value: 32, Origin: FromFlag, Requested: 320}) // keeps its place
	var b strings.Builder
	if err := s.Print(&b); err != nil {
		t.Fatal(err)
	}
	if want := "cap  32   flag  (requested 320)\nkv   f16  default\n"; b.String() != want {
		t.Errorf("printed\n%swant\n%s", b.String(), want)
	}
}

func TestPrepareRefuses(t *testing.T) {
	cut := newCuttable(t, glm)
	cut.cut(1000)
	noTokens := rewrite(t, glm, change{meta: map[string]any{"tokenizer.ggml.model": "sealed"}})
	unknown := rewrite(t, glm, change{meta: map[string]any{"general.architecture": "glm5moe"}})
	for _, tt := range []struct {
		name string
		o    Options
		want string
	}{
		{"no file", Options{Path: "testdata/none.gguf"}, "none.gguf"},
		{"a directory", Options{Path: "testdata"}, "is a directory"},
		{"no model", Options{Path: "testdata/heldout.txt"}, "heldout.txt"},
		{"a cut file", Options{Path: cut.path}, cut.path},
		{"an unknown architecture", Options{Path: unknown}, `"glm5moe" is not supported; supported are`},
		{"an unknown tokenizer", Options{Path: noTokens}, "sealed"},
		{"cap", Options{Path: glm, Cap: -1}, "cap -1"},
		{"ctx", Options{Path: glm, Ctx: -1}, "ctx -1"},
		{"chunk", Options{Path: glm, Chunk: -1}, "chunk -1"},
		{"threads", Options{Path: glm, Threads: -1}, "threads -1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			goroutines, files := runtime.NumGoroutine(), openFiles(t)
			p, err := Prepare(tt.o)
			if err == nil {
				t.Error("it is prepared")
				_, err = p.Load(context.Background())
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
			gone(t, goroutines, files)
		})
	}
	if _, err := Prepare(Options{Path: "testdata/none.gguf"}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
}

// What a model takes it gives back: goroutines, files, and memory outside of
// the Go heap, however it ends.
func TestClose(t *testing.T) {
	ctx := context.Background()
	goroutines, files := runtime.NumGoroutine(), openFiles(t)
	for _, mode := range modes {
		o := Options{Path: light(demo), Storage: mode, Cap: 2, Threads: 3, Ctx: 64}
		prepare(t, o).Close()

		p := prepare(t, o)
		cancelled, cancel := context.WithCancel(ctx)
		cancel()
		if e, err := p.Load(cancelled); !errors.Is(err, context.Canceled) {
			t.Errorf("loading, cancelled: %v, %v", e, err)
		}
		gone(t, goroutines, files)

		e, err := prepare(t, o).Load(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if runtime.NumGoroutine() <= goroutines {
			t.Error("a running model has no goroutines: this tests nothing")
		}
		generate(t, e, heldout(t, e, 20), 4)
		for range 2 {
			if err := e.Close(); err != nil {
				t.Error(err)
			}
		}
		gone(t, goroutines, files)
	}
	if t.Failed() || raceEnabled { // the race detector's own memory grows
		return
	}

	resident := func() int64 {
		runtime.GC()
		u, err := tiers.Memory{}.Usage()
		if err != nil {
			t.Fatal(err)
		}
		return u.RSS
	}
	before := int64(0)
	for i := range 6 {
		e, err := prepare(t, Options{Path: demo, Ctx: 64}).Load(ctx)
		if err != nil {
			t.Fatal(err)
		}
		generate(t, e, heldout(t, e, 20), 1)
		e.Close()
		if i == 1 {
			before = resident()
		}
	}
	// A lost pool of slots alone would be 12 MB each time.
	if grown := resident() - before; grown > 24<<20 {
		t.Errorf("four models more leave %d MB behind", grown>>20)
	}
}

// The ledger grants what the plan foresaw, and the model stays in it.
func TestLedger(t *testing.T) {
	for _, o := range []Options{{Path: demo}, {Path: demo, Cap: 1}, {Path: demo, Cap: 8, Storage: storage.MMap}} {
		o.Ctx = 256
		e := open(t, o)
		var sum int64
		for p := tiers.Base; p <= tiers.LRU; p++ {
			sum += e.Ledger.Of(p)
		}
		if total := e.Ledger.Total(); total != e.Cap.Peak || total != sum {
			t.Errorf("%s: %d bytes granted, %d by purpose, %d planned", options(o), total, sum, e.Cap.Peak)
		}
		if lru := e.Ledger.Of(tiers.LRU); (lru == 0) != (o.Storage == storage.MMap) {
			t.Errorf("%s: %d bytes of slots", options(o), lru)
		}
		var dense int64
		for _, x := range e.Spec.Dense {
			dense += x.Bytes
		}
		if got := e.Ledger.Of(tiers.Dense); got < dense || got > dense+4096*int64(len(e.Spec.Dense)) {
			t.Errorf("%d bytes of dense weights granted, %d are there", got, dense)
		}
		if e.Announced <= 0 || e.LoadNanos <= 0 {
			t.Errorf("announced %d bytes after %d ns", e.Announced, e.LoadNanos)
		}
	}
}

// openFiles is the number of files that this process has open.
func openFiles(t *testing.T) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip("needs /proc/self/fd to count open files: ", err)
	}
	return len(d)
}

// gone wants no more goroutines and files than there were. A goroutine may
// have ended for its owner before the runtime counts it out.
func gone(t *testing.T, goroutines, files int) {
	t.Helper()
	for start := time.Now(); runtime.NumGoroutine() > goroutines && time.Since(start) < 20*time.Second; {
		runtime.Gosched()
	}
	if n := runtime.NumGoroutine(); n > goroutines {
		buf := make([]byte, 1<<16)
		t.Errorf("%d goroutines, there were %d\n%s", n, goroutines, buf[:runtime.Stack(buf, true)])
	}
	if n := openFiles(t); n > files {
		t.Errorf("%d open files, there were %d", n, files)
	}
}
